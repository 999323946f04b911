"""The choice between one call per tensor and one call for many tensors.

On a GPU, a kernel launch costs more than the work of a small tensor, so tensors are stepped together: by torch's fused and
multi-tensor kernels, and by batched products of matrices with equal shapes. On a CPU, calls are cheap, and few temporary
tensors in the cache are worth more, so tensors are stepped one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .optimizer import Slot

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def batches_on(device: torch.device) -> bool:
    """Return True if tensors on ``device`` are stepped together."""
    return device.type == "cuda"


def is_batched(tensor: Tensor) -> bool:
    """Return True if the tensor is stepped with others by kernels that ignore strides."""
    return batches_on(tensor.device) and tensor.is_contiguous()


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items in lists by ``key(item)``. The order of the lists, and of the items in a list, is kept."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def zeros_like_each(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return zeros of the shape, dtype and device of each tensor, in a few shared buffers."""
    found: dict[int, Tensor] = {}
    for (device, dtype), indices in grouped(
        range(len(tensors)), lambda index: (tensors[index].device, tensors[index].dtype)
    ).items():
        # multiples of 64 elements, because kernels are faster with aligned tensors
        numels = [-(-tensors[index].numel() // 64) * 64 for index in indices]
        parts = torch.zeros(sum(numels), dtype=dtype, device=device).split(numels)
        for index, part in zip(indices, parts, strict=True):
            found[index] = part[: tensors[index].numel()].view(tensors[index].shape)
    return [found[index] for index in range(len(tensors))]


# Lazily computed tensors ----------------------------------------------------------------------------------------------


class LazyTensors(Mapping[int, Tensor]):
    """A mapping that computes its tensors on access, so that few of them are in memory at the same time.

    A key is the index of a stepped tensor over all param groups.

    Args:
        slots: The stepped tensors.
        make: Computes the value for a stepped tensor. It is called on every access, and its result is not stored.
        make_all: Computes the values for several stepped tensors, with few kernels. None: ``make`` computes them.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        make: Callable[[Slot], Tensor],
        make_all: Callable[[Sequence[Slot]], Sequence[Tensor]] | None = None,
    ) -> None:
        self._slots, self._make, self._make_all = {slot.position: slot for slot in slots}, make, make_all

    def __getitem__(self, position: int) -> Tensor:
        return self._make(self._slots[position])

    def all_of(self, positions: Sequence[int]) -> Sequence[Tensor]:
        """Return the values for several positions."""
        if self._make_all is None:
            return [self[position] for position in positions]
        return self._make_all([self._slots[position] for position in positions])

    def __contains__(self, position: object) -> bool:
        return position in self._slots

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)


def values_of(mapping: Mapping[int, Tensor], positions: Sequence[int]) -> Sequence[Tensor]:
    """Return the values of a mapping for several positions, computed together if it is a `LazyTensors`."""
    return mapping.all_of(positions) if isinstance(mapping, LazyTensors) else [mapping[one] for one in positions]
