"""How ranks tell each other of the sums that gradients are still to be."""

from __future__ import annotations

from collections.abc import Mapping

Sums = Mapping[tuple[tuple[int, ...], int], tuple[str, ...]]
"""Axes of pending sums, by DTensor: the ranks of its mesh, and which of the mesh's parameters it is."""
