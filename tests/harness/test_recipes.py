"""Tests of the helper that runs the recipes' scripts under torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipes import torchrun

SCRIPT = """\
import os, sys

if __name__ == "__main__":
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "with", sys.argv[1:], flush=True)
    assert os.environ["RANK"] != "1", "planted"
"""


def test_torchrun_passes_arguments_to_ranks_and_reports_their_errors(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with pytest.raises(AssertionError, match=r"(?s)rank 1 of 2 with \['a', '-b'\].*AssertionError: planted"):
        torchrun(script, 2, "a", "-b")
