"""The contents of a checkpoint: tensors by key, and one record per rank.

A piece is the shard of a parameter that the optimizer steps on one rank. Keys of tensors; all tensors except those under
``piece/`` and ``buffer/`` are full tensors, which do not depend on the mesh:

    model/<parameter>               the model's parameters and declared buffers
    state/<key>/<parameter>         optimizer state of the parameter's shape; pieces without a state get initial values
    whole/<key>/<parameter>         state of any shape that belongs to the full tensor: `WholeOptimizer.whole_states`
    piece/<key>/<where>/<parameter> state of any other shape, which belongs to one piece
    master/<parameter>              float32 master weights
    buffer/<digest>/<buffer>        undeclared buffers; equal buffers of several ranks are saved once

A `RankRecord` holds the other data of a rank: hyper-parameters, hashes of buffers, and the numbers in optimizer states.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...amp.master_weights import SCALAR_STATE
from ...parallel.interop.local_parameters import discard_gathered, local_parameter
from ...parallel.layout.annotation import Annotation, annotation_of
from ...parallel.layout.shard import Box, Region, Shape
from ...parallel.layout.spec import Span
from ...parallel.mesh.agreement import on_all_ranks, on_all_ranks_with
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from ...parallel.mesh.value_checks import (
    anything,
    check_count,
    check_number,
    check_text,
    dict_of,
    fields,
    items,
    list_of,
    python_numbers,
    wrong,
)
from ..norm.plan import ReductionPlan, entries_of, logical_shape
from ..norm.plan_agreement import Summary, agree
from ..parallel_optimizer import ParallelOptimizer
from ..states.optimizer_state import check_state_value
from ..step.c_engine import first_value
from ..step.wrapped_optimizer import asks_other_ranks, params_of, parts_of

if TYPE_CHECKING:
    from ..whole.optimizer import WholeOptimizer

# The parameters of a model, under names that are equal on every rank and in every layout ------------------------------


class NamedShard(NamedTuple):
    """This rank's shard of a parameter or declared buffer: its logical name, local tensor, and region of the full tensor.

    ``is_saved`` is False for a tied parameter that an earlier pipeline stage saves. Stages may shard it differently, and
    shards of different layouts would overlap.
    """

    name: str
    tensor: Tensor
    region: Region
    is_saved: bool


class LogicalParameters:
    """This rank's parameters and declared buffers, with their logical names and their regions of the full tensors.

    A logical name identifies a parameter or buffer of the full model, and is the same on every rank that holds it. If
    pipeline stages or owner ranks use one name for different parameters, their coordinates are appended, as in
    ``weight@pipe=1``. The name of a tied parameter is its name on the first rank that holds it.

    ``trainable_only``: only parameters with ``requires_grad``, and buffers of modules that hold such a parameter
    themselves.

    Collectives: object all-gathers; none with one rank.

    Attributes:
        names: The logical names in `shards` of all ranks. The list is equal on every rank.
        shards: This rank's shard of each parameter and declared buffer.
        buffers: This rank's undeclared persistent buffers, by name in the model.
        buffer_names: The names of all ranks' undeclared persistent buffers.
    """

    def __init__(self, model: nn.Module, registry: ProcessGroupRegistry, trainable_only: bool = False) -> None:
        topology, self.trainable_only = registry.topology, trainable_only

        def declare_parameters() -> tuple[
            tuple[dict[str, Tensor], list[Tensor], ReductionPlan], tuple[Summary, set[str]]
        ]:
            buffers, held = _parameters_and_buffers(unwrapped(model), trainable_only)
            entries = entries_of([list(held.items())], topology)
            plan = ReductionPlan.of(entries, topology, registry.global_rank)
            return (buffers, [*held.values()], plan), (Summary.of(plan, names=True), set(buffers))

        (self.buffers, held, plan), by_rank = on_all_ranks_with(declare_parameters, registry)
        plan = agree(plan, [summary for summary, _ in by_rank], registry)
        self.names = plan.parameter_names
        self.buffer_names = {name for _, buffers in by_rank for name in buffers}
        self._shard_of: dict[int, NamedShard] = {}
        self.shards = on_all_ranks(lambda: self._make_shards(held, plan), registry)

    def _make_shards(self, held: list[Tensor], plan: ReductionPlan) -> list[NamedShard]:
        """Return the shards of the tensors ``held``; raise ValueError if the shape of one does not fit its spec."""
        shards, topology = [], plan.topology
        for entry, slot, tensor in zip(plan.entries, plan.parameter_slots, held, strict=True):
            local = local_parameter(tensor, topology)
            full = logical_shape(tensor, annotation_of(local) or Annotation(entry.spec), topology)
            region = Region.of_shard(full, local.shape, entry.spec, topology, plan.coordinate, entry.name)
            tied = ((axis, entry.spec.tied_coordinates(axis, topology)) for axis, _ in entry.spec.tied)
            is_saved = all(plan.coordinate[axis] == where[0] for axis, where in tied)
            shard = NamedShard(self.names[slot], local.detach(), region, is_saved)
            self._shard_of[id(tensor)] = self._shard_of[id(local)] = shard
            shards.append(shard)
        return shards

    def of(self, param: Tensor) -> NamedShard:
        """Return this rank's shard of a model parameter."""
        if id(param) not in self._shard_of:
            annotation = annotation_of(param)
            label = (annotation.name if annotation else None) or "a parameter"
            raise ValueError(
                f"the optimizer steps {label} of shape {tuple(param.shape)}, which is not in the model; give the full "
                "model whose parameters the optimizer was made with"
            )
        return self._shard_of[id(param)]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return ``model`` without wrappers such as DistributedDataParallel, which add prefixes to names of parameters."""
    while True:
        within = (model._modules.get(name) for name in ("_orig_mod", "_forward_module"))
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif (inner := next((module for module in within if module is not None), None)) is not None:
            model = inner
        else:
            return model


def _parameters_and_buffers(model: nn.Module, trainable_only: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return (undeclared persistent buffers, parameters and declared persistent buffers), both by name.

    Raise ValueError if a module has non-empty extra state (``get_extra_state``).
    """
    discard_gathered(model)  # `named_parameters` would return them instead of the shards
    params: dict[str, Tensor] = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    saved = model.state_dict(keep_vars=True)
    if trainable_only:
        params = {name: param for name, param in params.items() if param.requires_grad}
        modules = model.named_modules(remove_duplicate=False)
        trained = {name for name, module in modules if any(p.requires_grad for p in module.parameters(recurse=False))}
        saved = {name: value for name, value in saved.items() if name.rpartition(".")[0] in trained}
    for name, value in saved.items():
        own_kind = name.endswith("_extra_state") and name not in params and name not in buffers
        if own_kind and not _is_empty(value):
            raise ValueError(
                f"{name} is extra state of a module, which can't be resharded: let get_extra_state() return None, and pass "
                "the state as extra= of save_checkpoint"
            )
    persistent = {name: buffer for name, buffer in buffers.items() if name in saved}
    declared = {name: buffer for name, buffer in persistent.items() if annotation_of(buffer) is not None}
    undeclared = {name: buffer for name, buffer in persistent.items() if name not in declared}
    return undeclared, {**params, **declared}


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, Tensor) and value.numel() == 0)


