"""Triton kernels compiled to PTX without a GPU: checks that the interpreter cannot make."""

from __future__ import annotations

import re
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
    """Return the PTX of the kernel."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime import JITFunction

    if not isinstance(kernel, JITFunction):
        pytest.skip("TRITON_INTERPRET=1: this process interprets the kernels, and compiles none")
    names = list(kernel.arg_names)
    signature = {name: "constexpr" if name in constants else TYPES[name] for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    made = compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": fusion})
    return str(made.asm["ptx"])


def count(pattern: str, ptx: str) -> int:
    return len(re.findall(pattern, ptx))


def is_reproducible(ptx: str) -> bool:
    """Return True if the PTX has no atomics, no approximate instructions and no fused float32 multiply-add."""
    return not count(r"\batom\.|\bred\.|\.approx|\bfma\.rn(\.ftz)?\.f32", ptx)


@pytest.mark.parametrize(("power", "capability"), [(0, 90), (2, 80), (2, 90)])
def test_triton_power_kernels_compile_without_atomics(power: int, capability: int) -> None:
    from meshstep.optim.kernels import triton_kernels

    ptx = compiled(triton_kernels.powers_of_chunks, {"DTYPE": 2, "POWER": power, **SIZES}, capability)
    assert is_reproducible(ptx)
    assert is_reproducible(compiled(triton_kernels.sums_of_cells, {"POWER": power, "BLOCK": 1024}, capability))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("rule", [ADAM, SGD], ids=["Adam", "SGD"])
def test_triton_update_kernels_compile_to_ieee_division_and_square_root(rule: dict[str, Any], capability: int) -> None:
    """Aligned addresses use vectors of four and unaligned addresses no vectors, because an unaligned vector access
    is an error on the GPU."""
    from meshstep.optim.kernels import triton_kernels

    aligned, shifted = (
        compiled(triton_kernels.update_chunks, {**rule, "ALIGNED": value, **SIZES}, capability)
        for value in (True, False)
    )
    assert is_reproducible(aligned)
    assert is_reproducible(shifted)
    assert count(r"ld\.global\S*\.v4", aligned) > 0
    assert count(r"st\.global\S*\.v4", aligned) > 0
    assert count(r"(ld|st)\.global\S*\.v[248]", shifted) == 0
    assert (count(r"sqrt\.rn\.f32", shifted) > 0) == (rule is ADAM)
    assert (count(r"div\.rn\.f32", shifted) > 0) == (rule is ADAM)
    for kind in (0, 1, 2):
        rows = {"KIND": kind, "DECOUPLED": kind == 0, "BLOCK": 128}
        assert is_reproducible(compiled(triton_kernels.count_steps, rows, capability))


def test_fused_multiply_add_in_ptx_is_detected() -> None:
    from meshstep.optim.kernels import triton_kernels

    assert not is_reproducible(compiled(triton_kernels.update_chunks, {**ADAM, "ALIGNED": False, **SIZES}, fusion=True))
