"""Ranks killed in training: the run resumes from its checkpoint on another mesh and ends like a single process."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from home_runs import soap
from measured import MAKES
from meshstep.optim import ParallelOptimizer, Sharded, save_checkpoint
from meshstep.parallel import P, ProcessGroupRegistry
from planted import Layout, Planted, run_step
from whole_runs import Make, alone, copies_differ, largest_error, muon
from whole_services import run_to
from world import World, forkserver

ROWS = Layout((("tensor", 2),), {"up": P("tensor"), "down": P(None, "tensor"), "bias": P("tensor")})
COLUMNS = Layout((("row", 2), ("col", 2)), {"up": P("row", "col"), "down": P("col"), "table": P("col")})
KINDS: dict[str, Make] = {"Muon": muon, "SOAP": soap, "Adafactor": MAKES["Adafactor"]}
SAVED, KILLED, END = 5, 7, 10
PATIENCE = 300.0


def until_killed(rank: int, kind: str, folder: Path) -> None:
    """Save after some steps, run some more, and wait for the kill."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with ProcessGroupRegistry(ROWS.topology) as registry:
        model = Planted(ROWS, rank, torch.float64)
        optimizer = ParallelOptimizer(KINDS[kind](model.named_parameters()), registry)
        for step in range(KILLED):
            run_step(model, optimizer, step)
            optimizer.step()
            if step + 1 == SAVED:
                save_checkpoint(folder / "run", model, optimizer)
        (folder / f"at-{rank}").touch()
        time.sleep(2 * PATIENCE)


@pytest.mark.long
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_run_of_full_tensor_optimizer_resumes_on_another_mesh(world: World, tmp_path: Path, kind: str) -> None:
    ranks = [forkserver().Process(target=until_killed, args=(rank, kind, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + PATIENCE
    while not all((tmp_path / f"at-{rank}").exists() for rank in range(2)):
        alive = all(process.exitcode is None for process in ranks)
        if not alive or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for process in ranks:
        process.kill()
        process.join()
    assert [process.exitcode for process in ranks] == [-signal.SIGKILL] * 2
    assert all((tmp_path / f"at-{rank}").exists() for rank in range(2))
    steps, options = range(SAVED, END), {"states": Sharded("row")}
    by_rank = world.run(4, run_to, COLUMNS, KINDS[kind], tmp_path / "run", steps, True, options)
    assert largest_error(by_rank, alone(COLUMNS, KINDS[kind], END)) <= 1e-12
    assert copies_differ(by_rank) == []
