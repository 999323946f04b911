"""Norms and clipping of DTensor models without a registry: the layouts are read from the meshes of the DTensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dtensor_layouts import LAYOUTS, Net, batch, expert_gradient, mesh_of, net, shard_layers
from meshstep.optim import (
    ClipState,
    ParallelOptimizer,
    PerParameter,
    ReplicaMismatchError,
    clip_grad_norm_,
    global_norm,
    scale_gradients_,
)
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from meshstep.parallel.interop.inferred_registry import _topology, _View, registry_of_meshes
from meshstep.parallel.mesh.refinement import Dim
from torch import nn
from world import World


def dense_norm(norm_type: float) -> float:
    model = net()
    model(batch()).square().mean().backward()
    model.experts.grad = expert_gradient()
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type))


def backward(name: str) -> Net:
    model = net()
    data = LAYOUTS[name](model)
    kept = model.experts.grad
    local = batch().chunk(data)[dist.get_rank() * data // dist.get_world_size()]
    model(local).square().mean().backward()
    model.experts.grad = kept
    return model


def norms(name: str, norm_type: float) -> tuple[float, float, float, str]:
    """Return the gradient norm, the norm after scaling to 0.5, the norm after clipping to 0.25, and torch's result.

    Torch's result is a text: the 2-norm of the clipped gradients, or the error.
    """
    model = backward(name)
    stats = global_norm(model, norm_type=norm_type)
    scale_gradients_(model.parameters(), stats.clip_coef_for(0.5))
    halved = clip_grad_norm_(model.parameters(), 0.25, norm_type=norm_type)
    after = global_norm(model.named_parameters(), norm_type=norm_type)
    try:
        torchs = str(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    except (RuntimeError, ValueError) as error:
        torchs = f"{type(error).__name__}: {error}"
    return float(stats), float(halved), float(after), torchs


@pytest.mark.long
@pytest.mark.default_cases(7)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("name", LAYOUTS)
def test_norm_of_dtensors_equals_dense_norm(world: World, name: str, norm_type: float) -> None:
    wanted = dense_norm(norm_type)
    assert wanted > 0.5
    for norm, halved, after, _ in world.run(4, norms, name, norm_type):
        assert norm == pytest.approx(wanted, rel=1e-12)
        assert halved == pytest.approx(0.5, rel=1e-5)
        assert after == pytest.approx(0.25, rel=1e-5)


@pytest.mark.parametrize("name", ["fsdp_and_tensor_parallel", "experts_on_another_mesh"])
def test_torch_norm_raises_for_dtensors_on_several_meshes(world: World, name: str) -> None:
    """On these layouts of `test_norm_of_dtensors_equals_dense_norm`, torch's `get_total_norm` raises."""
    assert all("Error" in torchs for *_, torchs in world.run(4, norms, name, 2.0))


def stages() -> tuple[float, float]:
    """Return the norm of two pipeline stages with two and three parameters, each with its own mesh, and the dense norm."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    stage, generator = dist.get_rank() // 2, torch.Generator().manual_seed(3)
    meshes = [DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",)), DeviceMesh("cpu", [2, 3], mesh_dim_names=("tp",))]
    full = [torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(5)]
    own = full[:2] if stage == 0 else full[2:]
    params = []
    for index, gradient in enumerate(own):
        placements = [Shard(0)] if index else [Replicate()]
        param = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), meshes[stage], placements))
        param.grad = distribute_tensor(gradient, meshes[stage], placements)
        params.append(param)
    return float(global_norm(params)), float(torch.cat([one.flatten() for one in full]).norm())


def test_norm_without_registry_covers_pipeline_stages_with_separate_meshes(world: World) -> None:
    for norm, wanted in world.run(4, stages):
        assert norm == pytest.approx(wanted, rel=1e-12)


def equal_stages(named: bool) -> tuple[float, float, tuple[str, ...]]:
    """Return the norm of two pipeline stages on slices of one mesh, the dense norm, and the pipeline axes.

    The parameters of both stages have equal shapes and placements.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = mesh_of((2, 2), ("pp", "fsdp"))
    gradients = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    gradient = distribute_tensor(gradients[mesh["pp"].get_local_rank()], mesh["fsdp"], [Shard(0)], src_data_rank=None)
    param = nn.Parameter(torch.zeros_like(gradient))
    param.grad = gradient
    norm = clip_grad_norm_([("layer", param)] if named else [param], 1.0)
    return float(norm), float(gradients.norm()), registry_of_meshes([param]).topology.pipe_axes


