"""Central differences of the loss along random directions, compared with the derivatives that the gradients predict.

To move a parameter means to add a small multiple of a random direction to it. A group of parameters is moved at once,
each along its own direction. The loss then changes by the sum of the parameters' effects. If this sum equals the sum
that the gradients predict, all gradients in the group are right, because errors along random directions do not cancel.
Otherwise the first half of the group is tested in the same way. If the first half is right, the error is in the second
half; otherwise the second half is tested too. If both halves of a group are wrong, and both halves of one of these
halves are wrong too, the parameters of this half are tested one by one.

If all gradients are right, two forwards per group of up to `TOGETHER` parameters are needed, more if the loss has
kinks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite, log10
from statistics import fmean
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_is_leaf, tree_map

from ...parallel.interop.local_parameters import discard_gathered, has_dtensors, local_tensor
from ...parallel.mesh.agreement import on_all_ranks_with
from ...parallel.mesh.random_state import random_state, set_random_state
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.stop_gradient import ConstantRecord
from ...parallel.mesh.topology import Topology
from .contracts import Directions, KnownParameter, Measured

# The loss as a repeatable function of the parameters ------------------------------------------------------------------

# The objective is the mean of the data-parallel ranks' losses. Along a model-parallel axis all ranks must compute the
# same loss, each from its shards of the model.


_LOGGER = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)
Losses = Sequence[float | None]
"""The loss of each rank, in the order of ranks; None for a rank without a loss, such as on a first pipeline stage."""


class Objective:
    """``loss_fn(model)`` as a repeatable function: every call begins with the same random states and buffers.

    Results of `stop_gradient` keep their values of the first call. A call restores the buffers. Gradients and random
    states change; `close` restores them.

    ``loss_fn`` returns this rank's loss, a tensor with one element, or None on a rank without a loss. If it runs
    backward itself, as a pipeline schedule does, it returns a detached loss or None. ``topology`` has the axes of the
    registry's topology with other roles; None: the registry's topology.
    """

    def __init__(
        self,
        model: M,
        loss_fn: Callable[[M], Tensor | None],
        registry: ProcessGroupRegistry,
        topology: Topology | None,
    ) -> None:
        self.topology, self.registry = topology or registry.topology, registry
        self._model: nn.Module = model
        self._loss: Callable[[], Tensor | None] = lambda: loss_fn(model)
        self._params = list(model.parameters())
        self._gradients = [(param, param.grad) for param in self._params]
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._random = random_state()
        self._constants = ConstantRecord()
        self._backward_is_ours = True
        self.calls = 0

    def differentiate(self) -> Losses:
        """Run one forward and backward, and return the losses of all ranks. The gradients remain in ``.grad``.

        An error of ``loss_fn`` is raised on every rank, the original one on its own rank. An error of backward is
        raised on its rank only.

        Collectives: the model's, and an object all-gather over the world.
        """
        with self._same_circumstances():
            loss, reports = on_all_ranks_with(self._computed, self.registry)
            if loss is not None and loss.requires_grad:
                loss.backward()
        self._backward_is_ours = all(ours for number, ours in reports if number is not None)
        return [number for number, _ in reports]

    def __call__(self) -> Losses:
        """Run one forward, and return the losses of all ranks. If ``loss_fn`` runs backward itself, backward runs too.

        Call `differentiate` first.

        Collectives: the model's, and an object all-gather over the world.
        """
        with self._same_circumstances(), torch.set_grad_enabled(not self._backward_is_ours):
            _, reports = on_all_ranks_with(self._computed, self.registry)
        discard_gathered(self._model)  # else the next forward would use the parameters that this forward gathered
        return [number for number, _ in reports]

    def _computed(self) -> tuple[Tensor | None, tuple[float | None, bool]]:
        """Call ``loss_fn``, and return (loss, (value of the loss, True if backward must still be called)).

        An error is logged before it is raised, because other ranks may be waiting for this rank in a collective of the
        model.
        """
        try:
            loss = self._loss()
            return loss, (_number(loss), loss is not None and loss.requires_grad)
        except Exception:
            _LOGGER.exception("the loss of rank %d could not be computed", self.registry.global_rank)
            raise

    def close(self) -> None:
        """Restore the gradients and random states that were there when this object was created."""
        for param, gradient in self._gradients:
            param.grad = gradient
        set_random_state(self._random)

    @contextmanager
    def _same_circumstances(self) -> Iterator[None]:
        for param in self._params:
            param.grad = None  # a backward inside loss_fn must not add to the gradients of an earlier call
        set_random_state(self._random)
        self.calls += 1
        try:
            with self._constants.recorded():
                yield
        finally:
            with torch.no_grad():
                for module, name, buffer, before in self._buffers:
                    setattr(module, name, buffer)
                    buffer.copy_(before)


def mean_loss(losses: Losses, topology: Topology) -> float:
    """Return the mean of the losses over the coordinates along the data-parallel axes.

    Ranks at one such coordinate count as one: their losses are averaged first. Raise ValueError if a loss is not
    finite, or if there is none for a coordinate.
    """
    by_samples: dict[tuple[tuple[str, int], ...], list[float]] = {}
    for rank, loss in enumerate(losses):
        samples = tuple((axis, topology.coordinate_of(rank, axis)) for axis in topology.data_axes)
        found = by_samples.setdefault(samples, [])
        if loss is not None:
            found.append(loss)
            if not isfinite(loss):
                raise ValueError(f"the loss of rank {rank} is {loss}; give a model and a batch with a finite loss")
    for samples, found in by_samples.items():
        if not found:
            at = ", ".join(f"{axis}={index}" for axis, index in samples)
            raise ValueError(
                f"no rank {f'at {at} ' if at else ''}returned a loss; loss_fn must return it on the rank that computes it"
            )
    return fmean(fmean(found) for found in by_samples.values())


def unequal_loss_axes(losses: Losses, topology: Topology, within: float) -> tuple[str, ...]:
    """Return the axes, except data-parallel ones, along which ranks' losses differ by more than ``within``."""
    found = []
    for axis in topology.axes:
        if axis not in topology.data_axes and topology.size(axis) > 1:
            groups = ([losses[rank] for rank in ranks] for ranks in topology.groups(axis))
            there = ([loss for loss in group if loss is not None] for group in groups)
            if any(group and max(group) - min(group) > within for group in there):
                found.append(axis)
    return tuple(found)


