"""Load an optimizer's state on all ranks or on none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...amp.loss_scale import LossScale
from ...amp.precision import Precision
from ...parallel.mesh.agreement import on_all_ranks
from ...parallel.mesh.plain_values import anything, dict_of
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.text import printable
from ..clip.state import ClipState
from ..step.call_guard import own_calls
from ..step.memory_order import lay_out_states
from ..step.skips import SkipMonitor
from .chain import Chain
from .coordinates import Coordinates
from .state_checks import check_groups, check_states


@dataclass(frozen=True)
class Saved:
    """What an optimizer's state is made of, to be saved and loaded.

    Args:
        optimizer: The wrapped one.
        chain: What stands in for its parameters.
        model_params: What loading may change.
        coordinates: Where this rank's states belong.
        clip: What a clip rule remembers, if there is one.
    """

    optimizer: torch.optim.Optimizer
    chain: Chain
    precision: Precision
    loss_scale: LossScale | None
    model_params: Sequence[Tensor]
    registry: ProcessGroupRegistry
    coordinates: Coordinates
    clip: ClipState | None = None

    def state_dict(self, counts: Mapping[str, int]) -> dict[str, Any]:
        """The wrapped optimizer's, and under ``"meshstep"`` all else, ``counts`` of steps among it. Host reads: a few."""
        own = {
            "precision": self.precision.name,
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state_dict(),
            "weights": self.chain.state_dict(),
            **counts,
            "coordinates": self.coordinates,
        }
        if self.clip is not None and self.clip.rule.initial():
            own["clip"] = self.clip.state_dict()
        return {**self.optimizer.state_dict(), "meshstep": own}

    def load(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Load what `state_dict` gave; returns what was under ``"meshstep"``, counts among it.

        Raises:
            ValueError: On every rank, when any rank's does not fit; everything is then as it was.
        Collectives: two object all-gathers. Host reads: a few.
        """
        inner, scale = self.optimizer, self.loss_scale
        backup, scale_backup = (
            {"state": inner.state, "param_groups": inner.param_groups},
            scale.state_dict() if scale else {},
        )
        own = state.get("meshstep")

        def load() -> None:
            self.check(state)
            with own_calls:
                inner.load_state_dict({key: value for key, value in state.items() if key != "meshstep"})
            lay_out_states(inner)
            if own is not None and scale is not None:
                scale.load_state_dict(own["loss_scale"])

        try:
            on_all_ranks(partial(_all_there, load), self.registry)
            self._load_weights(own)
        except Exception:
            # torch put new containers in place of the old ones, which are therefore what they were.
            inner.__setstate__(backup)
            if scale is not None:
                scale.load_state_dict(scale_backup)
            raise
        self.chain.publish()
        if self.clip is not None:
            self.clip.load_state_dict((own or {}).get("clip"))
        return own or {}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError, and name the field, where ``state`` is nothing that `load` can take. Changes nothing.
        Collectives: none. Host reads: a few."""
        _all_there(partial(self._check, state))

    def _check(self, state: Mapping[str, Any]) -> None:
        dict_of(anything)(state, "the state")
        own = state.get("meshstep")
        if own is not None:
            dict_of(anything)(own, "meshstep")
        self._check_mode(own)
        weights = {} if own is None else own["weights"]
        dict_of(anything)(weights, "weights")
        if ("shards" in weights) == ("shards" in self.chain.state_dict()):
            self.coordinates.check((own or {}).get("coordinates"))
        self.chain.check_state(weights)
        check_groups(state["param_groups"], self.optimizer.param_groups)
        check_states(state["state"])
        if own is not None:
            SkipMonitor.check_state(own)
            if self.loss_scale is not None:
                deepcopy(self.loss_scale).load_state_dict(own["loss_scale"])
        if self.clip is not None:
            self.clip.check_state((own or {}).get("clip"))

    def _load_weights(self, own: Mapping[str, Any] | None) -> None:
        """The last to be loaded, because masters are rounded into the model, which may have been loaded already."""
        model = [(param, param.detach().clone()) for param in self.model_params if self.precision.masters]
        backup = _cloned(self.chain.state_dict())

        def load() -> None:
            if own is not None:
                self.chain.load_state_dict(own["weights"])

        try:
            on_all_ranks(partial(_all_there, load), self.registry)
        except Exception:
            self.chain.load_state_dict(backup)
            with torch.no_grad():
                for param, value in model:
                    param.copy_(value)
            raise

    def _check_mode(self, own: Mapping[str, Any] | None) -> None:
        mode = self.precision
        if own is None:
            if mode.masters or self.loss_scale is not None:
                raise ValueError(
                    f"the state is a plain optimizer's, but precision={mode.name!r} also needs its loss scale or master "
                    "weights; load a state that ParallelOptimizer saved in this mode"
                )
        elif own["precision"] != mode.name:
            raise ValueError(
                f"the state was saved with precision={own['precision']!r}, but this optimizer runs with {mode.name!r}; "
                "continue in the mode it was saved in, or load only the model's weights and start the optimizer anew"
            )


def _all_there(load: Callable[[], None]) -> None:
    """``load()``; what it misses is a ValueError, which all ranks are told of."""
    try:
        load()
    except (KeyError, IndexError, AttributeError, TypeError, OverflowError) as error:
        raise ValueError(
            f"the state is incomplete or something else ({type(error).__name__}: {printable(str(error))}); give what "
            "state_dict() returned"
        ) from error


def _cloned(state: dict[str, Any]) -> dict[str, Any]:
    masters = state.get("masters")
    return state if masters is None else {**state, "masters": {key: value.clone() for key, value in masters.items()}}
