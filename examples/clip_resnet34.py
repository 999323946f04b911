"""Gradient clipping: ResNet-34 on CIFAR-10, in one process or over a mesh of processes.

    python examples/clip_resnet34.py --sample
    torchrun --standalone --nproc-per-node 2 examples/clip_resnet34.py --sample --data-parallel ddp
    torchrun --standalone --nproc-per-node 4 examples/clip_resnet34.py --sample --zero 2
    torchrun --standalone --nproc-per-node 4 examples/clip_resnet34.py --sample --topology data=2,tensor=2

Every topology computes the same function: batch, batch statistics and the clipping norm are equal. With `--float64` the
loss curves agree to 12 digits. In float32 they agree for 5 to 15 steps, until rounding first switches a ReLU. From then on
they differ like two runs in one process whose weights differ in the last digit, and end at similar losses.

`--accumulate` computes a slightly different function, because batch norm uses each micro-batch alone. `--sample` makes a
small data set in the format of CIFAR-10 from images that come with scikit-learn; the original is read from `--data`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from command_line import (
    CommandLine,
    add_training_flags,
    check_training,
    data_parallel_asked,
    main,
    precision_asked,
)
from meshstep.optim import Booster, CosineAnnealingLR
from meshstep.parallel import ProcessGroupRegistry
from models.resnet import make_resnet34
from sample_data import SampleCIFAR10, make_cifar10
from torch import Tensor, nn
from torchvision.datasets import CIFAR10
from torchvision.transforms import v2
from training import Run, prepare_files, steps_asked


def open_dataset(options: argparse.Namespace, train: bool) -> CIFAR10:
    """Return CIFAR-10, or the sample in its format, with images [3, 32, 32] of about unit variance."""
    # The random draws are the same on every topology: prepare_dataloader seeds them by sample and epoch.
    augment: list[Any] = [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()]
    if options.sample:  # digits fill the image, and mirrored digits are not digits
        augment = [v2.RandomCrop(32, padding=2)]
    to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)]
    kind, root = (SampleCIFAR10, options.data / "sample") if options.sample else (CIFAR10, options.data)
    return kind(root, train=train, transform=v2.Compose([*augment, *to_tensor] if train else to_tensor))


class Trainer:
    """Model, data and optimizer of one run; `train` is the loop.

    Raises:
        ValueError: The model can't be sharded over the topology, there are no images, or a checkpoint does not fit.
    """

    def __init__(self, options: argparse.Namespace, registry: ProcessGroupRegistry) -> None:
        self.options, self.registry = options, registry
        self.dtype = torch.float64 if options.float64 else torch.float32
        torch.manual_seed(options.seed)
        model = make_resnet34(10, registry, self.dtype)
        prepare_files(options, CIFAR10.base_folder, make_cifar10, lambda: CIFAR10(options.data, download=True))
        sgd = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4, fused=True)
        data_parallel = options.data_parallel or data_parallel_asked(options)
        booster = Booster(precision_asked(options), registry, data_parallel, accumulation_steps=options.accumulate)
        batch_size = options.batch_size // registry.topology.size(*registry.topology.data_axes)
        self.loader = booster.prepare_dataloader(
            open_dataset(options, train=True), batch_size, shuffle=True, drop_last=True, seed=options.seed
        )
        self.test_loader = booster.prepare_dataloader(open_dataset(options, train=False), batch_size)
        steps = steps_asked(options, len(self.loader))
        self.booster = booster
        self.model, self.optimizer, self.criterion, _, self.schedule = booster.boost(
            model, sgd, nn.CrossEntropyLoss(), self.loader, CosineAnnealingLR(sgd, total_steps=steps)
        )
        boosted = self.model, self.optimizer, self.schedule
        self.run = Run(options, booster, *boosted, steps=steps, every=min(5, steps), unit="images")

    def train(self) -> None:
        """Run all remaining steps."""
        self.model.train()
        for batch in self.run.micro_batches(self.loader):
            images, labels = self.to_device(*batch)
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(images), labels)
            self.booster.backward(loss, self.optimizer)
            self.optimizer.clip_grad_by_norm(max_norm=self.options.max_norm)
            stats = self.optimizer.step()
            self.schedule.step()
            self.run.note(stats, loss.detach(), count=len(images))

    def to_device(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return images.to(self.registry.device, self.dtype), labels.to(self.registry.device)

    @torch.no_grad()
    def test(self) -> tuple[float, float]:
        """Return loss and accuracy on the test images."""
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


def run(trainer: Trainer) -> None:
    """Test, train and test, with a progress bar and results on rank 0."""
    before = trainer.test()
    trainer.train()
    after, skipped, steps, options = trainer.test(), trainer.optimizer.skipped_steps, trainer.run, trainer.options
    if not steps.is_first:
        return
    precision = "float64" if options.float64 else options.precision
    how = f"{trainer.registry.topology!r}, {precision}, {trainer.booster.data_parallel or 'plain'} data parallelism"
    print(f"{how}: {steps.done} steps in {steps.seconds:.1f} s, {skipped} of them skipped")
    if steps.rows:
        print(f"loss in training: {steps.rows[0][1]:.4f} in the first steps, {steps.rows[-1][1]:.4f} in the last")
    print(f"test before: loss {before[0]:.4f}, accuracy {before[1]:.1%}")
    print(f"test after:  loss {after[0]:.4f}, accuracy {after[1]:.1%}")
    steps.write()


def read_options(processes: int, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ValueError: A flag is wrong.
    """
    parser = CommandLine(
        __doc__,
        "data (and replica, a second one): shards the batch; tensor: shards residual blocks",
    )
    add_training_flags(parser, batch_size=48, lr=0.3, epochs=2)
    add, files = parser.add_argument, parser.add_mutually_exclusive_group()
    add("--data", type=Path, default=Path("data"), metavar="DIR", help="where the files are (default: %(default)s)")
    files.add_argument("--download", action="store_true", help="download the real data set into DIR, 170 MB, first")
    files.add_argument("--sample", action="store_true", help="make and use DIR/sample, which needs no network")
    add("--float64", action="store_true", help="compute in double precision, about 5 times slower on a CPU")
    how = "average gradients by torch's DistributedDataParallel or fully_shard (default: the optimizer does it)"
    add("--data-parallel", choices=("ddp", "fsdp"), help=how)
    options = parser.read(processes, arguments)
    check_training(options)
    if options.float64 and options.precision != "fp32":
        raise ValueError(f"--float64 computes everything in float64: leave out --precision {options.precision}")
    if options.data_parallel and options.zero:
        raise ValueError(
            "--zero makes the optimizer reduce gradients, which --data-parallel leaves to torch: leave out one of the two"
        )
    return options


if __name__ == "__main__":
    main(read_options, Trainer, run)
