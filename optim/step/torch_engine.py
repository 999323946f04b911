"""The update engine that calls the torch optimizer's own `step`, with workarounds for bugs of torch's kernels.

Optimizers that accept a skip flag and a gradient scale get both as tensors on the device (`update_by_torch`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from ...amp import by_bucket
from ...amp.capture import is_captured
from ...amp.casting import is_half
from ...parallel.layout.annotation import copy_annotation
from ..gradients.in_place import scale_gradients, widen_gradients
from ..kernels.memory import Signature, is_lazy, is_non_overlapping_and_dense, match_memory_format, match_memory_format_
from .c_engine import first_value
from .wrapped_optimizer import asks_other_ranks, own_calls, params_of, parts_of

# Updates that a CUDA graph captures -----------------------------------------------------------------------------------


@contextmanager
def capturable(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Return a context manager that sets ``capturable`` in param groups while a CUDA graph captures the update.

    torch's Adam requires ``capturable`` in a capture, and warns about it without a graph.
    """
    if not is_captured():
        yield
        return
    check_states_are_made(optimizer)
    said = [group for group in optimizer.param_groups if group.get("capturable") is False]
    for group in said:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in said:
            group["capturable"] = False


def check_states_are_made(optimizer: torch.optim.Optimizer) -> None:
    """Raise RuntimeError if a parameter has a gradient but no state, although other parameters have states.

    Each replay of a CUDA graph that captures the step would create this state again.
    """
    params = params_of(optimizer)
    without = [param for param in params if not optimizer.state.get(param)]
    if len(without) == len(params):
        return  # the optimizer has no state at all
    for param in without:
        if param.grad is not None:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} has its first gradient in a step that is captured in a CUDA "
                "graph, and each replay would create the optimizer state again: before the capture, make a step in which "
                "every trained parameter has a gradient"
            )


# Step counts of fused optimizers, updated in one pass instead of two --------------------------------------------------

_ADD, _ADD_TENSOR = torch.ops.aten._foreach_add_.Scalar, torch.ops.aten._foreach_add_.Tensor
_SUBTRACT = torch.ops.aten._foreach_sub_.List


