"""Continue a training run from a checkpoint, on the mesh it was saved on or on another one.

Everything is read and compared beside the run first; only when all of it fits, on every rank, is the run changed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ...parallel.layout.regions import Region, Shape
from ...parallel.mesh.agreement import gather_objects, on_all_ranks
from ...parallel.mesh.call_tracker import in_call
from ...parallel.mesh.random_state import check_random_state, random_state, set_random_state
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.text import printable, some
from ...parallel.mesh.topology import Topology
from ...parallel.mesh.value_checks import check_like
from ..parallel_optimizer import ParallelOptimizer
from ..states.chain import SCALAR_STATE
from ..step.combined_optimizer import kind_of
from ..step.skips import SkipMonitor
from .contents import (
    LAYOUT,
    LogicalParameters,
    OptimizerState,
    SavedTensor,
    SharedRecord,
    Stepped,
    check_content,
    optimizer_state,
    parse_key,
    part_of,
    whole,
)
from .directory import (
    EARLIER,
    MANIFEST,
    SHARED_FILE,
    FileRecord,
    check_is_parallel,
    files_on_all_ranks,
    files_on_first_rank,
    is_checkpoint,
    newest_checkpoint,
    plain_content,
    rank_file,
    read_manifest,
    remember,
    verify,
)
from .tensors import Reader, Stored, is_tensor_file

# A training run put back from a checkpoint, on whatever mesh: first all of it beside the run, then into it ------------


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
        self.tensors: dict[str, SavedTensor] = {}
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
            self._state = [self._room_for_state(stepped) | self._room_for_whole(stepped) for stepped in own.stepped]
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
            state[key] = self._room(f"state/{key}/{name}", region, stepped.tensor.shape, found.dtype)
        places = {key: f"piece/{key}/{region}/{name}" for key in kept.odd}
        if lost := sorted(key for key, place in places.items() if place not in self._stored):
            raise ValueError(
                f"the optimizer's {', '.join(lost)} of {name} belongs to pieces of the parameter that no rank has now (it "
                "is not of the parameter's shape, so it can't be cut anew); continue on the mesh of the checkpoint"
            )
        return state | {key: self._room_for_all(place) for key, place in places.items()}

    def _room_for_whole(self, stepped: Stepped) -> dict[str, Any]:
        """Return the states of the full tensor that this rank must have."""
        part = stepped.whole
        keys = [parse_key(key)[1:] for key in self._stored if key.startswith("whole/")] if part is not None else []
        own = [
            key for key, name in keys if name == stepped.name and part is not None and part.keeps(stepped.tensor, key)
        ]
        return {key: self._room_for_all(f"whole/{key}/{stepped.name}") for key in own}

    def _room_for_masters(self, own: OptimizerState) -> dict[int, Tensor]:
        masters = {}
        for position, stepped in enumerate(own.stepped):
            name = stepped.name
            if position in own.masters:
                masters[position] = self._room(f"master/{name}", stepped.region, stepped.tensor.shape, torch.float32)
            elif stepped.tensor.requires_grad and f"master/{name}" in self._stored:
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


# Load -----------------------------------------------------------------------------------------------------------------

_ATTEMPTS = 10


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ParallelOptimizer | None,
    *,
    lr_scheduler: LRScheduler | None = None,
    registry: ProcessGroupRegistry | None = None,
) -> Any:
    """Continue from the newest complete checkpoint under ``path``.

    On the mesh it was saved on training goes on bit for bit. On another mesh, or with states sharded otherwise, the same
    numbers are laid out anew; random number generators are left as they are then, and batch norm's statistics, where
    ranks had different ones, are those of data coordinate 0 (as `DistributedDataParallel` does it). Where pieces of a
    parameter come together that had made different numbers of steps (experts), all of it goes on with the fewest, and
    elements that had no optimizer state yet have new ones; a warning names them.

    Nothing in a checkpoint is executed, whoever wrote it. Another run may save there meanwhile: if it removes what is being
    read, the newer one is read.

    Args:
        path: As for `save_checkpoint`; or the directory of one checkpoint, ``path/meshstep-<number>``.
        model, optimizer, lr_scheduler: As they were for `save_checkpoint`, on the same or another mesh: the same
            logical parameters, param groups, kind of optimizer and schedule, and precision mode. Gradients are forgotten.
        optimizer: None loads the model alone, parameters and buffers, in the dtypes that it has been saved in; random
            number generators are left as they are.
        registry: The groups, where there is no optimizer that has them.
    Returns:
        What was given as ``extra``, on every rank; tensors on the CPU.
    Raises:
        ValueError: On every rank: there is no checkpoint; a file in it is missing, truncated, changed or planted; it does
            not fit. Nothing has been changed then, on any rank.
        RuntimeError: On every rank, when one could not read. Nothing has been changed.
        TypeError: There is neither an optimizer nor a registry; a schedule, but no optimizer; the optimizer is torch's.
    Collectives: gathers of Python objects over the world, at all ranks' pace. Memory: once more this rank's parameters
    and states, on the CPU.
    """
    if optimizer is not None:
        check_is_parallel(optimizer)
        registry = optimizer.registry
    elif lr_scheduler is not None:
        raise TypeError("a schedule goes on with its optimizer: give optimizer= too, or leave lr_scheduler= out")
    elif registry is None:
        raise TypeError("to load the model alone give registry=, whose ranks hold it")
    with in_call(registry, "load_checkpoint"):
        directory, found = _taken(Path(path), _Run(model, optimizer, lr_scheduler, registry))
    if optimizer is not None:
        remember(optimizer, directory)
    if found.restoration.together:
        warnings.warn(
            "pieces that are put together here had made different numbers of optimizer steps: "
            f"{'; '.join(found.restoration.together)}. Each goes on with the fewest, and with a new state where there was "
            "none yet, so that its next updates are others than on the mesh of the checkpoint",
            stacklevel=2,
        )
    return found.content["extra"]


def _taken(path: Path, run: _Run) -> tuple[Path, _Found]:
    """The checkpoint that has been read, and taken into the run. Raises, collectives: as `load_checkpoint`."""
    for attempt in range(1, _ATTEMPTS + 1):
        directory, manifest = files_on_first_rank(lambda: _open(path, run.optimizer), run.registry)
        try:
            found = run.read(directory, manifest)
            break
        except Exception as problem:  # on every rank
            if files_on_first_rank(directory.exists, run.registry):
                raise
            if attempt == _ATTEMPTS:
                raise RuntimeError(
                    f"the checkpoint under {path} was replaced {attempt} times while it was read: another run saves faster "
                    "than this one reads; let it keep more, save_checkpoint(..., keep=2)"
                ) from problem
    run.take(found)
    return directory, found


class _Found(NamedTuple):
    """A checkpoint that fits, read beside the run."""

    content: dict[str, Any]
    restoration: Restoration
    state: dict[str, Any] | None  # the optimizer's
    random: dict[str, Any] | None


class _Run(NamedTuple):
    """What is to be loaded."""

    model: nn.Module
    optimizer: ParallelOptimizer | None
    schedule: LRScheduler | None
    registry: ProcessGroupRegistry

    def read(self, directory: Path, manifest: Mapping[str, Any]) -> _Found:
        """Read a checkpoint and compare it with the run, which is not changed.

        Raises, collectives: as `load_checkpoint`.
        """
        registry = self.registry
        files, saved = files_on_all_ranks(lambda: _said_in(manifest, directory), registry)
        files_on_all_ranks(lambda: _verify_share(directory, files, registry), registry)
        parameters = LogicalParameters(self.model, registry)
        content, own = files_on_all_ranks(lambda: self._content(directory, parameters, saved), registry)
        named = [[own.stepped[position].name for position in group["params"]] for group in own.groups] if own else []
        groups = _names_by_group(gather_objects(named, registry))
        reader = Reader(directory, files)

        def fit() -> tuple[Restoration, dict[str, Any] | None]:
            shared = SharedRecord(content["record"], saved, registry.topology, registry.global_rank)
            restoration = Restoration(parameters, own, groups, reader.index, shared)
            if own is None:
                return restoration, None
            with _naming(directory / SHARED_FILE):
                state = restoration.state_dict(content["rest"])
                assert self.optimizer is not None, "it has the state"
                self.optimizer.check_state_dict(state)
                SkipMonitor.check_state(content["rest"])
            return restoration, state

        restoration, state = files_on_all_ranks(fit, registry)
        random = files_on_all_ranks(lambda: self._random_state(directory, saved), registry)
        files_on_all_ranks(lambda: reader.read(restoration.tensors), registry)
        return _Found(content, restoration, state, random)

    def _content(
        self, directory: Path, parameters: LogicalParameters, saved: Topology
    ) -> tuple[dict[str, Any], OptimizerState | None]:
        """What is there for all ranks, and the optimizer's state as it is now. ValueError if they are not of a kind."""
        content: dict[str, Any] = plain_content(directory / SHARED_FILE)
        with _naming(directory / SHARED_FILE):
            check_content(content, saved.world_size)
        if self.optimizer is None:
            return content, None
        _check_kinds(content, self.optimizer, self.schedule)
        if self.schedule is not None:
            with _naming(directory / SHARED_FILE):
                _check_schedule(content["schedule"], self.schedule)
        return content, optimizer_state(self.optimizer, parameters)

    def _random_state(self, directory: Path, saved: Topology) -> dict[str, Any] | None:
        now = self.registry.topology
        if (saved.axes, saved.sizes, saved.roles) != (now.axes, now.sizes, now.roles) or self.optimizer is None:
            return None
        file = directory / rank_file(self.registry.global_rank)
        state: dict[str, Any] = plain_content(file)
        with _naming(file):
            check_random_state(state)
        return state

    def take(self, found: _Found) -> None:
        """Change the run, on all ranks or on none."""
        if self.optimizer is not None and found.state is not None:
            self._take_state(self.optimizer, found.state, found.content["schedule"], found.random)
            on_all_ranks(self.optimizer.zero_grad, self.registry)
        found.restoration.write_model()
        if self.optimizer is not None and found.state is not None:
            # The stored weights of whole masters are rounded to even; those of split ones, ties away from zero.
            self.optimizer.transforms.load_state_dict(found.state["meshstep"]["weights"])
            self.optimizer.transforms.publish()

    def _take_state(
        self, optimizer: ParallelOptimizer, state: dict[str, Any], schedule: Any, random: dict[str, Any] | None
    ) -> None:
        before = None if self.schedule is None else deepcopy(self.schedule.state_dict())
        random_before = random_state()

        def load() -> None:
            if self.schedule is not None:
                try:
                    self.schedule.load_state_dict(schedule)
                except Exception as problem:
                    raise ValueError(
                        f"the schedule can't continue from the state in the checkpoint: {problem!r}; "
                        "make it as the one that was saved"
                    ) from problem
            if random is not None:
                set_random_state(random)

        try:
            on_all_ranks(load, self.registry)
            optimizer.load_state_dict(state)
        except Exception:
            if self.schedule is not None and before is not None:
                self.schedule.load_state_dict(before)
            set_random_state(random_before)
            raise


