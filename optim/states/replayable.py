"""Repeat an optimizer's last update from copies of its inputs, to distinguish flipped bits from reproducible errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...amp.casting import copy_each_
from ..norm.param_table import ParamPosition
from ..step.update_request import Update, UpdateRequest
from ..step.wrapped_optimizer import params_of
from .param_transform import ParamTransform, PlacementContext, Position, Replacements, StatePlacement

if TYPE_CHECKING:
    from ..parallel_optimizer import ParallelOptimizer

State = dict[str, Any]


@dataclass(frozen=True)
class Replayable(StatePlacement):
    """The state placement that keeps copies of the inputs of each update, for `replay`.

        optimizer = ParallelOptimizer(adamw, registry, states=Replayable())

    Each step that is not skipped makes new copies, which replace the previous copies. A step reads on the host whether
    it is skipped, so a CUDA graph can't capture it.

    Memory: copies of the stepped tensors, their gradients and their states on the same device. With AdamW in float32 or
    with masters the copies have 16 bytes per element; a replay allocates 16 more.
    Raises:
        ValueError: By the constructor of `ParallelOptimizer`, on every rank: the update rounds stochastically
            (`HalfStates`, ``Bf16(stochastic_rounding=True)``), or the precision has ``split_masters=True`` or
            ``main_grads=False``.
    Collectives: none. Host synchronization: one per step.
    """

    position: ClassVar[Position] = Position.UPDATE

    def check(self, context: PlacementContext) -> None:
        drawn = [type(other).__name__ for other in context.placements if other.rounds_stochastically]
        drawn += [f"precision={context.precision!r}"] * context.precision.stochastic_rounding
        if drawn:
            raise ValueError(
                f"Replayable can't repeat an update with {drawn[0]}, which rounds randomly: leave Replayable or "
                f"{drawn[0]} out"
            )

        if context.precision.split_masters:
            raise ValueError(
                "Replayable copies master weights, which do not exist between two steps with Bf16(split_masters=True): "
                "leave Replayable out of states=, or leave split_masters=True out"
            )

    def transform(self, context: PlacementContext) -> ParamTransform:
        return UpdateRecorder(context.optimizer)


def replay(optimizer: ParallelOptimizer[Any]) -> list[str]:
    """Repeat the last update that was not skipped, and return the names of tensors that it does not reproduce bitwise.

    The optimizer and the model are unchanged afterwards.

    The update runs on this rank only, on the stepped tensors (masters and shards if there are any). It uses the
    gradients, clip coefficient and param-group options of the original update. Step hooks of the wrapped optimizer run
    again.

        names = replay(optimizer)  # [] or names such as "layer.weight: exp_avg"

    An empty list means that the update is reproducible; if the weights are wrong, the inputs of the update were wrong.
    A name in the list means that a bit flipped on this rank during or after the update, or that other code has written
    to the tensor since then. A nondeterministic kernel also causes differences; a second replay may then differ in
    other elements.

    Args:
        optimizer: An optimizer with ``states=Replayable()``.
    Returns:
        Names of the tensors that differ, such as ``["layer.weight: parameter", "layer.weight: exp_avg"]``.
    Raises:
        RuntimeError: `Replayable` is not installed, or no update was made since the optimizer was made, was loaded or
            reloaded, got a param group, or was refreshed.
    Collectives: those of the wrapped optimizer's step, usually none. Host synchronization: one per tensor.
    """
    for transform in optimizer.transforms.transforms:
        if isinstance(transform, UpdateRecorder):
            return transform.replay()
    raise RuntimeError(
        "replay needs the inputs of the last update: create the optimizer with states=Replayable(), which copies them in "
        "each step"
    )


class _Values(NamedTuple):
    """The values of a stepped tensor, its gradient (None: no gradient) and its optimizer state (None or empty: none)."""

    value: Tensor
    gradient: Tensor | None
    state: State | None


@dataclass(frozen=True)
class _Inputs:
    """The inputs of an update. ``groups`` has each param group with its options at the time of the update."""

    update: Callable[[], object]
    params: dict[Tensor, _Values]
    groups: list[tuple[State, State]]


class UpdateRecorder(ParamTransform):
    """The transform of `Replayable`: copies the inputs of each update."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._names: dict[Tensor, str] = {}
        self._inputs: _Inputs | None = None

    def not_captured(self) -> str | None:
        return "Replayable reads on the host whether an update is skipped: leave it out of states="

    def install(self, optimizer: torch.optim.Optimizer, positions: Sequence[ParamPosition]) -> Replacements:
        self._names |= {at.tensor: at.name for at in positions}
        self._inputs = None
        return {}

    def load_state_dict(self, state: Any) -> None:
        self._inputs = None

    def reload(self) -> None:
        self._inputs = None  # the copies belong to an update of other weights

    @torch.no_grad()
    def step(self, request: UpdateRequest, update: Update) -> None:
        """Copy the inputs of the update, then call ``update``. If the update is skipped, the earlier copies are kept.

        Host synchronization: one.
        """
        if not bool(request.skip):
            self._inputs = None  # frees the old copies before the new ones are made
            self._inputs = self._now(partial(update, replace(request, low_precision_out=None, split_weights=None)))
        update(request)

    def _now(self, update: Callable[[], object]) -> _Inputs:
        params = {}
        for param in (param for param in params_of(self.optimizer) if param.requires_grad or param.grad is not None):
            gradient = None if param.grad is None else param.grad.clone()
            params[param] = _Values(param.detach().clone(), gradient, _copied(self.optimizer.state.get(param, {})))
        return _Inputs(update, params, [(group, _options(group)) for group in self.optimizer.param_groups])

    @torch.no_grad()
    def replay(self) -> list[str]:
        """Repeat the last update, and return the names of the tensors that it does not reproduce bitwise."""
        if self._inputs is None:
            raise RuntimeError(
                "no update has been made since the optimizer was created, loaded, reloaded or refreshed, or got a "
                "param group: make a step first"
            )
        inputs, state = self._inputs, self.optimizer.state
        after = {param: _Values(param.detach().clone(), param.grad, state.get(param)) for param in inputs.params}
        groups = [(group, {**group}) for group in self.optimizer.param_groups]
        try:
            self._put(inputs)
            inputs.update()
            return [
                f"{self._names[param]}: {what}"
                for param, was in after.items()
                for what in _differing(param, was.value, state.get(param, {}), was.state or {})
            ]
        finally:
            copy_each_([*after], [was.value for was in after.values()])
            for param, was in after.items():
                self._set(param, was.gradient, was.state)
            for group, before in groups:
                group.update(before)

    def _put(self, inputs: _Inputs) -> None:
        copy_each_([*inputs.params], [kept.value for kept in inputs.params.values()])
        for param, kept in inputs.params.items():
            gradient = None if kept.gradient is None else kept.gradient.clone()
            self._set(param, gradient, _copied(kept.state) if kept.state else None)
        for group, options in inputs.groups:
            group.update(_copied(options))

    def _set(self, param: Tensor, gradient: Tensor | None, state: State | None) -> None:
        param.grad = gradient
        self.optimizer.state.pop(param, None)
        if state is not None:
            self.optimizer.state[param] = state


def _copied(state: State) -> State:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def _options(group: State) -> State:
    return _copied({key: value for key, value in group.items() if key not in ("params", "param_names")})


def _differing(param: Tensor, value: Tensor, state: State, before: State) -> list[str]:
    """Return the names of the entries of ``state`` that are not bitwise equal to those of ``before``.

    Entries that are not tensors are only compared by type. If ``param`` is not bitwise equal to ``value``, "parameter" is
    the first name.
    """
    names = [key for key in sorted({*state, *before}) if not _same_bits(state.get(key), before.get(key))]
    return names if _same_bits(param, value) else ["parameter", *names]


def _same_bits(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.detach().reshape(-1).view(torch.uint8) for tensor in (one, other)))
