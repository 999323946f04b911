"""A classifier on the grid whose weight lies as the table of `Embedding2D` does, so that the two can be one parameter.

embedding = Embedding2D(vocabulary, features, registry)
head = Classifier2D(features, vocabulary, registry)
head.weight = embedding.weight                                        # tied
loss = cross_entropy_2d(head(hidden), targets, registry)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..layout.annotation import annotate
from ..layout.shard import shard
from ..layout.spec import P
from ..mesh.collectives import copy_to
from ..mesh.registry import ProcessGroupRegistry
from .initialization import draw_linear
from .summa import Grid, autocast, summa_transposed


class Classifier2D(nn.Module):
    """``input @ weight.T + bias`` by SUMMA on a q x q grid, with the classes split over ``col`` in the output.

    Args:
        in_features, classes: Sizes of the full layer; they must divide by q.
        bias: Whether there is one.
        row, col: The mesh axes of the grid.
        generator, device, dtype: For the initial weights, which are those of `nn.Linear` for the same seed.

    Shapes:
        input [batch/q, ..., in/q] -> output [batch/q, ..., classes/q], which `cross_entropy_2d` takes.
        weight [classes/q, in/q] P(row, col), as an embedding's; bias [classes/q] P(col), a copy on every row.
        Under autocast the operands are cast to its dtype before they travel.
    Collectives: forward q broadcasts and q reductions, backward three times q of each kind together (see
    `summa_transposed`); the bias an all-reduce over row in backward. Host reads: none.
    Raises:
        ValueError: The grid isn't square, a dim doesn't divide, or the input doesn't hold in/q features.
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
        self.weight = nn.Parameter(shard(weight, P(row, col), registry))
        annotate(self.weight, P(row, col))
        self.bias: nn.Parameter | None = None
        if full_bias is not None:
            self.bias = nn.Parameter(shard(full_bias, P(col), registry))
            annotate(self.bias, P(col))

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[-1:] != self.weight.shape[1:]:
            raise ValueError(
                f"Classifier2D of {self.in_features} features over {self._grid.col}={self._grid.size} takes "
                f"{self.weight.size(1)} of them in the last dim, got shape {tuple(input.shape)}; split a full input "
                f"with scatter_to(input, registry, {self._grid.col!r}, dim=-1)"
            )
        rows = autocast(input).reshape(-1, input.size(-1))
        output = summa_transposed(rows, autocast(self.weight), self._grid)
        if self.bias is not None:
            output = output + copy_to(self.bias, self.registry, self.row).to(output.dtype)
        return output.reshape(*input.shape[:-1], output.size(-1))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.classes}, bias={self.bias is not None}, q={self._grid.size}"
