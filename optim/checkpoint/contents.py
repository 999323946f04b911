"""What a training run is, in parts that have a meaning on any mesh: from a model and its optimizer, and back into them.

Logical tensors, each by a key:

    model/<parameter>               the model's parameters and declared buffers
    state/<key>/<parameter>         the optimizer's state of the parameter's shape; first values where a piece has none
    whole/<key>/<parameter>         state that belongs to the logical parameter, of any shape: `WholeOptimizer.whole_states`
    piece/<key>/<where>/<parameter> state of any other shape: it belongs to this piece of the parameter
    master/<parameter>              float32 masters
    buffer/<digest>/<buffer>        buffers that nothing declared, one for each content

And a `RankRecord` from every rank, for what is no tensor or depends on the rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...parallel.layout.pieces import Region
from ..parallel_optimizer import ParallelOptimizer
from ..states.pieces import params_of
from ..step.known import first_value
from ..step.several import parts_of
from ..whole.optimizer import WholeOptimizer
from .logical_parameters import LogicalParameters
from .logical_tensor import LogicalTensor, part_of
from .piece_states import PieceState, PieceStates, Place, place_of

_FIELDS = {"model": 1, "state": 2, "whole": 2, "piece": 3, "master": 1, "buffer": 2}
LAYOUT = (
    "masters",
    "shards",
    "dtypes",
)  # what of the state of the weights is made anew for the layout that it comes to


def parse_key(key: str) -> tuple[str, ...]:
    """The parts of a key, the kind first and the name last.

    Raises:
        ValueError: It is no key of this format.
    """
    kind, _, rest = key.partition("/")
    parts = (kind, *rest.split("/", _FIELDS.get(kind, 1) - 1))
    if len(parts) != _FIELDS.get(kind, 0) + 1:
        raise ValueError(
            f"the checkpoint has a tensor {key!r}, which meshstep does not write; load one that save_checkpoint wrote"
        )
    return parts


@dataclass
class RankRecord:
    """What one rank says besides tensors.

    Args:
        groups: For each param group the names of its parameters on this rank and its hyper-parameters.
        buffers: Digests of the undeclared buffers, by name.
        pieces: What the optimizer has for each piece of a parameter, by parameter and place.
    """

    groups: list[tuple[list[str], dict[str, Any]]] = field(default_factory=list)
    buffers: dict[str, str] = field(default_factory=dict)
    pieces: dict[str, dict[Place, PieceState]] = field(default_factory=dict)


class Stepped(NamedTuple):
    """What the optimizer has at one position: (a piece of) a parameter or its master, and where that is."""

    param: Tensor
    piece: Tensor
    name: str
    region: Region


class OptimizerState(NamedTuple):
    """An optimizer's state dict, taken apart."""

    stepped: list[Stepped]  # by position in the param groups
    tensors: dict[int, dict[str, Any]]  # by position and key
    masters: dict[int, Tensor]  # by position
    whole: list[WholeOptimizer | None]  # by position: who knows what of its state belongs to the logical parameter
    groups: list[dict[str, Any]]
    rest: dict[str, Any]  # precision, loss scale, ...: ``state_dict()["meshstep"]``


def optimizer_state(optimizer: ParallelOptimizer, parameters: LogicalParameters) -> OptimizerState:
    """Raises ValueError where the optimizer steps what is not in the model. Collectives: none. Host reads: a few."""
    state = optimizer.state_dict()
    rest = {key: value for key, value in state["meshstep"].items() if key != "coordinates"}  # any rank reads it
    stepped = []
    for piece in optimizer.pieces():
        name, region = parameters.of(piece.param)
        stepped.append(Stepped(piece.param, piece.piece, name, region.run(piece.offset, piece.piece.numel())))
    whole_parts = [part for part in parts_of(optimizer.optimizer) if isinstance(part, WholeOptimizer)]
    by_piece = {id(tensor): part for part in whole_parts for tensor in params_of(part.param_groups)}
    of_whole = [by_piece.get(id(one.piece)) for one in stepped]
    return OptimizerState(stepped, state["state"], masters_in(rest["weights"]), of_whole, state["param_groups"], rest)


