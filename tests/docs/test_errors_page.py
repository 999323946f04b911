"""Every example of docs/reference/ERRORS.md raises the error that the page shows, on as many ranks as it says.

An entry has a heading of the third level, its cause and fix, a Python block (its first line may be ``# on N ranks``) and
directly after it a text block: the type and text of the error, with ``...`` for any text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from world import World

PAGE = (Path(__file__).parent.parent.parent / "docs" / "reference" / "ERRORS.md").read_text()
ENTRY = re.compile(r"^### (.*?)\n.*?^```python\n(?:# on (\d+) ranks\n)?(.*?)^```\n\n```text\n(.*?)\n```$", re.M | re.S)
BEGINNING = PAGE.partition("```python\n")[2].partition("```")[0]


def error_of(code: str) -> str:
    """Run the first block of the page and then ``code``, and return the last line of the traceback."""
    namespace: dict[str, Any] = {"__name__": "errors"}
    exec(compile(BEGINNING, "the beginning", "exec"), namespace)
    try:
        exec(compile(code, "the entry", "exec"), namespace)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if "registry" in namespace:
            namespace["registry"].close()
    return "no error"


def test_every_entry_of_errors_page_has_cause_fix_and_example() -> None:
    entries = re.split(r"^##+ ", PAGE, flags=re.MULTILINE)[1:]
    for entry in (text for text in entries if "```" in text):
        assert "* **Cause:**" in entry, entry
        assert "* **Fix:**" in entry, entry
    assert [heading for heading, *_ in ENTRY.findall(PAGE)] == re.findall(r"^### (.*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("ranks", "code", "shown"), [entry[1:] for entry in ENTRY.findall(PAGE)], ids=lambda x: None)
def test_example_of_errors_page_raises_the_shown_error_on_every_rank(
    ranks: str, code: str, shown: str, world: World
) -> None:
    assert not dist.is_initialized()
    errors = world.run(int(ranks), error_of, code) if ranks else [error_of(code)]
    pattern = re.escape(shown).replace(re.escape("..."), ".*")
    for error in errors:
        assert re.fullmatch(pattern, error, re.DOTALL), f"{error}\n\nis not\n\n{shown}"
