"""Small language models with LoRA, by default on every layer, in 1-D to 3-D tensor-parallel layouts, and their dense
reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import (
    Classifier2D,
    Classifier3D,
    ColumnParallelLinear,
    Embedding2D,
    Embedding3D,
    Linear2D,
    Linear3D,
    LoRA,
    P,
    ProcessGroupRegistry,
    RowParallelLinear,
    Topology,
    VocabParallelEmbedding,
    add_lora,
    cross_entropy_2d,
    cross_entropy_3d,
    declare,
    gather_from,
    scatter_to,
    shard,
    spec_of,
    unshard,
    vocab_parallel_cross_entropy,
)
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, WIDTH, HIDDEN, ROWS, LENGTH, R, ALPHA = 16, 8, 24, 8, 4, 3, 6.0
STEPS, LR, MAX_NORM = 10, 0.05, 0.1
LAYERS = ("embed", "up", "down", "head")
Weights = dict[str, Tensor]


class Options(NamedTuple):
    """Options of the adapters and of the model.

    Args:
        names: The layers with an adapter.
        adapters: Keyword arguments of `LoRA`.
        sequence_parallel: Shard the sequence between the layers, in the layouts that `_tensor` builds.
        blocks: Blocks of the layer ``up``. With three blocks, the model combines their outputs, else it uses tanh.
    """

    names: tuple[str, ...] = LAYERS
    adapters: dict[str, Any] = {}  # noqa: RUF012
    sequence_parallel: bool = False
    blocks: int | tuple[int, ...] = 3

    @property
    def inner(self) -> int:
        """Return the number of input features of the layer ``down``."""
        return HIDDEN // 3 if self.blocks == 3 else HIDDEN


DEFAULT = Options()


class Lm(nn.Module):
    """Embedding, two linear layers with a residual connection, and a head. `adapted` may add LoRA to each of them."""

    def __init__(self, embed: nn.Module, up: nn.Module, down: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.embed, self.up, self.down, self.head = embed, up, down, head
        self.fused = 1

    def between(self, hidden: Tensor) -> Tensor:
        if self.fused == 1:
            return torch.tanh(hidden)
        gate, up, added = hidden.chunk(3, -1)
        return torch.tanh(gate) * up + added

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(self.between(self.up(x)))
        logits: Tensor = self.head(x)
        return logits


class Layout(NamedTuple):
    """How a model is sharded: ``loss`` gets (model, ids, targets, registry), on the rows of this data rank."""

    topology: dict[str, Any]
    build: Callable[[ProcessGroupRegistry, Options], nn.Module]
    loss: Callable[[nn.Module, Tensor, Tensor, ProcessGroupRegistry], Tensor]


def dense_model(options: Options) -> Lm:
    torch.manual_seed(1)
    kwargs: Any = {"dtype": torch.float64}
    model = Lm(
        nn.Embedding(VOCAB, WIDTH, **kwargs),
        nn.Linear(WIDTH, HIDDEN, **kwargs),
        nn.Linear(options.inner, WIDTH, **kwargs),
        nn.Linear(WIDTH, VOCAB, **kwargs),
    )
    model.fused = 3 if options.blocks == 3 else 1
    return model


def _tensor(registry: ProcessGroupRegistry, options: Options) -> nn.Module:
    torch.manual_seed(1)
    kwargs: Any = {"dtype": torch.float64}
    split: Any = {**kwargs, "sequence_parallel": options.sequence_parallel}
    return Lm(
        VocabParallelEmbedding(VOCAB, WIDTH, registry, **split),
        ColumnParallelLinear(WIDTH, HIDDEN, registry, blocks=options.blocks, **split),
        RowParallelLinear(options.inner, WIDTH, registry, **split),
        ColumnParallelLinear(WIDTH, VOCAB, registry, **split),
    )


def _tensor_loss(model: nn.Module, ids: Tensor, targets: Tensor, registry: ProcessGroupRegistry) -> Tensor:
    return vocab_parallel_cross_entropy(model(ids), targets, registry)


def _gathered(registry: ProcessGroupRegistry, options: Options) -> nn.Module:
    """Return a model of column layers that gather their output, and row layers that take this rank's slice of a full
    input."""
    torch.manual_seed(1)
    kwargs: Any = {"dtype": torch.float64}
    return Lm(
        VocabParallelEmbedding(VOCAB, WIDTH, registry, **kwargs),
        ColumnParallelLinear(WIDTH, HIDDEN, registry, blocks=options.blocks, gather_output=True, **kwargs),
        RowParallelLinear(options.inner, WIDTH, registry, input_is_parallel=False, **kwargs),
        ColumnParallelLinear(WIDTH, VOCAB, registry, gather_output=True, **kwargs),
    )


def _dense_loss(model: nn.Module, ids: Tensor, targets: Tensor, _: ProcessGroupRegistry | None = None) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def _grid(depth: str | None) -> Callable[[ProcessGroupRegistry, Options], nn.Module]:
    def build(registry: ProcessGroupRegistry, options: Options) -> nn.Module:
        torch.manual_seed(1)
        kwargs: Any = {"dtype": torch.float64, "depth": depth}
        return Lm(
            Embedding2D(VOCAB, WIDTH, registry, **kwargs),
            Linear2D(WIDTH, HIDDEN, registry, blocks=options.blocks, **kwargs),
            Linear2D(options.inner, WIDTH, registry, bias="all", **kwargs),
            Classifier2D(WIDTH, VOCAB, registry, bias=True, **kwargs),
        )

    return build


def _grid_loss(model: nn.Module, ids: Tensor, targets: Tensor, registry: ProcessGroupRegistry) -> Tensor:
    rows = ("depth", "row") if "depth" in registry.topology.axes else ("row",)
    ids, targets = (shard(full, P(rows), registry) for full in (ids, targets))
    logits = model(ids)
    return cross_entropy_2d(logits, targets, registry, row=rows)


class _Cube(Lm):
    registry: ProcessGroupRegistry

    def forward(self, ids: Tensor) -> Tensor:
        x = scatter_to(self.embed(ids), self.registry, "weight", "input", dim=0)
        x = scatter_to(x, self.registry, "output", dim=-1)
        x = x + self.down(self.between(self.up(x)))
        x = gather_from(gather_from(x, self.registry, "output", dim=-1), self.registry, "weight", "input", dim=0)
        logits: Tensor = self.head(x)
        return logits


class _CubeTables(Lm):
    registry: ProcessGroupRegistry

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = super().forward(shard(ids, BATCH_OF_CUBE, self.registry))
        return logits


BATCH_OF_CUBE = P(("weight", "input"))


def _cube_tables(registry: ProcessGroupRegistry, options: Options) -> nn.Module:
    torch.manual_seed(1)
    kwargs: Any = {"dtype": torch.float64}
    model = _CubeTables(
        Embedding3D(VOCAB, WIDTH, registry, **kwargs),
        Linear3D(WIDTH, HIDDEN, registry, **kwargs),
        Linear3D(options.inner, WIDTH, registry, input="output", output="input", **kwargs),
        Classifier3D(WIDTH, VOCAB, registry, bias=True, **kwargs),
    )
    model.registry = registry
    return model


def _cube_tables_loss(model: nn.Module, ids: Tensor, targets: Tensor, registry: ProcessGroupRegistry) -> Tensor:
    return cross_entropy_3d(model(ids), shard(targets, BATCH_OF_CUBE, registry), registry)


def _cube(registry: ProcessGroupRegistry, options: Options) -> nn.Module:
    torch.manual_seed(1)
    kwargs: Any = {"dtype": torch.float64}
    embed = nn.Embedding(VOCAB, WIDTH, **kwargs)
    up = Linear3D(WIDTH, HIDDEN, registry, **kwargs)
    down = Linear3D(options.inner, WIDTH, registry, input="output", output="input", **kwargs)
    model = _Cube(embed, up, down, nn.Linear(WIDTH, VOCAB, **kwargs))
    model.registry = registry
    declare(model, {"*": P()})
    return model


LAYOUTS: dict[str, Layout] = {
    "single": Layout({}, lambda _, options: dense_model(options), _dense_loss),
    "tensor": Layout({"tensor": 2}, _tensor, _tensor_loss),
    "data and tensor": Layout({"data": 2, "tensor": 2}, _tensor, _tensor_loss),
    "gathered outputs": Layout({"data": 2, "tensor": 2}, _gathered, _dense_loss),
    "grid": Layout({"row": 2, "col": 2}, _grid(None), _grid_loss),
    "wide grid": Layout({"row": 1, "col": 4}, _grid(None), _grid_loss),
    "grids": Layout({"depth": 2, "row": 2, "col": 1}, _grid("depth"), _grid_loss),
    "cube tables": Layout({"input": 2, "weight": 1, "output": 2}, _cube_tables, _cube_tables_loss),
    "cube of 8": Layout({"input": 2, "weight": 2, "output": 2}, _cube_tables, _cube_tables_loss),
    "cube": Layout({"input": 2, "weight": 1, "output": 2}, _cube, _dense_loss),
}


def ranks_of(layout: str) -> int:
    return math.prod(LAYOUTS[layout].topology.values())


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def randomize(model: nn.Module) -> None:
    """Replace the LoRA factors that start as zeros by random values, the same full tensors in every layout."""
    for name, module in model.named_modules():
        if isinstance(module, LoRA):
            layout = module._layout
            param, spec = (module.lora_A, layout.first) if layout.is_embedding else (module.lora_B, layout.second)
            shape = (module.r, layout.in_features) if layout.is_embedding else (layout.out_features, module.r)
            generator = torch.Generator().manual_seed(len(name) + 10)
            full = 0.3 * torch.randn(*shape, generator=generator, dtype=torch.float64)
            with torch.no_grad():
                param.copy_(shard(full, spec, layout.registry, uneven=True))


def adapted(layout: str, registry: ProcessGroupRegistry, options: Options = DEFAULT, zero: bool = False) -> nn.Module:
    model: Any = LAYOUTS[layout].build(registry, options)
    model.fused = 3 if options.blocks == 3 else 1
    add_lora(model, options.names, R, ALPHA, registry, seed=4, **options.adapters)
    if not zero:
        randomize(model)
    adapted_model: nn.Module = model
    return adapted_model


def full_weights(model: nn.Module, registry: ProcessGroupRegistry) -> Weights:
    return {
        name: unshard(param.detach(), spec_of(param), registry)
        for name, param in model.named_parameters()
        if param.requires_grad
    }


def trained(
    layout: str, options: Options = DEFAULT, steps: int = STEPS, start: int = 0, zero: bool = False, **more: Any
) -> tuple[Weights, list[float], Weights]:
    """Train with clipping. Return the full adapter weights at the start, the norms, and the full adapter weights at the
    end."""
    with ProcessGroupRegistry(Topology(**LAYOUTS[layout].topology)) as registry:
        model = adapted(layout, registry, options, zero)
        torch.manual_seed(5)  # for dropout
        first = full_weights(model, registry)
        optimizer = optimizer_of(model, registry, **more)
        norms = [one_step(layout, model, optimizer, step) for step in range(start, start + steps)]
        return first, norms, full_weights(model, registry)


def optimizer_of(model: nn.Module, registry: ProcessGroupRegistry, **more: Any) -> ParallelOptimizer:
    params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    adamw = torch.optim.AdamW(params, lr=LR, weight_decay=0.1, fused=True)
    return ParallelOptimizer(adamw, registry, max_norm=MAX_NORM, **more)


def one_step(layout: str, model: nn.Module, optimizer: ParallelOptimizer, step: int) -> float:
    registry = optimizer.registry
    ids, targets = batch(step)
    if "data" in registry.topology.axes:
        ids, targets = (shard(full, P("data"), registry) for full in (ids, targets))
    return step_along(optimizer, LAYOUTS[layout].loss(model, ids, targets, registry))


def step_along(optimizer: ParallelOptimizer, loss: Tensor) -> float:
    """Make a step along the gradient of ``loss`` only, and return its norm."""
    optimizer.zero_grad()
    optimizer.backward(loss)
    stats = optimizer.step()
    assert stats is not None
    return float(stats.total_norm)


# The dense reference, which adds the product of the factors to the weights ------------------------------------------------


def reference(
    first: Weights, options: Options = DEFAULT, steps: int = STEPS, start: int = 0
) -> tuple[list[float], Weights]:
    """Train LoRA factors on the dense model from the values ``first``, and return the norms and the trained factors."""
    base, factors = dense_model(options), {name: value.clone().requires_grad_() for name, value in first.items()}
    scaling = ALPHA / (math.sqrt(R) if options.adapters.get("use_rslora") else R)
    adamw = torch.optim.AdamW([*factors.values()], lr=LR, weight_decay=0.1)
    norms = []
    for step in range(start, start + steps):
        ids, targets = batch(step)
        weights = {}
        for name in options.names:
            original = base.get_parameter(f"{name}.weight").detach()
            change = scaling * factors[f"{name}.lora_B"] @ factors[f"{name}.lora_A"]
            weight = original + (change.t() if name == "embed" else change)
            magnitude = factors.get(f"{name}.lora_magnitude_vector")
            if magnitude is not None:
                rows = weight.t() if name == "embed" else weight
                rows = rows * (magnitude / rows.norm(dim=1).detach()).unsqueeze(1)
                weight = rows.t() if name == "embed" else rows
            weights[f"{name}.weight"] = weight
        adamw.zero_grad()
        logits = torch.func.functional_call(base, weights, (ids,))
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        norms.append(float(nn.utils.clip_grad_norm_(factors.values(), MAX_NORM)))
        adamw.step()
    return norms, {name: value.detach() for name, value in factors.items()}
