"""Every entry of docs/reference/ERRORS.md ends in the error that it shows, on as many ranks as it says.

An entry is a heading of the third level, then a Python block (its first line may be ``# on N ranks``), then directly a
text block: the error's type and text, with ``...`` for what is left out.
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
    """What the beginning of the page and then ``code`` raise, as a traceback ends with it."""
    namespace: dict[str, Any] = {"__name__": "troubleshooting"}
    exec(compile(BEGINNING, "the beginning", "exec"), namespace)
    try:
        exec(compile(code, "the entry", "exec"), namespace)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if "registry" in namespace:
            namespace["registry"].close()
    return "no error"


def test_every_entry_is_run() -> None:
    assert [heading for heading, *_ in ENTRY.findall(PAGE)] == re.findall(r"^### (.*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("ranks", "code", "shown"), [entry[1:] for entry in ENTRY.findall(PAGE)], ids=lambda x: None)
def test_the_mistake_gives_the_error_on_every_rank(ranks: str, code: str, shown: str, world: World) -> None:
    assert not dist.is_initialized()
    errors = world.run(int(ranks), error_of, code) if ranks else [error_of(code)]
    pattern = re.escape(shown).replace(re.escape("..."), ".*")
    for error in errors:
        assert re.fullmatch(pattern, error, re.DOTALL), f"{error}\n\nis not\n\n{shown}"
