"""Common code of the training scripts: loop over batches, progress, curves and checkpoints."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from meshstep.optim import Booster, GradStats, Monitor, ParallelOptimizer, Report, newest_checkpoint
from meshstep.parallel import ShardedDataLoader, init_distributed
from plot import draw
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm

Row = tuple[int, float, float]  # step, loss, gradient norm


# The reference computes in float64, and the model in float32, or in float64 in train_moe.py. The difference is the rounding
# of forward and backward.
LARGEST_DIFFERENCE = 1e-5


def verdict(differences: Sequence[float]) -> tuple[str, bool]:
    """Return the text that ``--verify`` prints, and True if no difference exceeds `LARGEST_DIFFERENCE`; False for NaN.

    Args:
        differences: Relative difference from the dense norm per step.
    """
    largest = float(torch.tensor([0.0, *differences]).max())
    right = largest <= LARGEST_DIFFERENCE
    return (
        f"the norm differs from the dense model's by at most {largest:.1e} (relative): {'right' if right else 'WRONG'}",
        right,
    )


def check_verify(options: argparse.Namespace) -> None:
    """Raise ValueError if ``--verify`` is given with a precision that is too low for it."""
    if options.verify and options.precision != "fp32":
        raise ValueError(
            "--verify requires norms within 1e-5 of a float64 model, which only fp32 reaches: leave out --verify or "
            "--precision"
        )


def steps_asked(options: argparse.Namespace, per_epoch: int) -> int:
    """Return ``--steps`` if it is given, else ``--epochs`` times ``per_epoch``, the number of steps per epoch."""
    steps: int = options.steps or options.epochs * per_epoch
    return steps


def once_on_each_machine(make: Callable[[], object]) -> None:
    """Call ``make`` on one rank of every machine; all ranks wait until these calls have returned."""
    if init_distributed().local_rank == 0:  # the process group exists; the call only returns the local rank
        make()
    dist.barrier()


def prepare_files(
    options: argparse.Namespace, folder: str, make_sample: Callable[[Path], object], download: Callable[[], object]
) -> None:
    """Make the sample of ``--sample``, or download the data set for ``--download``.

    Args:
        folder: The folder in ``--data`` that has the files of the data set.
        make_sample: Writes the sample into a folder.
        download: Downloads the data set.
    Raises:
        ValueError: There are no files, and neither ``--sample`` nor ``--download`` is given.
    """
    if options.sample:
        once_on_each_machine(lambda: make_sample(options.data / "sample"))
    elif options.download:
        once_on_each_machine(download)
    elif not (options.data / folder).exists():
        raise ValueError(f"there is no {options.data / folder}: give --sample, --download, or another --data")


class Run:
    """The steps of one run, from the first step, or from the checkpoint of ``--resume``, to the last.

        for images, labels in run.batches(loader):
            ...
            run.note(optimizer.step(), loss.detach(), count=len(images))

    Args:
        options: Options of `add_training_flags`.
        booster: The `Booster` of the run.
        model, optimizer, schedule: Results of `Booster.boost`. With ``--resume``, the newest checkpoint is loaded into
            them, if there is one.
        steps: Total number of steps.
        every: Steps between reports, which are the points of the curve.
        unit: Name of the items that ``count`` of `note` counts.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        booster: Booster,
        model: nn.Module,
        optimizer: ParallelOptimizer,
        schedule: LRScheduler,
        *,
        steps: int,
        every: int,
        unit: str,
    ) -> None:
        self.options, self.booster, self.steps = options, booster, steps
        self.is_first = booster.registry.global_rank == 0
        self.rows: list[Row] = []  # all reports, on the first rank
        self.seconds = 0.0
        self.monitor = Monitor(booster.registry, self._show, every=every, unit=unit)
        self._state = model, optimizer, schedule
        if options.resume is not None and newest_checkpoint(options.resume) is not None:
            saved = booster.load(options.resume, *self._state)
            self.monitor.step = saved["step"]
            self.rows = list(map(tuple, saved["rows"]))

    @property
    def done(self) -> int:
        """Return the number of steps so far."""
        return self.monitor.step

    def batches(self, loader: ShardedDataLoader[Any], per_step: int = 1) -> Iterator[Any]:
        """Yield the batches of all remaining steps, epoch after epoch, with a progress bar.

        Args:
            per_step: Batches of the loader per step.
        """
        start, per_epoch = time.perf_counter(), -(-len(loader) // per_step)
        # The position is computed from the number of steps, so a run may continue with another --accumulate.
        loader.load_state_dict(loader.state_after(self.done // per_epoch, self.done % per_epoch * per_step))
        total = max(self.steps, self.done)
        with tqdm(total=total, initial=self.done, unit="step", disable=not self.is_first) as self._bar:
            while self.done < self.steps:
                for batch in loader:
                    yield batch
                    if self.done >= self.steps:
                        break
        self.seconds = time.perf_counter() - start

    def micro_batches(self, loader: ShardedDataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the micro-batches of all remaining steps, as (images, labels).

        Of the calls per micro-batch, `step` acts only after the last micro-batch of a batch, and `zero_grad` only before
        the first one.
        """
        count = self.options.accumulate
        for images, labels in self.batches(loader):
            yield from zip(images.chunk(count), labels.chunk(count), strict=True)

    def note(self, stats: GradStats | None, loss: Tensor | None, count: int) -> None:
        """Record the results of a micro-batch, and save a checkpoint if it is due.

        Args:
            stats: Result of `step`; None before the last micro-batch of an accumulation window.
            loss: The loss; None on a rank without a loss.
            count: Number of items in the micro-batch.
        """
        self.monitor(stats, loss, count)
        if stats is None:
            return
        self._bar.update()
        if self.options.resume is not None and self.done % self.options.save_every == 0:
            self.booster.save(self.options.resume, *self._state, extra={"step": self.done, "rows": self.rows})

    def _show(self, report: Report) -> None:
        self._bar.set_postfix_str(str(report), refresh=False)
        assert report.loss is not None
        self.rows.append((report.step, report.loss, report.grad_norm))

    def write(self) -> None:
        """Write the files of ``--curve`` and ``--plot`` on the first rank."""
        if self.is_first and self.options.curve is not None:
            write_csv(self.options.curve, "step,loss,norm", self.rows)
        if self.is_first and self.options.plot is not None:
            beside = () if self.options.beside is None else read_csv(self.options.beside)
            write_plot(self.options.plot, title_of(self.options), self.rows, beside)


def title_of(options: argparse.Namespace) -> str:
    """Return the title of a plot: topology and precision."""
    return f"{options.topology!r}, {options.precision}"


def write_csv(path: Path, header: str, rows: Sequence[Sequence[float]]) -> None:
    """Write the header and one line per row, each number with all digits."""
    path.write_text("\n".join([header, *(",".join(map(repr, row)) for row in rows), ""]))


def read_csv(path: Path) -> list[list[float]]:
    """Return the rows written by `write_csv`."""
    return [[float(number) for number in line.split(",")] for line in path.read_text().splitlines()[1:]]


def write_plot(path: Path, title: str, rows: Sequence[Sequence[float]], beside: Sequence[Sequence[float]] = ()) -> None:
    """Write a plot of rows (step, loss, gradient norm), with the curves of another run in grey."""
    path.write_text(draw(title, curves_of(rows), curves_of(beside)), encoding="utf-8")


def curves_of(rows: Sequence[Sequence[float]]) -> dict[str, list[tuple[float, float]]]:
    """Return the points (step, value) of each curve, by the name of the curve."""
    return {"loss": [(row[0], row[1]) for row in rows], "gradient norm": [(row[0], row[2]) for row in rows]}
