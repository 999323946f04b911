"""Select kernels, variants of the native CPU loops, and the threads of these loops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from meshstep.optim import use_kernels
from meshstep.optim.kernels.choice import Kernels, kernels_chosen
from meshstep.optim.kernels.native import Native, built, torchs_threads


@contextmanager
def using(kernels: Kernels) -> Iterator[None]:
    """Use these kernels in this process within the block."""
    before = kernels_chosen()
    use_kernels(kernels)
    try:
        yield
    finally:
        use_kernels(before)


@cache
def loops() -> Native:
    """Return the installed native loops; test machines have a C compiler, so they must exist."""
    found = built()
    assert found is not None, "the package was installed without its compiled kernels: is there a C compiler?"
    return found


def variants_here() -> list[str]:
    return loops().supported()[::-1]


@contextmanager
def with_variant(name: str) -> Iterator[None]:
    """Select a variant of the compiled CPU kernels in this process within the block, and the widest variant afterwards."""
    loops().take(name)
    try:
        yield
    finally:
        loops().take(None)


@contextmanager
def with_threads(count: int, torchs: bool) -> Iterator[None]:
    """Run the loops on ``count`` threads: of torch's pool if ``torchs``, else threads that each call creates."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    loops().borrow(torchs_threads() if torchs else None)
    try:
        yield
    finally:
        loops().borrow(torchs_threads())
        torch.set_num_threads(before)
