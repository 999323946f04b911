"""Every precision mode trains the digits example on every topology with the losses of one process, within its rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshstep.parallel import ProcessGroupRegistry, Topology
from properties import repetitions
from run_example import example
from test_examples import options
from world import World

STEPS = 50
TOPOLOGIES = ("tensor=2", "row=2,col=2", "data=2,tensor=2")
# Largest difference of the losses over 50 steps, which fall from 2.4 to about 1.2: about five times what was seen. Half
# types carry 11 (fp16) or 8 (bf16) significant bits, and split sums round in another order; 8-bit layers amplify that.
TOLERANCE = {
    "fp32": 3e-6,
    "fp16": 2e-3,
    "bf16": 1.5e-2,
    "fp16_naive": 3e-3,
    "O0": 3e-6,
    "O1": 2e-3,
    "O2": 3e-3,
    "O3": 3e-3,
    "fp8": 0.1,
}


def losses(topology: str, precision: str) -> list[float]:
    script: Any = example("train_digits")
    given = options(steps=STEPS, batch_size=16, lr=3e-3, verify=False, precision=precision)
    with ProcessGroupRegistry(Topology.parse(topology) if topology else Topology()) as registry:
        trainer = script.Trainer(given, registry)
        for step in range(STEPS):
            trainer.step(script.batch_at(step, trainer.train_samples, given.batch_size, given.seed))
        return torch.stack(trainer.history)[:, 0].tolist()


@pytest.mark.parametrize("precision", TOLERANCE)
def test_losses_equal_those_of_one_process(world: World, precision: str) -> None:
    alone = losses("", precision)
    assert sum(alone[-10:]) / 10 < alone[0] - 0.5, "it should learn"
    for topology in repetitions(TOPOLOGIES, precision):
        for found in world.run(Topology.parse(topology).world_size, losses, topology, precision):
            difference = max(abs(a - b) for a, b in zip(found, alone, strict=True))
            assert difference <= TOLERANCE[precision], topology
