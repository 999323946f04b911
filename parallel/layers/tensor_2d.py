"""2-D tensor parallelism: a linear layer on a grid of ranks.

Activations [batch, ..., features] are sharded to [batch/rows, ..., features/cols]: the batch over the mesh axis ``row``,
the features over the mesh axis ``col``. To convert a full activation to this rank's block, and back:

    local = scatter_to(scatter_to(full, registry, "row", dim=0), registry, "col", dim=-1)
    full = gather_from(gather_from(local, registry, "col", dim=-1), registry, "row", dim=0)

For data that needs no gradient, use `shard(full, P("row", None, "col"), registry)`. If the number of features is not
divisible by the size of ``col``, the features are sharded as `torch.chunk` does: pass ``uneven=True`` to `scatter_to` over
"col", and ``length=`` to `gather_from` over "col".

A parameter of your own that is combined with the features, such as a position embedding [seq, features], has the spec
P(None, "col"). Each row of the grid has a different part of the batch, so the gradient of the parameter must be summed over
``row``. `copy_to` makes this sum in backward:

    positions = nn.Parameter(shard(full, P(None, "col"), registry))       # [seq, features/cols]
    hidden = hidden + copy_to(positions, registry, "row")

2.5-D tensor parallelism (Tesseract) uses several such grids along the axis ``depth``. The batch is sharded over
``depth``, the slower axis, and ``row``: activations are [batch/(depth*rows), ..., features/cols]. Each grid holds all
weights and multiplies its part of the batch, so a layer issues no collective over ``depth``. The gradients of weights on a
grid are partial over ``depth``. Their specs declare this (``partial="depth"``), and the optimizer sums the gradients over
``depth`` once per step. ``depth`` is a model axis and not a data axis: the loss is already the mean over the samples of all
grids, so gradients must be summed, not averaged.

    layer = Linear2D(256, 1024, registry, depth="depth")
    local = shard(full, P(("depth", "row"), None, "col"), registry)
    loss = cross_entropy_2d(head(local), targets, registry, row=("depth", "row"))

References: Xu et al. 2021 (Optimus), arXiv:2104.05343; Wang et al. 2021 (Tesseract), arXiv:2105.14500.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..layout.shard import local_shape
from ..layout.spec import P
from ..layout.spec import blocks as in_blocks
from ..mesh.collectives import all_gather_to, broadcast_from, copy_to
from ..mesh.deprecation import warn_deprecated
from ..mesh.registry import ProcessGroupRegistry
from .embedding import Classifier2D, Embedding2D
from .initialization import (
    check_features,
    depth_axes,
    draw_linear,
    held_or_placeholder,
    keep_owned_shard,
    keep_shard,
    sizes_of,
)
from .layer_norm import LayerNorm2D
from .summa import Grid, autocast, summa

BiasLayout = Literal["column", "all", "row0"]
"""The layout of a `Linear2D` bias over the axis ``row``: replicated ("column"), sharded ("all"), or held only by ranks with
coordinate 0 on ``row`` ("row0"). Over the axis ``col`` the bias is always sharded."""


def bias_spec(layout: BiasLayout, row: str = "row", col: str = "col", blocks: int | Sequence[int] = 1) -> P:
    """Return the spec of a `Linear2D` bias; ``blocks`` is as in `Linear2D`."""
    columns = in_blocks(col, blocks)
    layouts = {"column": P(columns), "all": P((columns, row)), "row0": P(columns, owned={row: 0})}
    if layout not in layouts:
        raise ValueError(f"bias={layout!r} is unknown; use {', '.join(map(repr, layouts))}, or None for no bias")
    return layouts[layout]


class Linear2D(nn.Module):
    """Linear layer ``input @ weight + bias`` on a grid of ranks. The matrix product is computed by SUMMA (`summa`).

        layer = Linear2D(256, 1024, registry)

    Args:
        in_features, out_features: Sizes of the full layer. Sizes that are not multiples of the axes' sizes are sharded as
            `torch.chunk` does, but every rank must get at least one row and column of the weight.
        registry: The process groups.
        bias: Layout of the bias, which is always sharded over col. "column": replicated over row; backward sums its
            gradient over row. "all": sharded over row too. "row0": only ranks with coordinate 0 on row hold it, and the
            attribute ``bias`` is None on other ranks. None: no bias. Default: "column".
        blocks: Number of equal layers that are fused in this layer, or the ratio of their output features. Each fused layer
            is sharded over col. The output has this rank's features of each fused layer, in order. Default: 1.
        row, col: The mesh axes of the grid. Defaults: "row", "col".
        depth: The mesh axis along which there are several grids (2.5-D). The parameters are replicated over depth, with
            partial gradients that the optimizer sums: the specs below get ``partial=depth``. Default None: a single grid.
        generator, device, dtype: Random generator, device and dtype of the initial weights, which equal the weights of
            `nn.Linear` with the same seed, with the weight matrix transposed. Default None: torch's defaults.

    Shapes:
        input [batch/rows, ..., in/cols] -> output [batch/rows, ..., out/cols]; batch/(depth*rows) with depth.
        weight [in/rows, out/cols] P(row, col).
        bias [out/cols] P(col) for "column", [out/cols/rows] P((col, row)) for "all", [out/cols] P(col, owned={row: 0}) for
            "row0".
        With several blocks, blocks(col, ...) replaces col in the specs of weight and bias.
        Under autocast the operands are cast to the autocast dtype before they are broadcast.
    Raises:
        ValueError: A rank would get no elements of a parameter; the size of a fused layer is not a multiple of the size of
            col; ``blocks``, the bias layout or an axis is not valid; or the last dim of the input is not in/cols.
    Collectives: in forward a broadcast per panel along each axis; in backward two broadcasts and two reductions per
    panel (see `summa`). There are at most q panels on a q x q grid. The bias adds collectives over row. "column": an
    all-reduce in backward. "all": an all-gather in forward and a reduce-scatter in backward. "row0": a broadcast in
    forward and a reduce in backward.
    Host synchronization: none.
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
        (self._local_in,) = local_shape((in_features,), P(col), registry.topology, registry.coordinate)
        weight, full_bias = draw_linear(
            in_features, out_features, bias=bias is not None, generator=generator, device=device, dtype=dtype
        )
        partial = depth_axes(depth, registry)
        self.weight = keep_shard(weight.t(), P(row, in_blocks(col, blocks), partial=partial), registry)
        self.bias: nn.Parameter | None = None
        if bias is not None and full_bias is not None:
            self.bias = keep_owned_shard(full_bias, bias_spec(bias, row, col, blocks).with_partial(partial), registry)

    def forward(self, input: Tensor) -> Tensor:
        advice = f", and its batch over {self.row!r}"
        check_features(self, input, self.in_features, self._local_in, self.col, self.registry, advice)
        rows = autocast(input).reshape(-1, input.size(-1))
        output = self.matmul(rows, autocast(self.weight), self._grid, self.in_features)
        bias = self._column_bias()
        if bias is not None:
            output = output + bias.to(output.dtype)
        return output.reshape(*input.shape[:-1], output.size(-1))

    def _column_bias(self) -> Tensor | None:
        """Return the bias [out/cols] of this rank's output features, from the bias shards; None without bias.

        Collectives: over row. "row0": a broadcast, and a reduce in backward. "all": an all-gather, and a reduce-scatter in
        backward. "column": none, and an all-reduce in backward.
        """
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


