"""Families of layers for a model: dense, or sharded in one dimension, two, two and a half (several grids), or three.

A model gets its layers from a family, and its code does not depend on ranks. The families:

    family        batch over              features between layers    weights
    DenseLayers   data                    replicated                 replicated
    Layers1D      data                    replicated                 pairs of linear layers: sharded over `tensor`
    Layers2D      data and row            sharded over `col`         sharded over `row` and `col`
    Layers2p5D    data, depth and row     sharded over `col`         sharded over `row` and `col`, replicated over `depth`
    Layers3D      data, weight and input  sharded over `output`      sharded over `input`, `weight` and `output`

With the same seed, all families draw the same full weights.
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
    """Family of torch's layers, replicated on every rank. Subclasses override the methods for layers that they shard."""

    batch_axes: tuple[str, ...] = ()  # model axes over which the batch is sharded, besides the data axes
    feature_axes: tuple[str, ...] = ()  # model axes over which the features between layers are sharded
    rules: Mapping[str, P] = {"*": P()}  # specs of parameters that layers do not declare; P(): replicated

    @property
    def input_axes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return (model axes that shard the batch, model axes that shard the features) for a model's input."""
        return self.batch_axes, self.feature_axes

    def check_heads(self, heads: int) -> None:
        """Raise ValueError if the attention heads do not divide over the axis that shards them. Here, no axis does."""

    def linear(self, in_features: int, out_features: int) -> nn.Module:
        """Return a single linear layer."""
        return nn.Linear(in_features, out_features)

    def classifier(self, in_features: int, classes: int) -> nn.Module:
        """Return the linear layer whose output is the input of `loss`."""
        return self.linear(in_features, classes)

    def first_linear(self, in_features: int, out_features: int, bias: bool = True) -> nn.Module:
        """Return the first layer of a pair. Code between the two layers must process each feature (or head) separately."""
        return nn.Linear(in_features, out_features, bias)

    def second_linear(self, in_features: int, out_features: int) -> nn.Module:
        """Return the second of a pair of linear layers."""
        return nn.Linear(in_features, out_features)

    def norm(self, features: int) -> nn.Module:
        """Return a layer norm."""
        return nn.LayerNorm(features)

    def positions(self, full: Tensor) -> nn.Parameter:
        """Return the position embedding [token, feature]."""
        return nn.Parameter(full)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy, averaged over the samples of this data rank."""
        return F.cross_entropy(logits, labels)

    def all_classes(self, logits: Tensor) -> Tensor:
        """Return the logits of all classes for this rank's shard of the batch."""
        return logits


class Layers1D(DenseLayers):
    """Pairs of linear layers are sharded over `tensor`.

    Other layers are replicated: a classifier of 10 classes, for example, does not divide over 4 ranks.
    """

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
    """All layers sharded over the `row` x `col` grid: the batch over `row`, features over `col`, weights over both."""

    batch_axes: tuple[str, ...] = ("row",)
    feature_axes = ("col",)
    rules: Mapping[str, P] = {}
    depth: str | None = None  # the axis along which there are several grids
    classes: int | None = None  # the classifier's number of classes; need not be divisible by the size of `col`

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
    """`Layers2D` on several grids along `depth`, over which the batch is sharded too."""

    batch_axes = ("depth", "row")
    depth = "depth"


class Layers3D(DenseLayers):
    """All layers sharded over a cube.

    The first linear layer of a pair maps features sharded over `output` to features sharded over `input`, and the second
    layer maps them back. The batch is sharded over the other two axes.
    """

    batch_axes = ("weight", "input")
    feature_axes = ("output",)
    input_axes = (("weight", "output"), ("input",))  # a model's first layer is `linear`, which swaps two axes
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
    """Return the position embedding of a family whose model axes shard the batch.

    Its gradient is partial over these axes after backward. The optimizer sums it, as the spec declares.
    """
    spec = P(None, family.feature_axes, partial=family.batch_axes)
    param = nn.Parameter(shard(full, spec, family.registry))
    annotate(param, spec)
    return param


def check_divides(heads: int, axis: str, registry: ProcessGroupRegistry) -> None:
    """Raise ValueError if the attention heads do not divide over an axis."""
    if heads % registry.size(axis):
        raise ValueError(
            f"{heads} attention heads don't divide over {axis}={registry.size(axis)}; change --heads or this size"
        )


def layers_for(registry: ProcessGroupRegistry) -> DenseLayers:
    """Return the family for the model axes of a topology.

    Raises:
        ValueError: There is no family for these axes.
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
        f"no layers support {registry.topology!r}: give only data axes, or data axes with tensor, with row and col, with "
        "depth, row and col, or with input, weight and output"
    )
