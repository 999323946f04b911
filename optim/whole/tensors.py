"""Operations on full tensors of which each rank holds shards: norms, sums over dims, and the regions that ranks hold.

If several ranks hold an element, only one of them contributes it to a sum. If replicas are bitwise identical, so are
the results on all ranks. A tensor needs no collective if every rank that steps it holds all of its elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate, combinations
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...amp.casting import copy_each_
from ...parallel.layout.shard import Box, Region, Shape, narrowed
from ...parallel.layout.spec import P
from ...parallel.mesh.agreement import on_all_ranks_with
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..norm.powers import powers_by_torch
from .batching import chunks, grouped, is_batched

# Assignment of elements to ranks --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogicalTensor:
    """A full tensor, and the boxes (rectangular regions) of it that each rank holds.

    Args:
        name: Name of the tensor, unique in the model.
        shape: Shape of the full tensor.
        dtype: Dtype of the shards that the optimizer steps.
        metadata: Data that the optimizer needs about the tensor, such as the boxes of its matrices, from
            `WholeOptimizer.metadata_for`. Equal on all ranks that step the tensor. None: no metadata, or a frozen
            parameter.
        held: {global rank: boxes of the tensor that this rank holds}, for each rank that steps a shard.
    """

    name: str
    shape: Shape
    dtype: Any
    metadata: Any
    held: dict[int, tuple[Box, ...]] = field(repr=False)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Return the global ranks that step a shard of the tensor, in ascending order. The shard may be empty."""
        return tuple(sorted(self.held))

    @cached_property
    def is_split(self) -> bool:
        """Return True unless every rank that steps the tensor holds all of its elements."""
        return any(sum(prod(box.sizes) for box in boxes) != prod(self.shape) for boxes in self.held.values())

    def sources(self, first: int | None = None) -> dict[int, list[Box]]:
        """Return the boxes that each rank contributes to a sum or an exchange.

        Each element comes from exactly one rank.

        Args:
            first: The rank that contributes all elements that it holds. The other ranks follow in cyclic order. Each
                contributes the elements that no earlier rank holds. None: the lowest rank.
        Returns:
            {rank: boxes of the full tensor}. The list of a rank that contributes nothing is empty.
        """
        at = 0 if first is None else self.ranks.index(first)
        found: dict[int, list[Box]] = {}
        taken: list[Box] = []
        for rank in self.ranks[at:] + self.ranks[:at]:
            found[rank] = [rest for box in self.held[rank] for rest in without(box, taken)]
            taken += found[rank]
        return found


def without(box: Box, others: Sequence[Box]) -> list[Box]:
    """Return the part of ``box`` that is in none of ``others``, as a list of boxes that don't overlap."""
    rest = [box]
    for other in others:
        rest = [part for one in rest for part in _minus(one, other)]
    return rest


def _minus(box: Box, other: Box) -> Iterator[Box]:
    if not box.overlaps(other):
        if prod(box.sizes):
            yield box
        return
    spans = list(box.spans())
    for dim, common in enumerate(box.common(other).spans()):
        (start, size), (begin, length) = spans[dim], common
        for part in ((start, begin - start), (begin + length, start + size - begin - length)):
            if part[1]:
                yield Box.of_spans([*spans[:dim], part, *spans[dim + 1 :]])
        spans[dim] = common


