"""The clipping thresholds of single param groups, known on ranks that do not have the group too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...parallel.mesh.agreement import gather_objects
from ...parallel.mesh.registry import ProcessGroupRegistry


@dataclass(frozen=True)
class AgreedThresholds:
    """``max_norm`` by param group of the whole model. A pipeline stage that has fewer groups clips by the same norms.

    Args:
        values: One for each group; None: the group has no threshold of its own.
        everywhere: All ranks have all groups.
    """

    values: tuple[float | None, ...]
    everywhere: bool

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


def agreed_thresholds(param_groups: Sequence[Mapping[str, Any]], registry: ProcessGroupRegistry) -> AgreedThresholds:
    """What all ranks say about the thresholds.

    Raises:
        ValueError: On every rank: two say different things about one group.
    Collectives: an object all-gather. Host reads: yes.
    """
    by_rank = gather_objects([group.get("max_norm") for group in param_groups], registry)
    longest = max(by_rank, key=len)
    for rank, own in enumerate(by_rank):
        for index, value in enumerate(own):
            if value != longest[index]:
                raise ValueError(
                    f"max_norm of param group {index} is {value} on rank {rank} and {longest[index]} on another: give the "
                    "groups of all ranks the same"
                )
    return AgreedThresholds(tuple(longest), all(len(own) == len(longest) for own in by_rank))
