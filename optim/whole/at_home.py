"""Base class of optimizers that keep one full matrix state on the matrix's owner rank only.

The state is stored under the first shard of the tensor that the owner rank holds. Its key is "<name>.<number of the
matrix>", followed by ".<index>" if there are several of one name. It belongs to the full tensor: a checkpoint contains
it once, and after loading in any layout the matrix's owner rank there receives it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...parallel.layout.shard import Box, Shape
from ...parallel.layout.spec import P
from ...parallel.mesh.agreement import gather_objects
from ..states.chain import params_of
from .exchange import Homes, Matrix
from .layout import Blocks, LogicalTensor, matrices_of
from .optimizer import Slot, WholeOptimizer
from .tensors import WholeTensors

# Preconditioners ------------------------------------------------------------------------------------------------------

# Statistics of the rows and of the columns of a matrix, with their eigenbases and roots (Shampoo, SOAP).

Sides = Sequence[Tensor | None]
"""Per dim of a tensor, a square matrix of the dim's size; None for a dim without preconditioner."""

FACTORISATION = 40.0
"""Cost of a QR decomposition of a matrix [n, n] and the product before it, in operations of a matrix product per n^3."""


def sides_of(shape: Shape) -> Shape:
    """Return the sizes of the dims that may have preconditioners: the last two for a stack of matrices, else all."""
    return tuple(shape[1:]) if len(shape) == 3 else tuple(shape)


def gram(g: Tensor, dim: int) -> Tensor:
    """Return the Gram matrix [side, side] of the slices along ``dim``."""
    rows = g.movedim(dim, 0).flatten(1)
    return rows @ rows.mT


def into(x: Tensor, bases: Sides) -> Tensor:
    """Return ``x`` in the coordinates of the bases: Q_L^T X Q_R."""
    for q in bases:
        x = x.movedim(0, -1) if q is None else torch.tensordot(x, q, ([0], [0]))
    return x


def out_of(x: Tensor, bases: Sides) -> Tensor:
    """Return the inverse of `into`: Q_L X Q_R^T."""
    return into(x, [None if q is None else q.mT for q in bases])


def eigenvectors(symmetric: Tensor) -> Tensor:
    """Return the eigenvectors as columns, largest eigenvalue first.

    A non-finite matrix, which occurs only in a skipped step, gives arbitrary ones.
    """
    finite = torch.isfinite(symmetric).all()
    eye = torch.eye(symmetric.size(0), dtype=symmetric.dtype, device=symmetric.device)
    found: Tensor = torch.linalg.eigh(torch.where(finite, symmetric, eye)).eigenvectors
    return found.flip(1)


