"""The files that a step enters are the files that optim/README lists, in the same order."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import meshstep
import pytest
import torch
from loops import using
from meshstep.amp import precision_of
from meshstep.amp.fp8 import weights
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import nn
from torch.optim import optimizer as torch_optimizer
from whole_runs import STATES
from world import World

ROOT = os.path.realpath(Path(meshstep.__file__).parents[2])
PACKAGES = tuple(os.path.join(ROOT, name, "") for name in ("parallel", "amp", "optim"))


@contextmanager
def as_in_a_new_process() -> Iterator[None]:
    """Without what other tests have left in this one: FP8's hook at each step of any optimizer, its weights, and objects
    that would be finalized meanwhile."""
    none_kept: dict[object, object] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_optimizer, "_global_optimizer_post_hooks", OrderedDict())
        patch.setattr(weights, "KEPT", none_kept)
        gc.collect()
        gc.disable()
        try:
            yield
        finally:
            gc.enable()


def files_of_step(precision: Any, states: str) -> list[str]:
    """Return the files that the third step enters, backward included, in order; with the compiled loops."""
    entered: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        file = os.path.realpath(frame.f_code.co_filename)
        if event == "call" and file.startswith(PACKAGES) and entered[-1:] != [file]:
            entered.append(file)

    with using("auto"), as_in_a_new_process(), ProcessGroupRegistry(Topology(data=2)) as registry:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        precision_of(precision).prepare(model, registry)
        declare(model, {"*": P()})
        adamw = torch.optim.AdamW(model.parameters(), fused=True)
        options: dict[str, Any] = {"max_norm": 0.1, "precision": precision, **STATES[states]}
        optimizer = ParallelOptimizer(adamw, registry, **options)
        x = torch.randn(4, 8, dtype=next(model.parameters()).dtype)
        for step in range(3):
            optimizer.zero_grad()
            loss = model(x).float().square().mean()
            sys.setprofile(note if step == 2 else None)
            optimizer.backward(loss)
            optimizer.step()
            sys.setprofile(None)
    return [os.path.relpath(file, ROOT) for file in dict.fromkeys(entered)]


def test_step_enters_files_that_page_lists(world: World) -> None:
    _, text = Path(ROOT, "optim", "README.md").read_text().split("enters these files, in this order")
    plain, zero = text.partition("The gradients of")[0].split("lead through these as well")
    listed, listed_for_zero = (re.findall(r"^    .{11}(\S+\.py)\b", part, re.MULTILINE) for part in (plain, zero))
    plain_files = world.run(2, files_of_step, "fp32", "whole")
    zero_files = world.run(2, files_of_step, "bf16", "ZeRO-2")
    for entered, entered_for_zero in zip(plain_files, zero_files, strict=True):
        assert listed == entered
        assert listed_for_zero == [file for file in entered_for_zero if file not in listed]
