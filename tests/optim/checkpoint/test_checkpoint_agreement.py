"""An error on one rank during loading or saving raises on every rank, and no rank hangs."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import content
from layouts import Axes, Run
from meshstep.optim import load_checkpoint, save_checkpoint
from meshstep.optim.checkpoint import contents, load, save, tensors
from meshstep.optim.checkpoint import contents as logical_parameters
from world import World

AXES: Axes = (("tensor", 2),)
ERRORS: dict[str, Exception] = {
    "OSError": OSError(5, "Input/output error"),
    "UnpicklingError": pickle.UnpicklingError("invalid load key"),
    "KeyError": KeyError("what a later version calls it"),
}
# Functions that ranks call while loading, with the module or class in which to patch them. Only rank 0 calls the first two.
PLACES: dict[str, tuple[Any, str]] = {
    "manifest": (load, "read_manifest"),
    "newest checkpoint": (load, "newest_checkpoint"),
    "checksums": (load, "verify"),
    "parameters": (logical_parameters, "_parameters_and_buffers"),
    "non-tensor content": (load, "plain_content"),
    "torch.load": (torch, "load"),
    "optimizer state": (load, "optimizer_state"),
    "shared record": (load, "SharedRecord"),
    "index": (tensors, "index_of_json"),
    "load plan": (load, "Restoration"),
    "tensors": (tensors.Reader, "read"),
    "random numbers": (load, "set_random_state"),
}
BY_RANK_0 = ("manifest", "newest checkpoint")


def one_rank_fails(path: Path, place: str, kind: str) -> tuple[str, bool]:
    """Make one rank fail at ``place`` while loading. Return the error that the calling rank raises, and whether its state
    changed."""
    run = Run(AXES, "fp32")
    run.step(0)
    save_checkpoint(path, run.model, run.optimizer, lr_scheduler=run.schedule)
    run.step(1)
    state = [run.model.state_dict(), run.optimizer.state_dict(), run.schedule.state_dict(), torch.get_rng_state()]
    before = content(state)
    failing = 0 if place in BY_RANK_0 else 1

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ERRORS[kind]

    with pytest.MonkeyPatch.context() as patch:
        if run.registry.global_rank == failing:
            patch.setattr(*PLACES[place], fail)
        with pytest.raises(Exception, match=r".+") as error:
            load_checkpoint(path, run.model, run.optimizer, lr_scheduler=run.schedule)
    state = [run.model.state_dict(), run.optimizer.state_dict(), run.schedule.state_dict(), torch.get_rng_state()]
    changed = content(state) != before
    load_checkpoint(path, run.model, run.optimizer, lr_scheduler=run.schedule)  # collectives of the ranks still match
    run.registry.close()
    return f"{type(error.value).__name__}: {error.value}", changed


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("place", PLACES)
def test_error_of_one_rank_while_loading_is_raised_on_every_rank(
    world: World, tmp_path: Path, place: str, kind: str
) -> None:
    text = str(ERRORS[kind])
    for message, changed in world.run(2, one_rank_fails, tmp_path, place, kind):
        assert text.strip("'") in message
        assert not changed


def hooked(path: Path) -> str:
    run = Run(AXES, "bf16")
    run.step(0)
    save_checkpoint(path, run.model, run.optimizer)
    run.step(1)

    def refuse(optimizer: Any) -> None:
        raise LookupError("a hook of the user's")

    before = content([run.model.state_dict(), run.optimizer.state_dict()])
    if run.registry.global_rank == 1:
        run.optimizer.optimizer.register_load_state_dict_post_hook(refuse)
    with pytest.raises(Exception, match="a hook of the user's") as error:
        load_checkpoint(path, run.model, run.optimizer)
    assert content([run.model.state_dict(), run.optimizer.state_dict()]) == before
    run.registry.close()
    return type(error.value).__name__


def test_load_hook_that_raises_on_one_rank_leaves_all_ranks_unchanged(world: World, tmp_path: Path) -> None:
    assert world.run(2, hooked, tmp_path) == ["RuntimeError", "LookupError"]


Writes = dict[str, tuple[Any, str]]
WHILE_SAVING: Writes = {
    "buffers": (contents, "digest"),
    "other files": (save, "write_summed"),
    "tensor files": (tensors, "write_summed"),
}


def one_rank_fails_to_save(path: Path, place: str) -> str:
    run = Run(AXES, "fp32")
    run.model.register_buffer("seen", torch.ones(2))
    save_checkpoint(path, run.model, run.optimizer, extra=1)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("somewhere")

    broken: Callable[..., Any] = fail
    with pytest.MonkeyPatch.context() as patch:
        if run.registry.global_rank == 1:
            patch.setattr(*WHILE_SAVING[place], broken)
        with pytest.raises(Exception, match="somewhere"):
            save_checkpoint(path, run.model, run.optimizer, extra=2)
    found = load_checkpoint(path, run.model, run.optimizer)
    run.registry.close()
    return f"{found} {sorted(entry.name for entry in path.iterdir())}"


@pytest.mark.parametrize("place", WHILE_SAVING)
def test_error_of_one_rank_while_saving_is_raised_on_every_rank(world: World, tmp_path: Path, place: str) -> None:
    assert set(world.run(2, one_rank_fails_to_save, tmp_path, place)) == {"1 ['meshstep-00000001']"}
