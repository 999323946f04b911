"""Half-precision copies of what is stepped, offered to whoever steps."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(eq=False)
class HalfCopies:
    """Copies that an update may write along with what it steps, instead of a pass of their own.

    Args:
        halves: Of each float32 tensor its copy.

    Attributes:
        written: Those of them that have been written.
    """

    halves: Mapping[Tensor, Tensor]
    written: list[Tensor] = field(default_factory=list)


offered_copies: ContextVar[HalfCopies | None] = ContextVar("half copies", default=None)
"""Else it would be an argument of all calls between, torch's among them."""
