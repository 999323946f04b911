"""The update of a step. It chooses an engine per parameter: compiled C loops, Triton kernels, or torch's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...amp.by_bucket import holding
from ...amp.capture import is_captured
from ..gradients.in_place import scale_gradients, widen_gradients
from ..kernels.choice import triton_on
from .c_engine import (
    SUPPORTED_OPTIMIZERS,
    RowCache,
    is_number,
    is_supported,
    loops_for,
    numbers_in,
    rows_of,
    split_supported,
    step_by_loops,
    step_cached_rows,
)
from .torch_engine import (
    check_states_are_made,
    dense_stand_ins,
    is_miscomputed,
    lay_out_all,
    step_correctly,
    update_by_torch,
    without_momentum,
)
from .update_request import HostDecision, Update, UpdateRequest
from .wrapped_optimizer import asks_other_ranks, has_step_hooks, params_of, parts_of

if TYPE_CHECKING:
    from ..kernels.triton import Triton

_CACHES: list[Callable[[], None]] = []


def invalidate_before_updates(forget: Callable[[], None]) -> None:
    """Register ``forget``, a function that `UpdateEngine` calls before each update of weights.

    ``forget`` should clear a cache of values that were computed from weights. It must be cheap.
    """
    _CACHES.append(forget)


class UpdateEngine:
    """The engine that updates an optimizer's parameters with compiled C loops, Triton kernels, or torch's kernels.

    Path of a usual step: `run` -> parameter transforms -> `step` -> each device -> split weights, if any -> each
    optimizer of a `CombinedOptimizer` -> C loops, Triton kernels or torch's kernels.

    The C loops (on a CPU) and the Triton kernels (if chosen) multiply gradients by ``request.factor`` during the update
    and leave ``.grad`` unchanged. torch's fused kernels divide by the inverse factor in float32 and write the scaled
    gradient to ``.grad``. `Lion` by torch's kernels and the optimizers of `meshstep.optim.whole` scale copies of
    gradients, except that some of the latter (such as `Muon`) scale gradients on a GPU in place. For other optimizers,
    and if one of the parameters in a call of the optimizer's `step` is float64, a separate pass scales gradients in
    place.

    Host synchronization: that of the optimizers; one if `steps_on_device` is False for an optimizer; one more if the
    skip flag is on a GPU and some parameters are on the CPU (`HostDecision`). More if ``request.skip_of`` has tensors
    on the CPU, or tensors of an elementwise optimizer for which `may_step_in_several_calls` is False.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._caches: dict[torch.optim.Optimizer, RowCache] = {}

    def run(self, request: UpdateRequest, around: Iterable[Callable[[UpdateRequest, Update], object]] = ()) -> None:
        """Run one update, nested in the functions ``around``.

        These are called as ``function(request, update)``, and must call ``update(request)``. For the first function,
        ``update`` is `step`; for each later function it is a call of the previous function.
        """
        if request.skip.is_cuda and any(param.is_cpu for param in params_of(self.optimizer)):
            request = replace(request, on_host=HostDecision(request.skip, request.factor))
        update: Update = self.step
        for enter in around:
            update = partial(_entered, enter, update)
        update(request)

    def step(self, request: UpdateRequest) -> None:
        """Call the functions of `invalidate_before_updates`, then update the parameters in the param groups now."""
        for forget in _CACHES:
            forget()
        apart = [param for param in params_of(self.optimizer) if param in request.skip_of] if request.skip_of else []
        if apart:
            self._step_with_own_flags(request, apart)
        else:
            self._step_each_device(request)

    def _step_with_own_flags(self, request: UpdateRequest, apart: Sequence[Tensor]) -> None:
        """Step each parameter in ``apart`` alone, with its flag in ``request.skip_of``, and all other parameters together.

        There are two exceptions. Full-tensor optimizers step all of their parameters together, and read the flags in
        their attribute ``skip_of``. For an elementwise optimizer that can't step in several calls
        (`may_step_in_several_calls`), the host reads the flags and removes the gradients of skipped parameters; the
        optimizer then steps its other parameters together.

        Host synchronization: one to read flags in the second case; one per parameter in ``apart`` that is on the CPU
            with a flag on a GPU.
        """
        ids, skip_of = {id(param) for param in apart}, request.skip_of
        request = replace(request, skip_of={})
        one_by_one = list[tuple[torch.optim.Optimizer, Tensor]]()
        on_host = list[Tensor]()
        for part in parts_of(self.optimizer):
            if not asks_other_ranks(part):
                own = [param for param in params_of(part) if id(param) in ids]
                if may_step_in_several_calls(part):
                    one_by_one += [(part, param) for param in own]
                else:
                    on_host += own
        if on_host:
            flags = torch.stack([skip_of[param] for param in on_host]).tolist()
            for param, skips in zip(on_host, flags, strict=True):
                param.grad = None if skips else param.grad
        held = {id(param) for _, param in one_by_one}
        rest = [[param for param in group["params"] if id(param) not in held] for group in self.optimizer.param_groups]
        full: list[Any] = [part for part in parts_of(self.optimizer) if asks_other_ranks(part)]
        with holding(self.optimizer, rest):
            for part in full:
                part.skip_of = skip_of
            try:
                self._step_each_device(request)
            finally:
                for part in full:
                    del part.skip_of
        for part, param in one_by_one:
            skip = skip_of[param].to(param.device)
            own_request = _on_cpu(request) if param.is_cpu and request.on_host is not None else request
            only = [[other for other in group["params"] if other is param] for group in part.param_groups]
            with holding(part, only):
                self._step_split_weights(part, replace(own_request, skip=skip, on_host=None))

    def _step_each_device(self, request: UpdateRequest) -> None:
        """Step the parameters on a GPU, then those on the CPU, in one `_step_split_weights` call for each device.

        There is only one call if all parameters are on one kind of device, or if the optimizer can't step in several
        calls; and no call if the C loops can step all parameters from cached rows.
        """
        optimizer = self.optimizer
        if request.split_weights is None and step_cached_rows(optimizer, request, self._cache_of(optimizer)):
            return
        if request.on_host is None:
            self._step_split_weights(optimizer, request)
            return
        sides = sorted({param.is_cpu for param in params_of(optimizer)})
        if len(sides) == 2 and may_step_in_several_calls(optimizer):
            for on_cpu in sides:  # GPU first: its kernels run while the host steps on the CPU
                side = [
                    [param for param in group["params"] if param.is_cpu == on_cpu] for group in optimizer.param_groups
                ]
                with holding(optimizer, side):
                    self._step_split_weights(optimizer, _on_cpu(request) if on_cpu else request)
        else:
            self._step_split_weights(optimizer, _on_cpu(request) if True in sides else request)

    def _cache_of(self, optimizer: torch.optim.Optimizer) -> RowCache:
        return self._caches.setdefault(optimizer, {})

    def _step_split_weights(self, optimizer: torch.optim.Optimizer, request: UpdateRequest) -> None:
        """Step parameters, some of which may be split weights: bfloat16 weights with int16 remainders.

        The C loops join weight and remainder to a float32 master, step the master and split it again in one pass. For
        other engines `SplitWeights` joins and splits masters, bucket by bucket.
        """
        weights = request.split_weights
        if weights is None:
            self._step_each_optimizer(optimizer, request)
            return
        for part in parts_of(optimizer):
            update = partial(self._step_each_optimizer, part, replace(request, split_weights=None))
            loops = loops_for(part, request.skip, request.factor) if steps_on_device(part) else None
            if loops is None:
                weights.step(part, update)
            elif any(left := step_by_loops(loops, part, request, self._cache_of(part))):
                with holding(part, left):
                    weights.step(part, update)

    def _step_each_optimizer(self, optimizer: torch.optim.Optimizer, request: UpdateRequest) -> None:
        """Step ``optimizer``, or each optimizer of a `CombinedOptimizer`, with kernels that support it.

        Host synchronization: one if `steps_on_device` is False for any of them.
        """
        on_host = list[tuple[torch.optim.Optimizer, list[list[Tensor]] | None]]()
        for part in parts_of(optimizer):
            for bucket in _separate_calls(part):
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
        """Step ``optimizer``, which is not a `CombinedOptimizer`, by the first engine that supports it."""
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
    """Return the request with ``skip`` and ``factor`` on the CPU. Host synchronization: one, to wait for their copy."""
    assert request.on_host is not None, (
        "the step must start the copy (`HostDecision`) if some parameters are on the CPU"
    )
    skip, factor = request.on_host.wait()
    return replace(request, skip=skip, factor=factor, on_host=None)


