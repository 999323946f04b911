"""`ParallelOptimizer.refresh`: parameters that are frozen and unfrozen between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from meshstep.amp import Bf16
from meshstep.optim import Lion, Muon, Offloaded, ParallelOptimizer
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, shard
from placements import EXCHANGES, ZERO1, ZERO2
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from world import World

OPTIONS: dict[str, dict[str, Any]] = {
    **EXCHANGES,
    "offload": {"states": Offloaded(0.5)},
    "ZeRO-2, offload": {"states": (ZERO2, Offloaded(1.0))},
}
SPECS = {"embed": P(), "norm": P(), "up": P("tensor"), "down": P(None, "tensor"), "head": P()}
GROUPS: list[dict[str, Any]] = [
    {"names": ("embed", "norm", "head"), "lr": 0.125},
    {"names": ("up", "down"), "lr": 0.03125},
]

# The parameters that train in each step: gradual unfreezing from the head down, then other layers.
TRAINED: list[tuple[str, ...]] = [
    ("head",),
    ("head",),
    ("down", "head"),
    ("up", "down", "head"),
    ("embed", "norm", "up", "down", "head"),
    ("embed", "norm", "up", "down", "head"),
    ("embed", "down"),
    ("embed", "norm", "up", "down", "head"),
    ("embed", "norm", "up", "down", "head"),
]


def full_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(4, 6, generator=generator, dtype=torch.float64) for name in SPECS}


def loss_of(params: Mapping[str, Tensor], factor: float) -> Tensor:
    """Return a loss whose gradient depends on the weights and on the data rank's ``factor``."""
    return sum((param.double().square() * factor + param.double()).sum() for param in params.values())  # type: ignore[return-value]


def freeze_all_except(params: dict[str, nn.Parameter], names: tuple[str, ...]) -> None:
    for name, param in params.items():
        param.requires_grad_(name in names)


