"""Options, norms and statistics of the measurement of gradients in a step's one collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isnan
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...parallel.mesh.value_checks import check_scalar, is_whole

# Norms ----------------------------------------------------------------------------------------------------------------

Reduction = Literal["packed", "per_group"]
Level = Literal["total", "groups", "parameters", "named", "units"]


class Norms(NamedTuple):
    """Global p-norms of gradients, device tensors of the accumulation dtype.

    Args:
        total: 0-dim.
        groups: [param groups].
        parameters: [logical parameters], or empty where they are not measured.
        extra: What travelled along.
        units: [units of all parameters], or empty.
        weights: Norms of the weights themselves, shaped as the gradients' at the level that was asked for; or empty.
        named: [named groups, and the others], or empty; see `Named`.
    """

    total: Tensor
    groups: Tensor
    parameters: Tensor
    extra: Tensor
    units: Tensor
    weights: Tensor
    named: Tensor


def checked_norm_type(norm_type: float) -> float:
    """``norm_type`` as a float.

    Raises:
        TypeError: It is no number.
        ValueError: It is below 1 or NaN.
    """
    check_scalar(norm_type, "norm_type", "a number >= 1 (2.0 is the usual norm) or float('inf')")
    value = float(norm_type)
    if 0 < value < 1:
        raise ValueError(
            f"norm_type={norm_type}: give a number >= 1 (2.0 is the usual norm) or float('inf'); below 1 it is no norm (a "
            "sum of two gradients could be longer than both together), and grows with the number n of elements so fast, as "
            f"n^{1 / value:.3g}, that a threshold means little"
        )
    if isnan(value) or value < 1:
        raise ValueError(f"norm_type={norm_type}: give a number >= 1 (2.0 is the usual norm) or float('inf')")
    return value


def checked_reduction(reduction: Reduction) -> Reduction:
    """``reduction``.

    Raises:
        ValueError: It is none of the two.
    """
    if reduction not in ("packed", "per_group"):
        raise ValueError(f"reduction={reduction!r}: give 'packed' or 'per_group'")
    return reduction


# Options of the measurement -------------------------------------------------------------------------------------------

Commit = Callable[[], bool | Tensor]


def check_every(every: object, said: str) -> None:
    """Raise ValueError where it is no whole number of steps >= 1; ``said``: as it was given."""
    if not is_whole(every, 1):
        raise ValueError(f"{said}: give a whole number of steps >= 1")


@dataclass(frozen=True)
class Fingerprints:
    """Watch the copies over a long run, against silent corruption of data: in the first step and in every so-many-th.

    Weights (with masters those too), optimizer states with their step counts, and completed gradients of copies are
    compared bit by bit: one flipped bit is always seen, anything else but once in 2^32. Nobody waits for it: where copies
    differ, that step and all that follow are skipped on every rank, and 16 steps later, or in `ParallelOptimizer.poll`,
    `ReplicaMismatchError` is raised on every rank. It names parameter, state, axis and ranks; weights and states are as
    they were when they were compared. Call `poll` before a checkpoint and at the end of training.

    What has no copy can't be compared: split weights on a mesh without data axes, pieces of `Sharded` states (the whole
    weights are), anything of one process; a warning says so where nothing has. A gradient that was wrong before it was
    averaged is equally wrong in all copies, and with masters a flipped bit in a half-precision weight lives for one step.
    What isn't a tensor in the optimizer's ``state`` isn't seen. Copies must step by the same bits: not where kernels add
    in no fixed order. Where `Offloaded` may step one copy on the CPU and one on the device, it is refused.

    Args:
        every: >= 1: that many steps apart. A comparison reads all of it once more; six numbers a parameter and mesh axis
            travel in the collective that measures.
    """

    every: int = 100

    def check(self) -> None:
        """Raise ValueError if it is out of range."""
        check_every(self.every, f"Fingerprints(every={self.every!r})")


CheckReplicas = bool | Literal["first"] | Fingerprints


def check_measurement(
    norm_type: float, reduction: Reduction, check_replicas: CheckReplicas, commit: Commit | None
) -> None:
    """Raise ValueError for arguments that are out of range, TypeError for a ``commit`` that can't be called."""
    checked_norm_type(norm_type)
    checked_reduction(reduction)
    if isinstance(check_replicas, Fingerprints):
        check_replicas.check()
    elif check_replicas not in (True, False, "first"):
        raise ValueError(f"check_replicas={check_replicas!r}: give 'first', True, False or Fingerprints(every=100)")
    if commit is not None and not callable(commit):
        raise TypeError(f"commit={commit!r}: give a function without arguments that returns True or False")


# The report of a step -------------------------------------------------------------------------------------------------


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
        found_inf: 0-dim float32: 1 when the norm is not finite, or gradients came past `backward` without its loss scale;
            the step is skipped then. It may be skipped for other reasons, see `skipped`.
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
