"""Figures of `Telemetry`, compared with those of the dense model in float64, on many layouts and state placements."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from meshstep.amp import precision_of
from meshstep.optim import (
    ByValue,
    NoiseScale,
    ParallelOptimizer,
    PerParameter,
    SpectralNorms,
    Telemetry,
)
from meshstep.parallel import P, ProcessGroupRegistry
from planted import SHAPES, Dense, Full, Key, Layout, Planted, run_step, weight_of
from torch import Tensor
from whole_runs import STATES, WHOLE_LAYOUTS
from world import World
from zero_models import small_buckets

STEPS = 3
ITERATIONS = 2
TINY = 2.0**-14
Figures = list[dict[str, float]]


class Mixed(Layout):
    """Some elements of each full gradient are 0, and some are too small for half precision."""

    def share(self, name: str, rank: int, step: int, micro: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        kinds = torch.tensor([0.0, 2.0**-12, 1.0, 1.0]).double()
        chosen = kinds[torch.randint(4, SHAPES[name], generator=generator)]
        return super().share(name, rank, step, micro) * chosen


@dataclass(frozen=True)
class Case:
    """One run.

    Args:
        states: Key of `whole_runs.STATES`.
        masters: Whether to use bfloat16 with float32 master weights; nothing is rounded in these steps.
        broken: Whether each replica is counted as if it were the only one.
        micros: Micro-batches per accumulation window; 0: one micro-batch without a weight.
    """

    layout: Layout
    states: str = "whole"
    micros: int = 0
    noise: NoiseScale | None = None
    clip: Any = 1.5
    masters: bool = False
    broken: bool = False

    @property
    def size(self) -> int:
        return self.layout.topology.world_size


def mixed(layout: Layout) -> Layout:
    return Mixed(layout.axes, layout.specs)


CASES = {
    **{name: Case(mixed(layout)) for name, layout in WHOLE_LAYOUTS.items()},
    **{
        f"{name}, {states}": Case(mixed(WHOLE_LAYOUTS[name]), states)
        for name in ("data", "data x tensor", "experts")
        for states in ("ZeRO-1", "ZeRO-2", "offload")
    },
    "clipped in place": Case(mixed(WHOLE_LAYOUTS["grid"]), clip=PerParameter(0.25)),
    "clamped": Case(mixed(WHOLE_LAYOUTS["data x tensor"]), clip=ByValue(0.25)),
    "weighted windows": Case(mixed(WHOLE_LAYOUTS["data x tensor"]), micros=2),
    "masters": Case(WHOLE_LAYOUTS["grid"], masters=True, clip=None),
    **{
        f"masters, {states}": Case(WHOLE_LAYOUTS["data x tensor"], states, masters=True, clip=None)
        for states in ("ZeRO-1", "ZeRO-2", "offload")
    },
}
BROKEN = Case(mixed(WHOLE_LAYOUTS["grid"]), broken=True)
PIPE_AND_DATA = Layout((("pipe", 2), ("data", 2)), {"table": P(tied={"pipe": (0, -1)}), "gain": P(owned={"pipe": 1})})
OVER_DATA = Layout((("data", 2), ("tensor", 2)), {"kernel": P("data"), "bias": P(partial="tensor")})
NOISY = {
    "data": Case(WHOLE_LAYOUTS["data"], noise=NoiseScale()),
    "data=3": Case(WHOLE_LAYOUTS["data=3"], noise=NoiseScale(samples=5)),
    "data x tensor": Case(WHOLE_LAYOUTS["data x tensor"], noise=NoiseScale()),
    "data x tensor, ZeRO-1": Case(WHOLE_LAYOUTS["data x tensor"], "ZeRO-1", noise=NoiseScale()),
    "data x tensor, offload": Case(WHOLE_LAYOUTS["data x tensor"], "offload", noise=NoiseScale()),
    "weighted windows": Case(WHOLE_LAYOUTS["data x tensor"], micros=2, noise=NoiseScale(decay=0.5)),
    "pipe and data": Case(PIPE_AND_DATA, noise=NoiseScale()),
    "experts over data": Case(OVER_DATA, noise=NoiseScale()),
}


# On ranks -------------------------------------------------------------------------------------------------------------


def measured(case: Case) -> tuple[Figures, tuple[str, ...]]:
    """Return the figures of each step, and the parameters that the noise scale omits."""
    with ProcessGroupRegistry(case.layout.topology) as registry, small_buckets(64):
        model = Planted(case.layout, registry.global_rank, torch.float32 if case.masters else torch.float64)
        mode = precision_of("bf16" if case.masters else "fp32")
        mode.prepare(model, registry)
        sgd = torch.optim.SGD(model.named_parameters(), lr=0.25, momentum=0.5, fused=True)
        optimizer = ParallelOptimizer(sgd, registry, precision=mode, max_norm=case.clip, **STATES[case.states])
        spectral = SpectralNorms(iterations=ITERATIONS)
        telemetry = Telemetry(optimizer, every=1, by="parameter", spectral=spectral, noise=case.noise)
        if case.broken:
            telemetry._planned._weights.fill_(1.0)
        found = []
        for step in range(STEPS):
            run_step(model, optimizer, step, max(case.micros, 1), weighted=bool(case.micros))
            optimizer.step()
            assert telemetry.last is not None
            found.append(telemetry.last.to_dict())
        return found, telemetry.excluded_params


# In one process -------------------------------------------------------------------------------------------------------


def label(key: Key, layout: Layout) -> str:
    """Return the label of a parameter; parameters of one name that differ between stages have the stage as suffix."""
    name, stage = key
    return name if [other for other, _ in layout.keys].count(name) == 1 else f"{name}@pipe={stage}"


def expected(case: Case) -> Figures:
    layout, dense = case.layout, Dense(case.layout)
    vectors = {key: start(label(key, layout), weight) for key, weight in dense.weights.items() if weight.dim() > 1}
    means = torch.zeros(3, dtype=torch.float64)
    found = []
    for step in range(STEPS):
        before = {key: weight.clone() for key, weight in dense.weights.items()}
        gradients = dense.gradients(step, max(case.micros, 1), weighted=bool(case.micros))
        figures: dict[str, float] = {}
        for key, weight in before.items():
            if weight.dim() > 1:
                sigma, vectors[key] = iterated(weight, vectors[key])
                figures[f"spectral_norm/{label(key, layout)}"] = sigma
        dense.step(clipped(gradients, case.clip))
        update = {key: dense.weights[key] - before[key] for key in before}
        # The optimizer holds gradients that are averaged over data ranks, but not divided by the window's total weight.
        replicas = layout.topology.size(*layout.topology.data_axes)
        lying = {key: layout.gradient(key, step, max(case.micros, 1)) / replicas for key in before}
        for name, keys in {"total": [*before], **{label(key, layout): [key] for key in before}}.items():
            norms = {
                kind: norm(full, keys) for kind, full in (("param", before), ("grad", gradients), ("update", update))
            }
            figures |= {f"{kind}_norm/{name}": value for kind, value in norms.items()}
            figures[f"update_ratio/{name}"] = norms["update"] / norms["param"]
            elements = torch.cat([lying[key].flatten() for key in keys]).abs()
            figures[f"grad_zeros/{name}"] = float((elements == 0).double().mean())
            figures[f"grad_underflow/{name}"] = float((elements < TINY).double().mean())
        if case.noise is not None:
            figures |= noise(case, gradients, step, means)
        found.append(figures)
    return found


def norm(full: Full, keys: list[Key]) -> float:
    return float(torch.cat([full[key].flatten() for key in keys]).norm())


def clipped(gradients: Full, clip: Any) -> Full:
    if clip is None:
        return gradients
    if isinstance(clip, ByValue):
        return {key: value.clamp(-clip.clip_value, clip.clip_value) for key, value in gradients.items()}
    if isinstance(clip, PerParameter):
        assert isinstance(clip.max_norm, float)
        return {key: value * min(1.0, clip.max_norm / (float(value.norm()) + 1e-6)) for key, value in gradients.items()}
    factor = min(1.0, clip / (norm(gradients, [*gradients]) + 1e-6))
    return {key: value * factor for key, value in gradients.items()}


def start(name: str, weight: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    vector = torch.randn(weight.shape[1:], generator=generator, dtype=torch.float64)
    return vector / float(vector.norm())


def iterated(weight: Tensor, vector: Tensor) -> tuple[float, Tensor]:
    matrix, v, sigma = weight.flatten(1), vector.flatten(), 0.0
    for _ in range(ITERATIONS):
        u = matrix @ v
        w = matrix.T @ u
        sigma = float(w.norm() / u.norm())
        v = w / w.norm()
    return sigma, v.view(vector.shape)


def noise(case: Case, gradients: Full, step: int, means: Tensor) -> dict[str, float]:
    """Return the noise scale from each data rank's local gradients, by the formula of McCandlish et al. (2018); update
    ``means``."""
    layout, micros = case.layout, max(case.micros, 1)
    topology, replicas = layout.topology, layout.topology.size(*layout.topology.data_axes)
    own = [key for key in gradients if not {*layout.spec(key[0]).named_axes} & {*topology.data_axes}]
    samples, squares = [], []
    for data in range(replicas):
        weight = sum(weight_of(data, micro) for micro in range(micros)) if case.micros else 1.0
        square = sum(float((local(layout, key, data, step, micros) / weight).square().sum()) for key in own)
        given = case.noise.samples if case.noise is not None else None
        samples.append(weight if given is None else given)
        squares.append(square)
    small, big = sum(squares) / replicas, norm(gradients, own) ** 2
    x, y = sum(1 / b for b in samples) / replicas, 1 / sum(samples)
    signal, trace = (x * big - y * small) / (x - y), (small - big) / (x - y)
    assert case.noise is not None
    decay = case.noise.decay
    means.mul_(decay).add_(torch.tensor([signal, trace, 1.0], dtype=torch.float64), alpha=1 - decay)
    signal, trace, total = means.tolist()
    return {"noise_scale": trace / signal, "noise_signal": signal / total, "noise_trace": trace / total}


def local(layout: Layout, key: Key, data: int, step: int, micros: int) -> Tensor:
    """Return the part of a full gradient that comes from one data rank's losses, summed over the window."""
    topology, shares = layout.topology, dict[tuple[int, ...], Tensor]()
    for rank in range(topology.world_size):
        mine = sum(topology.coordinate_of(rank, axis) for axis in topology.data_axes) == data
        if mine and layout.holds(key[0], rank) and layout.key(key[0], rank) == key:
            shares[layout.where(key[0], rank)] = sum(
                (layout.share(key[0], rank, step, micro) for micro in range(micros)), torch.zeros(SHAPES[key[0]])
            )
    return torch.stack([*shares.values()]).sum(0)


