"""Continue a training run from a checkpoint, on the mesh it was saved on or on another one.

Everything is read and compared beside the run first; only when all of it fits, on every rank, is the run changed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ...parallel.data.random_state import set_random_state
from ...parallel.mesh.agreement import gather_objects, on_all_ranks
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from ..parallel_optimizer import ParallelOptimizer
from .contents import OptimizerState, optimizer_state
from .directory import FileRecord, newest_checkpoint, read_manifest, verify
from .files import SHARED_FILE, files_on_all_ranks, files_on_first_rank, rank_file
from .logical_parameters import LogicalParameters
from .restoration import Restoration
from .shared_record import SharedRecord


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
    from .tensors import read_tensors

    registry = optimizer.registry
    directory, manifest = files_on_first_rank(lambda: _open(Path(path), optimizer), registry)
    files_on_all_ranks(lambda: _verify_share(directory, manifest, registry), registry)
    saved = Topology(roles=manifest["roles"], **manifest["axes"])
    parameters = LogicalParameters(model, registry)
    content, own = files_on_all_ranks(lambda: _read(directory, optimizer, lr_scheduler, parameters), registry)
    restoration = _restoration(directory, content, saved, parameters, own, registry)
    state = on_all_ranks(lambda: restoration.state_dict(content["rest"]), registry)
    random = files_on_all_ranks(lambda: _random_state_in(directory, saved, registry), registry)
    read_tensors(directory, restoration.tensors, registry)
    # Up to here nothing has been changed.
    _load_schedule_and_optimizer(lr_scheduler, content["schedule"], optimizer, state)
    optimizer.zero_grad()
    restoration.write_model()
    if random is not None:
        set_random_state(random)
    return content["extra"]


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


def _read(
    directory: Path, optimizer: ParallelOptimizer, schedule: LRScheduler | None, parameters: LogicalParameters
) -> tuple[dict[str, Any], OptimizerState]:
    """What is there for all ranks, and the optimizer's state as it is now. Raises ValueError if they are not of a kind."""
    content: dict[str, Any] = torch.load(directory / SHARED_FILE, map_location="cpu", weights_only=True)
    _check_kinds(content, optimizer, schedule)
    return content, optimizer_state(optimizer, parameters)


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


def _restoration(
    directory: Path,
    content: Mapping[str, Any],
    saved: Topology,
    parameters: LogicalParameters,
    own: OptimizerState,
    registry: ProcessGroupRegistry,
) -> Restoration:
    """The plan of what this rank needs. Raises ValueError on every rank. Collectives: gathers of objects over the world."""
    from .tensors import stored_tensors

    names = [[own.stepped[position].name for position in group["params"]] for group in own.groups]
    groups = _names_by_group(gather_objects(names, registry))
    shared = SharedRecord(content["record"], saved, registry.topology, registry.global_rank)
    return on_all_ranks(lambda: Restoration(parameters, own, groups, stored_tensors(directory), shared), registry)


def _names_by_group(named: list[list[list[str]]]) -> list[set[str]]:
    """The names in each param group, those of all ranks."""
    count = max(len(groups) for groups in named)
    return [{name for groups in named if index < len(groups) for name in groups[index]} for index in range(count)]


def _random_state_in(directory: Path, saved: Topology, registry: ProcessGroupRegistry) -> dict[str, Any] | None:
    if saved != registry.topology:
        return None
    state: dict[str, Any] = torch.load(directory / rank_file(registry.global_rank), weights_only=True)
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
