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

`torch.distributed.checkpoint` decides who writes what. Files hold the tensors' bytes, with an index, a manifest and
checksums beside them.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as finished
from copy import deepcopy
from functools import partial
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ...parallel.mesh.agreement import gather_objects, on_all_ranks
from ...parallel.mesh.call_tracker import in_call, public_call
from ...parallel.mesh.random_state import random_state
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..parallel_optimizer import ParallelOptimizer
from ..step.combined_optimizer import kind_of
from .contents import (
    LogicalParameters,
    OptimizerState,
    PieceStates,
    RankRecord,
    SavedTensor,
    SharedRecord,
    collect,
    first_states_for_others,
    optimizer_state,
    portable_in,
)
from .directory import (
    SHARED_FILE,
    FileRecord,
    begin,
    check_is_parallel,
    files_on_all_ranks,
    files_on_first_rank,
    last_known,
    publish,
    rank_file,
    remember,
    write_summed,
)
from .tensors import write_tensors


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ParallelOptimizer,
    *,
    lr_scheduler: LRScheduler | None = None,
    extra: Any = None,
    keep: int = 1,
) -> Path:
    """Write a checkpoint under ``path``, and then remove the oldest ones there.

    It is written beside the previous one, brought to the disk and then renamed. Whenever the ranks or the machine
    crash, the newest complete checkpoint is either the previous one or this one.

    Stored are the model's parameters and persistent buffers, the optimizer's state and hyper-parameters, float32
    masters, loss scale, count of skipped steps, the schedule, and every rank's random number generators. Gradients
    are not, so the position in an accumulation window is always its beginning: call it after `step`.

    Args:
        path: A directory for this run alone, in a file system that all ranks share; it is made if it isn't there.
        model: This rank's part of the model (``nn.Module()`` where there is none), all of the optimizer's parameters in it;
            may be wrapped in `DistributedDataParallel`. Buffers have no spec: they are stored for each rank, but only once
            where they are equal. ``annotate(buffer, P(...))`` declares one that is sharded.
        optimizer: The optimizer.
        lr_scheduler: Any torch schedule.
        extra: What else you want back: numbers, strings, tensors, in lists, tuples and dicts. Rank 0's is stored.
        keep: How many of the newest checkpoints stay, this one among them; `load_checkpoint` takes the directory of an
            older one too.
    Returns:
        The checkpoint's own directory, ``path/meshstep-<number>``.
    Raises:
        ValueError: On every rank: gradients have been accumulated that no `step` has used yet; the schedule's state or
            ``extra`` holds something that could not be read back; ranks disagree on the parameters, don't hold equal
            pieces of them, or don't share ``path``; the newest checkpoint there is another run's, which this one has
            neither saved nor loaded. The previous checkpoint stays.
        RuntimeError: On every rank, when one could not write. The previous checkpoint stays.
        TypeError: The optimizer is a torch optimizer.
    Collectives: gathers of Python objects over the world, at all ranks' pace. Host reads: everything.
    """
    check_is_parallel(optimizer)
    with in_call(optimizer.registry, "save_checkpoint"):
        snapshot = snapshot_of(model, optimizer, lr_scheduler, extra, keep)
        checkpoint = write(Path(path), snapshot, last_known(optimizer, Path(path)), optimizer.registry)
    remember(optimizer, checkpoint)
    return checkpoint


class Snapshot(NamedTuple):
    """What this rank has to write: its parts of the tensors, its record, its random state, and what is the same for all
    ranks."""

    tensors: dict[str, SavedTensor]
    record: dict[str, Any]  # of all ranks
    random: dict[str, Any]
    common: dict[str, Any]
    facts: dict[str, Any]
    keep: int


def snapshot_of(
    model: nn.Module, optimizer: ParallelOptimizer, lr_scheduler: LRScheduler | None, extra: Any, keep: int
) -> Snapshot:
    """What `write` writes; tensors are views of the run's. Raises, collectives: as `save_checkpoint`."""
    registry = optimizer.registry
    parameters = LogicalParameters(model, registry)

    def collected() -> tuple[OptimizerState, dict[str, SavedTensor], RankRecord, dict[str, Any]]:
        check_keep(keep)
        _check_window(optimizer)
        # First: a schedule that has not seen yet whether the last step was skipped may correct the rates now.
        schedule = None if lr_scheduler is None else lr_scheduler.state_dict()
        state = optimizer_state(optimizer, parameters)
        common = {
            "rest": {**state.rest, "weights": portable_in(state.rest["weights"])},
            "optimizer": kind_of(optimizer.optimizer),
            "schedule": _readable(schedule, "the schedule's state"),
            "schedule_kind": type(lr_scheduler).__name__,
            "extra": _readable(extra, "extra="),
        }
        return state, *collect(parameters, state), common

    state, tensors, record, common = on_all_ranks(collected, registry)
    merged = SharedRecord.merge(gather_objects(record, registry))
    tensors |= first_states_for_others(parameters, state, PieceStates(merged["pieces"], set()), optimizer.optimizer)
    return Snapshot(tensors, merged, random_state(), common, _facts(optimizer), keep)


def write(path: Path, snapshot: Snapshot, known: str | None, registry: ProcessGroupRegistry) -> Path:
    """The complete checkpoint's directory; nothing is left of it after an error.

    Args:
        known: As for `begin`.
    Raises, collectives: as `save_checkpoint`.
    """
    directory = files_on_first_rank(lambda: begin(path, known), registry)
    try:
        own = write_tensors(directory, snapshot.tensors, registry)
        own |= files_on_all_ranks(lambda: _write_own(directory, snapshot, registry.global_rank), registry)
        files = {name: record for found in gather_objects(own, registry) for name, record in found.items()}
        return files_on_first_rank(lambda: publish(directory, files, snapshot.facts, snapshot.keep), registry)
    except Exception:
        if registry.global_rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
        gather_objects(None, registry)  # nobody goes on before it is gone
        raise


