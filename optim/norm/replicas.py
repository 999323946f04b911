"""Find replicas that differ, in the collective that measures the norm anyway.

Copies of one piece must have the same bits, in the parameter, in its gradient and in its optimizer state. Each rank
makes numbers h of the bits of its copy (`TensorHash`); along each replica axis the copy at coordinate 0 adds -(n - 1) h to
a slot and the n - 1 others add h. Equal copies cancel exactly (integers below 2^53 are exact in float64), so a slot that is
not 0 names a parameter and an axis along which it differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...parallel.layout.spec import P
from ...parallel.mesh.agreement import gather_objects
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..kernels.device_constants import Constants
from .hashing import NONE, WORDS, TensorHash, odd, splitmix64_finalizer, to_float_words
from .plan import ReductionPlan

States = Callable[[], Sequence[Mapping[str, Tensor]]]

ADVICE = (
    "A parameter that differs was initialised or stepped differently (the same seed on all replicas, or "
    "share_weights(model, registry)), or is split and declared as if it were not; a gradient that differs lacks a "
    "reduction over that axis (a layer that should all-reduce in backward, or P(partial=...) that was not said), or comes "
    "of another batch than its copies' (check_replicas=False where copies may differ), or was changed on each "
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
        exact: All bits count; see `TensorHash`.
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
        self.axes, self._constants, self.sums = plan.topology.axes, Constants(), TensorHash(device, exact)
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
            values[where] = signs * to_float_words(numbers).unsqueeze(1)
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


# Fingerprints over a long run -----------------------------------------------------------------------------------------

# Watch copies over a long run: every so many steps fingerprints travel along; what parted is held back and named.
#
# What is found stays on the device, where it skips this step and all that follow, on every rank: weights and states
# remain what they were when they were compared, until the host hears of it and `FingerprintMonitor.error` asks all ranks
# which copy differs.

SINCE = "copies have parted; the step in which they were compared was not made, nor any since"
WATCH_ADVICE = (
    "One of many copies that differs alone tells of a flipped bit on its rank: put what the others have in its place "
    "(load_checkpoint, or align_copies where the first copy is right), or the machine out of service. Several at once, or "
    "the same ones again, tell of a kernel that adds in no fixed order (torch.use_deterministic_algorithms), a forgotten "
    "all-reduce, or code that writes to one copy; with states=Replayable(), meshstep.optim.replay makes the update again"
)

Place = tuple[tuple[str, int], ...]
"""The coordinates that the ranks which hold copies of one piece have in common."""
Held = dict[tuple[str, str], dict[str, dict[Place, list[tuple[float, ...]]]]]
"""By a parameter's name and what of it is compared, and by each tensor that this is: what stands for its bits, by place."""


