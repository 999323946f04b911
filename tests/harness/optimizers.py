"""The optimizers that tests step, and functions that extract comparable values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from arguments import arguments
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import ProcessGroupRegistry
from scenarios import SCENARIOS, build
from torch import Tensor, nn

# Optimizer constructors by kind; called with ``(params, fused)``.
OPTIMIZERS: dict[str, Callable[[Any, bool], torch.optim.Optimizer]] = {
    "adamw": lambda params, fused: torch.optim.AdamW(params, lr=1e-2, fused=fused),
    "adam": lambda params, fused: torch.optim.Adam(params, lr=1e-2, fused=fused),
    "sgd": lambda params, fused: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=fused),
    "sgd, dampening": lambda params, fused: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.3, fused=fused),
    "adagrad": lambda params, fused: torch.optim.Adagrad(params, lr=1e-2, fused=fused),
}


def adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    """Return AdamW, by default fused and with eps 1e-4. torch's default 1e-8 is 0 in float16: O3 would divide 0 by 0."""
    return torch.optim.AdamW(params, **{"lr": 1e-2, "eps": 1e-4, "fused": True, **options})


def momentum_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True)


# Optimizers that can step parameters of every precision mode, by kind.
FOR_HALF_TYPES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "adamw, not fused": lambda params: adamw(params, fused=False),
    "sgd": momentum_sgd,
    "plain sgd": lambda params: torch.optim.SGD(params, lr=1e-2, fused=True),
}


def stepped(optimizer: ParallelOptimizer) -> list[Tensor]:
    """Return the tensors that the wrapped optimizer updates: the parameters, or their master weights."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def optimizer_for(
    name: str, registry: ProcessGroupRegistry, kind: str = "adamw", fused: bool = True, **options: Any
) -> tuple[nn.Module, ParallelOptimizer]:
    model = build(SCENARIOS[name], registry, torch.float32)
    assert model is not None
    return model, ParallelOptimizer(OPTIMIZERS[kind](model.parameters(), fused), registry, **arguments(**options))


# The learning rates of two param groups, from which a schedule starts.
BASES = [0.3, 0.02]


def optimizer_of(bases: list[float]) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2))], "lr": base} for base in bases])


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def snapshot(model: nn.Module, optimizer: ParallelOptimizer) -> list[Tensor]:
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    return [value.detach().clone() for value in (*model.parameters(), *state)]


class Counting(torch.optim.Optimizer):
    """An optimizer whose param groups count the steps and sum their weights, as schedule-free optimizers do."""

    elementwise = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5, "count": 0, "weight_sum": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            group["weight_sum"] += group["count"] ** 2
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] * group["count"] ** 2 / group["weight_sum"])
