"""`Monitor`, which passes a `Report` of a training run to callbacks every few steps.

Losses and statistics of steps stay on the device between reports. Only a step with a report needs host synchronization.

    with JsonLines("run.jsonl") as lines:
        monitor = Monitor(registry, lines, lambda report: bar.set_postfix_str(str(report)), every=20)
        for x, y in loader:
            ...
            monitor(optimizer.step(), loss, count=len(x))
        monitor.flush()

Every rank calls the monitor in every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor

from ...amp.capture import is_captured
from ...parallel.mesh.agreement import check_same, gather_objects, on_all_ranks
from ...parallel.mesh.call_tracker import track_call
from ...parallel.mesh.deprecation import renamed_fields
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.text import printable
from ...parallel.mesh.value_checks import check_count, fields
from ..norm.measure import GradStats, check_every
from ..norm.powers import accumulation_dtype
from ..parallel_optimizer import ParallelOptimizer
from .telemetry import Measurement, Telemetry, world_sum

# Report ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """Numbers that describe the steps since the last report, on the host.

        monitor = Monitor(registry, lambda report: print(report.step, report.loss, report.grad_norm))

    ``str(report)`` is one line for a log or ``tqdm.set_postfix_str``.

    Attributes:
        step: Number of steps so far, including skipped steps.
        loss: Mean loss since the last report over all ranks, weighted by ``count=`` of the monitor. A non-finite loss
            of a step that was skipped because of non-finite gradients is left out. NaN if all losses were left out.
            None if no rank gave a loss.
        grad_norm: Global gradient norm of the last step, unscaled and before clipping; may be inf or NaN.
        clip_coef: Clip coefficient of the last step.
        loss_scale: Loss scale of the last step; None in modes without one.
        skipped_steps: Number of skipped steps so far.
        per_second: Number of samples (or other units; see ``unit``) of all data ranks together per second of wall-clock
            time, since the last report.
        unit: The unit that ``count=`` of the monitor counts. Default: "samples".
        group_norms: Gradient norm of each param group in the last step, unscaled and before clipping.
        parameter_norms: {parameter name: gradient norm in the last step}; empty if the optimizer does not measure them.
        clipped: Fraction of the steps since the last report that had a clip coefficient below 1 and were not skipped.
        skipped: Fraction of skipped steps among the steps since the last report.
        utilization: Floating-point operations per second as a fraction of the devices' peak, from `Flops`. None without
            `Flops`.
        measured_step: The step that `Telemetry` measured for `figures`. None if it measured no step since the last
            report.
        figures: {name: number}, the numbers that `Telemetry` measured in step ``measured_step``; empty if
            ``measured_step`` is None.
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
        """Return {name: number} with all numbers of the report, such as ``{"grad_norm/total": 1.5}``.

        ``step``, ``measured_step`` and numbers that are None are left out. Norms of param groups are included only if
        there are several groups. Control characters in names are replaced by escapes.
        """
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
        # a number of the last step replaces a figure of an earlier measured step with the same name
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


# Model flops utilization ----------------------------------------------------------------------------------------------

#     utilization = counts per second * flops per count / (devices * peak)
#
# A count is a sample, token or other unit that the monitor counts. Operations of activation recomputation do not count.
# Source: Chowdhery et al. 2022, "PaLM", arXiv:2204.02311, appendix B.


