"""Parameters with the shapes of real models, for benchmarks."""

from __future__ import annotations

import torch
from torch import nn


def transformer_parameters(
    device: torch.device, width: int = 512, depth: int = 9, vocab: int = 3072
) -> list[nn.Parameter]:
    """Return the parameters of a transformer, with 30 million elements for the default sizes."""
    shapes: list[tuple[int, ...]] = [(vocab, width), (512, width)]
    for _ in range(depth):
        shapes += [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [nn.Parameter(torch.randn(shape, device=device) * 0.02) for shape in [*shapes, (width,), (width,)]]
