"""What a clip rule is: from norms, and what it remembers of earlier steps, to factors on gradients. And the usual one.

A rule says at which level it works, and gets the norms that were measured there, of the gradients as they will be stepped
with (unscaled, averaged), in device tensors of the same bits on every rank:

    level          norms.<level>            factors
    "total"        0-dim                    0-dim, folded into the update where the optimizer can
    "groups"       [param groups]           one for each param group
    "parameters"   [logical parameters]     one for each, over all of its pieces
    "named"        [patterns and 1]         one for each of the rule's `patterns`, and for what none of them matches
    "units"        [units of all of them]   one for each unit: the slices along a dim, such as rows

A factor multiplies the gradients of what it is the factor of. A step whose total norm is not finite is skipped, whatever a
rule says. Everything that rules need travels in the one packed collective of the step, and nothing is read by the host.

A rule is a function and keeps nothing itself. What it remembers it declares (`Clip.initial`); the optimizer keeps that in
tensors (`ClipState`), gives them to `Clip.decide`, and writes what comes back into them where the step was not skipped
for a norm that is not finite, a veto or copies that differ. So one rule may be given to several optimizers.
"""

from __future__ import annotations

import warnings
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...amp.capture import is_captured, keeps_state_in_place
from ...parallel.mesh.text import some
from ...parallel.mesh.value_checks import check_number, check_scalar, check_text, dict_of, fields, is_whole, list_of
from ..norm.groupings import UnitDim
from ..norm.measure import Level, Norms

Threshold = float | Callable[[Tensor], Tensor]
"""In units of the unscaled gradient: a number, or a function of the number of steps, both 0-dim tensors (`WarmUp`)."""


class OfEachParameter(NamedTuple):
    """Of a state: one number for each logical parameter, in the order of ``norms.parameters``; saved by name.

    Args:
        value: That it begins as.
    """

    value: float


Initial = float | Sequence[float] | OfEachParameter
"""What a tensor of a state begins as: a number is a 0-dim tensor, several are a 1-dim one."""

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Decision(NamedTuple):
    """What a rule says of one step.

    Args:
        factors: What gradients are multiplied by, of the shape of the norms at the rule's level; None: by 1.
        state: What it remembers from here on, by name, as `Clip.initial` has it; what is left out stays as it is.
        skip: 0-dim bool: the step is not to be made, though its norm is finite; None: it is.
    """

    factors: Tensor | None
    state: Mapping[str, Tensor] = NOTHING
    skip: Tensor | None = None

    def spiked(self, finite: Tensor) -> Tensor | None:
        """`GradStats.spiked`, where the norm is ``finite``, 0-dim bool: else the step is skipped for that."""
        return None if self.skip is None else (self.skip & finite).float()


class Clip(ABC):  # noqa: B024 (one of two methods is to be written)
    """A rule; give it as ``max_norm=``. One of your own says its `level`, and computes `factors`; or, if it remembers
    something or skips steps, says what it remembers in `initial` and computes `decide`."""

    level: Level = "total"
    patterns: tuple[str, ...] = ()
    """At level "named" the groups, by glob over the names of parameters."""
    weights: bool = False
    """Whether ``norms.weights`` is needed: the norms of the weights themselves, at the same level."""
    in_place: bool = False
    """Whether `finish_` changes gradients: they are then unscaled and multiplied before it, in a pass of their own."""
    norm_type: float | None = None
    """The p of the norms; None: that of the optimizer."""
    unit_dim: UnitDim = 0
    """At level "units" the dim along which they lie."""

    def check(self) -> None:  # noqa: B027 (a rule without numbers has nothing to check)
        """Raise ValueError for arguments that are out of range; asked on all ranks together, before anything is changed."""

    def factors(self, norms: Norms) -> Tensor | None:
        """What gradients are multiplied by, of the shape of the norms at this level; None: by 1. Host reads: none."""
        raise NotImplementedError(
            f"{type(self).__name__} says neither factors(norms) nor decide(norms, state): write one"
        )

    def initial(self) -> Mapping[str, Initial]:
        """What is remembered from step to step, by name, as it is before the first one. Asked once."""
        return NOTHING

    def decide(self, norms: Norms, state: Mapping[str, Tensor]) -> Decision:
        """What is done in this step. Writes to no tensor of ``state``, and reads nothing to the host.

        Args:
            state: What `initial` says, on the device of the norms and of their dtype.
        """
        return Decision(self.factors(norms))

    def shown(self, factors: Tensor, norms: Norms) -> Tensor:
        """0-dim: what `GradStats.clip_coef` says; the smallest factor."""
        if factors.dim() == 0:
            return factors
        return factors.amin() if factors.numel() else torch.ones_like(norms.total)

    def finish_(self, gradients_of: Sequence[Tensor]) -> None:  # noqa: B027 (most rules have nothing to do here)
        """Change the ``.grad`` of these tensors, in place, after the factors."""


