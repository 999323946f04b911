"""Optimizer state and master weights in torch's state-dict functions and DCP, on the same and other layouts."""

from __future__ import annotations

import copy
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dtensors import registry_of
from fully_sharded import adamw, sharded_net
from fully_sharded import data as rows
from meshstep.amp import Bf16, NaiveFp16
from meshstep.optim import ByPreviousNorm, HalfStates, ParallelOptimizer, Sharded, TorchStates
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, blocks, gather_from, shard
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import Shard, distribute_tensor
from world import World

Axes = tuple[tuple[str, int], ...]
KINDS: dict[str, tuple[Axes, dict[str, Any]]] = {
    "fully_shard": ((("data", 2),), {}),
    "fully_shard, bf16": ((("data", 2),), {"precision": "bf16"}),
    "replicas": ((("data", 2),), {}),
    "replicas, fp16": ((("data", 2),), {"precision": NaiveFp16(init_scale=4.0)}),
    "split": ((("tensor", 2),), {}),
    "split, bf16": ((("tensor", 2),), {"precision": "bf16"}),
    "ZeRO-1": ((("data", 2),), {"states": Sharded("data")}),
    "ZeRO-2, bf16": ((("data", 2),), {"states": Sharded("data", gradients=True), "precision": "bf16"}),
    "half states": ((("tensor", 2),), {"states": HalfStates()}),
    "rounded": ((("data", 2),), {"precision": Bf16(stochastic_rounding=True)}),
    "split masters": ((("data", 2),), {"precision": Bf16(split_masters=True)}),
    "ZeRO-1, split masters": ((("data", 2),), {"precision": Bf16(split_masters=True), "states": Sharded("data")}),
    "split, ZeRO-1": ((("data", 2), ("tensor", 2)), {"states": Sharded("data")}),
}


def ranks(kind: str) -> int:
    size: int = 2 ** len(KINDS[kind][0])
    return size


class Wide(nn.Module):
    """Two matrices, a vector and a scalar. The matrices are sharded over the ``tensor`` axis if there is one."""

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        self.registry = registry
        self.split = "tensor" in registry.topology.axes
        generator = torch.Generator().manual_seed(1)
        for name, shape in {"up": (6, 5), "bias": (6,), "down": (3, 6), "gain": ()}.items():
            full = torch.randn(shape, generator=generator)
            spec = {"up": P("tensor"), "down": P(None, "tensor")}.get(name, P()) if self.split else P()
            self.register_parameter(name, nn.Parameter(shard(full, spec, registry)))
            annotate(self.get_parameter(name), spec, name)

    def forward(self, x: Tensor) -> Tensor:
        up: Tensor = self.get_parameter("up")
        down: Tensor = self.get_parameter("down")
        if self.split:
            up, down = (
                gather_from(up, self.registry, "tensor", dim=0),
                gather_from(down, self.registry, "tensor", dim=1),
            )
        hidden = torch.tanh(x @ up.T + self.get_parameter("bias"))
        return (hidden @ down.T * self.get_parameter("gain")).square()


def built(registry: ProcessGroupRegistry, kind: str) -> tuple[nn.Module, ParallelOptimizer]:
    options = KINDS[kind][1]
    precision = options.get("precision", "fp32")
    if kind.startswith("fully_shard"):
        model: nn.Module = sharded_net(registry, torch.bfloat16 if precision == "bf16" else torch.float32)
    else:
        model = Wide(registry)
        if precision == "bf16":
            model.bfloat16()
        elif precision != "fp32":
            precision.prepare(model, registry)
    return model, ParallelOptimizer(adamw(model.parameters()), registry, max_norm=0.5, **options)


def train(model: nn.Module, optimizer: ParallelOptimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        optimizer.zero_grad()
        x = rows(10 * step + optimizer.registry.coordinate.get("data", 0)).to(next(model.parameters()).dtype)
        loss = model(x).float().mean()
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def saved_of(model: nn.Module, optimizer: ParallelOptimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, TorchStates(optimizer))}


