"""Loss scales: sequences compared with torch, apex and a plain Python state machine, state dicts, and bad settings."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from meshstep.amp import ConstantLossScale, DynamicLossScale, LossScale
from meshstep.amp.loss_scale import MAX_FLOAT32
from probes import no_host_reads

SETTINGS = st.fixed_dictionaries(
    {
        "init_scale": st.floats(2.0**-10, 2.0**20, width=32),
        "growth_factor": st.sampled_from([2.0, 1.001, 4.0, 2.5]),
        "backoff_factor": st.sampled_from([0.5, 0.25, 0.8]),
        "growth_interval": st.integers(1, 5),
    }
)
OVERFLOWS = st.lists(st.booleans(), max_size=60)


def float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).float())


def trace(scale: LossScale, overflows: list[bool]) -> list[float]:
    values = []
    for overflow in overflows:
        scale.update(torch.tensor(float(overflow)))
        values.append(scale.scale.item())
    return values


@dataclass
class Reference:
    """A dynamic loss scale in plain Python, with the documented rules."""

    init_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    hysteresis: int = 1
    min_scale: float = 0.0
    max_scale: float = inf

    def trace(self, overflows: list[bool]) -> list[float]:
        scale, good_steps, left, values = float32(self.init_scale), 0, self.hysteresis, []
        for overflow in overflows:
            if overflow:
                good_steps = 0
                left = max(left - 1, 0)
                if left == 0:
                    scale = max(float32(scale * self.backoff_factor), float32(self.min_scale))
            else:
                good_steps += 1
                if good_steps == self.growth_interval:
                    good_steps, left = 0, self.hysteresis
                    grown = float32(scale * self.growth_factor)
                    scale = min(grown if isfinite(grown) else scale, float32(self.max_scale))
            values.append(scale)
        return values


def apex_trace(overflows: list[bool], window: int, cap: float = 2.0**24, scale: float = 2.0**16) -> list[float]:
    """Return apex's dynamic scales: halved on each overflow, doubled after `window` steps without one, up to the cap."""
    unskipped, values = 0, []
    for overflow in overflows:
        if overflow:
            scale, unskipped = scale / 2, 0
        else:
            unskipped += 1
        if unskipped == window:
            scale, unskipped = min(cap, scale * 2), 0
        values.append(scale)
    return values


@given(SETTINGS, OVERFLOWS)
def test_dynamic_scale_sequence_equals_torch(settings: dict[str, Any], overflows: list[bool]) -> None:
    scaler = torch.amp.GradScaler("cpu", **settings)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.0)
    (param,) = optimizer.param_groups[0]["params"]
    expected = []
    for overflow in overflows:
        scaler.scale(torch.ones(()))
        param.grad = torch.full((3,), nan if overflow else 1.0)
        scaler.step(optimizer)
        scaler.update()
        expected.append(scaler.get_scale())
    assert trace(DynamicLossScale(**settings), overflows) == expected


@given(
    SETTINGS,
    OVERFLOWS,
    st.integers(1, 4),
    st.floats(2.0**-14, 2.0**-10, width=32) | st.just(0.0),
    st.floats(2.0**20, 2.0**24, width=32) | st.just(inf),
)
def test_dynamic_scale_sequence_equals_python_reference(
    settings: dict[str, Any], overflows: list[bool], hysteresis: int, min_scale: float, max_scale: float
) -> None:
    settings |= {"hysteresis": hysteresis, "min_scale": min_scale, "max_scale": max_scale}
    assert trace(DynamicLossScale(**settings), overflows) == Reference(**settings).trace(overflows)


@given(st.lists(st.integers(0, 2500), max_size=8), st.integers(1, 2000))
@example([0, 16000, 20000], 2000)
def test_dynamic_scale_sequence_equals_apex(good_runs: list[int], window: int) -> None:
    """Use runs of good steps that each end with an overflow, also at the largest scale."""
    overflows = [False, True] if not good_runs else [step == run for run in good_runs for step in range(run + 1)]
    scale = DynamicLossScale(growth_interval=window, max_scale=2.0**24)
    assert trace(scale, overflows) == apex_trace(overflows, window)


def test_dynamic_scale_defaults_equal_torch() -> None:
    torchs = torch.amp.GradScaler("cpu")
    scale = DynamicLossScale()
    assert scale.scale.item() == torchs.get_scale() == 2.0**16
    ours = scale.state_dict()
    for name in ("growth_factor", "backoff_factor", "growth_interval"):
        assert ours[name] == torchs.state_dict()[name]
    assert trace(scale, [False] * 1999)[-1] == 2.0**16
    assert trace(scale, [False, True, True]) == [2.0**17, 2.0**16, 2.0**15]


def test_hysteresis_of_two_tolerates_one_overflow_until_the_scale_grows() -> None:
    scale = DynamicLossScale(init_scale=64.0, growth_interval=3, hysteresis=2)
    # The first overflow is tolerated. Two good steps do not reset the count, so later overflows back off.
    assert trace(scale, [True, False, False, True, True, True]) == [64.0, 64.0, 64.0, 32.0, 16.0, 8.0]
    # A growth resets the count.
    assert trace(scale, [False, False, False, True, True]) == [8.0, 8.0, 16.0, 16.0, 8.0]


def test_tolerated_overflow_restarts_the_growth_interval() -> None:
    scale = DynamicLossScale(init_scale=64.0, growth_interval=3, hysteresis=2)
    assert trace(scale, [False, False, True, False, False, False]) == [64.0] * 5 + [128.0]


