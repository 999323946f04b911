"""Tensors made of numbers of the host, on a GPU without waiting for it, and made once."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...amp.capture import is_captured

KEPT = 64


class Constants:
    """The `KEPT` that were asked for last; which gradients there are may differ from step to step."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Tensor] = OrderedDict()
        self._of_graphs: dict[Hashable, Tensor] = {}  # graphs read them where they lie, as long as they are replayed

    def __call__(
        self, key: Hashable, values: Callable[[], Sequence[float]], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """1-dim, on ``device``: what ``values`` returns, which is called where there is none under the key. Host reads:
        none.

        Raises:
            RuntimeError: A CUDA graph is made, in which they can't be brought from the host.
        """
        key = (key, dtype, device)
        if key in self._of_graphs:
            return self._of_graphs[key]
        if key in self._kept:
            self._kept.move_to_end(key)
        elif is_captured():
            raise RuntimeError(
                "other parameters have gradients in the step that is captured in a CUDA graph than in the steps before: "
                "make a step before with the same ones"
            )
        else:
            host = torch.tensor(values(), dtype=dtype, pin_memory=device.type == "cuda")
            self._kept[key] = host.to(device, non_blocking=True)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        if is_captured():
            self._of_graphs[key] = self._kept[key]
        return self._kept[key]


# Tables ---------------------------------------------------------------------------------------------------------------

# Tables on a device that kernels read, of numbers of the host: addresses of tensors, which program takes which chunk.

T = TypeVar("T")
TABLES_KEPT = 64
DTYPES = {"q": torch.int64, "Q": torch.int64, "d": torch.float64}


@dataclass(frozen=True)
class Chunks:
    """How tensors are cut, which depends on their sizes alone.

    Args:
        numels: [n] int64.
        chunks: [chunks, 2] int64: the tensor, and the chunk's number within it.
        first: [n + 1] int64: of each tensor the first of its chunks; at the end how many there are.
        count: That number, on the host.
    """

    numels: Tensor
    chunks: Tensor
    first: Tensor
    count: int


class Tables:
    """The last `TABLES_KEPT`, by what is in them: as long as gradients stay where they are, nothing is copied.

    A table is never written again: a kernel that is still to run reads what it was launched with. On a GPU it travels from
    pinned memory, and nobody waits. It belongs to the stream on which it was asked for.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()

    def of(self, values: array[int] | array[float], device: torch.device) -> Tensor:
        """[len(values)] int64 or float64, on ``device``. Host reads: none."""
        key = (values.typecode, values.tobytes(), device, _stream(device))
        return self._one(key, lambda: _brought(torch.frombuffer(values, dtype=DTYPES[values.typecode]).clone(), device))

    def chunks_of(self, numels: array[int], size: int, device: torch.device) -> Chunks:
        """Tensors of these sizes in chunks of ``size`` elements. Host reads: none."""
        key = (size, numels.tobytes(), device, _stream(device))
        return self._one(key, lambda: _cut(numels, size, device))

    def _one(self, key: Hashable, make: Callable[[], T]) -> T:
        if key in self._kept:
            self._kept.move_to_end(key)
        else:
            self._kept[key] = make()
            if len(self._kept) > TABLES_KEPT:
                self._kept.popitem(last=False)
        found: T = self._kept[key]
        return found


def _cut(numels: array[int], size: int, device: torch.device) -> Chunks:
    lengths = torch.frombuffer(numels, dtype=torch.int64).clone()
    counts = (lengths + size - 1) // size
    first = torch.zeros(len(numels) + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(counts, 0, out=first[1:])
    count = int(first[-1])
    tensor = torch.repeat_interleave(counts)
    chunks = torch.stack([tensor, torch.arange(count, device="cpu") - first[tensor]], 1)
    return Chunks(_brought(lengths, device), _brought(chunks, device), _brought(first, device), count)


def _brought(table: Tensor, device: torch.device) -> Tensor:
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
