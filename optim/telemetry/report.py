"""What the steps since the last report did, in plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...parallel.mesh.text import printable


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
