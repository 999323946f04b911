"""Models in several layouts with replica checks, and a function that flips a single bit of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

import torch
from dtensors import local, registry_of
from meshstep.amp import Mode, NaiveFp16, Precision, precision_of
from meshstep.optim import (
    ByGroup,
    Fingerprints,
    Offloaded,
    ParallelOptimizer,
    Sharded,
    StatePlacement,
)
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

What = Literal["parameter", "gradient", "model", "exp_avg", "exp_avg_sq", "step", "momentum_buffer"]
EVERY = 4


@dataclass(frozen=True)
class Layout:
    """A mesh, the layout of the parameters on it, and how the model is stepped."""

    axes: tuple[tuple[str, int], ...]
    specs: dict[str, P]
    precision: Mode | Precision = "fp32"
    options: dict[str, Any] = field(default_factory=dict)
    roles: dict[str, Any] = field(default_factory=dict)
    dtensors: Literal["", "split", "fully sharded"] = ""
    bit_of: str = "bias"  # the parameter in which a test flips a bit: the one with the most replicas

    @property
    def topology(self) -> Topology:
        return Topology(roles=self.roles or None, **dict(self.axes))

    def registry(self) -> ProcessGroupRegistry:
        return registry_of(self.axes) if self.dtensors else ProcessGroupRegistry(self.topology)

    @property
    def placements(self) -> tuple[StatePlacement, ...]:
        states = self.options.get("states", ())
        return (states,) if isinstance(states, StatePlacement) else tuple(states)

    def copies(self, parameter: str, rank: int) -> tuple[int, ...]:
        """Return the ranks that update identical replicas of a parameter, including ``rank``."""
        spec, topology = self.specs[parameter], self.topology
        apart = {*spec.sharded_axes, *topology.pipe_axes} - {*dict(spec.tied)}
        apart |= {one.axis for one in self.placements if isinstance(one, Sharded)}
        apart |= {"data"} if self.dtensors == "fully sharded" else set()

        def at(rank: int) -> list[int]:
            return [topology.coordinate_of(rank, axis) for axis in sorted(apart)]

        return tuple(other for other in range(topology.world_size) if at(other) == at(rank))


GRID = (("data", 2), ("tensor", 2))
COPIED = {"matrix": P(), "bias": P()}
SPLIT = {"matrix": P("tensor"), "bias": P()}
LAYOUTS = {
    "data": Layout((("data", 2),), COPIED),
    "data x tensor": Layout((("data", 3), ("tensor", 2)), SPLIT),
    "ZeRO-1, copied over tensor": Layout((("data", 2), ("tensor", 2)), SPLIT, options={"states": Sharded("data")}),
    "bf16 masters": Layout((("data", 2), ("tensor", 2)), SPLIT, "bf16"),
    "fp16 masters": Layout((("data", 2),), COPIED, NaiveFp16(init_scale=64.0, hysteresis=1)),
    "experts": Layout(
        (("data", 2), ("expert", 2)), {"matrix": P("expert"), "bias": P()}, roles={"expert": "data"}, options={}
    ),
    "offloaded": Layout(GRID, SPLIT, options={"states": Offloaded()}),
    "one of two offloaded": Layout(GRID, SPLIT, options={"states": Offloaded(0.5)}),
    "offloaded bf16 masters": Layout(GRID, SPLIT, "bf16", options={"states": Offloaded(0.5)}),
    "ZeRO-1, offloaded": Layout(GRID, SPLIT, options={"states": (Sharded("data"), Offloaded())}),
    "tied": Layout((("data", 2), ("pipe", 2)), {"matrix": P(tied={"pipe": (0, -1)}), "bias": P()}, bit_of="matrix"),
    "DTensor": Layout(GRID, SPLIT, dtensors="split"),
    "HSDP": Layout((("replica", 3), ("data", 2)), COPIED, dtensors="fully sharded"),
    "overlap": Layout(GRID, SPLIT, options={"overlap": True}),
    "by group": Layout(GRID, SPLIT, options={"max_norm": ByGroup((0.2, None), others=0.3)}),
    "largest element": Layout((("data", 3), ("tensor", 2)), SPLIT, options={"max_norm": 0.05, "norm_type": inf}),
    "a collective a group": Layout((("data", 3), ("tensor", 2)), SPLIT, options={"reduction": "per_group"}),
}


class Model(nn.Module):
    """A model of two parameters; the batch that a rank sees depends only on its data coordinates."""

    def __init__(self, layout: Layout, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        self.registry, self.layout = registry, layout
        generator = torch.Generator().manual_seed(3)
        matrix, bias = (torch.randn(size, generator=generator) for size in ((8, 5), (7,)))
        for axis in layout.specs["matrix"].sharded_axes:
            matrix = matrix.chunk(registry.size(axis))[registry.coordinate[axis]]
        if layout.dtensors == "split":
            mesh = registry.device_mesh("tensor")
            matrix, bias = DTensor.from_local(matrix, mesh, [Shard(0)]), DTensor.from_local(bias, mesh, [Replicate()])
        self.matrix, self.bias = nn.Parameter(matrix.clone()), nn.Parameter(bias)
        declare(self, layout.specs)

    def forward(self, step: int) -> Tensor:
        topology = self.registry.topology
        seed = step * 100 + self.registry.rank(*topology.data_axes)
        matrix, bias = (param.to_local() if isinstance(param, DTensor) else param for param in (self.matrix, self.bias))
        x = torch.randn(7, generator=torch.Generator().manual_seed(seed)).to(bias)
        return (matrix.square().mean() * x.sum() + (bias * x).tanh().sum()).float()


class Run:
    """A model in a layout, whose replicas are checked every ``every`` steps; None: only in the first step."""

    def __init__(
        self,
        name: str,
        registry: ProcessGroupRegistry,
        make: Callable[[Any], torch.optim.Optimizer] | None = None,
        every: int | None = EVERY,
        commit: Callable[[], Any] | None = None,
        **options: Any,
    ) -> None:
        layout = LAYOUTS[name]
        self.model = Model(layout, registry)
        mode = precision_of(layout.precision)
        mode.prepare(self.model)
        make = make or (lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, fused=True))
        compared: Any = "first" if every is None else Fingerprints(every=every)
        always = {"precision": mode, "check_replicas": compared, "commit": commit}
        options = {"max_norm": 0.5, **always, **layout.options, **options}
        if layout.dtensors == "fully sharded":
            options["data_parallel"] = fully_shard(self.model, mesh=registry.device_mesh("replica", "data"))
        groups: Any = self.model.named_parameters()
        if isinstance(options["max_norm"], ByGroup):
            groups = [{"params": [pair]} for pair in groups]
        self.optimizer: ParallelOptimizer[Any] = ParallelOptimizer(make(groups), registry, **options)
        self.steps = 0

    def backward(self, scale: float = 1.0) -> None:
        self.optimizer.zero_grad()
        for _ in range(self.optimizer._setup.accumulation_steps or 1):
            self.optimizer.backward(self.model(self.steps) * scale)
        self.steps += 1

    def complete(self) -> None:
        """Reduce the gradients, so that replicas hold equal gradients."""
        self.optimizer._completion(self.optimizer._window, self.optimizer._grad_sync)

    def step(self, scale: float = 1.0) -> Any:
        self.backward(scale)
        return self.optimizer.step()

    def tensor(self, what: What, name: str) -> Tensor:
        """Return the updated tensor of a parameter, its gradient, one of its states, or the model's own tensor."""
        if what == "model":
            return local(self.model.get_parameter(name))
        row = next(row for row in self.optimizer.stepped_tensors() if row.name == name)
        if what == "gradient":
            gradient = row.grad_tensor.grad
            assert gradient is not None
            return gradient
        piece = row.tensor
        return piece.detach() if what == "parameter" else self.optimizer.state[piece][what]

    def everything(self) -> list[Tensor]:
        """Return copies of the updated tensors and of their states. The model's tensors are not needed: if they are not
        the updated tensors, each step overwrites them."""
        pieces = [piece.tensor for piece in self.optimizer.stepped_tensors()]
        states = [value for piece in pieces for value in self.optimizer.state[piece].values()]
        return [tensor.detach().clone() for tensor in [*pieces, *states]]


def flip(tensor: Tensor, bit: int, element: int = 0) -> None:
    """Flip one bit of one element in place, like a memory error: version counters do not change."""
    flat = tensor.data.view(-1)
    size = flat.element_size()
    flat.view(torch.uint8)[element * size + bit // 8] ^= 1 << bit % 8


def bits_of(tensors: list[Tensor]) -> bytes:
    return b"".join(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
