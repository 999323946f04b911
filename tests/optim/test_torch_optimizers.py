"""Every torch optimizer with every argument does in a `ParallelOptimizer` what torch's own tests ask of it alone."""

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
from torch_optimizers import ARGUMENTS, Kind, Net, Wrap, kinds_of, numbers, same, train, wrapper

every_name = pytest.mark.parametrize("name", ARGUMENTS)
every_optimizer = pytest.mark.parametrize("kind", [Kind(name, {}) for name in ARGUMENTS], ids=str)


@pytest.fixture(scope="module")
def wrap() -> Iterator[Wrap]:
    with ProcessGroupRegistry(Topology()) as registry:
        yield wrapper(registry)


# Steps ------------------------------------------------------------------------------------------------------------------


def seven_steps(kind: Kind, wrapped: Wrap | None, dtype: torch.dtype) -> list[Any]:
    """One without gradients, and two in which a layer is frozen."""
    model = Net(kind.name, dtype)
    optimizer = kind.plain(model.parameters())
    optimizer = optimizer if wrapped is None else wrapped(optimizer)
    seen = []
    for step in range(7):
        optimizer.zero_grad()
        model.layers[2].requires_grad_(step not in (3, 4))
        if step != 2:
            model.loss(step).backward()
        optimizer.step()
        seen.append(numbers(model, optimizer))
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@every_name
def test_steps_are_torchs_to_the_bit(wrap: Wrap, name: str, dtype: torch.dtype) -> None:
    for kind in kinds_of(name):
        plain = seven_steps(kind, None, dtype)
        assert same(seven_steps(kind, wrap, dtype), plain), kind
        assert not same(plain[1][0], plain[0][0]), f"{kind} should move"
        assert same(plain[2], plain[1]), "without gradients nothing does"


@every_name
def test_param_groups_keep_their_own_arguments(wrap: Wrap, name: str) -> None:
    def run(kind: Kind, wrapped: bool) -> list[Any]:
        model = Net(kind.name)
        groups = model.groups()
        groups[0]["lr"] = 0.003
        if "weight_decay" in kind.of([nn.Parameter(torch.ones(2, 2))]).defaults:
            groups[1]["weight_decay"] = 0.2
        optimizer = kind.plain(groups)
        optimizer = wrap(optimizer) if wrapped else optimizer
        if model.gain is not None:
            optimizer.add_param_group({"params": [model.gain], "lr": 0.0})
        train(model, optimizer, 0, 4)
        return [numbers(model, optimizer), [{**group, "params": 0} for group in optimizer.param_groups]]

    for kind in kinds_of(name):
        assert same(run(kind, wrapped=True), run(kind, wrapped=False)), kind


@every_optimizer
def test_gradients_of_zeros_and_missing_ones_are_torchs(wrap: Wrap, kind: Kind) -> None:
    def run(wrapped: bool) -> list[Any]:
        model = Net(kind.name)
        optimizer = wrap(kind.plain(model.parameters())) if wrapped else kind.plain(model.parameters())
        optimizer.step()
        for param in model.layers[0].parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        return numbers(model, optimizer)

    assert same(run(wrapped=True), run(wrapped=False))


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "NAdam", "RMSprop"])
def test_parameters_that_are_not_contiguous_are_stepped_as_torch_does(wrap: Wrap, name: str) -> None:
    def run(wrapped: bool) -> list[Tensor]:
        torch.manual_seed(3)
        params = [nn.Parameter(torch.randn(10, 5, 2)[..., 0]), nn.Parameter(torch.randn(10, 2)[..., 0])]
        optimizer = getattr(torch.optim, name)(params)
        optimizer = wrap(optimizer) if wrapped else optimizer
        for _ in range(5):
            optimizer.zero_grad()
            (params[0].mv(torch.arange(5.0)) + params[1]).square().sum().backward()
            optimizer.step()
        return [param.detach() for param in params]

    assert same(run(wrapped=True), run(wrapped=False))


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_a_differentiable_step_is_torchs(wrap: Wrap, name: str) -> None:
    def run(wrapped: bool) -> Tensor:
        param = torch.ones(3, requires_grad=True).clone()
        optimizer = getattr(torch.optim, name)([param], lr=0.1, differentiable=True)
        optimizer = wrap(optimizer) if wrapped else optimizer
        param.grad = torch.tensor([1.0, 2.0, 3.0])
        optimizer.step()
        return param.detach()

    assert same(run(wrapped=True), run(wrapped=False))


# State dicts ------------------------------------------------------------------------------------------------------------


def given(model: Net, named: bool) -> Any:
    return model.named_parameters() if named else model.parameters()


