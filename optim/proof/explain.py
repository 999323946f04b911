"""Explanation of a wrong gradient: a wrong layout, a wrong factor, or a module with a wrong backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ...parallel.interop.local_parameters import has_dtensors, local_tensor
from ...parallel.layout.spec import P
from ...parallel.mesh.agreement import gather_objects
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from .contracts import (
    COPY,
    TERM,
    GradientContract,
    KnownParameter,
    LocalTensor,
    Measured,
    ParameterView,
    bits_of,
    candidates,
    larger_axes,
    split_beside,
)
from .differences import DifferenceQuotient, Differences, Losses

Cause = Literal[
    "split, not declared",
    "declared split, but a copy",
    "a sum is missing",
    "counted several times",
    "divided too often",
    "added on every rank",
    "held by others",
    "no gradient comes",
    "copies differ",
    "backward is wrong",
    "forward differs",
]


# The order in which modules run, and the first tensor in this order that differs between ranks ------------------------


class HookPoint(NamedTuple):
    """A value in forward: the first argument of a module (``side`` "input"), or the first value it returns ("output")."""

    module: str
    side: str

    def __str__(self) -> str:
        return f"the {self.side} of {self.module}"


@contextmanager
def hooked(model: nn.Module, sites: Iterable[HookPoint], function: Callable[[HookPoint, Any], Any]) -> Iterator[None]:
    """Call ``function(site, values)`` at the hook points in each forward inside the context.

    ``values`` are the positional arguments of a module, or its output. They are replaced by the result of ``function``,
    unless it is None. Hook points of modules that the model does not have are skipped.
    """
    modules = dict(model.named_modules())
    handles: list[Any] = []
    for site in sites:
        module = modules.get(site.module)
        if module is None:
            continue
        if site.side == "input":
            hook = module.register_forward_pre_hook(lambda _, inputs, site=site: function(site, inputs))
        else:
            hook = module.register_forward_hook(lambda _, inputs, output, site=site: function(site, output))
        handles.append(hook)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


Hashes = dict[HookPoint, "tuple[tuple[int, ...], int] | None"]


@contextmanager
def recorded_forward(model: nn.Module) -> Iterator[Hashes]:
    """Yield {hook point: (shape, hash of the elements)} of the inputs and outputs of all submodules in the context.

    The dict is in the order in which the points were first reached. It has None instead of a pair if there is no tensor
    at the point, or a complex one. If a module is called several times, the hash is from its last call.
    """
    hashes: Hashes = {}

    def record(site: HookPoint, values: Any) -> None:
        value = first_tensor(values)
        hashes[site] = None
        if value is not None and not value.is_complex():
            value = local_tensor(value)
            hashes[site] = tuple(value.shape), bits_of(value)

    sites = [HookPoint(name, side) for name, _ in model.named_modules() if name for side in ("input", "output")]
    with hooked(model, sites, record):
        yield hashes


def first_tensor(values: Any) -> Tensor | None:
    """Return ``values`` itself, or the first item of (nested) tuples and lists; None if that is no tensor."""
    while isinstance(values, tuple | list) and values:
        values = values[0]
    return values if isinstance(values, Tensor) else None


class ForwardOrder:
    """The hashes of `recorded_forward` on all ranks, and the order of the parameters' modules in forward.

    Collectives: an object all-gather over the world, in the constructor.
    """

    def __init__(self, hashes: Hashes, known: Iterable[KnownParameter], registry: ProcessGroupRegistry) -> None:
        self._hashes = gather_objects(hashes, registry)
        self._topology = registry.topology
        self._known = list(known)
        self._at = {known.label: self._position(known) for known in self._known}

    def _position(self, known: KnownParameter) -> int:
        """Return the position of the parameter's module in forward: the index of its input among the hook points.

        The hook points are those of the lowest rank that holds the parameter, in the order of its forward. If the module
        was not called, return the index of the closest enclosing module that was called, or -1 if there is none.
        """
        order = list(self._hashes[min(known.seen)])
        module = known.module
        while module:
            if HookPoint(module, "input") in order:
                return order.index(HookPoint(module, "input"))
            module = module.rpartition(".")[0]
        return -1

    def sorted(self) -> list[KnownParameter]:
        """Return the parameters in the order in which their modules are entered in forward, stage by stage."""
        by_stage = bool(self._topology.pipe_axes)
        return sorted(self._known, key=lambda known: (min(known.seen) if by_stage else 0, self._at[known.label]))

    def until_right(self, last: KnownParameter, wrong: Sequence[KnownParameter]) -> list[HookPoint]:
        """Return the hook points from the start of forward to a module whose parameter has a correct gradient.

        This is the first such module that is entered after the module of ``last``. Its output is included. If there is
        no such module, return all hook points.

        ``last`` is the last one, in forward order, of the parameters ``wrong``, whose gradients are wrong.
        """
        rank, labels = min(last.seen), {known.label for known in wrong}
        order = list(self._hashes[rank])
        later = [
            self._at[known.label]
            for known in self._known
            if rank in known.seen and known.label not in labels and self._at[known.label] > self._at[last.label]
        ]
        if not later:
            return order
        module = order[min(later)].module
        return order[: max(index for index, site in enumerate(order) if site.module == module) + 1]

    def before_unequal(self, axis: str, until: HookPoint | None) -> tuple[HookPoint | None, list[str]]:
        """Return the last hook point at which all ranks along ``axis`` have the same tensor; None if there is none.

        Also return the names of the modules with parameters whose output comes after this point, up to ``until``.
        ``until`` is a hook point whose tensors differ although they must be equal: only points before it are searched.
        None: the losses differ, and all points are searched.
        """
        groups = list(self._topology.groups(axis))
        order = list(self._hashes[groups[0][0]])
        end = len(order) if until is None else order.index(until)
        recorded = [index for index in range(end) if self._hashes[groups[0][0]][order[index]] is not None]
        equal = (index for index in recorded if all(self._equal(order[index], ranks) for ranks in groups))
        last = max(equal, default=-1)
        owners = {known.module for known in self._known}
        inside = (site.module for site in order[last + 1 : end + 1] if site.side == "output" and site.module in owners)
        return (order[last] if last >= 0 else None), list(inside)

    def _equal(self, site: HookPoint, ranks: Sequence[int]) -> bool:
        return len({self._hashes[rank].get(site) for rank in ranks}) == 1


# Explanation ----------------------------------------------------------------------------------------------------------


_SEEDS = (1, 2)


class Probe:
    """Measurements along one random direction of a parameter: the ranks' gradients along it, and central differences.

    Along the sharded axes of ``contract``, ranks get distinct parts of the direction. ``products`` has the product
    <gradient, direction> of each rank that holds the parameter.

    Collectives: an object all-gather in the constructor; those of two forwards per new central difference.
    """

    def __init__(self, differences: Differences, known: KnownParameter, contract: GradientContract, seed: int) -> None:
        direction = differences.measured.direction(known, contract, seed)
        self.products = differences.measured.products([(known, direction)])[known.label]
        self._differences, self._known = differences, known
        self._steps = differences.along([(known, direction)], self.size)
        self._found: list[DifferenceQuotient] = []

    @property
    def size(self) -> float:
        """Return the approximate absolute derivative of the loss along the direction, estimated from gradients."""
        return max(self._known.effect, *map(abs, self.products.values()))

    def derivative(self) -> DifferenceQuotient | None:
        """Return the most reliable central difference; None if all differences are lost in rounding.

        It is the first difference with a small rounding error that agrees with an earlier difference. If there is none,
        it is the difference with the smallest step, because a small step contains the fewest kinks of the loss.
        Differences with a larger rounding error are considered only if no difference has a small one.
        """
        usable: list[DifferenceQuotient] = []
        for one in self.differences():
            exact = one.rounding <= 1e-5 * self.size
            if exact and any(abs(one.value - larger.value) <= 1e-6 * self.size for larger in usable):
                return one
            usable.append(one)
        exact_ones = [one for one in usable if one.rounding <= 1e-5 * self.size]
        return max(exact_ones or usable, key=lambda one: one.rounding, default=None)

    def differences(self) -> Iterator[DifferenceQuotient]:
        """Yield the central differences whose rounding error is at most 1 % of their value or of `size`."""
        yield from filter(self._tells, self._found)
        for found in self._steps:
            self._found.append(found)
            if self._tells(found):
                yield found

    def _tells(self, found: DifferenceQuotient) -> bool:
        return self._differences.tells(found, max(self.size, abs(found.value)))


@dataclass(frozen=True)
class Explanation:
    """A parameter layout with which the parameter's gradient would be right, or right except for a factor.

    ``contract`` is the layout; None: there is no such layout. ``factor`` is the factor by which the gradient is too
    large; 1 if it is right, or if there is no contract. ``even`` are the mesh axes along which all ranks have equal
    products <gradient, direction> for a random direction. ``split`` are the mesh axes that certainly shard another
    parameter of the same module.
    """

    contract: GradientContract | None
    factor: float
    even: tuple[str, ...]
    split: tuple[str, ...]


class Explainer:
    """Finds a layout with which a parameter's gradient is right. Results are the same on all ranks."""

    def __init__(self, differences: Differences) -> None:
        self.differences, self.topology = differences, differences.topology

    def explain(self, known: KnownParameter, declared: GradientContract | None) -> Explanation:
        """Return an `Explanation` with the first contract under which the gradient is the derivative of the loss.

        If there is no such contract, the explanation has the first contract under which the gradient is a multiple of
        the derivative. If there is none either, its contract is None. ``declared`` is tried first, then the contracts
        that the parameter's values allow, the most likely one first.

        Collectives: per tried set of axes along which ranks may hold distinct shards, two object all-gathers and those
            of up to 20 forwards.
        """
        split = split_beside(known, self.differences.measured.known, self.topology)
        probes: dict[tuple[str, ...], list[Probe]] = {}

        def probes_of(contract: GradientContract) -> list[Probe]:
            if contract.apart not in probes:
                probes[contract.apart] = [Probe(self.differences, known, contract, seed) for seed in _SEEDS]
            return probes[contract.apart]

        contracts = list(candidates(known, self.topology, split, declared))
        for contract in contracts:
            if all(self._fits(contract, probe) for probe in probes_of(contract)):
                return Explanation(contract, 1.0, self._even(probes_of(contract)[0]), split)
        even = self._even(probes_of(contracts[0])[0])
        for contract in contracts:
            factor = self._factor(contract, probes_of(contract))
            if factor is not None:
                return Explanation(contract, factor, even, split)
        return Explanation(None, 1.0, even, split)

    def copied_along(self, known: KnownParameter) -> tuple[str, ...]:
        """Return the model-parallel axes along which the tensor's values differ although its gradients are equal.

        Backward treats such a tensor as replicated, but it is not.

        Collectives: an object all-gather per axis along which the values differ.
        """
        differ = [axis for axis in self.topology.model_axes if not known.equal_along(axis, self.topology)]
        contract = next(candidates(known, self.topology, (), None))
        found = []
        for axis in differ:
            alike = GradientContract(
                tuple((other, COPY if other == axis else along) for other, along in contract.by_axis)
            )
            probe = Probe(self.differences, known, alike, _SEEDS[0])
            if axis in self._even(probe):
                found.append(axis)
        return tuple(found)

    def _fits(self, contract: GradientContract, probe: Probe) -> bool:
        value, spread = contract.derivative(probe.products, self.topology)
        if spread > self.differences.digits.relative * 10 * probe.size:
            return False
        size = max(abs(value), probe.size)
        found = (difference for difference in probe.differences() if not difference.unequal)
        return self.differences.judge(found, value, size) == "kept"

    def _factor(self, contract: GradientContract, probes: Iterable[Probe]) -> float | None:
        """Return the derivative that ``contract`` predicts from the gradients, divided by the measured one.

        Return None if the factors along the directions of ``probes`` differ, if a factor is 0 or cannot be measured, or if
        the ranks' predictions contradict each other.
        """
        found: list[float] = []
        for probe in probes:
            value, spread = contract.derivative(probe.products, self.topology)
            difference = probe.derivative()
            if difference is None or not difference.value or spread > 1e-6 * probe.size:
                return None
            found.append(value / difference.value)
        first, *others = found
        alike = all(abs(other - first) <= 1e-4 * abs(first) for other in others)
        return sum(found) / len(found) if alike and abs(first) > 1e-9 else None

    def _even(self, probe: Probe) -> tuple[str, ...]:
        """Return the mesh axes along which all ranks have equal products <gradient, direction>."""
        found = []
        for axis in larger_axes(self.topology):
            groups = ([probe.products[r] for r in ranks if r in probe.products] for ranks in self.topology.groups(axis))
            if all(not group or max(group) - min(group) <= 1e-6 * probe.size for group in groups):
                found.append(axis)
        return tuple(found)


