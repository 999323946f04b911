"""Loss scales, whose state stays on the device.

float16 gradients below 2^-25 become 0. The loss is therefore multiplied by a scale before backward, and the gradients
are divided by the scale before the step. `ConstantLossScale` keeps the scale constant. `DynamicLossScale` searches for
the largest scale without overflow: after each step, `update` gets a tensor that is non-zero if the gradients overflowed.
`update` changes the state in place. It does not synchronize the host, never replaces a tensor, and can be captured in a
CUDA graph.

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
from torch.amp.grad_scaler import OptState

from ..parallel.mesh.call_tracker import track_call
from ..parallel.mesh.registry import ProcessGroupRegistry
from ..parallel.mesh.value_checks import anything, dict_of, is_number

MAX_FLOAT32 = torch.finfo(torch.float32).max
SMALLEST = torch.finfo(torch.float32).tiny
"""Lower bound of loss scales: float32's smallest normal number. A smaller scale could become 0, or its inverse inf."""

_RANGE = f"a number from {SMALLEST:.3g} to {MAX_FLOAT32:.3g}, the range of float32's normal numbers"
_COUNTS = ("good_steps", "overflows_left", "growth_interval", "hysteresis")


class LossScale(ABC):
    """Base class of loss scales. The loss is multiplied by a loss scale before backward.

        (loss * loss_scale.scale).backward()
        optimizer.step()                 # with gradients divided by loss_scale.scale, unless they overflowed
        loss_scale.update(found_inf)

    Attributes:
        scale: The current loss scale, a 0-dim float32 tensor. It is changed in place and never replaced. Divide the
            gradients by it before you call `update`.
    """

    scale: Tensor

    @abstractmethod
    def update(self, found_inf: Tensor) -> None:
        """Update the scale in place, after a step.

        Args:
            found_inf: 0-dim float32 tensor on the device of ``scale``; 0 if the gradients were finite, any other value
                for an overflow. Every rank must pass the same value, otherwise the scales of the ranks diverge.
        Collectives: none. Host synchronization: none.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, float | int]:
        """Return the full state, including settings, as Python numbers.

        Host synchronization: one per tensor of the state.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the scale, the counters and the settings by those in ``state``.

        Args:
            state: A dict that `state_dict` returned.
        Raises:
            ValueError: ``state`` is not a dict, another class of loss scale saved it, or a value has a wrong type or is
                out of range. The loss scale is unchanged.
        """


class ConstantLossScale(LossScale):
    """Loss scale that stays constant: `update` does nothing, only `load_state_dict` changes the scale.

        loss_scale = ConstantLossScale(1024.0, device="cuda")

    Args:
        value: The scale; a number from 2^-126, float32's smallest normal number, to float32's maximum.
        device: The device of ``scale``. Default None: torch's default device.
    Raises:
        ValueError: The value is out of range.
    """

    def __init__(self, value: float, device: torch.device | str | None = None) -> None:
        _check(SMALLEST <= value <= MAX_FLOAT32, "value", value, _RANGE)
        self._value = value
        self.scale = torch.tensor(value, dtype=torch.float32, device=device)

    def update(self, found_inf: Tensor) -> None:
        pass

    def state_dict(self) -> dict[str, float | int]:
        return {"scale": self.scale.item()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _check_keys("ConstantLossScale", state, {"scale"})
        value = state["scale"]
        _check(SMALLEST <= value <= MAX_FLOAT32, "scale", value, _RANGE)
        self._value = value
        self.scale.fill_(value)

    def __repr__(self) -> str:
        return f"ConstantLossScale({self._value})"


class DynamicLossScale(LossScale):
    """Loss scale that grows after a run of good steps and backs off when a step overflows.

    ```text
    overflow:                                    scale = max(scale * backoff_factor, min_scale)
    after growth_interval good steps in a row:   scale = min(scale * growth_factor, max_scale)
    ```

    A good step is a step without overflow. The count of good steps restarts at 0 after an overflow and after a growth. A
    scale that would grow beyond the range of float32 does not grow.

    With ``hysteresis`` h > 1, the first h - 1 overflows do not reduce the scale. The h-th overflow and every later one
    reduce it, so a much too high scale falls fast. The count of overflows restarts at 0 only after growth_interval good
    steps in a row.

    With its defaults the scale is equal to the scale of `torch.amp.GradScaler` after every step, except that it does not
    fall below 2^-126, float32's smallest normal number. With ``max_scale=2.0**24`` it follows the rules of apex's dynamic
    scale.

        loss_scale = DynamicLossScale(init_scale=2.0**12, device="cuda")

    Args:
        init_scale: The first scale; a number from 2^-126 to float32's maximum, and from min_scale to max_scale. Default:
            2^16.
        growth_factor: The scale is multiplied by it to grow; a finite number > 1. Default: 2.0.
        backoff_factor: The scale is multiplied by it to back off; a number between 0 and 1 exclusive. Default: 0.5.
        growth_interval: Good steps in a row after which the scale grows; an integer in [1, 2^31). Default: 2000.
        hysteresis: h, the number of the first overflow that reduces the scale; an integer in [1, 2^31). Default 1: every
            overflow reduces the scale.
        min_scale, max_scale: Bounds of the scale. Defaults 0.0 and inf: the range of float32's normal numbers.
        device: The device of the state. Default None: torch's default device.
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
        """Count overflows, and undo the back-off of the scale while the count is below ``hysteresis``.

        After ``growth_interval`` good steps in a row, the count restarts at 0.
        """
        overflow = found_inf != 0
        self._overflows_left.add_(overflow, alpha=-1)  # may fall below 0, which has the same meaning as 0
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
        # The scale is not shown, because a repr in a log line must not synchronize with the device.
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
        raise ValueError(f"{name}={value!r:.80} is not valid for a loss scale; give {needed}")


