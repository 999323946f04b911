"""The command ``python -m meshstep.testing audit``: output, formats and exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import forked_python
import pytest
from meshstep.optim.proof.command import main, report
from meshstep.optim.proof.prove import Finding, Proof
from meshstep.parallel import P
from meshstep.parallel.ranks.run import ranks_of_this_process
from name_servers import without_names

SCRIPT = """
import torch
from meshstep.parallel import ColumnParallelLinear, P, RowParallelLinear, declare, shard


class Mlp(torch.nn.Module):
    def __init__(self, registry, copied):
        super().__init__()
        torch.manual_seed(1)
        self.up = ColumnParallelLinear(6, 8, registry)
        self.down = RowParallelLinear(8, 4, registry)
        declare(self, copied)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def made(registry, copied):
    model = Mlp(registry, copied)
    batch = shard(torch.randn(4, 6), P("data"), registry)
    return model, lambda model: model(batch).square().mean()


def build(registry):
    return made(registry, {})


def build_wrong(registry):
    return made(registry, {"up.bias": P()})


def build_nothing(registry):
    return None


def build_on_rank_1(registry):
    if registry.global_rank == 1:
        raise KeyError("a file that only rank 1 lacks")
    return build(registry)


NUMBER = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audited")
    (path / "script.py").write_text(SCRIPT)
    (path / "broken.py").write_text("import no_such_thing")
    return path


def launched_audit(processes: int, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return forked_python.torchrun(processes, "-m", "meshstep.testing", "audit", *arguments, cwd=folder)


GRID = ("--topology", "data=2,tensor=2")

Audited = Callable[..., tuple[int, str, str]]


@pytest.fixture
def audited(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Audited]:
    """Return a function that runs the command in this process, and returns the exit code, stdout and stderr."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["audit", *arguments])
        return code, *capsys.readouterr()

    yield run
    sys.modules.pop("script", None)


@pytest.fixture(scope="module", autouse=True)
def _ranks() -> Iterator[None]:
    yield
    ranks_of_this_process().close()


def test_audit_of_correct_model_exits_with_0(audited: Audited) -> None:
    code, printed, told = audited("script.py:build", *GRID)
    assert (code, told) == (0, "")
    assert re.fullmatch(r"4 parameters are right, in \d forwards\n", printed)


def test_audit_reports_wrong_spec_and_exits_with_1(folder: Path) -> None:
    done = forked_python.run("-m", "meshstep.testing", "audit", "script:build_wrong", *GRID, cwd=folder)
    assert (done.returncode, without_names(done.stderr)) == (1, "")
    lines = done.stdout.splitlines()
    assert lines[-2].startswith(
        "up.bias: declared P(), but each rank of 'tensor' has a different shard; the right spec is P('tensor')"
    )
    assert lines[-1].startswith("The other 3 parameters are right")
    (row,) = [line for line in lines if "split, not declared" in line]
    assert [word in row for word in ("up.bias", "P()", "P('tensor')", "tensor")] == [True] * 4


@pytest.mark.long
def test_audit_under_torchrun_prints_findings_as_json(folder: Path) -> None:
    done = launched_audit(4, folder, "script.py:build_wrong", *GRID, "--json")
    assert done.returncode == 1, done.stderr
    values = json.loads(done.stdout)
    (finding,) = values["findings"]
    assert not values["is_correct"]
    assert sorted(values["proved"]) == ["down.bias", "down.weight", "up.weight"]
    named = {key: finding[key] for key in ("name", "module", "declared", "inferred", "cause", "axes")}
    assert named == {
        "name": "up.bias",
        "module": "up",
        "declared": "P()",
        "inferred": "P('tensor')",
        "cause": "split, not declared",
        "axes": ["tensor"],
    }


def test_audit_with_infer_prints_rules_for_declare(audited: Audited) -> None:
    code, printed, told = audited("script.py:build_wrong", *GRID, "--infer")
    assert (code, told) == (0, "")
    assert printed.splitlines()[:2] == ["declare(model, {", "    'up.weight': P('tensor'),"]
    values = json.loads(audited("script.py:build_wrong", *GRID, "--infer", "--json")[1])
    (rules,) = values["rules"]
    assert rules["ranks"] == [0, 1, 2, 3]
    assert rules["declare"]["up.bias"] == "P('tensor')"
    assert values["proof"]["is_correct"]


@pytest.mark.default_cases(99)  # all cases: unlike other tests of this file, these start no process
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("script.py", *GRID), "'script.py' is not SCRIPT:BUILD; give a file or module and a function"),
        (("none.py:build", *GRID), "there is no file none.py"),
        (("none:build", *GRID), "there is no module none; the name of a file must end in .py"),
        (
            ("broken.py:build", *GRID),
            "broken.py can't be imported: ModuleNotFoundError: No module named 'no_such_thing'",
        ),
        (("script.py:bild", *GRID), "script.py has no function bild; it has declare, shard, made, build, build_wrong"),
        (("script.py:NUMBER", *GRID), "script.py has no function NUMBER"),
        (("script.py:build_nothing", *GRID), "returned NoneType; return (model, loss_fn)"),
        (("script.py:build_on_rank_1", "--topology", "tensor=2"), "KeyError: 'a file that only rank 1 lacks'"),
        (("script.py:build", "--topology", "tensor"), "'tensor' is neither axis=size nor alias=axis+axis"),
        (("script.py:build",), "the following arguments are required: --topology"),
    ],
)
def test_audit_with_invalid_arguments_exits_with_2(audited: Audited, arguments: tuple[str, ...], told: str) -> None:
    code, printed, error = audited(*arguments)
    assert (code, printed) == (2, "")
    assert told in error


def test_audit_with_wrong_number_of_processes_exits_with_error(folder: Path) -> None:
    done = launched_audit(2, folder, "script.py:build", *GRID)
    assert done.returncode != 0
    told = (
        "--topology data=2,tensor=2 has 4 ranks, but the launcher started 2 processes; "
        "launch 4, or start without a launcher"
    )
    assert done.stderr.count(told) == 1


def test_audit_report_with_rich_starts_with_table_of_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich", reason="needs rich (the extra `testing`)")
    finding = Finding("up.bias", "up", P(), P("tensor"), "counted several times", ("tensor",), 2.0, "words [bold]")
    proof = Proof((), (), (finding,), None, 3)
    table, _, text = report(proof).partition("\n\n")
    for word in ("parameter", "up.bias", "P()", "P('tensor')", "counted several times", "2.0000"):
        assert word in table
    assert text == str(proof)
