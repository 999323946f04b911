"""The clipping thresholds of single param groups, known on ranks that do not have the group too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from .policies import ByGroup, ByValue
from .rule import ByNorm, Clip, checked_threshold


@dataclass(frozen=True)
class AgreedThresholds:
    """``max_norm`` by param group of the whole model. A pipeline stage that has fewer groups clips by the same norms.

    Args:
        values: One for each group; None: the group has no threshold of its own.
        everywhere: All ranks have all groups.
    """

    values: tuple[float | None, ...]
    everywhere: bool

    @cached_property
    def some(self) -> bool:
        """Whether any group has one."""
        return any(value is not None for value in self.values)

    def now(self, param_groups: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """The thresholds, with those of this rank's groups as they are now.

        Raises:
            ValueError: One was changed, of which ranks without the group would not know.
        """
        own = [group.get("max_norm") for group in param_groups]
        if not self.everywhere and own != list(self.values[: len(own)]):
            before = list(self.values[: len(own)])
            raise ValueError(
                f"max_norm of the param groups is {own} and was {before} when the optimizer was made; "
                "other pipeline stages have fewer groups and would clip by the old ones: make the optimizer anew"
            )
        return own + list(self.values[len(own) :])

    def rule(self, clip: Clip | None, param_groups: Sequence[Mapping[str, Any]], norm_type: float) -> Clip | None:
        """``clip``, with the thresholds of single groups in it; raises as `now` and `check_thresholds`.

        Args:
            norm_type: The p of the norms.
        """
        check_thresholds(clip, param_groups)
        thresholds = self.now(param_groups)
        if not any(threshold is not None for threshold in thresholds):
            # The others' norm is made of norms, with their p.
            return replace(clip, norm_type=norm_type) if isinstance(clip, ByGroup) else clip
        others = clip.max_norm if isinstance(clip, ByNorm) else None
        return ByGroup(tuple(thresholds), others, norm_type, clip.clip_value if isinstance(clip, ByValue) else None)


def check_thresholds(clip: Clip | None, param_groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for thresholds of param groups that are out of range, or don't go with the rule."""
    for index, group in enumerate(param_groups):
        if group.get("max_norm") is not None:
            checked_threshold(group["max_norm"], f"max_norm of param group {index}", infinite=True)
            if not isinstance(clip, ByNorm | ByValue | None):
                raise ValueError(
                    f"param group {index} has a max_norm of its own, and max_norm={clip!r} is a rule for all groups; give "
                    "one of them"
                )


def agreed_thresholds(by_rank: Sequence[Sequence[Any]]) -> AgreedThresholds:
    """What all ranks say about the thresholds.

    Args:
        by_rank: The ``max_norm`` of each param group, or None, as each rank has it.
    Raises:
        ValueError: Two say different things about one group.
    """
    longest = max(by_rank, key=len)
    for rank, own in enumerate(by_rank):
        for index, value in enumerate(own):
            if value != longest[index]:
                raise ValueError(
                    f"max_norm of param group {index} is {value} on rank {rank} and {longest[index]} on another: give the "
                    "groups of all ranks the same"
                )
    return AgreedThresholds(tuple(longest), all(len(own) == len(longest) for own in by_rank))
