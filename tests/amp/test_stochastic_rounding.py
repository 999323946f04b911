"""Stochastic rounding: distribution, buckets, memory, replicas and resuming."""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable
from hashlib import blake2b
from typing import Any
from unittest import mock

import pytest
import torch
from meshstep.amp import Bf16, MasterWeights, StochasticRounding, stochastic_round_
from meshstep.optim import ParallelOptimizer, Sharded
from meshstep.optim.states.param_transform import StatePlacement
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, declare
from optimizers import Counting
from small_models import Mlp, mlp
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from world import World

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


DEVICES = pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])


def seeded(seed: int, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


@DEVICES
def test_stochastic_rounding_is_unbiased(device: str) -> None:
    many = 40_000
    values = torch.tensor([1.001, -1.001, 1 + 2**-8, 3.3e-5, -7.77e20, 2**-133 * 1.3, 250.7, 1e-40])
    copies = values.to(device).expand(many, -1).contiguous()
    rounded = stochastic_round_(torch.empty_like(copies, dtype=BF16), copies, seeded(5, device)).double().cpu()
    down = (values.view(torch.int32) >> 16 << 16).view(F32).double()
    up = ((values.view(torch.int32) >> 16) + 1 << 16).view(F32).double()
    assert bool(((rounded == down) | (rounded == up)).all()), "rounded to a value that is not a neighbour"
    unit = (up - down).abs()
    error = (rounded.mean(0) - values.double()).abs() / unit
    # The standard deviation of a mean of n draws is at most unit / (2 sqrt n); allow 5 standard deviations.
    assert bool((error < 5 * 0.5 / many**0.5).all()), error
    nearest = (values.to(BF16).double() - values.double()).abs() / unit
    assert bool((nearest > 5 * 0.5 / many**0.5).any()), "rounding to nearest should be biased"


@DEVICES
def test_stochastic_rounding_keeps_bfloat16_values_infinities_and_nans(device: str) -> None:
    values = torch.randn(1000, generator=seeded(1)).to(BF16).float()
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 3.3895313892515355e38, 9.2e-41])
    special[-1] = special[-1].to(BF16)
    source = torch.cat([values, special]).to(device)
    for seed in range(20):
        target = stochastic_round_(torch.empty_like(source, dtype=BF16), source, seeded(seed, device))
        assert torch.equal(target.float().view(torch.int32), source.view(torch.int32))
    nans = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int32).view(F32).to(device)
    for seed in range(20):
        target = torch.empty_like(nans, dtype=BF16)
        assert bool(stochastic_round_(target, nans, seeded(seed, device)).isnan().all())


def test_stochastic_round_accepts_channels_last_0_dim_and_empty_tensors() -> None:
    source = torch.randn(4, 3, 5, 5, generator=seeded(2))
    expected = stochastic_round_(torch.empty(4, 3, 5, 5, dtype=BF16), source, seeded(9))
    last = source.to(memory_format=torch.channels_last)
    assert torch.equal(stochastic_round_(torch.empty_like(last, dtype=BF16), last, seeded(9)), expected)
    assert stochastic_round_(torch.empty((), dtype=BF16), torch.tensor(2.0)) == 2
    assert stochastic_round_(torch.empty(0, 3, dtype=BF16), torch.empty(0, 3)).shape == (0, 3)
    for target, bad in ((torch.empty(3, dtype=F16), torch.ones(3)), (torch.empty(3, dtype=BF16), torch.ones(4))):
        with pytest.raises(ValueError, match="give a float32 source and a bfloat16 target of equal shape"):
            stochastic_round_(target, bad)


# The optimizer --------------------------------------------------------------------------------------------------------


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3, fused=True)


def train(model: nn.Module, rounding: StochasticRounding, steps: range) -> None:
    for index in steps:
        x = torch.randn(7, 6, generator=seeded(index)).to(next(model.parameters()).dtype)
        model(x).float().square().mean().backward()
        rounding.collect()
        rounding.step(rounding.optimizer.step)
        rounding.zero_grad()


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[Any]]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = [optimizer.state[param] for param in params if param in optimizer.state]
    values = [value for state in states for _, value in sorted(state.items())]
    return [tensor.double().flatten().tolist() for tensor in (*model.parameters(), *values)]


