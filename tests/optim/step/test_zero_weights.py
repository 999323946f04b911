"""Micro-batches of weight 0, whose loss may not be 0."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from arguments import arguments
from dtensors import registry_of
from fully_sharded import Net, adamw, data, sharded_net
from hypothesis import strategies as st
from meshstep.amp import TorchFp16
from meshstep.optim import ParallelOptimizer, Pipeline
from meshstep.optim.step.window import Window
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from probes import no_host_reads
from properties import random_cases
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from world import World

HOW = ("plain", "overlap", "zero2", "ddp", "fsdp", "tensor")
AXES = {"tensor": (("data", 1), ("tensor", 2))}  # the ranks of the other modes are data ranks
Counts = tuple[tuple[int, ...], ...]  # rows per micro-batch, by data rank


def rows_of(rank: int, micro: int, count: int) -> Tensor:
    """Return the samples of a micro-batch; a micro-batch of weight 0 has three samples, which must not count."""
    return data(100 * rank + micro, count or 3)


def norm_of(counts: Counts, how: str, kind: str, masks: bool = True) -> float:
    """Run one accumulation window, and return its norm.

    Args:
        counts: The weights of the micro-batches, by data rank.
        how: The reduction of gradients, one of `HOW`.
        kind: "numbers", "tensors" or "both": the types of the weights. "window": weights are tensors, and the script
            calls backward itself. "managed": with ``accumulation_steps``.
        masks: False: use the losses of micro-batches of weight 0, a planted mistake.
    """
    unmasked = nullcontext() if masks else mock.patch.object(Window, "mask_loss", lambda _, loss: loss)
    with registry_of(AXES.get(how, (("data", 2),))) as registry, unmasked:
        net = sharded_net(registry) if how == "fsdp" else Net().double()
        if how == "tensor":
            declare(net, {"*": P()})
        run: nn.Module = net
        if how == "ddp":
            run = DistributedDataParallel(net, process_group=registry.group("data"))
        rank, micro_batches = registry.coordinate["data"], len(counts[0])
        options: dict[str, Any] = {"accumulation_steps": micro_batches} if kind == "managed" else {}
        options |= {"overlap": True} if how == "overlap" else {}
        options |= {"shard_states": "data", "shard_gradients": True} if how == "zero2" else {}
        options |= {"data_parallel": run} if how in ("ddp", "fsdp") else {}
        optimizer = ParallelOptimizer(adamw(net.parameters()), registry, **arguments(max_norm=0.3, **options))
        stats = None
        for micro, count in enumerate(counts[rank]):
            is_tensor = kind in ("tensors", "window") or (kind == "both" and micro % 2 == 1)
            weight = torch.tensor(float(count)) if is_tensor else count
            early = kind != "managed" and micro < micro_batches - 1
            with optimizer.no_sync() if early else nullcontext():
                loss = run(rows_of(rank, micro, count)).sum()
                if kind == "window":
                    with optimizer.window(weight=weight):
                        optimizer.scale_loss(loss).backward()
                else:
                    optimizer.backward(loss, weight=weight)
            stats = optimizer.step() if kind == "managed" or micro == micro_batches - 1 else None
        assert stats is not None
        return float(stats.total_norm)


def dense_norm(counts: Counts) -> float:
    """Return the gradient norm of the mean output over all samples with a weight above 0, computed by plain torch."""
    net = Net().double()
    parts = [rows_of(rank, micro, n) for rank, of in enumerate(counts) for micro, n in enumerate(of) if n]
    net(torch.cat(parts)).mean().backward()
    return float(nn.utils.get_total_norm([param.grad for param in net.parameters() if param.grad is not None]))


def counts_of(data_ranks: int) -> st.SearchStrategy[Counts]:
    return st.integers(1, 3).flatmap(
        lambda micro: st.tuples(*[st.tuples(*[st.sampled_from([0, 0, 1, 4])] * micro)] * data_ranks)
    )


CASES = st.sampled_from(HOW).flatmap(
    lambda how: st.tuples(
        counts_of(1 if how == "tensor" else 2),
        st.just(how),
        st.sampled_from(["numbers", "tensors", "both", "window", "managed"]),
    )
)


@random_cases(CASES, 150)
def test_micro_batches_with_weight_0_do_not_change_global_norm(
    world: World, drawn: list[tuple[Counts, str, str]]
) -> None:
    drawn = [case for case in drawn if any(map(any, case[0]))]
    results = world.run_each(norm_of, [(2, case) for case in drawn])
    for case, by_rank in zip(drawn, results, strict=True):
        assert by_rank == pytest.approx([dense_norm(case[0])] * 2, rel=1e-6), case


@pytest.mark.default_cases(len(HOW))
@pytest.mark.parametrize("how", HOW)
def test_norm_is_wrong_if_losses_of_weight_0_are_not_masked(world: World, how: str) -> None:
    counts: Counts = ((2, 0),) if how == "tensor" else ((2, 1), (3, 0))
    for masks in (True, False):
        for found in world.run(2, norm_of, counts, how, "numbers", masks):
            assert (abs(found / dense_norm(counts) - 1) < 1e-6) == masks


# Pipelines ------------------------------------------------------------------------------------------------------------


def piped_norm(weights: tuple[float, ...]) -> float:
    """Return the norm of a window of `Pipeline` calls, one per weight."""
    with ProcessGroupRegistry(Topology(pipe=2)) as registry:
        stage = parts()[registry.rank("pipe")]
        declare(stage, {"*": P()})
        pipe = PipelineStage(stage, registry.rank("pipe"), 2, torch.device("cpu"), group=registry.group("pipe"))
        schedule = ScheduleGPipe(pipe, 2, loss_fn=squares, scale_grads=False)
        optimizer = ParallelOptimizer(torch.optim.SGD(stage.parameters(), lr=0.0, fused=True), registry)
        pipeline = Pipeline(schedule, optimizer)
        for micro, weight in enumerate(weights):
            pipeline.backward(data(micro, 4), target=data(micro, 4), weight=weight)
        return float(optimizer.step().total_norm)


def parts() -> list[nn.Module]:
    torch.manual_seed(2)
    return [nn.Linear(5, 5).double(), nn.Linear(5, 5).double()]


def squares(found: Tensor, target: Tensor) -> Tensor:
    return (found - target).square().sum()


def test_pipeline_call_with_weight_0_does_not_change_global_norm(world: World) -> None:
    dense = nn.Sequential(*parts())
    sum(((squares(dense(data(micro, 4)), data(micro, 4)) for micro in (0, 2))), torch.zeros(())).div(8).backward()
    norm = float(nn.utils.get_total_norm([param.grad for param in dense.parameters() if param.grad is not None]))
    assert world.run(2, piped_norm, (4, 0, 4)) == pytest.approx([norm] * 2, rel=1e-10)
    assert world.run(2, piped_norm, (4, 4, 4))[0] != pytest.approx(norm, rel=1e-2)


# One process ----------------------------------------------------------------------------------------------------------


def linear(**options: Any) -> tuple[nn.Linear, ParallelOptimizer]:
    torch.manual_seed(7)
    model = nn.Linear(5, 3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    return model, ParallelOptimizer(sgd, ProcessGroupRegistry(Topology()), **arguments(**options))


@pytest.mark.parametrize("weight", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
@pytest.mark.parametrize("precision", ["fp32", TorchFp16(init_scale=2.0**10)])
def test_loss_with_weight_0_adds_gradients_of_0(precision: Any, weight: float | Tensor) -> None:
    model, optimizer = linear(precision=precision)
    optimizer.backward(model(torch.ones(2, 5)).sum(), weight=weight)
    assert model.weight.grad is not None
    assert not model.weight.grad.any()
    optimizer.backward(model(torch.ones(2, 5)).sum(), weight=2)  # a later micro-batch counts
    stats = optimizer.step()
    assert stats is not None
    assert stats.total_norm > 1


def test_scale_loss_after_micro_batch_of_weight_0_returns_loss_unchanged() -> None:
    model, optimizer = linear()
    with optimizer.window(weight=0):
        assert not optimizer.scale_loss(model(torch.ones(1, 5)).sum())
    loss = model(torch.ones(1, 5)).sum()
    assert optimizer.scale_loss(loss) is loss


@pytest.mark.parametrize("as_tensor", [False, True])
def test_mean_over_no_tokens_with_weight_0_adds_gradients_of_0(as_tensor: bool) -> None:
    model, optimizer = linear()
    weight = torch.tensor(0) if as_tensor else 0
    labels = torch.full((2,), -100)
    for loss in (F.cross_entropy(model(torch.ones(2, 5)), labels), model(torch.ones(0, 5)).mean()):
        assert loss.isnan()
        optimizer.backward(loss, weight=weight)
    assert model.weight.grad is not None
    assert not model.weight.grad.any()


def test_micro_batch_weight_tensor_causes_no_host_synchronization() -> None:
    model, optimizer = linear()
    loss, weight = model(torch.ones(2, 5)).sum(), torch.tensor(0.0)
    with no_host_reads():
        optimizer.backward(loss, weight=weight)
