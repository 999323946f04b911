"""The compiled loops (`csrc/native.c`), called with the addresses of tensors.

One pass over memory where torch's kernels take two or more: powers of gradients of any float dtype are summed in float64 as
they are read; an update reads the gradient, in half precision too, multiplies it, steps, and writes the half-precision
copy of what it has stepped. The gradients stay as they are.

All instruction sets, and all numbers of threads, give the same bits. What a call does not change is what torch counts: who
writes to tensors that autograd has saved says so himself (`torch.autograd.graph.increment_version`).
"""

from __future__ import annotations

import ctypes
import logging
from array import array
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from pathlib import Path

import torch
from torch import Tensor

INTERFACE = 3  # as `meshstep_interface` in csrc/native.c
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
NORM_TYPES = {1.0: 1, 2.0: 2, inf: 0}
NO_MEMORY = "the kernels got no memory for their tables"


class Kind(IntEnum):
    """An update's formula, as in `reference`."""

    ADAM = 0
    SGD = 1
    ADAGRAD = 2


@dataclass(frozen=True)
class PointerColumns:
    """What one call updates, a row a tensor, as addresses: 0 where there is none.

    Args:
        fixed: Of the params, the first, second and third state, and the step counts, one column after another.
        grads: Of the gradients, all of one dtype.
        numels: Of the params.
        halves: Of half-precision copies of the params.
        rests: Of the remainders of params that are bfloat16, and are stepped as the masters that both are
            (`meshstep.amp.split_masters`).
    """

    fixed: array[int]
    grads: array[int]
    numels: array[int]
    halves: array[int] | None = None
    rests: array[int] | None = None


class Native:
    """The loops of one compiled library: C functions of addresses, which return 0, or else had no memory for their tables.

    Args:
        path: Of the library.

    Attributes:
        powers: Of (number of tensors, their addresses, numels, dtype, the norm's type, the result's address, threads): in
            float64 the sum of |x|^p of each tensor, p 1 or 2, or the largest |x|.
        update: Of (kind, number of rows, `PointerColumns`: fixed, grads, halves, rests, numels, dtypes of gradients and
            halves, numbers, factor, found_inf, threads): step rows, or nothing where ``found_inf`` is not 0. Numbers are
            float64: of Adam lr, beta1, beta2, eps, weight decay, whether that is decoupled, amsgrad; of SGD lr, momentum,
            dampening, weight decay, nesterov; of Adagrad lr, lr decay, eps, weight decay. A negative factor maximizes.
        instructions: The instruction set in use: "plain", "avx2", "avx512".
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        at, whole, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._take, self.powers, self.update = library.meshstep_take, library.meshstep_powers, library.meshstep_update
        self._take.argtypes, self._take.restype = [ctypes.c_char_p], ctypes.c_char_p
        self.powers.argtypes = [whole, at, at, number, number, at, number]
        self.update.argtypes = [number, whole, at, at, at, at, at, number, number, at, ctypes.c_double, at, number]
        self.instructions = self.take(None)
        self._borrow = library.meshstep_borrow
        self._borrow.argtypes, self._borrow.restype = [at], None
        self.borrow(torchs_threads())

    def take(self, instructions: str | None) -> str:
        """Use this instruction set, or the best one that runs here, and return its name; for tests.

        Raises:
            ValueError: It does not run here.
        """
        found: bytes | None = self._take(instructions.encode() if instructions else None)
        if found is None:
            raise ValueError(f"{instructions!r} does not run on this machine")
        self.instructions = found.decode()
        return self.instructions

    def borrow(self, parallel: int | None) -> None:
        """Work on the threads of an OpenMP runtime, whose ``GOMP_parallel`` is at this address; None: on own ones."""
        self._borrow(parallel)


def torchs_threads() -> int | None:
    """The address of ``GOMP_parallel`` in the OpenMP runtime of torch's kernels; None: it has none, as on a Mac."""
    torchs = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"  # who asks it is told of what it is linked to
    parallel = getattr(ctypes.CDLL(str(torchs)), "GOMP_parallel", None) if torchs.exists() else None
    return None if parallel is None else ctypes.cast(parallel, ctypes.c_void_p).value


def built() -> Native | None:
    """The library that was compiled when the package was installed, if it was, and from these sources."""
    found = sorted(Path(__file__).parent.glob("_native*.so"))
    if not found:
        return None
    interface = getattr(ctypes.CDLL(str(found[0])), "meshstep_interface", None)
    if interface is None or interface() != INTERFACE:
        logging.getLogger("meshstep").warning(
            "%s was compiled from other sources than these, and is not used: install again (pip install -e .)", found[0]
        )
        return None
    return Native(found[0])


def in_memory_order(tensor: Tensor) -> Tensor:
    """[numel]: a view of a dense tensor as it lies in memory; a copy of one that is not dense."""
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(by_stride).reshape(-1).contiguous()
