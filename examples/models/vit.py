"""A small vision transformer for all families of layers: see layers.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange
from meshstep.parallel import declare
from torch import Tensor, nn

from .layers import DenseLayers


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, layers: DenseLayers) -> None:
        super().__init__()
        layers.check_heads(heads)
        self.head_width = width // heads
        # No bias: softmax cancels the bias of the keys, so its gradient is rounding noise, which Adam would amplify.
        self.qkv = layers.first_linear(width, 3 * width, bias=False)
        self.out = layers.second_linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # The head varies slowest in the features, so each rank has complete heads.
        pattern = "batch token (head part feature) -> part batch head token feature"
        q, k, v = rearrange(self.qkv(x), pattern, part=3, feature=self.head_width)
        mixed = F.scaled_dot_product_attention(q, k, v)
        y: Tensor = self.out(rearrange(mixed, "batch head token feature -> batch token (head feature)"))
        return y


class Block(nn.Module):
    def __init__(self, width: int, heads: int, layers: DenseLayers) -> None:
        super().__init__()
        self.norm1, self.attention = layers.norm(width), Attention(width, heads, layers)
        self.norm2 = layers.norm(width)
        self.up, self.down = layers.first_linear(width, 4 * width), layers.second_linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + y


class PatchTransformer(nn.Module):
    """Transformer from patches [batch, token, pixel] to logits [batch, class], each sharded as the family defines.

    Args:
        layers: The family of layers.
        pixels, tokens, classes: Values per patch, patches per image, and classes.
        width, heads, depth: Features between the layers, attention heads, and blocks.
        block: Returns a block, given width, heads and family. Default: `Block`.
    """

    def __init__(
        self,
        layers: DenseLayers,
        pixels: int,
        tokens: int,
        classes: int,
        width: int,
        heads: int,
        depth: int,
        block: Callable[[int, int, DenseLayers], nn.Module] = Block,
    ) -> None:
        super().__init__()
        self.embed = layers.linear(pixels, width)
        self.positions = layers.positions(0.5 * torch.randn(tokens, width))
        self.blocks = nn.ModuleList(block(width, heads, layers) for _ in range(depth))
        self.norm = layers.norm(width)
        self.head = layers.classifier(width, classes)
        declare(self, layers.rules)

    def forward(self, patches: Tensor) -> Tensor:
        x = self.embed(patches) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits
