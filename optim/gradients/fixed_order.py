"""Sums over micro-batches in one binary tree that does not depend on how many data ranks hold the micro-batches.

The micro-batches of a window are numbered over all data ranks: data rank r holds the numbers r*K to r*K + K-1, where K is
``accumulation_steps``. The gradients are summed in the binary tree over these numbers:

    number of the micro-batch     0   1   2   3   4   5
    level 1                       0+1     2+3     4+5
    level 2                       (0+1)+(2+3)     4+5
    level 3                       ((0+1)+(2+3))+(4+5)

Two ranks with three micro-batches each, or six ranks with one each, compute the same additions with the same rounding.

* Within a rank, gradients are added as soon as both halves of a sum are there (`TreeSum.add`), so that a rank holds about
  log2(K) partial sums.
* Between ranks, each rank receives one slice of all partial sums of all ranks (all-to-all), adds them in the order of the
  tree, and sends the result to all ranks (all-gather). With one partial sum per rank these are the bytes of a ring.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...amp.casting import HALF_DTYPES, is_half
from ...parallel.mesh.process_group_collectives import all_gather_flat
from .buckets import ALIGNMENT, Finish, FlatBucket, dense, flat_buckets, nothing
from .in_place import gradient_dtype
from .reduce_in_backward import run_all


class Node(NamedTuple):
    """A partial sum: the sum over the micro-batches ``place * 2**level`` to ``(place + 1) * 2**level - 1``."""

    level: int
    place: int


class TreeSum:
    """The partial sums of one rank's gradients: per node of the tree, one tensor per parameter.

    Half-precision gradients are summed in float32. A parameter without a gradient in any micro-batch of a node has None
    there, which counts as zeros.

    Attributes:
        nodes: The partial sums by node, in the order of the micro-batches.
    """

    def __init__(self) -> None:
        self.nodes: dict[Node, list[Tensor | None]] = {}

    def add(self, number: int, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one micro-batch, and compute the sums of which both halves are there.

        Args:
            number: The number of the micro-batch over all data ranks; larger than in earlier calls.
            gradients: One dense gradient per parameter. The tensors are written to later.
        """
        node = Node(0, number)
        values = [None if gradient is None else _owned(gradient) for gradient in gradients]
        while node.place % 2 and (left := self.nodes.pop(Node(node.level, node.place - 1), None)) is not None:
            values = add_halves(left, values)
            node = Node(node.level + 1, node.place // 2)
        self.nodes[node] = values


def _owned(gradient: Tensor) -> Tensor:
    """Return a dense gradient as a tensor that may be written to, in float32 if it has half precision."""
    return gradient.float() if is_half(gradient) else gradient.resolve_neg()


def add_halves(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the sum of two partial sums per parameter. Values are written to the tensors of one of the two."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    one = [a if b is None else b for a, b in zip(left, right, strict=True) if (a is None) != (b is None)]
    if one:
        torch._foreach_add_([value for value in one if value is not None], 0.0)  # as a gradient of zeros: -0 becomes 0
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


def levels_of(count: int) -> int:
    """Return the level of the tree's root for ``count`` micro-batches."""
    return max(count - 1, 0).bit_length()


def root_of(parts: Mapping[Node, Tensor], count: int) -> Tensor:
    """Return the sum of all partial sums in the order of the tree.

    Args:
        parts: The partial sums of all ranks; they cover each micro-batch at most once. They are written to.
        count: The number of micro-batches over all data ranks.
    """
    parts = dict(parts)
    for level in range(levels_of(count)):
        for place in sorted(node.place for node in parts if node.level == level):
            if (value := parts.pop(Node(level, place), None)) is None:
                continue  # it was added to its left half
            right = parts.pop(Node(level, place + 1), None) if place % 2 == 0 else None
            parts[Node(level + 1, place // 2)] = value if right is None else value.add_(right)
    (root,) = parts.values()
    return root


def nodes_of(numbers: Iterable[int]) -> list[Node]:
    """Return the nodes that `TreeSum` has after adding the micro-batches ``numbers``, ascending, in its order."""
    tree = TreeSum()
    for number in numbers:
        tree.add(number, ())
    return [*tree.nodes]


class _Bucket(NamedTuple):
    """The dtype and device in which some parameters' gradients are summed, and their places in the buffer."""

    dtype: torch.dtype
    device: torch.device
    layout: FlatBucket


class FixedOrderSum:
    """Sums gradients over the micro-batches of all data ranks in the order of the tree.

    Args:
        params: The parameters whose gradients are summed; equal shapes on all ranks of the group.
        group: The process group of the data ranks. None: there is one data rank.
        rank: The index of this rank in the group.
        ranks: The number of data ranks.
        steps: K, the number of micro-batches per rank.
        bucket_bytes: Maximum size of the buffer for a partial sum; a larger parameter gets a buffer of its own. None
            (default): 8 MiB.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        group: dist.ProcessGroup | None,
        rank: int,
        ranks: int,
        steps: int,
        bucket_bytes: int | None = None,
    ) -> None:
        self.params, self.steps, self._rank, self._ranks, self._group = list(params), steps, rank, ranks, group
        self._tree = TreeSum()
        self.micro_batches = 0
        by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, param in enumerate(self.params):
            by_kind.setdefault((_sum_dtype(param), param.device), []).append(index)
        size = 8 * 2**20 if bucket_bytes is None else bucket_bytes
        self._buckets = [
            _Bucket(dtype, device, layout)
            for (dtype, device), indices in sorted(by_kind.items(), key=lambda item: (str(item[0]), item[1]))
            for layout in flat_buckets(
                indices, [self.params[i].numel() for i in indices], ranks, size // dtype.itemsize
            )
        ]

    def clear(self) -> None:
        """Forget the partial sums, and start with the first micro-batch."""
        self._tree, self.micro_batches = TreeSum(), 0

    @torch.no_grad()
    def take(self) -> None:
        """Move the gradients of one micro-batch from the parameters into the partial sums. Collectives: none.

        Raises:
            RuntimeError: There are more than K micro-batches.
        """
        if self.micro_batches >= self.steps:
            raise RuntimeError(
                f"{self.micro_batches + 1} micro-batches in a window of accumulation_steps={self.steps}: call step() and "
                "zero_grad() after each window"
            )
        number = self._rank * self.steps + self.micro_batches
        self._tree.add(number, [dense(param.grad) if param.requires_grad else None for param in self.params])
        for param in self.params:
            param.grad = None
        self.micro_batches += 1

    @torch.no_grad()
    def finish(self) -> None:
        """Set the gradient of each parameter that requires one to the sum over all micro-batches, and start anew.

        The gradient of a parameter that no micro-batch used becomes zeros. All ranks must have run the same number of
        micro-batches.

        Collectives: per bucket one all-to-all and one all-gather over the data ranks; none with one data rank.
        Host synchronization: none.
        """
        numbers = [range(rank * self.steps, rank * self.steps + self.micro_batches) for rank in range(self._ranks)]
        nodes, parts = [nodes_of(of_rank) for of_rank in numbers], [*self._tree.nodes.values()]
        self.clear()
        if parts:
            run_all([partial(self._start, bucket, nodes, parts) for bucket in self._buckets])

    def _start(self, bucket: _Bucket, nodes: list[list[Node]], parts: list[list[Tensor | None]]) -> Finish:
        """Start to sum one bucket, and return the function that finishes it.

        Args:
            bucket: The parameters and their places in the buffer.
            nodes: The nodes of each rank.
            parts: This rank's partial sums per node. Those of the bucket are freed.
        """
        count, layout, group = self._ranks * self.steps, bucket.layout, self._group
        own = [self._packed(values, bucket) for values in parts]
        if group is None:
            self._unpack(root_of(dict(zip(nodes[0], own, strict=True)), count), layout)
            return nothing
        numel, lengths = layout.slice_numel, [len(of_rank) for of_rank in nodes]
        sent = own[0] if len(own) == 1 else torch.stack([part.view(self._ranks, numel) for part in own], 1).view(-1)
        received = sent.new_empty(sum(lengths) * numel)
        sizes = [length * numel for length in lengths]
        arrived: Any = dist.all_to_all_single(
            received, sent, sizes, [len(own) * numel] * self._ranks, group=group, async_op=True
        )

        @torch.no_grad()
        def finish() -> None:
            nonlocal sent
            arrived.wait()
            del sent
            flat = received.new_empty(layout.padded_numel)
            slices = zip(
                (node for of_rank in nodes for node in of_rank), received.view(-1, numel).unbind(), strict=True
            )
            all_gather_flat(flat, root_of(dict(slices), count), group)
            self._unpack(flat, layout)

        return finish

    def _packed(self, values: list[Tensor | None], bucket: _Bucket) -> Tensor:
        """Return one partial sum as a buffer, [padded_numel], with zeros for missing gradients. Frees the values."""
        parts, end = list[Tensor](), 0
        zeros = torch.zeros(ALIGNMENT * self._ranks, dtype=bucket.dtype, device=bucket.device)
        for index, (start, stop) in zip(bucket.layout.indices, bucket.layout.spans, strict=True):
            value, values[index] = values[index], None
            parts += [zeros[: start - end], zeros.new_zeros(stop - start) if value is None else value.reshape(-1)]
            end = stop
        rest = bucket.layout.padded_numel - end
        return torch.cat([*parts, zeros[:rest] if rest <= len(zeros) else zeros.new_zeros(rest)])

    def _unpack(self, flat: Tensor, layout: FlatBucket) -> None:
        for index, (start, stop) in zip(layout.indices, layout.spans, strict=True):
            param = self.params[index]
            if not param.requires_grad:
                continue
            # `data` gives each gradient a version counter of its own, by which marks of reduced gradients are checked.
            value = flat.data[start:stop].view(param.shape)
            if not param.is_contiguous() or value.dtype != gradient_dtype(param):
                value = torch.empty_like(param, dtype=gradient_dtype(param), requires_grad=False).copy_(value)
            param.grad = value


def _sum_dtype(param: Tensor) -> torch.dtype:
    dtype = gradient_dtype(param)
    return torch.float32 if dtype in HALF_DTYPES else dtype


def reference_tree_sum(gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum of one gradient per micro-batch in the order of the tree, as a reference: halves by recursion."""
    count = len(gradients)
    if count == 1:
        return gradients[0]
    half = 1 << (levels_of(count) - 1)
    return reference_tree_sum(gradients[:half]) + reference_tree_sum(gradients[half:])