@renamed_fields(per_count="per_unit")
@dataclass(frozen=True)
class Flops:
    """Numbers from which a `Monitor` computes the model flops utilization of the devices.

        monitor = Monitor(registry, unit="tokens", flops=Flops.of_parameters(optimizer, peak=989e12))

    Args:
        per_unit: Floating-point operations in forward and backward of the full model, per sample (or other unit) that
            the monitor counts.
        peak: Peak floating-point operations per second of one rank's device, in the dtype of the computation.

    Raises:
        ValueError: A number is not finite and positive.
    """

    per_unit: float
    peak: float

    def __post_init__(self) -> None:
        for name, value in (("per_unit", self.per_unit), ("peak", self.peak)):
            if not (isfinite(value) and value > 0):
                raise ValueError(f"Flops({name}={value}): give a finite number > 0")

    @classmethod
    def of_parameters(cls, optimizer: ParallelOptimizer[Any], peak: float, active: float = 1.0) -> Flops:
        """Return `Flops` with 6 N operations per token: 2 per element of the model in forward, 4 in backward.

        N is the number of elements of the full tensors of all parameters of the optimizer, times ``active``. The
        products of queries and keys, and of attention weights and values, are not included.
        Reference: Kaplan et al. 2020, arXiv:2001.08361, section 2.1.

        Args:
            optimizer: The optimizer of the model.
            peak: Peak floating-point operations per second of one rank's device, in the dtype of the computation.
            active: Fraction of the elements that a token uses; below 1 with experts. Default: 1.

        Raises:
            ValueError: ``peak`` or ``active`` is not finite and positive.
        """
        counted = optimizer.plan.counted
        assert counted is not None, "all ranks have agreed on an optimizer's plan"
        if not (isfinite(active) and active > 0):
            raise ValueError(f"Flops.of_parameters(active={active}): give a finite number > 0; without experts, 1.0")
        return cls(6.0 * counted * active, peak)

    def utilization(self, per_second: float, registry: ProcessGroupRegistry) -> float:
        """Return the operations per second as a fraction of the peak of all ranks' devices.

        Args:
            per_second: Number of units (such as tokens) of all data ranks together per second.
            registry: Provides the number of ranks.
        """
        return per_second * self.per_unit / (self.peak * registry.topology.world_size)


# Monitor --------------------------------------------------------------------------------------------------------------

_FRACTION = 2.0**32


def exact_parts(values: Tensor) -> Tensor:
    """Return the integer part of each value, and its fraction rounded to a multiple of 2^-32: [2, n] float64.

    Sums of integer parts are exact up to 2^53, and sums of fractions for up to a million values. So these sums are
    bitwise identical in every order. A non-finite value has the fraction 0.
    """
    whole = values.floor()
    fraction = ((values - whole) * _FRACTION).round() / _FRACTION
    return torch.stack([whole, torch.where(values.isfinite(), fraction, 0.0)])


