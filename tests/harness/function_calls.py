"""Count the function calls within a call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def calls_of(function: Callable[[], object]) -> int:
    """Return the number of calls of functions in Python and C that ``function()`` makes, plus two.

    The two are the calls of ``function`` itself and of `sys.setprofile` after it.
    """
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count
