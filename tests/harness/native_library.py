"""Run tests with another build of the compiled loops, in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from meshstep.optim.kernels import native

SOURCES = Path(native.__file__).parent / "csrc"
FLAGS = ("-shared", "-fPIC", "-O1", "-ffp-contract=off", "-Wno-psabi", "-pthread")
PROGRAM = """
import sys
import pytest
from meshstep.optim.kernels import choice, native

library, before, *arguments = sys.argv[1:]
loops = native.Native(library)
exec(before)
native.built = choice._found = lambda: loops
options = ["-n", "0", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
sys.exit(pytest.main([*options, *arguments]))
"""


def compiled(source: Path, library: Path, *flags: str) -> Path:
    """Compile ``source``, a version of native.c, with gcc, and return the path ``library``."""
    subprocess.run(["gcc", *FLAGS, *flags, str(source), "-o", str(library), "-lm"], check=True)
    return library


def run_tests(
    library: Path, environment: Mapping[str, str], *arguments: str, before: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run pytest in a process that uses ``library`` instead of the installed loops, and return the completed process.

    ``before`` is Python code that runs before the tests; ``loops`` in it is the `Native` of the library.
    """
    command = [sys.executable, "-c", PROGRAM, str(library), before, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