def continued(kind: str, path: str, in_background: bool) -> None:
    """Save and load through DCP into a fresh model; training must continue bitwise identically."""
    with registry_of(KINDS[kind][0]) as registry:
        model, optimizer = built(registry, kind)
        train(model, optimizer, 0, 3)
        optimizer.zero_grad()
        # DCP cannot reshard plain sharded parameters, so each rank keeps a copy of its shards.
        weights = copy.deepcopy(model.state_dict())
        saved = {"optim": saved_of(model, optimizer)["optim"]}
        if in_background:  # in a separate process group, because the steps issue collectives meanwhile
            group: Any = dist.new_group(backend="gloo")
            writing = dcp_async_save(saved, checkpoint_id=path, process_group=group)
        else:
            writing = dcp_save(saved, checkpoint_id=path)
        expected = train(model, optimizer, 3, 6)
        if isinstance(writing, Future):
            writing.result()

        other, resumed = built(registry, kind)
        found = {"optim": saved_of(other, resumed)["optim"]}
        dcp_load(found, checkpoint_id=path)
        other.load_state_dict(weights)
        set_optimizer_state_dict(other, TorchStates(resumed), found["optim"])
        other.load_state_dict(weights)
        assert train(other, resumed, 3, 6) == expected
        assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))


@pytest.mark.parametrize("kind", KINDS)
def test_dcp_resumes_bitwise_identically_with_torch_state_dict_functions(
    world: World, tmp_path: Path, kind: str
) -> None:
    world.run(ranks(kind), continued, kind, str(tmp_path), False)


@pytest.mark.parametrize("kind", ["fully_shard, bf16", "ZeRO-1"])
def test_dcp_async_save_stores_the_state_before_later_steps(world: World, tmp_path: Path, kind: str) -> None:
    world.run(ranks(kind), continued, kind, str(tmp_path), True)


