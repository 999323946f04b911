"""Cast the tensors, inputs and outputs of a model, and run it under autocast. The precision modes use these functions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import update_wrapper
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..parallel.interop.local_parameters import has_dtensors

HALF_DTYPES = (torch.float16, torch.bfloat16)

Key = TypeVar("Key", bound=Hashable)


def is_half(tensor: Tensor) -> bool:
    return tensor.dtype in HALF_DTYPES


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with every real floating-point tensor cast to ``dtype``. The cast is differentiable.

    The function casts within nested tuples, named tuples, lists and dicts.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        result = copy(value)  # keeps the class: OrderedDict, defaultdict, a model's output class
        for key, item in value.items():
            result[key] = cast_floating(item, dtype)
        return result
    if isinstance(value, (tuple, list)):
        items = [cast_floating(item, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def cast_model_(model: nn.Module, wanted: Callable[[nn.Module, Tensor], torch.dtype]) -> bool:
    """Cast the floating-point parameters and buffers of ``model`` in place. Return True if any tensor was cast.

    The tensor objects stay the same; their data changes. Gradients of cast parameters are cast too. Tied parameters stay
    tied. ``wanted(module, tensor)`` returns the dtype that a parameter or buffer must have.

    Raises:
        ValueError: A tensor that must be cast is a DTensor. Or a tensor must be cast, and ``model`` is or contains
            `DistributedDataParallel`. Nothing is changed.
    """
    changes = [
        (tensor, dtype)
        for module in model.modules()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if tensor.is_floating_point() and tensor.dtype != (dtype := wanted(module, tensor))
    ]
    if changes and any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            f"the model contains DistributedDataParallel and {changes[0][0].dtype} tensors, but the precision mode needs "
            f"{changes[0][1]}; call prepare() of the mode, or boost(), before you wrap the model"
        )
    for tensor, dtype in changes:
        if has_dtensors((tensor,)):
            raise ValueError(
                f"the model has {tensor.dtype} DTensors (fully_shard or parallelize_module was applied), which can't be "
                f"cast in place, but the precision mode needs {dtype}; call prepare() of the mode, or boost(), before you "
                "shard the model"
            )
    for tensor, dtype in changes:
        # torch rejects a gradient whose dtype differs from the tensor's dtype, and .data does not cast the gradient.
        grad, tensor.grad = tensor.grad, None
        tensor.data = tensor.data.to(dtype)
        if grad is not None:
            tensor.grad = grad.to(dtype)
    for module in model.modules():
        if changes and isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # otherwise torch warns on a GPU that the weights are not in one chunk of memory
    return bool(changes)


@dataclass(frozen=True)
class CastInputs:
    """Forward pre-hook that casts floating-point inputs to ``dtype``. Register it with ``with_kwargs=True``."""

    dtype: torch.dtype

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return cast_floating(args, self.dtype), cast_floating(kwargs, self.dtype)


@dataclass(frozen=True)
class CastOutputs:
    """Forward hook that casts floating-point outputs to ``dtype``. A pickled model refers to the class by its name."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return cast_floating(output, self.dtype)


class Autocast:
    """Callable that runs a function, or a module's ``forward``, under `torch.autocast` to float16.

    It is a class and not a closure, because a closure cannot be pickled, and in a deep copy of the module it would call the
    original module's ``forward``. It does not use forward hooks, because an exception in ``forward`` skips hooks that were
    registered without ``always_call=True``, and would leave autocast enabled.
    """

    def __init__(self, function: Callable[..., Any], module: nn.Module | None = None) -> None:
        update_wrapper(self, function)
        self._function, self._module = function, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._device_type(args, kwargs), dtype=torch.float16):
            return self._function(*args, **kwargs)

    def _device_type(self, *arguments: Any) -> str:
        parameter = next(self._module.parameters(), None) if self._module is not None else None
        tensor = parameter if parameter is not None else next(_tensors(arguments), None)
        return (tensor.device if tensor is not None else torch.get_default_device()).type


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


