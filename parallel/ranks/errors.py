"""What a call on several ranks raises: the tracebacks of all ranks together, each text once."""

from __future__ import annotations

from collections.abc import Mapping

from ..mesh.text import named_ranks


class RanksError(AssertionError):
    """At least one rank raised, died or did not come to an end.

    Args:
        function: What the ranks called, by name.
        world_size: How many were to call it.
        failures: By rank, what was wrong there: a traceback, or where the rank stood.
    """

    def __init__(self, function: str, world_size: int, failures: Mapping[int, str]) -> None:
        self.failures = dict(sorted(failures.items()))
        ranks_of: dict[str, list[int]] = {}
        for rank, text in self.failures.items():
            ranks_of.setdefault(text.strip(), []).append(rank)
        # First those that raised: where others stood is what followed from it.
        causes_first = sorted(ranks_of.items(), key=lambda item: not item[0].startswith("Traceback"))
        told = (f"{named_ranks(ranks)}: {text}" for text, ranks in causes_first)
        count = f"{len(failures)} of {world_size} ranks" if world_size > 1 else "the only rank"
        super().__init__("\n\n".join([f"{count} failed in {function}", *told]))
        self._arguments = function, world_size, self.failures

    def __reduce__(self) -> tuple[type[RanksError], tuple[str, int, dict[int, str]]]:
        """Processes that share tests (pytest-xdist) send errors to each other."""
        return type(self), self._arguments
