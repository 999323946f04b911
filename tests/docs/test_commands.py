"""``python -m meshstep`` lists the commands of the packages and runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import forked_python
import pytest
from meshstep.__main__ import COMMANDS

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "meshstep", *arguments], capture_output=True, text=True)


def test_help_lists_every_package_with_a_command() -> None:
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    folders = [ROOT, ROOT / "src" / "meshstep"]
    packages = {path.parent.name for folder in folders for path in folder.glob("[a-z]*/__main__.py")}
    assert packages == {*COMMANDS}
    for name in COMMANDS:
        assert f"python -m meshstep.{name}" in " ".join(done.stdout.split())


@pytest.mark.parametrize("arguments", [(), ("report",)])
def test_missing_or_unknown_command_fails_and_prints_the_usage(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: python -m meshstep")
    assert "COMMAND" in done.stderr


def test_python_m_meshstep_passes_arguments_to_the_package_command() -> None:
    done = forked_python.run("-m", "meshstep", "parallel", "data=2", "row=2", "--rank", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "data" in done.stdout
    done = forked_python.run("-m", "meshstep", "parallel", "--help")
    assert done.stdout.startswith("usage: python -m meshstep.parallel")
    assert forked_python.run("-m", "meshstep", "optim", "report", "nowhere.jsonl").returncode == 2
