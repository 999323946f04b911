"""`prove` checks the declared layouts of a model against its loss; `infer` finds the layouts without a declaration."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...parallel.adapters.declaration import constant_norms, derived_specs, random_factors
from ...parallel.interop.audit import Sketch
from ...parallel.interop.local_parameters import has_dtensors, local_parameter
from ...parallel.layout.spec import P
from ...parallel.mesh.agreement import (
    check_all_say_the_same,
    described,
    gather_objects,
    on_all_ranks,
    on_all_ranks_with,
)
from ...parallel.mesh.deprecation import renamed_fields, renamed_members
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.text import some
from ...parallel.mesh.topology import Topology
from ...parallel.mesh.value_checks import is_whole
from .contracts import (
    GradientContract,
    KnownParameter,
    Measured,
    Shape,
    candidates,
    declared_contract,
    hints_of_undeclared_ties,
    parameters_beside,
    spec_of_contract,
    split_beside,
)
from .differences import (
    Differences,
    Digits,
    M,
    Objective,
    Promise,
    check_converts,
    find_wrong,
    in_float64,
    unequal_loss_axes,
)
from .explain import (
    Cause,
    Explainer,
    Fault,
    ForwardOrder,
    HookPoint,
    cause_of,
    describe_cause,
    locate_fault,
    recorded_forward,
)


@dataclass(frozen=True)
class Finding:
    """A mistake that `prove` found: a parameter whose reduced gradient is not the derivative of the loss.

    The reduced gradient is the gradient after the reductions over mesh axes that the declared layout requires. If ranks
    compute different values in forward where they must compute the same, there is a single finding, with the name
    "the forward".

        proof = prove(model, lambda model: model(batch), registry)
        for finding in proof.findings:
            print(finding.name, finding.declared, finding.inferred, finding.text)

    Args:
        name: Name of the parameter, followed by its pipeline stage if several stages use the name for different
            parameters.
        module: Name of the module that holds the parameter; empty for the model itself. For "the forward": the last
            module with parameters in which the difference may begin; empty if there is none.
        declared: The declared spec. None if no spec is declared, in `infer`, and for "the forward".
        inferred: The spec with which the gradient would be right. None if no such spec was found or searched, or if a
            mistake in the model is more likely than a wrong spec. If several dims may be sharded, it names one of them,
            and ``text`` says so.
        cause: The kind of mistake. `prove` searches the causes of the first four and the last four wrong parameters.
            The others get the cause "backward is wrong", or the cause of the module that `Proof.where` names.
        axes: The mesh axes along which the ranks' layouts, gradients or forwards are wrong; may be empty.
        factor: Factor by which the gradient is too large; below 1 if it is too small. None if no factor was found.
        text: Description of the most likely mistake.
    """

    name: str
    module: str
    declared: P | None
    inferred: P | None
    cause: Cause
    axes: tuple[str, ...]
    factor: float | None
    text: str

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dict of values that `json` can write, with specs as text."""
        specs = {"declared": self.declared, "inferred": self.inferred}
        return asdict(self) | {key: None if spec is None else repr(spec) for key, spec in specs.items()}

    def __str__(self) -> str:
        declared = "" if self.declared is None else f"declared {self.declared}, but "
        return f"{self.name}: {declared}{self.text}"


