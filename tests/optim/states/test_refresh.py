"""`ParallelOptimizer.refresh`: parameters that are frozen and unfrozen between steps train as in a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from meshstep.amp import Bf16
from meshstep.optim import Offloaded, ParallelOptimizer, Sharded
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, shard
from torch import Tensor, nn
from world import World

ZERO1, ZERO2 = Sharded("data"), Sharded("data", gradients=True)
OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "overlap": {"overlap": True},
    "ZeRO-1": {"states": ZERO1},
    "ZeRO-2": {"states": ZERO2},
    "offload": {"states": Offloaded(0.5)},
    "ZeRO-2, offload": {"states": (ZERO2, Offloaded(0.5))},
}
SPECS = {"embed": P(), "up": P("tensor"), "down": P(None, "tensor"), "head": P()}
GROUPS: list[dict[str, Any]] = [{"names": ("embed", "head"), "lr": 0.125}, {"names": ("up", "down"), "lr": 0.03125}]
STEPS = 9

# The parameters that train in each step: gradual unfreezing from the head down, then other layers.
TRAINED: list[tuple[str, ...]] = [
    ("head",),
    ("head",),
    ("down", "head"),
    ("up", "down", "head"),
    ("embed", "up", "down", "head"),
    ("embed", "up", "down", "head"),
    ("embed", "down"),
    ("embed", "up", "down", "head"),
    ("embed", "up", "down", "head"),
]


def full_weights() -> dict[str, Tensor]:
    """Return the weights of the dense model."""
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(4, 6, generator=generator, dtype=torch.float64) for name in SPECS}


def loss_of(params: dict[str, Tensor], factor: float) -> Tensor:
    """Return a loss whose gradient depends on the weights and on the data rank's ``factor``."""
    return sum((param.double().square() * factor + param.double()).sum() for param in params.values())  # type: ignore[return-value]


def freeze_all_except(params: dict[str, nn.Parameter], names: tuple[str, ...]) -> None:
    for name, param in params.items():
        param.requires_grad_(name in names)


def adamw(params: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": [(n, params[n]) for n in group["names"]], "lr": group["lr"]} for group in GROUPS]
    return torch.optim.AdamW(groups, weight_decay=0.25)


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
        how: The key of the options.
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
        optimizer = ParallelOptimizer(
            adamw(params), registry, max_norm=2.0, precision=precision, **OPTIONS[how]
        )
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
        return differences


CASES = [
    *((how, "float64", declared) for how in OPTIONS for declared in (True, False)),
    *((how, mode, True) for how in ("whole", "ZeRO-1", "ZeRO-2", "ZeRO-2, offload") for mode in ("bf16", "split")),
]


@pytest.mark.parametrize(("how", "mode", "declared"), CASES)
def test_gradual_unfreezing_equals_torch_optimizer(world: World, how: str, mode: str, declared: bool) -> None:
    bound = 1e-12 if mode == "float64" else 2**-6
    for of_rank in world.run(4, run, how, mode, declared):
        assert max(max(step.values()) for step in of_rank) < bound


# Errors ---------------------------------------------------------------------------------------------------------------


def message_of(function: Callable[[], object]) -> str:
    try:
        function()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "no error"


def unfrozen_without_call(how: str, mode: str, declared: bool, ranks: tuple[int, ...]) -> tuple[list[str], float]:
    """Unfreeze "up" on these ranks after the first step. Return the errors of the next steps, and the change of "up"."""
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
