"""The reduction plan of the global gradient norm. It is computed from the topology and the specs of the parameters.

Every distinct shard of a parameter must count exactly once in the norm, however many ranks hold a replica of it:

    total_norm^p = sum over parameters, over distinct shards, of ||shard||_p^p

The plan describes two ways to compute this sum.

``reduction="packed"``: every rank divides ||shard||_p^p of each shard by the number of ranks that hold the same shard
(its replication factor), and one all-reduce over all ranks sums the results.

``reduction="per_group"``: the parameters that are sharded over the same axes form a `NormBucket`. One all-reduce per
bucket sums ||shard||_p^p over these axes and over the pipeline axes, because pipeline stages hold different parameters.
For owned or tied parameters it also sums over the axes of the owner ranks or tied stages.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from types import GeneratorType
from typing import TypeVar

import torch
from torch import Tensor

from ...parallel.interop.local_parameters import has_dtensors, local_parameter
from ...parallel.layout.annotation import Annotation, annotation_of, attach
from ...parallel.layout.shard import Region
from ...parallel.layout.spec import Owned, P, owns
from ...parallel.mesh.deprecation import renamed_members
from ...parallel.mesh.text import aligned, some
from ...parallel.mesh.topology import Topology

# Entries --------------------------------------------------------------------------------------------------------------

_UNDECLARED = Annotation(P(), declared=False)


@dataclass(frozen=True)
class ParameterEntry:
    """The layout of one parameter on this rank.

        ParameterEntry("weight", P("tensor"), shape=(4, 8), full_shape=(8, 8))  # one of two shards

    Args:
        name: Name of the parameter.
        spec: How the parameter is sharded, replicated, partial, owned and tied.
        shape: Shape of this rank's shard.
        group: Index of the parameter's param group. Default: 0.
        dtype: Dtype of the parameter. Default: float32.
        averaged: The axes that gradient reduction leaves out: those of a DTensor's device mesh, and those over which
            optimizer states are sharded. The gradient is reduced over them elsewhere, or is equal along them. Default:
            none.
        trained: False: the parameter is frozen. Default: True.
        full_shape: Shape of the full tensor. If it was not declared, it is computed as if all shards were as large as
            this rank's. None (default): not known.
    """

    name: str
    spec: P
    shape: tuple[int, ...]
    group: int = 0
    dtype: torch.dtype = torch.float32
    averaged: tuple[str, ...] = ()
    trained: bool = True
    full_shape: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Return the number of elements that this rank holds."""
        return prod(self.shape)

    def region(self, topology: Topology, coordinate: dict[str, int]) -> Region | None:
        """Return the part of the full tensor that the rank at ``coordinate`` holds; None if `full_shape` is None.

        Raises:
            ValueError: A tensor of shape `full_shape` sharded by `spec` has no shard of shape `shape` at
                ``coordinate``.
        """
        if self.full_shape is None:
            return None
        return Region.of_shard(self.full_shape, self.shape, self.spec, topology, coordinate, self.name)


def entries_of(
    param_groups: Iterable[Iterable[Tensor | tuple[str, Tensor]]],
    topology: Topology,
    *,
    compared: bool = False,
    undeclared_are_replicas: bool = False,
) -> list[ParameterEntry]:
    """Return one entry per parameter of ``param_groups``.

    An undeclared plain parameter counts as replicated if no model axis is larger than 1; otherwise it is an error. The
    placements of a DTensor declare its layout over the axes of its mesh. An undeclared DTensor is an error if a model
    axis larger than 1 is not an axis of its mesh.

    With ``compared``, an undeclared plain parameter counts as replicated over the mesh axes of all DTensors among the
    parameters. With ``undeclared_are_replicas``, an undeclared parameter is never an error: it counts as replicated
    over all axes for which it has no placement. In both cases the caller must compare the replicas before the first
    step.
    """
    entries, undeclared = [], []
    param_groups = [list(params) for params in param_groups]
    meshed = _mesh_axes(param_groups, topology) if compared else set[str]()
    for group, params in enumerate(param_groups):
        for position, item in enumerate(params):
            given, param = item if isinstance(item, tuple) else (None, item)
            whole, param = param, local_parameter(param, topology)
            annotation = annotation_of(param) or _UNDECLARED
            name = (
                given or annotation.name or f"parameter {position} of group {group} ({_shape(param, annotation.spec)})"
            )
            check_dense_real(param, name)
            if topology.world_size > 1:
                check_not_flattened(whole, name)
            if not undeclared_are_replicas and _is_undeclared(whole, param, annotation, topology, meshed):
                undeclared.append(name)
            entries.append(
                ParameterEntry(
                    name,
                    annotation.spec_on(topology),
                    tuple(param.shape),
                    group,
                    param.dtype,
                    averaged=annotation.mesh_axes_on(topology),
                    trained=param.requires_grad,
                    full_shape=logical_shape(whole, annotation, topology),
                )
            )
    if undeclared:
        raise ValueError(
            f"no spec for {some(undeclared)}, and {topology!r} has model axes: say how each parameter is "
            "laid out with declare(model, {'name or pattern': P(...)}), P() meaning replicated (copy.deepcopy and "
            "wrappers drop specs: declare again after them)"
        )
    return entries


