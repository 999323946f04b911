"""Where a rank's optimizer states belong, kept with them: what a rank saved is for the rank at the same place alone."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...parallel.mesh.registry import ProcessGroupRegistry
from ..norm.plan import ReductionPlan


@dataclass(frozen=True)
class Coordinates:
    """The coordinate and size of every axis along which ranks step different tensors, or different pieces of them.

    Pickled, and so in a file, it is an ``OrderedDict``. `torch.distributed.checkpoint` would take plain tensors of equal
    keys for copies of each other and keep those of one rank; where they are none, it is told to refuse them.
    """

    axes: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, plan: ReductionPlan, registry: ProcessGroupRegistry) -> Coordinates:
        """Those of this rank.

        Args:
            plan: Of what the optimizer steps.
        """
        named = {axis for b in plan.buckets for axis in (*b.distinct, *dict(b.owned), *dict(b.tied))}
        sizes = {axis: registry.size(axis) for axis in registry.topology.axes if axis in named}
        return cls({axis: (registry.coordinate[axis], size) for axis, size in sizes.items() if size > 1})

    def check(self, saved: object) -> None:
        """Raise ValueError if states that ``saved`` came with belong elsewhere; None: from a version that kept none."""
        if saved is None:
            return
        axes = saved.axes if isinstance(saved, Coordinates) else saved
        if not isinstance(axes, Mapping):
            raise ValueError(f"the state has {saved!r} for coordinates; give what state_dict() returned")
        found = {axis: tuple(where) for axis, where in axes.items()}
        if found != dict(self.axes):
            raise ValueError(
                f"the state is of the rank at {_shown(found)}, this rank is at {_shown(self.axes)}: give every rank "
                "the state that it saved itself, or use save_checkpoint and load_checkpoint, which fit any layout"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ([(axis, list(where)) for axis, where in self.axes.items()],)

    def __create_write_items__(self, *_: object) -> Iterable[Any]:
        """What `torch.distributed.checkpoint` asks before it writes anything."""
        if not self.axes:
            return []
        raise ValueError(
            f"optimizer.state_dict() is of one rank, at {_shown(self.axes)}; saved by torch.distributed.checkpoint, ranks "
            "would overwrite each other's states: save get_optimizer_state_dict(model, TorchStates(optimizer)), or use "
            "meshstep.optim.save_checkpoint"
        )


def check_caller(where: Coordinates, stepped: Iterable[Tensor], given: Iterable[Tensor], *, makes_states: bool) -> None:
    """Raise ValueError where torch's state-dict functions, which find a state by its parameter, ask for a state dict in
    which they would not find it, or would take pieces for copies. To be called by what they call.

    Args:
        stepped: What the optimizer has, in the place of ``given``.
        makes_states: Whether there are states, or a step with gradients of zeros, which they call, makes them.
    """
    asking = sys._getframe(2).f_globals.get("__name__")
    if asking != "torch.distributed.checkpoint.state_dict":
        return
    own = {id(param) for param in given}
    if where.axes or any(id(param) not in own for param in stepped):
        raise ValueError(
            "the optimizer steps pieces or masters of the parameters, by which torch's state-dict functions find nothing: "
            "give them meshstep.optim.TorchStates(optimizer), or use save_checkpoint"
        )
    if not makes_states:
        raise ValueError(
            "the optimizer has no states yet, and torch's state-dict functions can't make them by one step, which with "
            "accumulation_steps= does nothing: give them meshstep.optim.TorchStates(optimizer), or use save_checkpoint"
        )


def _shown(axes: Mapping[str, tuple[int, ...]]) -> str:
    places = [f"{axis} {where[0]} of {where[1]}" for axis, where in axes.items()]
    return ", ".join(places) or "no coordinate in particular (it had all parameters whole)"