def flat(optimizer_state: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{name}.{key}": value for name, of in optimizer_state["state"].items() for key, value in of.items()}


def whole_states(axes: Axes, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the full optimizer state from torch's functions after three steps on the same data on every rank."""
    with registry_of(axes) as registry:
        torch.manual_seed(0)
        model = Wide(registry).to(dtype)
        optimizer = ParallelOptimizer(adamw(model.parameters()), registry, **options)
        for step in range(3):
            optimizer.zero_grad()
            optimizer.backward(model(rows(step).to(dtype)).mean())
            optimizer.step()
        full: dict[str, Any] = get_optimizer_state_dict(
            model, TorchStates(optimizer), options=StateDictOptions(full_state_dict=True, cpu_offload=False)
        )
        return flat(full)


@pytest.mark.parametrize("kind", ["split", "ZeRO-1", "split, ZeRO-1"])
def test_full_optimizer_state_matches_single_process_state(world: World, kind: str) -> None:
    axes, options = KINDS[kind]
    (dense,) = world.run(1, whole_states, (), {})
    for found in world.run(ranks(kind), whole_states, axes, options):
        assert found.keys() == dense.keys()
        for name, value in dense.items():
            torch.testing.assert_close(found[name], value.to(found[name].dtype), rtol=1e-5, atol=1e-7)


def test_full_optimizer_state_of_float64_parameters_stays_float64_with_zero1(world: World) -> None:
    axes, options = KINDS["ZeRO-1"]
    (dense,) = world.run(1, whole_states, (), {}, torch.float64)
    for found in world.run(2, whole_states, axes, options, torch.float64):
        for name, value in dense.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=0.0)


def onto_another(saved: str, loaded: str, path: str, load: bool) -> dict[str, Tensor]:
    """Train three steps in layout ``saved`` and save through DCP; if ``load``, load that into layout ``loaded`` instead.

    Return the full state.
    """
    axes, options = KINDS[loaded if load else saved]
    with registry_of(axes) as registry:
        model = Wide(registry)
        optimizer = ParallelOptimizer(adamw(model.parameters()), registry, **options)
        if not load:
            for step in range(3):
                optimizer.zero_grad()
                optimizer.backward(model(rows(step).float()).mean())
                optimizer.step()
        state = {"optim": get_optimizer_state_dict(model, TorchStates(optimizer))}
        if load:
            dcp_load(state, checkpoint_id=path)
            set_optimizer_state_dict(model, TorchStates(optimizer), state["optim"])
        else:
            dcp_save(state, checkpoint_id=path)
        full: dict[str, Any] = get_optimizer_state_dict(
            model, TorchStates(optimizer), options=StateDictOptions(full_state_dict=True)
        )
        return flat(full)


LAYOUTS = ["replicas", "split", "ZeRO-1", "split, ZeRO-1"]


@pytest.mark.parametrize("loaded", LAYOUTS)
@pytest.mark.parametrize("saved", LAYOUTS)
def test_dcp_state_of_one_layout_loads_into_another(world: World, tmp_path: Path, saved: str, loaded: str) -> None:
    expected = world.run(ranks(saved), onto_another, saved, loaded, str(tmp_path), False)[0]
    for found in world.run(ranks(loaded), onto_another, saved, loaded, str(tmp_path), True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert any(value.abs().sum() > 0 for name, value in expected.items() if name.endswith("exp_avg_sq"))


def counted_apart() -> str:
    with registry_of((("tensor", 2),)) as registry:
        model, optimizer = built(registry, "split")
        train(model, optimizer, 0, 2)
        optimizer.state[model.get_parameter("up")]["step"].fill_(5 + registry.coordinate["tensor"])
        with pytest.raises(ValueError, match="state 'step' of up is 5") as caught:
            TorchStates(optimizer).state_dict()
        return str(caught.value)


def test_step_counts_that_differ_between_shards_are_rejected_on_all_ranks(world: World) -> None:
    for text in world.run(2, counted_apart):
        assert "use meshstep.optim.save_checkpoint" in text


def fused() -> str:
    """Return the error for a weight with two blocks that are each sharded."""
    with registry_of((("tensor", 2),)) as registry:
        model = nn.Linear(3, 4)
        annotate(model.weight, P(blocks("tensor", 2)), "weight")
        annotate(model.bias, P(blocks("tensor", 2)), "bias")
        optimizer = ParallelOptimizer(adamw(model.parameters()), registry)
        optimizer.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()
        with pytest.raises(ValueError, match="weight: a DTensor does not support sharded blocks") as caught:
            get_optimizer_state_dict(model, TorchStates(optimizer))
        return str(caught.value)


def test_torch_state_dict_functions_reject_fused_weight_blocks_on_all_ranks(world: World) -> None:
    for text in world.run(2, fused):
        assert "use save_checkpoint" in text


def reshaped() -> None:
    """Load a full state dict with ``full_state_dict``; it must be sharded like the parameters."""
    with registry_of((("tensor", 2),)) as registry:
        model, optimizer = built(registry, "split")
        train(model, optimizer, 0, 2)
        states = TorchStates(optimizer)
        options = StateDictOptions(full_state_dict=True)
        full: dict[str, Any] = get_optimizer_state_dict(model, states, options=options)
        kept = copy.deepcopy(optimizer.optimizer.state_dict()["state"])
        other, resumed = built(registry, "split")
        set_optimizer_state_dict(other, TorchStates(resumed), full, options=options)
        for position, state in resumed.optimizer.state_dict()["state"].items():
            for key, value in state.items():
                assert torch.equal(value, kept[position][key])
        set_model_state_dict(other, get_model_state_dict(model))


def test_full_optimizer_state_is_sharded_when_loaded_into_sharded_model(world: World) -> None:
    world.run(2, reshaped)


def laid_out_the_other_way() -> None:
    """Load a DTensor whose shards have the expected shape but another layout."""
    with registry_of((("row", 2), ("col", 2))) as registry:
        weight = nn.Parameter(torch.zeros(2, 2))
        annotate(weight, P("row", "col"), "weight")
        optimizer = ParallelOptimizer(torch.optim.SGD([weight], lr=0.1, momentum=0.9), registry)
        optimizer.backward(weight.sum())
        optimizer.step()
        states = TorchStates(optimizer)
        saved = states.state_dict()
        full = torch.arange(16.0).view(4, 4)
        other = distribute_tensor(full, registry.device_mesh("row", "col"), [Shard(1), Shard(0)])
        saved["state"][0]["momentum_buffer"] = other
        states.load_state_dict(saved)
        assert torch.equal(optimizer.state[weight]["momentum_buffer"], shard(full, P("row", "col"), registry))


def test_optimizer_state_of_other_layout_with_same_shard_shape_is_resharded(world: World) -> None:
    world.run(4, laid_out_the_other_way)


# Wrong states ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("x", "has meshstep/skipped_steps='x', which is not a number; give the result of state_dict"),
        (None, "has no entry meshstep/skipped_steps, so .*, or without TorchStates"),
    ],
)
def test_torch_states_reject_state_without_valid_count_of_skipped_steps(value: str | None, said: str) -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = ParallelOptimizer(torch.optim.SGD([weight], lr=0.1), ProcessGroupRegistry(Topology()))
    states = TorchStates(optimizer)
    saved = states.state_dict()
    saved["param_groups"][0] |= {"meshstep/skipped_steps": value}
    if value is None:
        del saved["param_groups"][0]["meshstep/skipped_steps"]
    with pytest.raises(ValueError, match=said):
        states.load_state_dict(saved)
    states.load_state_dict(states.state_dict())


