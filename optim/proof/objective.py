"""The loss of a parallel model as a repeatable function of its parameters.

The objective is the mean, over the data-parallel ranks, of the losses that they return. Along a model-parallel axis all
ranks must compute the same loss, each from its shards of the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from statistics import fmean
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_is_leaf, tree_map

from ...parallel.interop.local_parameters import fully_sharded, has_dtensors, local_tensor
from ...parallel.mesh.agreement import on_all_ranks_with
from ...parallel.mesh.random_state import random_state, set_random_state
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology

_LOGGER = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)
Losses = Sequence[float | None]
"""Loss per rank; None on a rank without a loss, such as a pipeline stage that is not the last."""


class Objective:
    """``loss_fn(model)``, computed with the same random numbers and buffers in every call.

    Args:
        model: The model.
        loss_fn: Returns this rank's loss, a 0-dim tensor, or None on a rank without a loss. If it runs backward itself,
            like a pipeline schedule, it returns a detached loss or None.
        registry: The process groups.
    """

    def __init__(self, model: M, loss_fn: Callable[[M], Tensor | None], registry: ProcessGroupRegistry) -> None:
        self.topology, self.registry = registry.topology, registry
        self._loss: Callable[[], Tensor | None] = lambda: loss_fn(model)
        self._params = list(model.parameters())
        self._gradients = [param.grad for param in self._params]
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._fully_sharded = fully_sharded(model)
        self._random = random_state()
        self._backward_is_ours = True
        self.calls = 0

    def differentiate(self) -> Losses:
        """Run one forward and backward, and return the losses. The gradients remain in ``.grad``.

        Collectives: the model's, and an object all-gather.
        """
        with self._same_circumstances():
            loss, reports = on_all_ranks_with(self._computed, self.registry)
            if loss is not None and loss.requires_grad:
                loss.backward()
        self._backward_is_ours = all(ours for number, ours in reports if number is not None)
        return [number for number, _ in reports]

    def __call__(self) -> Losses:
        """Run one forward and return the losses.

        Collectives: the model's, and an object all-gather over the world.
        """
        with self._same_circumstances(), torch.set_grad_enabled(not self._backward_is_ours):
            _, reports = on_all_ranks_with(self._computed, self.registry)
        for module in self._fully_sharded:
            module.reshard()  # without a backward, the next forward would use the gathered parameters of this one
        return [number for number, _ in reports]

    def _computed(self) -> tuple[Tensor | None, tuple[float | None, bool]]:
        """Return the loss, its value, and whether backward must still be called.

        An error is logged at once, because other ranks may be waiting for this rank in a collective of the model.
        """
        try:
            loss = self._loss()
            return loss, (_number(loss), loss is not None and loss.requires_grad)
        except Exception:
            _LOGGER.exception("loss_fn raised on rank %d", self.registry.global_rank)
            raise

    def close(self) -> None:
        """Restore the gradients and the random states from before."""
        for param, gradient in zip(self._params, self._gradients, strict=True):
            param.grad = gradient
        set_random_state(self._random)

    @contextmanager
    def _same_circumstances(self) -> Iterator[None]:
        for param in self._params:
            param.grad = None  # if loss_fn runs backward itself, it must not add to the gradients of `differentiate`
        set_random_state(self._random)
        self.calls += 1
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, before in self._buffers:
                    setattr(module, name, buffer)
                    buffer.copy_(before)


def mean_loss(losses: Losses, topology: Topology) -> float:
    """Return the mean of the losses over the data-parallel ranks.

    Raises:
        ValueError: Some data-parallel rank has no loss, or a loss is not finite.
    """
    by_samples: dict[tuple[int, ...], list[float]] = {}
    for rank, loss in enumerate(losses):
        found = by_samples.setdefault(tuple(topology.coordinate_of(rank, axis) for axis in topology.data_axes), [])
        if loss is not None:
            found.append(loss)
            if not isfinite(loss):
                raise ValueError(f"the loss of rank {rank} is {loss}; give a model and a batch with a finite loss")
    for samples, found in by_samples.items():
        if not found:
            at = ", ".join(f"{axis}={index}" for axis, index in zip(topology.data_axes, samples, strict=True))
            raise ValueError(
                f"no rank {f'at {at} ' if at else ''}returned a loss; loss_fn must return it on the rank that computes it"
            )
    return fmean(fmean(found) for found in by_samples.values())


def unequal_loss_axes(losses: Losses, topology: Topology, within: float) -> tuple[str, ...]:
    """Return the axes, except data-parallel ones, along which two ranks' losses differ by more than ``within``."""
    found = []
    for axis in topology.axes:
        if axis not in topology.data_axes and topology.size(axis) > 1:
            groups = ([losses[rank] for rank in ranks] for ranks in topology.groups(axis))
            there = ([loss for loss in group if loss is not None] for group in groups)
            if any(group and max(group) - min(group) > within for group in there):
                found.append(axis)
    return tuple(found)


