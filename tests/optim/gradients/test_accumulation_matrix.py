"""K micro-batches give the weights of one large batch, up to rounding, in several modes, placements and layouts."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from arguments import arguments
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import P, ProcessGroupRegistry, Topology, shard
from optimizers import momentum_sgd
from precision_modes import MODES
from probes import collectives
from properties import repetitions
from scenarios import VOCAB, Scenario, build, dense_1d, full_tensors
from torch import Tensor
from world import World
from zero_models import BOTH, DATA2, ZERO1, ZERO2, Axes, difference, size_of

ROWS = 60
# Number of accumulation windows: at least two of each length, of which the later ones start with non-zero momentum.
# The effect of a lost or miscounted micro-batch is largest in the first steps. bfloat16 needs more steps, because its
# rounding errors also are largest there: biases start at 0.
STEPS = {"fp32": 4, "fp16": 4, "bf16": 12, "fp16_naive": 4}
ONE: Axes = (("data", 1), ("tensor", 1))
LAYOUTS = {"one process": ONE, "data=2": DATA2, "data=2,tensor=2": BOTH}
STATES: dict[str, dict[str, Any]] = {
    "replicated": {},
    "zero1": ZERO1,
    "zero2": ZERO2,
    "offloaded": {"offload": 0.5},
}
# Number of micro-batches of successive accumulation windows, repeated cyclically. The largest number is
# accumulation_steps; a window with fewer micro-batches ends by step(final=True).
WINDOWS = [(1,), (2, 1), (3,), (5, 3)]
# Collectives of the last micro-batch of a window: gradients (2 buckets with ZeRO-1 and ZeRO-2), norm, new parameters.
# ZeRO-2 also reduce-scatters in every earlier micro-batch; other state placements need no collective there.
SHARDED = {"reduce_scatter_single": 2, "all_reduce": 1, "all_gather_single": 2}
COLLECTIVES = {"replicated": {"all_reduce": 2}, "offloaded": {"all_reduce": 2}, "zero1": SHARDED, "zero2": SHARDED}
# Relative to the largest parameter. Micro-batches of a half-precision model round differently than one batch.
TOLERANCE = {"fp32": 2e-6, "fp16": 1e-3, "bf16": 2e-2, "fp16_naive": 3e-3}


def train(axes: Axes, mode: str, options: dict[str, Any], windows: tuple[int, ...]) -> tuple[dict[str, Tensor], Any]:
    """Return the full parameters after `STEPS` accumulation windows, and the collectives of a micro-batch within a window
    and of a micro-batch that ends a window."""
    with ProcessGroupRegistry(Topology(roles=None, **dict(axes))) as registry:
        scenario = Scenario(axes, "1d", dense_1d)
        model = build(scenario, registry, torch.float32)
        assert model is not None
        MODES[mode].prepare(model, registry)
        precision = MODES[mode]
        optimizer = ParallelOptimizer(
            momentum_sgd(model.parameters()),
            registry,
            **arguments(precision=precision, max_norm=0.4, accumulation_steps=max(windows), **options),
        )
        early: Counter[str] = Counter()
        last: Counter[str] = Counter()
        for step in range(STEPS[mode]):
            micro = windows[step % len(windows)]
            ids = torch.randint(VOCAB, (ROWS, 5), generator=torch.Generator().manual_seed(step))
            for index, part in enumerate(shard(ids, P("data"), registry).chunk(micro)):
                optimizer.zero_grad()
                loss = model(part)
                with collectives() as seen:
                    optimizer.backward(loss)
                    stats = optimizer.step(final=index == micro - 1)
                assert (stats is None) == (index < micro - 1)
                early, last = (seen, last) if stats is None else (early, seen)
        whole = full_tensors(scenario, model, registry, gradients=False)
        return {name: tensor.float() for name, tensor in whole.items()}, (dict(early), dict(last))


@cache
def one_large_batch(world: World, mode: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = world.run(1, train, ONE, mode, {}, (1,))[0][0]
    return found


@pytest.mark.long
@pytest.mark.parametrize(("layout", "states", "mode"), list(product(LAYOUTS, STATES, TOLERANCE)))
def test_accumulated_micro_batches_match_one_large_batch(world: World, layout: str, states: str, mode: str) -> None:
    expected = one_large_batch(world, mode)
    axes = LAYOUTS[layout]
    for windows in repetitions(WINDOWS, layout, states, mode):
        for found, (early, last) in world.run(size_of(axes), train, axes, mode, STATES[states], windows):
            assert difference(found, expected) <= TOLERANCE[mode], f"{windows} micro-batches"
            if layout == "data=2":  # the model itself has no collectives here
                assert last == COLLECTIVES[states]
                scattered = {"reduce_scatter_single": 2} if states == "zero2" and max(windows) > 1 else {}
                assert early == scattered
