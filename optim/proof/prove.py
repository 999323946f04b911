"""`prove` and `infer`: checks of the declared layouts against the loss, and layouts found without a declaration."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...parallel.layout.spec import P
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from .examination import examine
from .findings import Proof, Shape, candidates, spec_of_contract, split_beside
from .measured import GradientContract, KnownParameter, Measured, declared_contract
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
    """Check that the gradient of every parameter is the derivative of the loss. No second model is needed.

        proof = prove(model, lambda model: model(batch), registry)
        print(proof)

    Every parameter is moved along a random direction, equal for replicas and distinct for shards. The central
    difference of the loss is compared with the derivative that the gradients predict under the declared specs. Where
    they differ, `prove` looks for the layout that would make the gradient right, and for the module whose backward is
    wrong. `prove` cannot detect a model that computes, and differentiates correctly, another function than the intended
    one.

    Call it on every rank, in a test, at the start of training or between two steps. Don't call it between a backward
    with ``overlap=True`` and its step: the step would reject the gradients. Dropout gets the same random
    numbers in every forward. Gradients, buffers, parameters and random states are unchanged afterwards.

    Args:
        model: A model whose parameters are declared with `declare`. Parallel layers and DTensors declare themselves.
        loss_fn: Called with the model; returns this rank's loss, the mean over its samples, or None on a rank without a
            loss. Ranks along model-parallel axes return the same loss. The mean over the data-parallel ranks is
            differentiated. If the function runs backward itself, like a pipeline schedule, it returns the detached loss
            or None.
        registry: The process groups.
        max_parameters: Number of parameters to check, spread evenly over the model. None: all.
        dtype: torch.float64: convert parameters and buffers during the proof, and ignore casts to lower dtypes in the
            model. None: use the parameters' own dtypes; in float32 only errors above half a percent are detected.
        seed: Seed of the directions. Default: 0.

    Raises:
        ValueError: On every rank: a parameter is not declared, or a loss is missing or not finite.
        RuntimeError: ``loss_fn`` raised on another rank, which logs its own error at once. Ranks that wait for it in a
            collective of the model get the error when the collective times out.
        TypeError: A parameter has half precision and ``dtype`` is None, or a DTensor would have to be converted.

    Collectives: the model's, in one backward and about two forwards per 64 right parameters, and object all-gathers
        over the world.
    Host synchronization: yes.
    """
    return examine(model, loss_fn, registry, max_parameters, dtype, seed).proof


# `infer`: layouts from values, gradients and the loss -----------------------------------------------------------------


@dataclass(frozen=True)
class Inferred:
    """Result of `infer`. The rules describe this rank's parameters; the other fields are the same on all ranks.

    Args:
        rules: Specs for `declare`, by full parameter name.
        dims_unknown: Names of the parameters whose sharded dims, or their order, are not certain. Norm, clipping and
            step are right in any case; only a checkpoint for another layout needs the dims.
        proof: The proof of these rules. A parameter that no layout makes right is a finding and has no rule.
    """

    rules: dict[str, P]
    dims_unknown: tuple[str, ...]
    proof: Proof

    def __str__(self) -> str:
        lines = [f"    {pattern!r}: {spec}," for pattern, spec in shortened(self.rules).items()]
        unknown = "".join(
            f"\n# {name}: the sharded dims are a guess; pass shapes= to infer" for name in self.dims_unknown
        )
        unknown += "".join(
            f"\n# {name}: inferred from values only; the loss hardly depends on it" for name in self.proof.untold
        )
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
    """Find the layout of every parameter. Nothing needs to be declared, and existing declarations are ignored.

        print(infer(model, lambda model: model(batch), registry))

        declare(model, {
            'layers.*.up.weight': P('tensor'),
            ...

    Ranks with equal values hold replicas, ranks with different values hold shards. The loss decides which gradients are
    complete and which are partial, as in `prove`. A vector with one constant value on all ranks, like the ones of a
    norm or the zeros of a bias, may be either: it counts as sharded if another parameter of its module is sharded.
    Parameters with the same name on several pipeline stages count as different unless they are declared tied. If the
    result is uncertain, initialise the parameters at random, or pass ``shapes``.

    Args:
        model, loss_fn, registry, dtype, seed: As in `prove`.
        shapes: Shapes of the full tensors by name, or a single-process model with these shapes (on the meta device, for
            example). They decide which dims are sharded. None: the dims are guessed where several are possible.

    Raises:
        ValueError: On every rank: the shape of a shard does not fit the full shape in ``shapes``. Other errors as in
            `prove`.

    Collectives: as in `prove`; a parameter whose layout differs from the guess costs more forwards.
    Host synchronization: yes.
    """
    logical = _shapes(shapes)

    def guess(measured: Measured) -> dict[str, GradientContract]:
        for known in measured.known:
            known.full = logical.get(known.name)
        return {known.label: _first(known, measured.known, measured.topology) for known in measured.known}

    found = examine(model, loss_fn, registry, None, dtype, seed, guess)
    by_label = {known.label: known for known in found.known}
    rules, unknown = dict[str, P](), list[str]()
    for label, contract in found.contracts.items():
        known = by_label[label]
        beside = {
            other.name: (other.first.shape, found.contracts[other.label].apart == contract.apart)
            for other in found.known
            if other is not known and other.module == known.module and other.label in found.contracts
        }
        spec, is_certain = spec_of_contract(known, contract, registry.topology, beside)
        if not is_certain:
            unknown.append(label)
        if registry.global_rank in known.seen:
            rules[known.name] = spec
    return Inferred(rules, tuple(unknown), found.proof)


def _shapes(shapes: nn.Module | Mapping[str, Sequence[int]] | None) -> dict[str, Shape]:
    if isinstance(shapes, nn.Module):
        return {name: tuple(param.shape) for name, param in shapes.named_parameters()}
    return {name: tuple(shape) for name, shape in (shapes or {}).items()}


def _first(known: KnownParameter, everything: Sequence[KnownParameter], topology: Topology) -> GradientContract:
    """Return the most likely contract; the placements of a DTensor are used unchanged."""
    contract = next(candidates(known, topology, split_beside(known, everything, topology), None), None)
    if contract is None:
        held = " or ".join(sorted({str(seen.shape) for seen in known.seen.values()}))
        raise ValueError(
            f"{known.label}: shards of shape {held} don't fit the full shape {known.full} in shapes=; give the full shape "
            "in this model's dim order (not transposed), or remove it from shapes="
        )
    declared = declared_contract(known.first.spec or P(), known.first.averaged, topology)
    return GradientContract(
        tuple(
            (axis, declared.along(axis) if axis in known.first.averaged else along) for axis, along in contract.by_axis
        )
    )


def shortened(rules: Mapping[str, P]) -> dict[str, P]:
    """Replace the layer numbers in names by ``*`` where all layers have the same spec."""
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