# Full tensors in a checkpoint, independent of the layout of the ranks that saved them ---------------------------------


@dataclass(frozen=True)
class SavedTensor:
    """This rank's parts of a full tensor, by their positions in the full tensor. The parts do not overlap."""

    shape: Shape
    dtype: torch.dtype
    parts: dict[Box, Tensor]


@dataclass(frozen=True)
class HeldTensor:
    """Shape, dtype and positions of a rank's parts of a full tensor, without their elements."""

    shape: Shape
    dtype: torch.dtype
    boxes: tuple[Box, ...]

    def __str__(self) -> str:
        return f"a tensor of shape {self.shape}, {str(self.dtype)[6:]}"


def part_of(region: Region, tensor: Tensor) -> SavedTensor:
    """Return a shard, with its elements in the order of ``region``, as parts: views of ``tensor`` if it is contiguous."""
    parts = {Box(offsets, tuple(part.shape)): part for offsets, part in region.parts(tensor).items()}
    return SavedTensor(region.full_shape, tensor.dtype, parts)


# The optimizer state of a shard, and its use when shards are combined on another mesh ---------------------------------

# Step counts, and other optimizer states that are one number, are saved per shard. `ParallelOptimizer` steps all shards
# of a tensor or none, but earlier versions did not step a shard without a gradient, such as an expert without tokens.
# When the checkpoint is loaded in the same layout, each shard gets its own numbers back. In another layout, a new shard
# may combine several saved shards. If their numbers differ, the new shard gets all numbers of the saved shard with the
# fewest steps, ignoring shards that were never stepped. Elements without a saved state get initial values.

