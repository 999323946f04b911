"""Save a training run while it goes on."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as finished
from copy import deepcopy
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ...parallel.mesh.agreement import gather_objects, on_all_ranks
from ...parallel.mesh.calls import in_call, public_call
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..parallel_optimizer import ParallelOptimizer
from .logical_tensor import LogicalTensor
from .run_history import check_is_parallel, last_known, remember
from .save import Snapshot, check_keep, snapshot_of, write


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
        key: LogicalTensor(
            tensor.shape,
            tensor.dtype,
            {offsets: part.detach().to("cpu", copy=True) for offsets, part in tensor.parts.items()},
        )
        for key, tensor in snapshot.tensors.items()
    }
    record, common = deepcopy((snapshot.record, snapshot.common))
    return snapshot._replace(tensors=tensors, record=record, common=common)
