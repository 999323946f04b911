"""Layouts by Megatron-core's flags, and groups by its `parallel_state`; read for 0.16.

    registry = registry_of()                    # on parallel_state's own groups, or on those handed over
    declare_by_flags(model, registry)
    optimizer = ParallelOptimizer(torch.optim.AdamW(model.parameters(), fused=True), registry, max_norm=1.0)

A parameter's layout there is in attributes, in what its module is, and in two rules that its optimizer step knows by
itself:

    tensor_model_parallel, partition_dim, partition_stride   split over tensor; a stride n: n blocks, each of them split
    sequence_parallel, if the config says so too             the gradient is a sum over tensor that is still to be made
    "q_layernorm" or "k_layernorm" in the name, by config    the same, and no flag says it
    average_gradients_across_tp_domain                       a mean over tensor, still to be made
    allreduce = False, or a module that says is_expert       experts: split over expert-tensor, others on each expert rank
    shared_embedding                                         one parameter on the stages of the embedding group
    pipeline_parallel, if the config has a cond embedder     one parameter on all stages
    none of these                                            a copy on all ranks

Rank e of the expert group has experts of its own under the same names as the other ranks'. For the step they are pieces,
stacked along dim 0: what counts and is saved is right, and a checkpoint goes to another mesh of as many expert ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch.distributed as dist
from torch import Tensor, nn

from ..layout.annotation import annotate
from ..layout.spec import Entry, P, blocks, parts_of
from ..mesh.agreement import on_all_ranks
from ..mesh.refinement import steps_of
from ..mesh.registry import ProcessGroupRegistry
from ..mesh.topology import Role, Topology, axes_along

Ranks = tuple[int, ...]
Axes = tuple[str, ...]

# What a group is called here, and in a ProcessGroupCollection.
_DENSE: Mapping[str, str] = {"pipe": "pp", "data": "dp", "context": "cp", "tensor": "tp"}
_EXPERT: Mapping[str, str] = {"expert_data": "expt_dp", "expert": "ep", "expert_tensor": "expt_tp"}
_EMBEDDING: Mapping[str, str] = {"embedding": "embd"}
_ROLES: Mapping[str, Role] = {"pipe": "pipe", "data": "data", "context": "data", "tensor": "model"}


def registry_of(groups: object | None = None) -> ProcessGroupRegistry:
    """A registry on Megatron's own groups, which closing it doesn't destroy. On all ranks.

    Its axes are ``pipe``, ``data``, ``context`` and ``tensor``, slowest first as the ranks are. Where the expert mesh cuts
    one of them, that one becomes two or more, numbered: with tensor=2, data=4 and expert=4 over 8 ranks of which each
    has whole experts, ``data0=2, data1=2, tensor=2``; the experts are split over ``data1`` and ``tensor``.

    Args:
        groups: A ``ProcessGroupCollection`` with at least tp, pp and dp; None: those of ``parallel_state``.

    Raises:
        RuntimeError: ``parallel_state`` isn't initialised.
        ValueError: On every rank: a group's ranks aren't evenly spaced, or meshes cut each other so that no axes make both.
    Collectives: object all-gathers over the world. Host reads: yes.
    """
    found = _groups_of(groups, {**_DENSE, **_EXPERT})
    ranks = {name: _ranks(group) for name, group in found.items()}
    registry = ProcessGroupRegistry(topology_of(ranks, dist.get_world_size()))
    on_all_ranks(lambda: [axes_of(_ranks(group), registry, name) for name, group in found.items()], registry)
    registry.adopt(*found.values())
    return registry


def declare_by_flags(model: nn.Module, registry: ProcessGroupRegistry, groups: object | None = None) -> None:
    """Annotate every parameter of ``model`` with what its flags and Megatron's rules by name say. On all ranks.

    Where ``model`` is Megatron's own `DistributedDataParallel`, which sums experts' gradients over all that hold copies,
    nothing of that is left to be done. A parameter whose gradient is to be averaged over tensor also gets a hook that
    divides it.

    Args:
        model: One model chunk, as Megatron's layers made it; wrappers are looked through.
        registry: `registry_of`'s, or one of your own: any topology whose axes make Megatron's groups.
        groups: As there.

    Raises:
        ValueError: On every rank, and nothing is declared: flags contradict each other or don't fit the parameter, or a
            group isn't made by axes of the registry.
    Collectives: an object all-gather over the world. Host reads: yes.
    """

    def read() -> list[tuple[str, Tensor, P, int]]:
        rules = Rules(model, registry, groups)
        return [(name, param, *rules.spec(name, param)) for name, param in model.named_parameters()]

    for name, param, spec, divisor in on_all_ranks(read, registry):
        annotate(param, spec, name)
        if divisor > 1 and not hasattr(param, "_meshstep_mean"):  # a second declaration must not divide twice
            param._meshstep_mean = param.register_hook(lambda grad, size=divisor: grad / size)  # type: ignore[attr-defined]


class Rules:
    """What flags and names mean for the parameters of one model.

    Args:
        model, registry, groups: As `declare_by_flags`.
    Raises:
        ValueError: A group isn't made by axes of the registry.
    """

    def __init__(self, model: nn.Module, registry: ProcessGroupRegistry, groups: object | None = None) -> None:
        named = _groups_of(groups, {**_DENSE, **_EXPERT, **_EMBEDDING})
        embedding = named.pop("embedding", None)
        self._topology = registry.topology
        self._axes: dict[str, Axes] = {"context": ()}
        self._axes |= {name: axes_of(_ranks(group), registry, name) for name, group in named.items()}
        self._stages = self._stages_of(embedding)
        self._reduced = hasattr(model, "finish_grad_sync")
        self._experts = {
            id(param)
            for module in model.modules()
            if getattr(module, "is_expert", False)
            for param in module.parameters()
        }
        configs = [module.config for module in model.modules() if hasattr(module, "config")]
        self._sequence_parallel = any(getattr(config, "sequence_parallel", False) for config in configs)
        self._norms_by_name = any(getattr(config, "qk_layernorm", False) for config in configs)
        self._conditional = any(getattr(config, "has_cond_embedder", False) for config in configs)

    def spec(self, name: str, param: Tensor) -> tuple[P, int]:
        """The layout of one parameter, and what each rank's part of its gradient is to be divided by."""
        expert = self.is_expert(param)
        tensor = self._of("expert_tensor" if expert else "tensor", name)
        split = bool(getattr(param, "tensor_model_parallel", False))
        entries = self._split(name, param, tensor) if split else ()
        if expert:
            first = entries[0] if entries else None
            stacked = self._of("expert", name)
            entries = (*stacked, *parts_of(first)), *entries[1:]
            # Its DDP sums over all copies where a flag says so, which none does where a rank has all experts.
            summed = self._reduced and not getattr(param, "allreduce", True)
            partial = () if summed else tuple(a for a in self._of("expert_data", name) if self._is_model(a))
            return P(*entries, partial=partial), 1
        mean = bool(getattr(param, "average_gradients_across_tp_domain", False))
        pending = mean or self._is_summed(name, param)
        if split and pending and tensor:
            raise ValueError(
                f"{name} is split over tensor (tensor_model_parallel) and summed over it (sequence_parallel, or by its "
                "name): one of the two is wrong; clear that flag"
            )
        spec = P(*entries, partial=tensor if pending else (), tied=self._tied(name, param))
        return spec, self._topology.size(*tensor) if mean else 1

    def is_expert(self, param: Tensor) -> bool:
        """Whether it is on the expert mesh: no flag says so where a rank has all experts."""
        return not getattr(param, "allreduce", True) or id(param) in self._experts

    def _is_summed(self, name: str, param: Tensor) -> bool:
        by_name = self._norms_by_name and ("q_layernorm" in name or "k_layernorm" in name)
        return by_name or (self._sequence_parallel and bool(getattr(param, "sequence_parallel", False)))

    def _split(self, name: str, param: Tensor, tensor: Axes) -> tuple[Entry, ...]:
        dim, stride = int(getattr(param, "partition_dim", -1)), int(getattr(param, "partition_stride", 1))
        if not 0 <= dim < param.dim() or stride < 1:
            raise ValueError(
                f"{name}, of shape {tuple(param.shape)}, has tensor_model_parallel=True with partition_dim={dim} and "
                f"partition_stride={stride}: give the dim that is split, and in how many blocks"
            )
        entry: Entry = (blocks(tensor, stride),) if stride > 1 and tensor else tensor
        return (*((),) * dim, entry)

    def _tied(self, name: str, param: Tensor) -> dict[str, Ranks]:
        pipe = self._of("pipe", name)
        if not pipe:
            return {}
        if self._conditional and getattr(param, "pipeline_parallel", False):
            return {pipe[0]: tuple(range(self._topology.size(*pipe)))}
        if getattr(param, "shared_embedding", False):
            return {pipe[0]: self._stages}
        if getattr(param, "shared", False):
            raise ValueError(
                f"{name} is shared with another stage, and not as the word embedding: say where it is with "
                "declare(model, {..., tied={'pipe': (first, other)}}) after the other parameters"
            )
        return {}

    def _of(self, group: str, name: str) -> Axes:
        if group not in self._axes:
            raise ValueError(
                f"{name} is laid out over {group}, which is not among the groups that were handed over; hand it over too"
            )
        return self._axes[group]

    def _is_model(self, axis: str) -> bool:
        return self._topology.role(axis) == "model"

    def _stages_of(self, embedding: dist.ProcessGroup | None) -> Ranks:
        """On a stage without embedding, nobody asks."""
        pipe = self._axes["pipe"]
        if not pipe or embedding is None:
            return (0, -1)
        return tuple(sorted(self._topology.coordinate_of(rank, pipe[0]) for rank in _ranks(embedding)))


