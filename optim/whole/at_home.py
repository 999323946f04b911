"""Optimizers that keep a state of each matrix whole, at the matrix's home, and nowhere else.

In the optimizer's state it stands under the first piece of the tensor that the home has, as "<name>.<number of the matrix>"
and, where there are several of a kind, ".<which>". It belongs to the logical tensor: a checkpoint has it once, and whatever
the layout that it is loaded in, the matrix's home there gets it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...parallel.layout.regions import Box, Shape
from ...parallel.layout.spec import P
from ...parallel.mesh.agreement import gather_objects
from ..states.chain import params_of
from .exchange import Homes, Matrix
from .layout import Blocks, LogicalTensor, matrices_of
from .optimizer import Slot, WholeOptimizer
from .tensors import WholeTensors

# Preconditioners ------------------------------------------------------------------------------------------------------

# Matrices on the sides of a matrix: statistics of its rows and of its columns, their bases and roots (Shampoo, SOAP).

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


# At home --------------------------------------------------------------------------------------------------------------

_AT_HOME = re.compile(r"(\w+)\.(\d+)(?:\.|$)")


class HomeOptimizer(WholeOptimizer):
    """Gives matrices homes, which they keep as long as their states are there.

    Attributes:
        lists: How many tensors of each matrix travel.
        blocks: The blocks of fused weights, each a matrix of its own, by globs over names.
        homes: Where the matrices are computed.
        taken: How many steps there have been.
    Collectives: at binding, besides the base's, an object all-gather.
    """

    lists = 1
    blocks: Blocks = MappingProxyType({})
    not_captured = "counts steps on the host, and does more in some than in others"
    _with_others = False

    def said_of(self, name: str | None, shape: Shape, group: Mapping[str, Any], spec: P | None) -> Any:
        """The matrices of a tensor of two dims or more."""
        return tuple(matrices_of(name, shape, self.blocks, spec)) if len(shape) > 1 else ()

    def boxes(self, tensor: LogicalTensor) -> Sequence[Box]:
        """The matrices of a tensor; none where it has none."""
        return tensor.said or ()

    def cost(self, shape: Shape) -> float:
        """Of a step of a matrix, about, relative to others: homes are chosen by it."""
        raise NotImplementedError

    def bound(self, tensors: WholeTensors) -> None:
        """Raises ValueError, on every rank, where it has stepped before without other ranks."""
        super().bound(tensors)
        self.homes = Homes(tensors, self.boxes, self.cost, self.lists, settled=self._agreed(self._settled(tensors)))
        self.taken = StepsTaken()
        self._own: dict[int, list[Matrix]] = {}
        for matrix in self.homes.own:
            self._own.setdefault(tensors.positions(matrix.tensor)[0], []).append(matrix)

    def _agreed(self, own: set[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """By tensor and number the ranks that have states."""
        registry = self.tensors.registry
        if registry is None:
            return dict.fromkeys(own, 0)
        ranks = gather_objects((own, bool(own) and not self._with_others), registry)
        self._with_others = True
        if alone := [rank for rank, (_, stepped_alone) in enumerate(ranks) if stepped_alone]:
            raise ValueError(
                f"{type(self).__name__} has stepped alone on rank {alone[0]}, and has states of whole matrices there: give "
                "it to ParallelOptimizer before its first step, or go on from a checkpoint of it (load_checkpoint)"
            )
        return {which: rank for rank, (found, _) in enumerate(ranks) for which in found}

    def _settled(self, tensors: WholeTensors) -> set[tuple[str, int]]:
        """The matrices whose states are here already: another param group has come."""
        return {
            (tensor.name, number)
            for tensor, param in zip(tensors.tensors, params_of(self.param_groups), strict=True)
            for number in map(_number, self.state.get(param, {}))
            if number is not None
        }

    def own(self, slot: Slot) -> list[Matrix]:
        """The matrices whose state stands at a position: none but at the first one that a home has of a tensor."""
        return self._own.get(slot.position, [])

    # State ----------------------------------------------------------------------------------------------------------

    def is_whole_state(self, key: str) -> bool:
        return _number(key) is not None

    def keeps(self, param: Tensor, key: str) -> bool:
        assert self.tensors, "which binds it, if nobody has"
        position = next(index for index, other in enumerate(params_of(self.param_groups)) if other is param)
        return _number(key) in {matrix.number for matrix in self._own.get(position, [])}

    # The step -------------------------------------------------------------------------------------------------------

    def at_home(self, slots: Sequence[Slot]) -> Callable[[Matrix], Slot]:
        """Where the state of a matrix of `homes` stands."""
        by_position = {slot.position: slot for slot in slots}
        return lambda matrix: by_position[self.tensors.positions(matrix.tensor)[0]]


def _number(key: str) -> int | None:
    found = _AT_HOME.match(key)
    return int(found[2]) if found else None


class StepsTaken:
    """How many steps have been taken, by position: known to the host without a wait for what the device does now.

    At the end of each step the counts set out for the host; at the next step they have arrived. What somebody else has
    written to them meanwhile, a checkpoint, is read anew.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Tensor, int]] = {}  # by position: the count on the device, its version
        self._copies: dict[int, Tensor] = {}
        self._arrived: dict[torch.device, torch.cuda.Event] = {}

    def of(self, slot: Slot) -> int:
        """Before this step. Host reads: in the first step, and after loading."""
        count, seen = slot.state["step"], self._seen.get(slot.position)
        if not count.is_cuda or seen is None or seen[0] is not count or seen[1] != count._version:
            return _number_in(count.detach().cpu())
        self._arrived[count.device].synchronize()
        return _number_in(self._copies[slot.position])

    def note(self, slots: Sequence[Slot]) -> None:
        """After the step's last update was written."""
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
    """Of a 0-dim tensor on the CPU."""
    number: Any = count.tolist()
    return int(number)


def moments_at_home(slot: Slot, matrix: Matrix) -> dict[str, Tensor]:
    """Adam's two of a matrix, before its first step: of the parameter's dtype, and of the preconditioned sides' shape."""
    zeros = slot.param.new_zeros(sides_of(matrix.shape))
    return {named("exp_avg", matrix): zeros, named("exp_avg_sq", matrix): zeros.clone()}


def named(name: str, matrix: Matrix, which: Any = None) -> str:
    """The key of a matrix's state."""
    return f"{name}.{matrix.number}" if which is None else f"{name}.{matrix.number}.{which}"
