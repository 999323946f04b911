"""Where in a backward the mistake is: activations are moved as parameters are, from the loss backwards.

At the input and the output of each module stands an activation, whose gradient must be the derivative of the loss as that
of a parameter must. A module whose output's gradient is right, and whose input's is not, has a wrong backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...parallel.interop.local import has_dtensors
from .differences import Differences
from .explain import Explainer, Explanation, axes_of_factor
from .findings import Cause
from .forward_order import Site
from .measured import Known, Measured, Seen
from .objective import Losses
from .ways import COPY, larger_axes

_MOST = 24  # sites that are looked at


class _Added:
    """Zeros that are added to an activation, and what it was."""

    def __init__(self) -> None:
        self.zeros: Tensor | None = None
        self.value: Tensor | None = None

    def add_to(self, values: Any) -> Any:
        if isinstance(values, Tensor):
            return self._sum(values)
        if isinstance(values, tuple | list) and values:
            return type(values)([self.add_to(values[0]), *values[1:]])
        return values

    def _sum(self, value: Tensor) -> Tensor:
        if not value.is_floating_point() or has_dtensors((value,)):
            return value
        if self.zeros is None:
            self.zeros, self.value = torch.zeros_like(value, requires_grad=True), value.detach().clone()
        return value + self.zeros if self.zeros.shape == value.shape else value


@contextmanager
def _added(model: nn.Module, sites: Iterable[Site]) -> Iterator[dict[Site, _Added]]:
    modules = dict(model.named_modules())
    added = {site: _Added() for site in sites if site.module in modules}
    handles: list[Any] = []
    for site, one in added.items():
        module = modules[site.module]
        if site.side == "input":
            handles.append(module.register_forward_pre_hook(lambda _, inputs, one=one: one.add_to(inputs)))
        else:
            handles.append(module.register_forward_hook(lambda _, inputs, output, one=one: one.add_to(output)))
    try:
        yield added
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Place:
    """Between two sites the backward is wrong.

    Args:
        wrong: The last site whose gradient is wrong.
        right: The first one after it whose gradient is right; None: the loss.
        cause: What is wrong with it; along which axes.
        likely: No more than that explains it best.
    """

    wrong: Site
    right: Site | None
    cause: Cause
    axes: tuple[str, ...]
    likely: bool = False

    @property
    def inside(self) -> str:
        """What has the wrong backward."""
        if self.right is not None and self.right.module == self.wrong.module:
            return f"the backward of {self.wrong.module}"
        after = "the loss" if self.right is None else str(self.right)
        return f"the backward of what lies between {self.wrong} and {after}"

    def __str__(self) -> str:
        over = " or ".join(map(repr, self.axes)) or "some axis"
        said = {
            "a sum is missing": f": the gradient of {self.wrong} has to be summed over {over}",
            "counted several times": f": the gradient of {self.wrong} is summed once too often, over {over}",
            "divided too often": f": the gradient of {self.wrong} is averaged over {over}, where it has to be summed",
        }.get(self.cause, "")
        if self.likely:
            said = f", where most likely a sum over {over} is missing"
        return f"The mistake is in {self.inside}{said}."


def first_wrong(
    model: nn.Module,
    differences: Differences,
    events: Sequence[Site],
    split: Mapping[str, tuple[str, ...]],
) -> Place | None:
    """From the last of ``events`` backwards, the first site whose gradient is wrong. The same on all ranks.

    Args:
        differences: Of the model's parameters.
        events: In forward order, the same on all ranks; ranks that lack a module have nothing there.
        split: By module, the axes that split its parameters.
    """
    events = events[-_MOST:]
    objective, registry = differences.objective, differences.measured.registry
    with _added(model, events) as added:
        base: Losses = objective.differentiate()
        tensors, gradients, seen = dict[str, Tensor](), dict[str, Tensor | None](), dict[str, Seen]()
        for site, one in added.items():
            if one.zeros is not None and one.value is not None:
                tensors[str(site)], gradients[str(site)] = one.zeros.detach(), one.zeros.grad
                seen[str(site)] = Seen.of(one.value, one.zeros.grad, None, registry.topology)
                one.zeros = tensors[str(site)]
        measured = Measured(tensors, gradients, seen, registry)
        explainer = Explainer(Differences(objective, measured, base, differences.digits, differences.noise))
        right: Site | None = None
        for site in reversed(events):
            known = next((known for known in measured.known if known.name == str(site)), None)
            if known is None or not any(one.gradient for one in known.seen.values()):
                continue
            found = explainer.explain(known, None)
            problem = _problem(known, found, explainer)
            if problem is not None:
                return _likeliest(Place(site, right, *problem), split)
            right = site
    return None


def _likeliest(place: Place, split: Mapping[str, tuple[str, ...]]) -> Place:
    """Of a module whose own parameters are right, but not what it gives to those before it, what explains that best: it
    lacks what other ranks have to add. What is added twice would be a factor."""
    inside = place.right is not None and place.right.module == place.wrong.module
    if place.cause == "backward is wrong" and inside and split.get(place.wrong.module):
        return replace(place, cause="a sum is missing", axes=split[place.wrong.module], likely=True)
    return place


def _problem(known: Known, found: Explanation, explainer: Explainer) -> tuple[Cause, tuple[str, ...], bool] | None:
    """The cause, along which axes, and whether that is no more than likely. None: the gradient is right."""
    topology = explainer.topology
    if found.way is None:
        uneven = (axis for axis in larger_axes(topology) if axis in topology.model_axes and axis not in found.even)
        copied = tuple(axis for axis in uneven if known.equal_along(axis, topology))
        if copied:
            return "a sum is missing", copied, True
        taken_for_copies = explainer.copied_along(known)
        return ("forward differs", taken_for_copies, False) if taken_for_copies else ("backward is wrong", (), False)
    if found.factor != 1.0:
        times = max(found.factor, 1 / found.factor)
        cause: Cause = "counted several times" if found.factor > 1 else "divided too often"
        return cause, axes_of_factor(times, topology), False
    terms = tuple(
        axis for axis, along in found.way.by_axis if axis in topology.model_axes and not along.apart and along != COPY
    )
    return ("a sum is missing", terms, False) if terms else None
