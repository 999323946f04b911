"""What of an optimizer's state belongs to the elements of a parameter, and what is one number of all of it."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .casting import is_half

SCALAR_STATE = ("step", "mu", "mu_product", "eta")  # one number a parameter in torch's optimizers, whatever its shape


def is_half_kept(key: str, value: Any, param: Tensor) -> bool:
    """Whether a state may be kept in half precision between steps: not a number that all elements share, of which a
    rounded value would be wrong for all of them alike.

    Args:
        param: Whose state ``value`` is, under ``key``.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point() or key in SCALAR_STATE:
        return False
    return value.dim() > 0 or param.dim() == 0


def load_shared_numbers_exactly(optimizer: torch.optim.Optimizer) -> None:
    """Let ``optimizer.load_state_dict`` leave those numbers in their dtype; torch casts all but ``"step"``."""
    _load_uncast(optimizer, lambda key, value, param: key in SCALAR_STATE)


def load_states_exactly(optimizer: torch.optim.Optimizer, params: Container[Tensor]) -> None:
    """Let ``optimizer.load_state_dict`` give ``params``, which are in half precision, their states in the dtype
    that they were saved in, and the shared numbers of all parameters too; torch casts all but ``"step"``."""
    _load_uncast(optimizer, lambda key, _, param: key in SCALAR_STATE or param in params)


def _load_uncast(optimizer: torch.optim.Optimizer, wanted: Callable[[str, Tensor, Tensor], bool]) -> None:
    """Put values in the place of those that torch has cast, where they are ``wanted`` (key, saved value, parameter); half
    precision becomes float32."""
    given: dict[int, dict[str, Tensor]] = {}

    def note(_: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
        given.clear()
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for position, index in enumerate(saved):
            state = state_dict["state"].get(index, {})
            given[position] = {key: value for key, value in state.items() if isinstance(value, Tensor)}

    def put_back(optimizer: torch.optim.Optimizer) -> None:
        for position, param in enumerate(chain.from_iterable(group["params"] for group in optimizer.param_groups)):
            for key, value in given.get(position, {}).items():
                loaded = optimizer.state[param][key]
                if loaded.dtype != value.dtype and wanted(key, value, param):
                    to = torch.float32 if is_half(value) else value.dtype
                    optimizer.state[param][key] = value.to(loaded.device, to, copy=True)
        given.clear()

    optimizer.register_load_state_dict_pre_hook(note)
    optimizer.register_load_state_dict_post_hook(put_back)
