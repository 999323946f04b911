"""Which kernels compute: the library's own, or torch's.

"auto"    on a CPU the compiled ones (`native`), where the installation has them; else torch's
"torch"   torch's everywhere
"triton"  on a GPU those in Triton (`triton`), on a CPU as "auto"; with Triton's interpreter they are for the CPU, in tests
"""

from __future__ import annotations

import logging
import os
from functools import cache, cached_property
from typing import TYPE_CHECKING, Literal

import torch

from .native import Native, built

if TYPE_CHECKING:  # triton is not everywhere where torch is, and takes a second to import
    from .triton import Triton

Kernels = Literal["auto", "torch", "triton"]
VARIABLE = "MESHSTEP_KERNELS"

_said: list[Kernels] = []


class Chosen:
    """The kernels of this process, looked up once and not in each step; anew after `use_kernels`."""

    @cached_property
    def native(self) -> Native | None:
        """The compiled loops, if they are to be used and are there."""
        return None if kernels_chosen() == "torch" or _is_interpreted() else _found()

    @cached_property
    def triton(self) -> Triton | None:
        """The kernels in Triton, if they are to be used; `triton_on` says on which device."""
        return _loaded() if kernels_chosen() == "triton" else None


chosen = Chosen()


def use_kernels(kernels: Kernels) -> None:
    """Choose the kernels of this process, from now on: before optimizers are made, on all ranks alike.

    All compute the same formulas; results differ by rounding (the optimizers' agreement compares what ranks have chosen).
    Until it is called the environment's ``MESHSTEP_KERNELS`` says it, and "auto" where that is not set.

    Args:
        kernels: "auto": on a CPU powers of gradients and the updates of torch's fused Adam, AdamW, SGD and Adagrad by
            compiled loops, in one pass over memory; on a GPU torch's kernels. "torch": torch's own kernels everywhere.
            "triton": the same powers and updates on a GPU by kernels in Triton, on a CPU as "auto". These **have never run
            on a GPU**: they pass their tests in Triton's interpreter and compile for one. A step that is captured in a
            CUDA graph is torch's all the same.
    Raises:
        ValueError: It is none of them.
        ImportError: "triton", and the package triton can't be imported.
    Collectives: none.
    """
    _said[:] = [_checked(kernels, "kernels")]
    vars(chosen).clear()


def kernels_chosen() -> Kernels:
    """What `use_kernels`, or the environment, has said."""
    if not _said:
        _said.append(_checked(os.environ.get(VARIABLE, "auto"), VARIABLE))
    return _said[0]


def triton_on(device: torch.device) -> Triton | None:
    """The kernels in Triton, if they are to be used and run on this device."""
    kernels = chosen.triton
    return kernels if kernels is not None and kernels.runs_on(device) else None


def kernels_here() -> str:
    """What computes, for the ranks' agreement: on a CPU "native" or "torch", and what else there is on a GPU."""
    if _is_interpreted():
        return "triton, interpreted"
    on_cpu = "torch" if chosen.native is None else "native"
    return f"triton, on a CPU {on_cpu}" if kernels_chosen() == "triton" else on_cpu


def _is_interpreted() -> bool:
    return kernels_chosen() == "triton" and _loaded().interpreted


@cache
def _found() -> Native | None:
    found, log = built(), logging.getLogger("meshstep")
    if found is None:
        log.info("CPU kernels: torch's (the installation has no compiled ones of this version)")
    else:
        log.info("CPU kernels: native, %s (MESHSTEP_KERNELS=torch takes torch's)", found.instructions)
    return found


@cache
def _loaded() -> Triton:
    from .triton import Triton

    found, log = Triton(), logging.getLogger("meshstep")
    if found.interpreted:
        log.info("kernels: triton %s by its interpreter, on the CPU", found.version)
    else:
        log.info("GPU kernels: triton %s, which have never run on a GPU ('auto' takes torch's)", found.version)
    return found


def _checked(kernels: str, name: str) -> Kernels:
    if kernels == "auto":
        return "auto"
    if kernels == "torch":
        return "torch"
    if kernels == "triton":
        try:
            _loaded()
        except ImportError as error:
            raise ImportError(
                f"{name}='triton' needs the package triton, which can't be imported here ({error}): torch brings it on "
                "Linux, with its CUDA builds; install it (pip install triton), or give 'auto' or 'torch'"
            ) from error
        return "triton"
    raise ValueError(f"{name}={kernels!r}: give 'auto', 'torch' or 'triton'")
