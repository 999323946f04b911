"""Steps in which some shards of a parameter have no gradient, compared with the dense parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from arguments import arguments
from meshstep.amp import Bf16
from meshstep.optim import ByGroup, ByNorm, Muon, ParallelOptimizer, PerParameter
from meshstep.optim.step.missing_shards import MissingShards
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from torch import Tensor, nn
from world import World

EXPERTS, WIDTH = 4, 3
# The experts that get tokens in each step. No expert gets tokens in the fourth step, except if gradients are averaged
# over data ranks. In that case a tensor that has a gradient on no rank gets zeros, as with DistributedDataParallel, so
# expert 1 gets tokens in the fourth step.
TOKENS: Sequence[tuple[int, ...]] = ((0, 1, 2, 3), (0,), (3, 2), (), (1,), (0, 3), (2,))
AVERAGED_TOKENS = tuple(tokens or (1,) for tokens in TOKENS)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1, fused=True),
    "foreach AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1, foreach=True),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "SGD with dampening": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.1, fused=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, weight_decay=0.1, fused=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.1, weight_decay=0.1),
}
MESHES = {
    "expert=2": Topology(expert=2),
    "expert=4": Topology(expert=4),
    "data=2,expert=2": Topology(roles={"expert": "data"}, data=2, expert=2),
    "pipe=2,expert=2": Topology(pipe=2, expert=2),
}


def steps(
    topology: Topology,
    kind: str,
    options: dict[str, Any],
    rules: Sequence[Any],
    dtype: torch.dtype,
    tokens_of_steps: Sequence[tuple[int, ...]] = TOKENS,
) -> tuple[dict[str, Tensor], list[float]]:
    """Step grouped experts and a bias. Return this rank's parameters and the norms."""
    with ProcessGroupRegistry(topology) as registry:
        size, index = topology.size("expert") if "expert" in topology.axes else 1, registry.coordinate.get("expert", 0)
        generator = torch.Generator().manual_seed(1)
        full, bias = torch.randn(EXPERTS, WIDTH, generator=generator), torch.randn(WIDTH, generator=generator)
        own = range(index * EXPERTS // size, (index + 1) * EXPERTS // size)
        experts = nn.Parameter(full[own.start : own.stop].to(dtype, copy=True))
        params = {"bias": nn.Parameter(bias.to(dtype, copy=True))}
        annotate(params["bias"], P(), "bias")
        if registry.coordinate.get("pipe", 1) == 1:  # the first pipeline stage has only the bias
            params["experts"] = experts
            annotate(experts, P("expert", None) if size > 1 else P(), "experts")
        optimizer = ParallelOptimizer(OPTIMIZERS[kind]([*params.values()]), registry, **arguments(**options))
        norms = []
        for step, tokens in enumerate(tokens_of_steps):
            optimizer.max_norm = rules[step % len(rules)]
            loss = (params["bias"].float() * (step + 1.0)).sum()
            for expert in tokens if "experts" in params else ():
                if expert in own:
                    factors = torch.tensor([1.0, -2.0, 3.0]) * (step + 1 + expert) * (size if scaled(topology) else 1)
                    loss = loss + (experts[expert - own.start].float() * factors).sum()
            optimizer.backward(loss)
            stats = optimizer.step()
            norms.append(float(stats.total_norm))
            optimizer.zero_grad()
        return {name: param.detach().float() for name, param in params.items()}, norms


def scaled(topology: Topology) -> bool:
    """Return True if expert ranks are data ranks, so that gradients are divided by the number of ranks."""
    return "expert" in topology.data_axes


def assert_dense(world: World, mesh: str, kind: str, options: dict[str, Any], rules: Sequence[Any]) -> float:
    """Return the largest difference of a parameter from the dense model. Assert equal norms on meshes without stages."""
    topology = MESHES[mesh]
    dtype = torch.bfloat16 if str(options.get("precision", "")).startswith("bf16") else torch.float32
    dense_options = {key: value for key, value in options.items() if key in ("precision", "norm_type")}
    tokens = AVERAGED_TOKENS if "data" in topology.axes else TOKENS
    ((dense, norms),) = world.run(1, steps, Topology(), kind, dense_options, rules, dtype, tokens)
    found = world.run(topology.world_size, steps, topology, kind, options, rules, dtype, tokens)
    worst = 0.0
    for rank, (parts, rank_norms) in enumerate(found):
        index = topology.coordinate(rank)["expert"]
        for name, part in parts.items():
            wanted = dense[name]
            if name == "experts":
                wanted = wanted.chunk(topology.size("expert"))[index]
            worst = max(worst, float((part - wanted).abs().max()))
        if "pipe" not in topology.axes:
            assert rank_norms == pytest.approx(norms, rel=1e-6)
    return worst


@pytest.mark.default_cases(8)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if "pipe" not in mesh])
def test_optimizers_with_missing_shard_gradients_match_dense_model(world: World, mesh: str, kind: str) -> None:
    assert assert_dense(world, mesh, kind, {}, [0.7]) < 1e-6


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("data=2,expert=2", {"shard_states": "data"}),
        ("data=2,expert=2", {"shard_states": "data", "shard_gradients": True}),
        ("data=2,expert=2", {"overlap": True}),
        ("expert=2", {"offload": 0.5}),
        ("expert=4", {"precision": "bf16"}),
        ("expert=2", {"reduction": "per_group"}),
        ("expert=4", {"norm_type": float("inf")}),
        ("expert=2", {"check_replicas": False}),
    ],
    ids=str,
)
@pytest.mark.default_cases(8)
def test_state_placements_and_options_with_missing_shard_gradients_match_dense_model(
    world: World, mesh: str, options: dict[str, Any]
) -> None:
    assert assert_dense(world, mesh, "fused AdamW", options, [0.7]) < (0.02 if "precision" in options else 1e-6)


