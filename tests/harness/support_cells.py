"""Compute the cells of the support matrix: layouts, forms of data parallelism, and precision modes.

Each layout has all modes, except those in `SOME`. The model is two blocks of a layer norm and two linear layers. All
layouts use the same full weights and batches. So a cell is correct if its norms and final weights are, up to rounding,
those of a single process that trains the full model in the same mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import arguments
from meshstep.amp import ApexFp16, Fp8
from meshstep.optim import Booster, ParallelOptimizer
from meshstep.parallel import (
    ColumnParallelLinear,
    LayerNorm1D,
    LayerNorm2D,
    Linear2D,
    P,
    ProcessGroupRegistry,
    RowParallelLinear,
    Topology,
    cross_entropy_2d,
    declare,
    shard,
    unshard,
)
from meshstep.parallel.layout.annotation import annotation_of
from precision_modes import MODES as PLAIN_MODES
from torch import Tensor, nn

WIDTH, HIDDEN, BATCH, STEPS = 32, 64, 16, 3  # shards have 16 features, the minimum for 8-bit layers
MAX_NORM = 1.0

# All modes have default options, except bf16 with stochastic rounding.
MODES = {**PLAIN_MODES, "O3": ApexFp16("O3"), "fp8": Fp8()}
LAYOUTS = (
    "one process",
    "tensor=2",
    "row=2,col=2",
    "pipe=2",
    "data=2",
    "data=2,tensor=2",
    "data=2,pipe=2",
    "data=2,row=2,col=2",
)
SOME = {"data=2,row=2,col=2": ("fp32", "fp16", "bf16")}  # runs with eight processes are slow
FORMS: dict[str, dict[str, Any]] = {
    f"{name}{suffix}": {"data_parallel": None if name == "None" else name.strip('"'), **options}
    for suffix, options in (("", {}), (", offload", {"offload": 0.5}))
    for name in ("None", '"ddp"', '"zero1"', '"zero2"', '"fsdp"')
}

# Relative tolerances of the norms and of the weights for the rounding of each mode. A few clipped steps change the
# matrices by about 25 % of their norm. With stochastic rounding, each shard draws its own noise, so a sharded run rounds
# differently from one process. 8-bit weights and activations (e4m3) have 4 significant bits, gradients (e5m2) have 3.
TOLERANCE = {
    "fp32": (1e-6, 2e-6),
    "fp16": (1e-4, 3e-3),
    "bf16": (1e-3, 4e-2),
    "bf16 stochastic": (4e-3, 8e-2),
    "fp16_naive": (3e-4, 6e-3),
    "O0": (1e-6, 2e-6),
    "O1": (1e-4, 3e-3),
    "O2": (3e-4, 6e-3),
    "O3": (3e-4, 6e-3),
    "fp8": (1.5e-2, 1.5e-1),
}


def topology_of(layout: str) -> Topology:
    return Topology() if layout == "one process" else Topology.parse(layout)


# The model ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """x + down(tanh(up(norm(x)))), sharded over the mesh's axes."""

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        axes = registry.topology.axes
        if "tensor" in axes:
            self.norm: nn.Module = LayerNorm1D(WIDTH)
            self.up: nn.Module = ColumnParallelLinear(WIDTH, HIDDEN, registry)
            self.down: nn.Module = RowParallelLinear(HIDDEN, WIDTH, registry)
        elif "row" in axes:
            self.norm = LayerNorm2D(WIDTH, registry)
            self.up, self.down = Linear2D(WIDTH, HIDDEN, registry), Linear2D(HIDDEN, WIDTH, registry, bias="all")
        else:
            self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
            declare(self, {"*": P()})

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Blocks(nn.Module):
    """Two blocks; on a pipeline, the one block of this stage."""

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        torch.manual_seed(6)
        both = {str(index): Block(registry) for index in range(2)}
        stage = registry.coordinate.get("pipe")
        self.blocks = nn.ModuleDict(both if stage is None else {str(stage): both[str(stage)]})
        declare(self)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the batch of a step: x [batch, width] and classes [batch], the same on all ranks."""
    generator = torch.Generator().manual_seed(40 + step)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return x, x.flip(1).argmax(1)


def full_weights(model: nn.Module, registry: ProcessGroupRegistry) -> dict[str, Tensor]:
    """Return the full parameters by name, in the layout of `nn.Linear`, in float32; with a pipeline, of this stage."""
    full = {}
    for name, param in model.named_parameters():
        annotation = annotation_of(param)  # for a DTensor, of axes that its placements leave out
        assert annotation is not None
        local = param.full_tensor() if hasattr(param, "full_tensor") else param.detach()
        whole = unshard(local, annotation.spec, registry).float()
        by_rows = "row" in registry.topology.axes and whole.dim() == 2
        full[name.removeprefix("module.")] = whole.t() if by_rows else whole
    return full


# Running a cell -------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """The result of a cell on one rank: the norms and the full weights at the end; or the text of the error."""

    norms: list[float]
    weights: dict[str, Tensor]
    refusal: str


def run_cells(layout: str, forms: Sequence[str]) -> dict[str, dict[str, Run]]:
    """Run a few steps in each form and mode on this rank, with the same process groups and batches."""
    topology = topology_of(layout)
    if any("fsdp" in form for form in forms):
        from dtensors import registry_of  # creates meshes that torch does not confuse with those of a closed registry

        registry = registry_of(tuple(zip(topology.axes, topology.sizes, strict=True)))
    else:
        registry = ProcessGroupRegistry(topology)
    with registry:
        batches = [local_batch(step, registry) for step in range(STEPS)]
        return {
            form: {mode: run_cell(registry, form, mode, batches) for mode in SOME.get(layout, MODES)} for form in forms
        }


def differences(run: Run, reference: Run, mode: str) -> list[str]:
    """Return the values that differ by more than the mode's rounding; a rank of a pipeline has the weights of its stage
    only."""
    of_norm, of_weight = TOLERANCE[mode]
    found = []
    for step, (norm, expected) in enumerate(zip(run.norms, reference.norms, strict=True)):
        if not abs(norm / expected - 1) <= of_norm:
            found.append(f"norm of step {step}: {norm:.6f}, expected {expected:.6f}")
    for name, weight in run.weights.items():
        expected_weight = reference.weights[name]
        error = float((weight - expected_weight).abs().max() / expected_weight.abs().max())
        if not error <= of_weight:
            found.append(f"{name}: {error:.1e} off")
    return found


def run_cell(registry: ProcessGroupRegistry, form: str, mode: str, batches: Sequence[tuple[Tensor, Tensor]]) -> Run:
    """Run some steps with `Booster`; for a rejected combination, return the error's text."""
    model: nn.Module = Blocks(registry)
    sgd = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, fused=True)
    try:
        booster = Booster(MODES[mode], registry, **arguments(max_norm=MAX_NORM, **FORMS[form]))
        grid = "row" in registry.topology.axes
        criterion = (lambda x, y: cross_entropy_2d(x, y, registry)) if grid else F.cross_entropy
        model, optimizer, criterion, _, _ = booster.boost(model, sgd, criterion)
    except ValueError as error:
        return Run([], {}, str(error))
    norms = []
    for x, y in batches:
        optimizer.zero_grad()
        backward(model, optimizer, criterion, x, y)
        stats = optimizer.step()
        assert stats is not None
        norms.append(float(stats.total_norm))
    assert optimizer.skipped_steps == 0
    return Run(norms, full_weights(model, registry), "")


