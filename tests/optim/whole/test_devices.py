"""Optimizers that use norms of full tensors, with some shards on a GPU and others on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dtensors import registry_of
from fake_cuda import CUDA, Log, fake_cuda
from meshstep.optim import CAME, LAMB, LARS, Adafactor, StableAdamW
from meshstep.optim.whole.tensors import WholeTensors, logical_tensors
from meshstep.parallel.layout.shard import Region
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

KINDS: tuple[Callable[..., Any], ...] = (LAMB, LARS, StableAdamW, Adafactor, CAME)
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="needs a torch built with CUDA for the fake GPU"
)


def second_step(kind: Callable[..., Any], devices: Sequence[torch.device], collectives_on: torch.device) -> Log:
    """Return the log of rank 0 of two, which has the upper half of a matrix on each device."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with fake_cuda(collectives_on=collectives_on) as logging:
            params = [nn.Parameter(torch.ones(3, 4, device=device)) for device in devices]
            ranks = [
                [
                    (str(index), torch.float32, None, Region((6, 4), (((3 * rank, 3),), ((0, 4),)), 0, 12))
                    for index in range(len(devices))
                ]
                for rank in range(2)
            ]
            optimizer = kind(params, lr=0.1, weight_decay=0.1)
            shards = [(name, region, region.shape) for name, _, _, region in ranks[0]]
            optimizer.bound(WholeTensors(shards, logical_tensors(ranks), registry_of((("tensor", 2),))))
            for _ in range(2):
                for param in params:
                    param.grad = torch.ones_like(param)
                with logging() as log:
                    optimizer.step()
            assert [param.device.type for param in params] == [device.type for device in devices]
            return log  # type: ignore[no-any-return]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("collectives_on", [CUDA, CPU], ids=str)
@pytest.mark.parametrize("devices", [[CUDA, CPU], [CPU, CUDA], [CPU, CPU]], ids=str)
def test_norm_based_optimizers_support_shards_on_cpu_and_gpu(
    kind: Callable[..., Any], devices: list[torch.device], collectives_on: torch.device
) -> None:
    log = second_step(kind, devices, collectives_on)
    assert {device for _, device in log.collectives} == {collectives_on.type}
