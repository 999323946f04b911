"""Collect garbage as rarely as tests/conftest.py does, in the process that imports this module and in its forks."""

from __future__ import annotations

import gc

gc.set_threshold(100_000)
