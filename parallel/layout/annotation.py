"""Declare the layout of parameters. The layout is stored in an `Annotation`, an attribute of the parameter tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor, nn

from ..mesh.text import some
from ..mesh.topology import Topology
from .spec import P

ATTRIBUTE = "_meshstep_annotation"
Source = Literal["layer", "rule", "default"]


@dataclass(frozen=True)
class Annotation:
    """The layout of a parameter, with the name and the full shape of the parameter.

    Args:
        mesh_axes: For the local tensor of a DTensor, the names of the mesh dims of the DTensor's device mesh. Empty for
            other parameters.
        declared: False: the spec describes the layout over ``mesh_axes`` only, because it was derived from DTensor
            placements alone, or because the parameter has no layout.
        full_shape: Shape of the full tensor. None: unknown. It is needed for uneven shards, because the full shape
            can't be computed from the shape of one shard.
        dims: (mesh dim, axes) pairs: the axes of the topology of which a mesh dim consists. A mesh dim whose name is an
            axis or an alias of the topology needs no entry.
        source: Origin of the layout. ``"rule"``: a rule of `declare`. ``"default"``: the rule ``"*"`` of `declare`, or
            an optimizer that counts a parameter without a layout as replicated. ``"layer"``: any other origin, such as
            `annotate`.
    """

    spec: P
    name: str | None = None
    mesh_axes: tuple[str, ...] = ()
    declared: bool = True
    full_shape: tuple[int, ...] | None = None
    dims: tuple[tuple[str, tuple[str, ...]], ...] = ()
    source: Source = "layer"

    def spec_on(self, topology: Topology) -> P:
        """Return the layout as a spec that names only axes of ``topology``, instead of mesh dims and aliases."""
        return self.spec.resolve(topology, dict(self.dims))

    def mesh_axes_on(self, topology: Topology) -> tuple[str, ...]:
        """Return the axes of ``topology`` of which the mesh dims ``mesh_axes`` consist, in their order."""
        if not self.mesh_axes:
            return ()
        known = dict(self.dims)
        return tuple(
            axis for dim in self.mesh_axes for axis in (known[dim] if dim in known else topology.expand_aliases(dim))
        )

    def silent_axes(self, topology: Topology) -> tuple[str, ...]:
        """Return the model axes larger than 1 over which the layout is unknown; () if it is declared."""
        if self.declared:
            return ()
        described = self.mesh_axes_on(topology)
        return tuple(axis for axis in topology.model_axes if axis not in described and topology.size(axis) > 1)


def annotate(param: Tensor, spec: P, name: str | None = None, *, full_shape: tuple[int, ...] | None = None) -> None:
    """Attach a layout to one parameter. Layers call this function for their own parameters.

    The layout is an attribute of the tensor. ``copy.deepcopy``, and wrappers that create new parameters, do not copy
    it. Call `declare` for the new parameters.

        annotate(self.weight, P("tensor", None), "weight")

    Args:
        param: The parameter, on this rank.
        spec: The layout of the parameter.
        name: Name of the parameter in errors. None: errors show the shape.
        full_shape: Shape of the full tensor. Checkpoints need it if the length of a dim is not a multiple of the sizes
            of the axes that shard it. None: all shards have the same shape.
    Raises:
        ValueError: The spec has more entries than the parameter has dims.
    """
    if len(spec.entries) > param.dim():
        label = name or f"parameter of shape {tuple(param.shape)}"
        raise ValueError(
            f"{label}: {spec} has more entries ({len(spec.entries)}) than the tensor has dims ({param.dim()}); give at "
            "most one entry per dim"
        )
    setattr(param, ATTRIBUTE, Annotation(spec, name, full_shape=full_shape))


def attach(param: Tensor, annotation: Annotation) -> None:
    """Set the annotation of ``param`` without checking it."""
    setattr(param, ATTRIBUTE, annotation)


def annotation_of(param: Tensor) -> Annotation | None:
    found: Any = getattr(param, ATTRIBUTE, None)
    return found if isinstance(found, Annotation) else None


def label_of(param: Tensor, kind: str = "parameter") -> str:
    """Return a text for a parameter in messages: the name in its annotation, or else ``a {kind} of shape {shape}``."""
    annotation = annotation_of(param)
    return (annotation.name if annotation else None) or f"a {kind} of shape {tuple(param.shape)}"


def declare(module: nn.Module, rules: Mapping[str, P] | None = None) -> None:
    """Set the layout of every parameter of ``module`` by rules, and store each parameter's qualified name for errors.

        declare(model, {"*": P(), "head.weight": P("tensor", None), "layers.*.mlp.bias": P("tensor")})

    A rule is a parameter's full name, or a glob pattern, in which ``*`` also matches dots. For each parameter the most
    specific matching rule is used: its full name, or else the pattern with the most literal characters.

    * A full name always sets the layout.
    * A pattern does not change a layout that was set with `annotate`, as layers and `declare_adapters` do.
    * The pattern ``"*"`` sets the layout only of parameters that have no layout yet.

    If the function raises, no layout is changed.

    Args:
        module: The model, or a submodule.
        rules: Layout per full name or pattern. None: only store the names; every parameter must have a layout already.
    Raises:
        ValueError: A rule matches no parameter; a parameter has no declared layout, and no rule matches it (the placements
            of a DTensor are no declaration); two equally specific rules give a parameter different layouts; a pattern
            contradicts the layout that an earlier call set by a rule (a rule ``"*"`` of an earlier call may be
            overridden); or a spec has more entries than its parameter has dims.
    """
    rules = dict(rules or {})
    params = dict(module.named_parameters())
    for pattern in rules:
        if not any(fnmatchcase(name, pattern) for name in params):
            raise ValueError(
                f"rule {pattern!r} matches no parameter of {type(module).__name__}; "
                f"its parameters are {some(params) or 'none'}"
            )
    decided: dict[str, Annotation] = {}
    missing = []
    source: Source
    for name, param in params.items():
        existing = annotation_of(param)
        is_layers_own = existing is not None and existing.source == "layer" and name not in rules
        rule = None if is_layers_own else _most_specific(name, rules)
        if existing is not None and _keeps(existing, rule, rules, name):
            spec, source = existing.spec, existing.source
        elif rule is not None:
            spec, source = rules[rule], "default" if rule == "*" else "rule"
        else:
            missing.append(name)
            continue
        if len(spec.entries) > param.dim():
            raise ValueError(
                f"{name}: {spec} has more entries ({len(spec.entries)}) than the parameter of shape {tuple(param.shape)} "
                "has dims; give at most one entry per dim"
            )
        full_shape = existing.full_shape if existing is not None and existing.spec == spec else None
        decided[name] = Annotation(spec, name, full_shape=full_shape, source=source)
    if missing:
        raise ValueError(
            f"no rule declares the layout of {some(missing)}; add a rule, for example P() if the parameter is replicated"
        )
    for name, annotation in decided.items():
        setattr(params[name], ATTRIBUTE, annotation)


def _keeps(existing: Annotation, rule: str | None, rules: Mapping[str, P], name: str) -> bool:
    """Return True if the parameter ``name`` keeps its ``existing`` layout, False if ``rule`` sets its layout.

    ``rule`` is the most specific of the ``rules`` that may change the layout. None: there is no such rule.
    """
    if rule == name:
        return False
    if rule is None or rule == "*":
        return True
    if existing.source == "rule" and rules[rule] != existing.spec:
        raise ValueError(
            f"{name} was declared {existing.spec} by an earlier rule, but the pattern {rule!r} declares {rules[rule]}; "
            f"give the full name {name!r} to change its layout, or a pattern that does not match it"
        )
    return existing.source == "rule"


def _most_specific(name: str, rules: Mapping[str, P]) -> str | None:
    """Return the most specific rule that matches a parameter; None if no rule matches.

    It is the full name ``name``, or else the pattern with the most literal characters.
    """
    if name in rules:
        return name
    matching = [pattern for pattern in rules if fnmatchcase(name, pattern)]
    if not matching:
        return None
    best = max(map(_literal_characters, matching))
    candidates = [pattern for pattern in matching if _literal_characters(pattern) == best]
    if len({rules[pattern] for pattern in candidates}) > 1:
        raise ValueError(
            f"{name}: the rules {' and '.join(map(repr, candidates))} are equally specific and give different layouts; "
            f"write a longer pattern, or a rule for the full name {name!r}"
        )
    return candidates[0]


def _literal_characters(pattern: str) -> int:
    return sum(character not in "*?[]!" for character in pattern)


def copy_annotation(source: Tensor, target: Tensor) -> None:
    """Set the annotation of ``target`` to the annotation of ``source``, if ``source`` has one."""
    annotation = annotation_of(source)
    if annotation is not None:
        setattr(target, ATTRIBUTE, annotation)


# Partial gradients of DTensors: data that ranks exchange --------------------------------------------------------------

Sums = Mapping[tuple[tuple[int, ...], int], tuple[str, ...]]
"""Per DTensor parameter, the axes over which its gradient is partial without being declared partial. The key of a
parameter is a pair: the ranks of its device mesh, and its index among all parameters on device meshes of these ranks."""
