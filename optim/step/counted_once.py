"""The counts of steps that a fused optimizer keeps, one a parameter, taken in one pass over them instead of two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ADD, _ADD_TENSOR = torch.ops.aten._foreach_add_.Scalar, torch.ops.aten._foreach_add_.Tensor
_SUBTRACT = torch.ops.aten._foreach_sub_.List


class CountedOnce(TorchDispatchMode):
    """Within, a fused optimizer with a ``found_inf`` adds ``1 - found_inf`` to its counts.

    By itself torch adds 1 to all of them, and after the update, which does nothing where ``found_inf`` is 1, takes a list
    of as many ``found_inf`` from them: of a thousand parameters 26 launches where 10 will do. Where a torch does it in
    another way, nothing is changed.

    Args:
        optimizer: Whose step is called within.
        found_inf: 0-dim float32, 0 or 1.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, found_inf: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._optimizer, self._found_inf = optimizer, found_inf
        self._taken: Tensor | None = None
        self._counted: list[Sequence[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ADD and args[1] == 1 and self._are_counts(args[0]):
            self._counted.append(args[0])
            if self._taken is None:
                self._taken = 1 - self._found_inf
            return _ADD_TENSOR(args[0], self._taken)
        if func is _SUBTRACT and args[1][0] is self._found_inf and self._was_counted(args[0]):
            return None
        return func(*args, **(kwargs or {}))

    def _are_counts(self, tensors: Sequence[Tensor]) -> bool:
        counts = {id(state.get("step")) for state in self._optimizer.state.values()}
        return tensors[0].dtype == self._found_inf.dtype and all(id(tensor) in counts for tensor in tensors)

    def _was_counted(self, tensors: Sequence[Tensor]) -> bool:
        return any(
            len(before) == len(tensors) and all(a is b for a, b in zip(before, tensors, strict=True))
            for before in self._counted
        )
