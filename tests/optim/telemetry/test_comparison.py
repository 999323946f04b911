"""`compare_runs` on runs with planted mistakes and on correct runs, in several layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from grid_models import Lm, ids_of
from meshstep.optim import ParallelOptimizer, Recorder, RunComparison, compare_runs
from meshstep.parallel import ProcessGroupRegistry, Topology
from recorded_runs import PLANTED, Layout, Script, Training, recorded, right
from world import World

Record = Callable[[Layout, Script], Path]


@pytest.fixture(scope="module")
def record(world: World, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Return the function that runs a training once, and returns the path of its recording."""
    folder, made = tmp_path_factory.mktemp("runs"), dict[tuple[Layout, Script], Path]()

    def path(layout: Layout, script: Script = right) -> Path:
        if (layout, script) not in made:
            text = world.run(layout.size, recorded, layout, script)[0]
            assert text is not None
            made[layout, script] = folder / f"{len(made)}.jsonl"
            made[layout, script].write_text(text)
        return made[layout, script]

    return path


# Planted mistakes -----------------------------------------------------------------------------------------------------

CASES = [
    (name, layout, other)
    for name, planted in PLANTED.items()
    for layout in planted.layouts
    for other in planted.against
]
# Planted mistakes for which `compare_runs` names a wrong cause, axis or parameter; the values are the named causes.
NOT_NAMED: dict[str, str] = {}


def is_named(name: str, found: RunComparison) -> bool:
    planted, difference = PLANTED[name], found.difference
    if difference is None or (difference.step, difference.cause, difference.axis) != (
        planted.step,
        planted.cause,
        planted.axis,
    ):
        return False
    if planted.parameters is None:
        return difference.parameter is None
    return difference.parameter is not None and (not planted.parameters or difference.parameter in planted.parameters)


@pytest.mark.parametrize(("name", "layout", "other"), CASES, ids=[f"{n}, {a} beside {b}" for n, a, b in CASES])
def test_run_comparison_finds_planted_mistake(
    record: Record, name: str, layout: Layout, other: Layout, world: World
) -> None:
    planted = PLANTED[name]
    a, b = record(other, planted.right), record(layout, planted.script)
    found = compare_runs(a, b)
    assert found.verdict == "different"
    if name in NOT_NAMED:
        assert found.difference is not None
        assert found.difference.cause == NOT_NAMED[name], str(found)
        return
    assert is_named(name, found), str(found)
    back = compare_runs(b, a)
    assert back.difference is not None
    assert found.difference is not None
    assert back.difference.step == found.difference.step
    assert back.difference.quantity == found.difference.quantity


def test_at_most_one_in_ten_planted_mistakes_is_listed_without_named_cause() -> None:
    assert len(PLANTED) >= 20
    assert len(NOT_NAMED) <= len(PLANTED) / 10


