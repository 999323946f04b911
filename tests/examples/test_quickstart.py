"""The quickstart is short, and prints the same numbers on four processes as in one.

docs/test_readme.py checks that the README shows the file, and docs/test_pages.py that it shows the output of one process.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy

from run_example import EXAMPLES
from world import World

QUICKSTART = EXAMPLES / "quickstart.py"
README = (EXAMPLES.parent / "README.md").read_text()


def test_quickstart_has_at_most_40_lines() -> None:
    assert len(QUICKSTART.read_text().splitlines()) <= 40


def run_on_this_rank() -> tuple[str, tuple[int, ...]]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        registry = runpy.run_path(str(QUICKSTART))["registry"]
    registry.close()
    return printed.getvalue(), registry.topology.sizes


def test_quickstart_on_four_processes_prints_the_output_in_the_readme(world: World) -> None:
    said = re.search(r"^```text\n(.*?)^```$", README.partition(QUICKSTART.read_text())[2], re.MULTILINE | re.DOTALL)
    assert said is not None
    assert world.run(4, run_on_this_rank) == [(said[1], (2, 2)), *[("", (2, 2))] * 3]
