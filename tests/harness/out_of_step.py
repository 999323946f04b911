"""A small training run. Afterwards the data group gets a short timeout, and each rank runs a step, stays busy or gets a
signal, as its argument says.

RANK=0 WORLD_SIZE=3 MASTER_ADDR=localhost MASTER_PORT=29500 python tests/harness/out_of_step.py step evaluate SIGKILL
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from meshstep.optim import ParallelOptimizer, load_checkpoint, save_checkpoint
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare, init_distributed
from torch import nn
from torch.distributed import distributed_c10d


class Run:
    """Two training steps on all ranks. Afterwards the timeout of the data group is ``seconds``."""

    def __init__(self, world_size: int, seconds: float) -> None:
        self.registry = ProcessGroupRegistry(Topology(data=world_size), exclusive_groups=True)
        self.rank = self.registry.global_rank
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)
        declare(self.model, {"*": P()})
        self.optimizer = ParallelOptimizer(torch.optim.AdamW(self.model.parameters()), self.registry, max_norm=0.5)
        for _ in range(2):
            self.train()
        set_timeout(self.registry.group("data"), seconds)

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.optimizer.backward(self.model(torch.ones(1, 4)).sum())
        self.optimizer.step()

    def save(self, path: Path) -> None:
        save_checkpoint(path, self.model, self.optimizer)

    def load(self, path: Path) -> None:
        load_checkpoint(path, self.model, self.optimizer)


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Set the timeout of an existing group. A short timeout during creation could expire, as ranks of a busy machine may
    join late."""
    change: Any = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    change(timedelta(seconds=seconds), group)


def evaluate() -> None:
    time.sleep(600)


def meet(fate: str, run: Run) -> None:
    """Run a step ("step"), stay busy ("evaluate"), or send this process the signal that ``fate`` names; then exit."""
    run.optimizer.zero_grad()
    if fate == "step":
        try:
            run.optimizer.step()
        except RuntimeError as error:
            print(error, flush=True)
    elif fate == "evaluate":
        evaluate()
    else:
        os.kill(os.getpid(), signal.Signals[fate])
    os._exit(0)


if __name__ == "__main__":
    fates = sys.argv[1:]
    init_distributed(backend="gloo", timeout=timedelta(seconds=60))
    run = Run(len(fates), 2.0)
    meet(fates[run.rank], run)
