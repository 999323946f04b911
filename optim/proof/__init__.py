"""Proof that a parallel model computes what it should, with a dense model to compare with and without one."""
