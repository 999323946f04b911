"""The interface of clipping rules, their thresholds, and the state of a rule.

A rule maps gradient norms, and its state from earlier steps, to factors on gradients. The level of a rule determines
which norms it receives. Norms are device tensors, bitwise identical on every rank. They are norms of the averaged
gradients, without the loss scale.

    level          norms.<level>            factors
    "total"        0-dim                    0-dim; applied in the update if the optimizer supports it
    "groups"       [param groups]           one per param group
    "parameters"   [logical parameters]     one per parameter, for all of its shards
    "named"        [patterns + 1]           one per name pattern (`Clip.patterns`), and one for all other parameters
    "units"        [units of all params]    one per unit: a slice along a dim, such as a row

A step with a non-finite total norm is skipped, whatever the rule returns. The collectives that compute the total norm
also compute all other norms that rules need. Rules must not synchronize the host.

A rule object is immutable, so it can serve several optimizers. It declares its initial state (`Clip.initial`), and a
`ClipState` keeps the current state in tensors. `ClipState` passes the tensors to `Clip.decide`, and stores the returned
state. The returned state is stored if the step is not skipped, or if only the rule itself skips it. Otherwise, such as
after a non-finite norm or a rejection by ``commit=``, the state stays unchanged.
"""

from __future__ import annotations

import warnings
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...amp.capture import is_captured, keeps_state_in_place
from ...parallel.mesh.deprecation import renamed_members
from ...parallel.mesh.text import some
from ...parallel.mesh.value_checks import check_number, check_scalar, check_text, dict_of, fields, is_whole, list_of
from ..norm.global_norm import Named, UnitDim
from ..norm.measure import Level, Norms
from ..norm.powers import accumulation_dtype

Threshold = float | Callable[[Tensor], Tensor]
"""A threshold for norms of gradients without the loss scale: a number, or a function such as `WarmUp`.

The function maps the number of steps that were not skipped to the threshold, both as 0-dim tensors.
"""


class PerParameterState(NamedTuple):
    """Initial state with one number per logical parameter, in the order of ``norms.parameters``.

    Checkpoints store the numbers by parameter name.

        class MeanNorms(Clip):
            level = "parameters"

            def initial(self):
                return {"mean": PerParameterState(0.0)}

            def decide(self, norms, state):
                return ClipResult(None, {"mean": 0.9 * state["mean"] + 0.1 * norms.parameters})

    Args:
        value: The initial value of each number.
    """

    value: float


Initial = float | Sequence[float] | PerParameterState
"""The initial value of a state tensor of a clipping rule.

A number gives a 0-dim tensor, a sequence of numbers a 1-dim tensor. `PerParameterState` gives a 1-dim tensor with one
element per logical parameter, all of the same value.
"""

NOTHING: Mapping[str, Any] = MappingProxyType({})


class ClipResult(NamedTuple):
    """The result of a rule in one step.

        ClipResult(factors=(1.0 / norms.total).clamp(max=1.0), skip=norms.total > 100)  # in `Clip.decide`

    Args:
        factors: Factors on gradients, of the shape of the norms at the rule's level. None: gradients are unchanged.
        state: The new state tensors by name. States that are left out stay unchanged. Default: empty.
        skip: 0-dim bool: True skips the step although its norm is finite. None (default): the rule does not skip.
    """

    factors: Tensor | None
    state: Mapping[str, Tensor] = NOTHING
    skip: Tensor | None = None

    def spiked(self, finite: Tensor) -> Tensor | None:
        """Return the value for `GradStats.spiked`: 0-dim float32, 1 if the rule skips a step with a finite norm.

        Args:
            finite: 0-dim bool: True if the total norm is finite.
        Returns:
            None if ``skip`` is None.
        """
        return None if self.skip is None else (self.skip & finite).float()


