"""The tests of the row cache and of the compiled updates, with loops built with AddressSanitizer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from native_library import SOURCES, compiled, run_tests

READ_BEYOND = """
import torch

x, found = torch.ones(1000), torch.empty(1, dtype=torch.float64)
at, numel = (torch.tensor([number]) for number in (x.data_ptr(), 2000))
loops.powers(1, at.data_ptr(), numel.data_ptr(), 0, 2, found.data_ptr(), 1)
"""  # a negative control


def runtimes() -> str | None:
    """Return the paths of gcc's AddressSanitizer and of the C++ runtime, or None if they are not installed."""
    paths = list[str]()
    for name in ("libasan.so", "libstdc++.so.6"):
        try:
            command = ["gcc", f"-print-file-name={name}"]
            paths.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        except (OSError, subprocess.CalledProcessError):
            return None
    return " ".join(paths) if all(map(os.path.isabs, paths)) else None


@pytest.mark.skipif("MESHSTEP_TEST_ASAN" not in os.environ, reason="takes a minute: MESHSTEP_TEST_ASAN=1 runs it")
@pytest.mark.skipif(runtimes() is None, reason="needs gcc's libasan")
def test_row_cache_and_native_update_have_no_invalid_memory_access(tmp_path: Path) -> None:
    library = compiled(SOURCES / "native.c", tmp_path / "_native_asan.so", "-g", "-fsanitize=address")
    environment = {
        **os.environ,
        "LD_PRELOAD": str(runtimes()),
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0:abort_on_error=0:exitcode=99",
        "OMP_NUM_THREADS": "1",
    }
    control = run_tests(library, environment, before=READ_BEYOND)
    assert control.returncode == 99, control.stderr[-2000:]
    assert "heap-buffer-overflow" in control.stderr
    files = [str(Path(__file__).with_name(name)) for name in ("test_row_cache.py", "test_native_update.py")]
    found = run_tests(library, environment, *files, "-k", "not ranks")
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-4000:]
