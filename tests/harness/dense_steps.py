"""The dense reference of a drawn configuration: full parameters, in float64, computed element by element.

It uses none of the library's process groups, buckets, sharded tensors and window objects, only the definitions. These
are: the losses over which an element's gradient is summed, the divisor of this sum, the rule that a step leaves out a
parameter without a gradient, and the optimizers' formulas.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from typing import Any

import torch
from cases import slice_of
from configurations import (
    LAYOUTS,
    MODEL,
    Case,
    Coordinate,
    Setting,
    data_ranks,
    is_idle,
    is_masked,
    numbers,
    start_of,
    weight,
    written_to,
)
from torch import Tensor

RATES, DECAYS = (0.05, 0.02, 0.03), (0.1, 0.0, 0.05)
MOMENTUM, BETAS, EPS = 0.9, (0.9, 0.99), 0.1


@dataclass
class Dense:
    """One parameter, flattened."""

    value: Tensor
    first: Tensor
    second: Tensor
    steps: Tensor  # number of steps of each element
    largest: Tensor  # largest absolute value of any element so far (0-dim): it bounds the accumulated rounding error
    remainders: Tensor  # bound of the remainders (low 16 bits of split masters) that written weights may keep

    @classmethod
    def of(cls, name: str) -> Dense:
        value = start_of(name).flatten()
        first, second, steps, remainders = (torch.zeros_like(value) for _ in range(4))
        return cls(value, first, second, steps, value.abs().max(), remainders)


def elements(setting: Setting, name: str, at: Coordinate) -> Tensor:
    return _elements(setting.layout, name, setting.at.topology.rank(**at))


@cache
def _elements(layout: str, name: str, rank: int) -> Tensor:
    at, shape = LAYOUTS[layout], MODEL[name].shape
    return slice_of(torch.arange(prod(shape)).view(shape), at.spec(name), at.topology, rank).flatten()


# Gradients --------------------------------------------------------------------------------------------------------------


def gradients(case: Case, setting: Setting, step: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return (gradient, present, absolute) of the accumulation window for each parameter, all three flat.

    ``gradient`` is the mean over data ranks. Over micro-batches it is a sum, or with accumulation_steps or weights a mean.
    ``present`` is False if the parameter has no gradient. ``absolute`` is computed like ``gradient``, but from the absolute
    values of its terms, because rounding errors of low-precision sums are relative to ``absolute``.

    Without weights, a micro-batch without a loss counts like one whose loss is 0.
    """
    found = {}
    divisor = data_ranks(setting) * (setting.micro if setting.managed else 1)
    if setting.weighted:
        divisor = whole_weight(case, setting, step)
    for name in case.names:
        numel = prod(MODEL[name].shape)
        gradient, present = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.bool)
        absolute = torch.zeros_like(gradient)
        seen = set()
        trained = case.has(name, step) and not case.is_frozen(name, step)
        for at in setting.at.coordinates() if trained else ():
            piece = tuple(at[axis] for axis in setting.at.spec(name).sharded_axes)
            if setting.at.holds(name, at) and piece not in seen:
                seen.add(piece)
                where = elements(setting, name, at)
                gradient[where], present[where], absolute[where] = _summed(case, setting, name, at, step)
        # A sharded tensor is one parameter: if one shard has a gradient, all shards are updated.
        found[name] = gradient / divisor, present.any().expand(numel), absolute / divisor
    return found


def _summed(case: Case, setting: Setting, name: str, at: Coordinate, step: int) -> tuple[Tensor, bool, Tensor]:
    """Return the sum over all ranks and micro-batches over which a shard's gradient is summed, whether there is a
    gradient, and the sum of the terms' absolute values. A sum over several ranks exists even if no rank has a term."""
    topology, spec = setting.at.topology, setting.at.spec(name)
    summed = {*(axis for axis in topology.data_axes if axis not in spec.named_axes), *spec.partial, *dict(spec.tied)}
    ranges = [range(topology.size(axis)) if axis in summed else (at[axis],) for axis in topology.axes]
    total = torch.zeros(elements(setting, name, at).numel(), dtype=torch.float64)
    absolute = torch.zeros_like(total)
    terms = 0
    others = [dict(zip(topology.axes, place, strict=True)) for place in product(*ranges)]
    others = [other for other in others if setting.at.holds(name, other)]
    for other in others:
        for micro in range(setting.micro):
            idle = is_idle(case, setting, name, other, step, micro)
            if is_masked(case, setting, other, step, micro) and not idle:
                terms += 1  # the loss is multiplied by the weight 0: there is a gradient, of zeros
            elif weight(case, setting, other, step, micro) and not idle:
                term = numbers(case, setting, name, other, step, micro).flatten()
                total += term
                absolute += term.abs()
                terms += 1
    return total, terms > 0 or len(others) > 1, absolute


def whole_weight(case: Case, setting: Setting, step: int) -> int:
    data_axes = setting.at.topology.data_axes
    ranks = {tuple(at[axis] for axis in data_axes): at for at in setting.at.coordinates()}
    return sum(weight(case, setting, at, step, micro) for at in ranks.values() for micro in range(setting.micro))


# Steps ------------------------------------------------------------------------------------------------------------------