@pytest.mark.parametrize("named", [False, True])
def test_pipeline_stages_of_equal_shapes_are_distinguished_by_root_mesh_axis(world: World, named: bool) -> None:
    """Without the axis `pp` of the mesh from which `fsdp` was sliced, the stages would count as diverged replicas."""
    for norm, wanted, pipe_axes in world.run(4, equal_stages, named):
        assert norm == pytest.approx(wanted, rel=1e-12)
        assert pipe_axes == ("pp",)


def experts_on_slice(declared: bool) -> tuple[float | str, float]:
    """Give each rank of `ep` its own experts, as DTensors on a slice that lacks `ep`.

    Return the norm or the error, and the dense norm.
    """
    from meshstep.parallel import P, annotate
    from torch.distributed.tensor import Shard, distribute_tensor

    dense, moe = mesh_of((4,), ("dp",)), mesh_of((2, 2), ("ep", "ep_shard"))
    gradients = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    weight = nn.Parameter(distribute_tensor(torch.zeros(4, 2, dtype=torch.float64), dense, [Shard(0)]))
    weight.grad = distribute_tensor(torch.ones(4, 2, dtype=torch.float64), dense, [Shard(0)])
    own = gradients[moe["ep"].get_local_rank()]
    experts = nn.Parameter(distribute_tensor(torch.zeros_like(own), moe["ep_shard"], [Shard(1)], src_data_rank=None))
    experts.grad = distribute_tensor(own, moe["ep_shard"], [Shard(1)], src_data_rank=None)
    if declared:
        annotate(experts, P("ep"))
    try:
        return float(clip_grad_norm_([("weight", weight), ("experts", experts)], 1.0)), float(gradients.norm())
    except ReplicaMismatchError as error:
        return str(error), float(gradients.norm())


def test_norm_error_names_mesh_axis_along_which_experts_differ(world: World) -> None:
    for error, _ in world.run(4, experts_on_slice, False):
        assert str(error).startswith("replicas differ, and gradients are unchanged:")
        assert "experts: the gradient differs along axis 'ep'" in str(error)
        assert "A gradient that differs belongs to such a shard" in str(error)
        assert "align_replicas" not in str(error), "it needs a ParallelOptimizer"
        assert "(if replicas may differ, pass registry=, and the call does not compare replicas)" in str(error)


def test_norm_counts_experts_along_declared_axis_outside_their_submesh(world: World) -> None:
    for norm, experts in world.run(4, experts_on_slice, True):
        assert norm == pytest.approx((8 + experts**2) ** 0.5, rel=1e-12)


