"""Continue a training run from a checkpoint, on the same mesh or on another one.

In this file, the run is the model, optimizer and schedule into which a checkpoint is loaded. First, the checkpoint is
read into separate memory and compared with the run. The run is changed only if the checkpoint fits on every rank.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import islice, zip_longest
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ...amp.master_weights import SCALAR_STATE
from ...parallel.layout.shard import Region, Shape
from ...parallel.mesh.agreement import check_same, gather_objects, on_all_ranks
from ...parallel.mesh.call_tracker import track_call
from ...parallel.mesh.random_state import check_random_state, random_state, set_random_state
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.text import printable, some
from ...parallel.mesh.topology import Topology
from ...parallel.mesh.value_checks import check_like
from ..build import check_is_parallel
from ..parallel_optimizer import ParallelOptimizer
from ..step.skips import SkipMonitor
from ..step.wrapped_optimizer import kind_of
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
    files_on_all_ranks,
    files_on_first_rank,
    is_checkpoint,
    newest_checkpoint,
    path_on_all_ranks,
    plain_content,
    rank_file,
    read_manifest,
    remember,
    verify,
)
from .tensors import Reader, Stored, is_tensor_file

# A checkpoint is first loaded into separate memory, then copied into the run ------------------------------------------


class Restoration:
    """CPU memory for the data of a checkpoint that this rank needs.

    The constructor compares the checkpoint with the model and the optimizer, and allocates `tensors`. It changes
    neither of them. `state_dict` returns the saved state for the optimizer. Its tensors, except numbers such as step
    counts and the states of tensors that are not loaded, share memory with `tensors`, which `Reader.read` fills. Then
    `write_model` copies the saved values into the model.

    ``own`` are the contents of the optimizer's current state dict; None: only the model is loaded. ``groups`` has the
    names of each param group's parameters on all ranks.

    Attributes:
        tensors: CPU tensors to be filled from the checkpoint, by key. They are uninitialized until then.
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
            (tensor, self._allocate(f"model/{name}", region, tensor.shape, tensor.dtype))
            for name, tensor, region, _ in parameters.shards
        ]
        self._model += [(buffer, self._allocate_buffer(name, buffer)) for name, buffer in parameters.buffers.items()]
        self._own, self._state, self._masters = own, dict[int, dict[str, Any]](), dict[int, Tensor]()
        if own is not None:
            self._check_groups(groups)
            self._check_states()
            self._state = {
                position: self._allocate_state(stepped, own.tensors.get(position, {}))
                | self._allocate_full_states(stepped)
                for position, stepped in own.stepped.items()
            }
            self._masters = self._allocate_masters(own)

    @property
    def combined(self) -> list[str]:
        """Return messages about parameters whose new shards combine saved shards with unequal states or step counts."""
        return self._shared.pieces.combined

    # Comparison with the run ------------------------------------------------------------------------------------------

    def _check_names(self, parameters: LogicalParameters) -> None:
        saved = {name for (name,) in self._parts("model")}
        kind, advice = "parameters", "build the model that was saved"
        if parameters.trainable_only:
            kind, advice = "trainable parameters", f"{advice}, and freeze the parameters that were frozen then"
        _check_same(kind, saved, set(parameters.names), "in the model", advice)
        _check_same("buffers", set(self._shared.buffers), parameters.buffer_names, "in the model", advice)

    def _check_groups(self, groups: Sequence[Iterable[str]]) -> None:
        if len(groups) != len(self._shared.groups):
            raise ValueError(
                f"the checkpoint has {len(self._shared.groups)} param groups, the optimizer has {len(groups)}; build the "
                "param groups that were saved"
            )
        for index, ((names, _), now) in enumerate(zip(self._shared.groups, groups, strict=True)):
            where, advice = f"in param group {index}", "build the param groups that were saved"
            _check_same("parameters", set(names), set(now), where, advice)

    def _check_states(self) -> None:
        """Raise ValueError if index and record of the checkpoint list different states."""
        stored = set(self._parts("state"))
        if differing := sorted(stored ^ self._shared.pieces.keys):
            shown = some(f"{kind} of {name}" for kind, name in differing)
            raise ValueError(
                f"the checkpoint is damaged: its files list different optimizer states; only one file has {shown}; "
                f"{EARLIER}"
            )

    def _parts(self, kind: str) -> list[tuple[str, ...]]:
        return [parse_key(key)[1:] for key in self._stored if key.startswith(f"{kind}/")]

    def _find(self, key: str) -> Stored:
        if key not in self._stored:
            raise ValueError(f"the checkpoint's files contradict each other: index.json has no tensor {key}; {EARLIER}")
        return self._stored[key]

    def _allocate(self, key: str, region: Region, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor for a region of a saved full tensor, and add it to `tensors`.

        The tensor has ``shape``, with as many elements as ``region``. Raise ValueError if the checkpoint does not have
        the full tensor with the same full shape and dtype.
        """
        room = torch.empty(shape, dtype=dtype)
        found = self._find(key)
        if found != Stored(region.full_shape, dtype):
            factor = ". If the shapes differ by a factor in two dims, one of the runs declared the wrong dim as sharded"
            raise ValueError(
                f"the tensor {key} has shape {found.shape}, {str(found.dtype)[6:]} in the checkpoint, but shape "
                f"{region.full_shape}, {str(dtype)[6:]} here; build the model that was saved, in the same precision "
                f"mode{factor if found.shape != region.full_shape else ''}"
            )
        self.tensors[key] = part_of(region, room)
        return room

    def _allocate_full(self, key: str) -> Tensor:
        found = self._stored[key]
        room = torch.empty(found.shape, dtype=found.dtype)
        self.tensors[key] = whole(room)
        return room

    def _allocate_buffer(self, name: str, buffer: Tensor) -> Tensor:
        key = f"buffer/{self._shared.buffer(name)}/{name}"
        found = self._find(key)
        if found != Stored(tuple(buffer.shape), buffer.dtype):
            raise ValueError(
                f"the buffer {name} has shape {found.shape}, {str(found.dtype)[6:]} in the checkpoint, but "
                f"{tuple(buffer.shape)}, {str(buffer.dtype)[6:]} here; build the model that was saved"
            )
        return self._allocate_full(key)

    def _allocate_state(self, stepped: Stepped, now: Mapping[str, Any]) -> dict[str, Any]:
        """Allocate the optimizer state of a stepped tensor, and return it by name of the state.

        Step counts and other numbers have their saved values. Other tensors are uninitialized and are added to
        `tensors`; reading the checkpoint fills them. Raise ValueError if the checkpoint lacks a number of the present
        state ``now``, or if a state of another shape than the parameter's belongs to a shard that does not exist on this
        mesh.
        """
        name, region = stepped.name, stepped.region
        kept = self._shared.pieces.of(name, region)
        state = kept.plain()
        missing = {key for key in now if key in SCALAR_STATE} - state.keys()
        if kept.tensors and missing:
            shown = ", ".join(map(repr, sorted(missing)))
            raise ValueError(f"the checkpoint's optimizer state of {name} has no entry {shown}; {EARLIER}")
        for key in kept.tensors:
            found = self._find(f"state/{key}/{name}")
            state[key] = self._allocate(f"state/{key}/{name}", region, stepped.tensor.shape, found.dtype)
        places = {key: f"piece/{key}/{region}/{name}" for key in kept.odd}
        if lost := sorted(key for key, place in places.items() if place not in self._stored):
            raise ValueError(
                f"the checkpoint has {', '.join(map(repr, lost))} of {name} only for shards that do not exist on this "
                "mesh. An optimizer state without the parameter's shape can't be resharded: continue on the mesh of the "
                "checkpoint"
            )
        return state | {key: self._allocate_full(place) for key, place in places.items()}

    def _allocate_full_states(self, stepped: Stepped) -> dict[str, Any]:
        """Return the full-tensor states that this rank keeps for a stepped tensor, by name, uninitialized."""
        if stepped.whole is None:
            return {}
        return {
            key: self._allocate_full(f"whole/{key}/{name}")
            for key, name in self._parts("whole")
            if name == stepped.name and stepped.whole.keeps(stepped.tensor, key)
        }

    def _allocate_masters(self, own: OptimizerState) -> dict[int, Tensor]:
        masters = {position: master for position, master in own.masters.items() if position not in own.stepped}
        for position, stepped in own.stepped.items():
            name = stepped.name
            if position in own.masters:
                if f"master/{name}" not in self._stored:
                    raise self._no_master(name)
                masters[position] = self._allocate(
                    f"master/{name}", stepped.region, stepped.tensor.shape, torch.float32
                )
            elif stepped.tensor.requires_grad and f"master/{name}" in self._stored:
                raise ValueError(
                    f"the checkpoint has a float32 master weight of {name}, but the optimizer has none, as with "
                    "stochastic rounding; use the precision= of the saved run or, if the parameter was unfrozen after the "
                    "optimizer was made, call optimizer.refresh() before loading"
                )
        return masters

    def _no_master(self, name: str) -> ValueError:
        why = "was saved without master weights, as with stochastic rounding; use the precision= of the saved run"
        if self._parts("master"):
            why = (
                "was saved while this parameter was frozen: freeze it before you make the optimizer, load the "
                "checkpoint, then unfreeze the parameter and call optimizer.refresh()"
            )
        return ValueError(f"the checkpoint has no float32 master weight of {name}: the checkpoint {why}")

    # Restoring the run ------------------------------------------------------------------------------------------------

    def state_dict(self, rest: Mapping[str, Any]) -> dict[str, Any]:
        """Return the saved state in the form that the optimizer's ``load_state_dict`` takes.

        ``rest`` has the saved entries of ``state_dict()["meshstep"]``. Its ``"weights"`` has only the entries that do
        not depend on the layout.
        """
        assert self._own is not None, "needs an optimizer"
        groups = [
            {**now, **self._shared.hyper(index), **{k: now[k] for k in ("params", "param_names") if k in now}}
            for index, now in enumerate(self._own.groups)
        ]
        weights = _rebuild_weights(self._own.rest["weights"], self._masters, rest["weights"])
        state = {position: kept for position, kept in self._own.tensors.items() if position not in self._own.stepped}
        state |= {position: kept for position, kept in self._state.items() if kept}
        return {"state": state, "param_groups": groups, "meshstep": {**rest, "weights": weights}}

    @torch.no_grad()
    def write_model(self) -> None:
        """Copy the loaded values into the model's parameters and buffers."""
        for tensor, value in self._model:
            tensor.copy_(value)


def _rebuild_weights(
    weights: Mapping[str, Any], masters: Mapping[int, Tensor], portable: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the entry ``"weights"`` of a state to load: loaded master weights, and saved layout-independent entries.

    Entries that depend on the layout, other than the master weights, keep their current values. If ``portable`` lacks
    an entry, the result lacks it. At the load, the transform that needs the entry then keeps its own value
    (`HalfStates`) or raises an error.
    """
    own = {key: dict(masters) if key == "masters" else weights[key] for key in LAYOUT if key in weights}
    return own | {key: portable[key] for key in weights if key in portable}


def _check_same(kind: str, saved: set[str], now: set[str], where: str, advice: str) -> None:
    if saved != now:
        parts = [f"only in the checkpoint: {some(sorted(saved - now))}"] if saved - now else []
        parts += [f"only here: {some(sorted(now - saved))}"] if now - saved else []
        raise ValueError(f"the {kind} {where} differ from the checkpoint's ({'; '.join(parts)}): {advice}")


# Load -----------------------------------------------------------------------------------------------------------------

_ATTEMPTS = 10


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ParallelOptimizer | None,
    *,
    lr_scheduler: LRScheduler | None = None,
    registry: ProcessGroupRegistry | None = None,
    trainable_only: bool = False,
) -> Any:
    """Load the newest complete checkpoint under ``path`` into the model, optimizer and schedule; return its ``extra``.

        extra = load_checkpoint("checkpoints", model, optimizer, lr_scheduler=scheduler)

    On the mesh of the checkpoint, training continues bitwise identically. On another mesh, or if optimizer states are
    sharded in another way, the saved full tensors are resharded. Then training continues with these differences:

    * On another mesh, random number generators keep their current states.
    * Undeclared buffers that differed between data-parallel ranks, such as batch norm statistics, come from coordinate
      0 of each data axis that this mesh does not have with the same size.
    * If a new shard combines saved shards with different step counts, it continues with the smallest step count.
      Elements without optimizer state get initial values. A warning names such parameters.

    Loading executes no code from the checkpoint. If another run saves under ``path`` and thereby removes the checkpoint
    while it is read, the newer checkpoint is loaded.

    Args:
        path: The directory that was passed to `save_checkpoint`; or the directory of one checkpoint,
            ``path/meshstep-<number>``.
        model: This rank's part of the model. All ranks together must have the parameters of the saved model, with the
            same names and full shapes.
        optimizer: The optimizer, with the same param groups, class and precision mode as the saved optimizer. Its
            gradients are cleared. None: load only parameters and buffers, whose dtypes must be the saved ones.
        lr_scheduler: A schedule of the same class as the saved schedule. None (default): the run was saved without a
            schedule, or ``optimizer`` is None.
        registry: The process groups, only used if ``optimizer`` is None. None (default): those of the optimizer.
        trainable_only: True: load a checkpoint that was saved with ``trainable_only=True``. Its parameters must be the
            parameters of the model with ``requires_grad``; other parameters are unchanged. False (default): load a
            checkpoint of the full model.
    Returns:
        The ``extra`` of `save_checkpoint`, on every rank; its tensors are on the CPU.
    Raises:
        ValueError: On every rank: there is no checkpoint; a file is missing, truncated or changed; the checkpoint does
            not fit the model, optimizer or schedule; or ranks differ in ``trainable_only``, or in whether they give an
            optimizer. Model, optimizer and schedule are unchanged on all ranks.
        RuntimeError: On every rank: a rank could not read a file, another run replaced the checkpoint in each attempt, or
            `fully_shard` has not reduced the gradients that must be cleared. Model, optimizer and schedule are
            unchanged.
        TypeError: On every rank: ``path`` is not a path. On this rank: neither an optimizer nor a registry is given, or
            a schedule without an optimizer, or the optimizer is not a `ParallelOptimizer`.
    Collectives: gathers of Python objects over all ranks; with `Sharded` also all-gathers of weights.
    Host synchronization: yes.
    Memory: a CPU copy of this rank's parameters, buffers, master weights and optimizer states.
    """
    if optimizer is not None:
        check_is_parallel(optimizer)
        registry = optimizer.registry
    elif lr_scheduler is not None:
        raise TypeError("lr_scheduler= is given without its optimizer: give optimizer= too, or leave lr_scheduler= out")
    elif registry is None:
        raise TypeError("without an optimizer, load_checkpoint needs the process groups of the model: give registry=")
    with track_call("load_checkpoint", registry):
        root = path_on_all_ranks(path, registry)
        options = {
            "optimizer= of load_checkpoint": "given" if optimizer is not None else "None",
            "trainable_only= of load_checkpoint": bool(trainable_only),
        }
        check_same(options, registry)
        directory, found = _load_newest(root, _Run(model, optimizer, lr_scheduler, registry, trainable_only))
    if optimizer is not None:
        remember(optimizer, directory)
    if found.restoration.combined:
        warnings.warn(
            "some parameters combine shards with different numbers of optimizer steps: "
            f"{'; '.join(found.restoration.combined)}. Each continues with the fewest steps, and with a new state for "
            "elements without a state, so its next updates differ from the updates on the mesh of the checkpoint",
            stacklevel=2,
        )
    return found.content["extra"]


def _load_newest(path: Path, run: _Run) -> tuple[Path, _LoadedCheckpoint]:
    """Load a checkpoint into the run, and return its directory and contents.

    If the checkpoint is removed while it is read, the newest checkpoint is tried, up to `_ATTEMPTS` times.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        directory, manifest = files_on_first_rank(lambda: _open(path, run), run.registry)
        try:
            found = run.read(directory, manifest)
            break
        except Exception as problem:  # raised on all ranks or on none, so all ranks call the collective below
            if files_on_first_rank(directory.exists, run.registry):
                raise
            if attempt == _ATTEMPTS:
                raise RuntimeError(
                    f"the checkpoint under {path} was replaced {attempt} times while it was read, because another run "
                    "saves faster than this run reads; keep more checkpoints: save_checkpoint(..., keep=2)"
                ) from problem
    run.take(found)
    return directory, found


class _LoadedCheckpoint(NamedTuple):
    """A checkpoint in CPU memory. It was compared with the model, optimizer and schedule of this rank, and fits."""

    content: dict[str, Any]
    restoration: Restoration
    state: dict[str, Any] | None  # for the optimizer's load_state_dict; None: no optimizer is loaded
    # The states of this rank's random number generators. None: the mesh is another one, or no optimizer is loaded.
    random: dict[str, Any] | None


class _Run(NamedTuple):
    """The model, optimizer and schedule into which a checkpoint is loaded."""

    model: nn.Module
    optimizer: ParallelOptimizer | None
    schedule: LRScheduler | None
    registry: ProcessGroupRegistry
    trainable_only: bool

    def read(self, directory: Path, manifest: Mapping[str, Any]) -> _LoadedCheckpoint:
        """Read a checkpoint and compare it with the run, without changing the run. Errors are raised on every rank.

        Collectives: gathers of Python objects over all ranks.
        """
        registry = self.registry
        files, saved = files_on_all_ranks(lambda: _parse_manifest(manifest, directory), registry)
        files_on_all_ranks(lambda: _verify_share(directory, files, registry), registry)
        parameters = LogicalParameters(self.model, registry, self.trainable_only)
        content, own = files_on_all_ranks(lambda: self._content(directory, parameters, saved), registry)
        named = [own.names_in(group) for group in own.groups] if own else []
        groups = [
            set[str]().union(*of_ranks) for of_ranks in zip_longest(*gather_objects(named, registry), fillvalue=())
        ]
        reader = Reader(directory, files)

        def fit() -> tuple[Restoration, dict[str, Any] | None]:
            shared = SharedRecord(content["record"], saved, registry.topology, registry.global_rank)
            restoration = Restoration(parameters, own, groups, reader.index, shared)
            if own is None:
                return restoration, None
            with _name_file_in_errors(directory / SHARED_FILE):
                state = restoration.state_dict(content["rest"])
                assert self.optimizer is not None, "own is not None"
                self.optimizer.check_state_dict(state)
                SkipMonitor.check_state(content["rest"])
            self.optimizer.check_zero_grad()
            return restoration, state

        restoration, state = files_on_all_ranks(fit, registry)
        random = files_on_all_ranks(lambda: self._random_state(directory, saved), registry)
        files_on_all_ranks(lambda: reader.read(restoration.tensors), registry)
        return _LoadedCheckpoint(content, restoration, state, random)

    def _content(
        self, directory: Path, parameters: LogicalParameters, saved: Topology
    ) -> tuple[dict[str, Any], OptimizerState | None]:
        """Return the content of the file ``shared.pt``, and the contents of the optimizer's current state dict."""
        content: dict[str, Any] = plain_content(directory / SHARED_FILE)
        with _name_file_in_errors(directory / SHARED_FILE):
            check_content(content, saved.world_size)
        if self.optimizer is None:
            return content, None
        _check_kinds(content, self.optimizer, self.schedule)
        if self.schedule is not None:
            with _name_file_in_errors(directory / SHARED_FILE, *_OTHER_SCHEDULE):
                _check_schedule(content["schedule"], self.schedule)
        return content, optimizer_state(self.optimizer, parameters)

    def _random_state(self, directory: Path, saved: Topology) -> dict[str, Any] | None:
        now = self.registry.topology
        if (saved.axes, saved.sizes, saved.roles) != (now.axes, now.sizes, now.roles) or self.optimizer is None:
            return None
        file = directory / rank_file(self.registry.global_rank)
        state: dict[str, Any] = plain_content(file)
        with _name_file_in_errors(file):
            check_random_state(state)
        return state

    def take(self, found: _LoadedCheckpoint) -> None:
        """Copy a checkpoint into the run. If the optimizer or the schedule can't load it, the run stays unchanged."""
        if self.optimizer is None or found.state is None:
            found.restoration.write_model()
            return
        self._take_state(self.optimizer, found.state, found.content["schedule"], found.random)
        on_all_ranks(self.optimizer.zero_grad, self.registry)
        found.restoration.write_model()
        # Overwrite the model's weights with the rounded master weights. Split master weights round ties away from zero,
        # but the saved weights may come from a mode that rounds ties to even.
        self.optimizer.transforms.load_state_dict(found.state["meshstep"]["weights"])
        self.optimizer.transforms.write_back()

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
                        f"lr_scheduler= can't load the schedule's state in the checkpoint: {problem!r}; create the "
                        "schedule with the class and the arguments of the saved run"
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


def _open(path: Path, run: _Run) -> tuple[Path, dict[str, Any]]:
    while True:
        directory = path if is_checkpoint(path) else newest_checkpoint(path)
        if directory is None:
            raise ValueError(
                f"there is no complete checkpoint under {path}; give the path that save_checkpoint got, or load only if "
                "newest_checkpoint(path) is not None"
            )
        try:
            manifest = read_manifest(directory)
            break
        except ValueError:
            if directory.exists():
                raise
    if bool(manifest.get("trainable_only")) != run.trainable_only:
        raise ValueError(
            f"{directory} has all parameters of the model: leave trainable_only=True out"
            if run.trainable_only
            else f"{directory} was saved with trainable_only=True, so it has no frozen parameters: load these from their "
            "own source first, then call load_checkpoint(..., trainable_only=True)"
        )
    optimizer = run.optimizer
    if optimizer is not None and manifest["precision"] != optimizer.precision.name:
        raise ValueError(
            f"{directory} was saved with precision={manifest['precision']!r}, but this optimizer has "
            f"{optimizer.precision.name!r}; continue with the precision of the checkpoint"
        )
    return directory, manifest


def _parse_manifest(manifest: Mapping[str, Any], directory: Path) -> tuple[dict[str, FileRecord], Topology]:
    """Return the records of all files by name, and the mesh of the checkpoint.

    Raise ValueError if they are not valid, or if `SHARED_FILE` or the file of a rank is missing.
    """
    with _name_file_in_errors(directory / MANIFEST):
        files = {name: FileRecord.of_json(record) for name, record in manifest["files"].items()}
        ranks = sum(rank_file(rank) in files for rank in range(len(files)))
        if prod(manifest["axes"].values()) != ranks or SHARED_FILE not in files:
            raise ValueError(
                f"it lists {ranks} files rank-<number>.pt for axes {manifest['axes']}; there must be one per rank, and "
                f"{SHARED_FILE}"
            )
        return files, Topology(roles=manifest["roles"], **manifest["axes"])


_OTHER_SCHEDULE = (
    "has a state that does not fit lr_scheduler=",
    "create the schedule with the parts and the arguments of the saved run; if it has them, the file is damaged, or was "
    f"tampered with: {EARLIER}",
)


@contextmanager
def _name_file_in_errors(
    file: Path, cause: str = "is damaged, or was tampered with", remedy: str = EARLIER
) -> Iterator[None]:
    """Convert errors that damaged content causes, such as KeyError, to a ValueError with the file, cause and remedy."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as problem:
        text = str(problem) if isinstance(problem, ValueError) else f"{type(problem).__name__}: {problem}"
        raise ValueError(f"{file} {cause}: {printable(text)}; {remedy}") from None


def _check_schedule(saved: Any, schedule: LRScheduler) -> None:
    """Raise ValueError if a saved state of a schedule does not have the structure of the state of ``schedule``.

    Also raise ValueError if an entry would replace a method or another attribute of the class of ``schedule``.
    """
    now = schedule.state_dict()
    check_like(saved, now, "schedule")
    for name in saved or ():
        if name not in now and hasattr(type(schedule), name):
            raise ValueError(
                f"the saved state of the schedule has an entry {name!r}, which would replace an attribute of the class "
                f"{type(schedule).__name__}"
            )


def _verify_share(directory: Path, files: Mapping[str, FileRecord], registry: ProcessGroupRegistry) -> None:
    """Raise ValueError if a file of this rank's share is missing or damaged. Each file is in the share of one rank.

    For a file with tensors, only the size is checked here. Its contents are checked when they are read.
    """
    for name, record in islice(files.items(), registry.global_rank, None, registry.topology.world_size):
        verify(directory / name, record, contents=not is_tensor_file(name))


def _check_kinds(content: Mapping[str, Any], optimizer: ParallelOptimizer, schedule: LRScheduler | None) -> None:
    kind = kind_of(optimizer.optimizer)
    if content["optimizer"] != kind:
        raise ValueError(
            f"the checkpoint was saved with {content['optimizer']}, but this optimizer is {kind}; wrap "
            f"{content['optimizer']} as in the saved run, or load only the model: load_checkpoint(path, model, None, "
            "registry=registry)"
        )
    if (content["schedule"] is None) != (schedule is None):
        raise ValueError(
            "the checkpoint was saved without a schedule; load it without lr_scheduler="
            if schedule
            else f"the checkpoint was saved with a {content['schedule_kind']}; give lr_scheduler= of this kind"
        )
    if content["schedule_kind"] != type(schedule).__name__:
        raise ValueError(
            f"the checkpoint was saved with a {content['schedule_kind']}, but lr_scheduler= is a "
            f"{type(schedule).__name__}; give the kind that was saved"
        )