def test_stochastic_rounding_accumulates_updates_below_bfloat16_resolution_on_average() -> None:
    """Subtract 0.001 from 1 in each of 300 steps: rounding to nearest would stay at 1 for ever."""

    def after_300(step: Callable[[nn.Parameter, torch.optim.Optimizer], Callable[[], object]]) -> Tensor:
        weight = nn.Parameter(torch.ones(4000, dtype=BF16))
        optimizer = torch.optim.SGD([weight], lr=1e-3)
        one_step = step(weight, optimizer)
        for _ in range(300):
            weight.grad = torch.ones_like(weight)
            one_step()
        return weight.detach().float()

    def stochastic(weight: nn.Parameter, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        rounding = StochasticRounding(optimizer)
        return lambda: rounding.step(optimizer.step)

    assert float(after_300(stochastic).mean()) == pytest.approx(0.7, abs=2e-3)
    assert float(after_300(lambda weight, optimizer: optimizer.step).mean()) == 1.0


@pytest.mark.parametrize("make", [adamw, lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)])
def test_weights_with_stochastic_rounding_stay_near_float32_training(
    make: Callable[[Any], torch.optim.Optimizer],
) -> None:
    model, dense = mlp(BF16), mlp(F32)
    train(model, StochasticRounding(make(model.parameters())), range(60))
    reference = make(dense.parameters())
    for index in range(60):
        dense(torch.randn(7, 6, generator=seeded(index))).square().mean().backward()
        reference.step()
        reference.zero_grad()
    start = mlp(F32)
    for param, expected, first in zip(model.parameters(), dense.parameters(), start.parameters(), strict=True):
        assert param.dtype == BF16
        error = (param.float() - expected).norm() / (expected - first).norm()
        assert float(error.detach()) < 0.25