class Monitor:
    """Collects losses and statistics of steps on the device, and passes a `Report` to callbacks every few steps.

        monitor = Monitor(registry, JsonLines("run.jsonl"), every=20)
        monitor(optimizer.step(), loss, count=len(batch))  # in every step

    Every rank creates a monitor and calls it in every step. The callbacks run on global rank 0 only.

    Args:
        registry: The process groups; losses and counts are reduced over all ranks. If the monitor is called once per
            micro-batch, the reported loss is bitwise equal for any distribution of the same micro-batches over data
            ranks, except on devices without float64.
        *callbacks: Each is called with every report, in this order. If a callback has a method ``begin(step)``, this
            method is called before the first report, and again before the first report after `load_state_dict`.
            ``step`` is the step from which the run continues, 0 in a new run. The callback should discard its data of
            later steps, which come from an abandoned run.
        every: Number of steps between reports, >= 1. Default: 10.
        unit: Unit that ``count=`` counts, for names in reports. Default: "samples".
        telemetry: A report contains the numbers that this `Telemetry` measured last, unless an earlier report contained
            them. None (default): no such numbers.
        flops: Numbers for the devices' utilization, which reports then contain. None (default): no utilization.

    Raises:
        ValueError: On every rank: ``every`` is no integer >= 1, or differs between ranks.
        RuntimeError: On every rank: some ranks do not create a Monitor (for example because of ``if rank == 0``), and
            reached another collective call of this library.

    Collectives: two object all-gathers in the constructor, and one small all-reduce over the world per report (over
        gloo an object all-gather). None with one rank.
    Host synchronization: in the constructor, except with one rank; one per report on rank 0, and over gloo with several
        ranks also one per report on every rank.

    Attributes:
        step: Number of steps so far, including skipped steps. `state_dict` contains it, so that step numbers continue
            after a checkpoint was loaded.
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
        with track_call("Monitor", registry):
            on_all_ranks(partial(check_every, every, f"every={every!r}"), registry)
            check_same({"every= of Monitor": every}, registry)
        self.registry, self.callbacks, self.every, self.unit = registry, callbacks, every, unit
        self.telemetry, self.flops = telemetry, flops
        self.step = 0
        self._begun, self._began_at = False, 0
        self._reported: Measurement | None = None
        # device of the sums; `_follow` moves the sums to the GPU of the step's statistics or of the loss
        self._device = registry.device
        self._skipped = self._zero()
        self._window: list[tuple[Tensor, Tensor]] = []  # loss * count, and count, per micro-batch since the last step
        self._start_over()

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=accumulation_dtype(self._device), device=self._device)

    def _follow(self, value: object) -> None:
        """Move the sums to the device of ``value``, if ``value`` is a tensor on a device other than the CPU."""
        if isinstance(value, Tensor) and value.device not in (self._device, torch.device("cpu")):
            self._device = value.device
            for name in ("_skipped", "_loss", "_loss_count", "_left_out", "_clipped", "_skipped_before"):
                setattr(self, name, getattr(self, name).to(self._device, accumulation_dtype(self._device)))
            self._window = [(term.to(self._device), number.to(self._device)) for term, number in self._window]

    def _start_over(self) -> None:
        # since the last report: sums of loss * count (see `exact_parts`), of counts with a loss, and of counts whose loss
        # was left out
        self._loss, self._loss_count, self._left_out = self._zero().repeat(2), self._zero(), self._zero()
        # number of clipped steps since the last report, and of skipped steps before the last report
        self._clipped, self._skipped_before = self._zero(), self._skipped.clone()
        self._count, self._steps = 0.0, 0
        self._since = time.perf_counter()
        self._last: GradStats | None = None

    @torch.no_grad()
    def __call__(self, stats: GradStats | None, loss: Tensor | float | None = None, count: float = 1) -> None:
        """Record one micro-batch and, if ``stats`` is given, one step. In every ``every``-th step, call `flush`.

        Args:
            stats: The result of `ParallelOptimizer.step`. None after a micro-batch without a step: the loss and the
                count are recorded, but no step.
            loss: Mean loss of this rank's micro-batch, a number or 0-dim. None (default) on a rank without a loss, such
                as a first pipeline stage.
            count: Number of samples (or other units) in the micro-batch, equal on ranks with the same data coordinate.
                Default: 1.

        Raises:
            RuntimeError: A CUDA graph is being captured.

        Collectives: those of `flush` in every ``every``-th step; otherwise none.
        Host synchronization: that of `flush` in every ``every``-th step; otherwise none.
        """
        if is_captured():
            raise RuntimeError(
                "Monitor counts steps on the host, and replays of a CUDA graph don't run host code; call it after each "
                "replay, with the stats and the loss of the captured step, which contain the replay's values"
            )
        self._follow(loss if stats is None else stats.found_inf)
        if loss is not None:
            number = self._zero() + count
            self._window.append((number * loss, number))
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
        """Add the losses of the step's micro-batches to the sums since the last report.

        If the gradients were non-finite, a micro-batch with a non-finite loss adds only its count, to ``_left_out``.
        Its loss would make the mean non-finite.
        """
        if not self._window:
            return
        terms, counts = (torch.stack(column) for column in zip(*self._window, strict=True))
        left_out = stats.found_inf.bool() & ~terms.isfinite()
        self._loss += exact_parts(torch.where(left_out, 0.0, terms)).sum(1)
        self._loss_count += torch.where(left_out, 0.0, counts).sum()
        self._left_out += torch.where(left_out, counts, 0.0).sum()
        self._window.clear()

    @torch.no_grad()
    def flush(self) -> None:
        """Report the steps since the last report to the callbacks on rank 0; do nothing if there were no steps.

        Call it on all ranks at the end of an epoch or of training.

        Collectives: one all-reduce over the world, or over gloo an object all-gather; none with one rank.
        Host synchronization: one on rank 0; over gloo with several ranks also one on every rank.
        """
        if self._last is not None:
            self._report(self._last)
            self._start_over()

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps and the number of skipped steps, which are equal on all ranks.

        Save them in a checkpoint's ``extra=``. Losses since the last report are not included: to report them, call
        `flush` first.

        Host synchronization: one.
        """
        return {"step": self.step, "skipped_steps": int(self._skipped)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Load the result of `state_dict`. Discard losses and counts that were recorded since the last report.

        Raises:
            ValueError: ``state`` is not the state of a Monitor; nothing is changed.
        """
        try:
            fields({"step": check_count, "skipped_steps": check_count})(state, "state")
        except ValueError as error:
            raise ValueError(
                f"{state!r:.200} is not the state of a Monitor ({error}); give the result of Monitor.state_dict()"
            ) from None
        step, skipped = state["step"], state["skipped_steps"]
        self.step, self._skipped = step, self._zero() + skipped
        self._window.clear()
        self._begun, self._began_at = False, step
        self._start_over()

    def _report(self, stats: GradStats) -> None:
        sums, measured = self._sums(), self._measured()
        if self.registry.global_rank != 0:
            return
        scale = self._zero() if stats.loss_scale is None else stats.loss_scale
        parts = [sums, self._skipped, self._skipped_before, self._clipped, stats.total_norm, stats.clip_coef, scale]
        parts += [stats.group_norms, *stats.parameter_norms.values(), *(() if measured is None else [measured.values])]
        numbers = iter(torch.cat([part.to(sums).view(-1) for part in parts]).tolist())
        whole, rest_of_loss, loss_count, left_out, count = islice(numbers, 5)
        skipped, before, clipped, norm, clip_coef, loss_scale = islice(numbers, 6)
        group_norms = tuple(islice(numbers, stats.group_norms.numel()))
        parameter_norms = {name: next(numbers) for name in stats.parameter_norms}
        figures = {} if measured is None else {name: next(numbers) for name in measured.names}
        per_second = count / (time.perf_counter() - self._since)
        report = Report(
            step=self.step,
            loss=(whole + rest_of_loss) / loss_count if loss_count else nan if left_out else None,
            grad_norm=norm,
            clip_coef=clip_coef,
            loss_scale=None if stats.loss_scale is None else loss_scale,
            skipped_steps=int(skipped),
            per_second=per_second,
            unit=self.unit,
            group_norms=group_norms,
            parameter_norms=parameter_norms,
            clipped=clipped / self._steps,
            skipped=(skipped - before) / self._steps,
            utilization=None if self.flops is None else self.flops.utilization(per_second, self.registry),
            measured_step=None if measured is None else measured.step,
            figures=figures,
        )
        self._tell(report)

    def _measured(self) -> Measurement | None:
        """Return the last measurement of ``telemetry``; None if there is none or an earlier call has returned it."""
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
        """Return five sums over all ranks since the last report, [5].

        They are loss * count in two parts (see `exact_parts`), the counts of these losses, the counts of left-out losses,
        and all counts. The last sum includes the counts of each data coordinate once. The other sums include every rank
        that has a loss.
        """
        topology = self.registry.topology
        sharers = topology.world_size // topology.size(*topology.data_axes)
        count = self._loss.new_full((), self._count / sharers)
        sums = torch.stack([*self._loss, self._loss_count, self._left_out, count])
        with track_call("Monitor", self.registry):
            if topology.world_size == 1 or self.registry.device.type != "cpu":
                return world_sum(sums, self.registry)
            # Objects are gathered instead of an all-reduce. If only some ranks called the monitor, their all-reduce could
            # run against an all-reduce of another size on other ranks, for which gloo aborts the process.
            return sums.new_tensor(gather_objects(sums.tolist(), self.registry)).sum(0)
