"""Snippets of pages, and what they print."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any


def blocks(language: str, document: str) -> list[tuple[str, str]]:
    """(text, the text block that follows it directly, or nothing) of all blocks of a language."""
    found = re.findall(r"^```(\w+)\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", document, re.MULTILINE | re.DOTALL)
    return [(text, output) for kind, text, output in found if kind == language]


def languages(document: str) -> set[str]:
    """Of all its blocks; "" of one that has none."""
    return set(re.findall(r"^```(\w*)\n.*?^```$", document, re.MULTILINE | re.DOTALL))


def printed_by(code: str, name: str, namespace: dict[str, Any]) -> str:
    """What it prints; ``namespace`` is its globals."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, name, "exec"), namespace)
    return printed.getvalue()
