"""Remove torch's warning about unresolved host names, which appears because conftest.py turns DNS lookups off."""

from __future__ import annotations


def without_names(text: str) -> str:
    """Return the output of a process without torch's warning about unresolved host names."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if "hostname of the client socket cannot be retrieved" not in line)