def _check_scale(name: str, scale: float, settings: _Settings) -> None:
    low, high = settings.min_scale, min(settings.max_scale, MAX_FLOAT32)
    _check(low <= scale <= high, name, scale, f"a number in [{low}, {high}], which min_scale and max_scale allow")
    _check(scale >= SMALLEST, name, scale, _RANGE)


def _check_keys(kind: str, state: Mapping[str, Any], needed: set[str]) -> None:
    dict_of(anything)(state, "the state of the loss scale")
    if set(state) != needed:
        raise ValueError(
            f"the state for {kind} has {', '.join(sorted(state)) or 'no entries'}, but needs "
            f"{', '.join(sorted(needed))}; load the state into the precision mode that saved it"
        )
    for name, value in state.items():
        is_count = name in _COUNTS
        valid = type(value) is int if is_count else is_number(value)
        _check(valid, name, value, "an integer" if is_count else "a number that is not NaN")


# `torch.amp.GradScaler` for parallel models ---------------------------------------------------------------------------


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` that skips a step on all ranks if the gradients of any rank overflowed.

    It replaces torch's class in a training loop:

        scaler = GradScaler(registry)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    torch's scaler decides on each rank separately. After an overflow in one shard the other ranks step, and scales and
    weights diverge. This class all-reduces found_inf, torch's flag for a non-finite gradient, over all ranks. All ranks
    then skip the step, and their scales back off once.

    Every rank must call `unscale_`, `step` and `update` for the same optimizers in the same order. Only ranks that
    compute a loss need to call `scale`; pipeline stages before the last one may omit it. A rank whose parameters
    have no gradients contributes found_inf = 0 and skips or steps with the other ranks. Several optimizers may share
    one scaler, as in torch: an optimizer skips its step only if its own gradients overflowed, and the scale backs off
    once if the gradients of any optimizer overflowed.

    Args:
        registry: The process groups. The all-reduce runs over all axes of the topology.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: As in `torch.amp.GradScaler`. Defaults:
            2^16, 2.0, 0.5, 2000, True.
        device: Device type of the scale, "cuda" or "cpu". Default None: the device type of the registry's collectives.
    Collectives: one all-reduce (MAX, one number, over all ranks) per optimizer and step, in `unscale_`, or in `step` if
    `unscale_` was not called. No collective with one rank or with ``enabled=False``.
    Host synchronization: none in `step` for optimizers that skip on the device (torch's ``fused=True``). For other
    optimizers torch's `step` reads found_inf on the host once. `get_scale` and `state_dict` read values on the host. The
    all-reduce synchronizes if ``device`` is not the device of the collectives.
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
        """Step the optimizer as torch's scaler does: unscale the gradients, and skip the step after an overflow.

        A `meshstep.optim.ParallelOptimizer` unscales and skips by itself, on the device. During the call, ``optimizer``
        has the attribute ``overflow_is_agreed``, which torch's scaler does not set. It shows `ParallelOptimizer` that
        found_inf has been all-reduced.

        Args:
            optimizer: The optimizer, or a `meshstep.optim.ParallelOptimizer`.
            args, kwargs: Passed to ``optimizer.step``.
        Returns:
            The return value of ``optimizer.step``; None if the scaler did not call it because of an overflow.
        Raises:
            RuntimeError: As in `torch.amp.GradScaler.step`: `step` was already called for this optimizer since the last
                `update`, or the keyword argument ``closure`` was passed. Or a `meshstep.optim.ParallelOptimizer` has its
                own loss scale, or steps other tensors than the model's parameters, such as master weights.
            ValueError: A gradient is float16, and the optimizer does not unscale gradients by itself. The other ranks
                then skip the step.
            TypeError: ``optimizer`` is not a torch optimizer. The other ranks then skip the step, unless `unscale_` was
                called for an optimizer that has not stepped yet, or the scaler is disabled. If they call `step` for
                another optimizer than that one, they wait until the timeout.
        """
        stepped: Any = optimizer
        self._check_optimizer(optimizer, in_step=True)
        stepped.overflow_is_agreed = True
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            del stepped.overflow_is_agreed

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, as torch's scaler does, and find non-finite gradients of any rank.

        Raises:
            TypeError: ``optimizer`` is not a torch optimizer. The other ranks then skip the step, unless the scaler is
                disabled.
            RuntimeError: `unscale_` or `step` was already called for this optimizer since the last `update`.
            ValueError: A gradient is float16. The other ranks then skip the step.
        Collectives: one all-reduce (MAX, one number, over all ranks); none with one rank or with ``enabled=False``.
        """
        self._check_optimizer(optimizer, in_step=False)
        super().unscale_(optimizer)

    def _check_optimizer(self, optimizer: object, in_step: bool) -> None:
        """Raise TypeError if ``optimizer`` is no optimizer.

        Collectives: if it is none, the all-reduce in which the other ranks wait, with found_inf = 1, so that they skip the
        step. None with ``enabled=False``, or with ``in_step`` if an optimizer is unscaled and has not stepped.
        """
        if hasattr(optimizer, "param_groups"):
            return
        unscaled = self._enabled and any(
            state["stage"] is OptState.UNSCALED for state in self._per_optimizer_states.values()
        )
        if self._enabled and not (in_step and unscaled):
            self._agreed(torch.ones((), device=self._device))
        raise TypeError(f"the optimizer is a {type(optimizer).__name__}; give a torch optimizer or a ParallelOptimizer")

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        # torch creates ``_scale`` in the first call of the method `scale`, which a rank without a loss never calls.
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return super()._check_scale_growth_tracker(funcname)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # torch computes found_inf only by calls of this method: in `unscale_`, and, for a fused optimizer whose gradients
        # `unscale_` has not unscaled, in `step`.
        try:
            per_device = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        except Exception:
            self._agreed(torch.ones_like(found_inf))  # the other ranks wait in this all-reduce, and then skip the step
            raise
        for local in per_device.values():
            found_inf = torch.maximum(found_inf, local.to(found_inf.device, non_blocking=True))
        return {found_inf.device: self._agreed(found_inf)}

    def _agreed(self, found_inf: Tensor) -> Tensor:
        """Return the maximum of ``found_inf`` (0-dim, 0 or 1) over all ranks."""
        if self._registry.topology.world_size == 1:
            return found_inf
        agreed = found_inf.to(self._registry.device)
        with track_call("GradScaler.step", self._registry):
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._registry.group(*self._registry.topology.axes))
        return agreed.to(found_inf.device)