def test_dynamic_scale_does_not_grow_beyond_float32() -> None:
    scale = DynamicLossScale(init_scale=2.0**127, growth_interval=1)
    assert trace(scale, [False, False, True]) == [2.0**127, 2.0**127, 2.0**126]


@pytest.mark.parametrize("found_inf", [1.0, 2.0, nan, inf])
def test_nonzero_or_nan_found_inf_counts_as_overflow(found_inf: float) -> None:
    for hysteresis in (1, 2):
        scale = DynamicLossScale(init_scale=64.0, hysteresis=hysteresis)
        for _ in range(hysteresis):
            scale.update(torch.tensor(found_inf))
        assert scale.scale.item() == 32.0


@pytest.mark.parametrize(
    "scale",
    [DynamicLossScale(growth_interval=1), DynamicLossScale(growth_interval=1, hysteresis=2), ConstantLossScale(8)],
)
def test_loss_scale_update_is_in_place_without_host_synchronization(scale: LossScale) -> None:
    before, found_inf = scale.scale, torch.tensor(0.0)
    with no_host_reads():
        for value in (0.0, 1.0, 1.0, 0.0):
            found_inf.fill_(value)
            scale.update(found_inf)
            repr(scale)
    assert scale.scale is before
    assert scale.scale.dtype == torch.float32
    assert scale.scale.shape == ()
    assert found_inf.item() == 0.0


@given(SETTINGS, OVERFLOWS, OVERFLOWS, st.integers(1, 3))
def test_loaded_dynamic_scale_continues_like_the_saved_scale(
    settings: dict[str, Any], first: list[bool], second: list[bool], hysteresis: int
) -> None:
    scale = DynamicLossScale(**settings, hysteresis=hysteresis)
    trace(scale, first)
    state = json.loads(json.dumps(scale.state_dict()))
    # `load_state_dict` replaces these settings by those of the saved scale.
    resumed = DynamicLossScale(init_scale=3.0, growth_factor=7.0, growth_interval=11)
    tensor = resumed.scale
    resumed.load_state_dict(state)
    assert resumed.state_dict() == scale.state_dict()
    assert trace(resumed, second) == trace(scale, second)
    assert resumed.scale is tensor


def test_constant_scale_ignores_overflow_and_is_restored_from_state_dict() -> None:
    scale = ConstantLossScale(128.0)
    assert trace(scale, [True, False, True]) == [128.0] * 3
    resumed = ConstantLossScale(1.0)
    resumed.load_state_dict(scale.state_dict())
    assert resumed.scale.item() == 128.0
    assert repr(resumed) == "ConstantLossScale(128.0)"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scale: pickle.loads(pickle.dumps(scale))])
def test_copied_loss_scale_is_independent_of_the_original(copied: Any) -> None:
    scale = DynamicLossScale(init_scale=8.0)
    twin = copied(scale)
    trace(twin, [True])
    assert (scale.scale.item(), twin.scale.item()) == (8.0, 4.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init_scale": 0.0}, "init_scale=0.0"),
        ({"init_scale": 1e-40}, "init_scale=1e-40"),
        ({"init_scale": inf}, "init_scale=inf"),
        ({"init_scale": nan}, "init_scale=nan"),
        ({"init_scale": 1e39}, "init_scale=1e"),
        ({"init_scale": 1.0, "min_scale": 2.0}, r"init_scale=1.0 .* \[2.0, "),
        ({"init_scale": 4.0, "max_scale": 2.0}, r"init_scale=4.0 .* \[0.0, 2.0\]"),
        ({"growth_factor": 1.0}, "growth_factor=1.0"),
        ({"growth_factor": inf}, "growth_factor=inf"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0"),
        ({"backoff_factor": 0.0}, "backoff_factor=0.0"),
        ({"growth_interval": 0}, "growth_interval=0"),
        ({"growth_interval": 2.5}, "growth_interval=2.5"),
        ({"hysteresis": 0}, "hysteresis=0"),
        ({"min_scale": -1.0}, "min_scale=-1.0"),
        ({"min_scale": 2.0, "max_scale": 1.0}, "max_scale=1.0"),
    ],
)
def test_dynamic_scale_rejects_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DynamicLossScale(**settings)


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-50, inf, nan, 2 * MAX_FLOAT32])
def test_constant_scale_rejects_bad_value(value: float) -> None:
    with pytest.raises(ValueError, match="value="):
        ConstantLossScale(value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": nan}, "scale=nan"),
        ({"scale": 1e-40}, "scale=1e-40"),
        ({"good_steps": 3}, r"good_steps=3 .* 0\.\.2"),
        ({"overflows_left": -1}, "overflows_left=-1"),
        ({"hysteresis": 0}, "hysteresis=0"),
        ({"hysteresis": 1.5}, "hysteresis=1.5 .*give an integer"),
        ({"extra": 1}, "extra"),
    ],
)
def test_bad_loss_scale_state_raises_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    scale = DynamicLossScale(growth_interval=3)
    before = scale.state_dict()
    with pytest.raises(ValueError, match=message):
        scale.load_state_dict({**before, "scale": 1.0, "good_steps": 1, **change})
    assert scale.state_dict() == before


def test_loss_scale_rejects_state_of_another_class() -> None:
    dynamic, constant = DynamicLossScale(), ConstantLossScale(1.0)
    with pytest.raises(ValueError, match="the state for DynamicLossScale has scale, but needs"):
        dynamic.load_state_dict(constant.state_dict())
    with pytest.raises(ValueError, match=r"the state for ConstantLossScale has backoff_factor, .*, but needs scale;"):
        constant.load_state_dict(dynamic.state_dict())
