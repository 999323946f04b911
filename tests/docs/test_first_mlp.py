"""The tutorial docs/tutorials/FIRST_MLP.md, as one file on 4 ranks: rank 0 prints the text that the page shows.

``python tests/docs/test_first_mlp.py``, with ``tests/harness`` on the path, writes the printed text into the page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshstep.parallel import unshard
from snippets import blocks, printed_by
from world import World

PAGE = Path(__file__).parent.parent.parent / "docs" / "tutorials" / "FIRST_MLP.md"
RANKS = 4


def printed(codes: list[str]) -> tuple[list[str], float]:
    """Return the text that each snippet prints on this rank, and the final distance from the dense weights."""
    session: dict[str, Any] = {"__name__": "my_mlp"}
    try:
        texts = [printed_by(code, "FIRST_MLP.md", session) for code in codes]
        specs, registry = session["specs"], session["registry"]
        dense = dict(session["dense"].named_parameters())
        full = {name: unshard(param, specs[name], registry) for name, param in session["model"].named_parameters()}
        return texts, max(float((full[name] - dense[name]).detach().abs().max()) for name in specs)
    finally:
        if "registry" in session:
            session["registry"].close()


def test_tutorial_snippets_print_the_shown_text_and_match_dense_weights(world: World) -> None:
    codes, shown = zip(*blocks("python", PAGE.read_text()), strict=True)
    by_rank = world.run(RANKS, printed, list(codes))
    assert by_rank[0][0] == list(shown)
    assert max(error for _, error in by_rank) < 1e-6


def test_tutorial_page_quotes_error_bound_and_report_of_wrong_spec() -> None:
    text = PAGE.read_text()
    assert "off by at most 1e-5" in text
    assert "proved: up.weight, up.bias, down.weight, down.bias" in text
    assert (
        "up.bias: declared P(), but each rank of 'tensor' has a different shard; the right spec is P('tensor')" in text
    )


def write() -> None:
    """Write the text that the snippets print now into the page."""
    world, page = World(), PAGE.read_text()
    codes = [code for code, _ in blocks("python", page)]
    texts = world.run(RANKS, printed, codes)[0][0]
    for code, text in zip(codes, texts, strict=True):
        before, _, after = page.partition(code)
        if text:
            shown, _, after = after.partition("```text\n")
            page = f"{before}{code}{shown}```text\n{text}```{after.partition('```')[2]}"
    PAGE.write_text(page)
    world.close()


if __name__ == "__main__":
    write()