Place = tuple[tuple[tuple[Span, ...], ...], int, int]
"""The region of a shard within its parameter, as a tuple of the fields ``spans``, ``start`` and ``stop`` of `Region`."""


@dataclass(frozen=True)
class PieceState:
    """Description of the optimizer state of one shard: all of it except the elements of ``tensors`` and ``odd``.

    Keys are names of states, such as "exp_avg". ``tensors`` has the dtypes of states with the shard's shape, and
    ``odd`` the keys of other tensors. ``scalars`` has (name of the dtype, value) of states that are one number per
    shard as a 0-dim tensor, and ``values`` has the states that are not tensors.
    """

    tensors: dict[str, str] = field(default_factory=dict)
    odd: list[str] = field(default_factory=list)
    scalars: dict[str, tuple[str, float]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Mapping[str, Any], piece: Tensor, region: Region) -> PieceState:
        """Return the description of a shard's states. Host synchronization: one per scalar (`is_scalar`) on a device."""
        found = cls()
        for key, value in state.items():
            if not isinstance(value, Tensor):
                found.values[key] = value
            elif is_scalar(key, value, len(region.full_shape)):
                found.scalars[key] = (_name(value), value.item())
            elif value.shape == piece.shape:
                found.tensors[key] = _name(value)
            else:
                found.odd.append(key)
        return found

    def plain(self) -> dict[str, Any]:
        """Return the states that this object contains entirely: ``values``, and ``scalars`` as 0-dim CPU tensors."""
        scalars = {
            key: torch.tensor(number, dtype=getattr(torch, name)) for key, (name, number) in self.scalars.items()
        }
        return {**self.values, **scalars}

    @property
    def steps(self) -> Any:
        """Return the shard's step count; None if its state has no step count."""
        return self.scalars["step"][1] if "step" in self.scalars else self.values.get("step")

    @property
    def is_begun(self) -> bool:
        """Return True if the optimizer has updated the shard: it has states, and no step count of 0.

        A fused optimizer creates states with a step count of 0 if its first step is skipped.
        """
        return not same(self, PieceState()) and self.steps != 0


def _check_dtype(value: object, field: str) -> None:
    if not isinstance(value, str) or not isinstance(getattr(torch, value, None), torch.dtype):
        raise wrong(field, value, "the name of a dtype")


def _check_scalar(value: object, field: str) -> None:
    if isinstance(value, (list, tuple)) and len(value) == 2 and isinstance(value[1], (bool, complex)):
        _check_dtype(value[0], field)
        return
    items(_check_dtype, check_number)(value, field)


def check_piece_state(value: object, field: str) -> None:
    """Raise ValueError unless ``value`` is a dict with the fields of a `PieceState`, with numbers in their valid range."""
    checks = {
        "tensors": dict_of(_check_dtype),
        "odd": list_of(check_text),
        "scalars": dict_of(_check_scalar),
        "values": dict_of(anything),
    }
    fields(checks)(value, field)
    assert isinstance(value, Mapping)
    if unknown := value.keys() - checks.keys():
        raise ValueError(
            f"{field} has unknown entries {', '.join(map(repr, unknown))}; a state has only {', '.join(checks)}"
        )
    numbers = {**value["values"], **{key: number for key, (_, number) in value["scalars"].items()}}
    for key, number in numbers.items():
        check_state_value(key, number, field)


def check_place(value: object, field: str) -> None:
    """Raise ValueError unless ``value`` is a `Place`. ``field`` is the name of the value in the error."""
    items(list_of(list_of(items(check_count, check_count))), check_count, check_count)(value, field)


