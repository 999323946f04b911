"""Norms and clipping with loss scaling, also if squares overflow in fp16."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import pytest
import torch
from arguments import arguments
from meshstep.amp import ApexFp16, NaiveFp16, Precision, TorchFp16
from meshstep.optim import GradStats, ParallelOptimizer, clip_grad_norm_
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, shard
from torch import Tensor, nn
from world import World

SCALE = 1024.0
F16, F32 = torch.float16, torch.float32
MODES: dict[str, Precision] = {
    "fp16": TorchFp16(init_scale=SCALE),
    "fp16_naive": NaiveFp16(init_scale=SCALE),
    "O1": ApexFp16("O1", loss_scale=SCALE),
    "O2": ApexFp16("O2", loss_scale=SCALE),
    "O3": ApexFp16("O3", loss_scale=SCALE),
}


# Parameters on the mesh row=2,col=2: shape, layout, param group. O2 keeps "bn.weight" in float32.
SPECS = {
    "weight": ((4, 6), P("row", "col"), 0),
    "bias": ((6,), P("col"), 0),
    "shift": ((6,), P("col", owned={"row": 0}), 1),
    "gain": ((5,), P(), 1),
    "bn.weight": ((3,), P(), 1),
}
THRESHOLD, GROUP_THRESHOLD, CLIP_VALUE = 0.75, 0.5, 0.25


def gradient(name: str) -> Tensor:
    """Return the full gradient in multiples of 1/64, which fp16 represents exactly, also when scaled."""
    index = list(SPECS).index(name)
    values = torch.randint(-64, 65, SPECS[name][0], generator=torch.Generator().manual_seed(index))
    return values.double() / 64


def dense_norm(names: list[str], p: float) -> float:
    return float(torch.linalg.vector_norm(torch.cat([gradient(name).flatten() for name in names]), p))


def coef(names: list[str], p: float, threshold: float) -> float:
    return min(1.0, threshold / (dense_norm(names, p) + 1e-6))


@dataclass(frozen=True)
class Way:
    """How a step clips: constructor options, an explicit call before the step, a threshold of the second param
    group."""

    options: tuple[tuple[str, Any], ...] = ()
    call: str = ""
    own_threshold: bool = False

    def expected(self, name: str, p: float) -> Tensor:
        """Return the clipped gradient of ``name``."""
        grad, everything = gradient(name), list(SPECS)
        if self.own_threshold:
            second = [key for key in SPECS if SPECS[key][2] == 1]
            if name in second:
                return grad * coef(second, p, GROUP_THRESHOLD)
            return grad * coef([key for key in SPECS if key not in second], p, THRESHOLD)
        if self.call == "norm" or "max_norm" in dict(self.options):
            return grad * coef(everything, p, THRESHOLD)
        if self.call == "value" or "clip_value" in dict(self.options):
            return grad.clamp(-CLIP_VALUE, CLIP_VALUE)
        return grad


WAYS = {
    "measured only": Way(),
    "max_norm": Way((("max_norm", THRESHOLD),)),
    "clip_value": Way((("clip_value", CLIP_VALUE),)),
    "own thresholds": Way((("max_norm", THRESHOLD),), own_threshold=True),
    "clip_grad_by_norm": Way(call="norm"),
    "clip_grad_by_value": Way(call="value"),
}


def measure(mode: str, p: float, fused: bool) -> None:
    """Run one step for every way to clip, from zero weights with a learning rate of 1, so that the weights show the
    gradient."""
    with ProcessGroupRegistry(Topology(row=2, col=2)) as registry:
        for how, way in WAYS.items():
            try:
                check_one(mode, p, way, registry, fused)
            except AssertionError as error:
                raise AssertionError(f"{how}: {error}") from error


def check_one(mode: str, p: float, way: Way, registry: ProcessGroupRegistry, fused: bool) -> None:
    params = parameters(mode, registry)
    groups: list[dict[str, Any]] = [
        {"params": [param for name, param in params.items() if SPECS[name][2] == index]} for index in (0, 1)
    ]
    if way.own_threshold:
        groups[1]["max_norm"] = GROUP_THRESHOLD
    inner = torch.optim.SGD(groups, lr=1.0, fused=fused)
    options = dict(way.options)
    optimizer = ParallelOptimizer(
        inner, registry, **arguments(precision=MODES[mode], norm_type=p, per_parameter_norms=True, **options)
    )
    optimizer.scale_loss(torch.zeros(()))
    for name, param in params.items():  # as after backward: scaled, in float32 if there are master weights
        piece = shard(gradient(name) * SCALE, SPECS[name][1], registry)
        param.grad = piece.to(F32 if MODES[mode].masters else param.dtype)
    if way.call == "norm":
        check_stats(optimizer.clip_grad_by_norm(THRESHOLD), p)
    elif way.call == "value":
        check_stats(optimizer.clip_grad_by_value(CLIP_VALUE), p)
    stats = optimizer.step()
    check_stats(stats, p)
    assert stats is not None
    assert optimizer.grad_norm is stats.total_norm
    for name, param in params.items():
        expected = shard(way.expected(name, p), SPECS[name][1], registry)
        torch.testing.assert_close(
            -param.detach().double(), expected, rtol=2e-3 if param.dtype == F16 else 1e-5, atol=1e-6
        )


def parameters(mode: str, registry: ProcessGroupRegistry) -> dict[str, nn.Parameter]:
    params = {}
    for name, (shape, spec, _) in SPECS.items():
        if spec.holds(registry.coordinate, registry.topology):
            half = mode in ("fp16_naive", "O3") or (mode == "O2" and not name.startswith("bn"))
            params[name] = nn.Parameter(
                torch.zeros_like(shard(torch.zeros(shape), spec, registry), dtype=F16 if half else F32)
            )
            annotate(params[name], spec, name)
    return params


def check_stats(stats: GradStats | None, p: float) -> None:
    assert stats is not None
    assert float(stats.total_norm) == pytest.approx(dense_norm(list(SPECS), p), rel=1e-6)
    groups = [dense_norm([name for name in SPECS if SPECS[name][2] == index], p) for index in (0, 1)]
    assert stats.group_norms.tolist() == pytest.approx(groups, rel=1e-6)
    assert {name: float(value) for name, value in stats.parameter_norms.items()} == pytest.approx(
        {name: dense_norm([name], p) for name in SPECS}, rel=1e-6
    )
    assert stats.loss_scale is not None
    assert (float(stats.found_inf), float(stats.loss_scale)) == (0.0, SCALE)


@pytest.mark.parametrize("p", [1.0, 2.0, inf])
@pytest.mark.parametrize("mode", MODES)
def test_norms_and_clipping_with_loss_scale_match_unscaled_dense_gradients(world: World, mode: str, p: float) -> None:
    world.run(4, measure, mode, p, True)


@pytest.mark.long
def test_norms_and_clipping_with_loss_scale_and_unfused_sgd_match_dense_gradients(world: World) -> None:
    world.run(4, measure, "fp16_naive", 2.0, False)
    world.run(4, measure, "O3", 2.0, False)


# Values that fp16 cannot represent ------------------------------------------------------------------------------------

LARGE = {  # number of tensors, elements per tensor, gradient of each element
    "a hundred tensors of norm 1e4": (100, 4, 5000.0),
    "squares beyond fp16": (1, 4096, 300.0),
    "a norm beyond fp16": (3, 4096, 1500.0),
}
WITH_SCALE: dict[str, Precision] = {
    "fp16_naive": NaiveFp16(init_scale=8.0),
    "O2": ApexFp16("O2", loss_scale=8.0),
    "O3": ApexFp16("O3", loss_scale=8.0),
}


def halves(count: int, numel: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(numel, dtype=F16)) for _ in range(count)]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("mode", WITH_SCALE)
@pytest.mark.parametrize("case", LARGE)
def test_large_fp16_gradients_are_clipped_and_stepped(case: str, mode: str, fused: bool) -> None:
    count, numel, value = LARGE[case]
    norm = value * (count * numel) ** 0.5
    params = halves(count, numel)
    optimizer = ParallelOptimizer(
        torch.optim.SGD(params, lr=1.0, fused=fused),
        ProcessGroupRegistry(Topology()),
        max_norm=1.0,
        precision=WITH_SCALE[mode],
    )
    slopes = torch.full((numel,), value, dtype=F16)
    optimizer.backward(torch.stack([(param * slopes).float().sum() for param in params]).sum())
    assert all(param.grad is not None and float(param.grad.max()) == 8 * value for param in params)
    stats = optimizer.step()
    assert stats is not None
    assert float(stats.total_norm) == pytest.approx(norm, rel=1e-6)
    assert optimizer.skipped_steps == 0
    for param in params:
        torch.testing.assert_close(
            param.detach().double(), torch.full((numel,), -value / norm).double(), rtol=2e-3, atol=0.0
        )


@pytest.mark.parametrize("case", LARGE)
def test_clip_grad_norm_clips_fp16_gradients_whose_squares_overflow(case: str) -> None:
    """torch's function sets the gradients to zero if their norm exceeds the largest fp16 number."""
    count, numel, value = LARGE[case]
    norm = value * (count * numel) ** 0.5
    ours, torchs = halves(count, numel), halves(count, numel)
    for param in (*ours, *torchs):
        param.grad = torch.full((numel,), value, dtype=F16)
    stats = clip_grad_norm_(ours, 1.0, ProcessGroupRegistry(Topology()))
    assert float(stats.total_norm) == pytest.approx(norm, rel=1e-6)
    found = torch.cat([param.grad for param in ours if param.grad is not None]).double()
    torch.testing.assert_close(found, torch.full_like(found, value / norm), rtol=2e-3, atol=0.0)
    if norm > torch.finfo(F16).max:
        assert nn.utils.clip_grad_norm_(torchs, 1.0) == inf
        assert not any(param.grad.any() for param in torchs if param.grad is not None)
