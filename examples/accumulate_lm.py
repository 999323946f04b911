"""Gradient accumulation: a small GPT learns Python's documentation byte by byte, in one process or split over a mesh.

    python examples/accumulate_lm.py --accumulate 4
    torchrun --standalone --nproc-per-node 2 examples/accumulate_lm.py --accumulate 4 --topology tensor=2
    torchrun --standalone --nproc-per-node 2 examples/accumulate_lm.py --topology data=2
    torchrun --standalone --nproc-per-node 4 examples/accumulate_lm.py --accumulate 2 --topology data=2,tensor=2

A batch is cut into K micro-batches, on each data coordinate, which hold different numbers of tokens. Each gives the sum of
its losses with its number of tokens as weight, and the step uses the mean over all tokens: so the loss curve is the same
for every K and on every topology. The vocabulary is split over `tensor`: one table is embedding and classifier, and no
rank ever holds the logits of all bytes. The text, pydoc's topics, comes with Python.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from curve import Curve
from einops import rearrange
from meshstep.optim import CosineAnnealingLR, Monitor, ParallelOptimizer, Report
from meshstep.parallel import (
    ColumnParallelLinear,
    LayerNorm1D,
    P,
    ProcessGroupRegistry,
    RowParallelLinear,
    Topology,
    VocabParallelEmbedding,
    annotate,
    copy_to,
    gather_from,
    init_distributed,
    prepare_dataloader,
    reduce_from,
    vocab_parallel_cross_entropy,
)
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from tqdm import tqdm

VOCABULARY = 256  # all bytes; 0, which no text has, stands before and after each paragraph
CONTEXT = 64
TEST_PARAGRAPHS = 128
IGNORED = -100  # target where there is nothing to predict


class Attention(nn.Module):
    """Causal self-attention; each rank of `tensor` has some of the heads."""

    def __init__(self, width: int, heads: int, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        self.head_width = width // heads
        self.qkv = ColumnParallelLinear(width, 3 * width, registry, bias=False)
        self.out = RowParallelLinear(width, width, registry)

    def forward(self, x: Tensor) -> Tensor:
        # Heads are the slowest part of the features: a rank that has a slice of them has whole heads.
        pattern = "batch token (head part feature) -> part batch head token feature"
        q, k, v = rearrange(self.qkv(x), pattern, part=3, feature=self.head_width)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(rearrange(mixed, "batch head token feature -> batch token (head feature)"))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        self.norm1, self.attention = LayerNorm1D(width), Attention(width, heads, registry)
        self.norm2 = LayerNorm1D(width)
        self.up = ColumnParallelLinear(width, 4 * width, registry)
        self.down = RowParallelLinear(4 * width, width, registry)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Bytes [batch, token] -> logits of the next byte [batch, token, this rank's part of the vocabulary]."""

    def __init__(self, registry: ProcessGroupRegistry, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.registry = registry
        self.embed = VocabParallelEmbedding(VOCABULARY, width, registry)
        with torch.no_grad():
            self.embed.weight.mul_(width**-0.5)  # it is the classifier too, and the logits should start small
        self.positions = nn.Parameter(torch.randn(CONTEXT, width) * width**-0.5)
        annotate(self.positions, P())
        self.blocks = nn.ModuleList(Block(width, heads, registry) for _ in range(depth))
        self.norm = LayerNorm1D(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions[: ids.size(1)]
        for block in self.blocks:
            x = block(x)
        # Every rank goes on with classes of its own: copy_to sums what they say of x in the backward.
        return F.linear(copy_to(self.norm(x), self.registry, "tensor"), self.embed.weight)

    @torch.no_grad()
    def write(self, beginning: str, generator: torch.Generator, temperature: float = 0.6) -> str:
        """Continue a paragraph to its end, or to the end of the context. All ranks must call, with equal generators."""
        text = [0, *beginning.encode()]
        while len(text) < CONTEXT:
            logits = self(torch.tensor([text], device=self.registry.device))[0, -1]
            logits = gather_from(logits, self.registry, "tensor", dim=-1).float().cpu()
            byte = int(torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=generator))
            if byte == 0:
                break
            text.append(byte)
        return bytes(text[1:]).decode(errors="replace")


class Paragraphs(Dataset[Tensor]):
    """Of Python's documentation, in an order that is always the same: bytes [at most CONTEXT + 1], as integers."""

    def __init__(self, start: int, end: int | None) -> None:
        texts = [text.strip() for topic in topics.values() for text in topic.split("\n\n")]
        samples = [torch.tensor([0, *text.encode(), 0][: CONTEXT + 1]) for text in texts if len(text) >= 20]
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
        self.samples: list[Tensor] = [samples[index] for index in order[start:end]]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        return self.samples[index]


def collate(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Inputs and targets [batch, token], padded to the longest."""
    inputs = pad_sequence([sample[:-1] for sample in samples], batch_first=True)
    return inputs, pad_sequence([sample[1:] for sample in samples], batch_first=True, padding_value=IGNORED)


class Trainer:
    """Everything that one run needs; `train` is the loop."""

    def __init__(self, options: argparse.Namespace, registry: ProcessGroupRegistry) -> None:
        self.options, self.registry = options, registry
        train, test = Paragraphs(TEST_PARAGRAPHS, options.paragraphs), Paragraphs(0, TEST_PARAGRAPHS)
        coordinates = registry.topology.size(*registry.topology.data_axes)
        size = options.batch_size // (options.accumulate * coordinates)
        self.loader = prepare_dataloader(train, registry, size, shuffle=True, seed=options.seed, collate_fn=collate)
        self.test_loader = prepare_dataloader(test, registry, size, collate_fn=collate)
        torch.manual_seed(options.seed)
        self.model = GPT(registry, options.width, options.heads, options.depth).to(registry.device)
        adamw = torch.optim.AdamW(self.model.parameters(), lr=options.lr, weight_decay=0.05, fused=True)
        self.optimizer = ParallelOptimizer(
            adamw, registry, max_norm=options.max_norm, accumulation_steps=options.accumulate
        )
        self.steps = options.epochs * -(-len(self.loader) // options.accumulate)
        self.schedule = CosineAnnealingLR(self.optimizer, self.steps, warmup_steps=self.steps // 10)

    def train(self, bar: tqdm, report: Callable[[Report], object]) -> None:
        """All epochs; a report every step."""
        monitor = Monitor(self.registry, report, every=1, unit="tokens")
        for _ in range(self.options.epochs):
            for number, (inputs, targets) in enumerate(self.loader, start=1):
                loss_sum, tokens = self.loss_sum(inputs, targets)
                self.optimizer.backward(loss_sum, weight=tokens)
                # Steps with every K-th micro-batch, and with those that are left at the end of an epoch.
                stats = self.optimizer.step(last=number == len(self.loader))
                self.schedule.step()
                self.optimizer.zero_grad()
                monitor(stats, loss_sum.detach() / tokens, count=tokens)
                bar.update(stats is not None)

    def loss_sum(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        """The sum of the losses of a micro-batch, and over how many tokens."""
        tokens = int((targets != IGNORED).sum())
        logits = self.model(inputs.to(self.registry.device))
        targets = targets.to(self.registry.device)
        return vocab_parallel_cross_entropy(logits, targets, self.registry, reduction="sum"), tokens

    @torch.no_grad()
    def test(self) -> float:
        """The mean loss of the tokens in the test paragraphs."""
        total = torch.zeros(2, device=self.registry.device)
        for inputs, targets in self.test_loader:
            loss_sum, tokens = self.loss_sum(inputs, targets)
            total += torch.stack([loss_sum, torch.full_like(loss_sum, tokens)])
        if axes := self.registry.topology.data_axes:
            total = reduce_from(total, self.registry, *axes)
        return float(total[0] / total[1])


def run(options: argparse.Namespace, registry: ProcessGroupRegistry) -> None:
    """Test, train, test and write; with a progress bar and results on rank 0."""
    first = registry.global_rank == 0
    trainer = Trainer(options, registry)
    before, start = trainer.test(), time.perf_counter()
    with tqdm(total=trainer.steps, unit="step", disable=not first) as bar:
        curve = Curve(bar)
        trainer.train(bar, curve)
    seconds, after = time.perf_counter() - start, trainer.test()
    generator = torch.Generator().manual_seed(options.seed)
    samples = [trainer.model.write(beginning, generator) for beginning in ("The ", "If ", "A class ")]
    if not first:
        return
    print(f"{registry.topology!r}: {trainer.steps} steps of {options.accumulate} micro-batches in {seconds:.1f} s")
    print(f"test before:  loss {before:.4f}")
    print(f"test after:   loss {after:.4f}")
    print("\n-----\n".join(["it writes:", *samples]))
    if options.curve is not None:
        curve.write(options.curve)


def mesh(text: str) -> Topology:
    """A topology of data and tensor axes; the layers want a `tensor` axis, if only of size 1."""
    topology = Topology.parse(text)
    if unknown := set(topology.axes) - {"data", "tensor"}:
        raise argparse.ArgumentTypeError(f"no layers for {', '.join(sorted(unknown))}: give data, tensor, or both")
    return topology if "tensor" in topology.axes else Topology.parse(f"{text},tensor=1")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--topology",
        type=mesh,
        default=Topology(tensor=1),
        metavar="AXIS=SIZE,...",
        help="process axes data and tensor, slowest first; the sizes must multiply to the number of processes. data: "
        "every coordinate trains on its part of the batch; tensor: layers and vocabulary are split (default: none)",
    )
    add("--accumulate", type=int, default=1, metavar="K", help="micro-batches in a batch (default: %(default)s)")
    add("--epochs", type=int, default=4, help="times over the text (default: %(default)s)")
    add("--batch-size", type=int, default=32, help="paragraphs in a full batch (default: %(default)s)")
    add(
        "--paragraphs", type=int, metavar="N", help=f"use only N, {TEST_PARAGRAPHS} of them for the test (default: all)"
    )
    add("--lr", type=float, default=1e-2, help="peak learning rate (default: %(default)s)")
    add("--max-norm", type=float, default=1.0, help="clip the gradient norm to it (default: %(default)s)")
    add("--width", type=int, default=96, help="features between the layers (default: %(default)s)")
    add("--heads", type=int, default=4, help="of each attention layer (default: %(default)s)")
    add("--depth", type=int, default=2, help="attention layers (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights, batches and what it writes (default: %(default)s)")
    add("--curve", type=Path, metavar="FILE", help="write loss and gradient norm of each step there, as CSV")
    options = parser.parse_args()
    parts = options.accumulate * options.topology.size(*options.topology.data_axes)
    if options.batch_size % parts:
        parser.error(f"--batch-size {options.batch_size} must be a multiple of data coordinates times K, {parts}")
    return options


def main() -> None:
    options = parse_options()
    init_distributed()
    with ProcessGroupRegistry(options.topology) as registry:
        run(options, registry)


if __name__ == "__main__":
    main()
