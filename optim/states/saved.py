"""Load an optimizer's state on all ranks or on none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...parallel.mesh.agreement import on_all_ranks
from .stepped_weights import SteppedWeights

if TYPE_CHECKING:
    from ..parallel_optimizer import ParallelOptimizer


def load_checked(optimizer: ParallelOptimizer, weights: SteppedWeights, state: Mapping[str, Any]) -> None:
    """Load ``state`` into the wrapped optimizer, the loss scale and the weights.

    Raises:
        ValueError: On every rank, when any rank's does not fit; everything is then as it was.
    Collectives: two object all-gathers. Host reads: a few.
    """
    inner, scale = optimizer.optimizer, optimizer.loss_scale
    backup, scale_backup = (
        {"state": inner.state, "param_groups": inner.param_groups},
        scale.state_dict() if scale else {},
    )
    own = state.get("meshstep")

    def load() -> None:
        _check_mode(optimizer, own)
        weights.check_layout({} if own is None else own["weights"])
        inner.load_state_dict({key: value for key, value in state.items() if key != "meshstep"})
        if own is not None and scale is not None:
            scale.load_state_dict(own["loss_scale"])

    try:
        on_all_ranks(partial(_all_there, load), optimizer.registry)
        _load_weights(optimizer, weights, own)
    except (ValueError, TypeError, RuntimeError):
        # torch put new containers in place of the old ones, which are therefore what they were.
        inner.__setstate__(backup)
        if scale is not None:
            scale.load_state_dict(scale_backup)
        raise


def _load_weights(optimizer: ParallelOptimizer, weights: SteppedWeights, own: Mapping[str, Any] | None) -> None:
    """The last to be loaded, because masters are rounded into the model, which may have been loaded already."""
    model = [(param, param.detach().clone()) for param in optimizer._model_params if optimizer.precision.masters]
    backup = _cloned(weights.state_dict())

    def load() -> None:
        if own is not None:
            weights.load_state_dict(own["weights"])

    try:
        on_all_ranks(partial(_all_there, load), optimizer.registry)
    except (ValueError, TypeError, RuntimeError):
        weights.load_state_dict(backup)
        with torch.no_grad():
            for param, value in model:
                param.copy_(value)
        raise


def _all_there(load: Callable[[], None]) -> None:
    """``load()``; what it misses is a ValueError, which all ranks are told of."""
    try:
        load()
    except (KeyError, IndexError, AttributeError) as error:
        raise ValueError(
            f"the state is incomplete or something else ({type(error).__name__}: {error}); give what state_dict() returned"
        ) from error


def _check_mode(optimizer: ParallelOptimizer, own: Mapping[str, Any] | None) -> None:
    mode = optimizer.precision
    if own is None:
        if mode.masters or optimizer.loss_scale is not None:
            raise ValueError(
                f"the state is a plain optimizer's, but precision={mode.name!r} also needs its loss scale or master "
                "weights; load a state that ParallelOptimizer saved in this mode"
            )
    elif own["precision"] != mode.name:
        raise ValueError(
            f"the state was saved with precision={own['precision']!r}, but this optimizer runs with {mode.name!r}; "
            "continue in the mode it was saved in, or load only the model's weights and start the optimizer anew"
        )


def _cloned(state: dict[str, Any]) -> dict[str, Any]:
    masters = state.get("masters")
    return state if masters is None else {**state, "masters": {key: value.clone() for key, value in masters.items()}}
