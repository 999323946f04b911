"""The quickstart is short, what the README shows, and prints the same numbers in one process and on four."""

from __future__ import annotations

import contextlib
import io
import re
import runpy

from run_example import EXAMPLES, run_example
from world import World

QUICKSTART = EXAMPLES / "quickstart.py"
README = (EXAMPLES.parent / "README.md").read_text()


def shown() -> tuple[str, str]:
    """The script and its output in the README, below the section with the diff."""
    _, _, below = README.partition("\n```diff\n")
    section = re.search(r"^## .*?^```python\n(.*?)^```\n\n```text\n(.*?)^```$", below, re.MULTILINE | re.DOTALL)
    assert section is not None
    return section[1], section[2]


def test_it_has_at_most_40_lines() -> None:
    assert len(QUICKSTART.read_text().splitlines()) <= 40


def test_the_readme_shows_it_after_the_diff() -> None:
    assert shown()[0] == QUICKSTART.read_text()


def test_alone_it_prints_what_the_readme_says() -> None:
    assert run_example("quickstart") == shown()[1]


def run_on_this_rank() -> tuple[str, tuple[str, ...]]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        registry = runpy.run_path(str(QUICKSTART))["registry"]
    registry.close()
    return printed.getvalue(), registry.topology.axes


def test_four_processes_print_the_same_on_the_first_one(world: World) -> None:
    results = world.run(4, run_on_this_rank)
    assert [text for text, _ in results] == [shown()[1], "", "", ""]
    assert results[0][1] == ("data", "tensor")
