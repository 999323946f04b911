"""torch's optimizers with several sets of arguments, plain and wrapped: the wrapped one must behave like the plain
one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import ProcessGroupRegistry, declare
from meshstep.parallel.layout.spec import P
from torch import Tensor, nn

Wrap = Callable[[torch.optim.Optimizer], torch.optim.Optimizer]
Options = dict[str, Any]

# The sets of arguments to test in addition to the defaults. Muon supports matrices only.
ARGUMENTS: dict[str, list[Options]] = {
    "ASGD": [{"lambd": 0.1}, {"lr": 0.02, "t0": 100, "weight_decay": 0.1}],
    "Adadelta": [{"lr": 0.1, "weight_decay": 0.1}, {"rho": 0.95}],
    "Adafactor": [{"lr": 0.1, "weight_decay": 0.1}, {"d": 1.5}],
    "Adagrad": [{"lr": 0.1, "weight_decay": 0.1}, {"initial_accumulator_value": 0.1, "lr_decay": 0.5}],
    "Adam": [{"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}, {"betas": (0.7, 0.8), "decoupled_weight_decay": True}],
    "AdamW": [{"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}, {"eps": 0.1}],
    "Adamax": [{"lr": 0.1, "weight_decay": 0.1}, {"betas": (0.7, 0.8)}],
    "Muon": [{"lr": 0.01, "nesterov": False}],
    "NAdam": [
        {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True},
        {"momentum_decay": 6e-3, "weight_decay": 0.1},
    ],
    "RAdam": [{"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": True}, {"eps": 1e-6}],
    "RMSprop": [{"lr": 0.01, "centered": True, "momentum": 0.1}, {"alpha": 0.9, "weight_decay": 0.1}],
    "Rprop": [{"lr": 2e-4, "etas": (0.5, 1.5)}, {"step_sizes": (2e-6, 100)}],
    "SGD": [
        {"lr": 0.01, "momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    ],
}
FLAGS: list[Options] = [{}, {"foreach": False}, {"foreach": True}, {"fused": True}, {"maximize": True}]
TENSOR_RATE = 0.01


class Kind(NamedTuple):
    name: str
    options: Options

    def __str__(self) -> str:
        return f"{self.name} {self.options}" if self.options else self.name

    @property
    def of(self) -> Callable[..., torch.optim.Optimizer]:
        found: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, self.name)
        return found

    def plain(self, groups: Any) -> torch.optim.Optimizer:
        options = {key: value.clone() if isinstance(value, Tensor) else value for key, value in self.options.items()}
        return self.of(groups, **options)


def kinds_of(name: str) -> Iterator[Kind]:
    """Yield each set of arguments with each of `FLAGS` that the optimizer has, and sets with the learning rate in a
    tensor."""
    known = inspect.signature(getattr(torch.optim, name)).parameters
    for flags in FLAGS:
        if flags.keys() <= known.keys():
            yield from (Kind(name, {**options, **flags}) for options in ({}, *ARGUMENTS[name]))
    if "foreach" in known:
        yield Kind(name, {"foreach": False, "lr": torch.tensor(TENSOR_RATE)})
    if "fused" in known and name != "Adagrad":
        yield Kind(name, {"fused": True, "lr": torch.tensor(TENSOR_RATE)})


class Net(nn.Module):
    """Two layers and a 0-dim parameter; for Muon, matrices only."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        bias = name != "Muon"
        self.layers = nn.Sequential(nn.Linear(2, 3, bias=bias), nn.Sigmoid(), nn.Linear(3, 1, bias=bias), nn.Sigmoid())
        self.gain = nn.Parameter(torch.tensor(0.5)) if bias else None
        self.to(dtype)
        declare(self, {"*": P()})

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y if self.gain is None else y * self.gain

    def loss(self, step: int = 0) -> Tensor:
        x = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], dtype=next(self.parameters()).dtype)
        y: Tensor = self(x * (1 + step))
        return y.sum()

    def groups(self) -> list[dict[str, Any]]:
        """Return two param groups, one per linear layer, without ``gain``."""
        return [{"params": list(self.layers[0].parameters())}, {"params": list(self.layers[2:].parameters())}]


def wrapper(registry: ProcessGroupRegistry) -> Wrap:
    """Return a function that wraps a torch optimizer in a `ParallelOptimizer` on this mesh."""
    return lambda plain: ParallelOptimizer(plain, registry)


def train(model: Net, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        model.loss(step).backward()
        optimizer.step()


def numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the parameters and the optimizer's full state; tensors are not converted."""
    params = [param.detach().clone() for param in model.parameters()]
    states = [dict(optimizer.state[param]) for param in model.parameters() if param in optimizer.state]
    return [params, [[(key, _copy(value)) for key, value in sorted(state.items())] for state in states]]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def same(one: Any, other: Any) -> bool:
    """Return whether nested containers hold equal values. Tensors must also have equal dtypes, and lists and tuples the
    same type."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


every_name = pytest.mark.parametrize("name", ARGUMENTS)
every_optimizer = pytest.mark.parametrize("kind", [Kind(name, {}) for name in ARGUMENTS], ids=str)