def logical_tensors(ranks: Sequence[Sequence[tuple[str, Any, Any, Region]]]) -> dict[str, LogicalTensor]:
    """Return the full tensors by name, from the records of all ranks.

    Per rank, ``ranks`` has one record (name of the full tensor, dtype, metadata, region that the rank holds) per tensor
    that the rank's optimizer steps. Raise ValueError if records of one name have different full shapes, dtypes or
    metadata; if no rank holds some elements of a tensor; or if two records of one rank and one name have a common
    element.
    """
    found: dict[str, LogicalTensor] = {}
    for rank, own in enumerate(ranks):
        for name, dtype, metadata, region in own:
            known = found.setdefault(name, LogicalTensor(name, region.full_shape, dtype, metadata, {}))
            if (known.shape, known.dtype, known.metadata) != (region.full_shape, dtype, metadata):
                raise ValueError(
                    f"{name} has the full shape {known.shape}, dtype {known.dtype} and optimizer metadata "
                    f"{known.metadata} on rank {known.ranks[0]}, but the full shape {region.full_shape}, dtype {dtype} "
                    f"and optimizer metadata {metadata} on rank {rank}. Declare {name} equally on all ranks, and give "
                    f"{name} to the same optimizer; give different parameters different names"
                )
            known.held[rank] = (*known.held.get(rank, ()), *region.boxes())
    for tensor in found.values():
        for rank, boxes in tensor.held.items():
            if any(one.overlaps(other) for one, other in combinations(boxes, 2)):
                raise ValueError(
                    f"two parameters on rank {rank} have the name {tensor.name} (full shape {tuple(tensor.shape)}); to tie "
                    "them, make them one parameter (head.weight = embedding.weight); if they are different, give them "
                    "different names (with annotate, declare, or an optimizer created from model.named_parameters())"
                )
        count = sum(prod(box.sizes) for boxes in tensor.sources().values() for box in boxes)
        if count != prod(tensor.shape):
            raise ValueError(
                f"the optimizers of all ranks together have only {count} of the {prod(tensor.shape)} elements of "
                f"{tensor.name} (full shape {tuple(tensor.shape)}); give each rank's shard to the optimizer of that rank"
            )
    return found


# Parts of a parameter that are separate matrices: experts of a stack, blocks of a fused weight, heads -----------------

Blocks = Mapping[str, int | Sequence[int]]
"""The blocks of fused weights. A key is a glob over parameter names.

The value is the number of equal blocks along the rows (dim -2), or the list of the blocks' numbers of rows.
"""


def matrices_of(name: str | None, shape: Shape, blocks: Blocks, spec: P | None) -> list[Box]:
    """Return one box (rectangular region) per matrix of a tensor with at least two dims, in order.

    A tensor with 2 dims is a matrix, a tensor with 3 dims a stack of matrices. A fused weight has several blocks, each
    of which is a matrix. A tensor with 4 or more dims is a single matrix without blocks: the first dim is the rows, and
    all other dims together are the columns.

    The blocks are those of the first glob in ``blocks`` that matches ``name``; without a match, those of ``spec``.
    Raise ValueError if the blocks of a glob do not fit the rows.
    """
    if len(shape) > 3:
        return [Box((0,) * len(shape), shape)]
    dim, sizes = _blocks(name, shape, blocks, spec)
    stack = [[(index, 1)] for index in range(shape[0])] if len(shape) == 3 else [[]]
    found = []
    for which in stack:
        for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
            spans = [*which, *((0, length) for length in shape[-2:])]
            spans[dim] = start, size
            found.append(Box.of_spans(spans))
    return found


