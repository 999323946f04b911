"""tests/benchmarks/peers.py with the real packages at a small size: the table has a row for each library.

DeepSpeed may refuse fp16 on a processor; then the script prints this instead of the row.
"""

from __future__ import annotations

from pathlib import Path

import forked_python
import pytest
from packages import skip_module_without

skip_module_without("megatron")
skip_module_without("deepspeed")

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "peers.py"
ROWS = ["bare fused AdamW", "Megatron-core", "DeepSpeed", "meshstep, torch's kernels", "meshstep"]


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("flags", ["--ranks 2", pytest.param("--train --layers 1", id="--train")])
def test_peers_benchmark_prints_a_row_for_each_supported_library(flags: str) -> None:
    done = forked_python.run(str(SCRIPT), "--seconds", "0", "--width", "64", "--no-cpu-adam", *flags.split())
    assert done.returncode == 0, done.stdout + done.stderr
    refused = "DeepSpeed refuses fp16 on this processor: no row" in done.stdout
    for precision in ("fp32", "bf16, float32 masters", "fp16, float32 masters"):
        rows = done.stdout.split(f"\n{precision} (")[1].split("\n\n")[0].splitlines()[1:]
        names = [row.rsplit(" ms ")[0].rsplit(maxsplit=1)[0].strip() for row in rows]
        missing = {*ROWS} - {*names}
        assert missing == ({"DeepSpeed"} if refused and precision.startswith("fp16") else set())
        assert all(float(row.split()[-1].removesuffix("x")) > 0 for row in rows)
