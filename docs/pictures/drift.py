"""Copies that drift apart where each rank clips by what it holds, and the loss with them; and the same steps by the norm.

The transformer of examples/train_digits.py, split over tensor=4: its layer norms, embedding and head are copies, which see
the same gradients. Everything is the same in both runs but whose norm clips.
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
RUNS = {"own": "each rank clips by the norm of what it holds", "exact": "meshstep: all clip by the norm of the model"}


def train(steps: int = STEPS, lr: float = LR, runs: tuple[str, ...] = tuple(RUNS)) -> Figures:
    """On each rank, of both runs: the largest loss of any rank, and how far copies are apart, relative, of each step."""
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
    """The distance of all copies from those of rank 0, over their norm; of the rank that is farthest."""
    copies = torch.cat([p.detach().flatten().double() for p in model.parameters() if spec_of(p) == P()])
    first, *others = gather_objects(copies, registry)
    return max(float((other - first).norm() / first.norm()) for other in others)


def measure() -> Figures:
    return run_ranks(train, 4)[0]


def means(values: list[float], steps: int = 10) -> list[tuple[float, float]]:
    """(step, mean over the last steps)."""
    return [(end, sum(values[end - steps : end]) / steps) for end in range(steps, len(values) + 1)]


def panels(figures: Figures) -> Iterator[str]:
    steps = len(figures["own"]["loss"])
    apart = Frame(76, 96, 350, 220, 1, steps, 1e-4, 1, log=True)
    loss = Frame(496, 96, 350, 220, 1, steps, 0, 2.6)
    yield from apart.frame("copies apart, relative", (1e-4, 1e-3, 1e-2, 1e-1, 1))
    yield from loss.frame("loss of the worst rank, mean of 10 steps", (0, 1, 2))
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
    return page("Copies that clip by different norms: they drift apart", 872, 392, panels(figures))


if __name__ == "__main__":
    main("drift", measure, draw)
