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
from ..mesh.collectives import Over, all_gather, copy_to, reduce_from, reduce_scatter_to
from ..mesh.registry import ProcessGroupRegistry
from .initialization import depth_axes, draw_embedding, draw_linear, kept_piece, sizes_of
from .summa import Grid, autocast, summa_transposed


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


# Classifier 2d --------------------------------------------------------------------------------------------------------

# A classifier on the grid whose weight lies as the table of `Embedding2D` does, so that the two can be one parameter.
#
# embedding = Embedding2D(vocabulary, features, registry)
# head = Classifier2D(features, vocabulary, registry)
# head.weight = embedding.weight                                        # tied
# loss = cross_entropy_2d(head(hidden), targets, registry)


class Classifier2D(nn.Module):
    """``input @ weight.T + bias`` by SUMMA on a grid, with the classes split over ``col`` in the output.

    Args:
        in_features, classes: Sizes of the full layer. What doesn't divide is cut as `torch.chunk` does, but every rank must
            have something; give `cross_entropy_2d` the number of classes then.
        bias: Whether there is one.
        row, col: The mesh axes of the grid.
        depth: The mesh axis along which several grids lie (2.5-D), as in `Linear2D`. None: one grid.
        generator, device, dtype: For the initial weights, which are those of `nn.Linear` for the same seed.

    Shapes:
        input [batch/rows, ..., in/cols] -> output [batch/rows, ..., classes/cols], which `cross_entropy_2d` takes.
        weight [classes/rows, in/cols] P(row, col), as an embedding's; bias [classes/cols] P(col), a copy on every row.
        Under autocast the operands are cast to its dtype before they travel.
    Collectives: forward a broadcast and a reduction of each panel, backward three broadcasts and a reduction (see
    `summa_transposed`; on a q x q grid there are q panels); the bias an all-reduce over row in backward. Host reads: none.
    Raises:
        ValueError: A dim leaves nothing for some rank, or the input doesn't hold this column's features.
    """

    def __init__(
        self,
        in_features: int,
        classes: int,
        registry: ProcessGroupRegistry,
        *,
        bias: bool = False,
        row: str = "row",
        col: str = "col",
        depth: str | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.classes = in_features, classes
        self.registry, self.row = registry, row
        self._grid = Grid(registry, row, col)
        weight, full_bias = draw_linear(
            in_features, classes, bias=bias, generator=generator, device=device, dtype=dtype
        )
        partial = depth_axes(depth, registry)
        self.weight = kept_piece(weight, P(row, col, partial=partial), registry)
        self.bias = None if full_bias is None else kept_piece(full_bias, P(col, partial=partial), registry)

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[-1:] != self.weight.shape[1:]:
            col = self._grid.col
            raise ValueError(
                f"{type(self).__name__} of {self.in_features} features over {col}={self.registry.size(col)} takes "
                f"{self.weight.size(1)} of them in the last dim, got shape {tuple(input.shape)}; split a full input "
                f"with scatter_to(input, registry, {col!r}, dim=-1)"
            )
        rows = autocast(input).reshape(-1, input.size(-1))
        output = summa_transposed(rows, autocast(self.weight), self._grid, self.classes)
        if self.bias is not None:
            output = output + copy_to(self.bias, self.registry, self.row).to(output.dtype)
        return output.reshape(*input.shape[:-1], output.size(-1))

    def extra_repr(self) -> str:
        sizes = sizes_of(self.registry, self._grid.row, self._grid.col)
        return f"{self.in_features}, {self.classes}, bias={self.bias is not None}, {sizes}"
