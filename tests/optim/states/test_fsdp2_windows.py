"""Accumulation windows with FSDP2, DDP and the optimizer's own reduction."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from arguments import arguments
from dtensors import local, registry_of
from failing import fails_in_backward
from fully_sharded import Full, Net, adamw, assert_equal, data, sharded_net, whole
from meshstep.optim import GradStats, ParallelOptimizer, load_checkpoint, save_checkpoint
from probes import collectives
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_optimizers import same
from world import World

SIZES = ((2, 1, 3, 2, 2, 4, 1), (1, 1, 2, 5, 1, 1, 3))  # rows of each micro-batch, by data rank
WINDOWS = ((0, 1, 2), (3, 4, 5), (6,))  # two windows of three micro-batches, and a shorter last window


def micro_batch(rank: int, index: int, weighted: bool) -> Tensor:
    return data(100 * rank + index, SIZES[rank][index] if weighted else 2)


def train_windows(how: str, weighted: bool, explicit: bool) -> tuple[list[float], Full, list[dict[str, int]]]:
    with registry_of((("data", 2),)) as registry:
        net = sharded_net(registry) if how == "fsdp" else Net().double()
        run: nn.Module = DistributedDataParallel(net, process_group=registry.group("data")) if how == "ddp" else net
        managed = {} if explicit else {"accumulation_steps": 3}
        options: dict[str, Any] = {**managed, **({} if how == "own" else {"data_parallel": run})}
        optimizer = ParallelOptimizer(adamw(net.parameters()), registry, **arguments(max_norm=0.3, **options))
        rank, norms, counts = registry.coordinate["data"], [], []
        for indices in WINDOWS:
            with collectives() as seen:
                stats = run_window(run, optimizer, indices, rank, weighted, explicit, how)
            norms.append(stats.total_norm)
            counts.append({name: count for name, count in seen.items() if name != "all_gather_single"})
        return torch.stack(norms).tolist(), whole(net, registry), counts


def run_window(
    run: nn.Module,
    optimizer: ParallelOptimizer,
    indices: tuple[int, ...],
    rank: int,
    weighted: bool,
    explicit: bool,
    how: str,
) -> GradStats:
    stats = None
    for index in indices:
        last = index == indices[-1]
        optimizer.zero_grad() if not explicit or index == indices[0] else None
        if last and how == "fsdp" and not explicit:
            optimizer.mark_last_micro_batch()
        with optimizer.no_sync() if explicit and not last else nullcontext():
            x = micro_batch(rank, index, weighted)
            losses = run(x)
            if weighted:
                optimizer.backward(losses.sum(), weight=len(x))
            else:
                optimizer.backward(losses.mean() / (len(indices) if explicit else 1))
        if last or not explicit:
            stats = optimizer.step(final=last)
    assert stats is not None
    return stats


def dense_windows(weighted: bool) -> tuple[list[float], Full]:
    net = Net().double()
    optimizer = adamw(net.parameters())
    norms = []
    for indices in WINDOWS:
        optimizer.zero_grad()
        x = torch.cat([micro_batch(rank, index, weighted) for index in indices for rank in range(2)])
        net(x).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.3)))
        optimizer.step()
    return norms, {name: param.detach() for name, param in net.named_parameters()}


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("how", ["own", "ddp", "fsdp"])
def test_accumulation_with_optimizer_reduction_ddp_or_fsdp2_matches_dense_model(
    world: World, how: str, weighted: bool, explicit: bool
) -> None:
    expected = dense_windows(weighted)
    reduced = {
        "own": [{"all_reduce": 2}] * 3,
        # This counter does not see DDP's all-reduce. With accumulation_steps=3, DDP does not reduce the shorter last
        # window, so the optimizer does.
        "ddp": [{"all_reduce": 1}, {"all_reduce": 1}, {"all_reduce": 1 if explicit else 2}],
        "fsdp": [{"reduce_scatter_single": 2, "all_reduce": 2}] * 3,
    }[how]
    for norms, params, counts in world.run(2, train_windows, how, weighted, explicit):
        assert_equal((norms, params), expected, 1e-6)
        assert counts == reduced


def unannounced(explicit: bool) -> str:
    with registry_of((("data", 2),)) as registry:
        net = sharded_net(registry)
        steps = None if explicit else 3
        optimizer = ParallelOptimizer(
            torch.optim.SGD(net.parameters()), registry, data_parallel=net, accumulation_steps=steps
        )
        with optimizer.no_sync() if explicit else nullcontext():
            optimizer.backward(net(data(0)).mean())
        try:
            optimizer.step(final=True)
        except RuntimeError as error:
            return str(error)
        return "no error"


@pytest.mark.parametrize("explicit", [False, True])
def test_fsdp2_step_without_mark_last_micro_batch_raises(world: World, explicit: bool) -> None:
    for found in world.run(2, unannounced, explicit):
        assert "also call optimizer.mark_last_micro_batch() before the forward of the last one" in found


def abandoned() -> tuple[str, float, float]:
    """Return the error of `zero_grad` in an unfinished window, and the sum of a local gradient of one batch in two cases:
    in a clean run, and after the error was ignored."""
    with registry_of((("data", 2),)) as registry:
        net = sharded_net(registry)
        weight: Any = net.layers[0].weight
        optimizer = ParallelOptimizer(torch.optim.SGD(net.parameters()), registry, data_parallel=net)
        optimizer.backward(net(data(1)).mean())
        clean = float(local(weight.grad).sum())
        optimizer.zero_grad()
        with optimizer.no_sync():
            optimizer.backward(net(data(0)).mean())
        try:
            optimizer.zero_grad()
            message = "no error"
        except RuntimeError as error:
            message = str(error)
        net.zero_grad()
        net(data(1)).mean().backward()
        return message, clean, float(local(weight.grad).sum())


def test_zero_grad_within_fsdp2_accumulation_window_raises(world: World) -> None:
    for message, clean, regardless in world.run(2, abandoned):
        assert "fully_shard has gradients that it has not reduced yet" in message
        assert abs(regardless - clean) > 0.01


def copied(*states: dict[str, Any]) -> list[dict[str, Any]]:
    """Return copies of state dicts. A deep copy also changes the class of some dicts, so compare copies with copies."""
    return [deepcopy(state) for state in states]


def loaded_in_unreduced_window(directory: str, weight: float | None, by_checkpoint: bool) -> tuple[str, bool]:
    """Load a state while `fully_shard` has unreduced gradients, and return the error, and True if nothing changed."""
    with registry_of((("data", 2),)) as registry:
        net = sharded_net(registry)
        adamw = torch.optim.AdamW(net.parameters(), lr=0.1)
        optimizer = ParallelOptimizer(adamw, registry, data_parallel=net)
        schedule = torch.optim.lr_scheduler.StepLR(adamw, 1)

        def step(seed: int) -> None:
            optimizer.backward(net(data(seed)).mean(), weight=weight)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

        step(0)
        state = deepcopy(optimizer.state_dict())
        save_checkpoint(directory, net, optimizer, lr_scheduler=schedule)
        step(1)
        before = copied(optimizer.state_dict(), schedule.state_dict(), net.state_dict())
        with optimizer.no_sync():
            optimizer.backward(net(data(2)).mean(), weight=weight)
        try:
            if by_checkpoint:
                load_checkpoint(directory, net, optimizer, lr_scheduler=schedule)
            else:
                optimizer.load_state_dict(state)
            message = "no error"
        except RuntimeError as error:
            message = str(error)
        return message, same(before, copied(optimizer.state_dict(), schedule.state_dict(), net.state_dict()))


@pytest.mark.parametrize(("weight", "by_checkpoint"), [(3.0, False), (3.0, True), (None, True)])
def test_loading_while_fully_shard_has_unreduced_gradients_raises_and_changes_nothing(
    world: World, tmp_path: Path, weight: float | None, by_checkpoint: bool
) -> None:
    for message, unchanged in world.run(2, loaded_in_unreduced_window, str(tmp_path / "run"), weight, by_checkpoint):
        assert "fully_shard has gradients that it has not reduced yet" in message
        assert unchanged


def error_after_failed_backward() -> bool:
    """Call backward again after it raised within a `fully_shard` module. Return True if this raises.

    torch alone would continue with wrong gradients: unsharded and not averaged, or None.
    """
    with registry_of((("data", 2),)) as registry:
        net = sharded_net(registry)
        options = arguments(max_norm=0.3, data_parallel=net)
        optimizer = ParallelOptimizer(adamw(net.parameters()), registry, **options)
        handle = net.get_submodule(next(iter(dict(net.named_children())))).register_forward_hook(
            lambda _module, _inputs, output: fails_in_backward(output, RuntimeError("planted"))
        )
        with pytest.raises(RuntimeError, match="planted"):
            optimizer.backward(net(micro_batch(registry.coordinate["data"], 0, weighted=False)).sum())
        handle.remove()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="an earlier backward raised within a fully_shard module"):
            optimizer.backward(net(micro_batch(registry.coordinate["data"], 1, weighted=False)).sum())
    return True


def test_backward_after_a_failed_backward_of_fully_shard_raises(world: World) -> None:
    assert all(world.run(2, error_after_failed_backward))


def train_with_evaluations(folder: Path, evaluate: bool) -> Full:
    """Evaluate between backward and `step`, and before a checkpoint is saved and loaded.

    After a forward without a backward, torch keeps the full parameters of the root module, and reads them in the next
    forward.
    """
    with registry_of((("data", 2),)) as registry:
        net = sharded_net(registry)
        optimizer = ParallelOptimizer(adamw(net.parameters()), registry, max_norm=0.3, data_parallel=net)

        def look() -> None:
            if evaluate:
                with torch.no_grad():
                    net(micro_batch(registry.rank("data"), 6, False))

        for index in range(4):
            optimizer.zero_grad()
            optimizer.backward(net(micro_batch(registry.rank("data"), index, False)).mean())
            look()
            optimizer.step()
            if index == 1:
                look()
                save_checkpoint(folder, net, optimizer)
        look()
        load_checkpoint(folder, net, optimizer)
        optimizer.zero_grad()
        optimizer.backward(net(micro_batch(registry.rank("data"), 5, False)).mean())
        optimizer.step()
        return whole(net, registry)


def test_evaluations_between_backward_and_step_or_before_a_checkpoint_change_no_weights(
    world: World, tmp_path: Path
) -> None:
    expected, found = (world.run(2, train_with_evaluations, tmp_path / str(look), look) for look in (False, True))
    assert same(found, expected)
