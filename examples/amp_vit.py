"""Mixed precision: a small vision transformer on Caltech-101, in one process or sharded over a mesh of processes.

    python examples/amp_vit.py --sample
    torchrun --standalone --nproc-per-node 2 examples/amp_vit.py --sample --precision fp16 --topology tensor=2
    torchrun --standalone --nproc-per-node 4 examples/amp_vit.py --sample --precision bf16 --topology data=2,tensor=2
    torchrun --standalone --nproc-per-node 4 examples/amp_vit.py --sample --precision fp8 --topology row=2,col=2

Attention and MLP are sharded over `tensor`, or all layers over a grid or a cube of ranks: see models/layers.py. The loss
curve is the same on every topology, within the rounding of the precision. `--sample` makes a small data set in the format
of Caltech-101 from images that come with scikit-learn; the original data set is read from `--data`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from command_line import (
    CommandLine,
    add_model_size,
    add_training_flags,
    check_training,
    data_parallel_asked,
    main,
    precision_asked,
)
from einops import rearrange
from meshstep.optim import Booster, LinearWarmupLR
from meshstep.parallel import P, ProcessGroupRegistry, ShardedDataLoader, reduce_from, shard
from models.layers import layers_for
from models.vit import PatchTransformer
from sample_data import make_caltech101
from torch import Tensor
from torch.utils.data import Subset
from torchvision.datasets import Caltech101
from torchvision.transforms import v2
from training import Run, prepare_files, steps_asked

PATCH = 8  # pixels along each side


def open_dataset(options: argparse.Namespace, train: bool) -> Caltech101:
    """Return Caltech-101, or the sample in its format, with square images in -1..1."""
    # Random crops are the same on every topology: prepare_dataloader seeds them by sample and epoch.
    augment = [v2.RandomCrop(options.image_size, padding=options.image_size // 16)] if train else []
    to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
    resize = v2.Resize((options.image_size, options.image_size))
    transform = v2.Compose([v2.RGB(), resize, *augment, *to_tensor])
    return Caltech101(options.data / "sample" if options.sample else options.data, transform=transform)


Loader = ShardedDataLoader[tuple[Tensor, int]]


def make_loaders(options: argparse.Namespace, booster: Booster) -> tuple[Loader, Loader, int]:
    """Return loaders for training and, with about a sixth of the images, for the test, and the number of classes.

    Each data rank gets a part of a batch.
    """
    train_set, test_set = open_dataset(options, train=True), open_dataset(options, train=False)
    order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(0)).tolist()
    test_samples = max(1, len(order) // (6 * options.batch_size)) * options.batch_size
    train, test = Subset(train_set, order[test_samples:]), Subset(test_set, order[:test_samples])
    topology = booster.registry.topology
    batch_size = options.batch_size // topology.size(*topology.data_axes)
    return (
        booster.prepare_dataloader(train, batch_size, shuffle=True, drop_last=True, seed=options.seed),
        booster.prepare_dataloader(test, batch_size),
        len(train_set.categories),
    )


class Trainer:
    """Model, data and optimizer of one run; `train` is the loop.

    Raises:
        ValueError: No layers support the axes of the topology, its sizes do not divide the model's sizes, there are no
            images, or a checkpoint does not fit.
    """

    def __init__(self, options: argparse.Namespace, registry: ProcessGroupRegistry) -> None:
        self.options, self.registry, self.layers = options, registry, layers_for(registry)
        prepare_files(options, "caltech101", make_caltech101, lambda: Caltech101(options.data, download=True))
        self.booster = booster = Booster(
            precision_asked(options),
            registry,
            data_parallel_asked(options),
            max_norm=options.max_norm,
            accumulation_steps=options.accumulate,
        )
        self.loader, self.test_loader, classes = make_loaders(options, booster)
        tokens = (options.image_size // PATCH) ** 2
        # 101 classes do not divide over several ranks, so add classes without samples, up to a multiple of 32.
        classes += -classes % 32
        torch.manual_seed(options.seed)
        model = PatchTransformer(
            self.layers, 3 * PATCH * PATCH, tokens, classes, options.width, options.heads, options.depth
        )
        adamw = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.05, fused=True)
        steps = steps_asked(options, len(self.loader))
        self.model, self.optimizer, self.criterion, _, self.schedule = booster.boost(
            model, adamw, self.layers.loss, self.loader, LinearWarmupLR(adamw, steps, warmup_steps=steps // 10)
        )
        boosted = self.model, self.optimizer, self.schedule
        self.run = Run(options, booster, *boosted, steps=steps, every=5, unit="images")

    def train(self) -> None:
        """Run all remaining steps."""
        for images, labels in self.run.micro_batches(self.loader):
            patches, local_labels = self.local(images, labels)
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(patches), local_labels)
            self.booster.backward(loss, self.optimizer)
            stats = self.optimizer.step()
            self.schedule.step()
            self.run.note(stats, loss.detach(), count=len(images))

    def local(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Shard a batch over the model axes, and return this rank's patches and labels.

        Ranks with equal data coordinates pass the same batch.
        """
        patches = rearrange(images, "n c (row p) (col q) -> n (row col) (p q c)", p=PATCH, q=PATCH)
        rows, columns = self.layers.input_axes
        patches = shard(patches, P(rows, None, columns), self.registry)
        local_labels = shard(labels, P(self.layers.batch_axes), self.registry)
        return patches.to(self.registry.device), local_labels.to(self.registry.device)

    @torch.no_grad()
    def test(self) -> tuple[float, float]:
        """Return loss and accuracy on the test images."""
        results = []
        for images, labels in self.test_loader:
            patches, local_labels = self.local(images, labels)
            logits = self.model(patches)
            correct = self.layers.all_classes(logits).argmax(-1) == local_labels
            results.append(torch.stack([self.criterion(logits, local_labels), correct.float().mean()]))
        mean = torch.stack(results).mean(0)  # all batches have the same size
        axes = (*self.registry.topology.data_axes, *self.layers.batch_axes)
        if axes:
            mean = reduce_from(mean, self.registry, *axes) / self.registry.size(*axes)
        loss, accuracy = mean.tolist()
        return loss, accuracy


