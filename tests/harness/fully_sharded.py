"""A model under FSDP2's fully_shard with uneven shards, and its full parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshstep.parallel import P, ProcessGroupRegistry, unshard
from meshstep.parallel.interop.dtensor import DTensor
from meshstep.parallel.layout.annotation import annotation_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

Full = dict[str, Tensor]


class Net(nn.Module):
    """A model of layers with 7, 3 and 1 rows, whose shards on 2 and 4 ranks are uneven, and empty on some ranks.
    fully_shard ignores ``scale``."""

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
    """Return the batch of a step: [rows, 5] in float64."""
    return torch.randn(rows, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def sharded_net(registry: ProcessGroupRegistry, dtype: torch.dtype = torch.float64, **options: Any) -> Net:
    """Return the model sharded over the data axes, except for ``scale``, which is replicated."""
    net = Net().to(dtype)
    mesh = registry.device_mesh(*registry.topology.data_axes)
    fully_shard(net.layers[0], mesh=mesh, **options)
    fully_shard(net, mesh=mesh, ignored_params={net.scale}, **options)
    return net


def whole(module: nn.Module, registry: ProcessGroupRegistry) -> Full:
    """Return the full parameters. DTensors are gathered over their mesh, then over the axes of their declaration."""
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


def assert_equal(found: tuple[list[float], Full], expected: tuple[list[float], Full], rel: float) -> None:
    """Compare (norms, parameters) of two runs. ``rel`` is the relative tolerance, and for parameters the absolute one."""
    assert found[0] == pytest.approx(expected[0], rel=rel)
    for name, param in expected[1].items():
        torch.testing.assert_close(found[1][name].double(), param.double(), rtol=rel, atol=rel)
