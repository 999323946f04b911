"""FSDP2's fully_shard: alone, over tensor-parallel layers, with plain parameters beside; and next to DDP and our own."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from math import inf
from typing import Any

import pytest
import torch
from dtensors import Axes, LocalOperations, local, registry_of
from meshstep.amp import precision_of
from meshstep.optim import GradStats, ParallelOptimizer
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare, shard, spec_of, unshard
from meshstep.parallel.interop.dtensor import DTensor, keep_specs
from meshstep.parallel.layout.annotation import annotation_of
from optimizers import arguments
from probes import collectives, no_host_reads
from scenarios import VOCAB, Tensor1D, dense_1d
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from world import World

STEPS = 20
Full = dict[str, Tensor]


class Net(nn.Module):
    """7, 3 and 1 rows: uneven over 2 and 4 ranks, and empty on some. ``scale`` is left out of fully_shard."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.Sequential(
            nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1), nn.Flatten(0)
        )
        self.scale = nn.Parameter(torch.full((3,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return (y * self.scale.prod()).square()


def data(step: int, rows: int = 8) -> Tensor:
    return torch.randn(rows, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def sharded_net(registry: ProcessGroupRegistry, dtype: torch.dtype = torch.float64, **options: Any) -> Net:
    net = Net().to(dtype)
    mesh = registry.device_mesh(*registry.topology.data_axes)
    fully_shard(net.layers[0], mesh=mesh, **options)
    fully_shard(net, mesh=mesh, ignored_params={net.scale}, **options)
    return net


def whole(module: nn.Module, registry: ProcessGroupRegistry) -> Full:
    """The full parameters; of a DTensor first what the mesh splits, then what its declaration says beyond."""
    full = {}
    for name, param in module.named_parameters():
        if isinstance(param, DTensor):
            annotation = annotation_of(param)
            spec = annotation.spec if annotation is not None else P()
            full[name] = unshard(param.full_tensor(), spec, registry)
        else:
            annotation = annotation_of(param)
            full[name] = unshard(param, annotation.spec if annotation is not None else P(), registry)
    return full


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, fused=True)


# One batch a step -------------------------------------------------------------------------------------------------------


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
            assert seen["reduce_scatter_single"] == 2  # fully_shard's two groups of parameters
            watch = LocalOperations() if step else nullcontext()  # the first step checks on all ranks
            with collectives() as seen, watch, no_host_reads() if step else nullcontext():
                stats = optimizer.step()
            # Left out of fully_shard, one parameter is averaged here; the other collective measures.
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


def assert_equal(found: tuple[list[float], Full], expected: tuple[list[float], Full], rel: float) -> None:
    assert found[0] == pytest.approx(expected[0], rel=rel)
    for name, param in expected[1].items():
        torch.testing.assert_close(found[1][name].double(), param.double(), rtol=rel, atol=rel)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, inf])
@pytest.mark.parametrize("axes", [(("data", 2),), (("data", 4),), (("replica", 2), ("data", 2))])
def test_uneven_shards_and_a_plain_parameter_equal_the_dense_model(world: World, axes: Axes, norm_type: float) -> None:
    expected = dense_net(norm_type)
    for found in world.run(
        Topology(roles=None, **dict(axes)).world_size, train_net, axes, torch.float64, norm_type, {}
    ):
        assert_equal(found, expected, 1e-6)  # the clip coefficient has float32's 1e-7 in the denominator's 1e-6


def test_float32(world: World) -> None:
    for found in world.run(2, train_net, (("data", 2),), torch.float32, 2.0, {}):
        assert_equal(found, dense_net(2.0), 1e-3)


def train_tensor(sequence: bool) -> tuple[list[float], Full, list[str]]:
    """Tensor-parallel layers of meshstep, over which fully_shard is laid."""
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
            optimizer.backward(model(shard(rows(step), P("data"), registry)))
            with collectives() as seen:
                stats = optimizer.step()
            assert dict(seen) == {"all_reduce": 2}  # one of pending sums or of plain parameters; one measures
            assert stats is not None
            norms.append(stats.total_norm)
        specs = [f"{name}: {spec_of(param)}" for name, param in model.named_parameters()]
        return torch.stack(norms).tolist(), whole(model, registry), specs


def rows(step: int) -> Tensor:
    return torch.randint(VOCAB, (4, 5), generator=torch.Generator().manual_seed(step))


def dense_tensor(start: Full) -> tuple[list[float], Full]:
    params = {name: param.clone().requires_grad_() for name, param in start.items()}
    optimizer = adamw(list(params.values()))
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        dense_1d(params, rows(step)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(list(params.values()), 0.3)))
        optimizer.step()
    return norms, {name: param.detach() for name, param in params.items()}


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel_layers_equal_the_dense_model(world: World, sequence: bool) -> None:
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


def test_lost_declarations_are_an_error(world: World) -> None:
    for found in world.run(4, forgotten):
        assert "no spec for parameter 0 of group 0" in found
        assert "declare again after them" in found


# Mixed precision --------------------------------------------------------------------------------------------------------


def test_a_mixed_precision_policy(world: World) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for norms, params in world.run(2, train_net, (("data", 2),), torch.float32, 2.0, {"mp_policy": policy}):
        assert_equal((norms, params), dense_net(2.0), 0.1)


def train_half(how: str) -> tuple[list[float], Full, bool]:
    """A bf16-prepared model with float32 masters, sharded by fully_shard or averaged here."""
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


def test_master_weights(world: World) -> None:
    expected = world.run(2, train_half, "own")[0]
    for norms, params, masters in world.run(2, train_half, "fsdp"):
        assert masters
        assert all(param.dtype == torch.bfloat16 for param in params.values())
        assert norms == pytest.approx(expected[0], rel=0.1)  # gradients are rounded to bf16, here and there
        assert_equal(([], params), ([], expected[1]), 2e-2)


