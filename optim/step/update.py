"""What a step has decided, brought to where parameters are stepped, to the CPU too, and by whom they are: the library's
loops, its kernels in Triton, or torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from inspect import Parameter, signature

import torch
from torch import Tensor

from ...amp.by_bucket import holding
from ...amp.fp8 import weights as rounded_weights
from ..gradients.in_place import scale_gradients, widen_gradients
from .native_update import loops_for, step_by_loops
from .several import asks_other_ranks, parts_of
from .split_weights import SplitWeights, offered
from .torch_update import is_miscomputed, lay_out_gradients, params_of, step_rightly, update_by_torch, without_momentum
from .triton_update import step_by_triton, triton_for


class Update:
    """One step's update; to be called for all that the param groups hold, or for one part after another.

    Args:
        optimizer, found_inf, factor: As for `apply_update`. Where these are on a CUDA device and some parameters are not,
            they are sent to the CPU at once: a fused optimizer would send them too, but read what has not arrived.

    Attributes:
        skipped: 0-dim float32: ``found_inf``.
    Collectives: none. Host reads: those of `apply_update`; and one wait, for these two numbers, before parameters on the
    CPU are stepped.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, found_inf: Tensor, factor: Tensor | None) -> None:
        self.optimizer, self.skipped, self._decided = optimizer, found_inf, (found_inf, factor)
        self._sent: tuple[Tensor, torch.cuda.Event] | None = None
        self._here: tuple[Tensor, Tensor | None] | None = None
        if found_inf.is_cuda and self._some_are_on_the_cpu():
            both = torch.stack([found_inf.double(), found_inf.double() if factor is None else factor.double()])
            host = torch.empty(2, dtype=torch.float64, pin_memory=True)
            host.copy_(both, non_blocking=True)
            self._sent = host, torch.cuda.Event()
            self._sent[1].record(torch.cuda.current_stream(found_inf.device))

    def _some_are_on_the_cpu(self) -> bool:
        return any(param.is_cpu for group in self.optimizer.param_groups for param in group["params"])

    def within(self, around: Iterable[Callable[[Callable[[], object]], object]]) -> None:
        """Make it: the first of ``around`` calls it, the second the first, and so on."""
        update: Callable[[], object] = self
        for enter in around:
            update = partial(enter, update)
        update()

    def __call__(self) -> None:
        if rounded_weights.KEPT:
            rounded_weights.forget_rounded()
        if self._sent is None:
            apply_update(self.optimizer, *self._decided)
            return
        groups = enumerate(self.optimizer.param_groups)
        places = [(index, at, param.is_cpu) for index, group in groups for at, param in enumerate(group["params"])]
        sides = {on_cpu: [place for *place, here in places if here == on_cpu] for *_, on_cpu in places}
        if len(sides) == 2 and steps_in_parts(self.optimizer):
            for on_cpu, of_side in sorted(sides.items()):  # the device first: nobody waits for it
                with only(self.optimizer, of_side):
                    self._apply(on_cpu)
        else:
            self._apply(True in sides)

    def _apply(self, on_cpu: bool) -> None:
        apply_update(self.optimizer, *(self._arrived() if on_cpu else self._decided))

    def _arrived(self) -> tuple[Tensor, Tensor | None]:
        if self._here is None:
            assert self._sent is not None, "they were sent where some parameters are on the CPU"
            (host, event), (found_inf, factor) = self._sent, self._decided
            event.synchronize()
            self._here = host[0].to(found_inf.dtype), None if factor is None else host[1].to(factor.dtype)
        return self._here


def apply_update(optimizer: torch.optim.Optimizer, found_inf: Tensor, factor: Tensor | None) -> None:
    """Multiply all gradients by ``factor`` and step, unless ``found_inf`` is 1: then change nothing.

    Args:
        optimizer: The wrapped optimizer.
        found_inf: 0-dim float32, 0 or 1.
        factor: 0-dim, or None for 1. On a CPU the compiled loops multiply by it as they step (`native_update`), and leave
            gradients as they are; so do Triton's kernels on a GPU, if they were chosen (`triton_update`). torch's fused
            kernels divide by its inverse in float32 (and leave the scaled gradient in ``.grad``); float64 parameters and
            other optimizers are multiplied in a pass of their own.
    Split weights that are offered (`split_weights`) are stepped as float32 masters, of each optimizer by itself.

    Collectives: none. Host reads: one, unless `steps_on_device`; of several optimizers one for all.
    """
    if (weights := offered.get()) is None:
        _apply(optimizer, found_inf, factor)
        return
    for part in parts_of(optimizer):
        _update_split(part, weights, found_inf, factor)


