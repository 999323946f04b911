"""One flat bucket at run time: its gradients come to this rank's slice, its slice goes out to all ranks' parameters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...parallel.mesh.registry import ProcessGroupRegistry
from ..gradients.flat import FlatBucket, Segment

Finish = Callable[[], None]
IN_FLIGHT = 2
"""Exchanges under way at a time: one is packed or unpacked while another travels. Each holds a flat copy of its bucket."""


class Exchanges:
    """Starts exchanges in the order given and finishes them in the same, at most `IN_FLIGHT` at a time."""

    def __init__(self) -> None:
        self._started: deque[Finish] = deque()

    def add(self, finish: Finish) -> None:
        """Take charge of an exchange that has been started; may finish an earlier one."""
        self._started.append(finish)
        if len(self._started) >= IN_FLIGHT:
            self._started.popleft()()

    def finish(self) -> None:
        """Finish all."""
        while self._started:
            self._started.popleft()()

    @classmethod
    def run(cls, starts: Iterable[Callable[[], Finish]]) -> None:
        """Start and finish all of them."""
        exchanges = cls()
        for start in starts:
            exchanges.add(start())
        exchanges.finish()


class ShardedBucket:
    """The parameters of one bucket, on one rank.

    Args:
        params: The model's; one dtype and device.
        layout: How they lie in the bucket.
        registry: The groups.
        axis: The slices are its ranks'.
        summed: Whether gradients are still to be summed over the axis; else all ranks of it have the same. Over a data axis
            the sum is divided by its size.
        grad_dtype: Of the slice of the gradients, and of the collective.

    Attributes:
        segments: What this rank's slice holds.
        pieces: For each segment a 1-dim parameter: a view of the model's parameter, or of a copy where that is not
            contiguous.
        gradients: For each segment the gradient that has come so far, or None.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        layout: FlatBucket,
        registry: ProcessGroupRegistry,
        axis: str,
        summed: bool,
        grad_dtype: torch.dtype,
    ) -> None:
        self.params, self.layout, self.summed, self.grad_dtype = list(params), layout, summed, grad_dtype
        self._average = 1 / registry.size(axis) if axis in registry.topology.data_axes else 1.0
        self._rank = registry.rank(axis)
        self._group = registry.group(axis)
        self.segments = layout.segments(self._rank)
        self.pieces: list[Tensor] = [nn.Parameter(self._piece(segment)) for segment in self.segments]
        self.gradients: list[Tensor | None] = [None] * len(self.segments)
        self._seen = self._look()

    # Weights ---------------------------------------------------------------------------------------------------------

    def _part(self, segment: Segment) -> Tensor:
        """The segment's elements of the parameter, without autograd and with a version counter of their own."""
        flat = self.params[segment.position].data.reshape(-1)
        return flat[segment.start : segment.start + segment.numel]

    def _piece(self, segment: Segment) -> Tensor:
        """The same, a view if the parameter is contiguous, else a copy of no more than that."""
        part = self._part(segment)
        return part if self.params[segment.position].is_contiguous() else part.clone()

    def _look(self) -> list[tuple[int, int]]:
        return [(param.data_ptr(), param._version) for param in self.params]

    @torch.no_grad()
    def refresh(self) -> None:
        """Set the pieces to the parameters where somebody wrote to those or gave them other memory. Host reads: none."""
        now = self._look()
        for segment, piece in zip(self.segments, self.pieces, strict=True):
            if now[segment.position] != self._seen[segment.position]:
                piece.data = self._piece(segment)
                torch.autograd.graph.increment_version(piece)  # tells masters to compare
        self._seen = now

    def gather(self) -> Finish:
        """Start to bring all ranks' pieces into the parameters. Collectives: one all-gather."""
        if self._fits_exactly(self.params[0]):
            flat = self.params[0].data.view(-1)
        else:
            flat = self.params[0].new_empty(self.layout.padded_numel)
            own = self._own(flat)
            if self.pieces:
                torch._foreach_copy_([own[s.offset : s.offset + s.numel] for s in self.segments], self.pieces)
        work: Any = dist.all_gather_single(flat, self._own(flat), group=self._group, async_op=True)

        @torch.no_grad()
        def finish() -> None:
            work.wait()
            if flat.data_ptr() == self.params[0].data_ptr():
                torch.autograd.graph.increment_version(self.params)
            else:
                torch._foreach_copy_(self.params, self._views(flat))
            self._seen = self._look()

        return finish

    # Gradients -------------------------------------------------------------------------------------------------------

    def forget_gradients(self, set_to_none: bool = True) -> None:
        """Clear the slice of the gradients, and those of the parameters."""
        for param in self.params:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()
        self.gradients = [None if gradient is None or set_to_none else gradient.zero_() for gradient in self.gradients]

    @torch.no_grad()
    def reduce(self, release: bool = False, summed: bool = False) -> Finish:
        """Start to add the parameters' gradients to this rank's slice of them; one that a rank lacks counts as zeros.

        Args:
            release: Set the parameters' gradients to None. Else the slice may share memory with them.
            summed: Sum them over the axis though that should have been done.
        Collectives: one reduce-scatter where they are summed, else none. Host reads: none.
        """
        flat: Tensor | None = None
        if summed := summed or self.summed:
            flat = self._packed_gradients()
            own = flat.new_empty(self.layout.slice_numel)
            work: Any = dist.reduce_scatter_single(own, flat, group=self._group, async_op=True)
        else:
            parts = [self._gradient_part(segment, release) for segment in self.segments]
        if release:
            for param in self.params:
                param.grad = None

        @torch.no_grad()
        def finish() -> None:
            nonlocal flat  # the collective reads it until here
            if summed:
                work.wait()
                flat = None
                if self.grad_dtype != torch.float16:
                    own.mul_(self._average)
                self._add([own[s.offset : s.offset + s.numel] for s in self.segments])
            else:
                self._add(parts)

        return finish

    def _packed_gradients(self) -> Tensor:
        # Divided before the sum, float16 gradients overflow no earlier than one rank's would; else the slice is less work.
        early = self._average if self.grad_dtype == torch.float16 else 1.0
        first = _dense(self.params[0].grad)
        if first is not None and first.dtype == self.grad_dtype and self._fits_exactly(first):
            return first.view(-1) if early == 1.0 else first.view(-1) * early
        flat = self.params[0].new_zeros(self.layout.padded_numel, dtype=self.grad_dtype)
        pairs = [
            (view, gradient)
            for view, param in zip(self._views(flat), self.params, strict=True)
            if (gradient := _dense(param.grad)) is not None
        ]
        if pairs:
            views, gradients = zip(*pairs, strict=True)
            torch._foreach_copy_(views, gradients)
        return flat if early == 1.0 else flat.mul_(early)

    def _gradient_part(self, segment: Segment, release: bool) -> Tensor | None:
        gradient = _dense(self.params[segment.position].grad)
        if gradient is None:
            return None
        part = gradient.reshape(-1)[segment.start : segment.start + segment.numel]
        return part.to(self.grad_dtype, copy=release)

    def _add(self, parts: Sequence[Tensor | None]) -> None:
        for index, part in enumerate(parts):
            present = self.gradients[index]
            if present is None:
                self.gradients[index] = part
            elif part is not None:
                present.add_(part)

    # Flat buffers ----------------------------------------------------------------------------------------------------

    def _fits_exactly(self, tensor: Tensor) -> bool:
        """Whether the flattened tensor is the whole flat bucket: a large parameter that needs no copy to travel."""
        return len(self.params) == 1 and tensor.numel() == self.layout.padded_numel and tensor.is_contiguous()

    def _own(self, flat: Tensor) -> Tensor:
        return flat[self._rank * self.layout.slice_numel : (self._rank + 1) * self.layout.slice_numel]

    def _views(self, flat: Tensor) -> list[Tensor]:
        places = zip(self.params, self.layout.offsets, self.layout.numels, strict=True)
        return [flat[offset : offset + numel].view(param.shape) for param, offset, numel in places]


def _dense(gradient: Tensor | None) -> Tensor | None:
    """An embedding's sparse gradient as a dense one, which it becomes in a slice anyway."""
    return gradient if gradient is None or gradient.layout == torch.strided else gradient.to_dense()