@renamed_members(shown="reported_coef")
class Clip(ABC):  # noqa: B024 (a subclass overrides one of two methods)
    """The base class of clipping rules. Pass a rule to `ParallelOptimizer` as ``max_norm=``.

        class HalfGradients(Clip):
            def factors(self, norms):
                return torch.full_like(norms.total, 0.5)

    To write a rule, set `level` and override `factors`. A rule that skips steps overrides `decide` instead. A rule with
    state overrides `decide` and `initial`.
    """

    level: Level = "total"
    """The norms that the rule receives and maps to factors.

    "total": one norm of all gradients. "groups": one per param group. "parameters": one per logical parameter. "named":
    one per name pattern. "units": one per slice along a dim, such as a row.
    """
    patterns: tuple[str, ...] = ()
    """The name patterns (globs) at level "named"; not used at other levels."""
    weights: bool = False
    """True: the rule needs ``norms.weights``, the norms of the weights at the same level."""
    in_place: bool = False
    """True: the rule overrides `finish_`. Gradients are unscaled and multiplied by their factors before it is called."""
    norm_type: float | None = None
    """The p of the norms. None: the ``norm_type`` of the optimizer or of `clip_grad_norm_`."""
    unit_dim: UnitDim = 0
    """The dim along which parameters are divided into units at level "units", or a dict from name globs to dims."""

    @property
    def unclipped(self) -> tuple[str, ...]:
        """Return the name patterns of parameters that this rule never clips, for `GradStats.unclipped`. Default: empty.

        ``"others"`` stands for the parameters that no pattern matches.
        """
        return ()

    def check_names(self, names: Sequence[str]) -> None:
        """Raise ValueError if the rule does not support ``names``, the names of all logical parameters.

        By default, a rule of level "named" supports them if each of its patterns is the first match of a parameter. A
        rule of another level supports all names.
        """
        if self.level == "named":
            Named.of(names, self.patterns)

    def check(self) -> None:  # noqa: B027 (a rule without numbers has nothing to check)
        """Raise ValueError or TypeError if an argument of the rule is invalid. Called on all ranks before the first use."""

    def factors(self, norms: Norms) -> Tensor | None:
        """Return the factors on gradients, in the shape of the norms at this rule's level. None: gradients stay unchanged.

        An override must not synchronize the host.

        Args:
            norms: The norms of the gradients without the loss scale.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has neither factors(norms) nor decide(norms, state): write one of them"
        )

    def initial(self) -> Mapping[str, Initial]:
        """Return the state before the first step, by name. Default: no state."""
        return NOTHING

    def decide(self, norms: Norms, state: Mapping[str, Tensor]) -> ClipResult:
        """Return the factors, the new state and the skip flag of one step. Default: ``factors(norms)``, without state.

        An override must not write to ``state``, and must not synchronize the host.

        Args:
            norms: The norms of the gradients without the loss scale.
            state: One tensor per name in `initial`, with the device and dtype of the norms.
        """
        return ClipResult(self.factors(norms))

    def reported_coef(self, factors: Tensor, norms: Norms) -> Tensor:
        """Return the value for `GradStats.clip_coef`, 0-dim. Default: the smallest factor; 1 if ``factors`` is empty."""
        if factors.dim() == 0:
            return factors
        return factors.amin() if factors.numel() else torch.ones_like(norms.total)

    def finish_(self, gradients_of: Sequence[Tensor]) -> None:  # noqa: B027 (most rules have nothing to do here)
        """Change the ``.grad`` of the given tensors in place, after the factors were applied. Default: no change."""


# Thresholds -----------------------------------------------------------------------------------------------------------


def bound_factor(norm: Tensor, bound: float | Tensor) -> Tensor:
    """Return min(1, bound / norm) elementwise; 1 if norm is NaN. Unlike `clip_coefficient`, it adds nothing to norm."""
    return torch.where(norm > bound, bound / norm, torch.ones_like(norm))


def resolve_threshold(threshold: Threshold | None, state: Mapping[str, Tensor]) -> float | Tensor | None:
    """Return the threshold of a step. If it is a function, ``state`` has the ``"steps"`` of `initial_step_count`."""
    return threshold(state["steps"]) if callable(threshold) else threshold


def initial_step_count(threshold: Threshold | None) -> Mapping[str, Initial]:
    return {"steps": 0.0} if callable(threshold) else NOTHING


def next_step_count(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {"steps": state["steps"] + 1} if "steps" in state else NOTHING


def check_threshold(value: Threshold, name: str) -> None:
    """Check a threshold: a finite number > 0, or a function, whose ``check`` method is called if it has one."""
    if callable(value):
        getattr(value, "check", bool)()
        return
    check_scalar(value, name, "a number or a function of the number of steps")
    check_number_threshold(value, name)


def check_number_threshold(value: float, name: str, infinite: bool = False) -> None:
    """Check a threshold that must be a finite number > 0; with ``infinite``, also ``math.inf`` (a group is not clipped)."""
    check_scalar(value, name)
    value = float(value)
    if not (value > 0 and (infinite or isfinite(value))):
        without = ", or math.inf to leave the group unclipped" if infinite else ""
        raise ValueError(f"{name}={value}: give a finite number > 0{without}")


def check_positive(value: float, name: str) -> None:
    check_scalar(value, name)
    if not (value > 0 and isfinite(value)):
        raise ValueError(f"{name}={value}: give a finite number > 0")


def check_whole_number(value: int, name: str, least: int) -> None:
    if not is_whole(value, least):
        raise ValueError(f"{name}={value!r}: give a whole number >= {least}")


def check_decay(value: float, name: str) -> None:
    """Raise ValueError unless ``value``, the decay of an exponential mean, is in [0, 1); TypeError if it is no number."""
    check_scalar(value, name)
    if not 0 <= value < 1:
        raise ValueError(f"{name}={value!r}: give a number >= 0 and < 1, the weight of the previous mean")


# State ----------------------------------------------------------------------------------------------------------------

# The state of a rule is a dict of tensors, bitwise identical on every rank. Steps change the tensors in place.
# Checkpoints store their values as Python numbers.

Numbers = float | list[float] | dict[str, float]
"""A saved state tensor: one number (0-dim), a list (1-dim), or a dict by name of the logical parameter."""


class ClipState:
    """A clipping rule with its state. `ParallelOptimizer` constructs one from ``max_norm=``.

    Construct one to pass it to `clip_grad_norm_`:

        clip = ClipState(ZClip())
        for batch in batches:
            ...
            stats = clip_grad_norm_(params, clip, registry)
        torch.save(clip.state_dict(), path)

    Args:
        rule: The rule. Several `ClipState` objects can share one rule, because rules have no mutable state.

    Attributes:
        initial: The result of `Clip.initial`.
        names: The names of the logical parameters, equal on every rank. Empty until `bind`.
        tensors: The state by name. The first step creates the tensors on the device of the norms; later steps change them
            in place.
    """

    def __init__(self, rule: Clip) -> None:
        self.rule, self.initial = rule, rule.initial()
        self.names: tuple[str, ...] = ()
        self.tensors: dict[str, Tensor] = {}
        self._numbers: dict[str, Numbers] = {}  # loaded values; missing names start from the rule's initial values

    @property
    def needs_names(self) -> bool:
        """Return True if the rule has norms per parameter, name or unit, or state per parameter."""
        of_each = any(isinstance(value, PerParameterState) for value in self.initial.values())
        return of_each or self.rule.level in ("parameters", "named", "units")

    def bind(self, names: Sequence[str]) -> None:
        """Set the names of the logical parameters, which must be equal on every rank.

        If the names changed, the next step creates new state tensors. Parameters that keep their name keep their state.

        Host synchronization: one per state tensor if the names changed, else none.
        """
        if tuple(names) != self.names:
            self._numbers = self._read_numbers()
            self.names, self.tensors = tuple(names), {}

    def decide(self, norms: Norms, rule: Clip | None = None) -> ClipResult:
        """Return the result of the rule in one step, and create missing state tensors. `remember` stores the new state.

        Args:
            norms: The norms of the gradients without the loss scale.
            rule: A rule to apply with this state instead of `ClipState.rule`, such as this rule combined with thresholds
                of param groups. None (default): `ClipState.rule`.
        Raises:
            RuntimeError: A CUDA graph is captured before the state tensors exist, or the rule assigned a new object to one
                of its attributes during a capture.
        Host synchronization: none, unless the norms are on another device than in the last step.
        """
        self._create_tensors(norms.total)
        rule = self.rule if rule is None else rule
        with keeps_state_in_place(rule):
            return rule.decide(norms, self.tensors)

    def tensors_on(self, device: torch.device) -> Mapping[str, Tensor]:
        """Return the state tensors by name. Create them from loaded or initial values if no step has created them.

        Host synchronization: none, unless the tensors are on another device.
        """
        self._create_tensors(torch.empty((), dtype=accumulation_dtype(device), device=device))
        return self.tensors

    def remember(self, decision: ClipResult, taken: Tensor) -> None:
        """Write the new state of ``decision`` into `tensors` if the step is taken.

        Args:
            decision: The result of `decide`.
            taken: 0-dim bool on the device of the norms. False: the state stays unchanged.
        Raises:
            TypeError: ``decision`` has a state that the rule's `Clip.initial` does not have.
        Host synchronization: none.
        """
        for name, value in decision.state.items():
            if name not in self.tensors:
                raise TypeError(
                    f"{type(self.rule).__name__}.decide() returned a state {name!r}, but initial() has only "
                    f"{sorted(self.tensors)}: add the initial value of {name!r} to initial()"
                )
            kept = self.tensors[name]
            kept.copy_(torch.where(taken, value, kept))

    def _create_tensors(self, like: Tensor) -> None:
        initial = self.initial
        if self.tensors.keys() == initial.keys():
            if all(tensor.device == like.device for tensor in self.tensors.values()):
                return
            self.tensors = {name: tensor.to(like.device) for name, tensor in self.tensors.items()}
            return
        if is_captured():
            raise RuntimeError(
                f"{type(self.rule).__name__} has no state yet, and a step captured in a CUDA graph must not create it: "
                "make one step with the rule before the capture"
            )
        for name, begins in initial.items():
            numbers = self._initial_numbers(begins, self._numbers.get(name))
            host = torch.tensor(numbers, dtype=like.dtype, pin_memory=like.is_cuda)
            self.tensors[name] = host.to(like.device, non_blocking=True)

    def _initial_numbers(self, begins: Initial, known: Numbers | None) -> float | list[float]:
        if isinstance(begins, PerParameterState):
            own = known if isinstance(known, dict) else {}
            return [own.get(name, begins.value) for name in self.names]
        if known is not None and not isinstance(known, dict):
            return known
        return float(begins) if isinstance(begins, (int, float)) else [float(value) for value in begins]

    # Saving and loading ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's class name and its state as Python numbers, which can be loaded on another mesh or layout.

        Host synchronization: one per state tensor.
        """
        return {"rule": type(self.rule).__name__, "state": self._read_numbers()}

    def _read_numbers(self) -> dict[str, Numbers]:
        initial, found = self.initial, dict(self._numbers)
        for name, tensor in self.tensors.items():
            values = tensor.tolist()
            is_per_parameter = isinstance(initial[name], PerParameterState)
            found[name] = dict(zip(self.names, values, strict=True)) if is_per_parameter else values
        return found

    def check_state(self, saved: Mapping[str, Any] | None) -> None:
        """Raise ValueError unless ``saved`` is None or the result of `state_dict` of any rule."""
        if saved is None:
            return
        fields({"rule": check_text, "state": dict_of(_check_numbers)})(saved, "clip")

    def load_state_dict(self, saved: Mapping[str, Any] | None) -> None:
        """Replace the state by ``saved``, the result of `state_dict` on this or another mesh or layout.

        For a rule without state, nothing is loaded. If ``saved`` is None, belongs to another rule, or has other state
        names or lengths, this method warns, and the state starts from its initial values. It does not warn if the saved
        state is empty, as before the first step. It also warns if a parameter in `names` has no saved value; the state of
        this parameter starts from its initial value.

        Raises:
            ValueError: ``saved`` is not the result of a `state_dict`.
        """
        self.check_state(saved)
        initial, self.tensors, self._numbers = self.initial, {}, {}
        if not initial:
            return
        kind, saved = type(self.rule).__name__, saved or {}
        state = saved.get("state", {})
        fits = state.keys() == initial.keys() and all(_fits(initial[name], state[name]) for name in initial)
        if saved.get("rule") != kind or (state and not fits):
            found = f"is for {saved['rule']} and does not fit" if "rule" in saved else "has no state of a clipping rule"
            warnings.warn(
                f"{kind} keeps {', '.join(sorted(initial))} from step to step, but the loaded state {found}: the rule "
                "starts from the initial values, with its warm-up if it has one",
                stacklevel=2,
            )
            return
        self._numbers = {name: state[name] for name in initial if name in state}
        new = {name for numbers in state.values() if isinstance(numbers, dict) for name in {*self.names} - {*numbers}}
        if new:
            warnings.warn(
                f"the loaded state of {kind} has no values for {some(sorted(new))}; these parameters start from "
                "the initial values",
                stacklevel=2,
            )


def _check_numbers(value: object, field: str) -> None:
    if isinstance(value, list):
        list_of(check_number)(value, field)
    elif isinstance(value, dict):
        dict_of(check_number)(value, field)
    else:
        check_number(value, field)


def _fits(begins: Initial, numbers: Numbers) -> bool:
    """Return True if a saved state has the form of a state whose initial value is ``begins``."""
    if isinstance(begins, PerParameterState):
        return isinstance(numbers, dict)
    if isinstance(begins, (int, float)):
        return isinstance(numbers, (int, float))
    return isinstance(numbers, list) and len(numbers) == len(begins)