@contextmanager
def _holding(optimizer: torch.optim.Optimizer, bucket: list[list[Tensor]] | None) -> Iterator[None]:
    """Return a context manager in which the param groups hold only the parameters in ``bucket`` (None: all parameters)."""
    with nullcontext() if bucket is None else holding(optimizer, bucket), dense_stand_ins(optimizer):
        yield


def _separate_calls(optimizer: torch.optim.Optimizer) -> list[list[list[Tensor]] | None]:
    """Divide the parameters into buckets, which must be stepped in separate calls; ``[None]``: one call can step all.

    A fused optimizer has separate buckets for these parameters, so that the update of a parameter does not depend on
    the other parameters of its rank, and replicas on ranks with different parameters stay equal:

    * float64 parameters, because their gradients are scaled in place (`update_by_torch`)
    * half-precision parameters of an SGD on a CPU with a torch version that loses their updates (`is_miscomputed`)
    * with momentum and dampening, parameters without a momentum buffer, because the device can't skip their first
      update
    """
    groups = optimizer.param_groups
    if asks_other_ranks(optimizer) or not any(group.get("fused") for group in groups):
        return [None]
    if not any(map(_has_dampening, groups)) and len({param.dtype for param in params_of(optimizer)}) <= 1:
        return [None]
    kinds: dict[int, tuple[bool, ...]] = {}
    for group in groups:
        late = {id(param) for param in without_momentum(optimizer, group)} if _has_dampening(group) else ()
        for param in group["params"]:
            if param.grad is not None:
                is_wide = param.dtype == torch.float64
                kinds[id(param)] = (is_miscomputed(optimizer, [param]), is_wide, id(param) in late)
    found = sorted({*kinds.values()})
    if len(found) <= 1:
        return [None]
    return [
        [[param for param in group["params"] if kinds.get(id(param)) == kind] for group in groups] for kind in found
    ]


