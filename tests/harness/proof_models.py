"""Randomly drawn correct models of several families of layouts, with their losses: `prove` must find no error in them."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dtensors import registry_of
from grid_models import VOCABULARY, Lm
from meshstep.parallel import (
    ColumnParallelLinear,
    LayerNorm1D,
    P,
    ProcessGroupRegistry,
    RowParallelLinear,
    Topology,
    VocabParallelEmbedding,
    all_to_all,
    annotate,
    declare,
    scatter_to,
    shard,
    spec_of,
    vocab_parallel_cross_entropy,
)
from meshstep.testing import Proof, prove
from torch import Tensor, nn

Loss = Callable[[Any], Tensor | None]


class Built(NamedTuple):
    """A model and its loss on this rank."""

    model: nn.Module
    loss: Loss


@dataclass(frozen=True)
class Drawn:
    """The description of a model to build.

    ``trained``: random numbers are added to the initial biases of linear layers and parameters of norm layers. Initial
    norm parameters are constant.
    """

    family: str
    axes: tuple[tuple[str, int], ...]
    width: int
    depth: int
    dropout: float
    tied: bool
    trained: bool
    seed: int

    @property
    def topology(self) -> Topology:
        roles: Any = {"expert": "data"} if self.family == "experts" else None
        return Topology(roles=roles, **dict(self.axes))


_MESHES: dict[str, list[tuple[tuple[str, int], ...]]] = {
    "1-D": [(("tensor", 2),), (("data", 2), ("tensor", 2)), (("tensor", 3),), (("tensor", 2), ("data", 2))],
    "sequence": [(("tensor", 2),), (("data", 2), ("tensor", 2))],
    "2-D": [(("row", 2), ("col", 2))],
    "2.5-D": [(("depth", 2), ("row", 2), ("col", 2))],
    "3-D": [(("input", 2), ("weight", 2), ("output", 2))],
    "experts": [(("expert", 2),), (("data", 2), ("expert", 2)), (("expert", 2), ("tensor", 2))],
    "pipe": [(("pipe", 2),), (("data", 2), ("pipe", 2))],
    "DTensor": [(("tensor", 2),), (("data", 2), ("tensor", 2))],
    "FSDP2": [(("data", 2),), (("data", 2), ("tensor", 2)), (("data", 3),)],
}
_OFTEN = ["1-D", "1-D", "sequence", "2-D", "experts", "pipe", "DTensor", "2-D", "sequence"]
OF_TORCH = ("DTensor", "FSDP2")  # families of models whose meshes torch caches


def drawn_model(number: int) -> Drawn:
    """Return the description of model ``number``, which is the same on all ranks."""
    rng = random.Random(number)
    family = rng.choice([*_MESHES, *_OFTEN])
    return Drawn(
        family,
        rng.choice(_MESHES[family]),
        width=rng.choice([12, 24] if family in ("1-D", "sequence") else [8, 16]),
        depth=rng.randint(1, 3),
        dropout=rng.choice([0.0, 0.0, 0.2]),
        tied=rng.random() < 0.5,
        trained=rng.random() < 0.7,
        seed=number,
    )


def build(drawn: Drawn, registry: ProcessGroupRegistry) -> Built:
    """Build the model in float64, with all parameters declared."""
    torch.manual_seed(drawn.seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        built = _BUILDERS[drawn.family](drawn, registry)
    finally:
        torch.set_default_dtype(default)
    if drawn.trained:
        _train(built.model, registry)
    torch.manual_seed(drawn.seed)
    return built


def registry_for(drawn: Drawn) -> ProcessGroupRegistry:
    """Return a registry on the model's mesh; for DTensors, one that torch's cache does not confuse with an earlier
    mesh."""
    return registry_of(drawn.axes) if drawn.family in OF_TORCH else ProcessGroupRegistry(drawn.topology)


def proved(number: int) -> Proof:
    """Return the result of `prove` for model ``number``, which is correct; run on every rank of its topology."""
    drawn = drawn_model(number)
    with registry_for(drawn) as registry:
        built = build(drawn, registry)
        return prove(built.model, built.loss, registry)


def _train(model: nn.Module, registry: ProcessGroupRegistry) -> None:
    """Add random numbers, equal on replicas, to parameters with fewer than two dims: biases and norm parameters."""
    from meshstep.parallel.interop.local_parameters import local_parameter

    with torch.no_grad():
        for name, param in model.named_parameters():
            local = local_parameter(param, registry.topology)
            if local.dim() < 2:
                spec = spec_of(param, registry.topology)
                where = [(axis, registry.coordinate[axis]) for axis in spec.distinct_axes(registry.topology)]
                generator = torch.Generator().manual_seed(zlib.crc32(repr((name, where)).encode()))
                local += 0.2 * torch.randn(local.shape, generator=generator, dtype=local.dtype)


def _ids(registry: ProcessGroupRegistry, seed: int, length: int = 7) -> Tensor:
    """Return the token ids of this data rank."""
    where = [registry.coordinate[axis] for axis in registry.topology.data_axes]
    generator = torch.Generator().manual_seed(zlib.crc32(repr((seed, where)).encode()))
    return torch.randint(VOCABULARY, (4, length), generator=generator)


# 1-D layers -------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """x + down(gelu(up(norm(x))))."""

    def __init__(self, drawn: Drawn, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        options: dict[str, Any] = {"sequence_parallel": drawn.family == "sequence"}
        self.norm = LayerNorm1D(drawn.width, **options)
        self.up = ColumnParallelLinear(drawn.width, 2 * drawn.width, registry, **options)
        self.down = RowParallelLinear(2 * drawn.width, drawn.width, registry, **options)
        self.dropout = nn.Dropout(drawn.dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return y


class Lm1D(nn.Module):
    """ids [batch, token] -> loss."""

    def __init__(self, drawn: Drawn, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        self.registry, self.sequence = registry, drawn.family == "sequence"
        self.emb = VocabParallelEmbedding(12, drawn.width, registry)
        self.blocks = nn.ModuleList(Block(drawn, registry) for _ in range(drawn.depth))
        self.norm = LayerNorm1D(drawn.width, sequence_parallel=self.sequence)
        self.head = ColumnParallelLinear(drawn.width, 12, registry, sequence_parallel=self.sequence)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids[:, :-1])
        if self.sequence:
            x = scatter_to(x, self.registry, "tensor", dim=1)
        for block in self.blocks:
            x = block(x)
        return vocab_parallel_cross_entropy(self.head(self.norm(x)), ids[:, 1:], self.registry)


def _one_dimension(drawn: Drawn, registry: ProcessGroupRegistry) -> Built:
    model = Lm1D(drawn, registry)
    declare(model)
    ids = _ids(registry, drawn.seed)
    return Built(model, lambda model: model(ids))


# 2-D, 2.5-D and 3-D layers ----------------------------------------------------------------------------------------------


def _grid(drawn: Drawn, registry: ProcessGroupRegistry) -> Built:
    model = Lm(drawn.family, registry, drawn.width, drawn.tied)
    declare(model)
    ids = torch.randint(VOCABULARY, (8, 4), generator=torch.Generator().manual_seed(drawn.seed))
    return Built(model, lambda model: model(ids))


# Experts ----------------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Routes each token to the expert with its highest score, which is on one of the ranks of ``expert``."""

    def __init__(self, width: int, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        self.registry = registry
        self.router = nn.Parameter(torch.randn(2, width))
        self.up = nn.Parameter(shard(torch.randn(2, width, width) * width**-0.5, P("expert"), registry))
        self.bias = nn.Parameter(shard(torch.zeros(2, width), P("expert"), registry))
        annotate(self.router, P())
        annotate(self.up, P("expert"))
        annotate(self.bias, P("expert"))

    def forward(self, x: Tensor) -> Tensor:
        scores = (x @ self.router.t()).softmax(-1)
        chosen = scores.argmax(-1)
        # Every token is sent to both experts, as zeros to the one that was not chosen, so that all ranks exchange equal
        # numbers of rows.
        sent = torch.cat([x * (chosen == expert).unsqueeze(1) for expert in range(2)])
        rows = all_to_all(sent, self.registry, "expert", split_dim=0)
        back = all_to_all(torch.tanh(rows @ self.up[0] + self.bias[0]), self.registry, "expert", split_dim=0)
        both = torch.stack(back.chunk(2))
        index = torch.arange(len(x))
        return x + both[chosen, index] * scores[index, chosen].unsqueeze(1)


class ExpertModel(nn.Module):
    """x [token, feature] -> loss."""

    def __init__(self, drawn: Drawn, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        self.first = nn.Linear(drawn.width, drawn.width)
        self.blocks = nn.ModuleList(Experts(drawn.width, registry) for _ in range(drawn.depth))
        self.head = nn.Linear(drawn.width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).logsumexp(-1).square().mean()  # type: ignore[no-any-return]


def _experts(drawn: Drawn, registry: ProcessGroupRegistry) -> Built:
    model = ExpertModel(drawn, registry)
    declare(model, {"first.*": P(), "head.*": P()})
    where = [registry.coordinate[axis] for axis in registry.topology.data_axes]
    generator = torch.Generator().manual_seed(zlib.crc32(repr((drawn.seed, where)).encode()))
    x = torch.randn(9, drawn.width, generator=generator, dtype=torch.float64)
    return Built(model, lambda model: model(x))


# A pipeline -------------------------------------------------------------------------------------------------------------


class Stage(nn.Module):
    """The first or the last half of a model whose embedding and classifier are tied."""

    def __init__(self, drawn: Drawn, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        self.registry, self.first = registry, registry.coordinate["pipe"] == 0
        self.table = nn.Parameter(torch.randn(VOCABULARY, drawn.width) * 0.5)
        weights = [torch.randn(drawn.width, drawn.width) * 0.4 for _ in range(2)]
        self.inner = nn.ModuleList(nn.Linear(drawn.width, drawn.width) for _ in range(drawn.depth))
        with torch.no_grad():
            for layer in self.inner:
                layer.weight.copy_(weights[0 if self.first else 1])  # type: ignore[operator]

    def run(self, ids: Tensor) -> Tensor | None:
        """Run forward and backward of this stage; returns the loss on the last stage."""
        me, other = self.registry.rank("pipe"), self.registry.ranks("pipe")[1 - self.registry.rank("pipe")]
        hidden = torch.zeros(*ids[:, :-1].shape, self.table.size(1), dtype=torch.float64)
        if me == 0:
            out = self.through(self.table[ids[:, :-1]])
            dist.send(out.detach(), other)
            dist.recv(hidden, other)
            out.backward(self.received(hidden))
            return None
        dist.recv(hidden, other)
        hidden.requires_grad_()
        logits = self.through(hidden) @ self.table.t()
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        assert hidden.grad is not None
        dist.send(hidden.grad, other)
        return loss.detach()

    def through(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            x = torch.tanh(layer(x))
        return x

    def received(self, gradient: Tensor) -> Tensor:
        return gradient


def _pipe(drawn: Drawn, registry: ProcessGroupRegistry) -> Built:
    model = Stage(drawn, registry)
    declare(model, {"table": P(tied={"pipe": (0, -1)}), "inner.*": P()})
    ids = _ids(registry, drawn.seed)
    return Built(model, lambda model: model.run(ids))


# DTensors ---------------------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """x + down(gelu(up(norm(x)))), several times."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        width = drawn.width
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(drawn.depth))
        self.ups = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(drawn.depth))
        self.downs = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(drawn.depth))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return x.square().mean()


def _dtensor(drawn: Drawn, registry: ProcessGroupRegistry) -> Built:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = Mlp(drawn)
    plan = {"ups.*": ColwiseParallel(), "downs.*": RowwiseParallel()}
    axes = registry.topology.axes
    mesh = registry.device_mesh(*axes)
    if "tensor" in axes:
        parallelize_module(model, mesh["tensor"], plan)
    if drawn.family == "FSDP2":
        for layer in (*model.ups, *model.downs):
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    declare(model, {"*": P()})
    where = [registry.coordinate[axis] for axis in registry.topology.data_axes]
    generator = torch.Generator().manual_seed(zlib.crc32(repr((drawn.seed, where)).encode()))
    x = torch.randn(5, drawn.width, generator=generator, dtype=torch.float64)
    return Built(model, lambda model: model(x))


_BUILDERS: dict[str, Callable[[Drawn, ProcessGroupRegistry], Built]] = {
    "1-D": _one_dimension,
    "sequence": _one_dimension,
    "2-D": _grid,
    "2.5-D": _grid,
    "3-D": _grid,
    "experts": _experts,
    "pipe": _pipe,
    "DTensor": _dtensor,
    "FSDP2": _dtensor,
}