def plainly_rounded(source: Tensor, generator: torch.Generator) -> Tensor:
    draws = torch.empty(-(-source.numel() // 4), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    noise = draws.view(torch.int16)[: source.numel()].view(source.shape).int() + 2**15
    return (source.contiguous().view(torch.int32) + noise >> 16).to(torch.int16).view(BF16)


@pytest.mark.parametrize("bucket_numel", [1, 300, 10**6])
def test_bucketed_stochastic_rounding_equals_rounding_each_parameter_alone(bucket_numel: int) -> None:
    """Each parameter has its own draws, first for its values and then for its states by name, for any shape and strides."""
    shapes = ((5, 7), (64, 64), (3,), (), (0, 2), (2, 3, 5, 5), (1000,))
    params = [nn.Parameter(torch.randn(shape, generator=seeded(4)).to(BF16)) for shape in shapes]
    params[5].data = params[5].data.to(memory_format=torch.channels_last)
    groups: list[dict[str, Any]] = [{"params": params[:3]}, {"params": params[3:], "amsgrad": True}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    rounding = StochasticRounding(optimizer, seed=3, bucket_numel=bucket_numel)
    copies = [nn.Parameter(param.detach().float()) for param in params]
    plain_groups: list[dict[str, Any]] = [{"params": copies[:3]}, {"params": copies[3:], "amsgrad": True}]
    plain = torch.optim.AdamW(plain_groups, lr=1e-2)
    for step in range(3):
        for param, copy in zip(params, copies, strict=True):
            param.grad = torch.randn(param.shape, generator=seeded(step)).to(BF16)
            copy.grad = param.grad.float()
        rounding.step(optimizer.step)
        plain.step()
        for index, (param, copy) in enumerate(zip(params, copies, strict=True)):
            place = f"0.{index}" if index < 3 else f"1.{index - 3}"
            seed = int.from_bytes(blake2b(f"3 {step} {place}".encode(), digest_size=8).digest(), "big") >> 1
            generator, state, kept = seeded(seed), plain.state[copy], optimizer.state[param]
            copy.data = plainly_rounded(copy.data, generator).float()
            assert torch.equal(param, copy.to(BF16))
            for key in sorted(state.keys() - {"step"}):
                state[key] = plainly_rounded(state[key], generator).float()
                assert kept[key].dtype == BF16
                assert torch.equal(kept[key], state[key].to(BF16))


@pytest.mark.parametrize("bucket_numel", [1, 70, 10**6])
def test_stochastic_rounding_does_not_depend_on_bucket_size(bucket_numel: int) -> None:
    results = []
    for numel in (bucket_numel, 33):
        model = mlp(BF16)
        optimizer = adamw(
            [
                {"params": model.first.parameters()},
                {"params": [*model.norm.parameters(), *model.last.parameters()], "lr": 1e-2},
            ]
        )
        groups = [list(group["params"]) for group in optimizer.param_groups]
        train(model, StochasticRounding(optimizer, bucket_numel=numel), range(4))
        assert [group["params"] for group in optimizer.param_groups] == groups
        results.append(bits(model, optimizer))
    assert results[0] == results[1]


def test_step_count_increases_once_per_step_for_one_or_many_buckets() -> None:
    results = []
    for bucket_numel in (1, 10**6):
        model = mlp(BF16)
        optimizer = Counting([{"params": model.first.parameters()}, {"params": model.last.parameters()}])
        train(model, StochasticRounding(optimizer, bucket_numel=bucket_numel), range(4))
        assert [(group["count"], group["weight_sum"]) for group in optimizer.param_groups] == [(4, 30.0)] * 2
        results.append([param.tolist() for param in model.parameters()])
    assert results[0] == results[1]


def test_run_with_stochastic_rounding_resumes_bitwise_identically() -> None:
    def built(seed: int) -> tuple[Mlp, torch.optim.Optimizer, StochasticRounding]:
        model = mlp(BF16, seed)
        optimizer = adamw(model.parameters())
        return model, optimizer, StochasticRounding(optimizer, seed=seed)

    model, optimizer, rounding = built(0)
    train(model, rounding, range(3))
    for state in optimizer.state.values():
        assert {key: value.dtype for key, value in state.items()} == {"step": F32, "exp_avg": BF16, "exp_avg_sq": BF16}
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "own": rounding.state_dict()}, file)
    train(model, rounding, range(3, 6))

    file.seek(0)
    saved = torch.load(file)
    other, other_optimizer, other_rounding = built(1)
    other.load_state_dict(saved["model"])
    other_optimizer.load_state_dict(saved["optimizer"])
    other_rounding.load_state_dict(saved["own"])
    train(other, other_rounding, range(3, 6))
    assert bits(other, other_optimizer) == bits(model, optimizer)
    with pytest.raises(ValueError, match="has no entry 'stochastic_rounding', so another precision mode saved it"):
        other_rounding.load_state_dict({"masters": {}})


def test_skipped_step_with_stochastic_rounding_changes_nothing() -> None:
    model = mlp(BF16)
    optimizer = adamw(model.parameters())
    rounding = StochasticRounding(optimizer)
    train(model, rounding, range(3))
    before = bits(model, optimizer)
    skipping: Any = optimizer
    skipping.grad_scale, skipping.found_inf = torch.tensor(1.0), torch.tensor(1.0)
    train(model, rounding, range(3, 4))
    assert bits(model, optimizer) == before


def test_failed_update_leaves_parameters_and_state_unchanged() -> None:
    model = mlp(BF16)
    optimizer = adamw(model.parameters())
    rounding = StochasticRounding(optimizer)
    train(model, rounding, range(2))
    before, params = bits(model, optimizer), list(optimizer.param_groups[0]["params"])

    def fail() -> None:
        raise ArithmeticError

    for param in params:
        param.grad = torch.ones_like(param)
    with pytest.raises(ArithmeticError):
        rounding.step(fail)
    assert optimizer.param_groups[0]["params"] == params
    assert bits(model, optimizer) == before


def test_stochastic_rounding_step_updates_each_parameter_once_and_skips_missing_gradients() -> None:
    model = mlp(BF16)
    model.norm.float()
    model.last.weight.requires_grad_(False)
    optimizer = adamw(model.parameters())
    rounding = StochasticRounding(optimizer, bucket_numel=1)
    for param in model.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    frozen = model.last.weight.detach().clone()
    rounding.step(optimizer.step)
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}
    assert len(optimizer.state) == 5
    assert optimizer.state[model.norm.weight]["exp_avg"].dtype == F32
    assert torch.equal(model.last.weight, frozen)
    calls: list[int] = []
    rounding.zero_grad()
    rounding.step(lambda: calls.append(1))
    assert calls == [1]


def test_stochastic_rounding_adds_param_groups_and_rejects_bad_bucket_size() -> None:
    model, head = mlp(BF16), nn.Linear(3, 2, dtype=BF16)
    optimizer = adamw(model.parameters())
    rounding = StochasticRounding(optimizer)
    rounding.add_param_group({"params": head.parameters()})
    head(model(torch.ones(2, 6, dtype=BF16))).float().sum().backward()
    rounding.step(optimizer.step)
    assert optimizer.state[head.weight]["exp_avg"].dtype == BF16
    with pytest.raises(ValueError, match="bucket_numel=0"):
        StochasticRounding(optimizer, bucket_numel=0)


