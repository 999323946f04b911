"""The ``mpu`` that DeepSpeed and code in Megatron's style ask for ranks and groups, answered by a registry.

    mark_model_parallel(model.parameters(), registry)
    engine, *_ = deepspeed.initialize(model=model, mpu=ModelParallelUnit(registry), ...)
    check_engine(engine, registry)

Three kinds of axes by the topology's roles: *pipeline* (pipe), *tensor* (all model axes together: ``row x col`` is one
tensor-parallel group of DeepSpeed's) and *data*. *Model parallel* spans tensor x pipeline.

DeepSpeed reads one flag of a parameter, on each rank by itself: ``p.model_parallel``. What it counts in a norm are the
flagged parameters, and all of those on rank 0 of the group; the sum goes over the model-parallel group. One flag for all
ranks can't say that a bias is split over one axis of two and copied along the other (on a 2 x 2 grid the norm is 4% too
small or 10% too large). A flag that says "this rank is the one that counts this piece" makes the same code exact, where
it reads flags at all:

    config                                     optimizer within               reads them
    float32, stage 0                           the one that was given         yes
    ZeRO stages 1 and 2, any dtype             DeepSpeedZeroOptimizer         yes
    bfloat16, stage 1, float32 accumulation    BF16_Optimizer                 yes
    half precision, stage 0                    FP16_UnfusedOptimizer          no: the norm is 4% to 66% too small
    stage 3, FusedAdam in half precision       others                         not known here

`check_engine` refuses the last two. `meshstep.optim.ParallelOptimizer` can be the optimizer of a float32 stage 0
engine, which then only averages: give it ``data_parallel=Reduce(average_data=False)``, and the engine no
``gradient_clipping``. In half precision call `meshstep.optim.share_weights` before it is made: the engine gives data rank
0's weights to all, but masters are there by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..layout.annotation import annotation_of
from ..layout.spec import P
from ..mesh.agreement import on_all_ranks
from ..mesh.registry import ProcessGroupRegistry
from ..mesh.topology import Topology
from .local_parameters import has_dtensors, spec_of

_READ_FLAGS = ("DeepSpeedZeroOptimizer", "BF16_Optimizer")


class ModelParallelUnit:
    """Ranks, sizes and groups of a registry under the names of Megatron's ``mpu``.

    A kind of parallelism that the topology lacks has size 1, rank 0 and a group of this rank alone: never None, which
    torch takes for the whole world. It has no ``initialize_sequence_parallel``, whose presence makes DeepSpeed ignore
    model parallelism.

    Args:
        registry: Its groups are used; nothing is created before it is asked for. With ``torch.distributed`` initialised.
    Collectives, host reads: none, in any method.
    """

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        topology = registry.topology
        self.registry = registry
        self._pipe, self._data, self._tensor = topology.pipe_axes, topology.data_axes, topology.model_axes
        self._model = model_parallel_axes(topology)

    def get_model_parallel_rank(self) -> int:
        """This rank's index in its model-parallel group (tensor x pipeline)."""
        return self._rank(self._model)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Its model-parallel group."""
        return self._group(self._model)

    def get_model_parallel_world_size(self) -> int:
        """The size of its model-parallel group."""
        return self.registry.topology.size(*self._model)

    def get_tensor_model_parallel_rank(self) -> int:
        """This rank's index in its tensor-parallel group: all model axes."""
        return self._rank(self._tensor)

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        """Its tensor-parallel group."""
        return self._group(self._tensor)

    def get_tensor_model_parallel_world_size(self) -> int:
        """The size of its tensor-parallel group."""
        return self.registry.topology.size(*self._tensor)

    def get_pipeline_model_parallel_rank(self) -> int:
        """This rank's pipeline stage."""
        return self._rank(self._pipe)

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup:
        """The group of the stages of its pipeline."""
        return self._group(self._pipe)

    def get_pipeline_model_parallel_world_size(self) -> int:
        """The number of pipeline stages."""
        return self.registry.topology.size(*self._pipe)

    def get_data_parallel_rank(self) -> int:
        """This rank's index in its data-parallel group."""
        return self._rank(self._data)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Its data-parallel group."""
        return self._group(self._data)

    def get_data_parallel_world_size(self) -> int:
        """The size of its data-parallel group."""
        return self.registry.topology.size(*self._data)

    def get_data_parallel_group_ranks(self) -> list[int]:
        """The global ranks of its data-parallel group, ascending."""
        return list(self._ranks(self._data))

    def _rank(self, axes: tuple[str, ...]) -> int:
        return self.registry.rank(*axes) if axes else 0

    def _ranks(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        return self.registry.ranks(*axes) if axes else (self.registry.global_rank,)

    def _group(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        return self.registry.group_of(self._ranks(axes))


def model_parallel_axes(topology: Topology) -> tuple[str, ...]:
    """The axes of the model-parallel group, in topology order: all but the data axes."""
    return tuple(axis for axis in topology.axes if axis not in topology.data_axes)


def counts_piece(spec: P, coordinate: dict[str, int], topology: Topology) -> bool:
    """Whether, of the ranks of a model-parallel group that hold the same piece, the one at ``coordinate`` is the first."""
    spec = spec.on(topology)
    copies = [axis for axis in spec.replica_axes(topology) if axis in model_parallel_axes(topology)]
    return all(coordinate[axis] == 0 for axis in copies) and _is_first_of_tied(spec, coordinate, topology)


def mark_model_parallel(params: Iterable[Tensor], registry: ProcessGroupRegistry) -> None:
    """Set ``p.model_parallel`` so that DeepSpeed's own gradient norm and clipping are exact in any layout.

    A tied parameter also gets ``ds_pipe_replicated``: True but on the first stage that has it, which some of its norms ask
    for instead. Gradients must be complete (pending sums made, tied copies combined) when DeepSpeed measures them.

    Args:
        params: Declared parameters; plain ones.
    Raises:
        ValueError: A parameter has no spec, or is split over a data axis, over which DeepSpeed doesn't sum, or its
            gradient is a sum still to be made, which DeepSpeed doesn't make; nothing is changed.
    """
    topology, coordinate = registry.topology, registry.coordinate
    params = list(params)
    specs = [spec_of(param).on(topology) for param in params]
    for param, spec in zip(params, specs, strict=True):
        over = [axis for axis in topology.data_axes if axis in spec.sharded_axes]
        if over or has_dtensors((param,)):
            raise ValueError(
                f"{_name_of(param)} ({spec}) is {f'split over {over[0]!r}' if over else 'a DTensor'}, which DeepSpeed's "
                "norm can't count; use meshstep.optim.clip_grad_norm_, or let DeepSpeed shard it"
            )
        pending = [axis for axis in spec.partial if topology.size(axis) > 1]
        if pending:
            raise ValueError(
                f"{_name_of(param)} ({spec}) leaves backward with a sum over {pending[0]!r} still to be made, which "
                "DeepSpeed doesn't make: all-reduce the gradient in backward and declare it without partial=, or step with "
                "meshstep.optim.ParallelOptimizer, which makes it"
            )
    for param, spec in zip(params, specs, strict=True):
        param.model_parallel = counts_piece(spec, coordinate, topology)  # type: ignore[attr-defined]
        if spec.tied:
            param.ds_pipe_replicated = not _is_first_of_tied(spec, coordinate, topology)  # type: ignore[attr-defined]


def check_engine(engine: Any, registry: ProcessGroupRegistry) -> None:
    """Refuse an engine whose norm can't be that of the dense model, before it steps. On all ranks.

    Args:
        engine: As ``deepspeed.initialize`` returned it.
        registry: That of the layouts.
    Raises:
        ValueError: On every rank, with what to change: the engine was made without this registry's `ModelParallelUnit`; its
            optimizer reads no flags, or a parameter has none; it clips what `ParallelOptimizer` clips already.
    Collectives: an object all-gather over the world. Host reads: yes.
    """
    on_all_ranks(lambda: _check_engine(engine, registry), registry)


def _check_engine(engine: Any, registry: ProcessGroupRegistry) -> None:
    clips, inner = engine.gradient_clipping() > 0, engine.optimizer
    ours = isinstance(getattr(inner, "registry", None), ProcessGroupRegistry)
    if ours and clips:
        raise ValueError(
            f"gradient_clipping={engine.gradient_clipping()} clips what {type(inner).__name__} clips once more: leave it "
            "out of the config, and give max_norm="
        )
    if registry.topology.size(*model_parallel_axes(registry.topology)) == 1:
        return
    mpu = engine.mpu
    if not isinstance(mpu, ModelParallelUnit) or mpu.registry.topology != registry.topology:
        raise ValueError(
            "the engine has no mpu=ModelParallelUnit(registry): it has given every rank the weights of rank 0, also where "
            "they are other pieces, and averages gradients over all ranks. Initialise it with the mpu, from new weights"
        )
    if ours:
        return
    kind = type(inner).__name__
    if kind == "FP16_UnfusedOptimizer":
        raise ValueError(
            f"{kind} measures gradients, which don't have the parameters' flags, and counts those of rank 0 only: in half "
            'precision use "zero_optimization": {"stage": 1} or 2, or give ParallelOptimizer a float32 stage 0 engine'
        )
    known = kind in _READ_FLAGS or inner is engine.basic_optimizer
    if not known:
        raise ValueError(
            f"whether {kind} counts by flags is not known here: use stage 0, 1 or 2, or step with "
            "meshstep.optim.ParallelOptimizer"
        )
    unmarked = [name for name, param in engine.module.named_parameters() if not hasattr(param, "model_parallel")]
    if unmarked:
        raise ValueError(f"{unmarked[0]} has no flag: call mark_model_parallel(model.parameters(), registry)")


def _name_of(param: Tensor) -> str:
    annotation = annotation_of(param)
    return (annotation.name if annotation else None) or f"a parameter of shape {tuple(param.shape)}"


def _is_first_of_tied(spec: P, coordinate: dict[str, int], topology: Topology) -> bool:
    return all(coordinate[axis] == spec.tied_coordinates(axis, topology)[0] for axis, _ in spec.tied)
