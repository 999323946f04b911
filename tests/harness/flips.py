"""Models of several layouts whose copies are watched, and single bits turned in one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from meshstep.amp import Mode, NaiveFp16, Precision, precision_of
from meshstep.optim import Fingerprints, Measure, ParallelOptimizer, Sharded
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import Tensor, nn

What = Literal["parameter", "gradient", "model", "exp_avg", "exp_avg_sq", "step", "momentum_buffer"]
EVERY = 4


@dataclass(frozen=True)
class Layout:
    """A mesh, what lies how on it, and how it is stepped."""

    axes: tuple[tuple[str, int], ...]
    specs: dict[str, P]
    precision: Mode | Precision = "fp32"
    options: dict[str, Any] = field(default_factory=dict)
    roles: dict[str, Any] = field(default_factory=dict)

    @property
    def topology(self) -> Topology:
        return Topology(roles=self.roles or None, **dict(self.axes))


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
}


class Model(nn.Module):
    """Two parameters; what a rank sees of the batch depends on its data coordinates alone."""

    def __init__(self, layout: Layout, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        self.registry, self.layout = registry, layout
        generator = torch.Generator().manual_seed(3)
        matrix, bias = (torch.randn(size, generator=generator) for size in ((8, 5), (7,)))
        for axis in layout.specs["matrix"].named_axes:
            matrix = matrix.chunk(registry.size(axis))[registry.coordinate[axis]]
        self.matrix, self.bias = nn.Parameter(matrix.clone()), nn.Parameter(bias)
        declare(self, layout.specs)

    def forward(self, step: int) -> Tensor:
        topology = self.registry.topology
        seed = step * 100 + self.registry.rank(*topology.data_axes)
        x = torch.randn(7, generator=torch.Generator().manual_seed(seed)).to(self.bias)
        return (self.matrix.square().mean() * x.sum() + (self.bias * x).tanh().sum()).float()


class Run:
    """A model in a layout, watched every `EVERY` steps; ``step`` is one step of it."""

    def __init__(
        self,
        name: str,
        registry: ProcessGroupRegistry,
        make: Callable[[Any], torch.optim.Optimizer] | None = None,
        every: int | None = EVERY,
        **options: Any,
    ) -> None:
        layout = LAYOUTS[name]
        self.model = Model(layout, registry)
        mode = precision_of(layout.precision)
        mode.prepare(self.model)
        make = make or (lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, fused=True))
        measure = Measure(check_replicas="first" if every is None else Fingerprints(every=every))
        options = {"max_norm": 0.5, "precision": mode, "measure": measure, **layout.options, **options}
        self.optimizer: ParallelOptimizer[Any] = ParallelOptimizer(
            make(self.model.named_parameters()), registry, **options
        )
        self.steps = 0

    def backward(self, scale: float = 1.0) -> None:
        self.optimizer.zero_grad()
        for _ in range(self.optimizer._setup.accumulation_steps or 1):
            self.optimizer.backward(self.model(self.steps) * scale)
        self.steps += 1

    def step(self, scale: float = 1.0) -> Any:
        self.backward(scale)
        return self.optimizer.step()

    def tensor(self, what: What, name: str) -> Tensor:
        """What is stepped for a parameter, its gradient or a state of it; or the model's own tensor."""
        if what == "model":
            return self.model.get_parameter(name).detach()
        piece = next(piece.piece for piece in self.optimizer.pieces() if piece.name == name)
        if what == "gradient":
            assert piece.grad is not None
            return piece.grad
        return piece.detach() if what == "parameter" else self.optimizer.state[piece][what]

    def everything(self) -> list[Tensor]:
        """Copies of what is stepped, and of its states. (Where that is not the model's, each step brings it there.)"""
        pieces = [piece.piece for piece in self.optimizer.pieces()]
        states = [value for piece in pieces for value in self.optimizer.state[piece].values()]
        return [tensor.detach().clone() for tensor in [*pieces, *states]]


def flip(tensor: Tensor, bit: int, element: int = 0) -> None:
    """Turn one bit of one element where it lies, as memory does: nobody is told."""
    flat = tensor.data.view(-1)
    size = flat.element_size()
    flat.view(torch.uint8)[element * size + bit // 8] ^= 1 << bit % 8


def bits_of(tensors: list[Tensor]) -> bytes:
    """All their bits, one after the other."""
    return b"".join(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