# Deprecated names of the 2.5-D layers ---------------------------------------------------------------------------------


class Linear2p5D(Linear2D):
    """Deprecated; write ``Linear2D(..., depth="depth")`` instead."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        registry: ProcessGroupRegistry,
        *,
        depth: str = "depth",
        **options: Any,
    ) -> None:
        warn_deprecated("Linear2p5D", f"write Linear2D(..., depth={depth!r}) instead")
        super().__init__(in_features, out_features, registry, depth=depth, **options)


class LayerNorm2p5D(LayerNorm2D):
    """Deprecated; write ``LayerNorm2D(..., depth="depth")`` instead."""

    def __init__(self, features: int, registry: ProcessGroupRegistry, *, depth: str = "depth", **options: Any) -> None:
        warn_deprecated("LayerNorm2p5D", f"write LayerNorm2D(..., depth={depth!r}) instead")
        super().__init__(features, registry, depth=depth, **options)


class Embedding2p5D(Embedding2D):
    """Deprecated; write ``Embedding2D(..., depth="depth")`` instead."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        registry: ProcessGroupRegistry,
        *,
        depth: str = "depth",
        **options: Any,
    ) -> None:
        warn_deprecated("Embedding2p5D", f"write Embedding2D(..., depth={depth!r}) instead")
        super().__init__(num_embeddings, embedding_dim, registry, depth=depth, **options)


class Classifier2p5D(Classifier2D):
    """Deprecated; write ``Classifier2D(..., depth="depth")`` instead."""

    def __init__(
        self, in_features: int, classes: int, registry: ProcessGroupRegistry, *, depth: str = "depth", **options: Any
    ) -> None:
        warn_deprecated("Classifier2p5D", f"write Classifier2D(..., depth={depth!r}) instead")
        super().__init__(in_features, classes, registry, depth=depth, **options)
