"""What an optimizer may ask of tensors that ranks have pieces of: norms, sums over dims, its part of a whole.

Elements of which there are copies count once: the first rank that has them speaks for them, and what comes of it is the
same bits on every rank. A tensor that every rank which has some of it has whole needs no collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...parallel.layout.regions import Box, Region, Shape
from ...parallel.mesh.agreement import on_all_ranks_with
from ...parallel.mesh.registry import ProcessGroupRegistry
from .layout import LogicalTensor, logical_tensors

Request = tuple[int, Tensor, tuple[int, ...]]
"""A position, a tensor of its piece's shape, the dims of the logical tensor to sum over."""


class WholeTensors:
    """The logical tensors of which an optimizer steps pieces, by position in its param groups.

    Args:
        positions: The logical tensor's name, and which part of it the piece is.
        everything: See below.
        registry: None: alone.
        shapes: Of the pieces. None: that of the shard, or flat where it is a part of one.

    Attributes:
        tensors: For each position the logical tensor.
        everything: Those of all ranks, by name, in an order that is the same on all.
        rank: This one.
    """

    def __init__(
        self,
        positions: Sequence[tuple[str, Region]],
        everything: dict[str, LogicalTensor],
        registry: ProcessGroupRegistry | None,
        shapes: Sequence[Shape] | None = None,
    ) -> None:
        self.registry, self.everything = registry, everything
        self.rank = 0 if registry is None else registry.global_rank
        self.tensors = [everything[name] for name, _ in positions]
        self._regions = [region for _, region in positions]
        # A run may be flat even where it is all of the shard.
        self._shapes = [tuple(shape) for shape in shapes or map(_shape_of, self._regions)]
        self._positions: dict[str, list[int]] = {}
        for position, tensor in enumerate(self.tensors):
            self._positions.setdefault(tensor.name, []).append(position)
        split = [name for name, tensor in everything.items() if tensor.is_split]
        self._slots = {name: index for index, name in enumerate(split)}  # in what is packed of all ranks' norms
        self._spoken = [self._boxes(tensor) for tensor in self.tensors]
        self._cuts: dict[tuple[int, Shape, tuple[Box, ...]], list[tuple[Box, torch.Size, tuple[int, ...], int]]] = {}

    @classmethod
    def alone(cls, params: Sequence[Tensor], said: Sequence[Any] | None = None) -> WholeTensors:
        """Each parameter is whole, as on one rank. Collectives: none."""
        positions = [
            (str(index), Region(tuple(p.shape), tuple(((0, size),) for size in p.shape), 0, p.numel()))
            for index, p in enumerate(params)
        ]
        given = zip(positions, params, said or [None] * len(params), strict=True)
        own = [(name, param.dtype, says, region) for (name, region), param, says in given]
        return cls(positions, logical_tensors([own]), None)

    @classmethod
    def of(
        cls,
        named: Sequence[tuple[str, Tensor, Region | None]],
        registry: ProcessGroupRegistry,
        say: Callable[[], Sequence[Any]] | None = None,
    ) -> WholeTensors:
        """Of all ranks together.

        Args:
            named: For each position the logical tensor's name, unique in the model; the piece; which part it is of it.
            say: Gives for each position what all ranks that have some of the tensor must say alike; may raise.
        Raises:
            ValueError: On every rank: pieces of unequal sizes, of which nothing tells how they were cut; ranks say
                different things.
        Collectives: an object all-gather.
        """

        def own() -> tuple[None, list[tuple[str, Any, Any, Region]]]:
            found = []
            for (name, piece, region), says in zip(named, say() if say else [None] * len(named), strict=True):
                if region is None:
                    raise ValueError(
                        f"{name} has pieces of unequal sizes, of which nothing says how they were cut, so that it can't be "
                        "put together: make its dims divide, or cut it as torch.chunk does"
                    )
                found.append((name, piece.dtype, says, region))
            return None, found

        _, ranks = on_all_ranks_with(own, registry)
        everything = logical_tensors(ranks)  # of what all know: an error is one on all
        positions = [(name, region) for name, _, _, region in ranks[registry.global_rank]]
        return cls(positions, everything, registry, [tuple(piece.shape) for _, piece, _ in named])

    def _boxes(self, tensor: LogicalTensor) -> list[Box] | None:
        """What this rank speaks for; None: nobody needs to be asked."""
        return tensor.sources().get(self.rank, []) if tensor.is_split else None

    def positions(self, tensor: LogicalTensor) -> list[int]:
        """Where this rank has pieces of it."""
        return self._positions.get(tensor.name, [])

    def positions_of(self, tensor: LogicalTensor, box: Box) -> list[int]:
        """Those of `positions` that have a box, which lies in one rectangle of one piece."""
        return [
            position
            for position in self.positions(tensor)
            if any(box.overlaps(held) for held in self._regions[position].boxes())
        ]

    def piece_shape(self, position: int) -> Shape:
        """Of what this rank has: a shard's, or flat."""
        return self._shapes[position]

    # Parts ----------------------------------------------------------------------------------------------------------

    def rectangles(self, position: int, piece: Tensor) -> dict[Shape, Tensor]:
        """A contiguous tensor of the piece's shape as rectangles of the logical tensor, by their offsets; views."""
        return self._regions[position].parts(piece)

    def of_whole(self, position: int, whole: Tensor) -> Tensor:
        """The piece's part of a tensor that broadcasts to the logical one's shape, in the piece's shape.

        Host reads, collectives: none.
        """
        region, full = self._regions[position], whole.expand(self.tensors[position].shape)
        shape = self.piece_shape(position)
        if region.numel == prod(region.full_shape):
            return full.reshape(shape)
        piece = torch.empty(shape, dtype=whole.dtype, device=whole.device)
        for offsets, part in region.parts(piece).items():
            part.copy_(narrowed(full, Box(offsets, tuple(part.shape))))
        return piece

    def views(self, position: int, piece: Tensor, boxes: Iterable[Box]) -> Iterator[tuple[Box, Tensor]]:
        """The elements of boxes of the logical tensor that lie in the piece; views of it."""
        boxes = tuple(boxes)
        if not piece.is_contiguous():
            yield from self._cut(position, piece, boxes)
            return
        key = position, piece.shape, boxes
        if key not in self._cuts:  # where they lie is the same at every step
            template = torch.empty(piece.shape, device="meta")
            self._cuts[key] = [
                (box, part.shape, part.stride(), int(part.storage_offset()))
                for box, part in self._cut(position, template, boxes)
            ]
        begin = piece.storage_offset()
        for box, shape, strides, offset in self._cuts[key]:
            yield box, piece.as_strided(shape, strides, begin + offset)

    def _cut(self, position: int, piece: Tensor, boxes: Sequence[Box]) -> Iterator[tuple[Box, Tensor]]:
        parts = self.rectangles(position, piece)
        for box in boxes:
            for offsets, part in parts.items():
                held = Box(offsets, tuple(part.shape))
                if box.overlaps(held):
                    common = box.common(held)
                    yield common, narrowed(part, common, offsets)

    # Sums -----------------------------------------------------------------------------------------------------------

    def norms_of(self, *values: Mapping[int, Tensor]) -> list[dict[int, Tensor]]:
        """The L2 norms of logical tensors, several lists of them at once.

        Args:
            values: Each has a tensor of the piece's shape by position; the same positions on all ranks that share a tensor.
        Returns:
            For each list the norms, 0-dim float64, by position.
        Collectives: one all-reduce over the world, wherever some tensor of the model is split. Host reads: none, but to
        bring what is measured on a GPU to pieces on the CPU.
        """
        slots = self._slots
        packed = self._zeros(len(values) * len(slots), values)
        found: list[dict[int, tuple[Tensor, torch.device]]] = [{} for _ in values]
        for index, of_list in enumerate(values):
            for position, value in of_list.items():
                power = self._power(position, value)
                slot = slots.get(self.tensors[position].name)
                if slot is not None:
                    at = index * len(slots) + slot
                    packed[at] += power.to(packed.device)
                    power = packed[at]
                found[index][position] = power, value.device
        if slots:
            self._sum(packed, tuple(range(self._world)))
        return [{at: power.sqrt().to(device) for at, (power, device) in of_list.items()} for of_list in found]

    def _power(self, position: int, value: Tensor) -> Tensor:
        """The sum of squares of what this rank speaks for."""
        spoken = self._spoken[position]
        if spoken is None:
            return _power(value)
        parts = [part for _, part in self.views(position, value, spoken)]
        powers = [_power(part) for part in parts]
        return torch.stack(powers).sum() if powers else torch.zeros((), dtype=torch.float64, device=value.device)

    def sums(self, requests: Iterable[Request]) -> list[Tensor]:
        """Sums of logical tensors over some of their dims, all at once.

        Args:
            requests: Position, a tensor of the piece's shape, dims. In one order on all ranks that have some of a tensor.
                Taken one after another, so that those of a generator are not in memory together.
        Returns:
            For each request the whole result, float64, of the logical shape with those dims of size 1.
        Collectives: for each set of ranks that share split tensors one all-reduce. Host reads: as `norms_of`.
        """
        results, positions = list[Tensor](), list[int]()
        for position, value, dims in requests:
            results.append(self._local_sum(position, value, dims))
            positions.append(position)
        by_ranks: dict[tuple[int, ...], list[int]] = {}
        for index, position in enumerate(positions):
            if self._spoken[position] is not None:
                by_ranks.setdefault(self.tensors[position].ranks, []).append(index)
        for ranks in sorted(by_ranks):
            # By name: tied tensors may come in another order elsewhere.
            those = sorted(by_ranks[ranks], key=lambda index: self.tensors[positions[index]].name)
            device = results[those[0]].device
            packed = torch.cat([results[index].reshape(-1).to(device) for index in those])
            self._sum(packed, ranks)
            for index, part in zip(those, packed.split([results[index].numel() for index in those]), strict=True):
                results[index] = part.view(results[index].shape).to(results[index].device)
        return results

    def _local_sum(self, position: int, value: Tensor, dims: tuple[int, ...]) -> Tensor:
        shape, spoken = self.tensors[position].shape, self._spoken[position]
        whole = [1 if dim in dims else size for dim, size in enumerate(shape)]
        if spoken is None:
            return value.reshape(shape).double().sum(dims, keepdim=True) if dims else value.reshape(shape).double()
        result = torch.zeros(whole, dtype=torch.float64, device=value.device)
        for box, part in self.views(position, value, spoken):
            summed = part.double().sum(dims, keepdim=True) if dims else part.double()
            at = Box(tuple(0 if dim in dims else offset for dim, offset in enumerate(box.offsets)), tuple(summed.shape))
            narrowed(result, at).add_(summed)
        return result

    # Ranks ----------------------------------------------------------------------------------------------------------

    @property
    def _world(self) -> int:
        return 1 if self.registry is None else self.registry.topology.world_size

    def _zeros(self, count: int, values: Sequence[Mapping[int, Tensor]]) -> Tensor:
        device = next((value.device for of_list in values for value in of_list.values()), None)
        if device is None:
            device = torch.device("cpu") if self.registry is None else self.registry.device
        return torch.zeros(count, dtype=torch.float64, device=device)

    def _sum(self, packed: Tensor, ranks: tuple[int, ...]) -> None:
        """Over these ranks, in place."""
        assert self.registry is not None
        travelling = packed.to(self.registry.device)
        dist.all_reduce(travelling, group=self.group(ranks))
        if travelling is not packed:
            packed.copy_(travelling)

    def group(self, ranks: tuple[int, ...]) -> Any:
        """The process group of these ranks."""
        assert self.registry is not None
        return self.registry.group_of(ranks)


def _shape_of(region: Region) -> Shape:
    return region.shape if region.numel == prod(region.shape) else (region.numel,)


def _power(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return norm.square()


def narrowed(tensor: Tensor, box: Box, offsets: Shape | None = None) -> Tensor:
    """The elements of a box in a tensor that begins at ``offsets`` (None: at 0)."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset - (offsets[dim] if offsets else 0), size)
    return tensor
