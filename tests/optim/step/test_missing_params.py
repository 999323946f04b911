"""The check for trainable parameters of the model that the optimizer lacks, in the first step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from meshstep import Booster, ParallelOptimizer, ProcessGroupRegistry, Topology
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from world import World

MISSING = "the model has trainable parameters that the optimizer does not have and will never step, on"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(3, 4)).square().sum()  # type: ignore[no-any-return]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def replace_head(model: nn.Module) -> None:
    model.get_submodule("module" if hasattr(model, "module") else "").head = nn.Linear(4, 2)


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter, as adapter libraries install them."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.adapter = base, nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x)  # type: ignore[no-any-return]


def outcome(model: nn.Module, optimizer: ParallelOptimizer[Any]) -> str:
    """Return the error or warning of the first step, or "stepped"; after an error the weights are unchanged."""
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.backward(loss_of(model))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            optimizer.step()
        except RuntimeError as error:
            after = list(model.parameters())
            assert all(torch.equal(old, new.detach()) for old, new in zip(before, after, strict=True))
            return str(error)
    return next((str(one.message) for one in warned if MISSING in str(one.message)), "stepped")


# Modules replaced or added after the optimizer was made ---------------------------------------------------------------


def boosted(data_parallel: Any, only: int | None, **options: Any) -> str:
    booster = Booster(data_parallel=data_parallel, check_replicas=False, **options)
    with booster.registry as registry:
        net = Net()
        model, optimizer, *_ = booster.boost(net, adamw(net))
        if only in (None, registry.global_rank):
            replace_head(model)
        return outcome(model, optimizer)


@pytest.mark.parametrize("data_parallel", [None, "ddp", "zero1", "zero2", "fsdp"])
def test_first_step_after_replacing_module_raises_with_parameter_names_on_every_rank(
    world: World, data_parallel: str | None
) -> None:
    for text in world.run(2, boosted, data_parallel, None):
        assert f"{MISSING} ranks 0-1: head.weight, head.bias. " in text
        assert "make the optimizer after all changes of the model, or add the parameters with add_param_group" in text


@pytest.mark.parametrize("data_parallel", [None, "zero1"])
def test_first_step_after_replacing_module_on_one_rank_raises_on_every_rank(
    world: World, data_parallel: str | None
) -> None:
    for text in world.run(2, boosted, data_parallel, 1):
        assert f"{MISSING} rank 1: head.weight, head.bias. " in text


def with_warning(only: int | None) -> str:
    return boosted(None, only, on_missing_params="warn")


def test_on_missing_params_warn_warns_instead_of_raising(world: World) -> None:
    for text in world.run(2, with_warning, 1):
        assert text.startswith(f"{MISSING} rank 1: head.weight, head.bias. ")


def test_on_missing_params_rejects_values_other_than_raise_and_warn() -> None:
    with pytest.raises(ValueError, match="on_missing_params='ignore': give 'raise' or 'warn'"):
        ParallelOptimizer(adamw(Net()), ProcessGroupRegistry(Topology(data=1)), on_missing_params="ignore")  # type: ignore[call-overload]


def test_adapter_added_after_optimizer_raises_with_names_in_single_process() -> None:
    booster = Booster()
    net = Net()
    model, optimizer, *_ = booster.boost(net, adamw(net))
    model.body = Adapted(model.body)  # type: ignore[assignment]
    assert f"{MISSING} rank 0: body.adapter.weight. " in outcome(model, optimizer)
    optimizer.add_param_group({"params": model.body.adapter.parameters()})  # type: ignore[union-attr]
    optimizer.zero_grad()
    assert outcome(model, optimizer) == "stepped"


def by_ddp(left_out: bool) -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        net = Net()
        model = DistributedDataParallel(net, process_group=registry.group("data"))
        params = net.body if left_out else net
        return outcome(model, ParallelOptimizer(adamw(params), registry, data_parallel=model))


def test_parameters_of_data_parallel_module_left_out_of_the_optimizer_raise(world: World) -> None:
    assert world.run(2, by_ddp, False) == ["stepped"] * 2
    for text in world.run(2, by_ddp, True):
        assert f"{MISSING} ranks 0-1: head.weight, head.bias. " in text


# Parameters that were added after DistributedDataParallel was made ------------------------------------------------------


def beside_ddp(how: str) -> tuple[str, list[Tensor]]:
    """Return the error and the weights after a step. ``how`` says which parameters the module does not have."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        net = Net()
        if how == "ignored":
            ignored = ["head.weight", "head.bias"]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ignored)
        model = DistributedDataParallel(net, process_group=registry.group("data"))
        options: dict[str, Any] = {"data_parallel": model, "check_replicas": False}
        if how == "wrapped again":
            net.body = Adapted(net.body)  # type: ignore[assignment]
            options["data_parallel"] = model = DistributedDataParallel(net, process_group=registry.group("data"))
        early = how == "added to the optimizer" and ParallelOptimizer(adamw(net), registry, **options)
        if how not in ("ignored", "wrapped again"):
            net.body = Adapted(net.body)  # type: ignore[assignment]
        if how == "averaged by other code":
            options["average_data"] = False
        try:
            if early:
                early.add_param_group({"params": net.body.adapter.parameters()})  # type: ignore[union-attr]
            optimizer = ParallelOptimizer(adamw(net), registry, **options)
        except ValueError as error:
            return str(error), []
        optimizer.backward(model(torch.ones(3, 4) + registry.global_rank).square().sum())
        optimizer.step()
        return "", [param.detach() for param in net.parameters()]


