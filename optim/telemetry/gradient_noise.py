"""Gradient noise scale: the largest useful batch size, estimated from gradients before and after they are averaged.

    E |g_b|^2 = |G|^2 + S / b       g_b: mean gradient of b samples; G: its expectation; S: trace of the covariance of
                                    one sample's gradient

    small = mean over data ranks of |local gradient|^2,    x = mean over data ranks of 1 / b
    big   = |averaged gradient|^2,                         y = 1 / (all samples)

    S = (small - big) / (x - y)        |G|^2 = (x big - y small) / (x - y)        B_simple = S / |G|^2

A data rank is a coordinate along the data axes. The estimates of S and |G|^2 are unbiased, also if data ranks have
batches of different sizes and their gradients are weighted by these sizes. The ratio S / |G|^2 of one step is biased
and noisy. So S and |G|^2 are averaged separately over measured steps, and then divided.

Reference: McCandlish et al. 2018, "An empirical model of large-batch training", arXiv:1812.06162, appendix A.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ...amp.casting import is_half
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from ...parallel.mesh.value_checks import check_finite, fields
from ..gradients.buckets import gradient_buckets, reduce_all, sync_axes, sync_ranks
from ..gradients.in_place import gradient_dtype
from ..kernels.device_constants import Constants
from ..norm.plan import ParameterEntry, ReductionPlan
from ..norm.powers import SCRATCH, accumulation_dtype, flattened, mixed_powers
from ..parallel_optimizer import ParallelOptimizer


@dataclass(frozen=True)
class NoiseScale:
    """Option of `Telemetry` to measure the gradient noise scale, an estimate of the largest useful batch size.

        Telemetry(optimizer, noise=NoiseScale(samples=64))

    Args:
        samples: Number of samples per data rank and step, over all micro-batches of the step. The measured noise scale
            is then a number of samples. None (default): the noise scale has the unit of ``backward(weight=...)``, such
            as tokens. Without weights, its unit is one micro-batch if ``accumulation_steps`` is given, else one batch
            of a data rank.
        decay: Decay of the exponential means over measured steps, >= 0 and < 1. 0: only the last measured step counts.
            Default: 0.9.
    """

    samples: float | None = None
    decay: float = 0.9

    def check(self) -> None:
        """Raise ValueError if an option is out of range."""
        if self.samples is not None and not (isfinite(self.samples) and self.samples > 0):
            raise ValueError(f"NoiseScale(samples={self.samples}): give a finite number > 0, the samples per data rank")
        if not 0 <= self.decay < 1:
            raise ValueError(f"NoiseScale(decay={self.decay}): give a number >= 0 and < 1")


class RunningScale:
    """Exponential means of the estimates over steps. Non-finite estimates, such as after an overflow, are left out.

    ``means``, [3] float64, are the means of |G|^2 (the signal), of S (the trace), and of the constant 1. All three
    start at 0; dividing the first two by the third one corrects for that.
    """

    def __init__(self, decay: float, device: torch.device) -> None:
        self.decay, self.means = decay, torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, small: Tensor, big: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Add a step's unbiased estimates, and return [S / |G|^2, |G|^2, S] of the means.

        The result is NaN before the first finite estimates. All arguments are 0-dim, named as at the top of this module.
        """
        difference = x - y
        signal = (x * big - y * small) / difference
        new = torch.stack([signal, (small - big) / difference, torch.ones_like(signal)])
        mixed = self.means * self.decay + new * (1 - self.decay)
        self.means = torch.where(new.isfinite().all(), mixed, self.means)
        signal, trace, weight = self.means.unbind()
        return torch.stack([trace / signal, signal / weight, trace / weight])

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the means, for `load_state_dict`. It is equal on every rank."""
        return {"means": self.means.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the means from the result of `state_dict`; if it is not valid, raise ValueError and change nothing."""
        self.check_state(state)
        self.means = state["means"].to(self.means)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless ``state["means"]`` is a tensor of three finite floats."""
        fields({"means": partial(check_finite, shape=self.means.shape)})(state, "noise")


# Local sums -----------------------------------------------------------------------------------------------------------

SMALLEST_NORMAL = 2.0**-14
"""Smallest normal number of float16. Smaller numbers lose precision in float16, or become 0."""


def squares(tensors: Sequence[Tensor | None], device: torch.device, constants: Constants) -> Tensor:
    """Return the sum of squares of each tensor, 0 for None: [n] float64, or float32 on a device without float64."""
    present = {index: tensor for index, tensor in enumerate(tensors) if tensor is not None}
    powers = mixed_powers([*present.values()], 2.0, device, constants).to(device, accumulation_dtype(device))
    if len(present) == len(tensors):
        return powers
    found = torch.zeros(len(tensors), dtype=powers.dtype, device=device)
    if present:
        found[_places([*present], device, constants)] = powers
    return found


def counts(
    gradients: Sequence[Tensor | None], numels: Sequence[int], device: torch.device, constants: Constants
) -> Tensor:
    """Count zeros and small elements in each of n gradients, and return the numbers, [2, n] on ``device``.

    Row 0 counts zeros, and row 1 elements below `SMALLEST_NORMAL` in absolute value, including zeros. If gradient i is
    None, ``numels[i]`` elements count as zeros. The result is float64, or float32 on a device without float64.
    """
    dtype = accumulation_dtype(device)
    present = [index for index, gradient in enumerate(gradients) if gradient is not None]
    filled = [_counts(gradient.detach()) for gradient in gradients if gradient is not None]
    here = torch.stack([of_one.to(device) for of_one in filled], 1).to(dtype) if filled else None
    if here is not None and len(present) == len(gradients):
        return here
    found = constants(tuple(numels), lambda: numels, dtype, device).repeat(2, 1)
    if here is not None:
        found[:, _places(present, device, constants)] = here
    return found


def _places(indices: list[int], device: torch.device, constants: Constants) -> Tensor:
    return constants(tuple(indices), indices.copy, torch.int64, device)


def _counts(gradient: Tensor) -> Tensor:
    """Return [number of zeros, number of |g| < `SMALLEST_NORMAL`] for a gradient g. NaN is in neither number."""
    flat, dtype = flattened(gradient), accumulation_dtype(gradient.device)
    # On a CPU, the gradient is processed in parts that fit in the cache, because a large temporary tensor is slower.
    length = SCRATCH if gradient.is_cpu else max(len(flat), 1)
    scratch = torch.empty_like(flat[:length])
    found = []
    for part in flat.split(length):
        size = torch.abs(part, out=scratch[: len(part)])
        zeros = (len(part) - size.count_nonzero()).to(dtype)
        found.append(torch.stack([zeros, size.lt_(SMALLEST_NORMAL).sum(dtype=dtype)]))
    return found[0] if len(found) == 1 else torch.stack(found).sum(0)


def kept(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of the tensors: float32 copies of half-precision tensors, else copies in the same dtype."""
    return [tensor.detach().float() if is_half(tensor) else tensor.detach().clone() for tensor in tensors]


