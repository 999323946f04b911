"""The loss of a parallel model as a function of its parameters: computed again and again, each time under the same
circumstances.

What stands for the loss is the mean over data ranks of what each returns. Along model axes it must be one number: there
every rank computes the same loss, from pieces of the same model.
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
"""Of each rank; None where it has none, as on all but the last stage of a pipeline."""


class Objective:
    """``loss_fn(model)``, with the same random numbers and buffers at every call.

    Args:
        loss_fn: Returns this rank's loss, 0-dim; None where there is none. Where it has called backward itself, as the
            schedule of a pipeline does, it returns the loss detached, or None.
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
        """One forward and backward; the gradients stay in ``.grad``. Collectives: the model's, and an object all-gather."""
        with self._same_circumstances():
            loss, said = on_all_ranks_with(self._computed, self.registry)
            if loss is not None and loss.requires_grad:
                loss.backward()
        self._backward_is_ours = all(ours for number, ours in said if number is not None)
        return [number for number, _ in said]

    def __call__(self) -> Losses:
        """One forward. Collectives: the model's, and an object all-gather over the world."""
        with self._same_circumstances(), torch.set_grad_enabled(not self._backward_is_ours):
            _, said = on_all_ranks_with(self._computed, self.registry)
        for module in self._fully_sharded:
            module.reshard()  # without a backward, it would go on with the parameters that it has gathered
        return [number for number, _ in said]

    def _computed(self) -> tuple[Tensor | None, tuple[float | None, bool]]:
        """The loss; its value, and whether backward has still to be called. An error is told at once: other ranks may be
        waiting for this one in the model."""
        try:
            loss = self._loss()
            return loss, (_number(loss), loss is not None and loss.requires_grad)
        except Exception:
            _LOGGER.exception("loss_fn raised on rank %d", self.registry.global_rank)
            raise

    def close(self) -> None:
        """Everything as it was before."""
        for param, gradient in zip(self._params, self._gradients, strict=True):
            param.grad = gradient
        set_random_state(self._random)

    @contextmanager
    def _same_circumstances(self) -> Iterator[None]:
        for param in self._params:
            param.grad = None  # a new one, should loss_fn call backward itself: the first one's are kept
        set_random_state(self._random)
        self.calls += 1
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, before in self._buffers:
                    setattr(module, name, buffer)
                    buffer.copy_(before)


def whole_loss(losses: Losses, topology: Topology) -> float:
    """The mean over data ranks of their losses.

    Raises:
        ValueError: There is no loss for some data rank, or one is not finite.
    """
    by_samples: dict[tuple[int, ...], list[float]] = {}
    for rank, loss in enumerate(losses):
        found = by_samples.setdefault(tuple(topology.coordinate_of(rank, axis) for axis in topology.data_axes), [])
        if loss is not None:
            found.append(loss)
            if not isfinite(loss):
                raise ValueError(f"the loss of rank {rank} is {loss}: give a model and a batch whose loss is finite")
    for samples, found in by_samples.items():
        if not found:
            at = ", ".join(f"{axis}={index}" for axis, index in zip(topology.data_axes, samples, strict=True))
            raise ValueError(
                f"no rank {f'at {at} ' if at else ''}returned a loss: loss_fn must return it where it is computed"
            )
    return fmean(fmean(found) for found in by_samples.values())


def unequal_along(losses: Losses, topology: Topology, within: float) -> tuple[str, ...]:
    """The axes, data axes apart, along which the losses of two ranks differ by more than ``within``."""
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
        raise ValueError(
            f"loss_fn returned a tensor of shape {tuple(loss.shape)}; return the loss, which is one number"
        )
    return float(local_tensor(loss.detach()).double())


# Float64 --------------------------------------------------------------------------------------------------------------

# A model computed in float64 for a while, whatever dtype it has and asks for: differences of losses need the digits.

_LOWER = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = ("float", "half", "bfloat16")


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """Within it, parameters and buffers of ``model`` are float64, in place, and so is everything that torch's functions
    make of them; casts to a lower dtype are left out. Afterwards it has its own tensors again, and their gradients.

    Raises:
        TypeError: A parameter is a DTensor that is not float64.
    """
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.dtype in _LOWER]
    if not tensors:
        yield
        return
    if has_dtensors(tensors):
        raise TypeError(
            "DTensors can't be computed in another dtype for a while: build the model in float64 "
            "(torch.set_default_dtype), or prove it as it is, with dtype=None"
        )
    before = [_Before(tensor) for tensor in tensors]
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        for tensor in tensors:
            tensor.grad = None
            tensor.data = tensor.data.double()
            if tensor.grad_dtype != torch.float64:  # as main grads have
                tensor.grad_dtype = None
        with _AllInFloat64():
            yield
    finally:
        torch.set_default_dtype(default)
        for one in before:
            one.put_back()


class _Before:
    """A tensor as it is now."""

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
        if name == "__get__":  # an attribute, which most calls are
            return func(*args, **(kwargs or {}))
        if name in _CASTS:
            return args[0].double()
        if not name.endswith("_"):  # what is changed in place stays what it is
            args = tuple(map(_raised_within, args))
            kwargs = {key: _raised_within(value) for key, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _raised_within(value: object) -> object:
    """Of what holds others, each. A tree of one leaf costs more than most functions that it is made for."""
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
