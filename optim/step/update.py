"""Step a torch optimizer with one factor on the gradients, or skip: on the device where the optimizer can, and count it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from ...amp.capture import is_captured
from ...amp.casting import is_half
from ..clip.decide import Verdict
from ..gradients.in_place import scale_gradients
from .captured_update import capturable
from .first_look import SAY_SO


def steps_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer takes ``grad_scale`` and ``found_inf`` tensors itself: Adam, AdamW, SGD, Adagrad, fused.

    Not before its first step for a fused SGD with dampening: torch makes the first momentum buffer from the gradient
    alone and has no such buffer yet if that step is skipped on the device. And not for half-precision parameters on a CPU
    where torch's fused SGD loses their updates (2.12 and 2.13).
    """
    fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    groups = optimizer.param_groups
    if not fused or not all(group.get("fused") for group in groups):
        return False
    if _is_miscomputed(optimizer):
        return False
    return not any(
        group.get("momentum") and group.get("dampening") and _without_momentum(optimizer, group) for group in groups
    )


def check_steps_without_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError for an optimizer that can't step with the gradients that are there (`torch.optim.LBFGS`)."""
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise TypeError(
            f"{type(optimizer).__name__} evaluates the loss itself, several times a step, by a closure, whose gradients "
            "nobody would complete, measure and clip: take an optimizer that steps without"
        )


def apply_update(optimizer: torch.optim.Optimizer, found_inf: Tensor, factor: Tensor | None) -> None:
    """Multiply all gradients by ``factor`` and step, unless ``found_inf`` is 1: then change nothing.

    Args:
        optimizer: The wrapped optimizer.
        found_inf: 0-dim float32, 0 or 1.
        factor: 0-dim, or None for 1. A fused optimizer divides by its inverse in float32 (and leaves the scaled gradient in
            ``.grad``); float64 parameters and other optimizers are multiplied in a pass of their own.
    Collectives: none. Host reads: one, unless `steps_on_device`.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not steps_on_device(optimizer):
        if bool(found_inf):
            return
        if factor is not None:
            scale_gradients(params, factor)
        _step_rightly(optimizer)
        return
    if factor is not None and torch.float64 in {param.dtype for param in params}:
        scale_gradients(params, torch.where(found_inf > 0, torch.ones_like(factor), factor))
        factor = None
    _start_momentum(optimizer)
    fused: Any = optimizer
    fused.found_inf = found_inf
    fused.grad_scale = None if factor is None else factor.reciprocal().float()
    try:
        with capturable(optimizer):
            step_within(optimizer)
    finally:
        del fused.found_inf, fused.grad_scale


def _without_momentum(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> list[Tensor]:
    return [
        param
        for param in group["params"]
        if param.grad is not None and optimizer.state.get(param, {}).get("momentum_buffer") is None
    ]


def _start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give a fused SGD zeros to start from: torch would keep uninitialised memory when its first step is skipped.

    Without dampening the first update from zeros is the same as from nothing.
    """
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            for param in _without_momentum(optimizer, group) if group["momentum"] else ():
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)


def _step_rightly(optimizer: torch.optim.Optimizer) -> None:
    """Step, without fused kernels where those are wrong."""
    groups = optimizer.param_groups if _is_miscomputed(optimizer) or _starts_late(optimizer) else []
    fused = [group["fused"] for group in groups]
    try:
        for group in groups:
            group["fused"] = False
        step_within(optimizer)
    finally:
        for group, value in zip(groups, fused, strict=True):
            group["fused"] = value


def _starts_late(optimizer: torch.optim.Optimizer) -> bool:
    """Whether some parameters of a fused SGD have momentum and others get theirs only now, which its kernel can't do."""
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    for group in optimizer.param_groups:
        if group.get("fused") and group["momentum"] and group["dampening"]:
            with_gradient = sum(param.grad is not None for param in group["params"])
            if 0 < len(_without_momentum(optimizer, group)) < with_gradient:
                return True
    return False


def _is_miscomputed(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.SGD) and any(
        group.get("fused")
        and any(is_half(param) and param.is_cpu for param in group["params"])
        and _fused_sgd_is_wrong()
        for group in optimizer.param_groups
    )


@cache
def _fused_sgd_is_wrong() -> bool:
    """Whether fused SGD on a CPU leaves most of a half-precision parameter as it was (pytorch issue 191763)."""
    weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16, device="cpu"))
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5, fused=True).step()
    return bool((weight != 0.5).any())


# torch's global step hooks are to run once a step: around that of the optimizer that the user calls -------------------


