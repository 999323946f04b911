"""Deprecated names of the 2.5-D layers; use the 2-D layers with ``depth=``."""

from __future__ import annotations

import warnings
from typing import Any

from ..mesh.registry import ProcessGroupRegistry
from .embedding import Classifier2D, Embedding2D
from .layer_norm import LayerNorm2D
from .tensor_2d import Linear2D


def _warn(old: str, new: str, depth: str) -> None:
    warnings.warn(
        f"{old} is deprecated and will be removed in the next version; write {new}(..., depth={depth!r})",
        DeprecationWarning,
        stacklevel=3,
    )


class Linear2p5D(Linear2D):
    """Deprecated: `Linear2D` with ``depth="depth"``."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        registry: ProcessGroupRegistry,
        *,
        depth: str = "depth",
        **options: Any,
    ) -> None:
        _warn("Linear2p5D", "Linear2D", depth)
        super().__init__(in_features, out_features, registry, depth=depth, **options)


class LayerNorm2p5D(LayerNorm2D):
    """Deprecated: `LayerNorm2D` with ``depth="depth"``."""

    def __init__(self, features: int, registry: ProcessGroupRegistry, *, depth: str = "depth", **options: Any) -> None:
        _warn("LayerNorm2p5D", "LayerNorm2D", depth)
        super().__init__(features, registry, depth=depth, **options)


class Embedding2p5D(Embedding2D):
    """Deprecated: `Embedding2D` with ``depth="depth"``."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        registry: ProcessGroupRegistry,
        *,
        depth: str = "depth",
        **options: Any,
    ) -> None:
        _warn("Embedding2p5D", "Embedding2D", depth)
        super().__init__(num_embeddings, embedding_dim, registry, depth=depth, **options)


class Classifier2p5D(Classifier2D):
    """Deprecated: `Classifier2D` with ``depth="depth"``."""

    def __init__(
        self, in_features: int, classes: int, registry: ProcessGroupRegistry, *, depth: str = "depth", **options: Any
    ) -> None:
        _warn("Classifier2p5D", "Classifier2D", depth)
        super().__init__(in_features, classes, registry, depth=depth, **options)
