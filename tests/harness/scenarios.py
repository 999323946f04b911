"""Small models in several layouts, each with its dense function; trained by ParallelOptimizer and by torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import arguments
from meshstep.optim import GradStats, ParallelOptimizer
from meshstep.optim.step.c_engine import loops_for
from meshstep.parallel import (
    ColumnParallelLinear,
    LayerNorm1D,
    LayerNorm2D,
    Linear2D,
    P,
    ProcessGroupRegistry,
    RowParallelLinear,
    Topology,
    VocabParallelEmbedding,
    annotate,
    cross_entropy_2d,
    declare,
    scatter_to,
    shard,
    spec_of,
    unshard,
    vocab_parallel_cross_entropy,
)
from torch import Tensor, nn

VOCAB, WIDTH, HIDDEN = 12, 8, 16
Full = dict[str, Tensor]


def batch(step: int) -> Tensor:
    """Return token ids [4, 5]; each id is the target of the previous id."""
    return torch.randint(VOCAB, (4, 5), generator=torch.Generator().manual_seed(step))


# One dimension: embedding -> norm -> column -> gelu -> row -> column classifier ---------------------------------------


class Tensor1D(nn.Module):
    """Model from ids [batch, token] to the loss, with weights sharded over ``tensor``.

    With ``sequence``, activations are also sharded along the sequence.
    """

    def __init__(self, registry: ProcessGroupRegistry, dtype: torch.dtype, sequence: bool) -> None:
        super().__init__()
        self.registry, self.sequence = registry, sequence
        options: dict[str, Any] = {"dtype": dtype, "sequence_parallel": sequence}
        self.emb = VocabParallelEmbedding(VOCAB, WIDTH, registry, dtype=dtype)
        self.norm = LayerNorm1D(WIDTH, **options)
        self.up = ColumnParallelLinear(WIDTH, HIDDEN, registry, **options)
        self.down = RowParallelLinear(HIDDEN, WIDTH, registry, **options)
        self.head = ColumnParallelLinear(WIDTH, VOCAB, registry, **options)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids[:, :-1])
        if self.sequence:
            x = scatter_to(x, self.registry, "tensor", dim=1)
        x = self.down(F.gelu(self.up(self.norm(x))))
        return vocab_parallel_cross_entropy(self.head(x), ids[:, 1:], self.registry)


def dense_1d(p: Full, ids: Tensor) -> Tensor:
    x = F.layer_norm(p["emb.weight"][ids[:, :-1]], (WIDTH,), p["norm.weight"], p["norm.bias"])
    x = F.linear(F.gelu(F.linear(x, p["up.weight"], p["up.bias"])), p["down.weight"], p["down.bias"])
    return F.cross_entropy(F.linear(x, p["head.weight"], p["head.bias"]).flatten(0, 1), ids[:, 1:].flatten())


# 2-D layers -----------------------------------------------------------------------------------------------------------


class Tensor2D(nn.Module):
    """A model of 2-D layers: full ids [batch, token] -> loss. The batch is sharded over ``row``, features over ``col``."""

    def __init__(self, registry: ProcessGroupRegistry, dtype: torch.dtype, bias: Any) -> None:
        super().__init__()
        self.registry = registry
        table = torch.randn(VOCAB, WIDTH, dtype=dtype)
        self.table = nn.Parameter(shard(table, P(None, "col"), registry))
        annotate(self.table, P(None, "col", partial="row"))
        self.up = Linear2D(WIDTH, HIDDEN, registry, bias=bias, dtype=dtype)
        self.norm = LayerNorm2D(HIDDEN, registry, dtype=dtype)
        self.head = Linear2D(HIDDEN, VOCAB, registry, bias=bias, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        ids = shard(ids, P("row"), self.registry)
        x = self.norm(F.gelu(self.up(self.table[ids[:, :-1]])))
        return cross_entropy_2d(self.head(x), ids[:, 1:], self.registry)


def dense_2d(p: Full, ids: Tensor) -> Tensor:
    x = F.gelu(p["table"][ids[:, :-1]] @ p["up.weight"] + p["up.bias"])
    x = F.layer_norm(x, (HIDDEN,), p["norm.weight"], p["norm.bias"]) @ p["head.weight"] + p["head.bias"]
    return F.cross_entropy(x.flatten(0, 1), ids[:, 1:].flatten())


# A pipeline of two stages with a tied embedding and classifier ---------------------------------------------------------


class Stage(nn.Module):
    """The first or the last half of a model whose embedding and classifier are tied."""

    def __init__(self, registry: ProcessGroupRegistry, dtype: torch.dtype) -> None:
        super().__init__()
        self.registry, self.first = registry, registry.coordinate["pipe"] == 0
        table = torch.randn(VOCAB, WIDTH, dtype=dtype) * 0.5
        weights = [torch.randn(WIDTH, WIDTH, dtype=dtype) * 0.4 for _ in range(2)]
        self.layer = nn.Parameter(weights[0 if self.first else 1])
        self.tied = nn.Parameter(table)  # the embedding's table on the first stage, the classifier's on the last
        declare(self, {"tied": P(tied={"pipe": (0, -1)}), "layer": P()})

    def run(self, ids: Tensor) -> None:
        """Run forward and backward of this stage, exchanging activations and their gradients between the stages."""
        index = self.registry.rank("pipe")
        other = self.registry.ranks("pipe")[1 - index]
        dtype = self.layer.dtype
        hidden = torch.empty(*ids[:, :-1].shape, WIDTH, dtype=dtype)
        if self.first:
            out = torch.tanh(self.tied[ids[:, :-1]] @ self.layer)
            dist.send(out.detach(), other)
            dist.recv(hidden, other)
            out.backward(hidden)
        else:
            dist.recv(hidden, other)
            hidden.requires_grad_()
            x = torch.tanh(hidden @ self.layer) @ self.tied.t()
            F.cross_entropy(x.flatten(0, 1), ids[:, 1:].flatten()).backward()
            assert hidden.grad is not None
            dist.send(hidden.grad, other)


def dense_pipe(p: Full, ids: Tensor) -> Tensor:
    x = torch.tanh(torch.tanh(p["tied"][ids[:, :-1]] @ p["0:layer"]) @ p["1:layer"]) @ p["tied"].t()
    return F.cross_entropy(x.flatten(0, 1), ids[:, 1:].flatten())


# The scenarios --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """A mesh, the kind of model on it, and the dense loss of the model.

    Kind "idle": data rank 1 computes nothing. Kind "bare": pipeline stage 1 has no parameters.
    """

    axes: tuple[tuple[str, int], ...]
    kind: str
    dense: Callable[[Full, Tensor], Tensor]
    threshold: float = 0.42  # clips about half of the first 20 steps

    @property
    def topology(self) -> Topology:
        return Topology(roles=None, **dict(self.axes))


SCENARIOS = {
    "tensor": Scenario((("tensor", 2),), "1d", dense_1d),
    "tensor=4": Scenario((("tensor", 4),), "1d", dense_1d),
    "sequence parallel": Scenario((("tensor", 2),), "sequence", dense_1d),
    "grid, bias on columns": Scenario((("row", 2), ("col", 2)), "column", dense_2d, 1.1),
    "grid, bias on all": Scenario((("row", 2), ("col", 2)), "all", dense_2d, 1.1),
    "grid, bias on row 0": Scenario((("row", 2), ("col", 2)), "row0", dense_2d, 1.1),
    "data x tensor": Scenario((("data", 2), ("tensor", 2)), "1d", dense_1d),
    "data x sequence parallel": Scenario((("data", 2), ("tensor", 2)), "sequence", dense_1d),
    "pipe, tied": Scenario((("pipe", 2),), "pipe", dense_pipe, 0.6),
    "data x pipe, tied": Scenario((("data", 2), ("pipe", 2)), "pipe", dense_pipe, 0.6),
    "a stage without parameters": Scenario((("pipe", 2), ("tensor", 2)), "bare", dense_1d),
    "a rank without gradients": Scenario((("data", 2), ("tensor", 2)), "idle", dense_1d, 0.2),
}


def build(scenario: Scenario, registry: ProcessGroupRegistry, dtype: torch.dtype) -> nn.Module | None:
    """Return this rank's model; None if this rank has no parameters."""
    torch.manual_seed(11)
    kind = scenario.kind
    if kind in ("column", "all", "row0"):
        model: nn.Module = Tensor2D(registry, dtype, kind)
    elif kind == "pipe":
        return Stage(registry, dtype)
    elif kind == "bare" and registry.coordinate["pipe"] == 1:
        return None
    else:
        model = Tensor1D(registry, dtype, kind == "sequence")
    declare(model)
    return model


