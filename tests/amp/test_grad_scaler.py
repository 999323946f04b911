"""GradScaler on several ranks, compared with torch's."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from dense import collectives
from meshstep.amp import GradScaler
from meshstep.parallel import ProcessGroupRegistry, Topology
from probes import HostReadError, no_host_reads
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import SGD, AdamW, Optimizer
from world import World

MESH = Topology(pipe=2, tensor=2)
SCALE = 2.0**10
OPTIMIZERS = ("sgd", "sgd fused", "adamw", "adamw fused")


def optimizer_of(kind: str, params: Sequence[Tensor]) -> Optimizer:
    name, fused = kind.split()[0], kind.endswith("fused")
    return SGD(params, lr=0.1, fused=fused) if name == "sgd" else AdamW(params, lr=0.1, fused=fused)


def parameters(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in ((5, 3), (7,))]


def backward(params: list[Tensor], scaler: torch.amp.GradScaler, factor: float = 1.0) -> None:
    for param in params:
        param.grad = None
    loss = sum((factor * (param**2).sum() for param in params), torch.zeros(()))
    scaler.scale(loss).backward()


def plant(param: Tensor, value: float) -> None:
    assert param.grad is not None
    param.grad.view(-1)[2] = value


def copies(params: list[Tensor]) -> list[Tensor]:
    return [param.detach().clone() for param in params]


def same(params: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(param, other) for param, other in zip(params, expected, strict=True))


def steps(scaler: torch.amp.GradScaler, kind: str, bad_rank: int | None, unscale: bool, rank: int) -> list[Any]:
    """Run three steps, the second with an inf on ``bad_rank``; return (stepped, scale) per step, and the parameters."""
    params, seen = parameters(), []
    optimizer = optimizer_of(kind, params)
    for step in range(3):
        backward(params, scaler)
        if step == 1 and rank == bad_rank:
            plant(params[1], float("inf"))
        before = copies(params)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        seen.append((not same(params, before), scaler.get_scale()))
    return [*seen, [param.tolist() for param in params]]


def steps_on_ranks(kind: str, bad_rank: int, unscale: bool, drop_in: bool) -> tuple[list[Any], int]:
    with ProcessGroupRegistry(MESH) as registry, collectives() as counts:
        scaler = GradScaler(registry, SCALE) if drop_in else torch.amp.GradScaler("cpu", SCALE)
        return steps(scaler, kind, bad_rank, unscale, registry.global_rank), sum(counts.values())


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("unscale", [False, True])
def test_overflow_on_one_rank_skips_the_step_on_all_ranks(world: World, kind: str, unscale: bool) -> None:
    for bad_rank in (0, 3):
        results = world.run(4, steps_on_ranks, kind, bad_rank, unscale, True)
        # The same steps in one process: the second step is skipped, the scale halves once, the third step is applied.
        alone = steps(torch.amp.GradScaler("cpu", SCALE), kind, 0, unscale, rank=0)
        assert alone[:3] == [(True, SCALE), (False, SCALE / 2), (True, SCALE / 2)]
        for trace, collectives_issued in results:
            assert trace == alone
            assert collectives_issued == 3  # one per step


@pytest.mark.parametrize("kind", ["sgd", "adamw fused"])
def test_grad_scaler_of_torch_lets_ranks_diverge_after_overflow(world: World, kind: str) -> None:
    """Negative control of `test_overflow_on_one_rank_skips_the_step_on_all_ranks`: the comparison detects divergence."""
    traces = [trace for trace, _ in world.run(4, steps_on_ranks, kind, 3, False, False)]
    assert traces[3][1] == (False, SCALE / 2)
    assert traces[0][1] == (True, SCALE)


def steps_without_gradients(kind: str, bad: bool) -> list[Any]:
    """Step three times. Ranks of the first pipeline stage have no loss and no gradients, and never call `scale`.

    Return the scale after each step.
    """
    with ProcessGroupRegistry(MESH) as registry:
        scaler, params, seen = GradScaler(registry, SCALE, growth_interval=2), parameters(), []
        optimizer = optimizer_of(kind, params)
        for step in range(3):
            if registry.coordinate["pipe"] == 1:
                backward(params, scaler)
                if bad and step == 0 and registry.global_rank == 3:
                    plant(params[0], float("nan"))
            with collectives() as counts:
                scaler.step(optimizer)
                scaler.update()
            assert sum(counts.values()) == 1
            seen.append(scaler.get_scale())
        return seen


@pytest.mark.parametrize("kind", ["sgd", "adamw fused"])
def test_ranks_without_gradients_get_the_loss_scale_of_other_ranks(world: World, kind: str) -> None:
    assert world.run(4, steps_without_gradients, kind, True) == [[SCALE / 2, SCALE / 2, SCALE]] * 4
    assert world.run(4, steps_without_gradients, kind, False) == [[SCALE, SCALE * 2, SCALE * 2]] * 4


def two_optimizers(kinds: tuple[str, str]) -> tuple[list[bool], float]:
    """Step two optimizers; the first has an overflow on rank 1 only. Return which of them stepped, and the scale."""
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        scaler, params = GradScaler(registry, SCALE), [parameters(0), parameters(1)]
        optimizers = [optimizer_of(kind, each) for kind, each in zip(kinds, params, strict=True)]
        before = [copies(each) for each in params]
        backward([*params[0], *params[1]], scaler)
        if registry.global_rank == 1:
            plant(params[0][0], float("-inf"))
        with collectives() as counts:
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        assert sum(counts.values()) == 2  # one per optimizer
        return [not same(each, old) for each, old in zip(params, before, strict=True)], scaler.get_scale()


@pytest.mark.parametrize("kinds", [("sgd", "adamw fused"), ("adamw fused", "sgd"), ("sgd fused", "sgd fused")])
def test_overflow_of_one_optimizer_skips_only_its_step_on_all_ranks(world: World, kinds: tuple[str, str]) -> None:
    assert world.run(2, two_optimizers, kinds) == [([False, True], SCALE / 2)] * 2


def dtensor_steps(bad_rank: int) -> list[bool]:
    """Step a DTensor over `tensor`: the scaler of torch shares overflows over the mesh of the gradient, not over `data`.

    Return whether our scaler stepped, and whether torch's scaler stepped.
    """
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        full, mesh = torch.ones(4, 2), registry.device_mesh("tensor")
        stepped = []
        for scaler in (GradScaler(registry, SCALE), torch.amp.GradScaler("cpu", SCALE)):
            held = full.clone()
            param = DTensor.from_local(held, mesh, [Shard(0)]).requires_grad_()
            scaler.scale(torch.ones(()))
            local = full.clone()
            if registry.global_rank == bad_rank:
                local[1, 1] = float("inf")
            param.grad = DTensor.from_local(local, mesh, [Shard(0)])
            scaler.step(SGD([param], lr=0.1))
            stepped.append(not torch.equal(held, full))  # `held` is the memory of the parameter
        return stepped


def test_overflow_in_dtensor_gradient_skips_the_step_on_all_ranks(world: World) -> None:
    results = world.run(4, dtensor_steps, 3)
    assert [ours for ours, _ in results] == [False] * 4
    assert [torchs for _, torchs in results] == [True, True, False, False]  # negative control


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler_in_one_process_equals_grad_scaler_of_torch(kind: str, unscale: bool) -> None:
    settings = {"init_scale": 2.0**12, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 2}
    torchs = torch.amp.GradScaler("cpu", **settings)  # type: ignore[arg-type]
    ours = GradScaler(ProcessGroupRegistry(Topology()), **settings)  # type: ignore[arg-type]
    assert isinstance(ours, torch.amp.GradScaler)
    for _ in range(2):
        assert steps(ours, kind, 0, unscale, rank=0) == steps(torchs, kind, 0, unscale, rank=0)
        assert ours.state_dict() == torchs.state_dict()
    resumed = GradScaler(ProcessGroupRegistry(Topology()))
    resumed.load_state_dict(torchs.state_dict())
    assert steps(resumed, kind, 0, unscale, rank=0) == steps(torchs, kind, 0, unscale, rank=0)
    assert pickle.loads(pickle.dumps(ours)).state_dict() == ours.state_dict()


def test_fused_step_after_unscale_and_clip_applies_the_clipped_gradients() -> None:
    scaler = GradScaler(ProcessGroupRegistry(Topology()), SCALE)
    params = parameters()
    optimizer = optimizer_of("sgd fused", params)
    before = copies(params)
    backward(params, scaler)
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
    scaler.step(optimizer)
    for param, old in zip(params, before, strict=True):
        torch.testing.assert_close(param.detach(), old - 0.1 * 2 * old / (norm + 1e-6))


def test_disabled_grad_scaler_neither_scales_nor_skips() -> None:
    scaler = GradScaler(ProcessGroupRegistry(Topology()), enabled=False)
    params = parameters()
    backward(params, scaler)
    expected = [param.detach() - 0.1 * 2 * param.detach() for param in params]
    scaler.step(SGD(params, lr=0.1))
    scaler.update()
    torch.testing.assert_close(copies(params), expected)
    assert (scaler.get_scale(), scaler.state_dict(), scaler.is_enabled()) == (1.0, {}, False)
    backward(params, scaler, torch.inf)
    scaler.step(SGD(params, lr=0.1))
    assert not any(param.isfinite().any() for param in params)


def test_grad_scaler_with_fused_optimizer_causes_no_host_synchronization() -> None:
    scaler = GradScaler(ProcessGroupRegistry(Topology()), SCALE)
    params = parameters()
    fused, plain = optimizer_of("sgd fused", params), optimizer_of("sgd", params)
    backward(params, scaler)
    with no_host_reads():
        scaler.step(fused)
        scaler.update()
        scaler.scale(torch.ones(()))
        with pytest.raises(HostReadError):  # as documented, an unfused optimizer needs a host synchronization
            scaler.step(plain)
