"""Reduce gradients bucket by bucket while backward makes more of them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from torch import Tensor

from ...parallel.mesh.agreement import gather_objects
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from ..norm.plan import ParameterEntry, ReductionPlan
from .buckets import Finish, Reducible, keep_in_place, layout_kind, sync_axes


class InFlight:
    """Starts exchanges in the order given and finishes them in the same, at most so many at a time.

    Args:
        most: Under way at a time; each holds a flat copy of its bucket. None: any number.
    """

    def __init__(self, most: int | None = 2) -> None:
        self.most = most
        self._started: deque[Finish] = deque()

    def run(self, starts: Iterable[Callable[[], Finish]], *, to_the_end: bool = False) -> None:
        """Start them, which may finish earlier ones; ``to_the_end``: then finish all."""
        for start in starts:
            self._started.append(start())
            if self.most is not None and len(self._started) >= self.most:
                self._started.popleft()()
        while to_the_end and self._started:
            self._started.popleft()()


def run_all(starts: Iterable[Callable[[], Finish]], most: int | None = 2) -> None:
    """Start exchanges, and finish them; ``most`` as for `InFlight`."""
    InFlight(most).run(starts, to_the_end=True)


class BackwardReducer:
    """Reduces each bucket once a micro-batch, as soon as all of its parameters have their gradients.

    Which gradients come, and in what order, may differ between ranks; the order of collectives must not. So buckets are
    reduced in the order given: one that is full waits for those before it, and what is left when backward ends, because
    some parameter got no gradient here, is reduced then, zeros in the place of what is missing.

    Args:
        name_of: The name of a parameter, for errors.
        eager: Buckets, in the order in which backward fills them.
        late: Buckets that are reduced after backward, in this order.
        in_flight: As for `InFlight`.

    Attributes:
        stray: A parameter that has got a gradient since the last reduction, if there is one.
        came: Some parameter has got a gradient, ever.
    """

    def __init__(
        self,
        name_of: Callable[[Tensor], str],
        eager: Sequence[Reducible],
        late: Sequence[Reducible],
        in_flight: int | None = 2,
    ) -> None:
        self._name_of, self._eager, self._late, self._in_flight = name_of, list(eager), list(late), in_flight
        self._bucket_of = {param: index for index, bucket in enumerate(self._eager) for param in bucket.params}
        self._is_open = self.came = False
        self.stray: Tensor | None = None
        # Weak, or the model would keep this optimizer alive after another has taken its place.
        trained = [param for param in self._bucket_of if param.requires_grad]  # torch refuses hooks on frozen ones
        self._hooks = [param.register_post_accumulate_grad_hook(_weak_hook(self)) for param in trained]

    @contextmanager
    def micro_batch(self, several: bool = False) -> Iterator[None]:
        """Around one backward, or ``several`` that add up: all buckets have been reduced when it ends.

        Nobody knows which of several is the last that a gradient gets, so all of it is reduced after them then.

        Where it raises, the rest of them is started all the same and nobody waits for it: a rank has done its part then,
        wherever its backward and those of other ranks have come to, and the next one begins at the first bucket everywhere.
        """
        self._waiting: list[set[Tensor | None]] = [
            {None} if several else {param for param in bucket.params if param.requires_grad} for bucket in self._eager
        ]
        self._next, self._exchanges, self._is_open = 0, InFlight(self._in_flight), True
        try:
            yield
        except Exception:
            self._is_open, self._exchanges = False, InFlight(None)
            with suppress(Exception):  # the first one says more
                self._exchanges.run(self._rest())
            raise
        finally:
            self._is_open = False
        self._exchanges.run(self._rest(), to_the_end=True)
        self.stray = None

    def _rest(self) -> Iterator[Callable[[], Finish]]:
        for bucket in (*self._eager[self._next :], *self._late):
            self._next += 1
            yield bucket.start

    def _arrived(self, param: Tensor) -> None:
        if not self._is_open:
            self.stray = param  # a backward that the optimizer was not told of: it waits for the step, or the next one
            return
        self.came = True
        index = self._bucket_of[param]
        if index < self._next:
            raise RuntimeError(
                f"{self._name_of(param)} got a second gradient in one backward, after the first had been reduced "
                "(re-entrant activation checkpointing does that): use checkpoint(..., use_reentrant=False), or reduce "
                "after backward, without Sharded(gradients=True) and overlap=True"
            )
        self._waiting[index].discard(param)
        while self._next < len(self._eager) and not self._waiting[self._next]:
            self._exchanges.run([self._eager[self._next].start])
            self._next += 1

    def reduce_now(self) -> None:
        """Reduce all buckets, where backward has not. Collectives: those of the buckets."""
        run_all([bucket.start for bucket in (*self._eager, *self._late)], self._in_flight)

    def check_no_stray(self) -> None:
        """Raise RuntimeError if gradients have come since they were reduced, which would count on this rank alone."""
        if self.stray is not None:
            raise RuntimeError(
                f"{self._name_of(self.stray)} got a gradient outside of optimizer.backward after those of the window had "
                "been reduced: with overlap=True call optimizer.backward for the last micro-batch of a window"
            )

    def keep_in_place(self) -> None:
        """Of all of its buckets."""
        keep_in_place((*self._eager, *self._late))

    def remove_hooks(self) -> None:
        """Leave the parameters' gradients alone from now on."""
        for hook in self._hooks:
            hook.remove()


