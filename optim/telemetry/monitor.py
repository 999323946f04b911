"""Report what training does every few steps, with one host read a report and none in between.

    with JsonLines("run.jsonl") as lines:
        monitor = Monitor(registry, lines, lambda report: bar.set_postfix_str(str(report)), every=20)
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
from functools import partial
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor

from ...amp.capture import is_captured
from ...parallel.mesh.agreement import check_same, gather_objects, on_all_ranks
from ...parallel.mesh.call_tracker import in_call
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.text import printable
from ...parallel.mesh.value_checks import check_count, fields
from ..norm.measure import GradStats, check_every
from ..norm.powers import accumulation_dtype
from ..parallel_optimizer import ParallelOptimizer
from .labels import world_sum
from .telemetry import Measurement, Telemetry

# What the steps since the last report did, in plain numbers -----------------------------------------------------------


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
        clipped, skipped: Fractions of the steps since the last report that were clipped, and that were skipped.
        utilization: Of the devices' peak, by `Flops`; None without.
        measured_step: The step that `figures` are of; None where none was measured since the last report.
        figures: What `Telemetry` measured, by name.
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
    clipped: float | None = None
    skipped: float | None = None
    utilization: float | None = None
    measured_step: int | None = None
    figures: Mapping[str, float] = field(default_factory=dict)

    def scalars(self) -> dict[str, float]:
        """All numbers except the step, by a `printable` name with slashes, as dashboards want them."""
        own: dict[str, float | None] = {
            "loss": self.loss,
            "grad_norm/total": self.grad_norm,
            "clip_coef": self.clip_coef,
            "loss_scale": self.loss_scale,
            "skipped_steps": self.skipped_steps,
            f"{self.unit}_per_second": self.per_second,
            "clipped_fraction": self.clipped,
            "skipped_fraction": self.skipped,
            "flops_utilization": self.utilization,
        }
        # Of one name may be what was measured a few steps ago, and what the last step says: that one is taken.
        values: dict[str, float | None] = {**self.figures, **own}
        if len(self.group_norms) > 1:
            values.update({f"grad_norm/group_{index}": norm for index, norm in enumerate(self.group_norms)})
        values.update({f"grad_norm/{name}": norm for name, norm in self.parameter_norms.items()})
        return {printable(name): value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        parts = [f"loss {self.loss:.4f}"] if self.loss is not None else []
        parts += [f"norm {self.grad_norm:.3g}", f"clip {self.clip_coef:.3g}"]
        if self.loss_scale is not None:
            parts.append(f"scale {self.loss_scale:g}")
        if self.skipped_steps:
            parts.append(f"skipped {self.skipped_steps}")
        if self.utilization is not None:
            parts.append(f"mfu {self.utilization:.1%}")
        return ", ".join([*parts, f"{self.per_second:.3g} {printable(self.unit)}/s"])


# How much of what the devices could compute a model needs: model flops utilization ------------------------------------

#     utilization = counts a second * flops a count / (devices * peak)
#
# Chowdhery et al. 2022, "PaLM", arXiv:2204.02311, appendix B: what the model needs counts, not what was computed, so
# nothing that is computed again.


@dataclass(frozen=True)
class Flops:
    """What a `Monitor` computes the utilization of.

    Args:
        per_count: Floating-point operations of forward and backward for one of what the monitor counts, of the whole model.
        peak: Of one rank's device, a second, in the dtype that is computed in.
    Raises:
        ValueError: One is not finite and positive.
    """

    per_count: float
    peak: float

    def __post_init__(self) -> None:
        for name, value in (("per_count", self.per_count), ("peak", self.peak)):
            if not (isfinite(value) and value > 0):
                raise ValueError(f"Flops({name}={value}): give a finite number > 0")

    @classmethod
    def of_parameters(cls, optimizer: ParallelOptimizer[Any], peak: float, active: float = 1.0) -> Flops:
        """6 N a token: two for each parameter in forward, four in backward. Attention between tokens is not in it.

        Args:
            optimizer: N is what its plan counts: every logical element once, over all ranks.
            active: The fraction of them that a token meets, below 1 for experts.
        Kaplan et al. 2020, arXiv:2001.08361, section 2.1.
        """
        counted = optimizer.plan.counted
        assert counted is not None, "an optimizer's plan is agreed"
        return cls(6.0 * counted * active, peak)

    def utilization(self, per_second: float, registry: ProcessGroupRegistry) -> float:
        """From counts a second of all ranks together."""
        return per_second * self.per_count / (self.peak * registry.topology.world_size)


# Monitor --------------------------------------------------------------------------------------------------------------


class Monitor:
    """Collects on the device what steps give, and calls back with a `Report` every few of them.

    Every rank makes one and calls it in every step; the callbacks run on global rank 0 only.

    Args:
        registry: Losses and counts are those of all its ranks.
        *callbacks: Called with each report, in this order. One that has a method ``begin`` is told there, before the first
            report and again after `load_state_dict`, which step the reports follow: what it has of later ones is of a run
            that was given up.
        every: Steps between reports, >= 1.
        unit: What the counts count.
        telemetry: Whose figures reports have, of the last step that it measured since the report before.
        flops: For how much of the devices' peak is used.
    Raises:
        ValueError: On every rank: every is no whole number >= 1, or not the same on all ranks.
        RuntimeError: On every rank: some ranks make no Monitor, as with ``if rank == 0``, and came to another call.
    Collectives: here, an object all-gather; one small all-reduce over the world per report (over gloo an object
    all-gather). Host reads: one per report, on rank 0; over gloo on all ranks.

    Attributes:
        step: Steps so far; `state_dict` has it, so that a curve continues after a resume.
    """

    def __init__(
        self,
        registry: ProcessGroupRegistry,
        *callbacks: Callable[[Report], object],
        every: int = 10,
        unit: str = "samples",
        telemetry: Telemetry | None = None,
        flops: Flops | None = None,
    ) -> None:
        with in_call(registry, "Monitor"):
            on_all_ranks(partial(check_every, every, f"every={every!r}"), registry)
            check_same({"every= of Monitor": every}, registry)
        self.registry, self.callbacks, self.every, self.unit = registry, callbacks, every, unit
        self.telemetry, self.flops = telemetry, flops
        self.step = 0
        self._begun, self._began_at = False, 0
        self._reported: Measurement | None = None
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
            for name in ("_skipped", "_window", "_loss", "_loss_count", "_left_out", "_clipped", "_skipped_before"):
                setattr(self, name, getattr(self, name).to(self._device, accumulation_dtype(self._device)))

    def _start_over(self) -> None:
        # Sums of loss * count and of the counts that have a loss; the latter also of those whose loss is left out.
        self._loss, self._loss_count, self._left_out = self._zero(), self._zero(), self._zero()
        # Of the steps since the last report how many were clipped; of all before it how many were skipped.
        self._clipped, self._skipped_before = self._zero(), self._skipped.clone()
        self._count, self._steps = 0.0, 0
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
        skipped = stats.skipped
        self._skipped += skipped
        self._clipped += (stats.clip_coef < 1) & (skipped == 0)
        self.step += 1
        self._steps += 1
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
            fields({"step": check_count, "skipped_steps": check_count})(state, "state")
        except ValueError as error:
            raise ValueError(
                f"{state!r:.200} is no state of a Monitor; give what its state_dict() returned ({error})"
            ) from None
        step, skipped = state["step"], state["skipped_steps"]
        self.step, self._skipped = step, self._zero() + skipped
        self._window, self._window_count = self._zero(), 0.0
        self._begun, self._began_at = False, step
        self._start_over()

    def _report(self, stats: GradStats) -> None:
        sums, measured = self._sums(), self._measured()
        if self.registry.global_rank != 0:
            return
        scale = self._zero() if stats.loss_scale is None else stats.loss_scale
        parts = [sums, self._skipped, self._skipped_before, self._clipped, stats.total_norm, stats.clip_coef, scale]
        parts += [stats.group_norms, *stats.parameter_norms.values(), *(() if measured is None else [measured.values])]
        numbers = torch.cat([part.to(sums).view(-1) for part in parts]).tolist()
        loss, loss_count, left_out, count, skipped, before, clipped, norm, clip_coef, loss_scale, *rest = numbers
        groups = stats.group_norms.numel()
        figures = groups + len(stats.parameter_norms)
        per_second = count / (time.perf_counter() - self._since)
        report = Report(
            step=self.step,
            loss=loss / loss_count if loss_count else nan if left_out else None,
            grad_norm=norm,
            clip_coef=clip_coef,
            loss_scale=None if stats.loss_scale is None else loss_scale,
            skipped_steps=int(skipped),
            per_second=per_second,
            unit=self.unit,
            group_norms=tuple(rest[:groups]),
            parameter_norms=dict(zip(stats.parameter_norms, rest[groups:figures], strict=True)),
            clipped=clipped / self._steps,
            skipped=(skipped - before) / self._steps,
            utilization=None if self.flops is None else self.flops.utilization(per_second, self.registry),
            measured_step=None if measured is None else measured.step,
            figures={} if measured is None else dict(zip(measured.names, rest[figures:], strict=True)),
        )
        self._tell(report)

    def _measured(self) -> Measurement | None:
        """What was measured since the last report."""
        found = None if self.telemetry is None else self.telemetry.last
        if found is self._reported:
            return None
        self._reported = found
        return found

    def _tell(self, report: Report) -> None:
        for callback in self.callbacks:
            begin = getattr(callback, "begin", None)
            if not self._begun and callable(begin):
                begin(self._began_at)
            callback(report)
        self._begun = True

    def _sums(self) -> Tensor:
        """[4]: loss * count, the counts that have a loss, those whose loss is left out, and each data coordinate's count,
        over the world."""
        topology = self.registry.topology
        sharers = topology.world_size // topology.size(*topology.data_axes)
        count = self._loss.new_full((), self._count / sharers)
        sums = torch.stack([self._loss, self._loss_count, self._left_out, count])
        with in_call(self.registry, "Monitor"):
            if topology.world_size == 1 or self.registry.device.type != "cpu":
                return world_sum(sums, self.registry)
            # Where only some ranks report, an all-reduce that meets another one would abort the process inside gloo.
            return sums.new_tensor(gather_objects(sums.tolist(), self.registry)).sum(0)
