"""Where the layouts that parameters declare, by flags or otherwise, and what they hold after a backward disagree.

    declare_by_flags(model, registry)
    loss_of(model).backward()
    print(audit(model, registry))

    mlp.bias: declared P(), a copy over 'tensor', but the values differ: ...

A flag that is wrong or forgotten shows in no shape. It shows in values and gradients: pieces differ in both, copies in
none, and terms of a sum have equal values and different gradients. So one backward, on ranks that see the same samples
along an axis, tells what the parameter is along it:

    values      gradients     is                    right where declared
    differ                    a piece               split
    equal       differ        a term of a sum       partial
    equal       equal         a copy                neither

Constant values (ones of a norm, zeros of a bias) and gradients of zero say nothing by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..layout.spec import P
from ..mesh.agreement import gather_objects, on_all_ranks
from ..mesh.registry import ProcessGroupRegistry
from ..mesh.topology import Topology
from .local_parameters import local_parameter, local_tensor, spec_of

Kind = Literal["split", "partial", "copy"]

_PROJECTIONS, _CHUNK = 4, 2**20
# Of gradients that every rank computes for itself, in the order of its own additions; terms of a sum differ by about 1.
_EQUAL = {torch.float64: 1e-6, torch.float32: 1e-3}
_EQUAL_IN_HALF = 5e-2


class Sketch(NamedTuple):
    """What one rank says of a tensor: its norm, and its dot products with fixed vectors of 1 and -1."""

    norm: float
    projections: tuple[float, ...]
    constant: bool

    @classmethod
    @torch.no_grad()
    def of(cls, tensor: Tensor) -> Sketch:
        """Host reads: one."""
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
        """Whether the tensors are equal up to a part ``within`` of their norm."""
        largest = within * max(self.norm, other.norm)
        pairs = zip((self.norm, *self.projections), (other.norm, *other.projections), strict=True)
        return all(abs(a - b) <= largest for a, b in pairs)


class AuditedParameter(NamedTuple):
    """One parameter on one rank."""

    spec: P
    value: Sketch
    gradient: Sketch | None
    within: float


@dataclass(frozen=True)
class Disagreement:
    """A parameter that is along one axis something else than it is declared to be."""

    name: str
    axis: str
    spec: P
    declared: Kind
    found: str
    what_to_do: str

    def __str__(self) -> str:
        declared = {"split": "split", "partial": "a sum to be made", "copy": "a copy"}[self.declared]
        return f"{self.name}: declared {self.spec}, {declared} over {self.axis!r}, but {self.found}: {self.what_to_do}"


@dataclass(frozen=True)
class Audit:
    """All that was found, by parameter and axis; the same on all ranks."""

    parameters: int
    disagreements: tuple[Disagreement, ...]

    def __str__(self) -> str:
        if not self.disagreements:
            return f"{self.parameters} parameters are what they are declared to be"
        return "\n".join(map(str, self.disagreements))


def audit(model: nn.Module, registry: ProcessGroupRegistry) -> Audit:
    """Compare what parameters are declared to be with their values and gradients, along each axis but the pipeline's.

    After a backward, before anybody completes the gradients; ``main_grad`` is read where there is one. Without gradients
    only values are compared. Along data axes, whose ranks see different samples, only values are. On all ranks.

    Args:
        model: With declared parameters (`declare`, `declare_by_flags`); tied ones are compared along their other axes.
    Raises:
        ValueError: On every rank: a parameter is not declared.
    Collectives: object all-gathers over the world, of 12 numbers a parameter. Host reads: one a tensor.
    """
    topology = registry.topology

    def see() -> dict[str, AuditedParameter]:
        return {name: _seen(param, topology) for name, param in model.named_parameters()}

    by_rank = gather_objects(on_all_ranks(see, registry), registry)
    found: dict[tuple[str, str], Disagreement] = {}
    for axis in topology.axes:
        if topology.size(axis) > 1 and axis not in topology.pipe_axes:
            for ranks in topology.groups(axis):
                for disagreement in _along(axis, [by_rank[rank] for rank in ranks], topology):
                    found.setdefault((disagreement.name, axis), disagreement)
    names = {name for of_rank in by_rank for name in of_rank}
    return Audit(len(names), tuple(found.values()))


def _seen(param: Tensor, topology: Topology) -> AuditedParameter:
    local = local_parameter(param, topology)
    gradient = param.grad if param.grad is not None else getattr(param, "main_grad", None)
    sketch = None if gradient is None else Sketch.of(local_tensor(gradient))
    return AuditedParameter(spec_of(param), Sketch.of(local), sketch, _EQUAL.get(local.dtype, _EQUAL_IN_HALF))


def _along(axis: str, ranks: Sequence[Mapping[str, AuditedParameter]], topology: Topology) -> Iterator[Disagreement]:
    for name, first in ranks[0].items():
        seen = [of_rank[name] for of_rank in ranks if name in of_rank]
        kind: Kind = "split" if axis in first.spec.sharded_axes else "partial" if axis in first.spec.partial else "copy"
        if len(seen) == len(ranks) and axis not in (*dict(first.spec.owned), *dict(first.spec.tied)):
            problem = _problem(kind, seen, topology.role(axis) == "data")
            if problem is not None:
                yield Disagreement(name, axis, first.spec, kind, *problem)


def _problem(kind: Kind, seen: Sequence[AuditedParameter], other_samples: bool) -> tuple[str, str] | None:
    """What was found and what to do about it; None where it is right, or can't be told."""
    same_values = _all_equal([one.value for one in seen], seen[0].within)
    gradients = [one.gradient for one in seen if one.gradient is not None]
    told = len(gradients) == len(seen) and not other_samples and any(gradient.norm for gradient in gradients)
    same_gradients = told and _all_equal(gradients, seen[0].within)
    n = len(seen)
    if kind == "split":
        if same_values and (same_gradients or not seen[0].value.constant):
            what = "so are the gradients" if same_gradients else "the gradients differ" if told else ""
            instead = "a copy" if same_gradients else "a copy, whose gradient may be a sum to be made,"
            return (
                "the values are equal" + (f" and {what}" if what else ""),
                f"it is {instead} that would count {n} times, and its flag must go (tensor_model_parallel, or P(axis)); "
                "or pieces were initialised alike",
            )
        return None
    if not same_values:
        return (
            "the values differ",
            "it is a piece that lacks its flag (tensor_model_parallel and partition_dim, or P(axis)), or copies that were "
            "not initialised alike",
        )
    if kind == "copy" and told and not same_gradients:
        return (
            "the gradients differ",
            "they are terms of a sum that nobody makes, and the copies drift apart: sequence_parallel, or P(partial=...); "
            "or an all-reduce is missing in backward",
        )
    if kind == "partial" and same_gradients:
        return (
            "the gradients are equal",
            f"they are whole already, and summed once more they are {n} times too large: take the flag away "
            "(sequence_parallel, or P(partial=...))",
        )
    return None


def _all_equal(sketches: Sequence[Sketch], within: float) -> bool:
    return all(sketch.equals(sketches[0], within) for sketch in sketches[1:])