def test_gradients_of_float32_copies_are_dropped_before_the_copies_are_rounded() -> None:
    """Otherwise the largest bucket of a step would need its float32 gradients beside the random bits."""
    model = mlp(BF16)
    optimizer = adamw(model.parameters())
    rounding = StochasticRounding(optimizer)
    model(torch.ones(2, 6, dtype=BF16)).float().sum().backward()
    found: list[Tensor | None] = []

    def round_back(copies: dict[Tensor, Tensor]) -> None:
        found.extend(copy.grad for copy in copies.values())

    with mock.patch.object(rounding, "_round_back", round_back):
        rounding.step(optimizer.step)
    assert len(found) == len([*model.parameters()])
    assert found == [None] * len(found)


class LiveBytes(TorchDispatchMode):
    """Measures the peak number of bytes of tensors that are made while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in inputs | self._seen:
                    self._note(storage)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self._seen.add(key)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.live -= nbytes


def nbytes(tensors: Any) -> int:
    """Return the bytes of tensors; a repeated tensor counts once, 0-dim tensors do not count."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.dim()}.values())


@pytest.mark.parametrize(("helper", "bytes_per_element"), [(MasterWeights, 18), (StochasticRounding, 8)])
def test_masters_use_18_and_stochastic_rounding_8_bytes_per_element(helper: Any, bytes_per_element: int) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=BF16) for _ in range(4)))
    optimizer = adamw(model.parameters())
    steps = helper(optimizer)
    model(torch.ones(2, 64, dtype=BF16)).float().sum().backward()
    steps.collect()
    steps.step(optimizer.step)
    params = [*model.parameters(), *optimizer.param_groups[0]["params"]]
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = nbytes([*params, *states, *(param.grad for param in params)])
    assert held == bytes_per_element * sum(param.numel() for param in model.parameters())


def test_stochastic_rounding_peak_memory_of_a_step_is_bounded_by_bucket_size() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=BF16) for _ in range(16)))
    optimizer = adamw(model.parameters())
    bucket = 2 * 64 * 64
    rounding = StochasticRounding(optimizer, bucket_numel=bucket)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    rounding.step(optimizer.step)
    with LiveBytes() as memory:
        rounding.step(optimizer.step)
    # The peak is the float32 copies of a bucket and the temporary tensors to round one parameter (half a bucket).
    assert 16 * bucket <= memory.peak <= 24 * bucket, f"{memory.peak / bucket} bytes per element of a bucket"
    assert memory.live <= 16 * 64, "tensors of the step are still alive"


# Ranks ----------------------------------------------------------------------------------------------------------------


def rounded_on_a_mesh(named: bool) -> dict[str, list[float]]:
    """Return four weights on pipe=2,tensor=2 after five steps: owned by coordinate 0, replicated, sharded, and tied over
    the stages."""
    topology = Topology(pipe=2, tensor=2)
    with ProcessGroupRegistry(topology) as registry:
        specs = {
            "owned": P(owned={"tensor": 0}),
            "whole": P(),
            "sharded": P("tensor"),
            "tied": P(tied={"pipe": (0, -1)}),
        }
        params: dict[str, nn.Parameter] = {}
        for name, spec in specs.items():
            if spec.holds(registry.coordinate, topology):
                params[name] = nn.Parameter(torch.full((50,), 1.0, dtype=BF16))
                full_name = f"stage{registry.coordinate['pipe']}.{name}" if name == "tied" else name
                annotate(params[name], spec, full_name if named else None)
        optimizer = torch.optim.SGD(params.values(), lr=1e-3)
        rounding = StochasticRounding(optimizer, registry)
        for _ in range(5):
            for param in params.values():
                param.grad = torch.ones_like(param)
            rounding.step(optimizer.step)
        return {name: param.tolist() for name, param in params.items()}


