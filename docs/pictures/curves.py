"""Draw loss and gradient norm of examples/train_digits.py in six layouts, and their difference from the dense run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch
from common import HERE, Figures, Frame, example, figures_of, keep, main
from meshstep.parallel import ProcessGroupRegistry, Topology
from meshstep.parallel.layout.picture import COLOURS, line, page, text
from meshstep.testing import run_ranks

LAYOUTS = {  # the dense one first
    "data=1": "dense",
    "tensor=4": "1-D",
    "row=2,col=2": "2-D",
    "depth=2,row=2,col=2": "2.5-D",
    "input=2,weight=2,output=2": "3-D",
    "data=2,tensor=2": "1-D on 2 data ranks",
}
STEPS = 200


def train(topology: str, steps: int = STEPS, stop_after: int = STEPS) -> Figures:
    """Return loss and norm of each step, and the accuracy on the test samples, on each rank."""
    torch.set_num_threads(1)
    script = example("train_digits")
    options = script.read_options(Topology.parse(topology).world_size, ["--topology", topology, "--steps", str(steps)])
    with ProcessGroupRegistry(options.topology) as registry:
        trainer = script.Trainer(options, registry)
        for step in range(stop_after):
            trainer.step(script.batch_at(step, trainer.train_samples, options.batch_size, options.seed))
        history = torch.stack(trainer.history).double()
        return {"loss": history[:, 0].tolist(), "norm": history[:, 2].tolist(), "accuracy": trainer.test()[1]}


def measure() -> Figures:
    """Measure layouts without figures, minutes each. Remove figures/curves.json to measure all layouts."""
    found = figures_of("curves") if (HERE / "figures" / "curves.json").exists() else {}
    for topology in LAYOUTS:
        if topology not in found:
            found[topology] = run_ranks(train, Topology.parse(topology).world_size, topology)[0]
            keep("curves", found)
    return {topology: found[topology] for topology in LAYOUTS}


def off(values: list[float], dense: list[float]) -> list[tuple[float, float]]:
    """Return (step, largest relative difference up to this step). The figures have 6 digits."""
    differences = [abs(a / b - 1) for a, b in zip(values, dense, strict=True)]
    return list(enumerate(accumulate(differences, max), start=1))


def panels(figures: Figures) -> Iterator[str]:
    dense = next(iter(figures.values()))
    steps = len(dense["loss"])
    places = (("loss", (0.0, 1.0, 2.0), 0.0, 2.6), ("norm", (0.0, 1.0, 2.0, 3.0), 0.0, 3.2))
    for index, (name, ticks, low, high) in enumerate(places):
        frame = Frame(76 + 410 * index, 96, 350, 190, 1, steps, low, max(high, 1.02 * max(dense[name])))
        yield from frame.frame({"loss": "loss", "norm": "gradient norm"}[name], ticks)
        for rank, (_, values) in enumerate(figures.items()):  # wide lines first, so that thin lines stay visible
            points = list(enumerate(values[name], start=1))
            yield frame.curve(points, COLOURS[rank], 1.2 + 0.6 * (len(figures) - 1 - rank))
        below = Frame(76 + 410 * index, 360, 350, 120, 1, steps, 1e-7, 1e-2, log=True)
        yield from below.frame(f"{name}: difference from dense", (1e-6, 1e-4, 1e-2))
        for rank, values in list(enumerate(figures.values()))[1:]:
            yield below.curve(off(values[name], dense[name]), COLOURS[rank], 1.6)
    x = 76.0
    for rank, topology in enumerate(figures):
        yield line([(x, 531), (x + 22, 531)], colour=COLOURS[rank], width=5)
        yield text(x + 28, 535, LAYOUTS[topology])
        x += 48 + 7.6 * len(LAYOUTS[topology])
    note = "Difference: the largest |value / dense value - 1| in all steps so far, of values with 6 digits"
    yield text(76, 562, note, "quiet")


def draw(figures: Figures) -> str:
    return page("A transformer trained in six layouts (examples/train_digits.py)", 872, 586, panels(figures))


if __name__ == "__main__":
    main("curves", measure, draw)
