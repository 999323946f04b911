"""The data of one update, passed from the step through parameter transforms to the engines that make it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .split_weights import SplitWeights


@dataclass(frozen=True)
class UpdateRequest:
    """The inputs of one update.

    Args:
        skip: 0-dim float32 on the device of the gradient norm. 1: the update changes nothing.
        factor: The factor on all gradients, 0-dim on the same device. None (default): 1.
        low_precision_out: Half-precision copies that an engine may write in the same pass. None (default): there are none.
        split_weights: bfloat16 weights that are stepped as float32 masters. None (default): there are none.
        on_host: Copies of ``skip`` and ``factor`` that are on their way to the CPU. None (default): no CUDA device decides
            for parameters on the CPU.
    """

    skip: Tensor
    factor: Tensor | None = None
    low_precision_out: LowPrecisionOut | None = None
    split_weights: SplitWeights | None = None
    on_host: HostDecision | None = None

    @property
    def remainders(self) -> Mapping[Tensor, Tensor]:
        """Return the int16 remainder of each split weight."""
        return {} if self.split_weights is None else self.split_weights.remainders


Update = Callable[[UpdateRequest], object]
"""A function that steps the parameters in the present param groups, or skips."""


class HostDecision:
    """A copy of an `UpdateRequest`'s ``skip`` and ``factor`` on the CPU, for parameters that are stepped there.

    The copy starts in the constructor. A fused optimizer would start a copy itself, but would not wait for it.

    Args:
        skip: 0-dim, on a CUDA device.
        factor: 0-dim, on the same device; None: 1.
    """

    def __init__(self, skip: Tensor, factor: Tensor | None) -> None:
        self._dtypes = skip.dtype, None if factor is None else factor.dtype
        both = torch.stack([skip.double(), skip.double() if factor is None else factor.double()])
        self._host = torch.empty(2, dtype=torch.float64, pin_memory=True)
        self._host.copy_(both, non_blocking=True)
        self._event: torch.cuda.Event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(skip.device))
        self._here: tuple[Tensor, Tensor | None] | None = None

    def wait(self) -> tuple[Tensor, Tensor | None]:
        """Return ``skip`` and ``factor`` on the CPU. Host synchronization: the first call waits for the copy."""
        if self._here is None:
            self._event.synchronize()
            of_skip, of_factor = self._dtypes
            self._here = self._host[0].to(of_skip), None if of_factor is None else self._host[1].to(of_factor)
        return self._here


@dataclass(eq=False)
class LowPrecisionOut:
    """Half-precision copies that an engine may write together with the float32 tensors that it steps.

    Args:
        copies: The half-precision copy of each float32 tensor.

    Attributes:
        written: The copies that an engine has written.
    """

    copies: Mapping[Tensor, Tensor]
    written: list[Tensor] = field(default_factory=list)
