"""Reduction of gradient buckets over ranks while backward still computes other gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from torch import Tensor

from ...parallel.mesh.agreement import gather_objects
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from ..norm.plan import ParameterEntry, ReductionPlan
from .buckets import Finish, InFlight, Reducible, keep_in_place, layout_kind, run_all, sync_axes


class BackwardReducer:
    """Reduces each gradient bucket once per micro-batch, if possible while backward still computes other gradients.

    Ranks may compute different gradients, in different orders, but must issue collectives in the same order. So buckets
    are reduced in a fixed order: a bucket whose gradients are computed waits until the reductions of all earlier buckets
    have started. The buckets that remain at the end of backward are reduced then, with zeros for gradients that are
    None.

    Args:
        eager: Buckets that are reduced during backward, in the order in which backward fills them.
        late: Buckets that are reduced after backward, in this order.
        in_flight: Maximum number of reductions that run at the same time. None: no limit. With 3, as soon as a third
            reduction has started, the device's compute stream waits for the oldest one. So it waits for bucket n when
            bucket n + 2 starts, and not already when bucket n + 1 starts.

    Attributes:
        late_grad: The parameter of an eager bucket that last got a gradient outside of `micro_batch`; None if there is
            no such parameter. A `micro_batch` that ends without an error sets it to None.
        came: True if any parameter of an eager bucket has ever got a gradient within `micro_batch`.
    """

    def __init__(
        self,
        name_of: Callable[[Tensor], str],
        eager: Sequence[Reducible],
        late: Sequence[Reducible],
        in_flight: int | None = 3,
    ) -> None:
        self._name_of, self._eager, self._late, self._in_flight = name_of, list(eager), list(late), in_flight
        self._bucket_of = {param: index for index, bucket in enumerate(self._eager) for param in bucket.params}
        self._is_open = self.came = False
        self.late_grad: Tensor | None = None
        # The hooks have a weak reference to this object, because the model must not keep a replaced optimizer alive.
        # Frozen parameters are excluded, because torch rejects hooks on them.
        trained = [param for param in self._bucket_of if param.requires_grad]
        self._hooks = [param.register_post_accumulate_grad_hook(_weak_hook(self)) for param in trained]

    @contextmanager
    def micro_batch(self, several: bool = False) -> Iterator[None]:
        """Return a context manager that reduces each bucket once, while its body runs backward or after the body.

        If the body raises an Exception, the remaining reductions are started but not finished. This rank has then issued
        all collectives of the micro-batch, so the next micro-batch begins with the first bucket on every rank.

        With ``several``, the body calls backward several times. A parameter may then get several gradients, so all
        buckets are reduced after the body.
        """
        self._waiting: list[set[Tensor | None]] = [
            {None} if several else {param for param in bucket.params if param.requires_grad} for bucket in self._eager
        ]
        self._next, self._exchanges, self._is_open = 0, InFlight(self._in_flight), True
        self._move_hooks_last()
        try:
            yield
        except Exception:
            self._is_open, self._exchanges = False, InFlight(None)
            with suppress(Exception):  # the exception of the body must reach the caller
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
            self.late_grad = param
            return
        self.came = True
        index = self._bucket_of[param]
        if index < self._next:
            raise RuntimeError(
                f"{self._name_of(param)} got a second gradient in one backward, after the first had been reduced "
                "(re-entrant activation checkpointing does that): use checkpoint(..., use_reentrant=False), or leave out "
                "overlap=True and Sharded(gradients=True), so that gradients are reduced after backward"
            )
        self._waiting[index].discard(param)
        while self._next < len(self._eager) and not self._waiting[self._next]:
            self._exchanges.run([self._eager[self._next].start])
            self._next += 1

    def _move_hooks_last(self) -> None:
        """Let hooks that a script registered later run first: a gradient that they change is reduced after the change."""
        for handle in self._hooks:
            hooks = handle.hooks_dict_ref()
            if hooks and handle.id in hooks and next(reversed(hooks)) != handle.id:
                # Remove the hook and insert it again, because torch ignores the order that OrderedDict.move_to_end sets.
                hooks[handle.id] = hooks.pop(handle.id)

    def reduce_now(self) -> None:
        """Reduce all buckets now. Call it on a rank that ran no `micro_batch` in this step."""
        run_all([bucket.start for bucket in (*self._eager, *self._late)], self._in_flight)

    def check_no_stray(self) -> None:
        """Raise RuntimeError if an eager bucket's parameter got a gradient since the last `micro_batch`.

        Such a gradient was not reduced over ranks, so replicas would diverge if it were applied.
        """
        if self.late_grad is not None:
            raise RuntimeError(
                f"{self._name_of(self.late_grad)} got a gradient outside of optimizer.backward, after the gradients of "
                "this step had been reduced: with overlap=True, call optimizer.backward(loss) for the last micro-batch "
                "before step()"
            )

    def keep_in_place(self) -> None:
        keep_in_place((*self._eager, *self._late))

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _weak_hook(reducer: BackwardReducer) -> Callable[[Tensor], None]:
    reference = weakref.ref(reducer)

    def hook(param: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive._arrived(param)

    return hook


class ArrivedGradients:
    """Records which of ``params`` got a gradient in backward, even if it was reduced or moved before backward ended.

    Parameters that are frozen at construction are left out.
    """

    def __init__(self, params: Mapping[int, Tensor]) -> None:
        self._watched = {index: param for index, param in params.items() if param.requires_grad}
        self._arrived = arrived = set[int]()
        # The hooks reference only the set. A reference to this object would keep it alive, and the hooks are removed when
        # it is garbage-collected.
        hooks = [
            param.register_post_accumulate_grad_hook(_adding(index, arrived)) for index, param in self._watched.items()
        ]
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks])

    def clear(self) -> None:
        self._arrived.clear()

    def missing(self) -> list[int]:
        return [index for index in self._watched if index not in self._arrived]


def _adding(index: int, indices: set[int]) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        indices.add(index)

    return hook


# Deadlocks between reductions during backward and the model's collectives ---------------------------------------------

# Backward may compute no gradient of a parameter on some ranks. Such a rank starts the reduction of the parameter's
# bucket only at the end of backward. Suppose that this rank, during backward, waits for a second rank in a collective of
# the model, while the second rank waits for the first rank in the reduction. That is a deadlock. So if a parameter may
# have a gradient on some of the ranks that take part in the same collectives of the model, and none on others, all
# reductions start at the end of backward. Ranks whose shards have unequal sizes fill different buckets, so buckets with
# the layouts of such shards are also reduced at the end of backward.


def model_meets_over_data(entries: Sequence[ParameterEntry], topology: Topology, *axes: str) -> bool:
    """Return True if the model may issue collectives between ranks of which only some have a gradient of a parameter.

    Ranks along ``axes``, and along data axes larger than 1, may have gradients of different parameters. The model is
    assumed to issue collectives over these axes, except over an axis that only divides the batch
    (`Topology.is_batch_only_axis`) and that no spec names.
    """
    named = {name for entry in entries for name in entry.spec.named_axes}
    axes = (*axes, *(axis for axis in topology.data_axes if topology.size(axis) > 1))
    return any(not topology.is_batch_only_axis(axis) or axis in named for axis in axes)


Sizes = tuple[tuple[str, int], ...]
"""(layout as `kind_of` returns it, number of elements) for each parameter of one rank, in order."""


def kind_of(entry: ParameterEntry, topology: Topology) -> str:
    """Return the entry's layout over the mesh as text; equal for parameters that may share a bucket."""
    return str(layout_kind(entry.spec, topology))


