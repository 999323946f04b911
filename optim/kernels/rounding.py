"""Stochastic rounding of many tensors to bfloat16 by the Triton kernel on a GPU, and by the C loop on a CPU.

The noise of an element is a function of a key, the step, the number of the tensor among the tensors with this key, and
the element's index in row-major order. So replicas draw equal noise, whatever else they round, and no noise is stored in
memory. The noise differs from the random numbers of `torch.Generator`, with which torch's operators round.

    counter = (index of the counter, number of the tensor, step, step >> 32)    Philox 4x32, 10 rounds, 64-bit key
    noise   = 16 bits of the four words of the result: 8 elements per counter

The Triton kernel (`triton_rounding_kernel`) and the C loop (`csrc/loops.h`) draw bitwise identical noise.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...amp.casting import copy_each_
from ...amp.stochastic_rounding import Drawn
from .choice import chosen, triton_on
from .memory import PLAIN, is_lazy
from .native import NO_MEMORY, RoundingColumns


class _Row(NamedTuple):
    """A tensor to round. Kernels read ``source`` and write ``written`` linearly, so both are contiguous.

    ``written`` is ``target``, or a new tensor that must be copied into ``target``. ``key`` identifies the noise, and
    ``number`` the tensor among the tensors with this key.
    """

    target: Tensor
    written: Tensor
    source: Tensor
    key: int
    number: int


@torch.no_grad()
def round_by_kernels(everything: Sequence[Drawn]) -> list[Drawn]:
    """Round tensors with the Triton kernel or the C loop if it is chosen (`use_kernels`), and return all other tensors.

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
        _round_group(group, device, step)
    return others


def _is_plain(drawn: Drawn) -> bool:
    tensors = [tensor for pair in drawn.pairs for tensor in pair]
    return {*map(type, tensors)} <= PLAIN and not any(map(is_lazy, tensors))


def _round_group(group: Sequence[Drawn], device: torch.device, step: int) -> None:
    rows = [
        _Row(target, _writable(target), source.to(torch.float32).contiguous(), drawn.noise.key, number)
        for drawn in group
        for number, (target, source) in enumerate(drawn.pairs)
        if target.numel()
    ]
    if not rows:
        return
    columns = RoundingColumns(
        array("Q", [row.written.data_ptr() for row in rows]),
        array("Q", [row.source.data_ptr() for row in rows]),
        array("q", [row.target.numel() for row in rows]),
        array("Q", [row.key for row in rows]),
        array("q", [row.number for row in rows]),
    )
    loops = chosen.native if device.type == "cpu" else None
    if loops is not None:
        tables = (column.buffer_info()[0] for column in columns)
        if loops.round(len(rows), *tables, step, torch.get_num_threads()):
            raise MemoryError(NO_MEMORY)
    elif (kernels := triton_on(device)) is not None:
        kernels.round(columns, step, device)
    if strided := [row for row in rows if row.written is not row.target]:
        copy_each_([row.target for row in strided], [row.written for row in strided])
    # Kernels don't increase version counters, with which autograd detects writes to tensors that it saved.
    torch.autograd.graph.increment_version([row.target for row in rows if row.written is row.target])


def _writable(target: Tensor) -> Tensor:
    """Return ``target`` if a kernel can write it linearly, else a new contiguous tensor."""
    if target.is_contiguous() and type(target) in PLAIN:
        return target
    return torch.empty(target.shape, dtype=target.dtype, device=target.device)
