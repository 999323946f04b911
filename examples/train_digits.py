"""Train a small transformer on scikit-learn's handwritten digits, in one process or sharded over a mesh of processes.

    python examples/train_digits.py
    torchrun --standalone --nproc-per-node 4 examples/train_digits.py --topology row=2,col=2 --verify
    torchrun --standalone --nproc-per-node 4 examples/train_digits.py --topology tensor=4
    torchrun --standalone --nproc-per-node 4 examples/train_digits.py --topology data=2,tensor=2
    torchrun --standalone --nproc-per-node 8 examples/train_digits.py --topology depth=2,row=2,col=2
    torchrun --standalone --nproc-per-node 8 examples/train_digits.py --topology input=2,weight=2,output=2
    torchrun --standalone --nproc-per-node 2 examples/train_digits.py --topology tensor=2 --precision bf16 --accumulate 4
    torchrun --standalone --nproc-per-node 4 examples/train_digits.py --topology data=4 --micro-batches 8

The seed determines the full weights and the batches; the topology only determines which shards a rank holds. So the same
seed gives the same loss curve on every topology. The model is in models/.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from command_line import (
    SPLIT_THE_BATCH,
    CommandLine,
    add_micro_batches,
    add_model_size,
    add_training_flags,
    check_training,
    data_parallel_asked,
    main,
    precision_asked,
    take_micro_batches,
)
from cuda_graph import GraphedStep
from einops import rearrange
from meshstep.optim import Booster, newest_checkpoint
from meshstep.parallel import P, ProcessGroupRegistry, reduce_from, shard
from models.digits import DenseReference, DigitsTransformer, full_parameters
from models.layers import DenseLayers, layers_for
from optimizer_flag import add_optimizer, optimizer_of
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import tqdm
from training import LARGEST_DIFFERENCE, check_verify, read_csv, title_of, verdict, write_csv, write_plot

TEST_SAMPLES = 360


class Samples(NamedTuple):
    """Patches [sample, token, pixel] in -1..1, and labels [sample]."""

    patches: Tensor
    labels: Tensor

    def chunk(self, count: int) -> list[Samples]:
        """Return the samples in ``count`` equal parts."""
        parts = zip(self.patches.chunk(count), self.labels.chunk(count), strict=True)
        return [Samples(*part) for part in parts]


def load_samples(device: torch.device, dtype: torch.dtype) -> tuple[Samples, Samples]:
    """Return the training samples and the test samples. The split is the same in every run."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).to(dtype) / 8 - 1
    patches = rearrange(images, "n (row p) (col q) -> n (row col) (p q)", p=2, q=2).to(device)
    labels = torch.from_numpy(digits.target).to(device)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).to(device)
    test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
    return Samples(patches[train], labels[train]), Samples(patches[test], labels[test])


