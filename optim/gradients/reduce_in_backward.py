"""Reduce gradient buckets while backward computes further gradients."""

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
    """Starts reductions in a given order, finishes them in the same order, and limits the number of running ones.

    Args:
        most: Maximum number of running reductions; each holds a flat copy of its bucket. None: no limit. Default: 2.
    """

    def __init__(self, most: int | None = 2) -> None:
        self.most = most
        self._started: deque[Finish] = deque()

    def run(self, starts: Iterable[Callable[[], Finish]], *, to_the_end: bool = False) -> None:
        """Start reductions. Whenever `most` of them run, finish the oldest one.

        Args:
            starts: Each starts a reduction, and returns the function that finishes it.
            to_the_end: True: finish all reductions before returning. Default: False.
        """
        for start in starts:
            self._started.append(start())
            if self.most is not None and len(self._started) >= self.most:
                self._started.popleft()()
        while to_the_end and self._started:
            self._started.popleft()()


def run_all(starts: Iterable[Callable[[], Finish]], most: int | None = 2) -> None:
    """Start and finish all reductions, at most ``most`` at a time (None: no limit)."""
    InFlight(most).run(starts, to_the_end=True)


class BackwardReducer:
    """Reduces each gradient bucket once per micro-batch, as soon as backward has computed all of its gradients.

    Ranks may compute different gradients, in different orders, but must issue collectives in the same order. So buckets are
    reduced in the given order: a bucket whose gradients are complete waits for earlier buckets. At the end of backward, the
    remaining buckets are reduced, with zeros for missing gradients.

    Args:
        name_of: Returns the name of a parameter, for errors.
        eager: Buckets that are reduced during backward, in the order in which backward fills them.
        late: Buckets that are reduced after backward, in this order.
        in_flight: Maximum number of running reductions, as for `InFlight`. Default: 2.

    Attributes:
        late_grad: The last parameter that got a gradient outside of `micro_batch` since `micro_batch` last ended without an
            error. None: there is none.
        came: True once a parameter of an eager bucket has got a gradient inside of `micro_batch`.
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
        self.late_grad: Tensor | None = None
        # A weak reference, because the model's hooks must not keep a replaced optimizer alive.
        trained = [
            param for param in self._bucket_of if param.requires_grad
        ]  # torch rejects hooks on frozen parameters
        self._hooks = [param.register_post_accumulate_grad_hook(_weak_hook(self)) for param in trained]

    @contextmanager
    def micro_batch(self, several: bool = False) -> Iterator[None]:
        """Reduce each bucket once, while the body of the ``with`` statement runs backward, or after the body.

        If the body raises, the remaining reductions are started but not finished. So this rank has issued all collectives
        of the micro-batch, and the next micro-batch begins with the first bucket on every rank.

        Args:
            several: False (default): the body calls backward once. True: the body calls backward several times. Which
                gradient of a parameter is its last one is then not known, so all buckets are reduced after the body.
        """
        self._waiting: list[set[Tensor | None]] = [
            {None} if several else {param for param in bucket.params if param.requires_grad} for bucket in self._eager
        ]
        self._next, self._exchanges, self._is_open = 0, InFlight(self._in_flight), True
        try:
            yield
        except Exception:
            self._is_open, self._exchanges = False, InFlight(None)
            with suppress(Exception):  # the exception of the body is more useful
                self._exchanges.run(self._remaining())
            raise
        finally:
            self._is_open = False
        self._exchanges.run(self._remaining(), to_the_end=True)
        self.late_grad = None

    def _remaining(self) -> Iterator[Callable[[], Finish]]:
        for bucket in (*self._eager[self._next :], *self._late):
            self._next += 1
            yield bucket.start

    def _arrived(self, param: Tensor) -> None:
        if not self._is_open:
            self.late_grad = param  # from a backward outside of `micro_batch`; the next reduction must include it
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
        """Reduce all buckets now, for a backward that ran outside of `micro_batch`. Collectives: those of the buckets."""
        run_all([bucket.start for bucket in (*self._eager, *self._late)], self._in_flight)

    def check_no_stray(self) -> None:
        """Raise RuntimeError if a parameter got a gradient outside of `micro_batch`; see ``late_grad``.

        Without the error, only this rank would apply that gradient, and replicas would diverge.
        """
        if self.late_grad is not None:
            raise RuntimeError(
                f"{self._name_of(self.late_grad)} got a gradient outside of optimizer.backward after the window's "
                "gradients were reduced: with overlap=True call optimizer.backward for the last micro-batch of a window"
            )

    def keep_in_place(self) -> None:
        """Make the gradients of all buckets keep their addresses; see `Reducible`."""
        keep_in_place((*self._eager, *self._late))

    def remove_hooks(self) -> None:
        """Remove the hooks, so that backward reduces nothing any more."""
        for hook in self._hooks:
            hook.remove()


def _weak_hook(reducer: BackwardReducer) -> Callable[[Tensor], None]:
    reference = weakref.ref(reducer)

    def hook(param: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive._arrived(param)

    return hook


# Deadlocks between reductions during backward and the model's collectives ---------------------------------------------

# Ranks may lack different gradients. A rank that lacks a gradient starts the reduction of its bucket at the end of backward
# only. Suppose that this rank waits during backward for a second rank, in a collective of the model, while the second rank
# waits for the first one in the reduction. That is a deadlock. So if ranks that take part in the same collectives of the
# model may lack different gradients, all reductions start at the end of backward. If the ranks only have shards of unequal
# sizes, only the buckets with the layouts of these shards are reduced at the end of backward.


def model_meets_over_data(entries: Sequence[ParameterEntry], topology: Topology, *axes: str) -> bool:
    """Return True if the model may issue collectives over axes where ranks may lack different gradients.

    Ranks may lack different gradients along the data-parallel axes larger than 1, because they see different samples, and
    along ``axes``, over which gradients are reduced. The model may issue collectives over any such axis, except a
    batch-only axis (`Topology.is_batch_only_axis`) that no spec names.
    """
    named = {name for entry in entries for name in entry.spec.named_axes}
    axes = (*axes, *(axis for axis in topology.data_axes if topology.size(axis) > 1))
    return any(not topology.is_batch_only_axis(axis) or axis in named for axis in axes)


Sizes = tuple[tuple[str, int], ...]
"""(layout as text, number of elements) for each parameter of one rank, in order."""


def kind_of(entry: ParameterEntry, topology: Topology) -> str:
    """Return `layout_kind` of the entry as text."""
    return str(layout_kind(entry.spec, topology))


def sizes_of(entries: Iterable[ParameterEntry], topology: Topology) -> Sizes:
    """Return the layout and the number of elements of each entry."""
    return tuple((kind_of(entry, topology), entry.numel) for entry in entries)


def uneven_kinds(sizes: Sequence[Sizes], topology: Topology) -> frozenset[str]:
    """Return the layouts, as `kind_of` writes them, whose parameters differ in size between ranks of a pipeline stage.

    These ranks fill different buckets with the parameters. If the parameters of the other layouts do not have the same
    order on all ranks of a stage, return all layouts of the ranks that differ.

    Args:
        sizes: The result of `sizes_of` for each rank, by global rank.
        topology: The mesh.
    """
    within = [axis for axis in topology.axes if axis not in topology.pipe_axes]
    first = [sizes[topology.peers(rank, *within)[0]] for rank in range(len(sizes))]
    others = {(one, other) for one, other in zip(sizes, first, strict=True) if one != other}

    def differ(kinds: set[str]) -> bool:
        return any(
            [item for item in one if item[0] in kinds] != [item for item in other if item[0] in kinds]
            for one, other in others
        )

    kinds = {kind for pair in others for rank_sizes in pair for kind, _ in rank_sizes}
    uneven = {kind for kind in kinds if differ({kind})}
    return frozenset(kinds if differ(kinds - uneven) else uneven)


@dataclass(frozen=True)
class Early:
    """A predicate of plan entries: True for parameters whose gradients are reduced during backward.

    These are the trained parameters whose gradients are averaged over data-parallel axes and over no other axes. DTensors
    are excluded, because their gradients are reduced in the step. Parameters with owner ranks are excluded, because they do
    not exist on all ranks.

    Args:
        plan: The plan of the parameters.
        none: True: no gradient is reduced during backward. Default: False.
        uneven: Layouts, as `kind_of` writes them, whose gradients are not reduced during backward. Default: none.
    """

    plan: ReductionPlan
    none: bool = False
    uneven: frozenset[str] = frozenset()

    @classmethod
    def of(cls, plan: ReductionPlan, registry: ProcessGroupRegistry) -> Early:
        """Return the predicate that all ranks agree on. Collectives: an object all-gather."""
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
