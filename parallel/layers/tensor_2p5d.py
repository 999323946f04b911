"""2.5-D tensor parallelism (Tesseract): the layers of 2-D on each of several grids, which lie along ``depth``.

Activations [batch, ..., features] are split into [batch/(depth*rows), ..., features/cols]: the batch over ``depth``, the
slower one, and ``row``, the features over ``col``. Each grid holds all weights and multiplies its part of the batch by
itself, so that a layer issues the collectives of its 2-D one and none over ``depth``.

So what a grid has of a weight's gradient is a term of a sum over the grids: the specs are those of 2-D with
``partial="depth"``, and the optimizer makes the sums, of many weights in one collective, once in a window of
micro-batches, and sharded where `Sharded("depth")` shards the states. ``depth`` is a model axis and not a data axis,
because the loss is a mean over its samples as well: nothing is averaged over it.

    local = shard(full, P(("depth", "row"), None, "col"), registry)
    loss = cross_entropy_2d(head(local), targets, registry, row=("depth", "row"))

Reference: Wang et al. 2021 (Tesseract), arXiv:2105.14500.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..layout.annotation import annotate, annotation_of
from ..mesh.registry import ProcessGroupRegistry
from .classifier_2d import Classifier2D
from .embedding import Embedding2D
from .layer_norm import LayerNorm2D
from .tensor_2d import BiasLayout, Linear2D


class Linear2p5D(Linear2D):
    """`Linear2D` on every grid along ``depth``.

    Args:
        depth: The mesh axis along which the grids lie.
        Others as in `Linear2D`.

    Shapes:
        input [batch/(depth*rows), ..., in/cols] -> output [batch/(depth*rows), ..., out/cols].
        Weight and bias as in `Linear2D`, a copy on every grid: P(row, col, partial=depth), P(col, partial=depth),
        P((col, row), partial=depth) or P(col, owned={row: 0}, partial=depth).
    Collectives, host reads, raises: as `Linear2D`; unknown axes are a ValueError.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        registry: ProcessGroupRegistry,
        *,
        bias: BiasLayout | None = "column",
        blocks: int | Sequence[int] = 1,
        depth: str = "depth",
        row: str = "row",
        col: str = "col",
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            registry,
            bias=bias,
            blocks=blocks,
            row=row,
            col=col,
            generator=generator,
            device=device,
            dtype=dtype,
        )
        _sum_over(depth, self, registry)


class LayerNorm2p5D(LayerNorm2D):
    """`LayerNorm2D` on every grid along ``depth``; weight and bias are P(col, partial=depth).

    Args, collectives, host reads, raises: as `LayerNorm2D`, and the axis ``depth``.
    """

    def __init__(
        self,
        features: int,
        registry: ProcessGroupRegistry,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        depth: str = "depth",
        row: str = "row",
        col: str = "col",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(features, registry, eps=eps, bias=bias, row=row, col=col, device=device, dtype=dtype)
        _sum_over(depth, self, registry)


class Embedding2p5D(Embedding2D):
    """`Embedding2D` on every grid along ``depth``; the table is P(row, col, partial=depth).

    Args, collectives, host reads, raises: as `Embedding2D`, and the axis ``depth``.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        registry: ProcessGroupRegistry,
        *,
        depth: str = "depth",
        row: str = "row",
        col: str = "col",
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            registry,
            row=row,
            col=col,
            generator=generator,
            device=device,
            dtype=dtype,
        )
        _sum_over(depth, self, registry)


class Classifier2p5D(Classifier2D):
    """`Classifier2D` on every grid along ``depth``; the weight is P(row, col, partial=depth), as the table of
    `Embedding2p5D`, and the bias P(col, partial=depth).

    Args, collectives, host reads, raises: as `Classifier2D`, and the axis ``depth``.
    """

    def __init__(
        self,
        in_features: int,
        classes: int,
        registry: ProcessGroupRegistry,
        *,
        bias: bool = False,
        depth: str = "depth",
        row: str = "row",
        col: str = "col",
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features,
            classes,
            registry,
            bias=bias,
            row=row,
            col=col,
            generator=generator,
            device=device,
            dtype=dtype,
        )
        _sum_over(depth, self, registry)


def _sum_over(depth: str, layer: nn.Module, registry: ProcessGroupRegistry) -> None:
    """Say of the layer's parameters that their gradients are pending sums over ``depth``."""
    registry.topology.atoms(depth)  # or say what is wrong with it
    for param in layer.parameters():
        found = annotation_of(param)
        assert found is not None
        annotate(param, found.spec.with_partial((*found.spec.partial, depth)), full_shape=found.full_shape)