def backward(scenario: Scenario, model: nn.Module | None, optimizer: ParallelOptimizer, ids: Tensor) -> None:
    """Run this rank's part of one micro-batch of the scenario."""
    registry = optimizer.registry
    if "data" in dict(scenario.axes) and scenario.kind != "idle":
        ids = shard(ids, P("data"), registry)
    if isinstance(model, Stage):
        model.run(ids)
    elif scenario.kind == "idle" and registry.coordinate["data"] == 1:
        optimizer.backward(None)
    elif model is not None:
        optimizer.backward(model(ids))


def dense_loss(scenario: Scenario, params: Full, ids: Tensor) -> Tensor:
    """Return the loss of the whole batch, or half of this loss if one of two data ranks is idle."""
    loss = scenario.dense(params, ids)
    return loss / 2 if scenario.kind == "idle" else loss


def full_tensors(scenario: Scenario, model: nn.Module | None, registry: ProcessGroupRegistry, gradients: bool) -> Full:
    """Return the full parameters (or gradients) of this rank's stage, by the dense model's names."""
    found: Full = {}
    specs = {name: spec_of(param) for name, param in model.named_parameters()} if model is not None else {}
    if scenario.kind == "row0":  # other rows have no bias, but unshard is a collective of all ranks
        specs = {**specs, "up.bias": P("col", owned={"row": 0}), "head.bias": P("col", owned={"row": 0})}
    params = dict(model.named_parameters()) if model is not None else {}
    for name, spec in sorted(specs.items()):
        param = params.get(name)
        local = None if param is None else param.grad if gradients else param.detach()
        whole = unshard(local, spec, registry)
        if isinstance(model, Stage):
            name = f"{registry.coordinate['pipe']}:{name}" if name == "layer" else "tied"
        found[name] = whole
    return found


