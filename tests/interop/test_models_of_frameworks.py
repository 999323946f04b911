"""`clip_grad_norm_` without a registry and `ParallelOptimizer.for_model`, on models that frameworks have sharded.

Each case compares a sharded model with the same model in one process: gradients, norms, and parameters after two clipped
steps. The result of `torch.nn.utils.clip_grad_norm_` for the same gradients is checked too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from dtensors import clear_mesh_caches
from framework_models import BUILDERS, tokens_of
from meshstep.optim import ParallelOptimizer, clip_grad_norm_, global_norm, scale_gradients_
from meshstep.parallel.interop.local_parameters import divide_once
from torch import Tensor, nn
from world import World

STEPS, EXACT, ORDERS = 2, 1e-12, (2.0, 3.0)
Sizes = dict[str, int]
LAYOUTS: dict[str, Sizes] = {
    "fsdp": {"fsdp": 2},
    "tp": {"tp": 2},
    "fsdp x tp": {"fsdp": 2, "tp": 2},
    "hsdp": {"replicate": 2, "fsdp": 2},
    "ep": {"fsdp": 4, "ep": 2},
    "ep on all ranks": {"fsdp": 2, "tp": 2, "ep": 4},
}
EXPERT_MODELS = ("Mixtral", "GptOss", "DeepseekV3", "Qwen3Moe", "torchtitan DeepSeek-V3")
CASES = [(kind, layout) for kind in BUILDERS for layout in LAYOUTS if kind in EXPERT_MODELS or "ep" not in layout]


class Trained(NamedTuple):
    """The norm before each step, and the full parameters afterwards."""

    norms: list[float]
    weights: dict[str, Tensor]


class Reference(NamedTuple):
    """Results of the dense model: the gradients of step 0, the threshold, and `Trained` for each order of the norm."""

    gradients: dict[str, Tensor]
    max_norm: dict[float, float]
    trained: dict[float, Trained]


class Found(NamedTuple):
    """Errors of the sharded model on one rank, relative to the dense model, and the result of torch's clipping function.

    Attributes:
        wrong: Factor by which each wrong gradient differs from the dense gradient, before any call of the library.
        norm: Relative error of `global_norm` for each order, compared with the norm of the gathered gradients.
        steps: Largest error of a norm and of a parameter, for each way to step.
        torchs: Relative error of torch's norm, or the error that it raises.
    """

    wrong: dict[str, float]
    norm: dict[float, float]
    steps: dict[str, tuple[float, float]]
    torchs: float | str


def full(tensor: Any) -> Tensor:
    gathered: Tensor = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
    return gathered


def adamw(model: nn.Module) -> torch.optim.AdamW:
    # With this eps the updates depend on the scale of the gradients, so that a wrong clip coefficient is visible.
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2, weight_decay=0.1)


def train(model: nn.Module, loss_of: Callable[[Tensor], Tensor], clip: Callable[[], Any]) -> Trained:
    optimizer, norms = adamw(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(tokens_of(step)).backward()
        norms.append(float(clip()))
        optimizer.step()
    return Trained(norms, {name: full(param) for name, param in model.named_parameters()})


def train_for_model(model: nn.Module, loss_of: Callable[[Tensor], Tensor], max_norm: float, order: float) -> Trained:
    optimizer = ParallelOptimizer.for_model(model, adamw(model), max_norm=max_norm, norm_type=order)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        optimizer.backward(loss_of(tokens_of(step)))
        norms.append(float(optimizer.step().total_norm))
    return Trained(norms, {name: full(param) for name, param in model.named_parameters()})


# Dense model -----------------------------------------------------------------------------------------------------------


def write_reference(kind: str, folder: str) -> None:
    build = BUILDERS[kind]
    if hasattr(build, "save"):
        build.save(folder)
    gradients, thresholds, trained = {}, {}, {}
    for order in ORDERS:
        model = build.dense(folder)
        build.loss(model, tokens_of(0)).backward()
        gradients = {name: full(param.grad) for name, param in model.named_parameters() if param.grad is not None}
        thresholds[order] = 0.2 * norm_of(gradients.values(), order)

        def clip(model: nn.Module = model, order: float = order) -> Tensor:
            return nn.utils.clip_grad_norm_(model.parameters(), thresholds[order], order)

        def loss_of(tokens: Tensor, model: nn.Module = model) -> Tensor:
            loss: Tensor = build.loss(model, tokens)
            return loss

        trained[order] = train(model, loss_of, clip)
    torch.save((gradients, thresholds, {key: tuple(value) for key, value in trained.items()}), f"{folder}/dense.pt")


def norm_of(gradients: Any, order: float) -> float:
    return float(torch.cat([gradient.flatten() for gradient in gradients]).norm(order))


def read_reference(folder: str) -> Reference:
    gradients, thresholds, trained = torch.load(f"{folder}/dense.pt")
    return Reference(gradients, thresholds, {key: Trained(*value) for key, value in trained.items()})


@pytest.fixture(scope="session")
def folder_of(world: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A function that returns the folder with the reference of a model."""

    def of(kind: str) -> str:
        package = BUILDERS[kind].package
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}, of the extra `interop`")
        folder = tmp_path_factory.getbasetemp() / f"framework-{kind}".replace(" ", "-")
        if not folder.exists():
            folder.mkdir()
            world.run(1, write_reference, kind, str(folder))
        return str(folder)

    return of


# Sharded model ---------------------------------------------------------------------------------------------------------


def errors(found: Trained, expected: Trained) -> tuple[float, float]:
    """Return the largest relative error of a norm, and the largest error of a parameter, relative to its largest value."""
    assert found.weights.keys() == expected.weights.keys()
    norm = max(abs(one / other - 1) for one, other in zip(found.norms, expected.norms, strict=True))
    weight = max(
        float((found.weights[name] - value).abs().max() / value.abs().max()) for name, value in expected.weights.items()
    )
    return norm, weight


