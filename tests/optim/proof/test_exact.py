"""`assert_exact` on correct and wrong parallel models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshstep.optim import GradStats, ParallelOptimizer
from meshstep.parallel import P, ProcessGroupRegistry, Topology, copy_to, declare, reduce_from, shard
from meshstep.testing import assert_exact
from torch import Tensor, nn
from world import World

WIDTH, HIDDEN, BATCH, SCALE = 4, 8, 8, 3.0
TOPOLOGIES = [Topology(tensor=2), Topology(data=2, tensor=2), Topology(data=2), Topology(tensor=4)]


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(torch.tanh(self.fc1(self.norm(x))))
        return out


class Mine(nn.Module):
    """`Dense` sharded by hand without DTensors; ``up`` is stored as [in, out]. ``bug`` selects a planted error."""

    scale: Tensor
    shift: Tensor
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor

    def __init__(self, registry: ProcessGroupRegistry, bug: str = "") -> None:
        super().__init__()
        self.registry, self.bug = registry, bug
        self.tensor = "tensor" if "tensor" in registry.topology.axes else ""
        dense, axis = Dense(), self.tensor or None
        pieces = {
            "scale": (dense.norm.weight, P()),
            "shift": (dense.norm.bias, P()),
            "up": (dense.fc1.weight.t(), P(None, axis)),
            "up_bias": (dense.fc1.bias, P(axis)),
            "down": (dense.fc2.weight, P(None, axis)),
            "down_bias": (dense.fc2.bias, P()),
        }
        for name, (full, spec) in pieces.items():
            self.register_parameter(name, nn.Parameter(shard(full.detach(), spec, registry)))
        declare(self, {name: spec for name, (_, spec) in pieces.items()})

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.layer_norm(x, (WIDTH,), self.scale, self.shift)
        if self.tensor and self.bug != "no sum in backward":
            x = copy_to(x, self.registry, "tensor")
        hidden = torch.tanh(x @ self.up + self.up_bias)
        if self.bug == "gradient twice on rank 1" and dist.get_rank() == 1:
            hidden = 2 * hidden - hidden.detach()
        out = hidden @ self.down.t()
        if self.bug == "bias on every rank":
            return reduce_from(out + self.down_bias, self.registry, "tensor")
        return (reduce_from(out, self.registry, "tensor") if self.tensor else out) + self.down_bias


NAMES: dict[str, Any] = {
    "scale": "norm.weight",
    "shift": "norm.bias",
    "up": ("fc1.weight", torch.t),
    "up_bias": "fc1.bias",
    "down": "fc2.weight",
    "down_bias": "fc2.bias",
}


def batch() -> Tensor:
    return torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def backward(model: nn.Module, x: Tensor) -> nn.Module:
    (SCALE * model(x).square().mean()).backward()
    return model


def own_batch(registry: ProcessGroupRegistry) -> Tensor:
    return shard(batch(), P(registry.topology.data_axes), registry)


def compare(topology: Topology, bug: str = "", **options: Any) -> None:
    with ProcessGroupRegistry(topology) as registry:
        model, dense = Mine(registry, bug), Dense()
        options.setdefault("names", NAMES)
        assert_exact(
            lambda: backward(model, own_batch(registry)), lambda: backward(dense, batch()), registry, **options
        )


def explain(topology: Topology, bug: str = "", **options: Any) -> str:
    with pytest.raises(AssertionError) as error:
        compare(topology, bug, **options)
    return str(error.value)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=repr)
def test_assert_exact_passes_for_correct_model(world: World, topology: Topology) -> None:
    world.run(topology.world_size, compare, topology)


def renamed() -> None:
    compare(Topology(tensor=2), names=lambda name: NAMES[name])


def test_assert_exact_accepts_function_for_names_argument(world: World) -> None:
    world.run(2, renamed)


def test_assert_exact_names_gradients_made_wrong_by_missing_all_reduce(world: World) -> None:
    first, *others = world.run(4, explain, Topology(data=2, tensor=2), "no sum in backward")
    assert others == [first] * 3
    lines = first.splitlines()
    assert lines[0] == "values of the parallel model that differ from the dense model: 3"
    assert lines[1].startswith("the gradient of scale, ranks 0-3: rank ")
    assert lines[2].startswith("the gradient of shift, ranks 0-3: rank ")
    assert lines[3].startswith("the norm of the gradients: ")


def test_assert_exact_reports_factor_and_location_of_wrong_gradient(world: World) -> None:
    text = world.run(2, explain, Topology(tensor=2), "gradient twice on rank 1")[0]
    (line,) = [line for line in text.splitlines() if "gradient of up_bias" in line]
    assert line.startswith("the gradient of up_bias, rank 1: off by ")
    assert " of the shard 4+4 (offset+length): " in line
    assert line.endswith(": it is 2.0000 times the dense one")
    (line,) = [line for line in text.splitlines() if "gradient of up," in line]
    assert " of the shard 0,4+4,4 (offset+length): " in line
    assert "gradient of down," not in text


def test_assert_exact_finds_bias_added_on_every_rank(world: World) -> None:
    text = world.run(2, explain, Topology(tensor=2), "bias on every rank")[0]
    assert "the gradient of down_bias, ranks 0-1" in text


def test_assert_exact_reports_allowed_error_and_passes_within_large_atol(world: World) -> None:
    def allowed(text: str) -> list[float]:
        return [float(line.partition("allowed ")[2].partition(":")[0]) for line in text.splitlines()[1:]]

    strict = world.run(2, why_with, {"rtol": 1e-3})[0]
    looser = world.run(2, why_with, {"rtol": 1e-3, "atol": 1e-2})[0]
    for low, high in zip(allowed(strict), allowed(looser), strict=True):
        assert 0 < low < high
        assert high - low == pytest.approx(1e-2, rel=0.2)
    world.run(2, compare_with, {"atol": 1e3})


def why_with(options: dict[str, Any]) -> str:
    return explain(Topology(tensor=2), "gradient twice on rank 1", **options)


def compare_with(options: dict[str, Any]) -> None:
    compare(Topology(tensor=2), "gradient twice on rank 1", **options)


def gradients_are_as_backward_left_them() -> None:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model, dense = Mine(registry), Dense()
        backward(model, own_batch(registry))
        before = [(param.grad, None if param.grad is None else param.grad.clone()) for param in model.parameters()]
        assert_exact(lambda: model, lambda: backward(dense, batch()), registry, names=NAMES)
        for param, (grad, copy) in zip(model.parameters(), before, strict=True):
            assert param.grad is grad
            assert grad is not None
            assert copy is not None
            assert torch.equal(grad, copy)


def test_assert_exact_leaves_gradients_unchanged(world: World) -> None:
    world.run(2, gradients_are_as_backward_left_them)


# Complete steps -------------------------------------------------------------------------------------------------------


def steps(topology: Topology, max_norm: float, dense_norm: float, of_rank_1: float = 0.0, count: int = 3) -> None:
    with ProcessGroupRegistry(topology) as registry:
        model, dense = Mine(registry), Dense()
        mine = ParallelOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), registry, max_norm=max_norm)
        theirs = torch.optim.AdamW(dense.parameters(), lr=1e-2)

        def parallel_step() -> tuple[nn.Module, GradStats]:
            mine.zero_grad()
            mine.backward(SCALE * model(own_batch(registry)).square().mean())
            stats = mine.step()
            if registry.global_rank == 1:
                with torch.no_grad():
                    model.up_bias[0] += of_rank_1
            return model, stats

        def dense_step() -> tuple[nn.Module, Tensor]:
            theirs.zero_grad()
            backward(dense, batch())
            norm = nn.utils.clip_grad_norm_(dense.parameters(), dense_norm)
            theirs.step()
            return dense, norm

        assert_exact(parallel_step, dense_step, registry, names=NAMES, steps=count, rtol=1e-5)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=repr)
def test_assert_exact_passes_for_correct_clipped_steps(world: World, topology: Topology) -> None:
    world.run(topology.world_size, steps, topology, 0.5, 0.5)


def wrong_steps(*args: Any) -> str:
    with pytest.raises(AssertionError) as error:
        steps(Topology(tensor=2), *args)
    return str(error.value)


def test_assert_exact_finds_wrong_clipping_in_parameters(world: World) -> None:
    text = world.run(2, wrong_steps, 0.5, 1e-9)[0]
    assert "after step 1" in text
    assert "parameter scale, ranks 0-1" in text
    assert "norm of" not in text


def test_assert_exact_finds_wrong_element_on_one_rank(world: World) -> None:
    text = world.run(2, wrong_steps, 0.5, 0.5, 0.25)[0]
    assert text.splitlines()[0] == "values of the parallel model that differ from the dense model after step 1: 1"
    assert text.splitlines()[1].startswith("parameter up_bias, rank 1: off by 0.25 at [0] of the shard 4+4 ")


# Parameters that only some ranks hold ---------------------------------------------------------------------------------


class Stage(nn.Module):
    """One stage of a two-stage model. Each stage has its own layer and the tied parameters ``table`` and ``summed``.

    The gradient of ``summed`` is partial over ``row``. Only rank 0 of ``row`` in the last stage has ``bias``.
    """

    def __init__(self, registry: ProcessGroupRegistry, wrong: str) -> None:
        super().__init__()
        at = registry.coordinate
        full = of_all()
        specs = {
            f"layer{at['pipe']}": P("row"),
            "table": P(tied={"pipe": (0, -1)}),
            "summed": P(partial="row", tied={"pipe": (0, -1)}),
        }
        if at["row"] == 0 and at["pipe"] == 1:
            specs["bias"] = P(owned={"row": 0, "pipe": 1})
        for name, spec in specs.items():
            value, grad = full[name]
            param = nn.Parameter(shard(value, spec, registry))
            param.grad = shard(grad, spec, registry)
            if name in ("table", "summed"):
                param.grad *= 0.25 if at["pipe"] == 0 else 0.75
            if name == "summed":
                param.grad *= 1.5 if at["row"] == 0 else -0.5
            if name == wrong and registry.global_rank == 3:
                param.grad *= -1.0
            self.register_parameter(name, param)
        declare(self, specs)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, (value, grad) in of_all().items():
            param = nn.Parameter(value)
            param.grad = grad
            self.register_parameter(name, param)


def of_all() -> dict[str, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"layer0": (4, 3), "layer1": (6,), "table": (5, 2), "summed": (3,), "bias": (7,)}
    return {
        name: (torch.randn(shape, generator=generator).double(), torch.randn(shape, generator=generator).double())
        for name, shape in shapes.items()
    }


def stages(wrong: str = "") -> str:
    with ProcessGroupRegistry(Topology(pipe=2, row=2)) as registry:
        try:
            assert_exact(lambda: Stage(registry, wrong), Whole, registry)
        except AssertionError as error:
            return str(error)
        return ""


def test_assert_exact_supports_stages_owner_only_tied_and_partial_parameters(world: World) -> None:
    assert world.run(4, stages) == [""] * 4
    for name, ranks in (("layer1", "rank 3"), ("table", "ranks 1, 3"), ("summed", "ranks 0-3")):
        text = world.run(4, stages, name)[0]
        assert f"the gradient of {name}, {ranks}: " in text, text


# Rejected arguments ---------------------------------------------------------------------------------------------------


def refused(names: Any, error: type[Exception]) -> str:
    with pytest.raises(error) as found:
        compare(Topology(tensor=2), names=names)
    return str(found.value)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (
            {},
            "the dense model has no parameter 'scale', the counterpart of scale; give the name of the counterpart with",
        ),
        ({**NAMES, "shift": "norm.weight"}, "no rank has a counterpart of the dense model's norm.bias"),
        ({**NAMES, "shfit": "norm.bias"}, "names= contains shfit, which no rank's model has"),
    ],
    ids=["unknown", "missing", "misspelt"],
)
def test_assert_exact_rejects_wrong_names_on_every_rank(world: World, names: Any, told: str) -> None:
    first, second = world.run(2, refused, names, ValueError)
    assert told in first
    assert told in second


def misshapen() -> str:
    return explain(Topology(tensor=2), names={**NAMES, "up": "fc1.weight"})


def test_assert_exact_reports_shard_shape_that_contradicts_spec(world: World) -> None:
    text = world.run(2, misshapen)[0]
    assert "the gradient of up, ranks 0-1: rank 0: up: the shard has shape (4, 4), but P(None, 'tensor') gives " in text
    assert "the rank at {'tensor': 0} a shard of shape (8, 2) of the full shape (8, 4); declare the spec" in text


@pytest.mark.parametrize(
    ("parallel", "dense", "told"),
    [
        (lambda: (Dense(), 1.0), Dense, "both must return the same form"),
        (lambda: None, Dense, "a step returned NoneType"),
        (Dense, lambda: (1, 2, 3), "a step returned tuple"),
    ],
)
def test_assert_exact_rejects_unsupported_or_unequal_return_types_of_step(
    parallel: Callable[[], Any], dense: Callable[[], Any], told: str
) -> None:
    with pytest.raises(TypeError, match=told):
        assert_exact(parallel, dense, ProcessGroupRegistry(Topology(data=1)))


def not_finite() -> nn.Module:
    model = Dense()
    declare(model, {"*": P()})
    backward(model, batch())
    assert model.fc2.bias.grad is not None
    model.fc2.bias.grad[1] = math.nan
    return model


def test_assert_exact_fails_for_nan() -> None:
    with pytest.raises(AssertionError, match=r"gradient of fc2\.bias, rank 0: off by nan at \[1\]"):
        assert_exact(not_finite, lambda: backward(Dense(), batch()), ProcessGroupRegistry(Topology(data=1)))