def axes_of(ranks: Ranks, registry: ProcessGroupRegistry, name: str = "a group") -> Axes:
    """The axes along which this rank's group is exactly ``ranks``; those of size 1 are left out.

    Raises:
        ValueError: No axes make it.
    """
    axes = axes_along(tuple(sorted(ranks)), registry.topology)
    if axes is None or registry.global_rank not in ranks:
        raise ValueError(
            f"{name} has ranks {list(ranks)} on rank {registry.global_rank}, and no axes of {registry.topology!r} make "
            "that group: make the registry with registry_of(), or name the axes in the order of Megatron's ranks, the "
            "slowest first"
        )
    return axes


def topology_of(groups: Mapping[str, Ranks], world_size: int) -> Topology:
    """The axes that the dense and the expert mesh have in common, from the groups of any one rank; see `registry_of`.

        >>> topology_of({"data": (0, 2, 4, 6), "tensor": (0, 1), "expert": (0, 1, 2, 3), "expert_data": (0, 4)}, 8)
        Topology(data0=2, data1=2, tensor=2, pipe=1, context=1, roles={'data0': 'data', 'data1': 'data'})

    Raises:
        ValueError: As there.
    """
    sides = {name: _side(name, ranks) for name, ranks in groups.items() if len(ranks) > 1}
    ends = sorted({1, world_size, *(end for side in sides.values() for end in side)})
    for low, high in pairwise(ends):
        if high % low:
            raise ValueError(
                f"the groups {dict(groups)} cut the ranks in runs of {low} and of {high}: no common axes make both meshes; "
                "initialise Megatron with sizes of which one divides the other"
            )
    axes: dict[str, int] = {}
    roles: dict[str, Role] = {}
    for low, high in reversed(list(pairwise(ends))):
        dense = next(
            (name for name in _DENSE if name in sides and sides[name][0] <= low < high <= sides[name][1]), None
        )
        if dense is None:
            raise ValueError(
                f"no group of {', '.join(_DENSE)} goes along the ranks that are {low} apart; the groups are "
                f"{dict(groups)}; hand over the one that does"
            )
        start, stop = sides[dense]
        inner = [end for end in ends if start < end < stop]
        axis = dense if not inner else f"{dense}{sum(end >= high for end in inner)}"
        axes[axis], roles[axis] = high // low, _ROLES[dense]
    for name in _DENSE:
        if name not in sides:
            axes[name], roles[name] = 1, _ROLES[name]
    return Topology(roles=roles, **axes)


