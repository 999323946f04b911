"""Layouts from the parameter flags of Megatron-core 0.16, and a registry on the process groups of its `parallel_state`.

    registry = registry_of()                    # on parallel_state's groups, or on a ProcessGroupCollection
    declare_by_flags(model, registry)
    optimizer = ParallelOptimizer(torch.optim.AdamW(model.parameters(), fused=True), registry, max_norm=1.0)

Megatron describes a parameter's layout by attributes of the parameter, by its module, and by its name. Below, "tensor" and
"expert-tensor" are Megatron's tensor-parallel groups of dense parameters and of experts.

    tensor_model_parallel, partition_dim, partition_stride   sharded over tensor; stride n: n blocks, each one sharded
    sequence_parallel, if it is set in the config too        partial gradient over tensor, which must be summed
    "q_layernorm" or "k_layernorm" in the name, if the       partial gradient over tensor, which must be summed
        config has qk_layernorm; not in multi-latent
        attention, whose norms are before the projection
    average_gradients_across_tp_domain                       partial gradient over tensor, which must be averaged
    allreduce = False, or a module with is_expert            an expert: sharded over the expert group; and over
                                                             expert-tensor with tensor_model_parallel
    shared_embedding                                         tied over the stages of the embedding group
    pipeline_parallel, if the config has has_cond_embedder   tied over all stages
    none of these                                            replicated over all ranks of a stage

Each rank of the expert group holds different experts, but their parameters have the same names on all ranks. The spec
describes the parameters of this name on all ranks as one tensor that is sharded along dim 0. Norms and checkpoints are then
correct, and a checkpoint can be loaded on another mesh with the same number of expert ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..layout.annotation import annotate
from ..layout.spec import Entry, P, blocks, parts_of
from ..mesh.agreement import on_all_ranks
from ..mesh.refinement import gathered, steps_of
from ..mesh.registry import ProcessGroupRegistry
from ..mesh.topology import Role, Topology, axes_along
from .megatron_mla import check_rope_gradients, norms_before_projection

Ranks = tuple[int, ...]
Axes = tuple[str, ...]

# These mappings give, for each process group, its name here and its attribute in Megatron's ProcessGroupCollection.
_DENSE: Mapping[str, str] = {"pipe": "pp", "data": "dp", "context": "cp", "tensor": "tp"}
_EXPERT: Mapping[str, str] = {"expert_data": "expt_dp", "expert": "ep", "expert_tensor": "expt_tp"}
_FIELDS: Mapping[str, str] = {**_DENSE, **_EXPERT, "embedding": "embd"}
# The role of each axis in the registry's topology, by the name of the process group of dense parameters.
_ROLES: Mapping[str, Role] = {"pipe": "pipe", "data": "data", "context": "data", "tensor": "model"}


def registry_of(groups: object | None = None) -> ProcessGroupRegistry:
    """Return a registry that uses Megatron's process groups. Call it on all ranks.

    The axes are ``pipe``, ``data``, ``context`` and ``tensor``, in the order in which Megatron arranged the ranks; axes of
    size 1 are last. If a group of experts covers only a part of such an axis, the axis is divided into several numbered
    axes. Example: 8 ranks with tensor=2, data=4, expert=4 and expert-tensor=1 give ``data0=2, data1=2, tensor=2``. The
    experts are sharded over ``data1`` and ``tensor``.

    Closing the registry does not destroy Megatron's groups.

        registry = registry_of()

    Args:
        groups: A ``ProcessGroupCollection`` with at least tp, pp and dp. Default None: the groups of Megatron's
            ``parallel_state``.
    Raises:
        RuntimeError: ``groups`` is None, and ``parallel_state`` is not initialized.
        ValueError: ``groups`` lacks tp, pp or dp. On every rank: the ranks of a group are not evenly spaced; no common axes
            of the groups of dense parameters and of experts exist; no group of dense parameters connects some ranks; or a
            group of some rank does not lie along axes of the registry.
    Collectives: two object all-gathers over the world. Host synchronization: yes.
    """
    found = _groups_of(groups, {**_DENSE, **_EXPERT})
    ranks = {name: _ranks(group) for name, group in found.items()}
    topologies = gathered(lambda: topology_of(ranks, dist.get_world_size()))
    registry = ProcessGroupRegistry(topologies[dist.get_rank()])
    on_all_ranks(lambda: [axes_of(_ranks(group), registry, _FIELDS[name]) for name, group in found.items()], registry)
    registry.adopt(*found.values())
    return registry


def declare_by_flags(model: nn.Module, registry: ProcessGroupRegistry, groups: object | None = None) -> None:
    """Declare the layout of every parameter of a Megatron model, as its flags, its module and its name describe it.

    The table in the docstring of `meshstep.parallel.interop.megatron` has the rules. Call it on all ranks.

    If the model is wrapped in Megatron's `DistributedDataParallel`, the gradients of experts with ``allreduce=False`` are
    not declared partial, because this wrapper sums them over all replicas. A parameter whose gradient must be averaged over
    the tensor-parallel group is declared partial, which means a sum, and gets a hook that divides its gradient by the size
    of the group.

        declare_by_flags(model, registry)

    Args:
        model: A model chunk of Megatron layers; it may be wrapped.
        registry: A registry from `registry_of`, or any registry in which each of Megatron's groups is a group along axes.
        groups: A ``ProcessGroupCollection`` with at least tp, pp and dp. Default None: the groups of Megatron's
            ``parallel_state``.
    Raises:
        RuntimeError: On every rank: ``groups`` is None, and ``parallel_state`` is not initialized.
        ValueError: On every rank: flags contradict each other or do not fit the parameter; a needed group is missing, or is
            not a group along axes of the registry; or `sum_rope_gradients` must be called first for multi-latent attention.
            No layout is declared in these cases.
    Collectives: an object all-gather over the world. Host synchronization: yes.
    """

    def read() -> list[tuple[str, Any, P, int]]:
        rules = Rules(model, registry, groups)
        return [(name, param, *rules.spec(name, param)) for name, param in model.named_parameters()]

    for name, param, spec, divisor in on_all_ranks(read, registry):
        annotate(param, spec, name)
        if divisor > 1 and not hasattr(param, "_meshstep_mean"):  # a second declaration must not divide twice
            param._meshstep_mean = param.register_hook(lambda grad, size=divisor: grad / size)


class Rules:
    """Rules that translate Megatron's flags and parameter names into specs. The arguments are as in `declare_by_flags`."""

    def __init__(self, model: nn.Module, registry: ProcessGroupRegistry, groups: object | None) -> None:
        named = _groups_of(groups, _FIELDS)
        embedding = named.pop("embedding", None)
        self._topology = registry.topology
        self._axes: dict[str, Axes] = {"context": ()}
        self._axes |= {name: axes_of(_ranks(group), registry, _FIELDS[name]) for name, group in named.items()}
        self._stages = self._stages_of(embedding)
        self._reduced = any(hasattr(module, "finish_grad_sync") for module in model.modules())
        self._experts = {
            id(param)
            for module in model.modules()
            if getattr(module, "is_expert", False)
            for param in module.parameters()
        }
        configs = [module.config for module in model.modules() if hasattr(module, "config")]
        self._sequence_parallel = any(getattr(config, "sequence_parallel", False) for config in configs)
        if self._topology.size(*self._axes["tensor"]) > 1:
            check_rope_gradients(model)
        self._complete_norms = norms_before_projection(model)
        self._norms_by_name = any(getattr(config, "qk_layernorm", False) for config in configs)
        self._conditional = any(getattr(config, "has_cond_embedder", False) for config in configs)

    def spec(self, name: str, param: Tensor) -> tuple[P, int]:
        """Return the spec of a parameter, and the number by which its gradient must be divided.

        The number is the size of the tensor-parallel group if the gradient must be averaged over this group, else 1.
        """
        expert = self.is_expert(param)
        tensor = self._axes_of("expert_tensor" if expert else "tensor", name)
        split = bool(getattr(param, "tensor_model_parallel", False))
        entries = self._split(name, param, tensor) if split else ()
        if expert:
            first = entries[0] if entries else None
            stacked = self._axes_of("expert", name)
            entries = (*stacked, *parts_of(first)), *entries[1:]
            # The gradient of an expert must be summed over the expert-data group. Megatron's DDP does this only if the
            # parameter has allreduce=False, a flag that Megatron does not set if every rank has all experts. Without the
            # flag, or without DDP, the gradient is summed over data axes only. It stays partial over those axes of the
            # expert-data group that are model axes.
            summed = self._reduced and not getattr(param, "allreduce", True)
            unsummed = () if summed else self._axes_of("expert_data", name)
            partial = tuple(axis for axis in unsummed if self._topology.role(axis) == "model")
            return P(*entries, partial=partial), 1
        mean = bool(getattr(param, "average_gradients_across_tp_domain", False))
        pending = mean or self._is_summed(name, param)
        if split and pending and tensor:
            raise ValueError(
                f"{name} is sharded over the tensor-parallel group (tensor_model_parallel=True), and also has a partial "
                "gradient over this group (by sequence_parallel, average_gradients_across_tp_domain, or q_layernorm or "
                "k_layernorm in its name); clear the wrong flag"
            )
        spec = P(*entries, partial=tensor if pending else (), tied=self._tied(name, param))
        return spec, self._topology.size(*tensor) if mean else 1

    def is_expert(self, param: Tensor) -> bool:
        """Return True if the parameter has ``allreduce=False``, or is in a module with ``is_expert``.

        If every rank has all experts, Megatron sets only ``is_expert``.
        """
        return not getattr(param, "allreduce", True) or id(param) in self._experts

    def _is_summed(self, name: str, param: Tensor) -> bool:
        # Gradients of norms before a projection of multi-latent attention are complete, because its backward sums them.
        per_head = ("q_layernorm" in name or "k_layernorm" in name) and id(param) not in self._complete_norms
        by_name = self._norms_by_name and per_head
        return by_name or (self._sequence_parallel and bool(getattr(param, "sequence_parallel", False)))

    def _split(self, name: str, param: Tensor, tensor: Axes) -> tuple[Entry, ...]:
        dim, stride = int(getattr(param, "partition_dim", -1)), int(getattr(param, "partition_stride", 1))
        if not 0 <= dim < param.dim() or stride < 1:
            raise ValueError(
                f"{name} of shape {tuple(param.shape)} has tensor_model_parallel=True with partition_dim={dim} and "
                f"partition_stride={stride}; set partition_dim to the sharded dim, and partition_stride to the number of "
                "blocks (1 for one block)"
            )
        entry: Entry = (blocks(tensor, stride),) if stride > 1 and tensor else tensor
        return (*((),) * dim, entry)

    def _tied(self, name: str, param: Tensor) -> dict[str, Ranks]:
        pipe = self._axes_of("pipe", name)
        if not pipe:
            return {}
        if self._conditional and getattr(param, "pipeline_parallel", False):
            return {pipe[0]: tuple(range(self._topology.size(*pipe)))}
        if getattr(param, "shared_embedding", False):
            return {pipe[0]: self._stages}
        if getattr(param, "shared", False):
            raise ValueError(
                f"{name} is shared with another stage but is not the word embedding, so its stages are unknown; delete its "
                "attribute shared, call declare_by_flags, and then declare(model, "
                f"{{{name!r}: P(..., tied={{{pipe[0]!r}: (first, other)}})}})"
            )
        return {}

    def _axes_of(self, group: str, name: str) -> Axes:
        if group not in self._axes:
            raise ValueError(
                f"the layout of {name} needs the process group {_FIELDS[group]}, which this rank does not have; "
                "pass it in groups="
            )
        return self._axes[group]

    def _stages_of(self, embedding: dist.ProcessGroup | None) -> Ranks:
        """Return the pipeline stages that hold the word embedding.

        The result is (0, -1), the first and the last stage, if there is one stage or this rank has no embedding group. In
        ``parallel_state``, a rank without embedding group does not hold the embedding, and does not use the result. A
        ``ProcessGroupCollection`` without ``embd`` must belong to a model whose embedding is on these two stages.
        """
        pipe = self._axes["pipe"]
        if not pipe or embedding is None:
            return (0, -1)
        return tuple(sorted(self._topology.coordinate_of(rank, pipe[0]) for rank in _ranks(embedding)))


