"""Reference formulas of the kernels, in torch operations and in the dtype of the arguments.

g is the gradient times the factor (negative to maximize), and t the number of the step, counted from 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from torch import Tensor


@dataclass(frozen=True)
class Adam:
    """Adam and AdamW. States: first moment, second moment, largest second moment.

    Kingma, Ba 2015 (arXiv:1412.6980); Loshchilov, Hutter 2019 (arXiv:1711.05101) for ``decoupled``; Reddi et al. 2018
    for ``amsgrad``.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    amsgrad: bool = False

    def step(self, p: Tensor, g: Tensor, states: list[Tensor], t: int) -> None:
        """Step ``p`` and its states in place."""
        m, v, *largest = states
        if self.decoupled:
            p.mul_(1 - self.lr * self.weight_decay)
        else:
            g = g + self.weight_decay * p
        m.copy_(self.beta1 * m + (1 - self.beta1) * g)
        v.copy_(self.beta2 * v + (1 - self.beta2) * g * g)
        second = v
        if self.amsgrad:
            second = largest[0].copy_(largest[0].maximum(v))
        mean, root = m / (1 - self.beta1**t), second.sqrt() / sqrt(1 - self.beta2**t)
        p.sub_(self.lr * mean / (root + self.eps))


@dataclass(frozen=True)
class SGD:
    """torch's SGD, with Nesterov momentum as in Sutskever et al. 2013. State: the momentum, initially zeros."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def step(self, p: Tensor, g: Tensor, states: list[Tensor], t: int) -> None:
        """Step ``p`` and its states in place."""
        g = g + self.weight_decay * p
        if states:
            kept = states[0].copy_(self.momentum * states[0] + (1 - self.dampening) * g)
            g = g + self.momentum * kept if self.nesterov else kept
        p.sub_(self.lr * g)


@dataclass(frozen=True)
class Adagrad:
    """Adagrad (Duchi, Hazan, Singer 2011). State: the sum of squares."""

    lr: float
    lr_decay: float = 0.0
    eps: float = 1e-10
    weight_decay: float = 0.0

    def step(self, p: Tensor, g: Tensor, states: list[Tensor], t: int) -> None:
        """Step ``p`` and its states in place."""
        g = g + self.weight_decay * p
        total = states[0].add_(g * g)
        p.sub_(self.lr / (1 + (t - 1) * self.lr_decay) * g / (total.sqrt() + self.eps))
