"""Tensor-parallel layers whose parameters declare their layout."""