def _number(loss: object) -> float | None:
    if loss is None:
        return None
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"loss_fn returned {type(loss).__name__}; return the loss as a tensor, or None on a rank without a loss"
        )
    if loss.numel() != 1:
        raise ValueError(f"loss_fn returned a tensor of shape {tuple(loss.shape)}; return the loss as a single number")
    return float(local_tensor(loss.detach()).double())


# Float64 --------------------------------------------------------------------------------------------------------------

# The model is computed in float64 during a proof, because differences of losses in lower dtypes are mostly rounding.

_LOWER = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = ("float", "half", "bfloat16")


def check_converts(model: nn.Module) -> None:
    """Raise TypeError if a parameter or buffer in a lower dtype is a DTensor, which `in_float64` can't convert."""
    if has_dtensors([tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.dtype in _LOWER]):
        raise TypeError(
            "parameters or buffers that are DTensors can't be converted to float64 for the proof; build the model in "
            "float64 (torch.set_default_dtype), or pass dtype=None to prove it in its own dtype"
        )


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """Compute the model in float64 inside the context, and restore its tensors and gradients afterwards.

    Inside the context, the model's tensors in float32, bfloat16 and float16 are float64, and have no gradients at
    first. torch's default dtype is float64. Arguments of torch functions in the lower dtypes are converted to float64,
    except those of in-place functions. So casts to a lower dtype have no effect. If the model has no tensor in the
    lower dtypes, the context does nothing. Call `check_converts` first.
    """
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.dtype in _LOWER]
    if not tensors:
        yield
        return
    before = [_SavedTensor(tensor) for tensor in tensors]
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        for tensor in tensors:
            tensor.grad = None
            tensor.data = tensor.data.double()
            if tensor.grad_dtype != torch.float64:  # a fixed dtype, as for float32 main gradients
                tensor.grad_dtype = None
        with _AllInFloat64():
            yield
    finally:
        torch.set_default_dtype(default)
        for one in before:
            one.put_back()