def axes_of(ranks: Ranks, registry: ProcessGroupRegistry, name: str) -> Axes:
    """Return the axes larger than 1 along which this rank's group consists of ``ranks``, in any order."""
    axes = axes_along(tuple(sorted(ranks)), registry.topology)
    if registry.global_rank not in ranks:
        raise ValueError(
            f"process group {name} has ranks {list(ranks)}, but this process is rank {registry.global_rank}; on each "
            "rank, pass the group that contains that rank"
        )
    if axes is None:
        raise ValueError(
            f"process group {name} has ranks {list(ranks)} on rank {registry.global_rank}, and no axes of "
            f"{registry.topology!r} have these ranks; create the registry with "
            "meshstep.parallel.interop.megatron.registry_of(), or list the axes in the order of Megatron's ranks, slowest "
            "first"
        )
    return axes


def topology_of(groups: Mapping[str, Ranks], world_size: int) -> Topology:
    """Return the topology whose axes are common to Megatron's groups of dense parameters and of experts.

        >>> topology_of({"data": (0, 2, 4, 6), "tensor": (0, 1), "expert": (0, 1, 2, 3), "expert_data": (0, 4)}, 8)
        Topology(data0=2, data1=2, tensor=2, pipe=1, context=1, roles={'data0': 'data', 'data1': 'data'})

    ``groups`` has the global ranks of each group of any one rank. `registry_of` describes the axes.
    """
    strides = {name: _strides_of(_FIELDS[name], ranks) for name, ranks in groups.items() if len(ranks) > 1}
    by_field = {_FIELDS[name]: ranks for name, ranks in groups.items()}
    ends = sorted({1, world_size, *(end for pair in strides.values() for end in pair)})
    for low, high in pairwise(ends):
        if high % low:
            raise ValueError(
                f"the groups of ranks {by_field} have strides or spans (size x stride) {low} and {high}, of which {low} "
                f"doesn't divide {high}, so no mesh contains all groups; initialize Megatron with sizes that divide each "
                "other"
            )
    axes: dict[str, int] = {}
    roles: dict[str, Role] = {}
    for low, high in reversed(list(pairwise(ends))):
        dense = next(
            (name for name in _DENSE if name in strides and strides[name][0] <= low < high <= strides[name][1]), None
        )
        if dense is None:
            raise ValueError(
                f"none of the groups {', '.join(_DENSE.values())} connects ranks at a distance of {low}; the groups are "
                f"{by_field}; pass the missing group"
            )
        start, stop = strides[dense]
        inner = [end for end in ends if start < end < stop]
        axis = dense if not inner else f"{dense}{sum(end >= high for end in inner)}"
        axes[axis], roles[axis] = high // low, _ROLES[dense]
    for name in _DENSE:
        if name not in strides:
            axes[name], roles[name] = 1, _ROLES[name]
    return Topology(roles=roles, **axes)