class FusedStepCountMode(TorchDispatchMode):
    """A dispatch mode in which a fused optimizer with ``found_inf`` adds ``1 - found_inf`` to its step counts.

    torch itself adds 1 to all counts and, after the update, subtracts one ``found_inf`` tensor per count, which takes
    more kernel launches. With a torch version that counts in another way, the mode changes nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, found_inf: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._optimizer, self._found_inf = optimizer, found_inf
        self._taken: Tensor | None = None
        self._counted: list[Sequence[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ADD and args[1] == 1 and self._are_counts(args[0]):
            self._counted.append(args[0])
            if self._taken is None:
                self._taken = 1 - self._found_inf
            return _ADD_TENSOR(args[0], self._taken)
        if func is _SUBTRACT and args[1][0] is self._found_inf and self._was_counted(args[0]):
            return None
        return func(*args, **(kwargs or {}))

    def _are_counts(self, tensors: Sequence[Tensor]) -> bool:
        counts = {id(state.get("step")) for state in self._optimizer.state.values()}
        return tensors[0].dtype == self._found_inf.dtype and all(id(tensor) in counts for tensor in tensors)

    def _was_counted(self, tensors: Sequence[Tensor]) -> bool:
        return any(len(before) == len(tensors) and all(map(is_, before, tensors)) for before in self._counted)


@contextmanager
def _counts_kept_on_error(optimizer: torch.optim.Optimizer, found_inf: Tensor) -> Iterator[None]:
    """Return a context manager that corrects the step counts if an update raises that was to be skipped.

    A fused optimizer first adds 1 to its step counts, and subtracts ``found_inf`` after its kernel. If the kernel raises
    on one rank only, that rank's counts would stay one higher than those of its replicas. An addition shows in the
    version counter of the tensor.
    """
    before = {id(count): count._version for count in _counts_in(optimizer)}
    try:
        yield
    except Exception:
        for count in _counts_in(optimizer):
            if id(count) not in before:
                count.mul_(1 - found_inf)
            elif count._version == before[id(count)] + 1:
                count.sub_(found_inf)
        raise


def _counts_in(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    counts = (state.get("step") for state in optimizer.state.values())
    return (count for count in counts if isinstance(count, Tensor))


# States and gradients with the strides of their parameters ------------------------------------------------------------

# This library's kernels and torch's fused kernels read the memory of parameter, gradient and states linearly. With
# different strides they would combine an element with the state of another element. A state and its parameter may have
# different strides after a checkpoint of contiguous tensors was loaded, and after ``model.to(memory_format=...)``.


@dataclass
class _LaidOut:
    """A record of the tensors whose strides `lay_out_all` has checked in earlier steps."""

    states: list[object]
    params: Signature
    gradients: dict[torch.dtype, Signature] = field(default_factory=dict)


_laid_out: WeakKeyDictionary[torch.optim.Optimizer, _LaidOut] = WeakKeyDictionary()


def lay_out_all(optimizer: torch.optim.Optimizer) -> None:
    """Give states and gradients the strides of their parameters, before torch's fused kernels step.

    Strides are not checked again while the states are the same tensors, and types, dtypes, shapes and strides of
    parameters (and for gradients: of all gradients) are unchanged.
    """
    params = params_of(optimizer)
    if by_bucket.holders:  # param groups hold some of the parameters or temporary copies, so nothing is recorded
        lay_out_states(optimizer)
        lay_out_gradients(params)
        return
    states = [value for of_param in optimizer.state.values() for value in of_param.values()]
    known = _laid_out.get(optimizer)
    same = known is not None and len(states) == len(known.states) and all(map(is_, states, known.states))
    if known is None or not same or not known.params.fits(params):
        lay_out_states(optimizer)
        known = _laid_out[optimizer] = _LaidOut(states, Signature(params))
    gradients = [param.grad for param in params]
    first = gradients[0] if gradients else None
    if first is not None and first.dtype in known.gradients and known.gradients[first.dtype].fits(gradients):
        return
    lay_out_gradients(params)
    there = [gradient for gradient in gradients if gradient is not None]
    as_before = all(map(is_, gradients, (param.grad for param in params)))
    if as_before and first is not None and first.dtype not in known.gradients and len(there) == len(gradients):
        known.gradients[first.dtype] = Signature(there)


def lay_out_states(optimizer: torch.optim.Optimizer) -> None:
    """Change the strides of optimizer states to the strides of their parameters.

    This applies to states that have their parameter's shape, if the parameter has no gaps in memory. States of the
    optimizers of `meshstep.optim.whole` are unchanged, because these optimizers need contiguous states.
    """
    _laid_out.pop(optimizer, None)  # the record may reference states that `load_state_dict` has replaced
    for part in parts_of(optimizer):
        if asks_other_ranks(part) or not part.state:
            continue
        for param in (param for param in params_of(part) if param in part.state):
            contiguous = param.is_contiguous() and param.numel() > 0
            for value in part.state[param].values():
                if not isinstance(value, Tensor) or (contiguous and value.is_contiguous() and not value.is_neg()):
                    continue
                if is_non_overlapping_and_dense(param):
                    match_memory_format_(value, param)


def lay_out_gradients(params: Sequence[Tensor]) -> None:
    """Replace gradients that are lazy or have other strides than their parameter by copies with these strides."""
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        as_it_is = param.is_contiguous() and grad.is_contiguous() and param.numel() > 0 and not is_lazy(grad)
        if not as_it_is and (ordered := match_memory_format(grad, param)) is not grad:
            param.grad = ordered


@contextmanager
def dense_stand_ins(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Return a context manager that replaces parameters with gaps in memory by dense copies, for fused optimizers.

    Fused CPU kernels would write into the gaps, and fused CUDA kernels would raise an error. Unfused kernels would round
    differently, so replicas with different memory layouts would diverge. Empty parameters with other strides than a new
    tensor are replaced as well, because fused CUDA kernels compare their strides with those of the new states.
    Parameters without a gradient are not replaced. On exit without an error, the values of the copies are written back.
    """
    groups = optimizer.param_groups
    is_fused = not asks_other_ranks(optimizer) and any(group.get("fused") for group in groups)
    params = params_of(optimizer) if is_fused else []
    other = [param for param in params if not (param.is_contiguous() and param.numel())]  # few or none
    gaps = [param for param in other if param.grad is not None and not _has_usual_strides(param)]
    if not gaps:
        yield
        return
    copies = {param: _dense_copy(optimizer, param) for param in gaps}
    try:
        with by_bucket.holding(
            optimizer, [[copies.get(param, param) for param in group["params"]] for group in groups]
        ):
            yield
    finally:
        for param, copy in copies.items():
            if state := optimizer.state.pop(copy, None):
                optimizer.state[param] = state
    torch._foreach_copy_([param.detach() for param in copies], list(copies.values()))


def _has_usual_strides(param: Tensor) -> bool:
    if param.numel():
        return is_non_overlapping_and_dense(param)
    return param.stride() == torch.empty(param.shape, device="meta").stride()


