"""What one measurement of the gradients says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class GradStats:
    """The gradients of one step, measured. All tensors are on the device and the same bits on every rank.

    Nothing here has been read by the host; ``float(stats.total_norm)`` reads it, and waits for the device. So does
    ``str(stats)``, one line for a person: ``norm 0.913, clipped x0.548``. Each step has tensors of its own; those of a step
    that a CUDA graph captured are written anew by every replay: clone what you want to keep.

    Args:
        total_norm: 0-dim float64 (float32 where a device has none): the global p-norm of the unscaled gradients before
            clipping, inf or NaN as it is.
        clip_coef: 0-dim, same dtype: what the gradients were (or will be) multiplied by; 1 without clipping or when the
            norm is not finite. Where param groups have their own ``max_norm``, that of the others.
        found_inf: 0-dim float32: 1 when the norm is not finite and the step is skipped, else 0. It may be skipped for other
            reasons, see `skipped`.
        group_norms: [number of param groups]: the global p-norm of each param group.
        loss_scale: 0-dim float32: what backward had multiplied the loss by; None in modes without a loss scale.
        parameter_norms: By parameter name, where asked for: the global p-norm of each logical parameter.
        vetoed: 0-dim float32: 1 when ``commit=`` of any rank refused the step, else 0; None without ``commit=``.
        parted: 0-dim float32: 1 from the step on in which copies were found to differ until the error is raised that names
            them, else 0; None without `Fingerprints`.
        spiked: 0-dim float32: 1 when the clip rule skips the step, though its norm is finite, else 0; None where no rule
            does that (`SkipSpikes`).
        named_norms: By pattern, under `ByName`: the global p-norm of the parameters that it matches first.
        disagreed: 0-dim bool: True when ranks differ in the number of micro-batches, in weights, in clipping, in
            hyper-parameters or in which parameters are frozen, so that the step is skipped; None on one rank.
    """

    total_norm: Tensor
    clip_coef: Tensor
    found_inf: Tensor
    group_norms: Tensor
    loss_scale: Tensor | None = None
    parameter_norms: Mapping[str, Tensor] = field(default_factory=dict)
    vetoed: Tensor | None = None
    parted: Tensor | None = None
    spiked: Tensor | None = None
    named_norms: Mapping[str, Tensor] = field(default_factory=dict)
    disagreed: Tensor | None = None

    @property
    def skipped(self) -> Tensor:
        """0-dim float32: 1 when the step is skipped, for whatever reason, else 0. Host reads: none."""
        all_reasons = self.found_inf, self.vetoed, self.parted, self.spiked, self.disagreed
        reasons = [reason for reason in all_reasons if reason is not None]
        if len(reasons) > 2:
            return torch.stack(reasons).amax()
        return torch.maximum(*reasons) if len(reasons) == 2 else reasons[0]

    def __str__(self) -> str:
        parts = [f"norm {float(self.total_norm):.3g}"]
        if self.skipped:
            whys = {"a rank's veto": self.vetoed, "copies that differ": self.parted, "a spike": self.spiked}
            whys["ranks that disagree"] = self.disagreed
            why = ", ".join(reason for reason, flag in whys.items() if flag is not None and flag)
            parts.append(f"skipped ({why})" if why else "skipped")
        elif self.clip_coef < 1:
            parts.append(f"clipped x{float(self.clip_coef):.3g}")
        if self.loss_scale is not None:
            parts.append(f"loss scale {float(self.loss_scale):g}")
        return ", ".join(parts)
