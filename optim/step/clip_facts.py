"""The clipping of a step as one number, which all ranks compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor

from ...parallel.mesh.agreement import describe
from ..clip.policies import ByValue
from ..clip.rule import ByNorm, Clip
from .fact_hash import MASK, hash_of

EXPLICIT = "explicit clipping"


class ClipFacts(NamedTuple):
    """The clipping of one step on one rank.

    Args:
        explicit: The rules of the window's explicit clips, in their order.
        rule: The optimizer's own rule, which counts where there is no explicit clip.
        thresholds: ``max_norm`` of each param group; empty where ranks have different groups.
    """

    explicit: tuple[Clip | None, ...] = ()
    rule: Clip | None = None
    thresholds: tuple[object, ...] = ()

    def as_text(self) -> dict[str, str]:
        """Return the facts by name."""
        texts = {EXPLICIT: ", then ".join(map(_call_text, self.explicit)) or "none"}
        if not self.explicit:
            texts["max_norm"] = _rule_text(self.rule)
        return texts | {
            f"max_norm of param group {index}": _threshold_text(value) for index, value in enumerate(self.thresholds)
        }


class UsedClip:
    """The clipping rules and thresholds of this rank; hashed where one was replaced by another.

    Args:
        rule: The optimizer's own rule; None: it does not clip.
        all_groups: Every rank has all param groups. Otherwise their thresholds are left out, because a rank that changes
            one gets an error at once.

    Attributes:
        number: Below 2^`BITS`, equal on ranks that clip alike.
        facts: The parts of ``number``.
    """

    def __init__(self, rule: Clip | None, all_groups: bool) -> None:
        self._all_groups = all_groups
        self._of_explicit = self._of_rule = self._of_thresholds = self.number = 0
        self.facts = ClipFacts()
        self.set_rule(rule)

    def set_rule(self, rule: Clip | None) -> None:
        """Take another rule for the optimizer's own. Host reads: of a threshold that is a tensor."""
        self._of_rule = hash_of("max_norm", _rule_text(rule))
        self.facts, self._is_new = self.facts._replace(rule=rule), True

    def read(self, explicit: tuple[Clip | None, ...], param_groups: Sequence[Mapping[str, Any]]) -> bool:
        """Take the explicit clips of a window and the thresholds of param groups; return whether the facts have changed.

        Host reads: of an explicit threshold that is a tensor.
        """
        before, is_new = self.facts, self._is_new
        if len(explicit) != len(before.explicit) or not all(map(_is_same, explicit, before.explicit)):
            is_new, self._of_explicit = True, hash_of(EXPLICIT, *map(_call_text, explicit))
        thresholds: tuple[object, ...] = before.thresholds
        if self._all_groups:
            thresholds = tuple([group.get("max_norm") for group in param_groups])
            if len(thresholds) != len(before.thresholds) or not all(map(is_, thresholds, before.thresholds)):
                is_new, self._of_thresholds = True, hash_of("max_norm of groups", *map(_threshold_text, thresholds))
        if is_new:
            self.facts, self._is_new = ClipFacts(explicit, before.rule, thresholds), False
            self.number = ((self._of_explicit if explicit else self._of_rule) + self._of_thresholds) & MASK
        return is_new


def _is_same(one: Clip | None, other: Clip | None) -> bool:
    """Return whether two explicit rules are one, or have the same numbers. Host reads: none."""
    if one is other:
        return True
    if not isinstance(one, ByNorm | ByValue) or type(one) is not type(other):
        return False
    pairs = zip(vars(one).values(), vars(other).values(), strict=True)
    return all(mine is known or (type(mine) is type(known) is float and mine == known) for mine, known in pairs)


def _call_text(rule: Clip | None) -> str:
    if isinstance(rule, ByValue):
        return f"clip_grad_by_value({describe(rule.clip_value)})"
    if isinstance(rule, ByNorm):
        norm_type = "" if rule.norm_type is None else f", norm_type={describe(rule.norm_type)}"
        return f"clip_grad_by_norm({describe(rule.max_norm)}{norm_type})"
    return f"by max_norm={_rule_text(rule)}"


def _rule_text(rule: Clip | None) -> str:
    is_plain = isinstance(rule, ByNorm) and rule.norm_type is None
    return describe(rule.max_norm if is_plain else rule)  # type: ignore[union-attr]


def _threshold_text(value: object) -> str:
    is_on_device = isinstance(value, Tensor) and not value.is_cpu
    return "a tensor on a device" if is_on_device else describe(value)
