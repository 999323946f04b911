"""Tools to test parallel models: run functions on ranks, check layouts, and compare a model with the dense model."""

from typing import TYPE_CHECKING

from ..optim.proof.exact import assert_exact
from ..optim.proof.prove import Finding, InferredLayout, Proof, infer, prove
from ..parallel.interop.audit import audit
from ..parallel.mesh.deprecation import renamed_objects
from ..parallel.ranks.interface import Ranks, RanksError
from ..parallel.ranks.pool import RankPool
from ..parallel.ranks.run import fake_world, run_ranks

__all__ = [
    "Finding",
    "InferredLayout",
    "Proof",
    "RankPool",
    "Ranks",
    "RanksError",
    "assert_exact",
    "audit",
    "fake_world",
    "infer",
    "prove",
    "run_ranks",
]

if not TYPE_CHECKING:  # hidden from type checkers, so that they report former names as errors
    __getattr__ = renamed_objects(__name__, {"Inferred": InferredLayout})
