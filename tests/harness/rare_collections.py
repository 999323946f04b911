"""Collect garbage rarely in the process that imports this module, and in its forks.

With the default of 700, garbage collection took an eighth of the time, because most objects of the tests live long.
"""

from __future__ import annotations

import gc

gc.set_threshold(100_000)
