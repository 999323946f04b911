"""How one parameter is laid out over the mesh: `P`, and how a parameter comes to carry one.

`P` has one entry per tensor dim, as JAX's PartitionSpec: the mesh axis that shards the dim, a tuple of axes, or None.
Axes that a spec does not name hold replicas. What the spec can't say by dims it says by keyword:

    P("tensor", None)                      dim 0 is sharded over `tensor`
    P(("col", "row"))                      dim 0 is sharded over both axes, `col` slowest
    P("col", owned={"row": 0})             sharded over `col`; only coordinate 0 of `row` holds it at all
    P(partial="tensor")                    whole on every rank, but its gradient is a pending sum over `tensor`
    P("tensor", None, tied={"pipe": (0, -1)})   one parameter, present on the first and the last stage
    P()                                    replicated, said on purpose
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from torch import Tensor, nn

from ..interop.local import local_parameter
from ..mesh.topology import Topology

_ATTRIBUTE = "_meshstep_annotation"


@dataclass(frozen=True, init=False, repr=False)
class P:
    """The layout of one parameter.

    Args:
        entries: For each tensor dim the mesh axis that shards it, a tuple of axes (the first is the slowest), or None.
            Dims past the last entry are not sharded.
        partial: Axis or axes over which the gradient is still a sum to be made when backward ends.
        owned: ``{axis: coordinate}``: only that coordinate of the axis holds the parameter.
        tied: ``{axis: (coordinate, ...)}``: the same logical parameter is held at exactly these coordinates (negative
            ones count from the end), each of which contributes a part of its gradient.

    Raises:
        ValueError: An axis is named twice, or an entry is not an axis name, a tuple of names or None.
    """

    entries: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...]
    owned: tuple[tuple[str, int], ...]
    tied: tuple[tuple[str, tuple[int, ...]], ...]

    def __init__(
        self,
        *entries: str | tuple[str, ...] | None,
        partial: str | tuple[str, ...] | None = None,
        owned: Mapping[str, int] | None = None,
        tied: Mapping[str, Iterable[int]] | None = None,
    ) -> None:
        dims = [_axes_of(entry) for entry in entries]
        while dims and not dims[-1]:  # P("tensor", None) and P("tensor") say the same: one spelling, one hash
            dims.pop()
        object.__setattr__(self, "entries", tuple(dims))
        object.__setattr__(self, "partial", tuple(sorted(_axes_of(partial))))
        object.__setattr__(self, "owned", tuple(sorted((owned or {}).items())))
        object.__setattr__(self, "tied", tuple(sorted((axis, tuple(where)) for axis, where in (tied or {}).items())))
        for axis, where in self.tied:
            if not where:
                raise ValueError(f"{self}: tied over {axis!r} names no coordinate; write tied={{{axis!r}: (0, -1)}}")
        named = self.named_axes
        twice = sorted({axis for axis in named if named.count(axis) > 1})
        if twice:
            raise ValueError(f"{self}: axis {twice[0]!r} is named twice; an axis can say one thing about a parameter")

    @property
    def sharded_axes(self) -> tuple[str, ...]:
        """The axes that shard some dim, in the order of the dims."""
        return tuple(axis for axes in self.entries for axis in axes)

    @property
    def named_axes(self) -> tuple[str, ...]:
        """All axes that the spec mentions."""
        return (*self.sharded_axes, *self.partial, *dict(self.owned), *dict(self.tied))

    def dim_axes(self, dim: int) -> tuple[str, ...]:
        """The axes that shard tensor dim ``dim`` (>= 0), slowest first; () where it is whole."""
        return self.entries[dim] if dim < len(self.entries) else ()

    def tied_coordinates(self, axis: str, topology: Topology) -> tuple[int, ...]:
        """The coordinates of ``axis`` that hold the parameter, ascending, none negative."""
        size = topology.size(axis)
        return tuple(sorted({index % size for index in dict(self.tied)[axis]}))

    def holds(self, coordinate: Mapping[str, int], topology: Topology) -> bool:
        """Whether the rank at ``coordinate`` (axis -> index) holds this parameter."""
        return all(coordinate[axis] == index for axis, index in self.owned) and all(
            coordinate[axis] in self.tied_coordinates(axis, topology) for axis, _ in self.tied
        )

    def distinct_axes(self, topology: Topology) -> tuple[str, ...]:
        """The axes along which the pieces differ: the sharded ones, and the pipeline's unless it is tied or owned."""
        along_pipe = [axis for axis in topology.pipe_axes if axis not in self.named_axes]
        named = {*self.sharded_axes, *along_pipe}
        return tuple(axis for axis in topology.axes if axis in named)

    def replica_axes(self, topology: Topology) -> tuple[str, ...]:
        """The axes along which every coordinate holds a copy; a tied axis is not among them."""
        gone = {*self.distinct_axes(topology), *dict(self.owned), *dict(self.tied)}
        return tuple(axis for axis in topology.axes if axis not in gone)

    def holders(self, topology: Topology) -> int:
        """How many ranks hold a copy of each distinct piece."""
        copies = prod(topology.size(axis) for axis in self.replica_axes(topology))
        return copies * prod(len(self.tied_coordinates(axis, topology)) for axis, _ in self.tied)

    def validate(self, ndim: int, topology: Topology, name: str = "parameter") -> None:
        """Check the spec against a tensor's number of dims and a topology.

        Raises:
            ValueError: An axis is unknown, a coordinate is out of range or there are more entries than dims.
        """
        if len(self.entries) > ndim:
            raise ValueError(
                f"{name}: {self} has {len(self.entries)} entries but the tensor has {ndim} dims; give one entry a dim"
            )
        for axis in self.named_axes:
            if axis not in topology.axes:
                raise ValueError(f"{name}: {self} names axis {axis!r}, but the axes are {', '.join(topology.axes)}")
        held = [(axis, index) for axis, index in self.owned] + [(axis, i) for axis, where in self.tied for i in where]
        for axis, index in held:
            size = topology.size(axis)
            if not -size <= index < size or (index < 0 and axis in dict(self.owned)):
                raise ValueError(f"{name}: {self} names coordinate {index} of {axis!r}, which has size {size}")

    def __repr__(self) -> str:
        parts = [_entry_repr(axes) for axes in self.entries]
        if self.partial:
            parts.append(f"partial={_entry_repr(self.partial)}")
        if self.owned:
            parts.append(f"owned={dict(self.owned)}")
        if self.tied:
            parts.append(f"tied={dict(self.tied)}")
        return f"P({', '.join(parts)})"


