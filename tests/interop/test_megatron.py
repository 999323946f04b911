"""Megatron-core's GPTModel with layouts from the flags of its parameters (`declare_by_flags`)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_on_cpu import BATCH, LENGTH, gpt, loss_of, megatron, tokens_of
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import P, ProcessGroupRegistry, annotate, shard, unshard
from meshstep.parallel.interop.audit import Audit, audit
from meshstep.parallel.interop.local_parameters import spec_of
from meshstep.parallel.interop.megatron import declare_by_flags, registry_of
from meshstep.parallel.interop.megatron_mla import sum_rope_gradients
from packages import skip_module_without
from torch import Tensor, nn
from world import World

skip_module_without("megatron")

STEPS, LR, MAX_NORM, EPS = 3, 1e-2, 0.3, 1e-4
Weights = dict[str, Tensor]
# With smaller weights, the output layer would dominate the gradient norm.
LARGE: dict[str, Any] = {"init_method_std": 0.3}

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence parallel": {"sequence_parallel": True},
    "q/k layer norms": {"qk_layernorm": True},
    "both": {"sequence_parallel": True, "qk_layernorm": True},
}


def gathered(model: nn.Module, registry: ProcessGroupRegistry) -> Weights:
    return {name: unshard(param.detach(), spec_of(param), registry) for name, param in model.named_parameters()}


def in_its_ddp(model: Any, **options: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    return DistributedDataParallel(model.config, DistributedDataParallelConfig(**options), model)


def stepped_by_us(
    options: dict[str, Any],
    kept: dict[str, Any] | None = None,
    precision: Any = "fp32",
    micro_batches: int = 1,
    clears: bool = True,
) -> tuple[Weights, list[float], Weights]:
    """Return initial weights, norms of four steps, and final weights, gathered to full tensors.

    ``kept`` are the options of Megatron's `DistributedDataParallel`. None: the model is not wrapped. If ``clears`` is
    False, the next gradients are added to those of the step.
    """
    with megatron(tensor_model_parallel_size=2), registry_of() as registry:
        given = gpt(tensor_model_parallel_size=2, **options)
        if precision == "bf16":
            given.bfloat16()
        model = given if kept is None else in_its_ddp(given, **kept)
        sum_rope_gradients(model)
        declare_by_flags(model, registry)
        first = gathered(given, registry)
        adam = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.1, fused=True)
        how: Any = {"precision": precision, "accumulation_steps": micro_batches if micro_batches > 1 else None}
        averaged_by: Any = {} if kept is None else {"data_parallel": model}
        optimizer = ParallelOptimizer(adam, registry, max_norm=MAX_NORM, **how, **averaged_by)
        norms = []
        for step in range(STEPS):
            for micro_batch in range(micro_batches):
                optimizer.backward(loss_of(model, 2 * step + registry.rank("data") + 100 * micro_batch))
            norms.append(float(optimizer.step().total_norm))
            if clears:
                optimizer.zero_grad()
        return first, norms, gathered(given, registry)


def with_its_optimizer(model: Any) -> tuple[Any, Any, Any]:
    """Return Megatron's DDP around the model, its optimizer, and its `finalize_model_grads`."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    chunk = in_its_ddp(model)
    config = OptimizerConfig(
        optimizer="adam", lr=LR, adam_eps=EPS, weight_decay=0.1, clip_grad=MAX_NORM, use_distributed_optimizer=False
    )
    optimizer = get_megatron_optimizer(config, [chunk], use_gloo_process_groups=False)
    for group in optimizer.param_groups:  # by default, biases and norms have no weight decay
        group["weight_decay"], group["wd_mult"] = 0.1, 1.0
    return chunk, optimizer, finalize_model_grads


def stepped_by_megatron(options: dict[str, Any], broken: str = "") -> tuple[list[float], Weights]:
    """Return norms and final weights.

    ``broken`` is the ending of the names of parameters that get a wrong flag (`BROKEN`).
    """
    with megatron(tensor_model_parallel_size=2), registry_of() as registry:
        model = gpt(tensor_model_parallel_size=2, **options)
        declare_by_flags(model, registry)
        break_flags(model, [broken] if broken else [])
        chunk, optimizer, finalize = with_its_optimizer(model)
        norms = []
        for step in range(STEPS):
            chunk.zero_grad_buffer()
            optimizer.zero_grad()
            loss_of(chunk, 2 * step + registry.rank("data")).backward()
            finalize([chunk])
            norms.append(float(optimizer.step()[1]))
        return norms, gathered(model, registry)


