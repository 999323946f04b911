"""Pipelines of torch.distributed.pipelining: a small GPT learns Python's documentation, in pipeline stages.

    python examples/pipeline_lm.py
    torchrun --standalone --nproc-per-node 2 examples/pipeline_lm.py --topology pipe=2 --schedule interleaved1f1b
    torchrun --standalone --nproc-per-node 4 examples/pipeline_lm.py --topology pipe=2,tensor=2 --schedule 1f1b
    torchrun --standalone --nproc-per-node 4 examples/pipeline_lm.py --topology data=2,pipe=2 --schedule zbv --zero 2

torch provides the schedule. One table is the embedding of the first stage and the classifier of the last stage. The two
stages are on two ranks, or on one rank (`zbv`, or `pipe=1`). A micro-batch passes the sum of its losses, and the step
uses the mean over all tokens. So the loss curve is the same for every schedule, number of micro-batches and topology.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accumulate_lm import IGNORED, TEST_PARAGRAPHS, Paragraphs
from command_line import (
    CommandLine,
    add_model_size,
    add_training_flags,
    check_training,
    data_parallel_asked,
    main,
    precision_asked,
    with_axes,
)
from einops import rearrange
from meshstep.optim import Booster, CosineAnnealingLR
from meshstep.parallel import (
    LayerNorm1D,
    P,
    ProcessGroupRegistry,
    Topology,
    VocabParallelEmbedding,
    annotate,
    copy_to,
    declare,
    prepare_dataloader,
    reduce_from,
    spec_of,
    unshard,
    vocab_parallel_cross_entropy,
)
from models.gpt import CONTEXT, VOCABULARY, Block
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from training import Run, check_verify, steps_asked, verdict

SCHEDULES: Mapping[str, tuple[Any, int]] = {  # the class of each schedule, and its number of stages per rank
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved1f1b": (ScheduleInterleaved1F1B, 2),
    "zbv": (ScheduleZBVZeroBubble, 2),
}


def collate(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets [batch, CONTEXT]; pipeline stages need a constant shape."""
    inputs = torch.zeros(len(samples), CONTEXT, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORED)
    for row, sample in enumerate(samples):
        inputs[row, : len(sample) - 1], targets[row, : len(sample) - 1] = sample[:-1], sample[1:]
    return inputs, targets


class Part(nn.Module):
    """The stages of this rank, with the parameter names of the full model.

    The same seed draws the same weights for every topology and schedule.

    Args:
        own: Indices of this rank's stages.
        stages: Total number of stages.
    Raises:
        ValueError: The layers do not divide over the stages.
    """

    def __init__(self, registry: ProcessGroupRegistry, own: Sequence[int], stages: int, options: argparse.Namespace):
        super().__init__()
        self.own, self.stages, self.registry = own, stages, registry
        if options.depth % stages:
            raise ValueError(
                f"--depth {options.depth} is not divisible by the number of stages, {stages}; give a multiple of {stages}"
            )
        width, is_first, is_last = options.width, 0 in own, stages - 1 in own
        torch.manual_seed(options.seed)
        if is_first or is_last:
            self.embed = VocabParallelEmbedding(VOCABULARY, width, registry)
            with torch.no_grad():
                self.embed.weight.mul_(width**-0.5)  # the table is the classifier too, whose logits should start small
            if not (is_first and is_last):
                annotate(self.embed.weight, P("tensor", None, tied={"pipe": (0, -1)}))
        if is_first:
            self.positions = nn.Parameter(torch.randn(CONTEXT, width) * width**-0.5)
            annotate(self.positions, P())
        self.blocks = nn.ModuleDict()
        for index in (index for stage in own for index in self.of_stage(stage, options.depth)):
            torch.manual_seed(options.seed + 1 + index)
            self.blocks[str(index)] = Block(width, options.heads, registry)
        if is_last:
            self.norm = LayerNorm1D(width)
        declare(self)  # names the parameters

    def of_stage(self, stage: int, depth: int) -> range:
        """Return the indices of the blocks in a stage."""
        each = depth // self.stages
        return range(stage * each, (stage + 1) * each)


class Stage(nn.Module):
    """One pipeline stage. The first stage maps bytes [batch, token] to features, other stages map features to features.

    The last stage maps features to logits of this rank's shard of the vocabulary.
    """

    def __init__(self, part: Part, stage: int, depth: int) -> None:
        super().__init__()
        self.registry, self.is_first, self.is_last = part.registry, stage == 0, stage == part.stages - 1
        if self.is_first or self.is_last:
            self.embed = part.embed
        if self.is_first:
            self.positions = part.positions
        self.blocks = nn.ModuleList(part.blocks[str(index)] for index in part.of_stage(stage, depth))
        if self.is_last:
            self.norm = part.norm

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.embed(x) + self.positions
        for block in self.blocks:
            x = block(x)
        if self.is_last:
            x = F.linear(copy_to(self.norm(x), self.registry, "tensor"), self.embed.weight)
        return x


