"""Watch copies over a long run: every so many steps fingerprints travel along; what parted is held back and named.

What is found stays on the device, where it skips this step and all that follow, on every rank: weights and states remain
what they were when they were compared, until the host hears of it and `Watch.error` asks all ranks which copy differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...parallel.mesh.agreement import gather_objects
from ...parallel.mesh.registry import ProcessGroupRegistry
from .bits import as_words
from .replicas import Mismatch, ReplicaCheck, ReplicaMismatchError

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


class Watch:
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
    words = as_words(numbers).tolist()
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
                each = as_words(check.sums([value for _, value in named])).tolist() if named else []
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
