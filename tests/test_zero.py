"""Sharded optimizer states and gradients: what replicated ones do, with 1/N of the memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from math import inf
from typing import Any
from unittest import mock

import pytest
import torch
from meshstep.amp import NaiveFp16, precision_of
from meshstep.optim import ParallelOptimizer, zero
from meshstep.optim.sharded_bucket import ShardedBucket
from meshstep.optim.stepped_weights import Piece
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from meshstep.parallel.layout import shard
from precision_modes import MODES, OPTIMIZERS
from probes import collectives, no_host_reads
from scenarios import SCENARIOS, VOCAB, Scenario, backward, build, dense_1d, full_tensors
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from world import World, WorldError

Axes = tuple[tuple[str, int], ...]
DATA2: Axes = (("data", 2), ("tensor", 1))
DATA4: Axes = (("data", 4), ("tensor", 1))
BOTH: Axes = (("data", 2), ("tensor", 2))
REPLICAS: Axes = (("replica", 2), ("data", 2), ("tensor", 1))
ZERO1: dict[str, Any] = {"shard_states": "data"}
ZERO2: dict[str, Any] = {"shard_states": "data", "shard_gradients": True}


def rows(step: int, count: int = 8) -> Tensor:
    return torch.randint(VOCAB, (count, 5), generator=torch.Generator().manual_seed(100 + step))


def size_of(axes: Axes) -> int:
    return Topology(roles=None, **dict(axes)).world_size


def small_buckets(nbytes: int = 1024) -> Any:
    """Many buckets, though the models are small; some parameters are then a bucket of their own."""
    return mock.patch.object(zero, "BUCKET_BYTES", nbytes)


# The same as replicated -------------------------------------------------------------------------------------------------


def train(
    axes: Axes, mode: str, kind: str, steps: int, options: dict[str, Any], micro: int = 1, bucket: int = 256
) -> tuple[dict[str, Tensor], list[float], dict[str, float]]:
    """Full parameters, norms, and the last norms of all parameters, after some steps."""
    with ProcessGroupRegistry(Topology(roles=None, **dict(axes))) as registry, small_buckets(bucket):
        scenario = Scenario(axes, "1d", dense_1d)
        model = build(scenario, registry, torch.float32)
        assert model is not None
        MODES[mode].prepare(model, registry)
        if options.get("data_parallel"):
            options = {**options, "data_parallel": DistributedDataParallel(model, process_group=registry.group("data"))}
        optimizer = ParallelOptimizer(
            OPTIMIZERS[kind](model.parameters()), registry, precision=MODES[mode], accumulation_steps=micro, **options
        )
        run = options.get("data_parallel", model)
        norms = []
        for step in range(steps):
            ids = shard(rows(step), P(registry.topology.data_axes), registry)
            for part in ids.chunk(micro):
                optimizer.zero_grad()
                optimizer.backward(run(part))
                optimizer.step()
            assert optimizer.last_stats is not None
            norms.append(float(optimizer.last_stats.total_norm))
            each = {name: float(norm) for name, norm in optimizer.last_stats.parameter_norms.items()}
        whole = full_tensors(scenario, model, registry, gradients=False)
        return {name: tensor.float() for name, tensor in whole.items()}, norms, each


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max((float((found[k] - v).abs().max() / v.abs().max()) for k, v in expected.items()), default=0.0)


@pytest.mark.parametrize("options", [ZERO1, ZERO2], ids=["zero1", "zero2"])
@pytest.mark.parametrize("axes", [DATA2, DATA4, BOTH, REPLICAS], ids=str)
def test_fifty_steps_equal_replicated_ones(world: World, axes: Axes, options: dict[str, Any]) -> None:
    clip = {"max_norm": 0.3}
    expected, norms, _ = world.run(size_of(axes), train, axes, "fp32", "sgd", 50, clip)[0]
    assert min(norms) < 0.3 < max(norms)
    for found, measured, _ in world.run(size_of(axes), train, axes, "fp32", "sgd", 50, {**clip, **options}):
        assert difference(found, expected) <= 1e-6
        assert measured == pytest.approx(norms, rel=1e-6)


# In units of the largest parameter: what one gradient sum in another order may make of the model.
TOLERANCE = {
    "fp32": 1e-6,
    "fp16": 1e-4,
    "bf16": 1e-2,
    "fp16_naive": 2e-3,
    "O2": 2e-3,
    "O3": 1e-2,
    "bf16 stochastic": 3e-2,
}


@pytest.mark.parametrize("mode", TOLERANCE)
def test_every_precision(world: World, mode: str) -> None:
    clip = {"max_norm": 0.3}
    expected, norms, _ = world.run(4, train, BOTH, mode, "adamw", 10, clip)[0]
    for options in (ZERO1, ZERO2):
        runs = world.run(4, train, BOTH, mode, "adamw", 10, {**clip, **options})
        assert all(difference(run[0], runs[0][0]) == 0 for run in runs)
        assert difference(runs[0][0], expected) <= TOLERANCE[mode]
        assert runs[0][1] == pytest.approx(norms, rel=2 * TOLERANCE[mode])


@pytest.mark.parametrize("options", [ZERO1, ZERO2], ids=["zero1", "zero2"])
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_micro_batches_equal_one_batch(world: World, mode: str, options: dict[str, Any]) -> None:
    expected, _, _ = world.run(1, train, (("data", 1), ("tensor", 1)), mode, "sgd", 10, {"max_norm": 0.3})[0]
    for micro in (2, 4):
        for found, _, _ in world.run(2, train, DATA2, mode, "sgd", 10, {"max_norm": 0.3, **options}, micro):
            assert difference(found, expected) <= {"fp32": 1e-5, "bf16": 2e-2}[mode]


@pytest.mark.parametrize("reduction", ["packed", "per_group"])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, inf])
def test_norms_count_slices_once(world: World, p: float, reduction: str) -> None:
    options = {"max_norm": 1e6, "norm_type": p, "reduction": reduction, "per_parameter_norms": True}
    _, norms, each = world.run(4, train, BOTH, "fp32", "plain sgd", 2, options)[0]
    for _, found, found_each in world.run(4, train, BOTH, "fp32", "plain sgd", 2, {**options, **ZERO2}):
        assert found == pytest.approx(norms, rel=1e-6)
        assert found_each == pytest.approx(each, rel=1e-6)
        assert len(each) == 9


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("data x sequence parallel", "tensor"),  # sums the partial norms over it, takes slices of the rest
        ("grid, bias on row 0", "row"),  # where a bias is whole
        ("grid, bias on columns", "col"),
        ("data x pipe, tied", "data"),  # both stages must cut the tied table in the same places
        ("a rank without gradients", "data"),
        ("a stage without parameters", "tensor"),
    ],
)
def test_any_axis_of_any_layout(world: World, name: str, axis: str) -> None:
    size = SCENARIOS[name].topology.world_size
    runs = world.run(size, train_scenario, name, {})
    for options in ({"shard_states": axis}, {"shard_states": axis, "shard_gradients": True}):
        for (expected, norms), (found, measured) in zip(
            runs, world.run(size, train_scenario, name, options), strict=True
        ):
            assert difference(found, expected) <= 1e-12
            assert measured == pytest.approx(norms, rel=1e-12)


def train_scenario(name: str, options: dict[str, Any]) -> tuple[dict[str, Tensor], list[float]]:
    scenario = SCENARIOS[name]
    with ProcessGroupRegistry(scenario.topology) as registry, small_buckets():
        model = build(scenario, registry, torch.float64)
        params: Any = list(model.parameters()) if model is not None else [{"params": []}]
        optimizer = ParallelOptimizer(
            torch.optim.AdamW(params, lr=1e-2, fused=False), registry, max_norm=scenario.threshold, **options
        )
        norms = []
        for step in range(6):
            optimizer.zero_grad()
            backward(scenario, model, optimizer, rows(step, 4))
            stats = optimizer.step()
            assert stats is not None
            norms.append(float(stats.total_norm))
        return full_tensors(scenario, model, registry, gradients=False), norms


def test_ddp_averages_and_states_are_sharded(world: World) -> None:
    expected, norms, _ = world.run(2, train, DATA2, "bf16", "adamw", 10, {"data_parallel": True})[0]
    options = {"data_parallel": True, **ZERO1}
    for found, measured, _ in world.run(2, train, DATA2, "bf16", "adamw", 10, options, 2):
        assert difference(found, expected) <= 2e-2
        assert measured == pytest.approx(norms, rel=2e-2)


def train_dtensors(options: dict[str, Any]) -> list[Tensor]:
    """A DTensor that is sharded over tensor, beside plain parameters, for four steps: the local parameters."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        torch.manual_seed(4)
        model: Any = nn.Module()
        mesh = registry.device_mesh("tensor")
        model.weight = nn.Parameter(distribute_tensor(torch.randn(6, 5), mesh, [Shard(0)]))
        model.bias = nn.Parameter(torch.randn(3))
        declare(model, {"weight": P("tensor"), "bias": P("tensor")})
        optimizer = ParallelOptimizer(adamw(model.parameters()), registry, max_norm=0.1, **options)
        for step in range(4):
            assert isinstance(model.weight, DTensor)
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + registry.coordinate["data"]))
            optimizer.zero_grad()
            optimizer.backward(((x @ model.weight.to_local().t() + model.bias) ** 2).mean())
            optimizer.step()
        return [model.weight.to_local().detach().clone(), model.bias.detach().clone()]


