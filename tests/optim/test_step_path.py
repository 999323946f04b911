"""How far a reader must go to follow a step: the files that it enters, and how often it comes back to one.

The figures are limits: whoever makes them fall lowers them here. They had doubled unseen when nothing held them (33 files
and 57 returns of a float32 step), by what a step asks again each time: whether it is captured, which kernels there are.
"""

from __future__ import annotations

import gc
import inspect
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

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


class Way(NamedTuple):
    """Of a step.

    Args:
        files: That it enters, in this order.
        returns: How often it enters one that it has entered before.
    """

    files: list[str]
    returns: int


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


def path_of(precision: Any, states: str) -> Way:
    """Of the third step, with backward, on one of the ranks; by the compiled loops."""
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
        optimizer = ParallelOptimizer(adamw, registry, max_norm=0.1, precision=precision, **STATES[states])
        x = torch.randn(4, 8, dtype=next(model.parameters()).dtype)
        for step in range(3):
            optimizer.zero_grad()
            loss = model(x).float().square().mean()
            sys.setprofile(note if step == 2 else None)
            optimizer.backward(loss)
            optimizer.step()
            sys.setprofile(None)
    files = [os.path.relpath(file, ROOT) for file in dict.fromkeys(entered)]
    return Way(files, len(entered) - len(files))


@pytest.mark.parametrize(
    ("precision", "states", "files", "returns"),
    [("fp32", "whole", 9, 5), ("bf16", "whole", 12, 9), ("bf16", "ZeRO-2", 14, 20)],
)
def test_the_way_of_a_step_grows_no_longer(world: World, precision: str, states: str, files: int, returns: int) -> None:
    for found in world.run(2, path_of, precision, states):
        assert len(found.files) <= files, found.files
        assert found.returns <= returns, found.files


def test_it_is_the_one_that_is_told(world: World) -> None:
    """By the page: the files of a float32 step in their order, and those that ZeRO-2 adds, in theirs."""
    _, text = Path(ROOT, "optim", "README.md").read_text().split("comes through these files")
    plain, zero = text.partition("The gradients of")[0].split("lead through these as well")
    told, more = (re.findall(r"^    .{11}(\S+\.py)\b", part, re.MULTILINE) for part in (plain, zero))
    for found, others in zip(
        world.run(2, path_of, "fp32", "whole"), world.run(2, path_of, "bf16", "ZeRO-2"), strict=True
    ):
        assert told == found.files
        assert more == [file for file in others.files if file not in told]


def test_what_makes_an_optimizer_has_nine_arguments() -> None:
    parameters = inspect.signature(ParallelOptimizer.__init__).parameters.values()
    assert len([of for of in parameters if of.kind is not of.VAR_KEYWORD]) <= 1 + 9, "itself, and nine"
