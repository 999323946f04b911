"""`train_digits.py`: the curve of one process on several topologies, and the norms of the dense model.

Two further examples are tested here: `accumulate_norms.py` and `compare_norms.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from meshstep.parallel import ProcessGroupRegistry, Topology
from run_example import example, printed_by_example, read_curve, run_example
from world import World

STEPS = 12
COLUMNS = ("loss", "accuracy", "norm", "clip_coef")
FLAGS = ["--verify", "--steps", str(STEPS), "--depth", "1", "--max-norm", "0.95"]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    path = tmp_path_factory.mktemp("digits") / "one.csv"
    printed = run_example("train_digits", "--curve", str(path), *FLAGS)
    assert "right" in printed
    found = read_curve(path, COLUMNS)
    assert found.shape == (STEPS, 4)
    clipped = int((found[:, 3] < 1).sum())
    assert 0 < clipped < STEPS, "the threshold should clip some steps and not others, or it tests nothing"
    assert found[-1, 0] < found[0, 0] - 0.05, "the model should learn"
    return found


@pytest.mark.parametrize(
    ("topology", "flags"),
    [
        ("row=2,col=2", []),
        ("row=1,col=4", []),  # 10 classes are not divisible by 4
        ("depth=2,row=2,col=2", []),
        ("input=2,weight=2,output=2", []),
        ("data=2,tensor=2", []),
        ("data=2,tensor=2", ["--accumulate", "4", "--zero", "2"]),
    ],
)
def test_digits_example_on_several_topologies_matches_single_process_run(
    world: World, topology: str, flags: list[str], one_process: torch.Tensor, tmp_path: Path
) -> None:
    path = tmp_path / "curve.csv"
    given = ["--curve", str(path), *FLAGS, *flags]
    ranks = Topology.parse(topology).world_size
    printed, *others = world.run(ranks, printed_by_example, "train_digits", given, topology)
    assert "right" in printed
    assert others == [""] * (ranks - 1), "only rank 0 reports"
    torch.testing.assert_close(read_curve(path, COLUMNS), one_process, rtol=2e-5, atol=0)


def test_digits_run_resumes_on_another_topology(world: World, one_process: torch.Tensor, tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    flags = ["--resume", str(tmp_path / "checkpoints"), "--save-every", "5", *FLAGS]
    # The schedule needs the full length, so the first run trains all steps; only its checkpoints (steps 5, 10) are used.
    world.run(1, printed_by_example, "train_digits", flags, "data=1")
    flags += ["--accumulate", "4", "--zero", "2", "--curve", str(path)]
    printed, *_ = world.run(4, printed_by_example, "train_digits", flags, "data=2,tensor=2")
    assert f"{STEPS} steps" in printed
    torch.testing.assert_close(read_curve(path, COLUMNS), one_process, rtol=2e-5, atol=0)


def options(**changes: Any) -> argparse.Namespace:
    """Return the options of a two-step run with `--verify`, changed by ``changes``."""
    given: argparse.Namespace = example("train_digits").read_options(1, [])
    few = {"steps": 2, "batch_size": 32, "lr": 1e-3, "seed": 5, "verify": True}
    return argparse.Namespace(**{**vars(given), **few, **changes})


def test_verify_detects_a_wrong_norm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = example("train_digits")
    full_parameters = script.full_parameters

    def slightly_off(model: torch.nn.Module, registry: ProcessGroupRegistry) -> dict[str, torch.Tensor]:
        return {name: full * 1.0001 for name, full in full_parameters(model, registry).items()}

    for parameters, right in ((full_parameters, True), (slightly_off, False)):
        monkeypatch.setattr(script, "full_parameters", parameters)
        with ProcessGroupRegistry(Topology()) as registry:
            trainer = script.Trainer(options(), registry)
            trainer.run()
            assert script.report(trainer, 1.0) is right
        assert ("right," in capsys.readouterr().out) is right


def test_topology_without_matching_layers_raises() -> None:
    with (
        ProcessGroupRegistry(Topology(expert=1)) as registry,
        pytest.raises(
            ValueError, match=r"no layers support .*expert=1.*tensor, with row and col.*input, weight and output"
        ),
    ):
        example("train_digits").Trainer(options(), registry)


def test_every_epoch_uses_each_sample_once_and_in_another_order() -> None:
    script = example("train_digits")
    samples = script.Samples(torch.zeros(10, 1, 1), torch.arange(10))
    epochs = [[script.batch_at(step, samples, 5, seed=3).labels for step in (2 * e, 2 * e + 1)] for e in range(2)]
    first, second = (torch.cat(batches) for batches in epochs)
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(10))
    assert not torch.equal(first, second)


def test_accumulation_is_exact_with_group_norm_but_not_with_batch_norm() -> None:
    script, registry = example("accumulate_norms"), ProcessGroupRegistry(Topology(data=1))
    for norm in script.NORMS:
        found, expected = (script.train(norm, micro_batches, 5, registry) for micro_batches in (4, 1))
        parameters, gradient = map(script.difference, found, expected)
        if norm == "group norm":
            assert max(parameters, gradient) < 1e-14
        else:
            assert min(parameters, gradient) > 1e-3


def compare_norms(topology: str) -> tuple[float, list[tuple[str, float]]]:
    script, options = example("compare_norms"), argparse.Namespace(topology=Topology.parse(topology))
    with ProcessGroupRegistry(options.topology) as registry:
        return script.dense_norm(script.layer_input()), script.measure(*script.prepare(options, registry))


@pytest.mark.parametrize("topology", ["data=4", "tensor=4", "data=2,tensor=2"])
def test_compare_norms_example_measures_dense_norm_with_meshstep_on_several_topologies(
    world: World, topology: str
) -> None:
    for truth, rows in world.run(4, compare_norms, topology):
        *others, (method, norm) = rows
        assert method.startswith("meshstep, bias declared P(")
        assert norm == pytest.approx(truth, rel=1e-6)
        assert all(other == pytest.approx(truth, rel=1e-6) for _, other in others) == (topology == "data=4")
