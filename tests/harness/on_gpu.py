"""Helpers of tests on a GPU: GPU detection, detection of host synchronization, and ranks in separate processes."""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes
from world import forkserver

TIMEOUT = timedelta(minutes=2)


def why_no_gpu() -> str:
    """Return the reason why this process cannot use a GPU; empty if it can."""
    if not torch.backends.cuda.is_built():
        return "needs a GPU: this torch is built without CUDA"
    if not torch.cuda.is_available():
        return "needs a GPU: torch finds none (python -m tests.gpu, on a machine with one)"
    return ""


@contextmanager
def nobody_waits(device: torch.device) -> Iterator[None]:
    """Raise an error if torch detects within the block that the host synchronizes with the GPU; check nothing on a CPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it does not detect every synchronization
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def ranks(backend: str, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``function(*args)`` on new processes that are connected by ``backend``, and return the results by rank.

    The processes are not workers of `World`, because a forked process may be unable to use a GPU. On Linux
    without a GPU, they are forked from the server process that has already imported torch. Tensors in the results must
    be on the CPU.
    """
    forks = why_no_gpu() and sys.platform == "linux"
    method = forkserver().get_start_method() if forks else "spawn"
    with tempfile.TemporaryDirectory() as directory:
        of_each = backend, world_size, directory, function, args
        start_processes(_rank, of_each, nprocs=world_size, start_method=method)
        return [torch.load(Path(directory, str(rank)), weights_only=True) for rank in range(world_size)]


def _rank(
    rank: int, backend: str, world_size: int, directory: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(Path(directory, "store")), world_size)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    try:
        torch.save(function(*args), Path(directory, str(rank)))
    finally:
        dist.destroy_process_group()
