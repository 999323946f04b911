"""Tensors by position that are made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from .optimizer import Slot


class OnDemand(Mapping[int, Tensor]):
    """By position of some slots what is made of each: to be measured one after another, without memory for all at once.

    Args:
        slots: The positions.
        make: Called whenever the tensor is asked for, which is not kept.
    """

    def __init__(self, slots: Sequence[Slot], make: Callable[[Slot], Tensor]) -> None:
        self._slots, self._make = {slot.position: slot for slot in slots}, make

    def __getitem__(self, position: int) -> Tensor:
        return self._make(self._slots[position])

    def __contains__(self, position: object) -> bool:
        return position in self._slots

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)
