"""The AVX-512 variant of the compiled loops on a machine without AVX-512: its intrinsics are replaced by AVX2 code.

These tests show that the source handles the right elements in the right order. They do not show that the machine code
for AVX-512 is right; the tests of `FILES` show that on a machine with AVX-512.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from loops import variants_here
from native_library import SOURCES, compiled, run_tests

HEADER = Path(__file__).with_name("emulated_avx512.h")
REPLACED = {
    "loops.h": {"avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,prefer-vector-width=512": "avx2,f16c,fma"},
    "native.c": {
        "#include <immintrin.h>": f'#include <immintrin.h>\n#include "{HEADER}"',
        '__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&': "",
        '__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && ': "",
    },
}
FILES = ("test_native_powers.py", "test_native_updates.py", "test_native_rounding.py")
HAS_AVX512 = 'assert loops.supported()[:4] == ["avx512", "avx512 in turn", "avx2", "avx2 in turn"], loops.supported()'


def library_with(folder: Path, *flags: str) -> Path:
    """Compile the loops with emulated intrinsics, and return the path of the library."""
    for name, changes in REPLACED.items():
        source = (SOURCES / name).read_text()
        for old, new in changes.items():
            assert source.count(old) == 1, f"{name} contains {old!r} {source.count(old)} times"
            source = source.replace(old, new)
        (folder / name).write_text(source)
    return compiled(folder / "native.c", folder / "_native_emulated.so", *flags)


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in variants_here(), reason="the emulation needs AVX2")
@pytest.mark.skipif("avx512" in variants_here(), reason="on this machine, the other tests run the AVX-512 loops")
def test_avx512_loops_with_emulated_intrinsics_are_bitwise_identical_to_other_instruction_sets(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    files = [str(Path(__file__).with_name(name)) for name in FILES]
    chosen = ("-k", "not interface_version")
    found = run_tests(library_with(tmp_path), environment, *chosen, *files, before=HAS_AVX512)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    control = run_tests(library_with(tmp_path, "-DSWAPPED"), environment, *chosen, files[0], before=HAS_AVX512)
    assert control.returncode == 1, control.stdout[-4000:] + control.stderr[-2000:]
    for test in ("power_sums", "chunk_means"):
        assert f"test_native_loop_{test}_are_bitwise_identical_for_all_loop_variants" in control.stdout
