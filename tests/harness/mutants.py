"""Randomly drawn models with one mistake each, together with the result that `prove` must report.

The result is known without `prove`. A mistake in a backward does not change the loss, so the gradients of the correct
model are the reference, and the parameters whose gradients differ are wrong. A wrong spec makes its parameter wrong,
and so does a bias that is added on every rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
from meshstep.parallel import P, ProcessGroupRegistry, annotate, gather_objects, spec_of
from meshstep.parallel.interop.local_parameters import has_dtensors, local_gradients
from meshstep.parallel.mesh import collectives
from meshstep.parallel.mesh.collectives import Map, Over, all_gather, all_reduce, identity, own_slice, reduce_scatter
from meshstep.testing import prove
from proof_models import OF_TORCH, Built, Drawn, Stage, build, drawn_model, registry_for
from torch import Tensor
from torch.nn import functional as F

Kind = Literal[
    "sum dropped in backward",
    "sum doubled in backward",
    "backward over another axis",
    "sum dropped in forward",
    "forward over another axis",
    "spec",
    "divisor",
    "bias on every rank",
    "after instead of before",
    "stage's gradient",
]


@dataclass
class Truth:
    """The result that `prove` must report for a mutant.

    Args:
        wrong: Names of the wrong parameters, or {"the forward"} for a mistake in a forward.
        causes: The acceptable diagnoses.
        axes: The acceptable axes; empty: any.
    """

    wrong: set[str]
    causes: tuple[str, ...]
    axes: tuple[str, ...]
    what: str
    module: str = ""  # the module with the mistake, for mistakes in a forward


@dataclass(frozen=True)
class Outcome:
    kind: str
    family: str
    found: bool
    named: bool
    cause: bool
    forwards: int
    text: str


class NoMistake(Exception):
    """The drawn mistake is impossible in this model, changes no gradient, or cannot be detected from values."""


def mutated(number: int) -> Outcome | None:
    """Run `prove` on mutant ``number``; call on every rank of ``drawn_model(number).topology``. Return the same outcome
    on all ranks, or None if the drawn mistake is impossible or changes nothing."""
    drawn = drawn_model(number)
    rng = random.Random(f"mutant {number}")
    with registry_for(drawn) as registry:
        built = build(drawn, registry)
        kind = rng.choice([name for name, make in _KINDS.items() for _ in range(make.often(drawn))])
        try:
            with _KINDS[kind].make(built, drawn, registry, rng) as truth:
                proof = prove(built.model, built.loss, registry)
        except NoMistake:
            return None
        named = {finding.name.split(" (")[0] for finding in proof.findings}
        modules = {finding.module for finding in proof.findings}
        place = proof.where or ""
        return Outcome(
            kind,
            drawn.family,
            not proof.is_correct,
            named == truth.wrong or (bool(truth.module) and (truth.module in modules or truth.module in place)),
            any(
                finding.cause in truth.causes and (not truth.axes or bool({*finding.axes} & {*truth.axes}))
                for finding in proof.findings
            ),
            proof.forwards,
            f"{truth.what}: wrong are {sorted(truth.wrong)}, because {truth.causes} over {truth.axes}\n{proof}",
        )


# Gradients of the correct and of the wrong model --------------------------------------------------------------------------


def _gradients(built: Built, registry: ProcessGroupRegistry, seed: int) -> dict[str, Tensor]:
    named = dict(built.model.named_parameters())
    for param in named.values():
        param.grad = None
    torch.manual_seed(seed)
    loss = built.loss(built.model)
    if loss is not None and loss.requires_grad:
        loss.backward()
    found = local_gradients(list(named.values()), registry.topology).gradients
    result = {name: torch.zeros(()) if g is None else g.detach().clone() for name, g in zip(named, found, strict=True)}
    for param in named.values():
        param.grad = None
    torch.manual_seed(seed)
    return result


def _differ(right: dict[str, Tensor], wrong: dict[str, Tensor], registry: ProcessGroupRegistry) -> set[str]:
    mine = {name for name, value in right.items() if not torch.allclose(value, wrong[name], rtol=1e-6, atol=1e-12)}
    return set().union(*gather_objects(mine, registry))


# Collectives --------------------------------------------------------------------------------------------------------------


class _Calls:
    """Replaces `collectives.apply`: counts the calls over more than one rank, and changes one call."""

    def __init__(self, which: int = -1, change: Callable[[Map, Map, Over], tuple[Map, Map]] | None = None) -> None:
        self.which, self.change, self.seen = which, change, list[tuple[Map, Map, Over]]()
        self.shapes: list[tuple[int, ...]] = []
        self.modules: list[str] = []  # the module whose forward made each call
        self.within: list[str] = []
        self._apply: Callable[[Tensor, Map, Map, Over], Tensor] = vars(collectives)["apply"]

    def leave(self) -> None:
        self.within.pop()

    def __call__(self, tensor: Tensor, forward: Map, backward: Map, over: Over) -> Tensor:
        if over.size == 1:
            return tensor
        if torch._C._current_graph_task_id() != -1:  # a call within backward belongs to the call in forward
            return self._apply(tensor, forward, backward, over)
        index = len(self.seen)
        self.seen.append((forward, backward, over))
        self.shapes.append(tuple(tensor.shape))
        self.modules.append(self.within[-1] if self.within else "")
        if index == self.which and self.change is not None:
            forward, backward = self.change(forward, backward, over)
        return self._apply(tensor, forward, backward, over)


@contextmanager
def _with_call(built: Built, which: int, change: Callable[[Map, Map, Over], tuple[Map, Map]]) -> Iterator[None]:
    """Replace call number ``which`` in every forward of ``built``."""

    def restarted(module: Any, inputs: Any) -> None:
        calls.seen.clear()

    calls = _Calls(which, change)
    handle = built.model.register_forward_pre_hook(restarted)
    try:
        with mock.patch.object(collectives, "apply", calls):
            yield
    finally:
        handle.remove()


def _calls_of(built: Built, registry: ProcessGroupRegistry, seed: int) -> _Calls:
    calls = _Calls()
    handles: list[Any] = []
    for name, module in built.model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: calls.within.append(name)))
        handles.append(module.register_forward_hook(lambda *_: calls.leave()))
    try:
        with mock.patch.object(collectives, "apply", calls):
            _gradients(built, registry, seed)
    finally:
        for handle in handles:
            handle.remove()
    said = [(_name(forward), _name(backward), over.axes) for forward, backward, over in calls.seen]
    if any(other != said for other in gather_objects(said, registry)):
        raise NoMistake  # ranks make different calls, and matching ones cannot be identified
    return calls


def _name(function: Any) -> str:
    return getattr(function, "__name__", "exchange")


def _padded(tensor: Tensor, over: Over) -> Tensor:
    """Pad this rank's slice with zeros to the full size. A correct backward would gather the slices of all ranks."""
    sizes = list(tensor.shape)
    sizes[over.dim] *= over.size
    whole = tensor.new_zeros(sizes)
    whole.narrow(over.dim, over.rank * tensor.size(over.dim), tensor.size(over.dim)).copy_(tensor)
    return whole