@dataclass(frozen=True)
class Run:
    """The report of a rank: full initial and final parameters, norms, the last step's gradients after clipping (empty
    with sharded states), and the norms as bytes."""

    start: Full
    end: Full
    gradients: Full
    norms: list[float]
    bits: bytes


def train(
    name: str,
    dtype: torch.dtype,
    make: Callable[[list[Tensor]], torch.optim.Optimizer],
    steps: int,
    options: dict[str, Any],
) -> Run:
    """Train a scenario on this rank with ParallelOptimizer."""
    scenario = SCENARIOS[name]
    with ProcessGroupRegistry(scenario.topology) as registry:
        model = build(scenario, registry, dtype)
        start = full_tensors(scenario, model, registry, gradients=False)
        params: Any = list(model.parameters()) if model is not None else [{"params": []}]
        optimizer = ParallelOptimizer(make(params), registry, **arguments(**options))
        stats: list[GradStats] = []
        for step in range(steps):
            optimizer.zero_grad()
            backward(scenario, model, optimizer, batch(step))
            taken = optimizer.step()
            assert taken is not None
            stats.append(taken)
        norms = torch.stack([entry.total_norm for entry in stats])
        gradients = {} if options.get("shard_states") else full_tensors(scenario, model, registry, gradients=True)
        # Native loops do not write the clipped gradients.
        if dtype == torch.float32 and loops_for(optimizer.optimizer) is not None:
            gradients = {key: value * stats[-1].clip_coef for key, value in gradients.items()}
        return Run(
            start,
            full_tensors(scenario, model, registry, gradients=False),
            gradients,
            norms.tolist(),
            norms.double().numpy().tobytes(),
        )


def train_dense(
    name: str,
    start: Full,
    make: Callable[[list[Tensor]], torch.optim.Optimizer],
    steps: int,
    max_norm: float | None,
    norm_type: float,
) -> tuple[Full, Full, list[float]]:
    """Train the dense model in one process, in float64. Return final parameters, last gradients, and norms."""
    params = {key: value.double().requires_grad_() for key, value in start.items()}
    optimizer = make(list(params.values()))
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        dense_loss(SCENARIOS[name], params, batch(step)).backward()
        bound = float("inf") if max_norm is None else max_norm
        norms.append(float(nn.utils.clip_grad_norm_(list(params.values()), bound, norm_type)))
        optimizer.step()
    gradients = {key: value.grad for key, value in params.items() if value.grad is not None}
    return {key: value.detach() for key, value in params.items()}, gradients, norms