def _weak_hook(reducer: BackwardReducer) -> Callable[[Tensor], None]:
    reference = weakref.ref(reducer)

    def hook(param: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive._arrived(param)

    return hook


# Whether gradients can be reduced while backward runs, among collectives that the model itself issues there -----------

# They are started when they have come, and wait for each other; where a rank lacks some, at the end of backward. So ranks
# that meet in the model must come to the same reductions on the way, or they may wait for each other in a circle: one in
# the model for another, which waits in a reduction for a third, which comes there only when it has met others in the
# model. Then all of them wait for the end of backward; where only pieces are uneven, those of their kinds.


def model_meets_over_data(entries: Sequence[ParameterEntry], topology: Topology, *axes: str) -> bool:
    """Whether the model may issue collectives over ``axes``, over which gradients are reduced, or over a data axis, whose
    ranks see other samples, and so may lack other gradients."""
    named = {name for entry in entries for name in entry.spec.named_axes}
    axes = (*axes, *(axis for axis in topology.data_axes if topology.size(axis) > 1))
    return any(not topology.only_splits_the_batch(axis) or axis in named for axis in axes)


Sizes = tuple[tuple[str, int], ...]
"""The kind of layout and the number of elements of each parameter of a rank, in order."""


def kind_of(entry: ParameterEntry, topology: Topology) -> str:
    """In words, one for each kind of layout."""
    return str(layout_kind(entry.spec, topology))


def sizes_of(entries: Iterable[ParameterEntry], topology: Topology) -> Sizes:
    """Of the parameters of these entries."""
    return tuple((kind_of(entry, topology), entry.numel) for entry in entries)


def uneven_kinds(sizes: Sequence[Sizes], topology: Topology) -> frozenset[str]:
    """The kinds of layout whose parameters ranks of one pipeline stage cut into other buckets; all, where what is left does
    not come in one order.

    Args:
        sizes: By rank.
    """
    within = [axis for axis in topology.axes if axis not in topology.pipe_axes]
    first = [sizes[topology.peers(rank, *within)[0]] for rank in range(len(sizes))]
    others = {(one, other) for one, other in zip(sizes, first, strict=True) if one != other}

    def differ(kinds: set[str]) -> bool:
        return any(
            [item for item in one if item[0] in kinds] != [item for item in other if item[0] in kinds]
            for one, other in others
        )

    kinds = {kind for pair in others for of_rank in pair for kind, _ in of_rank}
    uneven = {kind for kind in kinds if differ({kind})}
    return frozenset(kinds if differ(kinds - uneven) else uneven)


@dataclass(frozen=True)
class Early:
    """Which gradients the optimizer itself averages while backward runs: those of its own over data axes alone; not a
    DTensor's, which has its in the step only, nor those of owned parameters, which other ranks lack.

    Attributes:
        plan: Of the parameters.
        none: All wait for the end of backward.
        uneven: The kinds of layout that do.
    """

    plan: ReductionPlan
    none: bool = False
    uneven: frozenset[str] = frozenset()

    @classmethod
    def of(cls, plan: ReductionPlan, registry: ProcessGroupRegistry) -> Early:
        """Made by all ranks together. Collectives: an object all-gather."""
        early, topology = cls(plan), plan.topology
        sizes = sizes_of((entry for entry in plan.entries if early(entry)), topology)
        reports = gather_objects((sizes, model_meets_over_data(plan.entries, topology)), registry)
        uneven = uneven_kinds([sizes for sizes, _ in reports], topology)
        return cls(plan, any(meets for _, meets in reports), uneven)

    def __call__(self, entry: ParameterEntry) -> bool:
        topology, spec = self.plan.topology, entry.spec
        axes = sync_axes(spec, topology, True, entry.averaged)
        mine = entry.trained and not entry.averaged and not spec.owned
        waits = self.none or kind_of(entry, topology) in self.uneven
        return mine and not waits and bool(axes) and {*axes} <= {*topology.data_axes} - {*spec.named_axes}
