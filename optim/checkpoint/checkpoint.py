"""Save a training run so that it survives a crash at any moment, and continue it on the same mesh or on another one.

    if newest_checkpoint(path):
        extra = load_checkpoint(path, model, optimizer, lr_scheduler=schedule)
        first = extra["step"]
    for step in range(first, steps):
        ...
        optimizer.step()
        if step % 100 == 99:
            save_checkpoint(path, model, optimizer, lr_scheduler=schedule, extra={"step": step + 1})

What is stored has no layout: parameters, masters and optimizer states are full logical tensors, of which each rank writes
what it holds and reads what it needs. So a run that was saved on tensor=2 continues on row=2,col=2, with states sharded
over another number of ranks, or in one process, wherever the model has the same logical parameters: the same names and
full shapes, on all ranks together.

Files are those of `torch.distributed.checkpoint`, with a manifest and checksums beside them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from copy import deepcopy
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ...parallel.mesh.agreement import gather_objects, on_all_ranks
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from ..parallel_optimizer import ParallelOptimizer
from .contents import RankRecord, collect, optimizer_state, portable_in
from .directory import FileRecord, begin, publish, read_manifest, record_of, verify
from .directory import newest_checkpoint as newest_checkpoint
from .parameters import LogicalParameters
from .random_state import random_state, set_random_state
from .record import SharedRecord
from .restoration import Restoration

T = TypeVar("T")
_SHARED = "shared.pt"


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ParallelOptimizer,
    *,
    lr_scheduler: LRScheduler | None = None,
    extra: Any = None,
) -> Path:
    """Write a checkpoint under ``path``, and then remove the previous one there.

    It is written beside the previous one, brought to the disk and then renamed. Whenever the ranks or the machine
    crash, the newest complete checkpoint is either the previous one or this one.

    Stored are the model's parameters and persistent buffers, the optimizer's state and hyper-parameters, float32
    masters, loss scale, count of skipped steps, the schedule, and every rank's random number generators. Gradients
    are not, so the position in an accumulation window is always its beginning: call it after `step`.

    Args:
        path: A directory for this run alone, in a file system that all ranks share; it is made if it isn't there. To keep
            more than the newest, give each a path of its own.
        model: This rank's part of the model (``nn.Module()`` where there is none), all of the optimizer's parameters in it;
            may be wrapped in `DistributedDataParallel`. Buffers have no spec: they are stored for each rank, but only once
            where they are equal. ``annotate(buffer, P(...))`` declares one that is sharded.
        optimizer: The optimizer.
        lr_scheduler: Any torch schedule.
        extra: What else you want back: numbers, strings, tensors, in lists, tuples and dicts. Rank 0's is stored.
    Returns:
        The checkpoint's own directory, ``path/meshstep-<number>``.
    Raises:
        ValueError: On every rank: gradients have been accumulated that no `step` has used yet; the schedule's state or
            ``extra`` holds something that could not be read back; ranks disagree on the parameters, don't hold equal
            pieces of them, or don't share ``path``. The previous checkpoint stays.
        RuntimeError: On every rank, when one could not write. The previous checkpoint stays.
    Collectives: gathers of Python objects over the world, at all ranks' pace. Host reads: everything.
    """
    from .tensors import write_tensors

    registry, path = optimizer.registry, Path(path)
    parameters = LogicalParameters(model, registry)

    def take() -> tuple[Any, RankRecord, dict[str, Any]]:
        _check_window(optimizer)
        # First: a schedule that has not seen yet whether the last step was skipped may correct the rates now.
        schedule = None if lr_scheduler is None else lr_scheduler.state_dict()
        state = optimizer_state(optimizer, parameters)
        tensors, record = collect(parameters, state)
        rest = {**state.rest, "weights": portable_in(state.rest["weights"])}
        about = {
            "rest": rest,
            "optimizer": type(optimizer.optimizer).__name__,
            "schedule": _readable(schedule, "the schedule's state"),
            "schedule_kind": type(lr_scheduler).__name__,
            "extra": _readable(extra, "extra="),
        }
        return tensors, record, about

    tensors, record, about = on_all_ranks(take, registry)
    records = gather_objects(record, registry)
    directory = _from_first(lambda: begin(path), registry)
    try:
        write_tensors(directory, tensors, registry)
        files = _on_all_ranks(lambda: _write_own(directory, records, about, registry), registry)
        everybodys = {name: record for found in gather_objects(files, registry) for name, record in found.items()}
        return _from_first(lambda: publish(directory, everybodys, _about(optimizer)), registry)
    except (ValueError, RuntimeError):
        if registry.global_rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
        gather_objects(None, registry)  # nobody goes on before it is gone
        raise


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ParallelOptimizer,
    *,
    lr_scheduler: LRScheduler | None = None,
) -> Any:
    """Continue from the newest complete checkpoint under ``path``.

    On the mesh it was saved on training goes on bit for bit. On another mesh, or with states sharded otherwise, the same
    numbers are laid out anew; random number generators are left as they are then, and batch norm's statistics, where
    ranks had different ones, are those of data coordinate 0 (as `DistributedDataParallel` does it).

    Load only what you trust: one of torch's files is a pickle.

    Args:
        path, model, optimizer, lr_scheduler: As they were for `save_checkpoint`, on the same or another mesh: the same
            logical parameters, param groups, kind of optimizer and schedule, and precision mode. Gradients are forgotten.
    Returns:
        What was given as ``extra``, on every rank; tensors on the CPU.
    Raises:
        ValueError: On every rank: there is no checkpoint; a file in it is missing, truncated or changed; it does not
            fit. Nothing has been changed then, on any rank.
        RuntimeError: On every rank, when one could not read. Nothing has been changed.
    Collectives: gathers of Python objects over the world, at all ranks' pace. Memory: once more this rank's parameters
    and states, on the CPU.
    """
    from .tensors import read_tensors, stored_tensors

    registry = optimizer.registry
    directory, manifest = _from_first(lambda: _open(Path(path), optimizer), registry)
    _on_all_ranks(lambda: _verify_share(directory, manifest, registry), registry)
    parameters = LogicalParameters(model, registry)
    saved = Topology(roles=manifest["roles"], **manifest["axes"])

    def plan() -> tuple[dict[str, Any], Any]:
        content = torch.load(directory / _SHARED, map_location="cpu", weights_only=True)
        _check_kinds(content, optimizer, lr_scheduler)
        return content, optimizer_state(optimizer, parameters)

    content, own = _on_all_ranks(plan, registry)
    named = [[own.stepped[position].name for position in group["params"]] for group in own.groups]
    shared = SharedRecord(content["record"], saved, registry.topology, registry.global_rank)
    groups = _together(gather_objects(named, registry))
    restoration = on_all_ranks(
        lambda: Restoration(parameters, own, groups, stored_tensors(directory), shared), registry
    )
    state = on_all_ranks(lambda: restoration.state_dict(content["rest"]), registry)
    random = _on_all_ranks(lambda: _random_state_in(directory, saved, registry), registry)
    read_tensors(directory, restoration.tensors, registry)
    # Up to here nothing has been changed.
    _load_schedule_and_optimizer(lr_scheduler, content["schedule"], optimizer, state)
    optimizer.zero_grad()
    restoration.write_model()
    if random is not None:
        set_random_state(random)
    return content["extra"]


# Saving -----------------------------------------------------------------------------------------------------------------


def _check_window(optimizer: ParallelOptimizer) -> None:
    pending = optimizer.window.micro_batches
    if pending:
        raise ValueError(
            f"{pending} micro-batches have been accumulated since the last step, and their gradients would be lost: call "
            "save_checkpoint after step()"
        )


def _readable(value: Any, what: str) -> Any:
    """``value``, if it can be read back without executing anything."""
    stream = BytesIO()
    try:
        torch.save(value, stream)
        stream.seek(0)
        torch.load(stream, weights_only=True)
    except Exception as problem:
        reason = str(problem).splitlines()[0]
        raise ValueError(
            f"{what} can't be stored ({reason}); give numbers, strings and tensors, in lists, tuples and dicts"
        ) from problem
    return value


def _write_own(
    directory: Path, records: list[RankRecord], about: Mapping[str, Any], registry: ProcessGroupRegistry
) -> dict[str, FileRecord]:
    """Write what is no tensor, and bring all that this rank wrote to the disk."""
    rank = registry.global_rank
    torch.save(random_state(), directory / _rank_file(rank))
    files = [_rank_file(rank), *(file.name for file in directory.glob(f"__{rank}_*"))]
    if rank == 0:
        torch.save({"record": SharedRecord.merge(records), **about}, directory / _SHARED)
        files += [_SHARED, ".metadata"]
    return {name: record_of(directory / name, synchronise=True) for name in files}


def _about(optimizer: ParallelOptimizer) -> dict[str, Any]:
    """What the manifest says of a run."""
    topology = optimizer.registry.topology
    return {
        "precision": optimizer.precision.name,
        "axes": dict(zip(topology.axes, topology.sizes, strict=True)),
        "roles": {axis: topology.role(axis) for axis in topology.axes},
        "torch": torch.__version__,
    }


def _rank_file(rank: int) -> str:
    return f"rank-{rank}.pt"


# Loading ----------------------------------------------------------------------------------------------------------------


def _open(path: Path, optimizer: ParallelOptimizer) -> tuple[Path, dict[str, Any]]:
    directory = newest_checkpoint(path)
    if directory is None:
        raise ValueError(f"there is no complete checkpoint under {path}; newest_checkpoint(path) tells beforehand")
    manifest = read_manifest(directory)
    if manifest["precision"] != optimizer.precision.name:
        raise ValueError(
            f"{directory} was saved with precision={manifest['precision']!r}, but this optimizer runs with "
            f"{optimizer.precision.name!r}; continue in the mode it was saved in"
        )
    return directory, manifest


def _verify_share(directory: Path, manifest: Mapping[str, Any], registry: ProcessGroupRegistry) -> None:
    """Check this rank's share of the files."""
    files = {name: FileRecord(*record) for name, record in manifest["files"].items()}
    verify(directory, dict(islice(files.items(), registry.global_rank, None, registry.topology.world_size)))