def dense_gradient_norm(
    weights: Mapping[str, Tensor], batch: Sequence[tuple[Tensor, Tensor]], heads: int, depth: int
) -> float:
    """Return the gradient norm of the mean loss of a batch, computed in plain torch in the dtype of the weights."""
    p = {name: weight.requires_grad_() for name, weight in weights.items()}
    inputs, targets = (torch.cat(parts) for parts in zip(*batch, strict=True))
    x = p["embed.weight"][inputs] + p["positions"]
    for index in range(depth):
        b = {name.removeprefix(f"blocks.{index}."): weight for name, weight in p.items()}
        y = F.layer_norm(x, x.shape[-1:], b["norm1.weight"], b["norm1.bias"])
        qkv = rearrange(
            F.linear(y, b["attention.qkv.weight"]),
            "batch token (head part feature) -> part batch head token feature",
            head=heads,
            part=3,
        )
        y = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        y = rearrange(y, "batch head token feature -> batch token (head feature)")
        x = x + F.linear(y, b["attention.out.weight"], b["attention.out.bias"])
        y = F.layer_norm(x, x.shape[-1:], b["norm2.weight"], b["norm2.bias"])
        y = F.gelu(F.linear(y, b["up.weight"], b["up.bias"]))
        x = x + F.linear(y, b["down.weight"], b["down.bias"])
    logits = F.linear(F.layer_norm(x, x.shape[-1:], p["norm.weight"], p["norm.bias"]), p["embed.weight"])
    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED).backward()
    gradients = [weight.grad for weight in p.values() if weight.grad is not None]
    return float(nn.utils.get_total_norm(gradients))


