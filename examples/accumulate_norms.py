"""Why batch norm and gradient accumulation don't mix: batch norm's statistics are those of a micro-batch.

    python examples/accumulate_norms.py

A small convolutional network learns scikit-learn's digits in float64, from batches of 64 that are cut into K
micro-batches. With group norm the gradient is that of the whole batch, to the last digits; with batch norm it is another
one, the more so the smaller the micro-batches. Nothing that an optimizer does can mend that: use group or layer norm.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from sklearn.datasets import load_digits
from torch import Tensor, nn

BATCH, STEPS, CHANNELS = 64, 20, 16
NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": partial(nn.BatchNorm2d, CHANNELS),
    "group norm": partial(nn.GroupNorm, 4, CHANNELS),
}


def train(norm: str, micro_batches: int, steps: int) -> tuple[Tensor, Tensor]:
    """All parameters after the steps, and the last gradient, as vectors."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, CHANNELS, 3), NORMS[norm](), nn.ReLU(), nn.Flatten(), nn.Linear(36 * CHANNELS, 10)]
    model = nn.Sequential(*layers).double()
    declare(model, {"*": P()})
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    registry = ProcessGroupRegistry(Topology())
    optimizer = ParallelOptimizer(sgd, registry, max_norm=1.0, accumulation_steps=micro_batches)
    for images, labels in batches(steps):
        for part, its_labels in zip(images.chunk(micro_batches), labels.chunk(micro_batches), strict=True):
            optimizer.zero_grad()
            optimizer.backward(F.cross_entropy(model(part), its_labels))
            optimizer.step()
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    return nn.utils.parameters_to_vector(model.parameters()).detach(), nn.utils.parameters_to_vector(gradients)


def batches(steps: int) -> zip[tuple[Tensor, Tensor]]:
    digits = load_digits()
    images = rearrange(torch.from_numpy(digits.images) / 8 - 1, "n row col -> n 1 row col")
    return zip(images.split(BATCH)[:steps], torch.from_numpy(digits.target).split(BATCH)[:steps], strict=True)


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def main() -> None:
    print(f"K micro-batches against one batch of {BATCH}, relative difference of")
    print(f"                   the first gradient   the parameters after {STEPS} steps")
    for norm in NORMS:
        (_, gradient), (parameters, _) = train(norm, 1, 1), train(norm, 1, STEPS)
        for count in (2, 4, 8):
            first = difference(train(norm, count, 1)[1], gradient)
            after = difference(train(norm, count, STEPS)[0], parameters)
            print(f"{norm}   K = {count}   {first:18.1e}   {after:.1e}")


if __name__ == "__main__":
    main()
