"""Randomly drawn models and steps on a random mesh, to check the order of collectives.

The programs have 1-D and 2-D tensor-parallel layers, gradients missing on some ranks, replicated and sharded states,
reduction in the step and during backward, norms, checks and checkpoints.

Each pipeline stage has its own layers and works independently; communication between stages is not the library's task.
"""

from __future__ import annotations

import random
import tempfile
import zlib
from dataclasses import dataclass
from math import inf, prod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from meshstep.optim import Bf16Compression, ByGroup, ByNorm, ParallelOptimizer, Sharded, save_checkpoint
from meshstep.optim.gradients import buckets as gradient_sync
from meshstep.optim.norm.replicas import ReplicaCheck
from meshstep.parallel import (
    ColumnParallelLinear,
    Embedding2D,
    LayerNorm1D,
    LayerNorm2D,
    Linear2D,
    P,
    ProcessGroupRegistry,
    RowParallelLinear,
    Topology,
    VocabParallelEmbedding,
    annotate,
    copy_to,
    declare,
    reduce_from,
)
from properties import is_full
from recorded_ranks import Program, programs_of
from torch import Tensor, nn
from zero_models import small_buckets

WIDTH, BATCH = 12, 2
MOST_RANKS = 24
_ROLES: dict[str, Any] = {"expert": "data"}
_SIZES = {"pipe": (2, 3), "data": (2, 3, 4), "replica": (2,), "expert": (2, 3), "tensor": (2, 3, 4)}


@dataclass(frozen=True)
class Drawn:
    """A mesh; everything else follows from a seed.

    Args:
        asks: True: each rank creates groups when it requests them, in its own order. False: all ranks create the same
            groups together first.
        meets: Whether groups are initialized once the optimizer has been constructed, as over NCCL.
    """

    axes: tuple[tuple[str, int], ...]
    seed: int
    asks: bool
    meets: bool

    @property
    def topology(self) -> Topology:
        return Topology(
            roles={axis: role for axis, role in _ROLES.items() if axis in dict(self.axes)}, **dict(self.axes)
        )

    @property
    def saves(self) -> bool:
        """Return whether the program saves a checkpoint, which does not support shards of unequal sizes."""
        return self.rng("saved").random() < 0.1

    @property
    def is_uneven(self) -> bool:
        """Return whether there may be shards of unequal sizes."""
        return "tensor" in dict(self.axes) and not self.saves

    def rng(self, *key: object) -> random.Random:
        """Return a random generator that is the same on all ranks that pass the same key."""
        return random.Random(zlib.crc32(repr((self.seed, *key)).encode()))


def drawn_of(number: int, most_ranks: int = MOST_RANKS) -> Drawn:
    """Return program number ``number``, on a mesh of at most ``most_ranks``; deterministic on all ranks."""
    rng = random.Random(number)
    while True:
        kinds = rng.sample([*_SIZES, "grid"], rng.randint(1, 4))
        axes = [(kind, rng.choice(_SIZES[kind])) for kind in kinds if kind != "grid"]
        if "grid" in kinds:
            axes += [("row", 2), ("col", 2)]
        rng.shuffle(axes)
        if len(axes) <= 4 and prod(size for _, size in axes) <= most_ranks:
            return Drawn(tuple(axes), number, asks=rng.random() < 0.5, meets=rng.random() < 0.5)


DRAWN = st.integers(0, 2**32 - 1).map(lambda number: drawn_of(number, MOST_RANKS if is_full() else 8))

# The model --------------------------------------------------------------------------------------------------------------


class Split1D(nn.Module):
    """A norm, then a column-parallel and a row-parallel layer. Forward returns the sum of the output. With ``sequence``,
    gradients of the norm are partial."""

    def __init__(self, registry: ProcessGroupRegistry, sequence: bool) -> None:
        super().__init__()
        self.norm = LayerNorm1D(WIDTH, sequence_parallel=sequence)
        self.up = ColumnParallelLinear(WIDTH, 2 * WIDTH, registry, sequence_parallel=sequence)
        self.down = RowParallelLinear(2 * WIDTH, WIDTH, registry, sequence_parallel=sequence)

    def forward(self, scale: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(self.norm(scale * torch.ones(BATCH, 2, WIDTH))))
        return out.sum()


