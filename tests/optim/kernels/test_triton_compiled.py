"""Triton kernels compiled to PTX without a GPU: checks that the interpreter cannot make."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from compiled_kernels import CAPABILITIES, Compiled, compile_kernel, resources_of
from interpreted import why_no_triton

pytestmark = pytest.mark.skipif(bool(why_no_triton()), reason=why_no_triton())
SIZES = {"CHUNK": 16384, "BLOCK": 1024}
ADAM = {"KIND": 0, "DECOUPLED": True, "OPTION": 0, "GRAD": 2, "HALF": 2, "SCALED": True}
SGD = {"KIND": 1, "DECOUPLED": False, "OPTION": 2, "GRAD": 3, "HALF": 0, "SCALED": False}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("rule", [ADAM, SGD], ids=["Adam", "SGD"])
def test_division_and_square_root_in_triton_update_kernels_are_ieee_rounded(
    rule: dict[str, Any], capability: int
) -> None:
    """The kernel for unaligned addresses has no vector loads or stores, which would be errors on the GPU."""
    from meshstep.optim.kernels import triton_kernels

    aligned, shifted = (
        compile_kernel(triton_kernels.update_chunks, {**rule, "ALIGNED": value, **SIZES}, capability)
        for value in (True, False)
    )
    assert aligned.is_reproducible()
    assert shifted.is_reproducible()
    assert aligned.vector_widths("ld")
    assert shifted.vector_widths("ld") == shifted.vector_widths("st") == set()
    assert (shifted.count(r"sqrt\.rn\.f32") > 0) == (rule is ADAM)
    assert (shifted.count(r"div\.rn\.f32") > 0) == (rule is ADAM)


@pytest.mark.parametrize(
    "instruction", ["div.full.f32", "div.approx.f32", "sqrt.approx.ftz.f32", "atom.global.add.f32"]
)
def test_approximate_and_atomic_instructions_in_ptx_are_detected(instruction: str) -> None:
    assert Compiled("div.rn.f32 %r1, %r2, %r3;", 0, 90).is_reproducible()
    assert not Compiled(f"{instruction} %r1, %r2, %r3;", 0, 90).is_reproducible()


def test_fused_multiply_add_in_ptx_is_detected() -> None:
    from meshstep.optim.kernels import triton_kernels

    constants = {**ADAM, "ALIGNED": False, **SIZES}
    assert not compile_kernel(triton_kernels.update_chunks, constants, fusion=True).is_reproducible()


# Registers, spills, barriers and width of accesses --------------------------------------------------------------------


NAMES = {0: "float32", 1: "float64", 2: "bfloat16", 3: "float16"}
# KIND, DECOUPLED and OPTION of AdamW, and of the variant of each optimizer that has the most tensors
FORMULAS = {"AdamW": (0, True, 0), "AMSGrad": (0, True, 1), "Nesterov": (1, False, 2), "Adagrad": (2, False, 0)}


@pytest.mark.long
@pytest.mark.default_cases(8)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("power", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
def test_triton_power_kernel_loads_16_bytes_per_thread(dtype: int, power: int, capability: int) -> None:
    """The barriers belong to the sum over the threads, after the loop over a chunk."""
    from meshstep.optim.kernels import triton_kernels

    made = compile_kernel(triton_kernels.powers_of_chunks, {"DTYPE": dtype, "POWER": power, **SIZES}, capability)
    assert made.is_reproducible()
    found = resources_of(made)
    assert found.spilled == 0
    assert found.barriers <= (2 if power == 0 else 4)
    assert found.programs >= 8
    assert made.vector_widths("ld") == {16}


@pytest.mark.long
@pytest.mark.default_cases(10)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize(("grad", "half"), [*product((0, 2, 3), (0, 2, 3))])
def test_triton_update_kernel_accesses_four_elements_per_thread_without_barriers(
    grad: int, half: int, formula: str, capability: int
) -> None:
    from meshstep.optim.kernels import triton_kernels

    kind, decoupled, option = FORMULAS[formula]
    options = {"KIND": kind, "DECOUPLED": decoupled, "OPTION": option, "GRAD": grad, "HALF": half, "SCALED": True}
    made = compile_kernel(triton_kernels.update_chunks, {**options, "ALIGNED": True, **SIZES}, capability)
    assert made.is_reproducible()
    found = resources_of(made)
    assert (found.spilled, found.barriers) == (0, 0)
    assert found.programs >= 8
    assert made.vector_widths("ld") == ({16, 8} if grad else {16})
    assert made.vector_widths("st") == ({16, 8} if half else {16})
    assert made.count(r"(?m)^\s*st\.global(?!\S*\.v[24])") == 0  # no single-element store without a predicate


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_triton_kernels_for_counts_and_sums_spill_no_registers(capability: int) -> None:
    from meshstep.optim.kernels import triton_kernels

    counts = [{"KIND": kind, "DECOUPLED": kind == 0, "BLOCK": triton_kernels.ROWS} for kind in (0, 1, 2)]
    sums = [{"POWER": power, "BLOCK": triton_kernels.BLOCK} for power in (0, 2)]
    for kernel, variants, barriers in (
        (triton_kernels.count_steps, counts, 0),
        (triton_kernels.sums_of_cells, sums, 2),
    ):
        for constants in variants:
            made = compile_kernel(kernel, constants, capability)
            assert made.is_reproducible()
            found = resources_of(made)
            assert found.spilled == 0
            assert found.barriers <= barriers
            assert found.programs >= 8
