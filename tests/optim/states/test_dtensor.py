"""DTensor parameters: specs from placements, and steps of mixed lists that equal the dense model's."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import slice_of
from dtensors import Axes, LocalOperations, local, registry_of
from meshstep.optim import ParallelOptimizer, clip_grad_norm_, clip_grad_value_, global_norm, sync_gradients
from meshstep.parallel import P, ProcessGroupRegistry, annotate, declare, spec_of
from optimizers import arguments
from probes import no_host_reads
from torch import Tensor, nn
from world import World

GRID = (("data", 2), ("tensor", 2))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# Specs ----------------------------------------------------------------------------------------------------------------


def layouts() -> list[str]:
    """The spec of DTensors in many layouts; each must describe the piece that the rank really has."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    found = []
    with registry_of(GRID) as registry:
        mesh = registry.device_mesh("data", "tensor")

        def note(name: str, param: Tensor, full: Tensor) -> None:
            spec = spec_of(param)
            expected = slice_of(full, spec, registry.topology, registry.global_rank)
            assert torch.equal(param.to_local(), expected), f"{name}: {spec}"  # type: ignore[attr-defined]
            found.append(f"{name}: {spec}")

        full = randn(8, 5)
        for placements in (
            (Shard(0), Replicate()),
            (Replicate(), Shard(1)),
            (Shard(1), Shard(0)),
            (Shard(0), Shard(0)),
            (Replicate(), Replicate()),
        ):
            note(str(placements), nn.Parameter(distribute_tensor(full, mesh, placements)), full)
        swapped = registry.device_mesh("tensor", "data")
        note("(tensor, data)", nn.Parameter(distribute_tensor(full, swapped, (Shard(0), Shard(0)))), full)

        torch.manual_seed(5)
        dense = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)).double()
        weights = {name: param.detach().clone() for name, param in dense.named_parameters()}
        parallelize_module(dense, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(dense, mesh=mesh["data"])
        for name, param in dense.named_parameters():
            note(name, param, weights[name])
    return found


def test_specs_describe_the_pieces(world: World) -> None:
    for found in world.run(4, layouts):
        assert found == [
            "(Shard(dim=0), Replicate()): P('data')",
            "(Replicate(), Shard(dim=1)): P(None, 'tensor')",
            "(Shard(dim=1), Shard(dim=0)): P('tensor', 'data')",
            "(Shard(dim=0), Shard(dim=0)): P(('data', 'tensor'))",
            "(Replicate(), Replicate()): P()",
            "(tensor, data): P(('tensor', 'data'))",
            "0.weight: P(('tensor', 'data'))",  # fully_shard cuts what the tensor axis has left
            "0.bias: P(('tensor', 'data'))",
            "1.weight: P('data', 'tensor')",
            "1.bias: P('data')",
        ]


def merged(said: P, dim: int) -> str:
    from torch.distributed.tensor import Shard, distribute_tensor

    with registry_of(GRID) as registry:
        param = nn.Parameter(distribute_tensor(randn(4, 6), registry.device_mesh("data"), (Shard(dim),)))
        annotate(param, said, "w")
        try:
            return str(spec_of(param))
        except ValueError as error:
            return str(error)


@pytest.mark.parametrize(
    ("said", "dim", "expected"),
    [
        (P(), 0, "P('data')"),
        (P("tensor"), 0, "P(('tensor', 'data'))"),
        (P("tensor"), 1, "P('tensor', 'data')"),
        (P(partial="tensor"), 1, "P(None, 'data', partial='tensor')"),
        (P(("tensor", "data")), 0, "P(('tensor', 'data'))"),
        (P("data"), 0, "P('data')"),
        (
            P(("data", "tensor")),
            0,
            "make it P(('tensor', 'data')); declare only what the mesh doesn't say: P('tensor')",
        ),
        (P("data"), 1, "declare only what the mesh doesn't say: P()"),
        (P(owned={"data": 0}), 0, "declare only what the mesh doesn't say: P()"),
    ],
)
def test_declarations_and_placements_are_merged(world: World, said: P, dim: int, expected: str) -> None:
    for found in world.run(4, merged, said, dim):
        assert found == expected or found.endswith(expected)


def refused(kind: str) -> str:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with registry_of(GRID) as registry:
        mesh = registry.device_mesh("data")
        if kind == "names":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        elif kind == "no names":
            mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
        elif kind == "ranks":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "data"))["data"]
        param = nn.Parameter(distribute_tensor(randn(4, 6), mesh, (Shard(0),) * mesh.ndim))
        if kind not in ("undeclared", "mixed"):
            annotate(param, P(), "w")
        plain = nn.Parameter(randn(2))
        make: Any = torch.optim.Muon if kind == "Muon" else torch.optim.AdamW
        try:
            ParallelOptimizer(make([param, *([plain] if kind == "mixed" else [])]), registry)
        except ValueError as error:
            return str(error)
        return "no error"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("names", "w is on a device mesh with dim 'dp', but the axes are data, tensor"),
        ("no names", "w is on a mesh without dim names"),
        ("ranks", "w is on a device mesh whose dim 'data' holds ranks (0, 1), but the axis of"),
        (
            "undeclared",
            "no spec for parameter 0 of group 0 (shape (sharded, 6)), and Topology(data=2, tensor=2) has model axes",
        ),
        ("mixed", "(shape (sharded, 6)), parameter 1 of group 0 (shape (2))"),
        ("Muon", "Muon computes with whole matrices"),
    ],
)
def test_layouts_that_say_too_little(world: World, kind: str, message: str) -> None:
    assert message in world.run(4, refused, kind)[0]


