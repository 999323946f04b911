"""One flat bucket at run time: the gradients of parameters of one kind of layout, end to end, on their way to a sum.

    replicated states   every rank needs the sum of the whole bucket        --all-reduce-->       the parameters' gradients
    sharded states      every rank needs its slice of the sum               --reduce-scatter-->   a slice

Only parameters of one kind (same distinct axes, owners, ties, dtype and device) share a bucket. All ranks that hold copies
of one of them hold all of the others too, so that the same element lies at the same place of equally long buffers wherever
it is summed, and copies get the same bits whatever order a backend sums in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...amp.copies import copy_each_
from ...parallel.mesh.flat_collectives import REDUCE_SCATTER
from ..kernels.memory import is_lazy
from .flat import FlatBucket
from .in_place import change_each, mark_complete, widen_gradients

BUCKET_BYTES = 32 * 2**20

Finish = Callable[[], object]
Memory = dict[str, Tensor]


class Exchange(ABC):
    """How a flat buffer of gradients is summed over a group: what goes over the wire. Collectives: one a call. Host reads:
    none.

    It starts a sum and returns what finishes it, so that buckets overlap with each other and with backward; the caller
    keeps the tensors until then. What it has to remember it keeps in the bucket's ``memory``; all ranks of the group give
    the same exchange.
    """

    @abstractmethod
    def all_reduce(self, flat: Tensor, group: dist.ProcessGroup, memory: Memory) -> Finish:
        """Start to put the sum of all ranks' ``flat`` (1-dim, contiguous) in its place; the result finishes it."""

    @abstractmethod
    def reduce_scatter(self, own: Tensor, flat: Tensor, group: dist.ProcessGroup, memory: Memory) -> Finish:
        """Start to put this rank's slice of the sum of all ranks' ``flat`` into ``own``; the result finishes it."""


class Exact(Exchange):
    """Sums in the gradients' own dtype."""

    def all_reduce(self, flat: Tensor, group: dist.ProcessGroup, memory: Memory) -> Finish:
        work: Any = dist.all_reduce(flat, group=group, async_op=True)
        return work.wait  # type: ignore[no-any-return]

    def reduce_scatter(self, own: Tensor, flat: Tensor, group: dist.ProcessGroup, memory: Memory) -> Finish:
        work: Any = getattr(dist, REDUCE_SCATTER)(own, flat, group=group, async_op=True)
        return work.wait  # type: ignore[no-any-return]


class Reducible(Protocol):
    """Gradients that are completed together, when all of them are there.

    Attributes:
        adopt: Gradients may become views of a buffer. Set to False where a CUDA graph is made: from then on they stay where
            they lie, and graphs of other micro-batches add to them there.
    """

    adopt: bool

    @property
    def params(self) -> Sequence[Tensor]: ...

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Whose gradients are summed; None: this rank's alone."""

    def start(self) -> Finish:
        """Start to reduce the gradients that there are; the result finishes it."""


class LocalGradients:
    """The gradients that this rank sums with nobody, but has to divide.

    Args:
        params: The tensors whose ``.grad`` it is.
        scale: What they are multiplied by.
    """

    group = None
    adopt = False

    def __init__(self, params: Sequence[Tensor], scale: float) -> None:
        self.params, self.scale = list(params), scale

    @torch.no_grad()
    def start(self) -> Finish:
        """Multiply them. Collectives, host reads: none."""
        widen_gradients(self.params)
        gradients = [param.grad for param in self.params if param.grad is not None]
        if gradients:
            change_each(torch._foreach_mul_, gradients, self.scale)
        return _nothing


def _nothing() -> None:
    pass


