"""``python ARGUMENTS...`` and torchrun, in processes that are forked from the one that the pool's ranks are forked from.

    done = forked_python.run("-m", "meshstep.testing", "audit", "script.py:build", cwd=folder)
    done = forked_python.torchrun(4, "script.py", "--flag")

Importing torch, and the modules that its first optimizer loads, takes six seconds of CPU time per process. The server
process has already imported them; ``meshstep`` and pytest are not shared but imported by the new process. Arguments,
environment, folder, `sys.path` and ``__main__`` are those of a fresh interpreter. Differences from a fresh
interpreter: the hash seed is the server's, environment variables that torch reads on import are the suite's, warnings
on import were given earlier, nothing is torn down at the end, and a `RankPool` forks its ranks from a forked server.
A test that depends on any of these starts a fresh process with `subprocess`.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import io
import multiprocessing
import os
import pickle
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import process, util
from pathlib import Path
from typing import Any, NamedTuple

from world import forkserver

TIMEOUT = 300.0
# Modules to remove: the tested library, pytest and hypothesis (pytest would warn that it cannot rewrite asserts of
# loaded modules), and modules of the suite.
FORGOTTEN = ("meshstep", "pytest", "_pytest", "hypothesis", "_hypothesis", "world", "__mp_main__")


_start_fresh: Callable[..., int] = util.spawnv_passfds


class _Start(NamedTuple):
    """The settings with which a process is started.

    Args:
        path: `sys.path` of a fresh interpreter, without the script's folder.
        printed: The files that receive stdout and stderr. None: those of the parent process.
    """

    arguments: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    path: list[str]
    printed: tuple[str, str] | None


class Forked:
    """A forked process with the methods of `subprocess.Popen`; it runs in a session of its own."""

    def __init__(
        self,
        *arguments: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        processes: int = 0,
        import_first: bool = False,
        fork_children: bool = False,
    ) -> None:
        """Start the process as `run` does, or as `torchrun` does if ``processes`` > 0.

        ``fork_children``: also fork the processes that this one and its children start by `subprocess.Popen` with
        `sys.executable` in a new session, such as the ranks of torchrun. Their output must go to one file, or to that of
        the parent process.
        """
        self.args = arguments
        folder = tempfile.mkdtemp(prefix="forked")
        weakref.finalize(self, shutil.rmtree, folder)
        self._printed = f"{folder}/stdout", f"{folder}/stderr"
        given = dict(os.environ if env is None else env)
        path = _fresh_path(given.get("PYTHONPATH", ""))
        start = _Start(arguments, str(cwd or Path.cwd()), given, path, self._printed)
        self._process = forkserver().Process(target=_forked, args=(start, processes, import_first, fork_children))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        """If the process is still running, kill it and its process group.

        Processes in another process group or session survive.
        """
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.kill()  # the process may not have created its session yet

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        out, err = (path.read_text() if path.exists() else "" for path in map(Path, self._printed))
        return out, err

    def completed(self, timeout: float = TIMEOUT) -> subprocess.CompletedProcess[str]:
        """Wait for the end of the process. Raises TimeoutExpired after killing it."""
        try:
            out, err = self.communicate(timeout)
        except BaseException:
            self.kill()
            raise
        return subprocess.CompletedProcess(self.args, self.wait(), out, err)


def run(
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
    fork_children: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS...``, where the first argument is a script, ``-m`` or ``-c``.

    ``env`` is the complete environment; default: that of this process. After a timeout, the process and its process
    group are killed, and TimeoutExpired is raised. ``fork_children`` as in `Forked`.
    """
    return Forked(*arguments, cwd=cwd, env=env, fork_children=fork_children).completed(timeout)


def torchrun(
    processes: int,
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
    import_first: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a script as `run` does, in processes forked from a torchrun launcher that is forked itself.

    Environment, store and process monitoring are torchrun's own. ``import_first``: import the script in the launcher
    before the processes are forked, so that its imports are executed only once.
    """
    forked = Forked(*arguments, cwd=cwd, env=env, processes=processes, import_first=import_first)
    return forked.completed(timeout)


@functools.cache
def _fresh_path(python_path: str) -> list[str]:
    """Return `sys.path` of a fresh interpreter, without its first entry, which depends on the script's location."""
    fresh = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    code = "import sys; print(*sys.path[1:], sep='\\n')"
    command = [sys.executable, "-c", code]
    return subprocess.check_output(command, env={**fresh, "PYTHONPATH": python_path}, text=True).splitlines()


# In the new process ---------------------------------------------------------------------------------------------------


def _forked(start: _Start, processes: int, import_first: bool, fork_children: bool = False) -> None:
    os.setsid()
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):  # the parent process may handle these signals
        default = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
        signal.signal(signal.Signals[name], default)
    for path, stream in zip(start.printed or (), (sys.stdout, sys.stderr), strict=False):
        stream.flush()
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream.fileno())
        os.close(file)
    os.chdir(start.cwd)
    os.environ.clear()
    os.environ.update(start.env)
    tempfile.tempdir = None
    sys.dont_write_bytecode = bool(start.env.get("PYTHONDONTWRITEBYTECODE"))
    # Processes that this process starts, such as its pool, use ORIGINAL_DIR and a temporary folder; these must not be the
    # server's.
    process.ORIGINAL_DIR = start.cwd  # type: ignore[attr-defined]
    config: dict[str, Any] = vars(multiprocessing.current_process())["_config"]
    config.pop("tempdir", None)
    sys.path[:] = start.path
    _forget_modules()
    gc.freeze()  # objects from before the fork live as long as the process; scanning them would copy their memory pages
    if fork_children:
        _fork_children()
    if processes:
        _launch(processes, start.arguments, import_first)
    else:
        _prepare_server()
        _python(start.arguments)