# Mixed lists ----------------------------------------------------------------------------------------------------------


def mixed(registry: ProcessGroupRegistry) -> tuple[list[nn.Parameter], list[Tensor]]:
    """DTensors (uneven, with empty pieces) and a plain parameter with gradients, and the dense gradients."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    grid, tensor = registry.device_mesh("data", "tensor"), registry.device_mesh("tensor")
    params: list[nn.Parameter] = []
    dense = [randn(5, 4, seed=1), randn(3, 6, seed=2), randn(1, 3, seed=3), randn(7, seed=4), randn(4, 2, seed=5)]
    for full, mesh, placements in (
        (dense[0], grid, (Shard(0), Shard(1))),
        (dense[1], tensor, (Shard(1),)),
        (dense[2], grid, (Replicate(), Shard(0))),
        (dense[3], tensor, (Replicate(),)),
    ):
        param = nn.Parameter(distribute_tensor(torch.zeros_like(full), mesh, placements))
        param.grad = distribute_tensor(full, mesh, placements)
        params.append(param)
    plain = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    plain.grad = slice_of(dense[4], P("tensor"), registry.topology, registry.global_rank)
    annotate(plain, P("tensor"))
    return [*params, plain], dense


def measured(norm_type: float) -> list[tuple[float, float]]:
    results = []
    with registry_of(GRID) as registry:
        params, dense = mixed(registry)
        expected = float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in dense]), norm_type))
        results.append((float(global_norm(params, registry, norm_type).total_norm), expected))
        with LocalOperations() as seen, no_host_reads():
            stats = clip_grad_norm_(params, 0.5, registry, norm_type)
        assert seen.collectives == (["_allgather_base_"] if norm_type == inf else ["allreduce_"])
        results.append((float(stats.total_norm), expected))
        results.append((float(global_norm(params, registry, norm_type).total_norm), 0.5))
        clip_grad_value_(params, 1e-3, registry)
        grads = [local(param.grad).abs() for param in params if param.grad is not None]
        results.append((float(torch.cat([grad.flatten() for grad in grads]).max()), 1e-3))
        # Nothing keeps the gradients' memory.
        params[0].grad = None
        assert all(getattr(value, "grad", None) is None for value in vars(params[0]).values())
        with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
            nn.utils.clip_grad_norm_(params, 0.5, norm_type)
    return results


@pytest.mark.parametrize("norm_type", [1.0, 2.0, inf])
def test_norm_and_clipping_of_mixed_lists(world: World, norm_type: float) -> None:
    for results in world.run(4, measured, norm_type):
        for found, expected in results:
            assert found == pytest.approx(expected, rel=2e-6)


def stepped(fused: bool) -> list[tuple[Tensor, Tensor]]:
    """Steps from a state that torch made, of DTensors and plain parameters in one group; pieces found and expected."""
    with registry_of(GRID) as registry:
        params, dense = mixed(registry)
        options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
        inner = torch.optim.AdamW(params, **options)
        inner.step()  # one at a time, torch steps mixed lists
        optimizer = ParallelOptimizer(inner, registry, max_norm=0.3)
        if fused:
            for group in optimizer.param_groups:
                group["fused"] = True
        full = [nn.Parameter(torch.zeros_like(grad)) for grad in dense]
        expected = torch.optim.AdamW(full, **options)
        for param, grad in zip(full, dense, strict=True):
            param.grad = grad.clone()
        expected.step()
        for _ in range(3):
            stats = optimizer.step()
            assert stats is not None
            nn.utils.clip_grad_norm_(full, 0.3)
            expected.step()
        optimizer.zero_grad()
        assert all(param.grad is None for param in params)
        return [
            (
                local(param),
                slice_of(whole.detach(), spec_of(param), registry.topology, registry.global_rank),
            )
            for param, whole in zip(params, full, strict=True)
        ]


@pytest.mark.parametrize("fused", [False, True])
def test_steps_of_mixed_lists(world: World, fused: bool) -> None:
    for pairs in world.run(4, stepped, fused):
        for found, expected in pairs:
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


# torch's tensor and sequence parallelism --------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return out


def parallel_block(registry: ProcessGroupRegistry) -> Block:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(2)
    plan: Any = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    block = Block().double()
    parallelize_module(block, registry.device_mesh("tensor"), plan)
    return block


def train_block(axes: Axes, functional: bool, options: dict[str, Any]) -> tuple[list[float], list[Tensor]]:
    with registry_of(axes) as registry:
        block = parallel_block(registry)
        declare(block, {"norm.*": P(partial="tensor"), "*": P()})
        inner = torch.optim.SGD(block.parameters(), lr=0.5, fused=True)
        optimizer = ParallelOptimizer(inner, registry, **arguments(max_norm=0.4, **options))
        norms = []
        for step in range(5):
            x = randn(2, 4, 6, seed=step)
            data = registry.size("data") if len(axes) > 1 else 1
            if data > 1:
                x = x.chunk(data)[registry.coordinate["data"]]
            optimizer.zero_grad()
            optimizer.backward(block(x.chunk(2, 1)[registry.coordinate["tensor"]]).square().sum() * data)
            if functional:  # complete, measure and clip without the optimizer
                sync_gradients(block.parameters(), registry)
                norms.append(float(clip_grad_norm_(block.parameters(), 0.4, registry).total_norm))
                with torch.no_grad():
                    for param in block.parameters():
                        param.add_(param.grad, alpha=-0.5)  # type: ignore[arg-type]
            else:
                stats = optimizer.step()
                assert stats is not None
                norms.append(float(stats.total_norm))
        return norms, [param.full_tensor().detach() for param in block.parameters()]  # type: ignore[attr-defined]


def dense_block() -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(2)
    block = Block().double()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.5)
    norms = []
    for step in range(5):
        optimizer.zero_grad()
        block(randn(2, 4, 6, seed=step)).square().sum().backward()
        norms.append(float(nn.utils.clip_grad_norm_(block.parameters(), 0.4)))
        optimizer.step()
    return norms, [param.detach() for param in block.parameters()]


def assert_trained(found: tuple[list[float], list[Tensor]]) -> None:
    norms, params = dense_block()
    assert found[0] == pytest.approx(norms, rel=1e-9)
    for one, other in zip(found[1], params, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("axes", [(("tensor", 2),), GRID])
def test_parallelize_module(world: World, axes: Axes, functional: bool) -> None:
    for found in world.run(2 * len(axes), train_block, axes, functional, {}):
        assert_trained(found)


@pytest.mark.parametrize(
    "options",
    [
        {"shard_states": "data"},
        {"shard_states": "data", "shard_gradients": True},
        {"offload": 0.5},
        {"check_replicas": True, "per_parameter_norms": True, "reduction": "per_group"},
    ],
)
def test_other_ways_to_step_dtensors(world: World, options: dict[str, Any]) -> None:
    for found in world.run(4, train_block, GRID, False, options):
        assert_trained(found)


def misdeclared(kind: str) -> str:
    with registry_of((("tensor", 2),)) as registry:
        block = parallel_block(registry)
        if kind == "complete":
            declare(block, {"norm.*": P(partial="tensor"), "down.bias": P(partial="tensor"), "*": P()})
        elif kind == "measured":
            declare(block, {"norm.*": P(partial="tensor"), "*": P()})
        else:
            declare(block, {"*": P()})
        block(randn(2, 2, 6)).sum().backward()
        try:
            if kind == "measured":
                global_norm(block.parameters(), registry)
            else:
                ParallelOptimizer(torch.optim.SGD(block.parameters()), registry).step()
        except ValueError as error:
            return str(error)
        return "no error"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "pending",
            "the gradient of norm.weight is Partial(sum) over 'tensor', but the parameter is Replicate(): declare it",
        ),
        ("complete", "down.bias is declared partial over 'tensor', but its gradient is complete"),
        ("measured", "the gradient of norm.weight (P(partial='tensor')) is still a pending sum over tensor"),
    ],
)
def test_pending_sums_must_be_declared(world: World, kind: str, message: str) -> None:
    for found in world.run(2, misdeclared, kind):
        assert message in found


def loaded() -> str:
    """Loading into DTensors must not be undone by master weights."""
    with registry_of((("tensor", 2),)) as registry:
        block = parallel_block(registry).bfloat16()
        declare(block, {"norm.*": P(partial="tensor"), "*": P()})
        optimizer = ParallelOptimizer(torch.optim.SGD(block.parameters(), lr=0.5), registry, precision="bf16")
        with torch.no_grad():
            block.up.weight.mul_(2)
        block(randn(2, 2, 6).bfloat16()).sum().backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            return str(error)
        return str(dist.get_rank())


def test_weights_that_were_changed_are_noticed(world: World) -> None:
    for found in world.run(2, loaded):
        assert found.startswith("up.weight was changed since the last step")
