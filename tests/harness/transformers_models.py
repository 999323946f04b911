"""Small models of the Transformers library, created without downloads."""

from __future__ import annotations

from typing import Any

import torch

SMALL = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "attention_dropout": 0.0,
}  # fmt: skip


def made(kind: str) -> Any:
    """A model with random weights in torch's default dtype."""
    import transformers

    torch.manual_seed(7)
    if kind == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SMALL, **experts, head_dim=4))
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, head_dim=4, tie_word_embeddings=True))
