"""Megatron's flags on plain parameters, and its process groups as lists of ranks. The tests do not need Megatron."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from meshstep.parallel import P, ProcessGroupRegistry, Topology, blocks, spec_of
from meshstep.parallel.interop import megatron
from meshstep.parallel.interop.megatron import declare_by_flags, registry_of, topology_of
from torch import nn
from world import World

TWO_MESHES = {"tensor": (0, 1), "data": (0, 2, 4, 6), "expert_tensor": (0,)}


@pytest.mark.parametrize(
    ("groups", "world_size", "axes"),
    [
        ({"tensor": (2, 3), "data": (1, 3)}, 4, "data=2,tensor=2"),
        ({"tensor": (0, 1), "pipe": (0, 2), "data": (0, 4)}, 8, "data=2,pipe=2,tensor=2"),  # the order tp-pp-dp of Megatron
        ({"tensor": (0, 1), "context": (0, 2), "data": (0, 4), "pipe": (0, 8)}, 16, "pipe=2,data=2,context=2,tensor=2"),
        ({**TWO_MESHES, "expert": (0, 1, 2, 3), "expert_data": (0, 4)}, 8, "data0=2,data1=2,tensor=2"),
        ({**TWO_MESHES, "expert": (0, 1), "expert_data": (0, 2, 4, 6)}, 8, "data=4,tensor=2"),
        ({"tensor": (0, 1, 2, 3), "data": (0, 4), "expert": (0, 2), "expert_tensor": (0, 1), "expert_data": (0, 4)}, 8,
         "data=2,tensor0=2,tensor1=2"),
        ({}, 1, ""),
    ],
)  # fmt: skip
def test_topology_of_megatron_groups_combines_dense_and_expert_mesh(
    groups: dict[str, tuple[int, ...]], world_size: int, axes: str
) -> None:
    topology = topology_of(groups, world_size)
    found = [f"{axis}={size}" for axis, size in zip(topology.axes, topology.sizes, strict=True) if size > 1]
    assert ",".join(found) == axes
    assert topology.world_size == world_size
    data = {axis for axis in topology.axes if axis.startswith(("data", "context"))}
    assert {*topology.data_axes} == data
    assert topology.pipe_axes == ("pipe",)


@pytest.mark.parametrize(
    ("groups", "world_size", "said"),
    [
        (
            {"tensor": (0, 1, 2), "data": (0, 3), "expert": (0, 1)},
            6,
            "strides or spans (size x stride) 2 and 3, of which 2 doesn't divide 3",
        ),
        (
            {"tensor": (0, 1, 3)},
            4,
            "process group tp has ranks [0, 1, 3], but the ranks of a group must be evenly spaced",
        ),
        (
            {"tensor": (0, 1)},
            4,
            "none of the groups pp, dp, cp, tp connects ranks at a distance of 2; the groups are {'tp': (0, 1)}",
        ),
    ],
)
def test_topology_of_groups_that_form_no_axes_raises(
    groups: dict[str, tuple[int, ...]], world_size: int, said: str
) -> None:
    with pytest.raises(ValueError, match="ranks") as error:
        topology_of(groups, world_size)
    assert said in str(error.value)


def collection(registry: ProcessGroupRegistry, **fields: tuple[str, ...]) -> Any:
    ranks = {name: registry.ranks(*axes) if axes else (registry.global_rank,) for name, axes in fields.items()}
    return SimpleNamespace(**{name: registry.group_of(members) for name, members in ranks.items()})


def adopted() -> bool:
    with ProcessGroupRegistry(Topology(pipe=2, tensor=2)) as made:
        groups = collection(made, tp=("tensor",), pp=("pipe",), dp=())
        with registry_of(groups) as registry:
            return registry.group("tensor") is groups.tp and registry.group("pipe") is groups.pp


def test_registry_of_megatron_groups_reuses_given_process_groups(world: World) -> None:
    assert all(world.run(4, adopted))


def uneven_on_first_rank() -> str:
    with ProcessGroupRegistry(Topology(x=4)) as made:
        ranks = [0, 1, 3] if made.global_rank == 0 else [made.global_rank]
        world = SimpleNamespace(**{name: made.group_of((made.global_rank,)) for name in ("tp", "pp", "dp")})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(megatron, "_ranks", lambda group: tuple(ranks))
            with pytest.raises(ValueError, match="ranks") as error:
                registry_of(world)
        return str(error.value)


def test_registry_of_uneven_groups_on_one_rank_raises_on_every_rank(world: World) -> None:
    assert len({*world.run(4, uneven_on_first_rank)}) == 1


def flagged(shape: tuple[int, ...], **flags: Any) -> nn.Parameter:
    param = nn.Parameter(torch.ones(shape))
    for name, value in flags.items():
        setattr(param, name, value)
    return param


SPLIT = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}
GATED = {**SPLIT, "partition_stride": 2}
BY_FLAGS: dict[str, tuple[tuple[int, ...], dict[str, Any], P]] = {
    "column": ((4, 6), SPLIT, P("tensor")),
    "row": ((4, 6), {**SPLIT, "partition_dim": 1}, P(None, "tensor")),
    "gated": ((4, 6), GATED, P(blocks("tensor", 2))),
    "flag_is_false": ((4, 6), {**SPLIT, "tensor_model_parallel": False}, P()),
    "norm": ((4,), {"sequence_parallel": True}, P(partial="tensor")),
    "q_layernorm": ((4,), {}, P(partial="tensor")),
    "k_layernorm": ((4,), {"sequence_parallel": False}, P(partial="tensor")),
    "kv_layernorm": ((4,), {}, P()),
    "no_flag": ((4,), {}, P()),
    "embedding": ((4, 6), {**SPLIT, "shared_embedding": True, "shared": True}, P("tensor", tied={"pipe": (0, 1)})),
    "timestep": ((4,), {"pipeline_parallel": True}, P(tied={"pipe": (0, 1)})),
    "mean": ((4,), {"average_gradients_across_tp_domain": True}, P(partial="tensor")),
}


class Model(nn.Module):
    def __init__(self, params: dict[str, nn.Parameter], **config: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)
        for name, param in params.items():
            self.register_parameter(name, param)


def by_flags(config: dict[str, bool]) -> dict[str, P]:
    with ProcessGroupRegistry(Topology(pipe=2, tensor=2)) as registry:
        groups = collection(registry, tp=("tensor",), pp=("pipe",), dp=(), embd=("pipe",))
        model = Model({name: flagged(shape, **flags) for name, (shape, flags, _) in BY_FLAGS.items()}, **config)
        declare_by_flags(model, registry, groups)
        declare_by_flags(model, registry, groups)  # a second call must not halve the gradient of `mean` again
        sum((2 * param).sum() for param in model.parameters()).backward()  # type: ignore[union-attr]
        for name, param in model.named_parameters():
            assert param.grad is not None
            assert float(param.grad.max()) == (1.0 if name == "mean" else 2.0), name
        return {name: spec_of(param) for name, param in model.named_parameters()}


def test_megatron_flags_and_parameter_names_determine_specs(world: World) -> None:
    config = {"sequence_parallel": True, "qk_layernorm": True, "has_cond_embedder": True}
    expected = {name: spec for name, (_, _, spec) in BY_FLAGS.items()}
    assert world.run(4, by_flags, config) == [expected] * 4


def test_megatron_flags_disabled_by_config_are_ignored(world: World) -> None:
    by_config = ("norm", "q_layernorm", "k_layernorm", "timestep")
    expected = {name: P() if name in by_config else spec for name, (_, _, spec) in BY_FLAGS.items()}
    assert world.run(4, by_flags, {}) == [expected] * 4


EXPERT = {"allreduce": False}
# With data=2 and tensor=2: the expert mesh, and the specs of column weight, row weight and bias of expert layers.
EXPERT_MESHES: dict[str, tuple[dict[str, tuple[str, ...]], tuple[P, P, P]]] = {
    "experts over data": (
        {"ep": ("data",), "expt_tp": ("tensor",), "expt_dp": ()},
        (P(("data", "tensor")), P("data", "tensor"), P("data")),
    ),
    "experts over both": (
        {"ep": ("data", "tensor"), "expt_tp": (), "expt_dp": ()},
        (P(("data", "tensor")), P(("data", "tensor")), P(("data", "tensor"))),
    ),
    "replicated over data": (
        {"ep": ("tensor",), "expt_tp": (), "expt_dp": ("data",)},
        (P("tensor"), P("tensor"), P("tensor")),
    ),
    "replicated over tensor, with different tokens on each rank": (
        {"ep": ("data",), "expt_tp": (), "expt_dp": ("tensor",)},
        (P("data", partial="tensor"), P("data", partial="tensor"), P("data", partial="tensor")),
    ),
}


def experts(fields: dict[str, tuple[str, ...]], reduces: bool, wrapped: bool = False) -> list[P]:
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        groups = collection(registry, tp=("tensor",), pp=(), dp=("data",), **fields)
        shapes = {"column": ((4, 6), SPLIT), "row": ((4, 6), {**SPLIT, "partition_dim": 1}), "bias": ((4,), {})}
        model = Model({name: flagged(shape, **flags, **EXPERT) for name, (shape, flags) in shapes.items()})
        if reduces:
            model.finish_grad_sync = None  # type: ignore[assignment]
        declare_by_flags(nn.Sequential(model) if wrapped else model, registry, groups)
        return [spec_of(param) for param in model.parameters()]


@pytest.mark.parametrize(("fields", "specs"), EXPERT_MESHES.values(), ids=EXPERT_MESHES)
def test_megatron_expert_specs_are_partial_unless_megatron_reduces_gradients(
    world: World, fields: dict[str, tuple[str, ...]], specs: tuple[P, ...]
) -> None:
    assert world.run(4, experts, fields, False) == [[*specs]] * 4
    summed = [P(*spec.entries) for spec in specs]
    assert world.run(4, experts, fields, True) == [summed] * 4
    assert world.run(4, experts, fields, True, True) == [summed] * 4, (
        "a module around Megatron's DistributedDataParallel"
    )


def refused(flags: dict[str, Any], fields: dict[str, tuple[str, ...]]) -> str:
    with ProcessGroupRegistry(Topology(pipe=2, tensor=2)) as registry:
        groups = collection(registry, **fields)
        own = flags if registry.global_rank == 3 else {}
        model = Model({"w": flagged((4, 6), **own)}, sequence_parallel=True)
        with pytest.raises(ValueError, match=r".") as error:
            declare_by_flags(model, registry, groups)
        with pytest.raises(ValueError, match="has no spec"):
            spec_of(model.get_parameter("w"))
        return str(error.value)


DENSE: dict[str, tuple[str, ...]] = {"tp": ("tensor",), "pp": ("pipe",), "dp": ()}


@pytest.mark.parametrize(
    ("flags", "fields", "said"),
    [
        (
            {**SPLIT, "sequence_parallel": True},
            DENSE,
            "w is sharded over the tensor-parallel group (tensor_model_parallel=True), and also has a partial",
        ),
        ({**SPLIT, "partition_dim": 2}, DENSE, "with partition_dim=2 and partition_stride=1"),
        ({"tensor_model_parallel": True}, DENSE, "with partition_dim=-1"),
        ({"shared": True}, DENSE, "w is shared with another stage but is not the word embedding"),
        (
            EXPERT,
            DENSE,
            "the layout of w needs the process group expt_tp, which this rank does not have; pass it in groups=",
        ),
        ({}, {"tp": ("tensor",), "pp": ("pipe",)}, "Megatron's process groups dp are missing"),
    ],
)
def test_invalid_megatron_flags_raise_on_every_rank(
    world: World, flags: dict[str, Any], fields: dict[str, tuple[str, ...]], said: str
) -> None:
    assert all(said in text for text in world.run(4, refused, flags, fields))
