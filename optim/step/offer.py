"""What a caller offers to whoever steps within: it would else be an argument of all calls between, torch's among them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Offer(Generic[T]):
    """Of one kind of thing; called, it returns the one that is offered now, or None."""

    def __init__(self) -> None:
        self._now: list[T] = []

    def __call__(self) -> T | None:
        return self._now[0] if self._now else None

    @contextmanager
    def of(self, value: T) -> Iterator[None]:
        """Within, ``value`` is offered."""
        before, self._now[:] = self._now[:], [value]
        try:
            yield
        finally:
            self._now[:] = before
