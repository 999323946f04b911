"""Gradient reduction overlapped with backward: results, order of collectives, misuse."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from failing import fails_in_backward
from meshstep.optim import Offloaded, ParallelOptimizer, Sharded
from meshstep.optim.gradients import buckets as sync
from meshstep.optim.gradients import reduce_in_backward as early_kinds
from meshstep.optim.gradients.buckets import GradientBucket
from meshstep.optim.norm.plan import NormBucket
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from optimizers import adamw
from overlap_runs import SMALL, Replica, Trained, train_dense, train_replicas, watched
from probes import collectives, no_host_reads
from scenarios import Run, train
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from world import World
from zero_models import difference, wide_model

HOW = [
    "plain",
    "unused",
    "idle",
    "managed",
    "short",
    "announced",
    "explicit",
    "all under no_sync",
    "backward without optimizer",
    "clipped",
    "in place",
    "kept",
    "added",
    "frozen later",
    "offloaded",
]
# No reduction in backward: the last micro-batch runs under no_sync or without optimizer.backward, or backward cannot know
# that it is the last one.
NOT_IN_BACKWARD = ("all under no_sync", "backward without optimizer", "short")


def same_bits(one: Trained, other: Trained) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in other)


def train_with_gradient_hooks(overlap: bool, zero_2: bool) -> Tensor:
    """Train with hooks on gradients, and return the weights.

    Hooks registered before the constructor of the optimizer multiply gradients by 2. Hooks registered after it square them.
    """
    registry = ProcessGroupRegistry(Topology(data=2))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    declare(model, {"*": P()})

    def double(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(2)

    def square(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.square_()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(double)
    states = Sharded("data", gradients=True) if zero_2 else ()
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = ParallelOptimizer(sgd, registry, states=states, overlap=overlap, bucket_bytes=64)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(square)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(registry.rank("data")))
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.backward(model(x).square().mean())
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


@pytest.mark.parametrize(("overlap", "zero_2"), [(True, False), (False, True)], ids=["overlap", "ZeRO-2"])
def test_gradient_hooks_registered_before_or_after_optimizer_run_before_reduction(
    world: World, overlap: bool, zero_2: bool
) -> None:
    expected = world.run(2, train_with_gradient_hooks, False, False)
    for weights in world.run(2, train_with_gradient_hooks, overlap, zero_2):
        assert torch.equal(weights, expected[0])


# Bitwise identical results --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16_naive", "bf16 stochastic"])
@pytest.mark.parametrize("how", HOW)
def test_overlapped_reduction_is_bitwise_identical_to_reduction_in_step(world: World, how: str, mode: str) -> None:
    expected = world.run(2, train_replicas, 2, mode, how, False)
    found = world.run(2, train_replicas, 2, mode, how, True)
    for one, other in zip(found, expected, strict=True):
        assert same_bits(one, other)
        assert same_bits(one, found[0])
    assert (found[0].in_backward > 0) == (how not in NOT_IN_BACKWARD)
    assert not torch.equal(found[0]["head.weight"].float(), Replica().head.weight.detach())


def without_backward(overlap: bool) -> str:
    with pytest.raises(RuntimeError) as caught:
        train_replicas(2, "fp32", "silent", overlap)
    return str(caught.value)


@pytest.mark.parametrize("overlap", [False, True])
def test_missing_backward_on_one_rank_raises_on_all_ranks_in_first_step(world: World, overlap: bool) -> None:
    for text in world.run(2, without_backward, overlap):
        assert "the number of micro-batches is 1 on rank 0 and 0 on rank 1" in text


@pytest.mark.parametrize("ranks", [3, 4])
def test_overlap_on_three_or_four_ranks_matches_dense_model(world: World, ranks: int) -> None:
    expected = train_dense(ranks)
    found = world.run(ranks, train_replicas, ranks, "fp32", "plain", True)
    for one in found:
        assert same_bits(one, found[0])
    found[0].pop("norms")
    assert difference({name: value.double() for name, value in found[0].items()}, expected) <= 2e-6


LAYOUTS = ["data x tensor", "data x sequence parallel", "data x pipe, tied", "a rank without gradients"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_overlap_keeps_training_bitwise_identical_on_several_layouts(world: World, name: str) -> None:
    runs: list[list[Run]] = []
    for overlap in (False, True):
        options = {"max_norm": 0.4, "overlap": overlap, "bucket_bytes": SMALL}
        runs.append(world.run(4, train, name, torch.float32, adamw, 4, options))
    for one, other in zip(*runs, strict=True):
        assert one.bits == other.bits
        assert all(torch.equal(one.end[key], other.end[key]) for key in other.end)
        assert all(torch.equal(one.gradients[key], other.gradients[key]) for key in other.gradients)


class Experts(nn.Module):
    """Two experts, one per rank of a data-parallel expert axis, and shared parameters."""

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.shared, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.expert = nn.Parameter(torch.randn(2, 16, 16)[registry.coordinate["expert"]].clone().unsqueeze(0))
        declare(self, {"expert": P("expert"), "*": P()})

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.shared(x)) @ self.expert[0]).square().mean()


def train_experts(overlap: bool) -> tuple[dict[str, Tensor], int]:
    roles: dict[str, Any] = {"expert": "data"}
    with ProcessGroupRegistry(Topology(roles=roles, data=2, expert=2)) as registry, watched() as watch:
        model = Experts(registry)
        optimizer = ParallelOptimizer(
            adamw(model.parameters()), registry, max_norm=0.1, overlap=overlap, bucket_bytes=SMALL
        )
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(5, 16, generator=torch.Generator().manual_seed(10 * step + registry.global_rank))
            optimizer.backward(model(x))
            optimizer.step()
        return {name: param.detach().clone() for name, param in model.named_parameters()}, watch.in_backward


def test_gradients_of_model_with_data_parallel_expert_axis_are_not_reduced_in_backward(world: World) -> None:
    for (one, early), (other, none) in zip(
        world.run(4, train_experts, True), world.run(4, train_experts, False), strict=True
    ):
        assert all(torch.equal(one[name], other[name]) for name in other)
        assert early == none == 0


class Rows(nn.Module):
    """A model whose ranks share replicated layers but also hold different parameters: row 0 has an extra bias and a
    longer vector."""

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.ln, self.linear = nn.LayerNorm(4096), nn.Linear(4096, 8, bias=False)
        if registry.coordinate["row"] == 0:
            self.bias = nn.Parameter(torch.zeros(8))
        self.wide = nn.Parameter(torch.zeros(8 if registry.coordinate["row"] else 4096))
        declare(self, {"ln.*": P(), "linear.weight": P(), "wide": P("row"), "*": P(owned={"row": 0})})


def train_rows(overlap: bool, mixed: bool) -> Tensor:
    """Return the shared parameters after 5 steps. The loss depends on them in the same way on both rows.

    With ``mixed``, parameters of all layouts share buckets.
    """
    with ProcessGroupRegistry(Topology(data=3, row=2)) as registry, ExitStack() as stack:
        for room in (sync, early_kinds) if mixed else ():
            stack.enter_context(mock.patch.object(room, "layout_kind", return_value=NormBucket()))
        model = Rows(registry)
        inner = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, fused=True)
        # With ``mixed``, the replica check would raise in the first step.
        optimizer = ParallelOptimizer(inner, registry, overlap=overlap, check_replicas=False)
        for step in range(5):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + registry.coordinate["data"])
            loss = torch.zeros(())
            for name, param in model.named_parameters():
                if name.startswith(("ln", "linear")):
                    loss = loss + (param * torch.randn(param.shape, generator=generator)).sum()
                else:
                    loss = loss + param.square().sum() + param.sum()
            optimizer.backward(loss)
            optimizer.step()
        return torch.cat([param.detach().view(-1) for param in (*model.ln.parameters(), model.linear.weight)])


@pytest.mark.parametrize("overlap", [False, True])
def test_replicas_stay_equal_when_ranks_hold_different_parameters(world: World, overlap: bool) -> None:
    found = world.run(6, train_rows, overlap, False)
    assert sum(int((one != found[0]).sum()) for one in found) == 0
    found = world.run(6, train_rows, overlap, True)
    assert sum(int((one != found[0]).sum()) for one in found) > 0  # the negative control


# Order and cost of collectives ----------------------------------------------------------------------------------------


def backward_order(uses_all: bool) -> tuple[list[int], int, dict[str, int], dict[str, int]]:
    """Return the order of buckets, the number reduced during backward, and the collectives of backward and step."""
    with ProcessGroupRegistry(Topology(data=2)) as registry, watched() as watch:
        model = wide_model()
        optimizer = ParallelOptimizer(
            adamw(model.parameters()), registry, max_norm=1.0, overlap=True, bucket_bytes=64 * 128 * 4
        )
        in_backward: list[int] = []
        for step in range(2):
            x = torch.randn(8, 64, requires_grad=True)
            x.register_hook(lambda gradient: in_backward.append(len(watch.order)))
            layers = list(model.children())
            watch.order.clear()
            hidden = nn.Sequential(*layers[:4])(x)
            if uses_all or registry.coordinate["data"] == 0:
                hidden = nn.Sequential(*layers[4:])(hidden)
            last = step == 1  # the first step runs additional checks
            with collectives() as seen, no_host_reads() if last else nullcontext():
                optimizer.backward(hidden.square().mean())
            with collectives() as in_step, no_host_reads() if last else nullcontext():
                optimizer.step()
            optimizer.zero_grad()
        return watch.order, in_backward[-1], dict(seen), dict(in_step)


def test_buckets_are_reduced_in_backward_in_same_order_on_all_ranks(world: World) -> None:
    for uses_all in (True, False):
        (first, running, seen, in_step), (second, meanwhile, *others) = world.run(2, backward_order, uses_all)
        assert first == second == [3, 2, 1, 0]  # index of the first parameter of each bucket
        assert running >= 2
        # A rank without gradients of the last layers cannot start early; it joins when its backward ends.
        assert meanwhile == (running if uses_all else 0)
        assert [seen, in_step] == others == [{"all_reduce": 4}, {"all_reduce": 1}]


def order_of_kinds() -> list[tuple[int, ...]]:
    """Return the parameter indices of each bucket for layers that alternate between two layouts."""
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        params = [nn.Parameter(torch.randn(64)) for _ in range(8)]
        model = nn.ParameterList(params)
        declare(model, {"[0246]": P(), "[1357]": P("tensor")})
        optimizer = ParallelOptimizer(adamw(model.parameters()), registry, overlap=True, bucket_bytes=2 * 64 * 4)
        early = optimizer._completion.early
        return [bucket.layout.indices for bucket in early or () if isinstance(bucket, GradientBucket)]


def test_buckets_of_different_layouts_follow_backward_order(world: World) -> None:
    assert world.run(4, order_of_kinds) == [[(5, 7), (4, 6), (1, 3), (0, 2)]] * 4


# Misuse and errors ----------------------------------------------------------------------------------------------------


def errors_of(kind: str) -> tuple[str, bool]:
    """Return the error, and whether training after ``zero_grad`` is bitwise identical to training without the error."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        results, said = [], ""
        for goes_wrong in (True, False):
            model = wide_model()
            optimizer = ParallelOptimizer(adamw(model.parameters()), registry, overlap=True, bucket_bytes=64 * 128 * 4)
            said = go_wrong(kind, model, optimizer, registry) if goes_wrong else said
            for step in range(2):
                optimizer.zero_grad()
                x = torch.randn(8, 64, generator=torch.Generator().manual_seed(2 * step + registry.global_rank))
                optimizer.backward(model(x).square().mean())
                optimizer.step()
            results.append(torch.cat([param.detach().view(-1) for param in model.parameters()]))
        return said, torch.equal(*results)


