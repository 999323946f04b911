"""States and gradients with the strides of their parameters.

Kernels that get addresses, the library's and torch's fused ones, walk through parameter, gradient and states linearly: with
other strides they would step elements by the states of others. Loaded states have other strides where a checkpoint was
written from contiguous tensors, and so have all states after ``model.to(memory_format=...)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...amp import by_bucket
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
        for param in () if asks_other_ranks(part) else (p for group in part.param_groups for p in group["params"]):
            contiguous = param.is_contiguous()
            for value in part.state[param].values() if param in part.state else ():
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
