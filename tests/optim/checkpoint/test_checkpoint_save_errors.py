"""Unsupported saves, failed saves, and leftovers of crashed saves."""

from __future__ import annotations

import re
import shutil
from copy import deepcopy
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import content, model_of, optimizer_of
from layouts import Axes, Run
from meshstep.optim import ZClip, load_checkpoint, newest_checkpoint, save_checkpoint
from meshstep.optim.checkpoint import save, tensors
from meshstep.parallel import P, annotate
from torch import nn
from world import World


def test_saving_inside_accumulation_window_is_rejected(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = optimizer_of(model, accumulation_steps=2)
    optimizer.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(
        ValueError,
        match=r"since the last update \(micro-batches: 1\): call save_checkpoint after the step",
    ):
        save_checkpoint(tmp_path, model, optimizer)
    optimizer.step(final=True)
    save_checkpoint(tmp_path, model, optimizer)


def test_save_rejects_extra_argument_with_unsupported_type(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = optimizer_of(model)
    with pytest.raises(ValueError, match=r"extra= can't be stored .*give numbers, strings and tensors"):
        save_checkpoint(tmp_path, model, optimizer, extra={"path": Path("x")})
    assert newest_checkpoint(tmp_path) is None
    extra = {"tensors": [torch.ones(2, dtype=torch.int8)], "pair": (1, None), "text": "x"}
    save_checkpoint(tmp_path, model, optimizer, extra=extra)
    assert content(load_checkpoint(tmp_path, model, optimizer)) == content(extra)


def test_save_rejects_param_group_option_that_could_not_be_loaded(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = optimizer_of(model)
    for value in (Path("x"), range(3), [{"nested": Decimal("1.5")}]):
        optimizer.param_groups[0]["mine"] = value
        with pytest.raises(ValueError, match=r"'mine' of param group 0 can't be stored \(torch\.load.* rejects its \w"):
            save_checkpoint(tmp_path, model, optimizer)
    assert newest_checkpoint(tmp_path) is None


def test_save_rejects_optimizer_state_that_could_not_be_loaded(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = optimizer_of(model)
    optimizer.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    optimizer.state[model.weight]["mine"] = Path("x")
    with pytest.raises(ValueError, match=r"the optimizer's 'mine' of weight can't be stored"):
        save_checkpoint(tmp_path, model, optimizer)
    assert newest_checkpoint(tmp_path) is None


def test_save_rejects_state_of_clip_rule_that_could_not_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    optimizer = optimizer_of(model, max_norm=ZClip())
    optimizer.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    state = optimizer.state_dict()
    state["meshstep"]["mine"] = Path("x")
    monkeypatch.setattr(optimizer, "state_dict", lambda: state)
    with pytest.raises(ValueError, match=r"the state of the precision mode or of the clipping rule can't be stored"):
        save_checkpoint(tmp_path, model, optimizer)


@pytest.mark.parametrize("value", [np.float64(0.25), np.float32(0.25), np.int64(3), np.bool_(True), np.array(0.25)])
def test_numpy_numbers_in_checkpoint_are_loaded_as_python_numbers(tmp_path: Path, value: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = optimizer_of(model)
    adamw = optimizer.optimizer
    options = {"mine": value, "nested": (value, [value, {"x": value}]), "bytes": b"x"}
    adamw.param_groups[0].update(deepcopy(options))
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw, lambda _: value)
    save_checkpoint(tmp_path, model, optimizer, lr_scheduler=schedule, extra={"best": value})
    adamw.param_groups[0].update(deepcopy(options))
    assert load_checkpoint(tmp_path, model, optimizer, lr_scheduler=schedule) == {"best": value}
    number = value.item()
    group = adamw.param_groups[0]
    assert (group["mine"], group["nested"], group["bytes"]) == (number, (number, [number, {"x": number}]), b"x")
    assert type(group["mine"]) is type(number)


class Unreadable:
    def __reduce__(self) -> Any:
        raise RuntimeError  # an error without text


def test_save_rejects_extra_argument_whose_pickling_fails_without_message(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"extra= can't be stored \(RuntimeError\)"):
        save_checkpoint(tmp_path, model, optimizer_of(model), extra=Unreadable())


def test_saving_model_that_lacks_a_stepped_parameter_is_rejected(tmp_path: Path) -> None:
    model = model_of()
    with pytest.raises(ValueError, match=r"the optimizer steps .* of shape \(2, 3\), which is not in the model"):
        save_checkpoint(tmp_path, model.get_submodule("one"), optimizer_of(model))


class Extra(nn.Linear):
    def __init__(self, state: object) -> None:
        super().__init__(2, 2)
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state


@pytest.mark.parametrize("state", [{"calls": 3}, torch.ones(1)], ids=["dict", "tensor"])
def test_saving_module_with_nonempty_extra_state_is_rejected(tmp_path: Path, state: object) -> None:
    model = Extra(state)
    with pytest.raises(ValueError, match=r"_extra_state is extra state of a module, .*pass the state as extra="):
        save_checkpoint(tmp_path, model, optimizer_of(model))


def fails(path: Path, how: str) -> tuple[str, list[str]]:
    """Make a second save fail, by an error on rank 1 or by uneven shards. Return the error, and the names in
    the folder ``path`` after the failed save."""
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


FULL: dict[str, tuple[Any, str]] = {
    "disk, tensors": (tensors, "write_summed"),
    "disk, rest": (save, "write_summed"),
}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("disk, tensors", "OSError: .*No space left"),
        ("disk, rest", "OSError: .*No space left"),
        ("uneven", "model/uneven: rank 1 has a part of .*equal"),
    ],
)
def test_failed_save_keeps_previous_checkpoint(world: World, tmp_path: Path, how: str, message: str) -> None:
    for found, left in world.run(2, fails, tmp_path, how):
        assert re.search(message, found), found
        assert left == ["meshstep-00000001"]


def test_saving_to_path_of_a_file_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="FileExistsError"):
        save_checkpoint(tmp_path / "file", model, optimizer_of(model))


def test_save_removes_leftovers_of_crashes_and_keeps_other_directories(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = optimizer_of(model)
    first = save_checkpoint(tmp_path, model, optimizer)
    for name in ("meshstep-00000002.0f.writing", "meshstep-00000000.removing", "checkpoint-9"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    second = save_checkpoint(tmp_path, model, optimizer)
    assert (first.name, second.name) == ("meshstep-00000001", "meshstep-00000002")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint-9", "meshstep-00000002"]


def test_save_succeeds_when_previous_checkpoint_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    optimizer = optimizer_of(model)
    save_checkpoint(tmp_path, model, optimizer, extra=1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", _no_space)
        save_checkpoint(tmp_path, model, optimizer, extra=2)
    assert load_checkpoint(tmp_path, model, optimizer) == 2
    save_checkpoint(tmp_path, model, optimizer)
    assert [entry.name for entry in tmp_path.iterdir()] == ["meshstep-00000003"]


@pytest.mark.parametrize("how", ["disk, tensors", "disk, rest"])
def test_failed_save_in_single_process_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    model = nn.Linear(2, 2)
    monkeypatch.setattr(*FULL[how], _no_space)
    with pytest.raises(RuntimeError, match="No space left"):
        save_checkpoint(tmp_path, model, optimizer_of(model))
    assert [*tmp_path.iterdir()] == []


def test_leftovers_that_cannot_be_removed_do_not_prevent_a_save(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    (tmp_path / "meshstep-00000002.0f.writing").write_text("a file, which rmtree can't remove")
    assert save_checkpoint(tmp_path, model, optimizer_of(model)).name == "meshstep-00000001"
