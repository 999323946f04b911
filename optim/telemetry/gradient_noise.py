"""The gradient noise scale: how large a batch is worth while, from gradients before and after they are averaged.

    E |g_b|^2 = |G|^2 + S / b                     g_b: the mean gradient of b samples; S: the trace of their covariance

    small = mean over data ranks of |local gradient|^2,    x = mean over data ranks of 1 / b
    big   = |averaged gradient|^2,                         y = 1 / (all samples)

    S = (small - big) / (x - y)        |G|^2 = (x big - y small) / (x - y)        B_simple = S / |G|^2

Both estimates are unbiased, also where data ranks have batches of different sizes, which are weighted by them; their ratio
is not, and noisy. So numerator and denominator are averaged over measured steps, each by itself.

Reference: McCandlish et al. 2018, "An empirical model of large-batch training", arXiv:1812.06162, appendix A.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

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
from ..norm.powers import SCRATCH, accumulation_dtype, flattened, local_powers
from ..parallel_optimizer import ParallelOptimizer


@dataclass(frozen=True)
class NoiseScale:
    """Ask `Telemetry` for the noise scale.

    Args:
        samples: How many one data rank has in a window, all of its micro-batches together: the scale is in the same unit.
            None: it is in what ``backward(weight=...)`` counts, such as tokens; without weights in micro-batches where
            ``accumulation_steps`` is given, else in batches of a data rank.
        decay: Of the exponential means over measured steps, from 0 (the last one alone) to 1.
    """

    samples: float | None = None
    decay: float = 0.9

    def check(self) -> None:
        """Raise ValueError if it is out of range."""
        if self.samples is not None and not (isfinite(self.samples) and self.samples > 0):
            raise ValueError(f"NoiseScale(samples={self.samples}): give a finite number > 0, of one data rank's window")
        if not 0 <= self.decay < 1:
            raise ValueError(f"NoiseScale(decay={self.decay}): give a number >= 0 and < 1")


class Estimates(NamedTuple):
    """0-dim each: of |G|^2, and of S, the trace of the covariance of one sample's gradient."""

    signal: Tensor
    trace: Tensor


def estimates(small: Tensor, big: Tensor, inverse_small: Tensor, inverse_big: Tensor) -> Estimates:
    """Unbiased ones, from two squared norms and the mean of 1 / samples of each; 0-dim. See the module."""
    difference = inverse_small - inverse_big
    signal = (inverse_small * big - inverse_big * small) / difference
    return Estimates(signal, (small - big) / difference)