def check_keep(keep: int) -> None:
    """Raise ValueError where it is no number of checkpoints."""
    if not isinstance(keep, int) or keep < 1:
        raise ValueError(f"keep={keep!r}: give how many checkpoints stay, the new one among them: 1, 2, ...")


def _check_window(optimizer: ParallelOptimizer) -> None:
    pending = optimizer.micro_batches
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


def _write_own(directory: Path, snapshot: Snapshot, rank: int) -> dict[str, FileRecord]:
    """Write what is no tensor, and bring it to the disk. Raises OSError."""
    contents = {rank_file(rank): snapshot.random}
    if rank == 0:
        contents[SHARED_FILE] = {"record": snapshot.record, **snapshot.common}
    return {name: write_summed(directory / name, partial(torch.save, content)) for name, content in contents.items()}


def _facts(optimizer: ParallelOptimizer) -> dict[str, Any]:
    """What the manifest says of a run."""
    topology = optimizer.registry.topology
    return {
        "precision": optimizer.precision.name,
        "axes": dict(zip(topology.axes, topology.sizes, strict=True)),
        "roles": {axis: topology.role(axis) for axis in topology.axes},
        "torch": torch.__version__,
    }


# Save a training run while it goes on ---------------------------------------------------------------------------------


class AsyncSaver:
    """Saves checkpoints in the background: `save` copies the run to the host, and a thread writes the copy.

        with AsyncSaver(path, registry, keep=3) as saver:
            for step in range(steps):
                ...
                if step % 100 == 99:
                    saver.save(model, optimizer, lr_scheduler=schedule, extra={"step": step + 1})

    What it writes is what `save_checkpoint` writes, as atomic, and `load_checkpoint` reads it. One checkpoint is written at
    a time. An error in writing is raised on every rank by the next `save` or `wait`; the end of the ``with`` waits too. The
    ranks' threads agree over a process group of their own, so training's collectives are not in their way.

    Every rank makes it, at the same point, and calls the same methods in the same order. Wait before the process group is
    destroyed.

    Args:
        path, keep: As for `save_checkpoint`.
        registry: The optimizer's.
    Raises:
        ValueError: On every rank: ``keep`` is out of range.
    Collectives: here two object all-gathers. Memory: while a checkpoint is written, once more what this rank
    holds of parameters, masters and states, on the CPU.
    """

    def __init__(self, path: str | os.PathLike[str], registry: ProcessGroupRegistry, *, keep: int = 1) -> None:
        on_all_ranks(lambda: check_keep(keep), registry)
        self.path, self.registry, self.keep = Path(path), registry, keep
        self._apart = ProcessGroupRegistry(registry.topology, backend="gloo", apart=True)
        gather_objects(None, self._apart)  # connects the ranks, which a thread must not do: the store is shared
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="meshstep-checkpoint")
        self._pending: tuple[Future[Path], ParallelOptimizer] | None = None

    @public_call
    def save(
        self,
        model: nn.Module,
        optimizer: ParallelOptimizer,
        *,
        lr_scheduler: LRScheduler | None = None,
        extra: Any = None,
    ) -> None:
        """Begin a checkpoint of the run as it is now; first wait for the one before.

        Args: as for `save_checkpoint`.
        Raises:
            ValueError, RuntimeError: On every rank: as `save_checkpoint`; or the one before could not be written, and then
                this one has not been begun.
        Collectives: gathers of Python objects over the world. Host reads: everything.
        """
        check_is_parallel(optimizer)
        self.wait()
        snapshot = snapshot_of(model, optimizer, lr_scheduler, extra, self.keep)
        copy = on_all_ranks(lambda: _on_the_host(snapshot), self.registry)
        known = last_known(optimizer, self.path)
        self._pending = self._thread.submit(self._write, copy, known), optimizer

    def _write(self, copy: Snapshot, known: str | None) -> Path:
        with in_call(self._apart, "AsyncSaver's writing"):
            return write(self.path, copy, known, self._apart)

    @public_call
    def wait(self) -> Path | None:
        """Wait until the checkpoint that was begun last is complete.

        Returns:
            Its directory; None where there is none to wait for.
        Raises:
            ValueError, RuntimeError: On every rank, when it could not be written. The previous checkpoint stays.
        Collectives: one object all-gather, if there is one to wait for.
        """
        if self._pending is None:
            return None
        (future, optimizer), self._pending = self._pending, None
        checkpoint = on_all_ranks(future.result, self.registry)
        remember(optimizer, checkpoint)
        return checkpoint

    def close(self) -> None:
        """`wait`, and end the thread and its process group. Raises, collectives: as there."""
        try:
            self.wait()
        finally:
            self._end()

    def _end(self) -> None:
        self._thread.shutdown()
        self._apart.close()

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        if self._pending is not None:  # other ranks may not come here: nothing that waits for them
            finished([self._pending[0]])
        self._end()


def _on_the_host(snapshot: Snapshot) -> Snapshot:
    """A copy that shares nothing with the run."""
    tensors = {
        key: SavedTensor(
            tensor.shape,
            tensor.dtype,
            {offsets: part.detach().to("cpu", copy=True) for offsets, part in tensor.parts.items()},
        )
        for key, tensor in snapshot.tensors.items()
    }
    record, common = deepcopy((snapshot.record, snapshot.common))
    return snapshot._replace(tensors=tensors, record=record, common=common)