def _blocks(name: str | None, shape: Shape, blocks: Blocks, spec: P | None) -> tuple[int, tuple[int, ...]]:
    """Return (dim along which a tensor is divided into blocks, block sizes). The dim is -2 (rows) or -1 (columns)."""
    rows = shape[-2]
    matching = (given for pattern, given in blocks.items() if name is not None and fnmatchcase(name, pattern))
    given_blocks = next(matching, None)
    if given_blocks is not None:
        sizes = (rows // max(given_blocks, 1),) * given_blocks if isinstance(given_blocks, int) else tuple(given_blocks)
        if not sizes or sum(sizes) != rows or min(sizes) < 1:
            raise ValueError(
                f"blocks={given_blocks!r} for {name}, which has {rows} rows: give a number of blocks that divides {rows}, "
                f"or a list of sizes >= 1 that add up to {rows}"
            )
        return -2, sizes
    spec = spec or P()
    for dim in (-2, -1):  # -1: `Linear2D` and `Linear2p5D` store weights as [in, out], so their blocks are columns
        for parts in map(spec.block_sizes, spec.dim_axes(len(shape) + dim)):
            if parts != (1,):
                return dim, tuple(shape[dim] * part // sum(parts) for part in parts)
    return -2, (rows,)


# Operations on full tensors -------------------------------------------------------------------------------------------


Request = tuple[int, Tensor, tuple[int, ...]]
"""A request for the sum of a full tensor over some dims: (position, tensor, dims).

``position`` is the index of a stepped tensor over all param groups. ``tensor`` has the shape of this stepped tensor.
``dims`` are the dims of the full tensor to sum over.
"""


class _Stepped(NamedTuple):
    """A tensor that this rank's optimizer steps.

    ``region`` is its part of the full tensor ``tensor``. ``shape`` may be flat although the region is the entire shard.
    ``canonical_boxes`` are the boxes that this rank contributes to sums; None if sums need no collective.
    """

    tensor: LogicalTensor
    region: Region
    shape: Shape
    canonical_boxes: list[Box] | None


class WholeTensors:
    """The full tensors whose shards an optimizer steps. Computes norms of full tensors, and sums over their dims.

    A stepped tensor is a tensor in the optimizer's param groups. A position is the index of a stepped tensor over all
    param groups.

    Args:
        shards: For each position, the name of the full tensor, the region of it that this rank steps, and the shape of the
            stepped tensor: that of the shard, or ``(numel,)`` if this rank steps only a part of the shard.
        everything: The full tensors of all ranks by name, in the same order on all ranks.
        registry: The process groups. None: a single process.

    Attributes:
        tensors: The full tensor of each position.
        rank: The global rank of this process; 0 without a registry.
    """

    def __init__(
        self,
        shards: Iterable[tuple[str, Region, Shape]],
        everything: dict[str, LogicalTensor],
        registry: ProcessGroupRegistry | None,
    ) -> None:
        self.registry, self.everything = registry, everything
        self.rank = 0 if registry is None else registry.global_rank
        self._stepped: list[_Stepped] = []
        self._positions: dict[str, list[int]] = {}
        for name, region, shape in shards:
            tensor = everything[name]
            boxes = tensor.sources().get(self.rank, []) if tensor.is_split else None
            self._positions.setdefault(name, []).append(len(self._stepped))
            self._stepped.append(_Stepped(tensor, region, shape, boxes))
        self.tensors = [stepped.tensor for stepped in self._stepped]
        split = [name for name, tensor in everything.items() if tensor.is_split]
        self._slots = {name: index for index, name in enumerate(split)}  # index among the sums of squares in `norms_of`
        self._cuts: dict[tuple[int, Shape, tuple[Box, ...]], list[tuple[Box, torch.Size, tuple[int, ...], int]]] = {}

    @classmethod
    def alone(cls, params: Sequence[tuple[Tensor, Any]]) -> WholeTensors:
        """Return the full tensors of a single process, in which every parameter is a full tensor.

        Args:
            params: Each parameter of all param groups, in order, with the result of `WholeOptimizer.metadata_for`.

        Collectives: none.
        """
        own = [
            (
                str(index),
                p.dtype,
                metadata,
                Region(tuple(p.shape), tuple(((0, size),) for size in p.shape), 0, p.numel()),
            )
            for index, (p, metadata) in enumerate(params)
        ]
        return cls([(name, region, region.shape) for name, _, _, region in own], logical_tensors([own]), None)

    @classmethod
    def of(
        cls,
        named: Sequence[tuple[str, Tensor, Region | None]],
        registry: ProcessGroupRegistry,
        metadata: Callable[[int], Any] | None = None,
    ) -> WholeTensors:
        """Gather the regions of the full tensors that all ranks step, and return the full tensors.

        Args:
            named: Per stepped tensor, in the order of the param groups: the name of its full tensor (unique in the
                model), the tensor, and the region of the full tensor that it holds (None: unknown).
            registry: The process groups.
            metadata: Called with the index of a tensor in ``named``. Returns the optimizer's metadata of its full
                tensor, which must be equal on all ranks that step it. None: no metadata.

        Raises:
            ValueError: On every rank: a region is unknown, because shards of unequal sizes have no declared full shape,
                or are not the shards of `torch.chunk`; or the ranks' records of a full tensor contradict each other,
                miss elements, or overlap on a rank (see `logical_tensors`).
            Exception: On every rank: ``metadata`` raised on a rank. Other ranks raise the same type if it is
                ValueError, TypeError or RuntimeError, else RuntimeError.
            RuntimeError: On every rank: ranks came here from different public calls of this library.

        Collectives: an object all-gather; none with one rank.
        Host synchronization: yes, except with one rank.
        """

        def own() -> tuple[None, list[tuple[str, Any, Any, Region]]]:
            found = []
            for position, (name, piece, region) in enumerate(named):
                if region is None:
                    raise ValueError(
                        f"{name} has shards of unequal sizes, whose places in the full tensor are not known; shard it as "
                        "torch.chunk does and give annotate(..., full_shape=...), or make the sharded dim divisible by the "
                        "number of ranks"
                    )
                found.append((name, piece.dtype, metadata(position) if metadata else None, region))
            return None, found

        _, ranks = on_all_ranks_with(own, registry)
        everything = logical_tensors(ranks)  # all ranks have the same input, so all of them raise or none
        shards = ((name, region, tuple(piece.shape)) for name, piece, region in named if region is not None)
        return cls(shards, everything, registry)

    def positions(self, tensor: LogicalTensor) -> list[int]:
        """Return the positions (indices over all param groups) at which this rank steps a shard of ``tensor``."""
        return self._positions.get(tensor.name, [])

    def positions_of(self, tensor: LogicalTensor, box: Box) -> list[int]:
        """Return the positions at which this rank's shard of ``tensor`` contains ``box``.

        ``box`` is in indices of the full tensor. It must lie in a single rectangle of one shard, or outside of all of
        this rank's shards.
        """
        return [
            position
            for position in self.positions(tensor)
            if any(box.overlaps(held) for held in self._stepped[position].region.boxes())
        ]

    def piece_shape(self, position: int) -> Shape:
        """Return the shape of the stepped tensor at a position: the shard's shape, or ``(numel,)`` if it is flat."""
        return self._stepped[position].shape

    # Parts ----------------------------------------------------------------------------------------------------------

    def of_whole(self, position: int, whole: Tensor) -> Tensor:
        """Return the part of ``whole`` that this rank steps at a position, in the stepped tensor's shape.

        The result may share memory with ``whole``.

        Args:
            position: Index of the stepped tensor over all param groups.
            whole: A tensor of the full tensor's shape, or one that broadcasts to it.

        Collectives: none.
        Host synchronization: none.
        """
        tensor, region, shape, _ = self._stepped[position]
        full = whole.expand(tensor.shape)
        if region.numel == prod(region.full_shape):
            return full.reshape(shape)
        piece = torch.empty(shape, dtype=whole.dtype, device=whole.device)
        for offsets, part in region.parts(piece).items():
            part.copy_(narrowed(full, Box(offsets, tuple(part.shape))))
        return piece

    def views(self, position: int, piece: Tensor, boxes: Iterable[Box]) -> Iterator[tuple[Box, Tensor]]:
        """Yield (box, view of ``piece``) for each intersection of ``boxes`` with the rectangles of ``piece``.

        The yielded box is the intersection, in indices of the full tensor.

        Args:
            position: Index of a stepped tensor over all param groups.
            piece: A tensor of the shape of this stepped tensor. If it is not contiguous, copies may be yielded.
            boxes: Boxes of the full tensor.
        """
        boxes = tuple(boxes)
        if not piece.is_contiguous():
            yield from self._cut(position, piece, boxes)
            return
        begin = piece.storage_offset()
        for box, shape, strides, offset in self._cut_once(position, piece.shape, boxes):
            yield box, piece.as_strided(shape, strides, begin + offset)

    def views_of_stack(self, position: int, stack: Tensor, boxes: Iterable[Box]) -> Iterator[tuple[Box, Tensor]]:
        """Yield (box, view [tensors, ...] of ``stack``) for the same boxes as `views`.

        Args:
            position: Index over all param groups of one stepped tensor of the stack. The other tensors of the stack must
                have the same layout, as in a list of `alike`.
            stack: [tensors, at least the stepped tensor's number of elements].
            boxes: Boxes of the full tensor.
        """
        begin, shape = stack.storage_offset(), torch.Size(self.piece_shape(position))
        for box, sizes, strides, offset in self._cut_once(position, shape, tuple(boxes)):
            yield box, stack.as_strided((len(stack), *sizes), (stack.stride(0), *strides), begin + offset)

    def _cut_once(
        self, position: int, shape: torch.Size, boxes: tuple[Box, ...]
    ) -> list[tuple[Box, torch.Size, tuple[int, ...], int]]:
        """Return (box, shape, strides, offset) of the views of a contiguous tensor of ``shape``."""
        key = position, shape, boxes
        if key not in self._cuts:  # the offsets are the same in every step
            template = torch.empty(shape, device="meta")
            self._cuts[key] = [
                (box, part.shape, part.stride(), int(part.storage_offset()))
                for box, part in self._cut(position, template, boxes)
            ]
        return self._cuts[key]

    def _cut(self, position: int, piece: Tensor, boxes: Sequence[Box]) -> Iterator[tuple[Box, Tensor]]:
        parts = self._stepped[position].region.parts(piece)
        for box in boxes:
            for offsets, part in parts.items():
                held = Box(offsets, tuple(part.shape))
                if box.overlaps(held):
                    common = box.common(held)
                    yield common, narrowed(part, common, offsets)

    # Sums -----------------------------------------------------------------------------------------------------------

    def norms_of(self, *values: Mapping[int, Tensor]) -> list[dict[int, Tensor]]:
        """Return the L2 norms of full tensors, for several mappings at once. Every rank must call it.

        Args:
            values: Mappings from positions (indices of stepped tensors over all param groups) to tensors of the stepped
                tensors' shapes. If a mapping has a shard of a full tensor on one rank, it must have the shards of this
                tensor on all ranks.
        Returns:
            For each mapping, the norm of each full tensor by position, 0-dim float64.

        Collectives: one all-reduce over the world, unless every rank holds all elements of the tensors that it steps.
        Host synchronization: none if the tensors and the process groups are on one device; otherwise to copy sums
            between the CPU and the GPU.
        """
        powers: list[dict[int, Tensor]] = []
        for of_list in values:
            if isinstance(of_list, dict):
                powers.append(self.local_powers(of_list))
            else:  # tensors are computed one after the other, so that few of them are in memory together
                powers.append({position: self._power(position, of_list[position]) for position in of_list})
        return self.norms_of_powers(*powers)

    def norms_of_powers(self, *powers: Mapping[int, Tensor]) -> list[dict[int, Tensor]]:
        """Return the L2 norms of full tensors, as `norms_of` does. Every rank must call it.

        ``powers`` are mappings from positions to this rank's parts of the sums of squares, from `local_powers`.
        """
        split, count = self._slots, len(self._slots)
        parts: dict[int, Tensor] = {}  # by index in the packed vector
        for index, of_list in enumerate(powers):
            for position, power in of_list.items():
                slot = split.get(self.tensors[position].name)
                if slot is not None:
                    at = index * count + slot
                    parts[at] = power if at not in parts else parts[at] + power.to(parts[at].device)
        found: list[dict[int, Tensor]] = [dict(of_list) for of_list in powers]
        if split:
            assert self.registry is not None, "a single process holds all elements of its tensors"
            device = next((power.device for of_list in powers for power in of_list.values()), self.registry.device)
            packed = torch.zeros(len(powers) * count, dtype=torch.float64, device=device)
            if parts:
                rest = packed.unbind()
                packed = torch.stack([parts.get(at, zero).to(zero.device) for at, zero in enumerate(rest)])
            self._sum(packed, tuple(range(self.registry.topology.world_size)))
            sums = packed.unbind()
            for index, of_list in enumerate(powers):
                for position, power in of_list.items():
                    if (slot := split.get(self.tensors[position].name)) is not None:
                        found[index][position] = sums[index * count + slot].to(power.device)
        return [_roots(of_list) for of_list in found]

    def _power(self, position: int, value: Tensor) -> Tensor:
        """Return the sum of squares of the elements of ``value`` that this rank contributes, 0-dim float64."""
        boxes = self._stepped[position].canonical_boxes
        if boxes is None:
            return _power(value)
        powers = [_power(part) for _, part in self.views(position, value, boxes)]
        return torch.stack(powers).sum() if powers else torch.zeros((), dtype=torch.float64, device=value.device)

    def sums(self, requests: Iterable[Request]) -> list[Tensor]:
        """Return sums of full tensors over some of their dims, for all requests at once.

        Args:
            requests: (position, tensor, dims) per sum. The position is the index of a stepped tensor over all param
                groups, the tensor has the shape of this stepped tensor, and the dims are those of the full tensor. All
                ranks that step shards of a full tensor must request the same sums of it in the same order. Requests are
                consumed one by one, so a generator's tensors are not in memory together.
        Returns:
            For each request the sum, float64, with the full tensor's number of dims and size 1 in the summed dims.

        Collectives: one all-reduce per distinct set of ranks that step shards of a requested tensor. None for a tensor
            if each of these ranks holds the full tensor.
        Host synchronization: none if the tensors and the process groups are on one device; otherwise to copy sums
            between the CPU and the GPU.
        """
        local = [(position, self.local_sum(position, value, dims)) for position, value, dims in requests]
        return [total for _, total in self.add_up(local)]

    def add_up(self, local: Iterable[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
        """Return (position, sum of a full tensor) pairs, given this rank's part of each sum. Collectives: as in `sums`.

        Args:
            local: (position, part) per sum. The position is the index of a stepped tensor over all param groups. The part,
                float64, is a result of `local_sum`, `local_powers` or `local_stack_sums`.
        """
        results = list(local)
        by_ranks: dict[tuple[int, ...], list[int]] = {}
        for index, (position, _) in enumerate(results):
            if self.is_split(position):
                by_ranks.setdefault(self.tensors[position].ranks, []).append(index)
        for ranks in sorted(by_ranks):
            # sorted by name, because other ranks may have tied tensors in another order
            those = sorted(by_ranks[ranks], key=lambda index: self.tensors[results[index][0]].name)
            parts = [results[index][1] for index in those]
            packed = torch.cat([part.reshape(-1).to(parts[0].device) for part in parts])
            self._sum(packed, ranks)
            sums = packed.split([part.numel() for part in parts])
            for index, part, total in zip(those, parts, sums, strict=True):
                results[index] = results[index][0], total.view(part.shape).to(part.device)
        return results

    def local_sum(self, position: int, value: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Return this rank's part of the sum of one `Request`, in the shape of the sum that `sums` returns."""
        shape, boxes = self.tensors[position].shape, self._stepped[position].canonical_boxes
        if boxes is None:
            return value.reshape(shape).double().sum(dims, keepdim=True) if dims else value.reshape(shape).double()
        whole = _collapse(Box((0,) * len(shape), shape), dims).sizes
        result = torch.zeros(whole, dtype=torch.float64, device=value.device)
        for box, part in self.views(position, value, boxes):
            summed = part.double().sum(dims, keepdim=True) if dims else part.double()
            narrowed(result, _collapse(box, dims)).add_(summed)
        return result

    # Sums of many tensors, with few kernels -------------------------------------------------------------------------

    @cached_property
    def _layouts(self) -> list[int]:
        """Return a number per position, which is equal for stepped tensors with equal layouts.

        Layouts are equal if the full tensors have the same shape, dtype and ranks, and this rank's shards have the same
        region and shape, and contribute the same boxes to sums. Regions, shapes and boxes are not compared if sums over the
        tensors need no collective.
        """
        numbers: dict[Any, int] = {}
        found = []
        for tensor, region, shape, boxes in self._stepped:
            key: tuple[Any, ...] = tensor.ranks, tensor.dtype, tensor.shape
            if boxes is not None:
                key = *key, region, shape, tuple(boxes)
            found.append(numbers.setdefault(key, len(numbers)))
        return found

    def alike(self, positions: Iterable[int]) -> list[list[int]]:
        """Divide the positions into lists of stepped tensors with equal layouts (see `_layouts`).

        The tensors of a list have at most `batching.CHUNK` elements together, unless the list has one position. If every
        rank that steps a full tensor holds all of it, these ranks put it into equal lists. So a kernel that sums over a
        stack of the list's tensors gives bitwise identical results on these ranks.
        """
        by_layout = grouped(positions, lambda position: self._layouts[position])
        lists = [sorted(own, key=lambda position: self.tensors[position].name) for own in by_layout.values()]
        return [part for own in lists for part in chunks(own, lambda position: prod(self.piece_shape(position)))]

    def is_split(self, position: int) -> bool:
        """Return True if a sum over the full tensor needs a collective, because a rank steps only a part of it."""
        return self._stepped[position].canonical_boxes is not None

    def contributes(self, position: int) -> bool:
        """Return True if this rank adds elements to the sums of a tensor; False if other ranks add all its elements."""
        boxes = self._stepped[position].canonical_boxes
        return boxes is None or any(prod(box.sizes) for box in boxes)

    def local_powers(self, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return this rank's part of the sum of squares of each full tensor, 0-dim float64, with few kernels.

        The tensors in ``values`` have the shapes of the stepped tensors. Keys of both dicts are positions.
        """
        together, found = list[int](), dict[int, Tensor]()
        for position, value in values.items():
            boxes = self._stepped[position].canonical_boxes
            count = value.numel() if boxes is None else sum(prod(box.sizes) for box in boxes)
            if count == value.numel() and is_batched(value):
                together.append(position)
            else:
                found[position] = self._power(position, value)
        for positions in grouped(together, lambda position: (values[position].device, values[position].dtype)).values():
            powers = powers_by_torch([values[position] for position in positions], 2.0)
            found.update(zip(positions, powers.unbind(), strict=True))
        return {position: found[position] for position in values}

    def local_stack_sums(
        self, positions: Sequence[int], stack: Tensor, dims: tuple[int, ...], square: bool
    ) -> Sequence[Tensor]:
        """Sum each tensor of a stack over some dims, and return this rank's part of each sum, as `local_sum` does.

        Args:
            positions: A list of `alike`.
            stack: [tensors, number of elements of a stepped tensor], float64. Its elements are ignored if `contributes`
                returns False.
            dims: Dims of the full tensor to sum over.
            square: True: sum the squares of the elements. False: sum the elements.
        """
        position, along = positions[0], tuple(dim + 1 for dim in dims)
        shape, boxes = self.tensors[position].shape, self._stepped[position].canonical_boxes

        def total(tensor: Tensor) -> Tensor:
            if square:
                norms: Tensor = torch.linalg.vector_norm(tensor, 2.0, along, keepdim=True)
                return norms.square_()
            return tensor.sum(along, keepdim=True)

        if boxes is None:
            return total(stack.view(len(positions), *shape)).unbind()
        whole = _collapse(Box((0,) * len(shape), shape), dims).sizes
        result = torch.zeros((len(positions), *whole), dtype=torch.float64, device=stack.device)
        for box, part in self.views_of_stack(position, stack, boxes):
            narrowed(result, _collapse(box, dims)).add_(total(part))
        return result.unbind()

    def outer_products(self, position: int, left: Tensor, right: Tensor, into: Tensor) -> None:
        """Write this rank's shards of ``left * right`` into ``into``, for a stack of full tensors with equal layouts.

        Args:
            position: Index over all param groups of one stepped tensor of the stack. Its full tensor has the shape
                [..., rows, columns].
            left: [tensors, ..., rows, 1], the same on all ranks.
            right: [tensors, ..., 1, columns], the same on all ranks.
            into: As ``stack`` in `views_of_stack`.
        """
        shape = self.tensors[position].shape
        dims = len(shape)
        for box, target in self.views_of_stack(position, into, [Box((0,) * dims, shape)]):
            rows, columns = narrowed(left, _collapse(box, (dims - 1,))), narrowed(right, _collapse(box, (dims - 2,)))
            torch.mul(rows, columns, out=target)

    # Ranks ----------------------------------------------------------------------------------------------------------

    def _sum(self, packed: Tensor, ranks: tuple[int, ...]) -> None:
        assert self.registry is not None
        transferred = packed.to(self.registry.device)
        dist.all_reduce(transferred, group=self.group(ranks))
        if transferred is not packed:
            packed.copy_(transferred)

    def group(self, ranks: tuple[int, ...]) -> Any:
        """Return the process group whose members are the global ranks ``ranks``. Not available in a single process."""
        assert self.registry is not None
        return self.registry.group_of(ranks)


def float64_stack(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of tensors of equal sizes, [tensors, elements], as float64."""
    stack = torch.empty((len(tensors), tensors[0].numel()), dtype=torch.float64, device=tensors[0].device)
    copy_each_([row.view(tensor.shape) for row, tensor in zip(stack.unbind(), tensors, strict=True)], tensors)
    return stack


def _roots(powers: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return dict(zip(powers, torch._foreach_sqrt([*powers.values()]), strict=True)) if powers else {}


def _power(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return norm.square()


def _collapse(box: Box, dims: Sequence[int]) -> Box:
    """Return ``box`` with offset 0 and size 1 in ``dims``."""
    return Box.of_spans([(0, 1) if dim in dims else span for dim, span in enumerate(box.spans())])