def dense(first: Weights, options: dict[str, Any], steps: int = STEPS) -> tuple[list[float], Weights]:
    """Train the unsharded float64 model in one process, from weights ``first``. Return norms and final weights."""
    with megatron():
        model = gpt(**{**options, "sequence_parallel": False}).double()
        params = dict(model.named_parameters())
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(first[name])
        optimizer = torch.optim.AdamW(params.values(), lr=LR, eps=EPS, weight_decay=0.1)
        norms = []
        for step in range(steps):
            optimizer.zero_grad()
            for rank in range(2):
                tokens, positions, mask = tokens_of(2 * step + rank)
                logits = model(tokens[:, :-1], positions, mask)  # the loss of the model would be in float32
                assert logits.dtype == torch.float64
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                (loss / 2).backward()
            norm = torch.nn.utils.clip_grad_norm_(params.values(), MAX_NORM)
            norms.append(float(norm))
            optimizer.step()
        return norms, {name: param.detach() for name, param in params.items()}


def farthest(found: Weights, expected: Weights) -> float:
    return max(float((found[name] - weight).abs().max()) for name, weight in expected.items())


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_megatron_model_trains_like_dense_model_and_megatron_optimizer(world: World, options: dict[str, Any]) -> None:
    ours = world.run(4, stepped_by_us, options)
    first, norms, last = ours[0]
    expected, weights = world.run(1, dense, first, options)[0]
    assert all(of_rank[1] == norms for of_rank in ours)
    assert norms == pytest.approx(expected, rel=1e-6)
    assert min(expected) > MAX_NORM  # every step clips
    theirs = world.run(4, stepped_by_megatron, options)[0]
    assert theirs[0] == pytest.approx(expected, rel=1e-5)
    assert farthest(last, theirs[1]) < 2e-6
    assert farthest(last, weights) < 2e-6


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
def test_training_in_megatron_ddp_equals_training_without_it(
    world: World, overlap: bool, half: bool, micro_batches: int
) -> None:
    dtype = {"params_dtype": torch.bfloat16, "bf16": True} if half else {}
    options, how = {**KINDS["both"], **dtype}, ("bf16" if half else "fp32", micro_batches)
    alone = world.run(4, stepped_by_us, options, None, *how)[0]
    its = {"overlap_grad_reduce": overlap, "grad_reduce_in_fp32": half}
    for _, norms, last in world.run(4, stepped_by_us, options, its, *how):
        assert norms == pytest.approx(alone[1], rel=1e-6)
        assert farthest(last, alone[2]) < 1e-6


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
def test_uncleared_gradients_in_megatron_ddp_accumulate_once(world: World, overlap: bool) -> None:
    """`step` leaves the buffer gradients in ``.grad``; backward must not add to them both directly and in its hook."""
    cleared, alone = (world.run(4, stepped_by_us, {}, None, "fp32", 1, clears)[0] for clears in (True, False))
    assert alone[1][1] != pytest.approx(cleared[1][1], rel=1e-2)
    for _, norms, last in world.run(4, stepped_by_us, {}, {"overlap_grad_reduce": overlap}, "fp32", 1, False):
        assert norms == pytest.approx(alone[1], rel=1e-6)
        assert farthest(last, alone[2]) < 1e-6


# Multi-latent attention -----------------------------------------------------------------------------------------------

MLA: dict[str, Any] = {
    "multi_latent_attention": True,
    "num_query_groups": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rope_type": "rope",
    "normalization": "LayerNorm",
    "qk_layernorm": True,
    "init_method_std": 0.3,
}
KINDS_OF_MLA: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence parallel": {"sequence_parallel": True},
    "column-parallel down projections": {"duplicated": False},
    "column-parallel down projections, sequence parallel": {"duplicated": False, "sequence_parallel": True},
    "without compressed queries": {"q_lora_rank": None},
    "without compressed queries, sequence parallel": {"q_lora_rank": None, "sequence_parallel": True},
}


@pytest.mark.default_cases(4)
@pytest.mark.parametrize("options", KINDS_OF_MLA.values(), ids=KINDS_OF_MLA)
def test_multi_latent_attention_trains_like_dense_model(world: World, options: dict[str, Any]) -> None:
    first, norms, last = world.run(4, stepped_by_us, {**MLA, **options})[0]
    expected, weights = world.run(1, dense, first, {**MLA, **options})[0]
    assert norms == pytest.approx(expected, rel=1e-6)
    assert min(expected) > MAX_NORM  # every step clips
    assert farthest(last, weights) < 2e-6


