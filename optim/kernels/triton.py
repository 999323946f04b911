"""Launcher of the Triton kernels, which compute the same formulas as the compiled CPU kernels.

The kernels were tested on an NVIDIA H100. On a CPU, tests use Triton's interpreter: if the environment has
``TRITON_INTERPRET=1`` before triton is imported, the kernels run on CPU tensors, slowly. Otherwise they run on GPU
tensors.
"""

from __future__ import annotations

import sys
from array import array
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import inf, log
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime import JITFunction

from . import triton_kernels, triton_rounding_kernel
from .device_constants import Tables
from .memory import PLAIN, in_memory_order
from .native import DTYPES, Kind, PointerColumns, RoundingColumns

MOST = 11  # largest supported finite p (integers only). For `norm.powers.HIGH` = 12 <= p < inf, callers use other code


@dataclass(frozen=True)
class KernelLaunch:
    """The parameters of one param group to update, with gradients of one dtype.

    The step counts in ``columns`` are float32, on the device. ``hyper`` has the order of `native.Native.update`.
    ``rate`` is the learning rate as a float32 or float64 tensor on the device; None: the learning rate in ``hyper``.
    ``half_dtype`` is ignored if ``columns`` has no half-precision copies.
    """

    columns: PointerColumns
    hyper: Sequence[float]
    rate: Tensor | None
    maximize: bool
    grad_dtype: torch.dtype
    half_dtype: torch.dtype


class Variant(NamedTuple):
    """Compile-time arguments DECOUPLED, OPTION, GRAD and HALF of `triton_kernels.update_chunks`."""

    decoupled: bool
    option: int
    grad: int
    half: int


class Together(NamedTuple):
    """The parameters of several `KernelLaunch` objects, concatenated for one launch.

    Per parameter, ``group_of`` has the index of its object, and ``fixed``, ``grads``, ``halves`` and ``numels`` have
    the addresses and numbers of elements, as in `PointerColumns`. Per object, ``hyper`` has the hyper-parameters.
    ``rates`` has the address of the learning rate tensor (0: none) and 1 if it is float64, else 0.
    """

    fixed: array[int]
    grads: array[int]
    halves: array[int]
    numels: array[int]
    group_of: array[int]
    hyper: array[float]
    rates: array[int]


