"""Save a training run so that it survives a crash at any moment, and continue it on the same mesh or on another one.

    first = 0
    if newest_checkpoint(path):
        extra = load_checkpoint(path, model, optimizer, lr_scheduler=schedule)
        first = extra["step"]
    for step in range(first, steps):
        ...
        optimizer.step()
        if step % 100 == 99:
            save_checkpoint(path, model, optimizer, lr_scheduler=schedule, extra={"step": step + 1})

Parameters, master weights, and optimizer states of their parameter's shape are stored as full tensors, which do not
depend on the layout. When saving, ranks write their shards, and each replicated shard once; when loading, each rank
reads the parts that it needs. So a run that was saved on a mesh tensor=2 can continue on row=2,col=2, with another number
of shards, or in one process. The parameters of all ranks together must have the same names and full shapes as in the
saved model. A shard's optimizer state of another shape, unless it is one number, can only be loaded for an equal shard.

`torch.distributed.checkpoint` plans which rank writes which part. A checkpoint is a directory: files with the bytes of
tensors, an index of these files, files with other data, and a manifest with checksums.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as finished
from copy import deepcopy
from functools import partial
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ...parallel.mesh.agreement import gather_objects, on_all_ranks
from ...parallel.mesh.call_tracker import public_call, track_call
from ...parallel.mesh.random_state import random_state
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.value_checks import python_numbers
from ..build import check_is_parallel
from ..parallel_optimizer import ParallelOptimizer
from ..step.wrapped_optimizer import kind_of
from .contents import (
    LogicalParameters,
    OptimizerState,
    PieceStates,
    RankRecord,
    SavedTensor,
    SharedRecord,
    collect,
    initial_states,
    optimizer_state,
    portable_entries,
)
from .directory import (
    SHARED_FILE,
    FileRecord,
    begin,
    files_on_all_ranks,
    files_on_first_rank,
    last_known,
    path_on_all_ranks,
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
    trainable_only: bool = False,
) -> Path:
    """Write a checkpoint under ``path``, and then remove all but the ``keep`` newest checkpoints there.

        save_checkpoint("checkpoints", model, optimizer, lr_scheduler=scheduler, extra={"step": step})

    The checkpoint is written to a temporary directory, synchronized to disk, and then renamed. If ranks or the machine
    crash at any moment, the newest complete checkpoint is the previous one or this one.

    It contains the model's parameters and persistent buffers, and the optimizer's state, hyper-parameters and float32
    master weights. It also contains the loss scale, the number of skipped steps, the state of the clipping rule, the
    schedule, and the random states of every rank. It does not contain gradients, so save after the optimizer's `step`,
    before the next micro-batch.

    Args:
        path: A directory that only this run uses, in a file system that all ranks share. It is created if it does not
            exist.
        model: This rank's part of the model (``nn.Module()`` if it has none), with all parameters of the optimizer. It
            may be wrapped in `DistributedDataParallel`. Each rank's undeclared buffers are stored; equal buffers are
            stored once. Declare a sharded buffer with ``annotate(buffer, P(...))``.
        optimizer: The optimizer that steps the model's parameters.
        lr_scheduler: Any torch schedule. None (default): no schedule is saved.
        extra: Other data to restore: numbers, strings and tensors, in lists, tuples and dicts. The value of rank 0 is
            stored. Default: None.
        keep: Number of newest checkpoints to keep, including this one. `load_checkpoint` also accepts the directory of
            an older checkpoint. Default: 1.
        trainable_only: True: save only parameters with ``requires_grad``, with their optimizer states and master weights,
            and persistent buffers of modules that hold such a parameter themselves. Frozen parameters need no spec then.
            Load it with ``load_checkpoint(..., trainable_only=True)``. False (default): save all parameters.
    Returns:
        The directory of the checkpoint, ``path/meshstep-<number>``.
    Raises:
        ValueError: On every rank: ``keep`` is out of range, or micro-batches were accumulated since the last `step`. Or
            a module has non-empty extra state, a parameter needs a declaration, or the optimizer steps a tensor that is
            not in ``model``. Or ``extra``, or the state of the schedule or the optimizer, contains an object that could
            not be read back, or a full-tensor optimizer has a state that is not a tensor. Or ranks disagree on the
            parameters or don't share ``path``. Or shards of a tensor have different dtypes, or unequal sizes and no
            declared full shape (`annotate`). Or the newest checkpoint under ``path`` is not the last one that
            ``optimizer`` saved or loaded there. The previous checkpoint is kept.
        RuntimeError: On every rank: a rank could not write. The previous checkpoint is kept.
        TypeError: On every rank: ``path`` is not a path. On this rank: the optimizer is not a `ParallelOptimizer`, so its
            process groups are unknown; other ranks wait until the timeout.
    Collectives: gathers of Python objects over all ranks.
    Host synchronization: yes, everything is copied to the host.
    """
    check_is_parallel(optimizer)
    with track_call("save_checkpoint", optimizer.registry):
        directory = path_on_all_ranks(path, optimizer.registry)
        snapshot = make_snapshot(model, optimizer, lr_scheduler, extra, keep, trainable_only)
        checkpoint = write(directory, snapshot, last_known(optimizer, directory), optimizer.registry)
    remember(optimizer, checkpoint)
    return checkpoint


class Snapshot(NamedTuple):
    """The data that this rank writes into a checkpoint.

    ``tensors`` are this rank's parts of the full tensors, by key. ``record`` is the result of `SharedRecord.merge` for
    all ranks. ``random`` has the states of this rank's random number generators. Rank 0 writes ``common`` for all
    ranks, and ``facts`` as entries of the manifest.
    """

    tensors: dict[str, SavedTensor]
    record: dict[str, Any]
    random: dict[str, Any]
    common: dict[str, Any]
    facts: dict[str, Any]
    keep: int


def make_snapshot(
    model: nn.Module,
    optimizer: ParallelOptimizer,
    lr_scheduler: LRScheduler | None,
    extra: Any,
    keep: int,
    trainable_only: bool,
) -> Snapshot:
    """Return this rank's data for `write`. Most of its tensors share memory with the model and the optimizer.

    Arguments and errors as in `save_checkpoint`, except for the errors of `write`.

    Collectives: gathers of Python objects over all ranks.
    Host synchronization: yes.
    """
    registry = optimizer.registry
    parameters = LogicalParameters(model, registry, trainable_only)

    def collect_on_rank() -> tuple[OptimizerState, dict[str, SavedTensor], RankRecord, dict[str, Any]]:
        check_keep(keep)
        _check_window(optimizer)
        # Called before the optimizer's state is read, because the schedule's `state_dict` may undo an advance for a
        # skipped step, which changes the optimizer's learning rates.
        schedule = None if lr_scheduler is None else lr_scheduler.state_dict()
        state = optimizer_state(optimizer, parameters)
        common = {
            "rest": {**state.rest, "weights": portable_entries(state.rest["weights"])},
            "optimizer": kind_of(optimizer.optimizer),
            "schedule": _readable(schedule, "the schedule's state"),
            "schedule_kind": type(lr_scheduler).__name__,
            "extra": _readable(extra, "extra="),
        }
        _check_state(state)
        return state, *collect(parameters, state), common

    state, tensors, record, common = on_all_ranks(collect_on_rank, registry)
    merged = SharedRecord.merge(gather_objects(record, registry))
    tensors |= initial_states(state, PieceStates(merged["pieces"], set()), optimizer.optimizer)
    facts = {**_manifest_entries(optimizer), "trainable_only": trainable_only}
    return Snapshot(tensors, merged, random_state(), common, facts, keep)


def write(path: Path, snapshot: Snapshot, known: str | None, registry: ProcessGroupRegistry) -> Path:
    """Write a checkpoint and return its directory. After an error, rank 0 removes the incomplete directory.

    ``known`` is the name of the last checkpoint under ``path`` that this run saved or loaded; None: no checkpoint.
    Errors are raised on every rank.

    Collectives: gathers of Python objects over all ranks.
    Host synchronization: yes.
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
        gather_objects(None, registry)  # all ranks wait until the directory is removed
        raise


