"""Checks of an optimizer's state that comes from a file or a user: kinds and ranges, before anything is replaced."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...parallel.mesh.plain_values import (
    MAX_COUNT,
    anything,
    check_like,
    check_number,
    check_text,
    dict_of,
    fields,
    is_number,
    list_of,
    wrong,
)

_FLAGS = ("foreach", "fused", "capturable", "differentiable", "maximize", "amsgrad", "nesterov")
_LARGEST = sys.float_info.max
_RANGES = {
    "lr": (0.0, _LARGEST),
    "initial_lr": (0.0, _LARGEST),
    "betas": (0.0, 1.0),
    "eps": (0.0, _LARGEST),
    "momentum": (0.0, _LARGEST),
    "weight_decay": (-_LARGEST, _LARGEST),
}


def check_groups(saved: object, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError where saved param groups have hyper-parameters of other kinds than ``groups``."""
    list_of(fields({"params": list_of(anything)}))(saved, "param_groups")
    for index, (new, group) in enumerate(zip(saved, groups, strict=False)):  # type: ignore[call-overload]
        for name, value in new.items():
            if name not in ("params", "param_names"):
                check_hyper(name, value, group.get(name), f"param_groups[{index}]")


def check_hyper(name: str, value: object, now: object, where: str) -> None:
    """Raise ValueError where a hyper-parameter is of another kind than its value ``now``, or out of its range."""
    field = f"{where}[{name!r}]"
    check_text(name, f"a key of {where}")
    if name in _FLAGS and not (value is None or isinstance(value, bool)):
        raise wrong(field, value, "True, False or None")
    check_like(value, now, field)
    within = _RANGES.get(name)
    for number in value if isinstance(value, (list, tuple)) else (value,):
        number = number.item() if isinstance(number, Tensor) and number.numel() == 1 else number
        if within is not None and is_number(number) and not within[0] <= number <= within[1]:
            raise wrong(field, value, f"a number from {within[0]:g} to {within[1]:g}")


def check_states(saved: object) -> None:
    """Raise ValueError where a number in saved optimizer states is NaN, or a count of steps is none."""
    dict_of(dict_of(anything), key=anything)(saved, "state")
    for position, state in saved.items():  # type: ignore[attr-defined]
        for name, value in state.items():
            check_state_value(name, value, f"state[{position!r}]")


def check_state_value(name: str, value: object, where: str) -> None:
    """Raise ValueError where a number of an optimizer's state is NaN, or it is a count of steps that is none."""
    number = value.item() if isinstance(value, Tensor) and value.dim() == 0 and name == "step" else value
    if isinstance(number, float) or name == "step":
        check_number(number, f"{where}[{name!r}]")
    if name == "step" and not 0 <= number <= MAX_COUNT:  # type: ignore[operator]
        raise wrong(f"{where}[{name!r}]", number, f"a number of steps from 0 to {MAX_COUNT}")
