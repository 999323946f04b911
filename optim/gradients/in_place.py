"""Change gradients in place, and mark gradients that are already reduced.

A mark on a parameter stores the address and the version counter of its gradient. torch's in-place operations increment
the counter, except through ``.data``, so a later backward makes the mark invalid. Code that changes a reduced gradient,
such as clipping, must renew the mark; see `keep_complete_marks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...amp.casting import is_half
from ...parallel.mesh.agreement import gather_objects
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..kernels.memory import is_lazy, resolve_
from ..norm.param_table import ParamTable
from ..norm.plan import check_dense_real
from ..norm.powers import are_alike

_COMPLETE = "_meshstep_complete"


def gradient_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype in which backward accumulates ``param.grad``: ``param.grad_dtype`` if set, else its own dtype."""
    return param.grad_dtype or param.dtype


def widen_gradients(params: Sequence[Tensor]) -> None:
    """Replace half-precision gradients of float32 parameters by float32 copies.

    Call it before changing gradients in place, because the result would be rounded to half precision otherwise.
    """
    for param in params:
        if param.grad is not None and param.grad.dtype != param.dtype == torch.float32 and is_half(param.grad):
            param.grad = param.grad.float()


def scale_gradients(params: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply the parameters' gradients by ``factor``, a 0-dim tensor, in place. Marks of reduced gradients stay valid.

    Half-precision gradients of float32 parameters become float32 first.
    """
    with keep_complete_marks((param, None) for param in params):
        widen_gradients(params)
        scale_each([param.grad for param in params], factor)


def scale_each(gradients: Sequence[Tensor | None], factor: Tensor) -> None:
    """Multiply gradients by ``factor``, a 0-dim tensor, in place, with one multi-tensor kernel per device and dtype.

    A gradient that is None is left out. ``factor`` is copied to each device.
    """
    here = [grad for grad in gradients if grad is not None]
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    if here and are_alike(here):
        kinds = {(here[0].device, here[0].dtype): here}
    else:
        for grad in here:
            kinds.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), grads in kinds.items():
        change_each(torch._foreach_mul_, grads, factor.to(device, torch.float32 if dtype != torch.float64 else None))


def clamp_each(gradients: Sequence[Tensor | None], clip_value: float) -> None:
    """Clamp gradients to [-clip_value, clip_value] in place. A gradient that is None is left out."""
    if grads := [grad for grad in gradients if grad is not None]:
        change_each(torch._foreach_clamp_min_, grads, -clip_value)
        change_each(torch._foreach_clamp_max_, grads, clip_value)


def change_each(
    change: Callable[[list[Tensor], Any], object], gradients: list[Tensor], argument: Tensor | float
) -> None:
    """Call ``change(gradients, argument)``, a multi-tensor kernel of torch that writes to ``gradients``.

    The kernel raises RuntimeError for lazily conjugated or negated tensors. In this case their values are written to new
    memory, and the kernel is called again.
    """
    try:
        change(gradients, argument)
    except RuntimeError:  # raised before anything is changed; the search for lazy tensors is left to this rare case
        if not any(map(is_lazy, gradients)):
            raise
        for gradient in gradients:
            resolve_(gradient)
        change(gradients, argument)


def clamp_gradients(params: Sequence[Tensor], clip_value: float) -> None:
    """Clamp the parameters' gradients to [-clip_value, clip_value] in place. Marks of reduced gradients stay valid.

    Half-precision gradients of float32 parameters become float32 first.
    """
    with keep_complete_marks((param, None) for param in params):
        widen_gradients(params)
        clamp_each([param.grad for param in params], clip_value)


def clear_gradients(params: Sequence[Tensor], set_to_none: bool) -> None:
    """Set gradients to None if ``set_to_none``, else fill them with zeros."""
    for param in params:
        if set_to_none:
            param.grad = None
        elif param.grad is not None:
            param.grad.zero_()


def mark_complete(param: Tensor, grad: Tensor | None = None) -> None:
    """Mark the gradient of ``param`` as reduced, until it is written to. Do nothing if there is no gradient.

    Args:
        param: The parameter that stores the mark.
        grad: The gradient. None (default): ``param.grad``.
    """
    grad = param.grad if grad is None else grad
    if grad is not None:
        setattr(param, _COMPLETE, (grad.data_ptr(), grad._version))


def is_complete(param: Tensor, grad: Tensor | None = None) -> bool:
    """Return True if there is no gradient, or if it is unchanged since `mark_complete`, where ``grad`` is described."""
    grad = param.grad if grad is None else grad
    return grad is None or getattr(param, _COMPLETE, None) == (grad.data_ptr(), grad._version)


@contextmanager
def keep_complete_marks(pairs: Iterable[tuple[Tensor, Tensor | None]]) -> Iterator[None]:
    """Keep the marks of `mark_complete` valid while the body of the ``with`` statement changes gradients in place.

    After the body, gradients that were marked before it are marked again.

    Args:
        pairs: Pairs of a parameter and its gradient. The gradient None means ``param.grad``.
    """
    complete = [(param, grad) for param, grad in pairs if is_complete(param, grad)]
    yield
    for param, grad in complete:
        mark_complete(param, grad)


# Checks of gradients, before anything is changed ----------------------------------------------------------------------


def check_kinds(table: ParamTable) -> None:
    """Raise TypeError with the parameter's name if a gradient is complex or sparse."""
    for row in table:
        if row.grad_tensor.grad is not None:
            check_dense_real(row.grad_tensor.grad, f"the gradient of {row.entry.name}")


def poison_bad_kinds(table: ParamTable) -> TypeError | None:
    """Replace complex and sparse gradients, which have no norm, by tensors of NaN. Return a TypeError for them, or None.

    The caller raises the error after the collectives of the step. In these collectives, the NaN makes all ranks skip the
    step.
    """
    try:
        check_kinds(table)
    except TypeError as problem:
        for param in table.grad_tensors:
            if param.grad is not None and (param.grad.is_complex() or param.grad.layout != torch.strided):
                param.grad = torch.full_like(param, torch.nan, dtype=gradient_dtype(param))
        return problem
    return None


def nonfinite_names(table: ParamTable, registry: ProcessGroupRegistry) -> list[str]:
    """Return the names of parameters whose gradients have a NaN or inf on any rank, for an error message.

    Collectives: an object all-gather.
    Host synchronization: one per gradient.
    """
    mine = [
        row.entry.name
        for row in table
        if row.grad_tensor.grad is not None and not bool(row.grad_tensor.grad.isfinite().all())
    ]
    return list(dict.fromkeys(name for report in gather_objects(mine, registry) for name in report))
