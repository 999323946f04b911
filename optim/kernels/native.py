"""Compiled CPU kernels (`csrc/native.c`), called with the addresses of tensors.

The kernels need one pass over memory where torch's kernels need two or more. Powers of gradients of the dtypes in
`DTYPES` are summed in float64 as the gradients are read. An update reads the gradient in its own precision, multiplies
it by a factor, updates parameter and states, and writes the half-precision copy of the parameter. The gradients are
unchanged.

The results are bitwise identical for all instruction sets and all numbers of threads. The kernels don't increase
torch's version counters. A caller that writes to tensors saved by autograd must call
`torch.autograd.graph.increment_version` itself.
"""

from __future__ import annotations

import ctypes
import logging
from array import array
from dataclasses import dataclass
from enum import IntEnum
from math import inf, sqrt
from pathlib import Path

import torch
from torch import Tensor

INTERFACE = 3  # must equal `meshstep_interface` in csrc/native.c
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
NORM_TYPES = {1.0: 1, 2.0: 2, inf: 0}
NO_MEMORY = "the kernels could not allocate memory for their tables"


class Kind(IntEnum):
    """Formula of an update: `Adam`, `SGD` or `Adagrad`."""

    ADAM = 0
    SGD = 1
    ADAGRAD = 2


@dataclass(frozen=True)
class PointerColumns:
    """Addresses of the tensors that one call updates, one row per tensor; 0 for a missing tensor.

    Args:
        fixed: Five columns, one after the other: addresses of the parameters, of their first, second and third optimizer
            states, and of their step counts.
        grads: Addresses of the gradients, which all have the same dtype.
        numels: Numbers of elements of the parameters.
        halves: Addresses of the half-precision copies of the parameters. None: there are none.
        rests: Addresses of the remainders of bfloat16 parameters that are stepped as split master weights
            (`meshstep.amp.master_weights`). None: there are none.
    """

    fixed: array[int]
    grads: array[int]
    numels: array[int]
    halves: array[int] | None = None
    rests: array[int] | None = None

    @property
    def count(self) -> int:
        """Return the number of rows."""
        return len(self.numels)


class Native:
    """The functions of the compiled library.

    `powers` and `update` take addresses. They return 0, or another value if memory for their tables ran out.

    Args:
        path: Path of the library.

    Attributes:
        powers: Called with (number of tensors, their addresses, numels, dtype, norm type, address of the result,
            threads). Writes one float64 per tensor: the sum of |x|^p for p = 1 or 2, or the largest |x| for p = inf.
        update: Called with (kind, number of rows, `PointerColumns`: fixed, grads, halves, rests, numels, dtypes of
            gradients and halves, numbers, factor, found_inf, threads). Steps the rows if ``found_inf`` is 0. The numbers
            are the hyper-parameters, in float64. Adam: lr, beta1, beta2, eps, weight decay, decoupled, amsgrad. SGD: lr,
            momentum, dampening, weight decay, nesterov. Adagrad: lr, lr decay, eps, weight decay. A negative factor
            maximizes.
        instructions: The instruction set in use: "plain", "avx2" or "avx512".
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
        """Select an instruction set and return its name.

        Args:
            instructions: "plain", "avx2" or "avx512"; None: the best one that this machine supports.

        Raises:
            ValueError: This machine does not support ``instructions``.
        """
        found: bytes | None = self._take(instructions.encode() if instructions else None)
        if found is None:
            raise ValueError(f"this machine does not support the instruction set {instructions!r}")
        self.instructions = found.decode()
        return self.instructions

    def borrow(self, parallel: int | None) -> None:
        """Use the threads of the OpenMP runtime whose ``GOMP_parallel`` has this address; None: create threads per call."""
        self._borrow(parallel)


def torchs_threads() -> int | None:
    """Return the address of ``GOMP_parallel`` in torch's OpenMP runtime; None if it has none, as on macOS."""
    torchs = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"  # also resolves symbols of linked libraries
    parallel = getattr(ctypes.CDLL(str(torchs)), "GOMP_parallel", None) if torchs.exists() else None
    return None if parallel is None else ctypes.cast(parallel, ctypes.c_void_p).value


def built() -> Native | None:
    """Return the library compiled at installation; None if there is none, or if it has another interface version.

    In the second case a warning is logged.
    """
    found = sorted(Path(__file__).parent.glob("_native*.so"))
    if not found:
        return None
    interface = getattr(ctypes.CDLL(str(found[0])), "meshstep_interface", None)
    if interface is None or interface() != INTERFACE:
        logging.getLogger("meshstep").warning(
            "%s was compiled from other sources, so it is not used; install the package again (pip install -e .)",
            found[0],
        )
        return None
    return Native(found[0])


# Reference formulas of the updates ------------------------------------------------------------------------------------

# They use torch operations, in the dtype of their arguments. g is the gradient times the factor (negative to maximize),
# and t the number of the step, counted from 1.


@dataclass(frozen=True)
class Adam:
    """Adam and AdamW. States: first moment, second moment, and with ``amsgrad`` the largest second moment.

    Kingma, Ba 2015 (arXiv:1412.6980); Loshchilov, Hutter 2019 (arXiv:1711.05101) for ``decoupled``; Reddi et al. 2018
    for ``amsgrad``.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    amsgrad: bool = False

    def step(self, p: Tensor, g: Tensor, states: list[Tensor], t: int) -> None:
        """Step ``p`` and its states in place."""
        m, v, *largest = states
        if self.decoupled:
            p.mul_(1 - self.lr * self.weight_decay)
        else:
            g = g + self.weight_decay * p
        m.copy_(self.beta1 * m + (1 - self.beta1) * g)
        v.copy_(self.beta2 * v + (1 - self.beta2) * g * g)
        second = v
        if self.amsgrad:
            second = largest[0].copy_(largest[0].maximum(v))
        mean, root = m / (1 - self.beta1**t), second.sqrt() / sqrt(1 - self.beta2**t)
        p.sub_(self.lr * mean / (root + self.eps))


@dataclass(frozen=True)
class SGD:
    """SGD as in torch; with ``nesterov`` also torch's Nesterov momentum, whose buffer does not contain the learning rate.

    State: the momentum buffer, initially zeros; none without momentum. With ``dampening``, torch's first step differs: it
    starts the buffer with the undampened gradient.
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def step(self, p: Tensor, g: Tensor, states: list[Tensor], t: int) -> None:
        """Step ``p`` and its states in place."""
        g = g + self.weight_decay * p
        if states:
            kept = states[0].copy_(self.momentum * states[0] + (1 - self.dampening) * g)
            g = g + self.momentum * kept if self.nesterov else kept
        p.sub_(self.lr * g)


@dataclass(frozen=True)
class Adagrad:
    """Adagrad (Duchi, Hazan, Singer 2011). State: the sum of squares."""

    lr: float
    lr_decay: float = 0.0
    eps: float = 1e-10
    weight_decay: float = 0.0

    def step(self, p: Tensor, g: Tensor, states: list[Tensor], t: int) -> None:
        """Step ``p`` and its states in place."""
        g = g + self.weight_decay * p
        total = states[0].add_(g * g)
        p.sub_(self.lr / (1 + (t - 1) * self.lr_decay) * g / (total.sqrt() + self.eps))