def batch_at(step: int, samples: Samples, batch_size: int, seed: int) -> Samples:
    """Return the full batch of a step, the same on every rank. Each epoch has another order."""
    epoch, index = divmod(step, len(samples.labels) // batch_size)
    generator = torch.Generator().manual_seed(1000 * seed + epoch)
    order = torch.randperm(len(samples.labels), generator=generator)
    chosen = order[index * batch_size : (index + 1) * batch_size].to(samples.labels.device)
    return Samples(samples.patches[chosen], samples.labels[chosen])


class Split:
    """Sharding of a batch over the data axes, and over the model axes of the layers."""

    def __init__(self, layers: DenseLayers, registry: ProcessGroupRegistry) -> None:
        self.registry = registry
        self.batch_axes = (*registry.topology.data_axes, *layers.batch_axes)
        batch_axes, feature_axes = layers.input_axes
        self.patch_spec = P((*registry.topology.data_axes, *batch_axes), None, feature_axes)
        self.label_spec = P(self.batch_axes)
        parts = registry.topology.size(*self.batch_axes)
        if TEST_SAMPLES % parts:
            raise ValueError(
                f"the {TEST_SAMPLES} test samples don't divide over {' x '.join(self.batch_axes)}={parts}; choose sizes "
                f"whose product divides {TEST_SAMPLES}"
            )

    def local(self, batch: Samples) -> Samples:
        """Return this rank's shard of a full batch."""
        patches = shard(batch.patches, self.patch_spec, self.registry)
        return Samples(patches, shard(batch.labels, self.label_spec, self.registry))

    def micro_batches(self, batch: Samples, total: int) -> list[Samples]:
        """Return this rank's micro-batches. All data ranks together have ``total`` of them, in the order of the ranks."""
        data_axes = self.registry.topology.data_axes
        per_rank = total // self.registry.topology.size(*data_axes)
        first = per_rank * self.registry.rank(*data_axes) if data_axes else 0
        return batch.chunk(total)[first : first + per_rank]

    def mean(self, local: Tensor) -> Tensor:
        """Return the mean over the full batch, from the mean over each rank's shard."""
        if not self.batch_axes:
            return local
        return reduce_from(local, self.registry, *self.batch_axes) / self.registry.size(*self.batch_axes)


class Trainer:
    """Model, optimizer and schedule of one run, and a record of its steps.

    Raises:
        ValueError: No layers support the axes of the topology, its sizes do not divide the test samples or the sizes of
            the model, a checkpoint does not fit, or a flag needs a GPU or another optimizer.
    """

    dtype = torch.float32

    def __init__(self, options: argparse.Namespace, registry: ProcessGroupRegistry) -> None:
        self.options, self.registry = options, registry
        if options.micro_batches is not None:
            torch.set_num_threads(1)  # matrix products on a CPU round differently with another number of threads
        self.layers = layers_for(registry)
        self.size = options.width, options.heads, options.depth
        self.split = Split(self.layers, registry)
        self.train_samples, self.test_samples = load_samples(registry.device, self.dtype)
        torch.manual_seed(options.seed)
        # Without master weights, the second moments of Adam are float16, so most squares and eps=1e-8 underflow to 0.
        eps = {"eps": 1e-3} if options.precision == "O3" else {}
        model = self.make_model().to(self.dtype)
        # A CUDA graph reads the learning rate from a tensor, which the schedule overwrites.
        lr = torch.tensor(options.lr, device=registry.device) if options.cuda_graph else options.lr
        inner = optimizer_of(options.optimizer, model.named_parameters(), lr, **eps)
        peaks = [float(group["lr"]) for group in inner.param_groups]
        schedule = torch.optim.lr_scheduler.OneCycleLR(inner, peaks, total_steps=options.steps, cycle_momentum=False)
        self.booster = Booster(
            precision_asked(options),
            registry,
            data_parallel_asked(options),
            max_norm=options.max_norm,
            accumulation_steps=options.accumulate,
            sum_order="any" if options.micro_batches is None else "fixed",
        )
        self.model, self.optimizer, self.loss, _, self.schedule = self.booster.boost(
            model, inner, self.layers.loss, lr_scheduler=schedule
        )
        self.train: Callable[..., Sequence[Tensor]] = GraphedStep(self.update) if options.cuda_graph else self.update
        self.reference = self.make_reference() if options.verify else None
        self.history: list[Tensor] = []  # loss, accuracy, gradient norm and clip coefficient of each step
        self.differences: list[float] = []
        if options.resume is not None and newest_checkpoint(options.resume) is not None:
            of_this_run = self.schedule.state_dict()
            saved = self.booster.load(options.resume, self.model, self.optimizer, self.schedule)
            self.history = list(saved["history"].to(registry.device))
            self.keep_length(of_this_run)

    def keep_length(self, of_this_run: dict[str, Any]) -> None:
        """Set the length of the loaded schedule to the length of this run. The saved run may have had another length.

        The first step of this run still uses the saved learning rate.
        """
        loaded = self.schedule.state_dict()
        if loaded["total_steps"] != of_this_run["total_steps"]:
            place = {key: loaded[key] for key in ("last_epoch", "_step_count", "_last_lr")}
            self.schedule.load_state_dict({**of_this_run, **place})

    def make_model(self) -> nn.Module:
        """Return this rank's shard of the model."""
        return DigitsTransformer(self.layers, *self.size)

    def make_reference(self) -> DenseReference:
        """Return the dense reference for the gradient norm."""
        return DenseReference(
            DigitsTransformer(DenseLayers(), *self.size),
            lambda model, patches, labels: F.cross_entropy(model(patches), labels),
        )

    def run(self) -> None:
        """Run all remaining steps, with a progress bar on rank 0."""
        start, last = len(self.history), self.options.steps
        steps = tqdm(range(start, last), unit="step", initial=start, total=last, disable=self.registry.global_rank != 0)
        for step in steps:
            self.step(batch_at(step, self.train_samples, self.options.batch_size, self.options.seed))
            # Reading numbers synchronizes the host, so they are not read in every step.
            if step % 10 == 9 or step == self.options.steps - 1:
                loss, accuracy, norm, _ = self.history[-1].tolist()
                self.optimizer.poll()
                steps.set_postfix_str(f"loss {loss:.4f}, gradient norm {norm:.3f}, accuracy {accuracy:.0%}")
            if self.options.resume is not None and (step + 1) % self.options.save_every == 0:
                record = {"history": torch.stack(self.history)}
                self.booster.save(self.options.resume, self.model, self.optimizer, self.schedule, extra=record)

    def step(self, batch: Samples) -> None:
        """Make one training step on a full batch."""
        expected = self.dense_norm(batch) if self.reference is not None else None
        means, norm, clip_coef = self.train(*batch)
        self.schedule.step()
        self.history.append(torch.cat([means.to(norm), torch.stack([norm, clip_coef])]))
        if expected is not None:
            self.differences.append(abs(float(norm) / expected - 1))

    def update(self, patches: Tensor, labels: Tensor) -> Sequence[Tensor]:
        """Run all micro-batches of a batch, and the step.

        Return (mean loss and accuracy [2], gradient norm, clip coefficient).
        """
        self.optimizer.zero_grad()
        batch, measured = Samples(patches, labels), []
        if self.options.micro_batches is None:
            shards = [self.split.local(part) for part in batch.chunk(self.options.accumulate)]
        else:
            shards = self.split.micro_batches(batch, self.options.micro_batches)
        for local in shards:
            loss, accuracy = self.forward(local)
            self.booster.backward(loss, self.optimizer)
            measured.append(torch.stack([loss.detach(), accuracy]))
        stats = self.optimizer.step()
        assert stats is not None  # this is the last micro-batch of the accumulation window
        return self.split.mean(torch.stack(measured).mean(0)), stats.total_norm, stats.clip_coef

    def forward(self, local: Samples) -> tuple[Tensor, Tensor]:
        """Return loss and accuracy of this rank's samples."""
        patches, labels = local
        logits = self.model(patches)
        correct = self.layers.all_classes(logits.detach()).argmax(-1) == labels
        return self.loss(logits, labels).to(self.dtype), correct.to(self.dtype).mean()

    def dense_norm(self, batch: Samples) -> float | None:
        """Return the gradient norm of the dense model on rank 0; None on other ranks."""
        parameters = full_parameters(self.model, self.registry)
        if parameters is None or self.reference is None:
            return None
        return self.reference.gradient_norm(parameters, *batch)

    def remarks(self) -> list[str]:
        """Return additional lines of the report."""
        return []

    @torch.no_grad()
    def test(self) -> tuple[float, float]:
        """Return loss and accuracy on the test samples."""
        loss, accuracy = self.split.mean(torch.stack(self.forward(self.split.local(self.test_samples)))).tolist()
        return loss, accuracy


def report(trainer: Trainer, seconds: float) -> bool:
    """Print the results on rank 0. Return False on rank 0 if ``--verify`` found wrong norms, else True."""
    test_loss, test_accuracy = trainer.test()
    state_hash = trainer.optimizer.state_hash()  # a collective: every rank must call it
    if trainer.registry.global_rank != 0:
        return True
    options, history = trainer.options, torch.stack(trainer.history).cpu()
    if options.curve is not None:
        write_csv(options.curve, "loss,accuracy,norm,clip_coef", history.tolist())
    if options.plot is not None:
        rows = [(step, row[0], row[2]) for step, row in enumerate(history.tolist(), start=1)]
        other = [] if options.beside is None else read_csv(options.beside)
        beside = [(step, row[0], row[2]) for step, row in enumerate(other, start=1)]
        write_plot(options.plot, title_of(options), rows, beside)
    clipped = int((history[:, 3] < 1).sum())
    print(f"{trainer.registry.topology!r}: {len(history)} steps in {seconds:.1f} s, {clipped} of them clipped")
    print(f"last batch:  loss {history[-1, 0]:.6f}, gradient norm {history[-1, 2]:.6f}")
    print(f"test:        loss {test_loss:.6f}, accuracy {test_accuracy:.2%}")
    if options.micro_batches is not None:
        print(f"state hash:  {state_hash:016x}, the same on any number of data ranks")
    for line in trainer.remarks():
        print(line)
    if not options.verify:
        return True
    said, right = verdict(trainer.differences)
    print(f"verify:      {said}, {LARGEST_DIFFERENCE:.0e} is allowed")
    return right


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
    add_training_flags(parser, batch_size=64, lr=3e-3, steps=200)
    add_model_size(parser, width=64)
    parser.add_argument(
        "--verify",
        action="store_true",
        help=f"compare the gradient norm of every step with that of the dense model in float64; "
        f"exit with 1 if the relative difference exceeds {LARGEST_DIFFERENCE:.0e}",
    )
    add_micro_batches(parser)
    replay = "capture the fourth step in a CUDA graph, and replay it in all later steps; needs a GPU"
    add_optimizer(parser)
    parser.add_argument("--cuda-graph", action="store_true", help=replay)
    options = parser.read(processes, arguments)
    take_micro_batches(options)
    if options.micro_batches is not None and any(axis in SPLIT_THE_BATCH for axis in options.topology.axes):
        raise ValueError(
            "--micro-batches does not support 2-D, 2.5-D and 3-D layers, which shard the batch: give only the axes data "
            "and tensor in --topology"
        )
    check_training(options)
    check_verify(options)
    return options


def run(trainer: Trainer) -> None:
    """Train and report; exit with status 1 if ``--verify`` finds wrong norms."""
    start = time.perf_counter()
    trainer.run()
    if not report(trainer, time.perf_counter() - start):
        raise SystemExit(1)


if __name__ == "__main__":
    main(read_options, Trainer, run)
