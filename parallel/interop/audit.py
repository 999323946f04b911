"""Compare declared layouts with the values and gradients of the parameters after a backward.

    declare_by_flags(model, registry)
    loss_of(model).backward()
    print(audit(model, registry))

    mlp.bias: declared P(), replicated over 'tensor', but the values differ: ...

A wrong declaration changes no shape, but it contradicts the values and gradients. If the ranks along an axis see the same
samples, their values and gradients after one backward show the layout of a parameter over the axis:

    values      gradients     layout                              correct declaration
    differ      any           sharded                             sharded
    equal       differ        replicated, partial gradient        partial
    equal       equal         replicated, complete gradient       neither sharded nor partial

Constant values (the ones of a norm, the zeros of a bias) are equal on shards too, so they do not show alone whether a
parameter is replicated. Gradients that are 0 on all ranks are not compared.

A tied parameter must have equal values on all its stages. A tie that is not declared contradicts no value and no gradient.
`Audit.hints` names parameters of different pipeline stages with equal values, because they may be one parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..layout.spec import P
from ..mesh.agreement import gather_objects, on_all_ranks
from ..mesh.registry import ProcessGroupRegistry
from ..mesh.text import some
from ..mesh.topology import Topology
from .local_parameters import local_parameter, local_tensor, spec_of

Kind = Literal["split", "partial", "copy", "tied"]

_PROJECTIONS, _CHUNK = 4, 2**20
# Two tensors count as equal if their norms and their projections (`Sketch`) differ by at most this fraction of the larger
# norm. Replicated gradients differ slightly between ranks, because ranks sum in different orders. Partial gradients have
# a relative difference of about 1.
_EQUAL = {torch.float64: 1e-6, torch.float32: 1e-3}
_EQUAL_IN_HALF = 5e-2


class Sketch(NamedTuple):
    """Fingerprint of a tensor on one rank: its norm, and dot products with random vectors, which all ranks share."""

    norm: float
    projections: tuple[float, ...]
    constant: bool

    @classmethod
    @torch.no_grad()
    def of(cls, tensor: Tensor) -> Sketch:
        """Return the fingerprint of ``tensor``. Host synchronization: one."""
        flat = tensor.detach().reshape(-1)
        total = torch.zeros(2 + _PROJECTIONS, dtype=torch.float64, device=flat.device)
        generator = torch.Generator(flat.device).manual_seed(0)
        for part in flat.split(_CHUNK):
            part = part.double()
            signs = torch.randint(0, 2, (_PROJECTIONS, part.numel()), generator=generator, device=flat.device)
            total[0] += part.square().sum()
            total[1:-1] += (2 * signs - 1).double() @ part
        total[-1] = (flat == flat[:1]).all()
        square, *projections, constant = total.tolist()
        return cls(square**0.5, tuple(projections), bool(constant))

    def equals(self, other: Sketch, within: float) -> bool:
        """Return True if the norms and the dot products of both tensors differ by at most ``within`` x the larger norm."""
        largest = within * max(self.norm, other.norm)
        return all(abs(difference) <= largest for difference in (self.norm - other.norm, *self._differences(other)))

    def is_near(self, other: Sketch, fraction: float) -> bool:
        """Return True if the estimated norm of the difference of both tensors is at most ``fraction`` x the larger norm."""
        square = sum(difference**2 for difference in self._differences(other)) / _PROJECTIONS
        return square <= (fraction * max(self.norm, other.norm)) ** 2

    def _differences(self, other: Sketch) -> list[float]:
        """Return the dot products of the difference of both tensors."""
        return [a - b for a, b in zip(self.projections, other.projections, strict=True)]


class AuditedParameter(NamedTuple):
    """Fingerprints of a parameter on one rank. ``within`` is the relative tolerance of comparisons."""

    spec: P
    shape: tuple[int, ...]
    value: Sketch
    gradient: Sketch | None
    within: float


@dataclass(frozen=True)
class Disagreement:
    """A contradiction between a parameter's declared layout over an axis and its values or gradients.

        for found in audit(model, registry).disagreements:
            print(found.name, found.axis, found.declared, found.what_to_do)

    Attributes:
        name: The parameter's name.
        axis: The mesh axis.
        spec: The declared spec.
        declared: The declared layout over the axis: "split" (sharded), "partial" (replicated, with a partial gradient),
            "copy" (replicated, with a complete gradient) or "tied" (replicated on some ranks, with partial gradients).
        found: Text with the observation that contradicts the declaration.
        what_to_do: Text with possible causes and corrections.
    """

    name: str
    axis: str
    spec: P
    declared: Kind
    found: str
    what_to_do: str

    def __str__(self) -> str:
        layouts = {"split": "sharded", "partial": "a partial gradient", "copy": "replicated", "tied": "tied"}
        over = f"{layouts[self.declared]} over {self.axis!r}"
        return f"{self.name}: declared {self.spec}, {over}, but {self.found}: {self.what_to_do}"


@dataclass(frozen=True)
class Audit:
    """Result of `audit`, identical on all ranks.

        audited = audit(model, registry)
        assert not audited.disagreements, audited

    Attributes:
        parameters: Number of distinct parameter names on all ranks; a tied parameter with several names counts once.
        disagreements: The contradictions that were found, at most one per parameter and axis.
        hints: Texts about values that contradict no declaration, but suggest one: different pipeline stages have
            parameters with equal values, which may be one tied parameter. Default: no hints.
    """

    parameters: int
    disagreements: tuple[Disagreement, ...]
    hints: tuple[str, ...] = ()

    def __str__(self) -> str:
        found = [*map(str, self.disagreements)] or [f"{self.parameters} parameters match their declared layouts"]
        return "\n".join([*found, *(f"note: {hint}" for hint in self.hints)])


def audit(model: nn.Module, registry: ProcessGroupRegistry) -> Audit:
    """Compare the declared layouts of all parameters with their values and gradients, and return the contradictions.

    Call it on all ranks after a backward, before the gradient reduction. The ranks along each axis are compared. Along
    pipeline axes only tied parameters are compared, because stages have different parameters. Along data axes only values
    are compared, because the ranks see different samples. The gradient of a parameter is its ``grad``, or without it
    ``main_grad``. If a parameter has neither, only its values are compared.

        model(x).square().mean().backward()
        print(audit(model, registry))

    Args:
        model: A model with declared parameters (`declare`, `declare_by_flags`). A parameter is not compared along its owned
            axes, or along an axis on which some ranks do not have it. A tied parameter may have different names on its
            stages: the n-th such parameter of one stage is then compared with the n-th of the other stages.
        registry: The process groups.
    Returns:
        The contradictions, identical on all ranks. ``print`` shows one line per contradiction.
    Raises:
        ValueError: On every rank: a parameter is not declared, or its layout does not fit the topology (`spec_of`).
    Collectives: two object all-gathers over the world; the second has about 12 numbers per parameter.
    Host synchronization: one per value, one per gradient, and those of the all-gathers.
    """
    topology = registry.topology

    def audit_local() -> dict[str, AuditedParameter]:
        return {name: _audit_parameter(param, topology) for name, param in model.named_parameters()}

    gathered = gather_objects(on_all_ranks(audit_local, registry), registry)
    common = tied_names([{name: param.spec for name, param in params.items()} for params in gathered], topology)
    by_rank = [
        {names.get(name, name): param for name, param in params.items()}
        for names, params in zip(common, gathered, strict=True)
    ]
    found: dict[tuple[str, str], Disagreement] = {}
    for axis in topology.axes:
        if topology.size(axis) > 1:
            for ranks in topology.groups(axis):
                for disagreement in _compare_ranks(axis, [by_rank[rank] for rank in ranks], topology):
                    found.setdefault((disagreement.name, axis), disagreement)
    values = [
        {
            name: (param.shape, param.value)
            for name, param in params.items()
            if not param.value.constant and not {*param.spec.named_axes} & {*topology.pipe_axes}
        }
        for params in gathered
    ]
    names = {name for params in by_rank for name in params}
    return Audit(len(names), tuple(found.values()), hints_of_equal_stages(values, topology))


def tied_names(specs: Sequence[Mapping[str, P | None]], topology: Topology) -> list[dict[str, str]]:
    """Return one dict per rank, which maps its names of tied parameters to those on the lowest rank that holds them.

    A tied parameter may have different names on its stages. Parameters that are tied over the same stages are matched
    as in `ParallelOptimizer`. First, a name that all ranks of these stages have is one parameter; such names are not in
    the dicts. Then the n-th remaining name of a rank is the same parameter as the n-th remaining name of every other rank.
    """
    by_tie: dict[Hashable, dict[int, list[str]]] = {}
    for rank, params in enumerate(specs):
        for name, spec in params.items():
            if spec is not None and spec.tied:
                tie = tuple((axis, spec.tied_coordinates(axis, topology)) for axis, _ in spec.tied)
                by_tie.setdefault(tie, {}).setdefault(rank, []).append(name)
    found: list[dict[str, str]] = [{} for _ in specs]
    for by_rank in by_tie.values():
        everywhere = set.intersection(*map(set, by_rank.values()))
        others = {rank: [name for name in names if name not in everywhere] for rank, names in by_rank.items()}
        first = others[min(others)]
        for rank, names in others.items():
            found[rank] |= dict(zip(names, first, strict=False))
    return found


def hints_of_equal_stages(values: Sequence[Mapping[str, Hashable]], topology: Topology) -> tuple[str, ...]:
    """Return at most one text, which names parameters of different pipeline stages with equal values.

    Parameters with equal values are not named if two of them are on one stage, because such copies are usually intended.
    """
    if not topology.pipe_axes:
        return ()
    others = [axis for axis in topology.axes if axis not in topology.pipe_axes]
    held: dict[tuple[str, str], dict[tuple[int, ...], Hashable]] = {}
    for rank, named in enumerate(values):
        stage = ", ".join(f"{axis}={topology.coordinate_of(rank, axis)}" for axis in topology.pipe_axes)
        at = tuple(topology.coordinate_of(rank, axis) for axis in others)
        for name, value in named.items():
            held.setdefault((name, stage), {})[at] = value
    equal: dict[Hashable, list[tuple[str, str]]] = {}
    for param, by_place in held.items():
        equal.setdefault(frozenset(by_place.items()), []).append(param)
    alike = [
        " and ".join(f"{name} ({stage})" for name, stage in params)
        for params in equal.values()
        if len(params) > 1 and max(Counter(stage for _, stage in params).values()) == 1
    ]
    if not alike:
        return ()
    return (
        f"different pipeline stages have parameters with equal values: {some(alike)}. If they are one parameter, declare "
        "it on each of these stages with P(tied={axis: (stage, stage)}); otherwise give the stages different random seeds",
    )


def _audit_parameter(param: Tensor, topology: Topology) -> AuditedParameter:
    local = local_parameter(param, topology)
    gradient = param.grad if param.grad is not None else getattr(param, "main_grad", None)
    sketch = None if gradient is None else Sketch.of(local_tensor(gradient))
    within = _EQUAL.get(local.dtype, _EQUAL_IN_HALF)
    return AuditedParameter(spec_of(param, topology), tuple(local.shape), Sketch.of(local), sketch, within)


def _compare_ranks(
    axis: str, ranks: Sequence[Mapping[str, AuditedParameter]], topology: Topology
) -> Iterator[Disagreement]:
    for name in dict.fromkeys(name for params in ranks for name in params):
        audited = [params[name] for params in ranks if name in params]
        first = audited[0]
        kind: Kind = "split" if axis in first.spec.sharded_axes else "partial" if axis in first.spec.partial else "copy"
        if axis in dict(first.spec.tied):
            kind = "tied"
        on_all = len(audited) == len(ranks) and axis not in (*dict(first.spec.owned), *topology.pipe_axes)
        if kind == "tied" or on_all:
            problem = _describe_problem(kind, audited, topology.role(axis) == "data")
            if problem is not None:
                yield Disagreement(name, axis, first.spec, kind, *problem)


def _describe_problem(kind: Kind, audited: Sequence[AuditedParameter], other_samples: bool) -> tuple[str, str] | None:
    """Return texts with an observation that contradicts a declared layout, and possible causes; None without one."""
    same_values = _all_equal([param.value for param in audited], audited[0].within)
    gradients = [param.gradient for param in audited if param.gradient is not None]
    comparable = len(gradients) == len(audited) and not other_samples and any(gradient.norm for gradient in gradients)
    same_gradients = comparable and _all_equal(gradients, audited[0].within)
    n = len(audited)
    if kind == "split":
        if same_values and (same_gradients or not audited[0].value.constant):
            what = "so are the gradients" if same_gradients else "the gradients differ" if comparable else ""
            layout = "replicated" if same_gradients else "replicated, perhaps with a partial gradient"
            return (
                "the values are equal" + (f" and {what}" if what else ""),
                f"either the parameter is {layout}, and would count {n} times in a norm: remove its flag "
                "(tensor_model_parallel, or P(axis)); or the shards were initialized with equal values",
            )
        return None
    if kind == "tied":
        if not same_values:
            return (
                "the values differ",
                "the replicas diverged, or were loaded or initialized with different values: copy the values of one rank "
                "to the other ranks; or the stages have different parameters: remove tied=",
            )
        if same_gradients and n > 1:
            return (
                "the gradients are equal",
                f"the gradients are summed already, and another sum would make them {n} times too large: call audit before "
                "the sum, or remove the sum",
            )
        return None
    if not same_values:
        return (
            "the values differ",
            "either the parameter is sharded and lacks its flag (tensor_model_parallel and partition_dim, or P(axis)); or "
            "the replicas were initialized with different values",
        )
    if kind == "copy" and comparable and not same_gradients:
        return (
            "the gradients differ",
            "either these are partial gradients that are never summed, so that the replicas diverge: set "
            "sequence_parallel, or P(partial=...); or backward lacks an all-reduce",
        )
    if kind == "partial" and same_gradients:
        return (
            "the gradients are equal",
            f"the gradients are complete, and another sum would make them {n} times too large: remove the flag "
            "(sequence_parallel, or P(partial=...))",
        )
    return None


def _all_equal(sketches: Sequence[Sketch], within: float) -> bool:
    return all(sketch.equals(sketches[0], within) for sketch in sketches[1:])