def audited_mla(options: dict[str, Any]) -> str:
    with megatron(tensor_model_parallel_size=2), registry_of() as registry:
        model = gpt(tensor_model_parallel_size=2, **MLA, **options)
        sum_rope_gradients(model)
        declare_by_flags(model, registry)
        loss_of(model, registry.rank("data")).backward()
        return str(audit(model, registry))


def refused_mla(options: dict[str, Any]) -> str:
    with megatron(tensor_model_parallel_size=2), registry_of() as registry:
        model = gpt(tensor_model_parallel_size=2, **MLA, **options)
        try:
            declare_by_flags(model, registry)
        except ValueError as error:
            return str(error)
        return ""


@pytest.mark.default_cases(4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("duplicated", [False, True], ids=["sharded", "duplicated"])
def test_multi_latent_attention_needs_sum_rope_gradients_unless_duplicated_and_sequence_parallel(
    world: World, duplicated: bool, sequence_parallel: bool
) -> None:
    options = {"duplicated": duplicated, "sequence_parallel": sequence_parallel}
    found = world.run(4, refused_mla, options)[3]
    assert found == "" if duplicated and sequence_parallel else "sum_rope_gradients(model)" in found
    assert world.run(4, audited_mla, options)[0].endswith("match their declared layouts")


# Megatron's pipeline schedule -----------------------------------------------------------------------------------------


def by_its_schedule(tensor: int) -> tuple[Weights, list[float], Weights]:
    """Return weights of this stage, by names of the dense model, before and after two steps, and the norms."""
    sizes: dict[str, Any] = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": 2}
    with megatron(**sizes), registry_of() as registry:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        stage = registry.rank("pipe")
        model = gpt(tied=True, pipeline_dtype=torch.float32, **sizes, **LARGE)
        declare_by_flags(model, registry)
        adam = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.1, fused=True)
        optimizer = ParallelOptimizer(adam, registry, max_norm=MAX_NORM)

        def forward_step(batches: Any, model: Any) -> Any:
            tokens, positions, mask = tokens_of(next(batches))
            losses = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
            return losses, lambda losses: (optimizer.scale_loss(losses.mean()), {})

        def by_dense_names() -> Weights:
            moved = {"layers.0": f"layers.{stage}", "output_layer.weight": "embedding.word_embeddings.weight"}
            found = {}
            for name, weight in gathered(model, registry).items():
                for here, there in moved.items():
                    name = name.replace(here, there)
                found[name] = weight
            return found

        first, norms = by_dense_names(), []
        for step in range(2):
            with optimizer.window():
                get_forward_backward_func()(
                    forward_step_func=forward_step,
                    data_iterator=iter([2 * step, 2 * step + 1]),
                    model=[model],
                    num_microbatches=2,
                    seq_length=LENGTH,
                    micro_batch_size=BATCH,
                )
            norms.append(float(optimizer.step().total_norm))
            optimizer.zero_grad()
        return first, norms, by_dense_names()


@pytest.mark.parametrize("tensor", [1, 2])
def test_megatron_pipeline_with_tied_embeddings_trains_like_dense_model(world: World, tensor: int) -> None:
    ours = world.run(2 * tensor, by_its_schedule, tensor)
    (first, _, last), (first_of_1, _, last_of_1) = ours[0], ours[tensor]  # one result per stage
    (shared,) = last.keys() & last_of_1.keys()
    assert shared == "embedding.word_embeddings.weight"
    assert torch.equal(last[shared], last_of_1[shared])
    first, last = {**first, **first_of_1}, {**last, **last_of_1}
    norms, weights = world.run(1, dense, first, {**LARGE, "tied": True}, 2)[0]
    for _, found, _ in ours:
        assert found == pytest.approx(norms, rel=1e-6)
    assert farthest(last, weights) < 2e-6


# Experts --------------------------------------------------------------------------------------------------------------

