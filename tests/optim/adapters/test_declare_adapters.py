"""`declare_adapters` on user-defined adapters, and checks that find mistakes in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lora_models import MAX_NORM, Options, adapted, full_weights, one_step, optimizer_of, reference
from meshstep.optim import ReplicaMismatchError
from meshstep.parallel import (
    ColumnParallelLinear,
    LoRA,
    P,
    ProcessGroupRegistry,
    RowParallelLinear,
    Topology,
    blocks,
    copy_to,
    declare,
    declare_adapters,
    random_factors,
    reduce_from,
    shard,
    spec_of,
    unshard,
)
from meshstep.parallel.interop.audit import audit
from meshstep.parallel.interop.dtensor import keep_specs
from meshstep.parallel.interop.local_parameters import local_tensor
from meshstep.testing import Proof, prove
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import linear
from world import World

R = 3


class Pair(nn.Module):
    """An adapter as users write it: two parameters beside a layer.

    ``wrong`` is a mistake in the forward: "no sum", "summed twice", or "" for none.
    """

    def __init__(self, layer: Any, registry: ProcessGroupRegistry, a: tuple[int, int], b: tuple[int, int], wrong: str):
        super().__init__()
        self.layer, self.registry, self.wrong = layer.requires_grad_(False), registry, wrong
        kwargs: Any = {"dtype": torch.float64}
        column = isinstance(layer, ColumnParallelLinear)
        self.column = column
        spec_a, spec_b = (P(), layer.spec) if column else (P(None, "tensor"), P())
        self.A = nn.Parameter(shard(torch.randn(*a, **kwargs) / 2, spec_a, registry))
        self.B = nn.Parameter(shard(torch.zeros(*b, **kwargs), spec_b, registry))

    def forward(self, x: Tensor) -> Tensor:
        hidden = linear(x, self.A)
        if self.wrong != "no sum":
            hidden = (copy_to if self.column else reduce_from)(hidden, self.registry, "tensor")
        if self.wrong == "summed twice":
            hidden = copy_to(hidden, self.registry, "tensor")
        result: Tensor = self.layer(x) + linear(hidden, self.B)
        return result


def pairs(registry: ProcessGroupRegistry, wrong: tuple[str, str] = ("", "")) -> nn.Module:
    torch.manual_seed(2)
    kwargs: Any = {"dtype": torch.float64}
    up = ColumnParallelLinear(8, 12, registry, blocks=(2, 1), **kwargs)
    down = RowParallelLinear(12, 8, registry, **kwargs)
    first = nn.Linear(8, 8, **kwargs).requires_grad_(False)
    declare(first, {"*": P()})
    model = nn.Sequential(
        LoRA(first, R, 3.0, registry),
        Pair(up, registry, (R, 8), (12, R), wrong[0]),
        nn.Tanh(),
        Pair(down, registry, (R, 12), (8, R), wrong[1]),
    )
    declare_adapters(model)
    return model


def loss_of(model: nn.Module) -> Tensor:
    x = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    result: Tensor = model(x)
    return (result - torch.ones(8, dtype=torch.float64)).square().mean()


def proved(wrong: tuple[str, str]) -> tuple[dict[str, P], Proof, str, bool]:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        model = pairs(registry, wrong)
        specs = {name: spec_of(param) for name, param in model.named_parameters() if param.requires_grad}
        proof = prove(model, loss_of, registry)
        with random_factors(model, registry) as names:
            loss_of(model).backward()
            audited = str(audit(model, registry))
        zero = all(not model.get_parameter(name).any() for name in names) and len(names) == 3
        return specs, proof, audited, zero


def test_declare_adapters_derives_lora_factor_specs_that_prove_accepts(world: World) -> None:
    for specs, proof, audited, zero in world.run(2, proved, ("", "")):
        assert specs == {
            "0.lora_A": P(),
            "0.lora_B": P(),
            "1.A": P(),
            "1.B": P(blocks("tensor", (2, 1))),
            "3.A": P(None, "tensor"),
            "3.B": P(),
        }
        assert proof.is_correct, proof
        assert {*proof.proved} == {*specs}, proof
        assert audited.endswith("match their declared layouts")
        assert zero, "the factors must be zero again"


@pytest.mark.parametrize(
    ("wrong", "name", "cause"),
    [
        (("no sum", ""), "1.A", "a sum is missing"),
        (("summed twice", ""), "1.A", "counted several times"),
        (("", "summed twice"), "3.A", "counted several times"),
    ],
)
def test_prove_names_adapter_factor_whose_gradient_sum_is_missing_or_doubled(
    world: World, wrong: tuple[str, str], name: str, cause: str
) -> None:
    """The gradient of a factor is not summed over the tensor ranks, or summed twice, as in some third-party adapters."""
    for _, proof, audited, _ in world.run(2, proved, wrong):
        found = {finding.name: finding for finding in proof.findings}
        assert name in found, proof
        assert found[name].cause == cause, proof
        assert found[name].axes == ("tensor",), proof
        if cause == "a sum is missing":
            assert f"{name}: declared P(), replicated over 'tensor', but the gradients differ" in audited


def test_prove_finds_row_parallel_adapter_without_sum_over_ranks(world: World) -> None:
    for _, proof, _, _ in world.run(2, proved, ("", "no sum")):
        assert [finding.cause for finding in proof.findings] == ["forward differs"], proof
        assert proof.findings[0].axes == ("tensor",)


# fully_shard ----------------------------------------------------------------------------------------------------------

FULLY_SHARDED = Options(("up", "down", "head"), blocks=1)


def fully_sharded() -> Any:
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        model: Any = adapted("data and tensor", registry, FULLY_SHARDED)
        first = full_weights(model, registry)
        with keep_specs(model):
            for layer in (model.up, model.down):
                fully_shard(layer, mesh=registry.device_mesh("data"))
            fully_shard(model, mesh=registry.device_mesh("data"))
        declare_adapters(model, registry)
        optimizer = optimizer_of(model, registry, data_parallel=model)
        norms = [one_step("data and tensor", model, optimizer, step) for step in range(10)]
        weights = {
            name: unshard(local_tensor(param), spec_of(param, registry.topology), registry)
            for name, param in model.named_parameters()
            if param.requires_grad
        }
        return first, norms, weights


def test_fully_sharded_adapters_train_like_dense_lora(world: World) -> None:
    for first, norms, weights in world.run(4, fully_sharded):
        expected_norms, expected = reference(first, FULLY_SHARDED)
        assert min(expected_norms) > MAX_NORM
        assert norms == pytest.approx(expected_norms, rel=1e-12)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-12, msg=name)


# Errors ---------------------------------------------------------------------------------------------------------------


def errors() -> list[str]:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        linear = nn.Linear(4, 4)
        calls: list[Callable[[], Any]] = [
            lambda: LoRA(linear, 2, 4.0, registry),
            lambda: LoRA(linear, 2, 4.0),
            lambda: LoRA(ColumnParallelLinear(4, 4, registry), 0, 4.0),
            lambda: LoRA(nn.LayerNorm(4), 2, 4.0, registry),
            lambda: declare_adapters(nn.Sequential(nn.Linear(4, 4)), registry),
            lambda: LoRA(_owned(nn.Linear(4, 4, bias=False)), 2, 4.0, registry),
        ]
        found = []
        for call in calls:
            with pytest.raises(ValueError, match=r".") as error:
                call()
            found.append(str(error.value))
        return found


def _owned(layer: nn.Module) -> nn.Module:
    declare(layer, {"weight": P(owned={"tensor": 0})})
    return layer


def test_lora_and_declare_adapters_reject_unsupported_layers_and_arguments(world: World) -> None:
    for texts in world.run(2, errors):
        undeclared, without_registry, rank, kind, none, owned = texts
        assert "the base layer: a parameter of shape (4, 4) has no spec; declare its layout" in undeclared
        assert (
            "is a Linear, which has no ProcessGroupRegistry; pass the registry of the model as registry="
            in without_registry
        )
        assert "r=0 must be a positive integer" in rank
        assert "is a LayerNorm without a weight of two dims" in kind
        assert (
            "found no adapter in Sequential: expected layers of PEFT or add_lora, or a module with two factors" in none
        )
        assert "so some ranks have no part of it, but an adapter needs a part on every rank" in owned


# The optimizer's comparison of replicas -------------------------------------------------------------------------------


def stepped(wrong: tuple[str, str], rules: dict[str, P]) -> str:
    """Make up to three steps. Return the first error with the index of its step, or "no error"."""
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        model = pairs(registry, wrong)
        declare(model, rules)
        optimizer = optimizer_of(model, registry)
        for step in range(3):
            optimizer.zero_grad()
            optimizer.backward(loss_of(model))
            try:
                optimizer.step()
            except ReplicaMismatchError as error:
                return f"step {step}: {error}"
        return "no error"


def test_step_error_names_adapter_factor_whose_gradient_is_not_summed(world: World) -> None:
    """Only the second step finds the difference: in the first step B is zero, so the gradient of A is zero on all ranks."""
    for error in world.run(2, stepped, ("no sum", ""), {}):
        assert error.startswith("step 1: "), error
        assert "1.A: the gradient differs along axis 'tensor'" in error
    assert world.run(2, stepped, ("", ""), {}) == ["no error"] * 2


def test_first_step_error_names_sharded_adapter_factor_declared_as_replicated(world: World) -> None:
    """With this spec, a checkpoint would contain only one rank's rows of B."""
    for error in world.run(2, stepped, ("", ""), {"1.B": P()}):
        assert error.startswith("step 0: "), error
        assert "1.B: the gradient differs along axis 'tensor'" in error
