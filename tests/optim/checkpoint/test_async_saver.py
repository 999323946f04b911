"""AsyncSaver: checkpoints that are written in the background while training continues."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import model_of, optimizer_of
from layouts import Axes, Run
from meshstep.optim import AsyncSaver, load_checkpoint, newest_checkpoint, save_checkpoint
from meshstep.optim.checkpoint import save as async_saver
from meshstep.optim.checkpoint import tensors
from meshstep.parallel import ProcessGroupRegistry, Topology
from torch import nn
from world import World

BOTH: Axes = (("data", 2), ("tensor", 2))
ZERO = {"shard_states": "data"}


def train(path: Path, axes: Axes, precision: str, options: dict[str, Any]) -> list[Any]:
    """Save after step 3, but block the write until step 7 is done. Return the losses of steps 4 to 7 and the weights."""
    run = Run(axes, precision, **options)
    may_write = threading.Event()
    real = async_saver.write

    def held_up(*args: Any) -> Path:
        assert may_write.wait(60)
        return real(*args)

    losses = []
    with pytest.MonkeyPatch.context() as patch, AsyncSaver(path, run.registry) as saver:
        patch.setattr(async_saver, "write", held_up)
        for step in range(8):
            losses.append(run.step(step))
            if step == 3:
                saver.save(run.model, run.optimizer, lr_scheduler=run.schedule, extra={"step": 4})
        assert newest_checkpoint(path) is None
        may_write.set()
        saved = saver.wait()
    assert saved == path / "meshstep-00000001"
    weights = [param.tolist() for param in run.model.parameters()]
    run.registry.close()
    return [losses[4:], weights]


def resume(path: Path, axes: Axes, precision: str, options: dict[str, Any]) -> list[Any]:
    run = Run(axes, precision, seed=6, **options)
    first = load_checkpoint(path, run.model, run.optimizer, lr_scheduler=run.schedule)["step"]
    losses = [run.step(step) for step in range(first, 8)]
    weights = [param.tolist() for param in run.model.parameters()]
    run.registry.close()
    return [losses, weights]


@pytest.mark.parametrize(
    ("axes", "precision", "options"),
    [((), "fp16_naive", {}), ((("tensor", 2),), "bf16", {}), (BOTH, "fp32", ZERO)],
    ids=["one process", "tensor", "data x tensor, ZeRO"],
)
def test_async_checkpoint_holds_state_at_save_call_not_at_write(
    world: World, tmp_path: Path, axes: Axes, precision: str, options: dict[str, Any]
) -> None:
    ranks = max(1, 2 * len(axes))
    expected = world.run(ranks, train, tmp_path, axes, precision, options)
    assert world.run(ranks, resume, tmp_path, axes, precision, options) == expected


def busy_group(path: Path) -> list[float]:
    """Train while checkpoints are written. Ranks run at different speeds, and training issues its own collectives.

    Return the losses.
    """
    run = Run((("tensor", 2),), "fp32")
    losses = []
    with AsyncSaver(path, run.registry, keep=2) as saver:
        for step in range(30):
            if run.registry.global_rank == step % 2:
                time.sleep(0.002)
            losses.append(run.step(step))
            if step % 5 == 4:
                saver.save(run.model, run.optimizer, extra=step)
    run.registry.close()
    return losses


def test_async_saving_does_not_change_losses_of_training(world: World, tmp_path: Path) -> None:
    expected = world.run(2, plainly, tmp_path / "plain")
    assert world.run(2, busy_group, tmp_path / "async") == expected
    assert sorted(entry.name for entry in (tmp_path / "async").iterdir()) == ["meshstep-00000005", "meshstep-00000006"]


def plainly(path: Path) -> list[float]:
    run = Run((("tensor", 2),), "fp32")
    losses = [run.step(step) for step in range(30)]
    run.registry.close()
    return losses


# Errors ---------------------------------------------------------------------------------------------------------------


def call_next(saver: AsyncSaver, run: Run, call: str) -> None:
    if call == "save":
        saver.save(run.model, run.optimizer)
    elif call == "end of with":
        with saver:
            pass
    else:
        getattr(saver, call)()


def fails(path: Path, next_call: str) -> list[str]:
    """Make rank 1 fail to write the second checkpoint. Return the error of the next call, the names in the folder ``path``,
    and the extra value of the checkpoint that is loaded afterwards."""
    run = Run((("tensor", 2),), "fp32")
    messages = []
    saver = AsyncSaver(path, run.registry)
    saver.save(run.model, run.optimizer, extra="first")
    saver.wait()

    def no_space(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if run.registry.global_rank == 1:
            patch.setattr(tensors, "write_summed", no_space)
        saver.save(run.model, run.optimizer, extra="second")  # starts the write
        for step in range(2):
            run.step(step)  # training continues meanwhile
        with pytest.raises((RuntimeError, ValueError)) as error:
            call_next(saver, run, next_call)
        messages.append(str(error.value))
    messages += sorted(entry.name for entry in path.iterdir())
    if next_call in ("save", "wait"):
        saver.save(run.model, run.optimizer, extra="third")
        saver.close()
    messages.append(load_checkpoint(path, run.model, run.optimizer))
    run.registry.close()
    return messages


@pytest.mark.parametrize("next_call", ["save", "wait", "close", "end of with"])
def test_failed_background_write_raises_at_next_call_on_every_rank(
    world: World, tmp_path: Path, next_call: str
) -> None:
    for message, *left, found in world.run(2, fails, tmp_path, next_call):
        assert "No space left" in message
        assert left == ["meshstep-00000001"]
        assert found == ("third" if next_call in ("save", "wait") else "first")


def test_async_saver_rejects_unserializable_extra_and_invalid_keep_immediately(tmp_path: Path) -> None:
    model = model_of()
    optimizer = optimizer_of(model)
    with AsyncSaver(tmp_path, optimizer.registry) as saver:
        with pytest.raises(ValueError, match="extra= can't be stored"):
            saver.save(model, optimizer, extra=tmp_path)
        assert saver.wait() is None
    for keep in (0, True):
        with pytest.raises(ValueError, match=f"keep={keep}"):
            AsyncSaver(tmp_path, optimizer.registry, keep=keep)


def test_exception_in_training_propagates_and_pending_checkpoint_is_completed(tmp_path: Path) -> None:
    model = model_of()
    optimizer = optimizer_of(model)

    def train_and_fail() -> None:
        with AsyncSaver(tmp_path, optimizer.registry) as saver:
            saver.save(model, optimizer, extra=1)
            raise KeyError("in training")

    with pytest.raises(KeyError, match="in training"):
        train_and_fail()
    assert load_checkpoint(tmp_path, model, optimizer) == 1


@pytest.mark.parametrize("error", [None, KeyError("in training")], ids=["no error", "error"])
def test_async_saver_ends_its_thread_at_the_end_of_the_with_block(tmp_path: Path, error: Exception | None) -> None:
    model = model_of()
    optimizer = optimizer_of(model)
    before = {*threading.enumerate()}
    with suppress(KeyError), AsyncSaver(tmp_path, optimizer.registry) as saver:
        saver.save(model, optimizer)
        assert {*threading.enumerate()} - before
        if error is not None:
            raise error
    assert {*threading.enumerate()} <= before


def test_async_saver_raises_instead_of_replacing_checkpoint_of_another_run(tmp_path: Path) -> None:
    model = model_of()
    save_checkpoint(tmp_path, model, optimizer_of(model), extra="another")
    optimizer = optimizer_of(model)
    saver = AsyncSaver(tmp_path, optimizer.registry)
    saver.save(model, optimizer)
    with pytest.raises(ValueError, match="saving could remove another run's checkpoint"):
        saver.close()
    assert load_checkpoint(tmp_path, model, None, registry=ProcessGroupRegistry(Topology())) == "another"


def test_async_checkpoint_is_unaffected_by_changes_after_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: nn.Module = model_of()
    optimizer = optimizer_of(model)
    extra: dict[str, Any] = {"list": [1], "tensor": torch.ones(1)}
    release = threading.Event()
    real = async_saver.write
    monkeypatch.setattr(async_saver, "write", lambda *args: release.wait(60) and real(*args))
    with AsyncSaver(tmp_path, optimizer.registry) as saver:
        saver.save(model, optimizer, extra=extra)
        extra["list"].append(2)
        extra["tensor"] += 1
        optimizer.param_groups[0]["lr"] = 7.0
        release.set()
    assert load_checkpoint(tmp_path, model, optimizer) == {"list": [1], "tensor": torch.ones(1)}
    assert optimizer.param_groups[0]["lr"] == 0.1
