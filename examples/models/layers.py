"""Families of layers that a model may be made of: dense, split in one dimension, in two.

A model asks a family for its layers and knows no ranks. What the families differ in:

    family        batch over     features between layers    weights
    DenseLayers   data           whole                      whole
    Layers1D      data           whole                      of each pair of linear layers: split over `tensor`
    Layers2D      data and row   split over `col`           split over `row` and `col`

From the same seed all of them draw the same full weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
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
    gather_from,
    shard,
)
from torch import Tensor, nn


class DenseLayers:
    """Torch's own layers, whole on every rank. The other families replace what they split."""

    batch_axes: tuple[str, ...] = ()  # model axes that split the batch (the data axes do so anyway)
    feature_axes: tuple[str, ...] = ()  # ... and those that split the features between the layers
    rules: Mapping[str, P] = {"*": P()}  # specs of what the layers don't declare themselves; P(): replicated

    def check_heads(self, heads: int) -> None:
        """Raise ValueError where the ranks that split the features can't have equally many attention heads."""

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

    def check_heads(self, heads: int) -> None:
        check_divides(heads, "tensor", self.registry)

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

    def check_heads(self, heads: int) -> None:
        check_divides(heads, "col", self.registry)

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


def check_divides(heads: int, axis: str, registry: ProcessGroupRegistry) -> None:
    """Raise ValueError where the ranks along an axis can't have equally many attention heads."""
    if heads % registry.size(axis):
        raise ValueError(f"{heads} attention heads don't divide over {axis}={registry.size(axis)}")


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