def _check_kinds(content: Mapping[str, Any], optimizer: ParallelOptimizer, schedule: LRScheduler | None) -> None:
    kind = type(optimizer.optimizer).__name__
    if content["optimizer"] != kind:
        raise ValueError(f"the checkpoint was saved with {content['optimizer']}, this optimizer is {kind}")
    if (content["schedule"] is None) != (schedule is None):
        raise ValueError(
            "the checkpoint was saved without a schedule; load it without lr_scheduler="
            if schedule
            else f"the checkpoint was saved with a {content['schedule_kind']}; give lr_scheduler= one, or it starts over"
        )
    if content["schedule_kind"] != type(schedule).__name__:
        raise ValueError(
            f"the checkpoint was saved with a {content['schedule_kind']}, lr_scheduler= is a {type(schedule).__name__}"
        )


def _together(named: list[list[list[str]]]) -> list[set[str]]:
    """The names in each param group, those of all ranks."""
    count = max(len(groups) for groups in named)
    return [{name for groups in named if index < len(groups) for name in groups[index]} for index in range(count)]


def _random_state_in(directory: Path, saved: Topology, registry: ProcessGroupRegistry) -> dict[str, Any] | None:
    if saved != registry.topology:
        return None
    state: dict[str, Any] = torch.load(directory / _rank_file(registry.global_rank), weights_only=True)
    return state


