"""Full initial weights, drawn as torch's dense layers draw theirs.

Every rank draws the whole tensor from the same seed and keeps its piece: then the full weights, and the state of the
random generator afterwards, depend on neither the topology nor the kind of parallelism, and equal those of the dense
torch layer built in the same place (same seed, dtype and device). The price is the full tensor in memory for a moment.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def draw_linear(
    in_features: int,
    out_features: int,
    *,
    bias: bool,
    generator: torch.Generator | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """Weight [out_features, in_features] and bias [out_features], uniform in +-1/sqrt(in_features) as `nn.Linear`."""
    weight = torch.empty(out_features, in_features, device=device, dtype=dtype)
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
    if not bias:
        return weight, None
    bound = 1 / math.sqrt(in_features)
    return weight, torch.empty(out_features, device=device, dtype=dtype).uniform_(-bound, bound, generator=generator)


def draw_embedding(
    num_embeddings: int,
    embedding_dim: int,
    *,
    generator: torch.Generator | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> Tensor:
    """Table [num_embeddings, embedding_dim] of standard normals, as `nn.Embedding`."""
    return torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype).normal_(generator=generator)
