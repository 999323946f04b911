"""State dicts, hooks and copies of torch's optimizers in a `ParallelOptimizer`, checked as in torch's own tests."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import ProcessGroupRegistry, Topology
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch_optimizers import (
    Kind,
    Net,
    Wrap,
    every_name,
    every_optimizer,
    kinds_of,
    numbers,
    same,
    train,
    wrapper,
)


@pytest.fixture(autouse=True)
def _torchs_kernels(torchs_kernels: None) -> None:
    """Use torch's kernels, because results are compared bitwise."""


@pytest.fixture(scope="module")
def wrap() -> Iterator[Wrap]:
    with ProcessGroupRegistry(Topology()) as registry:
        yield wrapper(registry)


# State dicts ------------------------------------------------------------------------------------------------------------


def given(model: Net, named: bool) -> Any:
    return model.named_parameters() if named else model.parameters()


@pytest.mark.parametrize(("named", "named_there"), [(True, True), (True, False), (False, True), (False, False)])
@every_optimizer
def test_state_dict_of_torch_optimizer_resumes_bitwise(wrap: Wrap, kind: Kind, named: bool, named_there: bool) -> None:
    model = Net(kind.name)
    optimizer = wrap(kind.plain(given(model, named)))
    train(model, optimizer, 0, 5)
    other_model = Net(kind.name)
    other_model.load_state_dict(model.state_dict())
    other = wrap(kind.plain(given(other_model, named_there)))
    saved = copy.deepcopy(optimizer.state_dict())  # `state_dict` returns the optimizer's own tensors, as in torch
    other.load_state_dict(saved)
    assert same(content(saved), content(optimizer.state_dict())), "load_state_dict must not change its argument"
    for first in range(5, 10):
        train(model, optimizer, first, first + 1)
        train(other_model, other, first, first + 1)
        assert same(numbers(model, optimizer), numbers(other_model, other))
    names = [name for name, _ in model.named_parameters()]
    if named or named_there:
        assert other.state_dict()["param_groups"][0]["param_names"] == names
    assert same(content(other.state_dict()), content(optimizer.state_dict()))


def content(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict with the names and coordinates set to None, for comparisons: names are optional, and the
    coordinates of a copied state dict have another type."""
    groups = [{**group, "param_names": None} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups, "meshstep": {**state_dict["meshstep"], "coordinates": None}}


@every_optimizer
def test_state_dict_can_be_loaded_with_weights_only(wrap: Wrap, kind: Kind) -> None:
    model = Net(kind.name)
    optimizer = wrap(kind.plain(model.parameters()))
    train(model, optimizer, 0, 3)
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    stream.seek(0)
    read = torch.load(stream, weights_only=True)
    assert same(content(read), content(optimizer.state_dict()))


NEW_FLAGS = ("maximize", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")


@pytest.mark.long
@every_name
def test_state_dicts_of_older_torch_versions_load_as_in_torch(wrap: Wrap, name: str) -> None:
    """State dicts of older versions lack newer flags, and their step counts are Python numbers."""

    def run(kind: Kind, wrapped: bool) -> list[Any]:
        model = Net(kind.name)
        optimizer = wrap(kind.plain(model.parameters())) if wrapped else kind.plain(model.parameters())
        train(model, optimizer, 0, 3)
        old = copy.deepcopy(optimizer.state_dict())
        for group in old["param_groups"]:
            for flag in () if kind.name == "Adafactor" else NEW_FLAGS:  # Adafactor has always had its flags
                group.pop(flag, None)
        for state in old["state"].values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].item()
        optimizer.load_state_dict(old)
        train(model, optimizer, 3, 5)
        return numbers(model, optimizer)

    for kind in kinds_of(name):
        assert same(run(kind, wrapped=True), run(kind, wrapped=False)), kind


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        (5, 1.0, r"a key of param_groups\[0\] is 5"),
        ("maximize", 3, r"param_groups\[0\]\['maximize'\] is 3"),
        ("lr", -1.0, r"param_groups\[0\]\['lr'\] is -1.0"),
    ],
)
def test_loading_param_group_with_invalid_key_or_value_raises_and_keeps_settings(
    name: object, value: object, told: str
) -> None:
    model = nn.Linear(3, 2)
    optimizer = ParallelOptimizer(torch.optim.AdamW(model.parameters()), ProcessGroupRegistry(Topology()))
    saved = optimizer.state_dict()
    saved["param_groups"][0][name] = value
    with pytest.raises(ValueError, match=told):
        optimizer.load_state_dict(saved)
    assert name not in optimizer.param_groups[0] or optimizer.param_groups[0][name] != value


# Hooks ------------------------------------------------------------------------------------------------------------------


@every_optimizer
def test_state_dict_hooks_run_in_order_of_torch(wrap: Wrap, kind: Kind) -> None:
    def run(wrapped: bool) -> list[object]:
        model = Net(kind.name)
        optimizer = wrap(kind.plain(model.parameters())) if wrapped else kind.plain(model.parameters())
        seen: list[object] = []

        def note(what: str, *_: Any) -> None:
            seen.append(what)

        def rate(value: float, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            changed = copy.deepcopy(state_dict)
            changed["param_groups"][0]["lr"] = value
            seen.append(value)
            return changed

        def mark(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            return {**state_dict, "marked": True}

        optimizer.register_state_dict_pre_hook(partial(note, "before saving"))
        optimizer.register_state_dict_post_hook(mark)
        optimizer.register_load_state_dict_pre_hook(partial(rate, 0.002))
        optimizer.register_load_state_dict_pre_hook(partial(rate, 0.003), prepend=True)
        optimizer.register_load_state_dict_post_hook(partial(note, "after loading"))
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        return [*seen, saved["marked"], optimizer.param_groups[0]["lr"]]

    assert run(wrapped=True) == run(wrapped=False) == ["before saving", 0.003, 0.002, "after loading", True, 0.002]


@every_optimizer
def test_step_hooks_run_once_per_step_in_order_of_torch(wrap: Wrap, kind: Kind) -> None:
    model = Net(kind.name)
    optimizer = wrap(kind.plain(model.parameters()))
    seen: list[str] = []

    def note(what: str, given: torch.optim.Optimizer, *_: Any) -> None:
        assert given is optimizer
        seen.append(what)

    handles = [
        register_optimizer_step_pre_hook(partial(note, "global before")),
        register_optimizer_step_post_hook(partial(note, "global after")),
        optimizer.register_step_pre_hook(partial(note, "before")),
        optimizer.register_step_post_hook(partial(note, "after")),
    ]
    try:
        train(model, optimizer, 0, 2)
    finally:
        for handle in handles:
            handle.remove()
    assert seen == ["global before", "before", "after", "global after"] * 2
    train(model, optimizer, 2, 3)
    assert len(seen) == 8


# Copies ---------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@every_name
def test_deep_copy_has_same_public_attributes_and_state(wrap: Wrap, name: str) -> None:
    for kind in kinds_of(name):
        model = Net(name)
        optimizer = wrap(kind.plain(model.parameters()))
        train(model, optimizer, 0, 3)
        assert optimizer.state or name == "SGD", "the optimizer must have state to copy"
        other_model, other = copy.deepcopy((model, optimizer))
        assert {key for key in vars(other) if key[0] != "_"} == {key for key in vars(optimizer) if key[0] != "_"}
        assert same(numbers(other_model, other), numbers(model, optimizer)), kind
        assert name in repr(other)
