"""Change gradients in place, and mark gradients that are already reduced over ranks ("complete").

A mark is an attribute of the parameter: the address and the version counter of its reduced gradient. torch's in-place
operations increment the counter, except through ``.data``. So a later backward makes the mark invalid. Code that
changes a reduced gradient, such as clipping, must renew the mark; `keep_complete_marks` does that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...amp.casting import is_half
from ...parallel.interop.local_parameters import local_tensor
from ...parallel.mesh.agreement import gather_objects
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..kernels.memory import is_lazy, resolve_
from ..norm.param_table import ParamTable
from ..norm.plan import check_dense_real
from ..norm.powers import are_alike

_COMPLETE = "_meshstep_complete"


def gradient_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype in which backward accumulates the gradient: ``param.grad_dtype``, or ``param.dtype`` if None."""
    return param.grad_dtype or param.dtype


def widen_gradients(params: Sequence[Tensor]) -> None:
    """Replace half-precision gradients of float32 parameters by float32 copies.

    Call it before changing gradients in place, because the changed values would be rounded to half precision.
    """
    for param in params:
        if param.grad is not None and param.grad.dtype != param.dtype == torch.float32 and is_half(param.grad):
            param.grad = param.grad.float()


def separate_gradients(params: Iterable[Tensor]) -> list[Tensor]:
    """Copy each gradient that begins at the address of an earlier one. Return the parameters that shared gradients.

    Autograd may give two parameters views of one gradient, for example for ``a.unsqueeze(0) + b.unsqueeze(0)``. The next
    backward, which adds to both in place, and clipping would then change this memory twice.
    """
    first: dict[int, Tensor] = {}
    shared: dict[int, Tensor] = {}
    for param in params:
        gradient = param.grad
        local = None if gradient is None or gradient.layout is not torch.strided else local_tensor(gradient)
        if type(local) is not Tensor or not (address := local.data_ptr()):
            continue  # also a fake tensor, or zeros without memory
        other = first.setdefault(address, param)
        if gradient is not None and other is not param:
            param.grad = gradient.clone()
            shared |= {id(other): other, id(param): param}
    return list(shared.values())


def distinct(gradients: Iterable[Tensor | None]) -> list[Tensor]:
    """Return the gradients without those that begin at the address of an earlier one. See `separate_gradients`."""
    found: dict[int, Tensor] = {}
    for gradient in gradients:
        if gradient is not None:
            address = gradient.data_ptr() if type(gradient) is Tensor else 0  # 0: no memory, or a fake tensor
            found.setdefault(address or id(gradient), gradient)
    return list(found.values())


class SeparateGradients:
    """Calls `separate_gradients` after each backward: in the first window for all parameters, later for those it found."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params, self._found = list(params), dict[int, Tensor]()

    def __call__(self) -> None:
        if self._params:
            self._found |= {id(param): param for param in separate_gradients(self._params)}

    def end_first_window(self) -> None:
        self._params = list(self._found.values())

    @contextmanager
    def micro_batch(self, _: object) -> Iterator[None]:
        """Return a context manager around one backward."""
        yield
        self()


def scale_gradients(params: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply the parameters' gradients by ``factor``, a 0-dim tensor, in place; reduced gradients stay marked.

    Half-precision gradients of float32 parameters become float32 before that.
    """
    with keep_complete_marks((param, None) for param in params):
        widen_gradients(params)
        scale_each([param.grad for param in params], factor)


def scale_each(gradients: Sequence[Tensor | None], factor: Tensor) -> None:
    """Multiply gradients by ``factor``, a 0-dim tensor, in place, in one multi-tensor call per device and dtype.

    ``factor`` is cast to float32 unless the gradients are float64.
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
    if grads := [grad for grad in gradients if grad is not None]:
        change_each(torch._foreach_clamp_min_, grads, -clip_value)
        change_each(torch._foreach_clamp_max_, grads, clip_value)


def change_each(
    change: Callable[[list[Tensor], Any], object], gradients: list[Tensor], argument: Tensor | float
) -> None:
    """Call ``change(gradients, argument)``, a multi-tensor function of torch that writes to ``gradients``.

    torch rejects lazy gradients (`is_lazy`). Their values are then written to new memory, and ``change`` is called
    again.
    """
    try:
        change(gradients, argument)
    except RuntimeError:  # torch raises it before it changes a gradient
        if not any(map(is_lazy, gradients)):
            raise
        for gradient in gradients:
            resolve_(gradient)
        change(gradients, argument)


def clamp_gradients(params: Sequence[Tensor], clip_value: float) -> None:
    """Clamp the parameters' gradients to [-clip_value, clip_value] in place; reduced gradients stay marked.

    Half-precision gradients of float32 parameters become float32 before that.
    """
    with keep_complete_marks((param, None) for param in params):
        widen_gradients(params)
        clamp_each([param.grad for param in params], clip_value)


def clear_gradients(params: Sequence[Tensor], set_to_none: bool) -> None:
    for param in params:
        if set_to_none:
            param.grad = None
        elif param.grad is not None:
            param.grad.zero_()


def mark_complete(param: Tensor, grad: Tensor | None = None) -> None:
    """Mark the gradient ``grad`` (None: ``param.grad``) as reduced. The mark is stored in ``param``.

    A later write to the gradient makes the mark invalid. Without a gradient nothing is marked.
    """
    grad = param.grad if grad is None else grad
    if grad is not None:
        setattr(param, _COMPLETE, (grad.data_ptr(), grad._version))


def is_complete(param: Tensor, grad: Tensor | None = None) -> bool:
    """Return True if ``grad`` (None: ``param.grad``) is marked as reduced, and was not written to since `mark_complete`.

    Also return True if there is no gradient. ``param`` is the parameter that stores the mark.
    """
    grad = param.grad if grad is None else grad
    return grad is None or getattr(param, _COMPLETE, None) == (grad.data_ptr(), grad._version)


@contextmanager
def keep_complete_marks(pairs: Iterable[tuple[Tensor, Tensor | None]]) -> Iterator[None]:
    """Return a context manager whose body may change reduced gradients in place without losing their marks.

    ``pairs`` are (parameter, gradient) pairs; a gradient of None stands for ``param.grad``.
    """
    complete = [(param, grad) for param, grad in pairs if is_complete(param, grad)]
    yield
    for param, grad in complete:
        mark_complete(param, grad)


# Checks of gradients, before anything is changed ----------------------------------------------------------------------


def check_kinds(table: ParamTable) -> None:
    """Raise TypeError with the parameter's name if a gradient that would be measured is complex or sparse."""
    for row in table:
        if row.grad_tensor.grad is not None:
            check_dense_real(row.grad_tensor.grad, f"the gradient of {row.entry.name}")


def poison_bad_kinds(table: ParamTable) -> TypeError | None:
    """Replace complex and sparse gradients, which are not supported, by tensors of NaN.

    The NaN makes the gradient norm NaN on all ranks, so that no rank applies the step. The caller must raise the
    returned error after the collectives of the step, in which the other ranks would otherwise wait.

    Return a TypeError that names the parameter of the first such gradient; None if there is none.
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
    """Return the names of the parameters whose gradient has a NaN or inf on any rank.

    Collectives: an object all-gather.
    Host synchronization: one per gradient, and by the all-gather.
    """
    mine = [
        row.entry.name
        for row in table
        if row.grad_tensor.grad is not None and not bool(row.grad_tensor.grad.isfinite().all())
    ]
    return list(dict.fromkeys(name for report in gather_objects(mine, registry) for name in report))