def frozen_without_spec(
    param_groups: Iterable[Iterable[tuple[str | None, Tensor]]], topology: Topology, *, compared: bool
) -> set[int]:
    """Return the `id` of each frozen parameter that `entries_of` would reject: without a spec, or of unsupported layout."""
    groups = [[param for _, param in pairs] for pairs in param_groups]
    frozen = [param for params in groups for param in params if not param.requires_grad]
    try:
        meshed = _mesh_axes(groups, topology) if compared and frozen else set[str]()
    except ValueError:  # the layout of a DTensor is not supported; a later call of `entries_of` raises this error
        return set()
    return {id(param) for param in frozen if _lacks_spec(param, topology, meshed)}


def _lacks_spec(param: Tensor, topology: Topology, meshed: set[str]) -> bool:
    try:
        local = local_parameter(param, topology)
    except ValueError:
        return True
    return _is_undeclared(param, local, annotation_of(local) or _UNDECLARED, topology, meshed)


def _is_undeclared(param: Tensor, local: Tensor, annotation: Annotation, topology: Topology, meshed: set[str]) -> bool:
    """Return True if the layout of ``param`` over some model axis is unknown.

    It is known if it is declared, if the parameter is a DTensor whose device mesh has the axis, or if the parameter is
    plain and the axis is in ``meshed``: the axes over which undeclared plain parameters count as replicated.

    ``local`` is ``param``, or its local tensor if it is a DTensor, and ``annotation`` belongs to it.
    """
    return bool({*annotation.silent_axes(topology)} - (meshed if param is local else set()))


def count_as_copies(params: Iterable[Tensor]) -> None:
    """Declare all undeclared plain parameters in ``params`` as replicated. Call it after `entries_of` accepted them."""
    for param in params:
        if annotation_of(param) is None and not has_dtensors((param,)):
            attach(param, Annotation(P(), source="default"))


def _mesh_axes(param_groups: Iterable[Iterable[Tensor | tuple[str, Tensor]]], topology: Topology) -> set[str]:
    params = [item[1] if isinstance(item, tuple) else item for params in param_groups for item in params]
    annotations = (annotation_of(local_parameter(param, topology)) for param in params if has_dtensors((param,)))
    return {axis for found in annotations if found is not None for axis in found.mesh_axes_on(topology)}


def logical_shape(param: Tensor, annotation: Annotation, topology: Topology) -> tuple[int, ...]:
    """Return the declared full shape of ``param``; if none was declared, compute it as if all shards had equal sizes.

    The shape of a DTensor is already full over the axes of its device mesh.
    """
    if annotation.full_shape is not None:
        return annotation.full_shape
    spec, known = annotation.spec_on(topology), annotation.mesh_axes_on(topology)
    if not spec.entries:
        return tuple(param.shape)
    return tuple(
        length * topology.size(*(axis for axis in spec.dim_axes(dim) if axis in topology.axes and axis not in known))
        for dim, length in enumerate(param.shape)
    )


