"""Checkpoint directories: retention, several runs in one directory, concurrent readers, loading only the model."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import model_of, optimizer_of
from layouts import Axes, Run
from meshstep.optim import load_checkpoint, newest_checkpoint, save_checkpoint
from meshstep.optim.checkpoint import load, save
from meshstep.parallel import ProcessGroupRegistry, Topology
from torch import nn
from world import World

TENSOR: Axes = (("tensor", 2),)


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


# Retention ------------------------------------------------------------------------------------------------------------


def test_keep_argument_retains_last_checkpoints_and_each_is_loadable(tmp_path: Path) -> None:
    model = model_of()
    optimizer = optimizer_of(model)
    for number in range(1, 6):
        save_checkpoint(tmp_path, model, optimizer, extra=number, keep=3)
        assert names(tmp_path) == [f"meshstep-{n:08}" for n in range(max(1, number - 2), number + 1)]
    assert load_checkpoint(tmp_path, model, optimizer) == 5
    for number in (3, 4, 5):
        assert load_checkpoint(tmp_path / f"meshstep-{number:08}", model, optimizer) == number
    save_checkpoint(tmp_path, model, optimizer)
    assert names(tmp_path) == ["meshstep-00000006"]


@pytest.mark.parametrize("keep", [0, -1, 1.5, None])
def test_save_checkpoint_rejects_invalid_keep_argument(tmp_path: Path, keep: Any) -> None:
    model = model_of()
    with pytest.raises(ValueError, match=r"keep=.*: give the number of checkpoints to keep"):
        save_checkpoint(tmp_path, model, optimizer_of(model), keep=keep)
    assert newest_checkpoint(tmp_path) is None


# Two runs in one directory --------------------------------------------------------------------------------------------


def second_run(path: Path) -> list[str]:
    first, second = Run(TENSOR, "fp32"), Run(TENSOR, "fp32")
    save_checkpoint(path, first.model, first.optimizer, extra="first")
    with pytest.raises(
        ValueError, match="load meshstep-00000001 with load_checkpoint before the first step; else"
    ) as error:
        save_checkpoint(path, second.model, second.optimizer, extra="second")
    assert names(path) == ["meshstep-00000001"]
    # A run may save after it has loaded the other run's checkpoint; then the first run may not save.
    assert load_checkpoint(path, second.model, second.optimizer) == "first"
    save_checkpoint(path, second.model, second.optimizer, extra="second")
    with pytest.raises(
        ValueError, match=r"meshstep-00000002 is the newest .* loaded there is meshstep-00000001; saving"
    ):
        save_checkpoint(path, first.model, first.optimizer)
    found = load_checkpoint(path, first.model, first.optimizer)
    first.registry.close()
    second.registry.close()
    return [str(error.value), found]


def test_saving_into_directory_of_another_run_is_rejected_on_all_ranks(world: World, tmp_path: Path) -> None:
    for message, found in world.run(2, second_run, tmp_path):
        assert "the last one that this optimizer saved or loaded there is none; saving could remove" in message
        assert found == "second"


def test_saving_after_loading_older_checkpoint_raises_and_names_both_checkpoints(tmp_path: Path) -> None:
    model = model_of()
    optimizer = optimizer_of(model)
    for _ in range(3):
        save_checkpoint(tmp_path, model, optimizer, keep=3)
    load_checkpoint(tmp_path / "meshstep-00000002", model, optimizer)
    with pytest.raises(
        ValueError, match=r"meshstep-00000003 is the newest .* loaded there is meshstep-00000002; saving"
    ):
        save_checkpoint(tmp_path, model, optimizer, keep=3)
    shutil.rmtree(tmp_path / "meshstep-00000003")
    save_checkpoint(tmp_path, model, optimizer, keep=3)
    assert names(tmp_path) == [f"meshstep-{number:08}" for number in (1, 2, 3)]


def test_save_raises_if_another_run_saves_to_directory_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of()
    optimizers = [optimizer_of(model), optimizer_of(model)]
    save_checkpoint(tmp_path, model, optimizers[0])
    load_checkpoint(tmp_path, model, optimizers[1])
    real = save.write_summed  # type: ignore[attr-defined]

    def meanwhile(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(save, "write_summed", real)
        save_checkpoint(tmp_path, model, optimizers[1], extra="the other")
        return real(*args, **kwargs)

    monkeypatch.setattr(save, "write_summed", meanwhile)
    with pytest.raises((RuntimeError, ValueError)):
        save_checkpoint(tmp_path, model, optimizers[0], extra="this one")
    assert load_checkpoint(tmp_path, model, optimizers[0]) == "the other"


# Concurrent readers ---------------------------------------------------------------------------------------------------


def replaced_while_read(path: Path, place: str) -> Any:
    """Replace the checkpoint while it is being loaded, at a point that all ranks reach together.

    Return the extra value that was loaded.
    """
    writer, reader = Run(TENSOR, "fp32"), Run(TENSOR, "fp32")
    save_checkpoint(path, writer.model, writer.optimizer, extra=1)
    real = getattr(load, place)
    written: list[Path] = []

    def replaced_first(*args: Any, **kwargs: Any) -> Any:
        if not written:
            written.append(path)
            save_checkpoint(path, writer.model, writer.optimizer, extra=2)
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, place, replaced_first)
        found = load_checkpoint(path, reader.model, reader.optimizer)
    writer.registry.close()
    reader.registry.close()
    return found


def test_load_on_all_ranks_switches_to_newer_checkpoint_if_old_one_is_removed(world: World, tmp_path: Path) -> None:
    assert world.run(2, replaced_while_read, tmp_path, "LogicalParameters") == [2, 2]


@pytest.mark.parametrize(
    "place", ["read_manifest", "_verify_share", "plain_content", "LogicalParameters", "Restoration"]
)
def test_loading_retries_when_checkpoint_is_replaced_while_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    model, other = model_of(), model_of()
    optimizer, reader = optimizer_of(model), optimizer_of(other)
    save_checkpoint(tmp_path, model, optimizer, extra=1)
    real = getattr(load, place)

    def replaced_first(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(load, place, real)
        save_checkpoint(tmp_path, model, optimizer, extra=2)
        return real(*args, **kwargs)

    monkeypatch.setattr(load, place, replaced_first)
    assert load_checkpoint(tmp_path, other, reader) == 2


def test_loading_while_another_thread_saves_does_not_fail(tmp_path: Path) -> None:
    model = model_of()
    optimizer = optimizer_of(model)
    save_checkpoint(tmp_path, model, optimizer, extra=0)
    stop = threading.Event()
    problems: list[BaseException] = []

    def write() -> None:
        number = 0
        try:
            while not stop.is_set():
                number += 1
                save_checkpoint(tmp_path, model, optimizer, extra=number)
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        other = model_of()
        reader = optimizer_of(other)
        found = [load_checkpoint(tmp_path, other, reader) for _ in range(30)]
    finally:
        stop.set()
        thread.join()
    assert not problems
    assert found == sorted(found)


def test_newest_checkpoint_retries_when_listed_checkpoint_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of()
    optimizer = optimizer_of(model)
    save_checkpoint(tmp_path, model, optimizer)
    real, listed = Path.iterdir, 0

    def iterdir(path: Path) -> Iterator[Path]:
        nonlocal listed
        entries = list(real(path))
        if path == tmp_path:
            listed += 1
            if listed == 1:
                save_checkpoint(tmp_path, model, optimizer)
        return iter(entries)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.name == "meshstep-00000002"


def test_load_error_suggests_keep_if_checkpoint_is_replaced_ten_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = model_of(), model_of()
    optimizer, reader = optimizer_of(model), optimizer_of(other)
    save_checkpoint(tmp_path, model, optimizer)
    real = load.plain_content  # type: ignore[attr-defined]

    def replaced(*args: Any, **kwargs: Any) -> Any:
        save_checkpoint(tmp_path, model, optimizer)
        return real(*args, **kwargs)

    monkeypatch.setattr(load, "plain_content", replaced)
    with pytest.raises(RuntimeError, match=r"replaced 10 times while it was read.*keep=2"):
        load_checkpoint(tmp_path, other, reader)


# Loading only the model -----------------------------------------------------------------------------------------------


def save_run(path: Path) -> None:
    run = Run(TENSOR, "bf16")
    for step in range(2):
        run.step(step)
    run.model.register_buffer("seen", torch.tensor([4, 5]))
    save_checkpoint(path, run.model, run.optimizer, lr_scheduler=run.schedule, extra={"step": 2})
    run.registry.close()


def load_model(path: Path, axes: Axes) -> tuple[bool, Any]:
    """Return whether loading only the model gives the tensors of a full load, and the extra value of the checkpoint."""
    one, other = Run(axes, "bf16", seed=6), Run(axes, "bf16", seed=7)
    for run in (one, other):
        run.model.register_buffer("seen", torch.tensor([0, 0]))
    extra = load_checkpoint(path, one.model, one.optimizer, lr_scheduler=one.schedule)
    before = torch.get_rng_state()
    assert load_checkpoint(path, other.model, None, registry=other.registry) == extra
    assert torch.equal(torch.get_rng_state(), before)
    assert not other.optimizer.state
    pairs = zip(one.model.state_dict().items(), other.model.state_dict().items(), strict=True)
    same = all(name == also and torch.equal(value, found) for (name, value), (also, found) in pairs)
    one.registry.close()
    other.registry.close()
    return same, extra


@pytest.mark.parametrize("axes", [TENSOR, ()])
def test_model_without_optimizer_loads_on_same_mesh_and_in_one_process(
    world: World, tmp_path: Path, axes: Axes
) -> None:
    world.run(2, save_run, tmp_path)
    assert world.run(2 if axes else 1, load_model, tmp_path, axes) == [(True, {"step": 2})] * (2 if axes else 1)


def test_model_only_load_requires_registry_and_matching_shapes(tmp_path: Path) -> None:
    model = model_of()
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    save_checkpoint(tmp_path, model, optimizer, lr_scheduler=schedule)
    with pytest.raises(TypeError, match=r"give registry="):
        load_checkpoint(tmp_path, model, None)
    with pytest.raises(TypeError, match=r"give optimizer= too"):
        load_checkpoint(tmp_path, model, None, lr_scheduler=schedule, registry=optimizer.registry)
    with pytest.raises(ValueError, match=r"model/one.weight has shape \(2, 3\)"):
        load_checkpoint(tmp_path, model_of(4), None, registry=optimizer.registry)
    load_checkpoint(tmp_path, model, None, registry=ProcessGroupRegistry(Topology()))


# Empty extra state ----------------------------------------------------------------------------------------------------


class Hollow(nn.Linear):
    """A layer whose extra state is empty, as in Megatron."""

    def __init__(self, nothing: Any) -> None:
        super().__init__(2, 2)
        self.nothing = nothing

    def get_extra_state(self) -> Any:
        return self.nothing

    def set_extra_state(self, state: Any) -> None:
        self.nothing = state


@pytest.mark.parametrize("nothing", [None, torch.empty(0, dtype=torch.uint8)])
def test_empty_extra_state_of_module_does_not_prevent_saving_and_loading(tmp_path: Path, nothing: Any) -> None:
    model, other = Hollow(nothing), Hollow(nothing)
    save_checkpoint(tmp_path, model, optimizer_of(model))
    load_checkpoint(tmp_path, other, optimizer_of(other))
    assert torch.equal(model.weight, other.weight)
    assert other.nothing is nothing
