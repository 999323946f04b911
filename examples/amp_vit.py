"""Mixed precision: a small vision transformer on Caltech-101, in one process or split over a mesh of processes.

    python examples/amp_vit.py --sample
    torchrun --standalone --nproc-per-node 2 examples/amp_vit.py --sample --precision fp16 --topology tensor=2
    torchrun --standalone --nproc-per-node 4 examples/amp_vit.py --sample --precision bf16 --topology data=2,tensor=2
    torchrun --standalone --nproc-per-node 4 examples/amp_vit.py --sample --precision fp8 --topology row=2,col=2

Attention and MLP are split over `tensor`, or everything over the `row` x `col` grid: see digits_model.py. The loss curve
is the same on every topology: to the rounding of float32, or of the half type that was chosen. `--sample` makes a small
data set in Caltech-101's format from images that come with scikit-learn; the real one is read from `--data`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from curve import Curve
from digits_model import PatchTransformer, layers_for
from einops import rearrange
from meshstep.optim import Booster, LinearWarmupLR, Monitor, Report
from meshstep.parallel import P, ProcessGroupRegistry, ShardedDataLoader, Topology, init_distributed, reduce_from, shard
from sample_data import make_caltech101
from torch import Tensor
from torch.utils.data import Subset
from torchvision.datasets import Caltech101
from torchvision.transforms import v2
from tqdm import tqdm

PATCH = 8  # pixels along each side


def open_dataset(options: argparse.Namespace, train: bool) -> Caltech101:
    """Caltech-101, or the sample in its format, as square images in -1..1."""
    # Random crops are the same on every topology: prepare_dataloader seeds them by sample and epoch.
    augment = [v2.RandomCrop(options.image_size, padding=options.image_size // 16)] if train else []
    to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
    resize = v2.Resize((options.image_size, options.image_size))
    transform = v2.Compose([v2.RGB(), resize, *augment, *to_tensor])
    return Caltech101(options.data / "sample" if options.sample else options.data, transform=transform)


def prepare_files(options: argparse.Namespace, local_rank: int) -> None:
    """Make or download the files, once on each machine."""
    if local_rank == 0 and options.sample:
        make_caltech101(options.data / "sample")
    elif local_rank == 0 and options.download:
        Caltech101(options.data, download=True)
    dist.barrier()


Loader = ShardedDataLoader[tuple[Tensor, int]]


def make_loaders(options: argparse.Namespace, booster: Booster) -> tuple[Loader, Loader]:
    """For training and, a sixth of the images, for the test; each data coordinate gets its part of every batch."""
    train_set, test_set = open_dataset(options, train=True), open_dataset(options, train=False)
    order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(0)).tolist()
    test_samples = max(1, len(order) // (6 * options.batch_size)) * options.batch_size
    train, test = Subset(train_set, order[test_samples:]), Subset(test_set, order[:test_samples])
    topology = booster.registry.topology
    batch_size = options.batch_size // topology.size(*topology.data_axes)
    return (
        booster.prepare_dataloader(train, batch_size, shuffle=True, drop_last=True, seed=options.seed),
        booster.prepare_dataloader(test, batch_size),
    )


class Trainer:
    """Everything that one run needs; `train` is the loop."""

    def __init__(self, options: argparse.Namespace, registry: ProcessGroupRegistry) -> None:
        self.options, self.registry, self.layers = options, registry, layers_for(registry)
        self.booster = booster = Booster(options.precision, registry, max_norm=options.max_norm)
        loader, self.test_loader = make_loaders(options, booster)
        tokens = (options.image_size // PATCH) ** 2
        classes = len(loader.dataset.dataset.categories)  # type: ignore[attr-defined]
        # 101 classes don't divide over any axis: fill up with classes that never come.
        classes += -classes % 32
        torch.manual_seed(options.seed)
        model = PatchTransformer(
            self.layers, 3 * PATCH * PATCH, tokens, classes, options.width, options.heads, options.depth
        )
        adamw = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.05, fused=True)
        self.steps = options.epochs * len(loader)
        schedule = LinearWarmupLR(adamw, self.steps, warmup_steps=self.steps // 10)
        self.model, self.optimizer, self.criterion, self.loader, self.schedule = booster.boost(
            model, adamw, self.layers.loss, loader, schedule
        )

    def train(self, bar: tqdm, report: Callable[[Report], object]) -> None:
        """All epochs, with a report every 5 steps."""
        monitor = Monitor(self.registry, report, every=5, unit="images")
        for _ in range(self.options.epochs):
            for images, labels in self.loader:
                patches, local_labels = self.local(images, labels)
                self.optimizer.zero_grad()
                loss = self.criterion(self.model(patches), local_labels)
                self.booster.backward(loss, self.optimizer)
                stats = self.optimizer.step()
                self.schedule.step()
                monitor(stats, loss.detach(), count=len(images))
                bar.update()

    def local(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's part of a data coordinate's batch, as the layers want it, in patches."""
        patches = rearrange(images, "n c (row p) (col q) -> n (row col) (p q c)", p=PATCH, q=PATCH)
        rows, columns = self.layers.batch_axes, self.layers.feature_axes
        patches = shard(patches, P(rows, None, columns), self.registry)
        return patches.to(self.registry.device), shard(labels, P(rows), self.registry).to(self.registry.device)

    @torch.no_grad()
    def test(self) -> tuple[float, float]:
        """Loss and accuracy on the test images."""
        results = []
        for images, labels in self.test_loader:
            patches, local_labels = self.local(images, labels)
            logits = self.model(patches)
            correct = self.layers.all_classes(logits).argmax(-1) == local_labels
            results.append(torch.stack([self.criterion(logits, local_labels), correct.float().mean()]))
        mean = torch.stack(results).mean(0)  # all batches are equally large
        axes = (*self.registry.topology.data_axes, *self.layers.batch_axes)
        if axes:
            mean = reduce_from(mean, self.registry, *axes) / self.registry.size(*axes)
        loss, accuracy = mean.tolist()
        return loss, accuracy


