"""Gradient accumulation: a small GPT learns Python's documentation byte by byte, in one process or sharded over a mesh.

    python examples/accumulate_lm.py --accumulate 4
    torchrun --standalone --nproc-per-node 2 examples/accumulate_lm.py --accumulate 4 --topology tensor=2
    torchrun --standalone --nproc-per-node 2 examples/accumulate_lm.py --topology data=2
    torchrun --standalone --nproc-per-node 4 examples/accumulate_lm.py --accumulate 2 --topology data=2,tensor=2
    torchrun --standalone --nproc-per-node 4 examples/accumulate_lm.py --topology data=2,cp=2
    torchrun --standalone --nproc-per-node 2 examples/accumulate_lm.py --topology data=2 --micro-batches 8

On each data rank, `--accumulate K` divides a batch into K micro-batches with different numbers of tokens. Each
micro-batch passes the sum of its losses with its number of tokens as weight, and the step uses the mean over all
tokens. So the loss curve is the same for every K and topology. The vocabulary is sharded over `tensor`: one table is
embedding and classifier, and a rank computes the logits of its bytes only. Paragraphs are sharded over `cp`; within
attention, heads are sharded instead. The text is the topics of pydoc, which come with Python.

With `--micro-batches N` the batch of all data ranks has N micro-batches, whose gradients are summed in an order that does
not depend on the number of data ranks. The printed hash of the state is then the same for each number that divides N.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pydoc_data.topics import topics

import torch
from command_line import (
    CommandLine,
    add_micro_batches,
    add_model_size,
    add_training_flags,
    check_training,
    data_parallel_asked,
    main,
    precision_asked,
    take_micro_batches,
    with_axes,
)
from meshstep.optim import Booster, CosineAnnealingLR
from meshstep.parallel import (
    ProcessGroupRegistry,
    Topology,
    prepare_dataloader,
    reduce_from,
    vocab_parallel_cross_entropy,
)
from models.gpt import CONTEXT, GPT
from optimizer_flag import add_optimizer, optimizer_of
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from training import Run, steps_asked

TEST_PARAGRAPHS = 128
IGNORED = -100  # target of padding


class Paragraphs(Dataset[Tensor]):
    """Paragraphs of Python's documentation in a fixed order. A sample has up to CONTEXT + 1 bytes, as integers."""

    def __init__(self, start: int, end: int | None) -> None:
        texts = [text.strip() for topic in topics.values() for text in topic.split("\n\n")]
        texts = [text for text in texts if len(text) >= 20]
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
        chosen = [texts[index].encode() for index in order[start:end]]
        self.samples = [torch.tensor([0, *text, 0][: CONTEXT + 1]) for text in chosen]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        return self.samples[index]