class DenseRun:
    """A training run of the full model.

    Attributes:
        absolute_norms: For each step so far, the gradient norm that results if the contribution of each rank and
            micro-batch is replaced by its absolute value. Tolerances are relative to this norm.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.skipped = case, 0
        self.absolute_norms: list[float] = []
        self.params = {name: Dense.of(name) for name in case.names}

    def step(self, number: int) -> float:
        """Run one step and return its norm; nothing is updated if the norm is not finite or a rank vetoes the step."""
        if self.case.is_written(number):
            self._write(number)
        found = gradients(self.case, self.case.setting_of(number), number)
        norms = [self._norm(found[name][0] for name in found if MODEL[name].group == group) for group in (0, 1, 2)]
        total = self._norm(torch.tensor(norms, dtype=torch.float64).unsqueeze(0))
        self.absolute_norms.append(self._norm(absolute for _, _, absolute in found.values()))
        if total != total or total == float("inf") or number == self.case.vetoed:
            self.skipped += 1
            return total
        factors = self._factors(norms, total)
        for name, (gradient, present, _) in found.items():
            self._update(self.params[name], MODEL[name].group, gradient * factors[MODEL[name].group], present)
        return total

    def _write(self, number: int) -> None:
        assert self.case.written is not None
        is_moved = self.case.written[1] in ("moved", "relaid") and self.case.precision == "bf16, split masters"
        for name, param in self.params.items():
            if self.case.has(name, number - 1):
                value = written_to(self.case, name).flatten()
                if is_moved:
                    # If a shard was moved to new memory, the optimizer keeps its remainders (the low 16 bits of split
                    # masters) only if none of its weights changed. The shards are unknown here, so an unchanged weight
                    # may have kept its remainder or lost it.
                    is_equal = param.value.bfloat16().double() == value
                    if is_equal.all():
                        continue
                    param.remainders = torch.where(is_equal, 2 * (param.value - value).abs(), 0.0)
                param.value = value
                param.largest = torch.maximum(param.largest, param.value.abs().max())

    def _norm(self, parts: Iterable[Tensor]) -> float:
        elements = torch.cat([torch.zeros(1, dtype=torch.float64), *(part.flatten() for part in parts)])
        return float(torch.linalg.vector_norm(elements, self.case.norm_type))

    def _factors(self, norms: list[float], total: float) -> list[float]:
        def clip(norm: float, threshold: float | None) -> float:
            return 1.0 if threshold is None else min(1.0, threshold / (norm + 1e-6))

        if self.case.group_max_norm is not None:
            others = self._norm(torch.tensor([norms[::2]], dtype=torch.float64))
            by_all, by_own = clip(others, self.case.max_norm), clip(norms[1], self.case.group_max_norm)
            return [by_all, by_own, by_all]
        return [clip(total, self.case.max_norm)] * 3

    def _update(self, p: Dense, group: int, gradient: Tensor, present: Tensor) -> None:
        rate, decay = RATES[group], DECAYS[group]
        p.steps[present] += 1
        if self.case.kind == "SGD":
            p.first[present] = (MOMENTUM * p.first + gradient + decay * p.value)[present]
            p.value -= torch.where(present, rate * p.first, 0.0)
            p.largest = torch.maximum(p.largest, p.value.abs().max())
            return
        beta1, beta2 = BETAS
        p.first[present] = (beta1 * p.first + (1 - beta1) * gradient)[present]
        p.second[present] = (beta2 * p.second + (1 - beta2) * gradient**2)[present]
        mean, square = p.first / (1 - beta1**p.steps), p.second / (1 - beta2**p.steps)
        moved = p.value * (1 - rate * decay) - rate * mean / (square.sqrt() + EPS)
        p.value = torch.where(present, moved, p.value)
        p.largest = torch.maximum(p.largest, p.value.abs().max())

    # Checkpoints --------------------------------------------------------------------------------------------------------

    def put_together(self, pieces: Iterable[tuple[str, Tensor]]) -> bool:
        """Merge the step counts of the tensors that the optimizer updates from now on. Each tensor, given by parameter
        name and flat indices, gets the smallest positive count among its elements.

        Returns:
            Whether the elements of any tensor had different counts. With SGD, all positive counts are taken as equal.
        """
        differed = False
        before = {name: param.steps.clone() for name, param in self.params.items()}
        for name, where in pieces:
            steps = before[name][where]
            begun = steps[steps > 0]
            if len(begun):
                self.params[name].steps[where] = begun.min()
                counts_differ = self.case.kind == "AdamW" and bool((begun != begun[0]).any())
                differed |= counts_differ or len(begun) < len(steps)
        return differed


def hyper_parameters(group: int) -> dict[str, float]:
    return {"lr": RATES[group], "weight_decay": DECAYS[group]}


def inner_optimizer(kind: str, groups: list[dict[str, Any]], implementation: str = "fused") -> torch.optim.Optimizer:
    """Return the torch optimizer whose formulas `DenseRun` computes."""
    for index, group in enumerate(groups):
        group.update(hyper_parameters(index))
    how = {"fused": implementation == "fused", "foreach": implementation == "foreach"}
    if kind == "SGD":
        return torch.optim.SGD(groups, momentum=MOMENTUM, **how)
    return torch.optim.AdamW(groups, betas=BETAS, eps=EPS, **how)