@renamed_fields(untold="undecided")
@renamed_members(right="is_correct")
@dataclass(frozen=True)
class Proof:
    """Result of `prove`, the same on all ranks.

        proof = prove(model, lambda model: model(batch), registry)
        assert not proof.findings, proof

    Args:
        proved: Names of the parameters whose gradients are the derivative of the loss.
        undecided: Names of the parameters without a result: the loss hardly depends on them, ``max_parameters`` left
            them out, or ranks compute different values in forward.
        findings: One finding per wrong parameter, in the order in which forward uses the parameters. If ranks compute
            different values in forward, there is a single finding, "the forward".
        where: Text about the module with a wrong backward, or about the place in forward where ranks begin to differ.
            None if no place was found.
        forwards: Number of forwards of the model that ran.
        hints: Texts about values that make no gradient wrong, but suggest another declaration. Either different
            pipeline stages have parameters with equal values, which may be one tied parameter. Or, in `infer`, shards
            are nearly equal, which may be replicas that diverged. Default: no hints.
    """

    proved: tuple[str, ...]
    undecided: tuple[str, ...]
    findings: tuple[Finding, ...]
    where: str | None
    forwards: int
    hints: tuple[str, ...] = ()

    @property
    def is_correct(self) -> bool:
        """Return True if there are no findings, even if parameters are undecided."""
        return not self.findings

    def check(self) -> None:
        """Raise AssertionError with the text of all findings if there are any."""
        if self.findings:
            raise AssertionError(str(self))

    def to_json(self) -> dict[str, Any]:
        """Return the fields and `is_correct` as a dict of values that `json` can write, with specs as text."""
        return asdict(self) | {
            "findings": [finding.to_json() for finding in self.findings],
            "is_correct": self.is_correct,
        }

    def __str__(self) -> str:
        summary = f"{len(self.proved)} parameters are right, in {self.forwards} forwards"
        undecided = f"; not decided: {', '.join(self.undecided)}" if self.undecided else ""
        notes = [f"note: {hint}" for hint in self.hints]
        if self.is_correct:
            return "\n".join([summary + undecided, *notes])
        wrong = [str(finding) for finding in self.findings]
        where = [self.where] if self.where else []
        if any(finding.cause == "forward differs" for finding in self.findings):
            return "\n".join(["the forward is wrong:", *wrong, *where, summary + undecided, *notes])
        count = "1 parameter is wrong" if len(wrong) == 1 else f"{len(wrong)} parameters are wrong"
        return "\n".join([f"{count}:", *wrong, *where, f"The other {summary}{undecided}", *notes])


def prove(
    model: M,
    loss_fn: Callable[[M], Tensor | None],
    registry: ProcessGroupRegistry,
    *,
    max_parameters: int | None = None,
    dtype: torch.dtype | None = torch.float64,
    seed: int = 0,
) -> Proof:
    """Check that the gradient of every trainable parameter is the derivative of the loss, and return a `Proof`.

        proof = prove(model, lambda model: model(batch), registry)
        print(proof)

    No dense model is needed. `prove` adds a small multiple of a random direction to every parameter; replicas get equal
    directions, shards get distinct ones. The resulting change of the loss, a central difference, must equal the
    derivative that the gradients predict under the declared specs. If it does not, `prove` searches for a spec with
    which the gradient would be right, and for the module whose backward is wrong. `prove` cannot detect that the model
    computes another function than the intended one, if it differentiates that function correctly.

    Call it on every rank, in a test, at the start of training or between two steps. Don't call it between a backward
    with ``overlap=True`` and its step: the step would reject the gradients. Dropout gets the same random numbers in
    every forward. A detached tensor that depends on parameters makes their gradients wrong, unless the module passes it
    through `stop_gradient`, as DoRA does with the norm of its weight. A factor of a LoRA adapter that is zero gets random
    values, because the gradient of the other factor would be zero too. Gradients, buffers, parameters and random states
    are restored before the call returns.

    Args:
        model: A model whose parameters are declared with `declare`. Parallel layers and DTensors declare themselves.
        loss_fn: Called with the model. It returns this rank's loss, the mean over this rank's samples, or None on a
            rank without a loss. Ranks along model-parallel axes must return the same loss. `prove` differentiates the
            mean over the data-parallel ranks. If ``loss_fn`` runs backward itself, as a pipeline schedule does, it
            returns the detached loss or None.
        registry: The process groups.
        max_parameters: Largest number of parameters to check, spread evenly over the model. None: all. Default: None.
        dtype: torch.float64: convert parameters and buffers to float64 during the proof, and ignore casts to lower
            dtypes in the model. None: keep the parameters' dtypes. In float32, `prove` detects an error only if it is
            above about one percent of the effects of all parameters that it checks together, up to 64. So it may miss a
            wrong gradient of one parameter among many. Default: torch.float64.
        seed: Seed of the random directions. Default: 0.

    Raises:
        ValueError: On every rank: ``max_parameters`` is below 1, ``dtype``, ``max_parameters`` or ``seed`` differs between
            ranks, a parameter is not declared, an adapter is merged, or a loss is missing, not finite or not a single
            number.
        RuntimeError: ``loss_fn`` raised an error on another rank (if it is a ValueError or TypeError, this rank raises
            the same type). The other rank logs its error at once. If this rank waits for that rank in a collective of
            the model, it raises only after the collective has timed out.
        TypeError: ``model`` is no module; a parameter has half precision and ``dtype`` is None; a DTensor of a lower dtype
            would have to be converted to float64; ``dtype`` is neither float64 nor None; or ``loss_fn`` returned neither
            a tensor nor None.

    Collectives: those of the model in one forward and backward, in two forwards to measure rounding errors, and in
        about two forwards per 64 right parameters, more for wrong ones. Also object all-gathers over the world.
    Host synchronization: yes.
    """
    return examine(model, loss_fn, registry, max_parameters, dtype, seed).proof