def renewed(symmetric: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Return the basis after one step of power iteration, and the order of the old basis's columns in it."""
    product = symmetric @ basis
    order = torch.argsort((basis * product).sum(0), descending=True)
    return torch.linalg.qr(product[:, order])[0], order


def inverse_root(symmetric: Tensor, order: int, epsilon: float) -> Tensor:
    """Return (S + epsilon)^(-1 / order) of a symmetric matrix whose eigenvalues are >= 0 except for rounding.

    A non-finite matrix gives an arbitrary root.
    """
    finite = torch.isfinite(symmetric).all()
    eye = torch.eye(symmetric.size(0), dtype=symmetric.dtype, device=symmetric.device)
    values, vectors = torch.linalg.eigh(torch.where(finite, symmetric, eye))
    root: Tensor = (vectors * (values.clamp(min=0) + epsilon).pow(-1 / order)) @ vectors.mT
    return root


# Owner ranks ----------------------------------------------------------------------------------------------------------

_AT_HOME = re.compile(r"(\w+)\.(\d+)(?:\.|$)")


class HomeOptimizer(WholeOptimizer):
    """Assigns an owner rank to every matrix, and keeps it as long as the owner rank has the matrix's state.

    Attributes:
        lists: Number of tensors per matrix that are sent to the owner rank, such as 1 for the gradient alone.
        blocks: The blocks of fused weights, each a separate matrix, by glob over parameter names.
        homes: The owner ranks and the exchanges with them.
        taken: The number of steps taken.

    Collectives: when the optimizer is bound, an object all-gather in addition to the base class's.
    """

    lists = 1
    blocks: Blocks = MappingProxyType({})
    not_captured = "counts steps on the host, and does more in some than in others"
    _with_others = False

    def metadata_for(self, name: str | None, shape: Shape, group: Mapping[str, Any], spec: P | None) -> Any:
        """Return the matrices of a tensor; none if it has fewer than two dims."""
        return tuple(matrices_of(name, shape, self.blocks, spec)) if len(shape) > 1 else ()

    def boxes(self, tensor: LogicalTensor) -> Sequence[Box]:
        """Return the matrices of a tensor; empty if it has none."""
        return tensor.metadata or ()

    def cost(self, shape: Shape) -> float:
        """Return the approximate relative cost of a step of one matrix; the choice of owner ranks balances it."""
        raise NotImplementedError

    def bound(self, tensors: WholeTensors) -> None:
        """Choose the owner ranks.

        Raises:
            ValueError: On every rank: the optimizer has stepped in a single process before.
        """
        super().bound(tensors)
        self.homes = Homes(tensors, self.boxes, self.cost, self.lists, settled=self._agreed(self._settled(tensors)))
        self.taken = StepsTaken()
        self._own: dict[int, list[Matrix]] = {}
        for matrix in self.homes.own:
            self._own.setdefault(tensors.positions(matrix.tensor)[0], []).append(matrix)

    def _agreed(self, own: set[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Return the rank that has the state of each matrix, by tensor name and number."""
        registry = self.tensors.registry
        if registry is None:
            return dict.fromkeys(own, 0)
        ranks = gather_objects((own, bool(own) and not self._with_others), registry)
        self._with_others = True
        if alone := [rank for rank, (_, stepped_alone) in enumerate(ranks) if stepped_alone]:
            raise ValueError(
                f"{type(self).__name__} has stepped without ParallelOptimizer on rank {alone[0]}, and has states; pass it "
                "to ParallelOptimizer before its first step, or continue from a checkpoint (load_checkpoint)"
            )
        return {which: rank for rank, (found, _) in enumerate(ranks) for which in found}

    def _settled(self, tensors: WholeTensors) -> set[tuple[str, int]]:
        """Return the matrices whose states are on this rank already, when it is bound again for another param group."""
        return {
            (tensor.name, number)
            for tensor, param in zip(tensors.tensors, params_of(self.param_groups), strict=True)
            for number in map(_number, self.state.get(param, {}))
            if number is not None
        }

    def own(self, slot: Slot) -> list[Matrix]:
        """Return the matrices whose state is stored at a position, the first position of a tensor on its owner rank."""
        return self._own.get(slot.position, [])

    # State ----------------------------------------------------------------------------------------------------------

    def is_whole_state(self, key: str) -> bool:
        return _number(key) is not None

    def keeps(self, param: Tensor, key: str) -> bool:
        assert self.tensors, "the property binds the optimizer"
        position = next(index for index, other in enumerate(params_of(self.param_groups)) if other is param)
        return _number(key) in {matrix.number for matrix in self._own.get(position, [])}

    # The step -------------------------------------------------------------------------------------------------------

    def at_home(self, slots: Sequence[Slot]) -> Callable[[Matrix], Slot]:
        """Return a function from a matrix to the slot that stores its state."""
        by_position = {slot.position: slot for slot in slots}
        return lambda matrix: by_position[self.tensors.positions(matrix.tensor)[0]]


def _number(key: str) -> int | None:
    found = _AT_HOME.match(key)
    return int(found[2]) if found else None


class StepsTaken:
    """Number of steps by position, known on the host without waiting for the current step.

    At the end of a step the device counts are copied to the host asynchronously; the copies are complete by the next
    step. If a count was changed in between, for example by a checkpoint, it is read again.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Tensor, int]] = {}  # by position: the device count and its version
        self._copies: dict[int, Tensor] = {}
        self._arrived: dict[torch.device, torch.cuda.Event] = {}

    def of(self, slot: Slot) -> int:
        """Return the number of steps before this one.

        Host synchronization: one in the first step and one after loading; otherwise the wait for the previous step.
        """
        count, seen = slot.state["step"], self._seen.get(slot.position)
        if not count.is_cuda or seen is None or seen[0] is not count or seen[1] != count._version:
            return _number_in(count.detach().cpu())
        self._arrived[count.device].synchronize()
        return _number_in(self._copies[slot.position])

    def note(self, slots: Sequence[Slot]) -> None:
        """Start copying the step counts to the host. Call it after the step's last update."""
        for slot in slots:
            count: Tensor = slot.state["step"]
            if count.is_cuda:
                copy = self._copies.setdefault(slot.position, torch.empty((), dtype=count.dtype, pin_memory=True))
                copy.copy_(count, non_blocking=True)
                self._seen[slot.position] = count, count._version
        for device in {slot.state["step"].device for slot in slots if slot.state["step"].is_cuda}:
            event = self._arrived[device] = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))


def _number_in(count: Tensor) -> int:
    number: Any = count.tolist()
    return int(number)


def moments_at_home(slot: Slot, matrix: Matrix) -> dict[str, Tensor]:
    """Return Adam's two moments of a matrix before its first step, zeros in the parameter's dtype."""
    zeros = slot.param.new_zeros(sides_of(matrix.shape))
    return {named("exp_avg", matrix): zeros, named("exp_avg_sq", matrix): zeros.clone()}


def named(name: str, matrix: Matrix, which: Any = None) -> str:
    """Return the state key of a matrix.

    Args:
        name: Name of the state.
        matrix: The matrix.
        which: Index, if the matrix has several states of that name. None: it has one.
    """
    return f"{name}.{matrix.number}" if which is None else f"{name}.{matrix.number}.{which}"
