"""Run the unmodified Megatron-core on CPU ranks over gloo; its calls to CUDA and apex are replaced by torch functions
on the CPU.

Within `megatron`, this process replaces the device "cuda" of new tensors (norms, overflow flags),
``torch.cuda.current_device``, ``synchronize`` and ``manual_seed``, ``Tensor.cuda`` and ``Tensor.type`` (Megatron asserts
"torch.cuda.FloatTensor"), and the states of CUDA's random generators. It makes Megatron's `FusedLayerNorm` the layer norm,
because Megatron has no other one for sequence parallelism, and replaces the apex kernel that it calls. It also adds a name
that Megatron's router imports from TransformerEngine. Flags, gradients, gradient norms, optimizers and all other layers are
not changed.

Multi-latent attention of Megatron-core 0.16 needs two layers of TransformerEngine. Here two classes replace these layers:
`_CoreAttention`, and `_DuplicatedLinear` with the flag `sequence_parallel`, as Megatron's `TELinear` sets it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

VOCABULARY, LENGTH, BATCH = 64, 16, 2


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and "cuda" in str(kwargs.get("device", "")):
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **(kwargs or {}))
        return result.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and len(args) == 1 else result


class _LayerNormKernel:
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, shape: tuple[int, ...], eps: float) -> Tensor:
        return nn.functional.layer_norm(x, shape, weight, bias, eps)

    apply = forward


class _CoreAttention(nn.Module):
    """Causal attention with different sizes of keys and values; in place of Megatron's TEDotProductAttention."""

    def __init__(self, *, softmax_scale: float, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))  # [batch, heads, length, size]
        scores = query @ key.transpose(-1, -2) * self.scale
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        attended = scores.masked_fill(later, -torch.inf).softmax(-1) @ value
        return attended.permute(2, 0, 1, 3).flatten(2)


class _DuplicatedLinear(nn.Linear):
    """A linear layer replicated over tensor; in place of Megatron's TELinear with ``parallel_mode="duplicated"``."""

    def __init__(self, inputs: int, outputs: int, *, config: Any, init_method: Any, **_: Any) -> None:
        super().__init__(inputs, outputs, bias=False)
        with torch.no_grad():
            init_method(self.weight)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 (a flag of Megatron)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


@contextmanager
def megatron(**sizes: int) -> Iterator[None]:
    """Initialize Megatron's parallel_state with these sizes (``tensor_model_parallel_size=2``) for the block."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.fusions import fused_layer_norm
        from megatron.core.models import backends
        from megatron.core.models.gpt import gpt_layer_specs
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer import multi_latent_attention, transformer_block
        from megatron.core.transformer.moe import moe_utils

        with ExitStack() as stack:

            def replace(of: Any, name: str, by: object) -> None:
                stack.enter_context(mock.patch.object(of, name, by, create=True))

            for of, name in ((gpt_layer_specs, "LNImpl"), (backends, "LNImpl"), (transformer_block, "LayerNormImpl")):
                replace(of, name, fused_layer_norm.FusedLayerNorm)
            replace(fused_layer_norm, "HAVE_FUSED_LAYER_NORM", True)
            replace(fused_layer_norm, "FusedLayerNormAffineFunction", _LayerNormKernel)
            replace(moe_utils, "te_general_gemm", None)
            replace(multi_latent_attention, "TELinear", _DuplicatedLinear)
            replace(random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
            replace(random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state))
            replace(torch.cuda, "get_rng_state", lambda *_: torch.get_rng_state())
            replace(torch.cuda, "manual_seed", torch.manual_seed)
            replace(torch.cuda, "synchronize", lambda *_: None)
            replace(torch.cuda, "current_device", lambda: torch.device("cpu"))
            stack.enter_context(_OnCpu())
            parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **sizes)
            stack.callback(_leave)
            random.model_parallel_cuda_manual_seed(7)
            yield


def _leave() -> None:
    from megatron.core import parallel_state

    for group in parallel_state._global_process_group_list or ():
        if group is not None:
            dist.destroy_process_group(group)
    parallel_state._global_process_group_list = None
    parallel_state.destroy_model_parallel()


def config_of(**options: Any) -> Any:
    """Return a TransformerConfig with two small layers, gated MLPs and two query groups; an MLATransformerConfig if the
    options contain ``multi_latent_attention=True``."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    fused = ("gradient_accumulation_fusion", "masked_softmax_fusion", "bias_dropout_fusion", "bias_activation_fusion")
    defaults = {
        **dict.fromkeys((*fused, "apply_rope_fusion", "persist_layer_norm"), False),
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
    }
    kind = MLATransformerConfig if options.get("multi_latent_attention") else TransformerConfig
    return kind(**{**defaults, **options})


def gpt(seed: int = 0, tied: bool = False, duplicated: bool = True, **options: Any) -> Any:
    """Return Megatron's GPTModel with the local spec, for this pipeline stage.

    One seed gives the same weights on every mesh without pipeline stages.

    Args:
        tied: The embedding and the output layer share their weight.
        duplicated: Multi-latent attention only: the down projections are replicated over tensor, as in the spec for
            TransformerEngine. False: they are column-parallel, as in the local spec.
        options: Arguments of `config_of`.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = config_of(**options)
    layers = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        moe_grouped_gemm=False,
        multi_latent_attention=config.multi_latent_attention,
    )
    if config.multi_latent_attention:
        parts = layers.submodules.self_attention.submodules
        parts.core_attention = _CoreAttention
        if duplicated:
            parts.linear_q_down_proj = parts.linear_kv_down_proj = _DuplicatedLinear
    predicts_more = config.mtp_num_layers is not None
    mtp = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False) if predicts_more else None
    torch.manual_seed(seed)
    return GPTModel(
        config,
        layers,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=tied,
        mtp_block_spec=mtp,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def tokens_of(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return one batch: tokens with the last target [batch, length + 1], positions, and a causal mask."""
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return tokens, torch.arange(LENGTH).expand(BATCH, LENGTH), mask


def loss_of(model: Any, seed: int) -> Tensor:
    tokens, positions, mask = tokens_of(seed)
    loss: Tensor = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
    return loss