def test_torch_states_reject_clipping_rule_state_that_is_no_json() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = ParallelOptimizer(
        torch.optim.SGD([weight], lr=0.1), ProcessGroupRegistry(Topology()), max_norm=ByPreviousNorm(1.0)
    )
    states = TorchStates(optimizer)
    saved = states.state_dict()
    saved["param_groups"][0]["meshstep/clip"] = "{"
    with pytest.raises(ValueError, match=r"has meshstep/clip='{', which is not valid JSON \("):
        states.load_state_dict(saved)


def test_creating_torch_states_for_stateless_optimizer_keeps_split_master_weights() -> None:
    """SGD without momentum has no states. To create missing states, the constructor of `TorchStates` makes a step with zero
    gradients, which must not change the master weights."""
    with ProcessGroupRegistry(Topology()) as registry:
        precision = Bf16(split_masters=True)
        model = precision.prepare(nn.Linear(8, 8, bias=False))
        weight = model.get_parameter("weight")
        annotate(weight, P(), "weight")
        optimizer = ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), registry, precision=precision)
        optimizer.backward(weight.float().square().sum())
        optimizer.step()
        before = optimizer.state_dict()["meshstep"]["weights"]["masters"][0].clone()
        assert not torch.equal(before, weight.float())
        TorchStates(optimizer)
        assert torch.equal(optimizer.state_dict()["meshstep"]["weights"]["masters"][0], before)


class CountedDescent(torch.optim.Optimizer):
    """Gradient descent that counts its steps per parameter, in a Python number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["count"] = self.state[param].get("count", 0) + 1
                param -= group["lr"] * param.grad


def test_torch_states_save_and_load_states_that_are_python_numbers() -> None:
    def run() -> tuple[nn.Parameter, ParallelOptimizer[Any]]:
        weight = nn.Parameter(torch.ones(3))
        annotate(weight, P(), "weight")
        descent = CountedDescent([("weight", weight)], {"lr": 0.1})
        return weight, ParallelOptimizer(descent, ProcessGroupRegistry(Topology()))

    weight, optimizer = run()
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.backward(weight.sum())
        optimizer.step()
    _, resumed = run()
    TorchStates(resumed).load_state_dict(TorchStates(optimizer).state_dict())
    assert [state["count"] for state in resumed.optimizer.state.values()] == [2]