def _strides_of(name: str, ranks: Ranks) -> tuple[int, int]:
    """Return the difference of neighbouring ranks of a group, and this difference times the size of the group."""
    steps = steps_of(ranks)
    if steps is None or len(steps) != 1:
        raise ValueError(
            f"process group {name} has ranks {list(ranks)}, but the ranks of a group must be evenly spaced; pass the "
            "groups that parallel_state created"
        )
    ((size, stride),) = steps
    return stride, stride * size


def _groups_of(groups: object | None, names: Mapping[str, str]) -> dict[str, dist.ProcessGroup]:
    """Return Megatron's process groups of this rank, by their names in this module.

    ``names`` has the attribute of each wanted group in a ``ProcessGroupCollection``. Groups that this rank does not
    have are left out; a missing tp, pp or dp raises ValueError.
    """
    if groups is None:
        from megatron.core import parallel_state
        from megatron.core.process_groups_config import ProcessGroupCollection

        if not parallel_state.model_parallel_is_initialized():
            raise RuntimeError(
                "Megatron's parallel_state isn't initialized; call parallel_state.initialize_model_parallel first, or "
                "pass groups=ProcessGroupCollection(...)"
            )
        groups = ProcessGroupCollection.use_mpu_process_groups(list(names.values()))
    fields = {name: getattr(groups, field, None) for name, field in names.items()}
    found = {name: group for name, group in fields.items() if isinstance(group, dist.ProcessGroup)}
    missing = [names[name] for name in ("tensor", "pipe", "data") if name not in found]
    if missing:
        raise ValueError(
            f"Megatron's process groups {', '.join(missing)} are missing; give groups= with at least tp, pp and dp"
        )
    return found


def _ranks(group: dist.ProcessGroup) -> Ranks:
    return tuple(dist.get_process_group_ranks(group))