def axes_of_factor(factor: float, topology: Topology) -> tuple[str, ...]:
    """Return the mesh axes of size ``factor``, else adjacent axes whose sizes multiply to it; () without such axes."""
    axes = larger_axes(topology)
    single = tuple(axis for axis in axes if abs(topology.size(axis) - factor) < 1e-3 * factor)
    if single:
        return single
    for start in range(len(axes)):
        for stop in range(start + 2, len(axes) + 1):
            if abs(prod(map(topology.size, axes[start:stop])) - factor) < 1e-3 * factor:
                return axes[start:stop]
    return ()


def cause_of(
    known: KnownParameter, declared: GradientContract, found: Explanation, topology: Topology
) -> tuple[Cause, tuple[str, ...]]:
    """Return (kind of mistake, mesh axes along which the ranks' layouts or gradients are wrong)."""
    differ = tuple(
        axis for axis, along in declared.by_axis if not along.apart and not known.equal_along(axis, topology)
    )
    tied = () if known.first.spec is None else dict(known.first.spec.tied)
    if differ and (found.contract is None or {*differ} & {*topology.data_axes, *tied}):
        return "copies differ", differ
    if found.contract is None:
        uneven = tuple(axis for axis, along in declared.by_axis if along == COPY and axis not in found.even)
        return "backward is wrong", uneven
    if found.factor != 1.0:
        too_large = found.factor > 1
        axes = axes_of_factor(found.factor if too_large else 1 / found.factor, topology)
        return ("counted several times" if too_large else "divided too often"), axes
    changed = [axis for axis, was in declared.by_axis if was != found.contract.along(axis)]
    assert changed
    axis = changed[0]
    was, now = declared.along(axis), found.contract.along(axis)
    if was.apart != now.apart:
        return ("split, not declared" if now.apart else "declared split, but a copy"), (axis,)
    if was == TERM or now.products != "sum":
        return "counted several times", (axis,)
    if now.apart or axis in topology.data_axes:
        return "divided too often", (axis,)
    if axis not in found.even:
        return "a sum is missing", (axis,)
    bias = axis in found.split and len(known.first.shape) == 1
    return ("added on every rank" if bias else "divided too often"), (axis,)


