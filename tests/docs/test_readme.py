"""The README's commands, and the loops in its diff and in docs/integrations, compared with plain torch.

test_pages.py checks what the snippets of all pages print.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from meshstep.parallel import P, ProcessGroupRegistry, Topology, copy_to, reduce_from, shard, unshard
from run_example import example
from snippets import blocks, printed_by
from torch import Tensor, nn
from world import World

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
INTEGRATIONS = ROOT / "docs" / "integrations"
NORMS = (ROOT / "docs" / "explanation" / "NORMS_OF_LAYOUTS.md").read_text()


def test_readme_shows_the_quickstart_after_the_diff() -> None:
    kinds_and_texts = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    after_the_diff = kinds_and_texts[[kind for kind, _ in kinds_and_texts].index("diff") + 1 :]
    shown = [kind_and_text for kind_and_text in after_the_diff if kind_and_text[0] != "bash"]  # skip the commands
    assert shown[0] == ("python", (ROOT / "examples" / "quickstart.py").read_text())


# The commands ---------------------------------------------------------------------------------------------------------


def test_ci_script_finds_train_digits_and_pytest_commands_in_readme() -> None:
    """`.ci/run` executes the lines of the README that begin with `python3 -m venv`."""
    commands = [line for line in README.splitlines() if line.startswith("python3 -m venv ")]
    assert [line + "\n" for line in commands] == [text for text, _ in blocks("bash", README)]
    main_job, tests = commands
    assert "torchrun --standalone --nproc-per-node 4 examples/train_digits.py" in main_job
    assert main_job.endswith("--verify")
    assert tests.endswith("-m pytest")
    assert "grep '^python3 -m venv '" in (ROOT / ".ci" / "run").read_text()


def test_readme_train_digits_command_parses_to_2x2_mesh_with_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    command = next(text for text, _ in blocks("bash", README) if "train_digits" in text)
    words = shlex.split(command)
    monkeypatch.setattr(sys, "argv", words[words.index("examples/train_digits.py") :])
    options = example("train_digits").read_options(4)
    assert options.topology == Topology(row=2, col=2)
    assert options.verify


# Norms that pages state -----------------------------------------------------------------------------------------------


def compare_norms() -> list[tuple[str, float]]:
    script = example("compare_norms")
    options = script.read_options(4, ["--topology", "row=2,col=2"])
    with ProcessGroupRegistry(options.topology) as registry:
        truth = ("dense layer, float64", script.dense_norm(script.layer_input()))
        return [truth, *script.measure(*script.prepare(options, registry))]


def test_norms_page_shows_the_measured_norms(world: World) -> None:
    text = next(text for text, _ in blocks("text", NORMS) if text.startswith("dense layer"))
    rows = [re.fullmatch(r"(.*?) {2,}([\d.]+)( +[-+][\d.]+%)?", line) for line in text.splitlines()]
    printed = {row[1]: float(row[2]) for row in rows if row is not None}
    found = dict(world.run(4, compare_norms)[0])
    assert found == pytest.approx(printed, rel=1e-4)
    truth = found.pop("dense layer, float64")
    assert found.pop("meshstep, bias declared P('col')") == pytest.approx(truth, rel=1e-6)
    assert all(abs(norm / truth - 1) > 0.02 for norm in found.values())


# The change to a training loop ----------------------------------------------------------------------------------------


class HandWritten(nn.Module):
    """Two linear layers sharded over `tensor` (only `down.bias` is replicated), without declared specs."""

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


def sides_of(diff: str) -> tuple[str, str]:
    """Return the code before and after a diff."""
    lines = diff.splitlines()
    before, after = ("\n".join(line[1:] for line in lines if line[:1] in (" ", sign, "")) for sign in "-+")
    return before, after


def sides_of_the_diff() -> tuple[str, str]:
    ((diff, _),) = blocks("diff", README)
    return sides_of(diff)


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(7)
    return [(torch.randn(8, 6, generator=random), 3 * torch.randn(8, 4, generator=random)) for _ in range(steps)]


def dense_model() -> Dense:
    torch.manual_seed(3)
    return Dense()


def run_after() -> tuple[dict[str, Tensor], float]:
    """Run the loop with meshstep on this rank; return the final full parameters and the last clip coefficient."""
    full = {name: param.detach() for name, param in dense_model().named_parameters()}
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        local = [(shard(x, P("data"), registry), shard(y, P("data"), registry)) for x, y in batches(5)]
        namespace: dict[str, Any] = {"batches": local, "build_model": lambda: HandWritten(full, registry)}
        exec(compile(sides_of_the_diff()[1], "README.md", "exec"), namespace)
        model = namespace["model"]
        found = {name: unshard(param, model.specs[name], registry) for name, param in model.named_parameters()}
        namespace["registry"].close()
    return found, float(namespace["stats"].clip_coef)


def test_loop_after_the_readme_diff_trains_like_the_dense_loop(world: World) -> None:
    before, after = sides_of_the_diff()
    assert "meshstep" in after
    assert "meshstep" not in before
    namespace: dict[str, Any] = {"batches": batches(5), "build_model": dense_model}
    exec(compile(before, "README.md", "exec"), namespace)
    for found, clip_coef in world.run(4, run_after):
        assert clip_coef < 1, "the norm should be clipped"
        for name, param in namespace["model"].named_parameters():
            torch.testing.assert_close(found[name], param.detach(), rtol=1e-5, atol=1e-6)


def test_readme_diff_changes_at_most_12_lines() -> None:
    ((diff, _),) = blocks("diff", README)
    assert sum(line.startswith(("+", "-")) and line.strip("+-") != "" for line in diff.splitlines()) <= 12


# Migration from other libraries ---------------------------------------------------------------------------------------


def change_from(page: str, which: int = 0) -> tuple[str, str]:
    """Return the code before and after a diff of a page of docs/integrations."""
    return sides_of(blocks("diff", (INTEGRATIONS / page).read_text())[which][0])


def run_migrated(page: str, axes: dict[str, int], micro_batches: int = 1) -> tuple[dict[str, Tensor], float]:
    """Run the loop of a page on this rank, as changed by the page's diff. Return the final full parameters and the last
    norm."""
    parts = [(x[part::micro_batches], y[part::micro_batches]) for x, y in batches(5) for part in range(micro_batches)]
    with ProcessGroupRegistry(Topology(roles=None, **axes)) as registry:
        namespace: dict[str, Any] = {
            "__name__": "migrated",
            "batches": [(shard(x, P("data"), registry), shard(y, P("data"), registry)) for x, y in parts],
            "build_model": dense_model,
        }
        torch.manual_seed(3)
        exec(compile(change_from(page)[1], page, "exec"), namespace)
        model, optimizer = namespace["model"], namespace["optimizer"]
        optimizer.registry.close()
        specs = HandWritten.specs if "tensor" in axes else {}
        full = {
            name.removeprefix("module."): unshard(param, specs.get(name, P()), registry).float()
            for name, param in model.named_parameters()
        }
        return full, float(optimizer.last_stats.total_norm)


def run_snippets(page: str) -> list[str]:
    """Return the text that each Python block of a page of docs/integrations prints on this rank."""
    session: dict[str, Any] = {"__name__": page}
    try:
        return [printed_by(code, page, session) for code, _ in blocks("python", (INTEGRATIONS / page).read_text())]
    finally:
        if "registry" in session:
            session["registry"].close()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_pytorch_page_snippets_print_the_shown_output(world: World) -> None:
    shown = [output for _, output in blocks("python", (INTEGRATIONS / "PYTORCH.md").read_text())]
    assert world.run(4, run_snippets, "PYTORCH.md")[0] == shown


def run_torch_loop() -> dict[str, Tensor]:
    """Run the loop of PYTORCH.md on this rank on a CPU, without the change of the diff. Return the final full
    parameters."""
    code = change_from("PYTORCH.md")[0].replace('"cuda"', '"cpu"').replace("GradScaler()", 'GradScaler("cpu")')
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        local = [(shard(x, P("data"), registry), shard(y, P("data"), registry)) for x, y in batches(5)]
    namespace: dict[str, Any] = {"batches": local, "build_model": dense_model}
    with mock.patch("torch.distributed.init_process_group"):  # the default group exists already
        exec(compile(code, "PYTORCH.md", "exec"), namespace)
    return {name.removeprefix("module."): param.detach() for name, param in namespace["model"].named_parameters()}


def test_pytorch_page_loop_trains_equally_before_and_after_the_diff(world: World) -> None:
    expected = world.run(2, run_torch_loop)[0]
    start = dict(dense_model().named_parameters())
    for found, norm in world.run(2, run_migrated, "PYTORCH.md", {"data": 2}):
        assert norm > 1.5, "the norm should be clipped"
        for name, value in expected.items():
            assert (value - start[name]).abs().max() > 1e-2
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def plain_torch() -> tuple[dict[str, Tensor], float]:
    """Train in one process in float32; return the final parameters and the last norm."""
    model = dense_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norm = torch.tensor(torch.nan)
    for x, y in batches(5):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}, float(norm)


@pytest.mark.parametrize(
    ("page", "axes", "micro_batches"),
    [("MEGATRON_CORE.md", {"data": 2, "tensor": 2}, 1), ("DEEPSPEED.md", {"data": 2}, 2)],
)
def test_loop_migrated_from_megatron_or_deepspeed_trains_like_plain_torch(
    world: World, page: str, axes: dict[str, int], micro_batches: int
) -> None:
    before, _ = change_from(page)
    compile(before, page, "exec")
    assert "meshstep" not in before
    start = {name: param.detach() for name, param in dense_model().named_parameters()}
    expected, norm = plain_torch()
    assert norm > 1.5, "the norm should be clipped"
    for found, measured in world.run(Topology(roles=None, **axes).world_size, run_migrated, page, axes, micro_batches):
        assert measured == pytest.approx(norm, rel=0.02)
        for name, value in expected.items():
            moved = (value - start[name]).abs().max()
            assert (found[name] - value).abs().max() < 0.15 * moved, name


def run_recipe() -> tuple[dict[str, Tensor], list[float]]:
    """Run the recipe of COLOSSALAI.md on this rank, as changed by the diff. Return the final parameters and learning
    rates."""
    x, y = (torch.cat(part) for part in zip(*batches(5), strict=True))
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    namespace: dict[str, Any] = {
        "__name__": "migrated",
        "dataset": torch.utils.data.TensorDataset(x, y),
        "batch_size": 8 // ranks,
        "build_model": dense_model,
    }
    with mock.patch.dict("sys.modules"):
        exec(compile(change_from("COLOSSALAI.md")[1], "COLOSSALAI.md", "exec"), namespace)
    namespace["booster"].registry.close()
    model = namespace["model"]
    full = {name.removeprefix("module."): param.detach().clone() for name, param in model.named_parameters()}
    return full, [group["lr"] for group in namespace["optimizer"].param_groups]


def test_migrated_colossalai_recipe_trains_like_one_process(world: World) -> None:
    before, after = change_from("COLOSSALAI.md")
    compile(before, "COLOSSALAI.md", "exec")
    loop = before.partition(" = build_model()")[2]
    assert loop == after.partition(" = build_model()")[2], "the diff should change only the imports and the plugin"
    ((expected, rates),) = world.run(1, run_recipe)
    for found, found_rates in world.run(2, run_recipe):
        assert found_rates == rates
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=5e-3, atol=5e-4)


def run_with_a_stand_in_for_deepspeed() -> tuple[list[str], dict[str, Any]]:
    """Return the arguments that DeepSpeed would get: the flagged parameters and the results of the mpu."""
    given: dict[str, Any] = {}

    def initialize(**arguments: Any) -> tuple[Any, ...]:
        given.update(arguments)
        engine = SimpleNamespace(
            module=arguments["model"],
            mpu=arguments["mpu"],
            optimizer=None,
            basic_optimizer=None,
            gradient_clipping=lambda: 1.0,
        )
        return engine, None, None, None

    full = {name: param.detach() for name, param in dense_model().named_parameters()}
    with (
        ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry,
        mock.patch.dict("sys.modules", deepspeed=SimpleNamespace(initialize=initialize)),
    ):
        namespace: dict[str, Any] = {"config": {}, "build_model": lambda: HandWritten(full, registry)}
        exec(compile(change_from("DEEPSPEED.md", 1)[1], "DEEPSPEED.md", "exec"), namespace)
        mpu = given["mpu"]
        answers = {name: getattr(mpu, f"get_{name}")() for name in ("model_parallel_rank", "data_parallel_world_size")}
        namespace["registry"].close()
    return [name for name, param in given["model"].named_parameters() if param.model_parallel], answers


def test_code_on_deepspeed_page_passes_model_parallel_flags_and_mpu(world: World) -> None:
    split = ["up.weight", "up.bias", "down.weight"]
    for rank, (flagged, answers) in enumerate(world.run(4, run_with_a_stand_in_for_deepspeed)):
        assert sorted(flagged) == sorted(split if rank % 2 else [*split, "down.bias"])
        assert answers == {"model_parallel_rank": rank % 2, "data_parallel_world_size": 2}
