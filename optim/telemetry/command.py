"""``python -m meshstep.optim report run.jsonl [-o report.html]``: the curves of a run as one page."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ...parallel.mesh.text import printable
from .json_lines import read_json_lines
from .page import page


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and return the exit code: 0, or 2 where the file is none of `JsonLines`, with a message on stderr."""
    parser = argparse.ArgumentParser(prog="python -m meshstep.optim", description="Looks at training runs.")
    report = parser.add_subparsers(required=True, metavar="report").add_parser(
        "report",
        help="the curves of a run as one page of HTML",
        description="Write one page with the curves of a run: it needs no network, and shows values under the pointer.",
        epilog="example: python -m meshstep.optim report run.jsonl -o report.html",
        allow_abbrev=False,
    )
    report.add_argument("run", metavar="RUN.jsonl", type=Path, help="what JsonLines has written")
    report.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="default: beside the run, its name with .html"
    )
    report.add_argument("--title", help="default: the file's name")
    options = parser.parse_args(arguments)
    output: Path = options.output or options.run.with_suffix(".html")
    # In an ASCII locale Python reads other bytes as lone surrogates, which no encoding writes.
    title = os.fsencode(options.title or options.run.stem).decode("utf-8", "replace")
    try:
        reports = read_json_lines(options.run)
        if not reports:
            raise ValueError(f"{options.run} has no report yet")
        output.write_bytes(page(title, reports).encode())
    except (OSError, ValueError) as error:
        print(f"{parser.prog} report: error: {printable(str(error))}", file=sys.stderr)
        return 2
    print(f"{printable(str(output))}: {len(reports)} reports, to step {reports[-1]['step']:,.0f}")
    return 0
