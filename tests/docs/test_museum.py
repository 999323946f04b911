"""Every example ("exhibit") of docs/explanation/MUSEUM.md prints the shown text, on the stated number of ranks.

An exhibit is a heading of the third level with a Python block, whose first line is ``# on N ranks``, and directly below it
the text that rank 0 prints. ``python tests/docs/test_museum.py``, with ``tests/harness`` on the path, updates that text.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
from meshstep.optim.proof.prove import prove
from meshstep.parallel import P, ProcessGroupRegistry, declare
from proof_models import Drawn, build
from world import World

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "explanation" / "MUSEUM.md"
EXHIBIT = re.compile(r"^### (.*?)\n(.*?^```python\n# on (\d+) ranks\n(.*?)^```\n\n)```text\n(.*?)^```$", re.M | re.S)
NORMS = re.compile(r"norm ([\d.]+), right: ([\d.]+) ")


def printed_by(beginning: str, code: str) -> str:
    """Return the text that the first snippet of the page and then an exhibit print on this rank."""
    namespace: dict[str, Any] = {"__name__": "museum"}
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(beginning, "the beginning", "exec"), namespace)
            exec(compile(code, "the exhibit", "exec"), namespace)
    finally:
        if "registry" in namespace:
            namespace["registry"].close()
    return printed.getvalue()


def beginning_of(page: str) -> str:
    return page.partition("```python\n")[2].partition("```")[0]


def test_every_heading_of_museum_md_has_an_example() -> None:
    page = PAGE.read_text()
    assert [found[0] for found in EXHIBIT.findall(page)] == re.findall(r"^### (.*)$", page, re.MULTILINE)


@pytest.mark.parametrize(
    ("ranks", "code", "shown"),
    [(int(found[2]), found[3], found[4]) for found in EXHIBIT.findall(PAGE.read_text())],
    ids=[found[0] for found in EXHIBIT.findall(PAGE.read_text())],
)
def test_museum_page_example_has_wrong_norm_and_prints_the_shown_findings(
    ranks: int, code: str, shown: str, world: World
) -> None:
    first, *others = world.run(ranks, printed_by, beginning_of(PAGE.read_text()), code)
    assert first == shown
    for wrong, right in NORMS.findall(first):
        assert abs(float(wrong) / float(right) - 1) > 1e-3
    proofs = [NORMS.sub("", text) for text in (first, *others)]
    assert len({re.sub(r"\(.*?%\)", "", proof) for proof in proofs}) == 1, "ranks print different findings"
    assert " wrong:\n" in first


def test_verify_page_shows_an_example_of_the_museum_page() -> None:
    page = (ROOT / "docs" / "howto" / "VERIFY_A_LAYOUT.md").read_text()
    before, _, after = page.partition("## A wrong layout\n")[2].partition("```text\n")
    assert "MUSEUM.md" in before
    (shown,) = [found for found in EXHIBIT.findall(PAGE.read_text()) if after.partition("```")[0] in found[4]]
    ((wrong, right),) = NORMS.findall(shown[4])
    assert f"clipped by a norm {1 - float(wrong) / float(right):.1%} too small" in " ".join(before.split())


def untied_table() -> tuple[bool, bool]:
    """Return whether `prove` accepts an embedding on both pipeline stages, declared as tied and as not tied."""
    drawn = Drawn("pipe", (("pipe", 2),), width=8, depth=1, dropout=0.0, tied=True, trained=True, seed=1)
    with ProcessGroupRegistry(drawn.topology) as registry:
        model, loss_fn = build(drawn, registry)
        tied = prove(model, loss_fn, registry).is_correct
        declare(model, {"table": P()})
        return tied, prove(model, loss_fn, registry).is_correct


def test_prove_cannot_detect_an_undeclared_tied_parameter(world: World) -> None:
    assert world.run(2, untied_table) == [(True, True)] * 2


def write() -> None:
    world, page = World(), PAGE.read_text()
    for _, before, ranks, code, shown in EXHIBIT.findall(page):
        found = world.run(int(ranks), printed_by, beginning_of(page), code)[0]
        page = page.replace(f"{before}```text\n{shown}```", f"{before}```text\n{found}```")
    PAGE.write_text(page)
    world.close()


if __name__ == "__main__":
    write()
