"""The loss scale: small state machines that live on the device.

fp16 gradients underflow below 2^-24, so the loss is multiplied by a scale before backward and the gradients are divided
by it before the step. `DynamicLossScale` searches for the largest scale that doesn't overflow; `ConstantLossScale`
keeps one. Both are told by a tensor whether the step overflowed and change their state in place: no host read, no new
tensor of which somebody could keep the old one, capturable in a CUDA graph.

Reference: Micikevicius et al. 2017, "Mixed precision training", arXiv:1710.03740.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel.mesh.call_tracker import in_call
from ..parallel.mesh.registry import ProcessGroupRegistry
from ..parallel.mesh.value_checks import anything, dict_of, is_number

MAX_FLOAT32 = torch.finfo(torch.float32).max
SMALLEST = torch.finfo(torch.float32).tiny
"""Below it a scale would be 0 one day, or have no inverse in float32."""


_COUNTS = ("good_steps", "overflows_left", "growth_interval", "hysteresis")


class LossScale(ABC):
    """What the loss is multiplied by before backward.

    Attributes:
        scale: 0-dim float32 tensor; the same object for life, changed in place. Multiply the loss by it, divide the
            gradients by it, and only then call `update`.
    """

    scale: Tensor

    @abstractmethod
    def update(self, found_inf: Tensor) -> None:
        """Take in whether this step's gradients overflowed.

        Args:
            found_inf: 0-dim float32 on the device of ``scale``; anything but 0 is an overflow. Every rank must give
                the same, or their scales drift apart.
        Collectives: none. Host reads: none.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, float | int]:
        """The whole state, settings included, as Python numbers. Host reads: one for each tensor of the state."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, with the settings it was saved with.

        Raises:
            ValueError: It comes from another kind of loss scale, or a value is out of range. Nothing has changed then.
        """


