"""Report what training does every few steps, with one host read a report and none in between.

    with TensorBoardWriter("runs/1") as board:
        monitor = Monitor(registry, board, lambda report: bar.set_postfix_str(str(report)), every=20)
        for x, y in loader:
            ...
            monitor(optimizer.step(), loss, count=len(x))
        monitor.flush()

Every rank calls the monitor in every step; what it is given stays on the device until it is time for a report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import nan
from os import PathLike
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..amp.capture import is_captured
from ..parallel.mesh.calls import in_call
from ..parallel.mesh.registry import ProcessGroupRegistry
from .norm.powers import accumulation_dtype
from .norm.stats import GradStats


@dataclass(frozen=True)
class Report:
    """What the steps since the last report did. Plain numbers.

    ``str(report)`` is one line, for a log or ``tqdm.set_postfix_str``.

    Attributes:
        step: Steps so far, skipped ones among them.
        loss: Mean over everything since the last report, weighted by the counts; None where no rank gave a loss. One that
            isn't finite is left out where the step was skipped, unless there are no others.
        grad_norm: Global norm in the last step, unscaled, before clipping; inf or NaN as it is.
        clip_coef: What the last step's gradients were multiplied by.
        loss_scale: That of the last step; None in modes without.
        skipped_steps: In all so far.
        per_second: Counts (samples, tokens) a second of wall clock since the last report, of all data coordinates.
        unit: What is counted.
        group_norms: Of each param group, in the last step.
        parameter_norms: By parameter name, in the last step, where the optimizer measures them.
    """

    step: int
    loss: float | None
    grad_norm: float
    clip_coef: float
    loss_scale: float | None
    skipped_steps: int
    per_second: float
    unit: str = "samples"
    group_norms: tuple[float, ...] = ()
    parameter_norms: Mapping[str, float] = field(default_factory=dict)

    def scalars(self) -> dict[str, float]:
        """All numbers but the step, by a name with slashes, as dashboards want them."""
        values: dict[str, float | None] = {
            "loss": self.loss,
            "grad_norm/total": self.grad_norm,
            "clip_coef": self.clip_coef,
            "loss_scale": self.loss_scale,
            "skipped_steps": self.skipped_steps,
            f"{self.unit}_per_second": self.per_second,
        }
        if len(self.group_norms) > 1:
            values.update({f"grad_norm/group_{index}": norm for index, norm in enumerate(self.group_norms)})
        values.update({f"grad_norm/{name}": norm for name, norm in self.parameter_norms.items()})
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        parts = [f"loss {self.loss:.4f}"] if self.loss is not None else []
        parts += [f"norm {self.grad_norm:.3g}", f"clip {self.clip_coef:.3g}"]
        if self.loss_scale is not None:
            parts.append(f"scale {self.loss_scale:g}")
        if self.skipped_steps:
            parts.append(f"skipped {self.skipped_steps}")
        return ", ".join([*parts, f"{self.per_second:.3g} {self.unit}/s"])


class Monitor:
    """Collects on the device what steps give, and calls back with a `Report` every few of them.

    Every rank makes one and calls it in every step; the callbacks run on global rank 0 only.

    Args:
        registry: Losses and counts are those of all its ranks.
        *callbacks: Called with each report, in this order.
        every: Steps between reports, >= 1.
        unit: What the counts count.
    Raises:
        ValueError: every is no whole number >= 1.
    Collectives: one small all-reduce over the world a report. Host reads: one a report, on rank 0.

    Attributes:
        step: Steps so far; `state_dict` has it, so that a curve continues after a resume.
    """

    def __init__(
        self,
        registry: ProcessGroupRegistry,
        *callbacks: Callable[[Report], object],
        every: int = 10,
        unit: str = "samples",
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r}: give a whole number of steps >= 1")
        self.registry, self.callbacks, self.every, self.unit = registry, callbacks, every, unit
        self.step = 0
        self._device = registry.device  # of the sums; where the losses are, as soon as there is one
        self._skipped = self._zero()
        self._window, self._window_count = self._zero(), 0.0  # of the step that is to come: the sum of loss * count
        self._start_over()

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=accumulation_dtype(self._device), device=self._device)

    def _follow(self, value: object) -> None:
        """Go to the device of a tensor that is not on the CPU."""
        if isinstance(value, Tensor) and value.device not in (self._device, torch.device("cpu")):
            self._device = value.device
            for name in ("_skipped", "_window", "_loss", "_loss_count", "_left_out"):
                setattr(self, name, getattr(self, name).to(self._device, accumulation_dtype(self._device)))

    def _start_over(self) -> None:
        # Sums of loss * count and of the counts that have a loss; the latter also of those whose loss is left out.
        self._loss, self._loss_count, self._left_out = self._zero(), self._zero(), self._zero()
        self._count = 0.0
        self._since = time.perf_counter()
        self._last: GradStats | None = None

    @torch.no_grad()
    def __call__(self, stats: GradStats | None, loss: Tensor | float | None = None, count: float = 1) -> None:
        """Note one step or micro-batch, and report if it is time.

        Args:
            stats: What `ParallelOptimizer.step` returned; None (in the middle of an accumulation window) is no step.
            loss: 0-dim: the mean over this rank's batch; None on a rank that has none, such as a first pipeline stage.
            count: Samples, or whatever the unit is, in the batch: the same on ranks that share a data coordinate.
        Raises:
            RuntimeError: A CUDA graph is made: call it after each replay, with what the captured step returned.
        Collectives, host reads: as the class says; none between reports.
        """
        if is_captured():
            raise RuntimeError(
                "Monitor counts steps on the host, of which replays of a CUDA graph do nothing: call it after each replay, "
                "with the stats and the loss of the captured step, which then hold the replay's"
            )
        self._follow(loss if stats is None else stats.found_inf)
        if loss is not None:
            self._window += loss * count
            self._window_count += count
        self._count += count
        if stats is None:
            return
        self._close_window(stats)
        self._skipped += stats.skipped
        self.step += 1
        self._last = stats
        if self.step % self.every == 0:
            self.flush()

    def _close_window(self, stats: GradStats) -> None:
        """Add the step's losses to the sums. What a skipped step's gradients overflowed on says nothing of the model."""
        left_out = stats.found_inf.bool() & ~self._window.isfinite()
        count = self._window.new_full((), self._window_count)
        self._loss += torch.where(left_out, 0.0, self._window)
        self._loss_count += torch.where(left_out, 0.0, count)
        self._left_out += torch.where(left_out, count, 0.0)
        self._window, self._window_count = self._zero(), 0.0

    @torch.no_grad()
    def flush(self) -> None:
        """Report the steps since the last report now, at the end of an epoch or of training; nothing if there are none.

        All ranks call it. Collectives, host reads: those of a report.
        """
        if self._last is not None:
            self._report(self._last)
            self._start_over()

    def state_dict(self) -> dict[str, int]:
        """The counts of steps and of skipped ones, the same on all ranks, for a checkpoint's ``extra=``. Losses since the
        last report are not in it: `flush` before. Host reads: one."""
        return {"step": self.step, "skipped_steps": int(self._skipped)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on counting where `state_dict` was called; what has been collected meanwhile is forgotten.

        Raises:
            ValueError: It is something else; nothing is changed.
        """
        try:
            step, skipped = int(state["step"]), int(state["skipped_steps"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{state!r} is no state of a Monitor; give what its state_dict() returned") from error
        self.step, self._skipped = step, self._zero() + skipped
        self._window, self._window_count = self._zero(), 0.0
        self._start_over()

    def _report(self, stats: GradStats) -> None:
        sums = self._sums()
        if self.registry.global_rank != 0:
            return
        scale = self._zero() if stats.loss_scale is None else stats.loss_scale
        parts = [sums, self._skipped, stats.total_norm, stats.clip_coef, scale, stats.group_norms]
        numbers = torch.cat([part.to(sums).view(-1) for part in (*parts, *stats.parameter_norms.values())]).tolist()
        loss, loss_count, left_out, count, skipped, norm, clip_coef, loss_scale, *rest = numbers
        groups = stats.group_norms.numel()
        report = Report(
            step=self.step,
            loss=loss / loss_count if loss_count else nan if left_out else None,
            grad_norm=norm,
            clip_coef=clip_coef,
            loss_scale=None if stats.loss_scale is None else loss_scale,
            skipped_steps=int(skipped),
            per_second=count / (time.perf_counter() - self._since),
            unit=self.unit,
            group_norms=tuple(rest[:groups]),
            parameter_norms=dict(zip(stats.parameter_norms, rest[groups:], strict=True)),
        )
        for callback in self.callbacks:
            callback(report)

    def _sums(self) -> Tensor:
        """[4]: loss * count, the counts that have a loss, those whose loss is left out, and each data coordinate's count,
        over the world."""
        topology = self.registry.topology
        sharers = topology.world_size // topology.size(*topology.data_axes)
        count = self._loss.new_full((), self._count / sharers)
        sums = torch.stack([self._loss, self._loss_count, self._left_out, count])
        if topology.world_size > 1:
            sums = sums.to(self.registry.device)
            with in_call(self.registry, "Monitor"):
                dist.all_reduce(sums, group=self.registry.group(*topology.axes))
        return sums


class TensorBoardWriter:
    """A callback of `Monitor` that writes each report's numbers to TensorBoard. A context manager, or `close` it.

    Args:
        log_dir: Of the run; the file in it is made with the first report, so on global rank 0 only.
    Raises:
        ImportError: The package tensorboard is not installed.
    """

    def __init__(self, log_dir: str | PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"TensorBoardWriter needs the package tensorboard ({error}); pip install 'meshstep[tensorboard]'"
            ) from error
        self._make: Callable[[str], Any] = SummaryWriter
        self.log_dir = str(log_dir)
        self._writer: Any = None

    def __call__(self, report: Report) -> None:
        """Write one point of each curve."""
        if self._writer is None:
            self._writer = self._make(self.log_dir)
        for name, value in report.scalars().items():
            self._writer.add_scalar(name, value, report.step)

    def close(self) -> None:
        """Write what is pending. A second call does nothing."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> TensorBoardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