@pytest.mark.parametrize("how", ["added to the optimizer", "added before the optimizer"])
def test_parameters_added_after_ddp_raise_because_ddp_does_not_average_them(world: World, how: str) -> None:
    for text, _ in world.run(2, beside_ddp, how):
        assert "is not in the DistributedDataParallel in data_parallel=, so its gradient would not be averaged" in text
        assert "Wrap the model with DistributedDataParallel after its last change" in text


def test_parameters_added_before_ddp_is_made_again_stay_equal_on_replicas(world: World) -> None:
    (text, first), (_, second) = world.run(2, beside_ddp, "wrapped again")
    assert text == ""
    assert len(first) == 5
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("how", ["ignored", "averaged by other code"])
def test_parameters_that_other_code_averages_are_accepted_beside_ddp(world: World, how: str) -> None:
    assert [text for text, _ in world.run(2, beside_ddp, how)] == ["", ""]


# Parameters that are not missing ---------------------------------------------------------------------------------------


def frozen(model: Net, registry: ProcessGroupRegistry) -> ParallelOptimizer[Any]:
    model.head.requires_grad_(False)
    return ParallelOptimizer(adamw(model.body), registry)


def combined(model: Net, registry: ProcessGroupRegistry) -> ParallelOptimizer[Any]:
    return ParallelOptimizer([adamw(model.body), adamw(model.head)], registry)


def several(model: Net, registry: ProcessGroupRegistry) -> ParallelOptimizer[Any]:
    optimizer = ParallelOptimizer(adamw(model.body), registry)
    optimizer.other = ParallelOptimizer(adamw(model.head), registry)  # type: ignore[attr-defined]
    return optimizer


def replaced_before(model: Net, registry: ProcessGroupRegistry) -> ParallelOptimizer[Any]:
    model.head = nn.Linear(4, 2)
    return ParallelOptimizer(adamw(model), registry)


@pytest.mark.parametrize("make", [frozen, combined, several, replaced_before])
def test_frozen_parameters_and_those_of_other_optimizers_do_not_count_as_missing(
    make: Callable[[Net, ProcessGroupRegistry], ParallelOptimizer[Any]],
) -> None:
    model, registry = Net(), ProcessGroupRegistry(Topology(data=1))
    optimizer = make(model, registry)
    optimizer._compare_with(model)
    assert outcome(model, optimizer) == "stepped"


def gathered(unused: bool) -> str:
    """Step while `fully_shard` has gathered parameters, in a module whose last call had no backward.

    Return "stepped".
    """
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = Net()
        for part in (model.body, model.head, model):
            fully_shard(part, mesh=registry.device_mesh("data"), reshard_after_forward=False)
        optimizer = ParallelOptimizer(adamw(model), registry, data_parallel=model)
        optimizer.backward(loss_of(model))
        if unused:
            model(torch.ones(3, 4))
            assert not any(hasattr(param, "to_local") for param in model.parameters()), "the parameters are gathered"
        optimizer.step()
        return "stepped"


def test_gathered_parameters_of_fully_shard_do_not_count_as_missing(world: World) -> None:
    assert world.run(2, gathered, True) == ["stepped"] * 2