MOE: dict[str, Any] = {
    "init_method_std": 0.1,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "allgather",
    "add_bias_linear": False,
}
EXPERT_MESHES = {
    "experts over data": (1, {"expert_model_parallel_size": 2}),
    "experts over data, sharded over tensor": (2, {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}),
    "experts over tensor": (2, {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    "experts over both": (2, {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}),
    "all experts on each rank, replicated over tensor": (
        2,
        {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1},
    ),
}


def expert_names(name: str, ranks: int) -> list[str]:
    """Return the dense-model names of one expert parameter, one name per expert rank."""
    before, _, after = name.partition("local_experts.")
    local, _, rest = after.partition(".")
    return [f"{before}local_experts.{4 // ranks * rank + int(local)}.{rest}" for rank in range(ranks)]


# A small DeepSeek-V3: multi-latent attention, shared experts, and one layer of multi-token prediction.
DEEPSEEK: dict[str, Any] = {
    **MLA,
    **MOE,
    "moe_shared_expert_intermediate_size": 24,
    "moe_shared_expert_gate": True,
    "mtp_num_layers": 1,
}


def with_experts(
    tensor: int, sizes: dict[str, Any], kept: bool, options: dict[str, Any] = MOE
) -> tuple[Weights, float, Weights]:
    """Return initial weights, first norm, and weights after a step, by names of the dense model."""
    ranks = sizes["expert_model_parallel_size"]
    with megatron(tensor_model_parallel_size=tensor, **sizes), registry_of() as registry:
        given = gpt(tensor_model_parallel_size=tensor, sequence_parallel=tensor > 1, **sizes, **options)
        model: Any = in_its_ddp(given) if kept else given
        sum_rope_gradients(model)
        declare_by_flags(model, registry)
        draw_experts(given, registry, ranks)
        how: Any = {"data_parallel": model} if kept else {}
        optimizer = ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), registry, max_norm=0.5, **how)
        first = by_dense_names(given, registry, ranks)
        loss = loss_of(model, registry.rank(*registry.topology.data_axes))
        optimizer.backward(loss)
        assert kept or str(audit(model, registry)).endswith("match their declared layouts")
        return first, float(optimizer.step().total_norm), by_dense_names(given, registry, ranks)


def draw_experts(model: nn.Module, registry: ProcessGroupRegistry, ranks: int) -> None:
    """Draw expert weights by their dense-model names, because CPU initialization is equal on all expert ranks."""
    for name, param in model.named_parameters():
        if "local_experts" in name:
            names = expert_names(name, ranks)
            drawn = [0.1 * torch.randn(full_of(name), generator=generator_of(each)) for each in names]
            param.data.copy_(shard(torch.cat(drawn), spec_of(param), registry))


def full_of(name: str) -> tuple[int, int]:
    return (96, 32) if "fc1" in name else (32, 48)


