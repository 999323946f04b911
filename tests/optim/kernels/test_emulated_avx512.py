"""The AVX-512 variant of the compiled loops on a machine without AVX-512: its intrinsics are replaced by AVX2 code.

This shows that the source has the right elements in the right order. It does not show that the machine code for AVX-512
is right, which the other tests of this folder show on a machine with AVX-512.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from loops import instructions_here
from meshstep.optim.kernels import native

SOURCES = Path(native.__file__).parent / "csrc"
HEADER = Path(__file__).with_name("emulated_avx512.h")
FLAGS = ("-shared", "-fPIC", "-O1", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", "-pthread")
REPLACED = {
    "loops.h": {"avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,prefer-vector-width=512": "avx2,f16c,fma"},
    "native.c": {
        "#include <immintrin.h>": f'#include <immintrin.h>\n#include "{HEADER}"',
        '__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&': "",
        '__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && ': "",
    },
}
FILES = ("test_native_powers.py", "test_native_updates.py", "test_native_rounding.py")
RUN = """
import sys
import pytest
from meshstep.optim.kernels import choice, native

loops = native.Native(sys.argv[1])
assert loops.supported() == ["avx512", "avx2", "plain"], loops.supported()
native.built = choice._found = lambda: loops
options = ["-n", "0", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
sys.exit(pytest.main([*options, "-k", "not interface_version", *sys.argv[2:]]))
"""


def library_with(folder: Path, *flags: str) -> Path:
    """Compile the loops with emulated intrinsics, and return the path of the library."""
    for name, changes in REPLACED.items():
        source = (SOURCES / name).read_text()
        for old, new in changes.items():
            assert source.count(old) == 1, f"{name} has {source.count(old)} times {old!r}"
            source = source.replace(old, new)
        (folder / name).write_text(source)
    library = folder / "_native_emulated.so"
    subprocess.run(["gcc", *FLAGS, *flags, str(folder / "native.c"), "-o", str(library), "-lm"], check=True)
    return library


def run(library: Path, files: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, str(library), *(str(Path(__file__).with_name(name)) for name in files)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in instructions_here(), reason="the emulation needs AVX2")
@pytest.mark.skipif("avx512" in instructions_here(), reason="this machine has AVX-512, so the tests run it")
def test_avx512_loops_with_emulated_intrinsics_are_bitwise_identical_to_other_instruction_sets(tmp_path: Path) -> None:
    found = run(library_with(tmp_path), FILES)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    control = run(library_with(tmp_path, "-DSWAPPED"), FILES[:1])
    assert control.returncode == 1, control.stdout[-4000:] + control.stderr[-2000:]
    for test in ("power_sums", "chunk_means"):
        assert f"test_compiled_{test}_are_bitwise_identical_for_all_instruction_sets" in control.stdout