def recorded_with(value: float | None, quantity: str, path: Path) -> Path:
    """Record three steps of a linear layer. Write ``value`` to its weight or gradient before the second `step` call."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = ParallelOptimizer(
        torch.optim.SGD(model.named_parameters(), lr=0.1), ProcessGroupRegistry(Topology()), check_replicas=False
    )
    with Recorder(optimizer, path):
        for step in range(3):
            optimizer.zero_grad()
            optimizer.backward(model(torch.ones(2, 4)).square().mean())
            if value is not None and step == 1:
                written = model.weight if quantity == "weight" else model.weight.grad
                assert written is not None
                written.data[0, 0] = value
            optimizer.step()
    return path


@pytest.mark.parametrize("quantity", ["weight", "gradient"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_run_comparison_finds_value_that_is_non_finite_in_one_run_only(
    value: float, quantity: str, tmp_path: Path
) -> None:
    finite = recorded_with(None, quantity, tmp_path / "finite.jsonl")
    other = recorded_with(value, quantity, tmp_path / "other.jsonl")
    for runs, which in (((finite, other), "B"), ((other, finite), "A")):
        difference = compare_runs(*runs).difference
        assert difference is not None
        assert (difference.step, difference.quantity, difference.cause) == (2, quantity, "non-finite")
        assert difference.parameter == "weight"
        assert f"only in run {which}, the {quantity} has" in difference.text
    assert compare_runs(other, other).verdict == "equal"


# Correct runs ---------------------------------------------------------------------------------------------------------

ALONE = Layout()
PAIRS = [
    (ALONE, Layout("data=2")),
    (ALONE, Layout("data=3")),
    (Layout("data=2"), Layout("data=4")),
    (ALONE, Layout("tensor=2")),
    (Layout("data=4"), Layout("tensor=4")),
    (ALONE, Layout("data=2,tensor=2")),
    (ALONE, Layout("pipe=2")),
    (Layout("tensor=2"), Layout("data=2,pipe=2")),
    (Layout("data=2"), Layout("pipe=2,tensor=2")),
    (ALONE, Layout("data=2", states="ZeRO-1")),
    (Layout("tensor=2"), Layout("data=2", states="ZeRO-2")),
    (Layout("data=2"), Layout("data=4", states="ZeRO-1")),
    (ALONE, Layout("data=2,tensor=2", states="ZeRO-2")),
    (ALONE, Layout("data=2", states="offload")),
    (ALONE, Layout(mode="bf16")),
    (Layout(mode="bf16"), Layout("data=2", "bf16")),
    (ALONE, Layout("tensor=2", "bf16")),
    (Layout("data=2"), Layout("data=2,tensor=2", "bf16", "ZeRO-1")),
    (ALONE, Layout("data=2", "fp16")),
    (Layout(mode="fp16"), Layout("tensor=2", "fp16")),
    (ALONE, Layout(micros=3)),
    (Layout("tensor=2"), Layout("data=2", states="ZeRO-2", micros=3)),
    (Layout(optimizer="sgd"), Layout("data=2,tensor=2", optimizer="sgd")),
    (Layout(optimizer="lion"), Layout("data=4", optimizer="lion")),
    (Layout(optimizer="adagrad"), Layout("tensor=4", optimizer="adagrad")),
    (Layout(optimizer="muon"), Layout("tensor=2", optimizer="muon")),
    (Layout("data=4", "fp64"), Layout("data=2,tensor=2", "fp64")),
]
EQUAL = {ALONE, Layout("pipe=2")}  # stages only send activations, so no sum changes


@pytest.mark.parametrize(("a", "b"), PAIRS, ids=[f"{a} beside {b}" for a, b in PAIRS])
def test_correct_runs_in_two_layouts_differ_at_most_by_rounding(
    record: Record, a: Layout, b: Layout, world: World
) -> None:
    for first, second in ((a, b), (b, a)):
        found = compare_runs(record(first, right), record(second, right))
        assert found.verdict == ("equal" if {a, b} == EQUAL else "rounding only"), str(found)


def test_run_comparison_finds_identical_runs_equal(record: Record, world: World) -> None:
    layout = Layout("data=2,tensor=2", states="ZeRO-1")
    text = world.run(layout.size, recorded, layout)[0]
    assert text is not None
    other = record(layout, right)
    again = other.with_suffix(".again")
    again.write_text(text)
    found = compare_runs(other, again)
    assert found.verdict == "equal", str(found)


def test_zero1_run_has_the_hashes_of_a_run_with_replicated_states(record: Record, world: World) -> None:
    # ZeRO-1 sums the same gradients in the same order, so all bits are equal, although ranks hash smaller regions.
    found = compare_runs(record(Layout("data=2"), right), record(Layout("data=2", states="ZeRO-1"), right))
    assert found.verdict == "equal", str(found)


def in_fixed_order(training: Training) -> None:
    """Set ``sum_order="fixed"`` and the layout's micro-batches per rank: 12 over all data ranks."""
    training.options |= {"sum_order": "fixed", "accumulation_steps": training.layout.micros}


def test_runs_with_fixed_sum_order_have_equal_hashes_on_1_to_4_data_ranks(record: Record, world: World) -> None:
    alone = record(Layout(micros=12), in_fixed_order)
    for layout in (
        Layout("data=2", micros=6),
        Layout("data=3", micros=4),
        Layout("data=4", micros=3, states="ZeRO-1"),
    ):
        found = compare_runs(alone, record(layout, in_fixed_order))
        assert found.verdict == "equal", str(found)
    plain = compare_runs(alone, record(Layout("data=2"), right))
    assert plain.verdict == "rounding only", str(plain)


def recorded_on_grid(axes: str, path: Path) -> None:
    """Record three steps of a language model with 2-D tensor-parallel layers."""
    with ProcessGroupRegistry(Topology.parse(axes)) as registry:
        model = Lm("2-D", registry, 8, tied=False)
        optimizer = ParallelOptimizer(torch.optim.AdamW(model.named_parameters(), lr=1e-2), registry, max_norm=1.0)
        with Recorder(optimizer, path) as recorder:
            for step in range(3):
                optimizer.zero_grad()
                recorder.batch(ids_of(step))
                optimizer.backward(model(ids_of(step)))
                optimizer.step()


def test_runs_on_one_rank_and_on_2d_grid_differ_by_rounding_only(world: World, tmp_path: Path) -> None:
    for axes in ("row=1,col=1", "row=2,col=2", "row=1,col=2"):
        topology = Topology.parse(axes)
        world.run(topology.world_size, recorded_on_grid, axes, tmp_path / f"{axes}.jsonl")
    for axes in ("row=2,col=2", "row=1,col=2"):
        found = compare_runs(tmp_path / "row=1,col=1.jsonl", tmp_path / f"{axes}.jsonl")
        assert found.verdict == "rounding only", str(found)
