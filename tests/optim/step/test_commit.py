"""``commit=``: rejected steps, which do not count as overflow."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from flips import Run, bits_of
from meshstep.optim import (
    GradStats,
    HoldOnSkip,
    MultiStepLR,
    ParallelOptimizer,
    TorchStates,
    load_checkpoint,
    save_checkpoint,
)
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from probes import collectives, no_host_reads
from torch import Tensor, nn
from world import World


def answers(kind: str, refuses: bool) -> Callable[[], Any]:
    return {"bool": lambda: not refuses, "tensor": lambda: torch.tensor(not refuses)}[kind]


def run_of(
    kind: str, accumulate: int | None = None
) -> tuple[list[tuple[bool, float, float, float]], tuple[int, int], list[float]]:
    """Return (changed, rejected, found_inf, skipped) per step, the counts of skipped and rejected steps, and the loss
    scales. ``changed`` tells whether the step changed any weight or state."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        asked: list[int] = []

        def commit() -> bool | Tensor:
            asked.append(len(asked))
            refuses = registry.global_rank == 1 and asked[-1] == 1
            answer: bool | Tensor = answers(kind, refuses)()
            return answer

        run = Run("fp16 masters", registry, every=None, commit=commit, accumulation_steps=accumulate)
        found, scales = [], []
        for step in range(4):
            before = bits_of(run.everything())
            stats = run.step(1e9 if step == 2 else 1.0)
            assert stats.rejected is not None
            moved = bits_of(run.everything()) != before
            found.append((moved, float(stats.rejected), float(stats.found_inf), float(stats.skipped)))
            assert run.optimizer.loss_scale is not None
            scales.append(float(run.optimizer.loss_scale.scale))
        assert asked == [0, 1, 2, 3]
        return found, (run.optimizer.skipped_steps, run.optimizer.rejected_steps), scales


@pytest.mark.parametrize("kind", ["bool", "tensor"])
def test_commit_rejection_on_one_rank_skips_step_on_all_ranks_and_keeps_loss_scale(world: World, kind: str) -> None:
    """Rank 1 rejects the second step; the third step overflows, and only it reduces the scale."""
    for steps, counts, scales in world.run(2, run_of, kind):
        assert steps == [(True, 0, 0, 0), (False, 1, 0, 1), (False, 0, 1, 1), (True, 0, 0, 0)]
        assert counts == (2, 1)
        assert scales == [64, 64, 32, 32]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_commit_is_called_once_per_accumulation_window(world: World, accumulate: int) -> None:
    for steps, *_ in world.run(2, run_of, "bool", accumulate):
        assert [vetoed for _, vetoed, *_ in steps] == [0, 1, 0, 0]


def run_clipped_by_hand() -> list[tuple[bool, float]]:
    """Return (changed, rejected) per step, with gradients clipped twice before each step."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        asked: list[int] = []

        def commit() -> bool:
            asked.append(0)
            return len(asked) != 2

        run = Run("data", registry, every=None, commit=commit, max_norm=None)
        found = []
        for _ in range(3):
            before = bits_of(run.everything())
            run.backward()
            run.optimizer.clip_grad_by_norm(0.3)
            run.optimizer.clip_grad_by_value(0.1)
            stats = run.optimizer.step()
            found.append((bits_of(run.everything()) != before, float(stats.rejected)))
        assert len(asked) == 3
        return found


def test_commit_is_called_once_after_explicit_clips(world: World) -> None:
    assert world.run(2, run_clipped_by_hand) == [[(True, 0), (False, 1), (True, 0)]] * 2


def raising(what: str, clips: int = 0) -> tuple[list[str], list[float], int]:
    """Return the error of each step, whether each step was rejected, and the number of rejected steps.

    Gradients are clipped ``clips`` times before each step.
    """
    with ProcessGroupRegistry(Topology(data=2)) as registry:

        def commit() -> Any:
            if registry.global_rank == 1 and run.steps == 2:
                if what == "raises":
                    raise OSError("the other replica groups are gone")
                return 1
            return True

        run = Run("data", registry, every=None, commit=commit, max_norm=None)
        told, vetoed = list[str](), list[float]()
        for _ in range(3):
            told.append("")
            try:
                run.backward()
                for _ in range(clips):
                    run.optimizer.clip_grad_by_norm(0.3)
                run.optimizer.step()
            except (OSError, TypeError) as error:
                told[-1] = str(error)
            assert run.optimizer.last_stats is not None
            assert run.optimizer.last_stats.rejected is not None
            vetoed.append(float(run.optimizer.last_stats.rejected))
        return told, vetoed, run.optimizer.rejected_steps


@pytest.mark.parametrize("clips", [0, 1, 2])
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("raises", "the other replica groups are gone"),
        ("number", "commit= returned 1: return True or False, or a 0-dim tensor of dtype bool"),
    ],
)
def test_error_in_commit_counts_as_rejection_on_all_ranks(world: World, what: str, told: str, clips: int) -> None:
    assert world.run(2, raising, what, clips) == [(["", "", ""], [0, 1, 0], 1), (["", told, ""], [0, 1, 0], 1)]


def continued(way: str, path: Path) -> list[tuple[int, int]]:
    """Return (skipped, rejected) counts of a run, of a run resumed from its state, and after one more rejected step."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:

        def run_of_vetoes() -> Run:
            run: Run = Run(
                "fp16 masters",
                registry,
                every=None,
                commit=lambda: (
                    registry.global_rank == 0 or run.steps % 2 == 0
                ),  # rank 1 rejects the 1st, 3rd and 5th step
            )
            return run

        first, other = run_of_vetoes(), run_of_vetoes()
        for step in range(5):
            first.step(1e9 if step == 3 else 1.0)
        if way == "checkpoint":
            save_checkpoint(path, first.model, first.optimizer)
            load_checkpoint(path, other.model, other.optimizer)
        elif way == "torch's states":
            TorchStates(other.optimizer).load_state_dict(TorchStates(first.optimizer).state_dict())
        elif way == "copy":
            other.optimizer = copy.deepcopy(first.optimizer)
        else:
            state = first.optimizer.state_dict()
            if way == "older state":
                del state["meshstep"]["vetoed_steps"]
            other.optimizer.load_state_dict(state)
        counts = [(run.optimizer.skipped_steps, run.optimizer.rejected_steps) for run in (first, other)]
        if way != "copy":  # a copy has other parameters than the model
            other.step()
            counts.append((other.optimizer.skipped_steps, other.optimizer.rejected_steps))
        return counts


