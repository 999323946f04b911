"""A forked ``python`` is as a fresh one: what it is given, what it finds, what it prints and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import forked_python
import pytest
from forked_python import Forked

SEEN = """\
import json, os, sys
import multiprocessing.process
print(json.dumps([__name__, sys.argv, sys.path, os.getcwd(), dict(os.environ), multiprocessing.process.ORIGINAL_DIR,
                  sys.modules["__main__"] is sys.modules[__name__], sys.dont_write_bytecode,
                  [name for name in ("meshstep", "pytest", "hypothesis", "world") if name in sys.modules]]))
"""


@pytest.mark.parametrize("how", [["script.py"], ["-m", "script"], ["-c", SEEN]], ids=lambda how: how[0])
def test_it_sees_what_a_fresh_one_sees(tmp_path: Path, how: list[str]) -> None:
    (tmp_path / "script.py").write_text(SEEN)
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "more"), "OF_THIS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    fresh = subprocess.run([sys.executable, *how, "a", "-b"], cwd=tmp_path, env=env, capture_output=True, text=True)
    found = forked_python.run(*how, "a", "-b", cwd=tmp_path, env=env)
    assert (found.stdout, found.stderr, found.returncode) == (fresh.stdout, fresh.stderr, 0)


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("print(1)", (0, "1\n", "")),
        ("raise SystemExit(3)", (3, "", "")),
        ("raise SystemExit('why')", (1, "", "why\n")),
        ("import atexit; atexit.register(print, 'last'); print('first')", (0, "first\nlast\n", "")),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", (-9, "", "")),
    ],
)
def test_it_ends_as_a_fresh_one(code: str, ended: tuple[int, str, str]) -> None:
    done = forked_python.run("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == ended


def test_an_error_has_its_traceback() -> None:
    done = forked_python.run("-c", "raise ValueError('planted')")
    assert done.returncode == 1
    assert done.stderr.endswith('File "<string>", line 1, in <module>\nValueError: planted\n')


def test_one_that_is_late_is_killed_with_what_it_started(tmp_path: Path) -> None:
    code = "import os, time; pid = os.fork(); open(str(os.getpid()), 'w').close(); time.sleep(600)"
    forked = Forked("-c", code, cwd=tmp_path)
    while len([*tmp_path.iterdir()]) < 2:
        time.sleep(0.05)
    with pytest.raises(subprocess.TimeoutExpired):
        forked.completed(timeout=0.1)
    assert forked.wait() == -9
    for pid in (int(path.name) for path in tmp_path.iterdir()):
        while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
            time.sleep(0.05)
