"""A long run (10,000 steps on a GPU, 200 on a CPU): constant memory, counted overflows, and no host synchronization after
the first tenth."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import torch
from graph_runs import Run, Setting
from meshstep.amp import NaiveFp16
from on_gpu import nobody_waits


def test_long_run_keeps_memory_constant_without_host_synchronization_after_first_tenth(device: torch.device) -> None:
    steps = 10_000 if device.type == "cuda" else 200
    # The loss scale grows between two overflows, and falls at each overflow.
    run = Run(Setting(NaiveFp16(init_scale=2.0**8, growth_interval=10, hysteresis=1), {"max_norm": 0.5}), device)
    good, bad = [run.batch(number) for number in range(3, 9)], run.batch(9)
    kept = []
    for part in range(10):
        with nobody_waits(device) if part else nullcontext():  # the first step checks the gradients on the host
            for number in range(part * steps // 10, (part + 1) * steps // 10):
                run.optimizer.zero_grad()
                run.optimizer.backward(run.loss(bad if number % 20 == 19 else good[number % 6]))
                run.optimizer.step()
        gc.collect()
        kept.append(torch.cuda.memory_allocated() if device.type == "cuda" else 0)
    assert run.optimizer.skipped_steps == steps // 20
    assert all(bool(param.isfinite().all()) for param in run.model.parameters())
    assert len(set(kept)) == 1
