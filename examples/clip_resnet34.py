"""Gradient clipping: ResNet-34 on CIFAR-10, in one process or over a mesh of processes.

    python examples/clip_resnet34.py --sample
    torchrun --standalone --nproc-per-node 2 examples/clip_resnet34.py --sample --data-parallel ddp
    torchrun --standalone --nproc-per-node 4 examples/clip_resnet34.py --sample --data-parallel zero2 --topology data=4
    torchrun --standalone --nproc-per-node 4 examples/clip_resnet34.py --sample --topology data=2,tensor=2

Every topology computes the same function: the batch is the same, and so are its statistics and the norm that its gradient
is clipped by. `--float64` shows it: the loss curves are then equal to 12 digits. In float32 they are until rounding first
turns a ReLU on or off, after 5 to 15 steps; from there on they part as two runs in one process do that start a last digit
apart, and end alike, not equal.

`--sample` makes a small data set in CIFAR-10's format from images that come with scikit-learn; the real one is read from
`--data`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from curve import Curve
from meshstep.optim import Booster, CosineAnnealingLR, DataParallel, Monitor, Report
from meshstep.parallel import ProcessGroupRegistry, Topology, init_distributed
from resnet_model import make_resnet34
from sample_data import SampleCIFAR10, make_cifar10
from torch import Tensor, nn
from torchvision.datasets import CIFAR10
from torchvision.transforms import v2
from tqdm import tqdm


def open_dataset(options: argparse.Namespace, train: bool) -> CIFAR10:
    """CIFAR-10, or the sample in its format; images [3, 32, 32] of about unit variance."""
    # The random draws are the same on every topology: prepare_dataloader seeds them by sample and epoch.
    augment: list[Any] = [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()]
    if options.sample:  # its digits fill the image, and mirrored they are none
        augment = [v2.RandomCrop(32, padding=2)]
    to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)]
    kind, root = (SampleCIFAR10, options.data / "sample") if options.sample else (CIFAR10, options.data)
    return kind(root, train=train, transform=v2.Compose([*augment, *to_tensor] if train else to_tensor))


def prepare_files(options: argparse.Namespace, local_rank: int) -> None:
    """Make or download the files, once on each machine."""
    if local_rank == 0 and options.sample:
        make_cifar10(options.data / "sample")
    elif local_rank == 0 and options.download:
        CIFAR10(options.data, download=True)
    dist.barrier()


class Trainer:
    """Everything that one run needs; `train` is the loop."""

    def __init__(self, options: argparse.Namespace, registry: ProcessGroupRegistry) -> None:
        self.options, self.registry = options, registry
        self.dtype = torch.float64 if options.float64 else torch.float32
        torch.manual_seed(options.seed)
        model = make_resnet34(10, registry, self.dtype)
        criterion = nn.CrossEntropyLoss()
        sgd = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4, fused=True)

        booster = Booster(options.precision, registry, options.data_parallel)
        batch_size = options.batch_size // registry.topology.size(*registry.topology.data_axes)
        loader = booster.prepare_dataloader(
            open_dataset(options, train=True), batch_size, shuffle=True, drop_last=True, seed=options.seed
        )
        self.test_loader = booster.prepare_dataloader(open_dataset(options, train=False), batch_size)
        self.steps = min(options.steps or options.epochs * len(loader), options.epochs * len(loader))
        schedule = CosineAnnealingLR(sgd, total_steps=self.steps)
        self.booster = booster
        self.model, self.optimizer, self.criterion, self.loader, self.schedule = booster.boost(
            model, sgd, criterion, loader, schedule
        )

    def train(self, bar: tqdm, report: Callable[[Report], object]) -> None:
        """All steps, with a report every 5 of them."""
        monitor = Monitor(self.registry, report, every=min(5, self.steps), unit="images")
        self.model.train()
        for images, labels in self.batches():
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(images), labels)
            self.booster.backward(loss, self.optimizer)
            self.optimizer.clip_grad_by_norm(max_norm=self.options.max_norm)
            stats = self.optimizer.step()
            self.schedule.step()
            monitor(stats, loss.detach(), count=len(images))
            bar.update()

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This data coordinate's part of each step's batch, on its device."""
        epochs = (batch for _ in range(self.options.epochs) for batch in self.loader)
        for images, labels in islice(epochs, self.steps):
            yield self.to_device(images, labels)

    def to_device(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return images.to(self.registry.device, self.dtype), labels.to(self.registry.device)

    @torch.no_grad()
    def test(self) -> tuple[float, float]:
        """Loss and accuracy on the test images."""
        self.model.eval()
        device, axes = self.registry.device, self.registry.topology.data_axes
        sums = torch.zeros(3, device=device)
        for batch in self.test_loader:
            images, labels = self.to_device(*batch)
            logits = self.model(images)
            loss, correct = self.criterion(logits, labels), (logits.argmax(-1) == labels).sum()
            sums += torch.stack([loss * len(labels), correct, torch.tensor(len(labels), device=device)])
        if axes and self.registry.size(*axes) > 1:
            dist.all_reduce(sums, group=self.registry.group(*axes))
        loss, accuracy = (sums[:2] / sums[2]).tolist()
        return loss, accuracy


def run(options: argparse.Namespace, registry: ProcessGroupRegistry) -> None:
    """Train and test, with a progress bar and results on rank 0."""
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
    precision = "float64" if options.float64 else options.precision
    how = f"{registry.topology!r}, {precision}, {options.data_parallel or 'plain'} data parallelism"
    print(f"{how}: {trainer.steps} steps in {seconds:.1f} s, {skipped} of them skipped")
    print(f"loss in training: {curve.reports[0].loss:.4f} in the first steps, {curve.reports[-1].loss:.4f} in the last")
    print(f"test before: loss {before[0]:.4f}, accuracy {before[1]:.1%}")
    print(f"test after:  loss {after[0]:.4f}, accuracy {after[1]:.1%}")
    if options.curve is not None:
        curve.write(options.curve)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    files = parser.add_mutually_exclusive_group()
    add("--data", type=Path, default=Path("data"), metavar="DIR", help="where the files are (default: %(default)s)")
    files.add_argument("--download", action="store_true", help="download the real data set into DIR, 170 MB, first")
    files.add_argument("--sample", action="store_true", help="make and use DIR/sample, which needs no network")
    add(
        "--topology",
        type=Topology.parse,
        metavar="AXIS=SIZE,...",
        help="process axes, slowest first; the sizes must multiply to the number of processes. data (and replica, a second "
        "one): every coordinate trains on its part of the batch; tensor: residual blocks are split (default: all on data)",
    )
    modes = ("fp32", "fp16", "bf16", "fp16_naive", "fp16_apex", "fp8")
    add("--precision", choices=modes, default="fp32", help="see meshstep.amp (default: %(default)s)")
    add("--float64", action="store_true", help="compute in double precision, about 5 times slower on a CPU")
    add(
        "--data-parallel",
        choices=get_args(DataParallel),
        help="see Booster (default: the optimizer averages gradients)",
    )
    add("--epochs", type=int, default=2, help="times over the training images (default: %(default)s)")
    add("--steps", type=int, metavar="N", help="stop after N steps if that is sooner")
    add("--batch-size", type=int, default=48, help="images in a step (default: %(default)s)")
    add("--lr", type=float, default=0.3, help="learning rate at the start (default: %(default)s)")
    add("--max-norm", type=float, default=1.0, help="clip the gradient norm to it (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights, batches and random crops (default: %(default)s)")
    add("--curve", type=Path, metavar="FILE", help="write loss and gradient norm of every 5 steps there, as CSV")
    options = parser.parse_args()
    if options.float64 and options.precision != "fp32":
        parser.error(f"--float64 is no mixed precision: leave out --precision {options.precision}")
    return options


def main() -> None:
    options = parse_options()
    launch = init_distributed()
    prepare_files(options, launch.local_rank)
    with ProcessGroupRegistry(options.topology or Topology(data=launch.world_size)) as registry:
        run(options, registry)


if __name__ == "__main__":
    main()
