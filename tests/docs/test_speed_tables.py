"""The benchmark scripts of the speed tables: each runs within seconds at a small size, and prints rows of numbers.

The figures on the pages are of larger models, measured on an idle machine. These runs only show that the scripts work.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from world import World

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "benchmarks"

# Script -> arguments, and the beginnings of the rows whose figures a page quotes.
SMALL: dict[str, list[tuple[str, list[str]]]] = {
    "bits": [("--only overlap", ["overlap: "])],
    "checkpoint": [("--rounds 2 --mib 0.1", ["save", "load"])],
    "code_mutants": [
        ("--listed --random 3 --show", ["faults: "]),
        ("--record /dev/null --processes 0 --tests tests/optim/norm/test_stats.py", ["blocks: "]),
    ],
    "dtensor_clip": [("--counts 10 20 --rounds 1 --torch-limit 10", ["       10 ", "       20 "])],
    "fingerprints": [("--seconds 0.01 --width 16 --clean 0", ["no watch"])],
    "fixed_order": [("--ranks 2 --elements 12000 --rounds 1", ["    2 "])],
    "gram": [
        ("--widths 16 --aspects 1 4 --rounds 1", ["16 x 16 | bfloat16", "16 x 64 | float32"]),
        ("--split --width 16 --matrices 1 --rounds 1", ["homes, on Gram", "summed"]),
    ],
    "host_time": [
        (
            "--rounds 1 --counts 20",
            ["step of 20 parameters: meshstep bf16", "plan of 20 parameters", "ParallelOptimizer of 20", "peers of"],
        )
    ],
    "launches": [("--only Muon --width 16 --layers 1 --most 1", ["Muon"])],
    "memory": [("--ranks 2 --width 8 --depth 2", ["fp32  replicated", "bf16  ZeRO-1", "bf16  ZeRO-2"])],
    "muon": [("--width 16 --layers 1 --rounds 1", ["homes", "duplicated"])],
    "mutants": [("--mutants 1 --right 1 --start 7000", ["right models: 1 proved,", "all"])],
    "overlap": [
        (
            "--ranks 2 --seconds 0 --width 64 --depth 1 --rows 1",
            [
                "DDP, clip_grad_norm_, AdamW",
                "DDP, ParallelOptimizer",
                "ParallelOptimizer(overlap=True)",
                "ParallelOptimizer(overlap=True), bare AdamW",
                "norm and clip add",
            ],
        )
    ],
    "post_validated": [
        ("--numel 0.001 --seconds 0", ["synchronous", "log of at most 64 MiB", "two phases"]),
        ("--check --steps 3", []),
    ],
    "proof": [("10", ["10  none", "10  a spec", "10  a copy_to"])],
    "split_masters": [("--every 8192", ["finite", "all"])],
    "random_cases": [("clip --count 2", ["2 cases from 0"])],
    "step": [
        (
            "--seconds 0 --width 16",
            [
                "bare fused AdamW",
                "meshstep, clipping",
                "bf16, classic chain",
                "bf16, from main grads",
                "meshstep clip_grad_norm_",
            ],
        )
    ],
    "telemetry": [("--seconds 0 --width 16 --every 2", ["no telemetry", "every step", "every=2"])],
    "whole_any": [("--width 8 --layers 1 --rounds 1", ["torch Adafactor"])],
}
ELSEWHERE = {
    "gpu": "test_gpu_suite.py",
    "oldest_sample": "../harness/test_properties.py",
    "peers": "../interop/test_peers_table.py",
    "registers": "test_register_table.py",
    "transfers": "test_transfer_table.py",
}


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Kept:
    """The rank pool of the test suite, which must outlive the script that uses it."""

    def __init__(self, world: World) -> None:
        self.run, self.run_each, self.ranks = world.run, world.run_each, world.ranks

    def close(self) -> None:
        """Keep the pool open."""


@pytest.mark.usefixtures("threads")
@pytest.mark.filterwarnings(
    "ignore:DTensor random operators:UserWarning", "ignore:torch.distributed is dis:UserWarning"
)
@pytest.mark.parametrize(
    ("name", "arguments", "rows"),
    [(name, arguments, rows) for name, runs in SMALL.items() for arguments, rows in runs],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_benchmark_script_prints_its_table(
    name: str,
    arguments: str,
    rows: list[str],
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    script: Any = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(script, "World", lambda: Kept(world), raising=False)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments.split()])
    with pytest.raises(SystemExit) if name in ("fingerprints", "random_cases") else nullcontext() as ended:
        script.main()
    assert ended is None or not ended.value.code
    printed = capfd.readouterr().out
    assert not re.search(r"\b(nan|inf)\b( ms|x|%|$)", printed, re.MULTILINE), printed
    for row in rows:
        assert re.search(rf"^[| `]*{re.escape(row)}.*\d", printed, re.MULTILINE), f"{row!r} is not in:\n{printed}"


def test_benchmark_scripts_find_their_imports() -> None:
    """The test suite has the harness on its path, but a script that is started alone does not."""
    harness = {path.stem for path in (ROOT / "tests" / "harness").glob("*.py")}
    for path in FOLDER.glob("*.py"):
        before, found, after = path.read_text().partition(
            'sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))'
        )
        imported = re.findall(r"^from (\w+) import", after if found else before, re.MULTILINE)
        assert found or not harness & {*imported}, f"{path.name} imports {harness & {*imported}} without their folder"


def test_every_benchmark_script_is_run_and_pages_name_existing_scripts() -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py")}
    assert scripts == {*SMALL, *ELSEWHERE}
    for name, test in ELSEWHERE.items():
        assert name in (Path(__file__).parent / test).read_text()
    pages = [
        path for path in ROOT.rglob("*.md") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    ]
    named = {name for page in pages for name in re.findall(r"tests/benchmarks/(\w+)\.py", page.read_text())}
    assert named <= scripts
    assert {"step", "overlap", "peers", "memory", "muon", "checkpoint"} <= named