def run(trainer: Trainer) -> None:
    """Test, train and test, with a progress bar and results on rank 0."""
    before = trainer.test()
    trainer.train()
    after, skipped, steps = trainer.test(), trainer.optimizer.skipped_steps, trainer.run
    if not steps.is_first:
        return
    how = f"{trainer.registry.topology!r}, {trainer.options.precision}"
    print(f"{how}: {steps.done} steps in {steps.seconds:.1f} s, {skipped} of them skipped")
    print(f"test before:  loss {before[0]:.4f}, accuracy {before[1]:.1%}")
    print(f"test after:   loss {after[0]:.4f}, accuracy {after[1]:.1%}")
    steps.write()


def read_options(processes: int, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ValueError: A flag is wrong.
    """
    parser = CommandLine(
        __doc__,
        "data: shards the batch; tensor: 1-D layers; row and col: 2-D; depth, row and col: 2.5-D; input, weight and "
        "output: 3-D",
    )
    add_training_flags(parser, batch_size=48, lr=2e-3, precision="bf16", epochs=12)
    add, files = parser.add_argument, parser.add_mutually_exclusive_group()
    add("--data", type=Path, default=Path("data"), metavar="DIR", help="where caltech101/ is (default: %(default)s)")
    files.add_argument(
        "--download",
        action="store_true",
        help="download the real data set into DIR first (137 MB; an older torchvision needs gdown too)",
    )
    files.add_argument("--sample", action="store_true", help="make and use DIR/sample, which needs no network")
    size_help = f"pixels along each side, a multiple of {PATCH} (default: %(default)s)"
    add("--image-size", type=int, default=32, help=size_help)
    add_model_size(parser, width=64)
    options = parser.read(processes, arguments)
    check_training(options)
    if options.image_size < 1 or options.image_size % PATCH:
        raise ValueError(f"--image-size {options.image_size} must be a positive multiple of {PATCH}")
    return options


if __name__ == "__main__":
    main(read_options, Trainer, run)