class GradientBucket:
    """The gradients of the parameters of one bucket, on one rank.

    Args:
        params: The tensors whose ``.grad`` is summed; one dtype and device.
        layout: How they lie in the buffer; its slices are those of a `reduce_scatter`.
        group: Whose gradients are summed.
        exchange: How.
        dtype: Of the buffer.
        scale: What gradients are multiplied by before they are summed: half-precision sums then overflow no earlier than
            one rank's gradient would.
        adopt: Let gradients become views of the flat buffer after an all-reduce, which saves a copy (see also `Reducible`).
            Not where a gradient has another owner who would not see that.
        pending: Those that must not be summed twice, and are marked: their gradients are never views.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        layout: FlatBucket,
        group: dist.ProcessGroup,
        exchange: Exchange,
        dtype: torch.dtype,
        scale: float = 1.0,
        adopt: bool = False,
        pending: Sequence[Tensor] = (),
    ) -> None:
        self.params, self.layout, self.dtype, self.scale = list(params), layout, dtype, scale
        self.group, self._exchange, self._pending = group, exchange, list(pending)
        # A mark knows a gradient by its version, which views of a buffer share.
        self.adopt = adopt and not self._pending
        self._memory: Memory = {}
        self._padded = layout.padded_numel
        self._spans = [(at, at + numel) for at, numel in zip(layout.offsets, layout.numels, strict=True)]
        gaps = (stop for (_, stop), start in zip(self._spans, layout.offsets[1:], strict=False) if stop != start)
        self._first_gap = next(gaps, layout.end)

    def start(self) -> Finish:
        """`all_reduce`, as buckets are reduced while backward runs."""
        return self.all_reduce()

    @torch.no_grad()
    def all_reduce(self) -> Finish:
        """Start to sum the gradients over the group; one that a rank lacks counts as zeros, and everybody gets the sum.

        Collectives: one. Host reads: none.
        """
        flat = self._packed()
        arrived = self._exchange.all_reduce(flat, self.group, self._memory)

        @torch.no_grad()
        def finish() -> None:
            arrived()
            self._unpack(flat)
            for param in self._pending:
                mark_complete(param)

        return finish

    @torch.no_grad()
    def reduce_scatter(self, own: Tensor) -> tuple[Finish, Tensor]:
        """Start to put this rank's slice of the sum into ``own``, [slice_numel] of the bucket's dtype.

        Returns:
            What finishes it, and the buffer, which must be kept until then. The gradients are not needed any more, unless
            one is the whole buffer.
        Collectives: one. Host reads: none.
        """
        first = dense(self.params[0].grad)
        if first is not None and first.dtype == self.dtype and self.fits_exactly(first):
            flat = first.view(-1) if self.scale == 1.0 else first.view(-1) * self.scale
        else:
            flat = self._packed()
        return self._exchange.reduce_scatter(own, flat, self.group, self._memory), flat

    def _packed(self) -> Tensor:
        """[padded_numel]: the gradients times the scale, zeros where there are none."""
        flat = self.params[0].new_empty(self._padded, dtype=self.dtype)
        flat[self._first_gap :].zero_()
        views, gradients = [], []
        for view, param in zip(self.views(flat), self.params, strict=True):
            gradient = dense(param.grad)
            if gradient is None:
                view.zero_()
            elif not flat.is_cpu:  # all together: one by one it would be a kernel each
                views.append(view)
                gradients.append(gradient)
            elif self.scale == 1.0:
                view.copy_(gradient)
            elif gradient.dtype == self.dtype:  # in one pass over memory
                torch.mul(gradient, self.scale, out=view)
            else:
                view.copy_(gradient).mul_(self.scale)
        if views:
            copy_each_(views, gradients)
            if self.scale != 1.0:
                torch._foreach_mul_(views, self.scale)
        return flat

    def _unpack(self, flat: Tensor) -> None:
        targets, sources = [], []
        for view, param in zip(self.views(flat), self.params, strict=True):
            if param.grad is None and not param.requires_grad:
                continue  # frozen since the bucket was made: what is no gradient must not be stepped with
            narrow = param.grad is not None and param.grad.dtype != self.dtype  # the sum would be rounded into it
            if (self.adopt or narrow) and param.is_contiguous():
                param.grad = view
                continue
            if param.grad is None or narrow or param.grad.is_neg():
                param.grad = torch.empty_like(param, dtype=self.dtype)
            targets.append(param.grad)
            sources.append(view)
        if targets:
            copy_each_(targets, sources)

    def fits_exactly(self, tensor: Tensor) -> bool:
        """Whether the flattened tensor is the whole buffer: a large parameter that needs no copy to travel."""
        whole = len(self.params) == 1 and tensor.numel() == self._padded
        return whole and tensor.is_contiguous() and not is_lazy(tensor)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Where each parameter lies in the flat buffer, of its shape."""
        places = zip(self.params, self._spans, strict=True)
        return [flat[start:stop].view(param.shape) for param, (start, stop) in places]


def reduce_all(buckets: Iterable[Reducible]) -> None:
    """Start all of a group, then finish them in the same order, then those of the next group. Collectives: those of the
    buckets.

    Over NCCL the kernels of two groups may need more of a GPU than there is: in flight together, started in one order here
    and in another there, they would wait for each other.
    """
    for _, of_group in groupby(buckets, key=lambda bucket: id(bucket.group)):
        for finish in [bucket.start() for bucket in of_group]:
            finish()


def keep_in_place(buckets: Iterable[Reducible]) -> None:
    """From now on their gradients stay where they lie, for a CUDA graph; see `Reducible`."""
    for bucket in buckets:
        bucket.adopt = False


def dense(gradient: Tensor | None) -> Tensor | None:
    """An embedding's sparse gradient as a dense one, which it becomes in a buffer anyway."""
    return gradient if gradient is None or gradient.layout == torch.strided else gradient.to_dense()
