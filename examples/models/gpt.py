"""A small GPT over bytes, sharded over `tensor`: one table, sharded by vocabulary, is embedding and classifier.

The sequence is sharded over the axis `cp`.
"""

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

from .sequence import SplitSequence

VOCABULARY = 256  # all bytes; 0, which is in no text, marks the beginning and the end of a paragraph
CONTEXT = 64


class Attention(nn.Module):
    """Causal self-attention; heads are sharded over `tensor`, and within attention over `cp` too."""

    def __init__(self, width: int, heads: int, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        self.sequence = SplitSequence(registry)
        axes = ("tensor", *self.sequence.axes)
        if heads % registry.size(*axes):
            raise ValueError(
                f"{heads} attention heads can't be divided evenly among {registry.size(*axes)} ranks ({' x '.join(axes)}); "
                "change --heads or the size of an axis"
            )
        self.head_width = width // heads
        self.qkv = ColumnParallelLinear(width, 3 * width, registry, bias=False)
        self.out = RowParallelLinear(width, width, registry)

    def forward(self, x: Tensor, tokens: int | None = None) -> Tensor:
        # The head varies slowest in the features, so each rank has complete heads.
        pattern = "batch token (head part feature) -> part batch head token feature"
        own = rearrange(self.qkv(x), pattern, part=3, feature=self.head_width)
        q, k, v = self.sequence.whole(own, x.size(1) if tokens is None else tokens)
        mixed = self.sequence.parted(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        y: Tensor = self.out(rearrange(mixed, "batch head token feature -> batch token (head feature)"))
        return y


class Block(nn.Module):
    """Transformer block: attention and two linear layers.

    ``forward`` takes this rank's tokens, and the number ``tokens`` of all tokens (None: sequences are not sharded).
    """

    def __init__(self, width: int, heads: int, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        self.norm1, self.attention = LayerNorm1D(width), Attention(width, heads, registry)
        self.norm2 = LayerNorm1D(width)
        self.up = ColumnParallelLinear(width, 4 * width, registry)
        self.down = RowParallelLinear(4 * width, width, registry)

    def forward(self, x: Tensor, tokens: int | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), tokens)
        y: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + y


class GPT(nn.Module):
    """Transformer from bytes [batch, token] to logits of the next byte [batch, local token, local vocabulary].

    Raises:
        ValueError: The topology has an axis other than data, cp and tensor, or its sizes do not divide the model's
            sizes.
    """

    def __init__(self, registry: ProcessGroupRegistry, width: int, heads: int, depth: int) -> None:
        super().__init__()
        strange = [axis for axis in registry.topology.model_axes + registry.topology.pipe_axes if axis != "tensor"]
        if strange:
            raise ValueError(
                f"--topology has {', '.join(strange)}, over which this model can't be sharded: use only data, cp and tensor"
            )
        self.registry, self.sequence = registry, SplitSequence(registry)
        self.embed = VocabParallelEmbedding(VOCABULARY, width, registry)
        with torch.no_grad():
            self.embed.weight.mul_(width**-0.5)  # the table is the classifier too, whose logits should start small
        self.positions = nn.Parameter(torch.randn(CONTEXT, width) * width**-0.5)
        annotate(self.positions, P())
        self.blocks = nn.ModuleList(Block(width, heads, registry) for _ in range(depth))
        self.norm = LayerNorm1D(width)

    def forward(self, ids: Tensor) -> Tensor:
        own = self.sequence.own
        x = self.embed(own(ids, 1)) + own(self.positions[: ids.size(1)], 0)
        for block in self.blocks:
            x = block(x, ids.size(1))
        # Each rank computes its shard of the classes, so copy_to sums the gradients of x in backward.
        return F.linear(copy_to(self.norm(x), self.registry, "tensor"), self.embed.weight)

    @torch.no_grad()
    def write(self, beginning: str, generator: torch.Generator, temperature: float = 0.6) -> str:
        """Return a paragraph that starts with ``beginning``. Call it on all ranks, with generators in the same state."""
        text = [0, *beginning.encode()]
        while len(text) < CONTEXT:
            logits = self.sequence.last(self(torch.tensor([text], device=self.registry.device)), len(text))[0]
            logits = gather_from(logits, self.registry, "tensor", dim=-1).float().cpu()
            byte = int(torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=generator))
            if byte == 0:
                break
            text.append(byte)
        return bytes(text[1:]).decode(errors="replace")
