"""Choice of the kernels for gradient norms, optimizer updates and stochastic rounding: meshstep's own or torch's.

    "auto"    on a CPU the compiled kernels (`native`) if they are installed; on an NVIDIA GPU of compute capability 8.0
              (`OLDEST`) or higher the Triton kernels (`triton`) if they compile and run there; otherwise torch's
    "torch"   torch's kernels on every device
    "triton"  on a GPU the Triton kernels, or an error if they don't run there; on a CPU the same kernels as "auto"

"triton" needs the package triton on every rank, also on ranks without a GPU. With "triton" and the environment variable
``TRITON_INTERPRET=1``, as in tests, the Triton kernels run on the CPU. Then the compiled kernels are not used, and GPUs
use torch's kernels.
"""

from __future__ import annotations

import logging
import os
from functools import cache, cached_property
from typing import TYPE_CHECKING, Literal, cast, get_args

import torch

from ...amp.capture import is_captured
from .native import Native, built

if TYPE_CHECKING:  # triton is optional, and takes a second to import
    from .triton import Triton

Kernels = Literal["auto", "torch", "triton"]
VARIABLE = "MESHSTEP_KERNELS"
OLDEST = (8, 0)  # the lowest compute capability for which the Triton kernels are compiled in tests

_choice: list[Kernels] = []


class Chosen:
    """The chosen kernels of this process, cached until `use_kernels` is called."""

    @cached_property
    def native(self) -> Native | None:
        """Return the compiled CPU kernels; None if torch's kernels or interpreted Triton kernels run on the CPU."""
        return None if kernels_chosen() == "torch" or _is_interpreted() else _found()

    @cached_property
    def triton(self) -> Triton | None:
        """Return the Triton kernels if "triton" is chosen, even if they don't run on the tensors' device; else None."""
        return _loaded() if kernels_chosen() == "triton" else None


chosen = Chosen()


def use_kernels(kernels: Kernels) -> None:
    """Choose the kernels for gradient norms, optimizer updates and stochastic rounding in this process.

    Call it before optimizers are created, with the same choice on all ranks; `ParallelOptimizer` checks that all ranks
    use the same kernels. Without a call, the environment variable ``MESHSTEP_KERNELS`` decides; its default is "auto".

    This package has compiled C loops for CPUs and Triton kernels for GPUs. They compute gradient norms, and the updates of
    torch's Adam, AdamW, SGD and Adagrad with ``fused=True``, and on CPUs of `Lion`, in one pass over memory, and round
    stochastically. Their results differ from torch's kernels by rounding, except those of `Lion`; in stochastic rounding,
    torch's kernels also draw other noise.

        use_kernels("torch")

    Args:
        kernels: "auto": the compiled loops on a CPU if they are installed, and the Triton kernels on an NVIDIA GPU of
            compute capability 8.0 or higher if Triton can compile and run a kernel there (else a log message names the
            reason); otherwise torch's kernels. "torch": torch's kernels on every device. "triton": as "auto", but an
            error if the Triton kernels can't run on the GPU.

    Raises:
        ValueError: ``kernels`` is none of "auto", "torch" and "triton".
        ImportError: ``kernels`` is "triton", and the package triton can't be imported.

    Collectives: none.
    Host synchronization: none.
    """
    _choice[:] = [_checked(kernels, "kernels")]
    vars(chosen).clear()


def kernels_chosen() -> Kernels:
    """Return the choice of `use_kernels`, or without a call the value of the environment variable ``MESHSTEP_KERNELS``."""
    if not _choice:
        _choice.append(_checked(os.environ.get(VARIABLE, "auto"), VARIABLE))
    return _choice[0]


def triton_on(device: torch.device) -> Triton | None:
    """Return the Triton kernels if they are chosen and run on ``device``; otherwise None.

    With "auto", the first call for a GPU tries a kernel there, which synchronizes the host. During the capture of a CUDA
    graph it can't be tried, so the result is None until a call after the capture.
    """
    if device.type == "cuda" and kernels_chosen() == "auto":
        return _on_gpu(device)
    kernels = chosen.triton
    return kernels if kernels is not None and kernels.runs_on(device) else None


def kernels_on_gpu(device: torch.device) -> str:
    """Return "triton" or "torch": the kernels on this GPU. `ParallelOptimizer` compares the value between ranks."""
    return "torch" if triton_on(device) is None else "triton"


def kernels_here() -> str:
    """Return a text that names the kernels on the CPU, and whether "triton" is chosen.

    `ParallelOptimizer` compares the text between ranks, because all ranks must use the same kernels.
    """
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
        log.info("CPU kernels: torch's (this installation has no compiled kernels of this version)")
    else:
        times = found.take_fastest()
        measured = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in times.items())
        log.info(
            "CPU kernels: native, %s, the fastest of %s (set MESHSTEP_KERNELS=torch for torch's)",
            found.variant,
            measured,
        )
    return found


_tried: dict[torch.device, Triton | None] = {}


def _on_gpu(device: torch.device) -> Triton | None:
    """Return the Triton kernels if a trial of them on ``device`` succeeded; if it failed or is not possible, None."""
    if device not in _tried:
        if not torch.cuda.is_available() or is_captured():
            return None
        sample = torch.full((5,), 3.0, device=device)
        if type(sample) is not torch.Tensor:  # torch's FakeTensorMode: nothing runs on the GPU
            return None
        mode = torch.cuda.get_sync_debug_mode()
        if mode:
            torch.cuda.set_sync_debug_mode(0)  # the trial reads its result from the GPU
        try:
            _tried[device] = _working_on(device, sample)
        finally:
            if mode:
                torch.cuda.set_sync_debug_mode(mode)
    return _tried[device]


def _working_on(device: torch.device, sample: torch.Tensor) -> Triton | None:
    log = logging.getLogger("meshstep")
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < OLDEST:
        log.info(
            "GPU kernels: torch's (Triton kernels need an NVIDIA GPU of compute capability %d.%d or higher)", *OLDEST
        )
        return None
    try:
        kernels = _loaded()
        if not kernels.runs_on(device):
            log.info("GPU kernels: torch's (TRITON_INTERPRET=1 is set, and Triton's interpreter runs on the CPU)")
            return None
        powers = kernels.powers([sample], 2.0)
        if powers is not None and powers.tolist() == [9.0 * sample.numel()]:
            return kernels
        problem = "a sum of squares was wrong"
    except ImportError as error:
        log.info("GPU kernels: torch's (triton can't be imported: %s)", error)
        return None
    except Exception as error:  # Triton raises errors of many classes, for example without a C compiler
        problem = f"{type(error).__name__}: {error}"
    log.warning("GPU kernels: torch's, because Triton kernels can't be used here (%s)", problem)
    return None


@cache
def _loaded() -> Triton:
    from .triton import Triton

    found, log = Triton(), logging.getLogger("meshstep")
    if found.interpreted:
        log.info("kernels: triton %s, interpreted on the CPU", found.version)
    else:
        log.info("GPU kernels: triton %s (set MESHSTEP_KERNELS=torch for torch's)", found.version)
    return found


def _checked(kernels: str, name: str) -> Kernels:
    if kernels not in get_args(Kernels):
        raise ValueError(f"{name}={kernels!r}: give 'auto', 'torch' or 'triton'")
    if kernels == "triton":
        try:
            _loaded()
        except ImportError as error:
            raise ImportError(
                f"{name}='triton' needs the package triton, which can't be imported ({error}); install it (pip install "
                "triton; torch's CUDA builds for Linux include it), or give 'auto' or 'torch'"
            ) from error
    return cast(Kernels, kernels)
