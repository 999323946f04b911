"""Split all 2^32 float32 masters into bfloat16 weights and 16-bit remainders, join them, and count exact results.

    python tests/benchmarks/split_masters.py [--chunk 17]

Takes some minutes on one core. The table has one row per kind of master. Its columns count: masters; masters restored
bitwise; weights equal to rounding to nearest even; ties rounded the other way; weights that are NaN, infinite and finite.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

import torch
from meshstep.amp.master_weights import join_master, split_master
from torch import Tensor

KINDS = ("finite", "infinite", "quiet NaN", "signalling NaN")
COLUMNS = ("masters", "same bits", "as to even", "ties", "weight NaN", "inf", "finite")
QUIET = 0x400000


def masks_of(master: Tensor) -> dict[str, Tensor]:
    """Return a mask per kind of master; all masters have the same exponent."""
    if bool(master[0].isfinite()):
        return {"finite": torch.ones_like(master, dtype=torch.bool)}
    nan, quiet = master.isnan(), master.view(torch.int32) & QUIET != 0
    return {"infinite": master.isinf(), "quiet NaN": nan & quiet, "signalling NaN": nan & ~quiet}


def count(start: int, length: int) -> Counter[tuple[str, str]]:
    """Count results per kind of master, for the masters with the ``length`` bit patterns from ``start``."""
    bits = torch.arange(length, dtype=torch.int32).add_(start - (start >> 31 << 32))
    master = bits.view(torch.float32)
    weight, remainder = split_master(master)
    even = master.bfloat16()
    as_even = weight.view(torch.int16) == even.view(torch.int16)
    as_even |= weight.isnan() & even.isnan()
    total: Counter[tuple[str, str]] = Counter()
    for kind, mask in masks_of(master).items():
        found = {
            "masters": mask,
            "same bits": join_master(weight, remainder).view(torch.int32) == bits,
            "as to even": as_even,
            "ties": ~as_even & (remainder == -(2**15)) & master.isfinite(),
            "weight NaN": weight.isnan(),
            "inf": weight.isinf(),
            "finite": weight.isfinite(),
        }
        total.update({(kind, name): int((mask & values).count_nonzero()) for name, values in found.items()})
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunk", type=int, default=17, help="2^chunk masters at a time, at most 2^23")
    parser.add_argument("--every", type=int, default=1, help="count one of this many chunks")
    arguments = parser.parse_args()
    length = 2**arguments.chunk
    torch.set_num_threads(1)
    began, total = time.perf_counter(), Counter[tuple[str, str]]()
    for start in range(0, 2**32, arguments.every * length):
        total.update(count(start, length))
    print(f"torch {torch.__version__}, {time.perf_counter() - began:.0f} s")
    print(f"{'':14}" + "".join(f"{name:>15}" for name in COLUMNS))
    for kind in KINDS:
        print(f"{kind:14}" + "".join(f"{total[kind, name]:15,}" for name in COLUMNS))
    print(f"{'all':14}" + "".join(f"{sum(total[kind, name] for kind in KINDS):15,}" for name in COLUMNS))


if __name__ == "__main__":
    main()
