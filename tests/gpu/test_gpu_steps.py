"""One GPU, no torch.distributed, every mode: the right norm, nobody waits, and a skip leaves every bit."""

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
def test_nobody_waits_for_the_gpu_from_the_second_step_on(device: torch.device, name: str) -> None:
    """More steps than those after which skips are looked at; the first one looks at what came."""
    run = Run(STEPPED[name], device)
    batches = [run.batch(number) for number in range(40)]
    for index, batch in enumerate(batches):
        if index < 2:
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
def test_the_norm_is_that_of_the_gradients(device: torch.device, name: str) -> None:
    run = Run(STEPPED[name], device)
    run.optimizer.backward(run.loss(run.batch(0)))
    scale = 1.0 if run.optimizer.loss_scale is None else float(run.optimizer.loss_scale.scale)
    gradients = [param.grad.double().flatten() for param in run.model.parameters() if param.grad is not None]
    expected = float(torch.cat(gradients).norm()) / scale
    stats = run.optimizer.step()
    assert stats is not None
    assert float(stats.total_norm) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", STEPPED)
def test_a_skipped_step_leaves_every_bit(device: torch.device, name: str) -> None:
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


def test_a_run_on_the_gpu_is_that_on_the_cpu(device: torch.device) -> None:
    """Up to rounding, which momentum does not amplify as Adam does."""
    found, expected = (Run(SETTINGS["momentum"], where) for where in (device, torch.device("cpu")))
    for run in (found, expected):
        run.steps(range(3, 9))
    for name, param in expected.model.state_dict().items():
        torch.testing.assert_close(found.model.state_dict()[name].cpu(), param, rtol=2e-2, atol=2e-3)
