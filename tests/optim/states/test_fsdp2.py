"""FSDP2 (fully_shard): alone, with tensor-parallel layers, with plain parameters, in half precision."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from math import inf
from typing import Any

import pytest
import torch
from arguments import arguments
from dtensors import Axes, LocalOperations, local, registry_of
from fully_sharded import Full, Net, adamw, assert_equal, data, sharded_net, whole
from meshstep.amp import precision_of
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare, shard, spec_of
from meshstep.parallel.interop.dtensor import keep_specs
from probes import collectives, no_host_reads
from scenarios import Tensor1D, batch, dense_1d
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from world import World

STEPS = 20


# One batch per step ---------------------------------------------------------------------------------------------------


def train_net(axes: Axes, dtype: torch.dtype, norm_type: float, options: dict[str, Any]) -> tuple[list[float], Full]:
    with registry_of(axes) as registry:
        net = sharded_net(registry, dtype, **options)
        optimizer = ParallelOptimizer(
            adamw(net.parameters()), registry, **arguments(max_norm=0.3, norm_type=norm_type, data_parallel=net)
        )
        norms = []
        for step in range(STEPS):
            optimizer.zero_grad()
            x = shard(data(step).to(dtype), P(registry.topology.data_axes), registry)
            with collectives() as seen:
                optimizer.backward(net(x).mean())
            assert seen["reduce_scatter_single"] == 2  # fully_shard has two parameter groups
            watch = LocalOperations() if step else nullcontext()  # the first step runs additional checks
            with collectives() as seen, watch, no_host_reads() if step else nullcontext():
                stats = optimizer.step()
            # One parameter is excluded from fully_shard and averaged by the optimizer; the other collective measures
            # the norm.
            assert dict(seen) == ({"all_reduce": 1, "all_gather_single": 1} if norm_type == inf else {"all_reduce": 2})
            assert stats is not None
            norms.append(stats.total_norm)
        return torch.stack(norms).tolist(), whole(net, registry)


def dense_net(norm_type: float) -> tuple[list[float], Full]:
    net = Net().double()
    optimizer = adamw(net.parameters())
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        net(data(step)).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.3, norm_type)))
        optimizer.step()
    return norms, {name: param.detach() for name, param in net.named_parameters()}


@pytest.mark.long
@pytest.mark.parametrize("norm_type", [1.0, 2.0, inf])
@pytest.mark.parametrize("axes", [(("data", 2),), (("data", 4),), (("replica", 2), ("data", 2))])
def test_fsdp2_with_uneven_shards_and_plain_parameter_matches_dense_model(
    world: World, axes: Axes, norm_type: float
) -> None:
    expected = dense_net(norm_type)
    for found in world.run(
        Topology(roles=None, **dict(axes)).world_size, train_net, axes, torch.float64, norm_type, {}
    ):
        assert_equal(found, expected, 1e-10)


def test_fsdp2_in_float32_matches_dense_model(world: World) -> None:
    for found in world.run(2, train_net, (("data", 2),), torch.float32, 2.0, {}):
        assert_equal(found, dense_net(2.0), 1e-3)


def train_tensor(sequence: bool) -> tuple[list[float], Full, list[str]]:
    """Apply fully_shard to tensor-parallel layers of meshstep and train them. Return norms, full parameters, and specs."""
    with registry_of((("data", 2), ("tensor", 2))) as registry:
        torch.manual_seed(11)
        model = Tensor1D(registry, torch.float64, sequence)
        mesh = registry.device_mesh("data")
        left_out: set[nn.Parameter] = set() if sequence else {*model.norm.parameters(), model.emb.weight}
        declare(model)
        with keep_specs(model):
            fully_shard(model.up, mesh=mesh)
            fully_shard(model, mesh=mesh, ignored_params=left_out)
        optimizer = ParallelOptimizer(adamw(model.parameters()), registry, max_norm=0.3, data_parallel=model)
        norms = []
        for step in range(STEPS):
            optimizer.zero_grad()
            optimizer.backward(model(shard(batch(step), P("data"), registry)))
            with collectives() as seen:
                stats = optimizer.step()
            # One collective measures the norm. The others reduce partial gradients, or gradients of the plain parameters
            # (sharded and replicated ones separately).
            assert dict(seen) == {"all_reduce": 2 if sequence else 3}
            assert stats is not None
            norms.append(stats.total_norm)
        specs = [f"{name}: {spec_of(param)}" for name, param in model.named_parameters()]
        return torch.stack(norms).tolist(), whole(model, registry), specs


def dense_tensor(start: Full) -> tuple[list[float], Full]:
    params = {name: param.clone().requires_grad_() for name, param in start.items()}
    optimizer = adamw(list(params.values()))
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        dense_1d(params, batch(step)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(list(params.values()), 0.3)))
        optimizer.step()
    return norms, {name: param.detach() for name, param in params.items()}


@pytest.mark.long
@pytest.mark.parametrize("sequence", [False, True])
def test_fsdp2_with_tensor_parallel_layers_matches_dense_model(world: World, sequence: bool) -> None:
    torch.manual_seed(11)
    start = Tensor1D(ProcessGroupRegistry(Topology(tensor=1)), torch.float64, False)
    expected = dense_tensor({name: param.detach() for name, param in start.named_parameters()})
    for norms, params, specs in world.run(4, train_tensor, sequence):
        assert_equal((norms, params), expected, 1e-6)
        assert "up.weight: P(('tensor', 'data'))" in specs
        assert "down.weight: P('data', 'tensor')" in specs
        assert ("norm.weight: P('data', partial='tensor')" if sequence else "norm.weight: P()") in specs


def forgotten() -> str:
    with registry_of((("data", 2), ("tensor", 2))) as registry:
        model = Tensor1D(registry, torch.float32, False)
        fully_shard(model, mesh=registry.device_mesh("data"))
        try:
            ParallelOptimizer(adamw(model.parameters()), registry)
        except ValueError as error:
            return str(error)
        return "no error"


def test_optimizer_raises_if_fully_shard_removed_declared_specs(world: World) -> None:
    for found in world.run(4, forgotten):
        assert "no spec for parameter 0 of group 0" in found
        assert "declare again after them" in found


# Mixed precision --------------------------------------------------------------------------------------------------------


def test_fsdp2_mixed_precision_policy_matches_dense_model(world: World) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for norms, params in world.run(2, train_net, (("data", 2),), torch.float32, 2.0, {"mp_policy": policy}):
        assert_equal((norms, params), dense_net(2.0), 0.1)


def train_half(how: str) -> tuple[list[float], Full, bool]:
    """Train a bf16 model with float32 master weights, sharded by fully_shard or averaged by the optimizer.

    Return norms, full parameters, and whether all master weights are float32.
    """
    with registry_of((("data", 2),)) as registry:
        mode = precision_of("bf16")
        net = Net()
        mode.prepare(net, registry)
        if how == "fsdp":
            fully_shard(net.layers[0], mesh=registry.device_mesh("data"))
            fully_shard(net, mesh=registry.device_mesh("data"), ignored_params={net.scale})
        options: dict[str, Any] = {"data_parallel": net} if how == "fsdp" else {}
        optimizer = ParallelOptimizer(
            adamw(net.parameters()), registry, **arguments(precision=mode, max_norm=0.3, **options)
        )
        norms = []
        for step in range(STEPS):
            optimizer.zero_grad()
            optimizer.backward(net(shard(data(step).float(), P("data"), registry)).mean())
            stats = optimizer.step()
            assert stats is not None
            norms.append(stats.total_norm)
        masters = {param.dtype for group in optimizer.param_groups for param in group["params"]}
        return torch.stack(norms).tolist(), whole(net, registry), masters == {torch.float32}


def test_fsdp2_with_master_weights_matches_replicated_training(world: World) -> None:
    expected = world.run(2, train_half, "own")[0]
    for norms, params, masters in world.run(2, train_half, "fsdp"):
        assert masters
        assert all(param.dtype == torch.bfloat16 for param in params.values())
        assert norms == pytest.approx(expected[0], rel=0.1)  # gradients are rounded to bf16 in both runs
        assert_equal(([], params), ([], expected[1]), 2e-2)


# State dicts ---------------------------------------------------------------------------------------------------------


def resumed() -> bool:
    """Return whether a run that loads its state into new objects midway is bitwise identical to an uninterrupted run."""
    with registry_of((("data", 2),)) as registry:

        def steps(net: Net, optimizer: ParallelOptimizer, indices: range) -> None:
            for step in indices:
                optimizer.zero_grad()
                optimizer.backward(net(shard(data(step), P("data"), registry)).mean())
                optimizer.step()

        def make() -> tuple[Net, ParallelOptimizer]:
            net = sharded_net(registry)
            layers: list[Any] = [*net.layers.parameters()]
            optimizer = ParallelOptimizer(adamw(layers), registry, max_norm=0.3, data_parallel=net)
            optimizer.add_param_group({"params": [net.scale], "lr": 0.1})
            return net, optimizer

        net, optimizer = make()
        steps(net, optimizer, range(3))
        model = {name: value.detach().clone() for name, value in net.state_dict().items()}
        state = copy.deepcopy(optimizer.state_dict())
        steps(net, optimizer, range(3, 6))
        again, second = make()
        again.load_state_dict(model)
        second.load_state_dict(state)
        steps(again, second, range(3, 6))
        pairs = zip(net.parameters(), again.parameters(), strict=True)
        return all(torch.equal(local(one), local(other)) for one, other in pairs)


def test_fsdp2_run_resumes_bitwise_from_state_dict(world: World) -> None:
    assert world.run(2, resumed) == [True, True]


# User-defined gradient divide factor over one rank --------------------------------------------------------------------


def divided(dtype: torch.dtype, replicas: int, sums: bool) -> tuple[Full, Full]:
    """Return gradients with a divide factor of 4 on a mesh of ``replicas`` x 1 ranks, and gradients of one process."""
    axes = {"replica": replicas, "shard": 1}
    with ProcessGroupRegistry(Topology(roles={"replica": "data", "shard": "data"}, **axes)) as registry:
        layer, dense = nn.Linear(5, 3).to(dtype), nn.Linear(5, 3).to(dtype)
        dense.load_state_dict(layer.state_dict())
        net = fully_shard(layer, mesh=registry.device_mesh("replica", "shard"))
        net.set_gradient_divide_factor(4.0)
        net.set_force_sum_reduction_for_comms(sums)
        optimizer = ParallelOptimizer(adamw(layer.named_parameters()), registry, data_parallel=layer)
        x = data(0, 4).to(dtype)
        optimizer.backward(layer(x[registry.rank("replica") :: replicas]).sum())
        (dense(x).sum() / 4).backward()
        return gradients(layer), gradients(dense)


def gradients(module: nn.Module) -> Full:
    return {name: local(param.grad).double() for name, param in module.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_fsdp2_gradient_divide_factor_is_applied_once(world: World, dtype: torch.dtype, replicas: int) -> None:
    for sums in (False, True):
        for found, expected in world.run(replicas, divided, dtype, replicas, sums):
            for name, gradient in expected.items():
                tolerance = 2 * torch.finfo(dtype).eps
                torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=tolerance, msg=name)
