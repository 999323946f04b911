"""Triton kernels compiled to PTX without a GPU, and their registers, spills, barriers and widths of memory accesses."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

INTS, FLOATS, DOUBLES = "*i64", "*fp32", "*fp64"
TYPES = dict.fromkeys(
    ("addresses", "numels", "chunks", "first_chunk", "fixed", "group_of", "rates", "grads", "halves"), INTS
)
TYPES |= dict.fromkeys(("targets", "sources", "keys", "numbers"), INTS)
TYPES |= dict.fromkeys(("cells", "out", "hyper"), DOUBLES)
TYPES |= dict.fromkeys(("by_row", "found_inf", "factor"), FLOATS)
TYPES |= dict.fromkeys(("rows", "step"), "i32")
CAPABILITIES = [80, 90, 100]


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    Args:
        ptx: The PTX code.
        shared: Bytes of shared memory per program.
        capability: Compute capability of the GPU, such as 90.
    """

    ptx: str
    shared: int
    capability: int

    def count(self, pattern: str) -> int:
        """Return the number of matches of a regular expression in the PTX."""
        return len(re.findall(pattern, self.ptx))

    def is_reproducible(self) -> bool:
        """Return True if the PTX has no atomics, no approximate instructions and no fused float32 multiply-add."""
        return not self.count(r"\batom\.|\bred\.|\.approx|\bdiv\.full|\bfma\.rn(\.ftz)?\.f32")

    def vector_widths(self, access: str) -> set[int]:
        """Return the bytes per thread of all vector loads ("ld") or vector stores ("st") of global memory.

        The loops over full blocks use vectors. The rest of a chunk uses single elements with predicates.
        """
        found = re.findall(rf"{access}\.global[\w.:]*?\.v(\d)\.[bfu](\d+)", self.ptx)
        return {int(count) * int(bits) // 8 for count, bits in found}


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


def compile_kernel(kernel: Any, constants: dict[str, Any], capability: int = 90, fusion: bool = False) -> Compiled:
    """Return the compiled kernel. Pointer arguments are declared as multiples of 16, as in a launch."""
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
    return Compiled(str(made.asm["ptx"]), made.metadata.shared, capability)


def resources_of(compiled: Compiled) -> Resources:
    """Return the registers and spills that Triton's assembler prints for a kernel, and the barriers in its PTX."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    architecture = f"--gpu-name={sm_arch_from_capability(compiled.capability)}"
    with TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(compiled.ptx)
        command = [get_ptxas(compiled.capability).path, "-v", architecture, str(source), "-o", str(target)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", printed)
    assert registers is not None, printed
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", printed)))
    return Resources(int(registers[1]), spilled, compiled.count(r"\bbar(rier)?\.sync"))
