"""Loading a damaged or incompatible checkpoint raises an error and changes nothing."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import content, model_of, optimizer_of
from layouts import Run
from meshstep.amp import Bf16
from meshstep.optim import load_checkpoint, newest_checkpoint, save_checkpoint
from meshstep.optim.checkpoint.directory import plain_content
from torch import nn
from world import World

Change = Callable[[Path], object]


def everything(run: Run) -> Any:
    state = [run.model.state_dict(), run.optimizer.state_dict(), run.schedule.state_dict()]
    return content([*state, torch.get_rng_state(), random.getstate()])


def refused(path: Path, run: Run) -> str:
    before = everything(run)
    with pytest.raises(ValueError, match=r".+") as error:
        load_checkpoint(path, run.model, run.optimizer, lr_scheduler=run.schedule)
    assert everything(run) == before
    return str(error.value)


# Damaged files --------------------------------------------------------------------------------------------------------


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file: Path) -> None:
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
def test_damage_in_any_checkpoint_file_raises_and_changes_nothing(tmp_path: Path, damage: str) -> None:
    run = Run((), "fp16_naive")
    for step in range(3):
        run.step(step)
    directory = save_checkpoint(tmp_path / "whole", run.model, run.optimizer, lr_scheduler=run.schedule)
    files = sorted(file.name for file in directory.iterdir())
    assert files == ["index.json", "meshstep.json", "rank-0.pt", "shared.pt", "tensors-0.bin"]
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


@pytest.mark.parametrize(
    "name", ["index.json", "tensors-0.bin", "tensors-1.bin", "rank-1.pt", "shared.pt", "meshstep.json"]
)
def test_damaged_file_is_reported_on_all_ranks(world: World, tmp_path: Path, name: str) -> None:
    for message in world.run(2, torn_on_two_ranks, tmp_path, name):
        assert name in message
        assert "damaged" in message


def test_loading_from_directory_without_checkpoint_raises(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "nowhere") is None
    (tmp_path / "checkpoint-5").mkdir()  # such as another program could make
    (tmp_path / "meshstep-00000003.writing").mkdir()
    assert newest_checkpoint(tmp_path) is None
    assert "no complete checkpoint" in refused(tmp_path, Run((), "fp32"))


# Checkpoints of another model or another configuration ----------------------------------------------------------------


def split_groups(model: nn.Module) -> Any:
    return [{"params": [param]} for param in model.parameters()]


def reversed_groups(model: nn.Module) -> Any:
    return [{"params": [param]} for param in reversed(list(model.parameters()))]


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        ({}, {"precision": "bf16"}, "precision='fp32', but this optimizer has 'bf16'"),
        ({}, {"kind": torch.optim.Adam}, "saved with AdamW, but this optimizer is Adam"),
        ({}, {"shape": 4}, r"model/one.weight has shape \(2, 3\).*but shape \(2, 4\)"),
        ({}, {"names": ("one",)}, "only in the checkpoint: two.bias, two.weight"),
        ({"names": ("one",)}, {}, "only here: two.bias, two.weight"),
        (
            {},
            {"buffer": False},
            r"the buffers in the model differ from the checkpoint's \(only in the checkpoint: seen\)",
        ),
        ({"buffer": False}, {}, "only here: seen"),
        ({}, {"groups": split_groups}, "1 param groups, the optimizer has 4"),
        ({"groups": split_groups}, {"groups": reversed_groups}, "in param group 0"),
        (
            {"precision": Bf16(stochastic_rounding=True)},
            {"precision": "bf16"},
            "one.weight: the checkpoint was saved without master",
        ),
        ({"precision": "bf16"}, {"precision": Bf16(stochastic_rounding=True)}, "float32 master weight of one.weight"),
        ({"schedule": True}, {}, "saved with a StepLR; give lr_scheduler="),
        ({}, {"schedule": True}, "saved without a schedule"),
    ],
)
def test_checkpoint_of_different_model_or_options_is_rejected(
    tmp_path: Path, saved: dict[str, Any], loaded: dict[str, Any], message: str
) -> None:
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


def test_bf16_checkpoint_of_frozen_parameter_loads_only_while_parameter_is_frozen(tmp_path: Path) -> None:
    def frozen() -> tuple[nn.Module, Any]:
        model = model_of()
        model.get_parameter("one.weight").requires_grad_(False)
        return model, optimizer_of(model, precision="bf16")

    save_checkpoint(tmp_path, *frozen())
    model = model_of()
    with pytest.raises(
        ValueError, match=r"one.weight: the checkpoint was saved while this parameter was frozen.*refresh\(\)"
    ):
        load_checkpoint(tmp_path, model, optimizer_of(model, precision="bf16"))
    model, optimizer = frozen()
    load_checkpoint(tmp_path, model, optimizer)
    model.get_parameter("one.weight").requires_grad_(True)
    optimizer.refresh()
    for param in model.parameters():
        param.grad = torch.ones_like(param, dtype=param.grad_dtype)
    before = model.get_parameter("one.weight").clone()
    optimizer.step()
    assert not model.get_parameter("one.weight").equal(before)


def test_loading_master_weight_of_unfrozen_parameter_raises_until_refresh(tmp_path: Path) -> None:
    model = model_of()
    save_checkpoint(tmp_path, model, optimizer_of(model, precision="bf16"))
    model = model_of()
    model.get_parameter("one.weight").requires_grad_(False)
    optimizer = optimizer_of(model, precision="bf16")
    model.get_parameter("one.weight").requires_grad_(True)
    with pytest.raises(
        ValueError, match=r"one.weight, but the optimizer has none, .* call optimizer.refresh\(\) before"
    ):
        load_checkpoint(tmp_path, model, optimizer)
    optimizer.refresh()
    load_checkpoint(tmp_path, model, optimizer)


class Fussy(torch.optim.lr_scheduler.StepLR):
    """A schedule that raises after it has loaded half of its state, if the saved ``gamma`` differs from its own."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]
        if state_dict["gamma"] != self.gamma:
            raise KeyError("gamma")