def _prepare_server() -> None:
    """Fork the server from which a `RankPool` of this program will fork its ranks, before the program runs.

    Otherwise the pool would start the server as a fresh interpreter, which imports torch again.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        try:
            _serve(theirs)
        except SystemExit:
            pass  # the server raises this error after the program has ended
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(0)
    theirs.close()
    prepared = [(ours, pid)]

    def start(path: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
        if "multiprocessing.forkserver" not in arguments[-1] or not prepared:
            return _start_fresh(path, arguments, descriptors)
        connection, server = prepared.pop()
        with connection:
            socket.send_fds(connection, [b"."], descriptors)
            connection.sendall(pickle.dumps((arguments[-1], dict(os.environ), os.getcwd())))
        return server

    util.spawnv_passfds = start  # type: ignore[assignment]  # multiprocessing passes texts, not bytes


def _serve(connection: socket.socket) -> None:
    """Become the server that the program requests. Return if the program ends without a request."""
    received, descriptors, _, _ = socket.recv_fds(connection, 1, 2)
    if not received:
        return
    with connection, connection.makefile("rb") as stream:
        command, environment, cwd = pickle.load(stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, "")
    listener, alive = descriptors
    exec(re.sub(r"main\(\d+, \d+", f"main({listener}, {alive}", command), {})


def _fork_children() -> None:
    """Fork Python processes in new sessions that this process and its children start by `subprocess.Popen`."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    forking = functools.partial(_popen, subprocess.Popen)
    subprocess.Popen = forking  # type: ignore[assignment, misc]
    subprocess_handler.Popen = forking  # type: ignore[assignment, attr-defined]  # starts the ranks of torchrun


def _popen(start: Callable[..., Any], args: Sequence[str], **options: Any) -> Any:
    """Start a process like `subprocess.Popen` (``start``), but fork it if it would run Python in a new session."""
    if args[0] != sys.executable or not options.get("start_new_session"):
        return start(args, **options)
    log = options["stdout"]
    assert options["stderr"] == (None if log is None else subprocess.STDOUT)
    # The flag -u is ignored: the buffered output is written at the end of the child.
    arguments = args[2:] if args[1] == "-u" else args[1:]
    return _ForkedChild(arguments, None if log is None else log.name, options.get("cwd"), options["env"])


class _ForkedChild:
    """A process that is forked from this one, with the methods of `subprocess.Popen` that its user calls."""

    def __init__(self, arguments: Sequence[str], log: str | None, cwd: Path | None, env: dict[str, str]) -> None:
        path, printed = _fresh_path(env.get("PYTHONPATH", "")), None if log is None else (log, log)
        start = _Start(tuple(arguments), str(cwd or Path.cwd()), env, path, printed)
        self._process = multiprocessing.get_context("fork").Process(target=_forked, args=(start, 0, False))
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("forked", timeout or 0.0)
        return self._process.exitcode


def _forget_modules() -> None:
    """Remove modules that a fresh interpreter would not have, or would import from another place."""
    importlib.invalidate_caches()
    for name in [*sys.modules]:
        if name.startswith(FORGOTTEN):
            del sys.modules[name]


def _launch(processes: int, arguments: tuple[str, ...], import_first: bool) -> None:
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    if import_first:
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="imported")
        del sys.path[0]
    standalone = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "of this run"]
    config, _, _ = config_from_args(parse_args([*standalone, "--nproc-per-node", str(processes), "_rank"]))
    config.start_method = "fork"
    elastic_launch(config, _rank)(*arguments)


def _rank(*arguments: str) -> None:
    """Run like a process started by torchrun: unbuffered output, and it ends on the signals that the launcher
    handles."""
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="utf-8", write_through=True)
    for name in ("SIGTERM", "SIGHUP", "SIGQUIT"):
        signal.signal(signal.Signals[name], signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _python(arguments)


def _python(arguments: tuple[str, ...]) -> None:
    """Run the program to its end; afterwards this process only exits with the exit code."""
    if "numpy" in sys.modules:  # a new process seeds numpy at random; forked processes would share one state
        sys.modules["numpy"].random.seed()
    atexit._clear()  # multiprocessing itself does this since Python 3.14
    code: Any = 0
    try:
        _main(*arguments)
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    sys.exit(code)


def _main(first: str, *others: str) -> None:
    if first == "-c":
        sys.argv = ["-c", *others[1:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(others[0], "<string>", "exec"), vars(main))
    elif first == "-m":
        sys.argv = ["-m", *others[1:]]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *others]
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")
