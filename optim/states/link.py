"""One link of the chain: something that stands in for parameters in an optimizer's param groups.

A placement (`Placement`) is what a user writes, ``states=(Sharded("data"), Offloaded(0.5))``: a frozen object that checks
itself and makes the link. Links are installed in the order of their `Position`, each over what the one before put there:

    model's parameter -> local tensor of a DTensor -> piece -> copy on the CPU -> float32 master -> stepped

Gradients go down the chain (`bring`), the update comes up (`step`). A link knows its own replacement and nothing else;
nesting, order, clearing and which piece is what are the chain's (`meshstep.optim.states.chain`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...amp.precision import Precision
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..norm.plan import ReductionPlan
from ..step.data_parallel import DataParallelSwitch
from ..step.window import Window
from .pieces import Held, StandIns, move_state

AnyWindow = Window[Any, Any]


class Position(IntEnum):
    """Where in the chain a link belongs."""

    LOCAL = 0
    """A plain tensor for a DTensor."""
    CUT = 1
    """Pieces of parameters."""
    DEVICE = 2
    """Copies elsewhere."""
    DTYPE = 3
    """Copies of another dtype."""
    STATE = 4
    """Nothing is replaced; the optimizer's state is."""
    UPDATE = 5
    """Nothing is replaced at all; next to the optimizer."""


@dataclass(frozen=True)
class Binding:
    """What a placement is to fit.

    Args:
        optimizer: The torch optimizer, as it was given.
        precision: The mode.
        registry: The groups.
        averages_data: Whether the optimizer itself averages gradients over the data axes.
        data_parallel: torch's, if that is used.
        overlap: Whether gradients are reduced while backward runs.
        placements: All that were given.
    """

    optimizer: torch.optim.Optimizer
    precision: Precision
    registry: ProcessGroupRegistry
    averages_data: bool = True
    data_parallel: DataParallelSwitch | None = None
    overlap: bool = False
    placements: Sequence[Placement] = ()

    @property
    def main_grads(self) -> bool:
        """Whether half-precision parameters have float32 gradients."""
        wanted = self.precision.masters and self.precision.main_grads
        return wanted and (self.data_parallel is None or self.data_parallel.float32_grads)


class Placement(ABC):
    """Where optimizer states and what they belong to are kept; an argument, frozen."""

    position: ClassVar[Position]
    draws: ClassVar[bool] = False
    """Its link rounds by draws of the step's own."""

    @abstractmethod
    def check(self, binding: Binding) -> None:
        """Raise ValueError, before anything is changed, where it does not fit. Collectives: none."""

    @abstractmethod
    def link(self, binding: Binding) -> Link:
        """The link, not installed yet. Collectives: none."""


class Link:
    """Stands in for nothing; subclasses override what they need.

    ``update`` is what steps the optimizer, or skips; `step` is around it.
    """

    idle = False
    """There is nothing that it stands in for; asked after `install`."""
    is_local = False
    """Its stand-ins are what the library calls the model's parameters."""
    differs = False
    """Ranks that hold copies of a tensor may differ in whether it is replaced."""
    divisible = False
    """`step` may be called several times for one update, each time with a part of what the param groups hold."""
    in_parts = False
    """All links between this one and the optimizer are; the chain says so."""

    def holds_back(self, tensor: Tensor) -> bool:
        """Whether the gradient stays at ``tensor``, which it was given, to be completed, measured and clipped there."""
        return False

    def not_captured(self) -> str | None:
        """Why a step can't be captured in a CUDA graph with it: its name, and what it does in Python or on the host."""
        return None

    def install(self, optimizer: torch.optim.Optimizer, held: Sequence[Held], tensors: Sequence[Tensor]) -> StandIns:
        """What stands for each of ``tensors``, which the optimizer holds now at the positions ``held``, of those that are
        replaced. Called again for param groups that are added."""
        return {}

    def move_state(
        self, optimizer: torch.optim.Optimizer, tensor: Tensor, targets: Sequence[tuple[Tensor, int]]
    ) -> None:
        """Give the stand-ins of ``tensor`` its optimizer state."""
        move_state(optimizer, tensor, targets)

    def derive(self, plan: ReductionPlan, held: Sequence[Held], tensors: Sequence[Tensor]) -> ReductionPlan:
        """The plan of the stand-ins, from that of the model's parameters."""
        return plan

    def micro_batch(self, window: AnyWindow) -> AbstractContextManager[None]:
        """Around the backward of one micro-batch; every rank enters it, whether it has something to compute or not."""
        return nullcontext()

    def catch_up(self, window: AnyWindow) -> None:
        """Do what backward does, where this rank ran none: ranks then have done the same collectives, in one order, before
        anything that they do together at the end of a window."""

    def bring(self, window: AnyWindow, averaged: bool) -> Exception | None:
        """Give the stand-ins the gradients of what they stand for, at the end of a window.

        Args:
            averaged: False where torch's data parallelism was to average them over the data axes, but has not.
        Returns:
            What is wrong with those of this rank, of which it has put NaN there.
        """
        return None

    def step(self, update: Callable[[], object]) -> None:
        """Call ``update`` and bring the result back; a skipped step changes nothing."""
        update()
        self.publish()

    def publish(self) -> None:
        """Bring the values of the stand-ins into what they stand for; on all ranks."""

    def reload(self) -> None:
        """Set the stand-ins to the values of what they stand for, after the model's weights were written."""

    def has_copies(self) -> bool:
        """Return True if a stand-in has memory of its own, so that `publish` would undo a write to what it stands for."""
        return False

    def find_overwritten(self) -> Tensor | None:
        """Return the first tensor whose values `publish` would undo, because its stand-in does not have them.

        Tensors that `bring` reads anew are left out. Host synchronization: one per tensor that has a copy.
        """
        return None

    def clear(self, set_to_none: bool) -> None:
        """Clear the gradients of what it replaced."""

    def cut_over(self, tensor: Tensor) -> tuple[str, ...] | None:
        """The axes over whose ranks ``tensor``, which it was given, is cut into pieces; None: it is not."""
        return None

    def kept(self, tensor: Tensor) -> Mapping[str, Tensor]:
        """What belongs to a tensor that the optimizer steps, besides its state, by name: it has copies where that has."""
        return {}

    def master_of(self, tensor: Tensor) -> Tensor | None:
        """A float32 copy of what a tensor that the optimizer holds is stepped as, where that is more than the tensor."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What must be saved beside the optimizer's own state. No other link has the same keys. But for masters and layouts
        a checkpoint keeps rank 0's: plain values that are the same on all ranks."""
        return {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the state was saved in another layout; nothing is changed."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it on this rank; `publish` follows, on all. ValueError where it does not fit, and nothing changed."""