def step_within(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.step()``, around which only its own hooks run: it is a part of another optimizer's step."""
    with _no_global_hooks():
        optimizer.step()


@contextmanager
def _no_global_hooks() -> Iterator[None]:
    """Without the hooks of `register_optimizer_step_pre_hook` and ``..._post_hook``."""
    registries: list[Any] = [torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]
    kept = [dict(hooks) for hooks in registries]
    for hooks in registries:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(registries, kept, strict=True):
            new = dict(hooks)
            hooks.clear()
            hooks.update({**before, **new})


# Skips ----------------------------------------------------------------------------------------------------------------

LAG = 16


@dataclass(frozen=True)
class Skip:
    """Skip a step whose gradient norm is not finite, on every rank; so many in a row are an error on every rank.

    Args:
        most_in_a_row: >= 1; noticed at most `LAG` steps late, because nobody waits for the device.
    """

    most_in_a_row: int = 50

    def check(self) -> None:
        """Raise ValueError if it is out of range."""
        if self.most_in_a_row < 1:
            raise ValueError(f"most_in_a_row={self.most_in_a_row}: give a number >= 1")


OnNonfinite = Literal["skip", "raise"] | Skip


def checked_nonfinite(on_nonfinite: OnNonfinite) -> OnNonfinite:
    """``on_nonfinite``; ValueError where it is none of these."""
    if isinstance(on_nonfinite, Skip):
        on_nonfinite.check()
    elif on_nonfinite not in ("skip", "raise"):
        raise ValueError(f"on_nonfinite={on_nonfinite!r}: give 'skip', 'raise' or Skip(most_in_a_row=...)")
    return on_nonfinite


def _too_many(in_a_row: int, on_nonfinite: OnNonfinite) -> str | None:
    most = (on_nonfinite if isinstance(on_nonfinite, Skip) else Skip()).most_in_a_row
    if in_a_row < most:
        return None
    return f"{in_a_row} steps in a row were skipped because the gradient norm was not finite"


class SkipMonitor:
    """Counts of skipped steps: in all, in a row, and because gradients came past `backward`.

    The counts live on the device. Each step copies them to host memory without waiting, and `count` reads the
    copy that was made `LAG` steps earlier, which has arrived long since. All ranks read the same step's counts, so what
    they conclude is agreed.
    """

    def __init__(self, device: torch.device) -> None:
        self.counts = torch.zeros(3, dtype=torch.int64, device=device)
        self._copies = torch.zeros(LAG, 3, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._arrived: list[torch.cuda.Event | None] = [None] * LAG
        self._step = 0

    def count(self, verdict: Verdict, on_nonfinite: OnNonfinite) -> str | None:
        """Count one step, which is skipped where ``found_inf`` is 1, before it is made.

        Returns:
            Why training should end here, if it should; the same on every rank.
        Raises:
            RuntimeError: On every rank: gradients came past `backward`, `LAG` steps ago; or now, with ``"raise"``.
        Host reads: one or two with ``"raise"``, else none.
        """
        stats = verdict.stats
        in_a_row, past = self._before()
        self._add(stats.found_inf, verdict.past)
        if past or (on_nonfinite == "raise" and verdict.past is not None and bool(verdict.past)):
            raise self._came_past(f", the first one {LAG} steps ago" if past else ", this one")
        if reason := _too_many(in_a_row, on_nonfinite):
            return reason
        if on_nonfinite == "raise" and bool(stats.found_inf):
            return f"the gradient norm is {float(stats.total_norm)}"
        return None

    def poll(self, on_nonfinite: OnNonfinite) -> str | None:
        """As `count`, of all steps so far, those that a CUDA graph replayed among them. Host reads: one."""
        _, in_a_row, past = self.counts.tolist()
        if past:
            raise self._came_past("")
        return _too_many(in_a_row, on_nonfinite)

    def _came_past(self, since: str) -> RuntimeError:
        self.counts[2] = self._step = 0
        return RuntimeError(
            "gradients came whose loss was not multiplied by the loss scale that they would be divided by; steps with "
            f"them were skipped{since}: {SAY_SO}"
        )

    def _add(self, found_inf: Tensor, past: Tensor | None) -> None:
        skipped = found_inf.to(torch.int64)
        self.counts[:2].add_(skipped)
        self.counts[1].mul_(skipped)
        if past is not None:
            self.counts[2].add_(past)
        if is_captured():
            return  # the counts go on in the replays, and `poll` looks at them
        slot = self._step % LAG
        self._copies[slot].copy_(self.counts, non_blocking=True)
        if self.counts.is_cuda:
            self._arrived[slot] = torch.cuda.Event()
            self._arrived[slot].record()  # type: ignore[union-attr]
        self._step += 1

    def _before(self) -> tuple[int, int]:
        """Steps skipped in a row, and because gradients came past, as of `LAG` steps before this one; 0 at first."""
        if self._step < LAG or is_captured():
            return 0, 0
        slot = self._step % LAG
        event = self._arrived[slot]
        if event is not None:
            event.synchronize()
        _, in_a_row, past = (ctypes.c_int64 * 3).from_address(self._copies.data_ptr() + slot * 3 * 8)
        return in_a_row, past

    def total(self) -> int:
        """Skipped steps in all. Host reads: one."""
        return int(self.counts[0])

    def restore(self, total: int) -> None:
        """Start again from ``total`` skipped steps and none in a row."""
        self.counts.zero_()
        self.counts[0] = total
        self._step = 0