def _side(name: str, ranks: Ranks) -> tuple[int, int]:
    """The stride of a group along an axis, and that of the next slower axis."""
    steps = steps_of(ranks)
    if steps is None or len(steps) != 1:
        raise ValueError(
            f"{name} has ranks {list(ranks)}, which aren't evenly spaced: no axis makes that group; hand over the groups "
            "that parallel_state made"
        )
    ((size, stride),) = steps
    return stride, stride * size


def _groups_of(groups: object | None, names: Mapping[str, str]) -> dict[str, dist.ProcessGroup]:
    """By name here; those that are missing are left out."""
    if groups is None:
        from megatron.core import parallel_state
        from megatron.core.process_groups_config import ProcessGroupCollection

        if not parallel_state.model_parallel_is_initialized():
            raise RuntimeError(
                "Megatron's parallel_state isn't initialised: call parallel_state.initialize_model_parallel first, or hand "
                "over a ProcessGroupCollection"
            )
        groups = ProcessGroupCollection.use_mpu_process_groups(list(names.values()))
    fields = {name: getattr(groups, field, None) for name, field in names.items()}
    found = {name: group for name, group in fields.items() if isinstance(group, dist.ProcessGroup)}
    missing = [names[name] for name in ("tensor", "pipe", "data") if name not in found]
    if missing:
        raise ValueError(f"the groups that were handed over lack {', '.join(missing)}: give tp, pp and dp")
    return found


def _ranks(group: dist.ProcessGroup) -> Ranks:
    return tuple(dist.get_process_group_ranks(group))
