"""Several GPUs over NCCL, one process per GPU, or several processes over gloo on the CPU:

torchrun --standalone --nproc-per-node 4 -m tests.gpu
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from cpu_graph import CpuGraph
from graph_runs import PLACED, SETTINGS, CudaGraph, Run, Setting, by_replays, by_steps
from meshstep.parallel import ProcessGroupRegistry, Topology, init_distributed
from on_gpu import nobody_waits
from precision_modes import differences
from torch import Tensor

pytestmark = [
    pytest.mark.skipif(
        int(os.environ.get("WORLD_SIZE", "1")) < 2,
        reason="needs several processes: torchrun --standalone --nproc-per-node 4 -m tests.gpu",
    ),
    pytest.mark.usefixtures("torchs_kernels"),
]
MODES = ("fp32", "bf16", "fp16_naive")


@pytest.fixture(scope="module")
def joined() -> Iterator[tuple[torch.device, ProcessGroupRegistry]]:
    """The device of this process, and a registry with all processes on the axis data."""
    launch = init_distributed()
    with ProcessGroupRegistry(Topology(data=launch.world_size)) as registry:
        yield launch.device, registry
    dist.destroy_process_group()


def run_of(joined: tuple[torch.device, ProcessGroupRegistry], mode: str, placed: str) -> Run:
    return Run(Setting(SETTINGS[mode].precision, {**PLACED[placed], "max_norm": 0.5}), *joined)


def by_rank(value: Tensor, registry: ProcessGroupRegistry) -> list[Tensor]:
    own = value.detach().contiguous()
    found = [torch.empty_like(own) for _ in range(registry.topology.world_size)]
    dist.all_gather(found, own)
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("placed", PLACED)
def test_replicas_are_bitwise_identical_after_training(
    joined: tuple[torch.device, ProcessGroupRegistry], placed: str, mode: str
) -> None:
    run = run_of(joined, mode, placed)
    run.steps(range(24))
    for param in run.model.parameters():
        first, *others = by_rank(param, joined[1])
        assert all(torch.equal(first, other) for other in others)
    first, *others = by_rank(torch.stack(run.trace), joined[1])
    assert all(torch.equal(first, other) for other in others)


def test_norm_equals_norm_of_the_mean_gradient(joined: tuple[torch.device, ProcessGroupRegistry]) -> None:
    run = run_of(joined, "fp32", "replicated")
    run.optimizer.backward(run.loss(run.batch(3)))
    gradients = [param.grad.double().flatten() for param in run.model.parameters() if param.grad is not None]
    expected = torch.stack(by_rank(torch.cat(gradients), joined[1])).mean(0).norm()
    stats = run.optimizer.step()
    assert stats is not None
    assert float(stats.total_norm) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("placed", PLACED)
def test_steps_over_several_gpus_other_than_the_first_three_and_the_16th_cause_no_host_synchronization(
    joined: tuple[torch.device, ProcessGroupRegistry], placed: str, mode: str
) -> None:
    """The 16th step looks for overwritten weights, and for parameters without gradients on all ranks."""
    run = run_of(joined, mode, placed)
    batches = [run.batch(number) for number in range(3, 9)] * 6
    for index, batch in enumerate(batches):
        if index < 3 or index == 15:
            run.optimizer.zero_grad()
            run.optimizer.backward(run.loss(batch))
            run.optimizer.step()
            continue
        with nobody_waits(joined[0]):
            run.optimizer.zero_grad()
            run.optimizer.backward(run.loss(batch))
            run.optimizer.step()


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("placed", PLACED)
def test_graph_replays_over_several_gpus_are_bitwise_identical_to_eager_steps(
    joined: tuple[torch.device, ProcessGroupRegistry], placed: str, mode: str, micro: int
) -> None:
    make = CudaGraph if joined[0].type == "cuda" else CpuGraph
    expected = by_steps(run_of(joined, mode, placed), micro, steps=24)
    assert differences(expected, by_replays(run_of(joined, mode, placed), 4, make, micro, steps=24)) == []
