"""A proof as a table, for people."""

from __future__ import annotations

import io
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ...parallel.mesh.text import aligned, printable
from .findings import Finding, Proof

_HEADER = ("parameter", "declared", "it is", "what is wrong", "over", "factor")


def report(proof: Proof) -> str:
    """A table of the findings in forward order, each of them in words, and what is right. With rich's lines where it is
    installed."""
    if proof.right:
        return str(proof)
    table = _with_rich if find_spec("rich") else _plain
    return f"{table([_row(finding) for finding in proof.findings])}\n\n{proof}"


def _row(finding: Finding) -> tuple[str, ...]:
    return (
        printable(finding.name),
        "" if finding.declared is None else str(finding.declared),
        "" if finding.inferred is None else str(finding.inferred),
        finding.cause,
        " x ".join(finding.axes),
        "" if finding.factor is None else f"{finding.factor:.4f}",
    )


def _plain(rows: list[tuple[str, ...]]) -> str:
    return "\n".join(aligned([_HEADER, *rows], right={5}))


def _with_rich(rows: list[tuple[str, ...]]) -> str:
    table: Any = import_module("rich.table").Table(*_HEADER)
    table.columns[5].justify = "right"
    text: Any = import_module("rich.text").Text
    for row in rows:
        table.add_row(*map(text, row))
    widest = sum(max(map(len, column)) + 3 for column in zip(_HEADER, *rows, strict=True)) + 1
    written = io.StringIO()
    import_module("rich.console").Console(file=written, width=widest).print(table)
    return written.getvalue().rstrip()
