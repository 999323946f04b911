"""The schedules: each is the warm-up and floor of `WarmupLR` with a decay of `formulas`.

schedule = CosineAnnealingLR(optimizer, total_steps=1000, warmup_steps=50)
for batch in loader:
    ...
    optimizer.step()
    schedule.step()
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch.optim import Optimizer

from .formulas import constant, cosine, multi_step, polynomial
from .warmup_lr import WarmupLR, whole_steps


class ConstantLR(WarmupLR):
    """The base rate, after a linear warm-up.

    Args, errors, collectives, host reads: as in `WarmupLR`.
    """

    def __init__(
        self, optimizer: Optimizer, warmup_steps: int = 0, *, hold_on_skip: bool = True, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, warmup_steps=warmup_steps, hold_on_skip=hold_on_skip, last_epoch=last_epoch)

    def decay(self, step: int) -> float:
        """1."""
        return constant(step)


class MultiStepLR(WarmupLR):
    """Multiplies the rate by gamma at each milestone; the warm-up's factor comes on top.

        decay(t) = gamma ** |{m in milestones: m <= t}|

    Args:
        milestones: Taken steps, from the start of the run, >= 0, in any order; one that comes twice counts twice.
        warmup_steps: W >= 0.
        gamma: In (0, 1].
    Other args, errors, collectives, host reads: as in `WarmupLR`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        milestones: Iterable[int],
        warmup_steps: int = 0,
        gamma: float = 0.1,
        *,
        hold_on_skip: bool = True,
        last_epoch: int = -1,
    ) -> None:
        self.milestones = sorted(whole_steps(milestone, "a milestone", 0) for milestone in milestones)
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma={gamma}: give a number in (0, 1]")
        self.gamma = gamma
        super().__init__(optimizer, warmup_steps=warmup_steps, hold_on_skip=hold_on_skip, last_epoch=last_epoch)

    def decay(self, step: int) -> float:
        """gamma to the power of the milestones that were reached."""
        return multi_step(step, self.milestones, self.gamma)


class PolynomialLR(WarmupLR):
    """Decays as a power of what is left of the run: (1 - x(t)) ** power, with x as `formulas` says.

    Args:
        total_steps: T >= 1, the warm-up among them.
        warmup_steps: W >= 0.
        power: > 0; 1 is linear.
        eta_min: The floor, absolute, in 0..every base rate.
    Other args, errors, collectives, host reads: as in `WarmupLR`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        power: float = 1.0,
        eta_min: float = 0.0,
        *,
        hold_on_skip: bool = True,
        last_epoch: int = -1,
    ) -> None:
        self.total_steps = whole_steps(total_steps, "total_steps", 1)
        if not 0 < power < math.inf:
            raise ValueError(f"power={power}: give a finite number > 0")
        self.power = power
        super().__init__(
            optimizer, warmup_steps=warmup_steps, floor=eta_min, hold_on_skip=hold_on_skip, last_epoch=last_epoch
        )

    def decay(self, step: int) -> float:
        """(1 - x) ** power."""
        return polynomial(step, self.total_steps, self.warmup_steps, self.power)


class LinearWarmupLR(PolynomialLR):
    """Up to the base rate in a straight line, and down to 0 in another.

    Args:
        total_steps: T >= 1, the warm-up among them.
        warmup_steps: W >= 0.
    Other args, errors, collectives, host reads: as in `WarmupLR`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        *,
        hold_on_skip: bool = True,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, total_steps, warmup_steps, hold_on_skip=hold_on_skip, last_epoch=last_epoch)


class CosineAnnealingLR(WarmupLR):
    """Decays along half a cosine: (1 + cos(pi x(t))) / 2, with x as `formulas` says.

    Without a warm-up it is torch's CosineAnnealingLR up to t = T, after which torch's rises again.

    Args:
        total_steps: T >= 1, the warm-up among them.
        warmup_steps: W >= 0.
        eta_min: The floor, absolute, in 0..every base rate.
    Other args, errors, collectives, host reads: as in `WarmupLR`.
    Reference: Loshchilov and Hutter 2017, "SGDR", arXiv:1608.03983, without restarts.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        *,
        hold_on_skip: bool = True,
        last_epoch: int = -1,
    ) -> None:
        self.total_steps = whole_steps(total_steps, "total_steps", 1)
        super().__init__(
            optimizer, warmup_steps=warmup_steps, floor=eta_min, hold_on_skip=hold_on_skip, last_epoch=last_epoch
        )

    def decay(self, step: int) -> float:
        """(1 + cos(pi x)) / 2."""
        return cosine(step, self.total_steps, self.warmup_steps)