# `infer`: layouts from values, gradients and the loss -----------------------------------------------------------------


@dataclass(frozen=True)
class InferredLayout:
    """Result of `infer`. `rules` has the specs of this rank's parameters; the other fields are the same on all ranks.

        inferred = infer(model, lambda model: model(batch), registry)
        declare(model, inferred.rules)

    Args:
        rules: {parameter name: spec}, for `declare`.
        dims_unknown: Names of the parameters for which several choices of the sharded dims are possible; the spec has
            one of them. The gradient norm, clipping by it, and the steps of elementwise optimizers are the same with
            every choice. Full-tensor optimizers (such as `Muon`), norms per row, and loading a checkpoint in another
            layout depend on the choice.
        proof: The `Proof` of these rules. If no spec makes a parameter's gradient right, the parameter has a finding
            and no rule.
    """

    rules: dict[str, P]
    dims_unknown: tuple[str, ...]
    proof: Proof

    def __str__(self) -> str:
        lines = [f"    {pattern!r}: {spec}," for pattern, spec in shortened(self.rules).items()]
        notes = [f"{name}: the sharded dims are a guess; pass shapes= to infer" for name in self.dims_unknown]
        notes += [f"{name}: inferred from values only; the loss hardly depends on it" for name in self.proof.undecided]
        if self.proof.is_correct:
            notes += [f"note: {hint}" for hint in self.proof.hints]
        else:
            notes += str(self.proof).splitlines()
        return "\n".join(["declare(model, {", *lines, "})", *(f"# {note}" for note in notes)])


def infer(
    model: M,
    loss_fn: Callable[[M], Tensor | None],
    registry: ProcessGroupRegistry,
    *,
    shapes: nn.Module | Mapping[str, Sequence[int]] | None = None,
    dtype: torch.dtype | None = torch.float64,
    seed: int = 0,
) -> InferredLayout:
    """Find a spec for every trainable parameter, and return the specs with their proof.

    Declarations are not used, except the placements of DTensors, and whether a parameter is tied.

        print(infer(model, lambda model: model(batch), registry))

    ```text
    declare(model, {
        'layers.*.up.weight': P('tensor'),
        ...
    ```

    If ranks have equal values of a parameter, they hold replicas; otherwise they hold shards. Changes of the loss
    decide which gradients are complete and which are partial, as in `prove`. A parameter whose elements all have one
    value on all ranks, such as the ones of a norm or the zeros of a bias, may be sharded or replicated. Sharded is
    tried first if another parameter of its module is sharded, or if ``shapes`` has its shape. Parameters with the same
    name on several pipeline stages count as different, unless they are declared tied. If the result is uncertain,
    initialize the parameters at random, or pass ``shapes``.

    If losses differ along a model axis, but all gradients are right if it is a data axis, the rules treat it as a data
    axis, and a finding names the axis. `Proof.hints` names shards that are nearly equal, because they may be replicas
    that diverged.

    Args:
        model, loss_fn, registry, dtype, seed: As in `prove`.
        shapes: Shapes of the full tensors by name, or a dense model with these shapes (for example on the meta device).
            They determine which dims are sharded. None: if several dims are possible, one is guessed. Default: None.

    Raises:
        ValueError: On every rank: the shape of a shard does not fit the full shape in ``shapes``, ``dtype`` or ``seed``
            differs between ranks, an adapter is merged, or a loss is missing, not finite or not a single number.
        TypeError: ``shapes`` is neither a mapping nor a module. Otherwise as in `prove`.
        RuntimeError: As in `prove`.

    Collectives: as in `prove`. If the first guess of a parameter's layout is wrong, more forwards are needed.
    Host synchronization: yes.
    """
    logical = on_all_ranks(lambda: _shapes(shapes), registry)
    topology = registry.topology

    def guess(measured: Measured) -> dict[str, GradientContract]:
        for known in measured.known:
            known.full = logical.get(known.name)
        return {known.label: _first(known, measured.known, measured.topology) for known in measured.known}

    found = examine(model, loss_fn, registry, None, dtype, seed, guess)
    if found.unequal:
        roles = {axis: topology.role(axis) for axis in topology.axes} | dict.fromkeys(found.unequal, "data")
        sizes = {axis: topology.size(axis) for axis in topology.axes}
        as_data = Topology(roles=roles, aliases=topology.aliases, **sizes)
        again = examine(model, loss_fn, registry, None, dtype, seed, guess, as_data)
        if again.proof.is_correct:
            topology, found = as_data, _of_other_roles(found, again)
    by_label = {known.label: known for known in found.known}
    rules, unknown = dict[str, P](), list[str]()
    for label, contract in found.contracts.items():
        known = by_label[label]
        beside = parameters_beside(known, found.known, found.contracts)
        spec, is_certain = spec_of_contract(known, contract, topology, beside)
        if not is_certain:
            unknown.append(label)
        if registry.global_rank in known.seen:
            rules[known.name_on(registry.global_rank)] = spec
    hints = (*found.proof.hints, *_hints_of_near_replicas(model, found, registry, topology))
    return InferredLayout(rules, tuple(unknown), replace(found.proof, hints=hints))


