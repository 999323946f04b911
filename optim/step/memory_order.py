"""States and gradients with the strides of their parameters.

Kernels that get addresses, the library's and torch's fused ones, walk through parameter, gradient and states linearly: with
other strides they would step elements by the states of others. Loaded states have other strides where a checkpoint was
written from contiguous tensors, and so have all states after ``model.to(memory_format=...)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...amp import by_bucket
from ...parallel.layout.annotation import copy_annotation
from ..kernels.memory import Signature, is_lazy, laid_out, lay_out_, lies_densely
from .several import asks_other_ranks, parts_of


@dataclass
class _LaidOut:
    """What was laid out in an optimizer's last step: states, the signature of its parameters, and those of gradients by
    dtype."""

    states: list[object]
    params: Signature
    gradients: dict[torch.dtype, Signature] = field(default_factory=dict)


_laid_out: WeakKeyDictionary[torch.optim.Optimizer, _LaidOut] = WeakKeyDictionary()


def lay_out_all(optimizer: torch.optim.Optimizer) -> None:
    """Lay out states and gradients before torch's fused kernels step. They are looked at one by one only where parameters,
    gradients or the tensors in the state are others than in the last step."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if by_bucket.holders:  # a part of the parameters, or copies that are thrown away
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
    """Give states of their parameter's shape its strides. Optimizers of `meshstep.optim.whole` keep theirs contiguous."""
    _laid_out.pop(optimizer, None)  # states that were loaded over are kept alive no longer
    for part in parts_of(optimizer):
        if asks_other_ranks(part) or not part.state:
            continue
        for param in (param for group in part.param_groups for param in group["params"] if param in part.state):
            contiguous = param.is_contiguous()
            for value in part.state[param].values():
                if not isinstance(value, Tensor) or (contiguous and value.is_contiguous() and not value.is_neg()):
                    continue
                if lies_densely(param):
                    lay_out_(value, param)


def lay_out_gradients(params: Sequence[Tensor]) -> None:
    """Give gradients on a CPU the strides of their parameters."""
    for param in params:
        grad = param.grad
        if grad is None or not param.is_cpu:
            continue
        as_it_is = param.is_contiguous() and grad.is_contiguous() and not is_lazy(grad)
        if not as_it_is and (ordered := laid_out(grad, param)) is not grad:
            param.grad = ordered


@contextmanager
def dense_stand_ins(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let a fused optimizer step dense copies of parameters that have gaps in memory, and copy the result back.

    Fused kernels on a CPU would write into the gaps. Other kernels round differently, so replicas that lie differently
    in memory, or beside other parameters, would drift apart. Collectives, host synchronization: none.
    """
    groups = optimizer.param_groups
    is_fused = not asks_other_ranks(optimizer) and any(group.get("fused") for group in groups)
    params = [param for group in groups for param in group["params"]] if is_fused else []
    gaps = [param for param in params if param.is_cpu and param.grad is not None and not lies_densely(param)]
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


def _dense_copy(optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor:
    """Return a dense parameter with the values, gradient, annotation and optimizer state of ``param``."""
    copy = nn.Parameter(torch.empty_like(param, requires_grad=False).copy_(param.detach()))
    copy_annotation(param, copy)
    copy.grad_dtype = param.grad_dtype
    copy.grad = param.grad
    if state := optimizer.state.pop(param, None):
        optimizer.state[copy] = state
    return copy
