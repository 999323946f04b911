"""Caches of small device tensors whose values come from the host. Copying the values does not synchronize the host."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...amp.capture import is_captured

KEPT = 64


class Constants:
    """Cache of 1-dim device tensors with constant values.

    It holds the `KEPT` tensors that were used last, and all tensors that captured CUDA graphs read. A cache of one tensor
    would not suffice, because the parameters with gradients may differ from step to step.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Tensor] = OrderedDict()
        self._of_graphs: dict[Hashable, Tensor] = {}  # never freed, because CUDA graphs read these addresses

    def __call__(
        self, key: Hashable, values: Callable[[], Sequence[float]], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return a 1-dim tensor on ``device`` with the given values. Equal keys must mean equal values.

        RuntimeError is raised if a CUDA graph is being captured and the tensor is not cached, because each replay would
        repeat the copy from the host.
        """
        key = (key, dtype, device)
        if key in self._of_graphs:
            return self._of_graphs[key]
        if key in self._kept:
            self._kept.move_to_end(key)
        elif is_captured():
            raise RuntimeError(
                "this CUDA graph capture needs a constant tensor that no recent step (or clip_grad_norm_ call) created. "
                "First run the same step outside the capture, with gradients for the same parameters and the same norms"
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

# Kernels read tables on the device: addresses of tensors, and for each program the chunk of elements that it processes.

T = TypeVar("T")
TABLES_KEPT = 64
CAPTURES = 4  # number of captured steps for whose tables pinned memory is reserved
DTYPES = {"q": torch.int64, "Q": torch.int64, "d": torch.float64}


@dataclass(frozen=True)
class Chunks:
    """Division of n tensors into chunks of equally many elements; the last chunk of a tensor may be shorter.

    The first three fields are int64 tensors on the device: the numbers of elements, [n]; per chunk the index of its
    tensor, and the chunk's index within that tensor, [count, 2]; and the index of each tensor's first chunk, followed
    by ``count``, [n + 1].
    """

    numels: Tensor
    chunks: Tensor
    first: Tensor
    count: int


class Tables:
    """Cache of the `TABLES_KEPT` device tables that were used last, looked up by their content.

    So if gradients have the same addresses as in the last step, no table of addresses is copied to the device.

    A table is never overwritten, because a kernel that has not run yet may still read it. It is copied to a GPU from
    pinned memory, without host synchronization. Each CUDA stream has separate tables.

    A captured CUDA graph contains the copy of a table, from pinned memory that stays unchanged. This memory is allocated
    in steps before the capture, because it can't be allocated during the capture. If it does not suffice, `of` and
    `chunks_of` raise RuntimeError during the capture.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._needed = 0  # number of elements of the kept tables: an estimate of the number that one step needs
        self._for_graphs: Tensor | None = None  # pinned int64 elements for future captures
        self._in_graphs: list[Tensor] = []  # pinned memory that captured graphs read; never freed

    def of(self, values: array[int] | array[float], device: torch.device) -> Tensor:
        key = (values.typecode, values.tobytes(), device, _stream(device))
        dtype = DTYPES[values.typecode]
        return self._one(key, device, lambda: self._brought(torch.frombuffer(values, dtype=dtype), device))

    def chunks_of(self, numels: array[int], size: int, device: torch.device) -> Chunks:
        """Return the division of tensors with these numbers of elements into chunks of ``size`` elements, on ``device``."""
        key = (size, numels.tobytes(), device, _stream(device))
        return self._one(key, device, lambda: self._cut(numels, size, device))

    def _one(self, key: Hashable, device: torch.device, make: Callable[[], T]) -> T:
        if is_captured():
            return make()
        if key in self._kept:
            self._kept.move_to_end(key)
        else:
            self._kept[key] = make()
            if len(self._kept) > TABLES_KEPT:
                self._kept.popitem(last=False)
            self._needed = sum(map(_numel, self._kept.values()))
        if device.type == "cuda" and (self._for_graphs is None or len(self._for_graphs) < self._needed):
            self._reserve()
        found: T = self._kept[key]
        return found

    def _reserve(self) -> None:
        with suppress(RuntimeError):  # if pinned memory can't be allocated, a later capture raises an error
            self._for_graphs = torch.empty(CAPTURES * self._needed, dtype=torch.int64, device="cpu", pin_memory=True)

    def _cut(self, numels: array[int], size: int, device: torch.device) -> Chunks:
        lengths = torch.frombuffer(numels, dtype=torch.int64)
        counts = (lengths + size - 1) // size
        first = torch.zeros(len(numels) + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(counts, 0, out=first[1:])
        count = int(first[-1])
        tensor = torch.repeat_interleave(counts)
        chunks = torch.stack([tensor, torch.arange(count, device="cpu") - first[tensor]], 1)
        return Chunks(
            self._brought(lengths, device), self._brought(chunks, device), self._brought(first, device), count
        )

    def _brought(self, table: Tensor, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return table.clone()
        if is_captured():
            return self._pinned_for_a_graph(table).to(device, non_blocking=True)
        return table.pin_memory().to(device, non_blocking=True)

    def _pinned_for_a_graph(self, table: Tensor) -> Tensor:
        """Return a copy of ``table`` in pinned memory that is never changed or freed."""
        numel = table.numel()
        if self._for_graphs is None or len(self._for_graphs) < numel:
            raise RuntimeError(
                "a CUDA graph captures kernels that have not run before, or too many graphs were captured in a row; make "
                "one step without a graph before each capture"
            )
        pinned, self._for_graphs = self._for_graphs[:numel], self._for_graphs[numel:]
        pinned = pinned.view(table.dtype).view(table.shape)
        pinned.copy_(table)
        self._in_graphs.append(pinned)
        return pinned


def _numel(kept: Tensor | Chunks) -> int:
    tables = (kept,) if isinstance(kept, Tensor) else (kept.numels, kept.chunks, kept.first)
    return sum(table.numel() for table in tables)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
