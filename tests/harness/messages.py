"""Print every error message of the library for review: `python tests/harness/messages.py`.

The messages are the arguments of all calls in the source that construct an exception. Parts that are only known at run
time stand in braces, as in an f-string.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("parallel", "amp", "optim", "src/meshstep/testing")


class Message(NamedTuple):
    file: str
    line: int
    error: str
    text: str


def text_of(node: ast.expr) -> str:
    """Return the text of a string expression, with its non-constant parts in braces."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "{" + ast.unparse(node.value) + "}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.IfExp):
        return f"<{text_of(node.body)} | {text_of(node.orelse)}>"
    return "{" + ast.unparse(node) + "}"


def is_error(name: str) -> bool:
    found = getattr(builtins, name, None)
    return (isinstance(found, type) and issubclass(found, Exception)) or name.endswith("Error")


def found_in(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield (line, type, text) for each call that constructs an exception with a message."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute) and node.args:
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if is_error(name):
                yield node.lineno, name, " ".join(text_of(argument) for argument in node.args)


@cache
def messages(root: Path = ROOT) -> list[Message]:
    """Return the messages of the whole library, in the order of its files."""
    return [
        Message(str(path.relative_to(root)), *found)
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("*.py"))
        for found in sorted(found_in(ast.parse(path.read_text())))
    ]


def main() -> None:
    for file, line, error, text in messages():
        print(f"{file}:{line} {error}\n    {text}")


if __name__ == "__main__":
    main()
