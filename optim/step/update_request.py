"""The inputs of one update (`UpdateRequest`), which a step passes through parameter transforms to the update engine.

A split weight is a bfloat16 weight with an int16 remainder. Together they store a float32 master weight (`split_master`).
`SplitWeights` joins them, steps the master weight, and splits it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ...amp.by_bucket import split_groups, step_by_bucket
from ...amp.casting import copy_each_, flat_offsets, is_half
from ...amp.master_weights import is_half_kept, join_master, split_master
from ...amp.stochastic_rounding import BUCKET_NUMEL
from ...parallel.layout.annotation import copy_annotation
from ..kernels.memory import is_non_overlapping_and_dense
from .host_copy import HostCopy
from .wrapped_optimizer import params_of


@dataclass(frozen=True)
class UpdateRequest:
    """The inputs of one update.

    Args:
        skip: 0-dim float32 on the device of the gradient norm. 1: the update changes no value.
        factor: The factor by which all gradients are multiplied, 0-dim on the same device. None (default): 1.
        low_precision_out: Half-precision copies of the stepped tensors that an engine may write in the same pass.
            Default None: no copies.
        split_weights: Bfloat16 weights with int16 remainders, which are stepped as float32 masters. Default None: no
            split weights.
        skip_of: The skip flag of each tensor that has its own flag: 0-dim, on the device of ``skip``. Default: empty.
        on_host: The copy of ``skip`` and ``factor`` to the CPU, which may still be running. None (default): no copy,
            because ``skip`` is on the CPU or all parameters are on the device.
    """

    skip: Tensor
    factor: Tensor | None = None
    low_precision_out: LowPrecisionOut | None = None
    split_weights: SplitWeights | None = None
    skip_of: Mapping[Tensor, Tensor] = field(default_factory=dict)
    on_host: HostDecision | None = None

    def on_copies(self, copies: Mapping[Tensor, Tensor]) -> UpdateRequest:
        """Return this request with each tensor in ``skip_of`` replaced by its copy, if it has one.

        ``copies`` is a dict from tensors to the copies that replaced them in the param groups.
        """
        if not self.skip_of:
            return self
        return replace(self, skip_of={copies.get(tensor, tensor): skip for tensor, skip in self.skip_of.items()})

    @property
    def remainders(self) -> Mapping[Tensor, Tensor]:
        """Return the int16 remainder of each split weight, by weight; empty without split weights."""
        return {} if self.split_weights is None else self.split_weights.remainders


Update = Callable[[UpdateRequest], object]
"""A function that updates the tensors in the optimizer's param groups at the time of the call, unless ``request.skip``
is 1."""


class HostDecision:
    """A copy of an `UpdateRequest`'s ``skip`` and ``factor`` on the CPU, for parameters that are stepped there.

    The constructor starts the copy. torch's fused optimizers would also copy both tensors to the CPU, but would read
    the copies without waiting for them.
    """

    def __init__(self, skip: Tensor, factor: Tensor | None) -> None:
        self._dtypes = skip.dtype, None if factor is None else factor.dtype
        both = torch.stack([skip.double(), skip.double() if factor is None else factor.double()])
        self._copy = HostCopy(both)
        self._here: tuple[Tensor, Tensor | None] | None = None

    def wait(self) -> tuple[Tensor, Tensor | None]:
        """Return ``skip`` and ``factor`` on the CPU. Host synchronization: the first call waits for the copy."""
        if self._here is None:
            both = self._copy.wait()
            of_skip, of_factor = self._dtypes
            self._here = both[0].to(of_skip), None if of_factor is None else both[1].to(of_factor)
        return self._here


@dataclass(eq=False)
class LowPrecisionOut:
    """Half-precision copies that an engine may write together with the float32 tensors that it steps."""

    copies: Mapping[Tensor, Tensor]
    written: list[Tensor] = field(default_factory=list)


# Split weights --------------------------------------------------------------------------------------------------------


class SplitWeights:
    """The update of split weights, bucket by bucket."""

    def __init__(self, remainders: Mapping[Tensor, Tensor]) -> None:
        self.remainders = remainders

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, update: Callable[[], object]) -> None:
        """Call ``update`` once per bucket of the param groups' tensors, with float32 masters in place of split weights.

        Weights and remainders are updated. A skipped update changes nothing, because splitting a joined master restores
        the weight and the remainder. The call allocates up to about 12 bytes per element of a bucket's split weights. A
        bucket has split weights of up to `BUCKET_NUMEL` elements together, or one larger split weight, on one device. The
        first bucket also has all other tensors. Split weights without a gradient are in no bucket.
        """
        stepped = (
            [param for param in group["params"] if param not in self.remainders or param.grad is not None]
            for group in optimizer.param_groups
        )
        buckets = split_groups(stepped, self.remainders.__contains__, BUCKET_NUMEL, by_device=True)
        step_by_bucket(optimizer, buckets, lambda _: self._step_bucket(optimizer, update))

    def _step_bucket(self, optimizer: torch.optim.Optimizer, update: Callable[[], object]) -> None:
        """Step the tensors that the param groups hold now."""
        weights = [param for param in params_of(optimizer) if param in self.remainders]
        if not weights:  # the bucket has only other tensors
            update()
            return
        joined = self._joined(weights)
        master_of = {weight: nn.Parameter(view) for weight, view in _views(joined, weights).items()}
        for group in optimizer.param_groups:
            group["params"] = [master_of.get(param, param) for param in group["params"]]
        try:
            for weight, master in master_of.items():
                _lend(optimizer, weight, master)
            update()
        finally:
            for weight, master in master_of.items():
                master.grad = None
                if state := optimizer.state.pop(master, None):
                    optimizer.state[weight] = state
        halves, remainders = split_master(joined)
        copy_each_([weight.detach() for weight in weights], list(_views(halves, weights).values()))
        copy_each_([self.remainders[weight] for weight in weights], list(_views(remainders, weights).values()))

    def _joined(self, weights: Sequence[Tensor]) -> Tensor:
        """Return a buffer with the weights' float32 masters. `_views` returns the view of each weight."""
        halves, remainders = [weight.detach() for weight in weights], [self.remainders[weight] for weight in weights]
        if len(weights) == 1:
            return join_master(halves[0], remainders[0])
        return join_master(_flat_copy(halves, weights), _flat_copy(remainders, weights))