def _of_other_roles(first: Examined, second: Examined) -> Examined:
    """Return the result for a model that is right except that some axes must have the role of data axes.

    It has one finding, which names these axes. ``second`` is the result with these axes as data axes.
    """
    roles = ", ".join(f"{axis!r}: 'data'" for axis in first.unequal)
    text = (
        f"the losses differ along {' x '.join(map(repr, first.unequal))}, which is not a data axis. All gradients are "
        "right if its ranks have different samples, or different parts of each sample, so that gradients are averaged over "
        f"it. Then build Topology(roles={{{roles}}}, ...) and use these rules with it"
    )
    finding = Finding("the forward", "", None, None, "forward differs", first.unequal, None, text)
    forwards = first.proof.forwards + second.proof.forwards
    return replace(second, proof=replace(second.proof, findings=(finding,), forwards=forwards))


# Two shards are nearly equal if their difference is at most this fraction of their deviation from the mean.
_NEAR = 0.2


def _hints_of_near_replicas(
    model: nn.Module, found: Examined, registry: ProcessGroupRegistry, topology: Topology
) -> tuple[str, ...]:
    """Return at most one text, which names parameters with nearly equal shards, such as replicas that diverged.

    Collectives: an object all-gather over the world.
    Host synchronization: one per parameter that may have such shards.
    """
    params = dict(model.named_parameters())
    sharded: list[tuple[KnownParameter, str]] = []
    own: dict[str, Sketch] = {}
    for known in found.known:
        if known.label not in found.contracts or any(seen.constant for seen in known.seen.values()):
            continue
        axes = [axis for axis in found.contracts[known.label].apart if axis not in topology.pipe_axes]
        sharded += [(known, axis) for axis in axes]
        if axes and registry.global_rank in known.seen:
            value = local_parameter(params[known.name_on(registry.global_rank)], topology).detach().double()
            own[known.label] = Sketch.of(value - value.mean())
    by_rank = gather_objects(own, registry)
    names = []
    for known, axis in sharded:
        pairs = [
            (by_rank[ranks[0]][known.label], by_rank[rank][known.label])
            for ranks in topology.groups(axis)
            for rank in ranks[1:]
            if {ranks[0], rank} <= {*known.seen} and known.seen[ranks[0]].shape == known.seen[rank].shape
        ]
        if pairs and all(one.is_near(other, _NEAR) for one, other in pairs):
            names.append(f"{known.label} (along {axis!r})")
    if not names:
        return ()
    return (
        f"the values of {some(names)} differ, but so little that they may be replicas that diverged. Their spec assumes "
        "shards. If they are replicas, start all ranks from the same weights, and call infer again",
    )


def _shapes(shapes: nn.Module | Mapping[str, Sequence[int]] | None) -> dict[str, Shape]:
    if isinstance(shapes, nn.Module):
        return {name: tuple(param.shape) for name, param in shapes.named_parameters()}
    if shapes is not None and not isinstance(shapes, Mapping):
        raise TypeError(f"shapes is a {type(shapes).__name__}; give a dict of shapes by name, or a dense model")
    return {name: tuple(shape) for name, shape in (shapes or {}).items()}


def _first(known: KnownParameter, everything: Sequence[KnownParameter], topology: Topology) -> GradientContract:
    """Return the most likely `GradientContract` of a parameter. Along mesh axes of a DTensor, use its placements."""
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
    """Return the rules with layer indices in names replaced by ``*`` if all names of a pattern have one spec."""
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


# The steps of a proof: predict derivatives from gradients, compare them with the loss, explain differences ------------

# Number of wrong parameters whose causes `prove` searches: the first four and the last four in forward order. The other
# parameters are mostly wrong for the same reason. Their findings get the cause "backward is wrong" and the text
# `NOT_SEARCHED`. If `prove` then locates a `Fault`, they get the cause of this fault instead. `infer` searches the causes
# of all wrong parameters.
EXPLAINED = 8
NOT_SEARCHED = (
    f"its gradient is not the derivative of the loss. The cause was not searched, because more than {EXPLAINED} parameters "
    "are wrong: first correct those with another text"
)


@dataclass
class Examined:
    """Result of `examine`.

    ``contracts`` has the gradient contract of each checked parameter that is right or undecided, by the parameter's
    label. It is empty if ranks compute different values in forward. ``unequal`` are the axes, except data-parallel
    ones, along which losses differ.
    """

    proof: Proof
    contracts: dict[str, GradientContract]
    known: list[KnownParameter]
    unequal: tuple[str, ...] = ()


def examine(
    model: M,
    loss_fn: Callable[[M], Tensor | None],
    registry: ProcessGroupRegistry,
    most: int | None,
    dtype: torch.dtype | None,
    seed: int,
    contracts_of: Callable[[Measured], dict[str, GradientContract]] | None = None,
    topology: Topology | None = None,
) -> Examined:
    """Run the checks of `prove` or `infer`, and return the result, the same on all ranks.

    Parameters, gradients, buffers and random states are restored. ``most`` is the ``max_parameters`` of `prove`.

    `infer` gives ``contracts_of``, which is called once on each rank, and returns a first guess of each parameter's
    gradient contract, by the parameter's label. Declared specs are then not checked. If another contract makes a
    gradient right, it replaces the guess, without a finding.

    ``topology`` has the axes of the registry's topology with other roles. Collectives are those of `prove`.
    """

    def check() -> tuple[None, dict[str, str]]:
        if not isinstance(model, nn.Module):
            raise TypeError(f"the model is a {type(model).__name__}; give an nn.Module")
        if not (dtype is None or dtype is torch.float64):
            raise TypeError(f"dtype={dtype}: give torch.float64, or None for the dtypes of the parameters")
        if most is not None and not is_whole(most, 1):
            raise ValueError(f"max_parameters={most}: give a number >= 1, or None to check all parameters")
        if dtype is not None:
            check_converts(model)
        return None, described({"dtype=": dtype, "max_parameters=": most, "seed=": seed})

    _, by_rank = on_all_ranks_with(check, registry)
    check_all_say_the_same(by_rank)
    in_dtype = nullcontext() if dtype is None else in_float64(model)
    with in_dtype, random_factors(model, registry, seed), constant_norms(model):
        objective = Objective(model, loss_fn, registry, topology)
        try:
            return _Examination(model, objective, most, seed, contracts_of).run()
        finally:
            objective.close()


