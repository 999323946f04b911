"""`clip_grad_norm_` with FSDP2, alone and combined with tensor parallelism, compared with torch's function."""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

import pytest
import torch
from dtensors import Axes, registry_of
from meshstep.optim import clip_grad_norm_, global_norm
from meshstep.parallel import P, ProcessGroupRegistry, declare
from meshstep.parallel.interop.dtensor import keep_specs
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from world import World

STEPS, ROWS, WIDTH = 3, 3, 6
MAX_NORM = 0.4


class Mlp(nn.Module):
    """Two linear layers and a norm. The inner width is 7, or 8 if ``even``; 7 rows give uneven shards on 2 to 5 ranks."""

    def __init__(self, even: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.up, self.down = nn.Linear(WIDTH, 8 if even else 7), nn.Linear(8 if even else 7, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x + self.down(torch.relu(self.up(x))))
        return y


class Seen(NamedTuple):
    """Results of one step: the norm before clipping, torch's norm of the same gradients, the norm after clipping, and the
    loss."""

    norm: float
    torchs: float
    after: float
    loss: float


def inputs(step: int, data_rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + data_rank)
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return (out * torch.arange(1.0, WIDTH + 1)).square().mean()


def sharded(axes: Axes, rules: list[tuple[float, float]]) -> list[tuple[list[Seen], dict[str, Tensor]]]:
    """Return the results of this rank for each (norm type, threshold) of ``rules``."""
    with registry_of(axes) as registry:
        return [_sharded(axes, registry, *rule) for rule in rules]


def _sharded(
    axes: Axes, registry: ProcessGroupRegistry, norm_type: float, max_norm: float
) -> tuple[list[Seen], dict[str, Tensor]]:
    over_tensor = "tensor" in dict(axes)
    model = Mlp(even=over_tensor)
    mesh = registry.device_mesh(*dict(axes))
    if over_tensor:
        plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
    declare(model.norm, {"*": P()})
    with keep_specs(model):
        for module in (model.up, model.down, model):
            fully_shard(module, mesh=mesh["data"] if over_tensor else mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, inputs(step, registry.rank("data")))
        loss.backward()
        torchs = torchs_norm(model, norm_type)
        stats = clip_grad_norm_(model.parameters(), max_norm, registry, norm_type)
        after = global_norm(model.parameters(), registry, norm_type)
        optimizer.step()
        seen.append(Seen(float(stats.total_norm), torchs, float(after.total_norm), float(loss)))
    full = {name: whole(param) for name, param in model.named_parameters()}
    return seen, full


def torchs_norm(model: nn.Module, norm_type: float) -> float:
    """Return torch's norm of the full gradients; torch's function does not support DTensors on several meshes."""
    return float(torch.nn.utils.get_total_norm([whole(param.grad) for param in model.parameters()], norm_type))


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def dense(data_ranks: int, even: bool, norm_type: float, max_norm: float) -> tuple[list[Seen], dict[str, Tensor]]:
    model = Mlp(even)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [loss_of(model, inputs(step, rank)) for rank in range(data_ranks)]
        torch.stack(losses).mean().backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type))
        after = torchs_norm(model, norm_type)
        optimizer.step()
        seen.append(Seen(norm, norm, after, float(losses[0].detach())))
    return seen, {name: param.detach() for name, param in model.named_parameters()}


MESHES: list[Axes] = [
    (("data", 2),),
    (("data", 3),),
    (("data", 4),),
    (("data", 5),),
    (("data", 2), ("tensor", 2)),
]


RULES = [(1.0, MAX_NORM), (2.0, MAX_NORM), (3.0, MAX_NORM), (inf, MAX_NORM), (2.0, 1e6)]


@pytest.mark.long
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_clipping_with_fsdp2_matches_dense_model(world: World, axes: Axes) -> None:
    sizes = dict(axes)
    world_size = sizes["data"] * sizes.get("tensor", 1)
    runs_of_rules = zip(*world.run(world_size, sharded, axes, RULES), strict=True)
    for runs, (norm_type, max_norm) in zip(runs_of_rules, RULES, strict=True):
        expected, params = dense(sizes["data"], "tensor" in sizes, norm_type, max_norm)
        assert len({tuple(step.norm for step in seen) for seen, _ in runs}) == 1, "norms differ between ranks"
        for step, wanted in enumerate(expected):
            assert wanted.norm > MAX_NORM
            assert runs[0][0][step].loss == pytest.approx(wanted.loss, rel=1e-10)
            for seen, _ in runs:
                assert (seen[step].norm, seen[step].torchs) == pytest.approx((wanted.norm, wanted.norm), rel=1e-10)
                assert seen[step].after == pytest.approx(min(wanted.norm, max_norm), rel=1e-4)
                assert seen[step].after <= max_norm
        for _, full in runs:
            for name, param in params.items():
                torch.testing.assert_close(full[name], param, rtol=1e-9, atol=1e-12)
