"""Numeric arguments of a wrong type or out of range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from meshstep.optim import (
    AdaGC,
    ByName,
    ByNorm,
    ByValue,
    Offloaded,
    ParallelOptimizer,
    PerParameter,
    Skip,
    WarmUp,
    clip_grad_norm_,
)
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import Tensor, nn
from world import World

NUMBER = "give a number or a function of the number of steps, not a "

OPTIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "text": ({"max_norm": "1.0"}, TypeError, f"max_norm='1.0': {NUMBER}str"),
    "bool": ({"max_norm": True}, TypeError, f"max_norm=True: {NUMBER}bool"),
    "list": ({"max_norm": [1.0]}, TypeError, f"max_norm=[1.0]: {NUMBER}list"),
    "tensor with dims": (
        {"max_norm": torch.ones(2)},
        TypeError,
        f"max_norm=a tensor of shape (2,): {NUMBER}tensor of one or more dims",
    ),
    "NaN": ({"max_norm": float("nan")}, ValueError, "max_norm=nan: give a finite number > 0"),
    "negative": ({"max_norm": -1}, ValueError, "max_norm=-1.0: give a finite number > 0"),
    "rule": ({"max_norm": PerParameter("1")}, TypeError, f"max_norm='1': {NUMBER}str"),  # type: ignore[arg-type]
    "value": ({"max_norm": ByValue(True)}, TypeError, "clip_value=True: give a number, not a bool"),
    "named": ({"max_norm": {"*": "1.0"}}, TypeError, f"of '*': max_norm='1.0': {NUMBER}str"),
    "others": (
        {"max_norm": ByName({"*": 1.0}, others=True)},
        TypeError,
        f"the rule of others=: max_norm=True: {NUMBER}bool",
    ),
    "warm-up": ({"max_norm": WarmUp(True, 1.0, 5)}, TypeError, "WarmUp start=True"),
    "decay": ({"max_norm": AdaGC(decay="0.9")}, TypeError, "decay='0.9': give a number, not a str"),  # type: ignore[arg-type]
    "norm_type": ({"norm_type": "2"}, TypeError, "norm_type='2': give a number >= 1"),
    "norm_type bool": ({"norm_type": True}, TypeError, "norm_type=True: give a number >= 1"),
    "p of a rule": ({"max_norm": ByNorm(1.0, True)}, TypeError, "norm_type=True: give a number >= 1"),
    "window": ({"accumulation_steps": True}, ValueError, "accumulation_steps=True: give a whole number >= 1"),
    "skips": ({"on_nonfinite": Skip(True)}, ValueError, "max_consecutive=True: give a whole number >= 1"),
    "skips text": ({"on_nonfinite": Skip("5")}, ValueError, "max_consecutive='5': give a whole number"),  # type: ignore[arg-type]
    "offloaded": ({"states": Offloaded(True)}, TypeError, "fraction=True: give the fraction of the elements"),
    "offloaded text": ({"states": Offloaded("1")}, TypeError, "fraction='1': give the fraction"),  # type: ignore[arg-type]
    "bucket": (
        {"bucket_bytes": True},
        ValueError,
        "bucket_bytes=True: give a whole number of bytes",
    ),
    "bucket part": ({"bucket_bytes": 1.5}, ValueError, "bucket_bytes=1.5"),
}


def small() -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    declare(model, {"*": P()})
    return model


def errors_of_options() -> dict[str, tuple[str, str]]:
    """Return the error of each invalid option, given only on rank 1."""
    found = {}
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        for name, (options, _, _) in OPTIONS.items():
            given = options if registry.global_rank == 1 else {}
            try:
                ParallelOptimizer(torch.optim.SGD(small().parameters(), lr=0.1), registry, **given)
            except Exception as error:
                found[name] = type(error).__name__, str(error)
    return found


def test_optimizer_option_of_wrong_type_or_value_is_rejected_on_all_ranks(world: World) -> None:
    for rank, found in enumerate(world.run(2, errors_of_options)):
        for name, (_, kind, text) in OPTIONS.items():
            assert name in found, f"{name} was accepted on rank {rank}"
            assert found[name][0] == kind.__name__, (name, found[name])
            assert text in found[name][1], (name, found[name])


@pytest.mark.parametrize("max_norm", [1, 1.0, torch.tensor(1.0)], ids=["int", "float", "tensor"])
def test_max_norm_accepts_int_float_and_tensor(max_norm: Any) -> None:
    model = small()
    optimizer = ParallelOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), ProcessGroupRegistry(Topology()), max_norm=max_norm
    )
    optimizer.backward(model(torch.ones(2, 4)).square().sum() * 9)
    stats = optimizer.step()
    assert torch.allclose(stats.clip_coef, (1 / (stats.total_norm + 1e-6)).to(stats.clip_coef.dtype))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda optimizer: setattr(optimizer, "max_norm", "1.0"), "max_norm='1.0'"),
        (lambda optimizer: optimizer.clip_grad_by_norm(True), "max_norm=True"),
        (lambda optimizer: optimizer.clip_grad_by_value("1"), "clip_value='1'"),
        (
            lambda optimizer: clip_grad_norm_(optimizer._model_params, "1.0", optimizer.registry),  # type: ignore[arg-type]
            "max_norm='1.0'",
        ),
        (
            lambda optimizer: optimizer.add_param_group({"params": [], "max_norm": True}),
            "max_norm of param group 1=True",
        ),
    ],
    ids=["setter", "explicit", "value", "function", "group"],
)
def test_clip_threshold_of_wrong_type_set_after_construction_is_rejected(
    change: Callable[[ParallelOptimizer[Any]], object], text: str
) -> None:
    model = small()
    optimizer = ParallelOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), ProcessGroupRegistry(Topology()), max_norm=2.0
    )
    optimizer.backward(model(torch.ones(2, 4)).sum())
    with pytest.raises(TypeError, match=text):
        change(optimizer)
    assert optimizer.max_norm == 2.0
    optimizer.step()


@pytest.mark.parametrize(
    ("weight", "text"),
    [
        (True, "weight=True: give a number or a 0-dim tensor.*not a bool"),
        ("3", "weight='3': give a number or a 0-dim tensor.*not a str"),
        (torch.ones(2), r"weight=a tensor of shape \(2,\): give a number or a 0-dim tensor"),
    ],
    ids=["bool", "text", "tensor"],
)
def test_micro_batch_weight_of_wrong_type_raises_and_a_later_step_succeeds(weight: Any, text: str) -> None:
    model = small()
    optimizer = ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), ProcessGroupRegistry(Topology()))
    for _ in range(2):
        with pytest.raises(TypeError, match=text):
            optimizer.backward(model(torch.ones(2, 4)).sum(), weight=weight)
        with pytest.raises(TypeError, match=text), optimizer.window(weight=weight):
            pass
    optimizer.backward(model(torch.ones(2, 4)).sum(), weight=2)
    assert float(optimizer.step().total_norm) > 0


def losses(loss: Tensor) -> list[Any]:
    return [[loss], (loss, loss), loss.item(), {"loss": loss}, "loss"]


def test_loss_of_wrong_type_raises_and_leaves_window_unchanged() -> None:
    model = small()
    optimizer = ParallelOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), ProcessGroupRegistry(Topology()), accumulation_steps=1
    )
    for loss in losses(model(torch.ones(2, 4)).sum()):
        said = rf"\(loss\) was given a {type(loss).__name__}: give the loss itself, a 0-dim tensor"
        with pytest.raises(TypeError, match="backward" + said):
            optimizer.backward(loss)
        with pytest.raises(TypeError, match="scale_loss" + said):
            optimizer.scale_loss(loss)
    optimizer.backward(model(torch.ones(2, 4)).sum())
    assert optimizer.step() is not None