def adamw(params: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": [(n, params[n]) for n in group["names"]], "lr": group["lr"]} for group in GROUPS]
    return torch.optim.AdamW(groups, weight_decay=0.25, fused=True)


def dense_run(dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """Yield the weights after each step of a torch optimizer in one process, in float64.

    With ``dtype`` bfloat16 the loss reads rounded weights, as with master weights.
    """
    params = {name: nn.Parameter(weight.to(dtype).double()) for name, weight in full_weights().items()}
    optimizer = adamw(params)
    for names in TRAINED:
        freeze_all_except(params, names)
        optimizer.zero_grad()
        read = {name: param + (param.to(dtype).double() - param).detach() for name, param in params.items()}
        loss_of(read, 1.5).backward()
        torch.nn.utils.clip_grad_norm_([param for param in params.values() if param.grad is not None], 2.0)
        optimizer.step()
        yield {name: param.detach().clone() for name, param in params.items()}


def run(how: str, mode: str, declared: bool, calls: bool = True) -> list[dict[str, float]]:
    """Return for each step the largest difference of each parameter's shard from the dense run.

    Args:
        mode: "float64", or a mode with master weights.
        declared: False: frozen parameters have no spec until they are unfrozen.
        calls: True: call `refresh` each time.
    """
    dtype = torch.float64 if mode == "float64" else torch.bfloat16
    precision: Any = {"float64": "fp32", "bf16": "bf16", "split": Bf16(split_masters=True)}[mode]
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        params = {name: nn.Parameter(shard(w, SPECS[name], registry).to(dtype)) for name, w in full_weights().items()}

        def change(names: tuple[str, ...]) -> None:
            freeze_all_except(params, names)
            for name in params if declared else names:
                annotate(params[name], SPECS[name], name)

        change(TRAINED[0])
        optimizer = ParallelOptimizer(adamw(params), registry, max_norm=2.0, precision=precision, **OPTIONS[how])
        differences = []
        for names, wanted in zip(TRAINED, dense_run(dtype), strict=True):
            change(names)
            optimizer.zero_grad()
            if calls:
                optimizer.refresh()
            optimizer.backward(loss_of(params, 1.0 + registry.coordinate["data"]))
            optimizer.step()
            differences.append(
                {
                    name: float((param.detach() - shard(wanted[name], SPECS[name], registry)).abs().max())
                    for name, param in params.items()
                }
            )
            if (shards := optimizer.state_dict()["meshstep"]["weights"].get("shards")) is not None:
                assert shards["pieces"] == [(row.offset, row.tensor.numel()) for row in optimizer.stepped_tensors()]
        return differences


CASES = [
    *((how, "float64", declared) for how in OPTIONS for declared in (True, False)),
    *((how, mode, True) for how in ("whole", "ZeRO-1", "ZeRO-2", "ZeRO-2, offload") for mode in ("bf16", "split")),
]


@pytest.mark.long
@pytest.mark.parametrize(("how", "mode", "declared"), CASES)
def test_gradual_unfreezing_with_refresh_matches_torch_optimizer(
    world: World, how: str, mode: str, declared: bool
) -> None:
    bound = 1e-12 if mode == "float64" else 2**-6
    for of_rank in world.run(4, run, how, mode, declared):
        assert max(max(step.values()) for step in of_rank) < bound


def test_gradual_unfreezing_run_without_refresh_raises(world: World) -> None:
    """Without `refresh` the run stops with an error, so the run with `refresh` needs its calls."""
    with pytest.raises(Exception, match=r"call optimizer\.refresh"):
        world.run(4, run, "whole", "float64", True, False)


# Other optimizers and data parallelism --------------------------------------------------------------------------------


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def optimizers_of(how: str, model: nn.Module) -> Any:
    matrices = [(name, param) for name, param in model.named_parameters() if param.dim() > 1]
    vectors = [(name, param) for name, param in model.named_parameters() if param.dim() == 1]
    if how == "list":
        return [torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.AdamW(vectors, lr=0.05)]
    if how == "muon":
        return [Muon(matrices, lr=0.05), torch.optim.AdamW(vectors, lr=0.05)]
    return (Lion if how == "lion" else torch.optim.AdamW)(model.named_parameters(), lr=0.05)


def unfreeze_layers(how: str, ranks: int) -> tuple[list[Tensor], list[float]]:
    """Train the last layer, then both, then the first, then both, one step each, with a torch schedule.

    Return the full weights after the last step, and the learning rates.
    """
    with ProcessGroupRegistry(Topology(data=ranks)) as registry:
        model = layers()
        model[0].requires_grad_(False)
        options: dict[str, Any] = {}
        if how == "fully_shard":
            for layer in (model[0], model[2]):
                fully_shard(layer)
            options = {"data_parallel": fully_shard(model)}
        if how == "fixed order":
            options = {"sum_order": "fixed", "accumulation_steps": 1}
        optimizer = ParallelOptimizer(optimizers_of(how, model), registry, **options)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for step, (first, last) in enumerate([(False, True), (True, True), (True, False), (True, True)]):
            model[0].requires_grad_(first)
            model[2].requires_grad_(last)
            optimizer.refresh()
            optimizer.zero_grad()
            mine = range(2)[registry.rank("data") :: ranks]
            losses = [model(batch(step, rank)).square().mean() for rank in mine]
            optimizer.backward(torch.stack(losses).mean())
            optimizer.step()
            schedule.step()
        weights = [param.detach() for param in model.parameters()]
        full = [weight.full_tensor() if isinstance(weight, DTensor) else weight for weight in weights]
        return full, [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("how", ["adamw", "lion", "list", "muon", "fully_shard", "fixed order"])
def test_unfreezing_with_schedule_on_two_ranks_matches_single_process(world: World, how: str) -> None:
    dense = "adamw" if how in ("fully_shard", "fixed order") else how
    wanted, rates = unfreeze_layers(dense, 1)
    assert rates == pytest.approx([0.01] * len(rates))
    for weights, found in world.run(2, unfreeze_layers, how, 2):
        assert found == rates
        for one, other in zip(weights, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def group_added_after_unfreezing() -> Tensor:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        params = {name: nn.Parameter(torch.zeros(3), requires_grad=name != "b") for name in "abc"}
        sgd = torch.optim.SGD([params["a"], params["b"]], lr=1.0)
        optimizer = ParallelOptimizer(sgd, registry, states=ZERO1)
        params["b"].requires_grad_(True)
        optimizer.add_param_group({"params": [params["c"]], "lr": 0.5})
        optimizer.backward(torch.stack([*params.values()]).sum())
        optimizer.step()
        return torch.stack([*params.values()]).detach()[:, 0]


def test_add_param_group_after_unfreezing_also_steps_unfrozen_parameters(world: World) -> None:
    for found in world.run(2, group_added_after_unfreezing):
        assert found.tolist() == [-1.0, -1.0, -0.5]


# Errors ---------------------------------------------------------------------------------------------------------------


def message_of(function: Callable[[], object]) -> str:
    try:
        function()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "no error"


def unfrozen_without_call(how: str, mode: str, declared: bool, ranks: tuple[int, ...]) -> tuple[list[str], float]:
    """Unfreeze "up" on ``ranks`` after the first step. Return the errors of three steps and the change of "up"."""
    precision: Any = {"float64": "fp32", "bf16": "bf16", "split": Bf16(split_masters=True)}[mode]
    dtype = torch.float64 if mode == "float64" else torch.bfloat16
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        params = {name: nn.Parameter(shard(w, SPECS[name], registry).to(dtype)) for name, w in full_weights().items()}
        freeze_all_except(params, TRAINED[0])
        for name in params if declared else TRAINED[0]:
            annotate(params[name], SPECS[name], name)
        optimizer = ParallelOptimizer(
            adamw(params), registry, precision=precision, on_nonfinite="raise", **OPTIONS[how]
        )
        before = params["up"].detach().clone()
        found = []
        for step in range(3):
            if step and registry.global_rank in ranks:
                params["up"].requires_grad_(True)

            def one_step() -> None:
                optimizer.zero_grad()
                optimizer.backward(loss_of(params, 1.0))
                optimizer.step()

            found.append(message_of(one_step))
        return found, float((params["up"].detach() - before).abs().max())


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (1,)], ids=["all ranks", "one rank"])
@pytest.mark.parametrize(("how", "mode", "declared"), CASES)
def test_unfreezing_without_refresh_raises_on_every_rank(
    world: World, how: str, mode: str, declared: bool, ranks: tuple[int, ...]
) -> None:
    for (first, *later), change in world.run(4, unfrozen_without_call, how, mode, declared, ranks):
        assert first == "no error"
        for text in later:
            assert "up was frozen when the optimizer was made" in text
            assert "optimizer.refresh()" in text
        assert change == 0.0


def wrong_refreshes() -> list[str]:
    """Return the errors of `refresh` within a window, with a parameter that is unfrozen on one rank only, beside DDP, and
    with an unfrozen parameter without a spec."""
    with ProcessGroupRegistry(Topology(data=2, tensor=1)) as registry:
        params = {name: nn.Parameter(torch.zeros(3), requires_grad=name != "b") for name in "ab"}
        optimizer = ParallelOptimizer(torch.optim.SGD(params.items(), lr=1.0), registry)
        optimizer.backward(params["a"].sum())
        found = [message_of(optimizer.refresh)]
        optimizer.step()
        params["b"].requires_grad_(registry.global_rank == 0)
        found.append(message_of(optimizer.refresh))
        params["b"].requires_grad_(False)
        optimizer.refresh()
        model = layers()
        model[0].requires_grad_(False)
        ddp = DistributedDataParallel(model)
        optimizer = ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), registry, data_parallel=ddp)
        model[0].requires_grad_(True)
        found.append(message_of(optimizer.refresh))
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        annotate(params["a"], P(), "a")
        optimizer = ParallelOptimizer(torch.optim.SGD(params.items(), lr=1.0), registry)
        params["b"].requires_grad_(True)
        found.append(message_of(optimizer.refresh))
        annotate(params["b"], P(), "b")
        optimizer.refresh()
        optimizer.backward(params["b"].sum())
        optimizer.step()
        assert params["b"].tolist() == [-1.0] * 3
    return found


def test_invalid_refresh_call_raises_on_every_rank(world: World) -> None:
    for in_window, on_one_rank, beside_ddp, without_spec in world.run(2, wrong_refreshes):
        assert "refresh() was called with accumulated gradients" in in_window
        assert (
            "rank 1 has [b: P(), shape (3), float32, param group 0, frozen]; give b the same requires_grad on both ranks"
            in on_one_rank
        )
        assert "was unfrozen, but the DistributedDataParallel" in beside_ddp
        assert "no spec for b" in without_spec
