"""A table of the tensors that a `ParallelOptimizer` steps, with one row per tensor.

A parameter has up to four tensors in its row. In order, a backward writes ``leaf.grad``, ``grad_tensor.grad`` is reduced,
measured and clipped, the optimizer updates ``tensor``, and ``param`` has the weights that the model reads.

    model and options       leaf        param           tensor                    grad_tensor
    float32                 parameter   parameter       parameter                 parameter
    bfloat16                parameter   parameter       float32 master            master
    bfloat16 and Sharded    parameter   parameter       float32 master of shard   master of shard
    float32 DTensor         DTensor     local tensor    local tensor              local tensor

"shard" is this rank's part of the parameter's elements, 1-dim. A bfloat16 DTensor has a master of its local tensor. With
`Offloaded`, ``tensor`` is a copy in CPU memory, and ``grad_tensor`` is the tensor before the offload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import starmap

from torch import Tensor

from ...parallel.layout.shard import Region
from ...parallel.layout.spec import P
from ...parallel.mesh.deprecation import renamed_members
from .plan import ParameterEntry, ReductionPlan


@dataclass(frozen=True, eq=False)
class ParamPosition:
    """A position in the optimizer's param groups, and the tensor at this position.

    A parameter transform (`ParamTransform`), such as the one for master weights, replaces the model's parameters in the
    param groups by other tensors.

        for position in optimizer.stepped_tensors():  # `SteppedTensor` is a subclass
            print(position.name, tuple(position.tensor.shape))

    Args:
        index: Index of the model parameter, in the order in which the optimizer was given parameters.
        name: Name of the model parameter.
        param: This rank's shard of the model parameter; for a DTensor its local tensor.
        tensor: The tensor that the optimizer holds at this position.
        offset: Index of the first element of ``tensor`` in the flattened (row-major) ``param``. Default: 0.
        path: For each parameter transform the tensor at this position before the transform, in order. The first one is
            the tensor that the optimizer was given. Empty (default) before any transform.
    """

    index: int
    name: str
    param: Tensor
    tensor: Tensor
    offset: int = 0
    path: tuple[Tensor, ...] = field(default=(), repr=False)

    @property
    def leaf(self) -> Tensor:
        """Return the tensor that the optimizer was given, whose gradient backward writes."""
        return self.path[0] if self.path else self.tensor

    def replaced_by(self, tensor: Tensor, offset: int, is_param: bool) -> ParamPosition:
        """Return this position with ``tensor``, which begins at element ``offset`` of the flattened old tensor.

        With ``is_param``, the new tensor also replaces `param`.
        """
        param = tensor if is_param else self.param
        return replace(self, param=param, tensor=tensor, offset=self.offset + offset, path=(*self.path, self.tensor))


@renamed_members(piece="tensor")
@dataclass(frozen=True, eq=False)
class SteppedTensor(ParamPosition):
    """A tensor that the optimizer steps, and its place in the model. `ParamPosition` describes the other arguments.

        for row in optimizer.stepped_tensors():
            print(row.name, row.region)

    ``tensor`` is 1-dim if its optimizer state is sharded (`Sharded`), and has the parameter's shape otherwise. It is
    float32 if it is a master weight.

    Args:
        entry: Spec, shape and param group of the tensor whose gradient is measured (an entry of the `ReductionPlan` of
            all stepped tensors).
        model_entry: Spec, shape and param group of the model parameter (an entry of the plan of the model parameters).
        region: The part of the full tensor that ``tensor`` holds. None if it is not known, as with shards of unequal
            sizes without a declared full shape.
        grad_tensor: The tensor whose ``.grad`` is reduced, measured and clipped.
        replica_tensor: The tensor that ``check_replicas="first"`` and ``check_replicas=True`` compare with its replicas
            on other ranks: ``tensor``, or the tensor before CPU offload (a transform whose ``replica_dependent`` is True).
        num_replicas: Number of ranks that hold the same shard.
        logical_index: Index of the logical parameter's name in ``ReductionPlan.parameter_names``; None if ranks did not
            exchange parameter names.
    """

    entry: ParameterEntry = field(kw_only=True)
    model_entry: ParameterEntry = field(kw_only=True, repr=False)
    region: Region | None = field(kw_only=True)
    grad_tensor: Tensor = field(kw_only=True, repr=False)
    replica_tensor: Tensor = field(kw_only=True, repr=False)
    num_replicas: int = field(kw_only=True)
    logical_index: int | None = field(kw_only=True)

    @property
    def spec(self) -> P:
        """Return the layout of the stepped tensor over the mesh."""
        return self.entry.spec

    @property
    def group(self) -> int:
        """Return the index of the tensor's param group."""
        return self.entry.group

    @property
    def trained(self) -> bool:
        """Return True if the parameter required a gradient when it was added or, if later, at the last `refresh`."""
        return self.entry.trained


