"""Precision modes of the digits example on three topologies, compared with one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshstep.parallel import ProcessGroupRegistry, Topology
from properties import repetitions
from run_example import example
from test_examples import options
from world import World

STEPS, SPLIT = 54, 25  # number of steps in one process, and on each topology
TOPOLOGIES = ("tensor=2", "row=2,col=2", "data=2,tensor=2")
# Largest allowed difference of the losses over the first 25 steps: about five times the observed difference. fp16 has 11
# and bf16 8 significant bits, and sums over shards round in another order. 8-bit layers amplify the difference.
TOLERANCE = {
    "fp32": 2.5e-6,
    "fp16": 6e-4,
    "bf16": 6e-3,
    "fp16_naive": 7.5e-4,
    "O0": 2.5e-6,
    "O1": 6e-4,
    "O2": 7.5e-4,
    "O3": 6e-4,
    "fp8": 2e-2,
}


def losses(topology: str, precision: str, steps: int) -> list[float]:
    script: Any = example("train_digits")
    given = options(steps=STEPS, batch_size=16, lr=3e-3, verify=False, precision=precision, depth=1)
    with ProcessGroupRegistry(Topology.parse(topology) if topology else Topology()) as registry:
        trainer = script.Trainer(given, registry)
        for step in range(steps):
            trainer.step(script.batch_at(step, trainer.train_samples, given.batch_size, given.seed))
        return torch.stack(trainer.history)[:, 0].tolist()


@pytest.mark.parametrize("precision", TOLERANCE)
def test_digits_losses_in_each_precision_match_single_process_run(world: World, precision: str) -> None:
    alone = losses("", precision, STEPS)
    assert sum(alone[-10:]) / 10 < alone[0] - 0.5, "the model should learn"
    for topology in repetitions(TOPOLOGIES, precision):
        for found in world.run(Topology.parse(topology).world_size, losses, topology, precision, SPLIT):
            difference = max(abs(a - b) for a, b in zip(found, alone[:SPLIT], strict=True))
            assert difference <= TOLERANCE[precision], topology