def _shape(param: Tensor, spec: P) -> str:
    """Return the shape as text, with "sharded" for a sharded dim, because its size may differ between ranks."""
    sizes = ("sharded" if spec.dim_axes(dim) else str(size) for dim, size in enumerate(param.shape))
    return f"shape ({', '.join(sizes)})"


def check_unused(params: object) -> None:
    """Raise ValueError for an exhausted generator, whose parameters would be left out silently.

    Other empty iterables are accepted, because a pipeline stage may have no parameters.
    """
    if isinstance(params, GeneratorType) and params.gi_frame is None:
        raise ValueError(
            "params is an exhausted generator, which has no parameters left: give list(model.parameters()), "
            "or call model.parameters() again"
        )


def check_not_flattened(param: Tensor, name: str) -> None:
    """Raise TypeError if torch's `FullyShardedDataParallel` (FSDP1) has flattened and sharded the parameter.

    Such a parameter is a plain tensor without a mesh, so it would count as replicated.
    """
    if getattr(param, "_fsdp_flattened", False):
        raise TypeError(
            f"{name} is a flattened shard of FullyShardedDataParallel (FSDP1), which is not supported: shard the model "
            "with torch.distributed.fsdp.fully_shard instead"
        )


def check_dense_real(tensor: Tensor, name: str) -> None:
    if tensor.is_complex():
        raise TypeError(
            f"{name} is complex ({tensor.dtype}), which is not supported; use a real parameter, and "
            "torch.view_as_complex in forward"
        )
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} is sparse ({tensor.layout}); build the layer with sparse=False")


# The plan -------------------------------------------------------------------------------------------------------------

T = TypeVar("T")


@dataclass(frozen=True)
class NormBucket:
    """The layout over the mesh that all parameters of one norm bucket share. Their norms are reduced over the same ranks.

    ``reduction="per_group"`` issues one all-reduce per norm bucket. Packed norms, the default, do not use norm buckets.
    Gradient buckets, and buckets of sharded optimizer states, also group parameters by this layout.

        NormBucket.of(P("tensor"), Topology(data=2, tensor=2))  # reduced over the ranks of the axis "tensor"

    Args:
        distinct: The axes along which ranks hold different shards or, on pipeline axes, different parameters; in the
            topology's order. Default: none.
        owned: (axis, coordinate) or (axis, other axis) pairs that select the owner ranks, as in `P`. Other ranks do not
            hold the parameters. Default: all ranks hold them.
        tied: ``(axis, coordinates)`` pairs: the pipeline stages that hold the same tied parameter. Default: not tied.
    """

    distinct: tuple[str, ...] = ()
    owned: Owned = ()
    tied: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, spec: P, topology: Topology) -> NormBucket:
        """Return the norm bucket of a parameter with the layout ``spec``."""
        spec = spec.resolve(topology)
        tied = tuple((axis, spec.tied_coordinates(axis, topology)) for axis, _ in spec.tied)
        return cls(spec.distinct_axes(topology), spec.owned, tied)

    def axes(self, topology: Topology) -> tuple[str, ...]:
        """Return the axes of the bucket's all-reduce: all axes in ``distinct``, ``owned`` and ``tied``."""
        named = {*self.distinct, *dict(self.owned), *dict(self.tied)}
        return tuple(axis for axis in topology.axes if axis in named)

    def counts(self, coordinate: dict[str, int]) -> bool:
        """Return True if the rank at ``coordinate`` adds its shard's sum of |g|^p to the bucket's all-reduce.

        For an owned parameter only the owner ranks add it. For a tied parameter only the first of its stages adds it.
        """
        return owns(self.owned, coordinate) and all(coordinate[axis] == where[0] for axis, where in self.tied)

    def __lt__(self, other: NormBucket) -> bool:
        """Compare buckets by their fields, so that sorted buckets have the same order on all ranks."""
        return self._key() < other._key()

    def _key(self) -> tuple[object, ...]:
        return self.distinct, [(axis, isinstance(at, str), at) for axis, at in self.owned], self.tied

    def __str__(self) -> str:
        parts = [" x ".join(self.distinct)] if self.distinct else []
        parts += [f"{axis}={index} only" for axis, index in self.owned]
        parts += [f"tied {axis}={','.join(map(str, where))}" for axis, where in self.tied]
        return " ".join(parts) or "replicated"


