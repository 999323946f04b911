"""Matrices on the sides of a matrix: statistics of its rows and of its columns, their bases and roots (Shampoo, SOAP)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...parallel.layout.pieces import Shape

Sides = Sequence[Tensor | None]
"""For each dim of a tensor a matrix of its size; None where it has no preconditioner."""

FACTORISATION = 40.0
"""What a QR of a matrix [n, n] and the product before it cost, in n^3 of a matrix product's."""


def sides_of(shape: Shape) -> Shape:
    """The dims that may have preconditioners: of a stack's matrix, its last two."""
    return tuple(shape[1:]) if len(shape) == 3 else tuple(shape)


def gram(g: Tensor, dim: int) -> Tensor:
    """[side, side]: the products of its slices along a dim."""
    rows = g.movedim(dim, 0).flatten(1)
    return rows @ rows.mT


def into(x: Tensor, bases: Sides) -> Tensor:
    """In the coordinates of the bases: Q_L^T X Q_R."""
    for q in bases:
        x = x.movedim(0, -1) if q is None else torch.tensordot(x, q, ([0], [0]))
    return x


def out_of(x: Tensor, bases: Sides) -> Tensor:
    """Back from there: Q_L X Q_R^T."""
    return into(x, [None if q is None else q.mT for q in bases])


def eigenvectors(symmetric: Tensor) -> Tensor:
    """In columns, that of the largest eigenvalue first. What is not finite, in a step that is skipped, has any."""
    finite = torch.isfinite(symmetric).all()
    eye = torch.eye(symmetric.size(0), dtype=symmetric.dtype, device=symmetric.device)
    found: Tensor = torch.linalg.eigh(torch.where(finite, symmetric, eye)).eigenvectors
    return found.flip(1)


def renewed(symmetric: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """A basis after one step of power iteration, and in which order it has the old one's columns."""
    product = symmetric @ basis
    order = torch.argsort((basis * product).sum(0), descending=True)
    return torch.linalg.qr(product[:, order])[0], order


def inverse_root(symmetric: Tensor, order: int, epsilon: float) -> Tensor:
    """(S + epsilon)^(-1 / order), of a matrix without negative eigenvalues but by rounding. What is not finite has any."""
    finite = torch.isfinite(symmetric).all()
    eye = torch.eye(symmetric.size(0), dtype=symmetric.dtype, device=symmetric.device)
    values, vectors = torch.linalg.eigh(torch.where(finite, symmetric, eye))
    root: Tensor = (vectors * (values.clamp(min=0) + epsilon).pow(-1 / order)) @ vectors.mT
    return root
