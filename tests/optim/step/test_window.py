"""The accumulation window and the skip counters, without an optimizer."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from meshstep.optim.clip.clipper import StepDecision, inverse_weight
from meshstep.optim.norm.measure import GradStats
from meshstep.optim.step.skips import LAG, Skip, SkipMonitor
from meshstep.optim.step.window import Window
from torch import Tensor


def broken_window(steps: int | None = None) -> Window:
    """Return a window whose first backward has raised."""
    window = Window(steps)
    with pytest.raises(ZeroDivisionError), window.micro_batch(None, [], []):
        raise ZeroDivisionError
    return window


def test_final_step_without_micro_batch_does_not_end_window() -> None:
    window = Window(2)
    assert not window.ends(final=True)
    with window.micro_batch(None, [], []):
        pass
    assert window.ends(final=True)
    assert not window.ends(final=False)


@pytest.mark.parametrize("scaled", [False, True])
def test_window_detects_gradients_computed_outside_of_its_micro_batches(scaled: bool) -> None:
    """With a loss scale, gradients of unscaled losses within a micro-batch are detected too."""
    window, param = Window(None, scaled=scaled), torch.ones(2, requires_grad=True)
    param.sum().backward()
    assert window.has_bypassed_grads([param])
    with window.micro_batch(None, [param], []):
        param.sum().backward()
    assert window.has_bypassed_grads([param]) == scaled
    with window.micro_batch(None, [param], []):
        window.scaled_losses += 1
        param.sum().backward()
    assert not window.has_bypassed_grads([param])
    window.close([param])
    assert not window.has_bypassed_grads([param])  # the gradient of the last step is still in ``.grad``
    param.sum().backward()
    assert window.has_bypassed_grads([param])


@pytest.mark.parametrize("end", ["complete", "clipped"])
def test_window_with_failed_backward_raises_until_it_is_cleared(end: str) -> None:
    window = broken_window()
    window.complete() if end == "complete" else window.clipped(mock.Mock())
    with pytest.raises(RuntimeError, match="a backward since the last step raised"):
        window.ends(final=False)
    window.clear()
    assert window.ends(final=False)


def test_failed_backward_on_one_of_several_ranks_advises_to_step_instead_of_zero_grad() -> None:
    """On the other ranks, `zero_grad` clears nothing within a window of fixed length."""
    window, param = Window(None, alone=False), torch.ones(2, requires_grad=True)
    with pytest.raises(ZeroDivisionError), window.micro_batch(None, [param], []):
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match=r"every rank, call optimizer.zero_grad\(\).* this rank only, call step\(\)"):
        window.begin(None, [param])
    assert window.ends(final=True, may_defer=True)
    assert "All ranks skip this step, and raise an error within 16 steps: catch both" in str(window.take_error())


def test_window_of_several_ranks_keeps_first_of_two_deferred_errors() -> None:
    window, first = Window(None, alone=False), ValueError("the cause")
    window.defer(first)
    window.defer(ValueError("a consequence"))
    assert window.take_error() is first
    assert window.take_error() is None


@pytest.mark.parametrize("weight", [3.0, torch.tensor(3.0)], ids=["number", "tensor"])
def test_micro_batch_weights_of_abandoned_window_do_not_count_in_next_window(weight: Any) -> None:
    window = Window(None)
    with window.micro_batch(weight, [], []):
        pass
    assert float(window.weight) == 3.0
    assert window.is_weighted
    window.clear()
    assert (float(window.weight), window.has_weight, window.is_weighted) == (0.0, False, False)
    with window.micro_batch(None, [], []):
        pass
    assert not window.is_weighted


def decision(bad: bool, skipped: bool = False, rejected: bool | None = None) -> StepDecision:
    """Return the decision of a step. ``bad``: its norm is non-finite. ``skipped``: it is skipped for another reason."""
    one, found_inf = torch.ones(()), torch.tensor(float(bad))
    veto = None if rejected is None else torch.tensor(float(rejected))
    stats = GradStats(one * (torch.inf if bad else 1), one, found_inf, one.view(1), rejected=veto)
    return StepDecision(stats, torch.maximum(found_inf, torch.tensor(float(skipped))), None)


def count(monitor: SkipMonitor, bad: list[bool], most: int = 3) -> list[str | None]:
    return [monitor.count(decision(each), Skip(most), captured=False) for each in bad]


def test_step_with_finite_norm_resets_count_of_consecutive_skips() -> None:
    monitor = SkipMonitor(torch.device("cpu"))
    assert count(monitor, [True, True, False] * 10) == [None] * 30
    assert monitor.poll(Skip(3)) is None
    assert monitor.total() == 20
    count(monitor, [True] * 3)
    assert monitor.poll(Skip(3)) == "3 steps in a row were skipped because the gradient norm was not finite"


def test_step_rejected_by_commit_does_not_count_as_consecutive_overflow() -> None:
    monitor = SkipMonitor(torch.device("cpu"))
    for _ in range(4):
        monitor.count(decision(False, skipped=True, rejected=True), Skip(2), captured=False)
    assert monitor.poll(Skip(2)) is None
    assert (monitor.total(), monitor.rejected()) == (4, 4)


def test_skip_monitor_load_state_dict_discards_counts_not_yet_read_by_host() -> None:
    monitor = SkipMonitor(torch.device("cpu"))
    count(monitor, [True] * LAG, most=LAG)  # the host reads the first of these counts in the next step
    monitor.load_state_dict({"skipped_steps": 5, "vetoed_steps": 2})
    assert count(monitor, [False] * (2 * LAG), most=LAG) == [None] * (2 * LAG)
    assert monitor.state_dict() == {"skipped_steps": 5, "vetoed_steps": 2}


def test_count_of_consecutive_skips_is_read_by_host_16_steps_later() -> None:
    """Negative control of the test of discarded counts: without `load_state_dict`, `count` returns a reason."""
    monitor = SkipMonitor(torch.device("cpu"))
    found = count(monitor, [True] * (2 * LAG), most=LAG)
    assert [reason is None for reason in found] == [True] * (2 * LAG - 1) + [False]


@pytest.mark.parametrize(
    ("totals", "wanted"),
    [([4.0], 0.5), ([0.0, 8.0], 0.25), ([0.0], 0.1), ([-1.0], torch.nan), ([torch.nan], torch.nan)],
)
def test_inverse_weight_is_nan_for_negative_or_nan_totals_and_finite_otherwise(
    totals: list[float], wanted: float
) -> None:
    found: Tensor = inverse_weight(torch.tensor(totals, dtype=torch.float64), data_ranks=2, mean_of=10)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), equal_nan=True)


def test_skip_counts_are_not_read_while_a_graph_is_captured() -> None:
    monitor = SkipMonitor(torch.device("cpu"))
    captured: list[Any] = [monitor.count(decision(True), Skip(1), captured=True) for _ in range(2 * LAG)]
    assert captured == [None] * (2 * LAG)
    assert monitor.poll(Skip(1)) is not None
