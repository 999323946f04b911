"""What a step has decided, brought to where parameters are stepped, to the CPU too, and by whom they are: the library's
loops, its kernels in Triton, or torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import Parameter, signature

import torch
from torch import Tensor

from ...amp.by_bucket import holding
from ..gradients.in_place import scale_gradients, widen_gradients
from .c_engine import Again, Call, Rows, loops_for, step_by_loops, taken_of
from .call_guard import has_step_hooks
from .combined_optimizer import asks_other_ranks, parts_of
from .half_copies import HalfCopies
from .split_weights import SplitWeights, offered_weights
from .torch_engine import (
    dense_stand_ins,
    is_miscomputed,
    lay_out_all,
    params_of,
    step_rightly,
    update_by_torch,
    without_momentum,
)
from .triton_engine import step_by_triton, triton_for


class Update(Again):
    """One step's update, by the library's loops, its kernels in Triton, or torch.

    Where it is decided on a CUDA device and some parameters are not there, that is sent to the CPU at once: a fused
    optimizer would send it too, but read what has not arrived.

    Args:
        factor: On a CPU the compiled loops multiply by it as they step (`again`), and leave gradients as they are; so do
            Triton's kernels on a GPU, if they were chosen (`triton_update`). torch's fused kernels divide by its inverse in
            float32 (and leave the scaled gradient in ``.grad``); float64 parameters and other optimizers are multiplied in
            a pass of their own.
    Split weights that are offered (`split_weights`) are stepped as float32 masters, of each optimizer by itself.

    Collectives: none. Host reads: one, unless `steps_on_device`, of several optimizers one for all; and one wait, for these
    two numbers, before parameters on the CPU are stepped by what a GPU decided.
    """

    _sent: tuple[Tensor, torch.cuda.Event] | None = None
    _here: tuple[Tensor, Tensor | None] | None = None

    def send(self) -> None:
        """To the CPU, what is on a CUDA device, where some parameters are there."""
        if any(param.is_cpu for group in self.optimizer.param_groups for param in group["params"]):
            both = torch.stack(
                [self.skipped.double(), self.skipped.double() if self.factor is None else self.factor.double()]
            )
            host = torch.empty(2, dtype=torch.float64, pin_memory=True)
            host.copy_(both, non_blocking=True)
            self._sent = host, torch.cuda.Event()
            self._sent[1].record(torch.cuda.current_stream(self.skipped.device))

    def some(self, rows: Rows, copies: HalfCopies | None) -> list[Call] | None:
        """What steps the rows that have gradients; None where some of these are nothing for the loops."""
        calls, left = taken_of(rows, copies)
        return None if left else calls

    def anew(self) -> None:
        """Ask by whom it is made."""
        if self._sent is None:
            _apply(self.optimizer, self.skipped, self.factor)
            return
        groups = enumerate(self.optimizer.param_groups)
        places = [(index, at, param.is_cpu) for index, group in groups for at, param in enumerate(group["params"])]
        sides = {on_cpu: [place for *place, here in places if here == on_cpu] for *_, on_cpu in places}
        if len(sides) == 2 and steps_in_parts(self.optimizer):
            for on_cpu, of_side in sorted(sides.items()):  # the device first: nobody waits for it
                with only(self.optimizer, of_side):
                    self._apply_on(on_cpu)
        else:
            self._apply_on(True in sides)

    def _apply_on(self, on_cpu: bool) -> None:
        _apply(self.optimizer, *(self._arrived() if on_cpu else (self.skipped, self.factor)))

    def _arrived(self) -> tuple[Tensor, Tensor | None]:
        if self._here is None:
            assert self._sent is not None, "they were sent where some parameters are on the CPU"
            (host, event), factor = self._sent, self.factor
            event.synchronize()
            self._here = host[0].to(self.skipped.dtype), None if factor is None else host[1].to(factor.dtype)
        return self._here


def _apply(optimizer: torch.optim.Optimizer, found_inf: Tensor, factor: Tensor | None) -> None:
    if (weights := offered_weights.get()) is None:
        _apply_anew(optimizer, found_inf, factor)
        return
    for part in parts_of(optimizer):
        _update_split(part, weights, found_inf, factor)


def _update_split(
    optimizer: torch.optim.Optimizer, weights: SplitWeights, found_inf: Tensor, factor: Tensor | None
) -> None:
    """By the loops in one pass, which join, step and split; what they leave by float32 copies, bucket by bucket."""
    update = partial(_apply_anew, optimizer, found_inf, factor)
    loops = loops_for(optimizer, found_inf, factor) if steps_on_device(optimizer) else None
    if loops is None:
        weights.step(optimizer, update)
        return
    if any(left := step_by_loops(loops, optimizer, found_inf, factor)):
        with holding(optimizer, left):
            weights.step(optimizer, update)


def _apply_anew(optimizer: torch.optim.Optimizer, found_inf: Tensor, factor: Tensor | None) -> None:
    """Step each optimizer by the kernels that suit it. Which ones step a parameter depends on no other parameter."""
    on_host = list[tuple[torch.optim.Optimizer, list[list[Tensor]] | None]]()
    for part in parts_of(optimizer):
        for bucket in _by_start(part):
            with _holding(part, bucket):
                if steps_on_device(part):
                    _update_on_device(part, found_inf, factor)
                else:
                    on_host.append((part, bucket))
    if on_host and not bool(found_inf):
        for part, bucket in on_host:
            with _holding(part, bucket):
                _update_on_host(part, factor)


@contextmanager
def _holding(optimizer: torch.optim.Optimizer, bucket: list[list[Tensor]] | None) -> Iterator[None]:
    """Let param groups hold a bucket (None: all), with dense copies of parameters that have gaps in memory."""
    with nullcontext() if bucket is None else holding(optimizer, bucket), dense_stand_ins(optimizer):
        yield


def _by_start(optimizer: torch.optim.Optimizer) -> list[list[list[Tensor]] | None]:
    """Return two buckets for a fused SGD with dampening: parameters with momentum, and those that get theirs in this step.

    Its kernels step only one kind at a time, and only the first kind skips on the device. [None] is all parameters at once.
    """
    groups = optimizer.param_groups
    if not any(group.get("fused") and group.get("momentum") and group.get("dampening") for group in groups):
        return [None]
    late = [without_momentum(optimizer, group) if group.get("momentum") else [] for group in groups]
    ids = {id(param) for params in late for param in params}
    rest = [[param for param in group["params"] if id(param) not in ids] for group in groups]
    has_both = any(late) and any(param.grad is not None for params in rest for param in params)
    return [rest, late] if has_both else [None]


def _update_on_host(optimizer: torch.optim.Optimizer, factor: Tensor | None) -> None:
    """Step an optimizer that knows neither a factor nor skipped steps."""
    widen_gradients(params_of(optimizer))
    if factor is not None:
        scale_gradients(params_of(optimizer), factor)
    if any(group.get("fused") for group in optimizer.param_groups):
        lay_out_all(optimizer)
    step_rightly(optimizer)


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
    hooks = any(map(has_step_hooks, parts_of(optimizer)))
    late = any(group.get("momentum") and group.get("dampening") for group in optimizer.param_groups)
    whole = any(map(asks_other_ranks, parts_of(optimizer)))
    return steps_on_device(optimizer) and not hooks and not late and not whole


def only(optimizer: torch.optim.Optimizer, places: Sequence[Sequence[int]]) -> AbstractContextManager[None]:
    """With param groups that hold only these of their parameters, by group and position."""
    bucket: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
    for index, at in places:
        bucket[index].append(optimizer.param_groups[index]["params"][at])
    return holding(optimizer, bucket)
