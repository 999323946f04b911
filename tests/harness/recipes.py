"""Run the code of the recipes in docs/integrations, and scripts in processes started by torchrun."""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked_python
import meshstep.optim  # noqa: F401  # once, before `torchrun` forks processes: every recipe needs it
from free_ports import free_port
from torch.distributed import TCPStore  # type: ignore[attr-defined]

ROOT = Path(__file__).parent.parent.parent


def recipe(page: str, heading: str | None = None) -> dict[str, Any]:
    """Run the Python blocks of a page of docs/integrations and return the names they define.

    With ``heading``, run the blocks of that section only.
    """
    names: dict[str, Any] = {"__name__": page}
    for code in _blocks(page, heading):
        exec(compile(code, page, "exec"), names)
    return names


def _blocks(page: str, heading: str | None) -> list[str]:
    text = (ROOT / "docs" / "integrations" / page).read_text()
    if heading is not None:
        text = re.split(r"^## ", text.partition(f"\n## {heading}\n")[2], flags=re.MULTILINE)[0]
    found = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, f"docs/integrations/{page} has no Python block under {heading or 'any heading'}"
    return found


def torchrun(script: Path, processes: int, *arguments: str) -> str:
    """Run ``script`` and return its output. If it fails, raise AssertionError with all of its output."""
    done = forked_python.torchrun(processes, str(script), *arguments, cwd=ROOT, import_first=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def in_turn(*parts: Callable[[], None]) -> None:
    """Run the parts one after another, on each rank of a script that `torchrun` started.

    Each part runs in a forked process and so in a new process group, as if it were started alone. Modules that are
    already imported are shared.
    """
    agents = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    # In the store of torchrun's agent, each part would find the addresses of the previous part.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for number, part in enumerate(parts):
        if os.environ["RANK"] == "0":
            agents.set(f"port of part {number}", free_port())
        os.environ["MASTER_PORT"] = agents.get(f"port of part {number}").decode()
        process = mp.get_context("fork").Process(target=part)
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"part {number} ends with {process.exitcode}")
