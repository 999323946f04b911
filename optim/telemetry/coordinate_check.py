"""Check of the maximal update parametrization (muP), with which training changes activations equally at every width.

    change of a layer = mean over all elements of |output after some steps - output before|, for one input of the model

The check compares models of several widths that are otherwise equal. In muP, the change of each layer does not depend
on the width, so a learning rate that was tuned on a narrow model fits a wide model. In the standard parametrization,
the change grows with the width in some layers.

Reference: Yang et al. 2022, "Tensor Programs V", arXiv:2203.03466, appendix D.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, log, nan
from statistics import linear_regression
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.text import aligned
from .telemetry import matches_any, world_sum


class Trial(NamedTuple):
    """A model of one width, with functions that run and train it.

        trial = Trial(model, lambda: model(x), lambda: train(model, steps=3))

    Args:
        model: The model; it is trained in place.
        forward: Runs the model's forward, on the same input in every call.
        train: Trains the model for a few steps.
    """

    model: nn.Module
    forward: Callable[[], object]
    train: Callable[[], object]


@dataclass(frozen=True)
class CoordinateCheck:
    """Result of `coordinate_check`; prints as a table.

        check = coordinate_check(build, (64, 128, 256), registry)
        print(check.widths, check.changes)

    Args:
        widths: The widths, ascending.
        changes: {name of a layer: the mean absolute change of its output in training, one number per width}.
    """

    widths: tuple[int, ...]
    changes: Mapping[str, tuple[float, ...]]

    def slopes(self) -> dict[str, float]:
        """Return {layer: s}, where the change of the layer grows with the width like width^s. s is about 0 in muP.

        s is the slope of the least-squares line through (log width, log change). It is NaN if a change is 0 or not
        finite.
        """
        return {layer: _slope(self.widths, values) for layer, values in self.changes.items()}

    def __str__(self) -> str:
        slopes = self.slopes()
        rows = [("layer", *map(str, self.widths), "slope")]
        rows += [
            (layer, *(f"{value:.3g}" for value in values), f"{slopes[layer]:+.2f}")
            for layer, values in self.changes.items()
        ]
        return "\n".join(aligned(rows, right=range(1, len(self.widths) + 2)))


def coordinate_check(
    build: Callable[[int], Trial],
    widths: Sequence[int],
    registry: ProcessGroupRegistry,
    layers: Sequence[str] = ("*",),
) -> CoordinateCheck:
    """Train a model of each width, and return how much each layer's output changes. Every rank must call it.

        def build(width):
            torch.manual_seed(0)
            model = Model(width, registry)
            return Trial(model, lambda: model(x), lambda: train(model, steps=3))

        print(coordinate_check(build, (64, 128, 256), registry))

    Args:
        build: Called with a width; returns a `Trial` with a model of this width, which may be sharded over the mesh.
            Every rank must have the same measured modules. Set the random seed in it, so that models differ only in the
            width.
        widths: Two or more different widths.
        registry: The process groups.
        layers: Globs over names of modules; the model itself is not measured. A module is measured if it returns a
            single floating-point tensor at every width. The tensor may be sharded or replicated. Default: all modules.

    Raises:
        ValueError: There are fewer than two different widths, or no matching module returned a floating-point tensor at
            every width.

    Collectives: those of ``build``, ``forward`` and ``train``, and one all-reduce per width if there are several ranks.
    Host synchronization: one per width, in addition to that of ``build``, ``forward`` and ``train``.
    Memory: the outputs of the measured modules in two forwards.
    """
    if len({*widths}) < 2:
        raise ValueError(f"widths={widths!r}: give two or more different widths, such as (64, 128, 256, 512)")
    ordered, changes = sorted({*widths}), dict[str, list[float]]()
    for width in ordered:
        for layer, change in _changes(build(width), registry, layers).items():
            changes.setdefault(layer, []).append(change)
    whole = {layer: tuple(values) for layer, values in changes.items() if len(values) == len(ordered)}
    if not whole:
        raise ValueError(
            f"layers={layers!r} matches no module that returned one floating-point tensor at every width; give globs for "
            "other module names"
        )
    return CoordinateCheck(tuple(ordered), whole)


def _changes(trial: Trial, registry: ProcessGroupRegistry, layers: Sequence[str]) -> dict[str, float]:
    with _watched(trial.model, layers) as seen:
        trial.forward()
        before = dict(seen)
    trial.train()
    with _watched(trial.model, layers) as seen:
        trial.forward()
    names = [name for name in before if name in seen]
    device = next((before[name].device for name in names), registry.device)
    sums = []
    for name in names:
        moved = (seen[name].double() - before[name].double()).abs().sum()
        sums.append(torch.stack([moved, torch.full_like(moved, seen[name].numel())]))
    # an element that several ranks hold is counted equally often in both sums, so their ratio is the mean
    packed = torch.stack(sums) if sums else torch.zeros(0, 2, dtype=torch.float64, device=device)
    totals = world_sum(packed.to(device), registry)
    return dict(zip(names, (totals[:, 0] / totals[:, 1]).tolist(), strict=True))


@contextmanager
def _watched(model: nn.Module, layers: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Yield a dict of copies of the last output of each matching module, by name, if it is one floating-point tensor."""
    named = [(name, module) for name, module in model.named_modules() if name]
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                seen[name] = output.detach().clone()

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in named if matches_any(layers, name)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _slope(widths: Sequence[int], values: Sequence[float]) -> float:
    if not all(0 < value < inf for value in values):  # False for NaN too
        return nan
    return linear_regression([log(width) for width in widths], [log(value) for value in values]).slope
