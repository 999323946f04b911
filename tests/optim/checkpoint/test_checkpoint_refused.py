"""Checkpoints that are torn or foreign: an error on every rank, and nothing is changed."""

from __future__ import annotations

import random
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import Axes, Run
from meshstep.amp import Bf16
from meshstep.optim import ParallelOptimizer, load_checkpoint, newest_checkpoint, save_checkpoint
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from optimizers import arguments
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from world import World

Change = Callable[[Path], object]


def content(value: Any) -> Any:
    """Comparable: dtypes and bits of tensors in whatever containers."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: content(inner) for key, inner in value.items()}
    return [content(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def everything(run: Run) -> Any:
    state = [run.model.state_dict(), run.optimizer.state_dict(), run.schedule.state_dict()]
    return content([*state, torch.get_rng_state(), random.getstate()])


def refused(path: Path, run: Run) -> str:
    """The error of loading; nothing has changed, and training goes on as if nothing had been tried."""
    before = everything(run)
    with pytest.raises(ValueError, match=r".+") as error:
        load_checkpoint(path, run.model, run.optimizer, lr_scheduler=run.schedule)
    assert everything(run) == before
    return str(error.value)


# Torn -----------------------------------------------------------------------------------------------------------------


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file: Path) -> None:
    """One bit, in the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


DAMAGES: dict[str, Change] = {
    "cut": cut,
    "empty": lambda file: file.write_bytes(b""),
    "flipped": flip,
    "garbage": lambda file: file.write_bytes(b"\x80\x02garbage"),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_torn_file_is_found(tmp_path: Path, damage: str) -> None:
    run = Run((), "fp16_naive")
    for step in range(3):
        run.step(step)
    directory = save_checkpoint(tmp_path / "whole", run.model, run.optimizer, lr_scheduler=run.schedule)
    files = sorted(file.name for file in directory.iterdir())
    assert files == [".metadata", "__0_0.distcp", "meshstep.json", "rank-0.pt", "shared.pt"]
    run.step(3)
    for name in files:
        torn = tmp_path / name
        shutil.copytree(tmp_path / "whole", torn)
        DAMAGES[damage](torn / directory.name / name)
        message = refused(torn, run)
        assert name in message
        assert "damaged" in message or "missing" in message


def torn_on_two_ranks(path: Path, name: str) -> str:
    run = Run((("tensor", 2),), "bf16")
    run.step(0)
    directory = save_checkpoint(path, run.model, run.optimizer, lr_scheduler=run.schedule)
    run.step(1)
    if run.registry.global_rank == 0:
        cut(directory / name)
    torch.distributed.barrier()
    message = refused(path, run)
    run.registry.close()
    return message


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", "rank-1.pt", "shared.pt", "meshstep.json"])
def test_all_ranks_say_so(world: World, tmp_path: Path, name: str) -> None:
    for message in world.run(2, torn_on_two_ranks, tmp_path, name):
        assert name in message
        assert "damaged" in message


def test_there_is_none(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "nowhere") is None
    (tmp_path / "checkpoint-5").mkdir()  # somebody else's
    (tmp_path / "meshstep-00000003.writing").mkdir()
    assert newest_checkpoint(tmp_path) is None
    assert "no complete checkpoint" in refused(tmp_path, Run((), "fp32"))


# Foreign --------------------------------------------------------------------------------------------------------------


def model_of(shape: int = 3, names: tuple[str, ...] = ("one", "two"), buffer: bool = True) -> nn.Module:
    torch.manual_seed(1)
    model = nn.ModuleDict({name: nn.Linear(shape, 2) for name in names})
    if buffer:
        model.register_buffer("seen", torch.tensor([1, 2]))
    return model


def optimizer_of(
    model: nn.Module, groups: Callable[[nn.Module], Any] = nn.Module.parameters, precision: Any = "fp32", **options: Any
) -> ParallelOptimizer:
    kind = options.pop("kind", torch.optim.AdamW)
    if precision != "fp32":
        model.bfloat16()
    inner = kind(groups(model), lr=0.1)
    return ParallelOptimizer(inner, ProcessGroupRegistry(Topology()), **arguments(precision=precision, **options))


def split_groups(model: nn.Module) -> Any:
    return [{"params": [param]} for param in model.parameters()]


def reversed_groups(model: nn.Module) -> Any:
    return [{"params": [param]} for param in reversed(list(model.parameters()))]


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        ({}, {"precision": "bf16"}, "precision='fp32', but this optimizer runs with 'bf16'"),
        ({}, {"kind": torch.optim.Adam}, "saved with AdamW, this optimizer is Adam"),
        ({}, {"shape": 4}, r"model/one.weight has shape \(2, 3\).*but shape \(2, 4\)"),
        ({}, {"names": ("one",)}, "two.bias, two.weight in the checkpoint only"),
        ({"names": ("one",)}, {}, "two.bias, two.weight here only"),
        ({}, {"buffer": False}, "the buffers in the model are not those of the checkpoint: seen"),
        ({"buffer": False}, {}, "seen here only"),
        ({}, {"groups": split_groups}, "1 param groups, the optimizer 4"),
        ({"groups": split_groups}, {"groups": reversed_groups}, "in param group 0"),
        ({"precision": Bf16(stochastic_rounding=True)}, {"precision": "bf16"}, "no master/one.weight"),
        ({"precision": "bf16"}, {"precision": Bf16(stochastic_rounding=True)}, "float32 master of one.weight"),
        ({"schedule": True}, {}, "saved with a StepLR; give lr_scheduler="),
        ({}, {"schedule": True}, "saved without a schedule"),
    ],
)
def test_foreign(tmp_path: Path, saved: dict[str, Any], loaded: dict[str, Any], message: str) -> None:
    for options, save in ((saved, True), (loaded, False)):
        options = dict(options)
        model = model_of(**{key: options.pop(key) for key in ("shape", "names", "buffer") if key in options})
        schedule = options.pop("schedule", False)
        optimizer = optimizer_of(model, **options)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1) if schedule else None
        for param in model.parameters():
            param.grad = torch.ones_like(param, dtype=param.grad_dtype)
        optimizer.step()
        if save:
            save_checkpoint(tmp_path, model, optimizer, lr_scheduler=scheduler)
            continue
        before = content([model.state_dict(), optimizer.state_dict()])
        with pytest.raises(ValueError, match=message):
            load_checkpoint(tmp_path, model, optimizer, lr_scheduler=scheduler)
        assert content([model.state_dict(), optimizer.state_dict()]) == before


