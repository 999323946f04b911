"""Settings that ranks compare at construction, and initial weights that they compare in the first step."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from meshstep.optim import Bf16Compression, ByNorm, Offloaded, ParallelOptimizer, ReplicaMismatchError, Sharded, Skip
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, copy_to, declare, reduce_from
from meshstep.parallel.mesh.agreement import check_all_say_the_same, describe
from small_models import parameter
from torch import Tensor, nn
from world import World

# Per setting: the values of the two ranks, and the expected error.
DIFFERENT: dict[str, tuple[Any, Any, str]] = {
    "max_norm": (1.0, 2.0, "max_norm is ByNorm(max_norm=1, norm_type=None) on rank 0 and ByNorm(max_norm=2"),
    "rule": (ByNorm(1.0), None, "max_norm is ByNorm(max_norm=1, norm_type=None) on rank 0 and None on rank 1"),
    "norm_type": (3.0, 2.0, "norm_type is 3 on rank 0 and 2 on rank 1"),
    "reduction": ("packed", "per_group", "reduction is 'packed' on rank 0 and 'per_group' on rank 1"),
    "check_replicas": (True, "first", "check_replicas is True on rank 0 and 'first' on rank 1"),
    "per_parameter_norms": (False, True, "per_parameter_norms is False on rank 0 and True on rank 1"),
    "commit": (None, bool, "commit is None on rank 0 and 'given' on rank 1"),
    "precision": ("fp32", "fp16", "precision is Fp32() on rank 0 and TorchFp16("),
    "masters": ("fp32", "bf16", "precision is Fp32() on rank 0 and Bf16("),
    "accumulation_steps": (2, None, "accumulation_steps is 2 on rank 0 and None on rank 1"),
    "average_data": (True, False, "average_data is True on rank 0 and False on rank 1"),
    "overlap": (True, False, "overlap is True on rank 0 and False on rank 1"),
    "compression": (
        None,
        Bf16Compression(),
        "compression is None on rank 0 and Bf16Compression(error_feedback=True) on rank 1",
    ),
    "bucket_bytes": (64, 128, "bucket_bytes is 64 on rank 0 and 128 on rank 1"),
    "states": (Offloaded(0.5), Offloaded(0.25), "Offloaded(fraction=0.5)) on rank 0 and (Offloaded(fraction=0.25)"),
    "on_nonfinite": ("skip", Skip(3), "on_nonfinite is 'skip' on rank 0 and Skip(max_consecutive=3) on rank 1"),
    "lr": (0.1, 0.2, "lr of param group 0 is 0.1 on rank 0 and 0.2 on rank 1"),
    "momentum": (0.0, 0.9, "momentum of param group 0 is 0 on rank 0 and 0.9 on rank 1"),
    "kind": ("SGD", "AdamW", "the optimizer is 'SGD' on rank 0 and 'AdamW' on rank 1"),
}


def told(setting: str, values: tuple[Any, Any]) -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        value = values[registry.rank("data")]
        kind: Any = getattr(torch.optim, value if setting == "kind" else "SGD")
        inner = kind([parameter("a")], lr=value if setting == "lr" else 0.1)
        if setting == "momentum":
            inner.param_groups[0]["momentum"] = value
        options: dict[str, Any] = {}
        if setting not in ("lr", "momentum", "kind"):
            options[{"rule": "max_norm", "masters": "precision"}.get(setting, setting)] = value
        try:
            ParallelOptimizer(inner, registry, **options)
        except ValueError as error:
            return str(error)
        return "no error"


@pytest.mark.default_cases(99)  # all cases
@pytest.mark.parametrize("setting", DIFFERENT)
def test_setting_that_differs_between_ranks_raises_on_every_rank(world: World, setting: str) -> None:
    first, second, said = DIFFERENT[setting]
    texts = world.run(2, told, setting, (first, second))
    assert said in texts[0]
    assert texts[0] == texts[1]
    assert world.run(2, told, setting, (first, first)) == ["no error"] * 2


@pytest.mark.parametrize("other", range(4))
def test_setting_that_differs_on_one_of_four_ranks_is_named_in_error(other: int) -> None:
    rates = ["0.2" if rank == other else "0.1" for rank in range(4)]
    first, rank, value = (0, other, "0.2") if other else (0, 1, "0.1")
    message = f"lr is {rates[first]} on rank {first} and {value} on rank {rank}: "
    with pytest.raises(ValueError, match=re.escape(message)):
        check_all_say_the_same([{"lr": rate} for rate in rates])


def test_equivalent_values_of_max_norm_on_two_ranks_are_accepted(world: World) -> None:
    assert world.run(2, told, "max_norm", (1, ByNorm(1.0))) == ["no error"] * 2


def stages_with_rates_of_their_own() -> str:
    with ProcessGroupRegistry(Topology(pipe=2)) as registry:
        inner = torch.optim.SGD([parameter("a")], lr=0.1 * (1 + registry.rank("pipe")))
        ParallelOptimizer(inner, registry, max_norm=0.5)
        return "no error"


def test_pipeline_stages_may_have_different_learning_rates(world: World) -> None:
    assert world.run(2, stages_with_rates_of_their_own) == ["no error"] * 2


# Initial weights -----------------------------------------------------------------------------------------------------

STATES: dict[str, Any] = {
    "whole": (),
    "sharded": Sharded("data"),
    "sharded gradients": Sharded("data", gradients=True),
    "offloaded": Offloaded(1.0),
}


def other_seeds(states: str, check: Any) -> tuple[str, bool]:
    """Return the error of two steps, and whether the weight is unchanged."""
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        torch.manual_seed(registry.rank("data"))
        model = nn.Linear(6, 5)
        declare(model, {"*": P()})
        inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
        options = {"states": STATES[states], "check_replicas": check}
        optimizer = ParallelOptimizer(inner, registry, max_norm=0.5, **options)
        before = model.weight.detach().clone()
        text = "no error"
        try:
            for _ in range(2):
                optimizer.zero_grad()
                optimizer.backward(model(torch.ones(2, 6)).square().sum())
                optimizer.step()
        except ReplicaMismatchError as error:
            text = ", ".join(map(str, error.mismatches))
        return text, torch.equal(before, model.weight)


@pytest.mark.parametrize("states", STATES)
def test_replicas_initialized_with_different_seeds_raise_in_first_step(world: World, states: str) -> None:
    """With ``check_replicas=False`` they do not raise."""
    for text, unchanged in world.run(4, other_seeds, states, "first"):
        assert "weight: the parameter differs along axis 'data'" in text
        assert "tensor" not in text
        assert unchanged
    for text, unchanged in world.run(4, other_seeds, states, False):
        assert (text, unchanged) == ("no error", False)


class Block(nn.Module):
    """A column-parallel and a row-parallel layer after a replicated norm."""

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        self.registry = registry
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(4)
        torch.manual_seed(1 + registry.rank("tensor"))
        self.up, self.down = nn.Linear(4, 3, bias=False), nn.Linear(3, 4, bias=False)

    def forward(self, x: Tensor, forgets: bool) -> Tensor:
        x = self.norm(x)
        x = x if forgets else copy_to(x, self.registry, "tensor")
        return reduce_from(self.down(self.up(x).tanh()), self.registry, "tensor")


def silent_bug(bug: str) -> str:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        model = Block(registry)
        declare(
            model,
            {"norm.*": P(), "up.weight": P() if bug == "split" else P("tensor"), "down.weight": P(None, "tensor")},
        )
        optimizer = ParallelOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1), registry, max_norm=0.5)
        generator = torch.Generator().manual_seed(registry.rank("tensor") if bug == "batch" else 0)
        x = torch.randn(5, 4, generator=generator)
        try:
            for step in range(2):
                optimizer.zero_grad()
                loss = model(x, forgets=bug == "all-reduce").square().sum()
                optimizer.backward(None if bug == "no loss" and registry.rank("tensor") else loss)
                optimizer.step()
                assert step == 0 or bug == "none"
        except ReplicaMismatchError as error:
            return ", ".join(map(str, error.mismatches))
        return "no error"


@pytest.mark.parametrize(
    ("bug", "found"),
    [
        ("none", "no error"),
        ("split", "up.weight: the parameter differs along axis 'tensor'"),
        ("all-reduce", "norm.weight: the gradient differs along axis 'tensor'"),
        ("batch", "norm.weight: the gradient differs along axis 'tensor'"),
    ],
)
def test_first_step_finds_wrong_specs_missing_all_reduce_and_different_batches(
    world: World, bug: str, found: str
) -> None:
    for text in world.run(2, silent_bug, bug):
        assert found in text


def one_tensor_rank_without_a_loss() -> str:
    """Call backward with a loss on one tensor rank only; each rank should compute the complete replicated gradient.

    Return the error.
    """
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        w = parameter("w", 3, value=2.0)
        optimizer = ParallelOptimizer(torch.optim.SGD([w], lr=0.1), registry, max_norm=0.5)
        optimizer.backward(None if registry.rank("tensor") else w.square().sum())
        try:
            optimizer.step()
        except ReplicaMismatchError as error:
            return ", ".join(map(str, error.mismatches))
        return "no error"


def test_loss_on_one_of_two_tensor_ranks_raises_in_first_step(world: World) -> None:
    assert world.run(2, one_tensor_rank_without_a_loss) == ["w: the gradient differs along axis 'tensor'"] * 2


def added_later() -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        a = parameter("a")
        optimizer = ParallelOptimizer(torch.optim.SGD([a], lr=0.1), registry)
        optimizer.backward(a.sum())
        optimizer.step()
        b = nn.Parameter(torch.full((3,), float(registry.rank("data"))))
        annotate(b, P(), "b")
        optimizer.add_param_group({"params": [b]})
        optimizer.zero_grad()
        optimizer.backward(a.sum() + b.sum())
        with pytest.raises(ReplicaMismatchError) as caught:
            optimizer.step()
        return ", ".join(map(str, caught.value.mismatches))


def test_diverged_added_parameter_raises_in_its_first_step(world: World) -> None:
    assert world.run(2, added_later) == ["b: the parameter differs along axis 'data'"] * 2


def test_replica_check_in_single_process_passes() -> None:
    with ProcessGroupRegistry(Topology(data=1)) as registry:
        a = parameter("a", value=1.0)
        optimizer = ParallelOptimizer(torch.optim.SGD([a], lr=0.1), registry, check_replicas=True)
        optimizer.backward(a.square().sum())
        stats = optimizer.step()
        assert stats is not None
        assert float(stats.total_norm) == pytest.approx(4.0)


def test_describe_ignores_order_of_dict_entries_with_keys_of_mixed_types() -> None:
    assert describe({1: 2, "a": 3}) == describe({"a": 3, 1: 2})
    assert describe({1: 2, "a": 3}) != describe({1: 2, "a": 4})


def test_describe_shows_modules_by_their_class_only() -> None:
    """Modules hold the weights of one rank, so their attributes must not be compared."""
    assert describe(nn.Linear(2, 2)) == describe(nn.Linear(3, 1)) == "Linear"
    assert describe({"model": nn.Linear(2, 2)}) == "{'model': Linear}"
