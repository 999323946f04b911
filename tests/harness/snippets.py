"""Extract code snippets from pages and run them."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any


def blocks(language: str, document: str) -> list[tuple[str, str]]:
    """Return all code blocks of a language as (text, the text block that directly follows it or "")."""
    found = re.findall(r"^```(\w+)\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", document, re.MULTILINE | re.DOTALL)
    return [(text, output) for kind, text, output in found if kind == language]


def languages(document: str) -> set[str]:
    """Return the languages of all code blocks; "" for a block without a language."""
    return set(re.findall(r"^```(\w*)\n.*?^```$", document, re.MULTILINE | re.DOTALL))


def printed_by(code: str, name: str, namespace: dict[str, Any]) -> str:
    """Run the code with ``namespace`` as its globals, and return its stdout."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, name, "exec"), namespace)
    return printed.getvalue()
