"""Embedding tables with a sharded vocabulary, and a classifier whose weight can be tied to `Embedding2D`.

Each rank looks up the ids whose table rows it holds, and uses zeros for all other ids. The sum over the ranks is the
embedding. An id outside the full vocabulary is an error before the sum, on every rank with this id, as in `nn.Embedding`:
an IndexError on CPU, a device assertion on CUDA.
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
from .initialization import check_features, depth_axes, draw_embedding, draw_linear, keep_shard, sizes_of
from .summa import Grid, autocast, summa_transposed


class VocabParallelEmbedding(nn.Module):
    """Embedding table whose rows are sharded over an axis of size t.

        embedding = VocabParallelEmbedding(32000, 512, registry)

    Args:
        num_embeddings, embedding_dim: Sizes of the full table; num_embeddings must be divisible by t.
        registry: The process groups.
        axis: The mesh axis that shards the vocabulary. Default: "tensor".
        sequence_parallel: If True, the output is sharded over the axis along dim 1, the sequence. Default: False.
        generator, device, dtype: Random generator, device and dtype of the initial weights, which equal the weights of
            `nn.Embedding` with the same seed. Default None: torch's defaults.

    Shapes:
        ids [...], replicated -> [..., embedding_dim], replicated; or [batch, seq] -> [batch, seq/t, embedding_dim] with
            sequence_parallel. weight [num_embeddings/t, embedding_dim] P(axis, None).
    Raises:
        ValueError: num_embeddings or the sequence is not divisible by t; the axis is unknown; or sequence-parallel ids
            have fewer than 2 dims.
        IndexError: An id is out of range (on CPU; a device assertion on CUDA).
    Collectives: one all-reduce in forward. With sequence_parallel a reduce-scatter in forward and an all-gather in
    backward instead.
    Host synchronization: none.
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
        registry.create_groups(axis)
        table = draw_embedding(num_embeddings, embedding_dim, generator=generator, device=device, dtype=dtype)
        self.weight = nn.Parameter(shard(table, P(axis, None), registry))
        annotate(self.weight, P(axis, None))

    def forward(self, ids: Tensor) -> Tensor:
        if self.sequence_parallel and ids.dim() < 2:
            raise ValueError(
                f"VocabParallelEmbedding with sequence_parallel=True got ids of shape {tuple(ids.shape)}, but needs shape "
                "[batch, seq]; add the missing dim"
            )
        partial = look_up(ids, self.weight, self.num_embeddings, self.registry, self.axis)
        if self.sequence_parallel:
            return reduce_scatter_to(partial, self.registry, self.axis, dim=1)
        return reduce_from(partial, self.registry, self.axis)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.axis}={self.registry.size(self.axis)}"