@pytest.mark.parametrize("way", ["state", "checkpoint", "torch's states", "copy"])
def test_commit_rejection_count_is_restored_from_state_dict_checkpoint_and_copy(
    world: World, tmp_path: Path, way: str
) -> None:
    for counts in world.run(2, continued, way, tmp_path):
        assert counts == [(4, 3), (4, 3), (5, 4)][: len(counts)]


def test_older_state_dict_without_commit_rejection_count_loads_as_zero(world: World, tmp_path: Path) -> None:
    assert world.run(2, continued, "older state", tmp_path) == [[(4, 3), (4, 0), (5, 1)]] * 2


def counted(kind: str) -> list[Any]:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        answer = torch.tensor(True)
        commit = None if kind == "none" else lambda: True if kind == "bool" else answer
        run, seen = Run("data", registry, every=None, commit=commit), []
        run.step()
        for _ in range(3):
            run.backward()
            with collectives() as log, no_host_reads() if kind != "tensor" else collectives():
                run.optimizer.step()
            seen.append(dict(log))
        return seen


def test_commit_needs_no_collective_or_host_synchronization(world: World) -> None:
    """An answer that is a CPU tensor is read on the host, which needs no synchronization. `tests/optim/test_fake_cuda.py`
    tests answers on a device."""
    runs = [world.run(2, counted, kind) for kind in ("none", "bool", "tensor")]
    assert runs[0] == runs[1] == runs[2]


def test_commit_on_some_ranks_only_raises(world: World) -> None:
    for told in world.run(2, on_one_rank):
        assert "commit is 'given' on rank 0 and None on rank 1" in told


def on_one_rank() -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        try:
            Run("data", registry, commit=(lambda: True) if registry.global_rank == 0 else None)
        except ValueError as error:
            return str(error)
        return "nothing"


def alone(**options: Any) -> ParallelOptimizer[GradStats]:
    model = nn.ParameterList([torch.ones(3)])
    declare(model, {"*": P()})
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    return ParallelOptimizer(sgd, ProcessGroupRegistry(Topology()), **options)


def step_of(optimizer: ParallelOptimizer[GradStats]) -> GradStats:
    optimizer.zero_grad()
    (weight,) = (param for group in optimizer.param_groups for param in group["params"])
    optimizer.backward(weight.square().sum())
    return optimizer.step()


def test_hold_on_skip_holds_schedule_on_rejected_step() -> None:
    say = iter([True, False, False, True])
    optimizer = alone(commit=lambda: next(say))
    schedule = HoldOnSkip(MultiStepLR(optimizer, [1, 2, 3], gamma=0.1))
    rates = []
    for _ in range(4):
        step_of(optimizer)
        schedule.step()
        rates.append(round(float(optimizer.param_groups[0]["lr"]), 6))
    assert rates == [0.05, 0.05, 0.05, 0.005]


def test_stats_name_commit_rejection_as_reason_of_skip() -> None:
    assert str(step_of(alone(commit=lambda: False))).endswith("skipped (rejected by commit)")


class Manager:
    """A stand-in for an object with sockets and threads, which must not be copied."""

    def should_commit(self) -> bool:
        return True

    def __deepcopy__(self, memo: Any) -> Manager:
        raise AssertionError("it is copied")


def test_copied_optimizer_shares_commit_function() -> None:
    manager = Manager()
    optimizer = copy.deepcopy(alone(commit=manager.should_commit))
    assert optimizer._setup.commit == manager.should_commit


def test_commit_that_is_not_callable_raises() -> None:
    with pytest.raises(TypeError, match="commit=True: give a function without arguments that returns True, False or a"):
        alone(commit=cast(Any, True))