def check_keep(keep: int) -> None:
    """Raise ValueError unless ``keep``, a number of checkpoints, is an integer >= 1."""
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
        raise ValueError(f"keep={keep!r}: give the number of checkpoints to keep, including the new one: 1, 2, ...")


def _check_window(optimizer: ParallelOptimizer) -> None:
    pending = optimizer.micro_batches
    if pending:
        raise ValueError(
            f"a checkpoint would lose the gradients accumulated since the last update (micro-batches: {pending}): call "
            "save_checkpoint after the step() that ends gradient accumulation, before the next backward"
        )


def _check_state(state: OptimizerState) -> None:
    """Raise ValueError if `load_checkpoint` could not read back a part of the optimizer's state that is not a tensor."""
    parts = {
        f"{key!r} of param group {index}": value
        for index, group in enumerate(state.groups)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
    parts |= {
        f"the optimizer's {key!r} of {stepped.name}": value
        for position, stepped in state.stepped.items()
        for key, value in state.tensors.get(position, {}).items()
        if not isinstance(value, Tensor)
    }
    rest = {key: value for key, value in state.rest.items() if key != "weights"}
    parts["the state of the precision mode or of the clipping rule"] = rest
    if _reading_error([*parts.values()]) is not None:  # one test of all parts takes much less time than one per part
        for what, value in parts.items():
            _check_readable(value, what)


def _readable(value: Any, what: str) -> Any:
    """Return ``value`` with NumPy's numbers as Python numbers. Raise ValueError as `_check_readable`."""
    value = python_numbers(value)
    _check_readable(value, what)
    return value


def _check_readable(value: Any, what: str) -> None:
    """Raise ValueError unless ``torch.load(weights_only=True)`` can read ``value`` back after `torch.save`."""
    problem = _reading_error(value)
    if problem is None:
        return
    rejected = re.search(r"GLOBAL (\S+)", str(problem)) if isinstance(problem, UnpicklingError) else None
    first_line = next(iter(str(problem).splitlines()), type(problem).__name__)
    reason = first_line if rejected is None else f"torch.load(weights_only=True) rejects its {rejected[1]}"
    raise ValueError(
        f"{what} can't be stored ({reason}); give numbers, strings and tensors, in lists, tuples and dicts"
    ) from problem


def _reading_error(value: Any) -> Exception | None:
    stream = BytesIO()
    try:
        torch.save(value, stream)
        stream.seek(0)
        torch.load(stream, weights_only=True)
    except Exception as problem:
        return problem
    return None


def _write_own(directory: Path, snapshot: Snapshot, rank: int) -> dict[str, FileRecord]:
    """Write this rank's random states, and on rank 0 the data for all ranks; return the records of the files by name."""
    contents = {rank_file(rank): snapshot.random}
    if rank == 0:
        contents[SHARED_FILE] = {"record": snapshot.record, **snapshot.common}
    return {name: write_summed(directory / name, partial(torch.save, content)) for name, content in contents.items()}


def _manifest_entries(optimizer: ParallelOptimizer) -> dict[str, Any]:
    """Return the entries of the manifest that describe the run: precision, mesh and torch's version."""
    topology = optimizer.registry.topology
    return {
        "precision": optimizer.precision.name,
        "axes": {axis: topology.size(axis) for axis in topology.axes},
        "roles": {axis: topology.role(axis) for axis in topology.axes},
        "torch": torch.__version__,
    }


# Save in the background -----------------------------------------------------------------------------------------------


class AsyncSaver:
    """Saves checkpoints in the background: `save` copies the run's tensors to CPU memory, and a thread writes the copies.

        with AsyncSaver(path, registry, keep=3) as saver:
            for step in range(steps):
                ...
                if step % 100 == 99:
                    saver.save(model, optimizer, lr_scheduler=schedule, extra={"step": step + 1})

    A checkpoint becomes complete atomically, as with `save_checkpoint`, and `load_checkpoint` reads it. Only one
    checkpoint is written at a time: `save` first waits for the previous checkpoint. If the thread of a rank fails, the
    next `save`, `wait` or `close` raises the error on every rank. The end of the ``with`` block waits for the last
    checkpoint. The threads use separate process groups, so they do not interfere with the collectives of training.

    Every rank must create an `AsyncSaver` at the same point of the program, and call the same methods in the same
    order. Call `wait` before you destroy the process group.

    Args:
        path: A directory that only this run uses, in a file system that all ranks share. It is created if it does not
            exist.
        registry: The process groups, as passed to the optimizer.
        keep: Number of newest checkpoints to keep, including the new one, >= 1. Default: 1.
    Raises:
        ValueError: On every rank: ``keep`` is out of range.
        TypeError: On every rank: ``path`` is not a path.
    Collectives: three object all-gathers in the constructor; none with one rank.
    Memory: while a checkpoint is written, a CPU copy of this rank's parameters, buffers, master weights and optimizer
    states. Copies of CUDA tensors are in pinned memory, which torch keeps for later copies.
    """

    def __init__(self, path: str | os.PathLike[str], registry: ProcessGroupRegistry, *, keep: int = 1) -> None:
        self.path = path_on_all_ranks(path, registry)
        on_all_ranks(lambda: check_keep(keep), registry)
        self.registry, self.keep = registry, keep
        self._apart = ProcessGroupRegistry(registry.topology, backend="gloo", exclusive_groups=True)
        # Connects the ranks now, because a thread must not connect them later through the store of the other groups.
        gather_objects(None, self._apart)
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
        trainable_only: bool = False,
    ) -> None:
        """Wait for the previous checkpoint, copy the current state of the run to the host, and start to write it.

        If writing the previous checkpoint failed, this method raises the error and does not start a checkpoint.

        Args:
            model: This rank's part of the model, with all parameters of the optimizer, as for `save_checkpoint`.
            optimizer: The optimizer that steps the model's parameters.
            lr_scheduler: Any torch schedule. None (default): no schedule is saved.
            extra: Other data to restore: numbers, strings and tensors, in lists, tuples and dicts. The value of rank 0
                is stored. Default: None.
            trainable_only: As in `save_checkpoint`. Default: False.
        Raises:
            ValueError: On every rank: as `save_checkpoint`, for this checkpoint or for the previous one.
            RuntimeError: On every rank: the previous checkpoint could not be written.
            TypeError: On every rank: the optimizer is not a `ParallelOptimizer`.
        Collectives: gathers of Python objects over all ranks.
        Host synchronization: yes, for step counts and similar numbers, for undeclared buffers, and for tensors in
            ``extra``, the schedule and the param groups. The host does not wait for the copies of other CUDA tensors;
            the thread waits for them. Later work in the current stream, such as the next step, runs after the copies.
        """
        on_all_ranks(lambda: check_is_parallel(optimizer), self.registry)
        self.wait()
        snapshot = make_snapshot(model, optimizer, lr_scheduler, extra, self.keep, trainable_only)
        copy, arrived = on_all_ranks(lambda: _copy_to_host(snapshot), self.registry)
        known = last_known(optimizer, self.path)
        self._pending = self._thread.submit(self._write, copy, arrived, known), optimizer

    def _write(self, copy: Snapshot, arrived: Sequence[torch.cuda.Event], known: str | None) -> Path:
        for event in arrived:
            event.synchronize()
        with track_call("AsyncSaver's writing", self._apart):
            return write(self.path, copy, known, self._apart)

    @public_call
    def wait(self) -> Path | None:
        """Wait until the last started checkpoint is complete.

        Returns:
            The directory of the checkpoint. None: no checkpoint was started since the last `wait`.
        Raises:
            ValueError: On every rank: ranks don't share the path, shards have different dtypes, or unequal sizes and no
                declared full shape, or the newest checkpoint under the path is not the last one that the optimizer
                saved or loaded there. The previous complete checkpoint is kept.
            RuntimeError: On every rank: the checkpoint could not be written. The previous complete checkpoint is kept.
        Collectives: one object all-gather, if a checkpoint was started since the last `wait`; none with one rank.
        """
        if self._pending is None:
            return None
        (future, optimizer), self._pending = self._pending, None
        checkpoint = on_all_ranks(future.result, self.registry)
        remember(optimizer, checkpoint)
        return checkpoint

    def close(self) -> None:
        """Call `wait`, then end the thread and close its process groups, even if `wait` raises an error.

        Raises:
            ValueError, RuntimeError: As in `wait`.
        Collectives: as `wait`.
        """
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
        # After an error, wait without a collective, because other ranks may have no error.
        if self._pending is not None:
            finished([self._pending[0]])
        self._end()


def _copy_to_host(snapshot: Snapshot) -> tuple[Snapshot, list[torch.cuda.Event]]:
    """Start to copy ``snapshot`` to CPU memory. The copy shares no memory with the model and the optimizer.

    Return the copy, and one event per CUDA device. Wait for the events before you read the copy. The host does not wait
    for CUDA tensors, because their copies are in pinned memory.
    """
    tensors = {
        key: SavedTensor(
            tensor.shape,
            tensor.dtype,
            {box: part.detach().to("cpu", copy=True, non_blocking=part.is_cuda) for box, part in tensor.parts.items()},
        )
        for key, tensor in snapshot.tensors.items()
    }
    devices = {part.device for tensor in snapshot.tensors.values() for part in tensor.parts.values() if part.is_cuda}
    arrived = [torch.cuda.current_stream(device).record_event() for device in devices]
    record, common = deepcopy((snapshot.record, snapshot.common))
    return snapshot._replace(tensors=tensors, record=record, common=common), arrived
