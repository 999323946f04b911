"""What is summed over which ranks: (topology, specs) -> a pure, printable plan of the norm's reduction.

A parameter's distinct pieces are indexed by the axes that shard it and by the pipeline axes, where every coordinate
holds other parameters. Every distinct piece counts exactly once, whoever holds copies of it:

    total_norm^p = sum over parameters, over distinct pieces, of ||piece||_p^p

Two ways to sum that, both read off the plan. *Packed*: every rank adds its pieces, each divided by its number of
holders, and one all-reduce over the world makes the total. *Per group*, the textbook form: the parameters of one bucket
are all-reduced over exactly the axes that index their pieces.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from types import GeneratorType
from typing import TypeVar

import torch
from torch import Tensor

from ...parallel.interop.local_parameters import has_dtensors, local_parameter
from ...parallel.layout.annotation import Annotation, annotation_of, attach
from ...parallel.layout.regions import Region
from ...parallel.layout.spec import Owned, P, owns
from ...parallel.mesh.text import aligned, some
from ...parallel.mesh.topology import Topology

# Entries --------------------------------------------------------------------------------------------------------------

_UNDECLARED = Annotation(P(), declared=False)


@dataclass(frozen=True)
class ParameterEntry:
    """One parameter as this rank sees it: its name, spec, local shape, index of its param group, dtype, the axes over which
    its gradient needs no averaging any more when it comes to be synchronised, whether it is trained (not frozen), and the
    shape of the logical tensor, if every piece is as large as this rank's (None: not known)."""

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
        """Number of elements that this rank holds."""
        return prod(self.shape)


def entries_of(
    param_groups: Iterable[Iterable[Tensor | tuple[str, Tensor]]], topology: Topology, *, compared: bool = False
) -> list[ParameterEntry]:
    """The entries of param groups, given as parameters or (name, parameter) pairs.

    A parameter that nothing declared counts as replicated where no model axis is larger than 1, and is an error elsewhere.
    The placements of a DTensor declare it for the axes of its mesh. A plain parameter beside it that nothing declared is
    copied over these axes, if copies are compared.

    Args:
        compared: Copies, of parameters and gradients, are compared before anything is stepped.
    Raises:
        ValueError: Undeclared parameters, all of them named; a DTensor whose layout has no spec.
        TypeError: A complex or sparse parameter.
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
            if {*annotation.silent_axes(topology)} - (meshed if whole is param else set()):
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


def count_as_copies(params: Iterable[Tensor]) -> None:
    """Let plain parameters that nothing declared, of which `entries_of` has made entries, be declared as copied."""
    for param in params:
        if annotation_of(param) is None and not has_dtensors((param,)):
            attach(param, Annotation(P(), source="default"))


def _mesh_axes(param_groups: Iterable[Iterable[Tensor | tuple[str, Tensor]]], topology: Topology) -> set[str]:
    """The axes of the meshes of all DTensors."""
    params = [item[1] if isinstance(item, tuple) else item for params in param_groups for item in params]
    annotations = (annotation_of(local_parameter(param, topology)) for param in params if has_dtensors((param,)))
    return {axis for found in annotations if found is not None for axis in found.mesh_axes_on(topology)}


def logical_shape(param: Tensor, annotation: Annotation, topology: Topology) -> tuple[int, ...]:
    """Of the logical tensor; a DTensor knows its length along the axes of its mesh."""
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
    """The shape as far as it is the same on all ranks: pieces may be uneven."""
    sizes = ("sharded" if spec.dim_axes(dim) else str(size) for dim, size in enumerate(param.shape))
    return f"shape ({', '.join(sizes)})"


def check_unused(params: object) -> None:
    """Raise ValueError for a generator that is used up: the parameters that it had would be left out without a word.

    One that is empty for another reason, as on a pipeline stage without parameters, is accepted.
    """
    if isinstance(params, GeneratorType) and params.gi_frame is None:
        raise ValueError(
            "params is a generator that is used up, so that it has no parameters any more: give list(model.parameters()), "
            "or call model.parameters() again"
        )


def check_dense_real(tensor: Tensor, name: str) -> None:
    """Raise TypeError for a complex or sparse tensor: its norm is not defined here."""
    if tensor.is_complex():
        raise TypeError(f"{name} is complex ({tensor.dtype}); give its real view (torch.view_as_real) to the optimizer")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} is sparse ({tensor.layout}); build the layer with sparse=False")


# The plan -------------------------------------------------------------------------------------------------------------

T = TypeVar("T")


@dataclass(frozen=True)
class Bucket:
    """Parameters whose pieces are reduced over the same ranks.

    Args:
        distinct: The axes that index the pieces, in topology order.
        owned: As in `P`: pairs outside of which nobody holds the bucket's parameters.
        tied: ``(axis, coordinates)`` pairs whose coordinates hold copies of one logical parameter.
    """

    distinct: tuple[str, ...] = ()
    owned: Owned = ()
    tied: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, spec: P, topology: Topology) -> Bucket:
        """The bucket of a parameter laid out as ``spec``."""
        spec = spec.on(topology)
        tied = tuple((axis, spec.tied_coordinates(axis, topology)) for axis, _ in spec.tied)
        return cls(spec.distinct_axes(topology), spec.owned, tied)

    def axes(self, topology: Topology) -> tuple[str, ...]:
        """The axes of the bucket's all-reduce: those that index pieces, and those where somebody holds nothing."""
        named = {*self.distinct, *dict(self.owned), *dict(self.tied)}
        return tuple(axis for axis in topology.axes if axis in named)

    def counts(self, coordinate: dict[str, int]) -> bool:
        """Whether the rank at ``coordinate`` adds its piece in the textbook form (the first of tied copies does)."""
        return owns(self.owned, coordinate) and all(coordinate[axis] == where[0] for axis, where in self.tied)

    def __lt__(self, other: Bucket) -> bool:
        """One order on all ranks."""
        return self._key() < other._key()

    def _key(self) -> tuple[object, ...]:
        return self.distinct, [(axis, isinstance(at, str), at) for axis, at in self.owned], self.tied

    def __str__(self) -> str:
        parts = [" x ".join(self.distinct)] if self.distinct else []
        parts += [f"{axis}={index} only" for axis, index in self.owned]
        parts += [f"tied {axis}={','.join(map(str, where))}" for axis, where in self.tied]
        return " ".join(parts) or "replicated"