class Fussy(torch.optim.lr_scheduler.StepLR):
    """Looks at what it is given only after it has taken half of it."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]
        if state_dict["gamma"] != self.gamma:
            raise KeyError("gamma")


def test_a_schedule_that_fails_half_way(tmp_path: Path) -> None:
    model = model_of()
    optimizer = optimizer_of(model)
    save_checkpoint(tmp_path, model, optimizer, lr_scheduler=Fussy(optimizer, 1, gamma=0.5))
    schedule = Fussy(optimizer, 1, gamma=0.7)
    optimizer.step()
    schedule.step()
    before = content([model.state_dict(), optimizer.state_dict(), schedule.state_dict()])
    with pytest.raises(
        ValueError, match=r"schedule can't continue from the state in the checkpoint: KeyError\('gamma'\)"
    ):
        load_checkpoint(tmp_path, model, optimizer, lr_scheduler=schedule)
    assert content([model.state_dict(), optimizer.state_dict(), schedule.state_dict()]) == before


# What is not saved ----------------------------------------------------------------------------------------------------


def test_not_in_the_middle_of_a_window(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = optimizer_of(model, accumulation_steps=2)
    optimizer.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(ValueError, match=r"1 micro-batches have been accumulated.*call save_checkpoint after step\(\)"):
        save_checkpoint(tmp_path, model, optimizer)
    optimizer.step(last=True)
    save_checkpoint(tmp_path, model, optimizer)


def test_nothing_that_would_have_to_be_executed(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = optimizer_of(model)
    with pytest.raises(ValueError, match=r"extra= can't be stored .*give numbers, strings and tensors"):
        save_checkpoint(tmp_path, model, optimizer, extra={"path": Path("x")})
    assert newest_checkpoint(tmp_path) is None
    extra = {"tensors": [torch.ones(2, dtype=torch.int8)], "pair": (1, None), "text": "x"}
    save_checkpoint(tmp_path, model, optimizer, extra=extra)
    assert content(load_checkpoint(tmp_path, model, optimizer)) == content(extra)


def test_a_model_that_is_not_the_optimizers(tmp_path: Path) -> None:
    model = model_of()
    with pytest.raises(ValueError, match=r"the optimizer steps .* of shape \(2, 3\), which is not in the model"):
        save_checkpoint(tmp_path, model.get_submodule("one"), optimizer_of(model))


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"calls": 3}


def test_state_of_a_kind_of_its_own(tmp_path: Path) -> None:
    model = Extra(2, 2)
    with pytest.raises(ValueError, match=r"_extra_state is state of a kind of its own .*give it as extra="):
        save_checkpoint(tmp_path, model, optimizer_of(model))


# Saving fails ---------------------------------------------------------------------------------------------------------


def fails(path: Path, how: str) -> tuple[str, list[str]]:
    """A second save fails on rank 1: the error, and what is left."""
    axes: Axes = (("tensor", 2),)
    run = Run(axes, "fp32")
    save_checkpoint(path, run.model, run.optimizer, extra="first")
    with pytest.MonkeyPatch.context() as patch:
        if how in FULL and run.registry.global_rank == 1:
            patch.setattr(*FULL[how], _no_space)
        if how == "uneven":
            rows = 3 - run.registry.global_rank
            run.model.register_parameter("uneven", nn.Parameter(torch.ones(rows, 2)))
            annotate(run.model.get_parameter("uneven"), P("tensor"), "uneven")
        with pytest.raises((RuntimeError, ValueError)) as error:
            save_checkpoint(path, run.model, run.optimizer, extra="second")
    left = sorted(entry.name for entry in path.iterdir())
    run = Run(axes, "fp32")
    assert load_checkpoint(path, run.model, run.optimizer) == "first"
    run.registry.close()
    return str(error.value), left


def _no_space(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


FULL: dict[str, tuple[Any, str]] = {"disk, tensors": (FileSystemWriter, "write_data"), "disk, rest": (zlib, "crc32")}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("disk, tensors", "writing .* failed on rank 1: .*No space left"),
        ("disk, rest", "OSError: .*No space left"),
        ("uneven", "model/uneven: rank 1 holds a piece of .*equal"),
    ],
)
def test_a_failed_save_leaves_the_previous_one(world: World, tmp_path: Path, how: str, message: str) -> None:
    for found, left in world.run(2, fails, tmp_path, how):
        assert re.search(message, found), found
        assert left == ["meshstep-00000001"]


def test_the_path_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="FileExistsError"):
        save_checkpoint(tmp_path / "file", model, optimizer_of(model))


def test_what_crashes_left_is_removed_and_others_things_stay(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = optimizer_of(model)
    first = save_checkpoint(tmp_path, model, optimizer)
    for name in ("meshstep-00000002.writing", "meshstep-00000000.removing", "checkpoint-9"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    second = save_checkpoint(tmp_path, model, optimizer)
    assert (first.name, second.name) == ("meshstep-00000001", "meshstep-00000002")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint-9", "meshstep-00000002"]


def test_a_previous_one_that_can_not_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    optimizer = optimizer_of(model)
    save_checkpoint(tmp_path, model, optimizer, extra=1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", _no_space)
        save_checkpoint(tmp_path, model, optimizer, extra=2)
    assert load_checkpoint(tmp_path, model, optimizer) == 2
    save_checkpoint(tmp_path, model, optimizer)
    assert [entry.name for entry in tmp_path.iterdir()] == ["meshstep-00000003"]