class ConstantLossScale(LossScale):
    """A scale that stays what it is, overflow or not.

    Args:
        value: The scale; > 0, in float32's range.
        device: Of ``scale``.
    Raises:
        ValueError: The value is out of range.
    """

    def __init__(self, value: float, device: torch.device | str | None = None) -> None:
        _check(0 < value <= MAX_FLOAT32, "value", value, "a number > 0 in float32's range")
        self._value = value
        self.scale = torch.tensor(value, dtype=torch.float32, device=device)

    def update(self, found_inf: Tensor) -> None:
        pass

    def state_dict(self) -> dict[str, float | int]:
        return {"scale": self.scale.item()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _check_keys("ConstantLossScale", state, {"scale"})
        value = state["scale"]
        _check(0 < value <= MAX_FLOAT32, "scale", value, "a number > 0 in float32's range")
        self._value = value
        self.scale.fill_(value)

    def __repr__(self) -> str:
        return f"ConstantLossScale({self._value})"


class DynamicLossScale(LossScale):
    """A scale that grows after a run of good steps and backs off when a step overflows.

        overflow:                                    scale = max(scale * backoff_factor, min_scale)
        after growth_interval good steps in a row:   scale = min(scale * growth_factor, max_scale)

    An overflow starts the run anew, and so does a growth. A growth that would leave float32's range doesn't happen.

    With ``hysteresis`` h > 1 the scale backs off only at the h-th overflow. What resets the count is a *whole run* of
    growth_interval good steps (the moment at which the scale grows) and nothing else: no shorter run, no back-off. So
    once h is reached every further overflow backs off at once, and a scale that is far too high falls fast. An overflow
    that only counts still starts the run anew.

    The defaults are those of `torch.amp.GradScaler`, and so is the trace, step by step. apex's dynamic scale is
    ``max_scale=2.0**24``.

    Args:
        init_scale: > 0, within the bounds and float32's range.
        growth_factor: > 1.
        backoff_factor: Between 0 and 1, exclusive.
        growth_interval: Good steps in a row before a growth, >= 1.
        hysteresis: Overflows before the first back-off, >= 1.
        min_scale, max_scale: Bounds of the scale; by default those of float32's normal numbers.
        device: Of the state.
    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float = 0.0,
        max_scale: float = inf,
        device: torch.device | str | None = None,
    ) -> None:
        self._settings = _Settings(growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale)
        _check_scale("init_scale", init_scale, self._settings)
        _check(init_scale > 0, "init_scale", init_scale, "a number > 0")
        self.scale = torch.tensor(init_scale, dtype=torch.float32, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._overflows_left = torch.full((), hysteresis, dtype=torch.int32, device=device)

    def update(self, found_inf: Tensor) -> None:
        settings = self._settings
        before = self.scale.clone() if settings.hysteresis > 1 else None
        torch._amp_update_scale_(
            self.scale,
            self._good_steps,
            found_inf,
            settings.growth_factor,
            settings.backoff_factor,
            settings.growth_interval,
        )
        if before is not None:
            self._tolerate(found_inf, before)
        self.scale.clamp_(max(settings.min_scale, SMALLEST), settings.max_scale)

    def _tolerate(self, found_inf: Tensor, before: Tensor) -> None:
        """Take the back-off of an overflow back that only counts, and count it."""
        overflow = found_inf != 0
        self._overflows_left.add_(overflow, alpha=-1)  # below 0 none is left either
        torch.where(overflow & (self._overflows_left > 0), before, self.scale, out=self.scale)
        whole_run = (self._good_steps | overflow) == 0
        self._overflows_left.masked_fill_(whole_run, self._settings.hysteresis)

    def state_dict(self) -> dict[str, float | int]:
        return {
            "scale": self.scale.item(),
            "good_steps": int(self._good_steps.item()),
            "overflows_left": max(int(self._overflows_left.item()), 0),
            **asdict(self._settings),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        names = [field.name for field in fields(_Settings)]
        _check_keys("DynamicLossScale", state, {"scale", "good_steps", "overflows_left", *names})
        settings = _Settings(**{name: state[name] for name in names})
        scale, good_steps, overflows_left = state["scale"], state["good_steps"], state["overflows_left"]
        _check_scale("scale", scale, settings)
        interval, hysteresis = settings.growth_interval, settings.hysteresis
        _check(0 <= good_steps < interval, "good_steps", good_steps, f"an integer in 0..{interval - 1}")
        _check(0 <= overflows_left <= hysteresis, "overflows_left", overflows_left, f"an integer in 0..{hysteresis}")
        self._settings = settings
        self.scale.fill_(scale)
        self._good_steps.fill_(good_steps)
        self._overflows_left.fill_(overflows_left)

    def __repr__(self) -> str:
        # Not the scale: a repr in a log line must not read the device.
        settings = ", ".join(f"{name}={value}" for name, value in asdict(self._settings).items())
        return f"DynamicLossScale({settings})"


@dataclass(frozen=True)
class _Settings:
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    hysteresis: int
    min_scale: float
    max_scale: float

    def __post_init__(self) -> None:
        _check(1 < self.growth_factor < inf, "growth_factor", self.growth_factor, "a finite number > 1")
        _check(0 < self.backoff_factor < 1, "backoff_factor", self.backoff_factor, "a number between 0 and 1")
        for name in ("growth_interval", "hysteresis"):
            count = getattr(self, name)
            _check(isinstance(count, int) and 1 <= count < 2**31, name, count, "an integer from 1 to 2**31 - 1")
        _check(self.min_scale >= 0, "min_scale", self.min_scale, "a number >= 0")
        _check(self.max_scale >= self.min_scale, "max_scale", self.max_scale, f"at least min_scale={self.min_scale}")


def _check(valid: bool, name: str, value: object, needed: str) -> None:
    if not valid:
        raise ValueError(f"{name}={value!r:.80} won't do for a loss scale; give {needed}")


def _check_scale(name: str, scale: float, settings: _Settings) -> None:
    low, high = settings.min_scale, min(settings.max_scale, MAX_FLOAT32)
    _check(low <= scale <= high, name, scale, f"a number in [{low}, {high}], the range of min_scale and max_scale")


def _check_keys(kind: str, state: Mapping[str, Any], needed: set[str]) -> None:
    dict_of(anything)(state, "the state of the loss scale")
    if set(state) != needed:
        raise ValueError(
            f"{kind} can't continue from a state with {', '.join(sorted(state)) or 'no entries'}; it needs one with "
            f"{', '.join(sorted(needed))}: load the state into the precision mode that saved it"
        )
    for name, value in state.items():
        is_count = name in _COUNTS
        valid = type(value) is int if is_count else is_number(value)
        _check(valid, name, value, "an integer" if is_count else "a number that float32 can hold")


# `torch.amp.GradScaler` for parallel models: an overflow on one rank is an overflow on all of them --------------------


class GradScaler(torch.amp.GradScaler):
    """A drop-in `torch.amp.GradScaler` whose found_inf is agreed over all axes of a registry.

        scaler = GradScaler(registry)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    torch's own decides on each rank alone: after an overflow in one shard the other ranks step, their scales drift
    apart and the model with them. Here all ranks of the world skip, and all scales back off once.

    Every rank must call `scale`, `unscale_`, `step` and `update` for the same optimizers in the same order; `scale` is
    for the ranks that have a loss, the others (pipeline stages before the last) may leave it out. A rank whose
    parameters have no gradients takes part with found_inf = 0, and skips or steps with the others. Several optimizers
    may share one scaler, as in torch: each skips for its own overflow only, and the scale backs off once for all.

    Args:
        registry: Where this rank is, and the process groups.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: As in `torch.amp.GradScaler`.
        device: Device type of the scale, "cuda" or "cpu"; by default that of the registry's collectives.

    Collectives: one all-reduce (MAX, one number, over the world) for each optimizer and step, where its gradients are
    checked: in `unscale_`, or else in `step`. With one rank or ``enabled=False`` none.
    Host reads: none by optimizers that skip on the device (torch's ``fused=True``). For others torch reads found_inf in
    `step`, once. `get_scale` and `state_dict` read the scale. If ``device`` isn't the collectives' device, so does the
    agreement.

    Not picklable while the registry has groups: keep its `state_dict`.
    """

    def __init__(
        self,
        registry: ProcessGroupRegistry,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        device: str | None = None,
    ) -> None:
        super().__init__(
            device or registry.device.type,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self._registry = registry

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As torch's; a `meshstep.optim.ParallelOptimizer` unscales and skips itself, on the device.

        Meanwhile the optimizer has an attribute ``overflow_is_agreed``, which tells its step that this is not torch's.

        Raises:
            RuntimeError: It steps other tensors than the model's, or has a loss scale of its own.
        """
        stepped: Any = optimizer
        stepped.overflow_is_agreed = True  # next to torch's own `found_inf` and `grad_scale`
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            del stepped.overflow_is_agreed

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        # torch makes the scale when `scale` is first called, which only a rank with a loss does.
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return super()._check_scale_growth_tracker(funcname)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # Both ways to a found_inf end here: `unscale_`, and the check that `step` makes for a fused optimizer, which
        # skips `unscale_`. (torch's ShardedGradScaler synchronises in the first alone.)
        per_device = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        for local in per_device.values():
            found_inf = torch.maximum(found_inf, local.to(found_inf.device, non_blocking=True))
        return {found_inf.device: self._agreed(found_inf)}

    def _agreed(self, found_inf: Tensor) -> Tensor:
        """The maximum over the world of a 0-dim tensor that is never NaN (which MAX may lose)."""
        if self._registry.topology.world_size == 1:
            return found_inf
        agreed = found_inf.to(self._registry.device)
        with in_call(self._registry, "GradScaler.step"):
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._registry.group(*self._registry.topology.axes))
        return agreed.to(found_inf.device)