# Texts of the causes --------------------------------------------------------------------------------------------------


def describe_cause(cause: Cause, axes: Sequence[str], factor: float, spec: P | None, is_certain: bool = True) -> str:
    """Return the text of a finding: the most likely mistake, and how to correct it.

    ``factor`` is the factor by which the gradient is too large. ``spec`` is the right spec; None: not known.
    ``is_certain``: False if other dims than those of ``spec`` may be sharded.
    """
    over = " x ".join(map(repr, axes)) or "some axis"
    either = " or ".join(map(repr, axes))
    becomes = "" if spec is None else f"; the right spec is {spec}"
    if not is_certain:
        becomes += ", or one that shards another dim (gradients don't show which)"
    return {
        "split, not declared": f"each rank of {over} has a different shard{becomes}",
        "declared split, but a copy": f"the ranks of {over} hold replicas with equal values{becomes}",
        "a sum is missing": (
            f"each rank of {over} has only a partial gradient: add the missing all-reduce over {over} to backward "
            f"(`copy_to` where a replica enters sharded computation), or declare P(partial=...){becomes}"
        ),
        "counted several times": (
            f"the gradient is {factor:.4f} times too large: it is summed twice, or summed over {either} although it "
            f"is complete there{becomes}"
            if axes
            else f"the gradient is {factor:.4f} times too large, which is the size of no mesh axis: a backward adds it "
            f"twice, or multiplies it by a wrong factor{becomes}"
        ),
        "divided too often": (
            f"the gradient is {1 / factor if factor else 0:.4f} times too small: it is averaged over {either} and must "
            "be summed"
            if axes
            else f"the gradient is {1 / factor if factor else 0:.4f} times too small, which is the size of no mesh axis: a "
            "backward multiplies it by a wrong factor, or loses a part of it"
        ),
        "added on every rank": (
            f"the loss contains it once per rank of {over}, like a bias that every rank adds before the sum over "
            f"{over}: add it after the sum, or on one rank only. Or its gradient is averaged and must be summed"
        ),
        "held by others": f"the ranks that hold it are not the ranks of its spec{becomes}",
        "no gradient comes": "it has no gradient although the loss depends on it: it is detached in forward",
        "copies differ": f"its replicas differ along {over}: start all ranks from the same weights, or declare it "
        "sharded if each rank has its own values, like experts",
        "backward is wrong": "no layout makes its gradient the derivative of the loss"
        + (f": the ranks of {over} must have equal gradients, but their gradients differ" if axes else ""),
        "forward differs": (
            f"the ranks of {over} must compute the same values, but their values differ: a sum or a gather over {over} "
            "is missing in forward or uses another axis, replicas of a parameter differ, or the ranks have different "
            f"batches (then make the axis a data axis: Topology(roles={{{over}: 'data'}}, ...))"
        ),
    }[cause]


