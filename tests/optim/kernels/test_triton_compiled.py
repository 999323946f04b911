"""Triton kernels compiled to PTX without a GPU: checks that the interpreter cannot make."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from interpreted import why_no_triton

pytestmark = pytest.mark.skipif(bool(why_no_triton()), reason=why_no_triton())
INTS, FLOATS, DOUBLES = "*i64", "*fp32", "*fp64"
TABLES = dict.fromkeys(
    ("addresses", "numels", "chunks", "first_chunk", "fixed", "group_of", "rates", "grads", "halves"), INTS
)
TYPES = {**TABLES, "cells": DOUBLES, "out": DOUBLES, "hyper": DOUBLES, "rows": "i32"}
TYPES |= dict.fromkeys(("by_row", "found_inf", "factor"), FLOATS)
SIZES = {"CHUNK": 16384, "BLOCK": 1024}
ADAM = {"KIND": 0, "DECOUPLED": True, "OPTION": 0, "GRAD": 2, "HALF": 2, "SCALED": True}
SGD = {"KIND": 1, "DECOUPLED": False, "OPTION": 2, "GRAD": 3, "HALF": 0, "SCALED": False}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(kernel: Any, constants: dict[str, Any], capability: int = 90, fusion: bool = False) -> str:
    """Return the PTX of the kernel. Pointer arguments are declared as multiples of 16, as in a launch."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime import JITFunction

    if not isinstance(kernel, JITFunction):
        pytest.skip("TRITON_INTERPRET=1: this process interprets the kernels, and compiles none")
    names = list(kernel.arg_names)
    signature = {name: "constexpr" if name in constants else TYPES[name] for name in names}
    pointers = [names.index(name) for name, kind in signature.items() if kind.startswith("*")]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(index,): [["tt.divisibility", 16]] for index in pointers},
    )
    made = compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": fusion})
    return str(made.asm["ptx"])


def count(pattern: str, ptx: str) -> int:
    return len(re.findall(pattern, ptx))


def is_reproducible(ptx: str) -> bool:
    """Return True if the PTX has no atomics, no approximate instructions and no fused float32 multiply-add."""
    return not count(r"\batom\.|\bred\.|\.approx|\bfma\.rn(\.ftz)?\.f32", ptx)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("rule", [ADAM, SGD], ids=["Adam", "SGD"])
def test_triton_update_kernels_use_only_ieee_division_and_square_root(rule: dict[str, Any], capability: int) -> None:
    """The kernel for unaligned addresses has no vector loads or stores, which would be errors on the GPU."""
    from meshstep.optim.kernels import triton_kernels

    aligned, shifted = (
        compiled(triton_kernels.update_chunks, {**rule, "ALIGNED": value, **SIZES}, capability)
        for value in (True, False)
    )
    assert is_reproducible(aligned)
    assert is_reproducible(shifted)
    assert vector_widths("ld", aligned)
    assert vector_widths("ld", shifted) == vector_widths("st", shifted) == set()
    assert (count(r"sqrt\.rn\.f32", shifted) > 0) == (rule is ADAM)
    assert (count(r"div\.rn\.f32", shifted) > 0) == (rule is ADAM)


def test_fused_multiply_add_in_ptx_is_detected() -> None:
    from meshstep.optim.kernels import triton_kernels

    assert not is_reproducible(compiled(triton_kernels.update_chunks, {**ADAM, "ALIGNED": False, **SIZES}, fusion=True))


# Registers, spills, barriers and width of accesses --------------------------------------------------------------------


@dataclass(frozen=True)
class Resources:
    """Resources of a compiled kernel.

    Args:
        registers: Registers per thread.
        spilled: Bytes per thread that are spilled to local memory.
        barriers: Number of barriers in the code.
    """

    registers: int
    spilled: int
    barriers: int

    @property
    def programs(self) -> int:
        """Number of programs of 128 threads whose registers fit into the 65,536 of a multiprocessor."""
        return 65536 // (128 * -(-self.registers // 8) * 8)