def local_batch(step: int, registry: ProcessGroupRegistry) -> tuple[Tensor, Tensor]:
    """Return this rank's part of `batch`."""
    axes = registry.topology.axes
    rows = (*registry.topology.data_axes, *(axis for axis in axes if axis == "row"))
    x, y = batch(step)
    return shard(x, P(rows, "col" if "col" in axes else None), registry), shard(y, P(rows), registry)


def backward(model: nn.Module, optimizer: ParallelOptimizer, criterion: Any, x: Tensor, y: Tensor) -> None:
    """Run backward; on a pipeline stage by stage, with activations and their gradients sent in float32."""
    registry = optimizer.registry
    if "pipe" not in registry.topology.axes:
        optimizer.backward(criterion(model(x), y))
        return
    stage = registry.coordinate["pipe"]
    other = registry.ranks("pipe")[1 - stage]
    travelling = torch.empty(x.shape)
    if stage == 0:
        out = model(x)
        dist.send(out.detach().float(), other)
        dist.recv(travelling, other)
        out.backward(travelling.to(out.dtype))
    else:
        dist.recv(travelling, other)
        hidden = travelling.requires_grad_()
        optimizer.scale_loss(criterion(model(hidden), y)).backward()
        assert hidden.grad is not None
        dist.send(hidden.grad, other)