class _SavedTensor:
    """The data, gradient and gradient dtype of a tensor; `put_back` restores them."""

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
        if name == "__get__":  # fast path: most calls only read an attribute
            return func(*args, **(kwargs or {}))
        if name in _CASTS:
            return args[0].double()
        if not name.endswith("_"):  # an in-place function keeps the dtype of its tensor
            args = tuple(map(_raised_within, args))
            kwargs = {key: _raised_within(value) for key, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _raised_within(value: object) -> object:
    """Return ``value`` with every float32, bfloat16 or float16 tensor and dtype in it converted to float64."""
    if value is None or isinstance(value, (int, float, str)):
        return value
    # `tree_map` is not called for a single leaf, because it is slow.
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


# Differences ----------------------------------------------------------------------------------------------------------


# Largest number of parameters that are moved at once. The tolerance of a group is relative to the sum of the
# parameters' effects. So in a group of 64, an error of one parameter is found if it is larger than 64 times the tolerance
# for this parameter alone.
TOGETHER = 64
ALIKE = 1.5  # largest ratio of the effects of parameters in a group, in powers of ten
_STEPS = (1.0, 0.1, 0.01, 0.001, 10.0)  # step sizes, divided by the first step size
_CHANGE = 1e-6  # the first step size is chosen so that the loss changes by about this fraction
_TINY = 1e-13  # a step size so small that the loss changes by rounding only
_FAR = 100  # two equal errors that are this many times larger than their tolerance prove that a gradient is wrong
Judgement = Literal["kept", "wrong", "undecided"]


@dataclass(frozen=True)
class Digits:
    """Accuracy of derivatives that are computed from losses of one dtype."""

    relative: float  # allowed relative error of a derivative
    noise: float  # relative rounding error that every loss may have
    smallest: float  # the first step size (a factor on the direction) is at least 10 times this
    largest: float  # the first step size is at most this

    @classmethod
    def of(cls, dtype: torch.dtype) -> Digits:
        """Return the accuracy for losses of ``dtype``; raise TypeError unless it is float32 or float64."""
        if dtype == torch.float64:
            return cls(1e-7, 5e-15, 1e-7, 1e-3)
        if dtype == torch.float32:
            return cls(5e-3, 1e-6, 1e-3, 1e-1)
        raise TypeError(
            f"differences of {dtype} losses are too inexact for a derivative; pass dtype=torch.float64, which restores the "
            "model's own dtype afterwards, or build the model in float64 or float32"
        )


@dataclass(frozen=True)
class DifferenceQuotient:
    """The derivative of the loss along a direction, computed as a central difference for one step size.

    ``rounding`` is the estimated largest rounding error of ``value``. ``unequal`` are the axes, except data-parallel
    ones, along which ranks computed different losses after the move. The losses must be equal along these axes.
    """

    value: float
    rounding: float
    unequal: tuple[str, ...]


class Differences:
    """Computes central differences of the loss along directions of parameters.

    ``base`` are the losses of all ranks at the present parameters. The attribute ``noise`` is the assumed absolute
    rounding error of a loss: at least the argument, and at least ``digits.noise`` times the loss.
    """

    def __init__(
        self, objective: Objective, measured: Measured, base: Losses, digits: Digits, noise: float = 0.0
    ) -> None:
        self.objective, self.measured, self.digits = objective, measured, digits
        self.topology = measured.topology
        self.loss = abs(mean_loss(base, self.topology))
        self.noise = max(noise, digits.noise * self.loss)

    def measure_noise(self, promises: Sequence[Promise]) -> None:
        """Measure the rounding error of a loss, and increase `noise` to ten times this error if `noise` is smaller.

        All parameters of ``promises`` are moved by a step so small that only rounding changes the loss. The error is
        large if the loss is a small difference of large numbers.

        Collectives: those of two calls of the objective.
        """
        promised = sum(promise.value for promise in promises)
        up, down = (self._moved([(p.known, p.direction) for p in promises], sign * _TINY) for sign in (1, -1))
        change = mean_loss(up, self.topology) - mean_loss(down, self.topology)
        self.noise = max(self.noise, 10 * abs(change - 2 * _TINY * promised))

    def along(self, directions: Directions, size: float) -> Iterator[DifferenceQuotient]:
        """Yield central differences along the directions, one for each of five step sizes.

        Two forwards run when a difference is taken from the iterator. They move all parameters at once, and restore
        them afterwards. ``size`` is the approximate absolute derivative along the directions; it determines the first
        step size.

        Collectives: those of two calls of the objective per difference.
        """
        digits = self.digits
        wanted = _CHANGE * self.loss / size if size else digits.largest
        first = min(max(wanted, 10 * digits.smallest), digits.largest)
        for factor in _STEPS:
            step = first * factor
            pair = [self._moved(directions, sign * step) for sign in (1, -1)]
            up, down = (mean_loss(losses, self.topology) for losses in pair)
            within = 10 * self.noise + 1e-3 * step * size  # larger differences between ranks' losses are not rounding
            apart = {axis for losses in pair for axis in unequal_loss_axes(losses, self.topology, within)}
            yield DifferenceQuotient((up - down) / (2 * step), self.noise / step, tuple(sorted(apart)))

    def _moved(self, directions: Directions, step: float) -> Losses:
        before = self.measured.move(directions, step)
        try:
            return self.objective()
        finally:
            self.measured.put_back(before)

    def judge(self, found: Iterable[DifferenceQuotient], promised: float, size: float) -> Judgement:
        """Compare central differences with the derivative that the gradients predict, and return the result.

        The loss may have kinks (ReLU, maximum, top-k). A difference is wrong if its step contains a kink, and smaller
        steps contain fewer kinks. So one difference that agrees with the prediction is enough, unless an earlier
        difference deviated from it by about the same amount. If two differences deviate from the prediction by the same
        large amount, their steps contain no kink, and the prediction is wrong.

        The result is "wrong" also if no difference agrees, and "undecided" if the rounding errors of all differences
        are too large. No more differences are taken after the result is certain. ``promised`` is a sum of one
        prediction per parameter, and ``size`` the sum of the predictions' sizes. The tolerance is relative to ``size``.
        """
        before: list[tuple[float, float]] = []
        for difference in found:
            if not self.tells(difference, size):
                continue
            off, allowed = difference.value - promised, self.digits.relative * size + difference.rounding
            if abs(off) <= allowed and all(
                abs(other) > 1.5 * allowed or abs(off) < 0.1 * abs(other) for other, _ in before
            ):
                return "kept"
            if any(abs(off - other) <= allowed + more < abs(off) / _FAR for other, more in before):
                return "wrong"
            before.append((off, allowed))
        return "wrong" if before else "undecided"

    def never_tells(self, size: float) -> bool:
        """Return True if rounding is above 1 % of a derivative of ``size`` even at the step size `Digits.largest`."""
        return self.noise / self.digits.largest > 0.01 * size

    def tells(self, found: DifferenceQuotient, size: float) -> bool:
        """Return True if the rounding error of ``found`` is at most 1 % of ``size``, the expected derivative."""
        return found.rounding <= 0.01 * size


@dataclass(frozen=True)
class Promise:
    """The derivative of the loss along a random direction of one parameter, as the gradients predict it.

    ``direction`` is this rank's part; None if the rank does not hold the parameter. ``size`` is the expected size of
    the derivative along a random direction. Directions are scaled by it, because scaling by ``value`` would make all
    predictions equal, so that the errors of two wrong parameters could cancel.
    """

    known: KnownParameter
    direction: Tensor | None
    value: float
    size: float

    def scaled(self, size: float) -> tuple[tuple[KnownParameter, Tensor | None], float]:
        """Scale the direction to a derivative of about ``size``; return ((parameter, direction), prediction)."""
        factor = size / self.size if self.size else 1.0
        return (self.known, None if self.direction is None else self.direction * factor), self.value * factor


def find_wrong(
    differences: Differences, promises: Sequence[Promise]
) -> tuple[list[KnownParameter], list[KnownParameter]]:
    """Return (parameters with wrong gradients, parameters whose effect on the loss is lost in rounding).

    ``promises`` has one entry per parameter, in the same order on all ranks.

    Collectives: those of the forwards, about two per 64 right parameters and more for wrong ones.
    """
    wrong: list[KnownParameter] = []
    undecided: list[KnownParameter] = []
    for group in _groups(promises):
        for found, sort in _within(differences, group, _kept(differences, group), crowded=False):
            (wrong if sort == "wrong" else undecided).append(found)
    return wrong, undecided


def _groups(promises: Sequence[Promise]) -> Iterator[list[Promise]]:
    """Yield groups of at most `TOGETHER` parameters whose effects on the loss have similar sizes."""
    by_size: dict[int | None, list[Promise]] = {}
    for promise in promises:
        size = None if not promise.size else int(log10(promise.size) // ALIKE)
        by_size.setdefault(size, []).append(promise)
    for group in by_size.values():
        for start in range(0, len(group), TOGETHER):
            yield group[start : start + TOGETHER]


def _within(
    differences: Differences, group: list[Promise], sort: Judgement, crowded: bool
) -> Iterator[tuple[KnownParameter, Judgement]]:
    """Yield the parameters of a group whose result is "wrong" or "undecided", with the result.

    ``sort`` is the result for the entire group. ``crowded``: the group is one half of a larger group, and the result of
    the other half is not "kept" either.
    """
    if sort == "kept":
        return
    if len(group) == 1:
        yield group[0].known, sort
        return
    first, second = group[: len(group) // 2], group[len(group) // 2 :]
    of_first = _kept(differences, first)
    # If the first half is right, the error is in the second half, which is not tested unless it is a single parameter.
    of_second = sort if of_first == "kept" and len(second) > 1 else _kept(differences, second)
    parts = [(first, of_first), (second, of_second)]
    all_wrong = "kept" not in (of_first, of_second)
    if all_wrong and crowded and len(group) > 2:
        parts = [([promise], _kept(differences, [promise])) for promise in group]
    for part, of_part in parts:
        yield from _within(differences, part, of_part, all_wrong)


def _kept(differences: Differences, group: Sequence[Promise]) -> Judgement:
    typical = sorted(promise.size for promise in group)[len(group) // 2]
    scaled = [promise.scaled(typical) for promise in group]
    promised, size = sum(value for _, value in scaled), sum(max(abs(value), typical) for _, value in scaled)
    found = differences.along([pair for pair, _ in scaled], size)
    if not size:  # all gradients are 0 or missing, so the loss must not change
        first = next(found)
        return "kept" if abs(first.value) <= 10 * first.rounding else "wrong"
    return differences.judge(found, promised, size)