def _flat_copy(tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    flat = torch.empty(flat_offsets(weights)[-1], dtype=tensors[0].dtype, device=tensors[0].device)
    copy_each_(list(_views(flat, weights).values()), tensors)
    return flat


def _views(buffer: Tensor, weights: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """Return the view of ``buffer`` that belongs to each weight; for a single weight, ``buffer`` itself.

    With several weights ``buffer`` is flat. A view has its weight's strides if the weight is dense, else it is contiguous.
    Kernels that step a master with its gradient and states rely on equal strides.
    """
    if len(weights) == 1:
        return {weights[0]: buffer}
    views = dict[Tensor, Tensor]()
    for start, weight in zip(flat_offsets(weights)[:-1], weights, strict=True):
        part = buffer[start : start + weight.numel()]
        is_dense = is_non_overlapping_and_dense(weight)
        views[weight] = part.as_strided(weight.shape, weight.stride(), start) if is_dense else part.view(weight.shape)
    return views


def _lend(optimizer: torch.optim.Optimizer, weight: Tensor, master: Tensor) -> None:
    """Give ``master`` the annotation, gradient and optimizer state of ``weight``.

    Half-precision states with one value per element become float32.
    """
    copy_annotation(weight, master)
    master.grad = weight.grad
    if state := optimizer.state.get(weight):
        for key, value in state.items():
            if is_half_kept(key, value, weight) and is_half(value):
                state[key] = value.float()
        optimizer.state[master] = state