def generator_of(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(sum(map(ord, name)))


def by_dense_names(model: nn.Module, registry: ProcessGroupRegistry, ranks: int) -> Weights:
    found: Weights = {}
    for name, weight in gathered(model, registry).items():
        names = expert_names(name, ranks) if "local_experts" in name else [name]
        found |= dict(zip(names, weight.chunk(len(names)), strict=True))
    return found


def dense_with_experts(first: Weights, batches: int, options: dict[str, Any] = MOE) -> tuple[float, Weights]:
    with megatron():
        model = gpt(**options).double()
        model.compute_language_model_loss = float64_loss
        params = dict(model.named_parameters())
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(first[name])
        for batch in range(batches):
            loss_of(model, batch).backward()
        # Scale the gradients and not the loss: the loss of multi-token prediction ignores a factor of the main loss.
        for param in params.values():
            param.grad /= batches
        norm = float(torch.nn.utils.clip_grad_norm_(params.values(), 0.5))
        torch.optim.SGD(params.values(), lr=0.1).step()
        return norm, {name: param.detach() for name, param in params.items()}


def float64_loss(labels: Tensor, logits: Tensor) -> Tensor:
    """Return the losses [batch, length]; Megatron's own function computes them in float32."""
    assert logits.dtype == torch.float64
    return nn.functional.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")


@pytest.mark.parametrize("kept", [False, True], ids=["alone", "in its DDP"])
@pytest.mark.parametrize(("tensor", "sizes"), EXPERT_MESHES.values(), ids=EXPERT_MESHES)
def test_megatron_experts_on_separate_mesh_train_like_one_process(
    world: World, tensor: int, sizes: dict[str, int], kept: bool
) -> None:
    ours = world.run(4, with_experts, tensor, sizes, kept)
    norm, weights = world.run(1, dense_with_experts, ours[0][0], 4 // tensor)[0]
    assert norm > 0.5
    for _, found, last in ours:
        assert found == pytest.approx(norm, rel=1e-6)
        assert farthest(last, weights) < 1e-6


WITH_ETP, WITHOUT_ETP = "experts over data, sharded over tensor", "experts over tensor"


@pytest.mark.default_cases(4)
@pytest.mark.parametrize("kept", [False, True], ids=["alone", "in its DDP"])
@pytest.mark.parametrize("mesh", [WITH_ETP, WITHOUT_ETP])
@pytest.mark.parametrize("duplicated", [True, False], ids=["duplicated", "sharded"])
def test_shared_experts_and_multi_token_prediction_train_like_one_process(
    world: World, duplicated: bool, mesh: str, kept: bool
) -> None:
    (tensor, sizes), options = EXPERT_MESHES[mesh], {**DEEPSEEK, "duplicated": duplicated}
    first, found, last = world.run(4, with_experts, tensor, sizes, kept, options)[0]
    assert any("shared_experts" in name for name in first)
    assert any("eh_proj" in name for name in first)
    assert any("gate_weight" in name for name in first)
    norm, weights = world.run(1, dense_with_experts, first, 4 // tensor, options)[0]
    assert norm > 0.5
    assert found == pytest.approx(norm, rel=1e-6)
    assert farthest(last, weights) < 1e-6


def all_experts_by_megatron() -> tuple[Weights, float, set[str]]:
    """Return initial weights, first norm, and the parameters whose replicas differ after a step of Megatron."""
    tensor, given = EXPERT_MESHES["all experts on each rank, replicated over tensor"]
    sizes: dict[str, Any] = {**given}
    with megatron(tensor_model_parallel_size=tensor, **sizes), registry_of() as registry:
        model = gpt(tensor_model_parallel_size=tensor, sequence_parallel=True, **sizes, **MOE)
        declare_by_flags(model, registry)
        draw_experts(model, registry, 1)
        first = by_dense_names(model, registry, 1)
        chunk, optimizer, finalize = with_its_optimizer(model)
        loss_of(chunk, registry.rank("data")).backward()
        finalize([chunk])
        norm = float(optimizer.step()[1])
        return first, norm, {d.name for d in audit(model, registry).disagreements if d.found == "the values differ"}


def test_megatron_optimizer_lets_replicated_experts_diverge(world: World) -> None:
    first, norm, differ = world.run(4, all_experts_by_megatron)[0]
    expected, _ = world.run(1, dense_with_experts, first, 2)[0]
    # The norm of ParallelOptimizer is within 1e-6: test_megatron_experts_on_separate_mesh_train_like_one_process.
    assert abs(norm / expected - 1) > 5e-4
    assert differ == {name for name in first if "local_experts" in name}


# The audit ------------------------------------------------------------------------------------------------------------

NORM, COLUMN_BIAS, ROW_BIAS = "input_layernorm.weight", "linear_fc1.bias", "linear_fc2.bias"
BROKEN = {
    NORM: ("sequence_parallel", False, "the gradients differ"),
    # The bias values are all zero on every rank, so only the gradients differ.
    COLUMN_BIAS: ("tensor_model_parallel", False, "the gradients differ"),
    "linear_fc1.weight": ("tensor_model_parallel", False, "the values differ"),
    "embedding.position_embeddings.weight": ("sequence_parallel", True, "the gradients are equal"),
    "output_layer.weight": ("tensor_model_parallel", False, "the values differ"),
}
REPLICA_AS_SHARD = {ROW_BIAS: ("tensor_model_parallel", True, "the values are equal and so are the gradients")}


def break_flags(model: nn.Module, ends: Iterable[str]) -> None:
    for name, param in model.named_parameters():
        for end in ends:
            if name.endswith(end):
                flag, value, _ = (BROKEN | REPLICA_AS_SHARD)[end]
                setattr(param, flag, value)


def audited(options: dict[str, Any], breaks: bool, kept: bool) -> Audit:
    with megatron(tensor_model_parallel_size=2), registry_of() as registry:
        model = gpt(tensor_model_parallel_size=2, **options)
        break_flags(model, BROKEN if breaks else [])
        model = in_its_ddp(model) if kept else model
        declare_by_flags(model, registry)
        loss_of(model, registry.rank("data")).backward()
        return audit(model, registry)


@pytest.mark.parametrize("kept", [False, True], ids=["alone", "in its DDP"])
def test_audit_accepts_megatron_models_and_names_parameters_with_wrong_flags(world: World, kept: bool) -> None:
    cases = [(4, (options, False, kept)) for options in KINDS.values()]
    for of_ranks in world.run_each(audited, cases):
        assert str(of_ranks[0]).endswith("parameters match their declared layouts")
    found = {
        d.name.removeprefix("module."): d.found
        for d in world.run(4, audited, KINDS["both"], True, kept)[0].disagreements
    }
    layers = [f"decoder.layers.{layer}." for layer in range(2)]
    assert found == {
        **{
            f"{layer}{where}": BROKEN[end][2]
            for layer in layers
            for where, end in (
                (NORM, NORM),
                (f"mlp.{COLUMN_BIAS}", COLUMN_BIAS),
                ("mlp.linear_fc1.weight", "linear_fc1.weight"),
            )
        },
        "embedding.position_embeddings.weight": "the gradients are equal",
        "output_layer.weight": "the values differ",
    }


def by_flags_alone() -> tuple[float, float, list[str]]:
    """Return the first norm with specs from flags alone and with all rules, and the parameters that the audit rejects
    with flags alone."""
    with megatron(tensor_model_parallel_size=2), registry_of() as registry:
        model = gpt(tensor_model_parallel_size=2, qk_layernorm=True, **LARGE)
        norms = []
        for rules in (False, True):
            declare_by_flags(model, registry)
            if not rules:
                for name, param in model.named_parameters():
                    if "q_layernorm" in name or "k_layernorm" in name:
                        annotate(param, P(), name)
            optimizer = ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), registry, check_replicas=False)
            optimizer.backward(loss_of(model, registry.rank("data")))
            if not rules:
                found = [d.name for d in audit(model, registry).disagreements]
            norms.append(float(optimizer.clip_grad_by_norm(1e9).total_norm))
            optimizer.zero_grad()
        return norms[0], norms[1], found


def test_megatron_flags_alone_miss_partial_gradients_of_qk_layer_norms(world: World) -> None:
    wrong, right, found = world.run(4, by_flags_alone)[0]
    assert 1e-5 < abs(wrong / right - 1) < 1e-2
    assert len(found) == 8
    assert all("q_layernorm" in name or "k_layernorm" in name for name in found)


@pytest.mark.parametrize(("end", "less"), [("linear_fc1.weight", True), (ROW_BIAS, False)])
def test_wrong_flag_makes_gradient_norm_of_megatron_optimizer_wrong(world: World, end: str, less: bool) -> None:
    first, ours, _ = world.run(4, stepped_by_us, LARGE)[0]
    expected = world.run(1, dense, first, LARGE)[0][0][0]
    found = world.run(4, stepped_by_megatron, LARGE, end)[0][0][0]
    assert ours[0] == pytest.approx(expected, rel=1e-6)
    assert (found < 0.99 * expected) if less else (found > 1.0001 * expected)


def test_megatron_page_recipe_passes_audit_and_has_equal_norms_in_two_runs(world: World) -> None:
    assert world.run(4, recipe) == world.run(4, recipe)


def recipe() -> float:
    page = (Path(__file__).parents[2] / "docs" / "integrations" / "MEGATRON_CORE.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    with megatron(tensor_model_parallel_size=2):
        namespace: dict[str, Any] = {"model": gpt(tensor_model_parallel_size=2)}
        exec(compile(code, "MEGATRON_CORE.md", "exec"), namespace)
        optimizer, registry = namespace["optimizer"], namespace["registry"]
        with registry:
            optimizer.backward(loss_of(namespace["model"], registry.rank("data")))
            assert str(namespace["audit"](namespace["model"], registry)).endswith("match their declared layouts")
            return float(optimizer.step().total_norm)


def refused(ddp: dict[str, bool], config: dict[str, bool]) -> str:
    with megatron(tensor_model_parallel_size=2), registry_of() as registry:
        model = in_its_ddp(gpt(tensor_model_parallel_size=2, **config), **ddp)
        declare_by_flags(model, registry)
        with pytest.raises(ValueError, match="of Megatron has an unsupported setting") as error:
            ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), registry, data_parallel=model)
        return str(error.value)


def test_unsupported_options_of_megatron_ddp_are_rejected(world: World) -> None:
    assert "states=Sharded('data') instead" in world.run(4, refused, {"use_distributed_optimizer": True}, {})[3]
    assert "backward(loss, weight=...)" in world.run(4, refused, {}, {"calculate_per_token_loss": True})[3]


def not_initialized() -> str:
    with pytest.raises(RuntimeError, match="isn't initialized") as error:
        registry_of()
    return str(error.value)


def test_registry_of_call_before_megatron_initialization_raises_clear_error(world: World) -> None:
    assert "initialize_model_parallel" in world.run(1, not_initialized)[0]