@dataclass(frozen=True)
class ReductionPlan:
    """The plan of one rank; needs no process.

    Args:
        topology: The mesh.
        rank: The global rank whose view this is.
        entries: This rank's parameters, in the order of the gradients that will be measured.
        buckets: The same list on every rank, whatever it holds: `meshstep.optim.norm.plan_agreement.agree` fills it in.
            Until then it is what this rank's own parameters need.
        num_groups: Number of param groups; the same on every rank once agreed.
        counted: Elements that all ranks count together, once agreed; None before.
        parameter_names: The names of all logical parameters of the model, once agreed with ``names=True``.
        parameter_slots: For each entry the index of its name in `parameter_names`.
        parameter_shapes: Of each of those the logical tensor's shape; None where ranks' pieces are not of equal sizes.
        cut_over: The axes over which parameters are cut into the pieces that the entries are; pieces may be uneven.
    """

    topology: Topology
    rank: int
    entries: tuple[ParameterEntry, ...]
    buckets: tuple[Bucket, ...]
    num_groups: int = 1
    counted: int | None = None
    parameter_names: tuple[str, ...] = ()
    parameter_slots: tuple[int, ...] = ()
    parameter_shapes: tuple[tuple[int, ...] | None, ...] = ()
    cut_over: tuple[str, ...] | None = None

    @classmethod
    def of(cls, entries: Iterable[ParameterEntry], topology: Topology, rank: int) -> ReductionPlan:
        """Plan the reduction of ``entries`` as ``rank`` sees it.

        Raises:
            ValueError: A spec does not fit its shape or the topology, or this rank may not hold the parameter.
        """
        coordinate, given = topology.coordinate(rank), tuple(entries)
        kinds: dict[tuple[P, int], P] = {}  # thousands of parameters have a few specs, each looked at once
        for entry in given:
            if (kind := (entry.spec, len(entry.shape))) not in kinds:
                entry.spec.validate(len(entry.shape), topology, entry.name)
                kinds[kind] = entry.spec.on(topology)
        entries = tuple(replace(e, spec=kinds[e.spec, len(e.shape)]) if topology.aliases else e for e in given)
        layouts: dict[P, Bucket] = {}
        for entry in entries:
            if entry.spec.blocks and entry.full_shape is not None:
                Region.of_shard(entry.full_shape, entry.shape, entry.spec, topology, coordinate, entry.name)
            if entry.spec in layouts:
                continue
            if not entry.spec.holds(coordinate, topology):
                raise ValueError(
                    f"{entry.name}: {entry.spec} says that rank {rank} at {_coordinate(coordinate)} does not hold it, "
                    "but it was given here; build it only where the spec says, or correct the spec"
                )
            layouts[entry.spec] = Bucket.of(entry.spec, topology)
        buckets = tuple(sorted({*layouts.values()}))
        return cls(topology, rank, entries, buckets, max((entry.group for entry in entries), default=0) + 1)

    def groups(self, reduction: str) -> list[tuple[str, ...]]:
        """The axes of groups that will be used, one list on every rank: each model axis that a spec names, by the model;
        and with ``reduction="per_group"`` those of each bucket, by the norm."""
        named = {axis for bucket in self.buckets for axis in bucket.distinct}
        summed = {bucket.axes(self.topology) for bucket in self.buckets if reduction == "per_group"}
        return sorted({(axis,) for axis in named & {*self.topology.model_axes}} | summed - {()})

    @cached_property
    def bucket_indices(self) -> tuple[int, ...]:
        """For each entry the index of its bucket in `buckets`."""
        index = {bucket: i for i, bucket in enumerate(self.buckets)}
        return self.for_each(lambda spec: index[Bucket.of(spec, self.topology)])

    @cached_property
    def num_replicas(self) -> tuple[int, ...]:
        """Return for each entry the number of ranks that hold the same shard."""
        return self.for_each(lambda spec: spec.holders(self.topology))

    @cached_property
    def replica_weights(self) -> tuple[float, ...]:
        """Return for each entry 1 / ``num_replicas``: the weight of a rank's power in the packed sum."""
        return tuple(1 / replicas for replicas in self.num_replicas)

    @property
    def holders(self) -> tuple[int, ...]:
        """Return ``num_replicas``. Deprecated."""
        warnings.warn("ReductionPlan.holders is called num_replicas now", DeprecationWarning, stacklevel=2)
        return self.num_replicas

    @property
    def weights(self) -> tuple[float, ...]:
        """Return ``replica_weights``. Deprecated."""
        warnings.warn("ReductionPlan.weights is called replica_weights now", DeprecationWarning, stacklevel=2)
        return self.replica_weights

    def for_each(self, answer: Callable[[P], T]) -> tuple[T, ...]:
        """``answer`` to the spec of each entry; asked once for each spec there is."""
        answers: dict[P, T] = {}
        for entry in self.entries:
            if entry.spec not in answers:
                answers[entry.spec] = answer(entry.spec)
        return tuple(answers[entry.spec] for entry in self.entries)

    @property
    def coordinate(self) -> dict[str, int]:
        """This rank's coordinate."""
        return self.topology.coordinate(self.rank)

    @cached_property
    def counted_numels(self) -> tuple[int, ...]:
        """For each entry the elements of this pipeline stage that the weighted sum counts: local elements x ranks that add
        them x weight."""
        ranks = self.for_each(self._ranks_that_add)
        return tuple(e.numel * n // h for e, n, h in zip(self.entries, ranks, self.num_replicas, strict=True))

    def _ranks_that_add(self, spec: P) -> int:
        ranks, topology = 1, self.topology
        for axis in topology.axes:
            if axis in dict(spec.tied):
                ranks *= len(spec.tied_coordinates(axis, topology))
            elif axis not in dict(spec.owned) and (axis not in topology.pipe_axes or axis in spec.named_axes):
                ranks *= topology.size(axis)
        return ranks

    def warn_of_experts(self) -> None:
        """Warn, on the first rank of a stage, where an expert axis of which nobody told the role shards some parameters and
        has copies of others, whose gradients are then not averaged over it."""
        topology = self.topology
        if any(index and axis not in topology.pipe_axes for axis, index in self.coordinate.items()):
            return
        for axis in topology.untold_expert_axes:
            silent = [e for e in self.entries if e.trained and axis not in (*e.spec.named_axes, *e.averaged)]
            sharded = [e for e in self.entries if axis in e.spec.sharded_axes]
            if silent and sharded:
                warnings.warn(
                    f"{axis!r} shards {sharded[0].name} and has copies of {silent[0].name}, but it has no role told: as a "
                    "model axis its ranks are taken to see the same samples, and gradients of copies are not averaged over "
                    f"it. Write Topology(roles={{{axis!r}: 'data'}}, ...) if they see different samples, in which case "
                    f"copies would drift apart; {{{axis!r}: 'model'}} if they see the same",
                    stacklevel=2,
                )

    def check_numel(self, full: int) -> None:
        """Compare with the dense model's number of elements; of this stage's part of it, before `agree`.

        Raises:
            ValueError: They differ; the text lists what each parameter counts.
        """
        counted = self.counted if self.counted is not None else sum(self.counted_numels)
        if counted != full:
            rows = "\n".join(
                f"  {entry.name}: local {entry.shape}, {entry.spec}, counts {numel:,}"
                for entry, numel in zip(self.entries, self.counted_numels, strict=True)
            )
            raise ValueError(
                f"the plan counts {counted:,} elements but the full model has {full:,}; a spec says shard where the "
                f"parameter is whole, or whole where it is a shard:\n{rows}"
            )

    def __str__(self) -> str:
        lines = [f"ReductionPlan of rank {self.rank} ({_coordinate(self.coordinate)}) over {self.topology!r}"]
        header = ("bucket", "group ranks", "weight", "parameters", "local numel", "counted numel")
        rows = [header, *(self._row(index, bucket) for index, bucket in enumerate(self.buckets))]
        lines += ["  " + line for line in aligned(rows, right=range(2, 6))]
        if in_blocks := sorted({repr(entry.spec) for entry in self.entries if entry.spec.blocks}):
            lines.append(f"in blocks: {', '.join(in_blocks)}")
        stage = " of this pipeline stage" if self.topology.size(*self.topology.pipe_axes) > 1 else ""
        if self.cut_over is None:
            counted = sum(self.counted_numels)
            lines.append(
                f"counts {counted:,} elements{stage}, as declared; plan.check_numel(n) compares with a dense model of n"
            )
        else:
            over = " x ".join(map(repr, self.cut_over))
            lines.append(f"pieces of parameters cut over {over}, counted as if all were as large as this rank's")
        if self.counted is not None:
            lines.append(
                f"agreed by all {self.topology.world_size} ranks, which count {self.counted:,} elements together"
            )
        return "\n".join(lines)

    def _row(self, index: int, bucket: Bucket) -> tuple[str, ...]:
        mine = [i for i, at in enumerate(self.bucket_indices) if at == index]
        ranks = self.topology.peers(self.rank, *bucket.axes(self.topology))
        shown = ",".join(map(str, ranks[:8])) + (f",... ({len(ranks)})" if len(ranks) > 8 else "")
        weight = f"1/{self.num_replicas[mine[0]]}" if mine else "-"
        local, counted = sum(self.entries[i].numel for i in mine), sum(self.counted_numels[i] for i in mine)
        return str(bucket), shown, weight, f"{len(mine):,}", f"{local:,}", f"{counted:,}"


def _coordinate(coordinate: dict[str, int]) -> str:
    return ", ".join(f"{axis}={index}" for axis, index in coordinate.items()) or "alone"
