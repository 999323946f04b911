"""Who has what of each logical tensor, and which of its copies speaks for it. Pure arithmetic; the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate, combinations
from math import prod
from typing import Any

from ...parallel.layout.regions import Box, Region, Shape
from ...parallel.layout.spec import P


@dataclass(frozen=True)
class LogicalTensor:
    """One logical tensor, as all ranks hold it together.

    Args:
        name: Unique in the model.
        shape: Of the whole.
        dtype: Of what is stepped.
        said: What the optimizer said of it, alike on all ranks that hold it.
        held: The rectangles that each rank has of it.
    """

    name: str
    shape: Shape
    dtype: Any
    said: Any
    held: Mapping[int, tuple[Box, ...]] = field(repr=False)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Those that have some of it."""
        return tuple(sorted(self.held))

    def is_whole_on(self, rank: int) -> bool:
        """Whether a rank has all of its elements."""
        return sum(prod(box.sizes) for box in self.held.get(rank, ())) == prod(self.shape)

    @cached_property
    def is_split(self) -> bool:
        """Whether some rank that has some of it lacks the rest."""
        return not all(map(self.is_whole_on, self.ranks))

    def sources(self, first: int | None = None) -> dict[int, list[Box]]:
        """By rank what it speaks for: each element of the tensor is in one box of one rank.

        Args:
            first: A rank that speaks for all that it has. Those after it come next, so that of copies not the same one
                speaks to all.
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
    """What of a box is in none of ``others``, as boxes that don't overlap."""
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
    """By name, from what each rank has: name, dtype, what is said of it, region.

    Raises:
        ValueError: Ranks say different things of one tensor, nobody has some of its elements, or one rank has some twice.
    """
    found: dict[str, LogicalTensor] = {}
    for rank, own in enumerate(ranks):
        for name, dtype, said, region in own:
            known = found.setdefault(name, LogicalTensor(name, region.full_shape, dtype, said, {}))
            if (known.shape, known.dtype, known.said) != (region.full_shape, dtype, said):
                raise ValueError(
                    f"{name} is {known.shape}, {known.dtype}, {known.said} on rank {known.ranks[0]}, but "
                    f"{region.full_shape}, {dtype}, {said} on rank {rank}: say the same of it on all"
                )
            held: Any = known.held
            held[rank] = (*held.get(rank, ()), *region.boxes())
    for tensor in found.values():
        for rank, boxes in tensor.held.items():
            if any(one.overlaps(other) for one, other in combinations(boxes, 2)):
                raise ValueError(
                    f"rank {rank} has elements of {tensor.name} {tuple(tensor.shape)} twice: two parameters there are said "
                    "to be this tensor. What is tied on one rank is one parameter (head.weight = embedding.weight), which "
                    "the optimizer steps once; two that differ need two names (annotate, declare, or an optimizer "
                    "that is made of model.named_parameters())"
                )
        spoken = sum(prod(box.sizes) for boxes in tensor.sources().values() for box in boxes)
        if spoken != prod(tensor.shape):
            raise ValueError(
                f"of the {prod(tensor.shape)} elements of {tensor.name} {tuple(tensor.shape)} the optimizers of all ranks "
                f"together have {spoken}: give every rank's piece of it to the optimizer"
            )
    return found


# Which parts of a parameter are matrices of their own: experts of a stack, blocks of a fused weight, heads ------------

Blocks = Mapping[str, int | Sequence[int]]
"""By glob over names: how many equal blocks a fused weight has along its rows (dim -2), or their sizes."""


def matrices_of(name: str | None, shape: Shape, blocks: Blocks, spec: P | None) -> list[Box]:
    """The matrices of a tensor, one after another: as ``blocks`` says for its name, else as its layout cuts it.

    2 dims are a matrix; 3 a stack of them; 4 and more one of rows of all the other dims.

    Raises:
        ValueError: The blocks don't add up to its rows.
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
    """The dim that is made of blocks, -2 or -1, and their sizes."""
    rows = shape[-2]
    said = next((given for pattern, given in blocks.items() if name is not None and fnmatchcase(name, pattern)), None)
    if said is not None:
        sizes = (rows // said,) * said if isinstance(said, int) else tuple(said)
        if sum(sizes) != rows or min(sizes) < 1:
            raise ValueError(f"{name} has {rows} rows, which blocks={said!r} do not add up to")
        return -2, sizes
    spec = spec or P()
    for dim in (-2, -1):  # layers in two dimensions keep [in, out]
        for parts in map(spec.block_sizes, spec.dim_axes(len(shape) + dim)):
            if parts != (1,):
                return dim, tuple(shape[dim] * part // sum(parts) for part in parts)
    return -2, (rows,)