def go_wrong(kind: str, model: Any, optimizer: ParallelOptimizer, registry: ProcessGroupRegistry) -> str:
    x = torch.randn(8, 64, requires_grad=True)

    def backward(y: Tensor) -> None:
        optimizer.backward(y.square().mean())

    def misuse() -> None:
        if kind == "re-entrant":
            backward(checkpoint(model, checkpoint(model, x, use_reentrant=True), use_reentrant=True))
        elif kind == "two micro-batches":
            backward(model(x))
            backward(model(x))
        elif kind == "backward without optimizer":
            backward(model(x))
            model(x).square().mean().backward()
            optimizer.step()
        elif registry.global_rank == 0:  # fails before any bucket is full; the other rank has reduced some by then
            backward(fails_in_backward(model(x), RuntimeError("simulated out of memory")))
        else:
            backward(model[1:](fails_in_backward(model[0](x), RuntimeError("simulated out of memory"))))

    with pytest.raises(RuntimeError) as caught:
        misuse()
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("re-entrant", "use_reentrant=False"),
        ("two micro-batches", "no_sync"),
        ("backward without optimizer", "call optimizer.backward(loss) for the last micro-batch"),
        ("backward raises", "simulated out of memory"),
    ],
)
def test_error_in_overlapped_backward_is_raised_on_all_ranks_and_zero_grad_recovers(
    world: World, kind: str, says: str
) -> None:
    for said, as_before in world.run(2, errors_of, kind):
        assert says in said
        assert as_before


def refused(kind: str) -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = wide_model()
        options: dict[str, Any] = {"overlap": True}
        if kind == "sharded":
            options["states"] = (Sharded("data"), Offloaded(0.5))
        elif kind == "nothing to reduce":
            options["average_data"] = False
        elif kind == "module":
            options["data_parallel"] = DistributedDataParallel(model)
        else:
            options["bucket_bytes"] = 0
        with pytest.raises(ValueError, match=r"overlap=True|bucket_bytes") as caught:
            ParallelOptimizer(adamw(model.parameters()), registry, **options)
        return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("sharded", "overlap=True does not work with Sharded"),
        ("nothing to reduce", "so backward has none to reduce; leave out one of the two arguments"),
        (
            "module",
            "overlap=True with data_parallel=DistributedDataParallel: the module reduces gradients during backward itself; "
            "leave overlap=True out, or leave data_parallel out and don't wrap the model",
        ),
        ("bytes", ">= 1"),
    ],
)
def test_overlap_with_unsupported_options_is_rejected(world: World, kind: str, says: str) -> None:
    for said in world.run(2, refused, kind):
        assert says in said
