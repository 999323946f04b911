"""``commit=``: one rank's refusal skips the step on all of them, and is no overflow."""

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
    """(moved, vetoed, found_inf, skipped) of each step; skipped and vetoed steps in all; the loss scale after each."""
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
            assert stats.vetoed is not None
            moved = bits_of(run.everything()) != before
            found.append((moved, float(stats.vetoed), float(stats.found_inf), float(stats.skipped)))
            assert run.optimizer.loss_scale is not None
            scales.append(float(run.optimizer.loss_scale.scale))
        assert asked == [0, 1, 2, 3]
        return found, (run.optimizer.skipped_steps, run.optimizer.vetoed_steps), scales


@pytest.mark.parametrize("kind", ["bool", "tensor"])
def test_one_veto_skips_on_every_rank_and_leaves_the_loss_scale(world: World, kind: str) -> None:
    """The second step is refused by rank 1, the third one overflows: only that one shrinks the scale."""
    for steps, counts, scales in world.run(2, run_of, kind):
        assert steps == [(True, 0, 0, 0), (False, 1, 0, 1), (False, 0, 1, 1), (True, 0, 0, 0)]
        assert counts == (2, 1)
        assert scales == [64, 64, 32, 32]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_it_is_asked_once_a_window(world: World, accumulate: int) -> None:
    for steps, *_ in world.run(2, run_of, "bool", accumulate):
        assert [vetoed for _, vetoed, *_ in steps] == [0, 1, 0, 0]


def run_clipped_by_hand() -> list[tuple[bool, float]]:
    """(moved, vetoed) of each step, of which the gradients were clipped twice before."""
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
            found.append((bits_of(run.everything()) != before, float(stats.vetoed)))
        assert len(asked) == 3
        return found


def test_gradients_that_were_clipped_before_are_asked_about_once(world: World) -> None:
    assert world.run(2, run_clipped_by_hand) == [[(True, 0), (False, 1), (True, 0)]] * 2


def raising(what: str) -> tuple[str, list[float], int]:
    with ProcessGroupRegistry(Topology(data=2)) as registry:

        def commit() -> Any:
            if registry.global_rank == 1 and run.steps == 2:
                if what == "raises":
                    raise OSError("the other replica groups are gone")
                return 1
            return True

        run = Run("data", registry, every=None, commit=commit)
        told, vetoed = "", []
        for _ in range(3):
            try:
                run.step()
            except (OSError, TypeError) as error:
                told = str(error)
            assert run.optimizer.last_stats is not None
            assert run.optimizer.last_stats.vetoed is not None
            vetoed.append(float(run.optimizer.last_stats.vetoed))
        return told, vetoed, run.optimizer.vetoed_steps


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("raises", "the other replica groups are gone"),
        ("number", "commit= returned 1: return True or False, or a 0-dim tensor of dtype bool"),
    ],
)
def test_what_it_raises_is_a_veto_to_the_others_who_go_on(world: World, what: str, told: str) -> None:
    assert world.run(2, raising, what) == [("", [0, 1, 0], 1), (told, [0, 1, 0], 1)]


def continued(way: str, path: Path) -> list[tuple[int, int]]:
    """(skipped, vetoed) steps of a run, of another one that goes on from its state, and one vetoed step later."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:

        def run_of_vetoes() -> Run:
            run: Run = Run(
                "fp16 masters",
                registry,
                every=None,
                commit=lambda: registry.global_rank == 0 or run.steps % 2 == 0,  # the 1st is refused, the 3rd, the 5th
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
        counts = [(run.optimizer.skipped_steps, run.optimizer.vetoed_steps) for run in (first, other)]
        if way != "copy":  # whose parameters are others than the model's
            other.step()
            counts.append((other.optimizer.skipped_steps, other.optimizer.vetoed_steps))
        return counts


@pytest.mark.parametrize("way", ["state", "checkpoint", "torch's states", "copy"])
def test_vetoes_are_counted_on_where_a_run_goes_on(world: World, tmp_path: Path, way: str) -> None:
    for counts in world.run(2, continued, way, tmp_path):
        assert counts == [(4, 3), (4, 3), (5, 4)][: len(counts)]


def test_a_state_from_before_vetoes_were_counted_has_none(world: World, tmp_path: Path) -> None:
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


def test_it_takes_no_collective_and_no_host_read(world: World) -> None:
    """A tensor on the CPU is read there, where nobody waits for it; one on a device is not."""
    runs = [world.run(2, counted, kind) for kind in ("none", "bool", "tensor")]
    assert runs[0] == runs[1] == runs[2]


def test_ranks_must_all_have_one_or_none(world: World) -> None:
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


def test_a_schedule_that_holds_on_skips_holds_on_a_veto() -> None:
    say = iter([True, False, False, True])
    optimizer = alone(commit=lambda: next(say))
    schedule = HoldOnSkip(MultiStepLR(optimizer, [1, 2, 3], gamma=0.1))
    rates = []
    for _ in range(4):
        step_of(optimizer)
        schedule.step()
        rates.append(round(float(optimizer.param_groups[0]["lr"]), 6))
    assert rates == [0.05, 0.05, 0.05, 0.005]


def test_stats_say_why_a_step_was_skipped() -> None:
    assert str(step_of(alone(commit=lambda: False))).endswith("skipped (a rank's veto)")


class Manager:
    """Of other groups: sockets and threads, which nobody copies."""

    def should_commit(self) -> bool:
        return True

    def __deepcopy__(self, memo: Any) -> Manager:
        raise AssertionError("it is copied")


def test_a_copy_of_the_optimizer_asks_the_same() -> None:
    manager = Manager()
    optimizer = copy.deepcopy(alone(commit=manager.should_commit))
    assert optimizer._setup.commit == manager.should_commit


def test_what_can_not_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="commit=True: give a function without arguments that returns True or False"):
        alone(commit=cast(Any, True))
