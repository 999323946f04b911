"""The compiled loops under test, by each instruction set that runs here."""

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
    """With these kernels in this process."""
    before = kernels_chosen()
    use_kernels(kernels)
    try:
        yield
    finally:
        use_kernels(before)


@cache
def loops() -> Native:
    """Those of the installation: where the tests run there is a C compiler, or there would be nothing to test."""
    found = built()
    assert found is not None, "the package was installed without its compiled kernels: is there a C compiler?"
    return found


def instructions_here() -> list[str]:
    """Of the instruction sets those that this machine has."""
    names = list[str]()
    for name in ("plain", "avx2", "avx512"):
        try:
            names.append(loops().take(name))
        except ValueError:
            continue
    loops().take(None)
    return names


@contextmanager
def with_instructions(name: str) -> Iterator[None]:
    """The instruction set is the library's, not a `Native`'s: all of them step by it meanwhile."""
    loops().take(name)
    try:
        yield
    finally:
        loops().take(None)


@contextmanager
def with_threads(count: int, torchs: bool) -> Iterator[None]:
    """The loops work on so many threads of torch's, or of their own."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    loops().borrow(torchs_threads() if torchs else None)
    try:
        yield
    finally:
        loops().borrow(torchs_threads())
        torch.set_num_threads(before)
