"""The casts that precision modes are made of: of a model's tensors, of what goes in and out, and autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..parallel.interop.local_parameters import has_dtensors

HALF_DTYPES = (torch.float16, torch.bfloat16)


def is_half(tensor: Tensor) -> bool:
    """Whether the tensor is float16 or bfloat16."""
    return tensor.dtype in HALF_DTYPES


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every real floating-point tensor in ``dtype``; differentiable.

    Looks into tuples (named ones too), lists and dicts; integer, bool and complex tensors and everything else pass.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        result = copy(value)  # keeps what the dict is: ordered, default, a model's output class
        for key, item in value.items():
            result[key] = cast_floating(item, dtype)
        return result
    if isinstance(value, (tuple, list)):
        items = [cast_floating(item, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def cast_model_(model: nn.Module, wanted: Callable[[nn.Module, Tensor], torch.dtype]) -> bool:
    """Cast the floating-point parameters and buffers of ``model`` in place: the same objects, with other data.

    Args:
        model: Any module; tied parameters stay tied.
        wanted: Tells the dtype for a parameter or buffer of a module.
    Returns:
        Whether anything had another dtype.
    Raises:
        ValueError: Something would have to be cast that `DistributedDataParallel` has taken over, or that is a DTensor;
            nothing is changed.
    """
    changes = [
        (tensor, dtype)
        for module in model.modules()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if tensor.is_floating_point() and tensor.dtype != (dtype := wanted(module, tensor))
    ]
    if changes and any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            f"the model is wrapped in DistributedDataParallel, whose buckets are {changes[0][0].dtype}, but the mode "
            f"needs {changes[0][1]}: prepare the model first and wrap it then"
        )
    if has_dtensors(tensor for tensor, _ in changes):
        raise ValueError(
            f"the model has DTensors (fully_shard or parallelize_module was applied), whose {changes[0][0].dtype} parts "
            f"would stay as they are, but the mode needs {changes[0][1]}: prepare the model first and shard it then"
        )
    for tensor, dtype in changes:
        # A gradient of another dtype than its tensor's is refused, and .data alone would leave it behind.
        grad, tensor.grad = tensor.grad, None
        tensor.data = tensor.data.to(dtype)
        if grad is not None:
            tensor.grad = grad.to(dtype)
    for module in model.modules():
        if changes and isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN wants its weights in one piece of memory, and warns at every forward
    return bool(changes)


@dataclass(frozen=True)
class CastInputs:
    """A forward pre-hook (with kwargs) that casts the floating-point inputs."""

    dtype: torch.dtype

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return cast_floating(args, self.dtype), cast_floating(kwargs, self.dtype)


@dataclass(frozen=True)
class CastOutputs:
    """A forward hook that casts the floating-point outputs."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return cast_floating(output, self.dtype)


class Autocast:
    """A function, or a module's ``forward``, run under `torch.autocast`.

    Not a pair of hooks: an interrupt between the two would leave autocast on. And an object, not a closure, because a
    deep copy or a pickle of a module must call the copy's own forward and not the original's.

    Args:
        function: What to run.
        dtype: What autocast casts to.
        module: The module whose parameters tell the device. Without, or without any, the first tensor among the
            arguments does, and then torch's default device.
    """

    def __init__(self, function: Callable[..., Any], dtype: torch.dtype, module: nn.Module | None = None) -> None:
        update_wrapper(self, function)
        self._function, self._dtype, self._module = function, dtype, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._device_type(args, kwargs), dtype=self._dtype):
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


# Whole models ---------------------------------------------------------------------------------------------------------


def run_in_(model: nn.Module, dtype: torch.dtype, keep_batchnorm_fp32: bool = False) -> None:
    """Cast the model and its inputs to ``dtype`` and its outputs to float32, in place.

    Batch norm kept in float32 takes and returns ``dtype`` all the same; torch computes it in float32 inside.
    """

    def wanted(module: nn.Module, tensor: Tensor) -> torch.dtype:
        keep = keep_batchnorm_fp32 and isinstance(module, nn.modules.batchnorm._BatchNorm)
        return torch.float32 if keep else dtype

    cast_model_(model, wanted)
    model.register_forward_pre_hook(CastInputs(dtype), with_kwargs=True)
    model.register_forward_hook(CastOutputs(torch.float32))


def autocast_model_(model: nn.Module) -> None:
    """Run the model under autocast to float16, in place; half-precision parameters and buffers become float32."""
    lift_half_(model)
    model.forward = Autocast(model.forward, torch.float16, model)


def autocast_criterion(criterion: Callable[..., Any]) -> Callable[..., Any]:
    """Run the criterion under autocast to float16: a module is changed in place, a function wrapped."""
    if not isinstance(criterion, nn.Module):
        return Autocast(criterion, torch.float16)
    criterion.forward = Autocast(criterion.forward, torch.float16, criterion)
    return criterion


def lift_half_(model: nn.Module) -> bool:
    """Make half-precision parameters and buffers float32, in place; whether there were any."""
    return cast_model_(model, lambda module, tensor: torch.float32 if is_half(tensor) else tensor.dtype)


# Copies of many tensors at once: on a GPU a few kernels for all of them, not one a tensor -----------------------------


def copy_each_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into the target of the same shape and device, cast to its dtype.

    torch's multi-tensor copy is one kernel a tensor for the whole list as soon as one pair has unequal strides or other
    dtypes than the rest (one gradient that is channels_last in a bucket, say). So those go by themselves.
    """
    alike: dict[tuple[object, ...], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target.stride() != source.stride():
            if not (target.is_contiguous() and source.is_contiguous()):
                target.copy_(source)
                continue
            target, source = target.view(-1), source.view(-1)  # a dim of length 1 has whatever stride
        of_targets, of_sources = alike.setdefault((target.device, target.dtype, source.dtype), ([], []))
        of_targets.append(target)
        of_sources.append(source)
    for of_targets, of_sources in alike.values():
        torch._foreach_copy_(of_targets, of_sources)


def has_equal_values(tensor: Tensor, copy: Tensor) -> bool:
    """Return True if ``copy``, cast to the dtype and device of ``tensor``, equals it. NaNs are equal, and so are 0 and -0.

    Memory: of one cast copy; where the two differ, of three masks. Host synchronization: one or two.
    """
    if tensor.shape != copy.shape:
        return False
    cast = copy.to(tensor.device, tensor.dtype)
    if torch.equal(tensor, cast):
        return True
    return bool(((tensor == cast) | (tensor.isnan() & cast.isnan())).all())


def float32_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in float32, of the same strides."""
    copies = [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
    copy_each_(copies, tensors)
    return copies
