"""Emulate a CUDA graph on CPU tensors: a capture records operators, and a replay runs them on the same memory.

    graph = CpuGraph()
    with graph.captured():
        optimizer.backward(loss_of(static_batch))
        stats = optimizer.step()
    graph.replay()

As with a CUDA graph, Python code runs only once. The capture leaves earlier tensors unchanged. Tensors created in it
contain garbage until the first replay. Reading a value on the host during the capture raises an error. Memory is not
reused, so a graph that reads memory after it was freed is not detected here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fake_tensors import tensors_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.is_nonzero")
_WITHOUT_VERSIONS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Noting(TorchDispatchMode):
    """Dispatch mode that records operators. It also runs them, because their results are needed for shapes, and saves
    the earlier contents of the memory that they touch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[Any, Any]] = {}
        self.made: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert not str(func).startswith(_READS), f"the host reads in a graph: {func}"
        for tensor in tensors_of((args, kwargs)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.before and storage._cdata not in self.made:
                self.before[storage._cdata] = storage, storage.clone()
        result = func(*args, **kwargs)
        self.made |= {_place(t): t.untyped_storage() for t in tensors_of(result) if _place(t) not in self.before}
        self.calls.append((func, args, kwargs, result))
        return result

    def forget(self) -> None:
        """Restore the memory to its contents before the operators ran."""
        for storage, before in self.before.values():
            storage.copy_(before)
        for storage in self.made.values():
            storage.fill_(255)  # all bits are ones: NaN in a floating-point tensor, -1 in an integer tensor


_wait = dist.Work.wait


def _waited(work: Any, *args: Any) -> Any:
    """Replace the wait for a collective.

    With gloo, waiting copies the result to its destination; the recorded collective includes this copy.
    """
    with _disable_current_modes():
        return _wait(work, *args)


@contextmanager
def capturing() -> Iterator[None]:
    """Make torch report that the current stream is capturing."""
    with (
        mock.patch.object(torch.cuda, "is_initialized", return_value=True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
    ):
        yield


class CpuGraph:
    def __init__(self) -> None:
        self._noted = _Noting()

    @contextmanager
    def captured(self) -> Iterator[None]:
        with capturing(), mock.patch.object(dist.Work, "wait", _waited), self._noted:
            yield
        self._noted.forget()

    @torch.no_grad()
    def replay(self) -> None:
        """Run the recorded operators again; Python state and tensor versions do not change."""
        with torch._C._ExcludeDispatchKeyGuard(_WITHOUT_VERSIONS):
            for func, args, kwargs, result in self._noted.calls:
                given = {_place(tensor) for tensor in tensors_of((args, kwargs))}
                again = func(*args, **kwargs)
                for leaf in tree_leaves(again):
                    if not isinstance(leaf, Tensor) and hasattr(leaf, "wait"):
                        leaf.wait()
                for old, new in zip(tensors_of(result), tensors_of(again), strict=True):
                    if _place(old) not in given:
                        old.copy_(new)


# Replaces ``torch.cuda`` in code that captures CUDA graphs.
CUDA_OF_THE_CPU = SimpleNamespace(
    is_available=lambda: True,
    CUDAGraph=CpuGraph,
    graph=lambda graph: graph.captured(),
    Stream=mock.Mock,
    current_stream=mock.Mock,
    stream=lambda _: nullcontext(),
)