def _has_dampening(group: Mapping[str, Any]) -> bool:
    return bool(group.get("momentum") and group.get("dampening"))


def _step_on_host(optimizer: torch.optim.Optimizer, factor: Tensor | None) -> None:
    """Step an optimizer that accepts no factor and no skip flag; gradients are first multiplied by ``factor`` in place."""
    widen_gradients(params_of(optimizer))
    if factor is not None:
        scale_gradients(params_of(optimizer), factor)
    if any(group.get("fused") for group in optimizer.param_groups):
        lay_out_all(optimizer)
    step_correctly(optimizer)


def steps_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer itself can skip a step, because it accepts ``grad_scale`` and ``found_inf``.

    True for torch's fused Adam, AdamW, SGD and Adagrad, for `Lion`, for the optimizers of `meshstep.optim.whole`, and
    for a `CombinedOptimizer` of such optimizers. Of these, only `AnyOptimizer` reads ``found_inf`` on the host. There are
    three exceptions, for which the result is False:

    * Fused Adagrad of torch 2.11, which does not declare that it accepts ``grad_scale`` and ``found_inf``.
    * Fused SGD with dampening before a parameter's first step: torch makes the momentum buffer from the first gradient,
      which is wrong if that step is skipped on the device.
    * Fused SGD with half-precision parameters on a CPU, in torch versions that lose their updates (2.11 to 2.13).
    """
    if (parts := parts_of(optimizer)) != [optimizer]:
        return all(map(steps_on_device, parts))
    if asks_other_ranks(optimizer):
        return True
    fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    groups = optimizer.param_groups
    if not fused or not all(group.get("fused") for group in groups):
        return False
    if is_miscomputed(optimizer, params_of(optimizer)):
        return False
    return not any(_has_dampening(group) and without_momentum(optimizer, group) for group in groups)


def check_steps_without_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError if the optimizer can't step without a closure, such as `torch.optim.LBFGS`."""
    for part in parts_of(optimizer):
        closure = signature(part.step).parameters.get("closure")
        if closure is None or closure.default is not Parameter.empty:
            continue
        raise TypeError(
            f"{type(part).__name__}.step requires a closure, whose gradients would be neither reduced, measured nor "
            "clipped: use an optimizer that steps without a closure"
        )


