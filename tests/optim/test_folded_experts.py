"""Experts on another mesh of the same ranks.

Each axis of a mesh is an axis of the topology, or an alias that joins several axes of the topology.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from arguments import arguments
from meshstep.optim import ParallelOptimizer, load_checkpoint, save_checkpoint
from meshstep.parallel import (
    P,
    ProcessGroupRegistry,
    Topology,
    all_gather_to,
    annotate,
    prepare_dataloader,
    reduce_scatter_to,
    shard,
    spec_of,
    unshard,
)
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from world import World

EXPERTS, WIDTH, TOKENS = 4, 8, 16
FOLDINGS = {
    "one": "data=1,tensor=1,expert=data+tensor",
    "experts over tensor": "data=2,tensor=2,expert=data+tensor",
    "experts over half of data": "edp=2,mid=2,tensor=1,data=edp+mid,expert=mid+tensor",
    "folded": "edp=2,mid=2,tensor=2,data=edp+mid,expert=mid+tensor",
    "experts replicated over tensor": "edp=1,mid=2,tensor=2,data=edp+mid,expert=edp+mid",
}
WORLD = {name: Topology.parse(text).world_size for name, text in FOLDINGS.items()}


class Experts(nn.Module):
    """Token i goes through a dense layer, then through expert ``i % EXPERTS``. Tokens are sharded over data and tensor
    axes, so that all ranks have different tokens."""

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        self.registry = registry
        generator = torch.Generator().manual_seed(3)
        dense, experts = (
            torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((WIDTH, WIDTH), (EXPERTS, WIDTH, WIDTH))
        )
        self.dense = nn.Parameter(dense)
        self.experts = nn.Parameter(shard(experts, P("expert"), registry))
        annotate(self.dense, P(partial="tensor"), "dense")
        # If an expert is replicated over tensor ranks, each of these ranks has processed a part of the expert's tokens.
        beside = tuple(axis for axis in ("tensor",) if axis not in registry.topology.expand_aliases("expert"))
        annotate(self.experts, P("expert", partial=beside), "experts")

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [n, width] of this rank to the sum of squares of the outputs."""
        registry = self.registry
        hidden = torch.tanh(tokens @ self.dense)
        everybody = all_gather_to(hidden, registry, "expert", dim=0)
        first = registry.rank("expert") * len(self.experts)
        number = torch.arange(len(everybody)) % EXPERTS
        here = [torch.where((number == first + i)[:, None], everybody @ w, 0.0) for i, w in enumerate(self.experts)]
        out = reduce_scatter_to(torch.stack(here).sum(0), registry, "expert", dim=0)
        return out.square().sum()


class Run:
    def __init__(self, folding: str, options: dict[str, Any]) -> None:
        self.registry = ProcessGroupRegistry(Topology.parse(FOLDINGS[folding]))
        self.model = Experts(self.registry)
        inner = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.optimizer = ParallelOptimizer(
            inner, self.registry, **arguments(max_norm=0.3, check_replicas=True, **options)
        )

    def step(self, number: int) -> float:
        tokens = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        mine = shard(tokens, P(("data", "tensor")), self.registry)
        self.optimizer.zero_grad()
        # This rank's term of the mean over the tokens of its data coordinate. The optimizer averages over data.
        self.optimizer.backward(self.model(mine) * self.registry.size("data") / TOKENS)
        return float(self.optimizer.step().total_norm)

    def full(self) -> list[Tensor]:
        return [unshard(param, spec_of(param), self.registry) for param in self.model.parameters()]


def train(folding: str, options: dict[str, Any], path: Path | None = None) -> tuple[list[float], list[Tensor]]:
    run = Run(folding, options)
    norms = [run.step(number) for number in range(4)]
    if path is not None:
        save_checkpoint(path, run.model, run.optimizer)
    norms += [run.step(number) for number in range(4, 6)]
    full = run.full()
    run.registry.close()
    return norms, full


def resume(folding: str, options: dict[str, Any], path: Path) -> tuple[list[float], list[Tensor]]:
    run = Run(folding, options)
    load_checkpoint(path, run.model, run.optimizer)
    norms = [run.step(number) for number in range(4, 6)]
    full = run.full()
    run.registry.close()
    return norms, full


OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "per group": {"reduction": "per_group"},
    "overlap": {"overlap": True},
    "zero1": {"shard_states": "data"},
    "zero2": {"shard_states": "data", "shard_gradients": True},
    "zero1 over half": {"shard_states": "mid"},
}


def assert_same(found: list[tuple[list[float], list[Tensor]]], expected: tuple[list[float], list[Tensor]]) -> None:
    for norms, full in found:
        torch.testing.assert_close(norms, expected[0][-len(norms) :], rtol=1e-12, atol=0)
        torch.testing.assert_close(full, expected[1], rtol=1e-11, atol=1e-13)


@pytest.mark.long
@pytest.mark.parametrize("options", OPTIONS)
def test_experts_on_another_mesh_of_same_ranks_match_dense_model(world: World, options: str) -> None:
    (expected,) = world.run(1, train, "one", {})
    assert_same(world.run(8, train, "folded", OPTIONS[options]), expected)


@pytest.mark.parametrize("folding", ["experts over tensor", "experts over half of data"])
def test_experts_over_tensor_or_part_of_data_axis_match_dense_model(world: World, folding: str) -> None:
    (expected,) = world.run(1, train, "one", {})
    assert_same(world.run(WORLD[folding], train, folding, OPTIONS["zero2"]), expected)


@pytest.mark.long
@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    ("saved", "loaded"), [("folded", "experts over half of data"), ("experts over tensor", "folded"), ("folded", "one")]
)
def test_checkpoint_loads_with_experts_on_another_mesh(world: World, tmp_path: Path, saved: str, loaded: str) -> None:
    expected, *_ = world.run(WORLD[saved], train, saved, OPTIONS["zero1"], tmp_path)
    options = OPTIONS["whole" if loaded == "one" else "zero2"]
    assert_same(world.run(WORLD[loaded], resume, loaded, options, tmp_path), expected)


def what_is_sharded() -> tuple[list[str], int]:
    """Return the specs of the stepped tensors and the number of elements of their states."""
    run = Run("folded", OPTIONS["zero1"])
    run.step(0)
    inner = run.optimizer.optimizer
    specs = [str(spec_of(piece)) for group in inner.param_groups for piece in group["params"]]
    numel = sum(value.numel() for state in inner.state.values() for value in state.values() if value.dim())
    run.registry.close()
    return specs, numel


def test_zero1_shards_dense_states_over_data_and_expert_states_over_remaining_axes(world: World) -> None:
    for specs, numel in world.run(8, what_is_sharded):
        assert specs == ["P(('edp', 'mid'), partial='tensor')", "P(('mid', 'tensor', 'edp'))"]
        # A quarter of the dense layer and half of an expert, with two moments each.
        assert numel == 2 * (WIDTH * WIDTH // 4 + WIDTH * WIDTH // 2)


def refused(axis: str) -> str:
    try:
        Run("folded", {"shard_states": axis})
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        ("expert", "the axes of 'expert' have several roles, mid 'data', tensor 'model'"),
        (
            "dat",
            r"Sharded\('dat'\): the mesh has no such axis or alias \(axes: edp, mid, tensor; aliases: data, expert\)",
        ),
    ],
)
def test_zero1_over_axes_with_different_roles_or_unknown_axis_is_rejected(
    world: World, axis: str, message: str
) -> None:
    for said in world.run(8, refused, axis):
        assert re.search(message, said), said


def loaded() -> tuple[int, list[int]]:
    with ProcessGroupRegistry(Topology.parse(FOLDINGS["folded"])) as registry:
        loader = prepare_dataloader(TensorDataset(torch.arange(16)), registry, 2)
        return registry.rank("data"), [int(sample) for (batch,) in loader for sample in batch]


def test_data_loader_distributes_samples_over_all_data_axes(world: World) -> None:
    found = world.run(8, loaded)
    assert sorted(sample for place, samples in found[::2] for sample in samples) == list(range(16))
    assert found[::2] == found[1::2]  # tensor ranks get the same samples