def masters_in(weights: Mapping[str, Any]) -> dict[int, Tensor]:
    """The masters, by position, in the state of an optimizer's weights, at whatever depth."""
    found: dict[int, Tensor] = dict(weights.get("masters") or {})
    for key, value in weights.items():
        if key != "masters" and isinstance(value, Mapping):
            found |= masters_in(value)
    return found


def portable_in(weights: Mapping[str, Any]) -> dict[str, Any]:
    """What of the state of an optimizer's weights is neither masters nor layout."""
    return {key: value for key, value in weights.items() if key not in LAYOUT}


# Saving -----------------------------------------------------------------------------------------------------------------


def collect(parameters: LogicalParameters, state: OptimizerState) -> tuple[dict[str, LogicalTensor], RankRecord]:
    """This rank's parts of all tensors (views, nothing is copied), and its record.

    Collectives: none. Host reads: the undeclared buffers.
    """
    tensors = {f"model/{name}": part_of(region, tensor) for name, tensor, region in parameters.writes()}
    record = RankRecord()
    for name, buffer in parameters.buffers.items():
        record.buffers[name] = digest(buffer)
        tensors[f"buffer/{record.buffers[name]}/{name}"] = whole(buffer)
    for group in state.groups:
        names = [state.stepped[position].name for position in group["params"]]
        hyper = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        record.groups.append((sorted(set(names)), hyper))
    for position, (stepped, part) in enumerate(zip(state.stepped, state.whole, strict=True)):
        kept = state.tensors.get(position, {})
        shared = {key: value for key, value in kept.items() if part is not None and part.is_whole_state(key)}
        for key, value in shared.items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"the optimizer's {key} of {stepped.name} is a {type(value).__name__}, of which nothing says what is "
                    "in it: save state_dict() on each rank, for the same mesh, or take one whose state is tensors"
                )
            tensors[f"whole/{key}/{stepped.name}"] = whole(value)
        if parameters.is_first(stepped.param):
            kept = {key: value for key, value in kept.items() if key not in shared}
            own = PieceState.of(kept, stepped.piece, stepped.region)
            record.pieces.setdefault(stepped.name, {})[place_of(stepped.region)] = own
            tensors.update(_state_tensors(stepped, own, kept))
            if position in state.masters:
                tensors[f"master/{stepped.name}"] = part_of(stepped.region, state.masters[position].detach())
    return tensors, record


def _state_tensors(stepped: Stepped, own: PieceState, state: Mapping[str, Any]) -> Iterator[tuple[str, LogicalTensor]]:
    for key in own.tensors:
        yield f"state/{key}/{stepped.name}", part_of(stepped.region, state[key].detach())
    for key in own.odd:
        yield f"piece/{key}/{stepped.region}/{stepped.name}", whole(state[key])


def first_states_for_others(
    parameters: LogicalParameters, state: OptimizerState, pieces: PieceStates, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, LogicalTensor]]:
    """State of the parameters' shapes that this rank's pieces lack and other pieces of the same parameters have: as torch
    begins it.

    Args:
        pieces: Of all ranks.
        optimizer: The wrapped one.
    """
    groups = [(part, group) for part in parts_of(optimizer) for group in part.param_groups]
    group_of = {id(param): (part, group) for part, group in groups for param in group["params"]}
    for stepped in state.stepped:
        if parameters.is_first(stepped.param):
            for key, dtype in pieces.missing(stepped.name, stepped.region):
                first = torch.full((), first_value(*group_of[id(stepped.piece)], key), dtype=dtype)
                yield f"state/{key}/{stepped.name}", part_of(stepped.region, first.expand(stepped.piece.shape))


def whole(tensor: Tensor) -> LogicalTensor:
    """A tensor that every rank which has it has whole."""
    return LogicalTensor(tuple(tensor.shape), tensor.dtype, {(0,) * tensor.dim(): tensor.detach()})


def digest(tensor: Tensor) -> str:
    """Of dtype, shape and bits. Host reads: all of it."""
    local = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    content = ctypes.string_at(local.data_ptr(), local.nbytes) if local.nbytes else b""
    return blake2b(repr((local.dtype, tuple(local.shape))).encode() + content, digest_size=8).hexdigest()
