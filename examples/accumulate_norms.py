"""Show why batch norm and gradient accumulation don't mix: the statistics of batch norm depend on the micro-batches.

    python examples/accumulate_norms.py
    torchrun --standalone --nproc-per-node 2 examples/accumulate_norms.py

A small convolutional network learns scikit-learn's digits in float64, from batches of 64 that are divided into K
micro-batches. With group norm the gradient equals the gradient of the full batch up to rounding. With batch norm it
differs, and more so for smaller micro-batches. No optimizer can correct that: use group norm or layer norm.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice

import torch
import torch.nn.functional as F
from command_line import CommandLine, add_steps, main
from einops import rearrange
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import P, ProcessGroupRegistry, declare, shard
from sklearn.datasets import load_digits
from torch import Tensor, nn

BATCH, STEPS, CHANNELS = 64, 20, 16
COUNTS = (2, 4, 8)  # micro-batches per batch
NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": partial(nn.BatchNorm2d, CHANNELS),
    "group norm": partial(nn.GroupNorm, 4, CHANNELS),
}


class Experiment:
    """Settings of the comparison: number of steps, registry, and samples per rank and step (`local_batch`).

    Raises:
        ValueError: The topology has an axis that is not a data axis, or the batch can't be divided equally over its ranks
            and micro-batches.
    """

    def __init__(self, options: argparse.Namespace, registry: ProcessGroupRegistry) -> None:
        self.steps, self.registry = options.steps, registry
        axes = registry.topology.data_axes
        if axes != registry.topology.axes:
            raise ValueError(
                f"{registry.topology!r} has an axis that is not a data axis, and this script does not shard the model; "
                "give data axes only, such as data=2"
            )
        self.local_batch, rest = divmod(BATCH, registry.topology.size(*axes))
        if rest or self.local_batch % max(COUNTS):
            raise ValueError(
                f"a batch of {BATCH} samples can't be divided into {max(COUNTS)} equal micro-batches on each rank of "
                f"{registry.topology!r}; choose a number of data ranks that divides {BATCH // max(COUNTS)}"
            )


def train(norm: str, micro_batches: int, steps: int, registry: ProcessGroupRegistry) -> tuple[Tensor, Tensor]:
    """Return all parameters after the steps, and the clipped gradient of the last step, as vectors."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, CHANNELS, 3), NORMS[norm](), nn.ReLU(), nn.Flatten(), nn.Linear(36 * CHANNELS, 10)]
    model = nn.Sequential(*layers).double()
    declare(model, {"*": P()})
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = ParallelOptimizer(sgd, registry, max_norm=1.0, accumulation_steps=micro_batches)
    for images, labels in batches(steps, registry):
        for part, its_labels in zip(images.chunk(micro_batches), labels.chunk(micro_batches), strict=True):
            optimizer.zero_grad()
            optimizer.backward(F.cross_entropy(model(part), its_labels))
            optimizer.step()
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    return nn.utils.parameters_to_vector(model.parameters()).detach(), nn.utils.parameters_to_vector(gradients)


def batches(steps: int, registry: ProcessGroupRegistry) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's shard of the batch of each step."""
    digits, spec = load_digits(), P(registry.topology.data_axes)
    images = rearrange(torch.from_numpy(digits.images) / 8 - 1, "n row col -> n 1 row col")
    labels = torch.from_numpy(digits.target)
    whole = len(labels) - len(labels) % BATCH
    pairs = list(zip(images[:whole].split(BATCH), labels[:whole].split(BATCH), strict=True))
    for batch in islice(cycle(pairs), steps):
        its_images, its_labels = (shard(part, spec, registry) for part in batch)
        yield its_images, its_labels


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def run(experiment: Experiment) -> None:
    """Print on rank 0 the difference between K micro-batches and one batch, for each kind of norm layer and each K."""
    steps, registry = experiment.steps, experiment.registry
    say: Callable[[str], None] = print if registry.global_rank == 0 else lambda line: None
    where = "" if registry.topology.world_size == 1 else f" on each rank of {registry.topology!r}"
    say(f"K micro-batches against one batch of {experiment.local_batch}{where}, relative difference of")
    say(f"                   the first gradient   the parameters after {steps} steps")
    for norm in NORMS:
        (_, gradient), (parameters, _) = train(norm, 1, 1, registry), train(norm, 1, steps, registry)
        for count in COUNTS:
            first = difference(train(norm, count, 1, registry)[1], gradient)
            after = difference(train(norm, count, steps, registry)[0], parameters)
            say(f"{norm}   K = {count}   {first:18.1e}   {after:.1e}")


def read_options(processes: int, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line. Raise ValueError if a flag is wrong."""
    parser = CommandLine(__doc__, "data: shards the batch")
    add_steps(parser, STEPS)
    return parser.read(processes, arguments)


if __name__ == "__main__":
    main(read_options, Experiment, run)
