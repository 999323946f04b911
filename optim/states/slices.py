"""One flat bucket of parameters at run time: its gradients come to this rank's slice, its slice goes out to all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...amp.copies import copy_each_, has_equal_values
from ...parallel.mesh.flat_collectives import ALL_GATHER
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..gradients.bucket import Exchange, Finish, GradientBucket, dense
from ..gradients.flat import FlatBucket, Segment
from ..gradients.in_place import clear_gradients


class Slices:
    """The parameters of one bucket, and this rank's slice of them.

    Args:
        params: The model's; one dtype and device.
        layout: How they lie in the bucket.
        registry: The groups.
        axes: The slices are their ranks'.
        summed: Whether gradients are still to be summed over the axes; else all ranks of them have the same. Over data axes
            the sum is divided by their size.
        grad_dtype: Of the slice of the gradients, and of the collective.
        exchange: How gradients are summed.
        release: Free the parameters' gradients when they have been reduced. Else the slice may share memory with them.

    Attributes:
        segments: What this rank's slice holds.
        pieces: For each segment a 1-dim parameter: a view of the model's parameter, or of a copy where that is not
            contiguous.
        gradients: For each segment the gradient that has come so far, or None.
    """

    adopt = False

    def __init__(
        self,
        params: Sequence[Tensor],
        layout: FlatBucket,
        registry: ProcessGroupRegistry,
        axes: tuple[str, ...],
        summed: bool,
        grad_dtype: torch.dtype,
        exchange: Exchange,
        release: bool,
    ) -> None:
        self.params, self.layout, self.summed, self.grad_dtype = list(params), layout, summed, grad_dtype
        self.release = release
        rank, self.group, self._numel = registry.rank(*axes), registry.group(*axes), layout.slice_numel
        self._own = slice(rank * self._numel, (rank + 1) * self._numel)
        average = 1 / registry.size(*axes) if {*axes} <= {*registry.topology.data_axes} else 1.0
        # Divided before the sum, float16 gradients overflow no earlier than one rank's would; else the slice is less work.
        early = average if grad_dtype == torch.float16 else 1.0
        self._late = 1.0 if grad_dtype == torch.float16 else average
        self._travels_as_it_is = len(self.params) == 1 and self.params[0].numel() == layout.padded_numel
        self._bucket = GradientBucket(self.params, layout, self.group, exchange, grad_dtype, early)
        self.segments = layout.segments(rank)
        self.pieces: list[Tensor] = [nn.Parameter(self._piece(segment)) for segment in self.segments]
        self.gradients: list[Tensor | None] = [None] * len(self.segments)
        self._seen = self._look()
        self._piece_versions = self._look_at_pieces()

    # Weights ---------------------------------------------------------------------------------------------------------

    def _part(self, segment: Segment) -> Tensor:
        """The segment's elements of the parameter, without autograd and with a version counter of their own."""
        flat = self.params[segment.position].data.reshape(-1)
        return flat[segment.start : segment.start + segment.numel]

    def _piece(self, segment: Segment) -> Tensor:
        """The same, a view if the parameter is contiguous, else a copy of no more than that."""
        part = self._part(segment)
        return part if self.params[segment.position].is_contiguous() else part.clone()

    def _look(self) -> list[tuple[int, int, tuple[int, ...]]]:
        return [(param.data_ptr(), param._version, param.stride()) for param in self.params]

    def _look_at_pieces(self) -> list[int]:
        return [piece._version for piece in self.pieces]

    @torch.no_grad()
    def refresh(self) -> None:
        """Set the pieces to the parameters where somebody wrote to those or gave them other memory. Host reads: none."""
        now = self._look()
        for segment, piece in zip(self.segments, self.pieces, strict=True):
            if now[segment.position] != self._seen[segment.position]:
                piece.data = self._piece(segment)
                torch.autograd.graph.increment_version(piece)  # tells masters to compare
        self._seen, self._piece_versions = now, self._look_at_pieces()

    def has_copies(self) -> bool:
        """Return True if a piece is a copy and not a view."""
        return any(not self.params[segment.position].is_contiguous() for segment in self.segments)

    def find_overwritten(self) -> Tensor | None:
        """Return the first parameter of which a piece is a copy with other values. Pieces that were written to, and
        parameters that `refresh` reads, are left out. Host synchronization: one per copy."""
        now = self._look()
        for segment, piece, version in zip(self.segments, self.pieces, self._piece_versions, strict=True):
            position = segment.position
            if self.params[position].is_contiguous() or now[position] != self._seen[position]:
                continue
            if piece._version == version and not has_equal_values(self._part(segment), piece.detach()):
                return self.params[position]
        return None

    def reload(self) -> None:
        """Set the pieces to the parameters, whether or not a write was seen."""
        self._seen = [(0, -1, ())] * len(self.params)
        self.refresh()

    def gather(self) -> Finish:
        """Start to bring all ranks' pieces into the parameters. Collectives: one all-gather."""
        if self._travels_as_it_is and self.params[0].is_contiguous():
            flat = self.params[0].data.view(-1)
        else:
            flat = self.params[0].new_empty(self._numel * self.layout.slices)
            own = flat[self._own]
            if self.pieces:  # a slice may be nothing but padding
                torch._foreach_copy_([own[s.offset : s.offset + s.numel] for s in self.segments], self.pieces)
        work: Any = getattr(dist, ALL_GATHER)(flat, flat[self._own], group=self.group, async_op=True)

        @torch.no_grad()
        def finish() -> None:
            work.wait()
            if flat.data_ptr() == self.params[0].data_ptr():
                torch.autograd.graph.increment_version(self.params)
            else:
                places = zip(self.layout.offsets, self.params, strict=True)
                arrived = [flat[at : at + p.numel()].view(p.shape) for at, p in places]
                if flat.is_cpu:
                    torch._foreach_copy_(self.params, arrived)
                else:  # where one lies in another order it would be a kernel each
                    copy_each_(self.params, arrived)
            self._seen, self._piece_versions = self._look(), self._look_at_pieces()

        return finish

    # Gradients -------------------------------------------------------------------------------------------------------

    def forget_gradients(self, set_to_none: bool = True) -> None:
        """Clear the slice of the gradients, and those of the parameters."""
        clear_gradients(self.params, set_to_none)
        self.gradients = [None if gradient is None or set_to_none else gradient.zero_() for gradient in self.gradients]

    def start(self) -> Finish:
        """`reduce`, as buckets are reduced while backward runs."""
        return self.reduce()

    @torch.no_grad()
    def reduce(self, summed: bool = False) -> Finish:
        """Start to add the parameters' gradients to this rank's slice of them; one that a rank lacks counts as zeros.

        Args:
            summed: Sum them over the axis though that should have been done.
        Collectives: one reduce-scatter where they are summed, else none. Host reads: none.
        """
        if summed := summed or self.summed:
            own = self.params[0].new_empty(self._numel, dtype=self.grad_dtype)
            arrived, *held = self._bucket.reduce_scatter(own)
        else:
            parts = [self._gradient_part(segment) for segment in self.segments]
        if self.release:
            for param in self.params:
                param.grad = None

        @torch.no_grad()
        def finish() -> None:
            if summed:
                arrived()
                held.clear()
                if self._late != 1.0:
                    own.mul_(self._late)
                self._add([own[s.offset : s.offset + s.numel] for s in self.segments])
            else:
                self._add(parts)

        return finish

    def _gradient_part(self, segment: Segment) -> Tensor | None:
        gradient = dense(self.params[segment.position].grad)
        if gradient is None:
            return None
        part = gradient.reshape(-1)[segment.start : segment.start + segment.numel]
        return part.to(self.grad_dtype, copy=self.release)

    def _add(self, parts: Sequence[Tensor | None]) -> None:
        sums, terms = [], []
        for index, part in enumerate(parts):
            present = self.gradients[index]
            if present is None:
                self.gradients[index] = part
            elif part is not None:
                sums.append(present)
                terms.append(part)
        if sums:
            torch._foreach_add_(sums, terms)