class FingerprintMonitor:
    """Compares the copies of one model, in the collective that measures.

    Args:
        checks: Of the tensors; the first one of what is stepped, gradients and states too. Exact.
        every: In the first measurement and in every so-many-th from there on.
        registry: The groups.

    Attributes:
        parted: 0-dim float32, on the device: 1 once copies were found to differ. Not to be written to.
    """

    def __init__(self, checks: Sequence[ReplicaCheck], every: int, registry: ProcessGroupRegistry) -> None:
        self.checks, self.every, self.registry = list(checks), every, registry
        self.start_over()

    def start_over(self) -> None:
        """Forget what was found, and compare in the next measurement."""
        device = self.checks[0].device
        self.parted = torch.zeros((), device=device)
        self._steps = 0
        self._numbers: list[Tensor] = []
        self._kept: list[tuple[Tensor, Tensor]] = []  # of each check, the sums and this rank's numbers

    def slots(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """What travels in this measurement; nothing where none is due. Host reads: none."""
        is_due = self._steps % self.every == 0
        self._steps += 1
        if not is_due:
            return []
        self._numbers = [check.numbers(None if index else gradients) for index, check in enumerate(self.checks)]
        return [check.weighted(numbers) for check, numbers in zip(self.checks, self._numbers, strict=True)]

    def look(self, totals: Sequence[Tensor], finite: Tensor) -> None:
        """At the sums of what `slots` gave.

        Args:
            finite: 0-dim bool: the gradients' norm is. Where it is not they are not compared: they are not stepped with,
                and an overflow may be in one copy alone.
        """
        if not totals:
            return
        found = [self._judged(check, sums, finite) for check, sums in zip(self.checks, totals, strict=True)]
        earlier = self.parted > 0
        # What was found first stays.
        self._kept = [
            (torch.where(earlier, kept[0], sums), torch.where(earlier, kept[1], numbers))
            for kept, sums, numbers in zip(
                self._kept or zip(found, self._numbers, strict=True), found, self._numbers, strict=True
            )
        ]
        some = torch.stack([sums.ne(0).any() for sums in found]).any()
        self.parted = torch.maximum(self.parted, some.to(self.parted))

    def _judged(self, check: ReplicaCheck, sums: Tensor, finite: Tensor) -> Tensor:
        by_kind = sums.view(len(check.plan.parameter_names), len(check.axes), len(check.kinds), -1).clone()
        by_kind[:, :, 1] = torch.where(finite, by_kind[:, :, 1], 0.0)
        return by_kind

    def error(self) -> ReplicaMismatchError:
        """What was found, with the ranks; compares anew from the next step on. On every rank.

        Collectives: an object all-gather. Host reads: some.
        """
        found: list[tuple[str, str, str]] = []
        mine: Held = {}
        for check, (sums, numbers) in zip(self.checks, self._kept, strict=True):
            differing = check.differing(sums.cpu())
            found += [(check.plan.parameter_names[slot], axis, kind) for slot, axis, kind in differing]
            mine |= _held(check, {(slot, kind) for slot, _, kind in differing}, numbers)
        everybody = gather_objects(mine, self.registry)
        self.start_over()
        axes: dict[tuple[str, str], list[str]] = {}
        for name, axis, kind in found:
            axes.setdefault((name, kind), []).append(axis)
        mismatches = (
            Mismatch(name, axis, what, ranks, copies)
            for (name, kind), along in axes.items()
            for what, ranks, copies in _who(kind, [held.get((name, kind), {}) for held in everybody])
            for axis in along
        )
        return ReplicaMismatchError([*mismatches], SINCE, WATCH_ADVICE)


def _held(check: ReplicaCheck, wanted: set[tuple[int, str]], numbers: Tensor) -> Held:
    """What this rank holds of (slot, kind) pairs that differ somewhere. Of states each one, as it is now: nobody has
    stepped since. Host reads: some."""
    held: Held = {}
    words = to_float_words(numbers).tolist()
    states = [] if check.states is None else check.states()
    for index, slot in enumerate(check.plan.parameter_slots):
        copied = check.copied_over(index)
        place = tuple((axis, at) for axis, at in check.plan.coordinate.items() if axis not in copied)
        for column, kind in enumerate(check.kinds):
            if (slot, kind) not in wanted or not copied:
                continue
            of_tensors = {kind: words[index][column]}
            if kind == "state":
                named = sorted(states[index].items())
                each = to_float_words(check.sums([value for _, value in named])).tolist() if named else []
                of_tensors |= {f"state {key}": found for (key, _), found in zip(named, each, strict=True)}
            in_all = held.setdefault((check.plan.parameter_names[slot], kind), {})
            for what, found in of_tensors.items():
                in_all.setdefault(what, {}).setdefault(place, []).append(tuple(found))
    return held


def _who(kind: str, held: Sequence[Mapping[str, Mapping[Place, object]]]) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """(what, the ranks that differ from most, number of copies) of each tensor that differs.

    Args:
        kind: All of it together, for where no tensor alone differs any more.
        held: By all ranks.
    """
    alone = sorted({what for of_rank in held for what in of_rank} - {kind})
    differing = [(what, ranks, copies) for what in alone for ranks, copies in _minorities(what, held)]
    yield from differing or ((kind, ranks, copies) for ranks, copies in _minorities(kind, held))


def _minorities(
    what: str, held: Sequence[Mapping[str, Mapping[Place, object]]]
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Of each piece whose copies differ: the ranks whose copy is not that of most, all where there is none of most."""
    for place in sorted({place for of_rank in held for place in of_rank.get(what, {})}):
        copies = {rank: repr(of[what][place]) for rank, of in enumerate(held) if place in of.get(what, {})}
        (most, count), *others = Counter(copies.values()).most_common()
        if others:
            tie = others[0][1] == count
            yield tuple(rank for rank, bits in copies.items() if tie or bits != most), len(copies)


# Shards that are replicas ---------------------------------------------------------------------------------------------

# Find replicated parameters that are declared sharded, in the collective that measures the norm in the first step.
#
# A replica declared ``P("tensor")`` is counted once per rank of the axis in the norm. Its "shards" along the axis are
# bitwise equal, in the weights and in the gradients. Those of a really sharded parameter are equal only if all ranks drew
# them from the same seed, which is a mistake too. Each rank makes a number h of both (`TensorHash`). Along each axis that
# shards the parameter, coordinate 0 adds -(n - 1) h to a slot, the n - 1 other coordinates add h, and all add 1 to a
# count. A slot of 0 whose count is not 0 names a parameter and an axis.
#
# Shards that may be equal by right put a number of their own rank in the place of h, so the slot is not 0:
#
# * without a gradient, or with a constant one (zeros; ones of a symmetric initialisation),
# * with fewer than `ENOUGH` elements, or fewer than `ENOUGH_CONSTANT` and constant weights (a bias of zeros),
# * empty or uneven shards, whose sizes differ.
#
# Owned and tied parameters and DTensors are left out: their layout is not declared by a dim and an axis alone.

ENOUGH, ENOUGH_CONSTANT = 4, 8
"""Elements of a shard that is compared, and of one with constant weights."""


class EqualShards:
    """Writes and reads the slots of one plan (agreed with ``names=True``).

    Args:
        plan: Of what is stepped: parameters, or pieces of them.
        axes: For each entry the axes along which its parameter is declared sharded, and should be compared; () for none.
        device: The device of the slots.
    """

    def __init__(self, plan: ReductionPlan, axes: Sequence[Sequence[str]], device: torch.device) -> None:
        self.plan, self.axes, self.device = plan, [tuple(of_entry) for of_entry in axes], device

    def slots(self, numbers: Tensor, weights: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
        """Return this rank's part of the slots, 1-dim float64. Host synchronization: none on CUDA devices.

        Args:
            numbers: [entries, 2] int64: `TensorHash` of the weights and gradients.
            weights, gradients: Of the entries.
        """
        topology, names = self.plan.topology, len(self.plan.parameter_names)
        values = torch.zeros(names, len(topology.axes), WORDS + 1, dtype=torch.float64, device=self.device)
        mixed = splitmix64_finalizer(numbers[:, 0]) + numbers[:, 1]
        own = torch.full((), self.plan.rank + 1, dtype=torch.int64, device=self.device)
        for index, axes in enumerate(self.axes):
            if not axes:
                continue
            known = _tell_apart(weights[index], gradients[index])
            number = own if known is None else torch.where(known.to(self.device), mixed[index], own)
            words = to_float_words(number)
            for axis in axes:
                sign = 1.0 - topology.size(axis) if self.plan.coordinate[axis] == 0 else 1.0
                slot = values[self.plan.parameter_slots[index], topology.axes.index(axis)]
                slot[:WORDS] += sign * words
                slot[WORDS] += 1
        return values.view(-1)

    def find(self, totals: Tensor) -> list[tuple[str, str]]:
        """Return the (parameter, axis) pairs whose shards are equal.

        Args:
            totals: The sum of all ranks' `slots`, on the host.
        """
        values = totals.view(len(self.plan.parameter_names), len(self.plan.topology.axes), WORDS + 1)
        equal = (values[..., :WORDS] == 0).all(-1) & (values[..., WORDS] > 0)
        return [
            (self.plan.parameter_names[slot], self.plan.topology.axes[axis]) for slot, axis in equal.nonzero().tolist()
        ]

    def check(self, totals: Tensor) -> None:
        """Raise ValueError, on every rank alike, if shards are equal; ``totals`` as for `find`."""
        if found := self.find(totals):
            name, axis = found[0]
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            size = self.plan.topology.size(axis)
            raise ValueError(
                f"{name}{more} is declared sharded along axis {axis!r}, but all {size} shards are bitwise equal, in "
                f"weights and gradients, as those of a replica are; the norm would count it {size} times. Nothing was "
                f"stepped. If it is a replica, declare it without {axis!r}: P(). If each rank drew its shard from the same "
                "seed, draw the full tensor and cut it with shard(), or take another seed on each rank. If the shards are "
                "equal on purpose, turn the comparison off: check_replicas=False"
            )


def _tell_apart(weights: Tensor, gradient: Tensor | None) -> Tensor | None:
    """Return a 0-dim bool: equal shards with these values are copies; None: there are too few values to tell."""
    if gradient is None or gradient.layout is not torch.strided or not gradient.is_floating_point():
        return None
    if gradient.numel() < ENOUGH:
        return None
    known = _varies(gradient)
    return known if gradient.numel() >= ENOUGH_CONSTANT else known & _varies(weights).to(known.device)


def _varies(tensor: Tensor) -> Tensor:
    """Return a 0-dim bool: ``tensor`` has two different values; False if one is NaN."""
    low, high = torch.aminmax(tensor.detach())
    return high > low
