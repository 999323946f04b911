"""Optimizer states, and gradients, sharded over a mesh axis: every rank of it steps its slice of the parameters.

    ZeRO-1    gradients of buckets --reduce-scatter--> slices, stepped --all-gather--> parameters
    ZeRO-2    the same, but each bucket is reduced as soon as backward has filled it, and its gradients are freed

An all-reduce is a reduce-scatter and an all-gather, so no more travels than with replicated data parallelism, while the
step's work and the optimizer's memory are divided by the size N of the axis: of optimizer states and masters a rank keeps
1 / N, up to a few elements a bucket.

Reference: Rajbhandari et al. 2019, "ZeRO", arXiv:1910.02054.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...amp.casting import is_half
from ...parallel.layout.annotation import annotate
from ...parallel.layout.spec import P
from ...parallel.mesh.agreement import gather_objects
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology, default_role
from ..gradients.during_backward import BackwardReducer
from ..gradients.flat import FlatBucket, flat_buckets
from ..gradients.sync import BUCKET_BYTES, sync_axes
from ..norm.plan import Bucket, ParameterEntry, ReductionPlan, entries_of
from .bucket import Exchanges, ShardedBucket
from .stepped_weights import Origin, SteppedWeights, move_state, origins_of, other_layout, replaced


@dataclass(frozen=True)
class Sharding:
    """How optimizer states are sharded.

    Args:
        axis: Over its ranks.
        gradients: The gradients too (ZeRO-2).
        average_data: As for `GradientSync`.
        main_grads: Half-precision parameters have float32 gradients.
    """

    axis: str
    gradients: bool = False
    average_data: bool = True
    main_grads: bool = False


class ShardedWeights(SteppedWeights):
    """Puts this rank's pieces of the parameters in their place in the param groups of an optimizer.

    Sharded are all parameters that require gradients and are the same on all ranks of the axis. Those stay whole that the
    axis shards already, that only one coordinate owns or that are tied over it; DTensors too, with sharded gradients.

    A piece is 1-dim and has its parameter's name and a spec that names the axis, so plans, norms and clipping need no
    exception for it. It shares the parameter's memory, unless that is not contiguous; where the precision has masters, they
    are made of pieces. Right for optimizers that treat every element alike, whatever tensor it is in.

    Args:
        optimizer: It may have stepped already. Its param groups and state are changed in place.
        registry: The groups.
        sharding: Over which axis, and what.
        make_whole: Makes the weights that step the pieces, from the optimizer that holds them.
    Raises:
        ValueError: On every rank: two ranks of the axis would shard different parameters.
    Collectives: here, an object all-gather; `collect` and `micro_batch`, one reduce-scatter a bucket of 32 MiB of
    gradients that the axis still has to sum; `step` and `synchronize`, one all-gather a bucket. Host reads: none.
    Memory besides the slices: flat copies of two buckets, during these.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        registry: ProcessGroupRegistry,
        sharding: Sharding,
        make_whole: Callable[[], SteppedWeights],
    ) -> None:
        self.registry, self.sharding = registry, sharding
        self._buckets: list[ShardedBucket] = []
        self._late: list[ShardedBucket] = []
        self._norm_buckets: set[Bucket] = set()
        self._model_uses_axis = False
        self._names: dict[Tensor, str] = {}
        self._count = 0
        self._collected = False
        pieces, origins = self._shard(optimizer.param_groups)
        for param, new in pieces.items():
            move_state(optimizer, param, new)
        for group in optimizer.param_groups:
            group.update(_with_pieces(group, pieces))
        self._whole = make_whole()
        super().__init__(optimizer, origins, self._whole)
        self._reducer = self._make_reducer()

    # Layout ----------------------------------------------------------------------------------------------------------

    def _shard(
        self, groups: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[Tensor, list[tuple[Tensor, int]]], list[Origin]]:
        """Make the buckets and pieces of these groups, which come after those that there are.

        Returns:
            The (piece, offset) pairs, at most one, of each parameter that is sharded; the origins of all that the groups
            hold when pieces have taken their place.
        """
        whole, topology = origins_of(groups, self._count), self.registry.topology
        named: list[Tensor | tuple[str, Tensor]] = [(origin.name, origin.param) for origin in whole]
        entries = entries_of([named], topology)
        planned = _layouts([origin.param for origin in whole], entries, self.registry, self.sharding)
        chosen = {index for _, layout in planned for index in layout.indices}
        self._agree(entries, chosen)
        self._count += len(whole)
        self._names |= {whole[index].param: entries[index].name for index in chosen}
        pieces: dict[Tensor, list[tuple[Tensor, int]]] = {whole[index].param: [] for index in chosen}
        for summed, layout in planned:
            bucket = self._make_bucket([whole[index].param for index in layout.indices], layout, summed)
            for segment, piece in zip(bucket.segments, bucket.pieces, strict=True):
                index = layout.indices[segment.position]
                annotate(piece, piece_spec(entries[index].spec, self.sharding.axis), entries[index].name)
                pieces[whole[index].param].append((piece, segment.start))
        origins = [
            replace(origin, offset=offset)
            for origin in whole
            for _, offset in pieces.get(origin.param, [(origin.param, 0)])
        ]
        return pieces, origins

    def _make_bucket(self, params: list[Tensor], layout: FlatBucket, summed: bool) -> ShardedBucket:
        sharding = self.sharding
        for param in params:
            if sharding.main_grads and is_half(param):
                gradient, param.grad = param.grad, None
                param.grad_dtype = torch.float32
                param.grad = None if gradient is None else gradient.float()
        dtype = _grad_dtype(params[0], sharding)
        bucket = ShardedBucket(params, layout, self.registry, sharding.axis, summed, dtype)
        # Where a model is split over the axis, backward may issue collectives of its own, among which ours must not come.
        early = not summed or not self._model_uses_axis
        (self._buckets if early else self._late).append(bucket)
        return bucket

    def _agree(self, entries: list[ParameterEntry], chosen: set[int]) -> None:
        """Add to the buckets of the norm those of all ranks, and compare what the ranks of the axis shard."""
        axis, topology = self.sharding.axis, self.registry.topology
        specs = [piece_spec(e.spec, axis) if i in chosen else e.spec for i, e in enumerate(entries)]
        mine = {Bucket.of(spec, topology) for spec in specs}
        uses_axis = default_role(axis) != "data" or any(axis in entry.spec.named_axes for entry in entries)
        reports = gather_objects((mine, [entries[index].name for index in sorted(chosen)], uses_axis), self.registry)
        self._model_uses_axis |= any(uses for _, _, uses in reports)
        for rank, (_, names, _) in enumerate(reports):
            first = topology.peers(rank, axis)[0]
            if names != reports[first][1]:
                differ = sorted({*names} ^ {*reports[first][1]})
                raise ValueError(
                    f"ranks {first} and {rank} would shard different parameters over {axis!r}, {', '.join(differ[:5])} on "
                    "only one of them: freeze the same parameters on all ranks before making the optimizer"
                )
        self._norm_buckets.update(*(buckets for buckets, _, _ in reports))

    def _make_reducer(self) -> BackwardReducer | None:
        if not self.sharding.gradients:
            return None
        return BackwardReducer(self._names, self._buckets, self._late)

    @property
    def _all_buckets(self) -> list[ShardedBucket]:
        return self._buckets + self._late

    def derive(self, plan: ReductionPlan) -> ReductionPlan:
        """The plan of the pieces: its buckets are summed over the axis too."""
        axis = self.sharding.axis
        sharded = {param for bucket in self._all_buckets for param in bucket.params}
        entries = []
        for origin, piece in zip(self._origins, self.measured(), strict=True):
            entry = plan.entries[origin.index]
            if origin.param in sharded:
                averaged = (*entry.averaged, axis)  # if it is a data axis at all: by the bucket, or by torch before
                entry = replace(entry, spec=piece_spec(entry.spec, axis), shape=tuple(piece.shape), averaged=averaged)
            entries.append(entry)
        slots = tuple(plan.parameter_slots[o.index] for o in self._origins) if plan.parameter_slots else ()
        buckets = tuple(sorted(self._norm_buckets))
        return replace(plan, entries=tuple(entries), buckets=buckets, parameter_slots=slots, cut_over=axis)

    def measured(self) -> list[Tensor]:
        """As everywhere: pieces, or their masters."""
        return self._whole.measured()

    def compared(self) -> list[Tensor]:
        """As everywhere: pieces, or their masters."""
        return self._whole.compared()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, sharded like the others. Collectives: an object all-gather."""
        pieces, origins = self._shard([param_group])
        self._whole.add_param_group({**param_group, **_with_pieces(param_group, pieces)})
        self._origins += origins
        if self._reducer is not None:
            self._reducer.remove_hooks()
            self._reducer = self._make_reducer()

    # The step --------------------------------------------------------------------------------------------------------

    def micro_batch(self) -> AbstractContextManager[None]:
        """Around one backward. With sharded gradients every bucket is reduced into this rank's slice, where micro-batches
        add up, and the parameters have no gradients afterwards.

        Raises:
            RuntimeError: The gradients of the window before have not been cleared.
        """
        if self._reducer is None:
            return nullcontext()
        self._check_cleared()
        return self._reducer.micro_batch()

    def _check_cleared(self) -> None:
        if self._collected:
            raise RuntimeError(
                "the gradients of the last window are still there, reduced, and can't be added to: call zero_grad() after "
                "every step (and after clipping, if more micro-batches are to come)"
            )

    @torch.no_grad()
    def collect(self, averaged: bool = True) -> None:
        """Reduce the gradients, as far as backward has not, and give each piece its part.

        Raises:
            RuntimeError: With sharded gradients: they have been collected, and not cleared; or a micro-batch went past
                `micro_batch`, in a window in which another did not.
        """
        self._refresh()
        if self._reducer is None:
            for bucket in self._all_buckets:
                bucket.gradients = [None] * len(bucket.pieces)  # the parameters' gradients hold all of the window
            summed = not averaged and self.sharding.axis in self.registry.topology.data_axes
            Exchanges.run(partial(bucket.reduce, summed=summed) for bucket in self._all_buckets)
        else:
            self._check_cleared()
            self._reducer.reduce_rest()
        self._collected = True
        for bucket in self._all_buckets:
            for piece, gradient in zip(bucket.pieces, bucket.gradients, strict=True):
                piece.grad = gradient
        self._whole.collect()

    def _refresh(self) -> None:
        """See what was written to the model's parameters since the last step."""
        for bucket in self._all_buckets:
            bucket.refresh()

    def step(self, update: Callable[[], object]) -> None:
        """Step the pieces, and bring them together in the model's parameters; a skipped step changes nothing."""
        self._whole.step(update)
        self.synchronize()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Bring all ranks' pieces together in the model's parameters."""
        Exchanges.run(bucket.gather for bucket in self._all_buckets)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the pieces and of the model's parameters."""
        self._whole.zero_grad(set_to_none)
        for bucket in self._all_buckets:
            bucket.forget_gradients(set_to_none)
        self._collected = False
        if self._reducer is not None:
            self._reducer.micro_batches = 0

    # Saving ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The masters' slices, if there are any, and under ``"shards"`` how they were cut."""
        return {"shards": self._cut(), **self._whole.state_dict()}

    def _cut(self) -> dict[str, Any]:
        cut = [(origin.offset, piece.numel()) for origin, piece in zip(self._origins, self.measured(), strict=True)]
        return {"axis": self.sharding.axis, "size": self.registry.size(self.sharding.axis), "pieces": cut}

    def check_layout(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the state is of optimizer states that were sharded in another way, or not at all."""
        saved, own = state.get("shards"), self._cut()
        if saved != own:
            raise other_layout(saved, own)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the slices on this rank; `synchronize` must follow, on all.

        Raises:
            ValueError: They were cut in another way; nothing is changed.
        """
        self.check_layout(state)
        self._refresh()  # the model may have been loaded before; masters, if there are any, then have the last word
        self._whole.load_state_dict({key: value for key, value in state.items() if key != "shards"})


def piece_spec(spec: P, axis: str) -> P:
    """The spec of a piece of a parameter laid out as ``spec``: 1-dim, and sharded over ``axis`` as well."""
    partial = tuple(name for name in spec.partial if name != axis)
    return P((*spec.sharded_axes, axis), partial=partial, owned=dict(spec.owned), tied=dict(spec.tied))


def _with_pieces(group: Mapping[str, Any], pieces: Mapping[Tensor, list[tuple[Tensor, int]]]) -> dict[str, Any]:
    """The ``params``, and ``param_names`` if there are any, of a group with the pieces in it."""
    return replaced(group, lambda param: [piece for piece, _ in pieces[param]] if param in pieces else [param])


def _layouts(
    params: Sequence[Tensor], entries: Sequence[ParameterEntry], registry: ProcessGroupRegistry, sharding: Sharding
) -> list[tuple[bool, FlatBucket]]:
    """(whether the axis sums the gradients, layout) of each bucket, in the order in which backward fills them.

    Ranks that hold replicas of a parameter must cut it in the same places, whatever else they hold: so only parameters that
    are held by the same ranks share a bucket.
    """
    topology, axis = registry.topology, sharding.axis
    together: dict[tuple[bool, Bucket, torch.dtype, str], list[int]] = {}
    for index, (param, entry) in enumerate(zip(params, entries, strict=True)):
        if can_shard(param, entry, sharding, topology):
            summed = axis in sync_axes(entry.spec, topology, sharding.average_data, entry.averaged)
            key = (summed, Bucket.of(entry.spec, topology), param.dtype, str(param.device))
            together.setdefault(key, []).append(index)
    planned = []
    for (summed, *_), indices in together.items():
        bucket_numel = BUCKET_BYTES // _grad_dtype(params[indices[0]], sharding).itemsize
        numels = [params[index].numel() for index in indices]
        planned += [(summed, layout) for layout in flat_buckets(indices, numels, registry.size(axis), bucket_numel)]
    return sorted(planned, key=lambda item: -item[1].indices[-1])


def can_shard(param: Tensor, entry: ParameterEntry, sharding: Sharding, topology: Topology) -> bool:
    """Whether all ranks of the axis hold, and step, the same parameter.

    The gradients of a DTensor are its own until the step, so they can't be taken from backward.
    """
    spec = entry.spec
    taken = {*spec.distinct_axes(topology), *dict(spec.owned), *dict(spec.tied)}
    reachable = not (sharding.gradients and entry.averaged)
    return param.requires_grad and param.numel() > 0 and reachable and sharding.axis not in taken


def _grad_dtype(param: Tensor, sharding: Sharding) -> torch.dtype:
    return torch.float32 if sharding.main_grads and is_half(param) else param.dtype
