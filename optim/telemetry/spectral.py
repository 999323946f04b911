"""Largest singular values of sharded matrices, by power iteration.

    u = W v,    w = W^T u,    sigma = |w| / |u|,    v <- w / |w|

Each rank multiplies the rectangles that it contributes, so that replicated elements count once. The products of all
matrices are summed over the world together. v is kept between measurements. So sigma, which is never too large, follows
the weights even with few iterations. A tensor with more than two dims is the matrix [first dim, all other dims].

Reference: Miyato et al. 2018, "Spectral normalization for generative adversarial networks", arXiv:1802.05957, which
also keeps u and v.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...parallel.layout.shard import Box, Region
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.value_checks import check_finite, dict_of
from ..whole.tensors import LogicalTensor, WholeTensors, narrowed
from .labels import world_sum


@dataclass(frozen=True)
class SpectralNorms:
    """Option of `Telemetry` to measure the largest singular values of matrices.

        Telemetry(optimizer, spectral=SpectralNorms(("*.weight",)))

    Args:
        globs: Globs over parameter names; vectors are left out. Default: all matrices.
        iterations: Number of iterations per measurement, >= 1. Default: 2.
    """

    globs: tuple[str, ...] = ("*",)
    iterations: int = 2

    def check(self) -> None:
        """Raise ValueError if an option is out of range."""
        if isinstance(self.iterations, bool) or not isinstance(self.iterations, int) or self.iterations < 1:
            raise ValueError(f"SpectralNorms(iterations={self.iterations!r}): give a whole number >= 1")
        globs: object = self.globs
        if not isinstance(globs, tuple) or not globs:
            raise ValueError(f"SpectralNorms(globs={self.globs!r}): give a tuple of globs, such as ('*.weight',)")


class PowerIteration:
    """Power iteration for the matrices of one plan.

    Args:
        named: Per stepped tensor: the full tensor's name, the stepped tensor, and its region; see `WholeTensors.of`.
        registry: The process groups.
        iterations: Number of iterations per call.
        device: Device of the results.

    Raises:
        ValueError: As `WholeTensors.of`.

    Collectives: as in `WholeTensors.of`.
    Memory: on every rank, one row per matrix; during a call, two rows and one column per matrix.

    Attributes:
        names: Names of the matrices, in the same order on all ranks.
        vectors: v by name: float64, with the shape of all dims except the first, bitwise identical on every rank.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor, Region | None]],
        registry: ProcessGroupRegistry,
        iterations: int,
        device: torch.device,
    ) -> None:
        self.registry, self.iterations, self.device = registry, iterations, device
        self._tensors = WholeTensors.of(named, registry)
        self._matrices = [self._tensors.everything[name] for name in sorted(self._tensors.everything)]
        self._canonical_boxes = [
            (index, position, boxes)
            for index, matrix in enumerate(self._matrices)
            if (boxes := matrix.sources().get(self._tensors.rank))
            for position in self._tensors.positions(matrix)
        ]
        self.names = tuple(matrix.name for matrix in self._matrices)
        self.vectors = {matrix.name: _start(matrix).to(device) for matrix in self._matrices}

    def __call__(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return sigma of each matrix, [matrices] float64.

        Args:
            pieces: The current stepped tensors, in the order of ``named``.

        Collectives: two all-reduces over the world per iteration, for all matrices together.
        Host synchronization: none.
        """
        pieces, found = [piece.detach().contiguous() for piece in pieces], list[Tensor]()
        for _ in range(self.iterations):
            left = self._summed(self._products(pieces, [*self.vectors.values()], transposed=False))
            right = self._summed(self._products(pieces, left, transposed=True))
            lengths = [(_length(w), _length(u)) for w, u in zip(right, left, strict=True)]
            # a matrix of zeros leaves its vector unchanged
            found = [torch.where(u > 0, w / u, torch.zeros_like(u)) for w, u in lengths]
            for (name, v), w, (length, _) in zip([*self.vectors.items()], right, lengths, strict=True):
                self.vectors[name] = torch.where((length > 0) & length.isfinite(), w / length, v)
        return torch.stack(found) if found else torch.zeros(0, dtype=torch.float64, device=self.device)

    def _products(self, pieces: Sequence[Tensor], vectors: Sequence[Tensor], transposed: bool) -> list[Tensor]:
        """Return this rank's contribution to W v, or to W^T u, of each matrix."""
        shapes = [matrix.shape[1:] if transposed else matrix.shape[:1] for matrix in self._matrices]
        results = [torch.zeros(shape, dtype=torch.float64, device=self.device) for shape in shapes]
        for index, position, boxes in self._canonical_boxes:
            for box, part in self._tensors.views(position, pieces[position], boxes):
                row = Box(box.offsets[:1], box.sizes[:1])
                column = Box(box.offsets[1:], box.sizes[1:])
                given, made = (row, column) if transposed else (column, row)
                matrix = part.to(self.device, torch.float64).flatten(1)
                product = (matrix.mT if transposed else matrix) @ narrowed(vectors[index], given).reshape(-1)
                narrowed(results[index], made).add_(product.view(made.sizes))
        return results

    def _summed(self, products: list[Tensor]) -> list[Tensor]:
        if not products:
            return products
        packed = torch.cat([product.reshape(-1) for product in products])
        parts = world_sum(packed, self.registry).split([product.numel() for product in products])
        return [part.view(product.shape) for part, product in zip(parts, products, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the vectors by name, equal on every rank and in every layout."""
        return {name: vector.clone() for name, vector in self.vectors.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the vectors of all matrices that still exist.

        Raises:
            ValueError: A value is no finite tensor; nothing is changed.
        """
        self.check_state(state)
        for name, vector in self.vectors.items():
            if name in state and state[name].shape == vector.shape:
                self.vectors[name] = state[name].to(vector)

    @staticmethod
    def check_state(state: Mapping[str, Any]) -> None:
        """Raise ValueError unless ``state`` maps names to finite tensors."""
        dict_of(check_finite)(state, "spectral")


def _start(matrix: LogicalTensor) -> Tensor:
    """Return a random unit vector, seeded by the matrix's name: equal on every rank and in every layout."""
    generator = torch.Generator().manual_seed(zlib.crc32(matrix.name.encode()))
    vector = torch.randn(matrix.shape[1:], generator=generator, dtype=torch.float64)
    return vector.div_(torch.linalg.vector_norm(vector).clamp_min(1e-300))


def _length(vector: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(vector)
    return length
