"""LoRA on Megatron's layers: training compared with dense LoRA, resuming, and saved experts."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_on_cpu import gpt, megatron, tokens_of
from meshstep.optim import ParallelOptimizer, load_checkpoint, save_checkpoint
from meshstep.parallel import (
    LoRA,
    add_lora,
    load_adapter,
    save_adapter,
    spec_of,
    unshard,
    vocab_parallel_cross_entropy,
)
from meshstep.parallel.interop.megatron import declare_by_flags, registry_of
from packages import skip_module_without
from torch import Tensor, nn
from world import World

skip_module_without("megatron")

Weights = dict[str, Tensor]
R, ALPHA, STEPS, LR, MAX_NORM = 2, 4.0, 4, 1e-2, 0.02
LAYERS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "word_embeddings", "output_layer"]
DENSE: dict[str, Any] = {"init_method_std": 0.3}
EXPERTS: dict[str, Any] = {
    "init_method_std": 0.1,  # larger weights amplify rounding errors to 2e-12 in ten steps
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
    """Return all weights of the base model, the adapter weights before the steps, the norms, and the adapter weights after
    the steps."""
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


def _randomize(adapter: Any, index: int, registry: Any) -> None:
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
    """Train the factors ``first`` on the dense model in one process; return norms and final factors.

    ``experts`` is the number of ranks that hold different experts.
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
    """Return the indices of the local experts in these parameter names."""
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
    for _, _, norms, weights in ours:
        assert weights.keys() == expected.keys()
        assert norms == pytest.approx(expected_norms, rel=1e-12)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-12, msg=name)


# Checkpoints and files ------------------------------------------------------------------------------------------------

CONTINUED = {"use_dora": True}


def part(
    sizes: dict[str, int], options: dict[str, Any], folder: str, steps: list[int]
) -> tuple[Weights, Weights, list[float], Weights, Tensor]:
    """Train for some steps, from the checkpoint in ``folder`` unless they begin at 0; save a checkpoint and the
    adapter.

    Return base weights, factors at the start, norms, factors at the end, and the loss of the first batch.
    """
    with megatron(**sizes), registry_of() as registry:
        model = gpt(**{**sizes, **options}).double()
        declare_by_flags(model, registry)
        base = {name: unshard(param.detach(), spec_of(param), registry) for name, param in model.named_parameters()}
        adapters = add_lora(model, LAYERS, R, ALPHA, registry, **CONTINUED)
        for index, adapter in enumerate(adapters.values()):
            assert isinstance(adapter, LoRA)
            _randomize(adapter, index, registry)
        params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        optimizer = ParallelOptimizer(torch.optim.AdamW(params, lr=LR, fused=True), registry, max_norm=MAX_NORM)
        if steps[0]:
            load_checkpoint(f"{folder}/checkpoint", model, optimizer)

        def full() -> Weights:
            return {name: unshard(param.detach(), spec_of(param), registry) for name, param in params}

        def loss_of(step: int) -> Tensor:
            tokens, positions, mask = tokens_of(4 * step)
            logits = model(tokens[:, :-1], positions, mask)
            return vocab_parallel_cross_entropy(logits, tokens[:, 1:], registry, axis="tensor")

        first, norms = full(), []
        for step in steps:
            optimizer.zero_grad()
            optimizer.backward(loss_of(step))
            norms.append(float(optimizer.step().total_norm))
        save_checkpoint(f"{folder}/checkpoint", model, optimizer)
        save_adapter(f"{folder}/adapter", model, registry)
        return base, first, norms, full(), loss_of(0).detach()


def test_lora_training_on_megatron_layers_resumes_on_another_layout(world: World, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="needs safetensors (the extra 'lora')")
    folder, half = str(tmp_path), list(range(STEPS // 2))
    two = {"tensor_model_parallel_size": 2}
    base, first, norms, _, _ = world.run(2, part, two, {**DENSE, "sequence_parallel": True}, folder, half)[0]
    after = [step + STEPS // 2 for step in half]
    ours = world.run(1, part, {"tensor_model_parallel_size": 1}, DENSE, folder, after)
    expected_norms, expected = world.run(1, reference, base, first, {**DENSE, "model_ranks": 4}, 1, ALPHA / R)[0]
    for _, _, more, weights, _ in ours:
        assert [*norms, *more] == pytest.approx(expected_norms, rel=1e-12)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-12, msg=name)
    for loss in world.run(2, loaded_loss, two, folder):
        torch.testing.assert_close(loss, ours[0][-1], rtol=1e-12, atol=0)


def loaded_loss(sizes: dict[str, int], folder: str) -> Tensor:
    """Return the loss of the base model with the saved adapter."""
    with megatron(**sizes), registry_of() as registry:
        model = gpt(**{**sizes, **DENSE}).double()
        declare_by_flags(model, registry)
        add_lora(model, LAYERS, R, ALPHA, registry, **CONTINUED)
        load_adapter(f"{folder}/adapter", model, registry)
        tokens, positions, mask = tokens_of(0)
        logits = model(tokens[:, :-1], positions, mask)
        return vocab_parallel_cross_entropy(logits, tokens[:, 1:], registry, axis="tensor").detach()


def saved_experts(folder: str) -> Weights:
    sizes, options = CASES["experts over data"]
    with megatron(**sizes), registry_of() as registry:
        model = gpt(**{**sizes, **options}).double()
        declare_by_flags(model, registry)
        add_lora(model, ["linear_fc1"], R, ALPHA, registry)
        save_adapter(folder, model, registry)
        return {
            name: unshard(param.detach(), spec_of(param), registry)
            for name, param in model.named_parameters()
            if param.requires_grad
        }


def test_lora_of_megatron_experts_is_saved_under_global_expert_indices(world: World, tmp_path: Path) -> None:
    safetensors: Any = pytest.importorskip("safetensors.torch", reason="needs safetensors (the extra 'lora')")
    weights = world.run(4, saved_experts, str(tmp_path))[0]
    found = safetensors.load_file(tmp_path / "adapter_model.safetensors")
    assert len(found) == 2 * len(weights)
    for name, weight in weights.items():
        for rank, part_of_rank in enumerate(weight.chunk(2)):
            number = re.sub(r"local_experts\.(\d+)", lambda at: f"local_experts.{2 * rank + int(at[1])}", name)  # noqa: B023
            assert torch.equal(found[f"base_model.model.{number}.weight"], part_of_rank), name