@dataclass(frozen=True)
class ParamTable:
    """The stepped tensors of this rank, in the order of the param groups.

    ``plan`` has one entry per row; ``model_plan``, the plan of the model parameters, has one entry per model parameter.
    """

    rows: tuple[SteppedTensor, ...]
    plan: ReductionPlan
    model_plan: ReductionPlan

    def __iter__(self) -> Iterator[SteppedTensor]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def grad_tensors(self) -> list[Tensor]:
        return [row.grad_tensor for row in self.rows]

    @cached_property
    def tensors(self) -> list[Tensor]:
        return [row.tensor for row in self.rows]

    def with_specs(self, spec_of: Callable[[SteppedTensor], P]) -> ParamTable:
        """Return a table with ``spec_of(row)`` as the spec of each row and plan entry. The plan's buckets are unchanged."""
        rows = tuple(replace(row, entry=replace(row.entry, spec=spec_of(row))) for row in self.rows)
        return replace(self, rows=rows, plan=replace(self.plan, entries=tuple(row.entry for row in rows)))

    def name_of(self, row: SteppedTensor) -> str:
        return row.name if row.logical_index is None else self.plan.parameter_names[row.logical_index]


def make_table(
    positions: Sequence[ParamPosition],
    grad_tensor_of: Callable[[ParamPosition], Tensor],
    replica_tensor_of: Callable[[ParamPosition], Tensor],
    plan: ReductionPlan,
    model_plan: ReductionPlan,
) -> ParamTable:
    """Return the table of the tensors at ``positions``.

    ``plan`` has one entry per position. The functions return `SteppedTensor.grad_tensor` and
    `SteppedTensor.replica_tensor` of a position.
    """
    num_replicas = plan.by_spec(lambda spec: spec.num_replicas(plan.topology))
    slots = model_plan.parameter_slots

    def row(entry: ParameterEntry, position: ParamPosition) -> SteppedTensor:
        model_entry = model_plan.entries[position.index]
        return SteppedTensor(
            position.index,
            position.name,
            position.param,
            position.tensor,
            position.offset,
            position.path,
            entry=entry,
            model_entry=model_entry,
            region=_region(position, model_entry, model_plan),
            grad_tensor=grad_tensor_of(position),
            replica_tensor=replica_tensor_of(position),
            num_replicas=num_replicas[entry.spec],
            logical_index=slots[position.index] if slots else None,
        )

    return ParamTable(tuple(starmap(row, plan.pair_entries(positions))), plan, model_plan)


def _region(position: ParamPosition, entry: ParameterEntry, plan: ReductionPlan) -> Region | None:
    """Return the stepped tensor's part of the full tensor; None if it is not known (see `SteppedTensor`)."""
    try:
        shard = entry.region(plan.topology, plan.coordinate)
    except ValueError:  # this rank's shard of the full shape is not the one that `torch.chunk` gives
        return None
    return None if shard is None else shard.run(position.offset, position.tensor.numel())
