"""Labels under which figures are reported: per parameter, per layer, per param group, or by globs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ...parallel.mesh.registry import ProcessGroupRegistry
from ..norm.groupings import matches

By = Literal["parameter", "layer", "group"] | Mapping[str, str]
"""``"layer"``: all parameters of one module. A mapping: labels to globs over parameter names; the first match counts."""

TOTAL = "total"


def labelled(names: Sequence[str], groups: Sequence[int], by: By) -> tuple[list[str], list[int | None]]:
    """Return the labels, and the index of each logical parameter's label (None: it has none).

    Args:
        names: Names of the logical parameters.
        groups: Their param groups.
        by: The kind of labels.

    Raises:
        ValueError: A glob matches nothing, or a label is ``"total"``.
    """
    if isinstance(by, Mapping):
        found = [next((label for label, glob in by.items() if matches(glob, name)), None) for name in names]
        for label, glob in by.items():
            if not any(matches(glob, name) for name in names):
                raise ValueError(
                    f"by={{{label!r}: {glob!r}}} matches no parameter; there are {', '.join(names[:8])}..."
                )
        labels = list(by)
    else:
        found = [_label(name, group, by) for name, group in zip(names, groups, strict=True)]
        labels = list(dict.fromkeys(label for label in found if label is not None))
    if TOTAL in labels:
        raise ValueError(f"by= has the label {TOTAL!r}, which is reserved for the full model; give another label")
    where = {label: index for index, label in enumerate(labels)}
    return labels, [None if label is None else where[label] for label in found]


def checked_by(by: object) -> None:
    """Raise ValueError if ``by`` is no valid kind of labels."""
    if by not in ("parameter", "layer", "group") and not (isinstance(by, Mapping) and by):
        raise ValueError(f"by={by!r}: give 'parameter', 'layer', 'group', or labels with globs, {{'mlp': '*.mlp.*'}}")


def chosen(names: Sequence[str], globs: Sequence[str]) -> list[bool]:
    """Return whether each name matches any of the globs."""
    return [any(matches(glob, name) for glob in globs) for name in names]


def _label(name: str, group: int, by: object) -> str:
    if by == "group":
        return f"group_{group}"
    plain, at, stage = name.partition("@")
    return (plain.rpartition(".")[0] or plain) + at + stage if by == "layer" else name


# Sums by slot, and over the world -------------------------------------------------------------------------------------


class Slots:
    """Sums of values by slot, bitwise identical on every rank.

    ``index_add_`` on a GPU would add in an arbitrary order.

    Args:
        slots: Slot of each value; None: the value belongs to no slot.
        count: Number of slots.
        device: Device of the values.
    """

    def __init__(self, slots: Sequence[int | None], count: int, device: torch.device) -> None:
        members: list[list[int]] = [[] for _ in range(count)]
        for index, slot in enumerate(slots):
            if slot is not None:
                members[slot].append(index)
        longest = max(map(len, members), default=0)
        nothing = len(slots)  # index of the zero that `__call__` appends
        rows = [[*of_slot, *[nothing] * (longest - len(of_slot))] for of_slot in members]
        self._members = torch.tensor(rows, dtype=torch.int64).reshape(count, longest).to(device)

    def __call__(self, values: Tensor) -> Tensor:
        """Sum [..., values] to [..., slots].

        Host synchronization: none.
        """
        padded = torch.cat([values, values.new_zeros(*values.shape[:-1], 1)], -1)
        return padded[..., self._members].sum(-1)


def world_sum(packed: Tensor, registry: ProcessGroupRegistry) -> Tensor:
    """Return the sum over all ranks, on the device of ``packed``.

    Collectives: an all-reduce if there are several ranks.
    """
    if registry.topology.world_size == 1:
        return packed
    wire = packed.to(registry.device, copy=True)
    dist.all_reduce(wire, group=registry.group(*registry.topology.axes))
    return wire.to(packed.device)