def changes_(before: Sequence[Tensor], after: Sequence[Tensor]) -> Sequence[Tensor]:
    """Subtract each tensor in ``after`` from the tensor in ``before``, in place, and return ``before``.

    The difference of two elements is exact if they differ by a factor of at most two; otherwise it may be rounded.
    """
    if before:
        torch._foreach_sub_(list(before), [tensor.detach() for tensor in after])
    return before


# Squared norm of each data rank's gradient before averaging -----------------------------------------------------------

# A data rank's gradient is the gradient of its own samples, before averaging over the data axes. Partial gradients and
# gradients of tied parameters are first summed over the other axes, in copies.


def check_are_local(optimizer: ParallelOptimizer[Any]) -> None:
    """Raise ValueError if the gradient noise scale of the optimizer's gradients can't be measured.

    That is the case if there is only one data rank, or if a gradient after backward does not come from the samples of a
    single data rank, for example because it is averaged during backward.
    """
    topology = optimizer.registry.topology
    if topology.size(*topology.data_axes) == 1:
        raise ValueError(f"NoiseScale needs at least two data ranks, and the mesh is {topology!r}; leave noise= out")
    if reasons := optimizer.not_local():
        raise ValueError(
            "NoiseScale needs each data rank's gradients before they are averaged, but "
            f"{'; and '.join(reasons)}. Or leave noise= out"
        )


def is_local(entry: ParameterEntry, topology: Topology) -> bool:
    """Return True if the parameter is trained, and its gradient on a data rank comes from this rank's samples only.

    If the parameter is sharded over a data axis (experts), or exists on one rank of a data axis only (``owned``), its
    gradient comes from the samples of several data ranks.
    """
    large = {axis for axis in topology.data_axes if topology.size(axis) > 1}
    return entry.trained and large <= {*sync_axes(entry.spec, topology, True, entry.averaged)}


class LocalGradients:
    """Measures the squared gradient norm of each data rank, before gradients are averaged over data ranks.

    ``params`` hold the gradients after backward, in the order of the plan's entries. ``constants`` must be a cache for
    this plan only.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        plan: ReductionPlan,
        registry: ProcessGroupRegistry,
        device: torch.device,
        constants: Constants,
    ) -> None:
        topology = plan.topology
        self.params, self.plan, self.registry, self.device = list(params), plan, registry, device
        self._constants = constants
        self._own = [index for index, entry in enumerate(plan.entries) if is_local(entry, topology)]
        self._pending = [
            index
            for index in self._own
            if len(sync_ranks(plan.entries[index].spec, topology, plan.rank, average_data=False)) > 1
        ]
        self.data_ranks, self.data_rank = topology.size(*topology.data_axes), registry.rank(*topology.data_axes)
        weights = [self.data_ranks * plan.replica_weights[index] for index in self._own]
        self._weights = torch.tensor(weights, dtype=torch.float64).to(device)

    def powers(self) -> Tensor:
        """Return this rank's contribution to the squared gradient norm of each data rank, [data ranks] float64.

        The contribution is at the index of this rank's own data rank; the other elements are 0. Sum the results over
        all ranks to get the squared norms. They are norms of the gradients after backward, which are multiplied by the
        loss scale, and summed over the micro-batches.

        Collectives: those that sum partial gradients and gradients of tied parameters: at least one all-reduce per set
            of ranks that sum such gradients.
        """
        summed = self._summed()
        gradients = [summed[index] if index in summed else self.params[index].grad for index in self._own]
        found = torch.zeros(self.data_ranks, dtype=torch.float64, device=self.device)
        found[self.data_rank] = (squares(gradients, self.device, self._constants) * self._weights).sum()
        return found

    def _summed(self) -> dict[int, Tensor | None]:
        """Sum copies of partial gradients, and of gradients of tied parameters, over all axes except the data axes.

        Return {index of the plan's entry: sum}. The parameters' gradients are unchanged.
        """
        copies = {}
        for index in self._pending:
            param = self.params[index]
            copies[index] = copy = torch.empty_like(param, dtype=gradient_dtype(param)).requires_grad_()
            copy.grad = None if param.grad is None else param.grad.detach().to(copy.dtype, copy=True)
        entries = tuple(self.plan.entries[index] for index in self._pending)
        plan = replace(self.plan, entries=entries)
        reduce_all(gradient_buckets([*copies.values()], plan, self.registry, average_data=False))
        return {index: copy.grad for index, copy in copies.items()}