@dataclass(frozen=True)
class ByNorm(Clip):
    """coef = min(1, max_norm / (total_norm + 1e-6))       Pascanu et al. 2013, arXiv:1211.5063

    Args:
        max_norm: In units of the unscaled gradient; finite, > 0. Or a function of the number of steps that were not
            skipped: `WarmUp`, or your own.
        norm_type: p >= 1, or inf; None: that of the optimizer.
    """

    max_norm: Threshold
    norm_type: float | None = None

    def check(self) -> None:
        checked_threshold(self.max_norm, "max_norm")

    def initial(self) -> Mapping[str, Initial]:
        return counting(self.max_norm)

    def decide(self, norms: Norms, state: Mapping[str, Tensor]) -> Decision:
        return Decision(clip_coefficient(norms.total, at(self.max_norm, state.get("steps"))), counted(state))


# Thresholds -----------------------------------------------------------------------------------------------------------


def clip_coefficient(norm: Tensor, max_norm: float | Tensor | None) -> Tensor:
    """min(1, max_norm / (norm + 1e-6)), elementwise; 0 or NaN where the norm is not finite, and the step is skipped."""
    return torch.ones_like(norm) if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)


def shortened(norm: Tensor, bound: float | Tensor) -> Tensor:
    """min(1, bound / norm), elementwise, for bounds that norms themselves make, and that a norm must meet exactly."""
    return torch.where(norm > bound, bound / norm, torch.ones_like(norm))


def at(threshold: Threshold | None, steps: Tensor | None) -> float | Tensor | None:
    """A threshold after so many steps, 0-dim; None where there is none, or where it is a number."""
    return threshold(steps) if callable(threshold) and steps is not None else threshold  # type: ignore[return-value]


def counting(*thresholds: Threshold | None) -> Mapping[str, Initial]:
    """The state of a rule that remembers nothing but how many steps there were, if one of its thresholds asks."""
    return {"steps": 0.0} if any(map(callable, thresholds)) else NOTHING


