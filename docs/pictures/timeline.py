"""Draw a step of two data ranks as a timeline of its stages.

Processes on one machine share a clock. The step is the one of median length of eleven. Times depend on the machine, so
tests compare only the order of stages.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial, partialmethod
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from common import Figures, main
from meshstep.optim import ParallelOptimizer, Sharded
from meshstep.optim.step.update import UpdateEngine
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from meshstep.parallel.layout.picture import COLOURS, box, line, page, text
from meshstep.testing import run_ranks
from torch import nn

RANKS, WIDTH, DEPTH, STEPS = 2, 512, 6, 11
STAGES = ("forward", "backward", "reduce-scatter", "measure, decide", "update", "all-gather")
Span = list[Any]  # [stage, start, end], in ms


def steps(count: int = STEPS, width: int = WIDTH) -> list[list[Span]]:
    """Return the spans of each step after the first, on each rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(width, width), nn.Tanh())))
    declare(model, {"*": P()})
    found: list[list[Span]] = []
    with ProcessGroupRegistry(Topology(data=RANKS)) as registry, ExitStack() as stack:
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        optimizer = ParallelOptimizer(adamw, registry, max_norm=1.0, states=Sharded("data"))
        spans: list[Span] = []
        watch(optimizer, partial(timed, spans), stack)
        x = torch.randn(64, width)
        for step in range(count + 1):
            spans.clear()
            loss = timed(spans, "forward", lambda: model(x).square().mean())
            timed(spans, "backward", optimizer.backward, loss)
            optimizer.step()
            optimizer.zero_grad()
            if step:
                found.append([list(span) for span in spans])
            dist.barrier()
    return found


def timed(spans: list[Span], stage: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    start = time.perf_counter()
    try:
        return function(*args, **kwargs)
    finally:
        spans.append([stage, 1e3 * start, 1e3 * time.perf_counter()])


def _timed(
    self: object, timed: Callable[..., Any], stage: str, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return timed(stage, call, self, *args, **kwargs)


def watch(optimizer: ParallelOptimizer, timed: Callable[..., Any], stack: ExitStack) -> None:
    """Time the stages of `ParallelOptimizer.step`, and the collectives within them."""
    for name, stage in (("_completion", "reduce-scatter"), ("_clipper", "measure, decide")):
        kind = type(getattr(optimizer, name))
        stack.enter_context(mock.patch.object(kind, "__call__", partialmethod(_timed, timed, stage, kind.__call__)))
    run: Callable[..., None] = UpdateEngine.run
    step: Callable[..., None] = UpdateEngine.step
    for name, stage, call in (("run", "all-gather", run), ("step", "update", step)):
        stack.enter_context(mock.patch.object(UpdateEngine, name, partialmethod(_timed, timed, stage, call)))


def measure() -> Figures:
    by_rank = run_ranks(steps, RANKS)
    lengths = [max(r[i][-1][2] for r in by_rank) - min(r[i][0][1] for r in by_rank) for i in range(STEPS)]
    chosen = sorted(range(STEPS), key=lengths.__getitem__)[STEPS // 2]
    start = min(rank[chosen][0][1] for rank in by_rank)
    ranks = [[[stage, a - start, b - start] for stage, a, b in rank[chosen]] for rank in by_rank]
    return {"torch": torch.__version__, "machine": platform.machine(), "ranks": ranks}


def bars(figures: Figures) -> Iterator[str]:
    end = max(span[2] for rank in figures["ranks"] for span in rank)
    left, width = 92.0, 740.0
    for index, rank in enumerate(figures["ranks"]):
        y = 104 + 66 * index
        yield text(36, y + 26, f"rank {index}", "name")
        yield box(left, y, width, 40, "card")
        # Inner spans end first and are drawn last: the update is inside the span of the all-gather.
        for stage, start, stop in sorted(rank, key=lambda span: span[1] - span[2]):
            x, long = left + width * start / end, width * (stop - start) / end
            yield box(x, y, max(long, 1.5), 40, "", 2, COLOURS[STAGES.index(stage)])
    bottom = 104 + 66 * len(figures["ranks"])
    for moment in range(0, int(end) + 1, max(10 * round(end / 40), 1)):
        x = left + width * moment / end
        yield line([(x, bottom - 22), (x, bottom - 16)])
        yield text(x, bottom, f"{moment} ms", "quiet", "middle")


def legend() -> Iterator[str]:
    x = 36.0
    for stage, colour in zip(STAGES, COLOURS, strict=False):
        yield box(x, 62, 14, 14, "", 3, colour)
        yield text(x + 20, 74, stage)
        x += 46 + 7.4 * len(stage)


def draw(figures: Figures) -> str:
    words = (
        f"{DEPTH} layers of {WIDTH} x {WIDTH}, states=Sharded('data'), gloo on two shared cores, {figures['machine']}"
    )
    words += f", torch {figures['torch']}"
    parts = [*legend(), *bars(figures), text(36, 262, words, "quiet")]
    return page("One step on two data ranks", 872, 282, parts)


if __name__ == "__main__":
    main("timeline", measure, draw)
