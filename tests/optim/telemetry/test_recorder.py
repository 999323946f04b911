"""`Recorder`: its file, its collectives, the digests of shards, and the command that compares two files."""

from __future__ import annotations

import json
from collections import Counter
from math import sqrt
from pathlib import Path
from typing import Any

import forked_python
import pytest
import torch
from dense import collectives
from meshstep.optim import ParallelOptimizer, Recorder, Telemetry, Tolerances, compare_runs
from meshstep.optim.__main__ import main
from meshstep.optim.telemetry import tensor_digest
from meshstep.optim.telemetry.recording import read_recording
from meshstep.optim.telemetry.tensor_digest import Digests, digest, hash_words, joined_hash, row_hashes
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from meshstep.parallel.layout.shard import Region
from planted import LAYOUTS, Layout, Planted, run_step
from probes import no_host_reads
from torch import Tensor, nn
from world import World

CPU = torch.device("cpu")

# Digests --------------------------------------------------------------------------------------------------------------


def whole(shape: tuple[int, ...]) -> Region:
    return Region(shape, tuple(((0, length),) for length in shape), 0, torch.Size(shape).numel())


def combined(found: Digests) -> tuple[str, Tensor]:
    """Return the digest of a full tensor from the digests of its shards."""
    return joined_hash(hash_words(found.hashes).sum(0).tolist()), found.sketches.sum(0)


