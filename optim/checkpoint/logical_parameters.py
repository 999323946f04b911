"""The parameters of a model under names that mean the same on every rank and in every layout."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...parallel.interop.local import local_parameter
from ...parallel.layout.annotation import Annotation, annotation_of
from ...parallel.layout.pieces import Region
from ...parallel.mesh.agreement import on_all_ranks, on_all_ranks_with
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..norm.agreement import Summary, agree
from ..norm.entries import ParameterEntry, entries_of, logical_shape
from ..norm.plan import ReductionPlan


class LogicalParameters:
    """This rank's parameters and declared buffers, each with its logical name and what the rank has of it.

    Pipeline stages may use a name for different parameters: it is made unique by the stage then. Tied parameters have the
    name that the first rank gives them.

    Args:
        model: This rank's part of it.
    Raises:
        ValueError: On every rank, when one has an undeclared parameter, or ranks declare different things.
    Collectives: object all-gathers.

    Attributes:
        names: The names of all logical parameters of the model, the same on every rank.
        regions: (name, local tensor, region) of those that this rank holds.
        buffers: The persistent buffers that nothing declared, by their names in the model.
        buffer_names: Of all ranks' such buffers.
    """

    def __init__(self, model: nn.Module, registry: ProcessGroupRegistry) -> None:
        self.topology = registry.topology

        def declared() -> tuple[tuple[dict[str, Tensor], dict[str, Tensor], ReductionPlan], tuple[Summary, set[str]]]:
            buffers, held = _parameters_and_buffers(unwrapped(model))
            plan = self._plan(held, registry.global_rank)
            return (buffers, held, plan), (Summary.of(plan, names=True), set(buffers))

        (self.buffers, held, plan), everybody = on_all_ranks_with(declared, registry)
        plan = agree(plan, [summary for summary, _ in everybody], registry)
        self.names = plan.parameter_names
        self.buffer_names = {name for _, buffers in everybody for name in buffers}
        self._index: dict[int, int] = {}
        self.regions = on_all_ranks(lambda: self._regions(list(held.values()), plan), registry)
        self._first = [_is_first_holder(entry, plan) for entry in plan.entries]

    def _regions(self, held: list[Tensor], plan: ReductionPlan) -> list[tuple[str, Tensor, Region]]:
        regions: list[tuple[str, Tensor, Region]] = []
        for entry, slot, tensor in zip(plan.entries, plan.parameter_slots, held, strict=True):
            local = local_parameter(tensor, self.topology)
            self._index[id(tensor)] = self._index[id(local)] = len(regions)
            regions.append((self.names[slot], local.detach(), self._region(tensor, local, entry, plan)))
        return regions

    def _plan(self, held: dict[str, Tensor], rank: int) -> ReductionPlan:
        return ReductionPlan.of(entries_of([list(held.items())], self.topology), self.topology, rank)

    def _region(self, tensor: Tensor, local: Tensor, entry: ParameterEntry, plan: ReductionPlan) -> Region:
        """The region of ``local``; ValueError where it is not of the size that its spec makes."""
        full = logical_shape(tensor, annotation_of(local) or Annotation(entry.spec), self.topology)
        return Region.of_shard(full, local.shape, entry.spec, self.topology, plan.coordinate, entry.name)

    def writes(self) -> Iterator[tuple[str, Tensor, Region]]:
        """Those of `regions` that this rank contributes to a checkpoint: of tied copies only the first stage's."""
        return (held for held, first in zip(self.regions, self._first, strict=True) if first)

    def is_first(self, param: Tensor) -> bool:
        """Whether this rank contributes what belongs to a parameter to a checkpoint."""
        return self._first[self._find(param)]

    def of(self, param: Tensor) -> tuple[str, Region]:
        """Name and region of one of the model's parameters.

        Raises:
            ValueError: It is none of the model's.
        """
        name, _, region = self.regions[self._find(param)]
        return name, region

    def _find(self, param: Tensor) -> int:
        if id(param) not in self._index:
            annotation = annotation_of(param)
            label = (annotation.name if annotation else None) or "a parameter"
            raise ValueError(
                f"the optimizer steps {label} of shape {tuple(param.shape)}, which is not in the model; give the whole "
                "model whose parameters the optimizer was made with"
            )
        return self._index[id(param)]


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside of `DistributedDataParallel`, ``torch.compile`` and frameworks' wrappers, whose parameters have the
    plain names."""
    while True:
        within = (model._modules.get(name) for name in ("_orig_mod", "_forward_module"))
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif (inner := next((module for module in within if module is not None), None)) is not None:
            model = inner
        else:
            return model


def _parameters_and_buffers(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Undeclared persistent buffers; parameters and declared buffers."""
    params: dict[str, Tensor] = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    saved = model.state_dict(keep_vars=True)
    for name, value in saved.items():
        own_kind = name.endswith("_extra_state") and name not in params and name not in buffers
        if own_kind and not _is_nothing(value):
            raise ValueError(
                f"{name} is state of a kind of its own (get_extra_state), which can't be laid out anew; give it as extra="
            )
    persistent = {name: buffer for name, buffer in buffers.items() if name in saved}
    declared = {name: buffer for name, buffer in persistent.items() if annotation_of(buffer) is not None}
    return {name: b for name, b in persistent.items() if name not in declared}, {**params, **declared}


def _is_nothing(value: object) -> bool:
    """What layers say that could have state of their own and have none (those of Megatron and Transformer Engine)."""
    return value is None or (isinstance(value, Tensor) and value.numel() == 0)


def _is_first_holder(entry: ParameterEntry, plan: ReductionPlan) -> bool:
    """Tied copies on several stages may be cut into other pieces there, which can't be mixed."""
    tied = ((axis, entry.spec.tied_coordinates(axis, plan.topology)) for axis, _ in entry.spec.tied)
    return all(plan.coordinate[axis] == where[0] for axis, where in tied)
