"""`let_threads_finish` gives threads the interpreter lock at process exit, for example gloo threads that free tensors."""

from __future__ import annotations

import subprocess
import sys

import pytest
from meshstep.parallel import ProcessGroupRegistry, Topology
from meshstep.parallel.mesh import registry as at_exit
from meshstep.parallel.mesh.registry import let_threads_finish
from world import World

# After the script's last line the thread still has work, and the main thread keeps the interpreter lock until exit.
SCRIPT = """
import ast, atexit, sys, threading, time
from functools import cache
# Execute only the function and its constant: the module imports torch, which starts threads of its own.
names = ("def let_threads_finish", "MOMENT =")
source = ast.parse(open(sys.argv[1]).read())
exec("\\n".join(ast.unparse(node) for node in source.body if any(name in ast.unparse(node) for name in names)))
sys.setswitchinterval(100)
go = threading.Lock()
go.acquire()

def work():
    go.acquire()
    print("done", flush=True)

threading.Thread(target=work, daemon=True).start()
if sys.argv[2] == "waits":
    let_threads_finish()
go.release()
"""


@pytest.mark.parametrize(("way", "said"), [("waits", "done\n"), ("does not wait", "")])
def test_daemon_thread_prints_at_exit_only_with_let_threads_finish(way: str, said: str) -> None:
    command = [sys.executable, "-c", SCRIPT, at_exit.__file__, way]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == said


def registered() -> int:
    with ProcessGroupRegistry(Topology(data=2)), ProcessGroupRegistry(Topology(data=2)):
        return let_threads_finish.cache_info().currsize


def test_two_registries_register_one_exit_handler(world: World) -> None:
    assert world.run(2, registered) == [1, 1]
