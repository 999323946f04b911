"""Comparison of replicas in the collective that computes the gradient norm.

Replicas of one shard must be bitwise identical: the parameter, its gradient and its optimizer state. Each rank hashes
the tensors of its replica (`TensorHash`). A hash has two words, which are integers below 2^32. The collective sums one
number, called a slot here, per parameter, mesh axis, kind of tensor and word. Along an axis with n replicas, the first
replica adds -(n - 1) times its word to the slot, and each other replica adds its word. The words of equal replicas
cancel exactly, because integers below 2^53 are exact in float64. A sum other than 0 means that replicas of this
parameter differ along this axis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...parallel.layout.spec import P
from ...parallel.mesh.agreement import gather_objects
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..kernels.device_constants import Constants
from .plan import ReductionPlan

States = Callable[[], Sequence[Mapping[str, Tensor]]]


def advice_on(may_differ: str, instead: str, copied: str) -> str:
    """Return a text with the possible causes of replicas that differ in the first step, and how to correct them.

    ``may_differ`` says how to turn the comparison off, and ``copied`` how to make weights equal. ``instead`` replaces
    `torch.nn.utils.clip_grad_norm_`, as in "max_norm=".
    """
    return (
        "A parameter that differs was initialized or updated differently on the ranks, or is a shard whose spec does not "
        f"name that axis (declare it). Use the same seed on all replicas; or {copied}. A gradient that differs belongs to "
        "such a shard, lacks an all-reduce over that axis in backward (or P(partial=...) in the declared spec), was "
        f"computed from another batch (if replicas may differ, {may_differ}), or was changed on each rank after backward "
        f"(use {instead} instead of torch.nn.utils.clip_grad_norm_)"
    )


BROADCAST = "call broadcast_weights(model, registry), which copies weights along data axes"
ADVICE = advice_on(
    "use check_replicas=False",
    "max_norm=",
    f"{BROADCAST}, before you create the optimizer; or align_replicas(optimizer), which copies them along all axes",
)


class ReplicaMismatchError(RuntimeError):
    """The error that is raised if replicas of a parameter, its gradient or its optimizer state differ.

        try:
            optimizer.step()
        except ReplicaMismatchError as error:
            print(error.mismatches[0].name, error.mismatches[0].ranks)

    Args:
        mismatches: One `Mismatch` per parameter, axis and kind of tensor that differs. A later comparison by
            `Fingerprints` gives one per shard instead of per parameter, and if possible one per optimizer state that
            differs. The message shows the first 20.
        since: First line of the message: what differs, and which steps were skipped. Default: replicas differ, and no
            step was taken.
        advice: Last line of the message: possible causes, and how to correct them. Default: the causes of a difference
            in the first step.
    """

    def __init__(
        self, mismatches: Sequence[Mismatch], since: str = "replicas differ, nothing was stepped", advice: str = ADVICE
    ) -> None:
        self.mismatches = tuple(mismatches)
        shown = "\n".join(f"  {mismatch}" for mismatch in self.mismatches[:20])
        more = f"\n  and {len(self.mismatches) - 20} more" if len(self.mismatches) > 20 else ""
        super().__init__(f"{since}:\n{shown}{more}\n{advice}")


@dataclass(frozen=True)
class Mismatch:
    """A difference along one axis between replicas of a parameter, of its gradient or of its optimizer state.

    ``kind`` is "parameter", "gradient", "master" (a master weight), "stepped weight" (the tensor that the optimizer
    steps instead of the parameter: a shard, or an offloaded or cast copy), "state" (all optimizer states together), or
    one optimizer state, such as "state exp_avg". ``ranks`` are the global ranks whose replica differs from the most
    frequent value. If two values are equally frequent and none is more frequent, these are all ranks with a replica. If
    the ranks were not determined, ``ranks`` is empty, and ``copies``, the number of ranks with a replica, is 0.
    """

    name: str
    axis: str
    kind: str
    ranks: tuple[int, ...] = ()
    copies: int = 0

    def __str__(self) -> str:
        kind = "master weight" if self.kind == "master" else self.kind
        text = f"{self.name}: the {kind} differs along axis {self.axis!r}"
        if not self.ranks:
            return text
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        if len(self.ranks) < self.copies:
            return f"{text}, on {ranks} from {self.copies - len(self.ranks)} other replicas"
        return f"{text}, between {ranks}, without a majority"


class ReplicaCheck:
    """Compares replicas of a plan's parameters, their gradients and their optimizer states over ranks.

    `slots` returns numbers that a collective must sum over all ranks. A sum is 0 if the replicas of a parameter along
    an axis are equal. Give the sums to `mismatches`, which returns the parameters whose replicas differ.

    ``states`` returns, for each entry of ``plan``, a dict of its optimizer states by name; None: states are not
    compared. With ``exact``, all bits are compared; otherwise all NaNs are equal, and -0 equals 0. All bits of 8-bit
    floats are compared in both cases. ``what`` is the kind of ``params`` in a `Mismatch`.
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
        """Return this rank's summands, [numel] float64. Sum them over all ranks, and give the sums to `mismatches`."""
        return self.weighted(self.numbers(gradients))

    def numbers(self, gradients: Sequence[Tensor | None] | None) -> Tensor:
        """Return the hashes of this rank's tensors, [entries, kinds] int64.

        The kinds (columns) are the parameter, its gradient and, if states are compared, all of its states together.

        Host synchronization: none if all tensors are on the device of the slots.
        """
        given = [None] * len(self.params) if gradients is None else list(gradients)
        states = [] if self.states is None else [[value for _, value in sorted(of.items())] for of in self.states()]
        flat = [state for of_entry in states for state in of_entry]
        found = self.sums([*self.params, *given, *flat])
        size = len(self.params)
        columns = [found[:size], found[size : 2 * size]]
        if self.states is not None:
            columns.append(self._combine_states(found[2 * size :], [len(of_entry) for of_entry in states]))
        return torch.stack(columns, dim=1)

    def count_zero(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return the number of replicated entries with a gradient of zeros, [1] float64 on the device of the slots.

        Empty gradients, as of a DTensor whose shard on this rank is empty, do not count.
        """
        flags = [
            (gradient == 0).all().to(self.device, torch.float64)
            for index, gradient in enumerate(gradients)
            if gradient is not None
            and gradient.layout == torch.strided
            and gradient.numel()
            and self.copied_over(index)
        ]
        return torch.stack(flags).sum().view(1) if flags else torch.zeros(1, dtype=torch.float64, device=self.device)

    def _combine_states(self, sums: Tensor, counts: Sequence[int]) -> Tensor:
        """Return one hash per entry, of all its states together, [entries] int64."""
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
        """Return this rank's summands, [numel] float64, computed from ``numbers``, the result of `numbers`."""
        counts = len(self.plan.parameter_names), len(self.axes), len(self.kinds), WORDS
        values = torch.zeros(counts, dtype=torch.float64, device=self.device)
        if self.params:
            where = self._constants("slots", lambda: self.plan.parameter_slots, torch.int64, self.device)
            signs = self._constants("signs", self._signs, torch.float64, self.device).view(-1, len(self.axes), 1, 1)
            values[where] = signs * to_float_words(numbers).unsqueeze(1)
        return values.view(-1)

    def _signs(self) -> list[float]:
        return [self._sign(axis, entry.spec) for entry in self.plan.entries for axis in self.axes]

    def _sign(self, axis: str, spec: P) -> float:
        """Return the factor by which this rank multiplies its hash in the slot of ``axis``.

        With n replicas of the parameter along the axis it is 1 - n on the first rank with a replica, and 1 on the other
        ranks. It is 0 if the axis does not replicate the parameter.
        """
        topology, at = self.plan.topology, self.plan.coordinate[axis]
        if axis in dict(spec.tied):
            where = spec.tied_coordinates(axis, topology)
        elif axis in spec.replica_axes(topology):
            where = tuple(range(topology.size(axis)))
        else:
            return 0.0
        return 1.0 - len(where) if at == where[0] else 1.0

    def copied_over(self, index: int) -> tuple[str, ...]:
        spec = self.plan.entries[index].spec
        return tuple(axis for axis in self.axes if self._sign(axis, spec) and self.plan.topology.size(axis) > 1)

    def differing(self, totals: Tensor) -> list[tuple[int, str, str]]:
        """Return (index of the name in ``plan.parameter_names``, axis, kind of tensor) for all replicas that differ."""
        shape = len(self.plan.parameter_names), len(self.axes), len(self.kinds), WORDS
        where = totals.view(shape).ne(0).any(-1).nonzero().tolist()
        return [(slot, self.axes[axis], self.kinds[kind]) for slot, axis, kind in where]

    def mismatches(self, totals: Tensor) -> list[Mismatch]:
        return [Mismatch(self.plan.parameter_names[slot], axis, kind) for slot, axis, kind in self.differing(totals)]


# Fingerprints over a long run -----------------------------------------------------------------------------------------

# Replicas are compared periodically. If they differ, a flag on the device is set, and this step and all later steps are
# skipped on every rank. So weights and states keep the values that were compared, until the host reads the flag and
# `FingerprintMonitor.error` exchanges hashes to find the ranks that differ.

SINCE = "replicas have diverged; the step that compared them and all later steps were skipped"
WATCH_ADVICE = (
    "If one of many replicas differs, a bit flipped on its rank: restore the values of the other replicas "
    "(load_checkpoint, or align_replicas if the first replica is right), or take the machine out of service. If several "
    "replicas differ, or the same replica differs again, look for a kernel that adds in no fixed order "
    "(torch.use_deterministic_algorithms), a missing all-reduce, or code that writes to one replica. With "
    "states=Replayable(), meshstep.optim.replay(optimizer) repeats the last update, to find such a kernel"
)

CommonCoordinates = tuple[tuple[str, int], ...]
"""The (axis, coordinate) pairs that all ranks with a replica of one shard have in common. They identify the shard."""
ReplicaHashes = dict[tuple[str, str], dict[str, dict[CommonCoordinates, list[tuple[float, ...]]]]]
"""Hashes by (parameter name, kind of tensor), then by the name of the tensor, such as "state exp_avg", then by shard."""


class _Comparison(NamedTuple):
    """The sums of a comparison over all ranks, and this rank's hashes."""

    check: ReplicaCheck
    sums: Tensor
    numbers: Tensor


class FingerprintMonitor:
    """Compares the replicas of one model periodically, in the collective that computes the gradient norm.

    The first one of ``checks``, which are bitwise, compares the tensors that the optimizer steps, their gradients and
    their states; a second one may compare the model's parameters. ``every`` is the number of measurements from one
    comparison to the next; the first measurement compares. `replicas_diverged`, 0-dim float32 on the device, is 1 from
    the comparison in which replicas differed. Do not write to it.
    """

    def __init__(self, checks: Sequence[ReplicaCheck], every: int, registry: ProcessGroupRegistry) -> None:
        self.checks, self.every, self.registry = list(checks), every, registry
        self.start_over()

    def start_over(self) -> None:
        device = self.checks[0].device
        self.replicas_diverged = torch.zeros((), device=device)
        self._steps = 0
        # Keys are names of fields. `_hashed` has this rank's hashes in the present comparison; it is empty if none is due.
        self._hashed: dict[str, tuple[ReplicaCheck, Tensor]] = {}
        self._detected: dict[str, _Comparison] = {}

    def fields(self, gradients: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Count a measurement. If a comparison is due, return a field of summands per check, else an empty dict.

        The names are ``"fingerprints 0"``, ``"fingerprints 1"``. Sum the fields over all ranks, and give the sums to
        `record`.
        """
        is_due = self._steps % self.every == 0
        self._steps += 1
        self._hashed = {
            f"fingerprints {index}": (check, check.numbers(None if index else gradients))
            for index, check in enumerate(self.checks if is_due else ())
        }
        return {field: check.weighted(numbers) for field, (check, numbers) in self._hashed.items()}

    def record(self, sums: Mapping[str, Tensor], finite: Tensor) -> None:
        """Set `replicas_diverged` to 1 if replicas differ, and store the sums and hashes for `error`.

        If ``finite``, a 0-dim bool, is False, gradients are not compared, because their replicas may differ after an
        overflow, and the step is skipped anyway. ``sums`` may also have other fields than those of `fields`.
        """
        if not self._hashed:
            return
        found = {
            field: _Comparison(check, self._mask_nonfinite(check, sums[field], finite), numbers)
            for field, (check, numbers) in self._hashed.items()
        }
        earlier = self.replicas_diverged > 0
        # After replicas have differed, later comparisons do not replace the recorded sums and hashes.
        for field, new in found.items():
            old = self._detected.get(field, new)
            self._detected[field] = _Comparison(
                new.check, torch.where(earlier, old.sums, new.sums), torch.where(earlier, old.numbers, new.numbers)
            )
        some = torch.stack([comparison.sums.ne(0).any() for comparison in found.values()]).any()
        self.replicas_diverged = torch.maximum(self.replicas_diverged, some.to(self.replicas_diverged))

    def _mask_nonfinite(self, check: ReplicaCheck, sums: Tensor, finite: Tensor) -> Tensor:
        by_kind = sums.view(len(check.plan.parameter_names), len(check.axes), len(check.kinds), -1).clone()
        by_kind[:, :, 1] = torch.where(finite, by_kind[:, :, 1], 0.0)
        return by_kind

    def error(self) -> ReplicaMismatchError:
        """Return an error that names the replicas and the ranks that differ, and call `start_over`.

        Every rank must call this method.
        Collectives: an object all-gather.
        Host synchronization: yes.
        """
        found: list[tuple[str, str, str]] = []
        mine: ReplicaHashes = {}
        for check, sums, numbers in self._detected.values():
            differing = check.differing(sums.cpu())
            found += [(check.plan.parameter_names[slot], axis, kind) for slot, axis, kind in differing]
            mine |= _hash_replicas(check, {(slot, kind) for slot, _, kind in differing}, numbers)
        by_rank = gather_objects(mine, self.registry)
        self.start_over()
        axes: dict[tuple[str, str], list[str]] = {}
        for name, axis, kind in found:
            axes.setdefault((name, kind), []).append(axis)
        mismatches = (
            Mismatch(name, axis, what, ranks, copies)
            for (name, kind), along in axes.items()
            for what, ranks, copies in _differing_tensors(kind, [held.get((name, kind), {}) for held in by_rank])
            for axis in along
        )
        return ReplicaMismatchError([*mismatches], SINCE, WATCH_ADVICE)


def _hash_replicas(check: ReplicaCheck, wanted: set[tuple[int, str]], numbers: Tensor) -> ReplicaHashes:
    """Return this rank's hashes of the tensors in ``wanted``.

    If states differ, the result also has one hash per optimizer state, computed from its current value. This value is
    unchanged since the comparison, because all steps since then were skipped.

    ``wanted`` has pairs (index of the name in ``plan.parameter_names``, kind of tensor). ``numbers`` are the hashes of
    the comparison.
    Host synchronization: yes.
    """
    held: ReplicaHashes = {}
    words = to_float_words(numbers).tolist()
    states = [] if check.states is None else check.states()
    for index, slot in enumerate(check.plan.parameter_slots):
        copied = check.copied_over(index)
        place = tuple((axis, at) for axis, at in check.plan.coordinate.items() if axis not in copied)
        for column, kind in enumerate(check.kinds):
            if (slot, kind) not in wanted or not copied:
                continue
            hashes = {kind: words[index][column]}
            if kind == "state":
                named = sorted(states[index].items())
                each = to_float_words(check.sums([value for _, value in named])).tolist() if named else []
                hashes |= {f"state {key}": found for (key, _), found in zip(named, each, strict=True)}
            by_tensor = held.setdefault((check.plan.parameter_names[slot], kind), {})
            for what, found in hashes.items():
                by_tensor.setdefault(what, {}).setdefault(place, []).append(tuple(found))
    return held


def _differing_tensors(
    kind: str, held: Sequence[Mapping[str, Mapping[CommonCoordinates, object]]]
) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Yield (name, ranks, number of replicas) for each tensor of one parameter whose replicas differ.

    For the kind "state", the yielded name is the name of a single state that differs, such as "state exp_avg". If no
    single state differs, and for other kinds, it is ``kind``. ``held`` has the parameter's hashes by global rank.
    """
    alone = sorted({what for of_rank in held for what in of_rank} - {kind})
    differing = [(what, ranks, copies) for what in alone for ranks, copies in _find_minorities(what, held)]
    yield from differing or ((kind, ranks, copies) for ranks, copies in _find_minorities(kind, held))


def _find_minorities(
    what: str, held: Sequence[Mapping[str, Mapping[CommonCoordinates, object]]]
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield (ranks, number of replicas), as in `Mismatch`, for each shard whose replicas of the tensor ``what`` differ."""
    for place in sorted({place for of_rank in held for place in of_rank.get(what, {})}):
        copies = {rank: repr(of[what][place]) for rank, of in enumerate(held) if place in of.get(what, {})}
        (most, count), *others = Counter(copies.values()).most_common()
        if others:
            tie = others[0][1] == count
            yield tuple(rank for rank, bits in copies.items() if tie or bits != most), len(copies)


# Shards that are replicas ---------------------------------------------------------------------------------------------

# The collective that measures the norm in the first step also finds replicated parameters that are declared sharded.
#
# If a replicated parameter is declared ``P("tensor")``, the norm counts it once per rank of the axis. Its "shards" along
# the axis are bitwise equal, in the weights and in the gradients. Shards of a parameter that really is sharded are equal
# only if all ranks drew them from the same seed, which is a mistake too. Each rank computes one hash h of the weight and
# the gradient. Along each axis of n ranks that shards the parameter, the rank at coordinate 0 adds -(n - 1) h to a slot,
# the other ranks add h, and all ranks add 1 to a count. If a slot is 0 and its count is above 0, all shards are equal.
#
# Some shards may be equal without a mistake. For such a shard, a rank adds a number unique to the rank instead of h, so
# the slot is not 0:
#
# * shards without a gradient, or with a constant gradient (zeros, or equal elements because the weights were initialized
#   symmetrically),
# * shards with fewer than `ENOUGH` elements, or with fewer than `ENOUGH_CONSTANT` and constant weights (a bias of zeros),
# * empty shards, and shards whose gradient is not a dense float tensor.
#
# Owned and tied parameters and DTensors are left out, because a dim and an axis alone do not describe their layout.

ENOUGH, ENOUGH_CONSTANT = 4, 8
"""Minimum numbers of elements of a shard that is compared: `ENOUGH` if its weights vary, `ENOUGH_CONSTANT` otherwise."""


class EqualShards:
    """Finds replicated parameters that are declared sharded.

    `slots` returns numbers that a collective must sum over all ranks. If all shards of a parameter along an axis are
    bitwise equal, the parameter is probably replicated; `check` then raises an error.

    ``plan`` has parameter names, from `norm.plan_agreement.agree`. ``axes`` has for each entry the axes along which its
    shards are compared. (): the entry is not compared.
    """

    def __init__(self, plan: ReductionPlan, axes: Sequence[Sequence[str]], device: torch.device) -> None:
        self.plan, self.axes, self.device = plan, [tuple(of_entry) for of_entry in axes], device

    def slots(self, numbers: Tensor, weights: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
        """Return this rank's summands, 1-dim float64: three numbers per parameter name and mesh axis."""
        topology, names = self.plan.topology, len(self.plan.parameter_names)
        values = torch.zeros(names, len(topology.axes), WORDS + 1, dtype=torch.float64, device=self.device)
        mixed = splitmix64_finalizer(numbers[:, 0]) + numbers[:, 1]
        own = torch.full((), self.plan.rank + 1, dtype=torch.int64, device=self.device)
        for index, axes in enumerate(self.axes):
            if not axes:
                continue
            known = _can_compare(weights[index], gradients[index])
            number = own if known is None else torch.where(known.to(self.device), mixed[index], own)
            words = to_float_words(number)
            for axis in axes:
                sign = 1.0 - topology.size(axis) if self.plan.coordinate[axis] == 0 else 1.0
                slot = values[self.plan.parameter_slots[index], topology.axes.index(axis)]
                slot[:WORDS] += sign * words
                slot[WORDS] += 1
        return values.view(-1)

    def find(self, totals: Tensor) -> list[tuple[str, str]]:
        """Return (parameter name, axis) for each parameter whose compared shards along the axis are all equal."""
        values = totals.view(len(self.plan.parameter_names), len(self.plan.topology.axes), WORDS + 1)
        equal = (values[..., :WORDS] == 0).all(-1) & (values[..., WORDS] > 0)
        return [
            (self.plan.parameter_names[slot], self.plan.topology.axes[axis]) for slot, axis in equal.nonzero().tolist()
        ]

    def check(self, totals: Tensor) -> None:
        if found := self.find(totals):
            name, axis = found[0]
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            size = self.plan.topology.size(axis)
            raise ValueError(
                f"{name}{more} is declared sharded along axis {axis!r}, but all {size} shards are bitwise equal, in "
                f"weights and gradients, as replicas are; the norm would count it {size} times. Nothing was stepped. "
                f"If it is a replica, declare it without {axis!r}: P(), or a spec with its other axes. If each rank drew "
                "its shard from the same seed, draw the full tensor and take this rank's shard with "
                f"meshstep.parallel.shard, or use another seed per coordinate on {axis!r}. If the shards are equal on "
                "purpose, turn the comparison off: check_replicas=False"
            )


def _can_compare(weights: Tensor, gradient: Tensor | None) -> Tensor | None:
    """Return a 0-dim bool: False if the gradient is constant, or if the weights are constant and few.

    Return None if the gradient is None, is not a dense float tensor, or has fewer than `ENOUGH` elements.
    """
    if gradient is None or gradient.layout is not torch.strided or not gradient.is_floating_point():
        return None
    if gradient.numel() < ENOUGH:
        return None
    known = _varies(gradient)
    return known if gradient.numel() >= ENOUGH_CONSTANT else known & _varies(weights).to(known.device)


def _varies(tensor: Tensor) -> Tensor:
    """Return a 0-dim bool: True if ``tensor`` has at least two different values. False if an element is NaN."""
    low, high = torch.aminmax(tensor.detach())
    return high > low


# 64-bit hashes of tensors' bits, computed on the tensors' devices -----------------------------------------------------

# A tensor is read as words w_i: its elements as integers, where a 64-bit element gives two 32-bit words. The hash is
# ``sum of w_i r_i`` modulo 2^64, with fixed odd numbers r_i that depend on the position only. One flipped bit changes
# w_i by a power of two below 2^32, and the sum by an odd multiple of it. Such a change is never 0 modulo 2^64, so with
# ``exact`` one flipped bit is always detected. Any other difference cancels at most about once in 2^32. The worst case is a
# difference in the top bits of 32-bit words only.
#
# `splitmix64_finalizer`, a permutation of 64-bit integers, is then applied to the sum, so that differences of several
# replicas do not cancel each other. The result is split into two 32-bit numbers, because sums of such numbers over a
# million ranks are exact in float64.

CHUNK = 2**20  # maximum number of words that are read at a time, with 8 bytes each
SMALL = 2**14  # tensors with at most this many words are read together
WORDS = 2  # float64 numbers per hash
NONE = 0x2545F4914F6CDD1D  # the hash of a missing tensor
_INTEGERS = {1: torch.int8, 2: torch.int16}


class TensorHash:
    """Computes one 64-bit hash of the bits of each tensor, on the tensor's device.

    With ``exact``, all bits count. Otherwise all NaNs are equal, and -0 equals 0. All bits of 8-bit floats count in
    both cases.
    """

    def __init__(self, device: torch.device, exact: bool = False) -> None:
        self.device, self.exact = device, exact
        self._constants = Constants()

    def __call__(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return the hash of each tensor, [n] int64, on the device of this object. The hash of None is `NONE`."""
        sums = torch.full((len(tensors),), NONE, dtype=torch.int64, device=self.device)
        here = [(at, tensor.detach()) for at, tensor in enumerate(tensors) if tensor is not None]
        for device in sorted({tensor.device for _, tensor in here}, key=str):
            found = [(at, tensor) for at, tensor in here if tensor.device == device]
            places = [at for at, _ in found]
            values = self._hash_on_device([tensor for _, tensor in found], device)
            if device != self.device:
                values = values.to(self.device)
            if len(places) == len(tensors):
                return values
            sums[self._constants(("places", *places), places.copy, torch.int64, self.device)] = values
        return sums

    def _hash_on_device(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        flat = [tensor.reshape(-1) for tensor in tensors]
        table = _table(device, max(map(_words_in, flat)))
        sums = {at: self._hash_in_chunks(whole, table) for at, whole in enumerate(flat) if _words_in(whole) > SMALL}
        for batch in _batches(flat):
            found = self._hash_small([self._words(flat[at]) for at in batch], table)
            sums |= zip(batch, found.unbind(), strict=True)
        return torch.stack([sums[at] for at in range(len(flat))])

    def _hash_in_chunks(self, flat: Tensor, table: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        for number, part in enumerate(flat.split(CHUNK * flat.numel() // _words_in(flat))):
            words = self._words(part)
            total.add_(words.to(torch.int64).mul_(table[: len(words)]).sum(), alpha=odd(number))
        return total

    def _hash_small(self, words: Sequence[Tensor], table: Tensor) -> Tensor:
        """Return the hashes of small tensors, computed as differences of one running sum over the words of all tensors.

        This takes a few kernels in total instead of a few per tensor. The running sum is exact modulo 2^64.
        """
        ends = [0]
        for tensor_words in words:
            ends.append(ends[-1] + len(tensor_words))
        products = torch.cat([table[: len(tensor_words)] for tensor_words in words])
        products *= torch.cat([*words])
        running = torch.cat([products.new_zeros(1), products.cumsum(0)])
        return running[self._constants(("ends", *ends), ends.copy, torch.int64, table.device)].diff()

    def _words(self, flat: Tensor) -> Tensor:
        """Return the bits of ``flat`` as a 1-dim integer tensor.

        Unless `exact`, all NaNs get the same bits and -0 becomes 0 first, except in 8-bit floats.
        """
        if not self.exact and flat.is_floating_point() and flat.element_size() > 1:
            flat = flat + 0.0
            flat = torch.where(flat.isnan(), torch.full_like(flat, torch.nan), flat)
        return flat.view(_INTEGERS.get(flat.element_size(), torch.int32))


def _words_in(tensor: Tensor) -> int:
    return tensor.numel() * max(1, tensor.element_size() // 4)


def _batches(flat: Sequence[Tensor]) -> list[list[int]]:
    """Return batches of indices of the small tensors. A batch has at most `CHUNK` words, all of one integer dtype."""
    batches: list[list[int]] = []
    open_batches: dict[torch.dtype, tuple[list[int], int]] = {}
    for at, tensor in enumerate(flat):
        if (words := _words_in(tensor)) > SMALL:
            continue
        kind = _INTEGERS.get(tensor.element_size(), torch.int32)
        batch, full = open_batches.get(kind, ([], CHUNK + 1))
        if full + words > CHUNK:
            batch, full = [], 0
            batches.append(batch)
        batch.append(at)
        open_batches[kind] = batch, full + words
    return batches


def odd(number: int) -> int:
    return (number * 0x5851F42D4C957F2D >> 20 & 0x3FFFFFFF) << 1 | 1


_TABLES: dict[torch.device, Tensor] = {}  # cached, because making a table takes as long as hashing a small model


def _table(device: torch.device, words: int) -> Tensor:
    """Return a cached tensor with one odd number per position, for at least ``min(words, CHUNK)`` positions."""
    size = min(CHUNK, max(SMALL, 1 << (words - 1).bit_length()))
    table = _TABLES.get(device)
    if table is None or len(table) < size:
        table = _odd_numbers(torch.arange(size, device=device))
        if type(table) is Tensor:  # not cached: fake tensors of torch's FakeTensorMode, which have no values
            _TABLES[device] = table
    return table


def _odd_numbers(positions: Tensor) -> Tensor:
    """Return one pseudo-random odd 64-bit number per position.

    With numbers that grow by equal steps, differences at neighbouring positions could cancel.
    """
    return splitmix64_finalizer(positions + 1) << 1 | 1


def splitmix64_finalizer(numbers: Tensor) -> Tensor:
    """Return the splitmix64 finalizer of each int64 number: a permutation of the 64-bit integers that looks random."""
    for bits, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        numbers = (numbers ^ _shift_right(numbers, bits)) * factor
    return numbers ^ _shift_right(numbers, 31)


def _shift_right(numbers: Tensor, bits: int) -> Tensor:
    return (numbers >> bits) & ((1 << 64 - bits) - 1)


def to_float_words(sums: Tensor) -> Tensor:
    """Mix hashes, [...] int64, and return each as two integers below 2^32, [..., WORDS] float64. The map is one-to-one."""
    mixed = splitmix64_finalizer(sums)
    return torch.stack([mixed & 0xFFFFFFFF, _shift_right(mixed, 32)], dim=-1).double()
