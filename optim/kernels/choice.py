"""Which kernels compute: the library's own, or torch's.

"auto"   on a CPU the compiled ones (`native`), where the installation has them; else torch's
"torch"  torch's everywhere
"""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Literal

from .native import Native, built

Kernels = Literal["auto", "torch"]
VARIABLE = "MESHSTEP_KERNELS"

_chosen: list[Kernels] = []


def use_kernels(kernels: Kernels) -> None:
    """Choose the kernels of this process, from now on: before optimizers are made, on all ranks alike.

    Both compute the same formulas; results differ by rounding (the optimizers' agreement compares what ranks have chosen).
    Until it is called the environment's ``MESHSTEP_KERNELS`` says it, and "auto" where that is not set.

    Args:
        kernels: "auto": on a CPU powers of gradients and the updates of torch's fused Adam, AdamW, SGD and Adagrad by
            compiled loops, in one pass over memory. "torch": torch's own kernels everywhere.
    Raises:
        ValueError: It is neither.
    Collectives: none.
    """
    _chosen[:] = [_checked(kernels, "kernels")]


def kernels_chosen() -> Kernels:
    """What `use_kernels`, or the environment, has said."""
    if not _chosen:
        _chosen.append(_checked(os.environ.get(VARIABLE, "auto"), VARIABLE))
    return _chosen[0]


def native() -> Native | None:
    """The compiled loops, if they are to be used and are there."""
    return _found() if kernels_chosen() == "auto" else None


def kernels_here() -> str:
    """What computes on a CPU, for the ranks' agreement: "native" or "torch"."""
    return "torch" if native() is None else "native"


@cache
def _found() -> Native | None:
    found, log = built(), logging.getLogger("meshstep")
    if found is None:
        log.info("CPU kernels: torch's (the installation has no compiled ones: there was no C compiler)")
    else:
        log.info("CPU kernels: native, %s (MESHSTEP_KERNELS=torch takes torch's)", found.instructions)
    return found


def _checked(kernels: str, name: str) -> Kernels:
    if kernels == "auto":
        return "auto"
    if kernels == "torch":
        return "torch"
    raise ValueError(f"{name}={kernels!r}: give 'auto' or 'torch'")