def counted(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """That state after one step more."""
    return {"steps": state["steps"] + 1} if "steps" in state else NOTHING


def checked_threshold(value: Threshold, name: str, infinite: bool = False) -> None:
    """Check a threshold; a function of the number of steps by its own ``check``, if it has one.

    Args:
        infinite: It may be: a group that is not clipped, nor one of those that are clipped together.
    Raises:
        TypeError: It is no number and no function.
        ValueError: It is not finite and positive.
    """
    if callable(value):
        getattr(value, "check", bool)()
        return
    check_scalar(value, name, "a number, a function of the number of steps, or None")
    value = float(value)
    if not (value > 0 and (infinite or isfinite(value))):
        without = "math.inf: this group is not clipped" if infinite else "None: no clipping"
        raise ValueError(f"{name}={value}: give a finite number > 0, in units of the unscaled gradient ({without})")


def checked_positive(value: float, name: str) -> None:
    """Raise ValueError unless it is a finite number above 0, TypeError if it is no number."""
    check_scalar(value, name)
    if not (value > 0 and isfinite(value)):
        raise ValueError(f"{name}={value}: give a finite number > 0")


def checked_count(value: int, name: str, least: int) -> None:
    """Raise ValueError where it is no whole number of at least ``least``."""
    if not is_whole(value, least):
        raise ValueError(f"{name}={value!r}: give a whole number >= {least}")


def checked_decay(value: float, name: str) -> None:
    """Raise ValueError unless it is the weight of an exponential mean, TypeError if it is no number."""
    check_scalar(value, name)
    if not 0 <= value < 1:
        raise ValueError(f"{name}={value!r}: give a number >= 0 and < 1, the weight of what was before")


# State ----------------------------------------------------------------------------------------------------------------

# What a rule remembers: named tensors of the same bits on every rank, kept in place, saved as numbers under names.

Numbers = float | list[float] | dict[str, float]
"""Of a state: 0-dim, 1-dim, or by the name of a logical parameter."""


class ClipState:
    """A rule in use, and what it remembers. An optimizer makes one of its ``max_norm=``; make one for `clip_grad_norm_`:

        clip = ClipState(ZClip())
        for batch in batches:
            ...
            stats = clip_grad_norm_(params, clip, registry)
        torch.save(clip.state_dict(), path)

    Args:
        rule: Which may be another one's too: what is remembered is here.

    Attributes:
        initial: What the rule remembers, and begins with; nothing for most.
        names: Of the logical parameters, the same on every rank; none before they are known, or where nobody asks.
        tensors: By name; they are made in the first step, on the device of the norms, and from there on changed in place.
    """

    def __init__(self, rule: Clip) -> None:
        self.rule, self.initial = rule, rule.initial()
        self.names: tuple[str, ...] = ()
        self.tensors: dict[str, Tensor] = {}
        self._numbers: dict[str, Numbers] = {}  # loaded; what is not among them begins as the rule says

    @property
    def needs_names(self) -> bool:
        """Whether the rule speaks of single parameters."""
        of_each = any(isinstance(value, OfEachParameter) for value in self.initial.values())
        return of_each or self.rule.level in ("parameters", "named", "units")

    def bind(self, names: Sequence[str]) -> None:
        """The logical parameters are these now; what is remembered of one of them stays, by its name. Host reads: where
        they were others before."""
        if tuple(names) != self.names:
            self._numbers = self._read()
            self.names, self.tensors = tuple(names), {}

    def decide(self, norms: Norms, rule: Clip | None = None) -> Decision:
        """What the rule says of one step. Host reads: none.

        Args:
            rule: What stands for it, with the same state: with thresholds of param groups in it.
        Raises:
            RuntimeError: A CUDA graph is made in the first step; or the rule has a state of its own, and moved it then.
        """
        self._make(norms.total)
        rule = self.rule if rule is None else rule
        with keeps_state_in_place(rule):
            return rule.decide(norms, self.tensors)

    def remember(self, decision: Decision, taken: Tensor) -> None:
        """Keep what the rule wants to remember, where ``taken``, 0-dim bool. Host reads: none."""
        for name, value in decision.state.items():
            if name not in self.tensors:
                raise TypeError(
                    f"{type(self.rule).__name__} wants to remember {name!r}, and initial() returns "
                    f"{sorted(self.tensors)}: say there what it begins as"
                )
            kept = self.tensors[name]
            kept.copy_(torch.where(taken, value, kept))

    def _make(self, like: Tensor) -> None:
        initial = self.initial
        if self.tensors.keys() == initial.keys():
            if all(tensor.device == like.device for tensor in self.tensors.values()):
                return
            self.tensors = {name: tensor.to(like.device) for name, tensor in self.tensors.items()}
            return
        if is_captured():
            raise RuntimeError(
                f"{type(self.rule).__name__} remembers nothing yet, and begins in the step that is captured in a CUDA "
                "graph: make a step with it before"
            )
        for name, begins in initial.items():
            numbers = self._laid_out(begins, self._numbers.get(name))
            host = torch.tensor(numbers, dtype=like.dtype, pin_memory=like.is_cuda)
            self.tensors[name] = host.to(like.device, non_blocking=True)

    def _laid_out(self, begins: Initial, known: Numbers | None) -> float | list[float]:
        if isinstance(begins, OfEachParameter):
            own = known if isinstance(known, dict) else {}
            return [own.get(name, begins.value) for name in self.names]
        if known is not None and not isinstance(known, dict):
            return known
        return float(begins) if isinstance(begins, (int, float)) else [float(value) for value in begins]

    # Saving and loading ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, which load on any layout. Host reads: one for each tensor."""
        return {"rule": type(self.rule).__name__, "state": self._read()}

    def _read(self) -> dict[str, Numbers]:
        initial, found = self.initial, dict(self._numbers)
        for name, tensor in self.tensors.items():
            values = tensor.tolist()
            found[name] = dict(zip(self.names, values, strict=True)) if _of_each(initial[name]) else values
        return found

    def check_state(self, saved: Mapping[str, Any] | None) -> None:
        """Raise ValueError where ``saved`` is nothing that the `state_dict` of a rule returns, of this one or another."""
        if saved is None:
            return
        fields({"rule": check_text, "state": dict_of(_check_numbers)})(saved, "clip")

    def load_state_dict(self, saved: Mapping[str, Any] | None) -> None:
        """Go on from what `state_dict` returned, on this or another layout.

        What was saved without a state of this rule (None), or with that of another one, is no error, so that a run may
        change its rule: what the rule remembers then begins anew, with a warning that says so.
        """
        self.check_state(saved)
        initial, self.tensors, self._numbers = self.initial, {}, {}
        if not initial:
            return
        kind, saved = type(self.rule).__name__, saved or {}
        state = saved.get("state", {})
        if saved.get("rule") != kind or not _fits(initial, state):
            found = f"is of {saved['rule']} and does not fit" if "rule" in saved else "has nothing of a rule"
            warnings.warn(
                f"{kind} remembers {', '.join(sorted(initial))} from step to step, and the state that is loaded {found}: "
                "it begins anew, with its warm-up if it has one",
                stacklevel=2,
            )
            return
        self._numbers = {name: state[name] for name in initial if name in state}
        new = {name for numbers in state.values() if isinstance(numbers, dict) for name in {*self.names} - {*numbers}}
        if new:
            warnings.warn(
                f"the state that is loaded has nothing of {kind} for {some(sorted(new))}: for these it begins anew",
                stacklevel=2,
            )


def _check_numbers(value: object, field: str) -> None:
    """Raise ValueError where a value is none of `Numbers`, or is NaN."""
    if isinstance(value, list):
        list_of(check_number)(value, field)
    elif isinstance(value, dict):
        dict_of(check_number)(value, field)
    else:
        check_number(value, field)


def _of_each(begins: Initial) -> bool:
    return isinstance(begins, OfEachParameter)


def _fits(initial: Mapping[str, Initial], state: Mapping[str, Any]) -> bool:
    """Whether the numbers have the names and shapes of a rule's state; what it has not begun to remember is missing."""
    if not state:
        return True
    return state.keys() == initial.keys() and all(
        isinstance(numbers, dict)
        if _of_each(begins)
        else isinstance(numbers, (int, float))
        if isinstance(begins, (int, float))
        else isinstance(numbers, list) and not _of_each(begins) and len(numbers) == len(begins)
        for begins, numbers in ((initial[name], state[name]) for name in initial)
    )