# Windows, three ways ------------------------------------------------------------------------------------------------------

SIZES = ((2, 1, 3, 2, 2, 4, 1), (1, 1, 2, 5, 1, 1, 3))  # rows of each micro-batch, by data rank
WINDOWS = ((0, 1, 2), (3, 4, 5), (6,))  # K = 3, and a tail


def micro_batch(rank: int, index: int, weighted: bool) -> Tensor:
    return data(100 * rank + index, SIZES[rank][index] if weighted else 2)


def train_windows(how: str, weighted: bool, explicit: bool) -> tuple[list[float], Full, list[dict[str, int]]]:
    with registry_of((("data", 2),)) as registry:
        net = sharded_net(registry) if how == "fsdp" else Net().double()
        run: nn.Module = DistributedDataParallel(net, process_group=registry.group("data")) if how == "ddp" else net
        managed = {} if explicit else {"accumulation_steps": 3}
        options: dict[str, Any] = {**managed, **({} if how == "own" else {"data_parallel": run})}
        optimizer = ParallelOptimizer(adamw(net.parameters()), registry, **arguments(max_norm=0.3, **options))
        rank, norms, counts = registry.coordinate["data"], [], []
        for indices in WINDOWS:
            with collectives() as seen:
                stats = run_window(run, optimizer, indices, rank, weighted, explicit, how)
            norms.append(stats.total_norm)
            counts.append({name: count for name, count in seen.items() if name != "all_gather_single"})
        return torch.stack(norms).tolist(), whole(net, registry), counts


def run_window(
    run: nn.Module,
    optimizer: ParallelOptimizer,
    indices: tuple[int, ...],
    rank: int,
    weighted: bool,
    explicit: bool,
    how: str,
) -> GradStats:
    stats = None
    for index in indices:
        last = index == indices[-1]
        optimizer.zero_grad() if not explicit or index == indices[0] else None
        if last and how == "fsdp" and not explicit:
            optimizer.window_ends()
        with optimizer.no_sync() if explicit and not last else nullcontext():
            x = micro_batch(rank, index, weighted)
            losses = run(x)
            if weighted:
                optimizer.backward(losses.sum(), weight=len(x))
            else:
                optimizer.backward(losses.mean() / (len(indices) if explicit else 1))
        if last or not explicit:
            stats = optimizer.step(last=last)
    assert stats is not None
    return stats


def dense_windows(weighted: bool) -> tuple[list[float], Full]:
    net = Net().double()
    optimizer = adamw(net.parameters())
    norms = []
    for indices in WINDOWS:
        optimizer.zero_grad()
        x = torch.cat([micro_batch(rank, index, weighted) for index in indices for rank in range(2)])
        net(x).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.3)))
        optimizer.step()
    return norms, {name: param.detach() for name, param in net.named_parameters()}


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("how", ["own", "ddp", "fsdp"])
def test_windows_are_the_same_three_ways(world: World, how: str, weighted: bool, explicit: bool) -> None:
    expected = dense_windows(weighted)
    reduced = {
        "own": [{"all_reduce": 2}] * 3,
        # DDP's own all-reduce is not seen here. It leaves the tail out, which is then averaged by us.
        "ddp": [{"all_reduce": 1}, {"all_reduce": 1}, {"all_reduce": 1 if explicit else 2}],
        "fsdp": [{"reduce_scatter_single": 2, "all_reduce": 2}] * 3,
    }[how]
    for norms, params, counts in world.run(2, train_windows, how, weighted, explicit):
        assert_equal((norms, params), expected, 1e-6)
        assert counts == reduced


def unannounced(explicit: bool) -> str:
    with registry_of((("data", 2),)) as registry:
        net = sharded_net(registry)
        steps = None if explicit else 3
        optimizer = ParallelOptimizer(
            torch.optim.SGD(net.parameters()), registry, data_parallel=net, accumulation_steps=steps
        )
        with optimizer.no_sync() if explicit else nullcontext():
            optimizer.backward(net(data(0)).mean())
        try:
            optimizer.step(last=True)
        except RuntimeError as error:
            return str(error)
        return "no error"


@pytest.mark.parametrize("explicit", [False, True])
def test_a_tail_that_fully_shard_was_not_told_of(world: World, explicit: bool) -> None:
    for found in world.run(2, unannounced, explicit):
        assert "Call window_ends() before the forward of the last one" in found


def abandoned() -> tuple[str, float, float]:
    """What zero_grad says in the middle of a window; the gradient of a batch, and what it is if one goes on regardless."""
    with registry_of((("data", 2),)) as registry:
        net = sharded_net(registry)
        weight: Any = net.layers[0].weight
        optimizer = ParallelOptimizer(torch.optim.SGD(net.parameters()), registry, data_parallel=net)
        optimizer.backward(net(data(1)).mean())
        clean = float(local(weight.grad).sum())
        optimizer.zero_grad()
        with optimizer.no_sync():
            optimizer.backward(net(data(0)).mean())
        try:
            optimizer.zero_grad()
            message = "no error"
        except RuntimeError as error:
            message = str(error)
        net.zero_grad()
        net(data(1)).mean().backward()
        return message, clean, float(local(weight.grad).sum())


def test_gradients_that_fully_shard_keeps(world: World) -> None:
    for message, clean, regardless in world.run(2, abandoned):
        assert "fully_shard keeps the gradients of micro-batches" in message
        assert abs(regardless - clean) > 0.01


def resumed() -> bool:
    """State saved in the middle of a run, loaded into new objects, goes on with the same bits."""
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


def test_state_dict(world: World) -> None:
    assert world.run(2, resumed) == [True, True]
