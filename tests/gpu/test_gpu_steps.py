"""Steps on one GPU without torch.distributed."""

from __future__ import annotations

import pytest
import torch
from graph_runs import OVERFLOWS, SETTINGS, Run, Setting
from meshstep.amp import Bf16
from meshstep.optim import HalfStates
from on_gpu import nobody_waits
from precision_modes import differences, snapshot

STEPPED = {
    **SETTINGS,
    "rounded": Setting(Bf16(stochastic_rounding=True)),
    "half states": Setting(options={"states": HalfStates()}),
}


@pytest.mark.parametrize("name", STEPPED)
def test_steps_other_than_the_first_two_and_the_16th_cause_no_host_synchronization(
    device: torch.device, name: str
) -> None:
    """Run more steps than the interval after which skips are checked.

    The first step checks the gradients, and the second and the 16th step compare master weights with the model.
    """
    run = Run(STEPPED[name], device)
    batches = [run.batch(number) for number in range(40)]
    for index, batch in enumerate(batches):
        if index in (0, 1, 15):
            run.optimizer.zero_grad()
            run.optimizer.backward(run.loss(batch))
            run.optimizer.step()
            continue
        with nobody_waits(device):
            run.optimizer.zero_grad()
            run.optimizer.backward(run.loss(batch))
            run.optimizer.step()
    assert run.optimizer.skipped_steps == len(OVERFLOWS)


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16", "fp16_naive", "O2"])
def test_norm_equals_float64_norm_of_the_gradients(device: torch.device, name: str) -> None:
    run = Run(STEPPED[name], device)
    run.optimizer.backward(run.loss(run.batch(0)))
    scale = 1.0 if run.optimizer.loss_scale is None else float(run.optimizer.loss_scale.scale)
    gradients = [param.grad.double().flatten() for param in run.model.parameters() if param.grad is not None]
    expected = float(torch.cat(gradients).norm()) / scale
    stats = run.optimizer.step()
    assert stats is not None
    assert float(stats.total_norm) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", STEPPED)
def test_skipped_step_leaves_all_tensors_bitwise_identical(device: torch.device, name: str) -> None:
    run = Run(STEPPED[name], device)
    run.steps(range(3, 6))
    before = snapshot(run.model, run.optimizer)
    run.optimizer.zero_grad()
    run.optimizer.backward(run.loss(run.batch(9)))
    stats = run.optimizer.step()
    assert stats is not None
    assert float(stats.found_inf) == 1
    assert differences(before, snapshot(run.model, run.optimizer)) == []
    run.steps(range(12, 14))
    assert differences(before, snapshot(run.model, run.optimizer)) != []


def test_training_on_device_matches_training_on_host_within_rounding(device: torch.device) -> None:
    """Use momentum, which amplifies rounding less than Adam."""
    found, expected = (Run(SETTINGS["momentum"], where) for where in (device, torch.device("cpu")))
    for run in (found, expected):
        run.steps(range(3, 9))
    for name, param in expected.model.state_dict().items():
        torch.testing.assert_close(found.model.state_dict()[name].cpu(), param, rtol=2e-2, atol=2e-3)
