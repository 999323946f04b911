"""Estimate how many kernels an operator launches on a GPU, from its arguments, following torch's CUDA sources.

A multi-tensor operator processes as many tensors per launch as fit into 4 KB of kernel arguments if all of its lists
have equal dtypes, sizes and strides; otherwise it launches one kernel per tensor. A multi-tensor norm of order
1, 2 or inf also launches one kernel that clears its buffer, and one per 512 norms that finishes them; other orders launch
one kernel per tensor. A concatenation launches one kernel per 128 tensors. Every other operator counts as one kernel, and
so does a copy between host and device.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from torch import Tensor

AT_ONCE = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}  # tensors per launch, by number of lists
BLOCKS, CHUNK = 320, 65536  # chunks per launch, elements per chunk
RESULTS, JOINED = 512, 128  # norms per finishing kernel, tensors per concatenation kernel


def kernels_of(name: str, args: Sequence[Any]) -> int:
    """Return the number of kernels for one call of the operator ``name``, such as ``aten._foreach_add_.List``."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor)]
    if name.startswith(("aten.stack.", "aten.cat.")):
        return _up(len(lists[0]), JOINED) if lists else 1
    if name.startswith("aten._fused_"):
        # All optimizers except SGD also pass a list of step counters.
        return _launches(lists[0], len(lists) - ("sgd" not in name))
    if name.startswith("aten._foreach_"):
        return _of_foreach(name, lists, [arg for arg in args if isinstance(arg, Tensor)], *args[1:2])
    return 1


def _of_foreach(name: str, lists: Sequence[Sequence[Tensor]], others: list[Tensor], second: Any = 2) -> int:
    dtypes = [{tensor.dtype for tensor in tensors} for tensors in (*lists, others) if tensors]
    casts = name.startswith("aten._foreach_copy_")
    same = all(len(of_list) == 1 for of_list in dtypes) and (casts or len(set().union(*dtypes)) == 1)
    if not same or not _strided_alike(lists):
        return len(lists[0])
    if name.startswith("aten._foreach_norm"):
        if second not in (1, 2, inf):
            return len(lists[0])
        return 1 + _launches(lists[0], 1) + _up(len(lists[0]), RESULTS)
    in_place = name.split(".")[1].endswith("_")
    return _launches(lists[0], len(lists) + (not in_place))


def _strided_alike(lists: Sequence[Sequence[Tensor]]) -> bool:
    return all(
        _is_dense(tensors[0]) and len({(t.shape, t.stride()) for t in tensors}) == 1
        for tensors in zip(*lists, strict=True)
    )


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _launches(tensors: Sequence[Tensor], lists: int) -> int:
    blocks = sum(_up(tensor.numel(), CHUNK) for tensor in tensors)
    return max(_up(sum(tensor.numel() > 0 for tensor in tensors), AT_ONCE[lists]), _up(blocks, BLOCKS))


def _up(number: int, of: int) -> int:
    return -(-number // of)
