"""The tests of the row cache with the compiled loops built with AddressSanitizer: no access outside of tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from meshstep.optim.kernels import native

SOURCE = Path(native.__file__).parent / "csrc" / "native.c"
FLAGS = ("-shared", "-fPIC", "-O1", "-g", "-fsanitize=address", "-ffp-contract=off", "-Wno-psabi", "-pthread")
RUN = """
import sys
import pytest
from meshstep.optim.kernels import choice
from meshstep.optim.kernels.native import Native

library, *arguments = sys.argv[1:]
loops = Native(library)
if "beyond" in arguments:  # negative control
    import torch
    x, found = torch.ones(1000), torch.empty(1, dtype=torch.float64)
    at, numel = (torch.tensor([number]) for number in (x.data_ptr(), 2000))
    loops.powers(1, at.data_ptr(), numel.data_ptr(), 0, 2, found.data_ptr(), 1)
choice._found = lambda: loops
sys.exit(pytest.main(["-n", "0", "-W", "ignore::pytest.PytestAssertRewriteWarning", *arguments]))
"""


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


def run(library: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "LD_PRELOAD": str(runtimes()),
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0:abort_on_error=0:exitcode=99",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", RUN, str(library), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.skipif("MESHSTEP_TEST_ASAN" not in os.environ, reason="takes a minute: MESHSTEP_TEST_ASAN=1 runs it")
@pytest.mark.skipif(runtimes() is None, reason="needs gcc's libasan")
def test_row_cache_has_no_invalid_memory_access_under_address_sanitizer(tmp_path: Path) -> None:
    library = tmp_path / "_native_asan.so"
    subprocess.run(["gcc", *FLAGS, str(SOURCE), "-o", str(library), "-lm"], check=True)
    control = run(library, "beyond")
    assert control.returncode == 99, control.stderr[-2000:]
    assert "heap-buffer-overflow" in control.stderr
    files = [str(Path(__file__).with_name(name)) for name in ("test_row_cache.py", "test_native_update.py")]
    found = run(library, *files, "-k", "not ranks")
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-4000:]
