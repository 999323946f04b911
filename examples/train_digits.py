"""Train a small transformer on scikit-learn's handwritten digits, in one process or split over a mesh of processes.

    python examples/train_digits.py
    torchrun --standalone --nproc-per-node 4 examples/train_digits.py --topology row=2,col=2 --verify
    torchrun --standalone --nproc-per-node 4 examples/train_digits.py --topology tensor=4
    torchrun --standalone --nproc-per-node 4 examples/train_digits.py --topology data=2,tensor=2
    torchrun --standalone --nproc-per-node 2 examples/train_digits.py --topology tensor=2 --precision bf16 --accumulate 4

The seed decides the full weights and the batches; the topology only decides who holds which part of them. So the same
seed gives the same loss curve on every topology. The model is in digits_model.py.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from digits_model import DenseLayers, DenseReference, DigitsTransformer, full_parameters, layers_for
from einops import rearrange
from meshstep.amp import ApexFp16, precision_of
from meshstep.optim import ParallelOptimizer, load_checkpoint, newest_checkpoint, save_checkpoint
from meshstep.parallel import P, ProcessGroupRegistry, Topology, init_distributed, reduce_from, shard
from sklearn.datasets import load_digits
from torch import Tensor
from tqdm import tqdm

TEST_SAMPLES = 360
PRECISIONS = ("fp32", "fp16", "bf16", "fp16_naive", "O0", "O1", "O2", "O3", "fp8")
# The reference computes in float64, the model in float32: what is left is the rounding of its forward and backward.
LARGEST_DIFFERENCE = 1e-5


class Samples(NamedTuple):
    """Patches [sample, token, pixel] in -1..1, and labels [sample]."""

    patches: Tensor
    labels: Tensor


def load_samples(device: torch.device) -> tuple[Samples, Samples]:
    """For training and for the test; the same split always."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float() / 8 - 1
    patches = rearrange(images, "n (row p) (col q) -> n (row col) (p q)", p=2, q=2).to(device)
    labels = torch.from_numpy(digits.target).to(device)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).to(device)
    test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
    return Samples(patches[train], labels[train]), Samples(patches[test], labels[test])


def batch_at(step: int, samples: Samples, batch_size: int, seed: int) -> Samples:
    """The full batch of a step, the same on every rank; each epoch has an order of its own."""
    epoch, index = divmod(step, len(samples.labels) // batch_size)
    generator = torch.Generator().manual_seed(1000 * seed + epoch)
    order = torch.randperm(len(samples.labels), generator=generator)
    chosen = order[index * batch_size : (index + 1) * batch_size].to(samples.labels.device)
    return Samples(samples.patches[chosen], samples.labels[chosen])


class Split:
    """How a batch is split over the ranks: over the data axes, and as the layers want it."""

    def __init__(self, layers: DenseLayers, registry: ProcessGroupRegistry) -> None:
        self.registry = registry
        self.batch_axes = (*registry.topology.data_axes, *layers.batch_axes)
        self.patch_spec = P(self.batch_axes, None, layers.feature_axes)
        self.label_spec = P(self.batch_axes)

    def local(self, batch: Samples) -> Samples:
        """This rank's part of a full batch."""
        patches = shard(batch.patches, self.patch_spec, self.registry)
        return Samples(patches, shard(batch.labels, self.label_spec, self.registry))

    def mean(self, local: Tensor) -> Tensor:
        """The mean over the whole batch of what each rank computed on its part."""
        if not self.batch_axes:
            return local
        return reduce_from(local, self.registry, *self.batch_axes) / self.registry.size(*self.batch_axes)


class Trainer:
    """Model, optimizer and schedule of one run, and a record of its steps."""

    def __init__(self, options: argparse.Namespace, registry: ProcessGroupRegistry) -> None:
        self.options, self.registry = options, registry
        self.layers = layers_for(registry)
        self.split = Split(self.layers, registry)
        self.train_samples, self.test_samples = load_samples(registry.device)
        torch.manual_seed(options.seed)
        mode = options.precision
        precision = ApexFp16(opt_level=mode) if mode.startswith("O") else precision_of(mode)
        self.model = precision.prepare(DigitsTransformer(self.layers).to(registry.device), registry)
        self.loss = precision.prepare_criterion(self.layers.loss)
        # Without masters Adam's second moments are float16: most squares underflow to 0, and 1e-8 does not hold them up.
        eps = 1e-3 if mode == "O3" else 1e-8
        adamw = torch.optim.AdamW(self.model.parameters(), lr=options.lr, weight_decay=0.05, eps=eps, fused=True)
        self.optimizer = ParallelOptimizer(
            adamw,
            registry,
            max_norm=options.max_norm,
            precision=precision,
            accumulation_steps=options.accumulate,
            shard_states="data" if options.zero else None,
            shard_gradients=options.zero == 2,
        )
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, options.lr, total_steps=options.steps, cycle_momentum=False
        )
        self.reference = DenseReference() if options.verify else None
        self.history: list[Tensor] = []  # of each step: loss, accuracy, gradient norm, clip coefficient
        self.differences: list[float] = []

    def run(self) -> None:
        """All steps, with a progress bar on rank 0."""
        folder = self.options.resume
        if folder is not None and newest_checkpoint(folder) is not None:
            saved = load_checkpoint(folder, self.model, self.optimizer, lr_scheduler=self.schedule)
            self.history = list(saved["history"].to(self.registry.device))
        start, last = len(self.history), self.options.steps
        steps = tqdm(range(start, last), unit="step", initial=start, total=last, disable=self.registry.global_rank != 0)
        for step in steps:
            self.step(batch_at(step, self.train_samples, self.options.batch_size, self.options.seed))
            if step % 10 == 9 or step == self.options.steps - 1:  # reading numbers waits for the device
                loss, accuracy, norm, _ = self.history[-1].tolist()
                steps.set_postfix_str(f"loss {loss:.4f}, gradient norm {norm:.3f}, accuracy {accuracy:.0%}")
            if folder is not None and (step + 1) % self.options.save_every == 0:
                record = {"history": torch.stack(self.history)}
                save_checkpoint(folder, self.model, self.optimizer, lr_scheduler=self.schedule, extra=record)

    def step(self, batch: Samples) -> None:
        """One training step on a full batch."""
        self.optimizer.zero_grad()
        count = self.options.accumulate
        measured = []
        for patches, labels in zip(batch.patches.chunk(count), batch.labels.chunk(count), strict=True):
            loss, accuracy = self.forward(Samples(patches, labels))
            self.optimizer.backward(loss)
            measured.append(torch.stack([loss.detach(), accuracy]))
        expected = self.dense_norm(batch) if self.reference is not None else None
        stats = self.optimizer.step()
        assert stats is not None  # all micro-batches of the window have come
        self.schedule.step()
        means = self.split.mean(torch.stack(measured).mean(0)).to(stats.total_norm)
        self.history.append(torch.cat([means, torch.stack([stats.total_norm, stats.clip_coef])]))
        if expected is not None:
            self.differences.append(abs(float(stats.total_norm) / expected - 1))

    def forward(self, batch: Samples) -> tuple[Tensor, Tensor]:
        """Loss and accuracy of this rank's part of a full batch."""
        patches, labels = self.split.local(batch)
        logits = self.model(patches)
        correct = self.layers.all_classes(logits.detach()).argmax(-1) == labels
        return self.loss(logits, labels).float(), correct.float().mean()

    def dense_norm(self, batch: Samples) -> float | None:
        """The norm of the dense model's gradient, computed on rank 0."""
        parameters = full_parameters(self.model, self.registry)
        if self.registry.global_rank != 0 or self.reference is None:
            return None
        return self.reference.gradient_norm(parameters, *batch)

    @torch.no_grad()
    def test(self) -> tuple[float, float]:
        """Loss and accuracy on the test samples."""
        loss, accuracy = self.split.mean(torch.stack(self.forward(self.test_samples))).tolist()
        return loss, accuracy


