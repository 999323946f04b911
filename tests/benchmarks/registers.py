"""Print the registers, barriers and memory accesses of the Triton kernels, compiled for three architectures without a GPU.

python tests/benchmarks/registers.py

registers   per thread, one figure per architecture
spilled     bytes per thread in local memory, the largest of the architectures
barriers    in the code of the kernel, the largest of the architectures
load, store bytes per thread of each vector access
programs    of 128 threads that fit into the registers of a multiprocessor, the smallest of the architectures
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

from compiled_kernels import CAPABILITIES, compile_kernel, resources_of

HEADER = [
    "kernel",
    *(f"registers, `sm_{capability}`" for capability in CAPABILITIES),
    "spilled",
    "barriers",
    "load",
    "store",
    "programs",
]


def kernels() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return the rows of the table: a kernel and its compile-time arguments."""
    from meshstep.optim.kernels import triton_kernels
    from meshstep.optim.kernels import triton_rounding_kernel as rounding

    sizes = {"CHUNK": triton_kernels.CHUNK, "BLOCK": triton_kernels.BLOCK}
    dtypes = {"float32": 0, "float64": 1, "bfloat16": 2, "float16": 3}

    def powers(dtype: str, power: int) -> tuple[Any, dict[str, Any]]:
        return triton_kernels.powers_of_chunks, {"DTYPE": dtypes[dtype], "POWER": power, **sizes}

    def update(kind: int, option: int, grad: str, half: str) -> tuple[Any, dict[str, Any]]:
        formula = {"KIND": kind, "DECOUPLED": kind == 0, "OPTION": option}
        tensors = {"GRAD": dtypes[grad], "HALF": dtypes.get(half, 0), "SCALED": True, "ALIGNED": True}
        return triton_kernels.update_chunks, {**formula, **tensors, **sizes}

    return {
        "norm, float32": powers("float32", 2),
        "norm, bfloat16": powers("bfloat16", 2),
        "norm, float16": powers("float16", 2),
        "norm, float64": powers("float64", 2),
        "largest element, float32": powers("float32", 0),
        "sums of the chunks of a norm": (triton_kernels.sums_of_cells, {"POWER": 2, "BLOCK": triton_kernels.BLOCK}),
        "AdamW, float32": update(0, 0, "float32", ""),
        "AdamW, bfloat16 gradients and weights": update(0, 0, "bfloat16", "bfloat16"),
        "AdamW, float16 gradients and weights": update(0, 0, "float16", "float16"),
        "AMSGrad, bfloat16 gradients and weights": update(0, 1, "bfloat16", "bfloat16"),
        "SGD with Nesterov momentum, float32": update(1, 2, "float32", ""),
        "Adagrad, float32": update(2, 0, "float32", ""),
        "step counts and rates of AdamW": (
            triton_kernels.count_steps,
            {"KIND": 0, "DECOUPLED": True, "BLOCK": triton_kernels.ROWS},
        ),
        "stochastic rounding": (
            rounding.round_chunks,
            {"ALIGNED": True, "LANES": rounding.LANES, "ROWS": rounding.ROWS, "CHUNK": rounding.CHUNK},
        ),
    }


def row(name: str) -> list[str]:
    """Return the cells of a row of the table."""
    compiled = [compile_kernel(*kernels()[name], capability) for capability in CAPABILITIES]
    found = [resources_of(one) for one in compiled]
    loads, stores = (set[int]().union(*(one.vector_widths(access) for one in compiled)) for access in ("ld", "st"))
    return [
        name,
        *(str(one.registers) for one in found),
        str(max(one.spilled for one in found)),
        str(max(one.barriers for one in found)),
        *(", ".join(map(str, sorted(widths, reverse=True))) for widths in (loads, stores)),
        str(min(one.programs for one in found)),
    ]


def main() -> None:
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    for name in kernels():
        print(f"| {' | '.join(row(name))} |")


if __name__ == "__main__":
    main()
