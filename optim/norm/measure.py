"""Options and results of the measurement in a step: norms of the gradients, and comparisons of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, isnan
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...parallel.mesh.deprecation import renamed_members
from ...parallel.mesh.value_checks import check_scalar, is_whole

# Norms ----------------------------------------------------------------------------------------------------------------

Reduction = Literal["packed", "per_group"]
Level = Literal["total", "groups", "parameters", "named", "units"]


class Norms(NamedTuple):
    """Global p-norms of gradients, as device tensors of `accumulation_dtype`, equal on all ranks.

        norms = GlobalNorm(plan, registry)(gradients)
        print(float(norms.total))

    Args:
        total: 0-dim: the norm of all gradients.
        groups: [param groups]: one norm per param group.
        parameters: [logical parameters]: one norm per logical parameter; empty if not requested.
        extra: 1-dim, not a norm: the argument ``extra`` of `GlobalNorm.__call__`, summed over all ranks.
        units: [units of all parameters]: one norm per unit, a slice of a parameter such as a row; empty if not
            requested.
        weights: 1-dim: norms of the weights instead of the gradients: one for all weights, or one per param group,
            parameter, named group or unit. Empty if not requested.
        named: [patterns + 1]: one norm per name pattern of a clipping rule such as `ByName`, and one of all parameters
            that match no pattern. Empty without patterns.
        norm_type: The p of the norms.
    """

    total: Tensor
    groups: Tensor
    parameters: Tensor
    extra: Tensor
    units: Tensor
    weights: Tensor
    named: Tensor
    norm_type: float


def checked_norm_type(norm_type: float) -> float:
    check_scalar(norm_type, "norm_type", "a number >= 1 (2.0 is the usual norm) or float('inf')")
    value = float(norm_type)
    if 0 < value < 1:
        raise ValueError(
            f"norm_type={norm_type}: give a number >= 1 (2.0 is the usual norm) or float('inf'); below 1 the triangle "
            f"inequality fails, and the norm of n equal elements is proportional to n^{1 / value:.3g}"
        )
    if isnan(value) or value < 1:
        raise ValueError(f"norm_type={norm_type}: give a number >= 1 (2.0 is the usual norm) or float('inf')")
    return value


def checked_reduction(reduction: Reduction) -> Reduction:
    if reduction not in ("packed", "per_group"):
        raise ValueError(f"reduction={reduction!r}: give 'packed' or 'per_group'")
    return reduction


# Options of the measurement -------------------------------------------------------------------------------------------

Commit = Callable[[], bool | Tensor]


def check_every(every: object, said: str) -> None:
    """Raise ValueError unless ``every`` is an integer >= 1. ``said``, the argument as text, begins the error."""
    if not is_whole(every, 1):
        raise ValueError(f"{said}: give a whole number of steps >= 1")


@dataclass(frozen=True)
class Fingerprints:
    """A setting of ``check_replicas=``: compare replicas periodically in a long run, to detect silent data corruption.

        optimizer = ParallelOptimizer(adamw, registry, check_replicas=Fingerprints(every=100))
        ...
        optimizer.poll()  # before a checkpoint

    Weights, master weights, optimizer states with their step counts, and reduced gradients are compared bitwise. A single
    flipped bit is always detected. Any other difference is missed with a probability of at most about 2^-32.

    The first step compares as with ``check_replicas="first"``, and raises at once. A later comparison does not
    synchronize the host. If replicas differ, the device skips that step and all later steps on every rank, so weights
    and states stay as they were at the comparison. 16 steps later, or in `ParallelOptimizer.poll`, or at once with
    ``on_nonfinite="raise"``, every rank raises `ReplicaMismatchError`, which names the parameter, the state, the axis
    and the ranks. Call `poll` before a checkpoint and at the end of training.

    Limits:

    * A shard without a replica is not compared. Examples are sharded weights on a mesh without data-parallel axes, states
      sharded by `Sharded`, and everything in a single process. With `Sharded` the full weights are compared. In a
      parallel run, a rank whose tensors have no replica issues a warning.
    * A gradient that was wrong before it was averaged is equally wrong on all replicas, so it is not detected.
    * With master weights, except with ``Bf16(split_masters=True)``, every step overwrites the half-precision weights. So a
      flipped bit in such a weight lasts for one step only, and most comparisons do not see it.
    * Of the optimizer states, only tensors in the optimizer's ``state`` attribute are compared.
    * Replicas must be updated bitwise identically, so kernels that add in no fixed order are not supported. Neither is
      `Offloaded` if it may update one replica on the CPU and another on the device.

    Args:
        every: Steps between two comparisons, >= 1. A comparison reads all compared tensors once more. It adds six numbers
            per parameter and mesh axis to the collective that measures the norm, or ten with master weights or state
            placements. Default: 100.
    """

    every: int = 100

    def check(self) -> None:
        """Raise ValueError if ``every`` is not an integer >= 1."""
        check_every(self.every, f"Fingerprints(every={self.every!r})")


CheckReplicas = bool | Literal["first"] | Fingerprints


def check_measurement(
    norm_type: float, reduction: Reduction, check_replicas: CheckReplicas, commit: Commit | None
) -> None:
    checked_norm_type(norm_type)
    checked_reduction(reduction)
    if isinstance(check_replicas, Fingerprints):
        check_replicas.check()
    elif check_replicas not in (True, False, "first"):
        raise ValueError(f"check_replicas={check_replicas!r}: give 'first', True, False or Fingerprints(every=100)")
    if commit is not None and not callable(commit):
        raise TypeError(
            f"commit={commit!r}: give a function without arguments that returns True, False or a 0-dim bool tensor"
        )


# The report of a step -------------------------------------------------------------------------------------------------


def clip_coefficient(norm: Tensor, max_norm: float | Tensor | None) -> Tensor:
    """Return min(1, max_norm / (norm + 1e-6)) elementwise; ones if ``max_norm`` is None.

    With a ``max_norm`` it is 0 or NaN for a non-finite norm. Callers replace it by 1 then, because the step is skipped.
    """
    return torch.ones_like(norm) if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)


@renamed_members(disagreed="ranks_disagree", parted="replicas_diverged", vetoed="rejected")
@dataclass(frozen=True)
class GradStats:
    """Measurements of one step's gradients. All tensors are on the device, and bitwise identical on every rank.

        stats = optimizer.step()
        print(stats)  # norm 0.913, clipped x0.548

    The object can replace the tensor that ``torch.nn.utils.clip_grad_norm_`` returns. It then stands for ``total_norm``:
    in ``float(stats)``, ``stats.item()``, ``f"{stats:.3f}"``, the comparisons ``<``, ``<=``, ``>`` and ``>=``,
    ``stats.full_tensor()`` and torch's functions, such as ``torch.isfinite(stats)``.

    Creating the object does not synchronize the host. ``float(stats.total_norm)`` and ``str(stats)`` read tensors, and
    synchronize it. Later steps leave the tensors unchanged, except a step captured in a CUDA graph: every replay of the
    graph overwrites the tensors of the captured step. Clone the tensors that you want to keep.

    Args:
        total_norm: 0-dim float64 (float32 on a device without float64): the global p-norm of the gradients, without the
            loss scale and before clipping. May be inf or NaN.
        clip_coef: 0-dim, same dtype: the clip coefficient; the smallest one if the rule has several. 1 without
            clipping, if the rule only clamps (`ByValue`), or if the norm is non-finite. If some param groups have a
            ``max_norm``, it is the coefficient of the groups without one.
        found_inf: 0-dim float32: 1 if the norm is non-finite. With a loss scale, also 1 if there are new gradients, but no
            rank multiplied a loss of the accumulation window by the scale. The step is then skipped. From
            `clip_grad_norm_`, also 1 if the call raised an error on another rank. See `skipped` for all reasons to skip.
        group_norms: [number of param groups]: the global p-norm per param group.
        loss_scale: 0-dim: the factor on the loss in backward. None without a loss scale.
        parameter_norms: The global p-norm of each logical parameter, by name. Empty without ``per_parameter_norms=True``.
        rejected: 0-dim float32: 1 if ``commit=`` of any rank rejected the step, else 0. None without ``commit=``.
        replicas_diverged: 0-dim float32: 1 from the step in which replicas differed until the error is raised, else 0. None
            without `Fingerprints`, and on a single rank.
        spiked: 0-dim float32: 1 if the clipping rule skips the step although its norm is finite, else 0. None unless the
            rule can skip steps (`SkipSpikes`).
        named_norms: With `ByName`: for each pattern the global p-norm of the parameters whose first match it is.
        ranks_disagree: 0-dim bool: True if ranks differ in the number of micro-batches, in the weights of micro-batches, in
            clipping, in hyper-parameters, in their frozen parameters, or in the replicated parameters without a gradient,
            or if an error of one rank makes all ranks skip. The step is then skipped. None on a single rank, and from
            functions such as `clip_grad_norm_`.
        unclipped: With `ByName`: the patterns whose parameters are not clipped, and ``"others"`` if the parameters that
            match no pattern are not clipped.
    """

    total_norm: Tensor
    clip_coef: Tensor
    found_inf: Tensor
    group_norms: Tensor
    loss_scale: Tensor | None = None
    parameter_norms: Mapping[str, Tensor] = field(default_factory=dict)
    rejected: Tensor | None = None
    replicas_diverged: Tensor | None = None
    spiked: Tensor | None = None
    named_norms: Mapping[str, Tensor] = field(default_factory=dict)
    ranks_disagree: Tensor | None = None
    unclipped: tuple[str, ...] = ()

    @property
    def skipped(self) -> Tensor:
        """Return a 0-dim float32 tensor: 1 if the step is skipped, else 0. Host synchronization: none."""
        all_reasons = self.found_inf, self.rejected, self.replicas_diverged, self.spiked, self.ranks_disagree
        first, *others = [reason for reason in all_reasons if reason is not None]
        if not others:
            return first
        return torch.maximum(first, *others) if len(others) == 1 else torch.stack([first, *others]).amax()

    def clip_coef_for(self, max_norm: float | Tensor) -> Tensor:
        """Return min(1, max_norm / (total_norm + 1e-6)), 0-dim; 1 if the norm is non-finite. Host synchronization: none."""
        coef = clip_coefficient(self.total_norm, max_norm)
        return torch.where(self.total_norm < inf, coef, torch.ones_like(coef))

    # Methods of the tensor that torch.nn.utils.clip_grad_norm_ returns ----------------------------------------------------

    def __float__(self) -> float:
        """Return ``total_norm`` as a number. Host synchronization: one."""
        return float(self.total_norm)

    def item(self) -> float:
        """Return ``total_norm`` as a number. Host synchronization: one."""
        return float(self.total_norm)

    def full_tensor(self) -> Tensor:
        """Return ``total_norm``. The DTensor that torch's function returns for sharded models has the same method."""
        return self.total_norm

    def __format__(self, spec: str) -> str:
        """Return ``total_norm`` in the format ``spec``, such as ``.3f``; with an empty ``spec``, return ``str(self)``."""
        return format(float(self), spec) if spec else str(self)

    def __lt__(self, other: Any) -> Any:
        return self.total_norm < _norm_of(other)

    def __le__(self, other: Any) -> Any:
        return self.total_norm <= _norm_of(other)

    def __gt__(self, other: Any) -> Any:
        return self.total_norm > _norm_of(other)

    def __ge__(self, other: Any) -> Any:
        return self.total_norm >= _norm_of(other)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, such as ``torch.isfinite``, with ``total_norm`` in place of each `GradStats`."""
        return func(*_norm_of(args), **_norm_of(kwargs or {}))

    def __str__(self) -> str:
        parts = [f"norm {float(self.total_norm):.3g}"]
        if self.skipped:
            whys = {
                "rejected by commit": self.rejected,
                "replicas differ": self.replicas_diverged,
                "a spike": self.spiked,
            }
            whys["ranks disagree"] = self.ranks_disagree
            why = ", ".join(reason for reason, flag in whys.items() if flag is not None and flag)
            parts.append(f"skipped ({why})" if why else "skipped")
        elif self.clip_coef < 1:
            parts.append(f"clipped x{float(self.clip_coef):.3g}")
        if self.unclipped:
            parts.append(f"not clipped: {', '.join(self.unclipped)}")
        if self.loss_scale is not None:
            parts.append(f"loss scale {float(self.loss_scale):g}")
        return ", ".join(parts)


def _norm_of(value: Any) -> Any:
    if isinstance(value, GradStats):
        return value.total_norm
    if isinstance(value, dict):
        return {key: _norm_of(item) for key, item in value.items()}
    return type(value)(map(_norm_of, value)) if type(value) in (list, tuple) else value
