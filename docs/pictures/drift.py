"""Draw how replicas diverge, and the loss with them, if each rank clips by the norm of its own shards.

The model is the transformer of examples/train_digits.py on tensor=4. Its layer norms, embedding and head are replicated and
get equal gradients. The two runs differ only in the norm that clips.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from common import Figures, Frame, example, main
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import P, ProcessGroupRegistry, gather_objects, spec_of
from meshstep.parallel.layout.picture import COLOURS, line, page, text
from meshstep.testing import run_ranks
from torch import nn

TOPOLOGY, STEPS, LR = "tensor=4", 200, 0.4
RUNS = {"own": "each rank clips by the norm of its shards", "exact": "meshstep: all ranks clip by the global norm"}


def train(steps: int = STEPS, lr: float = LR, runs: tuple[str, ...] = tuple(RUNS)) -> Figures:
    """Return, per run and step, the largest loss of any rank and the relative distance of replicas, on each rank."""
    torch.set_num_threads(1)
    return {run: one(run, steps, lr) for run in runs}


def one(run: str, steps: int, lr: float) -> dict[str, list[float]]:
    script = example("train_digits")
    options = script.read_options(4, ["--topology", TOPOLOGY, "--steps", str(steps)])
    found: dict[str, list[float]] = {"loss": [], "apart": []}
    with ProcessGroupRegistry(options.topology) as registry:
        trainer = script.Trainer(options, registry)
        model, sgd = trainer.model, torch.optim.SGD(trainer.model.parameters(), lr=lr, momentum=0.9)
        optimizer = ParallelOptimizer(sgd, registry, max_norm=1.0) if run == "exact" else None
        for step in range(steps):
            batch = script.batch_at(step, trainer.train_samples, options.batch_size, options.seed)
            sgd.zero_grad()
            loss, _ = trainer.forward(batch)
            if optimizer is not None:
                optimizer.backward(loss)
                optimizer.step()
            else:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                sgd.step()
            found["loss"].append(max(gather_objects(float(loss.detach()), registry)))
            found["apart"].append(apart(model, registry))
    return found


def apart(model: nn.Module, registry: ProcessGroupRegistry) -> float:
    """Return the largest distance of a rank's replicas from the replicas of rank 0, divided by the norm of these."""
    replicas = torch.cat([p.detach().flatten().double() for p in model.parameters() if spec_of(p) == P()])
    first, *others = gather_objects(replicas, registry)
    return max(float((other - first).norm() / first.norm()) for other in others)


def measure() -> Figures:
    return run_ranks(train, 4)[0]


def means(values: list[float], steps: int = 10) -> list[tuple[float, float]]:
    """Return (step, mean over the last ``steps`` values)."""
    return [(end, sum(values[end - steps : end]) / steps) for end in range(steps, len(values) + 1)]


def panels(figures: Figures) -> Iterator[str]:
    steps = len(figures["own"]["loss"])
    apart = Frame(76, 96, 350, 220, 1, steps, 1e-4, 1, log=True)
    loss = Frame(496, 96, 350, 220, 1, steps, 0, 2.6)
    yield from apart.frame("distance of replicas / their norm", (1e-4, 1e-3, 1e-2, 1e-1, 1))
    yield from loss.frame("largest loss of a rank, mean of 10 steps", (0, 1, 2))
    for index, run in enumerate(RUNS):
        colour = COLOURS[(1, 2)[index]]
        yield apart.curve(list(enumerate(figures[run]["apart"], start=1)), colour, 2)
        yield loss.curve(means(figures[run]["loss"]), colour, 2)
        x = 76 + 420 * index
        yield line([(x, 361), (x + 22, 361)], colour=colour, width=5)
        yield text(x + 28, 365, RUNS[run])
    if max(figures["exact"]["apart"]) == 0:
        yield text(84, 308, "meshstep: 0, in every step", "quiet")


def draw(figures: Figures) -> str:
    return page("Replicas that are clipped by different norms diverge", 872, 392, panels(figures))


if __name__ == "__main__":
    main("drift", measure, draw)
