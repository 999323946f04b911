"""A classifier on the grid whose weight lies as the table of `Embedding2D` does, so that the two can be one parameter.

embedding = Embedding2D(vocabulary, features, registry)
head = Classifier2D(features, vocabulary, registry)
head.weight = embedding.weight                                        # tied
loss = cross_entropy_2d(head(hidden), targets, registry)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..layout.spec import P
from ..mesh.collectives import copy_to
from ..mesh.registry import ProcessGroupRegistry
from .initialization import depth_axes, draw_linear, kept_piece, sizes_of
from .summa import Grid, autocast, summa_transposed


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