def two_roles() -> tuple[float, float, float, str]:
    """Give two DTensors equal gradients on two meshes that call the same ranks `tp` and `edp`.

    Return the norm of both, their norm in a step with the registry that the error of `for_model` proposes, the norm of one
    full gradient, and this error.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    tensor, experts = mesh_of((2, 2), ("dp", "tp")), mesh_of((2, 2), ("ep", "edp"))
    gradient = torch.randn(4, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    model = nn.Module()
    for name, mesh in (("dense", tensor["tp"]), ("experts", experts["edp"])):
        param = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, [Shard(0)]))
        param.grad = distribute_tensor(gradient, mesh, [Shard(0)])
        model.register_parameter(name, param)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="have more than one role") as caught:
        ParallelOptimizer.for_model(model, sgd)
    norm = float(global_norm(model))
    registry = ProcessGroupRegistry(Topology.of_meshes(tensor, experts, roles={"tp": "model"}))
    return norm, float(ParallelOptimizer(sgd, registry).step().total_norm), float(gradient.norm()), str(caught.value)


def test_norm_without_registry_does_not_depend_on_roles_of_mesh_dims(world: World) -> None:
    """An optimizer averages over data axes, so it needs the role of the ranks that are called `tp` and `edp`."""
    for norm, stepped, wanted, error in world.run(4, two_roles):
        assert norm == stepped == pytest.approx(wanted * 2**0.5, rel=1e-12)
        assert error.startswith("mesh dims 'tp' and 'edp' are along the same ranks")
        assert "Topology.of_meshes(mesh, other_mesh, roles={'tp': 'model'})" in error


def views_of(*meshes: tuple[str, int, int], sliced_off: tuple[str, int, int]) -> list[_View]:
    """Return the `_View` of each of 12 ranks. ``meshes`` are the dims of the DTensors' mesh, ``sliced_off`` is a dim of
    the root mesh that the DTensors' mesh lacks, each as (name, size, stride)."""

    def dim_at(rank: int, name: str, size: int, stride: int) -> Dim:
        first = rank - rank // stride % size * stride
        return Dim(0, name, tuple(range(first, first + size * stride, stride)))

    return [_View([dim_at(rank, *dim) for dim in meshes], [dim_at(rank, *sliced_off)], [], ()) for rank in range(12)]


def test_root_mesh_dim_becomes_topology_axis_only_if_it_forms_a_mesh_with_dtensor_dims() -> None:
    """The DTensors' mesh dim has size 6 and stride 2 on 12 ranks. With a dim of size 2 and stride 1 it forms a (6, 2)
    mesh; with a dim of size 3 and stride 1 it forms no mesh."""
    nesting = _topology(views_of(("a", 6, 2), sliced_off=("b", 2, 1)), any_roles=True)
    assert (nesting.axes, nesting.sizes) == (("a", "b"), (6, 2))
    other = _topology(views_of(("a", 6, 2), sliced_off=("c", 3, 1)), any_roles=True)
    assert (other.axes, other.sizes) == (("a", "replica_2x1"), (6, 2))


def test_root_mesh_dim_is_pipeline_axis_if_parameters_differ_along_it() -> None:
    views = views_of(("a", 6, 2), sliced_off=("b", 2, 1))
    assert _topology(views, any_roles=True).role("b") == "data"
    stages = [view._replace(parameters=(("", (2 + rank % 2,)),)) for rank, view in enumerate(views)]
    assert _topology(stages, any_roles=True).role("b") == "pipe"


def partial_gradient(is_declared: bool) -> Any:
    """Measure a gradient that is partial over the mesh. Return the norm, placements and gradient, or the error."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = mesh_of((2,), ("tp",))
    param = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()]))
    param.grad = DTensor.from_local(torch.tensor([1.0, 2.0 * dist.get_rank()]), mesh, [Partial()])
    if is_declared:
        annotate(param, P(partial="tp"), "weight")
        with pytest.raises(ValueError, match="partial") as caught:
            global_norm([param])
        return str(caught.value)
    norm, grad = float(global_norm([param])), param.grad
    assert isinstance(grad, DTensor)
    return norm, str(grad.placements), grad.to_local().tolist()


def test_partial_gradient_of_dtensor_is_summed_without_registry(world: World) -> None:
    """Norm layers under torch's `SequenceParallel` have such gradients."""
    for norm, placements, gradient in world.run(2, partial_gradient, False):
        assert norm == pytest.approx(8**0.5)
        assert placements == "(Replicate(),)"
        assert gradient == [2.0, 2.0]


def test_gradient_declared_partial_but_not_summed_raises(world: World) -> None:
    for text in world.run(2, partial_gradient, True):
        assert "must still be summed over tp" in str(text)


