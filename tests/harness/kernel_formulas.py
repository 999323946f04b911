"""Formulas of meshstep's kernels in plain torch: updates, rounding noise and powers. Tests compare kernels with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

import torch
from meshstep.optim.norm.powers import HIGH
from torch import Tensor

# Updates --------------------------------------------------------------------------------------------------------------

# They compute in the dtype of their arguments. Argument p is the parameter, g the gradient times a factor (negative to
# maximize), and t the number of the step, counted from 1. The fields have the order of the kernels' hyper-parameters.


@dataclass(frozen=True)
class Adam:
    """Formula of Adam and AdamW. Optimizer states: both moments, and with ``amsgrad`` the maximum of the second.

    With ``decoupled``, the weight decay does not go through the moments (AdamW).

    References: Kingma, Ba 2015 (arXiv:1412.6980); for ``decoupled`` Loshchilov, Hutter 2019 (arXiv:1711.05101); for
    ``amsgrad`` Reddi et al. 2018.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    amsgrad: bool = False

    def step(self, p: Tensor, g: Tensor, states: list[Tensor], t: int) -> None:
        """Update parameter ``p`` and its optimizer states in place, with gradient ``g``, in step ``t`` = 1, 2, ..."""
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
    """Formula of SGD. Optimizer state: the momentum buffer, initially zeros; none without momentum.

    As in torch, the momentum buffer does not contain the learning rate, also with ``nesterov``. With ``dampening``,
    torch's first step differs: torch starts the buffer with the undampened gradient.
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def step(self, p: Tensor, g: Tensor, states: list[Tensor], t: int) -> None:
        g = g + self.weight_decay * p
        if states:
            kept = states[0].copy_(self.momentum * states[0] + (1 - self.dampening) * g)
            g = g + self.momentum * kept if self.nesterov else kept
        p.sub_(self.lr * g)


@dataclass(frozen=True)
class Adagrad:
    """Formula of Adagrad (Duchi, Hazan, Singer 2011). Optimizer state: the sum of the gradients' squares."""

    lr: float
    lr_decay: float = 0.0
    eps: float = 1e-10
    weight_decay: float = 0.0

    def step(self, p: Tensor, g: Tensor, states: list[Tensor], t: int) -> None:
        g = g + self.weight_decay * p
        total = states[0].add_(g * g)
        p.sub_(self.lr / (1 + (t - 1) * self.lr_decay) * g / (total.sqrt() + self.eps))


@dataclass(frozen=True)
class Lion:
    """Formula of Lion (Chen et al. 2023, arXiv:2302.06675). Optimizer state: the momentum.

    In float32 without ``maximize`` the kernels give the bits of this formula if the factor on ``g`` is a power of two.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0

    def step(self, p: Tensor, g: Tensor, states: list[Tensor], t: int) -> None:
        momentum = states[0]
        update = (self.beta1 * momentum + (1 - self.beta1) * g).sign()
        p.copy_(p * (1 - self.lr * self.weight_decay) + update * -self.lr)
        momentum.copy_(self.beta2 * momentum + (1 - self.beta2) * g)


# Stochastic rounding --------------------------------------------------------------------------------------------------

LANES, ROWS = 512, 8  # a counter serves the elements of one column of 8 rows, each of 512 elements


def philox(key: int, counter: Tensor) -> Tensor:
    """Return the four words of Philox 4x32 with 10 rounds, [4, n] int64, each a 32-bit number."""
    mask = 0xFFFFFFFF
    k0, k1 = key & mask, key >> 32 & mask
    c0, c1, c2, c3 = counter
    for _ in range(10):
        (high_a, low_a), (high_b, low_b) = _product(0xD2511F53, c0), _product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = k0 + 0x9E3779B9 & mask, k1 + 0xBB67AE85 & mask
    return torch.stack([c0, c1, c2, c3])


def _product(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower 32 bits of the product of two 32-bit numbers, in int64."""
    low = factor * (x & 0xFFFF)  # below 2^48
    high = factor * (x >> 16) + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


def noise_of(key: int, number: int, step: int, numel: int) -> Tensor:
    """Return the noise of a tensor with ``numel`` elements: [numel] int64 in [0, 2^16)."""
    blocks = -(-numel // (ROWS * LANES))
    counter = torch.arange(blocks * LANES)
    others = torch.tensor([[number], [step & 0xFFFFFFFF], [step >> 32]]).expand(3, counter.numel())
    words = philox(key, torch.cat([counter[None], others]))
    halves = torch.stack([words & 0xFFFF, words >> 16], 1)  # [4, 2, counters]
    return halves.view(ROWS, blocks, LANES).transpose(0, 1).reshape(-1)[:numel]


def round_plainly(source: Tensor, noise: Tensor) -> Tensor:
    bits = source.contiguous().view(torch.int32).long()
    rounded = torch.where(source.isnan(), bits, bits + noise.view(source.shape)) >> 16
    return rounded.to(torch.int16).view(torch.bfloat16)


# Powers ---------------------------------------------------------------------------------------------------------------


def reference_powers(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the values of `local_powers`, [n] float64, computed one gradient at a time."""
    if not gradients:
        return torch.zeros(0, dtype=torch.float64)
    if norm_type >= HIGH and norm_type != inf:
        largest = reference_powers(gradients, inf)
        scaled = [g.double() / max(float(m), 1e-300) for g, m in zip(gradients, largest, strict=True)]
        return torch.stack([g.abs().pow(norm_type).sum() for g in scaled]).pow(1 / norm_type) * largest
    if norm_type == inf:
        powers = [g.double().abs().max() if g.numel() else g.new_zeros((), dtype=torch.float64) for g in gradients]
    else:
        powers = [g.double().abs().pow(norm_type).sum() for g in gradients]
    return torch.stack(powers)