def vector_widths(access: str, ptx: str) -> set[int]:
    """Return the bytes per thread of all vector loads ("ld") or vector stores ("st") of global memory.

    The loops over full blocks use vectors. The rest of a chunk uses single elements with predicates.
    """
    found = re.findall(rf"{access}\.global[\w.:]*?\.v(\d)\.[bfu](\d+)", ptx)
    return {int(count) * int(bits) // 8 for count, bits in found}


def resources_of(ptx: str, capability: int, folder: Path) -> Resources:
    """Return the resources of the PTX, as printed by the assembler that Triton uses."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    source = folder / "kernel.ptx"
    source.write_text(ptx)
    command = [get_ptxas(capability).path, "-v", f"--gpu-name={sm_arch_from_capability(capability)}", str(source)]
    done = subprocess.run([*command, "-o", str(folder / "kernel.cubin")], capture_output=True, text=True, check=True)
    registers = re.search(r"Used (\d+) registers", done.stderr)
    assert registers is not None, done.stderr
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", done.stderr)))
    barriers = count(r"\bbar(rier)?\.sync", ptx)
    return Resources(int(registers[1]), spilled, barriers)


NAMES = {0: "float32", 1: "float64", 2: "bfloat16", 3: "float16"}
# KIND, DECOUPLED and OPTION of AdamW, and of the variant of each optimizer that has the most tensors
FORMULAS = {"AdamW": (0, True, 0), "AMSGrad": (0, True, 1), "Nesterov": (1, False, 2), "Adagrad": (2, False, 0)}
CAPABILITIES = [80, 90, 100]


@pytest.mark.default_cases(8)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("power", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
def test_triton_power_kernel_loads_16_bytes_per_thread(dtype: int, power: int, capability: int, tmp_path: Path) -> None:
    """The barriers belong to the sum over the threads, after the loop over a chunk."""
    from meshstep.optim.kernels import triton_kernels

    ptx = compiled(triton_kernels.powers_of_chunks, {"DTYPE": dtype, "POWER": power, **SIZES}, capability)
    assert is_reproducible(ptx)
    found = resources_of(ptx, capability, tmp_path)
    assert found.spilled == 0
    assert found.barriers <= (2 if power == 0 else 4)
    assert found.programs >= 8
    assert vector_widths("ld", ptx) == {16}


@pytest.mark.default_cases(10)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize(("grad", "half"), [*product((0, 2, 3), (0, 2, 3))])
def test_triton_update_kernel_accesses_four_elements_per_thread_without_barriers(
    grad: int, half: int, formula: str, capability: int, tmp_path: Path
) -> None:
    from meshstep.optim.kernels import triton_kernels

    kind, decoupled, option = FORMULAS[formula]
    options = {"KIND": kind, "DECOUPLED": decoupled, "OPTION": option, "GRAD": grad, "HALF": half, "SCALED": True}
    ptx = compiled(triton_kernels.update_chunks, {**options, "ALIGNED": True, **SIZES}, capability)
    assert is_reproducible(ptx)
    found = resources_of(ptx, capability, tmp_path)
    assert (found.spilled, found.barriers) == (0, 0)
    assert found.programs >= 8
    assert vector_widths("ld", ptx) == ({16, 8} if grad else {16})
    assert vector_widths("st", ptx) == ({16, 8} if half else {16})
    assert count(r"(?m)^\s*st\.global(?!\S*\.v[24])", ptx) == 0  # no single-element store without a predicate


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_triton_kernels_for_counts_and_sums_spill_no_registers(capability: int, tmp_path: Path) -> None:
    from meshstep.optim.kernels import triton_kernels

    counts = [{"KIND": kind, "DECOUPLED": kind == 0, "BLOCK": triton_kernels.ROWS} for kind in (0, 1, 2)]
    sums = [{"POWER": power, "BLOCK": triton_kernels.BLOCK} for power in (0, 2)]
    for kernel, variants, barriers in (
        (triton_kernels.count_steps, counts, 0),
        (triton_kernels.sums_of_cells, sums, 2),
    ):
        for constants in variants:
            ptx = compiled(kernel, constants, capability)
            assert is_reproducible(ptx)
            found = resources_of(ptx, capability, tmp_path)
            assert found.spilled == 0
            assert found.barriers <= barriers
            assert found.programs >= 8