def plain_differs(of: str) -> str:
    """Change a plain parameter, or its gradient, on the last rank. The first call on a mesh compares replicas.

    Return the error.
    """
    model = net()
    shard_layers(model, mesh_of((4,), (f"tensor_{of}",)))
    model(batch()).square().mean().backward()
    if dist.get_rank() == 3:
        changed = model.gain if of == "parameter" else model.gain.grad
        assert changed is not None
        with torch.no_grad():
            changed[2] += 1e-3
    with pytest.raises(ReplicaMismatchError) as caught:
        clip_grad_norm_(model.named_parameters(), 1.0)
    return str(caught.value)


@pytest.mark.parametrize("of", ["parameter", "gradient"])
def test_clip_error_names_diverged_plain_tensor_and_its_mesh_axis(world: World, of: str) -> None:
    for text in world.run(4, plain_differs, of):
        assert f"gain: the {of} differs" in text
        assert f"tensor_{of}" in text


def plain_only() -> tuple[float, tuple[str, ...]]:
    """Return the norm and the axes for a model without DTensors, whose parameters count as replicas."""
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    model.weight.grad = torch.full((2, 3), 2.0)
    return float(clip_grad_norm_(model.parameters(), 1.0)), registry_of_meshes([*model.parameters()]).topology.axes


def test_model_without_dtensors_is_treated_as_replicated(world: World) -> None:
    for norm, axes in world.run(3, plain_only):
        assert norm == pytest.approx(2 * 6**0.5)
        assert axes == ("replica_3x1",)
    assert plain_only_here() == pytest.approx(2 * 6**0.5)


def plain_only_here() -> float:
    weight = nn.Parameter(torch.ones(6))
    weight.grad = torch.full((6,), 2.0)
    return float(clip_grad_norm_([weight], 1.0))


def same_registry() -> list[bool]:
    model, other = backward("experts_on_another_mesh"), backward("tensor_parallel")
    one, two = registry_of_meshes([*model.parameters()]), registry_of_meshes([*other.parameters()])
    return [
        registry_of_meshes([*model.parameters()]) is one,
        registry_of_meshes([*other.parameters()]) is two,
        one is not two,
        isinstance(one, ProcessGroupRegistry),
    ]


def test_registry_is_inferred_once_per_set_of_meshes(world: World) -> None:
    assert world.run(4, same_registry) == [[True] * 4] * 4


def rule_per_parameter() -> list[float]:
    model = backward("experts_on_another_mesh")
    clip = ClipState(PerParameter(0.01))
    clip_grad_norm_(model.named_parameters(), clip)
    return [float(global_norm([param])) for param in model.parameters() if param.grad is not None]


def test_per_parameter_rule_clips_each_parameter_without_registry(world: World) -> None:
    for found in world.run(4, rule_per_parameter):
        assert max(found) < 0.01 + 1e-9


def test_number_as_registry_argument_raises_with_advice() -> None:
    with pytest.raises(TypeError, match=r"registry is 1.0: give a ProcessGroupRegistry.*write norm_type=1.0"):
        clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0, 1.0)  # type: ignore[arg-type]


def test_returned_stats_can_be_used_like_norm_tensor_of_torch() -> None:
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.full((4,), 2.0)
    stats = clip_grad_norm_([weight], 1.0)
    assert float(stats) == stats.item() == 4.0
    assert f"{stats:.2f}" == "4.00"
    assert stats.full_tensor() is stats.total_norm
    assert [bool(truth) for truth in (stats > 3, stats >= 4, stats < 4, stats <= 4.0)] == [True, True, False, True]
    anything: Any = stats
    assert torch.isfinite(anything)
    assert not torch.isnan(anything)
    assert torch.stack([anything, anything]).tolist() == [4.0, 4.0]
    assert str(stats) == f"{stats}" == "norm 4, clipped x0.25"
