"""Compiled CPU kernels (`csrc/native.c`), called with the addresses of tensors.

The kernels need one pass over memory where torch's kernels need two or more. For norms, elements of the dtypes in
`DTYPES` are converted to float64, and their powers |x|^p are summed (for p = inf, the largest |x| is found). An update
reads the gradient in its own precision, multiplies it by a factor, updates parameter and optimizer states, and writes
the half-precision copy of the parameter. The gradients are unchanged. Stochastic rounding draws its noise from counters
(`rounding`).

The results are bitwise identical for all variants of the loops and all numbers of threads. The kernels don't increase
torch's version counters. A caller that writes to tensors saved by autograd must call
`torch.autograd.graph.increment_version` itself.
"""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

INTERFACE = 7  # must equal the result of `meshstep_interface` in csrc/native.c
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
NORM_TYPES = {1.0: 1, 2.0: 2, inf: 0}
MEAN_OF = 8
"""Number of elements per mean of `Native.means`."""
LINE = 64
"""Bytes of a cache line."""
VARIANTS = ("avx512", "avx512 in turn", "avx2", "avx2 in turn", "plain", "plain in turn")
"""Variants of the loops, named after their instruction sets, the widest one first.

For norms, variants "in turn" read one part of a tensor after the other; the others read several parts at once. Variants
"in turn" prefetch memory near the current address, the others farther ahead. Which one is faster depends on the processor.
"""
NO_MEMORY = "the native CPU kernels of meshstep could not allocate host memory"


class Kind(IntEnum):
    """Formula of an optimizer update: that of Adam and AdamW, of SGD, of Adagrad, or of Lion."""

    ADAM = 0
    SGD = 1
    ADAGRAD = 2
    LION = 3


@dataclass(frozen=True)
class PointerColumns:
    """Addresses of the tensors that one call of a kernel updates, as columns with one row per parameter.

    The address of a missing tensor is 0.

    ``fixed`` has five columns, one after the other: addresses of the parameters, of their first, second and third
    optimizer states, and of their step counts. All gradients have the same dtype. ``rests`` are 16-bit remainders of
    bfloat16 parameters: a parameter and its remainder together are a float32 master weight. ``halves`` or ``rests`` are
    None if no parameter has one.
    """

    fixed: array[int]
    grads: array[int]
    numels: array[int]
    halves: array[int] | None = None
    rests: array[int] | None = None

    @property
    def count(self) -> int:
        return len(self.numels)


class RoundingColumns(NamedTuple):
    """Addresses and noise of the tensors that one call of a kernel rounds, as columns with one row per tensor.

    ``targets`` and ``sources`` are addresses of contiguous bfloat16 and float32 tensors; no tensor is empty. ``numbers``
    has the index of each tensor among the tensors with its noise key.
    """

    targets: array[int]
    sources: array[int]
    numels: array[int]
    keys: array[int]
    numbers: array[int]