def _open(path: Path, optimizer: ParallelOptimizer | None) -> tuple[Path, dict[str, Any]]:
    while True:
        directory = path if is_checkpoint(path) else newest_checkpoint(path)
        if directory is None:
            raise ValueError(f"there is no complete checkpoint under {path}; ask newest_checkpoint(path) beforehand")
        try:
            manifest = read_manifest(directory)
            break
        except ValueError:
            if directory.exists():
                raise
    if optimizer is not None and manifest["precision"] != optimizer.precision.name:
        raise ValueError(
            f"{directory} was saved with precision={manifest['precision']!r}, but this optimizer runs with "
            f"{optimizer.precision.name!r}; continue in the mode it was saved in"
        )
    return directory, manifest


def _said_in(manifest: Mapping[str, Any], directory: Path) -> tuple[dict[str, FileRecord], Topology]:
    """The records of all files, and the mesh that the checkpoint was saved on."""
    with _naming(directory / MANIFEST):
        files = {name: FileRecord.of_json(record) for name, record in manifest["files"].items()}
        ranks = sum(rank_file(rank) in files for rank in range(len(files)))
        if prod(manifest["axes"].values()) != ranks or SHARED_FILE not in files:
            raise ValueError(
                f"axes are {manifest['axes']}, and there are files of {ranks} ranks; it must be one for each"
            )
        return files, Topology(roles=manifest["roles"], **manifest["axes"])


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Name the file in an error of what it holds, which is a ValueError whatever it was."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as problem:
        said = str(problem) if isinstance(problem, ValueError) else f"{type(problem).__name__}: {problem}"
        raise ValueError(f"{file} is damaged, or was planted: {printable(said)}; {EARLIER}") from None


