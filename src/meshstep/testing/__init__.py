"""Tests of parallel models: functions on several ranks, proofs by the loss, exactness against a dense model, random layouts."""

from ..optim.proof.findings import Finding, Proof
from ..optim.proof.infer import Inferred, infer
from ..optim.proof.prove import prove

__all__ = ["Finding", "Inferred", "Proof", "infer", "prove"]
