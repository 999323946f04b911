"""Steps of full-tensor optimizers on fake CUDA tensors, and their host synchronizations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fake_cuda import Log, fake_cuda
from gathered_objects import objects_gathered_by, said_by_all
from meshstep.optim import CAME, LAMB, LARS, Adafactor, Muon, ParallelOptimizer, Sharded, StableAdamW
from meshstep.optim.step import torch_engine
from meshstep.optim.whole import tensors as of_tensors
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from meshstep.parallel.layout.shard import Region
from set_gradients import setting_gradients
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.testing._internal.distributed.fake_pg import FakeStore

pytestmark = [
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
    pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a torch built with CUDA for the fake GPU"),
]
TOPOLOGY = Topology(data=2, tensor=2)
SPECS = {"split": P(None, "tensor"), "whole": P(), "bias": P()}
SHAPES = {"split": (6, 5), "whole": (4, 6), "bias": (6,)}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **{kind.__name__: kind for kind in (Muon, LAMB, LARS, StableAdamW, Adafactor)},
    "CAME": partial(CAME, lr=1e-3),
}


@contextmanager
def world() -> Iterator[None]:
    """Simulate rank 0 of four; collectives do nothing. Other ranks report the same objects, except their regions."""

    def with_their_regions(declare: Callable[[], tuple[None, list[Any]]], registry: ProcessGroupRegistry) -> Any:
        result, own = declare()

        def there(rank: int, name: str, region: Region) -> Region:
            where = TOPOLOGY.coordinate(rank)
            found = Region.of_shard(region.full_shape, region.shape, SPECS[name.partition("@")[0]], TOPOLOGY, where)
            if region.numel == found.numel:
                return found
            # ZeRO halves a shard over the data axis; rank 0 has the first half.
            rest = found.numel - region.numel
            return found.run(0, region.numel) if where["data"] == 0 else found.run(region.numel, rest)

        of_rank = [
            [(name, dtype, said, there(rank, name, region)) for name, dtype, said, region in own] for rank in range(4)
        ]
        return result, of_rank

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        with (
            objects_gathered_by(said_by_all),
            mock.patch.object(of_tensors, "on_all_ranks_with", with_their_regions),
        ):
            yield
    finally:
        dist.destroy_process_group()


def steps(make: Callable[[Any], torch.optim.Optimizer], options: dict[str, Any], dtype: torch.dtype) -> list[Log]:
    logs = []
    with world(), fake_cuda() as logging:
        registry = ProcessGroupRegistry(TOPOLOGY)
        model = nn.ParameterDict(
            {name: nn.Parameter(torch.ones(shape, device="cuda", dtype=dtype)) for name, shape in SHAPES.items()}
        )
        for name, param in model.items():
            annotate(param, SPECS[name], name)
        optimizer = ParallelOptimizer(
            make(model.named_parameters()), registry, check_replicas=False, max_norm=1.0, **options
        )
        for _ in range(3):
            with logging() as log:
                with setting_gradients(optimizer):
                    for param in model.values():
                        param.grad = torch.ones_like(param, dtype=getattr(param, "grad_dtype", None) or dtype)
                optimizer.step()
            optimizer.zero_grad()
            logs.append(log)
    return logs


@pytest.mark.long
@pytest.mark.default_cases(7)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("options", "dtype"),
    [({}, torch.float32), ({"precision": "bf16"}, torch.bfloat16), ({"precision": "fp16_naive"}, torch.float16)],
    ids=["fp32", "bf16", "fp16"],
)
def test_third_step_of_full_tensor_optimizer_on_cuda_needs_no_host_synchronization(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    for more in ({}, {"states": Sharded("data")}) if dtype == torch.float32 else ({},):
        logs = steps(OPTIMIZERS[name], {**options, **more}, dtype)
        assert logs[-1].launches
        # The second step compares master weights with the model's weights, once.
        assert all("amp/casting.py" in wait for wait in logs[1].waits)
        assert bool(logs[1].waits) == (dtype != torch.float32)
        assert logs[2].waits == []


class Reads(Muon):
    """Reads the step count on the host, which is wrong."""

    def updates(self, slots: Any) -> Any:
        assert all(float(slot.step) > 0 for slot in slots)
        return super().updates(slots)


def test_host_synchronization_in_full_tensor_optimizer_is_detected() -> None:
    with pytest.raises(DataDependentOutputException):
        steps(Reads, {}, torch.float32)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_full_tensor_optimizers_do_not_enter_fused_step_count_mode(name: str) -> None:
    """The mode that counts fused steps would cost the host more time per operator than the operator itself."""
    with mock.patch.object(torch_engine, "FusedStepCountMode", side_effect=AssertionError("a mode was entered")):
        assert steps(OPTIMIZERS[name], {}, torch.float32)[-1].launches
