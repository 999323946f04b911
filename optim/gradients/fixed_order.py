"""Sums over micro-batches in one binary tree that does not depend on how many data ranks hold the micro-batches.

The micro-batches of an accumulation window (of one optimizer step) are numbered over all data ranks: data rank r holds
the numbers r*K to r*K + K-1, where K is ``accumulation_steps``. The gradients are summed in the binary tree over these
numbers:

    number of the micro-batch     0   1   2   3   4   5
    level 1                       0+1     2+3     4+5
    level 2                       (0+1)+(2+3)     4+5
    level 3                       ((0+1)+(2+3))+(4+5)

Two ranks with three micro-batches each, or six ranks with one each, compute the same additions with the same rounding.

* Within a rank, two halves are added as soon as both are computed (`TreeSum.add`), so that a rank holds at most about
  2 log2(K) partial sums.
* Between ranks, each rank receives one slice of all partial sums of all ranks (all-to-all), adds them in the order of the
  tree, and sends the result to all ranks (all-gather). With one partial sum per rank, each rank sends as many bytes as in
  a ring all-reduce.
* If optimizer states are sharded over the data ranks (ZeRO-1), each rank steps its slice, and the all-gather is left out.
* With sharded gradients (ZeRO-2), each backward exchanges the gradients of its micro-batch, and each rank sums its slice
  over all micro-batches of all ranks (`SlicedTreeSum`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...amp.casting import HALF_DTYPES, is_half
from ...parallel.mesh.process_group_collectives import all_gather_flat
from .buckets import ALIGNMENT, Finish, FlatBucket, dense, flat_buckets, nothing, run_all
from .in_place import gradient_dtype


class Node(NamedTuple):
    """A partial sum: the sum over the micro-batches ``place * 2**level`` to ``(place + 1) * 2**level - 1``."""

    level: int
    place: int


class TreeSum:
    """The partial sums of one rank's gradients: per `Node` of the tree, one tensor per parameter.

    Half-precision gradients are summed in float32. If a parameter got a gradient in none of a node's micro-batches,
    its partial sum is None, which counts as zeros.

    If micro-batches are added in ascending order, ``nodes`` are in this order.
    """

    def __init__(self) -> None:
        self.nodes: dict[Node, list[Tensor | None]] = {}

    def add(self, number: int, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one micro-batch, and compute each sum whose two halves are both known.

        ``number`` counts the micro-batches of all data ranks. Later additions may overwrite the gradients.
        """
        node = Node(0, number)
        values = [None if gradient is None else _owned(gradient) for gradient in gradients]
        while (other := self.nodes.pop(Node(node.level, node.place ^ 1), None)) is not None:
            values = add_halves(other, values) if node.place % 2 else add_halves(values, other)
            node = Node(node.level + 1, node.place // 2)
        self.nodes[node] = values


def _owned(gradient: Tensor) -> Tensor:
    return gradient.float() if is_half(gradient) else gradient.resolve_neg()


def add_halves(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the sum of two partial sums per parameter. The result overwrites and reuses tensors of both arguments."""
    pairs = list(zip(left, right, strict=True))
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    one = [a if b is None else b for a, b in pairs if (a is None) != (b is None)]
    if one:
        # A missing gradient counts as zeros, and -0 + 0 = 0. So -0 must become 0 here too.
        torch._foreach_add_([value for value in one if value is not None], 0.0)
    return [b if a is None else a for a, b in pairs]


def root_of(parts: Mapping[Node, Tensor], count: int) -> Tensor:
    """Return the sum of all partial sums in the order of the tree. Tensors in ``parts`` may be overwritten."""
    parts = dict(parts)
    levels = (count - 1).bit_length()
    for level in range(levels):
        for place in sorted(node.place for node in parts if node.level == level):
            if (value := parts.pop(Node(level, place), None)) is None:
                continue  # it was added to its left sibling
            right = parts.pop(Node(level, place + 1), None) if place % 2 == 0 else None
            parts[Node(level + 1, place // 2)] = value if right is None else value.add_(right)
    (root,) = parts.values()
    return root


def nodes_of(numbers: Iterable[int]) -> list[Node]:
    """Return the nodes of a `TreeSum`, in order, after `TreeSum.add` of the micro-batches ``numbers`` (ascending)."""
    tree = TreeSum()
    for number in numbers:
        tree.add(number, ())
    return [*tree.nodes]


# Exchange between data ranks ------------------------------------------------------------------------------------------


class TreeRanks(NamedTuple):
    """The data ranks that hold the micro-batches of an accumulation window.

    ``axes`` are the data axes larger than 1, and ``group`` is their process group (None: there is one data rank).
    ``rank`` is the index of this rank in the group of ``ranks`` ranks, with ``steps`` (K) micro-batches each.
    """

    axes: tuple[str, ...]
    group: dist.ProcessGroup | None
    rank: int
    ranks: int
    steps: int

    @property
    def micro_batches(self) -> int:
        return self.ranks * self.steps


def exchange(
    own: Sequence[Tensor], nodes: Sequence[Sequence[Node]], ranks: TreeRanks
) -> Callable[[], list[tuple[Node, Tensor]]]:
    """Start to exchange partial sums: each rank gets its slice of the partial sums of all ranks.

    ``own`` has one flat buffer per node of this rank. All buffers have the same length, a multiple of ``ranks.ranks``.
    ``nodes`` has the nodes of each rank. The returned function waits, and returns a slice per node of all ranks, in the
    order of the ranks.
    Collectives: one all-to-all.
    """
    numel, lengths = own[0].numel() // ranks.ranks, [len(of_rank) for of_rank in nodes]
    sent = own[0] if len(own) == 1 else torch.stack([part.view(ranks.ranks, numel) for part in own], 1).view(-1)
    received, sizes = sent.new_empty(sum(lengths) * numel), [length * numel for length in lengths]
    work: Any = dist.all_to_all_single(
        received, sent, sizes, [len(own) * numel] * ranks.ranks, group=ranks.group, async_op=True
    )

    def wait() -> list[tuple[Node, Tensor]]:
        nonlocal sent
        work.wait()
        del sent
        slices = received.view(-1, numel).unbind()
        return list(zip((node for of_rank in nodes for node in of_rank), slices, strict=True))

    return wait


class SlicedTreeSum:
    """Sums one flat buffer per micro-batch over all micro-batches and data ranks. Each rank has one slice of the sum."""

    def __init__(self, ranks: TreeRanks) -> None:
        self._ranks = ranks
        self.clear()

    def clear(self) -> None:
        self._tree, self._micro_batches = TreeSum(), 0

    def start(self, flat: Tensor) -> Finish:
        """Start to exchange the buffers of one micro-batch per rank. The returned function waits and adds the slices.

        ``flat``, in the dtype of the sum, is not written to.
        Collectives: one all-to-all.
        """
        steps = self._ranks.steps
        numbers = range(self._micro_batches, self._ranks.micro_batches, steps)
        arrived = exchange([flat], [[Node(0, number)] for number in numbers], self._ranks)
        self._micro_batches += 1

        @torch.no_grad()
        def finish() -> None:
            for node, value in arrived():
                self._tree.add(node.place, [value])

        return finish

    @torch.no_grad()
    def finish(self) -> Tensor | None:
        """Return this rank's slice of the sum, and forget all partial sums. None: there was no micro-batch."""
        parts = {node: value for node, values in self._tree.nodes.items() for value in values if value is not None}
        self.clear()
        return root_of(parts, self._ranks.micro_batches) if parts else None


# The sum of an optimizer's gradients ----------------------------------------------------------------------------------


class SlicedBucket(NamedTuple):
    """A flat bucket of parameters. Each data rank needs only one slice of the sum of their gradients.

    ``layout`` has one slice per data rank. ``receive`` is called with this rank's slice of the sum, in the dtype of the
    sum, or with None after an accumulation window without micro-batches.
    """

    params: Sequence[Tensor]
    layout: FlatBucket
    receive: Callable[[Tensor | None], object]


class _Bucket(NamedTuple):
    """Parameters whose gradients are summed in one buffer.

    ``indices`` refer to `FixedOrderSum.params`. ``dtype`` is the dtype of the sum. ``receive`` is as in `SlicedBucket`;
    None: the sum is written to the gradients of the parameters.
    """

    indices: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    layout: FlatBucket
    receive: Callable[[Tensor | None], object] | None = None


class FixedOrderSum:
    """Sums gradients over the micro-batches of all data ranks, in the order of a binary tree (see the module).

    Each bucket in ``sliced`` contains a subset of ``params``. It receives this rank's slice of the sum, and its parameters
    get no gradients. Other parameters share buffers of up to ``bucket_bytes`` (None: 8 MiB). A larger parameter gets a
    buffer of its own.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        ranks: TreeRanks,
        sliced: Sequence[SlicedBucket] = (),
        bucket_bytes: int | None = None,
    ) -> None:
        self.params, self._ranks = list(params), ranks
        self._tree = TreeSum()
        self.micro_batches = 0
        index_of = {id(param): index for index, param in enumerate(self.params)}
        self._buckets = [
            _Bucket(
                [index_of[id(param)] for param in bucket.params],
                sum_dtype(bucket.params[0]),
                bucket.params[0].device,
                bucket.layout,
                bucket.receive,
            )
            for bucket in sliced
        ]
        is_sliced = {index for bucket in self._buckets for index in bucket.indices}
        by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, param in enumerate(self.params):
            if index not in is_sliced:
                by_kind.setdefault((sum_dtype(param), param.device), []).append(index)
        size = 8 * 2**20 if bucket_bytes is None else bucket_bytes
        self._buckets += [
            _Bucket(layout.indices, dtype, device, layout)
            for (dtype, device), indices in sorted(by_kind.items(), key=lambda item: (str(item[0]), item[1]))
            for layout in flat_buckets(
                {index: self.params[index].numel() for index in indices}, ranks.ranks, size // dtype.itemsize
            )
        ]

    def clear(self) -> None:
        self._tree, self.micro_batches = TreeSum(), 0

    @torch.no_grad()
    def take(self) -> None:
        """Move the gradients of one micro-batch from the parameters into the partial sums."""
        steps = self._ranks.steps
        if self.micro_batches >= steps:
            raise RuntimeError(
                f"optimizer.backward was called for {self.micro_batches + 1} micro-batches with "
                f"accumulation_steps={steps}: call step() and zero_grad() after every {steps} micro-batches"
            )
        number = self._ranks.rank * steps + self.micro_batches
        self._tree.add(number, [dense(param.grad) if param.requires_grad else None for param in self.params])
        for param in self.params:
            param.grad = None
        self.micro_batches += 1

    @torch.no_grad()
    def finish(self) -> None:
        """Set the gradient of each parameter that requires one to the sum over all micro-batches. Forget all partial sums.

        The gradient of a parameter that no micro-batch used becomes zeros. All ranks must have run the same number of
        micro-batches. If it is 0, no gradient is set, and the buckets of ``sliced`` receive None.
        Collectives: per bucket one all-to-all over the data ranks, and one all-gather unless the bucket is in
            ``sliced``; none with one data rank, or without micro-batches.
        """
        steps = self._ranks.steps
        numbers = [range(rank * steps, rank * steps + self.micro_batches) for rank in range(self._ranks.ranks)]
        nodes, own = [nodes_of(of_rank) for of_rank in numbers], self._tree.nodes
        self.clear()
        if own:
            run_all([partial(self._start, bucket, nodes, own) for bucket in self._buckets])
            return
        for bucket in self._buckets:
            if bucket.receive is not None:
                bucket.receive(None)

    def _start(self, bucket: _Bucket, nodes: list[list[Node]], own: Mapping[Node, list[Tensor | None]]) -> Finish:
        """Start to sum one bucket, and return the function that finishes it.

        ``nodes`` has the nodes of each rank, and ``own`` this rank's partial sums.
        """
        count, group = self._ranks.micro_batches, self._ranks.group
        packed = {node: self._packed(values, bucket) for node, values in own.items()}
        if group is None:
            self._unpack(root_of(packed, count), bucket)
            return nothing
        arrived = exchange([*packed.values()], nodes, self._ranks)

        @torch.no_grad()
        def finish() -> None:
            root = root_of(dict(arrived()), count)
            if bucket.receive is not None:
                bucket.receive(root)
                return
            flat = root.new_empty(bucket.layout.padded_numel)
            all_gather_flat(flat, root, group)
            self._unpack(flat, bucket)

        return finish

    def _packed(self, values: list[Tensor | None], bucket: _Bucket) -> Tensor:
        """Return one partial sum as a buffer, [padded_numel], with zeros for missing gradients. Frees used ``values``."""
        parts, end = list[Tensor](), 0
        zeros = torch.zeros(ALIGNMENT * self._ranks.ranks, dtype=bucket.dtype, device=bucket.device)
        for index, (start, stop) in bucket.layout.pair_spans(bucket.indices):
            value, values[index] = values[index], None
            parts += [zeros[: start - end], zeros.new_zeros(stop - start) if value is None else value.reshape(-1)]
            end = stop
        rest = bucket.layout.padded_numel - end
        return torch.cat([*parts, zeros[:rest] if rest <= len(zeros) else zeros.new_zeros(rest)])

    def _unpack(self, flat: Tensor, bucket: _Bucket) -> None:
        for index, (start, stop) in bucket.layout.pair_spans(bucket.indices):
            param = self.params[index]
            if not param.requires_grad:
                continue
            # `data` gives each gradient a separate version counter, as marks of reduced gradients need (`mark_complete`).
            value = flat.data[start:stop].view(param.shape)
            if not param.is_contiguous() or value.dtype != gradient_dtype(param):
                value = torch.empty_like(param, dtype=gradient_dtype(param), requires_grad=False).copy_(value)
            param.grad = value


def sum_dtype(param: Tensor) -> torch.dtype:
    dtype = gradient_dtype(param)
    return torch.float32 if dtype in HALF_DTYPES else dtype