def _several(tensor: Tensor, over: Over) -> Tensor:
    return all_gather(tensor, over) * over.size


_DROPPED: dict[Map, Map] = {all_reduce: identity, reduce_scatter: own_slice, all_gather: _padded}
_DOUBLED: dict[Map, Map] = {identity: all_reduce, own_slice: reduce_scatter, all_gather: _several}


@contextmanager
def _backward_mistake(
    built: Built, drawn: Drawn, registry: ProcessGroupRegistry, rng: random.Random, kind: Kind
) -> Iterator[Truth]:
    calls = _calls_of(built, registry, drawn.seed)
    table = _DOUBLED if kind == "sum doubled in backward" else _DROPPED
    others = [axis for axis in registry.topology.axes if registry.size(axis) > 1]
    possible = [
        index
        for index, (_, backward, over) in enumerate(calls.seen)
        if backward in table
        and (kind != "backward over another axis" or (backward is all_reduce and {*others} - {*over.axes}))
    ]
    if not possible:
        raise NoMistake
    which = rng.choice(possible)
    _, _, over = calls.seen[which]
    if len(set(gather_objects(calls.shapes[which], registry))) > 1:
        raise NoMistake  # ranks pass tensors of different shapes, which cannot be summed over another axis
    other = [axis for axis in others if axis not in over.axes]

    def change(forward: Map, backward: Map, over: Over) -> tuple[Map, Map]:
        if kind == "backward over another axis":
            elsewhere = Over(registry, (other[0],))
            return forward, lambda tensor, _: all_reduce(tensor, elsewhere)
        return forward, table[backward]

    right = _gradients(built, registry, drawn.seed)
    with _with_call(built, which, change):
        wrong = _differ(right, _gradients(built, registry, drawn.seed), registry)
        if not wrong:
            raise NoMistake
        missing = ("a sum is missing",)
        causes = {
            "sum dropped in backward": missing,
            "sum doubled in backward": ("counted several times",),
        }.get(kind, ("a sum is missing", "counted several times"))
        axes = (*over.axes, *other) if kind == "backward over another axis" else over.axes
        yield Truth(
            wrong,
            causes,
            axes,
            f"{kind}, call {which}, {_name(calls.seen[which][0])}/{_name(calls.seen[which][1])} over {over.axes}",
        )


