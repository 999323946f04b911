"""Find replicas that differ, in the collective that measures the norm anyway.

Copies of one piece must have the same bits, in the parameter, in its gradient and in its optimizer state. Each rank
makes numbers h of the bits of its copy (`BitSums`); along each replica axis the copy at coordinate 0 adds -(n - 1) h to a
slot and the n - 1 others add h. Equal copies cancel exactly (integers below 2^53 are exact in float64), so a slot that is
not 0 names a parameter and an axis along which it differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...parallel.layout.spec import P
from .bits import NONE, WORDS, BitSums, as_words, odd
from .constants import Constants
from .plan import ReductionPlan

States = Callable[[], Sequence[Mapping[str, Tensor]]]

ADVICE = (
    "A parameter that differs was initialised or stepped differently (the same seed on all replicas, or "
    "share_weights(model, registry)), or is split and declared as if it were not; a gradient that differs lacks a "
    "reduction over that axis (a layer that should all-reduce in backward, or P(partial=...) that was not said), or comes "
    "of another batch than its copies' (Measure(check_replicas=False) where copies may differ), or was changed on each "
    "rank after backward (torch.nn.utils.clip_grad_norm_, which max_norm= replaces)"
)


class ReplicaMismatchError(RuntimeError):
    """Replicas of a parameter, its gradient or its optimizer state have different values; ``mismatches`` says which."""

    def __init__(
        self, mismatches: Sequence[Mismatch], since: str = "replicas differ, nothing was stepped", advice: str = ADVICE
    ) -> None:
        self.mismatches = tuple(mismatches)
        shown = "\n".join(f"  {mismatch}" for mismatch in self.mismatches[:20])
        more = f"\n  and {len(self.mismatches) - 20} more" if len(self.mismatches) > 20 else ""
        super().__init__(f"{since}:\n{shown}{more}\n{advice}")


@dataclass(frozen=True)
class Mismatch:
    """One parameter whose copies differ along one axis.

    Args:
        kind: "parameter", "gradient", "master", "stepped weight" (a piece, or a copy elsewhere), "state", or which one:
            "state exp_avg".
        ranks: The global ranks whose copies differ from most of the others; all that hold one, where there is no such
            majority. Empty where nobody asked.
        copies: How many ranks hold one.
    """

    name: str
    axis: str
    kind: str
    ranks: tuple[int, ...] = ()
    copies: int = 0

    def __str__(self) -> str:
        text = f"{self.name}: the {self.kind} differs along axis {self.axis!r}"
        if not self.ranks:
            return text
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        if len(self.ranks) < self.copies:
            return f"{text}, on {ranks} from {self.copies - len(self.ranks)} other copies"
        return f"{text}, between {ranks}, of which nobody can say who is right"


class ReplicaCheck:
    """Writes and reads the slots of one plan (agreed with ``names=True``).

    Args:
        params: The tensors of its entries.
        device: Where the slots are.
        states: What asks for the optimizer's states of the entries, by name; None: they are not compared.
        exact: All bits count; see `BitSums`.
        what: What ``params`` are.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        params: Sequence[Tensor],
        device: torch.device,
        states: States | None = None,
        *,
        exact: bool = False,
        what: str = "parameter",
    ) -> None:
        self.plan, self.params, self.device, self.states = plan, list(params), device, states
        self.kinds = (what, "gradient") if states is None else (what, "gradient", "state")
        self.axes, self._constants, self.sums = plan.topology.axes, Constants(), BitSums(device, exact)
        self.numel = len(plan.parameter_names) * len(self.axes) * len(self.kinds) * WORDS

    def slots(self, gradients: Sequence[Tensor | None] | None = None) -> Tensor:
        """[numel] float64: what this rank adds. Reads the parameters, and the gradients if they are given, once more. Host
        reads: none."""
        return self.weighted(self.numbers(gradients))

    def numbers(self, gradients: Sequence[Tensor | None] | None = None) -> Tensor:
        """[entries, kinds] int64: of the bits that this rank holds. Host reads: none."""
        given = [None] * len(self.params) if gradients is None else list(gradients)
        states = [] if self.states is None else [[value for _, value in sorted(of.items())] for of in self.states()]
        flat = [state for of_entry in states for state in of_entry]
        found = self.sums([*self.params, *given, *flat])
        size = len(self.params)
        columns = [found[:size], found[size : 2 * size]]
        if self.states is not None:
            columns.append(self._together(found[2 * size :], [len(of_entry) for of_entry in states]))
        return torch.stack(columns, dim=1)

    def _together(self, sums: Tensor, counts: Sequence[int]) -> Tensor:
        """[entries] int64: one number for all states of each. A change in one of them is a change in it."""
        total = torch.full((len(counts),), NONE, dtype=torch.int64, device=self.device)
        if not len(sums):
            return total
        key = ("of states", *counts)
        owners = self._constants(
            (*key, "owners"), lambda: [at for at, n in enumerate(counts) for _ in range(n)], torch.int64, self.device
        )
        factors = self._constants(
            (*key, "factors"), lambda: [odd(at + 1) for n in counts for at in range(n)], torch.int64, self.device
        )
        return total.index_add_(0, owners, sums * factors)

    def weighted(self, numbers: Tensor) -> Tensor:
        """[numel] float64: the slots of those."""
        counts = len(self.plan.parameter_names), len(self.axes), len(self.kinds), WORDS
        values = torch.zeros(counts, dtype=torch.float64, device=self.device)
        if self.params:
            where = self._constants("slots", lambda: self.plan.parameter_slots, torch.int64, self.device)
            signs = self._constants("signs", self._signs, torch.float64, self.device).view(-1, len(self.axes), 1, 1)
            values[where] = signs * as_words(numbers).unsqueeze(1)
        return values.view(-1)

    def _signs(self) -> list[float]:
        """Of every entry along every axis."""
        return [self._sign(axis, entry.spec) for entry in self.plan.entries for axis in self.axes]

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

    def copied_over(self, index: int) -> tuple[str, ...]:
        """The axes along which this rank's entry has copies."""
        spec = self.plan.entries[index].spec
        return tuple(axis for axis in self.axes if self._sign(axis, spec) and self.plan.topology.size(axis) > 1)

    def differing(self, totals: Tensor) -> list[tuple[int, str, str]]:
        """(slot, axis, kind) of what the summed slots, on the host, say. The first is an index of the parameters' names."""
        shape = len(self.plan.parameter_names), len(self.axes), len(self.kinds), WORDS
        where = totals.view(shape).ne(0).any(-1).nonzero().tolist()
        return [(slot, self.axes[axis], self.kinds[kind]) for slot, axis, kind in where]

    def mismatches(self, totals: Tensor) -> list[Mismatch]:
        """What the summed slots, on the host, say."""
        return [Mismatch(self.plan.parameter_names[slot], axis, kind) for slot, axis, kind in self.differing(totals)]