def is_scalar(key: str, value: Tensor, dims: int) -> bool:
    """Return True if the state ``value`` named ``key`` of a parameter with ``dims`` dims is one number per shard.

    A step count is such a number. A 0-dim state of a 0-dim parameter may be a moment. It counts as a number only if
    ``key`` is in `SCALAR_STATE`.
    """
    return value.dim() == 0 and (dims > 0 or key in SCALAR_STATE)


def scalars_on_host(states: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return optimizer states, by position and key, with all 0-dim tensors on the CPU.

    Host synchronization: one per device and dtype of the 0-dim tensors.
    """
    found = {position: dict(state) for position, state in states.items()}
    places: dict[tuple[torch.device, torch.dtype], list[tuple[int, str]]] = {}
    for position, state in found.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() == 0 and not value.is_cpu:
                places.setdefault((value.device, value.dtype), []).append((position, key))
    for at in places.values():
        numbers = torch.stack([found[position][key].detach() for position, key in at]).cpu()
        for (position, key), number in zip(at, numbers.unbind(), strict=True):
            found[position][key] = number
    return found


def place_of(region: Region) -> Place:
    return region.spans, region.start, region.stop


# The states of all ranks ----------------------------------------------------------------------------------------------

RankStates = Mapping[str, Mapping[Place, PieceState]]  # the states of one rank's shards, by parameter and place


def merge_states(ranks: Sequence[RankStates]) -> dict[str, list[tuple[dict[str, Any], dict[Place, list[int]]]]]:
    """Merge the states of all ranks' shards. Shards of a parameter with equal states share one entry.

    ``ranks`` has the states of each rank's shards. Return, per parameter, a list of (fields of the `PieceState` as a
    dict, ranks whose shards have this state, by place). If all shards have equal states, the dict of ranks is empty.
    """
    found: dict[str, list[tuple[PieceState, dict[Place, list[int]]]]] = {}
    for rank, own in enumerate(ranks):
        for name, pieces in own.items():
            states = found.setdefault(name, [])
            for place, state in pieces.items():
                at = next((places for known, places in states if same(known, state)), None)
                if at is None:
                    states.append((state, at := {}))
                at.setdefault(place, []).append(rank)
    return {
        name: [(asdict(state), places if len(states) > 1 else {}) for state, places in states]
        for name, states in found.items()
    }


class PieceStates:
    """The saved states of all shards. `of` returns the state of a shard in any layout.

    ``content`` is the result of `merge_states`. ``ranks`` are the saved ranks that correspond to this rank: if the
    saved replicas of a shard have different states, the states of these ranks are used.

    Attributes:
        combined: Different messages about parameters. `of` adds one if it combines saved shards with different states,
            and the optimizer had stepped any of them.
    """

    def __init__(self, content: Mapping[str, Any], ranks: set[int]) -> None:
        self._states = {
            name: [(PieceState(**state), places) for state, places in states] for name, states in content.items()
        }
        self._ranks = ranks
        self.combined: list[str] = []

    @property
    def keys(self) -> set[tuple[str, str]]:
        """Return (key of the state, name of the parameter) for all states that have the shape of their shard."""
        return {(key, name) for name, states in self._states.items() for state, _ in states for key in state.tensors}

    def missing(self, name: str, region: Region) -> Iterator[tuple[str, torch.dtype]]:
        """Iterate over (key, dtype) of the states that other shards of the parameter have, but not this shard.

        Only states of the shards' shape count. Yields a state only if no replica of this shard has it.
        """
        states = self._states.get(name, [])
        here = {key for state, places in states if place_of(region) in places for key in state.tensors}
        known = {key: dtype for state, places in states for key, dtype in state.tensors.items() if places}
        return ((key, getattr(torch, known[key])) for key in sorted(known.keys() - here))

    def of(self, name: str, region: Region) -> PieceState:
        """Return the state of the shard that holds ``region`` of parameter ``name``; an empty state if none was saved.

        The shard may combine saved shards with different states. Then it gets the numbers of the stepped shard with the
        fewest steps. If any of the saved shards was stepped, a message is added to `combined`, unless it is there
        already. Raise ValueError if a state that is not a number differs between the saved shards.
        """
        states = self._states.get(name, [])
        if len(states) < 2:
            return states[0][0] if states else PieceState()
        here = [(state, places[place_of(region)]) for state, places in states if place_of(region) in places]
        found = [state for state, ranks in here if not self._ranks.isdisjoint(ranks)] or [state for state, _ in here]
        if not found:
            found = [state for state, places in states if any(_region(region, at).overlaps(region) for at in places)]
        return self._combine(name, found) if len(found) > 1 else found[0] if found else PieceState()

    def _combine(self, name: str, states: Sequence[PieceState]) -> PieceState:
        stepped = [state for state in states if state.is_begun]
        begun = stepped or [state for state in states if not same(state, PieceState())]
        counts = [state.steps for state in begun]
        differing = _differing([{**state.scalars, **state.values} for state in begun])
        if differing and (None in counts or not all(_is_number(state, key) for state in begun for key in differing)):
            raise ValueError(
                f"the saved optimizer state {', '.join(map(repr, differing))} of {name} differs between shards that this "
                "mesh combines, and no value is right for all of them; continue on the mesh of the checkpoint"
            )
        fewest = begun[counts.index(min(counts))] if differing else begun[0]
        tensors = {key: dtype for state in begun for key, dtype in state.tensors.items()}
        how = [f"{min(counts):g} to {max(counts):g} steps"] if differing else []
        missing = any(not state.is_begun or state.tensors.keys() != tensors.keys() for state in states)
        how += ["no state yet"] if missing else []
        message = f"{name} ({', '.join(how)})"
        if stepped and message not in self.combined:
            self.combined.append(message)
        return PieceState(
            tensors,
            sorted({key for state in begun for key in state.odd}),
            fewest.scalars,
            fewest.values,
        )


def _region(of_same_parameter: Region, place: Place) -> Region:
    return Region(of_same_parameter.full_shape, *place)


def _differing(found: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = {key for one in found for key in one}
    return sorted(key for key in keys if any(not same(one.get(key), found[0].get(key)) for one in found))


def _is_number(state: PieceState, key: str) -> bool:
    return key in state.scalars or isinstance(state.values.get(key), (int, float))


def same(one: object, other: object) -> bool:
    """Return ``one == other`` as a bool; False if this raises RuntimeError, as for tensors of several elements."""
    try:
        return bool(one == other)
    except RuntimeError:  # a tensor of several elements has no truth value
        return False


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# Keys of tensors, records of ranks, and the contents of an optimizer's state dict ---------------------------------------

_FIELDS = {"model": 1, "state": 2, "whole": 2, "piece": 3, "master": 1, "buffer": 2}
# Entries of ``state_dict()["meshstep"]["weights"]`` that depend on the layout. They are not saved, except for
# master weights, which are saved as full tensors. A load keeps the "shards" and "dtypes" of the optimizer.
LAYOUT = ("masters", "shards", "dtypes")


def parse_key(key: str) -> tuple[str, ...]:
    """Return the parts of a checkpoint key: ("state", "exp_avg", "layer.weight") of "state/exp_avg/layer.weight"."""
    kind, _, rest = key.partition("/")
    parts = (kind, *rest.split("/", _FIELDS.get(kind, 1) - 1))
    if len(parts) != _FIELDS.get(kind, 0) + 1:
        raise ValueError(
            f"the checkpoint has a tensor {key!r}, which meshstep does not write; load a checkpoint of save_checkpoint"
        )
    return parts


@dataclass
class RankRecord:
    """The data of one rank in a checkpoint, without the elements of tensors.

    ``groups`` has (names of the parameters on this rank, hyper-parameters) per param group. ``buffers`` has the hash of
    each undeclared buffer's contents, by name; see `digest`.
    """

    groups: list[tuple[list[str], dict[str, Any]]] = field(default_factory=list)
    buffers: dict[str, str] = field(default_factory=dict)
    pieces: dict[str, dict[Place, PieceState]] = field(default_factory=dict)


class Stepped(NamedTuple):
    """A tensor that the optimizer steps, with its name and region in the checkpoint.

    ``tensor`` is a local model parameter, a shard of it, an offloaded copy, or the float32 master weight of these.
    ``name`` and ``is_saved`` are those of the parameter's `NamedShard`, and ``region`` is the region that ``tensor`` holds.
    ``whole`` is the full-tensor optimizer that steps ``tensor``; None: another optimizer steps it.
    """

    tensor: Tensor
    name: str
    region: Region
    is_saved: bool
    whole: WholeOptimizer | None


class OptimizerState(NamedTuple):
    """The contents of an optimizer's state dict. A position is the index of a stepped tensor over all param groups."""

    stepped: dict[int, Stepped]  # by position; without frozen parameters if `LogicalParameters.trainable_only` is True
    tensors: dict[int, dict[str, Any]]  # optimizer states, by position and key
    masters: dict[int, Tensor]  # master weights, by position
    groups: list[dict[str, Any]]
    rest: dict[str, Any]  # ``state_dict()["meshstep"]`` without coordinates: precision, loss scale and more

    def names_in(self, group: Mapping[str, Any]) -> list[str]:
        """Return the names of the parameters in ``group``, an item of `groups`, that `stepped` contains."""
        return [self.stepped[position].name for position in group["params"] if position in self.stepped]