SHARDINGS = [
    (P("tensor"), {"tensor": 4}),
    (P(None, "tensor"), {"tensor": 3}),
    (P("row", "col"), {"row": 2, "col": 2}),
    (P(("col", "row")), {"row": 2, "col": 3}),
    (P("tensor", None, "col"), {"tensor": 5, "col": 2}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("spec", "axes"), SHARDINGS)
def test_digest_of_tensor_is_equal_for_several_shardings(
    spec: P, axes: dict[str, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = torch.randn(10, 6, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected_hash, expected_sketch = combined(digest([full], [whole((10, 6, 4))], CPU))
    monkeypatch.setattr(tensor_digest, "CHUNK", 7)
    topology, shards, regions = Topology(roles=None, **axes), [], []
    for rank in range(topology.world_size):
        coordinate = topology.coordinate(rank)
        spans = tuple(spec.spans(dim, length, topology, coordinate) for dim, length in enumerate(full.shape))
        region = Region(tuple(full.shape), spans, 0, torch.Size(sum(n for _, n in dim) for dim in spans).numel())
        flat = region.of(full).flatten()
        middle = len(flat) // 3  # two contiguous parts of the flattened shard, as with ZeRO-1
        shards += [flat[:middle], flat[middle:]]
        regions += [region.run(0, middle), region.run(middle, len(flat) - middle)]
    found_hash, found_sketch = combined(digest(shards, regions, CPU))
    assert found_hash == expected_hash
    torch.testing.assert_close(found_sketch, expected_sketch)


def test_tensor_digest_hash_changes_with_one_changed_or_two_swapped_elements() -> None:
    full, region = torch.randn(40, 5), whole((40, 5))
    expected = combined(digest([full], [region], CPU))[0]
    for change in range(50):
        other = full.clone()
        if change % 2:
            other.view(-1)[change * 3] = torch.nextafter(other.view(-1)[change * 3], torch.tensor(9.0))
        else:
            other.view(-1)[[change, change + 1]] = other.view(-1)[[change + 1, change]]
        assert combined(digest([other], [region], CPU))[0] != expected


def test_distance_of_sketches_estimates_distance_of_tensors() -> None:
    ratios = []
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        a, b = torch.randn(2, 30, 20, generator=generator, dtype=torch.float64)
        found = digest([a, a + 1e-3 * b], [whole((30, 20))] * 2, CPU).sketches
        ratios.append(float((found[0] - found[1]).norm() / (1e-3 * b.norm())))
    assert 0.95 < sqrt(sum(ratio**2 for ratio in ratios) / len(ratios)) < 1.05
    assert min(ratios) > 0.3
    assert max(ratios) < 1.8


def test_tensor_digest_applies_scale_and_omits_shards_without_tensor_or_region() -> None:
    full, region = torch.randn(6, 5), whole((6, 5))
    found = digest([full * 1024, None, full], [region, region, None], CPU, torch.tensor(1 / 1024))
    expected = digest([full], [region], CPU)
    assert found.hashes.tolist() == [int(expected.hashes), 0, 0]
    torch.testing.assert_close(found.sketches[0], expected.sketches[0])
    assert not found.sketches[1:].any()


def test_hash_of_batch_ignores_order_and_grouping_of_samples() -> None:
    x, y = torch.randn(8, 3), torch.arange(8)
    expected = int(row_hashes((x, y)))
    order = torch.randperm(8)
    assert int(row_hashes((x[order], y[order]))) == expected
    for split in (3, 0):  # 0: one of the parts has no samples
        parts = row_hashes((x[:split], y[:split])) + row_hashes((x[split:], y[split:]))
        assert int(parts) == expected
    assert int(row_hashes((x, y.flip(0)))) != expected
    with pytest.raises(ValueError, match="was given no tensor; give"):
        row_hashes(())


# Recorded steps -------------------------------------------------------------------------------------------------------


def counted_steps(layout: Layout, path: Path) -> list[Counter[str]]:
    """Return which collectives four steps add to those of a plain step; the second and fourth are recorded."""
    with ProcessGroupRegistry(layout.topology) as registry:
        model = Planted(layout, registry.global_rank)
        sgd = torch.optim.SGD(model.named_parameters(), lr=0.25, fused=True)
        optimizer = ParallelOptimizer(sgd, registry, max_norm=1.0)
        counts: list[Counter[str]] = []
        for step in range(6):
            if step == 2:
                recorder = Recorder(optimizer, path, every=2)
                recorder.load_state_dict({"step": 10})
            run_step(model, optimizer, step)
            if step > 1:
                recorder.flush()  # reads the numbers of the last recorded step
            with collectives() as seen, no_host_reads() if step > 1 else collectives():
                optimizer.step()
            counts.append(seen)
        recorder.close()
        assert recorder.step == 14
        return [count - counts[1] for count in counts[2:]]


def test_recorded_step_adds_one_collective_and_no_host_synchronization(world: World, tmp_path: Path) -> None:
    layout = LAYOUTS["data x tensor"]
    for counts in world.run(layout.topology.world_size, counted_steps, layout, tmp_path / "run.jsonl"):
        assert [sum(count.values()) for count in counts] == [0, 1, 0, 1]
    assert [*read_recording(tmp_path / "run.jsonl")] == [12, 14]


def recorded_beside_telemetry(layout: Layout, path: Path) -> list[dict[str, float]]:
    with ProcessGroupRegistry(layout.topology) as registry:
        model = Planted(layout, registry.global_rank, torch.float64)
        optimizer = ParallelOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.25), registry, max_norm=1.0)
        telemetry, found = Telemetry(optimizer, every=1, by="parameter"), []
        with Recorder(optimizer, path):
            for step in range(3):
                run_step(model, optimizer, step, micros=2, weighted=True)
                optimizer.step()
                assert telemetry.last is not None
                found.append(telemetry.last.to_dict())
        return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_recorded_norms_equal_the_norms_of_telemetry(world: World, name: str, tmp_path: Path) -> None:
    layout, path = LAYOUTS[name], tmp_path / "run.jsonl"
    figures = world.run(layout.topology.world_size, recorded_beside_telemetry, layout, path)[0]
    steps = read_recording(path)
    for number, of_step in enumerate(figures, 1):
        for param in steps[number].names:
            for kind, found in zip(("param", "grad", "update"), steps[number].figures[param].values(), strict=True):
                assert found.norm == pytest.approx(of_step[f"{kind}_norm/{param}"], rel=1e-12)
                assert found.sketch


# The file -------------------------------------------------------------------------------------------------------------


def run_alone(
    path: Path, steps: int = 3, lr: float = 0.1, start: int = 0, broken: bool = False, **options: Any
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    declare(model, {"*": P()})
    sgd = torch.optim.SGD(model.named_parameters(), lr=lr)
    optimizer = ParallelOptimizer(sgd, ProcessGroupRegistry(Topology()), max_norm=1.0)
    with Recorder(optimizer, path, **options) as recorder:
        recorder.load_state_dict({"step": start})
        for step in range(steps):
            optimizer.zero_grad()
            optimizer.backward(model(torch.ones(3) * (step + 1)).square().sum())
            optimizer.step()
        if broken:
            raise KeyboardInterrupt
    assert recorder.state_dict() == {"step": start + steps}


def test_recorder_records_the_first_step_and_multiples_of_every(tmp_path: Path) -> None:
    run_alone(tmp_path / "run.jsonl", steps=7, every=3, seed=5)
    steps = read_recording(tmp_path / "run.jsonl")
    assert [*steps] == [1, 3, 6]
    assert steps[1].run["seed"] == 5
    assert steps[1].options("weight")["lr"] == 0.1
    assert steps[3].line["clip_coef"] == pytest.approx(1 / steps[3].line["grad_norm"], rel=1e-5)


def test_recorder_records_a_parameter_with_the_name_total(tmp_path: Path) -> None:
    model = nn.ParameterDict({"total": nn.Parameter(torch.ones(3))})
    optimizer = ParallelOptimizer(
        torch.optim.SGD(model.named_parameters(), lr=0.1), ProcessGroupRegistry(Topology()), check_replicas=False
    )
    with Recorder(optimizer, tmp_path / "run.jsonl"):
        optimizer.backward(model["total"].sum())
        optimizer.step()
    assert read_recording(tmp_path / "run.jsonl")[1].names == ("total",)


def test_recorder_writes_the_last_step_after_an_exception_in_its_context(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_alone(tmp_path / "run.jsonl", broken=True)
    assert [*read_recording(tmp_path / "run.jsonl")] == [1, 2, 3]


def test_recorder_names_every_optimizer_of_a_list(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    declare(model, {"*": P()})
    parts = [torch.optim.AdamW([("weight", model.weight)]), torch.optim.SGD([("bias", model.bias)])]
    optimizer = ParallelOptimizer(parts, ProcessGroupRegistry(Topology()))
    with Recorder(optimizer, tmp_path / "run.jsonl"):
        optimizer.backward(model(torch.ones(3)).sum())
        optimizer.step()
    assert read_recording(tmp_path / "run.jsonl")[1].run["optimizer"] == ["AdamW", "SGD"]


def test_resumed_recorder_moves_later_steps_to_the_dropped_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run_alone(path, steps=4)
    run_alone(path, steps=2, start=2)
    assert [*read_recording(path)] == [1, 2, 3, 4]
    dropped = Path(f"{path}.dropped").read_text().splitlines()
    assert [json.loads(line)["step"] for line in dropped] == [3, 4]
    run_alone(path, steps=1)
    assert [*read_recording(path)] == [1]


def test_recorder_rejects_invalid_arguments_and_states(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every=0: give a whole number"):
        run_alone(tmp_path / "run.jsonl", every=0)
    model = nn.Linear(3, 2)
    declare(model, {"*": P()})
    optimizer = ParallelOptimizer(torch.optim.SGD(model.named_parameters()), ProcessGroupRegistry(Topology()))
    with (
        Recorder(optimizer, tmp_path / "run.jsonl") as recorder,
        pytest.raises(ValueError, match="but no 'step'; give the result of Recorder"),
    ):
        recorder.load_state_dict({})
    with pytest.raises(ValueError, match="for 'int8'"):
        Tolerances({"int8": 1.0})
    with pytest.raises(ValueError, match="growth=-1"):
        Tolerances(growth=-1)


# The command ----------------------------------------------------------------------------------------------------------


def test_compare_command_has_the_exit_codes_of_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = (tmp_path / f"{name}.jsonl" for name in "abc")
    run_alone(a)
    run_alone(b)
    run_alone(c, lr=0.2)
    assert main(["compare", str(a), str(b)]) == 0
    assert capsys.readouterr().out.startswith("equal: 3 recorded steps compared, up to step 3\n")
    assert main(["compare", str(a), str(c)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("first difference: step 1, option of weight\nprobable cause: learning rate\n")
    assert main(["compare", str(a), str(c), "--json", "--tolerance", "float32=0.5", "--growth", "0"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "different"
    assert found["difference"]["cause"] == "learning rate"
    assert found["difference"]["ratio"] == pytest.approx(2)


@pytest.mark.long
def test_compare_command_rejects_missing_invalid_and_unrelated_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, other = tmp_path / "good.jsonl", tmp_path / "other.jsonl"
    run_alone(good, steps=1)
    run_alone(other, steps=1, start=5, every=6)
    broken = tmp_path / "broken.jsonl"
    for path, said in (
        (tmp_path / "none.jsonl", "No such file"),
        (Path(__file__), "is no record"),
        (other, "no recorded step in common"),
    ):
        assert main(["compare", str(good), str(path)]) == 2
        assert said in capsys.readouterr().err
    broken.write_text(good.read_text().splitlines()[0] + "\n" + '{"step": 1')
    assert main(["compare", str(good), str(broken)]) == 2
    assert "contains no recorded step" in capsys.readouterr().err
    assert main(["compare", str(good), str(good), "--tolerance", "int8=1"]) == 2
    done = forked_python.run("-m", "meshstep.optim", "compare", "--help")
    assert done.returncode == 0
    assert "RUN_A" in done.stdout


def test_difference_within_the_tolerance_counts_as_rounding(tmp_path: Path) -> None:
    def run(path: Path, factor: float) -> None:
        torch.manual_seed(0)
        model = nn.Linear(30, 20)
        declare(model, {"*": P()})
        optimizer = ParallelOptimizer(
            torch.optim.SGD(model.named_parameters(), lr=0.1), ProcessGroupRegistry(Topology())
        )
        with Recorder(optimizer, path):
            optimizer.backward(model(torch.ones(30) * factor).square().sum())
            optimizer.step()

    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    run(a, 1.0)
    run(b, 1.003)
    assert compare_runs(a, b).verdict == "different"
    assert compare_runs(a, b, Tolerances({"float32": 0.05})).verdict == "rounding only"
