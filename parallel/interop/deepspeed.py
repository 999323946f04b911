"""DeepSpeed on a registry's process groups: an ``mpu`` object like Megatron's, and flags for exact gradient norms.

    mark_model_parallel(model.parameters(), registry)
    engine, *_ = deepspeed.initialize(model=model, mpu=ModelParallelUnit(registry), config=config)
    check_engine(engine, registry)

DeepSpeed uses four process groups of a rank. The roles of the topology's axes determine them:

    pipeline-parallel    along the axes with role "pipe"
    data-parallel        along the axes with role "data"
    tensor-parallel      along all axes with role "model", such as ``row`` and ``col``
    model-parallel       along all axes with role "model" or "pipe"

For its gradient norm, DeepSpeed sums squares over the model-parallel group. A rank counts the parameters whose flag
``p.model_parallel`` is True on this rank; rank 0 of the group counts all its parameters. If the flag has the same value on
all ranks, it cannot describe a bias that is sharded over one axis and replicated over another, and the norm is wrong.
`mark_model_parallel` sets the flag to True on one rank per shard. DeepSpeed's norm is then exact, if the engine's optimizer
reads the flags:

    config                                     class of the engine's optimizer   reads the flags
    float32, stage 0                           class of the user's optimizer     yes
    ZeRO stages 1 and 2, any dtype             DeepSpeedZeroOptimizer            yes
    bfloat16, stage 1, float32 accumulation    BF16_Optimizer                    yes
    half precision, stage 0                    FP16_UnfusedOptimizer             no: the norm is too small
    stage 3, FusedAdam in half precision       other classes                     unknown

If the model-parallel group has more than one rank, `check_engine` raises an error for the last two rows.

`meshstep.optim.ParallelOptimizer` can be the optimizer of a float32 engine of stage 0. The engine then averages the
gradients over the data axes, and the optimizer clips. Pass ``average_data=False`` to the optimizer, and leave
``gradient_clipping`` out of the engine's config. If the optimizer has float32 master weights, call
`meshstep.optim.broadcast_weights` before you create it: the engine broadcasts the weights of data-parallel rank 0 only
after the optimizer has copied the master weights from the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..layout.annotation import label_of
from ..layout.spec import P
from ..mesh.agreement import on_all_ranks
from ..mesh.registry import ProcessGroupRegistry
from ..mesh.topology import Topology
from .local_parameters import has_dtensors, spec_of

_READ_FLAGS = ("DeepSpeedZeroOptimizer", "BF16_Optimizer")


class ModelParallelUnit:
    """Object for the ``mpu`` argument of DeepSpeed: a registry's ranks, sizes and process groups, by Megatron's names.

        engine, *_ = deepspeed.initialize(model=model, mpu=ModelParallelUnit(registry), ...)

    This rank's data-parallel, tensor-parallel and pipeline-parallel groups lie along the axes with role "data", "model"
    and "pipe". The model-parallel group lies along the axes with role "model" or "pipe".

    If the topology has no axes for a group, the group has only this rank: its size is 1, and the rank's index is 0. A
    group is never None, because torch would use the default group instead. The class has no method
    ``initialize_sequence_parallel``, because DeepSpeed ignores model parallelism if this method exists.

    Args:
        registry: Provides the process groups. Each group is created at its first use. ``torch.distributed`` must be
            initialized.
    Collectives: none. Host synchronization: none, in any method.
    """

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        topology = registry.topology
        self.registry = registry
        self._pipe, self._data, self._tensor = topology.pipe_axes, topology.data_axes, topology.model_axes
        self._model = model_parallel_axes(topology)

    def get_model_parallel_rank(self) -> int:
        """Return this rank's index in its model-parallel group, which lies along all model and pipeline axes."""
        return self._rank(self._model)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Return this rank's model-parallel group, which lies along all model and pipeline axes."""
        return self._group(self._model)

    def get_model_parallel_world_size(self) -> int:
        """Return the size of this rank's model-parallel group, which lies along all model and pipeline axes."""
        return self.registry.topology.size(*self._model)

    def get_tensor_model_parallel_rank(self) -> int:
        """Return this rank's index in its tensor-parallel group, which lies along all model axes."""
        return self._rank(self._tensor)

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        """Return this rank's tensor-parallel group, which lies along all model axes."""
        return self._group(self._tensor)

    def get_tensor_model_parallel_world_size(self) -> int:
        """Return the size of this rank's tensor-parallel group, which lies along all model axes."""
        return self.registry.topology.size(*self._tensor)

    def get_pipeline_model_parallel_rank(self) -> int:
        """Return the index of this rank's pipeline stage."""
        return self._rank(self._pipe)

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup:
        """Return this rank's pipeline-parallel group, which has one rank per pipeline stage."""
        return self._group(self._pipe)

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Return the number of pipeline stages."""
        return self.registry.topology.size(*self._pipe)

    def get_data_parallel_rank(self) -> int:
        """Return this rank's index in its data-parallel group, which lies along all data axes."""
        return self._rank(self._data)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Return this rank's data-parallel group, which lies along all data axes."""
        return self._group(self._data)

    def get_data_parallel_world_size(self) -> int:
        """Return the size of this rank's data-parallel group, which lies along all data axes."""
        return self.registry.topology.size(*self._data)

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the global ranks of this rank's data-parallel group in ascending order."""
        return list(self._ranks(self._data))

    def _rank(self, axes: tuple[str, ...]) -> int:
        return self.registry.rank(*axes) if axes else 0

    def _ranks(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        return self.registry.ranks(*axes) if axes else (self.registry.global_rank,)

    def _group(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        return self.registry.group_of(self._ranks(axes))


def model_parallel_axes(topology: Topology) -> tuple[str, ...]:
    """Return the axes of DeepSpeed's model-parallel group: all axes except the data axes."""
    return tuple(axis for axis in topology.axes if axis not in topology.data_axes)


def counts_piece(spec: P, coordinate: dict[str, int], topology: Topology) -> bool:
    """Return True if the rank at ``coordinate`` must count its shard of a parameter in DeepSpeed's gradient norm.

    The result is True for the first of the ranks of a model-parallel group that hold the same shard.
    """
    spec = spec.resolve(topology)
    copies = [axis for axis in spec.replica_axes(topology) if axis in model_parallel_axes(topology)]
    return all(coordinate[axis] == 0 for axis in copies) and _is_first_of_tied(spec, coordinate, topology)


def mark_model_parallel(params: Iterable[Tensor], registry: ProcessGroupRegistry) -> None:
    """Set the flag ``model_parallel`` of each parameter, such that DeepSpeed's gradient norm and clipping are exact.

    If several ranks of a model-parallel group hold the same shard, the flag is True on the first of them, so that the shard
    is counted once. A parameter that is tied over pipeline stages also gets the flag ``ds_pipe_replicated``, which some of
    DeepSpeed's norms read. It is False on the first stage that holds the parameter, and True on the other stages. The
    gradients of tied parameters must be summed over their stages before DeepSpeed computes the norm.

        mark_model_parallel(model.parameters(), registry)

    Args:
        params: Parameters with declared layouts, no DTensors.
        registry: The process groups.
    Raises:
        ValueError: A parameter has no spec, is a DTensor, is sharded over a data axis, or is declared with a partial
            gradient over an axis larger than 1. DeepSpeed does not sum its norm over data axes, and does not sum partial
            gradients. Or a spec does not fit the topology (`P.resolve`). No flag is set in these cases.
    """
    topology, coordinate = registry.topology, registry.coordinate
    specs: dict[Any, P] = {param: spec_of(param).resolve(topology) for param in params}
    for param, spec in specs.items():
        over = [axis for axis in topology.data_axes if axis in spec.sharded_axes]
        if over or has_dtensors((param,)):
            raise ValueError(
                f"{label_of(param)} ({spec}) is {f'sharded over {over[0]!r}' if over else 'a DTensor'}, which DeepSpeed's "
                "norm does not support; use meshstep.optim.clip_grad_norm_, or let DeepSpeed shard the parameter"
            )
        pending = [axis for axis in spec.partial if topology.size(axis) > 1]
        if pending:
            raise ValueError(
                f"{label_of(param)} ({spec}) has a partial gradient over {pending[0]!r} after backward, which DeepSpeed "
                "does not sum; all-reduce the gradient in backward and declare the parameter without partial=, or step "
                "with meshstep.optim.ParallelOptimizer"
            )
    for param, spec in specs.items():
        param.model_parallel = counts_piece(spec, coordinate, topology)
        if spec.tied:
            param.ds_pipe_replicated = not _is_first_of_tied(spec, coordinate, topology)


def check_engine(engine: Any, registry: ProcessGroupRegistry) -> None:
    """Raise ValueError on every rank if a DeepSpeed engine would compute a wrong gradient norm, or would clip twice.

    Call it on all ranks before the first step.

    Args:
        engine: The engine that ``deepspeed.initialize`` returned.
        registry: The process groups, with the topology of the parameters' specs.
    Raises:
        ValueError: On every rank. The engine has ``gradient_clipping``, and its optimizer is a `ParallelOptimizer`, which
            clips too. If the model-parallel group has more than one rank, also: the engine was created without a
            `ModelParallelUnit` of this topology; or, if the optimizer is no `ParallelOptimizer`, the norm of its class
            ignores the flags that `mark_model_parallel` sets or is not known to read them, or a parameter has no flag.
    Collectives: an object all-gather over the world. Host synchronization: yes.
    """
    on_all_ranks(lambda: _check_engine(engine, registry), registry)


def _check_engine(engine: Any, registry: ProcessGroupRegistry) -> None:
    clips, inner = engine.gradient_clipping() > 0, engine.optimizer
    ours = isinstance(getattr(inner, "registry", None), ProcessGroupRegistry)
    if ours and clips:
        raise ValueError(
            f"gradient_clipping={engine.gradient_clipping()} makes the engine clip the gradients before "
            f"{type(inner).__name__}.step; leave gradient_clipping out of the config, and give the optimizer max_norm="
        )
    if registry.topology.size(*model_parallel_axes(registry.topology)) == 1:
        return
    mpu = engine.mpu
    if not isinstance(mpu, ModelParallelUnit) or mpu.registry.topology != registry.topology:
        raise ValueError(
            f"the engine has no mpu=ModelParallelUnit(registry) with {registry.topology!r}. An engine without it "
            "overwrites the shards of all ranks with the weights of rank 0, and averages gradients over all ranks; "
            "create the weights again, and pass the mpu to deepspeed.initialize"
        )
    if ours:
        return
    kind = type(inner).__name__
    if kind == "FP16_UnfusedOptimizer":
        raise ValueError(
            f"{kind} ignores the model_parallel flags of parameters, and its norm has only the gradients of model-parallel "
            'rank 0; in half precision write "zero_optimization": {"stage": 1} (or 2) in the config, or use float32, stage '
            "0 and ParallelOptimizer"
        )
    reads_flags = kind in _READ_FLAGS or inner is engine.basic_optimizer
    if not reads_flags:
        raise ValueError(
            f"{kind} is not known to read the model_parallel flags of parameters, so its gradient norm may be wrong; use "
            "ZeRO stage 1 or 2, or float32 with stage 0 and a torch optimizer or meshstep.optim.ParallelOptimizer"
        )
    unmarked = [name for name, param in engine.module.named_parameters() if not hasattr(param, "model_parallel")]
    if unmarked:
        raise ValueError(
            f"{unmarked[0]} has no model_parallel flag; call mark_model_parallel(model.parameters(), registry)"
        )


def _is_first_of_tied(spec: P, coordinate: dict[str, int], topology: Topology) -> bool:
    return all(coordinate[axis] == spec.tied_coordinates(axis, topology)[0] for axis, _ in spec.tied)