@renamed_members(holders="num_replicas", weights="replica_weights", cut_over="sharded_over")
@dataclass(frozen=True)
class ReductionPlan:
    """The reduction plan of one rank: how gradients and the global norm are summed over ranks. It needs no process groups.

        entries = [ParameterEntry("weight", P("tensor"), shape=(4, 8)), ParameterEntry("bias", P(), shape=(8,))]
        print(ReductionPlan.of(entries, Topology(data=2, tensor=2), rank=0))

    Args:
        topology: The mesh.
        rank: The global rank that the plan describes.
        entries: The layouts of this rank's parameters, in the order of the gradients that will be measured.
        buckets: The norm buckets of this rank's parameters. In a plan that `meshstep.optim.norm.plan_agreement.agree`
            returned: the buckets of all ranks, equal on every rank.
        num_groups: Number of param groups; the largest number of any rank in a plan from `agree`. `of` does not count empty
            groups after the last group with an entry. Default: 1.
        counted: Number of elements of all parameters of the model, with replicas counted once. None (default): not
            known, because the plan is not from `agree`.
        parameter_names: Unique names of all logical parameters of the model. Empty (default) if ranks did not exchange
            names.
        parameter_slots: For each entry the index of its name in `parameter_names`. Empty (default) without names.
        parameter_shapes: Shape of the full tensor per logical parameter; None for a parameter whose full shape is not
            known, as with shards of unequal sizes without a declared full shape. Empty (default) without names.
        sharded_over: The axes over which optimizer-state sharding splits parameters. The entries then describe the
            resulting shards, which may be uneven. None (default): the entries describe parameters.
    """

    topology: Topology
    rank: int
    entries: tuple[ParameterEntry, ...]
    buckets: tuple[NormBucket, ...]
    num_groups: int = 1
    counted: int | None = None
    parameter_names: tuple[str, ...] = ()
    parameter_slots: tuple[int, ...] = ()
    parameter_shapes: tuple[tuple[int, ...] | None, ...] = ()
    sharded_over: tuple[str, ...] | None = None

    @classmethod
    def of(cls, entries: Iterable[ParameterEntry], topology: Topology, rank: int) -> ReductionPlan:
        """Return the plan of ``entries`` on ``rank``.

        Raises:
            ValueError: A spec does not fit its shape or the topology, or the spec does not place the parameter on ``rank``.
        """
        coordinate, given = topology.coordinate(rank), tuple(entries)
        kinds: dict[tuple[P, int], P] = {}  # thousands of parameters share a few specs; validate each spec once
        for entry in given:
            if (kind := (entry.spec, len(entry.shape))) not in kinds:
                entry.spec.validate(len(entry.shape), topology, entry.name)
                kinds[kind] = entry.spec.resolve(topology)
        entries = tuple(replace(e, spec=kinds[e.spec, len(e.shape)]) if topology.aliases else e for e in given)
        layouts: dict[P, NormBucket] = {}
        for entry in entries:
            if entry.spec.blocks:
                entry.region(topology, coordinate)  # raises if blocks do not fit
            if entry.spec in layouts:
                continue
            if not entry.spec.holds(coordinate, topology):
                raise ValueError(
                    f"{entry.name}: rank {rank} at {_coordinate(coordinate)} has this parameter, but {entry.spec} places "
                    "it on other ranks; build the parameter only on the ranks of its spec, or correct the spec"
                )
            layouts[entry.spec] = NormBucket.of(entry.spec, topology)
        buckets = tuple(sorted({*layouts.values()}))
        return cls(topology, rank, entries, buckets, max((entry.group for entry in entries), default=0) + 1)

    def groups(self, reduction: str) -> list[tuple[str, ...]]:
        """Return the axes of each process group that the model and the norm use, in the same order on every rank.

        The model uses one group per model axis that shards a parameter. With ``reduction="per_group"`` the norm uses
        one group per norm bucket, over `NormBucket.axes`. Groups that only gradient reduction or the norm's collective over
        all ranks uses are not included.
        """
        named = {axis for bucket in self.buckets for axis in bucket.distinct}
        summed = {bucket.axes(self.topology) for bucket in self.buckets if reduction == "per_group"}
        return sorted({(axis,) for axis in named & {*self.topology.model_axes}} | summed - {()})

    @cached_property
    def bucket_indices(self) -> tuple[int, ...]:
        """Return for each entry the index of its bucket in `buckets`."""
        index = {bucket: i for i, bucket in enumerate(self.buckets)}
        return self.for_each(lambda spec: index[NormBucket.of(spec, self.topology)])

    @cached_property
    def num_replicas(self) -> tuple[int, ...]:
        """Return for each entry the number of ranks that hold the same shard."""
        return self.for_each(lambda spec: spec.num_replicas(self.topology))

    @cached_property
    def replica_weights(self) -> tuple[float, ...]:
        """Return for each entry 1 / `num_replicas`: with ``reduction="packed"``, the factor on the entry's sum of |g|^p."""
        return tuple(1 / replicas for replicas in self.num_replicas)

    @cached_property
    def replica_places(self) -> tuple[tuple[int, int], ...]:
        """Return (n, N) for each entry: this rank has the n-th (from 0) of the N counted replicas of its shard.

        On a rank whose replica is not counted (`NormBucket.counts`) it is (-1, 1), for example on all tied stages except
        the first one.
        """

        def place(spec: P) -> tuple[int, int]:
            bucket, number, count = NormBucket.of(spec, self.topology), 0, 1
            if not bucket.counts(self.coordinate):
                return -1, 1
            named = bucket.axes(self.topology)
            for axis in self.topology.axes:
                if axis not in named:
                    size = self.topology.size(axis)
                    number, count = number * size + self.coordinate[axis], count * size
            return number, count

        return self.for_each(place)

    @property
    def are_first_replicas(self) -> tuple[bool, ...]:
        """Return for each entry whether this rank is the first of the ranks that hold the same shard."""
        return tuple(number == 0 for number, _ in self.replica_places)

    def pair_entries(self, items: Iterable[T]) -> Iterator[tuple[ParameterEntry, T]]:
        """Iterate over (entry, item) pairs. ``items`` has one item per entry, in the order of the entries."""
        return zip(self.entries, items, strict=True)

    def by_spec(self, answer: Callable[[P], T]) -> dict[P, T]:
        """Return a dict from each distinct spec of the entries to ``answer(spec)``."""
        return {spec: answer(spec) for spec in dict.fromkeys(entry.spec for entry in self.entries)}

    def for_each(self, answer: Callable[[P], T]) -> tuple[T, ...]:
        """Return ``answer(spec)`` for each entry; ``answer`` is called once per distinct spec."""
        answers = self.by_spec(answer)
        return tuple(answers[entry.spec] for entry in self.entries)

    @cached_property
    def coordinate(self) -> dict[str, int]:
        """Return this rank's coordinate per axis."""
        return self.topology.coordinate(self.rank)

    @cached_property
    def counted_numels(self) -> tuple[int, ...]:
        """Return for each entry the number of elements of the parameter, with replicas counted once.

        It is the number of elements of ``full_shape``. If this shape is unknown, or optimizer-state sharding splits the
        parameters, it is the number of local elements, times the number of ranks that hold a shard of the parameter,
        divided by the number of ranks that hold the same shard. That is exact if all shards have equal sizes.
        """
        ranks = self.by_spec(self._ranks_that_add)
        replicas = self.by_spec(lambda spec: spec.num_replicas(self.topology))
        return tuple(
            prod(entry.full_shape)
            if entry.full_shape is not None and self.sharded_over is None
            else entry.numel * ranks[entry.spec] // replicas[entry.spec]
            for entry in self.entries
        )

    def _ranks_that_add(self, spec: P) -> int:
        ranks, topology = 1, self.topology
        for axis in topology.axes:
            if axis in dict(spec.tied):
                ranks *= len(spec.tied_coordinates(axis, topology))
            elif axis not in dict(spec.owned) and (axis not in topology.pipe_axes or axis in spec.named_axes):
                ranks *= topology.size(axis)
        return ranks

    def warn_of_experts(self) -> None:
        """Warn if a mesh axis without a declared role shards experts but replicates other trained parameters.

        Gradients of the replicas are not averaged over such an axis. In each pipeline stage only the first rank warns.
        """
        topology = self.topology
        if any(index and axis not in topology.pipe_axes for axis, index in self.coordinate.items()):
            return
        for axis in topology.expert_axes_without_role:
            silent = [e for e in self.entries if e.trained and axis not in (*e.spec.named_axes, *e.averaged)]
            sharded = [e for e in self.entries if axis in e.spec.sharded_axes]
            if silent and sharded:
                warnings.warn(
                    f"axis {axis!r} shards {sharded[0].name} and replicates {silent[0].name}, but has no declared role: it "
                    "counts as a model axis, whose ranks see the same samples, and gradients of replicas are not averaged "
                    f"over it. If its ranks see different samples, replicas would diverge: write Topology(roles="
                    f"{{{axis!r}: 'data'}}, ...). If they see the same samples, write {{{axis!r}: 'model'}}",
                    stacklevel=2,
                )

    def check_numel(self, full: int) -> None:
        """Compare the number of elements in the plan with the number of elements of the dense model.

        Args:
            full: Number of elements of the dense model; if `counted` is None, of this pipeline stage of it only.
        Raises:
            ValueError: The numbers differ. The message lists the count of each parameter of this rank.
        """
        counted = self.counted if self.counted is not None else sum(self.counted_numels)
        if counted != full:
            rows = "\n".join(
                f"  {entry.name}: local {entry.shape}, {entry.spec}, counts {numel:,}"
                for entry, numel in self.pair_entries(self.counted_numels)
            )
            raise ValueError(
                f"the plan counts {counted:,} elements but the full model has {full:,}; correct the spec of a parameter "
                f"that is declared sharded but is full, or declared replicated but is a shard:\n{rows}"
            )

    def __str__(self) -> str:
        lines = [f"ReductionPlan of rank {self.rank} ({_coordinate(self.coordinate)}) over {self.topology!r}"]
        header = ("bucket", "group ranks", "weight", "parameters", "local numel", "counted numel")
        rows = [header, *(self._row(index, bucket) for index, bucket in enumerate(self.buckets))]
        lines += ["  " + line for line in aligned(rows, right=range(2, 6))]
        if in_blocks := sorted({repr(entry.spec) for entry in self.entries if entry.spec.blocks}):
            lines.append(f"in blocks: {', '.join(in_blocks)}")
        stage = " of this pipeline stage" if self.topology.size(*self.topology.pipe_axes) > 1 else ""
        if self.sharded_over is None:
            counted = sum(self.counted_numels)
            # `agree` drops the full shapes that it finds to differ between ranks
            uneven = self.counted is not None and any(e.full_shape is None and e.spec.entries for e in self.entries)
            basis = "as if all shards had this rank's size" if uneven else "as declared"
            lines.append(
                f"counts {counted:,} elements{stage}, {basis}; plan.check_numel(n) compares with a dense model of n"
            )
        else:
            over = " x ".join(map(repr, self.sharded_over))
            lines.append(
                f"shards of parameters over {over} (optimizer-state sharding), counted as if all had this rank's size"
            )
        if self.counted is not None:
            lines.append(
                f"agreed by all {self.topology.world_size} ranks, which count {self.counted:,} elements together"
            )
        return "\n".join(lines)

    def _row(self, index: int, bucket: NormBucket) -> tuple[str, ...]:
        mine = [i for i, at in enumerate(self.bucket_indices) if at == index]
        ranks = self.topology.peers(self.rank, *bucket.axes(self.topology))
        shown = ",".join(map(str, ranks[:8])) + (f",... ({len(ranks)})" if len(ranks) > 8 else "")
        weight = f"1/{self.num_replicas[mine[0]]}" if mine else "-"
        local, counted = sum(self.entries[i].numel for i in mine), sum(self.counted_numels[i] for i in mine)
        return str(bucket), shown, weight, f"{len(mine):,}", f"{local:,}", f"{counted:,}"


def _coordinate(coordinate: dict[str, int]) -> str:
    return ", ".join(f"{axis}={index}" for axis, index in coordinate.items()) or "alone"
