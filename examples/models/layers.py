"""Families of layers that a model may be made of: dense, split in one dimension, in two, on several grids, in three.

A model asks a family for its layers and knows no ranks. What the families differ in:

    family        batch over              features between layers    weights
    DenseLayers   data                    whole                      whole
    Layers1D      data                    whole                      of each pair of linear layers: split over `tensor`
    Layers2D      data and row            split over `col`           split over `row` and `col`
    Layers2p5D    data, depth and row     split over `col`           split over `row` and `col`, copied over `depth`
    Layers3D      data, weight and input  split over `output`        split over `input`, `weight` and `output`

From the same seed all of them draw the same full weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from meshstep.parallel import (
    BiasLayout,
    Classifier3D,
    ColumnParallelLinear,
    LayerNorm1D,
    LayerNorm2D,
    LayerNorm3D,
    Linear2D,
    Linear3D,
    P,
    ProcessGroupRegistry,
    RowParallelLinear,
    annotate,
    cross_entropy_2d,
    cross_entropy_3d,
    gather_from,
    shard,
)
from torch import Tensor, nn


class DenseLayers:
    """Torch's own layers, whole on every rank. The other families replace what they split."""

    batch_axes: tuple[str, ...] = ()  # model axes that split the batch (the data axes do so anyway)
    feature_axes: tuple[str, ...] = ()  # ... and those that split the features between the layers
    rules: Mapping[str, P] = {"*": P()}  # specs of what the layers don't declare themselves; P(): replicated

    @property
    def input_axes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The model axes that split the batch, and those that split the features, of what the first layer takes."""
        return self.batch_axes, self.feature_axes

    def check_heads(self, heads: int) -> None:
        """Raise ValueError where the ranks that split the features can't have equally many attention heads."""

    def linear(self, in_features: int, out_features: int) -> nn.Module:
        """A linear layer that stands alone."""
        return nn.Linear(in_features, out_features)

    def classifier(self, in_features: int, classes: int) -> nn.Module:
        """The linear layer whose output `loss` takes."""
        return self.linear(in_features, classes)

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

    batch_axes: tuple[str, ...] = ("row",)
    feature_axes = ("col",)
    rules: Mapping[str, P] = {}
    depth: str | None = None  # the axis of several grids
    classes: int | None = None  # which may not divide over `col`

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        self.registry = registry

    def check_heads(self, heads: int) -> None:
        check_divides(heads, "col", self.registry)

    def linear(self, in_features: int, out_features: int) -> nn.Module:
        return Linear2D(in_features, out_features, self.registry, depth=self.depth)

    def classifier(self, in_features: int, classes: int) -> nn.Module:
        self.classes = classes
        return self.linear(in_features, classes)

    def first_linear(self, in_features: int, out_features: int, bias: bool = True) -> nn.Module:
        layout: BiasLayout | None = "column" if bias else None
        return Linear2D(in_features, out_features, self.registry, bias=layout, depth=self.depth)

    def second_linear(self, in_features: int, out_features: int) -> nn.Module:
        return self.linear(in_features, out_features)

    def norm(self, features: int) -> nn.Module:
        return LayerNorm2D(features, self.registry, depth=self.depth)

    def positions(self, full: Tensor) -> nn.Parameter:
        return summed_positions(full, self)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy_2d(logits, labels, self.registry, row=self.batch_axes, classes=self.classes)

    def all_classes(self, logits: Tensor) -> Tensor:
        return gather_from(logits, self.registry, "col", dim=-1, length=self.classes)


class Layers2p5D(Layers2D):
    """`Layers2D` on several grids, which lie along `depth` and split the batch as well."""

    batch_axes = ("depth", "row")
    depth = "depth"


class Layers3D(DenseLayers):
    """Everything split over a cube: the first linear layer of a pair takes features that are split over `output` and gives
    some that are split over `input`, and the second one brings them back; the batch is split over the two other axes."""

    batch_axes = ("weight", "input")
    feature_axes = ("output",)
    input_axes = (("weight", "output"), ("input",))  # of the linear layer that stands alone
    rules: Mapping[str, P] = {}

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        self.registry = registry

    def check_heads(self, heads: int) -> None:
        check_divides(heads, "input", self.registry)

    def linear(self, in_features: int, out_features: int) -> nn.Module:
        return Linear3D(in_features, out_features, self.registry, input="output", output="input")

    def classifier(self, in_features: int, classes: int) -> nn.Module:
        return Classifier3D(in_features, classes, self.registry, bias=True)

    def first_linear(self, in_features: int, out_features: int, bias: bool = True) -> nn.Module:
        return Linear3D(in_features, out_features, self.registry, bias=bias)

    def second_linear(self, in_features: int, out_features: int) -> nn.Module:
        return self.linear(in_features, out_features)

    def norm(self, features: int) -> nn.Module:
        return LayerNorm3D(features, self.registry)

    def positions(self, full: Tensor) -> nn.Parameter:
        return summed_positions(full, self)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy_3d(logits, labels, self.registry)


def summed_positions(full: Tensor, family: Layers2D | Layers3D) -> nn.Parameter:
    """The position embedding where ranks along model axes see other samples: after backward its gradient is still a sum
    over these, which the optimizer makes because the spec says so."""
    spec = P(None, family.feature_axes, partial=family.batch_axes)
    param = nn.Parameter(shard(full, spec, family.registry))
    annotate(param, spec)
    return param


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
    if axes == {"depth", "row", "col"}:
        return Layers2p5D(registry)
    if axes == {"input", "weight", "output"}:
        return Layers3D(registry)
    raise ValueError(
        f"no layers for {registry.topology!r}: besides data, give tensor, or row and col, which depth may be added to, or "
        "input, weight and output, or nothing"
    )