class Native:
    """The functions of the compiled library. `powers`, `means`, `update` and `round` return 1 if out of memory, else 0.

    Attributes:
        powers: Writes one float64 per tensor: the sum of |x|^p for p = 1 or 2, or the largest |x| for p = inf.
            Arguments: the number of tensors, the addresses of their address table and of their table of numels, the
            dtype (see `DTYPES`), p (see `NORM_TYPES`), the address of the result, and the number of threads.
        means: Writes the mean of |x|^p for p = 1 or 2 per 8 consecutive elements of each tensor; missing elements at the
            end of a tensor count as zeros. Arguments as in `powers`; not for float64.
        update: Updates parameters and optimizer states if ``found_inf`` is 0. Arguments: the `Kind`, the number of
            rows, the addresses of the columns fixed, grads, halves, rests and numels of a `PointerColumns`, the dtypes
            of gradients and half-precision copies (see `DTYPES`), the address of the hyper-parameters, the factor on
            the gradients (negative to maximize), the address of ``found_inf``, and the number of threads. The
            hyper-parameters are float64. Adam: lr, beta1, beta2, eps, weight decay, decoupled, amsgrad. SGD: lr,
            momentum, dampening, weight decay, nesterov. Adagrad: lr, lr decay, eps, weight decay. Lion: lr, beta1, beta2,
            weight decay.
        round: Rounds float32 tensors to bfloat16 stochastically, with the noise of `rounding`. Arguments: the number
            of tensors, the addresses of the columns of a `RoundingColumns`, the step, and the number of threads.
        evict: Removes memory from the caches of an x86-64 processor; does nothing on others. Arguments: the address and the
            number of bytes.
        variant: The variant of the loops in use (see `VARIANTS`).
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        at, whole, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._take, self.powers, self.update = library.meshstep_take, library.meshstep_powers, library.meshstep_update
        self._take.argtypes, self._take.restype = [ctypes.c_char_p], ctypes.c_char_p
        self.means = library.meshstep_means
        self.powers.argtypes = self.means.argtypes = [whole, at, at, number, number, at, number]
        self.update.argtypes = [number, whole, at, at, at, at, at, number, number, at, ctypes.c_double, at, number]
        self.round = library.meshstep_round
        self.round.argtypes = [whole, at, at, at, at, at, ctypes.c_uint64, number]
        self.evict = library.meshstep_evict
        self.evict.argtypes, self.evict.restype = [at, whole], None
        self.variant = self.take(None)
        self._borrow = library.meshstep_borrow
        self._borrow.argtypes, self._borrow.restype = [at], None
        self.borrow(torchs_threads())

    def take(self, variant: str | None) -> str:
        """Select a variant of the loops and return its name.

        ``variant`` is one of `VARIANTS`; None: the first of them that this machine supports.
        """
        found: bytes | None = self._take(variant.encode() if variant else None)
        if found is None:
            raise ValueError(
                f"the loops {variant!r} are unknown, or this machine does not support them; give one of {VARIANTS} or None"
            )
        self.variant = found.decode()
        return self.variant

    def supported(self) -> list[str]:
        before, found = self.variant, list[str]()
        for name in VARIANTS:
            with suppress(ValueError):
                found.append(self.take(name))
        self.take(before)
        return found

    def take_fastest(self, timed: Callable[[], float] | None = None, rounds: int = 5) -> Mapping[str, float]:
        """Select the fastest supported variant, and return each supported variant's shortest time in seconds.

        The order is that of `VARIANTS`. All variants give bitwise identical results, so ranks may select different ones.
        The first variant within 5 % of the shortest time is selected, because smaller differences are random.
        """
        timed = StepTimer(self) if timed is None else timed
        times = dict.fromkeys(self.supported(), inf)
        for name in [*times] * rounds:
            self.take(name)
            times[name] = min(times[name], timed())
        least = min(times.values())
        self.take(next(name for name, seconds in times.items() if 0.95 * seconds <= least))
        return times

    def borrow(self, parallel: int | None) -> None:
        """Select the threads that `powers`, `means`, `update` and `round` use.

        ``parallel`` is the address of the function ``GOMP_parallel`` of an OpenMP runtime, whose threads are used.
        None: each call creates threads.
        """
        self._borrow(parallel)


class StepTimer:
    """Measures a squared norm and an AdamW update of float32 elements on one thread, by the selected variant.

    A call returns the sum of both times in seconds. Before each of the two operations, it removes the operation's
    tensors from the CPU's caches, because a step usually reads tensors from main memory.
    """

    def __init__(self, native: Native, numel: int = 2**17) -> None:
        self._native, self._bytes = native, 4 * numel
        # Plain memory instead of tensors, because the caller may be in a torch mode that replaces new tensors.
        self._memory = [array("f", [1.0]) * (numel + LINE // 4) for _ in range(4)]
        # Aligned like torch's tensors, because loads that cross cache lines would be slower.
        self._tensors = [-(-address // LINE) * LINE for address, _ in map(array.buffer_info, self._memory)]
        self._step, self._found_inf, self._power = array("f", [1.0]), array("f", [0.0]), array("d", [0.0])
        self._options = array("d", [1e-3, 0.9, 0.999, 1e-8, 0.01, 1.0, 0.0])
        param, first, second, grad = self._tensors
        self._fixed = array("q", [param, first, second, 0, self._step.buffer_info()[0]])
        self._grads, self._numels = array("q", [grad]), array("q", [numel])

    def __call__(self) -> float:
        native, float32 = self._native, DTYPES[torch.float32]
        tables = self._fixed, self._grads, self._numels, self._options, self._found_inf, self._power
        fixed, grads, numels, options, found_inf, power = (table.buffer_info()[0] for table in tables)
        native.evict(self._grads[0], self._bytes)
        start = perf_counter()
        native.powers(1, grads, numels, float32, NORM_TYPES[2.0], power, 1)
        seconds = perf_counter() - start
        for tensor in self._tensors:
            native.evict(tensor, self._bytes)
        start = perf_counter()
        native.update(Kind.ADAM, 1, fixed, grads, None, None, numels, float32, 0, options, 1.0, found_inf, 1)
        return seconds + perf_counter() - start


def torchs_threads() -> int | None:
    """Return the address of ``GOMP_parallel`` in torch's OpenMP runtime; None if it is not found, as on macOS."""
    torchs = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"  # also finds symbols of libraries that it links
    parallel = getattr(ctypes.CDLL(str(torchs)), "GOMP_parallel", None) if torchs.exists() else None
    return None if parallel is None else ctypes.cast(parallel, ctypes.c_void_p).value


def built() -> Native | None:
    """Return the library that was compiled at installation; None if there is none, or if its interface version differs."""
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
