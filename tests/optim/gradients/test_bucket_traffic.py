"""Bytes of GPU memory per element that a warm step reads and writes around its collectives, on fake CUDA tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_cuda import Log, fake_cuda
from gathered_objects import objects_gathered_by, said_by_all
from meshstep.optim import ParallelOptimizer, Sharded
from meshstep.optim.gradients import buckets
from meshstep.parallel import ProcessGroupRegistry, Topology
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
    pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a torch built with CUDA for the fake GPU"),
]
SHAPES = ((1024, 1024), (257,), (1023, 1030), (7,))


def step_on(ranks: int, **options: Any) -> tuple[Log, float]:
    """Return the log of the fourth step, and the bytes per element that it reads and writes."""
    log = Log()
    with fake_cuda(collectives_on=CPU) as logging:
        params = [nn.Parameter(torch.ones(shape, device="cuda")) for shape in SHAPES]
        optimizer = ParallelOptimizer(
            torch.optim.AdamW(params, fused=True),
            ProcessGroupRegistry(Topology() if ranks == 1 else Topology(data=ranks)),
            **{"max_norm": 1.0, "check_replicas": False, **options},
        )
        for _ in range(4):
            with optimizer.window():
                for param in params:
                    param.grad = torch.ones_like(param)
            with logging(traffic=True) as log:
                optimizer.step()
            optimizer.zero_grad()
    return log, log.traffic / sum(param.numel() for param in params)


def steps_of_two_ranks(**options: Any) -> tuple[Log, float]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with objects_gathered_by(said_by_all):
            return step_on(2, **options)
    finally:
        dist.destroy_process_group()


def test_step_on_two_ranks_moves_eight_more_bytes_per_element_than_on_one() -> None:
    """One pass reads the gradients, scales them and writes them to the bucket. Then they are views of the bucket."""
    alone, found = step_on(1)[1], steps_of_two_ranks()[1]
    assert alone == pytest.approx(36, abs=0.1)  # the norm reads gradients; AdamW also writes the unscaled gradients
    assert found - alone == pytest.approx(8, abs=0.1)


def test_one_kernel_scales_all_small_gradients_and_one_zeroes_bucket_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """All gradients count as small here, because the limit ``LARGE`` is raised."""
    monkeypatch.setattr(buckets, "LARGE", 2**30)
    log, found = steps_of_two_ranks()
    assert log.launches.count("aten._foreach_zero_.default") == 1
    assert log.launches.count("aten._foreach_mul_.Scalar") == 1
    assert found - step_on(1)[1] == pytest.approx(16, abs=0.1)


def test_zero_1_step_reads_and_writes_34_bytes_per_element() -> None:
    assert steps_of_two_ranks(states=Sharded("data"))[1] == pytest.approx(34, abs=0.1)