def test_dtensors_beside_plain_parameters(world: World) -> None:
    expected = world.run(4, train_dtensors, {})
    for options in (ZERO1, ZERO2):
        for found, wanted in zip(world.run(4, train_dtensors, options), expected, strict=True):
            assert all(
                torch.allclose(one, other, rtol=1e-6, atol=1e-7) for one, other in zip(found, wanted, strict=True)
            )


def train_tail(by_ddp: bool, options: dict[str, Any]) -> list[Tensor]:
    """Windows of three micro-batches, of which the last has only two, left out of the synchronisation by DDP."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = wide_model()
        if by_ddp:
            options = {**options, "data_parallel": DistributedDataParallel(model)}
        optimizer = ParallelOptimizer(
            adamw(model.parameters()), registry, max_norm=0.1, accumulation_steps=3, **options
        )
        for step in range(5):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2 * step + registry.coordinate["data"]))
            optimizer.backward(options.get("data_parallel", model)(x).square().mean())
            optimizer.step(last=step == 4)
            optimizer.zero_grad()
        return [param.detach().clone() for param in model.parameters()]


def test_a_tail_that_ddp_left_out(world: World) -> None:
    expected = world.run(2, train_tail, False, {})[0]
    for found in world.run(2, train_tail, True, ZERO1):
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


# Small models ------------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters of all kinds: 0-dim, not contiguous, frozen, unused on some ranks, sharded over the axis already."""

    def __init__(self, registry: ProcessGroupRegistry | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(5)
        data = 1 if registry is None or "data" not in registry.topology.axes else registry.size("data")
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.sometimes = nn.Parameter(torch.randn(33))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.expert = nn.Parameter(torch.randn(4 // data, 6))
        self.head = nn.Linear(45, 8)
        self.to(dtype)
        declare(self, {"*": P(), **({"expert": P("data", None)} if data > 1 else {})})

    def forward(self, x: Tensor, use: bool = True) -> Tensor:
        x = self.head(self.conv(x).flatten(1) * self.gain).square().mean() + self.expert.sum() ** 2 * 1e-3
        return x + (self.sometimes.square().sum() * 0.1 if use else 0.0) + self.frozen.sum() * 0.1


def inputs(step: int, rank: int) -> Tensor:
    return torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(1000 * rank + step))


def adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4, fused=True, **options)


def odd_steps(
    model: Odd, optimizer: ParallelOptimizer, registry: ProcessGroupRegistry, steps: range, first_rank_uses: bool = True
) -> None:
    dtype = model.gain.dtype
    for step in steps:
        optimizer.zero_grad()
        x = inputs(step, registry.coordinate["data"]).to(dtype)
        optimizer.backward(model(x, use=registry.coordinate["data"] == 0 or not first_rank_uses))
        optimizer.step()


def train_odd(options: dict[str, Any]) -> dict[str, Tensor]:
    with ProcessGroupRegistry(Topology(data=2)) as registry, small_buckets(256):
        model = Odd(registry)
        optimizer = ParallelOptimizer(adamw(model.named_parameters()), registry, max_norm=1.0, **options)
        odd_steps(model, optimizer, registry, range(8))
        names = [name for group in optimizer.param_groups for name in group["param_names"]]
        assert len(names) == len(stepped(optimizer))
        if options:
            assert model.expert in {piece.piece for piece in pieces(optimizer)}
            assert optimizer.plan.counted == sum(p.numel() for p in Odd().parameters())
            assert "pieces of parameters cut over 'data'" in str(optimizer.plan)
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def stepped(optimizer: ParallelOptimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def pieces(optimizer: ParallelOptimizer) -> list[Piece]:
    return optimizer._weights.pieces()


def test_parameters_of_all_kinds(world: World) -> None:
    runs = world.run(2, train_odd, {})
    for options in (ZERO1, ZERO2):
        for found, expected in zip(world.run(2, train_odd, options), runs, strict=True):
            assert difference(found, expected) <= 1e-6


def cover(options: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Checks the pieces of this rank against the model, and tells what they cover."""
    with ProcessGroupRegistry(Topology(data=2)) as registry, small_buckets(256):
        model = Odd(registry, torch.bfloat16)
        optimizer = ParallelOptimizer(adamw(model.parameters()), registry, precision="bf16", **options)
        odd_steps(model, optimizer, registry, range(2))
        named = dict(model.named_parameters())
        found = []
        for piece in pieces(optimizer):
            assert piece.param is named[piece.name]
            part = piece.param.detach().reshape(-1)[piece.offset : piece.offset + piece.piece.numel()]
            assert torch.equal(piece.piece.detach().reshape(-1).to(torch.bfloat16), part)
            if piece.param.requires_grad:
                assert piece.piece.dtype == torch.float32
                assert optimizer.state[piece.piece]["exp_avg"].shape == piece.piece.shape
                found.append((piece.name, piece.offset, piece.piece.numel()))
        return found


@pytest.mark.parametrize("options", [{}, ZERO2, {"offload": 0.5}, {**ZERO1, "offload": 0.5}], ids=str)
def test_pieces_say_what_the_optimizer_steps(world: World, options: dict[str, Any]) -> None:
    covered = world.run(2, cover, options)
    if "shard_states" not in options:
        covered = covered[:1]
    sizes = {name: param.numel() for name, param in Odd().named_parameters() if name not in ("frozen", "expert")}
    for name, numel in sizes.items():
        spans = sorted((offset, count) for found in covered for n, offset, count in found if n == name)
        assert [offset for offset, _ in spans] == [sum(c for _, c in spans[:i]) for i in range(len(spans))]
        assert sum(count for _, count in spans) == numel


# Cost --------------------------------------------------------------------------------------------------------------------


def wide_model() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 96), nn.GELU(), nn.Linear(96, 64), nn.LayerNorm(64)]
    model = nn.Sequential(*layers)
    declare(model, {"*": P()})
    return model


def cost(shards: bool, gradients: bool, mode: str) -> dict[str, Any]:
    with ProcessGroupRegistry(Topology(data=4)) as registry:
        model = wide_model()
        precision_of(mode).prepare(model, registry)
        options: dict[str, Any] = {"shard_states": "data", "shard_gradients": gradients} if shards else {}
        optimizer = ParallelOptimizer(adamw(model.parameters()), registry, precision=mode, max_norm=1.0, **options)
        x = torch.randn(8, 64)
        for step in range(3):
            watched = step == 2  # after all that only a first step does
            with collectives() as seen, no_host_reads() if watched else nullcontext():
                for _ in range(2):
                    optimizer.backward(model(x).float().square().mean())
                gradient_bytes = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
                optimizer.step()
            optimizer.zero_grad()
        states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        masters = [piece.piece for piece in pieces(optimizer) if piece.piece.dtype != piece.param.dtype]
        return {
            "collectives": dict(seen),
            "gradients": gradient_bytes,
            "states": sum(v.nbytes for v in states),
            "masters": sum(v.nbytes for v in masters),
        }


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_memory_and_collectives(world: World, mode: str) -> None:
    whole = world.run(4, cost, False, False, mode)[0]
    numel = sum(param.numel() for param in wide_model().parameters())
    assert whole["states"] == pytest.approx(8 * numel, rel=0.001)
    assert whole["masters"] == (4 * numel if mode == "bf16" else 0)
    assert whole["collectives"] == {"all_reduce": 2}  # gradients, and the norm
    for gradients in (False, True):
        for found in world.run(4, cost, True, gradients, mode):
            assert found["states"] == pytest.approx(whole["states"] / 4, rel=0.05)
            assert found["masters"] == pytest.approx(whole["masters"] / 4, rel=0.05)
            # One bucket: reduced once a window, or once a micro-batch where gradients are sharded; measured once.
            reduced = 2 if gradients else 1
            assert found["collectives"] == {
                "reduce_scatter_single": reduced,
                "all_reduce": 1,
                "all_gather_single": 1,
            }
            assert found["gradients"] == (0 if gradients else 4 * numel)


def backward_order(uses_all: bool) -> tuple[list[list[str]], int]:
    """The buckets that ZeRO-2 reduces, in order, by the names of their parameters; and how many of them in backward."""
    with ProcessGroupRegistry(Topology(data=2)) as registry, small_buckets(64 * 128 * 4):
        model = wide_model()
        optimizer = ParallelOptimizer(adamw(model.parameters()), registry, **ZERO2)
        names = {id(param): name for name, param in model.named_parameters()}
        order: list[list[str]] = []
        in_backward: list[int] = []
        original = ShardedBucket.reduce

        def watched(bucket: Any, release: bool = False, summed: bool = False) -> Any:
            order.append([names[id(param)] for param in bucket.params])
            return original(bucket, release, summed)

        with mock.patch.object(ShardedBucket, "reduce", watched):
            x = torch.randn(8, 64, requires_grad=True)
            layers = list(model.children())
            hidden = nn.Sequential(*layers[:4])(x)
            if uses_all or registry.coordinate["data"] == 0:
                hidden = nn.Sequential(*layers[4:])(hidden)
            x.register_hook(lambda gradient: in_backward.append(len(order)))
            optimizer.backward(hidden.square().mean())
            optimizer.step()
        return order, in_backward[0]


def test_gradients_are_reduced_while_backward_runs_in_one_order(world: World) -> None:
    everything = [["2.bias", "4.weight", "4.bias", "5.weight", "5.bias"], ["2.weight"], ["0.bias"], ["0.weight"]]
    for uses_all in (True, False):
        (first, while_running), (second, meanwhile) = world.run(2, backward_order, uses_all)
        assert first == second == everything
        assert while_running >= 2
        # Without the last layers' gradients a rank can't begin; it does its part when backward ends.
        assert meanwhile == (while_running if uses_all else 0)


# Behaviour ---------------------------------------------------------------------------------------------------------------


def overflow(options: dict[str, Any]) -> tuple[list[float], bool, int]:
    """Skips of three steps, in the second of which one element of one rank's slice is not finite."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model, mode = Odd(registry, torch.float16), NaiveFp16(init_scale=4.0)
        optimizer = ParallelOptimizer(adamw(model.parameters()), registry, precision=mode, **options)
        found, unchanged = [], True
        for step in range(3):
            optimizer.zero_grad()
            optimizer.backward(model(inputs(step, registry.coordinate["data"]).half()))
            if step == 1 and registry.coordinate["data"] == 1:
                mine = pieces(optimizer)[-1]
                gradients = optimizer._weights._buckets[0].gradients  # type: ignore[attr-defined]
                target = gradients[-1] if options["shard_gradients"] else mine.param.grad
                assert target is not None
                target.view(-1)[-1] = inf
            before = [param.detach().clone() for param in (*model.parameters(), *stepped(optimizer))]
            stats = optimizer.step()
            assert stats is not None
            found.append(float(stats.found_inf))
            after = [*model.parameters(), *stepped(optimizer)]
            same = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
            unchanged &= same == (step == 1)
        return found, unchanged, optimizer.skipped_steps


@pytest.mark.parametrize("gradients", [False, True])
def test_overflow_in_one_slice_skips_everywhere(world: World, gradients: bool) -> None:
    for found, unchanged, skipped in world.run(2, overflow, {**ZERO1, "shard_gradients": gradients}):
        assert found == [0.0, 1.0, 0.0]
        assert unchanged
        assert skipped == 1


def resume(mode: str, options: dict[str, Any]) -> bool:
    """Six steps, and three steps, a new process' objects, three more: whether all bits are the same."""
    dtype = torch.float32 if mode == "fp32" else torch.bfloat16
    with ProcessGroupRegistry(Topology(data=2)) as registry:

        def make() -> tuple[Odd, ParallelOptimizer]:
            model = Odd(registry, dtype)
            return model, ParallelOptimizer(adamw(model.parameters()), registry, precision=MODES[mode], **options)

        model, optimizer = make()
        odd_steps(model, optimizer, registry, range(3))
        saved_model = {key: value.clone() for key, value in model.state_dict().items()}
        saved = torch.utils._pytree.tree_map(
            lambda value: value.clone() if isinstance(value, Tensor) else value, optimizer.state_dict()
        )
        odd_steps(model, optimizer, registry, range(3, 6))
        other, again = make()
        odd_steps(other, again, registry, range(1))
        other.load_state_dict(saved_model)
        again.load_state_dict(saved)
        odd_steps(other, again, registry, range(3, 6))
        return all(
            torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
        )


@pytest.mark.parametrize("mode", ["fp32", "bf16", "bf16 stochastic"])
@pytest.mark.parametrize("options", [ZERO1, {**ZERO2, "offload": 0.5}], ids=str)
def test_training_resumes_bit_for_bit(world: World, mode: str, options: dict[str, Any]) -> None:
    assert world.run(2, resume, mode, options) == [True, True]


def restored_model(mode: str) -> bool:
    """Loading the optimizer's state alone brings the masters' weights back into the model, on all ranks."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = Odd(registry, torch.bfloat16)
        optimizer = ParallelOptimizer(adamw(model.parameters()), registry, precision=mode, **ZERO1)
        odd_steps(model, optimizer, registry, range(2))
        state = torch.utils._pytree.tree_map(
            lambda value: value.clone() if isinstance(value, Tensor) else value, optimizer.state_dict()
        )
        before = [param.detach().clone() for param in model.parameters()]
        odd_steps(model, optimizer, registry, range(2, 4))
        optimizer.load_state_dict(state)
        return all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_loaded_masters_reach_the_whole_model(world: World) -> None:
    assert world.run(2, restored_model, "bf16") == [True, True]


def late(options: dict[str, Any]) -> dict[str, Tensor]:
    """An optimizer that has stepped before it is wrapped, and gets a param group later."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = Odd(registry)
        first = [param for name, param in model.named_parameters() if not name.startswith("head")]
        inner = adamw(first)
        model(inputs(0, 0)).backward()
        inner.step()
        inner.zero_grad()
        optimizer = ParallelOptimizer(inner, registry, max_norm=1.0, per_parameter_norms=True, **options)
        odd_steps(model, optimizer, registry, range(2))
        optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 1e-3, "max_norm": 0.5})
        with pytest.raises(ValueError, match="some parameters"):
            optimizer.add_param_group({"params": [model.head.bias]})
        odd_steps(model, optimizer, registry, range(2, 5))
        assert optimizer.last_stats is not None
        norms = optimizer.last_stats.parameter_norms
        assert len(norms) == len(list(model.parameters()))
        return {name: p.detach().clone() for name, p in model.named_parameters()} | {
            f"norm of {name}": norm for name, norm in norms.items()
        }


def test_states_and_groups_that_come_before_and_after(world: World) -> None:
    for options in (ZERO1, ZERO2, {"offload": 0.6}, {**ZERO2, "offload": 1.0}):
        for found, expected in zip(world.run(2, late, options), world.run(2, late, {}), strict=True):
            names = {name for name in expected if "frozen" not in name}
            assert difference({n: found[n] for n in names}, {n: expected[n] for n in names}) <= 1e-6


def changed_from_outside(mode: str) -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        dtype = torch.float32 if mode == "fp32" else torch.bfloat16
        model = Odd(registry, dtype)
        optimizer = ParallelOptimizer(adamw(model.parameters()), registry, precision=mode, **ZERO1)
        odd_steps(model, optimizer, registry, range(1))
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        odd_steps(model, optimizer, registry, range(1, 2))
        with torch.no_grad():
            for param in model.parameters():
                param.data = param.data + 1  # other values, in other memory
                param.mul_(1)
        try:
            odd_steps(model, optimizer, registry, range(2, 3))
        except RuntimeError as error:
            return str(error)
        held = [p.detach().clone() for p in model.parameters()]
        optimizer._weights.synchronize()
        assert all(torch.equal(one, other) for one, other in zip(held, model.parameters(), strict=True))
        return f"{float(model.gain.detach()):.1f}"


def test_weights_that_were_changed_are_stepped_or_refused(world: World) -> None:
    assert world.run(2, changed_from_outside, "fp32") == ["2.5", "2.5"]
    for text in world.run(2, changed_from_outside, "bf16"):
        assert "was changed since the last step" in text


# What can't work ---------------------------------------------------------------------------------------------------------


def refused(kind: str) -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model: Any = wide_model()
        options: dict[str, Any] = dict(ZERO1)
        params: Any = list(model.parameters())
        make: Callable[[Any], torch.optim.Optimizer] = adamw
        if kind == "axis":
            options = {"shard_states": "tensor"}
        elif kind == "gradients alone":
            options = {"shard_gradients": True}
        elif kind == "ddp":
            options = {**ZERO2, "data_parallel": DistributedDataParallel(model)}
        elif kind == "averaged elsewhere":
            options = {**ZERO2, "average_data": False}
        elif kind == "optimizer":
            make = partial(torch.optim.Adafactor, lr=1e-2)
        elif kind == "offload":
            options = {"offload": 1.5}
        elif kind == "frozen on one rank":
            model[0].weight.requires_grad_(registry.coordinate["data"] == 0)
        before = [id(param) for param in params]
        inner = make(params)
        try:
            optimizer = ParallelOptimizer(inner, registry, **options)
        except ValueError as error:
            assert [id(param) for group in inner.param_groups for param in group["params"]] == before
            return str(error)
        other = ParallelOptimizer(adamw(wide_model().parameters()), registry, **({} if kind == "whole" else ZERO1))
        state = other.state_dict()
        if kind == "cut":
            state["meshstep"]["weights"]["shards"]["pieces"] = []
        with pytest.raises(ValueError, match="the state was saved") as caught:
            optimizer.load_state_dict(state)
        return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("axis", "no axis of the mesh; its axes are data"),
        ("gradients alone", "needs shard_states"),
        ("ddp", "leave data_parallel"),
        ("averaged elsewhere", "average_data out"),
        ("optimizer", "optimizer.elementwise = True"),
        ("offload", "offload=1.5"),
        ("frozen on one rank", "0.weight on only one"),
        ("whole", "with optimizer states whole"),
        ("cut", "in 0 pieces"),
    ],
)
def test_what_cannot_work_is_refused_on_all_ranks(world: World, kind: str, says: str) -> None:
    for text in world.run(2, refused, kind):
        assert says in text


def misused(kind: str) -> None:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = wide_model()
        optimizer = ParallelOptimizer(adamw(model.parameters()), registry, **ZERO2)
        x = torch.randn(8, 64, requires_grad=True)
        if kind == "not cleared":
            optimizer.backward(model(x).square().mean())
            optimizer.step()
            optimizer.backward(model(x).square().mean())
        elif kind == "past the optimizer":
            optimizer.backward(model(x).square().mean())
            model(x).square().mean().backward()
            optimizer.step()
        else:
            y = checkpoint(model, x, use_reentrant=True)
            optimizer.backward(checkpoint(model, y, use_reentrant=True).square().mean())


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("not cleared", "call zero_grad"),
        ("past the optimizer", "outside of optimizer.backward"),
        ("twice in one backward", "second gradient in one backward"),
    ],
)
def test_misuse_of_sharded_gradients_is_an_error(world: World, kind: str, says: str) -> None:
    with pytest.raises(WorldError, match=says):
        world.run(2, misused, kind)
