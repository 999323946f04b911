"""A model of embedding, four blocks and classifier, as stages of each of torch's `SCHEDULES`, and as one dense function
in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from fully_sharded import Full, whole
from meshstep.parallel import (
    ColumnParallelLinear,
    P,
    ProcessGroupRegistry,
    RowParallelLinear,
    Topology,
    annotate,
)
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

VOCAB, WIDTH, HIDDEN, BLOCKS = 13, 8, 12, 4
MICRO_BATCHES, ROWS, TOKENS = 4, 8, 5

Kind = Literal["gpipe", "1f1b", "interleaved 1f1b", "interleaved zero bubble", "zbv"]
SCHEDULES: dict[Kind, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved 1f1b": ScheduleInterleaved1F1B,
    "interleaved zero bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
# torch 2.11's ScheduleZBVZeroBubble loses its gloo connections even with two plain linear stages.
ZBV_RUNS = not torch.__version__.startswith("2.11.")
if not ZBV_RUNS:
    del SCHEDULES["zbv"]
TWO: list[Kind] = ["1f1b", "zbv" if ZBV_RUNS else "interleaved zero bubble"]


@dataclass(frozen=True)
class Piped:
    """A schedule over the mesh's axis ``pipe``, and whether the classifier is tied to the embedding."""

    kind: Kind
    tied: bool
    axes: tuple[tuple[str, int], ...] = (("pipe", 2),)

    @property
    def topology(self) -> Topology:
        return Topology(roles=None, **{**dict(self.axes), "tensor": dict(self.axes).get("tensor", 1)})

    @property
    def stages(self) -> int:
        return dict(self.axes)["pipe"] * (1 if self.kind in ("gpipe", "1f1b") else 2)

    def own(self, rank: int) -> list[int]:
        pipe = dict(self.axes)["pipe"]
        if self.stages == pipe:
            return [rank]
        return [rank, self.stages - 1 - rank] if self.kind == "zbv" else [rank, rank + pipe]


def dense_weights(dtype: torch.dtype = torch.float64) -> Full:
    """Return the full weights of the untied model. Embedding and classifier start with equal values."""
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator) * 0.4

    weights = {"table": normal(VOCAB, WIDTH)}
    weights["head"] = weights["table"].clone()
    for index in range(BLOCKS):
        weights[f"blocks.{index}.up.weight"], weights[f"blocks.{index}.up.bias"] = normal(HIDDEN, WIDTH), normal(HIDDEN)
        weights[f"blocks.{index}.down.weight"], weights[f"blocks.{index}.down.bias"] = (
            normal(WIDTH, HIDDEN),
            normal(WIDTH),
        )
    return {name: weight.to(dtype) for name, weight in weights.items()}


def dense_logits(p: Full, ids: Tensor) -> Tensor:
    """Return the logits; the classifier is the embedding's table if there is no head."""
    x = p["table"][ids]
    for index in range(BLOCKS):
        name = f"blocks.{index}."
        up = torch.tanh(F.linear(x, p[name + "up.weight"], p[name + "up.bias"]))
        x = x + F.linear(up, p[name + "down.weight"], p[name + "down.bias"])
    return F.linear(x, p.get("head", p["table"]))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(step: int, data_ranks: int = 1) -> tuple[Tensor, Tensor]:
    """Return inputs and targets [row, token], for all data ranks together."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (ROWS * data_ranks, TOKENS + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class Block(nn.Module):
    """x + down(tanh(up(x))), sharded over ``tensor``."""

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, HIDDEN, registry)
        self.down = RowParallelLinear(HIDDEN, WIDTH, registry)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return x + y


class Part(nn.Module):
    """This rank's part of the model, with the full model's parameter names; its stages are `Chunk` objects."""

    def __init__(self, piped: Piped, registry: ProcessGroupRegistry) -> None:
        from meshstep.parallel import shard, spec_of

        super().__init__()
        self.own = piped.own(registry.coordinate["pipe"])
        first, last, dense = 0 in self.own, piped.stages - 1 in self.own, dense_weights(torch.float32)
        across = piped.tied and not (first and last)
        if first or (last and piped.tied):
            self.table = nn.Parameter(dense["table"].clone())
            annotate(self.table, P(tied={"pipe": (0, -1)}) if across else P())
        if last and not piped.tied:
            self.head = nn.Parameter(dense["head"].clone())
            annotate(self.head, P())
        self.blocks = nn.ModuleDict()
        for stage in self.own:
            for index in blocks_of(stage, piped.stages):
                self.blocks[str(index)] = Block(registry)
        with torch.no_grad():
            for name, param in self.blocks.named_parameters():
                param.copy_(shard(dense[f"blocks.{name}"], spec_of(param), registry))


def blocks_of(stage: int, stages: int) -> range:
    each = BLOCKS // stages
    return range(stage * each, (stage + 1) * each)


class Chunk(nn.Module):
    """One stage of a part: some blocks. The first stage also has the embedding, and the last one the classifier."""

    def __init__(self, part: Part, stage: int, stages: int) -> None:
        super().__init__()
        self.first, self.last = stage == 0, stage == stages - 1
        if self.first:
            self.table = part.table
        if self.last:
            self.head = part.head if hasattr(part, "head") else part.table
        self.blocks = nn.ModuleList(part.blocks[str(index)] for index in blocks_of(stage, stages))

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = F.embedding(x, self.table)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.head) if self.last else x


def schedule_of(piped: Piped, part: Part, registry: ProcessGroupRegistry, **options: Any) -> Any:
    """Return torch's schedule over the stages of this rank."""
    stages = [
        PipelineStage(
            Chunk(part, stage, piped.stages),
            stage,
            piped.stages,
            torch.device("cpu"),
            group=registry.group("pipe"),
        )
        for stage in part.own
    ]
    options = {"loss_fn": cross_entropy, **options}
    return SCHEDULES[piped.kind](stages if piped.stages > 2 else stages[0], MICRO_BATCHES, **options)


def full_of(chunks: list[nn.Module], part: Part, registry: ProcessGroupRegistry) -> Full:
    full: Full = {}
    for stage, chunk in zip(part.own, chunks, strict=True):
        blocks = blocks_of(stage, 2 if len(part.own) == 1 else 4)
        for name, value in whole(chunk, registry).items():
            kind, _, rest = name.partition(".")
            if kind == "blocks":
                index, _, leaf = rest.partition(".")
                name = f"blocks.{blocks[int(index)]}.{leaf}"
            full[name] = value.detach().clone()
    return full