# Comparison -----------------------------------------------------------------------------------------------------------


def worst(found: Figures, wanted: Figures) -> tuple[float, str]:
    """Return the largest relative error and the name of its figure."""
    errors = [(0.0, "")]
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        errors += [(abs(one[name] - other[name]) / (abs(other[name]) or 1.0), name) for name in one]
    assert all(math.isfinite(error) for error, _ in errors)
    return max(errors)


class Runs(dict[str, list[tuple[Figures, tuple[str, ...]]]]):
    """The results of each case by name. A case runs on first access."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.cases = {**CASES, **{f"noise: {name}": case for name, case in NOISY.items()}, "broken": BROKEN}

    def __missing__(self, name: str) -> list[tuple[Figures, tuple[str, ...]]]:
        case = self.cases[name]
        self[name] = self.world.run(case.size, measured, case)
        return self[name]


@pytest.fixture(scope="module")
def runs(world: World) -> Runs:
    return Runs(world)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", CASES)
def test_telemetry_figures_match_dense_model(name: str, runs: Any) -> None:
    (found, _), *others = runs[name]
    assert all(repr(theirs) == repr(found) for theirs, _ in others), "figures differ between ranks"
    error, figure = worst(found, expected(CASES[name]))
    assert error < 1e-12, figure


@pytest.mark.parametrize("name", NOISY)
def test_noise_scale_matches_formula_from_local_gradients(name: str, runs: Any) -> None:
    (found, left_out), *others = runs[f"noise: {name}"]
    assert all(repr(theirs) == repr(found) for theirs, _ in others)
    assert left_out == (("kernel",) if name == "experts over data" else ())
    error, figure = worst(found, expected(NOISY[name]))
    # Signal and trace are differences of squared norms, whose rounding errors grow by cancellation; the noise scale is
    # their quotient.
    assert error < 1e-11, figure


def test_comparison_of_figures_detects_double_counted_replicas_and_wrong_sample_count(runs: Any) -> None:
    """Negative controls of `worst`, by which the other tests of this file compare figures."""
    (found, _), *_ = runs["broken"]
    assert worst(found, expected(BROKEN))[0] > 0.1
    (found, _), *_ = runs["noise: data x tensor"]
    assert worst(found, expected(Case(WHOLE_LAYOUTS["data x tensor"], noise=NoiseScale(samples=2))))[0] > 0.1