@contextmanager
def _forward_mistake(
    built: Built, drawn: Drawn, registry: ProcessGroupRegistry, rng: random.Random, kind: Kind
) -> Iterator[Truth]:
    calls = _calls_of(built, registry, drawn.seed)
    others = [axis for axis in registry.topology.axes if registry.size(axis) > 1]
    possible = [
        index
        for index, (forward, _, over) in enumerate(calls.seen)
        if forward is all_reduce and (kind == "sum dropped in forward" or {*others} - {*over.axes})
    ]
    if not possible:
        raise NoMistake
    which = rng.choice(possible)
    over = calls.seen[which][2]
    other = [axis for axis in others if axis not in over.axes]

    def change(forward: Map, backward: Map, over: Over) -> tuple[Map, Map]:
        if kind == "sum dropped in forward":
            return identity, backward
        elsewhere = Over(registry, (other[0],))
        return (lambda tensor, _: all_reduce(tensor, elsewhere)), backward

    with _with_call(built, which, change):
        truth = Truth({"the forward"}, ("forward differs",), over.axes, f"{kind}, call {which} over {over.axes}")
        truth.module = calls.modules[which]
        yield truth


# Specs --------------------------------------------------------------------------------------------------------------------


@contextmanager
def _spec_mistake(
    built: Built, drawn: Drawn, registry: ProcessGroupRegistry, rng: random.Random, _: Kind
) -> Iterator[Truth]:
    topology = registry.topology
    names = sorted(set().union(*gather_objects(set(dict(built.model.named_parameters())), registry)))
    axes = [axis for axis in topology.axes if topology.size(axis) > 1 and axis in topology.model_axes]
    if drawn.family == "experts":
        axes = [axis for axis in topology.axes if topology.size(axis) > 1 and axis != "data"]
    if not axes:
        raise NoMistake
    name, axis = rng.choice(names), rng.choice(axes)
    kind = rng.choice(["copy", "piece", "term"])
    param = dict(built.model.named_parameters()).get(name)
    if any(gather_objects(param is not None and has_dtensors((param,)), registry)):
        raise NoMistake  # its DTensor placements determine the spec
    said: list[tuple[P, bool] | None] = gather_objects(
        None if param is None else (spec_of(param, topology), bool((param == param.flatten()[0]).all())), registry
    )
    spec, constant = next(one for one in said if one is not None)
    was = "piece" if axis in spec.sharded_axes else "term" if axis in spec.partial else "copy"
    named_otherwise = axis in (*dict(spec.owned), *dict(spec.tied)) or any(at == axis for _, at in spec.owned)
    if kind == was or named_otherwise or (axis in topology.data_axes and kind == "term"):
        raise NoMistake
    if constant and ({was, kind} == {"piece", "term"} or axis in topology.data_axes):
        # If all elements of a parameter are equal, its shards have equal values, as the replicas of a partial or replicated
        # parameter have. So no check of values can distinguish sharded from partial, and along a data axis not even
        # sharded from replicated.
        raise NoMistake
    entries = [tuple(a for a in spec.dim_axes(dim) if a != axis) for dim in range(max(1, len(spec.entries)))]
    partial = tuple(a for a in spec.partial if a != axis)
    if kind == "piece":
        entries[0] = (*entries[0], axis)
    if kind == "term":
        partial = (*partial, axis)
    changed = P(*entries, partial=partial, owned=dict(spec.owned), tied=dict(spec.tied))
    if param is not None:
        annotate(param, changed)
    causes: dict[tuple[str, str], tuple[str, ...]] = {
        ("piece", "copy"): ("split, not declared",) if not constant else ("split, not declared", "a sum is missing"),
        ("piece", "term"): ("split, not declared",),
        ("copy", "piece"): ("declared split, but a copy",),
        ("term", "piece"): ("declared split, but a copy",),
        ("copy", "term"): ("counted several times",),
        ("term", "copy"): ("a sum is missing",),
    }
    yield Truth({name}, causes[was, kind], (axis,), f"{name}: {spec} declared {changed}")


# Single parameters and modules -----------------------------------------------------------------------------------------