# Location of a wrong backward: activations are tested like parameters, from the loss backwards ------------------------

# An activation is a tensor that a module receives or returns in forward. Hooks add zeros to activations. The gradient
# of the zeros is the gradient of the activation, and it must be the derivative of the loss, as for a parameter. If the
# gradient of a module's output is right and the gradient of its input is wrong, the module's backward is wrong.

_MOST = 24  # largest number of activations that are tested


class _Added:
    """Zeros that a hook adds to a tensor in forward, and a copy of this tensor.

    Both are None before the hook ran, and if the tensor is a DTensor or not of a float dtype.
    """

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


@dataclass(frozen=True)
class Fault:
    """The place of a wrong backward, given by two tensors of forward between which it lies.

    ``wrong`` is the last tensor, in forward order, with a wrong gradient. ``right`` is the next tested tensor, whose
    gradient is right; None: the loss. ``axes`` may be empty. ``likely``: the cause is the most likely one, but not
    certain.
    """

    wrong: HookPoint
    right: HookPoint | None
    cause: Cause
    axes: tuple[str, ...]
    likely: bool = False

    @property
    def inside(self) -> str:
        """Return a description of the operation whose backward is wrong."""
        if self.right is not None and self.right.module == self.wrong.module:
            return f"the backward of {self.wrong.module}"
        after = "the loss" if self.right is None else str(self.right)
        return f"the backward between {self.wrong} and {after}"

    def __str__(self) -> str:
        over = " or ".join(map(repr, self.axes)) or "some axis"
        detail = {
            "a sum is missing": f": the gradient of {self.wrong} must be summed over {over}",
            "counted several times": f": the gradient of {self.wrong} is summed once too often, over {over}",
            "divided too often": f": the gradient of {self.wrong} is averaged over {over} and must be summed",
        }.get(self.cause, "")
        if self.likely:
            detail = f", where most likely a sum over {over} is missing"
        return f"The mistake is in {self.inside}{detail}."


