"""A training run of 24 steps in separate processes that pauses at a given place, is killed there, and resumes.

RANK=0 WORLD_SIZE=2 python tests/harness/killable.py '{"directory": "/tmp/run", "attempt": 0, "axes": {"data": 2}, ...}'
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import arguments
from meshstep.amp import precision_of
from meshstep.optim import (
    SOAP,
    Adafactor,
    CosineAnnealingLR,
    Muon,
    ParallelOptimizer,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from meshstep.optim.checkpoint import tensors
from meshstep.optim.whole import whole
from meshstep.parallel import (
    ColumnParallelLinear,
    P,
    ProcessGroupRegistry,
    RowParallelLinear,
    Topology,
    declare,
    init_distributed,
    shard,
)
from torch import Tensor, nn

STEPS, SAVE_AT, STOP_AT, SAVE_AGAIN_AT = 24, 12, 15, 17
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "SOAP": lambda params: SOAP(params, lr=1e-2, precondition_frequency=4),
    "Muon": lambda params: Muon(params, lr=1e-2),
    "Adafactor": lambda params: Adafactor(params, lr=1e-2),
    "whole(Adafactor)": lambda params: whole(torch.optim.Adafactor(params, lr=1e-2)),
}


@dataclass(frozen=True)
class Plan:
    """One attempt at a run.

    Args:
        directory: The run's directory: checkpoints, marker files and results.
        attempt: The number of the attempt, used in file names.
        stop: Where to pause until the kill: ``"training"`` (after step `STOP_AT`), or during the second save while
            ``"writing"`` a file, ``"renaming"`` the new checkpoint or ``"removing"`` the previous one. ``"dying"``:
            after step `STOP_AT` the last rank kills itself, in the first ``deaths`` attempts of torchrun. ``""``: nowhere.
        second_save: Whether the run saves a second checkpoint.
    """

    directory: str
    attempt: int
    axes: dict[str, int]
    precision: str
    stop: str = ""
    second_save: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = "AdamW"
    deaths: int = 2

    @property
    def checkpoints(self) -> Path:
        return Path(self.directory) / "checkpoints"

    @property
    def mark(self) -> Path:
        return Path(self.directory) / f"stopped-{self.attempt}"

    def result(self, rank: int) -> Path:
        return Path(self.directory) / f"result-{self.attempt}-{rank}.pt"


class Model(nn.Module):
    """A model with batch norm and dropout, and with two layers that are sharded if the mesh has an axis ``tensor``."""

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        self.first, self.norm, self.dropout = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)
        if "tensor" in registry.topology.axes:
            self.up: nn.Module = ColumnParallelLinear(8, 16, registry)
            self.down: nn.Module = RowParallelLinear(16, 4, registry)
        else:
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.dropout(F.gelu(self.norm(self.first(x))))
        out: Tensor = self.down(torch.tanh(self.up(hidden)))
        return out


def train(plan: Plan) -> None:
    """Run the plan on this rank, in a process that may be killed."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        init_distributed(backend="gloo")
    else:
        store = f"file://{plan.directory}/store-{plan.attempt}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    registry = ProcessGroupRegistry(Topology(roles=None, **plan.axes))
    torch.manual_seed(7)
    model = Model(registry)
    declare(model, {"first.*": P(), "norm.*": P(), "*": P()})
    # Ranks with the same data coordinate see the same samples and need equal dropout masks; other ranks need other masks.
    torch.manual_seed(100 + registry.coordinate.get("data", 0))
    mode = precision_of(plan.precision)
    mode.prepare(model, registry)
    inner = KINDS[plan.kind](model.parameters())
    optimizer = ParallelOptimizer(inner, registry, **arguments(precision=mode, max_norm=0.5, **plan.options))
    schedule = CosineAnnealingLR(optimizer, STEPS, warmup_steps=5)
    start = 0
    if newest_checkpoint(plan.checkpoints):
        start = load_checkpoint(plan.checkpoints, model, optimizer, lr_scheduler=schedule)["steps"]
    losses = []
    for step in range(start, STEPS):
        losses.append(one_step(step, model, optimizer, registry))
        schedule.step()
        if step + 1 == SAVE_AGAIN_AT:
            arm(plan, rank)
        if step + 1 == SAVE_AT or (step + 1 == SAVE_AGAIN_AT and plan.second_save):
            save_checkpoint(plan.checkpoints, model, optimizer, lr_scheduler=schedule, extra={"steps": step + 1})
        if step + 1 == STOP_AT and plan.stop == "training":
            stop(plan)
        if step + 1 == STOP_AT and plan.stop == "dying" and rank == size - 1 and dist.is_torchelastic_launched():
            die_unless_restarted_often_enough(plan)
    torch.save({"start": start, "losses": losses, "model": model.state_dict()}, plan.result(rank))
    registry.close()
    dist.destroy_process_group()


def one_step(step: int, model: nn.Module, optimizer: ParallelOptimizer, registry: ProcessGroupRegistry) -> float:
    """Train on one batch, which is split over the data ranks, and return the loss of this rank."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 6, generator=generator)
    y = torch.sin(3 * x[:, :4])
    x, y = (shard(part, P(registry.topology.data_axes), registry) for part in (x, y))
    optimizer.zero_grad()
    loss = F.mse_loss(model(x).float(), y)
    optimizer.backward(loss)
    optimizer.step()
    return float(loss.detach())


def arm(plan: Plan, rank: int) -> None:
    """If the plan stops in a save, patch the next save on one rank so that this rank pauses in it."""
    places: dict[str, tuple[int, Any, str]] = {
        "writing": (1, tensors, "write_summed"),
        "renaming": (0, os, "rename"),
        "removing": (0, shutil, "rmtree"),
    }
    if plan.stop in places and places[plan.stop][0] == rank:
        _, owner, name = places[plan.stop]
        blocked: Callable[..., None] = lambda *args, **kwargs: stop(plan)  # noqa: E731
        setattr(owner, name, blocked)


def stop(plan: Plan) -> None:
    plan.mark.touch()
    time.sleep(600)


def die_unless_restarted_often_enough(plan: Plan) -> None:
    """Kill this process in the first ``plan.deaths`` attempts, after writing a file that counts them."""
    count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if int(count) < plan.deaths:
        (Path(plan.directory) / f"died-{count}").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def start_in_fork(plan: Plan, rank: int, size: int) -> None:
    """Set RANK and WORLD_SIZE, and run `train`. Call it in a forked process, which torchrun did not start."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    train(plan)


def encoded(plan: Plan) -> str:
    return json.dumps(asdict(plan))


if __name__ == "__main__":
    train(Plan(**json.loads(sys.argv[1])))
