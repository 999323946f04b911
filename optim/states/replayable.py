"""Make the last update again, from what went into it: a flipped bit does not come a second time, a bug does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ...amp.casting import copy_each_
from ..norm.param_table import ParamPosition
from ..step.update_request import Update, UpdateRequest
from .chain import Binding, Link, Placement, Position, Replacements

if TYPE_CHECKING:
    from ..parallel_optimizer import ParallelOptimizer

State = dict[str, Any]


@dataclass(frozen=True)
class Replayable(Placement):
    """Keep what goes into each update that is made, for `replay`. Off unless it is given.

    Memory: a copy of everything that is stepped, of its gradients and of its states, where those are: for AdamW in float32
    or with masters 16 bytes an element, and 12 more during a replay. Time: a copy of it in each step, and one host read.
    """

    position: ClassVar[Position] = Position.UPDATE

    def check(self, binding: Binding) -> None:
        drawn = [type(other).__name__ for other in binding.placements if other.draws]
        drawn += [f"precision={binding.precision.name!r}"] * binding.precision.stochastic_rounding
        if drawn:
            raise ValueError(f"Replayable with {drawn[0]}, which rounds by the step's own draws: leave one of them out")

        if binding.precision.split_masters:
            raise ValueError(
                "Replayable copies masters, and with Bf16(split_masters=True) there are none between two steps: leave "
                "Replayable out of states=, or split_masters"
            )

    def link(self, binding: Binding) -> Link:
        return Kept(binding.optimizer)


def replay(optimizer: ParallelOptimizer[Any]) -> list[str]:
    """Make the last update that was not skipped again, and compare all bits with what is there now, which stays.

    On this rank alone; of what the optimizer steps (masters and pieces where there are), by the gradients, the factor and
    the param groups' options that the update had. Step hooks of the wrapped optimizer run once more.

    Returns:
        What has other bits now: ``["layer.weight: parameter", "layer.weight: exp_avg"]``. Empty: the update comes out as it
        did, so that what is wrong was in what went into it. Else a bit has turned in the update or since, on the rank where
        it has, or somebody has written there; or a kernel does not come out the same twice: then another replay differs as
        well, and elsewhere.
    Raises:
        RuntimeError: `Replayable` was not given; no update has been made since the optimizer was made or loaded.
    Collectives: none. Host reads: a few.
    """
    for link in optimizer.transforms.links:
        if isinstance(link, Kept):
            return link.replay()
    raise RuntimeError("nothing is kept of updates: give states=Replayable(), which copies what goes into them")


@dataclass(frozen=True)
class _Inputs:
    """What an update reads. Tensors are copies."""

    update: Callable[[], object]
    values: list[Tensor]
    gradients: list[Tensor | None]
    states: list[State]
    groups: list[State]


class Kept(Link):
    """Copies what the optimizer is about to step with; see `Replayable`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._names: list[str] = []
        self._inputs: _Inputs | None = None

    def not_captured(self) -> str | None:
        return "Replayable asks on the host whether an update is made"

    def install(self, optimizer: torch.optim.Optimizer, positions: Sequence[ParamPosition]) -> Replacements:
        self._names += [at.name for at in positions]
        self._inputs = None
        return {}

    def load_state_dict(self, state: Any) -> None:
        self._inputs = None

    def reload(self) -> None:
        self._inputs = None  # its update was of other weights

    @property
    def _params(self) -> list[Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, request: UpdateRequest, update: Update) -> None:
        """A skipped update leaves what is kept of the one before. Host reads: one."""
        if not bool(request.skip):
            self._inputs = self._now(partial(update, replace(request, low_precision_out=None, split_weights=None)))
        update(request)

    def _now(self, update: Callable[[], object]) -> _Inputs:
        params = self._params
        gradients = [None if param.grad is None else param.grad.clone() for param in params]
        values = [param.detach().clone() for param in params]
        states = [_copied(self.optimizer.state.get(param, {})) for param in params]
        return _Inputs(update, values, gradients, states, _options(self.optimizer))

    @torch.no_grad()
    def replay(self) -> list[str]:
        """See `replay`."""
        if self._inputs is None:
            raise RuntimeError("no update has been made since the optimizer was made or loaded: make a step first")
        inputs, params, state = self._inputs, self._params, self.optimizer.state
        after, groups = (
            [param.detach().clone() for param in params],
            [{**group} for group in self.optimizer.param_groups],
        )
        gradients, states = [param.grad for param in params], [state.get(param) for param in params]
        try:
            self._put(inputs)
            inputs.update()
            return [
                f"{name}: {what}"
                for name, param, value, of_param in zip(self._names, params, after, states, strict=True)
                for what in _differing(param, value, state.get(param, {}), of_param or {})
            ]
        finally:
            copy_each_(params, after)
            for param, gradient, of_param in zip(params, gradients, states, strict=True):
                param.grad = gradient
                state.pop(param, None)
                if of_param is not None:
                    state[param] = of_param
            for group, before in zip(self.optimizer.param_groups, groups, strict=True):
                group.update(before)

    def _put(self, inputs: _Inputs) -> None:
        """Copies of what is kept, in the place of what is there now."""
        params = self._params
        copy_each_(params, inputs.values)
        for param, gradient, state in zip(params, inputs.gradients, inputs.states, strict=True):
            param.grad = None if gradient is None else gradient.clone()
            self.optimizer.state.pop(param, None)
            if state:
                self.optimizer.state[param] = _copied(state)
        for group, options in zip(self.optimizer.param_groups, inputs.groups, strict=True):
            group.update(_copied(options))


def _copied(state: State) -> State:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def _options(optimizer: torch.optim.Optimizer) -> list[State]:
    return [
        _copied({key: value for key, value in group.items() if key not in ("params", "param_names")})
        for group in optimizer.param_groups
    ]


def _differing(param: Tensor, value: Tensor, state: State, before: State) -> list[str]:
    """What of a parameter and its states has other bits than it had."""
    names = [key for key in sorted({*state, *before}) if not _same_bits(state.get(key), before.get(key))]
    return names if _same_bits(param, value) else ["parameter", *names]


def _same_bits(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.detach().reshape(-1).view(torch.uint8) for tensor in (one, other)))
