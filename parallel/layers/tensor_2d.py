"""2-D tensor parallelism: a linear layer on a grid of ranks.

Activations [batch, ..., features] are split into [batch/rows, ..., features/cols]: the batch over ``row``, the features
over ``col``. From a full activation to this rank's block and back:

    local = scatter_to(scatter_to(full, registry, "row", dim=0), registry, "col", dim=-1)
    full = gather_from(gather_from(local, registry, "col", dim=-1), registry, "row", dim=0)

(or `shard(full, P("row", None, "col"), registry)` for data, which needs no gradient). Features that don't divide are cut
as `torch.chunk` cuts them: add ``uneven=True`` to the scatter, ``length=`` to the gather. A model's own parameter that
meets the features, a position embedding say, is laid out P(None, "col") and goes through `copy_to` over ``row``, which
completes its gradient: every row of the grid holds another part of the batch.

    positions = nn.Parameter(shard(full, P(None, "col"), registry))       # [seq, features/cols]
    hidden = hidden + copy_to(positions, registry, "row")

2.5-D tensor parallelism (Tesseract) is the same on each of several grids, which lie along the axis ``depth``. The batch
is split over ``depth``, the slower axis, and ``row``: activations are [batch/(depth*rows), ..., features/cols]. Each grid
holds all weights and multiplies its part of the batch by itself, so a layer issues no collective over ``depth``. The
gradient that a grid computes is one term of a sum over the grids. The specs say so (``partial="depth"``), and the
optimizer makes the sums of all parameters together, once per window of micro-batches. ``depth`` is a model axis and not
a data axis, because the loss is already a mean over the samples of all grids.

    layer = Linear2D(256, 1024, registry, depth="depth")
    local = shard(full, P(("depth", "row"), None, "col"), registry)
    loss = cross_entropy_2d(head(local), targets, registry, row=("depth", "row"))

References: Xu et al. 2021 (Optimus), arXiv:2104.05343; Wang et al. 2021 (Tesseract), arXiv:2105.14500.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ..layout.shard import local_shape
from ..layout.spec import P
from ..layout.spec import blocks as in_blocks
from ..mesh.collectives import all_gather_to, broadcast_from, copy_to
from ..mesh.registry import ProcessGroupRegistry
from .initialization import depth_axes, draw_linear, held_or_placeholder, kept_piece, owned_piece, sizes_of
from .summa import Grid, autocast, summa

BiasLayout = Literal["column", "all", "row0"]


def bias_spec(layout: BiasLayout, row: str = "row", col: str = "col", blocks: int | Sequence[int] = 1) -> P:
    """How each published bias layout of `Linear2D` is declared.

    Raises:
        ValueError: The layout is unknown.
    """
    columns = in_blocks(col, blocks)
    layouts = {"column": P(columns), "all": P((columns, row)), "row0": P(columns, owned={row: 0})}
    if layout not in layouts:
        raise ValueError(f"bias layout {layout!r} is unknown; use {', '.join(map(repr, layouts))}, or None for no bias")
    return layouts[layout]


class Linear2D(nn.Module):
    """``input @ weight + bias`` by SUMMA on a grid.

    Args:
        in_features, out_features: Sizes of the full layer. What doesn't divide is cut as `torch.chunk` does, but every rank
            must have something.
        bias: Who holds the bias of this column's features. "column": every row a copy, whose gradient backward
            completes over row. "all": every row a part of it. "row0": row 0 alone, the other rows' ``bias`` is None.
            None: no bias.
        blocks: Several layers in one, each of which is split over col: a number of equal ones, or the ratio of their
            sizes. The output then has this column's features of each, one after the other.
        row, col: The mesh axes of the grid.
        depth: The mesh axis along which several grids lie (2.5-D). The parameters are then replicated over it, with
            gradients that the optimizer sums over it: the specs below with ``partial=depth``. None: one grid.
        generator, device, dtype: For the initial weights, which are those of `nn.Linear` for the same seed (the weight
            transposed).

    Shapes:
        input [batch/rows, ..., in/cols] -> output [batch/rows, ..., out/cols]; with depth batch/(depth*rows).
        weight [in/rows, out/cols] P(row, col).
        bias [out/cols] P(col), [out/cols/rows] P((col, row)) or [out/cols] P(col, owned={row: 0}).
        With several blocks blocks(col, ...) stands for col.
        Under autocast the operands are cast to its dtype before they travel.
    Collectives: forward a broadcast of each panel along each axis, backward twice that and two reductions (see `summa`;
    on a q x q grid there are q panels). The bias adds one collective over row: "column" an all-reduce in backward, "all"
    an all-gather in forward and a reduce-scatter in backward, "row0" a broadcast in forward and a reduce in backward. Host
    reads: none.
    Raises:
        ValueError: A dim leaves nothing for some rank, blocks don't divide, the bias layout or an axis is unknown, or the
            input doesn't hold this column's features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        registry: ProcessGroupRegistry,
        *,
        bias: BiasLayout | None = "column",
        blocks: int | Sequence[int] = 1,
        row: str = "row",
        col: str = "col",
        depth: str | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.registry, self.row, self.col = registry, row, col
        self.bias_layout = bias
        self.matmul: Callable[[Tensor, Tensor, Grid, int], Tensor] = summa
        self._grid = Grid(registry, row, col)
        (self._takes,) = local_shape((in_features,), P(col), registry.topology, registry.coordinate)
        weight, full_bias = draw_linear(
            in_features, out_features, bias=bias is not None, generator=generator, device=device, dtype=dtype
        )
        partial = depth_axes(depth, registry)
        self.weight = kept_piece(weight.t(), P(row, in_blocks(col, blocks), partial=partial), registry)
        self.bias: nn.Parameter | None = None
        if bias is not None and full_bias is not None:
            self.bias = owned_piece(full_bias, bias_spec(bias, row, col, blocks).with_partial(partial), registry)

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[-1:] != (self._takes,):
            raise ValueError(
                f"{type(self).__name__} of {self.in_features} features over {self.col}={self.registry.size(self.col)} "
                f"takes {self._takes} of them in the last dim, got shape {tuple(input.shape)}; split a full input "
                f"with scatter_to(input, registry, {self.col!r}, dim=-1)"
            )
        rows = autocast(input).reshape(-1, input.size(-1))
        output = self.matmul(rows, autocast(self.weight), self._grid, self.in_features)
        bias = self._column_bias()
        if bias is not None:
            output = output + bias.to(output.dtype)
        return output.reshape(*input.shape[:-1], output.size(-1))

    def _column_bias(self) -> Tensor | None:
        """The bias [out/cols] of this rank's column, on every row."""
        if self.bias_layout == "row0":
            held = held_or_placeholder(self.bias, self.weight.size(1), like=self.weight)
            return broadcast_from(held, self.registry, self.row, root=0)
        if self.bias is None:
            return None
        if self.bias_layout == "all":
            return all_gather_to(self.bias, self.registry, self.row, dim=0, length=self.weight.size(1))
        return copy_to(self.bias, self.registry, self.row)

    def extra_repr(self) -> str:
        sizes = sizes_of(self.registry, self.row, self.col)
        return f"{self.in_features}, {self.out_features}, bias={self.bias_layout!r}, {sizes}"
