"""Fused weights (gate and up in one matrix; q, k and v in another) on 1, 2 and 4 tensor-parallel ranks.

The reference is the dense model in one process: torch's linear layers, AdamW and `clip_grad_norm_`. The parallel model
is saved and loaded into another layout every two steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import slice_of
from layouts import Axes
from meshstep.optim import Adaptive, ParallelOptimizer, Sharded, load_checkpoint, save_checkpoint
from meshstep.parallel import (
    ColumnParallelLinear,
    P,
    ProcessGroupRegistry,
    RowParallelLinear,
    Topology,
    annotate,
    blocks,
    spec_of,
)
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from world import World

WIDTH, HEAD, QUERIES, KEYS, HIDDEN = 12, 2, 16, 4, 8
QKV, MAX_NORM, LR = (QUERIES, KEYS, KEYS), 0.02, 3e-2
FEATURES = tuple(HEAD * heads for heads in QKV)


class Block(nn.Module):
    """Attention with four query heads per key head, and a gated MLP, with dense or sharded layers."""

    def __init__(self, registry: ProcessGroupRegistry | None, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        kept: Any = {"bias": True, "dtype": torch.float64}
        if registry is None:
            self.qkv: nn.Module = nn.Linear(WIDTH, sum(FEATURES), **kept)
            self.out: nn.Module = nn.Linear(FEATURES[0], WIDTH, **kept)
            self.gate_up: nn.Module = nn.Linear(WIDTH, 2 * HIDDEN, **kept)
            self.down: nn.Module = nn.Linear(HIDDEN, WIDTH, **kept)
            self.features = FEATURES
        else:
            qkv = ColumnParallelLinear(WIDTH, sum(FEATURES), registry, blocks=QKV, **kept)
            self.qkv, self.features = qkv, qkv.block_features
            self.out = RowParallelLinear(FEATURES[0], WIDTH, registry, **kept)
            self.gate_up = ColumnParallelLinear(WIDTH, 2 * HIDDEN, registry, blocks=2, **kept)
            self.down = RowParallelLinear(HIDDEN, WIDTH, registry, **kept)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, HEAD)).mT for part in self.qkv(x).split(self.features, -1))
        q, k, v = (part.movedim(-1, -3) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        x = x + self.out(mixed.movedim(-3, -2).flatten(-2))
        gate, up = self.gate_up(x).chunk(2, -1)
        output: Tensor = x + self.down(F.silu(gate) * up)
        return output


def batch(step: int) -> Tensor:
    return torch.randn(4, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


@dataclass
class Truth:
    """Output and gradient norm of each step of the dense model, and weights and moments after the step."""

    outputs: list[Tensor]
    norms: list[float]
    weights: list[dict[str, Tensor]]
    averages: list[dict[str, Tensor]]


def dense_run(steps: int) -> Truth:
    model = Block(None, 3)
    adamw = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    truth = Truth([], [], [], [])
    for step in range(steps):
        adamw.zero_grad()
        output = model(batch(step))
        truth.outputs.append(output.detach())
        torch.autograd.backward(output.sin().mean())
        truth.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        adamw.step()
        named = list(model.named_parameters())
        truth.weights.append({name: param.detach().clone() for name, param in named})
        truth.averages.append({name: adamw.state[param]["exp_avg"].clone() for name, param in named})
    return truth


@dataclass(frozen=True)
class Stage:
    """A layout in which the model trains for a few steps."""

    axes: Axes
    how: str = "whole"  # or "zero", or "fsdp"


def near(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


def train(path: Path, stage: Stage, first: int, last: int, truth: Truth) -> None:
    """Load the checkpoint unless ``first`` is 0, run steps ``first`` to ``last - 1``, compare them with the dense run, and
    save."""
    registry = ProcessGroupRegistry(Topology(roles=None, **dict(stage.axes)))
    topology, rank = registry.topology, registry.global_rank
    model = Block(registry, 3 if first == 0 else 99)
    specs = {name: spec_of(param) for name, param in model.named_parameters()}
    names = list(specs)
    if stage.how == "fsdp":
        for name, param in model.named_parameters():
            annotate(param, specs[name], name)
        fully_shard(model, mesh=registry.device_mesh("data"))
        for name, param in model.named_parameters():
            annotate(param, specs[name], name)
    else:
        for name, param in model.named_parameters():
            annotate(param, specs[name], name)
    optimizer = ParallelOptimizer(
        torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1),
        registry,
        max_norm=MAX_NORM,
        states=(Sharded("data"),) if stage.how == "zero" else (),
        data_parallel=model if stage.how == "fsdp" else None,
    )
    if first:
        load_checkpoint(path, model, optimizer)
    replica, replicas = (registry.coordinate["data"], topology.size("data")) if "data" in topology.axes else (0, 1)
    for step in range(first, last):
        optimizer.zero_grad()
        output = model(batch(step).chunk(replicas)[replica])
        assert near(output, truth.outputs[step].chunk(replicas)[replica]), f"output of step {step}"
        optimizer.backward(output.sin().mean())
        stats = optimizer.step()
        assert stats is not None
        assert float(stats.total_norm) == pytest.approx(truth.norms[step], rel=1e-12)
        assert truth.norms[step] > MAX_NORM
    pieces = optimizer.stepped_tensors()
    assert {piece.name for piece in pieces} <= set(names)
    for piece in pieces:
        spec = specs[piece.name]
        if stage.how == "fsdp":
            spec = spec.with_dims([(*spec.dim_axes(0), "data"), spec.dim_axes(1)])
        kept = optimizer.state[piece.tensor]["exp_avg"]
        for whole, found in ((truth.weights, piece.tensor), (truth.averages, kept)):
            local = slice_of(whole[last - 1][piece.name], spec, topology, rank).flatten()
            assert near(found.detach().flatten(), local[piece.offset :][: found.numel()]), piece.name
    save_checkpoint(path, model, optimizer)
    registry.close()


ONE, TWO, FOUR, BOTH = (), (("tensor", 2),), (("tensor", 4),), (("data", 2), ("tensor", 2))
RESHARDED = {
    "1 -> 2 -> 4 -> 1": (Stage((("tensor", 1),)), Stage(TWO), Stage(FOUR), Stage((("tensor", 1),))),
    "ZeRO": (Stage(BOTH, "zero"), Stage(FOUR), Stage((("data", 4), ("tensor", 1)), "zero"), Stage(TWO)),
    "FSDP2": (Stage(BOTH, "fsdp"), Stage(TWO), Stage(BOTH, "zero"), Stage(BOTH, "fsdp")),
}


@pytest.mark.parametrize("name", RESHARDED)
def test_fused_weights_match_dense_training_across_resharding(world: World, tmp_path: Path, name: str) -> None:
    truth = dense_run(8)
    for index, stage in enumerate(RESHARDED[name]):
        ranks = prod(size for _, size in stage.axes)
        world.run(ranks, train, tmp_path, stage, 2 * index, 2 * index + 2, truth)


# Other features that use blocks ---------------------------------------------------------------------------------------


def clipped_by_unit(axes: Axes, spec: P) -> list[Tensor]:
    """Return the fused weight after a step with unit-wise clipping, and the rank."""
    with ProcessGroupRegistry(Topology(roles=None, **dict(axes))) as registry:
        full = torch.arange(1.0, 37.0).view(12, 3) ** 2
        weight = nn.Parameter(slice_of(torch.ones(12, 3), spec, registry.topology, registry.global_rank))
        annotate(weight, spec, "fused")
        optimizer = ParallelOptimizer(torch.optim.SGD([weight], lr=1.0), registry, max_norm=Adaptive(0.5))
        optimizer.backward((weight * slice_of(full, spec, registry.topology, registry.global_rank)).sum())
        optimizer.step()
        return [weight.detach(), torch.tensor(registry.global_rank)]


@pytest.mark.parametrize("spec", [P(blocks("tensor", 2)), P(blocks("tensor", (4, 1, 1))), P(None, blocks("tensor", 1))])
def test_unit_wise_clipping_of_fused_weight_matches_single_process(world: World, spec: P) -> None:
    (alone, _), *_ = world.run(1, clipped_by_unit, (("tensor", 1),), spec)
    spec = spec if spec.dim_axes(0) else P()
    for weight, rank in world.run(2, clipped_by_unit, TWO, spec):
        assert near(weight, slice_of(alone, spec, Topology(tensor=2), int(rank)))


def told() -> tuple[list[str], str]:
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        layer = ColumnParallelLinear(4, 12, registry, blocks=(4, 1, 1))
        optimizer = ParallelOptimizer(torch.optim.SGD(layer.named_parameters(), lr=1.0), registry)
        assert "blocks=(4, 1, 1)" in repr(layer)
        return [str(piece.region) for piece in optimizer.stepped_tensors()], str(optimizer.plan)


def test_printed_plan_and_shard_regions_show_blocks_of_fused_weight(world: World) -> None:
    results = world.run(4, told)
    assert [regions for regions, _ in results[:2]] == [
        ["0|8|10,0+4|1|1,4", "0|8|10+4|1|1"],
        ["4|9|11,0+4|1|1,4", "4|9|11+4|1|1"],
    ]
    for _, plan in results:
        assert "in blocks: P(blocks('tensor', (4, 1, 1)))" in plan
        assert "agreed by all 4 ranks, which count 60 elements together" in plan


def refused(mixed: bool) -> str:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        weight = nn.Parameter(torch.ones(4, 3))
        spec = P(blocks("tensor", 1 if mixed and registry.global_rank else 2 if mixed else (2, 1)))
        annotate(weight, spec, "fused")
        with pytest.raises(ValueError, match="fused") as error:
            ParallelOptimizer(torch.optim.SGD([weight], lr=1.0), registry)
        return str(error.value)


def test_fused_weight_blocks_that_do_not_fit_shard_are_rejected_on_every_rank(world: World) -> None:
    first, second = world.run(2, refused, False)
    assert first == second
    assert "P(blocks('tensor', (2, 1))) can't shard dim 0, of length 8" in first
    assert "multiple of 3" in first


def test_block_specs_that_differ_on_ranks_are_rejected(world: World) -> None:
    first, second = world.run(2, refused, True)
    assert first == second
    assert "rank 0 has [fused: P(blocks('tensor', 2))" in first
    assert "rank 1 has [fused: P('tensor')" in first


def on_a_dtensor() -> None:
    """Declare blocks for a packed weight that is a DTensor with ``Shard(0)``, as wrappers create it."""
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        full = torch.arange(24.0).view(12, 2)
        spec = P(blocks("tensor", 2))
        local = slice_of(full, spec, registry.topology, registry.global_rank)
        from torch.distributed.tensor import Shard

        weight = nn.Parameter(DTensor.from_local(local, registry.device_mesh("tensor"), [Shard(0)]))
        annotate(weight, spec, "fused")
        assert spec_of(weight) == spec
        optimizer = ParallelOptimizer(torch.optim.SGD([weight], lr=1.0), registry)
        (piece,) = optimizer.stepped_tensors()
        assert piece.region is not None
        assert torch.equal(piece.region.of(full), local)


def test_region_of_stepped_dtensor_has_its_declared_blocks(world: World) -> None:
    world.run(2, on_a_dtensor)


def saved_on_two(path: Path, spec: P) -> None:
    """Save on two ranks that each hold half of gate and half of up, declared by ``spec``."""
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        local = slice_of(torch.arange(8.0), P(blocks("tensor", 2)), registry.topology, registry.global_rank)
        model = nn.ParameterDict({"fused": nn.Parameter(local)})
        annotate(model["fused"], spec, "fused")
        save_checkpoint(path, model, ParallelOptimizer(torch.optim.SGD(model.parameters()), registry))


@pytest.mark.parametrize(
    ("spec", "order"), [(P(blocks("tensor", 2)), range(8)), (P("tensor"), (0, 1, 4, 5, 2, 3, 6, 7))], ids=str
)
def test_fused_weight_blocks_load_in_dense_order_only_if_declared(
    world: World, tmp_path: Path, spec: P, order: Sequence[int]
) -> None:
    world.run(2, saved_on_two, tmp_path, spec)
    model = nn.ParameterDict({"fused": nn.Parameter(torch.zeros(8))})
    annotate(model["fused"], P(), "fused")
    optimizer = ParallelOptimizer(torch.optim.SGD(model.parameters()), ProcessGroupRegistry(Topology()))
    load_checkpoint(tmp_path, model, optimizer)
    assert model["fused"].tolist() == list(order)