def _dense_copy(optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor:
    """Return a dense copy of ``param`` with its gradient and annotation, and move its optimizer state to the copy."""
    order = torch.preserve_format if param.numel() else torch.contiguous_format
    copy = nn.Parameter(torch.empty_like(param, requires_grad=False, memory_format=order).copy_(param.detach()))
    copy_annotation(param, copy)
    copy.grad_dtype = param.grad_dtype
    copy.grad = param.grad
    if state := optimizer.state.pop(param, None):
        optimizer.state[copy] = state
    return copy


# The update by torch's kernels ----------------------------------------------------------------------------------------


def update_by_torch(optimizer: torch.optim.Optimizer, found_inf: Tensor, factor: Tensor | None) -> None:
    """Call `step` of an optimizer that accepts a skip flag: a fused torch optimizer, `Lion`, or a full-tensor optimizer.

    ``found_inf`` is 0-dim; 1 skips the update. ``factor`` is a 0-dim factor on gradients; None: 1.
    Collectives, host synchronization: those of full-tensor optimizers; none with other optimizers.
    """
    params = params_of(optimizer)
    widen_gradients(params)
    if factor is not None and torch.float64 in {param.dtype for param in params}:
        scale_gradients(params, torch.where(found_inf > 0, torch.ones_like(factor), factor))
        factor = None
    _start_momentum(optimizer)
    _start_sums(optimizer)
    lay_out_all(optimizer)
    fused: Any = optimizer
    fused.found_inf = found_inf
    fused.grad_scale = None if factor is None else torch.reciprocal(factor, out=torch.empty_like(found_inf))
    try:
        with capturable(optimizer), _counting(optimizer, found_inf):
            step_within(optimizer)
    finally:
        del fused.found_inf, fused.grad_scale


def _counting(optimizer: torch.optim.Optimizer, found_inf: Tensor) -> AbstractContextManager[object]:
    if asks_other_ranks(optimizer):
        return nullcontext()  # full-tensor optimizers count their steps themselves
    return (
        FusedStepCountMode(optimizer, found_inf) if found_inf.is_cuda else _counts_kept_on_error(optimizer, found_inf)
    )


def without_momentum(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> list[Tensor]:
    return [
        param
        for param in group["params"]
        if param.grad is not None and optimizer.state.get(param, {}).get("momentum_buffer") is None
    ]


def _start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Create missing momentum buffers of a fused SGD as zeros, for parameters with a gradient.

    torch would leave a new buffer uninitialized if its first step is skipped. Without dampening, the first update from
    zeros equals torch's first update.
    """
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            for param in without_momentum(optimizer, group) if group["momentum"] else ():
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)


def _start_sums(optimizer: torch.optim.Optimizer) -> None:
    """Create missing states of an Adagrad, for parameters with a gradient, as the constructor of Adagrad does.

    torch 2.11 creates none in `add_param_group`.
    """
    if not isinstance(optimizer, torch.optim.Adagrad):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and "sum" not in optimizer.state.get(param, {}):
                first = first_value(optimizer, group, "sum")
                start = complex(first, first) if param.is_complex() else first
                is_double = torch.get_default_dtype() == torch.float64 and not group["fused"]
                count = torch.zeros((), dtype=torch.float64 if is_double else torch.float32)
                optimizer.state[param] = {
                    "step": count.to(param.device) if group["fused"] else count,
                    "sum": torch.full_like(param, start, memory_format=torch.preserve_format).detach(),
                }


def step_correctly(optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer, with ``fused=False`` if its fused kernels would give wrong results (`is_miscomputed`)."""
    _start_sums(optimizer)
    groups = optimizer.param_groups if is_miscomputed(optimizer, params_of(optimizer)) else []
    before = [(group, group["fused"]) for group in groups]
    try:
        for group in groups:
            group["fused"] = False
        step_within(optimizer)
    finally:
        for group, fused in before:
            group["fused"] = fused


def is_miscomputed(optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> bool:
    """Return True if torch's fused SGD would update a half-precision CPU parameter in ``params`` incorrectly."""
    if not isinstance(optimizer, torch.optim.SGD) or not any(group.get("fused") for group in optimizer.param_groups):
        return False
    stepped = (param for param in params if param.requires_grad or param.grad is not None)
    return any(param.is_cpu and is_half(param) for param in stepped) and _fused_sgd_is_wrong()


@cache
def _fused_sgd_is_wrong() -> bool:
    """Return True if fused SGD of this torch version leaves most of a half-precision CPU parameter unchanged.

    See pytorch issue 191763.
    """
    weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16, device="cpu"))
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5, fused=True).step()
    return bool((weight != 0.5).any())


# torch's global step hooks, which run once per step: around the optimizer whose `step` the user calls ------------------


def step_within(optimizer: torch.optim.Optimizer) -> None:
    """Call ``optimizer.step()`` without torch's global step hooks, because it is a part of another optimizer's step."""
    with _no_global_hooks(), own_calls:
        optimizer.step()


@contextmanager
def _no_global_hooks() -> Iterator[None]:
    registries: list[Any] = [torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]
    kept = [(hooks, dict(hooks)) for hooks in registries]
    for hooks in registries:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            new = dict(hooks)
            hooks.clear()
            hooks.update({**before, **new})
