"""Arguments of `ParallelOptimizer` for four ways to reduce gradients over the axis "data".

One all-reduces gradients in the step, one already during backward; ZeRO-1 shards states, and ZeRO-2 gradients too.
"""

from __future__ import annotations

from typing import Any

from meshstep.optim import Sharded

ZERO1, ZERO2 = Sharded("data"), Sharded("data", gradients=True)
EXCHANGES: dict[str, dict[str, Any]] = {
    "whole": {},
    "overlap": {"overlap": True},
    "ZeRO-1": {"states": ZERO1},
    "ZeRO-2": {"states": ZERO2},
}