def _number(loss: Tensor | None) -> float | None:
    if loss is None:
        return None
    if loss.numel() != 1:
        raise ValueError(f"loss_fn returned a tensor of shape {tuple(loss.shape)}; return the loss as a single number")
    return float(local_tensor(loss.detach()).double())


# Float64 --------------------------------------------------------------------------------------------------------------

# Differences of losses need the accuracy of float64, whatever the dtype of the model.

_LOWER = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = ("float", "half", "bfloat16")


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """Compute the model in float64 inside the context, and restore its tensors and gradients afterwards.

    Parameters and buffers are converted in place, torch functions return float64, and casts to a lower dtype are
    ignored.

    Raises:
        TypeError: A parameter is a DTensor of another dtype than float64.
    """
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.dtype in _LOWER]
    if not tensors:
        yield
        return
    if has_dtensors(tensors):
        raise TypeError(
            "parameters that are DTensors can't be converted to float64 for the proof; build the model in float64 "
            "(torch.set_default_dtype), or pass dtype=None to prove it in its own dtype"
        )
    before = [_SavedTensor(tensor) for tensor in tensors]
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        for tensor in tensors:
            tensor.grad = None
            tensor.data = tensor.data.double()
            if tensor.grad_dtype != torch.float64:  # main gradients have a fixed dtype
                tensor.grad_dtype = None
        with _AllInFloat64():
            yield
    finally:
        torch.set_default_dtype(default)
        for one in before:
            one.put_back()


class _SavedTensor:
    """The data, gradient and gradient dtype of a tensor, to be restored later."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._data, self._gradient, self._grad_dtype = tensor, tensor.data, tensor.grad, tensor.grad_dtype

    def put_back(self) -> None:
        self._tensor.grad = None
        self._tensor.data = self._data
        if self._tensor.grad_dtype != self._grad_dtype:
            self._tensor.grad_dtype = self._grad_dtype
        self._tensor.grad = self._gradient


class _AllInFloat64(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":  # most calls only read an attribute
            return func(*args, **(kwargs or {}))
        if name in _CASTS:
            return args[0].double()
        if not name.endswith("_"):  # an in-place function keeps the dtype of its tensor
            args = tuple(map(_raised_within, args))
            kwargs = {key: _raised_within(value) for key, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _raised_within(value: object) -> object:
    """Convert the tensors and dtypes in ``value``.

    Single leaves skip `tree_map`, which is slower than most torch functions.
    """
    if value is None or isinstance(value, (int, float, str)):
        return value
    return (
        _raised(value) if isinstance(value, (Tensor, torch.dtype)) or tree_is_leaf(value) else tree_map(_raised, value)
    )


def _raised(value: object) -> object:
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _LOWER else value
    if isinstance(value, Tensor) and value.dtype in _LOWER:
        with torch._C.DisableTorchFunctionSubclass():
            return value.double()
    return value