def optimizer_state(optimizer: ParallelOptimizer, parameters: LogicalParameters) -> OptimizerState:
    """Return the contents of the optimizer's state dict, with the name and region of each stepped tensor.

    Host synchronization: yes.
    """
    state = python_numbers(optimizer.state_dict())
    # A state with the entry "coordinates" can't be loaded on a rank with other mesh coordinates.
    rest = {key: value for key, value in state["meshstep"].items() if key != "coordinates"}
    whole_parts: list[Any] = [part for part in parts_of(optimizer.optimizer) if asks_other_ranks(part)]
    whole_of = {id(tensor): part for part in whole_parts for tensor in params_of(part)}
    stepped = {}
    for position, row in enumerate(optimizer.stepped_tensors()):
        if parameters.trainable_only and not row.leaf.requires_grad:
            continue
        shard = parameters.of(row.param)
        region = shard.region.run(row.offset, row.tensor.numel())
        stepped[position] = Stepped(row.tensor, shard.name, region, shard.is_saved, whole_of.get(id(row.tensor)))
    return OptimizerState(stepped, state["state"], find_master_weights(rest["weights"]), state["param_groups"], rest)


def find_master_weights(weights: Mapping[str, Any]) -> dict[int, Tensor]:
    """Return the master weights in the nested entry ``"weights"`` of an optimizer's state, by position."""
    found: dict[int, Tensor] = dict(weights.get("masters") or {})
    for key, value in weights.items():
        if key != "masters" and isinstance(value, Mapping):
            found |= find_master_weights(value)
    return found


