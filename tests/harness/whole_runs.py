"""Run optimizers that need full tensors, on the layouts in `WHOLE_LAYOUTS` and in a single process, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from meshstep.optim import Muon, Offloaded, ParallelOptimizer, Sharded
from meshstep.parallel import P, ProcessGroupRegistry, blocks
from planted import LAYOUTS, SHAPES, Dense, Full, Layout, Part, Planted, parts, run_step, start
from torch import Tensor, nn
from zero_models import small_buckets

Make = Callable[[Iterable[tuple[str, Tensor]]], torch.optim.Optimizer]
"""A constructor of an optimizer of named parameters; a module-level function, so that ranks can import it."""


class ExactMeans(Layout):
    """A layout whose gradient terms are multiples of 3, so that means over 3 data ranks are exact in any order of
    summation."""

    def share(self, name: str, rank: int, step: int, micro: int = 0) -> Tensor:
        return super().share(name, rank, step, micro) * 3


WHOLE_LAYOUTS = {
    **LAYOUTS,
    "data=3": ExactMeans((("data", 3),)),
    "uneven": Layout((("tensor", 3),), {"up": P("tensor"), "down": P(None, "tensor"), "bias": P("tensor")}),
    "fused blocks": Layout((("tensor", 2),), {"up": P(blocks("tensor", 2)), "bias": P(blocks("tensor", 2))}),
    "experts": Layout((("data", 2), ("expert", 2)), {"kernel": P("expert")}),
    "sequence": Layout(
        (("tensor", 2),),
        {
            "up": P("tensor"),
            "down": P(None, "tensor"),
            "bias": P(partial="tensor"),
            "table": P("tensor", None),
            "kernel": P(None, "tensor", None),
            "gain": P(partial="tensor"),
        },
    ),
    # The specs that the 2.5-D and 3-D layers declare.
    "2.5-D": Layout(
        (("depth", 2), ("row", 1), ("col", 2)),
        {
            "up": P("row", "col", partial="depth"),
            "down": P("row", "col", partial="depth"),
            "bias": P(("col", "row"), partial="depth"),
            "table": P("row", "col", partial="depth"),
            "kernel": P("row", "col", None, partial="depth"),
            "gain": P(owned={"row": 0}, partial="depth"),
        },
    ),
    "3-D": Layout(
        (("input", 2), ("weight", 2), ("output", 2)),
        {
            "up": P(("output", "weight"), "input"),
            "down": P(("input", "weight"), "output"),
            "bias": P("input"),
            "table": P(None, "output", owned={"input": "output"}),
            "kernel": P(("output", "weight"), "input", None),
        },
    ),
}


def muon(params: Iterable[Any], **options: Any) -> Muon:
    given: dict[str, Any] = {"ns_dtype": None, "adamw": {"lr": 0.05}, "blocks": {"up": 2}, **options}
    return Muon(params, lr=0.1, **given)


STATES: dict[str, dict[str, Any]] = {
    "whole": {},
    "ZeRO-1": {"states": Sharded("data")},
    "ZeRO-2": {"states": Sharded("data", gradients=True)},
    "offload": {"states": Offloaded(0.5)},
}


def trained(layout: Layout, make: Make, options: dict[str, Any] | None = None, steps: int = 10) -> list[Part]:
    with ProcessGroupRegistry(layout.topology) as registry, small_buckets(64):
        model = Planted(layout, registry.global_rank, torch.float64)
        optimizer = ParallelOptimizer(make(model.named_parameters()), registry, **(options or {}))
        for step in range(steps):
            run_step(model, optimizer, step)
            optimizer.step()
        return parts(layout, optimizer)


def alone(layout: Layout, make: Make, steps: int = 10, micros: int = 1) -> Full:
    """Return the full parameters after the same steps of the same optimizer in one process, without a registry."""
    dense = Dense(layout)
    params = {key: nn.Parameter(start(key)) for key in layout.keys}
    # One name per kind of parameter, as on a rank: options by name must apply on every stage.
    by_stage: dict[int, dict[str, nn.Parameter]] = {}
    for (name, stage), param in params.items():
        by_stage.setdefault(stage, {})[name] = param
    optimizers = [make(named.items()) for named in by_stage.values()]
    for step in range(steps):
        for key, gradient in dense.gradients(step, micros).items():
            params[key].grad = gradient
        for optimizer in optimizers:
            optimizer.step()
    return {key: param.detach() for key, param in params.items()}


def largest_error(by_rank: list[list[Part]], full: Full) -> float:
    """Return the largest error of any shard on any rank, relative to the largest element of its tensor."""
    errors = [
        float((part.value - part.of(full[part.key])).abs().max() / full[part.key].abs().max())
        for own in by_rank
        for part in own
        if part.value.numel()
    ]
    assert errors
    return max(errors)


def copies_differ(by_rank: list[list[Part]]) -> list[str]:
    """Return the shards whose replicas have unequal values on two ranks."""
    seen: dict[tuple[Any, str], Tensor] = {}
    return [
        f"{part.key} {part.region}"
        for own in by_rank
        for part in own
        if not torch.equal(seen.setdefault((part.key, str(part.region)), part.value), part.value)
    ]


def shapes() -> dict[str, tuple[int, ...]]:
    return dict(SHAPES)


def step_both(
    one: torch.optim.Optimizer, ours: list[nn.Parameter], other: torch.optim.Optimizer, theirs: list[nn.Parameter]
) -> None:
    """Run one step of two optimizers with the same random gradients."""
    for param, same in zip(ours, theirs, strict=True):
        param.grad = torch.randn_like(param)
        same.grad = param.grad.clone()
    one.step()
    other.step()