def report(trainer: Trainer, seconds: float) -> bool:
    """Print the results on rank 0; whether the norms were right."""
    test_loss, test_accuracy = trainer.test()
    if trainer.registry.global_rank != 0:
        return True
    options, history = trainer.options, torch.stack(trainer.history).cpu()
    if options.curve is not None:
        rows = (",".join(map(repr, row)) for row in history.tolist())
        options.curve.write_text("\n".join(["loss,accuracy,norm,clip_coef", *rows, ""]))
    clipped = int((history[:, 3] < 1).sum())
    print(f"{trainer.registry.topology!r}: {len(history)} steps in {seconds:.1f} s, {clipped} of them clipped")
    print(f"last batch:  loss {history[-1, 0]:.6f}, gradient norm {history[-1, 2]:.6f}")
    print(f"test:        loss {test_loss:.6f}, accuracy {test_accuracy:.2%}")
    if not options.verify:
        return True
    largest = float(torch.tensor([0.0, *trainer.differences]).max())
    right = largest <= LARGEST_DIFFERENCE
    print(
        f"verify:      the norm is at most {largest:.1e} (relative) off the dense model's in float64: "
        f"{'right' if right else 'WRONG'}, {LARGEST_DIFFERENCE:.0e} is allowed"
    )
    return right


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--topology",
        type=Topology.parse,
        default=Topology(),
        metavar="AXIS=SIZE,...",
        help="process axes, slowest first; the sizes must multiply to the number of processes. data: every coordinate "
        "trains on its part of the batch; tensor: 1-D layers; row and col, equally large: 2-D layers (default: none)",
    )
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="samples in a full batch (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument(
        "--max-norm", type=float, default=1.0, help="clip the gradient norm to it (default: %(default)s)"
    )
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="fp32", help="mixed-precision mode (default: %(default)s)"
    )
    parser.add_argument(
        "--accumulate", type=int, default=1, metavar="K", help="split each batch into K micro-batches (default: 1)"
    )
    parser.add_argument(
        "--zero",
        type=int,
        choices=(0, 1, 2),
        default=0,
        help="shard optimizer states over data (1), and gradients as well (2) (default: 0)",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help="save checkpoints there, and continue from the newest one, which may be of another topology or --zero",
    )
    parser.add_argument(
        "--save-every", type=int, default=25, metavar="N", help="steps between checkpoints (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights and batches (default: %(default)s)")
    parser.add_argument(
        "--curve", type=Path, metavar="FILE", help="write loss, norm and so on of each step there, as CSV"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help=f"compare the gradient norm of every step with the dense model's in float64, computed beside it; "
        f"exit with 1 if they differ by more than {LARGEST_DIFFERENCE:.0e}, relative",
    )
    options = parser.parse_args()
    if options.verify and options.precision != "fp32":
        parser.error("--verify compares with float64 to 1e-5, which only fp32 can meet; leave one of the two out")
    if options.zero and "data" not in options.topology.axes:
        parser.error(
            "--zero shards over the axis data, which --topology does not have; e.g. --topology data=2,tensor=2"
        )
    if options.batch_size % options.accumulate:
        parser.error(f"--accumulate {options.accumulate} does not divide --batch-size {options.batch_size}")
    return options


def main() -> None:
    options = parse_options()
    init_distributed()
    with ProcessGroupRegistry(options.topology) as registry:
        trainer = Trainer(options, registry)
        start = time.perf_counter()
        trainer.run()
        right = report(trainer, time.perf_counter() - start)
    dist.destroy_process_group()
    if not right:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