class Trainer:
    """Model, data and optimizer of one run; `train` is the loop.

    Raises:
        ValueError: The sizes of the topology do not divide the model's sizes, or a checkpoint does not fit.
    """

    def __init__(self, options: argparse.Namespace, registry: ProcessGroupRegistry) -> None:
        self.options, self.registry = options, registry
        topology = registry.topology
        train, test = Paragraphs(TEST_PARAGRAPHS, options.paragraphs), Paragraphs(0, TEST_PARAGRAPHS)
        size = options.batch_size // topology.size(*topology.data_axes)
        # drop_last, because a pipeline needs micro-batches of equal size.
        self.loader = prepare_dataloader(
            train, registry, size, shuffle=True, drop_last=True, seed=options.seed, collate_fn=collate
        )
        self.test_loader = prepare_dataloader(test, registry, size, drop_last=True, collate_fn=collate)
        kind, per_rank = SCHEDULES[options.schedule]
        stages = per_rank * registry.size("pipe")
        self.part = Part(registry, own_stages(options.schedule, registry), stages, options)
        made = [
            PipelineStage(
                Stage(self.part, stage, options.depth).to(registry.device),
                stage,
                stages,
                registry.device,
                group=registry.group("pipe"),
            )
            for stage in self.part.own
        ]
        # scale_grads=False: the loss is a sum, which the step divides by the number of tokens. By default, torch divides
        # by the number of micro-batches.
        schedule = kind(made if per_rank > 1 else made[0], options.accumulate, loss_fn=self.loss_sum, scale_grads=False)
        adamw = torch.optim.AdamW(self.part.parameters(), lr=options.lr, weight_decay=0.05, fused=True)
        self.booster = booster = Booster(
            precision_asked(options), registry, data_parallel_asked(options), max_norm=options.max_norm
        )
        steps = steps_asked(options, len(self.loader))
        rates = CosineAnnealingLR(adamw, steps, warmup_steps=steps // 10)
        self.pipeline, self.optimizer, _, _, self.rates = booster.boost(schedule, adamw, lr_scheduler=rates)
        boosted = self.part, self.optimizer, self.rates
        self.run = Run(options, booster, *boosted, steps=steps, every=1, unit="tokens")
        self.differences: list[float] = []  # relative differences from the norms of the dense model, with --verify

    def train(self) -> None:
        """Run all remaining steps."""
        for inputs, targets in self.run.batches(self.loader):
            tokens = int((targets != IGNORED).sum())
            expected = self.dense_norm(inputs, targets) if self.options.verify else None
            loss_sum = self.pipeline.backward(*self.placed(inputs), target=self.placed(targets)[0], weight=tokens)
            stats = self.optimizer.step()
            self.rates.step()
            self.optimizer.zero_grad()
            if expected is not None:
                self.differences.append(abs(float(stats.total_norm) / expected - 1))
            self.run.note(stats, None if loss_sum is None else loss_sum / tokens, count=tokens)

    def dense_norm(self, inputs: Tensor, targets: Tensor) -> float | None:
        """Return the gradient norm of the full model for the full batch, in float64 from gathered weights, on rank 0.

        Return None on other ranks.
        """
        registry = self.registry
        own = {name: unshard(param.detach(), spec_of(param), registry) for name, param in self.part.named_parameters()}
        place = [registry.coordinate[axis] for axis in registry.topology.data_axes]
        everybody: list[Any] | None = [None] * registry.topology.world_size if registry.global_rank == 0 else None
        dist.gather_object((place, inputs, targets, {name: value.cpu() for name, value in own.items()}), everybody)
        if everybody is None:
            return None
        weights = {name: value.double() for *_, of_rank in everybody for name, value in of_rank.items()}
        # One entry per data coordinate: ranks with the same coordinate have the same batch.
        batch = {tuple(place): (inputs, targets) for place, inputs, targets, _ in everybody}
        return dense_gradient_norm(weights, list(batch.values()), self.options.heads, self.options.depth)

    def placed(self, *tensors: Tensor) -> list[Tensor]:
        """Return the tensors on this rank's device."""
        return [tensor.to(self.registry.device) for tensor in tensors]

    def loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses of a micro-batch."""
        return vocab_parallel_cross_entropy(logits, targets, self.registry, reduction="sum")

    def test(self) -> float:
        """Return the mean loss of the tokens in the test paragraphs."""
        total = torch.zeros(2, device=self.registry.device)
        for inputs, targets in self.test_loader:
            loss_sum = self.pipeline.evaluate(*self.placed(inputs), target=self.placed(targets)[0])
            if loss_sum is not None:  # one pipeline rank has the loss
                total += torch.stack([loss_sum, (targets != IGNORED).sum().to(loss_sum)])
        total = reduce_from(total, self.registry, *self.registry.topology.data_axes, "pipe")
        return float(total[0] / total[1])


def own_stages(schedule: str, registry: ProcessGroupRegistry) -> list[int]:
    """Return the indices of this rank's stages: one stage, or two.

    With ``zbv`` the second stages are in reversed order, so the first rank has the first and the last stage.
    """
    rank, ranks = registry.rank("pipe"), registry.size("pipe")
    if SCHEDULES[schedule][1] == 1:
        return [rank]
    return [rank, 2 * ranks - 1 - rank if schedule == "zbv" else rank + ranks]


def run(trainer: Trainer) -> None:
    """Test, train and test, with results on rank 0. Exit with status 1 if ``--verify`` finds wrong norms."""
    before = trainer.test()
    trainer.train()
    after, steps = trainer.test(), trainer.run
    if not steps.is_first:
        return
    options = trainer.options
    how = f"{trainer.registry.topology!r}, {options.schedule}, {options.precision}"
    print(f"{how}: {steps.done} steps of {options.accumulate} micro-batches in {steps.seconds:.1f} s")
    print(f"test before:  loss {before:.4f}")
    print(f"test after:   loss {after:.4f}")
    steps.write()
    if options.verify:
        said, right = verdict(trainer.differences)
        print(f"verify:       {said}")
        if not right:
            raise SystemExit(1)


def read_options(processes: int, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ValueError: A flag is wrong.
    """
    parser = CommandLine(
        __doc__,
        "pipe: divides the layers into stages; tensor: shards layers and vocabulary; data: shards the batch",
    )
    add_training_flags(parser, batch_size=32, lr=1e-2, epochs=2, accumulate=4)
    add = parser.add_argument
    add("--schedule", choices=SCHEDULES, default="1f1b", help="pipeline schedule of torch (default: %(default)s)")
    few = f"use only N paragraphs, {TEST_PARAGRAPHS} of them for the test (default: all)"
    add("--paragraphs", type=int, metavar="N", help=few)
    add_model_size(parser, width=96, depth=4)
    add("--verify", action="store_true", help="compare every norm with that of the dense model in float64")
    options = parser.read(processes, arguments)
    check_training(options)
    topology: Topology = with_axes(options.topology, "pipe", "tensor")
    options.topology = topology
    check_verify(options)
    if TEST_PARAGRAPHS % options.batch_size:
        raise ValueError(
            f"--batch-size {options.batch_size} must divide {TEST_PARAGRAPHS}, the number of test paragraphs"
        )
    strange = [axis for axis in topology.axes if axis not in (*topology.data_axes, "pipe", "tensor")]
    if strange:
        raise ValueError(
            f"--topology has {', '.join(strange)}, over which this script can't shard layers: use only data, pipe "
            "and tensor"
        )
    return options


if __name__ == "__main__":
    main(read_options, Trainer, run)