def reference_slice(
    gradients: Sequence[Sequence[Tensor]], layout: FlatBucket, rank: int, average: bool
) -> list[Tensor]:
    """What ``Slices.gradients`` of ``rank`` must be, plain: sum the ranks' whole gradients and cut.

    Args:
        gradients: Of each rank of the axis, those of the bucket's parameters.
        average: Divide by the number of ranks.
    """
    totals = [torch.stack(list(of_all)).double().sum(0).flatten() for of_all in zip(*gradients, strict=True)]
    parts = [totals[s.position][s.start : s.start + s.numel] for s in layout.segments(rank)]
    return [part / len(gradients) if average else part for part in parts]


def reference_sharded_step(
    params: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    layout: FlatBucket,
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """A step of a bucket whose states are sharded, plain: each rank steps its slice, and all slices make up the parameters.

    Args:
        params, gradients: As for `reference_slice`; the ranks are of a data axis.
        optimizers: Of each rank one over copies of its segments.
    """
    for rank, optimizer in enumerate(optimizers):
        copies = [copy for group in optimizer.param_groups for copy in group["params"]]
        for copy, gradient in zip(copies, reference_slice(gradients, layout, rank, average=True), strict=True):
            copy.grad = gradient.to(copy.dtype)
        optimizer.step()
        for copy, s in zip(copies, layout.segments(rank), strict=True):
            params[s.position].data.view(-1)[s.start : s.start + s.numel] = copy.detach()
