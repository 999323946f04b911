"""One proof, step by step: what gradients promise, whether the loss keeps it, and if not, what is wrong and where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...parallel.interop.local_parameters import has_dtensors
from ...parallel.layout.spec import P
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.text import some
from .differences import Differences, Digits, Promise, wrong_ones
from .explain import Explainer, FaultPlace, cause_of, first_wrong
from .findings import Cause, Finding, Proof, spec_of_way
from .forward_order import ForwardOrder, Recorded, Site
from .measured import KnownParameter, Measured, Way, declared_way
from .objective import M, Objective, in_float64, unequal_along

# What a finding says: the mistake that is the likeliest, and what to write --------------------------------------------


def words(cause: Cause, axes: Sequence[str], factor: float, spec: P | None, where: str | None) -> str:
    """Args: spec: What it is instead. where: What localises a wrong backward."""
    over = " x ".join(map(repr, axes)) or "some axis"
    either = " or ".join(map(repr, axes)) or "no axis of this size"
    becomes = "" if spec is None else f"; it is {spec}"
    text = {
        "split, not declared": f"each rank of {over} has a piece of its own{becomes}",
        "declared split, but a copy": f"but the ranks of {over} have the same values and move together{becomes}",
        "a sum is missing": (
            f"each rank of {over} has only a term of its gradient: an all-reduce over {over} is missing in backward "
            f"(`copy_to` where a copy enters split work), or nobody has declared P(partial=...){becomes}"
        ),
        "counted several times": (
            f"the gradient is {factor:.4f} times too large: summed twice, or over {either}, along which it is complete"
            f"{becomes}"
        ),
        "divided too often": (
            f"the gradient is {1 / factor if factor else 0:.4f} times too small: averaged over {either}, where it is to be "
            "summed"
        ),
        "added on every rank": (
            f"the loss has it once for each rank of {over}, as a bias that every rank adds before the sum over {over}: add "
            "it after the sum, or on one rank; or its gradient is averaged where it is to be summed"
        ),
        "held by others": f"other ranks hold it than its spec says{becomes}",
        "no gradient comes": "the loss depends on it, and no gradient comes: it is detached on the way",
        "copies differ": f"its values differ along {over}, where they are declared copies: start from the same weights, "
        "or declare it split where each rank has its own, as experts are",
        "backward is wrong": "no layout makes its gradient the derivative of the loss"
        + (f": ranks of {over} that should have the same gradient have others" if axes else ""),
        "forward differs": (
            f"ranks of {over} compute different things that should be one and the same: a sum or a gather over {over} is "
            "missing in forward or made over another axis, copies of a parameter differ, or ranks have other batches"
        ),
    }[cause]
    return text if where is None or cause == "copies differ" else f"{text} (see {where})"


# Examination ----------------------------------------------------------------------------------------------------------

# Wrong parameters that are looked at one by one; the others are wrong too, and mostly for the same reason.
EXPLAINED = 8


@dataclass
class Examined:
    """Args: ways: Of the parameters that are right, or of which the loss tells nothing. known: All that were looked at."""

    proof: Proof
    ways: dict[str, Way]
    known: list[KnownParameter]


def examined(
    model: M,
    loss_fn: Callable[[M], Tensor | None],
    registry: ProcessGroupRegistry,
    most: int | None,
    dtype: torch.dtype | None,
    seed: int,
    ways_of: Callable[[Measured], dict[str, Way]] | None = None,
) -> Examined:
    """The proof, the same on all ranks; the model is afterwards what it was.

    Args:
        model, loss_fn, registry, dtype, seed: As in `prove`.
        most: ``max_parameters`` of `prove`.
        ways_of: Asked once, on every rank, for what each parameter is, by label; what is declared is then not looked at,
            and another layout that fits better is no mistake. None: what is declared.
    Raises, collectives, host reads: as `prove`.
    """
    if dtype not in (None, torch.float64):
        raise TypeError(f"dtype={dtype}: prove in float64, or with None in what the parameters have")
    with in_float64(model) if dtype is not None else nullcontext():
        objective = Objective(model, loss_fn, registry)
        try:
            return _Examination(model, objective, registry, most, seed, ways_of).made()
        finally:
            objective.close()


class _Examination:
    """One proof, step by step; everything in it is the same on all ranks but the tensors."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        registry: ProcessGroupRegistry,
        most: int | None,
        seed: int,
        ways_of: Callable[[Measured], dict[str, Way]] | None,
    ) -> None:
        self.model, self.objective, self.registry, self.seed = model, objective, registry, seed
        self.topology = registry.topology
        self.digits = Digits.of(_lowest_dtype(model))
        self.recorded = Recorded(model)
        with self.recorded.recorded():
            self.base = objective.differentiate()
        self.measured = Measured.of_model(model, registry)
        self.differences = Differences(objective, self.measured, self.base, self.digits)
        self.explainer = Explainer(self.differences)
        everything = self.measured.known
        step = -(-len(everything) // most) if most else 1
        self.known = everything[::step]
        self.left_out = [known for known in everything if known not in self.known]
        given = {} if ways_of is None else ways_of(self.measured)
        self.inferring = ways_of is not None
        self.ways = given or self._declared(model)

    def _declared(self, model: nn.Module) -> dict[str, Way]:
        meshed = has_dtensors(list(model.parameters()))
        undeclared = [known.label for known in self.known if known.first.spec is None and self.topology.world_size > 1]
        if undeclared and not meshed:
            raise ValueError(
                f"no spec for {some(undeclared)}: say how each is laid out with declare(model, "
                "{'name or pattern': P(...)}), or ask infer(model, loss_fn, registry) for the rules"
            )
        return {
            known.label: declared_way(known.first.spec or P(), known.first.averaged, self.topology)
            for known in self.known
        }

    def made(self) -> Examined:
        """The proof."""
        unequal = unequal_along(self.base, self.topology, self.digits.relative / 100 * self.differences.loss)
        if unequal:
            return self._other_forward(self._forward_order(), unequal[0], None)
        suspects, untold = self._suspects()
        findings: list[Finding] = []
        place: FaultPlace | None = None
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
        left = [known.label for known in (*untold, *self.left_out)]
        not_right = {*left, *(finding.name for finding in findings)}
        proved = tuple(known.label for known in self.known if known.label not in not_right)
        where = None if place is None else str(place)
        proof = Proof(proved, tuple(left), tuple(findings), where, self.objective.calls)
        told = (*proved, *(known.label for known in untold))
        return Examined(proof, {label: self.ways[label] for label in told}, self.known)

    def _forward_order(self) -> ForwardOrder:
        """Asked for where something is wrong, on which ranks agree. Collectives: an object all-gather."""
        return ForwardOrder(self.recorded, self.known, self.registry)

    def _suspects(self) -> tuple[dict[str, Cause | None], list[KnownParameter]]:
        """By label, what is wrong, and the cause where that is known already; those of which nothing can be told."""
        suspects: dict[str, Cause | None] = {}
        promises = []
        for known, promise in self._promises():
            if self._held_by_others(known):
                suspects[known.label] = "held by others"
            elif promise is None or self._contradicted(known, self.ways[known.label]):
                suspects[known.label] = None
            else:
                promises.append(promise)
        self.differences.measure_noise(promises)
        wrong, untold = wrong_ones(self.differences, promises)
        suspects.update((known.label, None) for known in wrong)
        return suspects, untold

    # What the gradients promise ---------------------------------------------------------------------------------------

    def _promises(self) -> list[tuple[KnownParameter, Promise | None]]:
        """Of each parameter; None where ranks promise different things that should promise the same."""
        directions = [
            (known, self.measured.direction(known, self.ways[known.label], self.seed)) for known in self.known
        ]
        found: list[tuple[KnownParameter, Promise | None]] = []
        for (known, direction), products in zip(directions, self.measured.products(directions), strict=True):
            value, spread = self.ways[known.label].derivative(products, self.topology)
            size = max(known.effect, *map(abs, products.values()))
            alike = spread <= 10 * self.digits.relative * size or self.differences.never_tells(size)
            found.append((known, Promise(known, direction, value, known.effect) if alike else None))
        return found

    def _held_by_others(self, known: KnownParameter) -> bool:
        """Whether other ranks hold it than its spec says."""
        spec = None if self.inferring else known.first.spec
        if spec is None or self.topology.pipe_axes:
            return False
        places = map(self.topology.coordinate, range(self.topology.world_size))
        return {rank for rank, at in enumerate(places) if spec.holds(at, self.topology)} != set(known.seen)

    def _copies_differ(self, known: KnownParameter, way: Way) -> bool:
        return any(not along.apart and not known.equal_along(axis, self.topology) for axis, along in way.by_axis)

    def _contradicted(self, known: KnownParameter, way: Way) -> bool:
        """Whether copies differ, or pieces are equal, though not constant."""
        return self._copies_differ(known, way) or self._pieces_alike(known, way)

    def _pieces_alike(self, known: KnownParameter, way: Way) -> bool:
        if any(seen.constant for seen in known.seen.values()):
            return False
        return any(
            known.equal_along(axis, self.topology) and known.shared_along(axis, self.topology) for axis in way.apart
        )

    # What is wrong ----------------------------------------------------------------------------------------------------

    def _findings(self, wrong: Sequence[KnownParameter], suspects: Mapping[str, Cause | None]) -> list[Finding]:
        found: list[Finding] = []
        few = wrong if self.inferring else (*wrong[-EXPLAINED // 2 :], *wrong[: EXPLAINED // 2])
        explained = {known.label for known in few}
        for known in wrong:
            if known.label in explained:
                finding = self._explained(known, suspects[known.label])
            else:
                finding = self._finding(known, "backward is wrong", (), 1.0, None)
            found += [] if finding is None else [finding]
        return found

    def _explained(self, known: KnownParameter, cause: Cause | None) -> Finding | None:
        """None: it is right after all, or another layout than was guessed."""
        if not any(seen.gradient for seen in known.seen.values()):
            return self._finding(known, "no gradient comes", (), 1.0, None)
        declared = self.ways[known.label]
        doubtful = self.inferring or self._contradicted(known, declared)
        explanation = self.explainer.explain(known, None if doubtful else declared)
        if self.inferring and explanation.way is not None and explanation.factor == 1.0:
            self.ways[known.label] = explanation.way
            return None
        spec = None
        if explanation.way is not None and explanation.factor == 1.0:
            spec, _ = spec_of_way(known, explanation.way, self.topology, {})
        if cause is not None:
            return self._finding(known, cause, (), 1.0, spec)
        if explanation.way == declared and explanation.factor == 1.0 and not doubtful:
            return None  # moved alone, and along other directions, it is right
        cause, axes = cause_of(known, declared, explanation, self.topology)
        factor = explanation.factor
        if cause == "counted several times" and factor == 1.0:
            factor = float(self.topology.size(*axes))
        if cause in ("divided too often", "added on every rank"):
            factor = 1 / self.topology.size(*axes) if factor == 1.0 else factor
            spec = None
        return self._finding(known, cause, axes, factor, spec)

    def _finding(
        self, known: KnownParameter, cause: Cause, axes: tuple[str, ...], factor: float, spec: P | None
    ) -> Finding:
        return Finding(
            known.label,
            known.module,
            None if self.inferring else known.first.spec,
            spec,
            cause,
            axes,
            factor if factor != 1.0 else None,
            words(cause, axes, factor, spec, None),
        )

    # Where it is wrong ------------------------------------------------------------------------------------------------

    def _place(
        self, order: ForwardOrder, wrong: Sequence[KnownParameter], findings: Sequence[Finding]
    ) -> FaultPlace | None:
        """Of a backward that is wrong for what comes before it, the last such."""
        flowing = {"backward is wrong", "a sum is missing", "counted several times", "divided too often"}
        labels = {finding.name for finding in findings if finding.cause in flowing}
        last = next((known for known in reversed(wrong) if known.label in labels), None)
        several = len({finding.module for finding in findings if finding.name in labels}) > 1
        if last is None or not (several or any(finding.cause == "backward is wrong" for finding in findings)):
            return None
        sites, split = order.until_right(last, wrong), self._split()
        place = first_wrong(self.model, self.differences, sites, split)
        if place is None and split.get(last.module):  # what comes out of its module is right
            into, out = Site(last.module, "input"), Site(last.module, "output")
            return FaultPlace(into, out, "a sum is missing", split[last.module], likely=True)
        return place

    def _split(self) -> dict[str, tuple[str, ...]]:
        """By module, the axes that split its parameters."""
        found: dict[str, tuple[str, ...]] = {}
        for known in self.known:
            apart = tuple(axis for axis in self.ways[known.label].apart if axis in self.topology.model_axes)
            found[known.module] = found.get(known.module) or apart
        return found

    def _placed(self, finding: Finding, place: FaultPlace) -> Finding:
        """With the cause that was found where backward goes wrong, if its own is none."""
        if finding.cause != "backward is wrong":
            return finding
        text = words("backward is wrong", finding.axes, 1.0, None, place.inside)
        return replace(finding, cause=place.cause, axes=place.axes or finding.axes, text=text)

    def _other_forward(self, order: ForwardOrder, axis: str, until: Site | None) -> Examined:
        """Nothing can be proved where ranks compute other things than they should: they begin to, and end at ``until``."""
        last, modules = order.before_unequal(axis, until)
        since = "in nothing" if last is None else f"at {last} for the last time"
        where = f"They agree {since}; what comes then: {', '.join(modules) or 'no module with parameters'}."
        text = words("forward differs", (axis,), 1.0, None, None)
        finding = Finding(
            "the forward", modules[-1] if modules else "", None, None, "forward differs", (axis,), None, text
        )
        left = tuple(known.label for known in self.measured.known)
        return Examined(Proof((), left, (finding,), where, self.objective.calls), {}, self.known)


def _lowest_dtype(model: nn.Module) -> torch.dtype:
    dtypes = {param.dtype for param in model.parameters()} or {torch.float64}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
