"""A hand-written tensor-parallel network on plain torch.distributed, and the equivalent dense network.

y = down(gelu(up(norm(x))))        up: sharded over its output features, down: over its input features
"""

from typing import Any

import torch
import torch.distributed as dist
from meshstep import P, ProcessGroupRegistry, declare, shard
from torch import Tensor, nn


class DenseNet(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


class MyNet(nn.Module):
    """The network with sharded weights.

    Args:
        forget_sum: Plant a bug: backward does not sum the partial gradients of the input of `up` over the ranks. With
            a plain torch optimizer, training still runs but is slightly wrong, and the replicas of `norm` diverge.
    """

    def __init__(self, dense: DenseNet, registry: ProcessGroupRegistry, forget_sum: bool = False) -> None:
        super().__init__()
        self.axis = "tensor" if "tensor" in registry.topology.axes else None
        self.group = registry.group("tensor") if self.axis and registry.size("tensor") > 1 else None
        self.forget_sum = forget_sum
        specs = {
            "norm.weight": P(),
            "norm.bias": P(),
            "up.weight": P(self.axis, None),
            "up.bias": P(self.axis),
            "down.weight": P(None, self.axis),
            "down.bias": P(),
        }
        pieces = {name: shard(param, specs[name], registry) for name, param in dense.named_parameters()}
        hidden, width = pieces["up.weight"].shape
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.to(registry.device, pieces["up.weight"].dtype)
        self.load_state_dict(pieces)
        declare(self, specs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.group is not None and not self.forget_sum:
            x = SumInBackward.apply(x, self.group)
        y = nn.functional.linear(nn.functional.gelu(self.up(x)), self.down.weight)
        if self.group is not None:
            y = SumInForward.apply(y, self.group)
        return y + self.down.bias


class SumInBackward(torch.autograd.Function):
    """Autograd function that returns x, and sums its gradient over the ranks in backward.

    x is replicated and every rank uses it, so its gradient is the sum of the ranks' gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumInForward(torch.autograd.Function):
    """Autograd function that sums y over the ranks. In backward, each term gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: dist.ProcessGroup) -> Tensor:
        y = y.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
