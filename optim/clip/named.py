"""Clip parameters by groups that their names make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isinf

import torch
from torch import Tensor

from ..norm.norms import Norms
from .rule import ByNorm, Clip, Decision, Initial, Threshold

OfGroup = Threshold | Clip | None
"""What is done with a named group: a threshold of its norm, or a rule for it; None or ``math.inf``: nothing."""


@dataclass(frozen=True, init=False)
class ByName(Clip):
    """Named groups of parameters, each clipped by the norm of all of its logical parameters, whoever holds them.

        ByName({"*.experts.*": 0.5, "mtp*": ZClip(), "*.bias": None}, others=1.0)

    ``max_norm={"*.experts.*": 0.5, "mtp*": ZClip()}`` is short for it, without ``others``. No param groups are needed. The
    first pattern that matches a name has it; one that is the first match of no parameter of the model is an error on
    every rank. `GradStats.named_norms` has the norms, ``clip_coef`` the smallest factor.

    Args:
        groups: By glob over names, as `torch.nn.Module.named_parameters` has them: thresholds, or rules of the level
            "total", which take the group's norm for the total, and remember what they remember of each group apart.
        others: The same for the parameters that no pattern matches, all together.
        norm_type: p >= 1, or inf; None: what `Measure` says.
    """

    level = "named"
    groups: tuple[tuple[str, Clip | None], ...]
    others: Clip | None
    norm_type: float | None

    def __init__(self, groups: Mapping[str, OfGroup], others: OfGroup = None, norm_type: float | None = None) -> None:
        made = tuple((pattern, _rule_of(value)) for pattern, value in groups.items())
        for name, value in (("groups", made), ("others", _rule_of(others)), ("norm_type", norm_type)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "patterns", tuple(pattern for pattern, _ in made))

    def check(self) -> None:
        if not self.groups:
            raise ValueError("there is no named group: give a threshold or a rule by pattern, as {'*.experts.*': 0.5}")
        for pattern, rule in self._all:
            if rule is None:
                continue
            where = f"of {pattern!r}" if pattern else "of the others"
            if rule.level != "total" or rule.in_place or rule.weights or rule.norm_type is not None:
                raise ValueError(
                    f"the rule {where} is {rule!r}: give one of the level 'total' that only multiplies, such as ByNorm or "
                    "ZClip, and the norm_type to ByName"
                )
            try:
                rule.check()
            except (TypeError, ValueError) as error:
                raise type(error)(f"{where}: {error}") from error

    @property
    def _all(self) -> tuple[tuple[str, Clip | None], ...]:
        return *self.groups, ("", self.others)  # nothing is matched by an empty pattern

    def initial(self) -> Mapping[str, Initial]:
        rules = ((pattern, rule) for pattern, rule in self._all if rule is not None)
        return {f"{pattern}/{name}": value for pattern, rule in rules for name, value in rule.initial().items()}

    def decide(self, norms: Norms, state: Mapping[str, Tensor]) -> Decision:
        factors, new, skips = list[Tensor](), dict[str, Tensor](), list[Tensor]()
        one = torch.ones_like(norms.total)
        for (pattern, rule), norm in zip(self._all, norms.named.unbind(), strict=True):
            if rule is None:
                factors.append(one)
                continue
            own = {name: state[f"{pattern}/{name}"] for name in rule.initial()}
            decision = rule.decide(norms._replace(total=norm), own)
            factors.append(one if decision.factors is None else decision.factors)
            new |= {f"{pattern}/{name}": value for name, value in decision.state.items()}
            skips += [] if decision.skip is None else [decision.skip]
        return Decision(torch.stack(factors), new, torch.stack(skips).any() if skips else None)


def _rule_of(value: OfGroup) -> Clip | None:
    if value is None or isinstance(value, Clip):
        return value
    return None if isinstance(value, (int, float)) and isinf(value) and value > 0 else ByNorm(value)
