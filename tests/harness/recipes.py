"""Recipes of MIGRATING.md for other trainers: what it says is what the tests run, in processes that torchrun starts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


def recipe(heading: str) -> dict[str, Any]:
    """What the Python blocks of a section of MIGRATING.md define."""
    names: dict[str, Any] = {"__name__": heading}
    for code in _blocks(heading):
        exec(compile(code, f"MIGRATING.md, {heading}", "exec"), names)
    return names


def _blocks(heading: str) -> list[str]:
    _, _, after = (ROOT / "MIGRATING.md").read_text().partition(f"\n### {heading}\n")
    section = re.split(r"^##+ ", after, flags=re.MULTILINE)[0]
    found = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert found, f"MIGRATING.md has no Python under {heading}"
    return found


def torchrun(script: Path, processes: int, *arguments: str) -> str:
    """What ``script`` prints. AssertionError, with all that it said, where it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*command, str(script), *arguments], capture_output=True, text=True, timeout=300, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
