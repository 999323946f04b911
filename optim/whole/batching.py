"""The choice between one call per tensor and one call for many tensors.

On a GPU, a kernel launch costs more than the work of a small tensor, so tensors are stepped together: by torch's fused and
multi-tensor kernels, and by batched products of matrices with equal shapes. On a CPU, calls are cheap, and fewer
temporary tensors at a time are more likely to stay in the cache, so tensors are stepped one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ...amp.by_bucket import split_runs
from ...amp.casting import copy_each_

if TYPE_CHECKING:
    from .optimizer import Slot

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

CHUNK = 2**25
"""Largest number of elements whose temporary tensors are in memory at the same time, unless one tensor is larger.

With 2^23 elements, steps of 10^8 parameters took three times as long on an H100 as their memory traffic.
"""


def batches_on(device: torch.device) -> bool:
    return device.type == "cuda"


def is_batched(tensor: Tensor) -> bool:
    """Return True if the tensor is on a CUDA device and contiguous, as kernels for many tensors require."""
    return batches_on(tensor.device) and tensor.is_contiguous()


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items in lists by ``key(item)``. The order of the lists, and of the items in a list, is kept."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def by_position(slots: Iterable[Slot], tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return {position of the slot: tensor}, for one tensor per slot."""
    return {slot.position: tensor for slot, tensor in zip(slots, tensors, strict=True)}


# Tensors in one buffer ------------------------------------------------------------------------------------------------


def chunks(items: Sequence[T], numel: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield the items in lists of at most `CHUNK` elements, or of one larger item, as `split_runs` does."""
    return split_runs(items, numel, CHUNK)


class PackedTensors:
    """Uninitialized tensors in one flat buffer, in which tensors with equal keys are next to each other.

    Tensors with equal keys must have equal numbers of elements. ``keys=None``: the number of elements is the key.

    Attributes:
        tensors: Views of the buffer, in the order of ``shapes``.
        flat: The buffer. Elements between two tensors have no meaning.
        stacks: {key: view of the buffer that has one of the tensors with this key at the beginning of each row}.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
        keys: Sequence[Hashable] | None = None,
    ) -> None:
        numels = [prod(shape) for shape in shapes]
        by_key = grouped(range(len(shapes)), lambda index: numels[index] if keys is None else keys[index])
        # multiples of 64 elements, because kernels are faster with aligned tensors
        padded = {key: -(-numels[indices[0]] // 64) * 64 for key, indices in by_key.items()}
        sizes = [padded[key] * len(indices) for key, indices in by_key.items()]
        self.flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        self.stacks: dict[Hashable, Tensor] = {}
        found: dict[int, Tensor] = {}
        for (key, indices), block in zip(by_key.items(), self.flat.split(sizes), strict=True):
            stack = block.view(len(indices), padded[key])
            self.stacks[key] = stack
            for index, row in zip(indices, stack.unbind(), strict=True):
                found[index] = row[: numels[index]].view(tuple(shapes[index]))
        self.tensors = [found[index] for index in range(len(shapes))]
        self._order = [index for indices in by_key.values() for index in indices]

    @classmethod
    def like(cls, slots: Sequence[Slot], keys: Sequence[Hashable] | None = None) -> PackedTensors:
        """Return tensors of the slots' shapes, with the dtype and device of the first slot, which all slots must have."""
        param = slots[0].param
        return cls([slot.param.shape for slot in slots], param.dtype, param.device, keys)

    def fill(self, sources: Sequence[Tensor]) -> PackedTensors:
        """Copy one source into each tensor, and return self."""
        copy_each_(self.tensors, sources)
        return self

    def multiply(self, factors: Tensor) -> None:
        """Multiply each tensor in place by one number of ``factors``, [tensors]."""
        each = factors.to(self.flat.dtype)
        if self._order != sorted(self._order):
            rows = each.unbind()
            each = torch.stack([rows[index] for index in self._order])
        parts = each.split([len(stack) for stack in self.stacks.values()])
        for stack, part in zip(self.stacks.values(), parts, strict=True):
            stack.mul_(part.unsqueeze(1))


# Lazily computed tensors ----------------------------------------------------------------------------------------------


class LazyTensors(Mapping[int, Tensor]):
    """A mapping that computes its tensors on access, so that few of them are in memory at the same time.

    Keys are indices of stepped tensors over all param groups. ``make`` is called on every access, and its result is not
    stored. ``make_all`` computes several values with few kernels, by position; None: ``make`` computes them.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        make: Callable[[Slot], Tensor],
        make_all: Callable[[Sequence[Slot]], Mapping[int, Tensor]] | None = None,
    ) -> None:
        self._slots, self._make, self._make_all = {slot.position: slot for slot in slots}, make, make_all

    def __getitem__(self, position: int) -> Tensor:
        return self._make(self._slots[position])

    def all_of(self, positions: Sequence[int]) -> Mapping[int, Tensor]:
        """Return the values for several positions, by position."""
        if self._make_all is None:
            return {position: self[position] for position in positions}
        return self._make_all([self._slots[position] for position in positions])

    def __contains__(self, position: object) -> bool:
        return position in self._slots

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)


def values_of(mapping: Mapping[int, Tensor], positions: Sequence[int]) -> Mapping[int, Tensor]:
    """Return the values of a mapping for several positions, computed together if it is a `LazyTensors`."""
    return mapping.all_of(positions) if isinstance(mapping, LazyTensors) else {one: mapping[one] for one in positions}
