"""A training run put back from a checkpoint, on whatever mesh: first all of it beside the run, then into it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...parallel.layout.pieces import Region, Shape
from ...parallel.mesh.text import some
from ..states.pieces import SCALAR_STATE
from ..whole.optimizer import WholeOptimizer
from .checksums import EARLIER
from .contents import LAYOUT, OptimizerState, Stepped, parse_key, whole
from .index import Stored
from .logical_parameters import LogicalParameters
from .logical_tensor import LogicalTensor, part_of
from .shared_record import SharedRecord


class Restoration:
    """What this rank needs of a checkpoint, and room for it.

    Made without touching the run, it compares what is stored with what the run needs. When `tensors` have been filled,
    `state_dict` is the optimizer's and `write_model` changes the model.

    Args:
        parameters: The model's.
        own: The optimizer's state, as it is now; None where the model is loaded alone.
        groups: The names of the parameters in each param group, those of all ranks together.
        stored: What tensors the checkpoint has, by key.
        shared: What else is in it.
    Raises:
        ValueError: The checkpoint does not fit.
    Collectives: none.

    Attributes:
        tensors: To be filled, on the CPU; by key.
    """

    def __init__(
        self,
        parameters: LogicalParameters,
        own: OptimizerState | None,
        groups: Sequence[Iterable[str]],
        stored: Mapping[str, Stored],
        shared: SharedRecord,
    ) -> None:
        self.tensors: dict[str, LogicalTensor] = {}
        self._stored, self._shared = stored, shared
        self._check_names(parameters)
        self._model = [
            (tensor, self._room(f"model/{name}", region, tensor.shape, tensor.dtype))
            for name, tensor, region in parameters.regions
        ]
        self._model += [(buffer, self._room_for_buffer(name, buffer)) for name, buffer in parameters.buffers.items()]
        self._own, self._state, self._masters = own, list[dict[str, Any]](), dict[int, Tensor]()
        if own is not None:
            self._check_groups(groups)
            self._check_states(own)
            self._state = [
                self._room_for_state(stepped) | self._room_for_whole(stepped, part)
                for stepped, part in zip(own.stepped, own.whole, strict=True)
            ]
            self._masters = self._room_for_masters(own)

    @property
    def together(self) -> list[str]:
        """The parameters, each with a few words, whose pieces come from pieces that had made different numbers of steps."""
        return self._shared.pieces.together

    # What fits --------------------------------------------------------------------------------------------------------

    def _check_names(self, parameters: LogicalParameters) -> None:
        saved = {parse_key(key)[-1] for key in self._stored if key.startswith("model/")}
        _check_same("parameters", saved, set(parameters.names), "in the model")
        _check_same("buffers", set(self._shared.buffers), parameters.buffer_names, "in the model")

    def _check_groups(self, groups: Sequence[Iterable[str]]) -> None:
        if len(groups) != len(self._shared.groups):
            raise ValueError(
                f"the checkpoint has {len(self._shared.groups)} param groups, the optimizer {len(groups)}; build the "
                "param groups that were saved"
            )
        for index, ((names, _), now) in enumerate(zip(self._shared.groups, groups, strict=True)):
            _check_same("parameters", set(names), set(now), f"in param group {index}")

    def _check_states(self, own: OptimizerState) -> None:
        """What the index and the record say of states is the same, and each parameter has all states that its optimizer
        has of it now."""
        stored = set(self._parts("state"))
        if differing := sorted(stored ^ self._shared.pieces.keys):
            shown = some(f"{kind} of {name}" for kind, name in differing)
            raise ValueError(f"index and record differ in the states of parameters: {shown}; {EARLIER}")
        for position, stepped in enumerate(own.stepped):
            now, kept = own.tensors.get(position, {}), self._shared.pieces.of(stepped.name, stepped.region)
            numbers = {*kept.scalars, *kept.values}
            missing = {key for key in now if key in SCALAR_STATE} - numbers
            if kept.tensors and missing:
                raise ValueError(f"the state of {stepped.name} has no {', '.join(sorted(missing))}")

    def _parts(self, kind: str) -> list[tuple[str, ...]]:
        return [parse_key(key)[1:] for key in self._stored if key.startswith(f"{kind}/")]

    def _find(self, key: str) -> Stored:
        if key not in self._stored:
            raise ValueError(f"the checkpoint has no {key}: it was saved in another mode; continue in that one")
        return self._stored[key]

    def _room(self, key: str, region: Region, shape: Shape, dtype: torch.dtype) -> Tensor:
        """An empty tensor of ``shape`` for a region of a logical tensor."""
        room = torch.empty(shape, dtype=dtype)
        found = self._find(key)
        if found != Stored(region.full_shape, dtype):
            raise ValueError(
                f"{key} has shape {found.shape}, {str(found.dtype)[6:]} in the checkpoint, but shape "
                f"{region.full_shape}, {str(dtype)[6:]} here; build the model that was saved, in the same mode; where two "
                "dims differ by a factor, one of the runs declares another dim as split than the one that is"
            )
        self.tensors[key] = part_of(region, room)
        return room

    def _room_for_all(self, key: str) -> Tensor:
        found = self._stored[key]
        room = torch.empty(found.shape, dtype=found.dtype)
        self.tensors[key] = whole(room)
        return room

    def _room_for_buffer(self, name: str, buffer: Tensor) -> Tensor:
        key = f"buffer/{self._shared.buffer(name)}/{name}"
        found = self._find(key)
        if found != Stored(tuple(buffer.shape), buffer.dtype):
            raise ValueError(
                f"the buffer {name} has shape {found.shape}, {str(found.dtype)[6:]} in the checkpoint, but "
                f"{tuple(buffer.shape)}, {str(buffer.dtype)[6:]} here; build the model that was saved"
            )
        return self._room_for_all(key)

    def _room_for_state(self, stepped: Stepped) -> dict[str, Any]:
        """The optimizer's state at one position."""
        name, region = stepped.name, stepped.region
        kept = self._shared.pieces.of(name, region)
        state = kept.plain()
        for key in kept.tensors:
            found = self._find(f"state/{key}/{name}")
            state[key] = self._room(f"state/{key}/{name}", region, stepped.piece.shape, found.dtype)
        places = {key: f"piece/{key}/{region}/{name}" for key in kept.odd}
        if lost := sorted(key for key, place in places.items() if place not in self._stored):
            raise ValueError(
                f"the optimizer's {', '.join(lost)} of {name} belongs to pieces of the parameter that no rank has now (it "
                "is not of the parameter's shape, so it can't be cut anew); continue on the mesh of the checkpoint"
            )
        return state | {key: self._room_for_all(place) for key, place in places.items()}

    def _room_for_whole(self, stepped: Stepped, part: WholeOptimizer | None) -> dict[str, Any]:
        """What belongs to the logical parameter, and this rank is to have."""
        keys = [parse_key(key)[1:] for key in self._stored if key.startswith("whole/")] if part is not None else []
        own = [
            key for key, name in keys if name == stepped.name and part is not None and part.keeps(stepped.piece, key)
        ]
        return {key: self._room_for_all(f"whole/{key}/{stepped.name}") for key in own}

    def _room_for_masters(self, own: OptimizerState) -> dict[int, Tensor]:
        masters = {}
        for position, (_, piece, name, region) in enumerate(own.stepped):
            if position in own.masters:
                masters[position] = self._room(f"master/{name}", region, piece.shape, torch.float32)
            elif piece.requires_grad and f"master/{name}" in self._stored:
                raise ValueError(
                    f"the checkpoint has a float32 master of {name}, the optimizer has none: it was saved in another mode; "
                    "continue in that one"
                )
        return masters

    # Putting it back ----------------------------------------------------------------------------------------------------

    def state_dict(self, rest: Mapping[str, Any]) -> dict[str, Any]:
        """For the ``load_state_dict`` of the optimizer, if there is one.

        Args:
            rest: What `OptimizerState.rest` was when it was saved, its ``"weights"`` reduced to what is portable.
        """
        assert self._own is not None, "asked for with an optimizer only"
        groups = [
            {**now, **self._shared.hyper(index), **{k: now[k] for k in ("params", "param_names") if k in now}}
            for index, now in enumerate(self._own.groups)
        ]
        weights = _rebuilt(self._own.rest["weights"], self._masters, rest["weights"])
        state = {position: kept for position, kept in enumerate(self._state) if kept}
        return {"state": state, "param_groups": groups, "meshstep": {**rest, "weights": weights}}

    @torch.no_grad()
    def write_model(self) -> None:
        """Put the stored values into the model's parameters and buffers."""
        for tensor, value in self._model:
            tensor.copy_(value)


def _rebuilt(weights: Mapping[str, Any], masters: Mapping[int, Tensor], portable: Mapping[str, Any]) -> dict[str, Any]:
    """The state of the weights as it is now, with other contents; a link whose part is missing says so when it loads."""
    own = {key: dict(masters) if key == "masters" else weights[key] for key in LAYOUT if key in weights}
    return own | {key: portable[key] for key in weights if key in portable}


def _check_same(kind: str, saved: set[str], now: set[str], where: str) -> None:
    if saved != now:
        parts = [f"{names} in the checkpoint only" for names in (some(sorted(saved - now)),) if names]
        parts += [f"{names} here only" for names in (some(sorted(now - saved)),) if names]
        raise ValueError(
            f"the {kind} {where} are not those of the checkpoint: {'; '.join(parts)}; build what was saved"
        )
