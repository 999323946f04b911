"""Named groups: logical parameters by glob over their names, whoever holds them and whatever param groups they are in.

named[k]^p = sum of parameters[i]^p over the parameters whose name matches pattern k, and no pattern before it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from ...parallel.mesh.text import some
from .constants import Constants
from .powers import p_norm


def matches(pattern: str, name: str) -> bool:
    """Whether a logical parameter is meant, with or without the stage that makes its name unique."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.partition("@")[0], pattern)


@dataclass(frozen=True)
class Named:
    """The groups that patterns make of all logical parameters of a plan; the last one is what no pattern matches.

    Args:
        groups: For each logical parameter the index of its group: that of the first pattern that matches.
        count: Number of groups, that of the others among them.
    """

    groups: tuple[int, ...]
    count: int

    @classmethod
    def of(cls, names: Sequence[str], patterns: Sequence[str]) -> Named:
        """The groups of the parameters of these ``names``, the same on every rank.

        Raises:
            ValueError: A pattern is the first match of no parameter.
        """
        groups = tuple(
            next((index for index, pattern in enumerate(patterns) if matches(pattern, name)), len(patterns))
            for name in names
        )
        for index, pattern in enumerate(patterns):
            if index not in groups:
                taken = [name for name in names if matches(pattern, name)]
                raise ValueError(
                    f"the pattern {pattern!r} matches {some(taken)}, which earlier patterns have taken: the first match "
                    "wins, so write the narrower pattern first"
                    if taken
                    else f"the pattern {pattern!r} matches no parameter; there are {some(sorted(names))}. Names come from "
                    "declare, or from model.named_parameters(), if the optimizer is made of these"
                )
        return cls(groups, len(patterns) + 1)

    def norms(self, parameters: Tensor, norm_type: float, constants: Constants) -> Tensor:
        """[count]: of each group, from [logical parameters]; 0 of one without parameters. Host reads: none."""
        index = constants(("named", self.groups), lambda: self.groups, torch.int64, parameters.device)
        own = index.unsqueeze(1) == torch.arange(self.count, device=parameters.device)
        return p_norm(torch.where(own, parameters.unsqueeze(1), torch.zeros_like(parameters[:1])), norm_type)