def _axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
    if not isinstance(axes, tuple) or not all(isinstance(axis, str) and axis for axis in axes):
        raise ValueError(f"{entry!r} is no entry of a spec; give an axis name, a tuple of axis names or None")
    return axes


def _entry_repr(axes: tuple[str, ...]) -> str:
    return repr(axes[0]) if len(axes) == 1 else repr(axes or None)


@dataclass(frozen=True)
class Annotation:
    """What a parameter carries.

    Args:
        spec: Its layout.
        name: What errors call it.
        mesh_axes: Of a DTensor's local tensor, the axes of its device mesh: torch has reduced the gradient over them.
        declared: False where only a DTensor's placements say the spec, which speak for ``mesh_axes`` alone.
    """

    spec: P
    name: str | None = None
    mesh_axes: tuple[str, ...] = ()
    declared: bool = True

    def silent_axes(self, topology: Topology) -> tuple[str, ...]:
        """The model axes larger than 1 of which nobody has said whether they shard the parameter."""
        silent = () if self.declared else (axis for axis in topology.model_axes if axis not in self.mesh_axes)
        return tuple(axis for axis in silent if topology.size(axis) > 1)


def annotate(param: Tensor, spec: P, name: str | None = None) -> None:
    """Attach ``spec`` to one parameter; a layer calls it for its own parameters.

    The annotation is an attribute of the tensor: ``copy.deepcopy`` and wrappers that make new parameters drop it, and
    the parameter then counts as undeclared, which is an error where the spec is needed. Use `declare` again on the copy.

    Raises:
        ValueError: The spec has more entries than the parameter has dims.
    """
    if len(spec.entries) > param.dim():
        label = name or f"parameter of shape {tuple(param.shape)}"
        raise ValueError(
            f"{label}: {spec} has {len(spec.entries)} entries but the tensor has {param.dim()} dims; "
            "give one entry a dim"
        )
    setattr(param, _ATTRIBUTE, Annotation(spec, name))


