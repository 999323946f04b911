"""A record of the tests that execute each block of the library's code.

`tests/benchmarks/code_mutants.py` and `tests/benchmarks/oldest_sample.py` use it.

`record` writes into each function of a copy of the repository, at the start of each block, an assignment
``_hits[number] = 1``. A block is a list of statements that run one after the other: the body of a function, a branch, a
loop, or the rest of a body after one of these. The hits are bytes of a file that is mapped into the memory of a pytest
process and of all processes that it starts, so that the hits of ranks count too. After each test, the pytest plugin in this
module stores the hits and sets them to zero.

The hits of a fixture that several tests share count for each test that uses it.
"""

from __future__ import annotations

import ast
import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SIZE = 1 << 16  # bytes of the hits, one per block, so also the largest number of blocks
_FUTURE = "from __future__ import annotations"
_COMPOUND = ast.If | ast.For | ast.While | ast.Try | ast.With | ast.Match
_IMPORT = """
try:
    from executed_blocks import hits as _hits
except ImportError:  # a process with another path
    _hits = bytearray({size})
"""


# Instrumentation --------------------------------------------------------------------------------------------------------


def instrumented(text: str, first: int) -> tuple[str, list[tuple[int, int]]]:
    """Return the code of a module that notes the execution of each block, and the lines of each block.

    Blocks get numbers from ``first`` on; blocks within a block follow it. Modules without the line `_FUTURE` have no
    blocks: they contain Triton kernels, which cannot assign to ``_hits``, or no functions.
    """
    lines, blocks, before = text.splitlines(), list[tuple[int, int]](), dict[int, list[int]]()
    if _FUTURE not in lines:
        return text, blocks

    def visit(body: list[ast.stmt]) -> None:
        starts = not (body and lines[body[0].lineno - 1].lstrip().startswith("elif"))
        for statement in body:
            if starts and not _is_text(statement):
                decorators = getattr(statement, "decorator_list", [])
                line = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
                before.setdefault(line, []).append(first + len(blocks))
                blocks.append((line, body[-1].end_lineno or 0))
            starts = (starts and _is_text(statement)) or isinstance(statement, _COMPOUND)
            for name in ("body", "orelse", "finalbody"):
                if isinstance(statement, _COMPOUND):
                    visit(getattr(statement, name, []))
            for inner in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
                visit(inner.body)

    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            visit(node.body)
    after = lines.index(_FUTURE) + 1
    written = []
    for number, line in enumerate(lines, 1):
        indent = line[: len(line) - len(line.lstrip())]
        written += [f"{indent}_hits[{block}] = 1" for block in before.get(number, ())]
        written.append(line)
        if number == after:
            written.append(_IMPORT.format(size=SIZE))
    return "\n".join(written) + "\n", blocks


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


# The record -------------------------------------------------------------------------------------------------------------