class Embedding2D(nn.Module):
    """Embedding table whose rows are sharded over the axis ``row``, and whose columns are sharded over the axis ``col``.

    The batch is sharded over ``row`` too. The ids are therefore all-gathered over ``row`` for the lookup, and the result is
    reduce-scattered over ``row``.

        embedding = Embedding2D(32000, 512, registry)

    Args:
        num_embeddings, embedding_dim: Sizes of the full table. Sizes that are not multiples of the axes' sizes are sharded
            as `torch.chunk` does, but every rank must get at least one row and column.
        registry: The process groups.
        row, col: The mesh axes of the grid. Defaults: "row", "col".
        depth: The mesh axis along which there are several grids (2.5-D). The weight is replicated over depth, with a
            partial gradient that the optimizer sums. Default None: a single grid.
        generator, device, dtype: Random generator, device and dtype of the initial weights, which equal the weights of
            `nn.Embedding` with the same seed. Default None: torch's defaults.

    Shapes:
        ids [batch/rows, ...], replicated over col -> [batch/rows, ..., embedding_dim/cols]; batch/(depth*rows) with depth.
        weight [num_embeddings/rows, embedding_dim/cols] P(row, col), with depth P(row, col, partial=depth).
    Raises:
        ValueError: A rank would get no elements of the table, or an axis is unknown.
        IndexError: An id is out of range (on CPU; a device assertion on CUDA).
    Collectives: an all-gather of the ids and a reduce-scatter over row in forward, an all-gather over row in backward.
    Host synchronization: none.
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
        registry.create_groups(row, col)
        table = draw_embedding(num_embeddings, embedding_dim, generator=generator, device=device, dtype=dtype)
        self.weight = keep_shard(table, P(row, col, partial=depth_axes(depth, registry)), registry)

    def forward(self, ids: Tensor) -> Tensor:
        if self.registry.size(self.row) > 1:
            ids = all_gather(ids, Over(self.registry, (self.row,), call=type(self).__name__))
        partial = look_up(ids, self.weight, self.num_embeddings, self.registry, self.row)
        return reduce_scatter_to(partial, self.registry, self.row, dim=0)

    def extra_repr(self) -> str:
        sizes = sizes_of(self.registry, self.row, self.col)
        return f"{self.num_embeddings}, {self.embedding_dim}, {sizes}"


def look_up(ids: Tensor, table: Tensor, vocabulary: int, registry: ProcessGroupRegistry, *axes: str) -> Tensor:
    """Return the embeddings [..., features] of ``ids`` [...], with zeros for ids whose table rows are on other ranks.

    ``table`` is this rank's shard of a table with ``vocabulary`` rows, which ``axes`` shard jointly.
    """
    if registry.size(*axes) == 1:
        return F.embedding(ids, table)
    index, is_remote = local_index(ids, vocabulary, registry, *axes)
    return F.embedding(index, table).masked_fill(is_remote.unsqueeze(-1), 0)


class Classifier2D(nn.Module):
    """Linear layer ``input @ weight.T + bias`` on a grid of ranks, by SUMMA. It returns logits sharded over ``col``.

        head = Classifier2D(512, 32000, registry)
        head.weight = embedding.weight      # optional: tied to an Embedding2D
        loss = cross_entropy_2d(head(hidden), target, registry)

    Args:
        in_features, classes: Sizes of the full layer. Sizes that are not multiples of the axes' sizes are sharded as
            `torch.chunk` does, but every rank must get at least one feature and class. If ``classes`` is not a multiple of
            the size of col, `cross_entropy_2d` needs the argument ``classes``.
        registry: The process groups.
        bias: If True, the layer has a bias. Default: False.
        row, col: The mesh axes of the grid. Defaults: "row", "col".
        depth: The mesh axis along which there are several grids (2.5-D). The parameters are replicated over depth, with
            partial gradients that the optimizer sums: the specs below get ``partial=depth``. Default None: a single grid.
        generator, device, dtype: Random generator, device and dtype of the initial weights, which equal the weights of
            `nn.Linear` with the same seed. Default None: torch's defaults.

    Shapes:
        input [batch/rows, ..., in/cols] -> output [batch/rows, ..., classes/cols], as `cross_entropy_2d` expects;
            batch/(depth*rows) with depth.
        weight [classes/rows, in/cols] P(row, col), as in `Embedding2D`; bias [classes/cols] P(col), replicated over
            row.
        Under autocast the operands are cast to the autocast dtype before they are broadcast.
    Raises:
        ValueError: A rank would get no elements of a parameter, an axis is unknown, or the last dim of the input is not
            in/cols.
    Collectives: in forward a broadcast and a reduction per panel; in backward three broadcasts and a reduction per
    panel (see `summa_transposed`). There are at most q panels on a q x q grid. The bias adds an all-reduce over row in
    backward.
    Host synchronization: none.
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
        self.weight = keep_shard(weight, P(row, col, partial=partial), registry)
        self.bias = None if full_bias is None else keep_shard(full_bias, P(col, partial=partial), registry)

    def forward(self, input: Tensor) -> Tensor:
        advice = f", and its batch over {self.row!r}"
        check_features(self, input, self.in_features, self.weight.size(1), self._grid.col, self.registry, advice)
        rows = autocast(input).reshape(-1, input.size(-1))
        output = summa_transposed(rows, autocast(self.weight), self._grid, self.classes)
        if self.bias is not None:
            output = output + copy_to(self.bias, self.registry, self.row).to(output.dtype)
        return output.reshape(*input.shape[:-1], output.size(-1))

    def extra_repr(self) -> str:
        sizes = sizes_of(self.registry, self._grid.row, self._grid.col)
        return f"{self.in_features}, {self.classes}, bias={self.bias is not None}, {sizes}"
