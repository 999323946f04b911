"""The spec of a piece: plans, norms and clipping need no exception for sharded states."""

from __future__ import annotations

from ...parallel.layout.spec import P


def piece_spec(spec: P, axes: tuple[str, ...]) -> P:
    """The spec of a piece of a parameter laid out as ``spec``: 1-dim, and sharded over ``axes`` as well."""
    partial = tuple(name for name in spec.partial if name not in axes)
    return P((*spec.sharded_axes, *axes), partial=partial, owned=dict(spec.owned), tied=dict(spec.tied))