def check_steps_on_gpu(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if this version of torch can't step the optimizer's parameters on a GPU.

    Fused Adagrad of torch 2.11 raises an error in its first step there. This version does not declare that it accepts
    ``grad_scale`` and ``found_inf``; newer versions, which support GPUs, do.
    """
    for part in parts_of(optimizer):
        fused = isinstance(part, torch.optim.Adagrad) and any(group.get("fused") for group in part.param_groups)
        if fused and not getattr(part, "_step_supports_amp_scaling", False):
            raise ValueError(
                f"Adagrad with fused=True has parameters on a GPU, where torch {torch.__version__} can't step it: "
                "write torch.optim.Adagrad(..., fused=False), or install a newer torch"
            )


def may_step_in_several_calls(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer may step its parameters in several calls, with the same result as in one call."""
    has_hooks = any(map(has_step_hooks, parts_of(optimizer)))
    has_dampening = any(map(_has_dampening, optimizer.param_groups))
    is_whole = any(map(asks_other_ranks, parts_of(optimizer)))
    return steps_on_device(optimizer) and not has_hooks and not has_dampening and not is_whole


# Triton kernels: the optimizers of `c_engine` with ``in_triton``, with parameters and states on a GPU ---------------

# Parameters with equal compile-time arguments (`triton.Variant`) share kernel launches, even if their param groups
# have different learning rates or other numbers. The host does not read the factor, the skip flag, the step counts, or
# learning rates that are tensors on the GPU.


def triton_for(optimizer: torch.optim.Optimizer, found_inf: Tensor, factor: Tensor | None) -> Triton | None:
    """Return the Triton kernels if `triton_on` returns them and they support the optimizer; None otherwise."""
    device = found_inf.device
    kernels = triton_on(device)
    if kernels is None:
        return None

    def is_read(value: Tensor) -> bool:
        return is_number(value) and (value.is_cpu or value.device == device)

    if not all(is_number(value) and value.device == device for value in (found_inf, factor) if value is not None):
        return None
    if any(
        isinstance(value, Tensor) and key != "lr" for group in optimizer.param_groups for key, value in group.items()
    ):
        return None
    if not is_supported(optimizer, is_read) or not SUPPORTED_OPTIMIZERS[type(optimizer)].in_triton:
        return None
    if is_captured():
        check_states_are_made(optimizer)
    return kernels


def step_by_triton(
    kernels: Triton, optimizer: torch.optim.Optimizer, request: UpdateRequest, cache: RowCache
) -> list[list[Tensor]]:
    """Step all parameters that the Triton kernels support, and return the parameters that torch must step.

    If ``request.skip`` is 1, no value changes; missing states are created. ``request.skip`` and ``request.factor`` must
    be on the kernels' device. Rows in ``cache`` that can't be reused are replaced.
    """
    from ..kernels.triton import KernelLaunch

    spec, copies, left = SUPPORTED_OPTIMIZERS[type(optimizer)], request.low_precision_out, list[list[Tensor]]()
    parts, alive, halves = list[KernelLaunch](), list[Tensor](), list[Tensor]()
    device = request.skip.device
    for group, rows in rows_of(optimizer, device, {}, cache):
        rate = group["lr"] if isinstance(group["lr"], Tensor) and group["lr"].device == device else None
        hyper = numbers_in(group if rate is None else {**group, "lr": 0.0}, spec)
        calls, leftover = split_supported(rows, copies)
        for call in calls:
            parts.append(KernelLaunch(call.columns, hyper, rate, group["maximize"], call.grad_dtype, call.half_dtype))
            alive += call.alive
            halves += call.halves
        left.append(leftover)
    kernels.update(spec.kind, parts, request.skip, request.factor)
    if copies is not None and halves:
        copies.written += halves
        torch.autograd.graph.increment_version(halves)
    return left