def portable_entries(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``weights`` that do not depend on the layout: all except those named in `LAYOUT`."""
    return {key: value for key, value in weights.items() if key not in LAYOUT}


# Saving -----------------------------------------------------------------------------------------------------------------


def collect(parameters: LogicalParameters, state: OptimizerState) -> tuple[dict[str, SavedTensor], RankRecord]:
    """Return this rank's parts of all saved tensors by key, and its `RankRecord`. Parts of contiguous tensors are views.

    Raise ValueError if a state that belongs to a full tensor (`WholeOptimizer.whole_states`) is not a tensor.

    Host synchronization: one per undeclared buffer on a device, and those of `scalars_on_host`.
    """
    saved = (shard for shard in parameters.shards if shard.is_saved)
    tensors = {f"model/{shard.name}": part_of(shard.region, shard.tensor) for shard in saved}
    record = RankRecord()
    for name, buffer in parameters.buffers.items():
        record.buffers[name] = digest(buffer)
        tensors[f"buffer/{record.buffers[name]}/{name}"] = whole(buffer)
    for group in state.groups:
        names = state.names_in(group)
        hyper = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        record.groups.append((sorted(set(names)), hyper))
    states = scalars_on_host(state.tensors)
    for position, stepped in state.stepped.items():
        kept, part = states.get(position, {}), stepped.whole
        shared = {key: value for key, value in kept.items() if part is not None and part.is_whole_state(key)}
        for key, value in shared.items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"the optimizer state {key!r} of {stepped.name} is a {type(value).__name__}, which can't be saved for "
                    "another mesh: save optimizer.state_dict() on each rank to continue on the same mesh, or use an "
                    "optimizer whose states are tensors"
                )
            tensors[f"whole/{key}/{stepped.name}"] = whole(value)
        if stepped.is_saved:
            kept = {key: value for key, value in kept.items() if key not in shared}
            own = PieceState.of(kept, stepped.tensor, stepped.region)
            record.pieces.setdefault(stepped.name, {})[place_of(stepped.region)] = own
            tensors.update(_state_tensors(stepped, own, kept))
            if position in state.masters:
                tensors[f"master/{stepped.name}"] = part_of(stepped.region, state.masters[position].detach())
    return tensors, record


def _state_tensors(stepped: Stepped, own: PieceState, state: Mapping[str, Any]) -> Iterator[tuple[str, SavedTensor]]:
    for key in own.tensors:
        yield f"state/{key}/{stepped.name}", part_of(stepped.region, state[key].detach())
    for key in own.odd:
        yield f"piece/{key}/{stepped.region}/{stepped.name}", whole(state[key])


def initial_states(
    state: OptimizerState, pieces: PieceStates, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, SavedTensor]]:
    """Yield (key of the checkpoint, initial values) for states that this rank's shards lack and other shards have.

    Without them, the saved full tensors would have gaps. The values are those with which torch's optimizers begin.
    """
    groups = [(part, group) for part in parts_of(optimizer) for group in part.param_groups]
    group_of = {id(param): (part, group) for part, group in groups for param in group["params"]}
    for stepped in state.stepped.values():
        if stepped.is_saved:
            for key, dtype in pieces.missing(stepped.name, stepped.region):
                first = torch.full((), first_value(*group_of[id(stepped.tensor)], key), dtype=dtype)
                yield f"state/{key}/{stepped.name}", part_of(stepped.region, first.expand(stepped.tensor.shape))


def whole(tensor: Tensor) -> SavedTensor:
    """Return the full tensor ``tensor`` as a `SavedTensor` with one part."""
    shape = tuple(tensor.shape)
    return SavedTensor(shape, tensor.dtype, {Box((0,) * len(shape), shape): tensor.detach()})


def digest(tensor: Tensor) -> str:
    """Return a hash of the dtype, shape and elements, as a hexadecimal text. Copies all elements to the host."""
    local = on_host(tensor)
    found = blake2b(repr((local.dtype, tuple(local.shape))).encode(), digest_size=8)
    found.update(bytes_of(local))
    return found.hexdigest()


def on_host(tensor: Tensor) -> Tensor:
    """Return the elements of ``tensor`` as a contiguous CPU tensor, which may share memory with it."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a view of a contiguous CPU tensor's memory, writable unless empty. Keep the tensor alive while you use it."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


# The records of all ranks, and their use on another mesh --------------------------------------------------------------

T = TypeVar("T")
Variants = list[tuple[T, list[int]]]
"""A value that may differ between ranks: a list of (value, ranks that have this value)."""


def check_content(content: object, world_size: int) -> None:
    """Raise ValueError, with the name of the wrong field, unless ``content`` has the structure of ``shared.pt``."""
    ranks = list_of(partial(_check_rank, world_size=world_size))
    fields(
        {
            "record": fields(
                {
                    "groups": list_of(items(list_of(check_text), list_of(items(dict_of(anything), ranks), least=1))),
                    "buffers": dict_of(list_of(items(check_text, ranks), least=1)),
                    "pieces": dict_of(list_of(items(check_piece_state, dict_of(ranks, key=check_place)))),
                }
            ),
            "rest": fields({"precision": check_text, "loss_scale": anything, "weights": dict_of(anything)}),
            "optimizer": check_text,
            "schedule": anything,
            "schedule_kind": check_text,
            "extra": anything,
        }
    )(content, "content")


def _check_rank(value: object, field: str, world_size: int) -> None:
    if type(value) is not int or not 0 <= value < world_size:
        raise wrong(field, value, f"a rank from 0 to {world_size - 1}")


class SharedRecord:
    """The saved records of all ranks, from which this rank chooses its values, even on another mesh.

    Some values differ between the ranks that saved. For example, batch norm statistics differ between data-parallel
    ranks, and learning rates may differ between pipeline stages. This rank uses the values of the similar saved ranks.
    Along an axis that both meshes have with equal size, a similar rank has this rank's coordinate. Along any other
    data-parallel axis of the saved mesh, it has coordinate 0. On the same mesh, the only similar rank is the one with
    the same coordinates. If no similar rank has the value, all saved ranks are used. If the ranks that are used have
    different values, reading the value raises ValueError.

    ``content`` is the result of `merge`, ``saved`` the mesh of the checkpoint, and ``now`` the mesh of this run.

    Attributes:
        groups: Per param group, (names of the parameters, different hyper-parameters with the ranks that have them).
        buffers: The different hashes of each undeclared buffer with the ranks that have them, by name.
    """

    def __init__(self, content: Mapping[str, Any], saved: Topology, now: Topology, rank: int) -> None:
        self.groups: list[tuple[list[str], Variants[dict[str, Any]]]] = content["groups"]
        self.buffers: dict[str, Variants[str]] = content["buffers"]
        self._saved, self._now, self._ranks = saved, now, _similar_ranks(saved, now, rank)
        self.pieces = PieceStates(content["pieces"], self._ranks)

    @staticmethod
    def merge(records: Sequence[RankRecord]) -> dict[str, Any]:
        """Merge the records of all ranks into lists and dicts, as the constructor's argument ``content``."""
        groups = []
        for index in range(max(len(record.groups) for record in records)):
            found = {rank: record.groups[index] for rank, record in enumerate(records) if index < len(record.groups)}
            names = sorted({name for own, _ in found.values() for name in own})
            # A torch optimizer needs at least one param group, so a rank may have a group without parameters. The
            # hyper-parameters of such a rank are left out, unless the group is empty on all ranks.
            groups.append((names, _variants({rank: hyper for rank, (own, hyper) in found.items() if own or not names})))
        return {
            "groups": groups,
            "buffers": _by_name([record.buffers for record in records]),
            "pieces": merge_states([record.pieces for record in records]),
        }

    def hyper(self, index: int) -> dict[str, Any]:
        """Return this rank's hyper-parameters of param group ``index``."""
        what = f"the hyper-parameters of param group {index}"
        return self._choose(self.groups[index][1], what, "give all ranks the same values")

    def buffer(self, name: str) -> str:
        """Return the hash of this rank's value of the undeclared buffer ``name``."""
        declare = "declare the buffer's layout with annotate(buffer, P(...))"
        return self._choose(self.buffers[name], f"the buffer {name}", declare)

    def _choose(self, variants: Variants[T], what: str, advice: str) -> T:
        similar = [value for value, ranks in variants if not self._ranks.isdisjoint(ranks)]
        chosen = similar or [value for value, _ in variants]
        if len(chosen) > 1:
            raise ValueError(
                f"{what} differed between ranks of {self._saved!r}, so the value for this rank of {self._now!r} "
                f"is ambiguous; continue on the mesh of the checkpoint, or {advice} before saving"
            )
        return chosen[0]


def _similar_ranks(saved: Topology, now: Topology, rank: int) -> set[int]:
    coordinate = now.coordinate(rank)
    wanted = dict.fromkeys(saved.data_axes, 0)
    wanted |= {axis: coordinate[axis] for axis in saved.axes if axis in now.axes and saved.size(axis) == now.size(axis)}
    return set(saved.filter(**wanted))


def _by_name(by_rank: Sequence[Mapping[str, T]]) -> dict[str, Variants[T]]:
    """Return, for each name, the different values and the ranks that have them."""
    names = sorted({name for own in by_rank for name in own})
    return {name: _variants({rank: own[name] for rank, own in enumerate(by_rank) if name in own}) for name in names}


def _variants(values: Mapping[int, T]) -> Variants[T]:
    found: Variants[T] = []
    for rank, value in values.items():
        for known, ranks in found:
            if same(known, value):
                ranks.append(rank)
                break
        else:
            found.append((value, [rank]))
    return found