class Triton:
    """The Triton kernels of this process."""

    def __init__(self) -> None:
        self.version = str(triton.__version__)
        self.interpreted = not isinstance(triton_kernels.powers_of_chunks, JITFunction)
        self._tables = Tables()
        self._rounding_tables = Tables()  # apart, because a step that rounds needs many tables for its buckets

    def runs_on(self, device: torch.device) -> bool:
        return device.type == ("cpu" if self.interpreted else "cuda")

    def powers(self, tensors: Sequence[Tensor], norm_type: float) -> Tensor | None:
        """Return the sum of |x|^p of each tensor, or for p = inf the largest |x|: [n] float64, on the tensors' device.

        None: p is neither an integer from 1 to `MOST` nor inf, or the dtypes or the class of a tensor are not
        supported.
        """
        power = 0 if norm_type == inf else int(norm_type) if norm_type in range(1, MOST + 1) else None
        dtypes = {tensor.dtype for tensor in tensors}
        if power is None or len(dtypes) > 1 or not dtypes <= DTYPES.keys() or not {*map(type, tensors)} <= PLAIN:
            return None
        device, dtype = tensors[0].device, DTYPES[dtypes.pop()]
        tensors = [tensor if tensor.is_contiguous() else in_memory_order(tensor) for tensor in tensors]
        with _on(device):
            found_at = array("Q", [tensor.data_ptr() for tensor in tensors])
            if 0 in found_at:  # a tensor without elements, or a zero tensor of autograd, which has no memory
                tensors = [tensor.clone() if tensor._is_zerotensor() else tensor for tensor in tensors]
                found_at = array("Q", [tensor.data_ptr() for tensor in tensors])
            addresses = self._tables.of(found_at, device)
            numels = array("q", [tensor.numel() for tensor in tensors])
            cut = self._tables.chunks_of(numels, triton_kernels.CHUNK, device)
            cells = torch.empty(cut.count, dtype=torch.float64, device=device)
            found = torch.empty(len(tensors), dtype=torch.float64, device=device)
            block = triton_kernels.BLOCK
            if cut.count:
                triton_kernels.powers_of_chunks[(cut.count,)](
                    addresses,
                    cut.numels,
                    cut.chunks,
                    cells,
                    dtype,
                    power,
                    triton_kernels.CHUNK,
                    block,
                    enable_fp_fusion=False,
                )
            triton_kernels.sums_of_cells[(len(tensors),)](cells, cut.first, found, power, block, enable_fp_fusion=False)
        return found

    def update(self, kind: Kind, parts: Sequence[KernelLaunch], found_inf: Tensor, factor: Tensor | None) -> None:
        """Update float32 parameters and their optimizer states if ``found_inf`` is 0."""
        alike: defaultdict[Variant, list[KernelLaunch]] = defaultdict(list)
        for part in parts:
            if part.columns.count:
                alike[_variant(kind, part)].append(part)
        with _on(found_inf.device):
            for variant, of_variant in alike.items():
                self._launch(kind, variant, of_variant, found_inf, factor)

    def _launch(
        self, kind: Kind, variant: Variant, parts: list[KernelLaunch], found_inf: Tensor, factor: Tensor | None
    ) -> None:
        device, together = found_inf.device, _together(kind, parts)
        rows = len(together.numels)
        of, cut = self._tables.of, self._tables.chunks_of(together.numels, triton_kernels.CHUNK, device)
        tables = of(together.fixed, device), of(together.grads, device), of(together.halves, device)
        groups, numbers = of(together.group_of, device), of(together.hyper, device)
        own_rates = of(together.rates, device)
        by_row = torch.empty(rows * triton_kernels.BY_ROW, dtype=torch.float32, device=device)
        triton_kernels.count_steps[(-(-rows // triton_kernels.ROWS),)](
            tables[0],
            groups,
            numbers,
            own_rates,
            found_inf,
            by_row,
            rows,
            int(kind),
            variant.decoupled,
            triton_kernels.ROWS,
        )
        if not cut.count:
            return
        scaled = factor is not None
        triton_kernels.update_chunks[(cut.count,)](
            *tables,
            cut.numels,
            cut.chunks,
            groups,
            numbers,
            by_row,
            found_inf,
            factor if scaled else found_inf,
            rows,
            int(kind),
            *variant,
            scaled,
            _are_aligned(together.fixed[: 4 * rows], 16)
            and _are_aligned(together.grads, 8 if variant.grad else 16)
            and _are_aligned(together.halves, 8),
            triton_kernels.CHUNK,
            triton_kernels.BLOCK,
            enable_fp_fusion=False,
        )

    def round(self, columns: RoundingColumns, step: int, device: torch.device) -> None:
        """Round float32 tensors on ``device`` to bfloat16 stochastically, with one launch and the noise of `rounding`."""
        of, kernels = self._rounding_tables.of, triton_rounding_kernel
        with _on(device):
            cut = self._rounding_tables.chunks_of(columns.numels, kernels.CHUNK, device)
            kernels.round_chunks[(cut.count,)](
                of(columns.targets, device),
                of(columns.sources, device),
                cut.numels,
                cut.chunks,
                of(columns.keys, device),
                of(columns.numbers, device),
                step,
                _are_aligned(columns.targets, 16) and _are_aligned(columns.sources, 16),
                kernels.LANES,
                kernels.ROWS,
                kernels.CHUNK,
            )


def _variant(kind: Kind, part: KernelLaunch) -> Variant:
    half = 0 if part.columns.halves is None else DTYPES[part.half_dtype]
    decoupled, option = False, 0
    if kind == Kind.ADAM:
        decoupled, option = bool(part.hyper[5]), int(part.hyper[6])
    elif kind == Kind.SGD and part.hyper[1]:
        option = 2 if part.hyper[4] else 1
    return Variant(decoupled, option, DTYPES[part.grad_dtype], half)


def _together(kind: Kind, parts: Sequence[KernelLaunch]) -> Together:
    found = Together(array("Q"), array("Q"), array("Q"), array("q"), array("q"), array("d"), array("q"))
    for column in range(5):
        for part in parts:
            found.fixed.extend(part.columns.fixed[column * part.columns.count : (column + 1) * part.columns.count])
    for index, part in enumerate(parts):
        found.grads.extend(part.columns.grads)
        found.halves.extend(part.columns.halves or [0] * part.columns.count)
        found.numels.extend(part.columns.numels)
        found.group_of.extend([index] * part.columns.count)
        found.hyper.extend(_hyper(kind, part))
        rate = part.rate
        found.rates.extend([0, 0] if rate is None else [rate.data_ptr(), rate.dtype == torch.float64])
    return found


def _hyper(kind: Kind, part: KernelLaunch) -> array[float]:
    """Return one row of the kernels' argument ``hyper``: the `triton_kernels.HYPER` numbers of a param group.

    The numbers are five hyper-parameters (0 for a missing one), log(beta1) and log(beta2) for Adam or zeros, and -1 if the
    optimizer maximizes, else 1.
    """
    hyper = part.hyper
    logs = [log(beta) if beta else -inf for beta in hyper[1:3]] if kind == Kind.ADAM else [0.0, 0.0]
    own = [*hyper[:5], *[0.0] * (5 - len(hyper[:5]))]
    return array("d", [*own, *logs, -1.0 if part.maximize else 1.0])


def _are_aligned(addresses: array[int], size: int) -> bool:
    """Return True if all addresses are multiples of ``size``, a power of two up to 256.

    Only the lowest byte of each address is read, because many addresses are checked in each step.
    """
    last = slice(None, None, 8) if sys.byteorder == "little" else slice(7, None, 8)
    return all(byte % size == 0 for byte in set(addresses.tobytes()[last]))


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which ``device`` is the current GPU, on which Triton launches. It does nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
