"""Find replicas that differ, in the collective that measures the norm anyway.

Copies of one piece must have the same bits, in the parameter and in its gradient. Each rank hashes its copy to a 31-bit
integer h; along each replica axis the copy at coordinate 0 adds -(n - 1) h to a slot and the n - 1 others add h. Equal
copies cancel exactly (integers below 2^53 are exact in float64), so a slot that is not 0 names a parameter and an axis
along which it differs. Different copies cancel by chance once in about 2^31.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...parallel.layout.spec import P
from .constants import Constants
from .plan import ReductionPlan

KINDS = ("parameter", "gradient")
CHUNK = 2**20  # elements that are hashed at a time, in 8 bytes each
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaMismatchError(RuntimeError):
    """Replicas of a parameter, or of its gradient, have different values; ``mismatches`` says which."""

    def __init__(self, mismatches: Sequence[Mismatch]) -> None:
        self.mismatches = tuple(mismatches)
        shown = "\n".join(f"  {mismatch}" for mismatch in self.mismatches[:20])
        more = f"\n  and {len(self.mismatches) - 20} more" if len(self.mismatches) > 20 else ""
        super().__init__(
            f"replicas differ, nothing was stepped:\n{shown}{more}\nA parameter that differs was initialised or stepped "
            "differently (the same seed on all replicas, or share_weights(model, registry)), or is split and declared as "
            "if it were not; a gradient that differs lacks a reduction over that axis (a layer that should all-reduce in "
            "backward, or P(partial=...) that was not said), or comes of another batch than its copies' "
            "(Measure(check_replicas=False) where copies may differ)"
        )


@dataclass(frozen=True)
class Mismatch:
    """One parameter whose copies differ along one axis."""

    name: str
    axis: str
    kind: str

    def __str__(self) -> str:
        return f"{self.name}: the {self.kind} differs along axis {self.axis!r}"


class ReplicaCheck:
    """Writes and reads the slots of one plan (agreed with ``names=True``).

    Args:
        params: The tensors of its entries.
        device: Where the slots are.
    """

    def __init__(self, plan: ReductionPlan, params: Sequence[Tensor], device: torch.device) -> None:
        self.plan, self.params, self.device = plan, list(params), device
        self._axes, self._constants = plan.topology.axes, Constants()
        self.numel = len(plan.parameter_names) * len(self._axes) * len(KINDS)

    def slots(self, gradients: Sequence[Tensor | None] | None = None) -> Tensor:
        """[numel] float64: what this rank adds. Reads the parameters, and the gradients if they are given, once more. Host
        reads: none."""
        counts = len(self.plan.parameter_names), len(self._axes), len(KINDS)
        values = torch.zeros(counts, dtype=torch.float64, device=self.device)
        if self.params:
            given = [None] * len(self.params) if gradients is None else gradients
            tensors = [tensor for pair in zip(self.params, given, strict=True) for tensor in pair]
            hashes = self._hashes(tensors).view(-1, 1, len(KINDS))
            where = self._constants("slots", lambda: self.plan.parameter_slots, torch.int64, self.device)
            signs = self._constants("signs", self._signs, torch.float64, self.device).view(-1, len(self._axes), 1)
            values[where] = signs * hashes
        return values.view(-1)

    def _hashes(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """[n] on `device`, of tensors of which some may be on another: one transfer for all of those."""
        none = self._constants("none", lambda: [1.0], torch.float64, self.device)[0]
        here = [none if tensor is None else fingerprint(tensor) for tensor in tensors]
        away = [index for index, found in enumerate(here) if found.device != self.device]
        if away:
            arrived = torch.stack([here[index] for index in away]).to(self.device)
            for index, found in zip(away, arrived.unbind(), strict=True):
                here[index] = found
        return torch.stack(here)

    def _signs(self) -> list[float]:
        """Of every entry along every axis."""
        return [self._sign(axis, entry.spec) for entry in self.plan.entries for axis in self._axes]

    def _sign(self, axis: str, spec: P) -> float:
        """Weights that cancel over the copies along ``axis``; 0 where there are no copies."""
        topology, at = self.plan.topology, self.plan.coordinate[axis]
        if axis in dict(spec.tied):
            where = spec.tied_coordinates(axis, topology)
        elif axis in spec.replica_axes(topology):
            where = tuple(range(topology.size(axis)))
        else:
            return 0.0
        return 1.0 - len(where) if at == where[0] else 1.0

    def mismatches(self, totals: Tensor) -> list[Mismatch]:
        """What the summed slots, on the host, say."""
        where = totals.view(len(self.plan.parameter_names), len(self._axes), len(KINDS)).nonzero().tolist()
        return [Mismatch(self.plan.parameter_names[slot], self._axes[axis], KINDS[kind]) for slot, axis, kind in where]


def fingerprint(tensor: Tensor) -> Tensor:
    """0-dim float64, an integer below 2^31: a hash of the bits of ``tensor``, of all NaNs alike, -0 as 0."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    start = 1
    for part in tensor.detach().reshape(-1).split(CHUNK):
        value = part + 0.0
        value = torch.where(value.isnan(), torch.full_like(value, torch.nan), value)
        bits = value.view(_INTEGERS[value.element_size()]).to(torch.int64)
        position = torch.arange(start, start + bits.numel(), device=bits.device)
        # Multiplication by odd constants and shifts mixes the bits; int64 wraps around.
        mixed = (bits ^ (position * -7046029254386353131)) * -4658895280553007687
        mixed = (mixed ^ (mixed >> 29)) * -7723592293110705685
        total += mixed.sum()
        start += bits.numel()
    return ((total * -7046029254386353131 >> 33) & 0x7FFFFFFF).double()
