"""Half-precision copies of what is stepped, offered to whoever steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor


class HalfCopies:
    """Copies that an update may write along with what it steps, instead of a pass of their own.

    Args:
        halves: Of each float32 tensor its copy.

    Attributes:
        written: Those of them that have been written.
    """

    def __init__(self, halves: Mapping[Tensor, Tensor]) -> None:
        self.halves, self.written = halves, list[Tensor]()

    @contextmanager
    def offered(self) -> Iterator[None]:
        """Within, whoever steps may write them."""
        before, _offered[:] = _offered[:], [self]
        try:
            yield
        finally:
            _offered[:] = before


_offered: list[HalfCopies] = []


def offered() -> HalfCopies | None:
    """Those that are offered now."""
    return _offered[0] if _offered else None