class RunningScale:
    """The exponential means of both, by which the scale is told. Not finite ones, of a step that overflowed, are left out.

    Attributes:
        means: [3] float64: of |G|^2, of S, and of 1, by which the two are divided.
    """

    def __init__(self, decay: float, device: torch.device) -> None:
        self.decay, self.means = decay, torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, found: Estimates) -> Tensor:
        """[3] float64: B_simple, |G|^2 and S, all of the means; NaN where nothing has come. Host reads: none."""
        new = torch.stack([found.signal, found.trace, torch.ones_like(found.signal)])
        mixed = self.means * self.decay + new * (1 - self.decay)
        self.means = torch.where(new.isfinite().all(), mixed, self.means)
        signal, trace, weight = self.means.unbind()
        return torch.stack([trace / signal, signal / weight, trace / weight])

    def state_dict(self) -> dict[str, Any]:
        """The means; the same on every rank."""
        return {"means": self.means.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with them. Raises ValueError where they are no such tensor; nothing is changed."""
        self.check_state(state)
        self.means = state["means"].to(self.means)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError where ``state`` has no finite means."""
        fields({"means": partial(check_finite, shape=self.means.shape)})(state, "noise")


# Local sums -----------------------------------------------------------------------------------------------------------

# What a rank finds by itself of the tensors that it holds: sums of squares, of zeros, of what half precision loses.

SMALLEST_NORMAL = 2.0**-14
"""Of float16; what is smaller is subnormal there, with fewer than its 11 bits, or 0."""


def squares(tensors: Sequence[Tensor | None], device: torch.device, constants: Constants) -> Tensor:
    """[n] float64, on ``device``: the sum of squares of each tensor, on any device and of any float dtype; 0 for None.

    Args:
        constants: Keep where in the result these tensors stand.
    """
    dtype = accumulation_dtype(device)
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor is not None:
            kinds.setdefault((tensor.device, tensor.dtype), []).append(index)
    if len(kinds) == 1 and all(tensor is not None for tensor in tensors):
        return local_powers([tensor for tensor in tensors if tensor is not None], 2.0).to(device, dtype)
    found = torch.zeros(len(tensors), dtype=dtype, device=device)
    for indices in kinds.values():
        of_kind = local_powers([tensor for index in indices if (tensor := tensors[index]) is not None], 2.0)
        found[_places(indices, device, constants)] = of_kind.to(device, dtype)
    return found


def counts(
    gradients: Sequence[Tensor | None], numels: Sequence[int], device: torch.device, constants: Constants
) -> Tensor:
    """[2, n] float64, on ``device``: how many elements of each gradient are 0, and how many are smaller than
    `SMALLEST_NORMAL`, zeros among them. One that did not come counts as zeros.

    Args:
        numels: Of what they are the gradients of.
        constants: Keep these, and where in the result the gradients stand that came.
    """
    dtype = accumulation_dtype(device)
    came = [index for index, gradient in enumerate(gradients) if gradient is not None]
    filled = [_counts(gradient.detach()) for gradient in gradients if gradient is not None]
    here = torch.stack([of_one.to(device) for of_one in filled], 1).to(dtype) if filled else None
    if here is not None and len(came) == len(gradients):
        return here
    found = constants(tuple(numels), lambda: numels, dtype, device).repeat(2, 1)
    if here is not None:
        found[:, _places(came, device, constants)] = here
    return found


def _places(indices: list[int], device: torch.device, constants: Constants) -> Tensor:
    return constants(tuple(indices), indices.copy, torch.int64, device)


def _counts(gradient: Tensor) -> Tensor:
    """[2] float64; of a NaN neither is said."""
    flat, dtype = flattened(gradient), accumulation_dtype(gradient.device)
    # On a CPU in parts that stay in the cache: fresh memory for all of it would cost more than to read it.
    length = SCRATCH if gradient.is_cpu else max(len(flat), 1)
    scratch = torch.empty_like(flat[:length])
    found = []
    for part in flat.split(length):
        size = torch.abs(part, out=scratch[: len(part)])
        zeros = (len(part) - size.count_nonzero()).to(dtype)
        found.append(torch.stack([zeros, size.lt_(SMALLEST_NORMAL).sum(dtype=dtype)]))
    return found[0] if len(found) == 1 else torch.stack(found).sum(0)


def kept(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies, from which `changes_` can subtract: float32 of half-precision ones, else of the same dtype."""
    return [tensor.detach().float() if is_half(tensor) else tensor.detach().clone() for tensor in tensors]


def changes_(before: Sequence[Tensor], after: Sequence[Tensor]) -> Sequence[Tensor]:
    """``before`` minus ``after``, in place. Of what is float32 or half a difference is rounded to float32, where it is
    rounded at all: not between numbers within twice of each other."""
    if before:
        torch._foreach_sub_(list(before), [tensor.detach() for tensor in after])
    return before


# The squared norm of each data rank's own gradient, before the ranks' are averaged ------------------------------------

# Sums over other axes, of a term that every rank of ``tensor`` has, or of tied copies, are made first, on copies: what is
# asked for is the gradient that this data rank alone would step with.


def check_are_local(optimizer: ParallelOptimizer[Any]) -> None:
    """Raise ValueError where gradients are not this data rank's own when backward is over. Collectives: none."""
    topology = optimizer.registry.topology
    if topology.size(*topology.data_axes) == 1:
        raise ValueError(
            f"NoiseScale needs two data ranks, whose gradients differ; the mesh is {topology!r}: leave noise= out"
        )
    if reasons := optimizer.not_local():
        raise ValueError(
            "NoiseScale needs each data rank's gradients before they are averaged, but "
            f"{'; and '.join(reasons)}. Or leave noise= out"
        )


def is_local(entry: ParameterEntry, topology: Topology) -> bool:
    """Whether each data rank has a gradient of its own of all of it: not where a data axis splits it, as experts, or owns
    it, whose gradients come from the samples of several ranks."""
    large = {axis for axis in topology.data_axes if topology.size(axis) > 1}
    return entry.trained and large <= {*sync_axes(entry.spec, topology, True, entry.averaged)}


class LocalGradients:
    """Measures those of one plan.

    Args:
        params: The model's parameters, where backward leaves gradients, in the order of the entries.
        plan: Of these.
        device: Of what is measured.
        constants: Of this plan.
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
        """[data ranks] float64: what this rank adds to the squared norm of its data rank, at its place; as backward left
        the gradients, the loss scale in them, and summed over the window.

        Collectives: where there are pending sums, one all-reduce for each set of peers and kind of layout. Host reads:
        none.
        """
        summed = self._summed()
        gradients = [summed[index] if index in summed else self.params[index].grad for index in self._own]
        found = torch.zeros(self.data_ranks, dtype=torch.float64, device=self.device)
        found[self.data_rank] = (squares(gradients, self.device, self._constants) * self._weights).sum()
        return found

    def _summed(self) -> dict[int, Tensor | None]:
        """The gradients with pending sums, by entry: copies in which these are made."""
        copies = {}
        for index in self._pending:
            param = self.params[index]
            copies[index] = copy = torch.empty_like(param, dtype=gradient_dtype(param)).requires_grad_()
            copy.grad = None if param.grad is None else param.grad.detach().to(copy.dtype, copy=True)
        entries = tuple(self.plan.entries[index] for index in self._pending)
        plan = replace(self.plan, entries=entries)
        reduce_all(gradient_buckets([*copies.values()], plan, self.registry, average_data=False))
        return {index: copy.grad for index, copy in copies.items()}