def collate(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets [batch, token], padded to the longest sample."""
    inputs = pad_sequence([sample[:-1] for sample in samples], batch_first=True)
    return inputs, pad_sequence([sample[1:] for sample in samples], batch_first=True, padding_value=IGNORED)


def collate_parts(samples: list[Tensor], parts: int) -> list[tuple[Tensor, Tensor]]:
    """Return the micro-batches of a batch, each padded to its longest sample."""
    size = -(-len(samples) // parts)
    return [collate(samples[start : start + size]) for start in range(0, len(samples), size)]


class Trainer:
    """Model, data and optimizer of one run; `train` is the loop.

    Raises:
        ValueError: The topology has an axis other than data, cp and tensor, its sizes do not divide the model's sizes,
            or a checkpoint does not fit.
    """

    def __init__(self, options: argparse.Namespace, registry: ProcessGroupRegistry) -> None:
        self.options, self.registry = options, registry
        train, test = Paragraphs(TEST_PARAGRAPHS, options.paragraphs), Paragraphs(0, TEST_PARAGRAPHS)
        coordinates = registry.topology.size(*registry.topology.sample_axes)
        size = options.batch_size // (options.accumulate * coordinates)
        is_fixed = options.micro_batches is not None
        if is_fixed:
            torch.set_num_threads(1)  # matrix products on a CPU round differently with another number of threads
        # For the fixed order of the sum, a rank needs consecutive micro-batches: the parts of one batch of the loader.
        parts = options.accumulate if is_fixed else 1
        self.per_step: int = options.accumulate // parts
        self.loader = prepare_dataloader(
            train,
            registry,
            size * parts,
            shuffle=True,
            drop_last=is_fixed,
            seed=options.seed,
            collate_fn=partial(collate_parts, parts=parts),
        )
        self.test_loader = prepare_dataloader(test, registry, size, collate_fn=collate)
        torch.manual_seed(options.seed)
        self.gpt = GPT(registry, options.width, options.heads, options.depth)
        inner = optimizer_of(options.optimizer, self.gpt.named_parameters(), options.lr)
        self.booster = booster = Booster(
            precision_asked(options),
            registry,
            data_parallel_asked(options),
            max_norm=options.max_norm,
            accumulation_steps=options.accumulate,
            sum_order="fixed" if is_fixed else "any",
        )
        steps = steps_asked(options, -(-len(self.loader) // self.per_step))
        schedule = CosineAnnealingLR(inner, steps, warmup_steps=steps // 10)
        self.model, self.optimizer, _, _, self.schedule = booster.boost(self.gpt, inner, lr_scheduler=schedule)
        boosted = self.model, self.optimizer, self.schedule
        self.run = Run(options, booster, *boosted, steps=steps, every=1, unit="tokens")

    def train(self) -> None:
        """Run all remaining steps."""
        for parts in self.run.batches(self.loader, per_step=self.per_step):
            for inputs, targets in parts:
                loss_sum, tokens = self.loss_sum(inputs, targets)
                self.booster.backward(loss_sum, self.optimizer, weight=tokens)
                # `step` acts after every K-th micro-batch, and with `final=True`, at the end of an epoch.
                ends_epoch = self.per_step > 1 and self.loader.state_dict()["position"] == 0
                stats = self.optimizer.step(final=ends_epoch)
                self.schedule.step()
                self.optimizer.zero_grad()
                self.run.note(stats, loss_sum.detach() / tokens, count=tokens)

    def loss_sum(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        """Return the sum of the losses of this rank's tokens of a micro-batch, and the number of these tokens."""
        targets = self.gpt.sequence.own(targets, 1)
        tokens = int((targets != IGNORED).sum())
        logits = self.model(inputs.to(self.registry.device))
        targets = targets.to(self.registry.device)
        return vocab_parallel_cross_entropy(logits, targets, self.registry, reduction="sum"), tokens

    @torch.no_grad()
    def test(self) -> float:
        """Return the mean loss of the tokens in the test paragraphs."""
        total = torch.zeros(2, device=self.registry.device)
        for inputs, targets in self.test_loader:
            loss_sum, tokens = self.loss_sum(inputs, targets)
            total += torch.stack([loss_sum, torch.full_like(loss_sum, tokens)])
        if axes := self.registry.topology.data_axes:
            total = reduce_from(total, self.registry, *axes)
        return float(total[0] / total[1])


def run(trainer: Trainer) -> None:
    """Test, train, test, and write text, with a progress bar and results on rank 0."""
    before = trainer.test()
    trainer.train()
    after, steps = trainer.test(), trainer.run
    state_hash = trainer.optimizer.state_hash()  # a collective: every rank must call it
    generator = torch.Generator().manual_seed(trainer.options.seed)
    samples = [trainer.gpt.write(beginning, generator) for beginning in ("The ", "If ", "A class ")]
    if not steps.is_first:
        return
    how = f"{trainer.registry.topology!r}, {trainer.options.precision}"
    print(f"{how}: {steps.done} steps of {trainer.options.accumulate} micro-batches in {steps.seconds:.1f} s")
    print(f"test before:  loss {before:.4f}")
    print(f"test after:   loss {after:.4f}")
    if trainer.options.micro_batches is not None:
        print(f"state hash:   {state_hash:016x}, the same on any number of data ranks")
    print("\n-----\n".join(["it writes:", *samples]))
    steps.write()


def read_options(processes: int, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ValueError: A flag is wrong.
    """
    parser = CommandLine(
        __doc__,
        "data: shards the batch; cp: shards the paragraphs; tensor: shards layers and vocabulary",
    )
    add_training_flags(parser, batch_size=32, lr=1e-2, epochs=4)
    add_optimizer(parser)
    add = parser.add_argument
    few = f"use only N paragraphs, {TEST_PARAGRAPHS} of them for the test (default: all)"
    add("--paragraphs", type=int, metavar="N", help=few)
    add_micro_batches(parser)
    add_model_size(parser, width=96)
    options = parser.read(processes, arguments)
    topology: Topology = options.topology
    take_micro_batches(options)
    if options.micro_batches is not None and topology.data_axes != topology.sample_axes:
        raise ValueError(
            "--micro-batches does not support the axis cp, which divides paragraphs: leave out --micro-batches or the axis"
        )
    check_training(options, topology.sample_axes)
    options.topology = with_axes(topology, "tensor")
    return options


if __name__ == "__main__":
    main(read_options, Trainer, run)
