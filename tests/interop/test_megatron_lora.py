"""LoRA on Megatron's linear layers, embeddings and experts trains like a dense model with the product of the factors."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core, of the extra `interop`")

from megatron_on_cpu import gpt, megatron, tokens_of
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import LoRA, add_lora, spec_of, unshard, vocab_parallel_cross_entropy
from meshstep.parallel.interop.megatron import declare_by_flags, registry_of
from torch import Tensor, nn
from world import World

Weights = dict[str, Tensor]
R, ALPHA, STEPS, LR, MAX_NORM = 2, 4.0, 10, 1e-2, 0.02
LAYERS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "word_embeddings", "output_layer"]
DENSE: dict[str, Any] = {"init_method_std": 0.3}
EXPERTS: dict[str, Any] = {
    "init_method_std": 0.3,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "allgather",
    "add_bias_linear": False,
}
RS, DORA = {"use_rslora": True}, {"use_dora": True}
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "plain": ({"tensor_model_parallel_size": 2}, DENSE),
    "sequence parallel": ({"tensor_model_parallel_size": 2}, {**DENSE, "sequence_parallel": True}),
    "experts over data": ({"tensor_model_parallel_size": 1, "expert_model_parallel_size": 2}, EXPERTS),
    "experts sharded over tensor": (
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
        {**EXPERTS, "sequence_parallel": True},
    ),
    "experts over tensor": (
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        {**EXPERTS, "sequence_parallel": True},
    ),
}


ADAPTERS: list[tuple[str, dict[str, bool]]] = [
    *((case, {}) for case in CASES),
    ("plain", RS),
    ("plain", DORA),
    ("sequence parallel", RS),
    ("sequence parallel", DORA),
    ("experts over data", DORA),
    ("experts over tensor", RS),
    ("experts over tensor", DORA),
]


def trained(
    sizes: dict[str, int], options: dict[str, Any], adapters_options: dict[str, bool]
) -> tuple[Weights, Weights, list[float], Weights]:
    """Return all weights of the base model, adapter weights before and after the steps, and norms."""
    with megatron(**sizes), registry_of() as registry:
        given: dict[str, Any] = {**sizes, **options}
        model = gpt(**given).double()
        declare_by_flags(model, registry)
        base = {name: unshard(param.detach(), spec_of(param), registry) for name, param in model.named_parameters()}
        adapters = add_lora(model, LAYERS, R, ALPHA, registry, **adapters_options)
        for index, adapter in enumerate(adapters.values()):
            _randomize(adapter, index, registry)
        params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]

        def full() -> Weights:
            return {name: unshard(param.detach(), spec_of(param), registry) for name, param in params}

        first, norms = full(), []
        optimizer = ParallelOptimizer(torch.optim.AdamW(params, lr=LR, fused=True), registry, max_norm=MAX_NORM)
        for step in range(STEPS):
            tokens, positions, mask = tokens_of(4 * step + registry.rank(*registry.topology.data_axes))
            logits = model(tokens[:, :-1], positions, mask)
            loss = vocab_parallel_cross_entropy(logits, tokens[:, 1:], registry, axis="tensor")
            optimizer.zero_grad()
            optimizer.backward(loss)
            norms.append(float(optimizer.step().total_norm))
        return base, first, norms, full()


def _randomize(adapter: LoRA, index: int, registry: Any) -> None:
    """Replace the LoRA factor that starts as zeros by random values: distinct on shards and experts, equal on
    replicas."""
    layout = adapter._layout
    param, spec = (adapter.lora_A, layout.first) if layout.is_embedding else (adapter.lora_B, layout.second)
    place = [registry.coordinate[axis] for axis in spec.sharded_axes]
    seed = sum(10**digit * at for digit, at in enumerate(place)) + 1000 * index
    param.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(seed))


def reference(
    base: Weights, first: Weights, options: dict[str, Any], experts: int, scaling: float
) -> tuple[list[float], Weights]:
    """Train the dense model in one process.

    Args:
        experts: Number of ranks along which experts differ.
    """
    factors = {name: value.clone().requires_grad_() for name, value in first.items()}
    with megatron():
        kept = {key: value for key, value in options.items() if key != "model_ranks"}
        model = gpt(**{**kept, "sequence_parallel": False}).double()
        optimizer, norms = torch.optim.AdamW([*factors.values()], lr=LR), []
        for step in range(STEPS):
            weights = _merged(model, base, factors, experts, scaling)
            optimizer.zero_grad()
            for rank in range(4 // options["model_ranks"]):
                tokens, positions, mask = tokens_of(4 * step + rank)
                logits = torch.func.functional_call(model, weights, (tokens[:, :-1], positions, mask))
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                (loss / (4 // options["model_ranks"])).backward(retain_graph=True)
            norms.append(float(nn.utils.clip_grad_norm_(factors.values(), MAX_NORM)))
            optimizer.step()
    return norms, {name: value.detach() for name, value in factors.items()}


def _merged(model: nn.Module, base: Weights, factors: Weights, experts: int, scaling: float) -> Weights:
    """Return the dense weights. Experts of several ranks are stacked along dim 0 of ``base`` and ``factors``."""
    found = {}
    for name in dict(model.named_parameters()):
        expert = re.search(r"local_experts\.(\d+)", name)
        number = int(expert.group(1)) if expert else 0
        own = len(factors_of_experts(base)) if expert else 1
        stored = name if not expert else name.replace(f"local_experts.{number}", f"local_experts.{number % own}")
        module = stored.removesuffix(".weight")

        def part(tensor: Tensor) -> Tensor:
            return tensor.chunk(experts)[number // own] if expert else tensor  # noqa: B023

        weight = part(base[stored])
        if f"{module}.lora_A" in factors and name.endswith(".weight"):
            change = scaling * part(factors[f"{module}.lora_B"]) @ part(factors[f"{module}.lora_A"])
            rows = (weight.t() if "word_embeddings" in name else weight) + change
            if f"{module}.lora_magnitude_vector" in factors:
                magnitude = part(factors[f"{module}.lora_magnitude_vector"])
                rows = rows * (magnitude / rows.norm(dim=1).detach()).unsqueeze(1)
            weight = rows.t() if "word_embeddings" in name else rows
        found[name] = weight
    return found


def factors_of_experts(base: Weights) -> set[str]:
    """Return the numbers of the experts on a rank."""
    return {found.group(1) for name in base if (found := re.search(r"local_experts\.(\d+)", name))}


@pytest.mark.parametrize(("case", "adapters"), ADAPTERS)
def test_lora_on_megatron_layers_trains_like_dense_lora(world: World, case: str, adapters: dict[str, bool]) -> None:
    sizes, options = CASES[case]
    experts = sizes.get("expert_model_parallel_size", 1)
    ranks = {**options, "model_ranks": sizes["tensor_model_parallel_size"]}
    ours = world.run(4, trained, sizes, options, adapters)
    base, first, _, _ = ours[0]
    scaling = ALPHA / (math.sqrt(R) if adapters == RS else R)
    expected_norms, expected = world.run(1, reference, base, first, ranks, experts, scaling)[0]
    assert min(expected_norms) > MAX_NORM, "every step should clip"
    tolerance = 1e-11 if "experts" in case else 1e-12  # the models of experts amplify rounding errors up to 2e-12
    for _, _, norms, weights in ours:
        assert weights.keys() == expected.keys()
        assert norms == pytest.approx(expected_norms, rel=tolerance)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=tolerance, atol=tolerance, msg=name)
