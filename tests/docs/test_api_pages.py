"""The API's pages are built by the CI, of all that is public, and a warning fails it."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import meshstep
import pytest

ROOT = Path(__file__).parent.parent.parent


def test_the_ci_builds_them_of_all_that_is_public() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "api.py"))
    assert {f"meshstep.{package}" for package in (*meshstep._PACKAGES, "testing")} == {*script["MODULES"]}
    run = (ROOT / ".ci" / "run").read_text()
    assert re.search(r"^ +\.venv-more/bin/python docs/api\.py ", run, re.MULTILINE)
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    assert re.search(r'^docs = \["pdoc>=', extras, re.MULTILINE)
    assert re.search(r'^dev = \["meshstep\[.*docs.*\]"', extras, re.MULTILINE)


def test_what_annotations_say_can_be_made_at_run_time() -> None:
    """pdoc found that it couldn't."""
    from meshstep.optim import GradStats, ParallelOptimizer

    assert ParallelOptimizer[GradStats].__origin__ is ParallelOptimizer  # type: ignore[attr-defined]


def test_they_are_built_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pdoc is installed: in the CI, and here if you have the extra `docs`."""
    pytest.importorskip("pdoc", reason="needs pdoc (the extra 'docs')")
    monkeypatch.setattr(sys, "argv", ["api.py", str(tmp_path)])
    runpy.run_path(str(ROOT / "docs" / "api.py"), run_name="__main__")
    assert "ParallelOptimizer" in (tmp_path / "meshstep" / "optim.html").read_text()
