"""`prove` on correct models of random layouts, and on models with planted mistakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from meshstep.optim.proof import prove as prove_module
from meshstep.optim.proof.explain import ForwardOrder
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, copy_to, declare, reduce_from
from meshstep.testing import Proof, prove
from mutants import Outcome, mutated
from proof_models import drawn_model, proved
from properties import number_of_cases
from torch import Tensor, nn
from torch.nn import functional as F
from world import World, WorldError

# Seeds of the random models; tests/benchmarks/mutants.py tests other seeds.
RIGHT, WRONG = (range(9000, 9000 + number_of_cases(count)) for count in (16, 36))


def test_prove_reports_nothing_for_correct_models(world: World) -> None:
    proofs = world.run_each(proved, [(drawn_model(number).topology.world_size, (number,)) for number in RIGHT])
    for number, (first, *others) in zip(RIGHT, proofs, strict=True):
        assert first.is_correct, f"{drawn_model(number)}: {first}"
        assert first.proved
        assert not first.undecided
        assert all(other == first for other in others)


@pytest.mark.long
def test_prove_finds_every_planted_mistake_and_most_causes(world: World) -> None:
    calls = [(drawn_model(number).topology.world_size, (number,)) for number in WRONG]
    made: list[Outcome] = []
    for number, outcomes in zip(WRONG, world.run_each(mutated, calls), strict=True):
        first = outcomes[0]
        assert all(outcome == first for outcome in outcomes)
        if first is not None:
            assert first.found, f"{drawn_model(number)}: {first}"
            assert first.named, f"{drawn_model(number)}: {first}"
            made.append(first)
    assert len(made) >= len(WRONG) * 5 / 9
    wrong = [outcome for outcome in made if not outcome.cause]
    assert len(wrong) <= len(made) // 10, wrong


# One mistake each -------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A replicated linear layer and norm, then two weights sharded over ``tensor``, and a replicated bias."""

    def __init__(self, registry: ProcessGroupRegistry, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.registry = registry
        self.first = nn.Linear(5, 6, dtype=dtype)
        self.norm = nn.LayerNorm(6, dtype=dtype)
        up, down = torch.randn(8, 6, dtype=dtype) / 2, torch.randn(6, 8, dtype=dtype) / 2
        size, rank = registry.size("tensor"), registry.rank("tensor")
        self.up = nn.Parameter(up.chunk(size)[rank].clone())
        self.down = nn.Parameter(down.chunk(size, 1)[rank].clone())
        self.bias = nn.Parameter(torch.randn(6, dtype=dtype))
        declare(self, {"*": P(), "up": P("tensor"), "down": P(None, "tensor")})

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        hidden = torch.tanh(copy_to(x, self.registry, "tensor") @ self.up.t())
        x = x + reduce_from(hidden @ self.down.t(), self.registry, "tensor") + self.bias
        return x.square().mean()


def _net(
    change: Callable[[Net], None] | None = None, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Proof, dict[str, Tensor]]:
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        net = Net(registry, dtype)
        if change is not None:
            change(net)
        x = torch.randn(7, 5, dtype=dtype, generator=torch.Generator().manual_seed(registry.rank("data")))
        proof = prove(net, lambda net: net(x), registry, **options)
        return proof, {name: param.detach() for name, param in net.named_parameters()}


def test_prove_of_correct_model_needs_at_most_seven_forwards(world: World) -> None:
    proof = world.run(4, _net)[0][0]
    assert proof.is_correct
    assert len(proof.proved) == 7
    assert proof.forwards <= 7  # one with backward, two to measure rounding, two step sizes, ...
    assert str(proof) == f"7 parameters are right, in {proof.forwards} forwards"
    proof.check()


def _net_asked_for_its_order() -> list[int]:
    """Return how often the order of modules is gathered for a correct and for a wrong model."""
    made = []
    for change in (None, _slightly_off):
        with mock.patch.object(prove_module, "ForwardOrder", side_effect=ForwardOrder) as order:
            _net(change)
        made.append(order.call_count)
    return made


def test_prove_gathers_module_order_only_for_wrong_models(world: World) -> None:
    assert world.run(4, _net_asked_for_its_order) == [[0, 1]] * 4


def _detached(net: Net) -> None:
    net.first.register_forward_hook(lambda module, inputs, output: output.detach())


def _bias_on_all(net: Net) -> None:
    def forward(x: Tensor) -> Tensor:
        x = net.norm(net.first(x))
        hidden = torch.tanh(copy_to(x, net.registry, "tensor") @ net.up.t())
        return (x + reduce_from(hidden @ net.down.t() + net.bias, net.registry, "tensor")).square().mean()

    net.forward = forward  # type: ignore[method-assign]


def _no_copy_to(net: Net) -> None:
    def forward(x: Tensor) -> Tensor:
        x = net.norm(net.first(x))
        hidden = torch.tanh(x @ net.up.t())
        return (x + reduce_from(hidden @ net.down.t(), net.registry, "tensor") + net.bias).square().mean()

    net.forward = forward  # type: ignore[method-assign]


def _no_sum(net: Net) -> None:
    def forward(x: Tensor) -> Tensor:
        x = net.norm(net.first(x))
        return (x + torch.tanh(x @ net.up.t()) @ net.down.t() + net.bias).square().mean()

    net.forward = forward  # type: ignore[method-assign]


def _other_seed(net: Net) -> None:
    with torch.no_grad():
        net.first.weight += 0.1 * net.registry.rank("data")


def _slightly_off(net: Net) -> None:
    net.down.register_hook(lambda gradient: gradient * 1.0001)


def _held_by_all(net: Net) -> None:
    annotate(net.bias, P(owned={"tensor": 0}))


@pytest.mark.parametrize(
    ("change", "cause", "axes", "names"),
    [
        (_detached, "no gradient comes", (), {"first.weight", "first.bias"}),
        (_bias_on_all, "added on every rank", ("tensor",), {"bias"}),
        (_no_copy_to, "a sum is missing", ("tensor",), {"first.weight", "first.bias", "norm.weight", "norm.bias"}),
        (_no_sum, "forward differs", ("tensor",), {"the forward"}),
        (_other_seed, "copies differ", ("data",), {"first.weight"}),
        (_slightly_off, "counted several times", (), {"down"}),
        (_held_by_all, "held by others", (), {"bias"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_prove_names_cause_axes_and_parameters_of_mistake(
    world: World, change: Callable[[Net], None], cause: str, axes: tuple[str, ...], names: set[str]
) -> None:
    proofs = [proof for proof, _ in world.run(4, _net, change)]
    assert all(proof == proofs[0] for proof in proofs)
    assert {finding.name for finding in proofs[0].findings} == names
    assert {finding.cause for finding in proofs[0].findings} == {cause}, proofs[0]
    if axes:
        assert {finding.axes for finding in proofs[0].findings} == {axes}
    with pytest.raises(AssertionError, match="wrong:"):
        proofs[0].check()
    assert proofs[0].to_json()["findings"][0]["cause"] == cause
    header = "the forward is wrong:" if names == {"the forward"} else "wrong:"
    assert header in str(proofs[0]).partition("\n")[0]
    assert ("the size of no mesh axis" in str(proofs[0])) is (change is _slightly_off)


def _declared(net: Net) -> None:
    annotate(net.up, P())
    annotate(net.norm.weight, P(partial="tensor"))
    annotate(net.down, P(partial="tensor"))
    annotate(net.bias, P("tensor"))


def test_prove_names_cause_and_inferred_spec_of_wrong_declarations(world: World) -> None:
    proof = world.run(4, _net, _declared)[0][0]
    found = {finding.name: (finding.cause, finding.inferred, finding.factor) for finding in proof.findings}
    assert found == {
        "up": ("split, not declared", P("tensor"), None),
        "norm.weight": ("counted several times", P(), 2.0),
        "down": ("split, not declared", P("tensor"), None),
        "bias": ("declared split, but a copy", P(), None),
    }
    unsure = {finding.name for finding in proof.findings if "shards another dim" in finding.text}
    assert unsure == {"up", "down"}  # their real specs are P("tensor") and P(None, "tensor")


# Several wrong parameters ---------------------------------------------------------------------------------------------


class Tower(nn.Module):
    """Twelve replicated layers, followed by a `Net`."""

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(5, 5, dtype=torch.float64) for _ in range(12))
        self.net = Net(registry)
        declare(self.layers, {"*": P()})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        out: Tensor = self.net(x)
        return out


def _tower(change: Callable[[Tower], None]) -> Proof:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        tower = Tower(registry)
        change(tower)
        x = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        return prove(tower, lambda tower: tower(x), registry)


def _doubled_on_the_way(tower: Tower) -> None:
    tower.net.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2 - inputs[0].detach(),))


def _layers_declared_sharded(tower: Tower) -> None:
    for param in tower.layers.parameters():
        annotate(param, P("tensor"))


def _one_doubled(tower: Tower) -> None:
    tower.get_parameter("layers.7.weight").register_hook(lambda gradient: gradient * 2)


def test_prove_needs_at_most_twelve_forwards_per_wrong_parameter(world: World) -> None:
    first, *others = world.run(2, _tower, _doubled_on_the_way)
    wrong = {f"layers.{index}.{name}" for index in range(12) for name in ("weight", "bias")}
    assert {finding.name for finding in first.findings} == wrong
    assert first.forwards <= 12 * len(wrong)  # including the explanations and the search for the location
    assert all(other == first for other in others)


def test_prove_of_many_wrong_declarations_locates_no_wrong_backward(world: World) -> None:
    proof = world.run(2, _tower, _layers_declared_sharded)[0]
    searched = [finding.cause for finding in proof.findings if finding.text != prove_module.NOT_SEARCHED]
    assert searched == ["declared split, but a copy"] * 8
    assert len(proof.findings) == 24
    assert proof.where is None


def test_prove_finds_one_wrong_gradient_in_at_most_40_forwards(world: World) -> None:
    proof = world.run(2, _tower, _one_doubled)[0]
    assert [finding.name for finding in proof.findings] == ["layers.7.weight"]
    assert proof.findings[0].factor == pytest.approx(2.0)
    assert proof.forwards <= 40


class Pair(nn.Module):
    """A model of two scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.tensor([value], dtype=torch.float64)) for value in (0.7, 1.3))

    def forward(self) -> Tensor:
        return (self.one.sin() * 2 + self.other.exp()).sum()


def _pairs_doubled(seeds: int) -> list[set[str]]:
    with ProcessGroupRegistry(Topology(data=1)) as registry:
        model = Pair()
        declare(model, {"*": P()})
        for param in model.parameters():
            param.register_hook(lambda gradient: gradient * 2)
        proofs = [prove(model, lambda model: model(), registry, seed=seed) for seed in range(seeds)]
        return [{finding.name for finding in proof.findings} for proof in proofs]


def test_prove_finds_two_equally_wrong_parameters_for_60_seeds(world: World) -> None:
    """The random directions of the two parameters can have opposite signs, so that their errors nearly cancel."""
    assert world.run(1, _pairs_doubled, 60) == [[{"one", "other"}] * 60]


# ReLU kinks -----------------------------------------------------------------------------------------------------------


class Relu(nn.Module):
    """A model with so many ReLU kinks that all finite-difference steps except the smallest cross some kinks."""

    def __init__(self) -> None:
        super().__init__()
        width, hidden, depth = 96, 768, 2
        self.norms = nn.ModuleList(nn.LayerNorm(width, dtype=torch.float64) for _ in range(depth))
        self.ups = nn.ModuleList(nn.Linear(width, hidden, dtype=torch.float64) for _ in range(depth))
        self.downs = nn.ModuleList(nn.Linear(hidden, width, dtype=torch.float64) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(torch.relu(up(norm(x))))
        return x.square().mean()


def _relu(seed: int, factor: float) -> Proof:
    with ProcessGroupRegistry(Topology(data=1)) as registry:
        torch.manual_seed(seed)
        model = Relu()
        declare(model, {"*": P()})
        model.get_parameter("norms.1.bias").register_hook(lambda gradient: gradient * factor)
        x = torch.randn(192, 96, dtype=torch.float64)
        return prove(model, lambda model: model(x), registry, seed=seed)


@pytest.mark.parametrize("seed", range(3))
def test_prove_of_model_with_many_relu_kinks_finds_only_wrong_gradients(world: World, seed: int) -> None:
    (right,) = world.run(1, _relu, seed, 1.0)
    (wrong,) = world.run(1, _relu, seed, 1.01)
    assert right.is_correct, right
    assert not right.undecided
    assert [finding.name for finding in wrong.findings] == ["norms.1.bias"]
    assert wrong.findings[0].factor == pytest.approx(1.01, abs=1e-4)


# Dtypes -----------------------------------------------------------------------------------------------------------------


class Casting(nn.Module):
    """A model that casts to float32 inside its forward, as norm layers of large models do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6, dtype=dtype)
        self.gain = nn.Parameter(torch.rand(6, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        y = F.softmax(self.gain * normed.to(x.dtype), dim=-1, dtype=torch.float32).to(x.dtype)
        return (y * torch.arange(6, dtype=x.dtype)).mean()


def _casting(dtype: torch.dtype, hooked: float, proved_in: torch.dtype | None) -> tuple[Proof, bool]:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = Casting(dtype)
        declare(model, {"*": P()})
        before = [param.data for param in model.parameters()]
        model.gain.register_hook(lambda gradient: gradient * hooked)
        x = torch.randn(3, 6, dtype=dtype)
        proof = prove(model, lambda model: model(x), registry, dtype=proved_in)
        same = all(
            param.data.data_ptr() == was.data_ptr() for param, was in zip(model.parameters(), before, strict=True)
        )
        return proof, same and torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_prove_in_float64_supports_lower_precisions_and_leaves_model_unchanged(
    world: World, dtype: torch.dtype
) -> None:
    (right, kept), _ = world.run(2, _casting, dtype, 1.0, torch.float64)
    (wrong, _), _ = world.run(2, _casting, dtype, 1.001, torch.float64)
    assert right.is_correct
    assert kept
    assert [finding.name for finding in wrong.findings] == ["gain"]
    assert wrong.findings[0].factor == pytest.approx(1.001, abs=1e-5)


def test_prove_in_float32_finds_errors_of_ten_percent(world: World) -> None:
    (right, _), _ = world.run(2, _casting, torch.float32, 1.0, None)
    (wrong, _), _ = world.run(2, _casting, torch.float32, 1.1, None)
    assert right.is_correct
    assert [finding.name for finding in wrong.findings] == ["gain"]


@pytest.mark.long
def test_prove_of_bfloat16_model_rejects_dtype_none_and_float32(world: World) -> None:
    with pytest.raises(WorldError, match="too inexact for a derivative"):
        world.run(2, _casting, torch.bfloat16, 1.0, None)
    with pytest.raises(WorldError, match=r"give torch\.float64, or None"):
        world.run(2, _casting, torch.bfloat16, 1.0, torch.float32)


# Misuse -----------------------------------------------------------------------------------------------------------------


def _misused(kind: str) -> Proof:
    with ProcessGroupRegistry(Topology(data=2, tensor=1)) as registry:
        model = nn.Linear(3, 2, dtype=torch.float64)
        if kind != "undeclared":
            declare(model, {"*": P()})
        x = torch.ones(4, 3, dtype=torch.float64)
        losses: dict[str, Callable[[nn.Module], Any]] = {
            "number": lambda model: model(x).mean().item(),
            "none": lambda model: None if registry.rank("data") else model(x).mean(),
            "nan": lambda model: model(x).mean() * float("nan" if registry.rank("data") else 1),
            "vector": lambda model: model(x),
            "undeclared": lambda model: model(x).mean(),
        }
        return prove(model, losses[kind], registry)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("number", "loss_fn returned float; return the loss as a tensor"),
        ("none", "no rank at data=1 returned a loss"),
        ("nan", "the loss of rank 1 is nan"),
        ("vector", r"shape \(4, 2\); return the loss as a single number"),
        ("undeclared", "no spec is declared for weight, bias.*infer"),
    ],
)
def test_prove_raises_on_every_rank_for_invalid_loss_or_missing_specs(world: World, kind: str, text: str) -> None:
    with pytest.raises(WorldError, match=rf"(?s)2 of 2 ranks failed.*ranks 0-1.*{text}"):
        world.run(2, _misused, kind)


def test_prove_checks_at_most_max_parameters(world: World) -> None:
    proof = world.run(4, _net_of_few)[0]
    assert len(proof.proved) == 3
    assert len(proof.undecided) == 4


def _net_of_few() -> Proof:
    return _net(max_parameters=3)[0]


def test_prove_rejects_max_parameters_below_one() -> None:
    with pytest.raises(ValueError, match="max_parameters=0: give a number >= 1"):
        prove(nn.Linear(2, 2), lambda model: None, ProcessGroupRegistry(Topology()), max_parameters=0)