def run(options: argparse.Namespace, registry: ProcessGroupRegistry) -> None:
    """Test, train, test; with a progress bar and results on rank 0."""
    first = registry.global_rank == 0
    trainer = Trainer(options, registry)
    before, start = trainer.test(), time.perf_counter()
    with tqdm(total=trainer.steps, unit="step", disable=not first) as bar:
        curve = Curve(bar)
        trainer.train(bar, curve)
    seconds, after = time.perf_counter() - start, trainer.test()
    skipped = trainer.optimizer.skipped_steps
    if not first:
        return
    print(
        f"{registry.topology!r}, {options.precision}: {trainer.steps} steps in {seconds:.1f} s, {skipped} of them skipped"
    )
    print(f"test before:  loss {before[0]:.4f}, accuracy {before[1]:.1%}")
    print(f"test after:   loss {after[0]:.4f}, accuracy {after[1]:.1%}")
    if options.curve is not None:
        curve.write(options.curve)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    files = parser.add_mutually_exclusive_group()
    add("--data", type=Path, default=Path("data"), metavar="DIR", help="where caltech101/ is (default: %(default)s)")
    files.add_argument(
        "--download",
        action="store_true",
        help="download the real data set into DIR first (137 MB; an older torchvision needs gdown too)",
    )
    files.add_argument("--sample", action="store_true", help="make and use DIR/sample, which needs no network")
    add(
        "--topology",
        type=Topology.parse,
        default=Topology(),
        metavar="AXIS=SIZE,...",
        help="process axes, slowest first; the sizes must multiply to the number of processes. data: every coordinate "
        "trains on its part of the batch; tensor: 1-D layers; row and col, equally large: 2-D layers (default: none)",
    )
    modes = ("fp32", "fp16", "bf16", "fp16_naive", "fp16_apex", "fp8")
    add("--precision", choices=modes, default="bf16", help="see meshstep.amp (default: %(default)s)")
    add("--epochs", type=int, default=12, help="times over the training images (default: %(default)s)")
    add("--batch-size", type=int, default=48, help="images in a full batch (default: %(default)s)")
    add("--lr", type=float, default=2e-3, help="peak learning rate (default: %(default)s)")
    add("--max-norm", type=float, default=1.0, help="clip the gradient norm to it (default: %(default)s)")
    add(
        "--image-size",
        type=int,
        default=32,
        help=f"pixels along each side, a multiple of {PATCH} (default: %(default)s)",
    )
    add("--width", type=int, default=64, help="features between the layers (default: %(default)s)")
    add("--heads", type=int, default=4, help="of each attention layer (default: %(default)s)")
    add("--depth", type=int, default=2, help="attention layers (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights, batches and random crops (default: %(default)s)")
    add("--curve", type=Path, metavar="FILE", help="write loss and gradient norm of every 5 steps there, as CSV")
    options = parser.parse_args()
    if not (options.sample or options.download or (options.data / "caltech101").exists()):
        parser.error(f"there is no {options.data / 'caltech101'}: give --sample, --download, or another --data")
    parts = options.topology.size(*(axis for axis in ("data", "row") if axis in options.topology.axes))
    if options.batch_size % parts:
        parser.error(f"--batch-size {options.batch_size} must be a multiple of {parts}, over which it is split")
    return options


def main() -> None:
    options = parse_options()
    launch = init_distributed()
    prepare_files(options, launch.local_rank)
    with ProcessGroupRegistry(options.topology) as registry:
        run(options, registry)


if __name__ == "__main__":
    main()
