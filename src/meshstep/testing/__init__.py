"""Tests of parallel models: functions on several ranks, exactness against a dense model, random layouts."""

from ..optim.proof.exact import assert_exact
from ..parallel.ranks.errors import RanksError
from ..parallel.ranks.fake import fake_world
from ..parallel.ranks.interface import Ranks
from ..parallel.ranks.pool import RankPool
from ..parallel.ranks.run import run_ranks

__all__ = ["RankPool", "Ranks", "RanksError", "assert_exact", "fake_world", "run_ranks"]
