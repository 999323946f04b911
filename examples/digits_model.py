"""A small vision transformer, written once, over three families of layers: dense, split in one dimension, in two.

The model asks a family for its layers and knows no ranks. What the families differ in:

    family        batch over     features between layers    weights
    DenseLayers   data           whole                      whole
    Layers1D      data           whole                      of each pair of linear layers: split over `tensor`
    Layers2D      data and row   split over `col`           split over `row` and `col`

From the same seed all of them draw the same full weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from einops import rearrange
from meshstep.parallel import (
    ColumnParallelLinear,
    LayerNorm1D,
    LayerNorm2D,
    Linear2D,
    P,
    ProcessGroupRegistry,
    RowParallelLinear,
    annotate,
    cross_entropy_2d,
    declare,
    gather_from,
    shard,
    spec_of,
    unshard,
)
from torch import Tensor, nn

TOKENS, PIXELS, CLASSES = 16, 4, 10  # a digit is 8 x 8 pixels: 16 patches of 2 x 2


class DenseLayers:
    """Torch's own layers, whole on every rank. The other families replace what they split."""

    batch_axes: tuple[str, ...] = ()  # model axes that split the batch (the data axes do so anyway)
    feature_axes: tuple[str, ...] = ()  # ... and those that split the features between the layers
    rules: Mapping[str, P] = {"*": P()}  # specs of what the layers don't declare themselves; P(): replicated

    def linear(self, in_features: int, out_features: int) -> nn.Module:
        """A linear layer that stands alone."""
        return nn.Linear(in_features, out_features)

    def first_linear(self, in_features: int, out_features: int, bias: bool = True) -> nn.Module:
        """The first of a pair; what stands between the two works on each output feature (or attention head) alone."""
        return nn.Linear(in_features, out_features, bias)

    def second_linear(self, in_features: int, out_features: int) -> nn.Module:
        """The second of a pair."""
        return nn.Linear(in_features, out_features)

    def norm(self, features: int) -> nn.Module:
        """A layer norm."""
        return nn.LayerNorm(features)

    def positions(self, full: Tensor) -> nn.Parameter:
        """The position embedding [token, feature]."""
        return nn.Parameter(full)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy, the mean over this data coordinate's part of the batch."""
        return F.cross_entropy(logits, labels)

    def all_classes(self, logits: Tensor) -> Tensor:
        """The logits of every class, for this rank's part of the batch."""
        return logits


class Layers1D(DenseLayers):
    """Pairs of linear layers split over `tensor`; the rest is replicated (10 classes would not divide over 4 ranks)."""

    rules: Mapping[str, P] = {"embed.*": P(), "positions": P(), "head.*": P()}

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        self.registry = registry

    def first_linear(self, in_features: int, out_features: int, bias: bool = True) -> nn.Module:
        return ColumnParallelLinear(in_features, out_features, self.registry, bias=bias)

    def second_linear(self, in_features: int, out_features: int) -> nn.Module:
        return RowParallelLinear(in_features, out_features, self.registry)

    def norm(self, features: int) -> nn.Module:
        return LayerNorm1D(features)


class Layers2D(DenseLayers):
    """Everything split over the `row` x `col` grid: the batch over `row`, the features over `col`, weights over both."""

    batch_axes = ("row",)
    feature_axes = ("col",)
    rules: Mapping[str, P] = {}

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        self.registry = registry

    def linear(self, in_features: int, out_features: int) -> nn.Module:
        return Linear2D(in_features, out_features, self.registry)

    def first_linear(self, in_features: int, out_features: int, bias: bool = True) -> nn.Module:
        return Linear2D(in_features, out_features, self.registry, bias="column" if bias else None)

    def second_linear(self, in_features: int, out_features: int) -> nn.Module:
        return Linear2D(in_features, out_features, self.registry)

    def norm(self, features: int) -> nn.Module:
        return LayerNorm2D(features, self.registry)

    def positions(self, full: Tensor) -> nn.Parameter:
        # Each row sees its own part of the batch: after backward the gradient is still a sum over `row`, which the
        # optimizer makes because the spec says so.
        spec = P(None, "col", partial="row")
        param = nn.Parameter(shard(full, spec, self.registry))
        annotate(param, spec)
        return param

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy_2d(logits, labels, self.registry)

    def all_classes(self, logits: Tensor) -> Tensor:
        return gather_from(logits, self.registry, "col", dim=-1)


def layers_for(registry: ProcessGroupRegistry) -> DenseLayers:
    """The family that a topology's model axes ask for.

    Raises:
        ValueError: None does.
    """
    axes = set(registry.topology.axes) - set(registry.topology.data_axes)
    if not axes:
        return DenseLayers()
    if axes == {"tensor"}:
        return Layers1D(registry)
    if axes == {"row", "col"}:
        return Layers2D(registry)
    raise ValueError(f"no layers for {registry.topology!r}: besides data, give tensor, or row and col, or nothing")


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, layers: DenseLayers) -> None:
        super().__init__()
        self.head_width = width // heads
        # No bias: softmax cancels that of the keys, and Adam would blow up its gradient, which is rounding noise.
        self.qkv = layers.first_linear(width, 3 * width, bias=False)
        self.out = layers.second_linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # Heads are the slowest part of the features: a rank that has a slice of them has whole heads.
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
    """Patches [batch, token, pixel] -> logits [batch, class], each split as the family says."""

    def __init__(
        self, layers: DenseLayers, pixels: int, tokens: int, classes: int, width: int, heads: int, depth: int
    ) -> None:
        super().__init__()
        self.embed = layers.linear(pixels, width)
        self.positions = layers.positions(0.5 * torch.randn(tokens, width))
        self.blocks = nn.ModuleList(Block(width, heads, layers) for _ in range(depth))
        self.norm = layers.norm(width)
        self.head = layers.linear(width, classes)
        declare(self, layers.rules)

    def forward(self, patches: Tensor) -> Tensor:
        x = self.embed(patches) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


class DigitsTransformer(PatchTransformer):
    """The one for scikit-learn's digits."""

    def __init__(self, layers: DenseLayers, width: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__(layers, PIXELS, TOKENS, CLASSES, width, heads, depth)


def full_parameters(model: nn.Module, registry: ProcessGroupRegistry) -> dict[str, Tensor]:
    """The full parameters on every rank, by name and as the dense model has them. All ranks must call."""
    full = {name: unshard(param, spec_of(param), registry) for name, param in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, Linear2D):  # its weight is [in, out], that of `nn.Linear` is [out, in]
            full[f"{name}.weight"] = full[f"{name}.weight"].t()
    return full


class DenseReference:
    """The same model on one rank, dense, in float64: says what the global gradient norm must be."""

    def __init__(self) -> None:
        self.model = DigitsTransformer(DenseLayers()).double()

    def gradient_norm(self, parameters: Mapping[str, Tensor], patches: Tensor, labels: Tensor) -> float:
        """The 2-norm of the loss' gradient at these full parameters, for the full batch."""
        self.model.load_state_dict(parameters)
        loss = F.cross_entropy(self.model(patches.double()), labels)
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        return float(torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients])))