@contextmanager
def _divisor(
    built: Built, drawn: Drawn, registry: ProcessGroupRegistry, rng: random.Random, _: Kind
) -> Iterator[Truth]:
    topology = registry.topology
    if drawn.family == "FSDP2":  # FSDP2 never runs a hook that `register_hook` adds to a parameter
        index, which = rng.randrange(drawn.depth), rng.choice(["ups", "downs"])
        layer: Any = built.model.get_submodule(f"{which}.{index}")
        layer.set_gradient_divide_factor(1.0)
        wrong = {f"{which}.{index}.{name}" for name in ("weight", "bias")}
        yield Truth(wrong, ("counted several times",), (), f"{which}.{index}: gradients are summed, not averaged")
        return
    names = sorted(set().union(*gather_objects(set(dict(built.model.named_parameters())), registry)))
    name = rng.choice(names)
    axis = rng.choice([axis for axis in topology.axes if topology.size(axis) > 1])
    factor = rng.choice([1 / topology.size(axis), float(topology.size(axis))])
    param = dict(built.model.named_parameters()).get(name)
    handle = None if param is None else param.register_hook(lambda gradient: gradient * factor)
    try:
        # A halved gradient also results from a bias that each of two ranks adds; axes of equal size cannot be
        # distinguished.
        causes = ("counted several times",) if factor > 1 else ("divided too often", "added on every rank")
        yield Truth({name}, causes, (), f"{name}: gradient times {factor}")
    finally:
        if handle is not None:
            handle.remove()


@contextmanager
def _bias_everywhere(
    built: Built, drawn: Drawn, registry: ProcessGroupRegistry, rng: random.Random, _: Kind
) -> Iterator[Truth]:
    index = rng.randrange(drawn.depth)
    down: Any = built.model.get_submodule(f"blocks.{index}.down")

    def forward(x: Tensor) -> Tensor:
        return collectives.reduce_from(F.linear(x, down.weight, down.bias), registry, "tensor")

    with mock.patch.object(down, "forward", forward):
        yield Truth({f"blocks.{index}.down.bias"}, ("added on every rank",), ("tensor",), "bias added before the sum")


@contextmanager
def _copied_too_early(
    built: Built, drawn: Drawn, registry: ProcessGroupRegistry, rng: random.Random, _: Kind
) -> Iterator[Truth]:
    """Sum the gradient after the norm's backward instead of before it, so that gradients of the norm's own
    parameters stay partial."""
    index = rng.randrange(drawn.depth)
    block: Any = built.model.get_submodule(f"blocks.{index}")
    norm, up = block.norm, block.up
    normed = norm.forward

    def early(x: Tensor) -> Tensor:
        return normed(collectives.copy_to(x, registry, "tensor"))  # type: ignore[no-any-return]

    def bare(x: Tensor) -> Tensor:
        return F.linear(x, up.weight, up.bias)

    with mock.patch.object(norm, "forward", early), mock.patch.object(up, "forward", bare):
        wrong = {f"blocks.{index}.norm.weight", f"blocks.{index}.norm.bias"}
        yield Truth(wrong, ("a sum is missing",), ("tensor",), "copy_to before the norm, not after it")


@contextmanager
def _stage_gradient(
    built: Built, drawn: Drawn, registry: ProcessGroupRegistry, rng: random.Random, _: Kind
) -> Iterator[Truth]:
    """Double the gradient that the next stage sends back, or reverse the order of its samples."""
    kind = rng.choice(["doubled", "turned"])
    model = built.model
    assert isinstance(model, Stage)

    def received(gradient: Tensor) -> Tensor:
        return gradient * 2 if kind == "doubled" else gradient.flip(0)

    right = _gradients(built, registry, drawn.seed)
    with mock.patch.object(model, "received", received):
        wrong = _differ(right, _gradients(built, registry, drawn.seed), registry)
        causes = ("counted several times", "backward is wrong") if kind == "doubled" else ("backward is wrong",)
        yield Truth(wrong, causes, (), f"the gradient of a stage is {kind}")


@dataclass(frozen=True)
class _Make:
    kind: Any
    mistake: Any
    families: tuple[str, ...]
    weight: int = 1

    def often(self, drawn: Drawn) -> int:
        return self.weight if drawn.family in self.families else 0

    def make(self, built: Built, drawn: Drawn, registry: ProcessGroupRegistry, rng: random.Random) -> Any:
        return self.mistake(built, drawn, registry, rng, self.kind)


_OWN = ("1-D", "sequence", "2-D", "2.5-D", "3-D", "experts")
_ALL = (*_OWN, "pipe", *OF_TORCH)
_KINDS: dict[str, _Make] = {
    kind: _Make(kind, mistake, families, weight)
    for kind, mistake, families, weight in (
        ("sum dropped in backward", _backward_mistake, _OWN, 3),
        ("sum doubled in backward", _backward_mistake, _OWN, 2),
        ("backward over another axis", _backward_mistake, _OWN, 1),
        ("sum dropped in forward", _forward_mistake, _OWN, 2),
        ("forward over another axis", _forward_mistake, _OWN, 1),
        ("spec", _spec_mistake, _ALL, 4),
        ("divisor", _divisor, _ALL, 2),
        ("bias on every rank", _bias_everywhere, ("1-D",), 2),
        ("after instead of before", _copied_too_early, ("1-D",), 2),
        ("stage's gradient", _stage_gradient, ("pipe",), 3),
    )
}
