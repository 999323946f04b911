"""Continue a training run from a checkpoint, on the mesh it was saved on or on another one.

Everything is read and compared beside the run first; only when all of it fits, on every rank, is the run changed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ...parallel.data.random_state import check_random_state, random_state, set_random_state
from ...parallel.mesh.agreement import gather_objects, on_all_ranks
from ...parallel.mesh.calls import in_call
from ...parallel.mesh.plain_values import check_like
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.text import printable
from ...parallel.mesh.topology import Topology
from ..parallel_optimizer import ParallelOptimizer
from ..step.several import kind_of
from ..step.skips import SkipMonitor
from .checksums import EARLIER, FileRecord, verify
from .contents import OptimizerState, optimizer_state
from .directory import MANIFEST, is_checkpoint, newest_checkpoint, read_manifest
from .files import SHARED_FILE, files_on_all_ranks, files_on_first_rank, plain_content, rank_file
from .logical_parameters import LogicalParameters
from .restoration import Restoration
from .run_history import check_is_parallel, remember
from .shared_record import SharedRecord, check_content
from .tensors import Reader, is_tensor_file

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
                self.optimizer._saved().check(state)
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
            self.optimizer._states.load_state_dict(found.state["meshstep"]["weights"])
            self.optimizer._states.publish()

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