def _load_schedule_and_optimizer(
    schedule: LRScheduler | None,
    saved: dict[str, Any],
    optimizer: ParallelOptimizer,
    state: dict[str, Any],
) -> None:
    """Both, on all ranks, or none of them."""
    backup = None if schedule is None else deepcopy(schedule.state_dict())

    def load() -> None:
        if schedule is not None:
            try:
                schedule.load_state_dict(saved)
            except Exception as problem:
                raise ValueError(
                    f"the schedule can't continue from the state in the checkpoint: {problem!r}"
                ) from problem

    try:
        on_all_ranks(load, optimizer.registry)
        optimizer.load_state_dict(state)
    except (ValueError, TypeError, RuntimeError):
        if schedule is not None and backup is not None:
            schedule.load_state_dict(backup)
        raise


# All ranks --------------------------------------------------------------------------------------------------------------


def _on_all_ranks(function: Callable[[], T], registry: ProcessGroupRegistry) -> T:
    """As `on_all_ranks`, for what uses files."""

    def run() -> T:
        try:
            return function()
        except OSError as problem:
            raise RuntimeError(f"{type(problem).__name__}: {problem}") from problem

    return on_all_ranks(run, registry)


def _from_first(function: Callable[[], T], registry: ProcessGroupRegistry) -> T:
    """What ``function`` returns on rank 0, which alone calls it; its error is raised on every rank."""
    first = registry.global_rank == 0
    found = _on_all_ranks(lambda: function() if first else None, registry)
    return gather_objects(found, registry)[0]  # type: ignore[return-value]
