"""Optimizers of torch, stepped in a `ParallelOptimizer` in the situations that torch's own tests cover."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import ProcessGroupRegistry, Topology
from torch import Tensor, nn
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


def seven_steps(kind: Kind, wrapped: Wrap | None, dtype: torch.dtype) -> list[Any]:
    """Run seven steps, one without gradients and two with a frozen layer; return parameters and states after each."""
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


@pytest.mark.long
@pytest.mark.default_cases(13)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@every_name
def test_wrapped_steps_of_torch_optimizers_are_bitwise_identical_to_bare_steps(
    wrap: Wrap, name: str, dtype: torch.dtype
) -> None:
    for kind in kinds_of(name):
        plain = seven_steps(kind, None, dtype)
        assert same(seven_steps(kind, wrap, dtype), plain), kind
        assert not same(plain[1][0], plain[0][0]), f"{kind} must change the weights"
        assert same(plain[2], plain[1]), "a step without gradients must change nothing"


@pytest.mark.long
@every_name
def test_param_groups_keep_their_own_options(wrap: Wrap, name: str) -> None:
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
        try:
            plain = run(kind, wrapped=False)
        except KeyError as error:
            pytest.skip(f"torch {torch.__version__}'s {name} can't step a group that was added (KeyError: {error})")
        assert same(run(kind, wrapped=True), plain), kind


@every_optimizer
def test_zero_and_missing_gradients_give_updates_of_torch(wrap: Wrap, kind: Kind) -> None:
    def run(wrapped: bool) -> list[Any]:
        model = Net(kind.name)
        optimizer = wrap(kind.plain(model.parameters())) if wrapped else kind.plain(model.parameters())
        for given in (model.layers[:1], model.layers[:0], model.layers[:1], model.layers):
            optimizer.zero_grad()
            for param in given.parameters():
                param.grad = torch.zeros_like(param)
            optimizer.step()
        return numbers(model, optimizer)

    assert same(run(wrapped=True), run(wrapped=False))


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "NAdam", "RMSprop"])
def test_noncontiguous_parameters_get_updates_of_torch(wrap: Wrap, name: str) -> None:
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
def test_differentiable_step_matches_torch(wrap: Wrap, name: str) -> None:
    def run(wrapped: bool) -> Tensor:
        param = torch.ones(3, requires_grad=True).clone()
        optimizer = getattr(torch.optim, name)([param], lr=0.1, differentiable=True)
        optimizer = wrap(optimizer) if wrapped else optimizer
        param.grad = torch.tensor([1.0, 2.0, 3.0])
        optimizer.step()
        return param.detach()

    assert same(run(wrapped=True), run(wrapped=False))


# Rejected and accepted uses -------------------------------------------------------------------------------------------


def test_optimizer_that_requires_closure_is_rejected(wrap: Wrap) -> None:
    inner = torch.optim.LBFGS([nn.Parameter(torch.ones(2))])
    with pytest.raises(TypeError, match=r"LBFGS.step requires a closure.*use an optimizer that steps without"):
        wrap(inner)
    assert len(inner.param_groups) == 1


def test_optimizer_whose_step_has_no_argument_is_accepted(wrap: Wrap) -> None:
    class SignDescent(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for param in group["params"]:
                    param -= group["lr"] * param.grad.sign()

    param = nn.Parameter(torch.ones(2))
    optimizer = wrap(SignDescent([param], {"lr": 0.25}))
    param.grad = torch.tensor([2.0, -3.0])
    optimizer.step()
    assert param.tolist() == [0.75, 1.25]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_are_rejected(wrap: Wrap) -> None:
    param = nn.Parameter(torch.ones(3, 2))
    optimizer = wrap(torch.optim.SparseAdam([param]))
    param.grad = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1, 2), (3, 2))
    with pytest.raises(TypeError, match=r"is sparse .*; build the layer with sparse=False"):
        optimizer.step()
    assert torch.equal(param.detach(), torch.ones(3, 2))


@every_optimizer
def test_complex_parameters_are_rejected(wrap: Wrap, kind: Kind) -> None:
    inner = kind.plain([nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))])
    with pytest.raises(TypeError, match=r"is complex .*; use a real parameter, and torch.view_as_complex in forward"):
        wrap(inner)


def test_step_with_closure_is_rejected(wrap: Wrap) -> None:
    optimizer = wrap(torch.optim.SGD([nn.Parameter(torch.ones(2))]))
    assert isinstance(optimizer, ParallelOptimizer)
    with pytest.raises(ValueError, match="step takes no closure"):
        optimizer.step(lambda: 1.0)