def _update_split(
    optimizer: torch.optim.Optimizer, weights: SplitWeights, found_inf: Tensor, factor: Tensor | None
) -> None:
    """By the loops in one pass, which join, step and split; what they leave by float32 copies, bucket by bucket."""
    update = partial(_apply, optimizer, found_inf, factor)
    loops = loops_for(optimizer, found_inf, factor) if steps_on_device(optimizer) else None
    if loops is None:
        weights.step(optimizer, update)
        return
    if any(left := step_by_loops(loops, optimizer, found_inf, factor)):
        with holding(optimizer, left):
            weights.step(optimizer, update)


def _apply(optimizer: torch.optim.Optimizer, found_inf: Tensor, factor: Tensor | None) -> None:
    loops = loops_for(optimizer, found_inf, factor)
    left = None if loops is None else step_by_loops(loops, optimizer, found_inf, factor, as_before=True)
    if left is None:
        _apply_anew(optimizer, found_inf, factor)
    elif any(left):
        _leave_to_torch(left, optimizer, found_inf, factor)


def _apply_anew(optimizer: torch.optim.Optimizer, found_inf: Tensor, factor: Tensor | None) -> None:
    """Ask of each optimizer by whom it is stepped."""
    parts = parts_of(optimizer)
    on_host = [part for part in parts if not steps_on_device(part)]
    for part in parts:
        if part not in on_host:
            _update_on_device(part, found_inf, factor)
    if on_host and not bool(found_inf):
        for part in on_host:
            widen_gradients(params_of(part))
            if factor is not None:
                scale_gradients(params_of(part), factor)
            if any(group.get("fused") for group in part.param_groups):
                lay_out_gradients(params_of(part))
            step_rightly(part)


def _update_on_device(optimizer: torch.optim.Optimizer, found_inf: Tensor, factor: Tensor | None) -> None:
    left: list[list[Tensor]] = []
    if (kernels := triton_for(optimizer, found_inf, factor)) is not None:
        left = step_by_triton(kernels, optimizer, found_inf, factor)
    elif (loops := loops_for(optimizer, found_inf, factor)) is not None:
        left = step_by_loops(loops, optimizer, found_inf, factor)
    else:
        update_by_torch(optimizer, found_inf, factor)
    if any(left):
        _leave_to_torch(left, optimizer, found_inf, factor)


def _leave_to_torch(
    left: list[list[Tensor]], optimizer: torch.optim.Optimizer, found_inf: Tensor, factor: Tensor | None
) -> None:
    with holding(optimizer, left):
        update_by_torch(optimizer, found_inf, factor)


def steps_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer takes ``grad_scale`` and ``found_inf`` tensors itself: Adam, AdamW, SGD, Adagrad, fused; and
    those of `meshstep.optim.whole`.

    Not before its first step for a fused SGD with dampening: torch makes the first momentum buffer from the gradient
    alone and has no such buffer yet if that step is skipped on the device. And not for half-precision parameters on a CPU
    where torch's fused SGD loses their updates (2.12 and 2.13). Of several optimizers all must.
    """
    if (parts := parts_of(optimizer)) != [optimizer]:
        return all(map(steps_on_device, parts))
    if asks_other_ranks(optimizer):
        return True
    fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    groups = optimizer.param_groups
    if not fused or not all(group.get("fused") for group in groups):
        return False
    if is_miscomputed(optimizer):
        return False
    return not any(
        group.get("momentum") and group.get("dampening") and without_momentum(optimizer, group) for group in groups
    )


def check_steps_without_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError for an optimizer that can't step with the gradients that are there (`torch.optim.LBFGS`)."""
    for part in parts_of(optimizer):
        closure = signature(part.step).parameters.get("closure")
        if closure is None or closure.default is not Parameter.empty:
            continue
        raise TypeError(
            f"{type(part).__name__} evaluates the loss itself, several times a step, by a closure, whose gradients "
            "nobody would complete, measure and clip: take an optimizer that steps without"
        )


def steps_in_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Whether to step parts of what the param groups hold one after another is the same as to step all of it at once."""
    hooks = any(part._optimizer_step_pre_hooks or part._optimizer_step_post_hooks for part in parts_of(optimizer))
    late = any(group.get("momentum") and group.get("dampening") for group in optimizer.param_groups)
    whole = any(map(asks_other_ranks, parts_of(optimizer)))
    return steps_on_device(optimizer) and not hooks and not late and not whole


def only(optimizer: torch.optim.Optimizer, places: Sequence[Sequence[int]]) -> AbstractContextManager[None]:
    """With param groups that hold only these of their parameters, by group and position."""
    bucket: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
    for index, at in places:
        bucket[index].append(optimizer.param_groups[index]["params"][at])
    return holding(optimizer, bucket)