def attach(param: Tensor, annotation: Annotation) -> None:
    """Let ``param`` carry ``annotation``, as it is."""
    setattr(param, _ATTRIBUTE, annotation)


def annotation_of(param: Tensor) -> Annotation | None:
    """The annotation of a parameter, or None where nothing declared it."""
    found: Any = getattr(param, _ATTRIBUTE, None)
    return found if isinstance(found, Annotation) else None


def spec_of(param: Tensor) -> P:
    """The declared spec of a parameter; of a DTensor the one of its local tensor, its placements included.

    Raises:
        ValueError: Nothing declared it; a DTensor's placements contradict what was declared.
    """
    annotation = annotation_of(local_parameter(param))
    if annotation is None:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} has no spec; say how it is laid out with declare(model, "
            "{'name or pattern': P(...)}), P() meaning replicated (copy.deepcopy and wrappers drop specs: declare again)"
        )
    return annotation.spec


def declare(module: nn.Module, rules: Mapping[str, P] | None = None) -> None:
    """Say how every parameter of ``module`` is laid out, and give each its qualified name.

        declare(model, {"*": P(), "head.weight": P("tensor", None), "layers.*.mlp.bias": P("tensor")})

    A rule is a parameter's name or a glob pattern (``*`` crosses dots). The most specific match wins: a full name before
    any pattern, then the pattern with more literal characters. Parameters that their layer has declared already
    (`annotate`) keep that spec unless a rule gives their full name. Either all of the rules take effect or none.

    Raises:
        ValueError: A rule matches no parameter; a parameter is matched by no rule and not declared; two equally specific
            rules disagree; a spec has more entries than its parameter has dims.
    """
    rules = dict(rules or {})
    params = dict(module.named_parameters())
    for pattern in rules:
        if not any(fnmatchcase(name, pattern) for name in params):
            raise ValueError(
                f"rule {pattern!r} matches no parameter of {type(module).__name__}; "
                f"its parameters are {_some(params) or 'none'}"
            )
    decided: dict[str, Annotation] = {}
    missing = []
    for name, param in params.items():
        existing = annotation_of(param)
        spec = rules.get(name) or (existing.spec if existing else _most_specific(name, rules))
        if spec is None:
            missing.append(name)
            continue
        if len(spec.entries) > param.dim():
            raise ValueError(
                f"{name}: {spec} has {len(spec.entries)} entries but the parameter has shape {tuple(param.shape)}; "
                "give one entry a dim"
            )
        decided[name] = Annotation(spec, name)
    if missing:
        raise ValueError(
            f"no rule says how {_some(missing)} is laid out; add a rule for it, P() meaning replicated on purpose"
        )
    for name, annotation in decided.items():
        setattr(params[name], _ATTRIBUTE, annotation)


def _most_specific(name: str, rules: Mapping[str, P]) -> P | None:
    matching = [pattern for pattern in rules if fnmatchcase(name, pattern)]
    if not matching:
        return None
    best = max(map(_literal_characters, matching))
    candidates = [pattern for pattern in matching if _literal_characters(pattern) == best]
    if len({rules[pattern] for pattern in candidates}) > 1:
        raise ValueError(
            f"{name}: the rules {' and '.join(map(repr, candidates))} are equally specific and disagree; "
            "make one longer or give the full name"
        )
    return rules[candidates[0]]


def _literal_characters(pattern: str) -> int:
    return sum(character not in "*?[]!" for character in pattern)


def _some(names: Iterable[str], most: int = 5) -> str:
    names = list(names)
    shown = ", ".join(names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def copy_annotation(source: Tensor, target: Tensor) -> None:
    """Give ``target`` (a master copy, a slice) the annotation of ``source``, if it has one."""
    annotation = annotation_of(source)
    if annotation is not None:
        setattr(target, _ATTRIBUTE, annotation)