class Words1D(nn.Module):
    """The scaled sum of three rows of an embedding table that is sharded by rows."""

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        self.table = VocabParallelEmbedding(WIDTH, 4, registry)

    def forward(self, scale: Tensor) -> Tensor:
        out: Tensor = self.table(torch.arange(3)[None])
        return (out * scale).sum()


class Split2D(nn.Module):
    """A norm, then two linear layers, all sharded over a 2-D grid. Forward returns the sum of the output."""

    def __init__(self, registry: ProcessGroupRegistry, biases: list[Any]) -> None:
        super().__init__()
        self.norm = LayerNorm2D(WIDTH, registry)
        self.up, self.down = (Linear2D(WIDTH, WIDTH, registry, bias=bias) for bias in biases)

    def forward(self, scale: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(self.norm(scale * torch.ones(1, 2, WIDTH // 2))))
        return out.sum()


class Words2D(nn.Module):
    """The scaled sum of the first two rows of an embedding table that is sharded over a 2-D grid."""

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        self.table = Embedding2D(WIDTH, WIDTH, registry)

    def forward(self, scale: Tensor) -> Tensor:
        out: Tensor = self.table(torch.arange(2)[None])
        return (out * scale).sum()


class Vector(nn.Module):
    """A parameter with a given spec, outside of any layer."""

    def __init__(self, registry: ProcessGroupRegistry, spec: P, numel: int) -> None:
        super().__init__()
        if spec.holds(registry.coordinate, registry.topology):
            self.weight = nn.Parameter(torch.ones(numel))
            annotate(self.weight, spec)

    def forward(self, scale: Tensor) -> Tensor:
        weight = getattr(self, "weight", None)
        return scale if weight is None else (weight * scale).sum()


class Experts(nn.Module):
    """One expert on each rank of an axis, with collectives before and after it; ``tokens`` decides whether it gets
    input."""

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        self.registry, self.tokens = registry, True
        self.weight = nn.Parameter(torch.ones(6))
        annotate(self.weight, P("expert"))

    def forward(self, scale: Tensor) -> Tensor:
        taken = copy_to(scale, self.registry, "expert")
        return reduce_from((taken * self.weight).sum() if self.tokens else taken, self.registry, "expert")


def layers_of(drawn: Drawn, registry: ProcessGroupRegistry) -> dict[str, nn.Module]:
    """Return the layers of this rank's stage by name, in one order for all ranks of the stage."""
    topology, stage = registry.topology, registry.coordinate.get("pipe")
    rng, made = drawn.rng("layers", stage), dict[str, nn.Module]()
    kinds = ["plain", "plain", "vector", *("owned" for axis in topology.model_axes)]
    kinds += ["1d", "1d", "words 1d", "terms"] if "tensor" in topology.axes else []
    kinds += ["uneven"] if drawn.is_uneven else []
    kinds += ["2d", "2d", "words 2d", "diagonal"] if "row" in topology.axes else []
    kinds += ["experts", "experts"] if "expert" in topology.axes else []
    for index, kind in enumerate(rng.choices(kinds, k=rng.randint(1, 5))):
        made[f"{stage} {index} {kind}"] = _layer(kind, registry, rng)
    if stage is not None and drawn.rng("tied").random() < 0.5:
        tied = P(tied={"pipe": (0, -1)})
        if tied.holds(registry.coordinate, topology):
            made["tied"] = Vector(registry, tied, 7)
    return made


def _layer(kind: str, registry: ProcessGroupRegistry, rng: random.Random) -> nn.Module:
    topology = registry.topology
    if kind == "1d":
        return Split1D(registry, sequence=topology.size("tensor") == 2 and rng.random() < 0.5)
    if kind == "words 1d":
        return Words1D(registry)
    if kind == "2d":
        return Split2D(registry, rng.choices(["column", "all", "row0", None], k=2))
    if kind == "words 2d":
        return Words2D(registry)
    if kind == "experts":
        return Experts(registry)
    if kind == "uneven":  # the last shard may be empty, if there are more shards than elements
        numel, of = rng.choice([3, 50]), topology.size("tensor")
        return Vector(registry, P("tensor"), numel // of + (registry.rank("tensor") < numel % of))
    if kind == "terms":
        return Vector(registry, P(partial="tensor"), 5)
    if kind == "diagonal":
        return Vector(registry, P("col", owned={"row": "col"}), 6)
    if kind == "owned":
        axis = rng.choice(topology.model_axes)
        return Vector(registry, P(owned={axis: rng.randrange(topology.size(axis))}), 9)
    if kind == "vector":
        return Vector(registry, P(), rng.choice([3, 40]))
    plain = nn.Sequential(nn.Linear(4, rng.choice([1, 8])))
    declare(plain, {"*": P()})
    return _Plain(plain)


class _Plain(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, scale: Tensor) -> Tensor:
        out: Tensor = self.layer(scale * torch.ones(BATCH, 4))
        return out.sum()


# The run ----------------------------------------------------------------------------------------------------------------


def options_of(drawn: Drawn) -> dict[str, Any]:
    """Return a valid combination of arguments of `ParallelOptimizer`, the same on all ranks."""
    rng, topology = drawn.rng("options"), drawn.topology
    norm_type = rng.choice([1.0, 2.0, 2.0, inf])
    options: dict[str, Any] = {
        "max_norm": rng.choice([None, ByNorm(0.5), ByGroup((0.5,))]),
        "norm_type": norm_type,
        "reduction": rng.choice(["packed", "per_group"]),
        "per_parameter_norms": rng.random() < 0.3,
        "check_replicas": rng.choice([True, False]),
    }
    compression = rng.choice([None, Bf16Compression()])
    states = rng.choice(["whole", "overlap", "overlap", "zero1", "zero2", "zero2"])
    sharded_over = [axis for axis in topology.axes if axis not in topology.pipe_axes]
    if states == "overlap":
        options |= {"overlap": True, "compression": compression}
    elif states != "whole" and sharded_over:
        axis = rng.choice(sharded_over)
        options["states"] = Sharded(axis, gradients=states == "zero2", compression=compression)
    return options


def run(drawn: Drawn, directory: str) -> None:
    registry = ProcessGroupRegistry(drawn.topology)
    topology, rank = registry.topology, registry.global_rank
    wanted = [
        tuple(drawn.rng("wanted", index).sample(topology.axes, 1 + index % len(topology.axes))) for index in range(3)
    ]
    if not drawn.asks:
        registry.connect(*wanted)
    for axes in drawn.rng("asked", rank).sample(wanted, len(wanted)):  # in a different order on each rank
        registry.group(*axes)
    model = nn.ModuleDict(layers_of(drawn, registry))
    adamw = torch.optim.AdamW([{"params": [*model.named_parameters()]}], fused=True)
    micro_batches = drawn.rng("micro").randint(1, 2)
    optimizer = ParallelOptimizer(adamw, registry, accumulation_steps=micro_batches, **options_of(drawn))
    if drawn.meets:
        registry.connect(*optimizer._clipper.plan.groups(optimizer._setup.reduction))
    for step in range(2):
        for micro in range(micro_batches):
            optimizer.backward(_loss(drawn, model, registry, step, micro))
        stats = optimizer.step()
        assert stats is not None
        optimizer.zero_grad()
    if drawn.saves:
        save_checkpoint(Path(directory), model, optimizer)
    registry.close()


def _loss(drawn: Drawn, model: nn.ModuleDict, registry: ProcessGroupRegistry, step: int, micro: int) -> Tensor:
    """Return the loss of some of the layers; ranks that share collectives use the same layers."""
    loss = torch.ones((), requires_grad=True)

    def is_used(name: str, *axes: str) -> bool:
        where = [registry.coordinate[axis] for axis in axes]
        return not (step or micro) or drawn.rng("used", name, step, micro, where).random() < 0.8

    data = registry.topology.data_axes
    for name, layer in model.items():
        if isinstance(layer, Experts):
            layer.tokens = is_used(f"{name}'s weight", *data)
        if is_used(name, *(axis for axis in data if axis != "expert" or not isinstance(layer, Experts))):
            loss = layer(loss * 0.5 + 1.0)
    return loss


def recorded(drawn: Drawn) -> list[Program]:
    """Return the recorded program of each rank."""
    with (
        tempfile.TemporaryDirectory() as directory,
        small_buckets(100),
        mock.patch.object(gradient_sync, "BUCKET_BYTES", 100),
        mock.patch.object(ReplicaCheck, "mismatches", return_value=[]),  # the backend sends no checksums
    ):
        return programs_of(drawn.topology.world_size, lambda: run(drawn, directory))
