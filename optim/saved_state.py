"""Load an optimizer's state on all ranks or on none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..amp.weights import Weights
from ..parallel.agreement import on_all_ranks

if TYPE_CHECKING:
    from .parallel_optimizer import ParallelOptimizer


def load_checked(optimizer: ParallelOptimizer, weights: Weights, state: Mapping[str, Any]) -> None:
    """Load ``state`` into the wrapped optimizer, the loss scale and the weights.

    Raises:
        ValueError: On every rank, when any rank's does not fit; everything is then as it was.
    Collectives: an object all-gather. Host reads: a few.
    """
    inner, scale = optimizer.optimizer, optimizer.loss_scale
    backup = {"state": inner.state, "param_groups": inner.param_groups}
    scale_backup, weights_backup = scale.state_dict() if scale else {}, _cloned(weights.state_dict())
    own = state.get("meshstep")

    def load() -> None:
        _check_mode(optimizer, own)
        inner.load_state_dict({key: value for key, value in state.items() if key != "meshstep"})
        if own is not None:
            weights.load_state_dict(own["weights"])
            if scale is not None:
                scale.load_state_dict(own["loss_scale"])

    try:
        on_all_ranks(load, optimizer.registry)
    except (ValueError, TypeError, RuntimeError):
        # torch put new containers in place of the old ones, which are therefore what they were.
        inner.__setstate__(backup)
        weights.load_state_dict(weights_backup)
        if scale is not None:
            scale.load_state_dict(scale_backup)
        raise


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