def test_failing_scheduler_load_leaves_model_optimizer_and_scheduler_unchanged(tmp_path: Path) -> None:
    model = model_of()
    optimizer = optimizer_of(model)
    save_checkpoint(tmp_path, model, optimizer, lr_scheduler=Fussy(optimizer, 1, gamma=0.5))
    schedule = Fussy(optimizer, 1, gamma=0.7)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    schedule.step()
    before = content([model.state_dict(), optimizer.state_dict(), schedule.state_dict()])
    with pytest.raises(
        ValueError, match=r"lr_scheduler= can't load the schedule's state in the checkpoint: KeyError\('gamma'\)"
    ):
        load_checkpoint(tmp_path, model, optimizer, lr_scheduler=schedule)
    assert content([model.state_dict(), optimizer.state_dict(), schedule.state_dict()]) == before


def test_loading_a_schedule_with_other_parts_names_them_and_not_only_damage(tmp_path: Path) -> None:
    model = model_of()
    optimizer = optimizer_of(model)
    lr = torch.optim.lr_scheduler

    def schedule(*parts: Any) -> Any:
        return lr.SequentialLR(optimizer, list(parts), [*range(1, len(parts))])

    save_checkpoint(tmp_path, model, optimizer, lr_scheduler=schedule(lr.ConstantLR(optimizer), lr.LinearLR(optimizer)))
    others = [
        (
            schedule(*(lr.ConstantLR(optimizer) for _ in range(3))),
            r"'_milestones'\] is \[1\]; expected a list of 2 items",
        ),
        (schedule(lr.ConstantLR(optimizer), lr.CosineAnnealingLR(optimizer, 5)), r"lacks 'T_max', 'eta_min'"),
    ]
    for other, text in others:
        expected = (
            rf"shared\.pt has a state that does not fit lr_scheduler=: .*{text}.*; create the schedule with the parts"
        )
        with pytest.raises(ValueError, match=expected):
            load_checkpoint(tmp_path, model, optimizer, lr_scheduler=other)


@pytest.mark.parametrize(("text", "reason"), [("no archive\nsecond line", "no archive"), ("", "EOFError")])
def test_error_about_unreadable_checkpoint_file_quotes_first_line_of_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    def load(*args: Any, **kwargs: Any) -> Any:
        raise EOFError(text)

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(ValueError, match=f"was tampered with: {reason}; "):
        plain_content(tmp_path / "rank-0.pt")
