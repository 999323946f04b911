"""`prove`: that every gradient of a parallel model, completed as its layout says, is the derivative of the loss."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...parallel.layout.spec import P
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from .examination import examined
from .findings import Proof, Shape, candidates, spec_of_way, split_beside
from .measured import KnownParameter, Measured, Way, declared_way
from .objective import M


def prove(
    model: M,
    loss_fn: Callable[[M], Tensor | None],
    registry: ProcessGroupRegistry,
    *,
    max_parameters: int | None = None,
    dtype: torch.dtype | None = torch.float64,
    seed: int = 0,
) -> Proof:
    """Check the gradient of every parameter against the loss itself, which needs no other model to compare with.

        proof = prove(model, lambda model: model(batch), registry)
        print(proof)

    Every parameter is moved along a random direction, copies of it together and pieces each along its own; the central
    difference of the loss is compared with what the gradients promise, put together as the specs say. Where they promise
    something else, it is found out under which layout they would be right, and in which module backward goes wrong. What it
    can't see is a model that computes, and differentiates rightly, another function than the one it is meant to be.

    Call it on every rank, in a test, at the start of training or between two steps; not between a backward that reduces
    (``overlap=True``) and its step, which would refuse the gradients. Dropout sees the same random numbers at every
    forward; gradients, buffers, parameters and random states are afterwards what they were.

    Args:
        model: With declared parameters (`declare`); what a layer or a DTensor's placements say needs no more.
        loss_fn: Given the model, returns this rank's loss, a mean over its samples; None where there is none. Ranks along
            model axes return the same loss; the mean over data ranks is what is differentiated. Where it has called
            backward itself, as a pipeline's schedule does, it returns the loss detached, or None.
        max_parameters: Prove only so many, evenly over the model.
        dtype: What to compute in: parameters and buffers are cast for the time, and casts to lower dtypes in the model are
            left out. None: in the parameters' own, float32 telling errors of half a percent.
        seed: Of the directions.

    Raises:
        ValueError: On every rank: a parameter is not declared; a loss is not finite, or missing.
        RuntimeError: ``loss_fn`` raised on another rank, whose own error is logged there at once. (Ranks that wait for it
            in the model's collectives learn of it when these time out.)
        TypeError: Half precision and ``dtype=None``; DTensors that would have to be cast.
    Collectives: the model's, in one backward and about two forwards for 64 parameters that are right, and object
        all-gathers over the world. Host reads: yes.
    """
    return examined(model, loss_fn, registry, max_parameters, dtype, seed).proof


# `infer`: the layout of every parameter, from values, gradients and the loss alone ------------------------------------


@dataclass(frozen=True)
class Inferred:
    """What `infer` found; the rules are those of this rank's parameters, the rest is the same on all ranks.

    Args:
        rules: For `declare`, by full name.
        dims_unknown: The parameters of which shapes don't tell which dims are cut, or in which order: norm, clipping and
            step are right in any case, a checkpoint for other layouts needs the dims.
        proof: That the loss agrees. What no layout makes right is among its findings, and has no rule.
    """

    rules: dict[str, P]
    dims_unknown: tuple[str, ...]
    proof: Proof

    def __str__(self) -> str:
        lines = [f"    {pattern!r}: {spec}," for pattern, spec in shortened(self.rules).items()]
        unknown = "".join(
            f"\n# {name}: the dims are a guess; infer(..., shapes=) knows them" for name in self.dims_unknown
        )
        unknown += "".join(f"\n# {name}: by its values; the loss hardly depends on it" for name in self.proof.untold)
        wrong = "" if self.proof.right else "\n" + "\n".join(f"# {line}" for line in str(self.proof).splitlines())
        return "\n".join(["declare(model, {", *lines, "})"]) + unknown + wrong


def infer(
    model: M,
    loss_fn: Callable[[M], Tensor | None],
    registry: ProcessGroupRegistry,
    *,
    shapes: nn.Module | Mapping[str, Sequence[int]] | None = None,
    dtype: torch.dtype | None = torch.float64,
    seed: int = 0,
) -> Inferred:
    """Find out how every parameter is laid out; nothing needs to be declared, and what is declared is not looked at.

        print(infer(model, lambda model: model(batch), registry))

        declare(model, {
            'layers.*.up.weight': P('tensor'),
            ...

    Where ranks have equal values there are copies, where they have others there are pieces; which of the gradients are
    complete and which are terms of a sum, the loss tells, as in `prove`. A vector of one constant on all ranks (ones of a
    norm, zeros of a bias) may be a piece or a term: it is taken for a piece where another parameter of its module is one.
    Parameters of one name on several stages of a pipeline are taken for different ones, unless they are declared tied.
    Initialise at random where that is not enough, or give shapes.

    Args:
        model, loss_fn, dtype, seed: As in `prove`.
        shapes: Of the logical tensors, by name, or a model of one process that has them (on the meta device will do): then
            it is told which dims are cut.
    Raises:
        ValueError: On every rank: what ranks hold of a parameter is no part of its shape in ``shapes``. Or as `prove`.
    Collectives, host reads: As `prove`; a parameter whose layout isn't what values suggest costs forwards more.
    """
    logical = _shapes(shapes)

    def guess(measured: Measured) -> dict[str, Way]:
        for known in measured.known:
            known.full = logical.get(known.name)
        return {known.label: _first(known, measured.known, measured.topology) for known in measured.known}

    found = examined(model, loss_fn, registry, None, dtype, seed, guess)
    by_label = {known.label: known for known in found.known}
    rules, unknown = dict[str, P](), list[str]()
    for label, way in found.ways.items():
        known = by_label[label]
        beside = {
            other.name: (other.first.shape, found.ways[other.label].apart == way.apart)
            for other in found.known
            if other is not known and other.module == known.module and other.label in found.ways
        }
        spec, told = spec_of_way(known, way, registry.topology, beside)
        if not told:
            unknown.append(label)
        if registry.global_rank in known.seen:
            rules[known.name] = spec
    return Inferred(rules, tuple(unknown), found.proof)


def _shapes(shapes: nn.Module | Mapping[str, Sequence[int]] | None) -> dict[str, Shape]:
    if isinstance(shapes, nn.Module):
        return {name: tuple(param.shape) for name, param in shapes.named_parameters()}
    return {name: tuple(shape) for name, shape in (shapes or {}).items()}


def _first(known: KnownParameter, everything: Sequence[KnownParameter], topology: Topology) -> Way:
    """The likeliest way; a DTensor's placements are taken as they are."""
    way = next(candidates(known, topology, split_beside(known, everything, topology), None), None)
    if way is None:
        held = " or ".join(sorted({str(seen.shape) for seen in known.seen.values()}))
        raise ValueError(
            f"{known.label}: ranks hold {held}, which is no part of {known.full}, its shape in `shapes`; give the "
            "logical tensors as this model has them (transposed ones are others), or leave it out"
        )
    said = declared_way(known.first.spec or P(), known.first.averaged, topology)
    return Way(
        tuple((axis, said.along(axis) if axis in known.first.averaged else along) for axis, along in way.by_axis)
    )


def shortened(rules: Mapping[str, P]) -> dict[str, P]:
    """With ``*`` for the numbers of layers, where all of them have the same spec."""
    by_pattern: dict[str, set[P]] = {}
    for name, spec in rules.items():
        by_pattern.setdefault(_pattern(name), set()).add(spec)
    found: dict[str, P] = {}
    for name, spec in rules.items():
        pattern = _pattern(name)
        found[pattern if len(by_pattern[pattern]) == 1 else name] = spec
    return found


def _pattern(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
