"""Every snippet of the README runs and prints what it says it prints; its commands are those of the CI."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from meshstep.parallel import P, ProcessGroupRegistry, Topology
from meshstep.parallel.__main__ import main as print_topology
from meshstep.parallel.collectives import copy_to, reduce_from
from meshstep.parallel.layout import shard, unshard
from test_examples import example
from torch import Tensor, nn
from world import World

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
# [(language, text, the text block that follows it directly or None)]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", README, re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[str, str]]:
    return [(text, output) for kind, text, output in BLOCKS if kind == language]


@pytest.mark.parametrize(("code", "output"), blocks("python"), ids=lambda text: text.split("\n")[0])
def test_python(code: str, output: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert printed.getvalue() == output


def test_console(capsys: pytest.CaptureFixture[str]) -> None:
    ((text, _),) = blocks("console")
    command, _, output = text.partition("\n")
    prefix = "$ python -m meshstep.parallel "
    assert command.startswith(prefix)
    print_topology(command.removeprefix(prefix).split())
    assert capsys.readouterr().out == output


# The commands ---------------------------------------------------------------------------------------------------------


def test_the_ci_finds_the_two_commands() -> None:
    """.ci/run takes them from here: the lines that make a virtual environment."""
    commands = [line for line in README.splitlines() if line.startswith("python3 -m venv ")]
    assert [line + "\n" for line in commands] == [text for text, _ in blocks("bash")]
    main_job, tests = commands
    assert "torchrun --standalone --nproc-per-node 4 examples/train_digits.py" in main_job
    assert main_job.endswith("--verify")
    assert tests.endswith("-m pytest")
    assert "grep '^python3 -m venv '" in (ROOT / ".ci" / "run").read_text()


def test_the_flags_of_the_main_job_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    command = next(text for text, _ in blocks("bash") if "train_digits" in text)
    words = shlex.split(command)
    monkeypatch.setattr(sys, "argv", words[words.index("examples/train_digits.py") :])
    options = example("train_digits").parse_options()
    assert options.topology == Topology(row=2, col=2)
    assert options.verify


def test_files_that_it_names_exist() -> None:
    for name in re.findall(r"\b(?:examples|tests)/[\w/.]+\w", README):
        assert (ROOT / name).exists(), name


# The figures ----------------------------------------------------------------------------------------------------------


def compare_norms() -> list[tuple[str, float]]:
    script = example("compare_norms")
    with ProcessGroupRegistry(Topology(row=2, col=2)) as registry:
        input = script.layer_input()
        return [("dense layer, float64", script.dense_norm(input)), *script.measure(input, registry)]


def test_the_norms_are_as_printed(world: World) -> None:
    text = next(text for text, _ in blocks("text") if text.startswith("dense layer"))
    rows = [re.fullmatch(r"(.*?) {2,}([\d.]+)( +[-+][\d.]+%)?", line) for line in text.splitlines()]
    printed = {row[1]: float(row[2]) for row in rows if row is not None}
    found = dict(world.run(4, compare_norms)[0])
    assert found == pytest.approx(printed, rel=1e-4)
    truth = found.pop("dense layer, float64")
    assert found.pop("meshstep, bias declared P('col')") == pytest.approx(truth, rel=1e-6)
    assert all(abs(norm / truth - 1) > 0.02 for norm in found.values())


# The change to a training loop ----------------------------------------------------------------------------------------


class HandWritten(nn.Module):
    """Two linear layers, split over `tensor` by hand: it declares nothing."""

    specs: Mapping[str, P] = {
        "up.weight": P("tensor"),
        "up.bias": P("tensor"),
        "down.weight": P(None, "tensor"),
        "down.bias": P(),
    }

    def __init__(self, full: dict[str, Tensor], registry: ProcessGroupRegistry) -> None:
        super().__init__()
        local = {name: shard(full[name], spec, registry) for name, spec in self.specs.items()}
        self.registry = registry
        self.up = nn.ParameterDict({"weight": local["up.weight"], "bias": local["up.bias"]})
        self.down = nn.ParameterDict({"weight": local["down.weight"], "bias": local["down.bias"]})

    def forward(self, input: Tensor) -> Tensor:
        hidden = nn.functional.linear(copy_to(input, self.registry, "tensor"), self.up["weight"], self.up["bias"])
        output = nn.functional.linear(torch.tanh(hidden), self.down["weight"])
        total: Tensor = reduce_from(output, self.registry, "tensor") + self.down["bias"]
        return total


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.down(torch.tanh(self.up(input)))
        return output


def sides_of_the_diff() -> tuple[str, str]:
    ((diff, _),) = blocks("diff")
    lines = diff.splitlines()
    return tuple("\n".join(line[1:] for line in lines if line[:1] in (" ", sign, "")) for sign in "-+")  # type: ignore[return-value]


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(7)
    return [(torch.randn(8, 6, generator=random), 3 * torch.randn(8, 4, generator=random)) for _ in range(steps)]


def dense_model() -> Dense:
    torch.manual_seed(3)
    return Dense()


def run_after() -> tuple[dict[str, Tensor], float]:
    """The loop with meshstep, on this rank: full parameters at the end, and the last clip coefficient."""
    full = {name: param.detach() for name, param in dense_model().named_parameters()}
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        local = [(shard(x, P("data"), registry), shard(y, P("data"), registry)) for x, y in batches(5)]
        namespace: dict[str, Any] = {"batches": local, "build_model": lambda: HandWritten(full, registry)}
        exec(compile(sides_of_the_diff()[1], "README.md", "exec"), namespace)
        model = namespace["model"]
        found = {name: unshard(param, model.specs[name], registry) for name, param in model.named_parameters()}
        namespace["registry"].close()
    return found, float(namespace["stats"].clip_coef)


def test_the_loop_after_the_change_trains_as_the_dense_one_before(world: World) -> None:
    before, after = sides_of_the_diff()
    assert "meshstep" in after
    assert "meshstep" not in before
    namespace: dict[str, Any] = {"batches": batches(5), "build_model": dense_model}
    exec(compile(before, "README.md", "exec"), namespace)
    for found, clip_coef in world.run(4, run_after):
        assert clip_coef < 1, "it should clip"
        for name, param in namespace["model"].named_parameters():
            torch.testing.assert_close(found[name], param.detach(), rtol=1e-5, atol=1e-6)


def test_the_diff_is_short() -> None:
    ((diff, _),) = blocks("diff")
    assert sum(line.startswith(("+", "-")) and line.strip("+-") != "" for line in diff.splitlines()) <= 12
