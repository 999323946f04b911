"""Write the list of tests that the sample on the oldest torch does not need, because other tests execute the same code.

    .venv-oldest/bin/python tests/benchmarks/oldest_sample.py [--processes 2]    # 5 minutes on two idle cores

Run it with the oldest torch. It runs the sample with all tests (profile "oldest-all") in an instrumented copy of the
repository, and records which blocks of the library and of the examples each test executes. It writes to `NOT_ON_OLDEST`
the tests that take over `SECONDS` and execute only blocks of other tests (`without_new_blocks`). A test that was not
recorded stays in the sample: tests of pages, whose code is not recorded, and new and renamed tests until the next call.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

from executed_blocks import ROOT, Record, copy_of_repository, record, without_new_blocks
from properties import NOT_ON_OLDEST

SECONDS = 0.1
TESTS = ("amp", "examples", "gpu", "interop", "mistakes", "optim", "parallel", "docs/test_gpu_suite.py")
CODE = ("amp", "examples", "optim", "parallel")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    os.environ["MESHSTEP_KERNELS"] = "torch"  # as in .ci/run
    with tempfile.TemporaryDirectory() as folder:
        files = [str(path.relative_to(ROOT)) for name in CODE for path in sorted((ROOT / name).rglob("*.py"))]
        to, tests = Path(folder) / "record.json", [f"tests/{name}" for name in TESTS]
        record(copy_of_repository(Path(folder) / "copy"), files, to, options.processes, tests, profile="oldest-all")
        recorded = Record(to)
    seconds = {
        case.partition("[")[0]: taken for case, taken in recorded.seconds.items()
    }  # the sample has one case each
    blocks = {case.partition("[")[0]: hits for case, hits in recorded.hits.items()}
    left_out = without_new_blocks(seconds, blocks, SECONDS)
    NOT_ON_OLDEST.write_text("".join(f"{test}\n" for test in left_out))
    kept = sum(seconds.values()) - sum(seconds[test] for test in left_out)
    print(f"left out: {len(left_out)} of {len(seconds)} tests; seconds kept: {kept:.0f} of {sum(seconds.values()):.0f}")


if __name__ == "__main__":
    main()
