"""How a parameter carries its `P`: an attribute of the tensor, which layers and users attach and everybody else reads."""

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
    """What a parameter carries.

    Args:
        spec: Its layout.
        name: What errors call it.
        mesh_axes: Of a DTensor's local tensor, the dims of its device mesh: torch has reduced the gradient over them.
        dims: The axes of the topology that such dims are, where that has no such name.
        declared: False where only a DTensor's placements say the spec, which speak for ``mesh_axes`` alone.
        full_shape: Of the logical tensor, where it is known; where pieces are uneven, no rank's own tells it.
        source: ``"layer"`` (`annotate`), ``"rule"`` (a rule of `declare`), or ``"default"`` (the rule ``"*"``, or none).
    """

    spec: P
    name: str | None = None
    mesh_axes: tuple[str, ...] = ()
    declared: bool = True
    full_shape: tuple[int, ...] | None = None
    dims: tuple[tuple[str, tuple[str, ...]], ...] = ()
    source: Source = "layer"

    def spec_on(self, topology: Topology) -> P:
        """The layout in the axes of the topology. Raises ValueError as `P.on`."""
        return self.spec.on(topology, dict(self.dims))

    def mesh_axes_on(self, topology: Topology) -> tuple[str, ...]:
        """The axes of the topology that the dims of the device mesh are."""
        if not self.mesh_axes:
            return ()
        known = dict(self.dims)
        return tuple(axis for dim in self.mesh_axes for axis in (known[dim] if dim in known else topology.atoms(dim)))

    def silent_axes(self, topology: Topology) -> tuple[str, ...]:
        """The model axes larger than 1 of which nobody has said whether they shard the parameter."""
        if self.declared:
            return ()
        said = self.mesh_axes_on(topology)
        return tuple(axis for axis in topology.model_axes if axis not in said and topology.size(axis) > 1)


def annotate(param: Tensor, spec: P, name: str | None = None, *, full_shape: tuple[int, ...] | None = None) -> None:
    """Attach ``spec`` to one parameter; a layer calls it for its own parameters.

    The annotation is an attribute of the tensor: ``copy.deepcopy`` and wrappers that make new parameters drop it, and
    the parameter then counts as undeclared, which is an error where the spec is needed. Use `declare` again on the copy.

    Args:
        full_shape: Of the logical tensor. A checkpoint needs it where a dim doesn't divide.
    Raises:
        ValueError: The spec has more entries than the parameter has dims.
    """
    if len(spec.entries) > param.dim():
        label = name or f"parameter of shape {tuple(param.shape)}"
        raise ValueError(
            f"{label}: {spec} has {len(spec.entries)} entries but the tensor has {param.dim()} dims; "
            "give one entry a dim"
        )
    setattr(param, ATTRIBUTE, Annotation(spec, name, full_shape=full_shape))


def attach(param: Tensor, annotation: Annotation) -> None:
    """Let ``param`` carry ``annotation``, as it is."""
    setattr(param, ATTRIBUTE, annotation)


def annotation_of(param: Tensor) -> Annotation | None:
    """The annotation of a parameter, or None where nothing declared it."""
    found: Any = getattr(param, ATTRIBUTE, None)
    return found if isinstance(found, Annotation) else None


def declare(module: nn.Module, rules: Mapping[str, P] | None = None) -> None:
    """Say how every parameter of ``module`` is laid out, and give each its qualified name.

        declare(model, {"*": P(), "head.weight": P("tensor", None), "layers.*.mlp.bias": P("tensor")})

    A rule is a parameter's name or a glob pattern (``*`` crosses dots). The most specific match wins: a full name before
    any pattern, then the pattern with more literal characters. A full name always sets the spec. A pattern leaves
    parameters unchanged that their layer has declared (`annotate`). The pattern ``"*"`` is the default for parameters
    that nothing else has declared, in this call or an earlier one. Either all of the rules take effect or none.

    Raises:
        ValueError: A rule matches no parameter; a parameter is matched by no rule and not declared; two equally specific
            rules disagree, or a pattern disagrees with a rule of an earlier call; a spec has more entries than its
            parameter has dims.
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
                f"{name}: {spec} has {len(spec.entries)} entries but the parameter has shape {tuple(param.shape)}; "
                "give one entry a dim"
            )
        full_shape = existing.full_shape if existing is not None and existing.spec == spec else None
        decided[name] = Annotation(spec, name, full_shape=full_shape, source=source)
    if missing:
        raise ValueError(
            f"no rule says how {some(missing)} is laid out; add a rule for it, P() meaning replicated on purpose"
        )
    for name, annotation in decided.items():
        setattr(params[name], ATTRIBUTE, annotation)


def _keeps(existing: Annotation, rule: str | None, rules: Mapping[str, P], name: str) -> bool:
    """Return whether a declared parameter keeps its spec, whatever ``rule`` says.

    Raises:
        ValueError: The rule is a pattern that disagrees with a rule of an earlier call.
    """
    if rule == name:
        return False
    if rule is None or rule == "*":
        return True
    if existing.source == "rule" and rules[rule] != existing.spec:
        raise ValueError(
            f"{name} was declared {existing.spec} before, and the pattern {rule!r} says {rules[rule]}; give the full name "
            f"{name!r} to change its spec, or a pattern that does not match it"
        )
    return existing.source == "rule"


def _most_specific(name: str, rules: Mapping[str, P]) -> str | None:
    """Return the rule for a parameter: its name, else the matching pattern with the most literal characters."""
    if name in rules:
        return name
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
    return candidates[0]


def _literal_characters(pattern: str) -> int:
    return sum(character not in "*?[]!" for character in pattern)


def copy_annotation(source: Tensor, target: Tensor) -> None:
    """Give ``target`` (a master copy, a slice) the annotation of ``source``, if it has one."""
    annotation = annotation_of(source)
    if annotation is not None:
        setattr(target, ATTRIBUTE, annotation)


# How ranks tell each other of the sums that gradients are still to be -------------------------------------------------

Sums = Mapping[tuple[tuple[int, ...], int], tuple[str, ...]]
"""Axes of pending sums, by DTensor: the ranks of its mesh, and which of the mesh's parameters it is."""
