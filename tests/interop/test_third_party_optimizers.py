"""Third-party optimizers: meshstep's versions equal them, and third-party elementwise optimizers step shards exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from meshstep.optim import CAME, LAMB, LARS, ParallelOptimizer, StableAdamW
from meshstep.parallel import ProcessGroupRegistry
from planted import LAYOUTS, Dense, Layout, Part, Planted, parts, run_step, start
from torch import nn
from whole_runs import STATES, Make, alone, copies_differ, largest_error
from whole_services import beyond_sgd, changed_by_overflow, each_trained
from world import World
from zero_models import small_buckets

EXACT = 1e-12
SHAPES = [(6, 10), (12, 4), (3, 4, 6), (7,), ()]
Kind = Callable[..., torch.optim.Optimizer]


def published(package: str, name: str) -> Any:
    pytest.importorskip(package, reason=f"needs {package}, of the extra `interop`")
    return getattr(import_module(package), name)


# Equal to the third-party implementation --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "package", "name", "options", "theirs"),
    [
        (LAMB, "timm.optim", "Lamb", {"lr": 0.05}, {"max_grad_norm": None}),
        (
            LAMB,
            "timm.optim",
            "Lamb",
            {"lr": 0.05, "bias_correction": False, "betas": (0.8, 0.9)},
            {"max_grad_norm": None},
        ),
        (LAMB, "timm.optim", "Lamb", {"weight_decay": 0.0}, {"max_grad_norm": None}),
        (LAMB, "timm.optim", "Lamb", {"weight_decay": 0.0, "always_adapt": True}, {"max_grad_norm": None}),
        (LARS, "timm.optim", "Lars", {"momentum": 0.9, "weight_decay": 0.1}, {}),
        (LARS, "timm.optim", "Lars", {"momentum": 0.8, "weight_decay": 0.1, "nesterov": True, "trust_coeff": 0.1}, {}),
        (LARS, "timm.optim", "Lars", {"lr": 0.1, "eps": 0.1, "always_adapt": True}, {}),
        (StableAdamW, "pytorch_optimizer", "StableAdamW", {"lr": 0.05}, {}),
        (StableAdamW, "pytorch_optimizer", "StableAdamW", {"betas": (0.5, 0.6), "eps": 0.1, "weight_decay": 0.3}, {}),
        (CAME, "came_pytorch", "CAME", {"lr": 0.003}, {}),
        (CAME, "came_pytorch", "CAME", {"lr": 0.003, "betas": (0.8, 0.9, 0.95), "weight_decay": 0.1}, {}),
        (CAME, "came_pytorch", "CAME", {"lr": 0.003, "clip_threshold": 0.5, "eps": (1e-3, 1e-2)}, {}),
    ],
)
def test_lamb_lars_stableadamw_and_came_equal_third_party_implementation(
    ours: Kind, package: str, name: str, options: dict[str, Any], theirs: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES]
    same = [nn.Parameter(param.detach().clone()) for param in params]
    pair = ours(params, **options), published(package, name)(same, **options, **theirs)
    for _ in range(10):
        for param, other in zip(params, same, strict=True):
            param.grad = torch.randn_like(param)
            other.grad = param.grad.clone()
        for optimizer in pair:
            optimizer.step()
    for param, other in zip(params, same, strict=True):
        assert float((param - other).detach().abs().max() / other.detach().abs().max()) <= EXACT


# Elementwise optimizers -------------------------------------------------------------------------------------------------

ELEMENTWISE: list[tuple[str, str, dict[str, Any]]] = [
    ("lion_pytorch", "Lion", {"lr": 0.01, "weight_decay": 0.1}),
    ("pytorch_optimizer", "Lion", {"lr": 0.01, "weight_decay": 0.1}),
    ("pytorch_optimizer", "AdEMAMix", {"lr": 0.01, "weight_decay": 0.1, "t_alpha_beta3": 5.0}),
    ("schedulefree", "AdamWScheduleFree", {"lr": 0.01, "weight_decay": 0.1, "warmup_steps": 2}),
    ("pytorch_optimizer", "ScheduleFreeAdamW", {"lr": 0.01, "weight_decay": 0.1}),
]
every_one = pytest.mark.parametrize(("package", "name", "options"), ELEMENTWISE, ids=lambda value: str(value))


def training(kind: Kind, options: dict[str, Any], params: Iterable[Any]) -> torch.optim.Optimizer:
    """Make an optimizer from unnamed parameters, because some optimizers reject names. Switch schedule-free optimizers to
    training."""
    optimizer: Any = kind([item[1] if isinstance(item, tuple) else item for item in params], **options)
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer  # type: ignore[no-any-return]


CASES = [
    (name, state)
    for name in ("tensor", "grid", "data x tensor", "diagonal", "pipe, tied")
    for state in ("whole", "ZeRO-2", "offload")
    if state != "ZeRO-2" or "data" in name
]


@every_one
def test_third_party_elementwise_optimizers_on_shards_match_dense_update(
    world: World, package: str, name: str, options: dict[str, Any]
) -> None:
    make: Make = partial(training, published(package, name), options)
    calls = [
        (LAYOUTS[layout].topology.world_size, (LAYOUTS[layout], [make], STATES[state], 6)) for layout, state in CASES
    ]
    for (layout, state), by_rank in zip(CASES, world.run_each(each_trained, calls), strict=True):
        own = [made for (made,) in by_rank]
        assert largest_error(own, alone(LAYOUTS[layout], make, 6)) <= EXACT, f"{layout}, {state}"
        assert copies_differ(own) == [], f"{layout}, {state}"


@every_one
def test_third_party_elementwise_optimizers_add_no_collectives_and_skip_overflow(
    world: World, package: str, name: str, options: dict[str, Any]
) -> None:
    make: Make = partial(training, published(package, name), options)
    layout = LAYOUTS["data x tensor"]
    assert world.run(4, beyond_sgd, layout, [make], {}) == [[{}]] * 4
    assert world.run(4, changed_by_overflow, layout, [make], torch.float64, STATES["ZeRO-2"]) == [[[]]] * 4


def evaluated(layout: Layout, make: Make, options: dict[str, Any]) -> tuple[list[Part], list[Part]]:
    """Return the shards of this rank after four steps and ``eval()``, and after ``train()`` and one more step."""
    with ProcessGroupRegistry(layout.topology) as registry, small_buckets(64):
        model = Planted(layout, registry.global_rank, torch.float64)
        optimizer = ParallelOptimizer(make(model.named_parameters()), registry, **options)
        for step in range(4):
            run_step(model, optimizer, step)
            optimizer.step()
        optimizer.eval()
        averages = parts(layout, optimizer)
        # The model has full tensors where the optimizer has shards of them.
        shown = dict(model.named_parameters())
        for piece, part in zip(optimizer.stepped_tensors(), averages, strict=True):
            held = shown[piece.name].detach().flatten()[piece.offset : piece.offset + piece.tensor.numel()]
            assert torch.equal(held, part.value)
        optimizer.train()
        run_step(model, optimizer, 4)
        optimizer.step()
        return averages, parts(layout, optimizer)


@pytest.mark.parametrize("state", ["whole", "ZeRO-2"])
def test_schedule_free_averages_equal_dense_averages(world: World, state: str) -> None:
    make: Make = partial(training, published("schedulefree", "AdamWScheduleFree"), {"lr": 0.01, "warmup_steps": 2})
    layout = LAYOUTS["data x tensor"]
    dense, params = Dense(layout), {key: nn.Parameter(start(key)) for key in layout.keys}
    optimizer: Any = make((name, param) for (name, _), param in params.items())
    wanted = []
    for step in range(5):
        for key, gradient in dense.gradients(step).items():
            params[key].grad = gradient
        optimizer.step()
        if step == 3:
            optimizer.eval()
            wanted.append({key: param.detach().clone() for key, param in params.items()})
            optimizer.train()
    wanted.append({key: param.detach() for key, param in params.items()})
    by_rank = world.run(4, evaluated, layout, make, STATES[state])
    for index, expected in enumerate(wanted):
        own = [pair[index] for pair in by_rank]
        assert largest_error(own, expected) <= EXACT
        assert copies_differ(own) == []


def refusal(layout: Layout, make: Make) -> str:
    with ProcessGroupRegistry(layout.topology) as registry:
        model = Planted(layout, registry.global_rank)
        with pytest.raises(ValueError, match="sharded") as refused:
            ParallelOptimizer(make(model.named_parameters()), registry)
        return str(refused.value)


@pytest.mark.parametrize(
    ("package", "name"), [("pytorch_optimizer", "Lamb"), ("pytorch_optimizer", "CAME"), ("timm.optim", "Adafactor")]
)
def test_third_party_optimizers_that_need_full_tensors_are_rejected_on_shards(
    world: World, package: str, name: str
) -> None:
    make: Make = partial(training, published(package, name), {"lr": 0.01})
    for said in world.run(2, refusal, LAYOUTS["tensor"], make):
        assert f"{name} is not known to be" in said
