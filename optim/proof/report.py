"""A proof as a table, for people."""

from __future__ import annotations

import importlib.util
import io

from ...parallel.mesh.text import aligned
from .findings import Finding, Proof

_HEADER = ("parameter", "declared", "it is", "what is wrong", "over", "factor")


def report(proof: Proof) -> str:
    """A table of the findings in forward order, each of them in words, and what is right. With rich's lines where it is
    installed."""
    if proof.right:
        return str(proof)
    table = _with_rich if importlib.util.find_spec("rich") else _plain
    return f"{table([_row(finding) for finding in proof.findings])}\n\n{proof}"


def _row(finding: Finding) -> tuple[str, ...]:
    return (
        finding.name,
        "" if finding.declared is None else str(finding.declared),
        "" if finding.inferred is None else str(finding.inferred),
        finding.cause,
        " x ".join(finding.axes),
        "" if finding.factor is None else f"{finding.factor:.4f}",
    )


def _plain(rows: list[tuple[str, ...]]) -> str:
    return "\n".join(aligned([_HEADER, *rows], right={5}))


def _with_rich(rows: list[tuple[str, ...]]) -> str:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*_HEADER)
    table.columns[5].justify = "right"
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(file=io.StringIO(), width=max(len(" | ".join(row)) for row in (_HEADER, *rows)) * 2)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip()
