"""What the optimizer steps for each parameter of the model: the parameter, its master, a piece of it, a copy on the CPU.

    SteppedWeights       whole parameters, or their masters
    OffloadedWeights     for some of them a copy on the CPU            (`meshstep.optim.states.offloaded`)
    ShardedWeights       a piece of each, stepped by one of the above  (`meshstep.optim.states.sharded`)

One interface for `ParallelOptimizer` and for checkpoints, around the `Weights` of the precision mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...amp.weights import Weights
from ...parallel.layout.annotation import annotation_of
from ..norm.plan import ReductionPlan

SCALAR_STATE = ("step", "mu", "mu_product", "eta")  # one number a parameter in torch's optimizers, whatever its shape


@dataclass(frozen=True)
class Piece:
    """One tensor that the optimizer steps, and what it is of the model.

    Args:
        name: The model parameter's.
        param: The model parameter: this rank's shard of it.
        piece: What the optimizer steps, and keeps its state for: the elements of ``param`` from ``offset`` on, float32
            where it is a master. 1-dim where optimizer states are sharded, else of the parameter's shape.
        offset: In the flattened (row-major) parameter.
    """

    name: str
    param: Tensor
    piece: Tensor
    offset: int


@dataclass(frozen=True)
class Origin:
    """What an optimizer's parameter stands for: parameter number ``index`` of the optimizer as it was given."""

    index: int
    name: str
    param: Tensor
    offset: int = 0


class SteppedWeights:
    """The optimizer steps whole parameters, or their masters.

    Args:
        optimizer: Its param groups hold what is stepped.
        origins: What each of them stands for, in their order.
        inner: The precision mode's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, origins: Sequence[Origin], inner: Weights) -> None:
        self.optimizer, self.inner = optimizer, inner
        self._origins = list(origins)

    def pieces(self) -> list[Piece]:
        """All that the optimizer steps, in the order of its param groups."""
        stepped = params_of(self.optimizer.param_groups)
        return [Piece(o.name, o.param, piece, o.offset) for o, piece in zip(self._origins, stepped, strict=True)]

    def derive(self, plan: ReductionPlan) -> ReductionPlan:
        """The plan of what is `measured`, from that of the model's parameters; no collective."""
        return plan

    def micro_batch(self) -> AbstractContextManager[None]:
        """Around the backward of one micro-batch; every rank enters it, whether it has something to compute or not."""
        return nullcontext()

    def collect(self, averaged: bool = True) -> None:
        """Give `measured` the gradients that backward made.

        Args:
            averaged: False where torch's data parallelism was to average them over the data axes, but has not.
        """
        self.inner.collect()

    def measured(self) -> list[Tensor]:
        """The tensors whose gradients are completed, measured, clipped and stepped with, in the optimizer's order."""
        return params_of(self.optimizer.param_groups)

    def compared(self) -> list[Tensor]:
        """The tensors whose values must be equal on all ranks that hold copies, in the order of `measured`."""
        return self.measured()

    def step(self, update: Callable[[], object]) -> None:
        """Call ``update``, which steps the optimizer or skips, and bring the result into the model."""
        self.inner.step(update)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group; its ``params`` is a list, of parameters or of (name, parameter) pairs."""
        first = len(self._origins)
        self.inner.add_param_group(param_group)
        self._origins += origins_of([param_group], first)

    def state_dict(self) -> dict[str, Any]:
        """What must be saved beside the optimizer's own state."""
        return self.inner.state_dict()

    def check_layout(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the state is of optimizer states that were sharded in another way."""
        if "shards" in state:
            raise other_layout(state["shards"], None)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it on this rank; `synchronize` must follow, on all.

        Raises:
            ValueError: It does not fit; nothing is changed.
        """
        self.check_layout(state)
        self.inner.load_state_dict(state)

    def synchronize(self) -> None:
        """Bring the stepped weights into the model on all ranks, after they were loaded."""


def other_layout(saved: Mapping[str, Any] | None, own: Mapping[str, Any] | None) -> ValueError:
    """The error that optimizer states were saved in another layout than they have here (None: whole)."""
    layouts = [
        f"sharded over {cut['axis']}={cut['size']} in {len(cut['pieces'])} pieces" if cut else "whole"
        for cut in (saved, own)
    ]
    return ValueError(
        f"the state was saved with optimizer states {layouts[0]}, but here they are {layouts[1]}; a state fits the same "
        "model, topology, rank and shard_states (save_checkpoint and load_checkpoint reshard)"
    )


# Param groups -----------------------------------------------------------------------------------------------------------


def params_of(param_groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """The parameters of param groups, in one list."""
    return [param for _, param in named_params_of(param_groups)]


def named_params_of(param_groups: Sequence[Mapping[str, Any]]) -> list[tuple[str | None, Tensor]]:
    """The parameters of param groups, with the names that the optimizer was given, else the annotations'."""
    named: list[tuple[str | None, Tensor]] = []
    for group in param_groups:
        given = group.get("param_names")
        for position, item in enumerate(group["params"]):
            name, param = item if isinstance(item, tuple) else (given[position] if given else None, item)
            annotation = annotation_of(param)
            named.append((name or (annotation.name if annotation else None), param))
    return named


def origins_of(param_groups: Sequence[Mapping[str, Any]], first: int = 0) -> list[Origin]:
    """Origins of param groups in which nothing has been replaced; their parameters are numbered from ``first`` on."""
    return [
        Origin(index, name or f"parameter {index}", param)
        for index, (name, param) in enumerate(named_params_of(param_groups), first)
    ]


def replaced(param_group: Mapping[str, Any], replacement: Callable[[Tensor], Sequence[Tensor]]) -> dict[str, Any]:
    """The ``params`` of a group with others, none or several, in the place of each, and ``param_names`` if it has any."""
    is_named = "param_names" in param_group or any(isinstance(item, tuple) for item in param_group["params"])
    named = [(name or "", new) for name, param in named_params_of([param_group]) for new in replacement(param)]
    result: dict[str, Any] = {"params": [param for _, param in named]}
    return {**result, "param_names": [name for name, _ in named]} if is_named else result


def move_state(optimizer: torch.optim.Optimizer, param: Tensor, targets: Sequence[tuple[Tensor, int]]) -> None:
    """Move the optimizer's state of ``param``, if it has any, to those that stand for pieces of it.

    Args:
        targets: (tensor, offset): it has the elements from ``offset`` on of the flattened parameter.
    """
    state = optimizer.state.pop(param, None)
    for target, offset in targets if state else ():
        optimizer.state[target] = {
            key: _part_of(value, key, param, target, offset) for key, value in (state or {}).items()
        }


def _part_of(value: Any, key: str, param: Tensor, target: Tensor, offset: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    if key not in SCALAR_STATE and value.shape == param.shape != target.shape:
        value = value.reshape(-1)[offset : offset + target.numel()].view(target.shape)
    elif target.device == param.device:
        return value.clone()  # torch keeps step counts on the CPU for optimizers that are not fused
    return value.to(target.device, copy=True)
