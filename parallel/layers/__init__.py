"""Layers whose parameters declare their layout."""
