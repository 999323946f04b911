"""Dispatch modes with which a test observes a step: host reads and allocated memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from dense import collectives as collectives
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "_has_inf_or_nan", "allclose")


class HostReadError(AssertionError):
    """An operation copied a tensor's value to the host."""


class MadeMemory(TorchDispatchMode):
    """Counts operators, and the bytes of the new storages in their results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = self.bytes = 0
        self._seen: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no other storage gets its address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._seen |= _storages((args, kwargs))
        result = func(*args, **(kwargs or {}))
        made = {key: storage for key, storage in _storages(result).items() if key not in self._seen}
        self._seen |= made
        self.operators += 1
        self.bytes += sum(storage.nbytes() for storage in made.values())
        return result


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}


class NoHostReads(TorchDispatchMode):
    """Raises on the operators in `_READS`, which copy a tensor's value to the host: ``.item()``, ``bool(t)``,
    ``torch.equal``, ``nonzero``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.split("::")[-1] in _READS:
            raise HostReadError(f"{func} copies a tensor's value to the host")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Use `NoHostReads`, after checking that it detects a host read."""
    with NoHostReads():  # type: ignore[no-untyped-call]
        try:
            bool(torch.ones(()))
        except HostReadError:
            pass
        else:
            raise AssertionError("NoHostReads does not detect that bool(tensor) copies a value to the host")
        yield
