"""Tools to test parallel models: run functions on ranks, prove layouts, compare with a dense model, draw random layouts."""

from ..optim.proof.exact import assert_exact
from ..optim.proof.prove import Finding, Inferred, Proof, infer, prove
from ..parallel.ranks.interface import Ranks, RanksError
from ..parallel.ranks.pool import RankPool
from ..parallel.ranks.run import fake_world, run_ranks

__all__ = [
    "Finding",
    "Inferred",
    "Proof",
    "RankPool",
    "Ranks",
    "RanksError",
    "assert_exact",
    "fake_world",
    "infer",
    "prove",
    "run_ranks",
]