def measure(kind: str, sizes: Sizes, folder: str) -> Found:
    clear_mesh_caches()
    build, reference = BUILDERS[kind], read_reference(folder)

    def sharded() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
        model, rows = build.sharded(folder, **sizes)
        return model, lambda tokens: build.loss(model, tokens[rows])

    model, rows = build.sharded(folder, **sizes)
    build.loss(model, tokens_of(0)[rows]).backward()
    gathered = {name: full(param.grad) for name, param in model.named_parameters() if param.grad is not None}
    assert gathered.keys() == reference.gradients.keys()
    wrong = {}
    for name, gradient in gathered.items():
        dense = reference.gradients[name]
        if float((gradient - dense).norm() / dense.norm()) > 1e-10:
            factor = float((gradient * dense).sum() / dense.square().sum())
            wrong[name] = factor if float((gradient - factor * dense).norm() / dense.norm()) < 1e-10 else float("nan")
    torchs: float | str
    try:
        torchs = abs(float(full(nn.utils.clip_grad_norm_(model.parameters(), 1e9))) / norm_of(gathered.values(), 2) - 1)
    except (RuntimeError, ValueError) as error:
        torchs = f"{type(error).__name__}: {error}"
    norm = {
        order: abs(float(global_norm(model, norm_type=order)) / norm_of(gathered.values(), order) - 1)
        for order in ORDERS
    }
    for order in ORDERS:
        assert min(reference.trained[order].norms) > reference.max_norm[order], "every step should clip"
    model, loss_of = sharded()
    divide_once(model)  # `for_model` calls it itself
    limit = reference.max_norm[2.0]
    stepped = {
        "clip_grad_norm_": errors(train(model, loss_of, lambda: clip_grad_norm_(model, limit)), reference.trained[2.0])
    }
    for order in ORDERS:
        found = train_for_model(*sharded(), reference.max_norm[order], order)
        stepped[f"for_model, p={order:g}"] = errors(found, reference.trained[order])
    return Found(wrong, norm, stepped, torchs)


@pytest.mark.default_cases(9)
@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_clip_grad_norm_without_registry_on_framework_model_matches_dense_model(
    world: World, folder_of: Callable[[str], str], kind: str, layout: str
) -> None:
    sizes, answer = LAYOUTS[layout], torchs_answer(kind, layout)
    for found in world.run(ranks_of(sizes), measure, kind, sizes, folder_of(kind)):
        # torch 2.15 divides gradients of experts twice if no other rank holds the same experts; see `divide_once`.
        twice = layout == "ep on all ranks" and BUILDERS[kind].package == "transformers"
        assert all(twice and "experts" in name and factor == pytest.approx(0.5) for name, factor in found.wrong.items())
        assert max(found.norm.values()) < EXACT
        check_steps(found.steps)
        if answer is None:
            assert float(found.torchs) < EXACT
        else:
            assert answer in str(found.torchs)


def check_steps(steps: dict[str, tuple[float, float]]) -> None:
    for way, (norm, weight) in steps.items():
        assert norm < EXACT, way
        assert weight < EXACT, way


def ranks_of(sizes: Sizes) -> int:
    return sizes.get("fsdp", 1) * sizes.get("tp", 1) * sizes.get("replicate", 1)


def torchs_answer(kind: str, layout: str) -> str | None:
    """Return a part of the error of `torch.nn.utils.clip_grad_norm_`; None if it returns the dense norm."""
    if "ep" in layout:
        return "must have the same mesh"
    if "tp" not in layout or kind == "tutorial, norms as DTensors" or kind.startswith("torchtitan"):
        return None
    return "got mixed torch.Tensor and DTensor" if layout == "tp" else "must have the same mesh"


# Negative control ------------------------------------------------------------------------------------------------------


def clip_without_last_dim(model: nn.Module, max_norm: float) -> Tensor:
    """Clip by a wrong norm: the powers of each parameter are not summed over the last dim of its mesh.

    Return the norm.
    """
    total = torch.zeros((), dtype=torch.float64)
    for param in model.parameters():
        grad: Any = param.grad
        is_dtensor = hasattr(grad, "to_local")
        power = (grad.to_local() if is_dtensor else grad).square().sum()
        for index, placement in enumerate(grad.placements[:-1] if is_dtensor else ()):
            if not placement.is_replicate():
                dist.all_reduce(power, group=grad.device_mesh.get_group(index))
        total += power
    norm = total.sqrt()
    scale_gradients_(model, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def step_with_wrong_rule(kind: str, sizes: Sizes, folder: str) -> tuple[float, float]:
    clear_mesh_caches()
    build, reference = BUILDERS[kind], read_reference(folder)
    model, rows = build.sharded(folder, **sizes)
    limit = reference.max_norm[2.0]
    found = train(model, lambda tokens: build.loss(model, tokens[rows]), lambda: clip_without_last_dim(model, limit))
    return errors(found, reference.trained[2.0])


@pytest.mark.parametrize(("kind", "layout"), [("Mixtral", "ep"), ("tutorial, norms as DTensors", "fsdp x tp")])
def test_norm_without_sum_over_one_mesh_dim_differs_from_dense_norm(
    world: World, folder_of: Callable[[str], str], kind: str, layout: str
) -> None:
    sizes = LAYOUTS[layout]
    for norm, weight in world.run(ranks_of(sizes), step_with_wrong_rule, kind, sizes, folder_of(kind)):
        assert norm > 1e3 * EXACT
        assert weight > 1e3 * EXACT
        with pytest.raises(AssertionError):
            check_steps({"wrong rule": (norm, weight)})
