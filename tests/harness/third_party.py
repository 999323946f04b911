"""Small optimizers under the class names of third-party optimizers, because meshstep recognizes them by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class SignDescent(torch.optim.Optimizer):
    """An elementwise optimizer: updates by the sign of the momentum (as Lion and Tiger)."""

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
        """Return the value to subtract, before multiplication by the learning rate."""
        return momentum.sign()


class TrustRatio(SignDescent):
    """A non-elementwise optimizer: the norm of the full tensor scales the update (as LAMB and LARS)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()

    def update(self, param: Tensor, momentum: Tensor) -> Tensor:
        return momentum.mul(param.norm() / momentum.norm())


class QuantizedMomentum(SignDescent):
    """Rounds the momentum to 8 bits in blocks of 256 elements, for tensors of 4,096 elements or more (as torchao
    and bitsandbytes)."""

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
    """Return a class with this name, with the module of this package, and with its own `step`."""

    def step(self: SignDescent, closure: Any = None) -> None:
        base.step(self)

    return type(name, (base,), {"__module__": f"{package}.optim", "step": step})
