"""A forked ``python`` process has the environment, output and exit code of a fresh one, and a timeout kills it with its
children."""

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
def test_forked_process_sees_same_environment_as_fresh_process(tmp_path: Path, how: list[str]) -> None:
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
def test_forked_process_has_expected_exit_code_and_output(code: str, ended: tuple[int, str, str]) -> None:
    done = forked_python.run("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == ended


def test_forked_process_prints_traceback_of_error() -> None:
    done = forked_python.run("-c", "raise ValueError('planted')")
    assert done.returncode == 1
    assert done.stderr.endswith('File "<string>", line 1, in <module>\nValueError: planted\n')


def test_timeout_kills_forked_process_and_its_children(tmp_path: Path) -> None:
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