def _check_schedule(saved: Any, schedule: LRScheduler) -> None:
    """Raise ValueError where a saved schedule's state is not like the one that it is to replace."""
    now = schedule.state_dict()
    check_like(saved, now, "schedule")
    for name in saved or ():
        if name not in now and hasattr(type(schedule), name):
            raise ValueError(f"schedule has {name!r}, which is a method of {type(schedule).__name__}")


def _verify_share(directory: Path, files: Mapping[str, FileRecord], registry: ProcessGroupRegistry) -> None:
    """Check this rank's share of the files; the contents of tensors' files are checked by who reads them."""
    share = dict(islice(files.items(), registry.global_rank, None, registry.topology.world_size))
    tensors = {name: record for name, record in share.items() if is_tensor_file(name)}
    verify(directory, tensors, contents=False)
    verify(directory, {name: record for name, record in share.items() if name not in tensors}, contents=True)


def _check_kinds(content: Mapping[str, Any], optimizer: ParallelOptimizer, schedule: LRScheduler | None) -> None:
    kind = kind_of(optimizer.optimizer)
    if content["optimizer"] != kind:
        raise ValueError(
            f"the checkpoint was saved with {content['optimizer']}, this optimizer is {kind}; make that one, or "
            "load the model alone: load_checkpoint(path, model, None, registry=registry)"
        )
    if (content["schedule"] is None) != (schedule is None):
        raise ValueError(
            "the checkpoint was saved without a schedule; load it without lr_scheduler="
            if schedule
            else f"the checkpoint was saved with a {content['schedule_kind']}; give lr_scheduler= one, or it starts over"
        )
    if content["schedule_kind"] != type(schedule).__name__:
        raise ValueError(
            f"the checkpoint was saved with a {content['schedule_kind']}, lr_scheduler= is a {type(schedule).__name__}; "
            "give the kind that was saved"
        )


def _names_by_group(named: list[list[list[str]]]) -> list[set[str]]:
    """The names in each param group, those of all ranks."""
    count = max(len(groups) for groups in named)
    return [{name for groups in named if index < len(groups) for name in groups[index]} for index in range(count)]