def test_stochastic_rounding_noise_is_equal_on_replicas_and_differs_between_shards(world: World) -> None:
    ranks = world.run(4, rounded_on_a_mesh, True)  # rank = 2 * pipe + tensor
    assert "owned" not in ranks[1]
    assert ranks[0]["whole"] == ranks[1]["whole"], "only rank 0 has `owned` before `whole`, which must not matter"
    assert ranks[0]["whole"] != ranks[2]["whole"], "parameters of the same name on two stages are different parameters"
    assert ranks[0]["sharded"] != ranks[1]["sharded"]
    assert ranks[0]["tied"] == ranks[1]["tied"] == ranks[2]["tied"] == ranks[3]["tied"], (
        "the name on each stage must not matter"
    )
    assert len(set(ranks[0]["whole"])) > 1


def nameless_on_a_mesh() -> str:
    with pytest.raises(
        ValueError, match="has no name, but the seed of its rounding noise is computed from its name"
    ) as problem:
        rounded_on_a_mesh(False)
    return str(problem.value)


def test_stochastic_rounding_on_several_ranks_needs_parameter_names(world: World) -> None:
    assert all("declare(model, {'*': P()})" in message for message in world.run(4, nameless_on_a_mesh))


def named_by_declaration() -> None:
    """Follow the advice of the error for a parameter without a name, on a model whose parameters are undeclared."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = nn.Linear(3, 2, dtype=BF16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="has no name"):
            StochasticRounding(optimizer, registry)
        declare(model, {"*": P()})
        StochasticRounding(optimizer, registry)


def test_declaration_of_all_parameters_gives_stochastic_rounding_their_names(world: World) -> None:
    world.run(2, named_by_declaration)


def trained_on_data_ranks(declared: bool, states: tuple[StatePlacement, ...]) -> list[Tensor]:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        if declared:
            declare(model, {"*": P()})
        precision = Bf16(stochastic_rounding=True)
        precision.prepare(model, registry)
        optimizer = ParallelOptimizer(adamw(model.named_parameters()), registry, precision=precision, states=states)
        for _ in range(3):
            optimizer.backward(
                model(torch.full((2, 6), 1.0 + registry.global_rank, dtype=BF16)).float().square().mean()
            )
            optimizer.step()
            optimizer.zero_grad()
        return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("states", [(), (Sharded("data"),)], ids=str)
def test_undeclared_parameters_on_data_axes_round_like_declared_replicas(
    world: World, states: tuple[StatePlacement, ...]
) -> None:
    first, second = world.run(2, trained_on_data_ranks, False, states)
    declared = world.run(2, trained_on_data_ranks, True, states)[0]
    for found, replica, expected in zip(first, second, declared, strict=True):
        assert torch.equal(found, replica)
        assert torch.equal(found, expected)


def round_undeclared_on_tensor_axis() -> str:
    weight = nn.Parameter(torch.ones(4, dtype=BF16))
    with (
        ProcessGroupRegistry(Topology(tensor=2)) as registry,
        pytest.raises(ValueError, match="has no spec") as problem,
    ):
        StochasticRounding(torch.optim.SGD([("up.weight", weight)], lr=1e-3), registry)
    return str(problem.value)


def test_missing_spec_error_of_stochastic_rounding_names_the_parameter(world: World) -> None:
    for message in world.run(2, round_undeclared_on_tensor_axis):
        assert message.startswith("up.weight has no spec; declare its layout with declare(model, ")


def test_stochastic_rounding_depends_on_parameter_name_not_position() -> None:
    results = []
    for order in (("a", "b"), ("b", "a")):
        params = {name: nn.Parameter(torch.ones(40, dtype=BF16)) for name in order}
        optimizer = torch.optim.SGD(list(params.items()), lr=1e-3)
        rounding = StochasticRounding(optimizer)
        for param in params.values():
            param.grad = torch.ones_like(param)
        rounding.step(optimizer.step)
        results.append({name: param.tolist() for name, param in params.items()})
    assert results[0] == results[1]
    assert results[0]["a"] != results[0]["b"]


@pytest.mark.parametrize("seed", ["3", 2.0, True, None, 2**64, -(2**64)], ids=repr)
def test_stochastic_rounding_state_with_invalid_seed_is_rejected(seed: object) -> None:
    param = nn.Parameter(torch.ones(2, dtype=BF16))
    rounding = StochasticRounding(torch.optim.SGD([("weight", param)], lr=0.1), seed=3)
    rounding.check_state({"stochastic_rounding": {"seed": 2**63, "steps": 0}})
    with pytest.raises(ValueError, match="seed"):
        rounding.check_state({"stochastic_rounding": {"seed": seed, "steps": 0}})