@pytest.mark.parametrize(("named", "named_there"), [(True, True), (True, False), (False, True), (False, False)])
@every_optimizer
def test_a_state_dict_continues_to_the_bit_in_another_optimizer(
    wrap: Wrap, kind: Kind, named: bool, named_there: bool
) -> None:
    model = Net(kind.name)
    optimizer = wrap(kind.plain(given(model, named)))
    train(model, optimizer, 0, 5)
    other_model = Net(kind.name)
    other_model.load_state_dict(model.state_dict())
    other = wrap(kind.plain(given(other_model, named_there)))
    saved = copy.deepcopy(optimizer.state_dict())  # its tensors are the optimizer's, as torch's are
    other.load_state_dict(saved)
    assert same(content(saved), content(optimizer.state_dict())), "to load it must not change it"
    for first in range(5, 10):
        train(model, optimizer, first, first + 1)
        train(other_model, other, first, first + 1)
        assert same(numbers(model, optimizer), numbers(other_model, other))
    names = [name for name, _ in model.named_parameters()]
    if named or named_there:
        assert other.state_dict()["param_groups"][0]["param_names"] == names
    assert same(content(other.state_dict()), content(optimizer.state_dict()))


def content(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Without names, which are optional, and coordinates, which are of another type in a copy."""
    groups = [{**group, "param_names": None} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups, "meshstep": {**state_dict["meshstep"], "coordinates": None}}


@every_optimizer
def test_a_state_dict_is_stored_and_read_by_weights_only(wrap: Wrap, kind: Kind) -> None:
    model = Net(kind.name)
    optimizer = wrap(kind.plain(model.parameters()))
    train(model, optimizer, 0, 3)
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    stream.seek(0)
    read = torch.load(stream, weights_only=True)
    assert same(content(read), content(optimizer.state_dict()))


NEW_FLAGS = ("maximize", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")


@every_name
def test_state_dicts_of_older_versions_load_as_in_torch(wrap: Wrap, name: str) -> None:
    """They have no newer flags, and steps that are plain numbers."""

    def run(kind: Kind, wrapped: bool) -> list[Any]:
        model = Net(kind.name)
        optimizer = wrap(kind.plain(model.parameters())) if wrapped else kind.plain(model.parameters())
        train(model, optimizer, 0, 3)
        old = copy.deepcopy(optimizer.state_dict())
        for group in old["param_groups"]:
            for flag in () if kind.name == "Adafactor" else NEW_FLAGS:  # it has had its flags from the beginning
                group.pop(flag, None)
        for state in old["state"].values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].item()
        optimizer.load_state_dict(old)
        train(model, optimizer, 3, 5)
        return numbers(model, optimizer)

    for kind in kinds_of(name):
        assert same(run(kind, wrapped=True), run(kind, wrapped=False)), kind


# Hooks ------------------------------------------------------------------------------------------------------------------


@every_optimizer
def test_hooks_of_state_dicts_run_in_torchs_order(wrap: Wrap, kind: Kind) -> None:
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
def test_hooks_of_steps_run_once_a_step_in_torchs_order(wrap: Wrap, kind: Kind) -> None:
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


# The object -------------------------------------------------------------------------------------------------------------


@every_name
def test_a_deep_copy_has_all_that_is_public_and_the_same_state(wrap: Wrap, name: str) -> None:
    for kind in kinds_of(name):
        model = Net(name)
        optimizer = wrap(kind.plain(model.parameters()))
        train(model, optimizer, 0, 3)
        assert optimizer.state or name == "SGD", "there should be something to copy"
        other_model, other = copy.deepcopy((model, optimizer))
        assert {key for key in vars(other) if key[0] != "_"} == {key for key in vars(optimizer) if key[0] != "_"}
        assert same(numbers(other_model, other), numbers(model, optimizer)), kind
        assert name in repr(other)


# Refused ----------------------------------------------------------------------------------------------------------------


def test_what_needs_a_closure_is_refused_in_words_when_it_is_made(wrap: Wrap) -> None:
    inner = torch.optim.LBFGS([nn.Parameter(torch.ones(2))])
    with pytest.raises(TypeError, match=r"LBFGS evaluates the loss itself.*take an optimizer that steps without"):
        wrap(inner)
    assert len(inner.param_groups) == 1


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_are_refused_in_words(wrap: Wrap) -> None:
    param = nn.Parameter(torch.ones(3, 2))
    optimizer = wrap(torch.optim.SparseAdam([param]))
    param.grad = torch.sparse_coo_tensor([[0]], torch.ones(1, 2), (3, 2))
    with pytest.raises(TypeError, match=r"is sparse .*; build the layer with sparse=False"):
        optimizer.step()
    assert torch.equal(param.detach(), torch.ones(3, 2))


@every_optimizer
def test_complex_parameters_are_refused_in_words(wrap: Wrap, kind: Kind) -> None:
    inner = kind.plain([nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))])
    with pytest.raises(TypeError, match=r"is complex .*; give its real view \(torch.view_as_real\)"):
        wrap(inner)


def test_closures_are_refused_in_words(wrap: Wrap) -> None:
    optimizer = wrap(torch.optim.SGD([nn.Parameter(torch.ones(2))]))
    assert isinstance(optimizer, ParallelOptimizer)
    with pytest.raises(ValueError, match="step takes no closure"):
        optimizer.step(lambda: 1.0)
