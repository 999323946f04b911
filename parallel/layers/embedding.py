"""Embedding tables whose vocabulary is split over ranks.

Each rank looks up the ids that its rows hold, gives zeros for the rest, and the sum over the ranks is the embedding. An
id outside the full vocabulary fails on every rank before any collective, as in `nn.Embedding`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..layout.annotation import annotate
from ..layout.shard import local_index, shard
from ..layout.spec import P
from ..mesh.collectives import reduce_from, reduce_scatter_to
from ..mesh.linear_maps import Over, all_gather
from ..mesh.registry import ProcessGroupRegistry
from .initialization import depth_axes, draw_embedding, kept_piece, sizes_of


class VocabParallelEmbedding(nn.Module):
    """An embedding table with its rows split over one axis of size t.

    Args:
        num_embeddings, embedding_dim: Sizes of the full table; num_embeddings must divide by t.
        axis: The mesh axis that splits the vocabulary.
        sequence_parallel: The output is split along dim 1, the sequence.
        generator, device, dtype: For the initial weights, which are those of `nn.Embedding` for the same seed.

    Shapes:
        ids [...], replicated -> [..., embedding_dim], replicated; or [batch, seq] -> [batch, seq/t, embedding_dim] if
        sequence_parallel. weight [num_embeddings/t, embedding_dim] P(axis, None).
    Collectives: one all-reduce in forward; if sequence_parallel a reduce-scatter, and an all-gather in backward. Host
    reads: none.
    Raises:
        ValueError: num_embeddings or the sequence doesn't divide by t; sequence-parallel ids have fewer than 2 dims.
    Reference: Shoeybi et al. 2019, arXiv:1909.08053.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        registry: ProcessGroupRegistry,
        *,
        axis: str = "tensor",
        sequence_parallel: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.registry, self.axis, self.sequence_parallel = registry, axis, sequence_parallel
        table = draw_embedding(num_embeddings, embedding_dim, generator=generator, device=device, dtype=dtype)
        self.weight = nn.Parameter(shard(table, P(axis, None), registry))
        annotate(self.weight, P(axis, None))

    def forward(self, ids: Tensor) -> Tensor:
        if self.sequence_parallel and ids.dim() < 2:
            raise ValueError(
                "VocabParallelEmbedding with sequence_parallel=True splits dim 1, the sequence of [batch, seq], "
                f"but was given shape {tuple(ids.shape)}; add the missing dim"
            )
        partial = _lookup(ids, self.weight, self.num_embeddings, self.registry, self.axis)
        if self.sequence_parallel:
            return reduce_scatter_to(partial, self.registry, self.axis, dim=1)
        return reduce_from(partial, self.registry, self.axis)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.axis}={self.registry.size(self.axis)}"


class Embedding2D(nn.Module):
    """An embedding table with its rows split over ``row`` and its columns over ``col``.

    The batch is split over ``row`` too: the ids are gathered over it for the lookup, and the result is scattered back.

    Args:
        num_embeddings, embedding_dim: Sizes of the full table. What doesn't divide is cut as `torch.chunk` does, but every
            rank must have something.
        row, col: The mesh axes of the grid.
        depth: The mesh axis along which several grids lie (2.5-D), as in `Linear2D`. None: one grid.
        generator, device, dtype: For the initial weights, which are those of `nn.Embedding` for the same seed.

    Shapes:
        ids [batch/row, ...], equal along col -> [batch/row, ..., embedding_dim/col].
        weight [num_embeddings/row, embedding_dim/col] P(row, col).
    Collectives: an all-gather (ids) and a reduce-scatter over row in forward, an all-gather in backward. Host reads:
    none.
    Raises:
        ValueError: A dim leaves nothing for some rank.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        registry: ProcessGroupRegistry,
        *,
        row: str = "row",
        col: str = "col",
        depth: str | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.registry, self.row, self.col = registry, row, col
        table = draw_embedding(num_embeddings, embedding_dim, generator=generator, device=device, dtype=dtype)
        self.weight = kept_piece(table, P(row, col, partial=depth_axes(depth, registry)), registry)

    def forward(self, ids: Tensor) -> Tensor:
        if self.registry.size(self.row) > 1:
            ids = all_gather(ids, Over(self.registry, (self.row,), call=type(self).__name__))
        partial = _lookup(ids, self.weight, self.num_embeddings, self.registry, self.row)
        return reduce_scatter_to(partial, self.registry, self.row, dim=0)

    def extra_repr(self) -> str:
        sizes = sizes_of(self.registry, self.row, self.col)
        return f"{self.num_embeddings}, {self.embedding_dim}, {sizes}"


def _lookup(ids: Tensor, weight: Tensor, vocabulary: int, registry: ProcessGroupRegistry, axis: str) -> Tensor:
    """[...] -> [..., features]: the rows of ``weight`` that this rank holds, zeros for those it doesn't."""
    if registry.size(axis) == 1:
        return F.embedding(ids, weight)
    index, elsewhere = local_index(ids, vocabulary, registry, axis)
    return F.embedding(index, weight).masked_fill(elsewhere.unsqueeze(-1), 0)
