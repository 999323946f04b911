"""A training run put back from a checkpoint, on whatever mesh: first all of it beside the run, then into it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...parallel.layout.pieces import Region, Shape
from ..states.pieces import SCALAR_STATE
from .contents import LAYOUT, OptimizerState, Stepped, parse_key, whole
from .logical_parameters import LogicalParameters
from .logical_tensor import LogicalTensor, Stored, part_of
from .shared_record import SharedRecord


class Restoration:
    """What this rank needs of a checkpoint, and room for it.

    Made without touching the run, it compares what is stored with what the run needs. When `tensors` have been filled,
    `state_dict` is the optimizer's and `write_model` changes the model.

    Args:
        parameters, own: The model's, and the optimizer's state, as they are now.
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
        own: OptimizerState,
        groups: Sequence[Iterable[str]],
        stored: Mapping[str, Stored],
        shared: SharedRecord,
    ) -> None:
        self.tensors: dict[str, LogicalTensor] = {}
        self._own, self._stored, self._shared = own, stored, shared
        self._check_names(parameters, groups)
        self._model = [
            (tensor, self._room(f"model/{name}", region, tensor.shape, tensor.dtype))
            for name, tensor, region in parameters.regions
        ]
        self._model += [(buffer, self._room_for_buffer(name, buffer)) for name, buffer in parameters.buffers.items()]
        self._kept: dict[str, list[tuple[str, ...]]] = {}  # of each parameter what there is of the optimizer's state
        for key in stored:
            kind, *between, name = parse_key(key)
            if kind in ("state", "piece", "master"):
                self._kept.setdefault(name, []).append((kind, *between))
        self._state = [self._room_for_state(stepped) for stepped in own.stepped]
        self._masters = self._room_for_masters()

    # What fits --------------------------------------------------------------------------------------------------------

    def _check_names(self, parameters: LogicalParameters, groups: Sequence[Iterable[str]]) -> None:
        saved = {parse_key(key)[-1] for key in self._stored if key.startswith("model/")}
        _check_same("parameters", saved, set(parameters.names), "in the model")
        _check_same("buffers", set(self._shared.buffers), parameters.buffer_names, "in the model")
        if len(groups) != len(self._shared.groups):
            raise ValueError(
                f"the checkpoint has {len(self._shared.groups)} param groups, the optimizer {len(groups)}; build the "
                "param groups that were saved"
            )
        for index, ((names, _), now) in enumerate(zip(self._shared.groups, groups, strict=True)):
            _check_same("parameters", set(names), set(now), f"in param group {index}")

    def _find(self, key: str) -> Stored:
        if key not in self._stored:
            raise ValueError(f"the checkpoint has no {key}: it was saved in another mode")
        return self._stored[key]

    def _room(self, key: str, region: Region, shape: Shape, dtype: torch.dtype) -> Tensor:
        """An empty tensor of ``shape`` for a region of a logical tensor."""
        room = torch.empty(shape, dtype=dtype)
        found = self._find(key)
        if found != Stored(region.full_shape, dtype):
            raise ValueError(
                f"{key} has shape {found.shape}, {str(found.dtype)[6:]} in the checkpoint, but shape "
                f"{region.full_shape}, {str(dtype)[6:]} here; build the model that was saved, in the same mode"
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
                f"{tuple(buffer.shape)}, {str(buffer.dtype)[6:]} here"
            )
        return self._room_for_all(key)

    def _room_for_state(self, stepped: Stepped) -> dict[str, Any]:
        """The optimizer's state at one position."""
        name, region = stepped.name, stepped.region
        state: dict[str, Any] = self._shared.values(name)
        elsewhere = set()
        for kind, *between in self._kept.get(name, []):
            if kind == "state":
                key = f"state/{between[0]}/{name}"
                found = self._stored[key]
                if found.shape == () and (region.full_shape != () or between[0] in SCALAR_STATE):
                    state[between[0]] = self._room_for_all(key)
                else:
                    state[between[0]] = self._room(key, region, stepped.piece.shape, found.dtype)
            elif kind == "piece" and between[1] == str(region):
                state[between[0]] = self._room_for_all(f"piece/{between[0]}/{between[1]}/{name}")
            elif kind == "piece":
                elsewhere.add(between[0])
        if lost := sorted(elsewhere - state.keys()):
            raise ValueError(
                f"the optimizer's {', '.join(lost)} of {name} belongs to pieces of the parameter that no rank has now (it "
                "is not of the parameter's shape, so it can't be cut anew); continue on the mesh of the checkpoint"
            )
        return state

    def _room_for_masters(self) -> dict[int, Tensor]:
        masters = {}
        for position, (_, piece, name, region) in enumerate(self._own.stepped):
            if position in self._own.masters:
                masters[position] = self._room(f"master/{name}", region, piece.shape, torch.float32)
            elif ("master",) in self._kept.get(name, []):
                raise ValueError(f"the checkpoint has a float32 master of {name}, the optimizer has none: another mode")
        return masters

    # Putting it back ----------------------------------------------------------------------------------------------------

    def state_dict(self, rest: Mapping[str, Any]) -> dict[str, Any]:
        """For the optimizer's ``load_state_dict``.

        Args:
            rest: What `OptimizerState.rest` was when it was saved, its ``"weights"`` reduced to what is portable.
        """
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
        parts = [f"{names} in the checkpoint only" for names in (_some(saved - now),) if names]
        parts += [f"{names} here only" for names in (_some(now - saved),) if names]
        raise ValueError(
            f"the {kind} {where} are not those of the checkpoint: {'; '.join(parts)}; build what was saved"
        )


def _some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")