# Casts of full models ---------------------------------------------------------------------------------------------------


def run_in_(model: nn.Module, dtype: torch.dtype, keep_batchnorm_fp32: bool) -> None:
    """Cast the tensors of ``model`` in place, and register hooks that cast its inputs to ``dtype``, its outputs to float32.

    If ``keep_batchnorm_fp32`` is True, parameters and buffers of batch norm become float32. Batch norm layers still get
    inputs of ``dtype`` and return ``dtype``. Errors are those of `cast_model_`.
    """

    def wanted(module: nn.Module, tensor: Tensor) -> torch.dtype:
        keep = keep_batchnorm_fp32 and isinstance(module, nn.modules.batchnorm._BatchNorm)
        return torch.float32 if keep else dtype

    cast_model_(model, wanted)
    model.register_forward_pre_hook(CastInputs(dtype), with_kwargs=True)
    model.register_forward_hook(CastOutputs(torch.float32))


def autocast_model_(model: nn.Module) -> None:
    """Make ``model.forward`` run under autocast to float16. Half-precision parameters and buffers become float32."""
    lift_half_(model)
    model.forward = Autocast(model.forward, model)


def autocast_criterion(criterion: Callable[..., Any]) -> Callable[..., Any]:
    """Return a criterion that runs under autocast to float16. A module is changed in place; a function is wrapped."""
    if not isinstance(criterion, nn.Module):
        return Autocast(criterion)
    criterion.forward = Autocast(criterion.forward, criterion)
    return criterion


def lift_half_(model: nn.Module) -> bool:
    """Cast float16 and bfloat16 parameters and buffers to float32, in place. Return True if any tensor was cast."""
    return cast_model_(model, lambda module, tensor: torch.float32 if is_half(tensor) else tensor.dtype)


# Copies of many tensors with few GPU kernels ---------------------------------------------------------------------------


def copy_each_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy ``sources[i]`` into ``targets[i]`` for every i, cast to the target's dtype.

    torch's multi-tensor copy launches one kernel per tensor if the (target, source) pairs of the list have different
    dtypes, or if a target and its source have different strides. This function therefore makes one multi-tensor copy per
    device and pair of dtypes. A pair with different strides is copied by itself, unless both tensors are contiguous. A
    source must have the shape and device of its target.
    """
    groups: dict[tuple[object, ...], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target.stride() != source.stride():
            if not (target.is_contiguous() and source.is_contiguous()):
                target.copy_(source)
                continue
            # Contiguous tensors may differ in the strides of dims of length 1.
            target, source = target.view(-1), source.view(-1)
        group_targets, group_sources = groups.setdefault((target.device, target.dtype, source.dtype), ([], []))
        group_targets.append(target)
        group_sources.append(source)
    for group_targets, group_sources in groups.values():
        torch._foreach_copy_(group_targets, group_sources)


def has_equal_values(tensor: Tensor, copy: Tensor) -> bool:
    """Return True if ``copy``, cast to the dtype and device of ``tensor``, has the same shape and equal elements.

    Two NaNs at the same position count as equal. Host synchronization: yes.
    """
    if tensor.shape != copy.shape:
        return False
    cast = copy.to(tensor.device, tensor.dtype)
    if torch.equal(tensor, cast):
        return True
    return bool(((tensor == cast) | (tensor.isnan() & cast.isnan())).all())


def float32_of(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Return float32 copies of the tensors by the same keys. The copy of a dense tensor has the strides of that tensor."""
    copies = {key: torch.empty_like(tensor, dtype=torch.float32) for key, tensor in tensors.items()}
    copy_each_([*copies.values()], [*tensors.values()])
    return copies


def flat_offsets(tensors: Iterable[Tensor]) -> list[int]:
    """Return the offset of each tensor in a flat buffer of all tensors, followed by the length of the buffer, in elements.

    All numbers are multiples of 64, because kernels are faster at aligned addresses.
    """
    return list(accumulate((-(-tensor.numel() // 64) * 64 for tensor in tensors), initial=0))