class _Examination:
    """One run of the checks of `prove` or `infer`.

    The constructor runs one forward and backward; `run` runs all other forwards.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        most: int | None,
        seed: int,
        contracts_of: Callable[[Measured], dict[str, GradientContract]] | None,
    ) -> None:
        self.model, self.objective, self.seed = model, objective, seed
        self.topology, self.registry = objective.topology, objective.registry
        self.digits = Digits.of(_lowest_dtype(model))
        with recorded_forward(model) as self.hashes:
            self.base = objective.differentiate()
        self.measured = Measured.of_model(model, self.registry, self.topology)
        self.differences = Differences(objective, self.measured, self.base, self.digits)
        self.explainer = Explainer(self.differences)
        everything = self.measured.known
        step = -(-len(everything) // most) if most else 1
        self.known = everything[::step]
        self.left_out = [known for index, known in enumerate(everything) if index % step]
        self.inferring = contracts_of is not None
        self.derived = dict(ChainMap(*gather_objects(derived_specs(model), self.registry)))
        self.contracts = self._declared(model) if contracts_of is None else contracts_of(self.measured)
        self.not_searched = set[str]()  # labels of wrong parameters whose causes were not searched

    def _declared(self, model: nn.Module) -> dict[str, GradientContract]:
        meshed = has_dtensors(list(model.parameters()))
        undeclared = [known.label for known in self.known if known.first.spec is None and self.topology.world_size > 1]
        if undeclared and not meshed:
            raise ValueError(
                f"no spec is declared for {some(undeclared)}: call declare(model, {{'name or pattern': P(...)}}), with "
                "the rules that infer(model, loss_fn, registry) prints if you don't know them"
            )
        return {
            known.label: declared_contract(known.first.spec or P(), known.first.averaged, self.topology)
            for known in self.known
        }

    def run(self) -> Examined:
        """Run the proof and return its result."""
        unequal = unequal_loss_axes(self.base, self.topology, self.digits.relative / 100 * self.differences.loss)
        if unequal:
            return replace(self._other_forward(self._forward_order(), unequal[0], None), unequal=unequal)
        suspects, undecided = self._suspects()
        findings: list[Finding] = []
        place: Fault | None = None
        if suspects:
            order = self._forward_order()
            in_order = [known for known in order.sorted() if known.label in suspects]
            findings = self._findings(in_order, suspects)
            names = {finding.name for finding in findings}
            place = self._place(order, [known for known in in_order if known.label in names], findings)
            if place is not None and place.cause == "forward differs":
                return self._other_forward(order, place.axes[0], place.wrong)
            if place is not None:
                findings = [self._placed(finding, place) for finding in findings]
        left = [known.label for known in (*undecided, *self.left_out)]
        not_right = {*left, *(finding.name for finding in findings)}
        proved = tuple(known.label for known in self.known if known.label not in not_right)
        where = None if place is None else str(place)
        hints = hints_of_undeclared_ties(self.measured.known, self.topology)
        proof = Proof(proved, tuple(left), tuple(findings), where, self.objective.calls, hints)
        decided = (*proved, *(known.label for known in undecided))
        return Examined(proof, {label: self.contracts[label] for label in decided}, self.known)

    def _forward_order(self) -> ForwardOrder:
        """Return the order in which modules ran, gathered from all ranks. Every rank must call it."""
        return ForwardOrder(self.hashes, self.known, self.registry)

    def _suspects(self) -> tuple[dict[str, Cause | None], list[KnownParameter]]:
        """Return ({label of a wrong parameter: cause, or None if it must be searched}, undecided parameters)."""
        suspects: dict[str, Cause | None] = {}
        promises = []
        for known, promise in self._promises():
            if self._held_by_others(known):
                suspects[known.label] = "held by others"
            elif self.inferring and self._stale_ties(known):
                suspects[known.label] = "copies differ"
            elif promise is None or self._contradicted(known, self.contracts[known.label]):
                suspects[known.label] = None
            else:
                promises.append(promise)
        self.differences.measure_noise(promises)
        wrong, undecided = find_wrong(self.differences, promises)
        suspects.update((known.label, None) for known in wrong)
        return suspects, undecided

    # Predictions of the gradients -------------------------------------------------------------------------------------

    def _promises(self) -> list[tuple[KnownParameter, Promise | None]]:
        """Return (parameter, derivative that its gradients predict along a random direction) pairs.

        The prediction is None if ranks predict different values although the gradient contract requires equal ones, and
        the values are large enough to be measured.
        """
        directions = [
            (known, self.measured.direction(known, self.contracts[known.label], self.seed)) for known in self.known
        ]
        products = self.measured.products(directions)
        found: list[tuple[KnownParameter, Promise | None]] = []
        for known, direction in directions:
            of_ranks = products[known.label]
            value, spread = self.contracts[known.label].derivative(of_ranks, self.topology)
            size = max(known.effect, *map(abs, of_ranks.values()))
            alike = spread <= 10 * self.digits.relative * size or self.differences.never_tells(size)
            found.append((known, Promise(known, direction, value, known.effect) if alike else None))
        return found

    def _held_by_others(self, known: KnownParameter) -> bool:
        """Return True if the ranks that hold the parameter are not the ranks that its declared spec requires.

        Always False in `infer`. Along pipeline axes that the spec does not name, any stage may hold the parameter.
        """
        spec = None if self.inferring else known.first.spec
        if spec is None:
            return False
        places = [self.topology.coordinate(rank) for rank in range(self.topology.world_size)]
        free = [axis for axis in self.topology.pipe_axes if axis not in spec.named_axes]
        stages = {tuple(places[rank][axis] for axis in free) for rank in known.seen}
        return set(known.seen) != {
            rank
            for rank, at in enumerate(places)
            if spec.holds(at, self.topology) and tuple(at[axis] for axis in free) in stages
        }

    def _stale_ties(self, known: KnownParameter) -> tuple[str, ...]:
        """Return the axes over which the parameter is declared tied, although its values on the tied ranks differ."""
        tied = () if known.first.spec is None else dict(known.first.spec.tied)
        return tuple(axis for axis in tied if not known.equal_along(axis, self.topology))

    def _contradicted(self, known: KnownParameter, contract: GradientContract) -> bool:
        """Return True if the values of the parameter on the ranks contradict ``contract``, its assumed layout.

        They do if ranks that must hold replicas have different values. They also do if ranks that must hold different
        shards have equal values, unless all elements of a shard are equal.
        """
        equal = {axis for axis, _ in contract.by_axis if known.equal_along(axis, self.topology)}
        if any(axis not in equal for axis, along in contract.by_axis if not along.apart):
            return True
        if any(seen.constant for seen in known.seen.values()):
            return False
        return any(axis in equal and known.shared_along(axis, self.topology) for axis in contract.apart)

    # Findings ---------------------------------------------------------------------------------------------------------

    def _findings(self, wrong: Sequence[KnownParameter], suspects: Mapping[str, Cause | None]) -> list[Finding]:
        few = wrong if self.inferring else (*wrong[-EXPLAINED // 2 :], *wrong[: EXPLAINED // 2])
        explained = {known.label for known in few}
        self.not_searched = {known.label for known in wrong} - explained
        found = [
            self._explained(known, suspects)
            if known.label in explained
            else replace(self._finding(known, "backward is wrong"), text=NOT_SEARCHED)
            for known in wrong
        ]
        return [finding for finding in found if finding is not None]

    def _explained(self, known: KnownParameter, suspects: Mapping[str, Cause | None]) -> Finding | None:
        """Search the cause of a wrong gradient, and return the parameter's finding.

        Return None if the parameter's gradient turns out to be right. In `infer`, also return None if another
        `GradientContract` makes the gradient right; this contract is then stored in ``self.contracts``.

        ``suspects``: {label of each wrong parameter: its cause}. None: search the cause.
        """
        cause = suspects[known.label]
        if not any(seen.gradient for seen in known.seen.values()):
            return self._finding(known, "no gradient comes")
        if self.inferring and cause == "copies differ":
            return self._finding(known, cause, self._stale_ties(known))
        declared = self.contracts[known.label]
        doubtful = self.inferring or self._contradicted(known, declared)
        explanation = self.explainer.explain(known, None if doubtful else declared)
        if self.inferring and explanation.contract is not None and explanation.factor == 1.0:
            self.contracts[known.label] = explanation.contract
            return None
        spec, is_certain = None, True
        if explanation.contract is not None and explanation.factor == 1.0:
            right = {label: contract for label, contract in self.contracts.items() if label not in suspects}
            beside = parameters_beside(known, self.known, {**right, known.label: explanation.contract})
            spec, is_certain = spec_of_contract(known, explanation.contract, self.topology, beside)
        if cause is not None:
            return self._finding(known, cause, spec=spec, is_certain=is_certain)
        if explanation.contract == declared and explanation.factor == 1.0 and not doubtful:
            return None  # along other directions, in which only this parameter moves, its gradient is right
        cause, axes = cause_of(known, declared, explanation, self.topology)
        factor = explanation.factor
        if cause == "counted several times" and factor == 1.0:
            factor = float(self.topology.size(*axes))
        if cause in ("divided too often", "added on every rank"):
            factor = 1 / self.topology.size(*axes) if factor == 1.0 else factor
            spec = None
        return self._finding(known, cause, axes, factor, spec, is_certain)

    def _finding(
        self,
        known: KnownParameter,
        cause: Cause,
        axes: tuple[str, ...] = (),
        factor: float = 1.0,
        spec: P | None = None,
        is_certain: bool = True,
    ) -> Finding:
        if spec is not None and not self.inferring and known.name in self.derived:
            # For a LoRA adapter, use the spec that follows from its base layer, because the inferred spec may fit the
            # gradients, but contradict the base layer.
            spec, is_certain = self.derived[known.name], True
        return Finding(
            known.label,
            known.module,
            None if self.inferring else known.first.spec,
            spec,
            cause,
            axes,
            factor if factor != 1.0 else None,
            describe_cause(cause, axes, factor, spec, is_certain),
        )

    # Location of a wrong backward -------------------------------------------------------------------------------------

    def _place(self, order: ForwardOrder, wrong: Sequence[KnownParameter], findings: Sequence[Finding]) -> Fault | None:
        """Return the place of the wrong backward that makes the gradients of earlier modules wrong.

        If there are several places, return the last one in forward order. If none is found, return a likely fault in the
        module of the last wrong parameter if that module is sharded, else None. Also return None if the findings do not
        suggest a wrong backward.
        """
        flowing = {"backward is wrong", "a sum is missing", "counted several times", "divided too often"}
        searched = [finding for finding in findings if finding.name not in self.not_searched]
        labels = {finding.name for finding in searched if finding.cause in flowing}
        last = next((known for known in reversed(wrong) if known.label in labels), None)
        several = len({finding.module for finding in searched if finding.name in labels}) > 1
        if last is None or not (several or any(finding.cause == "backward is wrong" for finding in searched)):
            return None
        sites, split = order.until_right(last, wrong), self._split()
        place = locate_fault(self.model, self.differences, sites, split)
        # All tested activations have right gradients, so most likely the sum is missing in the module of ``last``.
        if place is None and split.get(last.module):
            into, out = HookPoint(last.module, "input"), HookPoint(last.module, "output")
            return Fault(into, out, "a sum is missing", split[last.module], likely=True)
        return place

    def _split(self) -> dict[str, tuple[str, ...]]:
        """Return {module name: the model-parallel axes that shard a parameter of the module}."""
        found: dict[str, tuple[str, ...]] = {}
        for known in self.known:
            apart = tuple(axis for axis in self.contracts[known.label].apart if axis in self.topology.model_axes)
            found[known.module] = found.get(known.module) or apart
        return found

    def _placed(self, finding: Finding, place: Fault) -> Finding:
        """Return ``finding``, with cause, axes and text of ``place`` if its own cause is "backward is wrong"."""
        if finding.cause != "backward is wrong":
            return finding
        text = "its gradient is not the derivative of the loss" if finding.name in self.not_searched else finding.text
        text = f"{text} (see {place.inside})"
        return replace(finding, cause=place.cause, axes=place.axes or finding.axes, text=text)

    def _other_forward(self, order: ForwardOrder, axis: str, until: HookPoint | None) -> Examined:
        """Return the result if ranks compute different values in forward, where no proof is possible.

        ``axis`` is the mesh axis along which the ranks' values differ. ``until`` is the first input or output of a
        module that is known to differ; None: the loss.
        """
        last, modules = order.before_unequal(axis, until)
        since = "The ranks' values agree nowhere" if last is None else f"The ranks' values last agree at {last}"
        where = f"{since}; modules after that: {', '.join(modules) or 'none with parameters'}."
        text = describe_cause("forward differs", (axis,), 1.0, None)
        finding = Finding(
            "the forward", modules[-1] if modules else "", None, None, "forward differs", (axis,), None, text
        )
        left = tuple(known.label for known in self.measured.known)
        return Examined(Proof((), left, (finding,), where, self.objective.calls), {}, self.known)


def _lowest_dtype(model: nn.Module) -> torch.dtype:
    dtypes = {param.dtype for param in model.parameters()} or {torch.float64}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
