"""The compiled loops under test, by each instruction set that runs here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from meshstep.optim.kernels.native import Native, built


def loops() -> Native:
    """Those of the installation: where the tests run there is a C compiler, or there would be nothing to test."""
    return _LOOPS


def _built() -> Native:
    found = built()
    assert found is not None, "the package was installed without its compiled kernels: is there a C compiler?"
    return found


def _running(found: Native) -> list[str]:
    names = list[str]()
    for name in ("plain", "avx2", "avx512"):
        try:
            names.append(found.take(name))
        except ValueError:  # this machine has it not
            continue
    found.take(None)
    return names


_LOOPS = _built()
INSTRUCTIONS = _running(_LOOPS)


@contextmanager
def with_instructions(name: str) -> Iterator[None]:
    """The instruction set is the library's, not a `Native`'s: all of them step by it meanwhile."""
    _LOOPS.take(name)
    try:
        yield
    finally:
        _LOOPS.take(None)
