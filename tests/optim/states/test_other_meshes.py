"""DTensors on meshes whose dims have no axis of the same name: flattened dims, slices, other names, another root mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dtensors import registry_of
from meshstep.optim import ParallelOptimizer, load_checkpoint, save_checkpoint
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, declare, spec_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from world import World


class Net(nn.Module):
    """Layers and a plain replicated parameter. Six rows over four ranks give shards of 2, 2, 2 and 0 rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6)).double()
        self.gain = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x) * self.gain
        return out.square().mean()


class Run:
    def __init__(self, kind: str, moved: float = 0.0) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        self.kind, self.model, options = kind, Net(), dict[str, Any]()
        with torch.no_grad():
            for param in self.model.parameters():
                param.add_(moved)
        layers = self.model.layers
        if kind == "dense":
            self.registry = ProcessGroupRegistry(Topology(data=1))
        elif kind.startswith("flattened"):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
            flat = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
            topology = Topology.of_meshes(mesh, flat) if "alias" in kind else Topology(dp_shard=2, cp=2)
            self.registry = ProcessGroupRegistry(topology)
            fully_shard(layers, mesh=flat)
        else:
            self.registry = registry_of((("data", 2), ("tensor", 2)))
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
            parallelize_module(layers, mesh["y"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            if kind == "renamed":
                fully_shard(layers, mesh=mesh["x"])
        if any(hasattr(module, "set_requires_gradient_sync") for module in self.model.modules()):
            options["data_parallel"] = layers
        if kind in ("renamed", "one dim of a renamed mesh"):
            annotate(self.model.gain, P(), "gain")
        declare(self.model, {"*": P()})
        inner = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.optimizer = ParallelOptimizer(inner, self.registry, max_norm=0.3, **options)

    def step(self, number: int) -> float:
        rows = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        axes = self.registry.topology.data_axes
        mine = rows.chunk(self.registry.size(*axes))[self.registry.rank(*axes)]
        self.optimizer.zero_grad()
        self.optimizer.backward(self.model(mine))
        return float(self.optimizer.step().total_norm)

    def full(self) -> list[Tensor]:
        return [param.full_tensor() if hasattr(param, "full_tensor") else param for param in self.model.parameters()]


def train(kind: str, path: Path | None = None) -> tuple[list[float], list[Tensor], list[str]]:
    run = Run(kind)
    norms = [run.step(number) for number in range(3)]
    if path is not None:
        save_checkpoint(path, run.model, run.optimizer)
    norms += [run.step(number) for number in range(3, 5)]
    specs = [str(spec_of(param, run.registry.topology)) for param in run.model.parameters()]
    full = [tensor.detach() for tensor in run.full()]
    run.registry.close()
    return norms, full, specs


def resume(kind: str, path: Path) -> tuple[list[float], list[Tensor]]:
    run = Run(kind, moved=1.0)
    load_checkpoint(path, run.model, run.optimizer)
    norms = [run.step(number) for number in range(3, 5)]
    full = [tensor.detach() for tensor in run.full()]
    run.registry.close()
    return norms, full


SPECS = {
    "flattened": ["P((('dp_shard', 'cp'),))"] * 4,
    "flattened, alias": ["P((('dp_shard', 'cp'),))"] * 4,
    "renamed": ["P(('tensor', 'data'))", "P(('tensor', 'data'))", "P('data', 'tensor')", "P('data')"],
    "one dim of a renamed mesh": ["P('tensor')", "P('tensor')", "P(None, 'tensor')", "P()"],
}


@pytest.mark.long
@pytest.mark.parametrize("kind", SPECS)
def test_dtensors_on_flattened_or_renamed_meshes_match_dense_model(world: World, tmp_path: Path, kind: str) -> None:
    ((expected, weights, _),) = world.run(1, train, "dense")
    for norms, full, specs in world.run(4, train, kind, tmp_path):
        torch.testing.assert_close(norms, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(full, weights, rtol=1e-11, atol=1e-13)
        assert specs == ["P()", *SPECS[kind]]
    for norms, full in [*world.run(4, resume, kind, tmp_path), *world.run(1, resume, "dense", tmp_path)]:
        torch.testing.assert_close(norms, expected[3:], rtol=1e-12, atol=0)
        torch.testing.assert_close(full, weights, rtol=1e-11, atol=1e-13)
