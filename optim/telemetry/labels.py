"""What figures are given of: each logical parameter, each layer, each param group, or what globs name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ...parallel.mesh.registry import ProcessGroupRegistry
from ..norm.groupings import matches

By = Literal["parameter", "layer", "group"] | Mapping[str, str]
"""``"layer"``: all parameters of one module. A mapping: from labels to globs over parameter names; the first that fits."""

TOTAL = "total"


def labelled(names: Sequence[str], groups: Sequence[int], by: By) -> tuple[list[str], list[int | None]]:
    """The labels, and for each logical parameter the index of its own, if it has one.

    Args:
        names: Of the logical parameters.
        groups: Their param groups.
    Raises:
        ValueError: A glob fits to nothing, or a label is ``"total"``.
    """
    if isinstance(by, Mapping):
        found = [next((label for label, glob in by.items() if matches(glob, name)), None) for name in names]
        for label, glob in by.items():
            if not any(matches(glob, name) for name in names):
                raise ValueError(
                    f"by={{{label!r}: {glob!r}}} fits to no parameter; there are {', '.join(names[:8])}..."
                )
        labels = list(by)
    else:
        found = [_label(name, group, by) for name, group in zip(names, groups, strict=True)]
        labels = list(dict.fromkeys(label for label in found if label is not None))
    if TOTAL in labels:
        raise ValueError(f"a label is {TOTAL!r}, which is the name of the whole model's figures: give another one")
    where = {label: index for index, label in enumerate(labels)}
    return labels, [None if label is None else where[label] for label in found]


def checked_by(by: object) -> None:
    """Raise ValueError where it is none."""
    if by not in ("parameter", "layer", "group") and not (isinstance(by, Mapping) and by):
        raise ValueError(f"by={by!r}: give 'parameter', 'layer', 'group', or labels with globs, {{'mlp': '*.mlp.*'}}")


def chosen(names: Sequence[str], globs: Sequence[str]) -> list[bool]:
    """Which names fit to any of the globs."""
    return [any(matches(glob, name) for glob in globs) for name in names]


def _label(name: str, group: int, by: object) -> str:
    if by == "group":
        return f"group_{group}"
    plain, at, stage = name.partition("@")
    return (plain.rpartition(".")[0] or plain) + at + stage if by == "layer" else name


# Values put together: by where they belong, in one order on every rank and device, and over the world -----------------


class Slots:
    """Sums of values by slot. ``index_add_`` on a GPU would add in whatever order, and give other bits to each rank.

    Args:
        slots: Of each value; None: it is in none.
        count: How many slots there are.
        device: Of the values.
    """

    def __init__(self, slots: Sequence[int | None], count: int, device: torch.device) -> None:
        members: list[list[int]] = [[] for _ in range(count)]
        for index, slot in enumerate(slots):
            if slot is not None:
                members[slot].append(index)
        longest = max(map(len, members), default=0)
        nothing = len(slots)  # the place of a zero, which `__call__` adds
        rows = [[*of_slot, *[nothing] * (longest - len(of_slot))] for of_slot in members]
        self._members = torch.tensor(rows, dtype=torch.int64).reshape(count, longest).to(device)

    def __call__(self, values: Tensor) -> Tensor:
        """[..., values] -> [..., slots]. Host reads: none."""
        padded = torch.cat([values, values.new_zeros(*values.shape[:-1], 1)], -1)
        return padded[..., self._members].sum(-1)


def world_sum(packed: Tensor, registry: ProcessGroupRegistry) -> Tensor:
    """The sum over all ranks, on the device of what is given; an all-reduce, but on one rank."""
    if registry.topology.world_size == 1:
        return packed
    wire = packed.to(registry.device, copy=True)
    dist.all_reduce(wire, group=registry.group(*registry.topology.axes))
    return wire.to(packed.device)
