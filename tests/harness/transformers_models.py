"""Small models of the Transformers library, created without downloads."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Mesh = tuple[int, ...]
SMALL = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "attention_dropout": 0.0,
}  # fmt: skip


def made(kind: str) -> Any:
    """Return a model with random weights in torch's default dtype."""
    import transformers

    torch.manual_seed(7)
    if kind == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SMALL, **experts, head_dim=4))
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, head_dim=4, tie_word_embeddings=True))


def loaded(path: str, mesh: Mesh | None, dtype: torch.dtype = torch.float64) -> Any:
    """Load the model: unsharded, or sharded over fsdp x tp, optionally with experts over ep."""
    import transformers
    from transformers.distributed import DistributedConfig

    transformers.utils.logging.disable_progress_bar()
    config = (
        None
        if mesh is None
        else DistributedConfig(**dict(zip(("fsdp_size", "tp_size", "ep_size"), mesh, strict=False)))
    )
    # Other implementations of experts do not support float64.
    options = {"experts_implementation": "eager"} if "moe" in path else {}
    return transformers.AutoModelForCausalLM.from_pretrained(path, distributed_config=config, dtype=dtype, **options)


def tokens_of(step: int, rows: int = 4) -> Tensor:
    return torch.randint(0, 64, (rows, 8), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the loss in the dtype of the logits; the loss of the model itself is in float32."""
    logits = model(input_ids=tokens).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (param.full_tensor() if hasattr(param, "full_tensor") else param).detach().double()
        for name, param in model.named_parameters()
    }


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
