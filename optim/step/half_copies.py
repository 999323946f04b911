"""Half-precision copies of what is stepped, offered to whoever steps."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .offer import Offer


class HalfCopies:
    """Copies that an update may write along with what it steps, instead of a pass of their own.

    Args:
        halves: Of each float32 tensor its copy.

    Attributes:
        written: Those of them that have been written.
    """

    def __init__(self, halves: Mapping[Tensor, Tensor]) -> None:
        self.halves, self.written = halves, list[Tensor]()


offered = Offer[HalfCopies]()
