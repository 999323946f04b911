"""What the optimizer holds at each position of its param groups, and what that is of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...amp.optimizer_state import SCALAR_STATE as SCALAR_STATE
from ...parallel.layout.annotation import annotation_of
from ...parallel.layout.pieces import Region


@dataclass(frozen=True)
class Piece:
    """One tensor that the optimizer steps, and what it is of the model.

    Args:
        name: The model parameter's.
        param: The model parameter: this rank's shard of it.
        piece: What the optimizer steps, and keeps its state for: the elements of ``param`` from ``offset`` on, float32
            where it is a master. 1-dim where optimizer states are sharded, else of the parameter's shape.
        offset: In the flattened (row-major) parameter.
        region: Which part of the logical tensor that is; None where ranks have pieces of unequal sizes.
    """

    name: str
    param: Tensor
    piece: Tensor
    offset: int
    region: Region | None = None


@dataclass(frozen=True)
class Held:
    """One position of the param groups: the model's parameter number ``index`` of those that the optimizer was given.

    Args:
        offset: In the flattened parameter, where what is stepped for it begins.
        path: What each link of the chain was given, from the model's (local) parameter on; what is stepped is not among it.
    """

    index: int
    name: str
    param: Tensor
    offset: int = 0
    path: tuple[Tensor, ...] = field(default=(), repr=False)


StandIns = Mapping[Tensor, Sequence[tuple[Tensor, int]]]
"""For each tensor that is replaced the (tensor, offset) pairs that stand for it, none or several."""


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


def match_names(new: dict[str, Any], groups: Sequence[dict[str, Any]]) -> None:
    """Give groups without parameters an empty ``param_names`` where the others have names: torch wants all or none.

    Args:
        new: The param group to add; its parameters may be (name, parameter) pairs.
        groups: The optimizer's groups. Empty ones may be changed.
    """
    if not new["params"]:
        if any("param_names" in group for group in groups):
            new["param_names"] = []
        else:
            new.pop("param_names", None)
    elif not any(group["params"] for group in groups):
        named = "param_names" in new or isinstance(new["params"][0], tuple)
        for group in groups:
            group.update({"param_names": []}) if named else group.pop("param_names", None)


def held_in(param_groups: Sequence[Mapping[str, Any]], first: int = 0) -> list[Held]:
    """What param groups hold in which nothing has been replaced; their parameters are numbered from ``first`` on."""
    return [
        Held(index, name or f"parameter {index}", param)
        for index, (name, param) in enumerate(named_params_of(param_groups), first)
    ]


def replaced(param_group: Mapping[str, Any], replacement: Callable[[Tensor], Iterable[Tensor]]) -> dict[str, Any]:
    """The ``params`` of a group with others, none or several, in the place of each, and ``param_names`` if it has any."""
    named = [(name or "", new) for name, param in named_params_of([param_group]) for new in replacement(param)]
    result: dict[str, Any] = {"params": [param for _, param in named]}
    return {**result, "param_names": [name for name, _ in named]} if "param_names" in param_group else result


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