def copy_of_repository(folder: Path) -> Path:
    """Copy the library, its tests, pages and examples into ``folder``, and return ``folder``."""
    for name in ("amp", "optim", "parallel", "src", "tests", "docs", "examples"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def record(
    copy: Path, files: Sequence[str], to: Path, processes: int, arguments: Sequence[str] = (), profile: str = "once"
) -> None:
    """Run tests in a copy of the repository, and write which blocks each test executes.

    Tests that read the code, or that compile it to one graph, fail in the copy. Their hits count nevertheless.

    Args:
        copy: The root of the copy. Its files change.
        files: The modules whose blocks are recorded, by their paths in the repository.
        to: The file for `Record`.
        processes: The number of pytest processes.
        arguments: Further arguments of pytest.
        profile: The profile of `tests/conftest.py`, which decides which tests run.
    """
    blocks, count = dict[str, list[tuple[int, int, int]]](), 0
    for file in files:
        text, found = instrumented((copy / file).read_text(), count)
        (copy / file).write_text(text)
        blocks[file] = [(first, last, count + index) for index, (first, last) in enumerate(found)]
        count += len(found)
    if count > SIZE:
        raise ValueError(f"{count} blocks do not fit into {SIZE} bytes: enlarge SIZE")
    folder = copy / "hits"
    folder.mkdir()
    search_path = os.pathsep.join([str(copy / "src"), str(Path(__file__).parent)])
    own = {"PYTHONPATH": search_path, "MESHSTEP_HITS": str(folder), "MESHSTEP_TEST_PROFILE": profile}
    environment = {**os.environ, **own}
    command = [sys.executable, "-m", "pytest", "-q", "-pexecuted_blocks", "-pno:cacheprovider", f"-n{processes}"]
    subprocess.run([*command, *arguments], cwd=copy, env=environment, check=False)
    tests = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    to.write_text(json.dumps({"blocks": blocks, "tests": sorted(tests)}))
    hit = set[int]().union(*(found for _, _, found in tests))
    print(f"blocks: {len(hit)} of {count} executed by {len(tests)} tests")


class Record:
    """The tests that executed each block, from the file that `record` wrote."""

    def __init__(self, path: Path) -> None:
        stored = json.loads(path.read_text())
        self.blocks: dict[str, list[tuple[int, int, int]]] = stored["blocks"]  # per file: first line, last line, number
        self.seconds: dict[str, float] = {name: seconds for name, seconds, _ in stored["tests"]}
        self.hits: dict[str, set[int]] = {name: set(hits) for name, _, hits in stored["tests"]}
        self._tests: dict[int, list[str]] = {}
        for name, hits in self.hits.items():
            for number in hits:
                self._tests.setdefault(number, []).append(name)

    def tests_of(self, file: str, line: int) -> list[str] | None:
        """Return the tests that executed the innermost block with ``line``, sorted by the number of blocks they executed.

        None: no block has the line, because it is executed on import or is part of a Triton kernel.
        """
        around = [number for first, last, number in self.blocks.get(file, ()) if first <= line <= last]
        if not around:
            return None
        return sorted(self._tests.get(around[-1], ()), key=lambda name: len(self.hits[name]))


def without_new_blocks(seconds: dict[str, float], blocks: dict[str, set[int]], limit: float) -> list[str]:
    """Return tests that take over ``limit`` seconds and whose blocks other tests execute too.

    All faster tests stay. Of the others, as many stay as are needed to execute all blocks. The choice is greedy: the next
    test is the one with the most new blocks per second.
    """
    slow = {test for test, taken in seconds.items() if taken > limit}
    executed = set[int]().union(*(found for test, found in blocks.items() if test not in slow))
    missing = set[int]().union(*blocks.values()) - executed
    while missing:
        best = max(sorted(slow), key=lambda test: len(blocks[test] & missing) / seconds[test])
        slow.remove(best)
        missing -= blocks[best]
    return sorted(slow)


# The pytest plugin, which is this module in a process with MESHSTEP_HITS -------------------------------------------------


def _map() -> Any:
    if "MESHSTEP_HITS" not in os.environ:
        return bytearray(SIZE)
    path = Path(os.environ["MESHSTEP_HITS"]) / os.environ.get("PYTEST_XDIST_WORKER", "main")
    if not path.exists():
        path.write_bytes(bytes(SIZE))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), SIZE)


hits = _map()
_of_fixtures: dict[Any, set[int]] = {}


def _take() -> set[int]:
    found = {number for number, hit in enumerate(hits[:]) if hit}
    hits[:] = bytes(SIZE)
    return found


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Iterator[None]:
    """Store the hits of a fixture that several tests share: any fixture whose scope is not "function"."""
    if fixturedef.scope == "function":
        return (yield)
    before = _take()
    try:
        return (yield)
    finally:
        _of_fixtures[fixturedef] = _take()
        for number in before:
            hits[number] = 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[None]:
    """Store the hits of a test, with those of its fixtures."""
    _take()
    start = time.perf_counter()
    try:
        return (yield)
    finally:
        seconds = time.perf_counter() - start
        found = _take()
        for definitions in item._fixtureinfo.name2fixturedefs.values():
            found.update(*(_of_fixtures.get(definition, ()) for definition in definitions))
        folder, worker = Path(os.environ["MESHSTEP_HITS"]), os.environ.get("PYTEST_XDIST_WORKER", "main")
        with (folder / f"{worker}.jsonl").open("a") as file:
            file.write(json.dumps([item.nodeid, round(seconds, 3), sorted(found)]) + "\n")
