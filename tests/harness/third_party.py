"""Small optimizers under the names of libraries' classes, which know an optimizer by its names alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class SignDescent(torch.optim.Optimizer):
    """Elementwise: the sign of a momentum (Lion, Tiger)."""

    def __init__(self, params: Any, lr: float = 0.01, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    momentum = state.setdefault("momentum", torch.zeros_like(param))
                    momentum.lerp_(param.grad, 0.3)
                    param.sub_(self.update(param, momentum), alpha=group["lr"])

    def update(self, param: Tensor, momentum: Tensor) -> Tensor:
        """What is subtracted, before the rate."""
        return momentum.sign()


class TrustRatio(SignDescent):
    """Not elementwise: the norm of the whole tensor decides how far it goes (LAMB, LARS)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()

    def update(self, param: Tensor, momentum: Tensor) -> Tensor:
        return momentum.mul(param.norm() / momentum.norm())


class QuantizedMomentum(SignDescent):
    """Its momentum is rounded to 8 bits in blocks of 256 elements, in tensors of 4,096 or more (torchao, bitsandbytes)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()

    def update(self, param: Tensor, momentum: Tensor) -> Tensor:
        if momentum.numel() >= 4096:
            blocks = momentum.reshape(-1).view(-1, 256)
            scale = blocks.abs().amax(1, keepdim=True) / 127
            momentum.copy_(((blocks / scale).round() * scale).view_as(momentum))
        return momentum


def under_the_name(package: str, name: str, base: type[SignDescent] = SignDescent) -> type[SignDescent]:
    """A class of that name, as if it came from there, with a `step` of its own."""

    def step(self: SignDescent, closure: Any = None) -> None:
        base.step(self)

    return type(name, (base,), {"__module__": f"{package}.optim", "step": step})
