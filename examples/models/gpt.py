"""A small GPT over bytes, split over `tensor`: one table, split by its vocabulary, is embedding and classifier."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from meshstep.parallel import (
    ColumnParallelLinear,
    LayerNorm1D,
    P,
    ProcessGroupRegistry,
    RowParallelLinear,
    VocabParallelEmbedding,
    annotate,
    copy_to,
    gather_from,
)
from torch import Tensor, nn

from .layers import check_divides

VOCABULARY = 256  # all bytes; 0, which no text has, stands before and after each paragraph
CONTEXT = 64


class Attention(nn.Module):
    """Causal self-attention; each rank of `tensor` has some of the heads."""

    def __init__(self, width: int, heads: int, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        check_divides(heads, "tensor", registry)
        self.head_width = width // heads
        self.qkv = ColumnParallelLinear(width, 3 * width, registry, bias=False)
        self.out = RowParallelLinear(width, width, registry)

    def forward(self, x: Tensor) -> Tensor:
        # Heads are the slowest part of the features: a rank that has a slice of them has whole heads.
        pattern = "batch token (head part feature) -> part batch head token feature"
        q, k, v = rearrange(self.qkv(x), pattern, part=3, feature=self.head_width)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(rearrange(mixed, "batch head token feature -> batch token (head feature)"))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        self.norm1, self.attention = LayerNorm1D(width), Attention(width, heads, registry)
        self.norm2 = LayerNorm1D(width)
        self.up = ColumnParallelLinear(width, 4 * width, registry)
        self.down = RowParallelLinear(4 * width, width, registry)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Bytes [batch, token] -> logits of the next byte [batch, token, this rank's part of the vocabulary].

    Raises:
        ValueError: The topology has other axes than data and tensor, or they don't divide the model.
    """

    def __init__(self, registry: ProcessGroupRegistry, width: int, heads: int, depth: int) -> None:
        super().__init__()
        strange = [axis for axis in registry.topology.model_axes + registry.topology.pipe_axes if axis != "tensor"]
        if strange:
            raise ValueError(f"no layers for {', '.join(strange)}: give data, tensor, or both")
        self.registry = registry
        self.embed = VocabParallelEmbedding(VOCABULARY, width, registry)
        with torch.no_grad():
            self.embed.weight.mul_(width**-0.5)  # it is the classifier too, and the logits should start small
        self.positions = nn.Parameter(torch.randn(CONTEXT, width) * width**-0.5)
        annotate(self.positions, P())
        self.blocks = nn.ModuleList(Block(width, heads, registry) for _ in range(depth))
        self.norm = LayerNorm1D(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions[: ids.size(1)]
        for block in self.blocks:
            x = block(x)
        # Every rank goes on with classes of its own: copy_to sums what they say of x in the backward.
        return F.linear(copy_to(self.norm(x), self.registry, "tensor"), self.embed.weight)

    @torch.no_grad()
    def write(self, beginning: str, generator: torch.Generator, temperature: float = 0.6) -> str:
        """Continue a paragraph to its end, or to the end of the context. All ranks must call, with equal generators."""
        text = [0, *beginning.encode()]
        while len(text) < CONTEXT:
            logits = self(torch.tensor([text], device=self.registry.device))[0, -1]
            logits = gather_from(logits, self.registry, "tensor", dim=-1).float().cpu()
            byte = int(torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=generator))
            if byte == 0:
                break
            text.append(byte)
        return bytes(text[1:]).decode(errors="replace")