def test_stochastic_rounding_leaves_parameter_unchanged_if_no_rank_has_its_gradient(world: World) -> None:
    options, mesh = {"precision": Bf16(stochastic_rounding=True)}, MESHES["expert=2"]
    one, two = (
        world.run(2, steps, mesh, "fused AdamW", options, [0.7], torch.bfloat16, tokens)
        for tokens in (TOKENS[:1], (TOKENS[0], ()))
    )
    for (before, _), (after, _) in zip(one, two, strict=True):
        assert torch.equal(before["experts"], after["experts"])
        assert not torch.equal(before["bias"], after["bias"])


@pytest.mark.parametrize("rule", [PerParameter(0.5), ByGroup((0.5,)), {"experts": 0.3, "*": ByNorm(0.6)}], ids=str)
def test_clip_rules_with_missing_shard_gradients_match_dense_model(world: World, rule: Any) -> None:
    assert assert_dense(world, "expert=2", "fused AdamW", {}, [rule]) < 1e-6


def test_shards_without_gradient_are_stepped_if_a_pipeline_stage_lacks_the_tensor(world: World) -> None:
    topology = MESHES["pipe=2,expert=2"]
    found = world.run(4, steps, topology, "fused AdamW", {}, [None], torch.float32)
    ((dense, _),) = world.run(1, steps, Topology(), "fused AdamW", {}, [None], torch.float32)
    for rank, (parts, _) in enumerate(found):
        at = topology.coordinate(rank)
        if at["pipe"] == 1:
            torch.testing.assert_close(parts["experts"], dense["experts"].chunk(2)[at["expert"]], rtol=0, atol=1e-6)


def test_shards_diverge_from_dense_model_if_those_without_gradient_are_not_stepped(world: World) -> None:
    """Negative control: `steps_without_counts` steps only shards that have a gradient."""
    for kind, least in (("fused AdamW", 0.1), ("SGD with momentum", 0.1)):
        found = world.run(2, steps_without_counts, kind)
        ((dense, _),) = world.run(1, steps, Topology(), kind, {}, [0.7], torch.float32)
        full = torch.cat([parts["experts"] for parts, _ in found])
        assert float((full - dense["experts"]).abs().max()) > least


def steps_without_counts(kind: str) -> tuple[dict[str, Tensor], list[float]]:
    with mock.patch.object(MissingShards, "field", return_value={}):
        return steps(MESHES["expert=2"], kind, {}, [0.7], torch.float32)


def muon_steps(topology: Topology) -> Tensor:
    """Step the weight matrices of experts by Muon; in some steps a rank has no tokens. Return the weights."""
    with ProcessGroupRegistry(topology) as registry:
        size, index = topology.world_size, registry.global_rank
        full = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(1))
        own = range(index * 4 // size, (index + 1) * 4 // size)
        weight = nn.Parameter(full[own.start : own.stop].clone())
        annotate(weight, P("expert", None, None) if size > 1 else P(), "experts")
        optimizer = ParallelOptimizer(Muon([("experts", weight)], lr=0.1), registry)
        for step, tokens in enumerate(((0, 1, 2, 3), (0,), (3, 2), (1,))):
            terms = [(weight[expert - own.start] * (step + expert + 1.0)).sum() for expert in tokens if expert in own]
            optimizer.backward(torch.stack(terms).sum() if terms else None)
            optimizer.step()
            optimizer.zero_grad()
        return weight.detach().clone()


def test_full_tensor_optimizer_treats_missing_shard_gradients_as_zeros(world: World) -> None:
    (dense,) = world.run(1, muon_steps, Topology())
    torch.testing.assert_close(torch.cat(world.run(2, muon_steps, Topology(expert=2))), dense, rtol=1e-5, atol=1e-6)
