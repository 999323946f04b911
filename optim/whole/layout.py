"""Assignment of the elements of a full tensor to ranks.

It tells which ranks hold an element, and which one contributes a replicated element. It is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate, combinations
from math import prod
from typing import Any

from ...parallel.layout.shard import Box, Region, Shape
from ...parallel.layout.spec import P


@dataclass(frozen=True)
class LogicalTensor:
    """A full tensor, and the ranks that hold it.

    Args:
        name: Unique in the model.
        shape: Shape of the full tensor.
        dtype: Dtype of the stepped shards.
        metadata: The optimizer's metadata, equal on all ranks that hold the tensor (see `WholeOptimizer.metadata_for`).
        held: The rectangles that each rank holds.
    """

    name: str
    shape: Shape
    dtype: Any
    metadata: Any
    held: Mapping[int, tuple[Box, ...]] = field(repr=False)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that hold some elements, in ascending order."""
        return tuple(sorted(self.held))

    def is_whole_on(self, rank: int) -> bool:
        """Return True if ``rank`` holds all elements."""
        return sum(prod(box.sizes) for box in self.held.get(rank, ())) == prod(self.shape)

    @cached_property
    def is_split(self) -> bool:
        """Return True if some rank holds only part of the elements."""
        return not all(map(self.is_whole_on, self.ranks))

    def sources(self, first: int | None = None) -> dict[int, list[Box]]:
        """Return the boxes that each rank contributes, so that every element comes from exactly one rank.

        Args:
            first: A rank that contributes all elements it holds. The ranks after it follow in order, which spreads the
                work among replicas. None: start at the lowest rank.
        """
        at = 0 if first is None else self.ranks.index(first)
        order = self.ranks[at:] + self.ranks[:at]
        return dict(_without_copies((rank, self.held[rank]) for rank in order))


def _without_copies(held: Iterator[tuple[int, Sequence[Box]]] | Any) -> Iterator[tuple[int, list[Box]]]:
    taken: list[Box] = []
    for rank, boxes in held:
        own = [rest for box in boxes for rest in without(box, taken)]
        taken += own
        yield rank, own


def without(box: Box, others: Sequence[Box]) -> list[Box]:
    """Return the parts of ``box`` outside of ``others``, as boxes that don't overlap."""
    rest = [box]
    for other in others:
        rest = [part for one in rest for part in _minus(one, other)]
    return rest


def _minus(box: Box, other: Box) -> Iterator[Box]:
    if not box.overlaps(other):
        if prod(box.sizes):
            yield box
        return
    common, offsets, sizes = box.common(other), list(box.offsets), list(box.sizes)
    for dim, (begin, length) in enumerate(zip(common.offsets, common.sizes, strict=True)):
        before, after = begin - offsets[dim], offsets[dim] + sizes[dim] - begin - length
        if before:
            yield Box(tuple(offsets), (*sizes[:dim], before, *sizes[dim + 1 :]))
        if after:
            at = (*offsets[:dim], begin + length, *offsets[dim + 1 :])
            yield Box(at, (*sizes[:dim], after, *sizes[dim + 1 :]))
        offsets[dim], sizes[dim] = begin, length


def logical_tensors(ranks: Sequence[Sequence[tuple[str, Any, Any, Region]]]) -> dict[str, LogicalTensor]:
    """Merge the records of all ranks into full tensors, by name.

    Args:
        ranks: Per rank, the name, dtype, metadata and region of each stepped tensor.

    Raises:
        ValueError: Ranks disagree about a tensor, some of its elements are on no rank, or one rank has an element
            twice.
    """
    found: dict[str, LogicalTensor] = {}
    for rank, own in enumerate(ranks):
        for name, dtype, metadata, region in own:
            known = found.setdefault(name, LogicalTensor(name, region.full_shape, dtype, metadata, {}))
            if (known.shape, known.dtype, known.metadata) != (region.full_shape, dtype, metadata):
                raise ValueError(
                    f"{name} is {known.shape}, {known.dtype}, {known.metadata} on rank {known.ranks[0]}, but "
                    f"{region.full_shape}, {dtype}, {metadata} on rank {rank}; declare it equally on all ranks"
                )
            held: Any = known.held
            held[rank] = (*held.get(rank, ()), *region.boxes())
    for tensor in found.values():
        for rank, boxes in tensor.held.items():
            if any(one.overlaps(other) for one, other in combinations(boxes, 2)):
                raise ValueError(
                    f"two parameters on rank {rank} have the name {tensor.name} {tuple(tensor.shape)}; to tie them, make "
                    "them one parameter (head.weight = embedding.weight); if they are different, give them different names "
                    "(with annotate, declare, or an optimizer created from model.named_parameters())"
                )
        count = sum(prod(box.sizes) for boxes in tensor.sources().values() for box in boxes)
        if count != prod(tensor.shape):
            raise ValueError(
                f"the optimizers of all ranks have {count} of the {prod(tensor.shape)} elements of {tensor.name} "
                f"{tuple(tensor.shape)}; give the shards of all ranks to the optimizers"
            )
    return found


# Parts of a parameter that are separate matrices: experts of a stack, blocks of a fused weight, heads -----------------

Blocks = Mapping[str, int | Sequence[int]]
"""Per glob over parameter names, the number of equal blocks along the rows (dim -2) of a fused weight, or their sizes."""


def matrices_of(name: str | None, shape: Shape, blocks: Blocks, spec: P | None) -> list[Box]:
    """Return the matrices of a tensor in order.

    The tensor is divided by ``blocks`` if its name matches, else by the blocks of its layout.

    A tensor with 2 dims is a matrix, a tensor with 3 dims a stack of matrices. With 4 or more dims, the first dim is
    the rows and all other dims together are the columns.

    Raises:
        ValueError: The block sizes don't add up to the number of rows.
    """
    if len(shape) > 3:
        return [Box((0,) * len(shape), shape)]
    dim, sizes = _blocks(name, shape, blocks, spec)
    stack = [(index,) for index in range(shape[0])] if len(shape) == 3 else [()]
    found = []
    for which in stack:
        for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
            offsets, lengths = [*which, 0, 0], [*(1 for _ in which), *shape[-2:]]
            offsets[dim], lengths[dim] = start, size
            found.append(Box(tuple(offsets), tuple(lengths)))
    return found


def _blocks(name: str | None, shape: Shape, blocks: Blocks, spec: P | None) -> tuple[int, tuple[int, ...]]:
    """Return the dim that consists of blocks, -2 or -1, and the block sizes."""
    rows = shape[-2]
    matching = (given for pattern, given in blocks.items() if name is not None and fnmatchcase(name, pattern))
    given_blocks = next(matching, None)
    if given_blocks is not None:
        sizes = (rows // given_blocks,) * given_blocks if isinstance(given_blocks, int) else tuple(given_blocks)
        if sum(sizes) != rows or min(sizes) < 1:
            raise ValueError(f"blocks={given_blocks!r} for {name}: give sizes that add up to its {rows} rows")
        return -2, sizes
    spec = spec or P()
    for dim in (-2, -1):  # 2-D layers keep [in, out]
        for parts in map(spec.block_sizes, spec.dim_axes(len(shape) + dim)):
            if parts != (1,):
                return dim, tuple(shape[dim] * part // sum(parts) for part in parts)
    return -2, (rows,)
