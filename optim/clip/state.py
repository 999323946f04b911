"""What a rule remembers: named tensors of the same bits on every rank, kept in place, saved as numbers under names."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...amp.capture import is_captured, keeps_state_in_place
from ...parallel.mesh.plain_values import check_number, check_text, dict_of, fields, list_of
from ...parallel.mesh.text import some
from ..norm.norms import Norms
from .rule import Clip, Decision, Initial, OfEachParameter

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