def sizes_of(entries: Iterable[ParameterEntry], topology: Topology) -> Sizes:
    return tuple((kind_of(entry, topology), entry.numel) for entry in entries)


def uneven_kinds(sizes: Sequence[Sizes], topology: Topology) -> frozenset[str]:
    """Return the layouts whose parameters differ in number, size or order between ranks of a pipeline stage.

    These ranks divide the parameters into different buckets. If the ranks of a stage still differ after parameters
    with these layouts are left out, for example in the order of parameters with different layouts, return all layouts of
    the ranks that differ.
    """
    within = [axis for axis in topology.axes if axis not in topology.pipe_axes]
    pairs = {(of_rank, sizes[topology.peers(rank, *within)[0]]) for rank, of_rank in enumerate(sizes)}
    others = {(one, other) for one, other in pairs if one != other}

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
    """A predicate of plan entries: True for a parameter whose gradient is reduced during backward.

    Such a parameter is trained, and its gradient is averaged over data-parallel axes and summed over no other axes. It
    is not a DTensor, because gradients of DTensors are reduced in the step. It has no owner ranks (``P(owned=...)``),
    because the other ranks do not have the parameter.

    With ``none``, no gradient is reduced during backward. ``uneven`` has layouts, as `kind_of` returns them, whose
    gradients are not reduced during backward.
    """

    plan: ReductionPlan
    none: bool = False
    uneven: frozenset[str] = frozenset()

    @classmethod
    def of(cls, plan: ReductionPlan, registry: ProcessGroupRegistry) -> Early:
        """Return the predicate for ``plan``, with ``none`` and ``uneven`` computed from all ranks' parameters.

        Collectives: an object all-gather.
        """
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
