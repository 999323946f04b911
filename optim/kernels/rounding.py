"""Stochastic rounding of many tensors to bfloat16 by the Triton kernel on a GPU, and by the C loop on a CPU."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ...amp.casting import copy_each_
from ...amp.stochastic_rounding import Drawn
from .choice import chosen, triton_on
from .memory import PLAIN, is_lazy
from .native import NO_MEMORY, Native

RoundContiguous = Callable[[Sequence[Tensor], Sequence[Tensor], "array[int]", "array[int]", int], None]
"""A function that rounds contiguous float32 sources into contiguous bfloat16 targets on one device.

Arguments: targets; sources; per tensor the key of its noise, and its number among the tensors with this key; the step.
"""


@torch.no_grad()
def round_by_kernels(everything: Sequence[Drawn]) -> list[Drawn]:
    """Round tensors with the Triton kernel or the C loop if it is chosen (`use_kernels`), and return all other tensors.

    Both draw the noise of `rounding_noise`. Element i of a tensor in row-major order has noise number i, whatever its
    strides.
    Host synchronization: none, except in the first call for a GPU (see `triton_on`).
    """
    others, groups = [], dict[tuple[torch.device, int], list[Drawn]]()
    for drawn in everything:
        device = drawn.pairs[0][0].device
        if triton_on(device) is not None or (device.type == "cpu" and chosen.native is not None and _is_plain(drawn)):
            groups.setdefault((device, drawn.noise.steps), []).append(drawn)
        else:
            others.append(drawn)
    for (device, step), group in groups.items():
        loops = chosen.native if device.type == "cpu" else None
        if loops is not None:
            _round_group(group, step, partial(_round_by_loop, loops))
        else:
            from .triton_rounding import round_by_triton

            _round_group(group, step, round_by_triton)
    return others


def _is_plain(drawn: Drawn) -> bool:
    tensors = [tensor for pair in drawn.pairs for tensor in pair]
    return {*map(type, tensors)} <= PLAIN and not any(map(is_lazy, tensors))


def _round_group(group: Sequence[Drawn], step: int, round_contiguous: RoundContiguous) -> None:
    pairs, keys, numbers = list[tuple[Tensor, Tensor]](), array("Q"), array("q")
    for drawn in group:
        for number, pair in enumerate(drawn.pairs):
            if pair[0].numel():
                pairs.append(pair)
                keys.append(drawn.noise.key)
                numbers.append(number)
    if not pairs:
        return
    # The kernels read and write memory linearly, so they need contiguous tensors.
    sources = [source.to(torch.float32).contiguous() for _, source in pairs]
    targets = [target for target, _ in pairs]
    direct = [target.is_contiguous() and type(target) in PLAIN for target in targets]
    written = [
        target if is_direct else torch.empty(target.shape, dtype=target.dtype, device=target.device)
        for target, is_direct in zip(targets, direct, strict=True)
    ]
    round_contiguous(written, sources, keys, numbers, step)
    strided = [index for index, is_direct in enumerate(direct) if not is_direct]
    if strided:
        copy_each_([targets[index] for index in strided], [written[index] for index in strided])
    # Kernels don't increase version counters, with which autograd detects writes to tensors that it saved.
    torch.autograd.graph.increment_version(
        [target for target, is_direct in zip(targets, direct, strict=True) if is_direct]
    )


def _round_by_loop(
    loops: Native,
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    keys: array[int],
    numbers: array[int],
    step: int,
) -> None:
    addresses = [array("Q", map(Tensor.data_ptr, tensors)) for tensors in (targets, sources)]
    numels = array("q", map(Tensor.numel, targets))
    tables = [table.buffer_info()[0] for table in (*addresses, numels, keys, numbers)]
    if loops.round(len(targets), *tables, step, torch.get_num_threads()):
        raise MemoryError(NO_MEMORY)
