"""The update of a step: which engine (compiled C loops, Triton kernels, torch) steps which parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import Parameter, signature

import torch
from torch import Tensor

from ...amp.by_bucket import holding
from ..gradients.in_place import scale_gradients, widen_gradients
from .c_engine import RowCache, loops_for, step_by_loops, step_cached_rows
from .call_guard import has_step_hooks
from .combined_optimizer import asks_other_ranks, parts_of
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
from .update_request import HostDecision, Update, UpdateRequest

_CACHES: list[Callable[[], None]] = []


def invalidate_before_updates(forget: Callable[[], None]) -> None:
    """Call ``forget`` before each update, for caches of values that were made from weights. It must be cheap."""
    _CACHES.append(forget)


class UpdateEngine:
    """Makes the updates of one optimizer by the compiled loops, the library's Triton kernels, or torch, whichever suits.

    On a CPU the loops multiply gradients by ``request.factor`` as they step, and leave ``.grad`` unchanged. So do the
    Triton kernels, if they were chosen. torch's fused kernels divide by the inverse factor in float32 and leave the scaled
    gradient in ``.grad``. float64 parameters and other optimizers are scaled in a pass of their own.

    Args:
        optimizer: The wrapped optimizer; it may consist of several.
    Collectives: none. Host synchronization: one, unless `steps_on_device`, for all of several optimizers together; one wait
    for `HostDecision` before parameters on the CPU are stepped by the decision of a GPU.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._caches: dict[torch.optim.Optimizer, RowCache] = {}

    def run(self, request: UpdateRequest, around: Iterable[Callable[[UpdateRequest, Update], object]] = ()) -> None:
        """Make one update inside the given transforms: the first of ``around`` calls `step`, the second the first, ..."""
        if request.skip.is_cuda and any(param.is_cpu for param in params_of(self.optimizer)):
            request = replace(request, on_host=HostDecision(request.skip, request.factor))
        update: Update = self.step
        for enter in around:
            update = partial(_entered, enter, update)
        update(request)

    def step(self, request: UpdateRequest) -> None:
        """Step what the param groups hold now, which may be a part of all parameters, or skip."""
        for forget in _CACHES:
            forget()
        optimizer = self.optimizer
        if request.split_weights is None and step_cached_rows(optimizer, request, self._cache_of(optimizer)):
            return
        if request.on_host is None:
            self._step_split(request)
            return
        groups = enumerate(optimizer.param_groups)
        places = [(index, at, param.is_cpu) for index, group in groups for at, param in enumerate(group["params"])]
        sides = {on_cpu: [place for *place, here in places if here == on_cpu] for *_, on_cpu in places}
        if len(sides) == 2 and steps_in_parts(optimizer):
            for on_cpu, of_side in sorted(sides.items()):  # the device first: its launches do not wait
                with only(optimizer, of_side):
                    self._step_split(_on_cpu(request) if on_cpu else request)
        else:
            self._step_split(_on_cpu(request) if True in sides else request)

    def _cache_of(self, optimizer: torch.optim.Optimizer) -> RowCache:
        return self._caches.setdefault(optimizer, {})

    def _step_split(self, request: UpdateRequest) -> None:
        """Step split weights as float32 masters: by the loops, which join, step and split in one pass; others by float32
        copies, bucket by bucket."""
        weights, optimizer = request.split_weights, self.optimizer
        if weights is None:
            self._step_parts(optimizer, request)
            return
        for part in parts_of(optimizer):
            update = partial(self._step_parts, part, replace(request, split_weights=None))
            loops = loops_for(part, request.skip, request.factor) if steps_on_device(part) else None
            if loops is None:
                weights.step(part, update)
            elif any(left := step_by_loops(loops, part, request, self._cache_of(part))):
                with holding(part, left):
                    weights.step(part, update)

    def _step_parts(self, optimizer: torch.optim.Optimizer, request: UpdateRequest) -> None:
        """Step each optimizer by the kernels that suit it. The choice for a parameter depends on no other parameter."""
        on_host = list[tuple[torch.optim.Optimizer, list[list[Tensor]] | None]]()
        for part in parts_of(optimizer):
            for bucket in _by_start(part):
                with _holding(part, bucket):
                    if steps_on_device(part):
                        self._step_on_device(part, request)
                    else:
                        on_host.append((part, bucket))
        if on_host and not bool(request.skip):
            for part, bucket in on_host:
                with _holding(part, bucket):
                    _step_on_host(part, request.factor)

    def _step_on_device(self, optimizer: torch.optim.Optimizer, request: UpdateRequest) -> None:
        left: list[list[Tensor]] = []
        cache = self._cache_of(optimizer)
        if (kernels := triton_for(optimizer, request.skip, request.factor)) is not None:
            left = step_by_triton(kernels, optimizer, request, cache)
        elif (loops := loops_for(optimizer, request.skip, request.factor)) is not None:
            left = step_by_loops(loops, optimizer, request, cache)
        else:
            update_by_torch(optimizer, request.skip, request.factor)
        if any(left):
            with holding(optimizer, left):
                update_by_torch(optimizer, request.skip, request.factor)


def _entered(enter: Callable[[UpdateRequest, Update], object], update: Update, request: UpdateRequest) -> None:
    enter(request, update)


def _on_cpu(request: UpdateRequest) -> UpdateRequest:
    """Return the request with ``skip`` and ``factor`` on the CPU. Host synchronization: a wait for their copy."""
    assert request.on_host is not None, "the copy is started where some parameters are on the CPU"
    skip, factor = request.on_host.wait()
    return replace(request, skip=skip, factor=factor, on_host=None)


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


def _step_on_host(optimizer: torch.optim.Optimizer, factor: Tensor | None) -> None:
    """Step an optimizer that knows neither a factor nor skipped steps."""
    widen_gradients(params_of(optimizer))
    if factor is not None:
        scale_gradients(params_of(optimizer), factor)
    if any(group.get("fused") for group in optimizer.param_groups):
        lay_out_all(optimizer)
    step_rightly(optimizer)


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
