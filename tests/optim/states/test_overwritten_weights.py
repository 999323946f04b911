"""Weights of which the optimizer keeps a copy (master weights, offload), written through ``.data``.

Steps 2 and 16 detect such writes and raise on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from meshstep.amp import Bf16, NaiveFp16
from meshstep.amp.casting import has_equal_values
from meshstep.optim import Fingerprints, Offloaded, ParallelOptimizer, Sharded
from meshstep.optim.states import gradient_completion as completion
from meshstep.optim.step.first_window_checks import check_not_overwritten
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, declare, gather_objects
from torch import nn
from world import World
from zero_models import small_buckets

ZERO1, ZERO2 = Sharded("data"), Sharded("data", gradients=True)
WITH_COPIES: dict[str, tuple[Any, torch.dtype, Any]] = {
    "bf16": ("bf16", torch.bfloat16, ()),
    "bf16 half gradients": (Bf16(main_grads=False), torch.bfloat16, ()),
    "fp16": (NaiveFp16(init_scale=64.0), torch.float16, ()),
    "offloaded": ("fp32", torch.float32, Offloaded(1.0)),
    "half offloaded": ("fp32", torch.float32, Offloaded(0.5)),
    "offloaded, bf16": ("bf16", torch.bfloat16, Offloaded(1.0)),
    "ZeRO-1": ("fp32", torch.float32, ZERO1),  # steps a copy of one weight, which is not contiguous
    "ZeRO-2, bf16": ("bf16", torch.bfloat16, ZERO2),
    "ZeRO-2, offloaded": ("fp32", torch.float32, (ZERO2, Offloaded(0.5))),
}
WITHOUT: dict[str, tuple[Any, torch.dtype, Any]] = {
    "fp32": ("fp32", torch.float32, ()),
    "split": (Bf16(split_masters=True), torch.bfloat16, ()),
    "stochastic": (Bf16(stochastic_rounding=True), torch.bfloat16, ()),
}
CASES = WITH_COPIES | WITHOUT


class Training:
    """Two layers on each rank of a data axis; one weight is not contiguous."""

    def __init__(self, registry: ProcessGroupRegistry, case: str, **options: Any) -> None:
        precision, dtype, states = CASES[case]
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)).to(dtype)
        first: Any = self.model[0]
        weight = first.weight
        weight.data = weight.detach().t().contiguous().t()
        declare(self.model, {"*": P()})
        sgd = torch.optim.SGD(self.model.named_parameters(), lr=2**-6)
        self.optimizer = ParallelOptimizer(sgd, registry, precision=precision, states=states, **options)
        self.params, self.rank, self.gathers = list(self.model.parameters()), registry.global_rank, list[int]()

    def step(self, factor: float = 1.0) -> str:
        self.optimizer.zero_grad()
        self.optimizer.backward(factor * sum((p.float().square().sum() for p in self.params), torch.zeros(())))
        with mock.patch.object(completion, "gather_objects", wraps=gather_objects) as gather:
            try:
                self.optimizer.step()
            except RuntimeError as error:
                return str(error)
            finally:
                self.gathers.append(gather.call_count)
        return ""

    def write(self) -> None:
        """Change all weights without a change of their version counters."""
        for param in self.params:
            param.data.clamp_(-0.0625, 0.03125)

    def weights(self) -> list[torch.Tensor]:
        return [param.detach().clone() for param in self.params]


@contextmanager
def training(case: str, **options: Any) -> Iterator[Training]:
    with ProcessGroupRegistry(Topology(data=2)) as registry, small_buckets(16):
        yield Training(registry, case, **options)


def written_before(case: str, step: int, ranks: tuple[int, ...], steps: int) -> tuple[list[tuple[int, str]], bool]:
    """Return the errors of ``steps`` steps, by step number, and whether the steps that raised left the written weights
    unchanged."""
    errors, kept = list[tuple[int, str]](), True
    with training(case) as run:
        for index in range(1, steps + 1):
            if index == step and run.rank in ranks:
                run.write()
            before = run.weights()
            if error := run.step():
                kept = kept and all(map(torch.equal, before, run.weights()))
                errors.append((index, error))
                assert run.step() == error  # raised again until the weights are reloaded
                run.optimizer.reload_from_model()
                assert run.step() == ""
    return errors, kept


@pytest.mark.parametrize("case", WITH_COPIES)
def test_overwritten_weights_with_optimizer_copy_raise_in_second_step_on_every_rank(world: World, case: str) -> None:
    for ((index, error),), kept in world.run(2, written_before, case, 2, (0, 1), 3):
        assert index == 2
        assert kept
        assert "was changed since the last step on rank 0" in error
        assert "call optimizer.reload_from_model()" in error


@pytest.mark.parametrize("case", ["bf16", "offloaded"])
def test_weights_overwritten_on_one_rank_raise_error_naming_that_rank_on_every_rank(world: World, case: str) -> None:
    for ((index, error),), kept in world.run(2, written_before, case, 2, (1,), 2):
        assert index == 2
        assert kept
        assert "0.weight was changed since the last step on rank 1" in error


def test_weights_written_before_step_16_raise_in_step_16(world: World) -> None:
    for ((index, _),), kept in world.run(2, written_before, "bf16", 16, (0, 1), 17):
        assert index == 16
        assert kept


@pytest.mark.parametrize("case", ["bf16", "ZeRO-1"])
def test_weights_written_before_step_3_are_not_detected(world: World, case: str) -> None:
    """docs/reference/LIMITS.md documents this limit."""
    assert world.run(2, written_before, case, 3, (0, 1), 4) == [([], True)] * 2


@pytest.mark.parametrize("case", WITHOUT)
def test_write_to_weights_without_master_or_offloaded_copy_does_not_raise(world: World, case: str) -> None:
    assert world.run(2, written_before, case, 2, (0, 1), 3) == [([], True)] * 2


def undisturbed(case: str) -> tuple[list[str], list[int]]:
    """Return the error of each of 20 steps, and the number of object all-gathers in each of the first 17.

    The first step overflows, then a state is loaded. Before step 18 a group is added, and before step 19 other code writes
    to the stepped tensors.
    """
    errors = []
    with training(case) as run:
        for index in range(1, 18):
            errors.append(run.step(float("inf") if index == 1 else 1.0))
            if index == 1:
                run.optimizer.load_state_dict(run.optimizer.state_dict())
        gathers = run.gathers[:]
        extra = nn.Parameter(torch.ones(7, dtype=run.params[0].dtype))
        annotate(extra, P(), "extra")
        run.optimizer.add_param_group({"params": [("extra", extra)]})
        run.params.append(extra)
        errors.append(run.step())
        with torch.no_grad():
            for piece in run.optimizer.stepped_tensors():
                piece.tensor.mul_(0.5)  # writes to the stepped tensors, which the next step copies to the model
        errors += [run.step() for _ in range(2)]
    return errors, gathers


@pytest.mark.parametrize("case", CASES)
def test_steps_without_overwritten_weights_do_not_raise(world: World, case: str) -> None:
    for errors, gathers in world.run(2, undisturbed, case):
        assert errors == [""] * 20
        assert gathers == [1, int(case in WITH_COPIES), *[0] * 15]


def masters_on_one_stage() -> tuple[list[int], str]:
    """Give the first stage a half-precision weight with master weights, and the second stage a float32 weight.

    Return the distinct values of the weight, times 8, and the error.
    """
    with ProcessGroupRegistry(Topology(pipe=2)) as registry:
        dtype = torch.float32 if registry.global_rank else torch.bfloat16
        param = nn.Parameter(torch.ones(8, dtype=dtype))
        annotate(param, P(), f"of stage {registry.global_rank}")
        optimizer = ParallelOptimizer(torch.optim.SGD([param], lr=0.125), registry, precision="bf16")
        optimizer.backward(param.float().square().sum())
        optimizer.step()
        optimizer.zero_grad()
        param.data.mul_(3)
        optimizer.backward(param.float().square().sum())
        with pytest.raises(RuntimeError) as raised:
            optimizer.step()
        return [int(value) for value in param.detach().unique().mul(8)], str(raised.value)


def test_overwritten_weights_raise_on_ranks_without_master_weights_too(world: World) -> None:
    for values, error in world.run(2, masters_on_one_stage):
        assert values == [18]  # (1 - 0.125 * 2) * 3: unchanged by the failed step
        assert error.startswith("of stage 0 was changed since the last step on rank 0")


def flipped_with_fingerprints(ranks: tuple[int, ...]) -> str:
    with training("bf16", check_replicas=Fingerprints(every=100)) as run:
        run.step()
        if run.rank in ranks:
            run.write()
        return run.step()


def test_fingerprints_suppress_overwrite_error_only_if_one_rank_wrote(world: World) -> None:
    assert world.run(2, flipped_with_fingerprints, (1,)) == [""] * 2
    assert all("reload_from_model()" in error for error in world.run(2, flipped_with_fingerprints, (0, 1)))


def test_frozen_parameter_may_be_overwritten() -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        model = nn.Linear(4, 3).bfloat16()
        model.bias.requires_grad_(False)
        optimizer = ParallelOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1), registry, precision="bf16")
        for _ in range(2):
            optimizer.zero_grad()
            optimizer.backward(model(torch.ones(1, 4).bfloat16()).float().sum())
            optimizer.step()
            model.bias.data.fill_(3)
        assert bool((model.bias == 3).all())


@pytest.mark.parametrize(
    ("copy", "equal"),
    [
        ([1.0, 2.0, 0.0], True),
        ([1.0, 2.0, -0.0], True),
        ([1.0 + 2**-12, 2.0, 0.0], True),  # rounds to the same bfloat16 value
        ([1.0 + 2**-7, 2.0, 0.0], False),
        ([1.0, float("nan"), 0.0], False),
        ([1.0, 2.0], False),
    ],
)
def test_optimizer_copy_and_weight_are_compared_in_dtype_of_weight(copy: list[float], equal: bool) -> None:
    assert has_equal_values(torch.tensor([1.0, 2.0, 0.0], dtype=torch.bfloat16), torch.tensor(copy)) is equal


def test_nan_in_both_optimizer_copy_and_weight_compares_as_equal() -> None:
    assert has_equal_values(torch.tensor([torch.nan, 2.0]).bfloat16(), torch.tensor([torch.nan, 2.0]))


def test_error_names_first_rank_with_overwritten_weights() -> None:
    check_not_overwritten([None, None], False)
    check_not_overwritten([None, "w"], True)
    with pytest.raises(RuntimeError, match="v was changed since the last step on rank 1"):
        check_not_overwritten([None, "v", "w"], True)
    with pytest.raises(RuntimeError, match="w was changed since the last step on rank 0"):
        check_not_overwritten(["w"], True)