def locate_fault(
    model: nn.Module,
    differences: Differences,
    events: Sequence[HookPoint],
    split: Mapping[str, tuple[str, ...]],
) -> Fault | None:
    """Find the last input or output of a module, in forward order, whose gradient is wrong, and return its `Fault`.

    Return None if no tested gradient is wrong. The result is the same on all ranks. The gradients in ``.grad`` are
    overwritten. Only the last `_MOST` hook points are tested. ``events`` are in forward order, the same on all ranks; a
    rank skips modules that it does not have.

    Collectives: those of one forward and backward, of several forwards per hook point, and object all-gathers.
    """
    events = events[-_MOST:]
    objective, registry = differences.objective, differences.measured.registry
    added = {site: _Added() for site in events}
    with hooked(model, added, lambda site, values: added[site].add_to(values)):
        base: Losses = objective.differentiate()
        local, seen = dict[str, LocalTensor](), dict[str, ParameterView]()
        for site, one in added.items():
            if one.zeros is not None and one.value is not None:
                local[str(site)] = LocalTensor(one.zeros.detach(), one.zeros.grad)
                seen[str(site)] = ParameterView.of(one.value, one.zeros.grad, None, differences.topology)
                one.zeros = local[str(site)].value
        measured = Measured(local, seen, registry, differences.topology)
        explainer = Explainer(Differences(objective, measured, base, differences.digits, differences.noise))
        right: HookPoint | None = None
        for site in reversed(events):
            known = next((known for known in measured.known if known.name == str(site)), None)
            if known is None or not any(one.gradient for one in known.seen.values()):
                continue
            found = explainer.explain(known, None)
            problem = _problem(known, found, explainer)
            if problem is not None:
                return _likeliest(Fault(site, right, *problem), split)
            right = site
    return None


def _likeliest(place: Fault, split: Mapping[str, tuple[str, ...]]) -> Fault:
    """Return ``place`` with the likely cause "a sum is missing", if the backward of a single, sharded module is wrong.

    In such a module, most likely the sum over the ranks that hold the other shards is missing: a sum that is made twice
    would give a wrong factor, which is another cause. Other faults are returned unchanged.
    """
    inside = place.right is not None and place.right.module == place.wrong.module
    if place.cause == "backward is wrong" and inside and split.get(place.wrong.module):
        return replace(place, cause="a sum is missing", axes=split[place.wrong.module], likely=True)
    return place


def _problem(
    known: KnownParameter, found: Explanation, explainer: Explainer
) -> tuple[Cause, tuple[str, ...], bool] | None:
    """Return (cause, axes, True if the cause is uncertain) for a wrong gradient of an activation; None if it is right."""
    topology = explainer.topology
    if found.contract is None:
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
        axis
        for axis, along in found.contract.by_axis
        if axis in topology.model_axes and not along.apart and along != COPY
    )
    return ("a sum is missing", terms, False) if terms else None
