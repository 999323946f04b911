"""The first difference of two recorded steps beyond rounding, and its probable cause.

Quantities are compared in the order in which they depend on each other: layout, weight, gradient, decision of the step,
options of param groups, update. The first one that differs is reported, because later ones follow from it. A distance is
estimated from norms and sketches (`rounding.distance`), and is accepted up to these limits:

    d_w       relative distance of all weights together
    weight    2 eps |w| (1 + growth * (step - 1)) + 2 * sum over earlier steps of the accepted distances of updates
    gradient  (tolerance + 10 d_w) * max(|g|, 0.01 * global norm)
    update    (f(largest accepted relative distance of the gradient) + 10 d_w) * |dw| + 2 eps |w|

Optimizers such as Adam divide by the size of an element's gradient. If the gradient of an element is rounding only, its
update may differ completely. So f(d) is ``3 sqrt(d)``, and ``3 d`` for SGD, but at least the tolerance.
If the first compared step is not step 1, the updates before it are not recorded, and its limit for a weight is larger by
``tolerance * |w|``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import hypot, inf, isfinite, prod, sqrt
from typing import Any

from ...parallel.mesh.text import some
from .recording import Figures, RecordedStep
from .rounding import EPS, FLOOR, coarsest, dot, multiple
from .step_pair import AxisMatch, Cause, Difference, StepPair


def first_difference(pair: StepPair) -> Difference | None:
    """Return the first difference of a step, or None. Distances that count as rounding are added to ``pair.accepted``."""
    for compare in (_layout, _weights, _gradients, _decision, _options, _updates):
        found = compare(pair)
        if found is not None:
            return found
    return None


class _Report:
    """Creates the `Difference` of a step and quantity. It names the first parameter, unless the call gives another one."""

    def __init__(self, pair: StepPair, quantity: str, names: Sequence[str]) -> None:
        self.pair, self.quantity, self.names = pair, quantity, tuple(names)

    def __call__(
        self,
        cause: Cause,
        text: str,
        *,
        axis: str | None = None,
        ratio: float | None = None,
        parameter: str | None = None,
    ) -> Difference:
        named = parameter or (self.names[0] if self.names else None)
        return Difference(self.pair.step, self.quantity, named, self.names, cause, axis, ratio, text)


# Layout ---------------------------------------------------------------------------------------------------------------


def _layout(pair: StepPair) -> Difference | None:
    for which, run, other in reversed(pair.sides):
        missing = [name for name in run.names if name not in other.line["parameters"]]
        if missing:
            return _missing(pair, which, missing, [name for name in other.names if name not in run.line["parameters"]])
    shapes = {name: (pair.a.layout(name)["shape"], pair.b.layout(name)["shape"]) for name in pair.names}
    wrong = [name for name, both in shapes.items() if None not in both and both[0] != both[1]]
    if not wrong:
        return None
    a, b = shapes[wrong[0]]
    ratio = prod(b) / max(prod(a), 1)
    axis = _axis_of_shape(pair, wrong[0], ratio)
    text = (
        f"the full shape is {tuple(a)} in A and {tuple(b)} in B, {_shown(ratio)} times as many elements"
        + ("" if axis is None else f", which fits axis {axis}")
        + ": a replica is declared sharded, a shard is declared replicated, or the models differ"
    )
    return _Report(pair, "layout", wrong)("layout", text, axis=axis, ratio=ratio)


def _missing(pair: StepPair, which: str, names: Sequence[str], others: Sequence[str]) -> Difference:
    """Return the difference for ``names``, which only run ``which`` has, and ``others``, which only the other run has."""
    report = _Report(pair, "layout", [*names, *others])
    bases = {name.partition("@")[0] for name in report.names if "@" not in name}
    for name in report.names:
        base, _, place = name.partition("@")
        if place and base in bases:
            text = (
                f"{base} is one parameter in one run, and one per stage in the other run; if the stages share it, declare "
                "it with P(tied=...), else give the stages' parameters different names"
            )
            return report("tied parameter", text, axis=place.partition("=")[0], parameter=base)
    text = (
        f"only run {which} steps {some(names)}: give the other run's optimizer the same parameters, or check the names"
    )
    return report("not in the optimizer", text)


def _axis_of_shape(pair: StepPair, name: str, ratio: float) -> str | None:
    for which, run, _ in pair.sides:
        times = ratio if which == "B" else 1 / ratio if ratio else inf
        for axis in run.axes:
            if times == (run.size(axis) if axis in run.layout(name)["sharded"] else 1 / run.size(axis)):
                return axis
    return None


# Weights --------------------------------------------------------------------------------------------------------------


def _weights(pair: StepPair) -> Difference | None:
    accepted, differing, squares = pair.accepted, list[str](), [0.0, 0.0]
    for name in pair.names:
        if accepted.last_step is not None:
            gap = pair.step - accepted.last_step
            accepted.slack[name] = accepted.slack.get(name, 0.0) + gap * accepted.last_update.get(name, 0.0)
        found, size = pair.distance(name, "weight")
        eps = EPS.get(coarsest(*(_known(run.layout(name)["dtype"]) for _, run, _ in pair.sides)), 1.0)
        growth = 1 + accepted.tolerances.growth * (pair.step - 1)
        limit = 2 * eps * size * growth + 2 * accepted.slack.get(name, 0.0)
        if accepted.last_step is None and pair.step > 1:  # the updates before this step were not recorded
            limit += pair.tolerance(name) * size
        if found > limit:
            differing.append(name)
        elif isfinite(found):
            pair.accept(name, "weight", found / size if size else 0.0)
            squares = [squares[0] + found**2, squares[1] + size**2]
    pair.drift = sqrt(squares[0] / squares[1]) if squares[1] else 0.0
    return _cause_of_weights(pair, pair.by_distance(differing, "weight")) if differing else None


def _known(dtype: str) -> str:
    return dtype if dtype in EPS else "float8"


def _cause_of_weights(pair: StepPair, names: list[str]) -> Difference:
    report = _Report(pair, "weight", names)
    if (found := _non_finite(report)) is not None:
        return found
    if pair.accepted.last_step is not None:
        for which, run, _ in pair.sides:
            name = next((name for name in names if run.differing_axes(name, "weight")), None)
            if name is not None:
                axis = " x ".join(run.differing_axes(name, "weight"))
                text = f"in run {which}, replicas differ along axis {axis}: they were written or stepped differently"
                return report("written weights", text, axis=axis, parameter=name)
        text = (
            f"the updates up to step {pair.accepted.last_step} agree: other code wrote weights (a load, an average, a "
            "broadcast), or the difference arose in a step that was not recorded"
        )
        return report("written weights", text)
    return _permuted(report) or _initial_scale(pair, report) or _seed(pair, report)


def _initial_scale(pair: StepPair, report: _Report) -> Difference | None:
    for name in report.names:
        ratio = pair.multiple(name, "weight")
        if ratio is not None:
            match = pair.axis_of_ratio(ratio, report.names) if ratio > 0 else None
            text = f"before the first recorded step, the weight in B is {_shown(ratio)} times that of A"
            axis = None if match is None else match.axis
            return report("initial scale", text, ratio=ratio, parameter=name, axis=axis)
    # If the runs drew other random numbers, and the norms differ by the square root of the size of a sharding axis, the
    # standard deviation was computed from a shard's shape.
    for name in report.names:
        a, b = (figures.norm for figures in pair.both(name, "weight"))
        spread = 3 / sqrt(pair.numel(name)) + 0.02
        is_scaled = a and b and abs(b / a - 1) > spread
        match = pair.axis_of_ratio(b / a, report.names, spread, ("sqrt t", "1/sqrt t")) if is_scaled else None
        if match is None or match.axis not in pair.run(match.which).layout(name)["sharded"]:
            continue
        text = (
            f"before the first recorded step, the norm in B is {_shown(b / a)} times that of A, about the square root of "
            f"the size of axis {match.axis}: the initial scale was computed from the shape of a shard"
        )
        return report("initial scale", text, ratio=b / a, parameter=name, axis=match.axis)
    return None


def _seed(pair: StepPair, report: _Report) -> Difference:
    seeds, axis = (pair.a.run["seed"], pair.b.run["seed"]), pair.axis_of_shards(report.names, exact=True)
    text = f"before the first recorded step, {len(report.names)} of {len(pair.names)} weights have other values"
    if None not in seeds and seeds[0] != seeds[1]:
        return report("seed", f"{text}, and the recorded seeds differ: {seeds[0]} in A, {seeds[1]} in B")
    if axis is not None:
        text += f", exactly those that are sharded over {axis}: draw full tensors, and keep the shards"
    return report("seed", f"{text}: another seed, or another order of drawing", axis=axis)


def _non_finite(report: _Report) -> Difference | None:
    """Return the difference if a tensor has NaN or infinite elements in one run only."""
    for name in report.names:
        a, b = report.pair.both(name, report.quantity)
        if a.is_finite != b.is_finite:
            run = "A" if b.is_finite else "B"
            text = f"only in run {run}, the {report.quantity} has elements that are NaN or infinite"
            return report("non-finite", text, parameter=name)
    return None


def _permuted(report: _Report) -> Difference | None:
    """Return the difference if a tensor has the same norm in both runs, but other elements."""
    pair, quantity = report.pair, report.quantity
    for name in report.names:
        a, b = pair.both(name, quantity)
        limit = max(pair.tolerance(name) * (1e-2 if quantity == "weight" else 1), 1e-7)
        if not a.norm or abs(a.norm - b.norm) > limit * a.norm or pair.relative(name, quantity) <= 10 * limit:
            continue
        if pair.multiple(name, quantity) is None:
            text = "the norm is the same in both runs, but elements differ: shards or blocks are in another order"
            return report("order", text, parameter=name, axis=pair.only_sharding_axis(name))
    return None


# Gradients ------------------------------------------------------------------------------------------------------------


def _gradients(pair: StepPair) -> Difference | None:
    norms = [run.global_norm for _, run, _ in pair.sides]
    floor = FLOOR * max(norm if isfinite(norm) else 0.0 for norm in norms)
    differing, fine = list[str](), list[tuple[str, float, float]]()
    for name in pair.names:
        found, size = pair.distance(name, "gradient")
        base = max(size, floor)
        if found > (pair.tolerance(name) + 10 * pair.drift) * base:
            differing.append(name)
        elif isfinite(found):
            fine.append((name, found / base if base else 0.0, found / size if size else 0.0))
    if differing:
        return _cause_of_gradients(pair, pair.by_distance(differing, "gradient"))
    noise = pair.accepted.noise
    for name, relative, own in fine:
        pair.accept(name, "gradient", relative)
        noise[name] = max(noise.get(name, 0.0), min(own, 1.0))
    return None


def _cause_of_gradients(pair: StepPair, names: list[str]) -> Difference:
    report = _Report(pair, "gradient", names)
    if (found := _non_finite(report)) is not None:
        return found
    batches = pair.a.line["batch"], pair.b.line["batch"]
    if None not in batches and batches[0] != batches[1]:
        text = (
            "the hashes of the batches differ: the runs saw other samples in this step (another order or seed of the data, "
            "or data ranks that read the same or too few samples)"
        )
        return report("batch", text)
    zero = [name for name in names if 0.0 in (figures.norm for figures in pair.both(name, "gradient"))]
    if zero:
        which = "A" if pair.both(zero[0], "gradient")[0].norm == 0 else "B"
        text = (
            f"only in run {which}, the gradient of {some(zero)} is zero or missing: the parameter is frozen, not used, "
            "detached, or not the one that the model computes with"
        )
        return report("no gradient", text, parameter=zero[0])
    return _replicas(pair, report) or _factor(pair, report) or _other_terms(pair, report, batches[0] is not None)


def _replicas(pair: StepPair, report: _Report) -> Difference | None:
    """Return the difference if replicas of a gradient differ along an axis in one run only."""
    for which, run, other in pair.sides:
        own = [name for name in report.names if run.differing_axes(name, "gradient")]
        own = [name for name in own if not other.differing_axes(name, "gradient")]
        if not own:
            continue
        # A parameter shows the cause best if the mean of its replicas' gradients is a multiple of the other run's gradient.
        name = next((name for name in own if pair.multiple(name, "gradient") is not None), own[0])
        ratio, axes = pair.multiple(name, "gradient"), run.differing_axes(name, "gradient")
        axis, size = " x ".join(axes), prod(map(run.size, axes))
        if {run.role(one) for one in axes} == {"data"}:
            text = f"in run {which}, the gradient differs between the ranks of axis {axis}: it was not averaged over {axis}"
            return report("not averaged", text, axis=axis, ratio=ratio, parameter=name)
        of_right = None if not ratio else ratio if which == "B" else 1 / ratio
        replicated = {name for name in pair.names if not {*axes} & {*run.layout(name)["distinct"]}}
        is_everywhere = pair.is_all(report.names) and replicated <= {*own}
        if of_right is None:
            scaled = is_everywhere and _are_similar(pair)
        else:
            scaled = abs(of_right * size - 1) > max(3 * pair.tolerance(name), 1e-3)
        if scaled:
            text = (
                f"in run {which}, the ranks of axis {axis} multiplied their gradients by different factors, such as the "
                "clip coefficients of local norms"
            )
            return report("clipped before", text, axis=axis, ratio=ratio, parameter=name)
        if of_right is None and is_everywhere:
            text = (
                f"in run {which}, all gradients differ between the ranks of axis {axis}, also those near the loss: a sum "
                f"over {axis} is missing in forward, or the ranks have different inputs"
            )
            return report("missing sum", text, axis=axis, parameter=name)
        text = f"in run {which}, replicas along axis {axis} have different gradients: the sum over {axis} is missing"
        if of_right is not None:
            text += f"; their mean is 1/{size} of the gradient of the other run"
        return report("missing sum", text, axis=axis, ratio=ratio, parameter=name)
    return None


def _are_similar(pair: StepPair) -> bool:
    """Return True if all gradients of B are similar multiples of the gradients of A, with factors that are not near 1.

    Each gradient of B must be nearly parallel to that of A (cosine >= 0.9). The norm ratios B/A must differ by a factor
    below 2.5, and all must be above 1.1 or all below 0.9.
    """
    ratios = []
    for name in pair.names:
        a, b = pair.both(name, "gradient")
        lengths = hypot(*a.sketch) * hypot(*b.sketch)
        if not lengths or dot(a.sketch, b.sketch) < 0.9 * lengths:
            return False
        ratios.append(b.norm / a.norm)
    return max(ratios) < 2.5 * min(ratios) and (max(ratios) < 0.9 or min(ratios) > 1.1)


def _factor(pair: StepPair, report: _Report) -> Difference | None:
    """Return the difference if gradients of B are multiples of the same gradients of A."""
    factors = {name: found for name in report.names if (found := pair.multiple(name, "gradient")) is not None}
    if not factors:
        return None
    # If factors differ, the one nearest to 1 shows the cause: backward may apply a mistake to a gradient several times.
    name = min(factors, key=lambda one: abs(factors[one] - 1))
    alike = [one for one in factors if abs(factors[one] / factors[name] - 1) < 10 * max(pair.tolerance(one), 1e-4)]
    if len(alike) == 1 and len(factors) < len(report.names) and len(pair.names) > 3:
        return None
    return _cause_of_factor(pair, report, factors[name], name)


def _other_terms(pair: StepPair, report: _Report, same_batch: bool) -> Difference:
    """Return the difference for gradients that are no multiples of each other."""
    if not pair.is_all(report.names):
        if (found := _permuted(report)) is not None:
            return found
        axis = pair.axis_of_shards(report.names, exact=True)
        model_axes = sorted({one for _, run, _ in pair.sides for one in run.axes if run.role(one) == "model"})
        where = f" over axis {axis}" if axis else f" (a sum over {' or '.join(model_axes)}?)" if model_axes else ""
        text = (
            f"{len(report.names)} of {len(pair.names)} gradients differ without a common factor, and the others agree: "
            f"terms of a sum are missing or added in backward{where}, before the first layer whose parameters agree"
        )
        return report("partial sum", text, axis=axis)
    text = "all gradients differ without a common factor, with equal weights"
    if not same_batch:
        text += (
            ": the runs saw other samples, or the forward pass or the loss differs; record batches with recorder.batch() "
            "to tell them apart"
        )
        return report("batch", text)
    text += (
        " and the same batch: the forward pass, the loss or the weights of samples differ (a missing sum in forward, other "
        "masks, a mean of means, dropout), or gradients of some samples are missing"
    )
    return report("forward", text)


# Factors --------------------------------------------------------------------------------------------------------------


def _cause_of_factor(pair: StepPair, report: _Report, ratio: float, name: str) -> Difference:
    """Return the difference for gradients or updates of B that are multiples of the same tensors of A.

    ``name`` is the parameter that shows the cause, and ``ratio`` its ratio.
    """
    limit = max(3 * pair.tolerance(name), 1e-3)
    match = pair.axis_of_ratio(ratio, report.names, limit) if ratio > 0 else None
    cause, text, axis = (
        ("sign", "the signs differ", None)
        if ratio < 0
        else next(_explanations(pair, report, ratio, limit, match), ("scaled", "no axis has this size", None))
    )
    text = f"the {report.quantity} in B is {_shown(ratio)} times that of A: {text}"
    return report(cause, text, axis=axis, ratio=ratio, parameter=name)


Explanation = tuple[Cause, str, "str | None"]


def _explanations(
    pair: StepPair, report: _Report, ratio: float, limit: float, match: AxisMatch | None
) -> Iterator[Explanation]:
    """Yield (cause, text, axis) for each explanation of a ratio, the most probable explanation first.

    ``limit`` is the relative tolerance with which the ratio is compared with loss scales and other numbers. ``match``
    is the mesh axis whose size explains the ratio (`StepPair.axis_of_ratio`).
    """
    is_common = pair.is_all(report.names) and report.quantity == "gradient"
    if is_common:
        yield from _scales(pair, ratio, limit)
    if match is not None and "sqrt" not in match.kind:
        run, axis, only_data = match.which, match.axis, match.roles == {"data"}
        if match.kind == "t":
            how = "summed, not averaged" if only_data else "summed once more in backward"
            yield "counted several times", f"run {run} counts it {match.size} times over axis {axis} ({how})", axis
        elif only_data:
            yield "averaged twice", f"run {run} divides by the size of axis {axis} once more", axis
        else:
            yield "missing sum", f"run {run} has a mean over axis {axis} instead of the sum, or lacks the sum", axis
    for which, step, _ in pair.sides:
        coef = step.line["clip_coef"]
        if coef and abs(coef - 1) > limit and _is_near(ratio, coef if which == "A" else 1 / coef, limit):
            other = "B" if which == "A" else "A"
            yield (
                "clipped before",
                f"this is the clip coefficient of run {which}, so run {other} has clipped its gradients before step()",
                None,
            )
    if match is not None:
        yield (
            "scaled",
            f"run {match.which} has the factor {match.kind}, where t = {match.size} is the size of axis {match.axis}",
            match.axis,
        )
    which, step, _ = pair.sides[0 if ratio < 1 else 1]  # the run with the smaller gradients: B if ratio < 1
    norm = step.global_norm
    if is_common and any(abs(norm / value - 1) < 1e-4 for value in (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)):
        text = f"the global norm of run {which} is {norm:.4g}, so its gradients were probably clipped before step()"
        yield "clipped before", text, None


def _scales(pair: StepPair, ratio: float, limit: float) -> Iterator[Explanation]:
    """Yield the explanations of a ratio by loss scales and numbers of micro-batches. Arguments as in `_explanations`."""
    for which, run, other in pair.sides:
        own, after = run.line["loss_scale"], None if run.following is None else run.following["loss_scale"]
        of_run = ratio if which == "B" else 1 / ratio
        is_changed = own and after and own != after and pair.accepted.last_step is not None
        if is_changed and _is_one_of(of_run, own / after, limit):
            text = f"run {which} changed its loss scale from {own:g} to {after:g} in this step, before it removed the scale"
            yield "loss scale", text, None
        if own and own != 1 and _is_one_of(of_run, own, limit):
            yield "loss scale", f"run {which} has the loss scale {own:g}, which is not removed, or removed twice", None
        if own and (scale := other.line["loss_scale"]) and own != scale and _is_one_of(of_run, own / scale, limit):
            yield (
                "loss scale",
                f"the loss scales, {own:g} in run {which} and {scale:g} in the other, have this ratio",
                None,
            )
        count = run.line["micro_batches"]
        if count > 1 and count != other.line["micro_batches"] and _is_one_of(of_run, count, limit):
            how = "sums them, and does not average" if of_run > 1 else "divides by their number twice"
            yield "micro-batches", f"run {which} has {count} micro-batches per step, and {how}", None


def _is_near(ratio: float, value: float, limit: float) -> bool:
    return abs(ratio / value - 1) <= limit


def _is_one_of(ratio: float, value: float, limit: float) -> bool:
    return _is_near(ratio, value, limit) or _is_near(ratio, 1 / value, limit)


# Decision of the step, and options of param groups --------------------------------------------------------------------


def _decision(pair: StepPair) -> Difference | None:
    report = _Report(pair, "decision", ())
    skipped = pair.a.line["skipped"], pair.b.line["skipped"]
    if None not in skipped and skipped[0] != skipped[1]:
        return report("skipped", f"only run {'A' if skipped[0] else 'B'} skipped this step, although gradients agree")
    a, b = pair.a.line["clip_coef"], pair.b.line["clip_coef"]
    if skipped[0] or None in (a, b) or not (isfinite(a) and isfinite(b)):
        return None
    limit = max(map(pair.tolerance, pair.names), default=1e-4) + 10 * pair.drift
    if abs(a - b) <= limit * max(a, b):
        return None
    ratio = b / a if a else inf
    rules = pair.a.run["max_norm"], pair.b.run["max_norm"]
    said = f"gradients agree, but the clip coefficient is {a:.6g} in A and {b:.6g} in B"
    if rules[0] != rules[1]:
        return report("clip threshold", f"{said}: max_norm={rules[0]} in A and max_norm={rules[1]} in B", ratio=ratio)
    for which, run, _ in pair.sides:
        true = run.global_norm
        for used in _norms_used(run):
            if true and isfinite(used) and abs(used / true - 1) > limit:
                axis, why = _axis_of_norm(run, used, true, limit)
                text = (
                    f"{said}: run {which} clips by the norm {used:.6g}, but its gradients have the norm {true:.6g}{why}"
                )
                return report("clip norm", text, ratio=ratio, axis=axis)
    return report(
        "clip threshold", f"{said}, with the same max_norm={rules[0]}: thresholds or states differ", ratio=ratio
    )


def _norms_used(run: RecordedStep) -> Iterator[float]:
    """Yield the norm that a run reported, and max_norm / clip coefficient if max_norm is a number and the step clipped."""
    if run.line["grad_norm"]:
        yield run.line["grad_norm"]
    try:
        threshold = float(run.run["max_norm"])
    except ValueError:
        return
    if 0 < run.line["clip_coef"] < 1:
        yield threshold / run.line["clip_coef"]


def _axis_of_norm(run: RecordedStep, used: float, true: float, limit: float) -> tuple[str | None, str]:
    """Return the axis that explains why a run clips by the norm ``used`` instead of ``true``, and the explanation."""
    squares = {name: figures["gradient"].norm ** 2 for name, figures in run.figures.items()}
    for axis in run.axes:
        size = run.size(axis)
        copies = sum(value for name, value in squares.items() if axis not in run.layout(name)["distinct"])
        for squared, text in (
            (true**2 + (size - 1) * copies, f": it counts replicas over axis {axis} {size} times"),
            (true**2 * size, f": it counts all gradients {size} times over axis {axis}"),
            (true**2 / size, f": it has 1/{size} of the squares, as if it were divided over axis {axis}"),
        ):
            if abs(used**2 / squared - 1) <= 2 * limit:
                return axis, text
    return None, ""


def _options(pair: StepPair) -> Difference | None:
    differing: dict[str, list[str]] = {}
    for name in pair.names:
        a, b = pair.a.options(name), pair.b.options(name)
        for key in a:
            if key in b and not _is_same_option(a[key], b[key]):
                differing.setdefault(key, []).append(name)
    if not differing:
        return None
    key = next((key for key in ("lr", "weight_decay") if key in differing), next(iter(differing)))
    names = differing[key]
    report, a, b = _Report(pair, "option", names), pair.a.options(names[0])[key], pair.b.options(names[0])[key]
    is_ratio = isinstance(a, (int, float)) and isinstance(b, (int, float)) and a * b > 0
    ratio: float | None = b / a if is_ratio else None
    if key == "lr":
        match = None if ratio is None else pair.axis_of_ratio(ratio, pair.names, 1e-6)
        text = f"the learning rate is {_number(a)} in A and {_number(b)} in B"
        if match is not None:
            text += (
                f"; run {match.which} has {match.kind} times the other rate, where t = {match.size} is the size of "
                f"axis {match.axis}"
            )
        return report("learning rate", text, axis=None if match is None else match.axis, ratio=ratio)
    if key == "weight_decay":
        text = (
            f"the weight decay of {some(names)} is {_number(a)} in A and {_number(b)} in B: the parameters are in other "
            "param groups, or the option differs"
        )
        return report("weight decay", text, ratio=ratio)
    return report("hyper-parameter", f"the option {key} is {a} in A and {b} in B", ratio=ratio)


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _is_same_option(a: object, b: object) -> bool:
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a == b or abs(a - b) <= 1e-6 * max(abs(a), abs(b))
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_same_option, a, b))
    return a == b


# Updates --------------------------------------------------------------------------------------------------------------


def _updates(pair: StepPair) -> Difference | None:
    is_linear = pair.a.run["optimizer"] == pair.b.run["optimizer"] == ["SGD"]
    differing, fine = list[str](), list[tuple[str, float, float]]()
    for name in pair.names:
        found, size = pair.distance(name, "update")
        noise = pair.accepted.noise.get(name, 0.0)
        relative = max(pair.tolerance(name), 3 * noise if is_linear else 3 * sqrt(noise)) + 10 * pair.drift
        eps = max(EPS[_known(run.layout(name)["stepped"])] for _, run, _ in pair.sides)
        if found > relative * size + 2 * eps * pair.distance(name, "weight")[1]:
            differing.append(name)
        elif isfinite(found):
            fine.append((name, found, size))
    if differing:
        return _cause_of_updates(pair, pair.by_distance(differing, "update"))
    for name, found, size in fine:
        pair.accept(name, "update", found / size if size else 0.0)
        pair.accepted.last_update[name] = found
    return None


def _cause_of_updates(pair: StepPair, names: list[str]) -> Difference:
    report = _Report(pair, "update", names)
    if (found := _non_finite(report)) is not None:
        return found
    for name in names:
        a, b = pair.both(name, "update")
        if 0.0 in (a.norm, b.norm):
            text = f"only in run {'A' if a.norm == 0 else 'B'}, the update is zero, although gradients agree"
            return report("not stepped", text, parameter=name)
    optimizers = pair.a.run["optimizer"], pair.b.run["optimizer"]
    if optimizers[0] != optimizers[1]:
        text = (
            f"gradients agree; the optimizer is {' + '.join(optimizers[0])} in A and {' + '.join(optimizers[1])} in B"
        )
        return report("other optimizer", text)
    for name in names:
        decay = _decay(pair, name)
        if decay is not None:
            text = f"the updates differ by {decay:.3g} times the weight: weight decay on other parameters, or twice"
            return report("weight decay", text, parameter=name)
    axis = pair.axis_of_shards(names, exact=False)
    if axis is not None:
        text = (
            f"gradients agree, and only parameters that are sharded over {axis} differ: the optimizer needs full tensors "
            "(a norm, or a matrix), but was applied to shards"
        )
        return report("update of shards", text, axis=axis)
    factors = [factor for name in names if (factor := pair.multiple(name, "update")) is not None]
    if not factors or len(factors) < len([name for name in names if pair.numel(name) > 1]):
        text = (
            "weights, gradients and options agree: the optimizer state differs (lost or not loaded in one run, or other "
            "step counts), or the formula of the update"
        )
        return report("optimizer state", text)
    ratio = factors[0]
    if not pair.is_all(names) or any(abs(factor / ratio - 1) > 0.05 for factor in factors):
        return _cause_of_factor(pair, report, ratio, names[0])
    said = f"gradients agree, and the update in B is {_shown(ratio)} times that of A"
    if any(run.line["loss_scale"] for _, run, _ in pair.sides) and _is_one_of(ratio, 2.0, 0.01):
        return report("loss scale", f"{said}: the loss scale was updated before it was removed", ratio=ratio)
    match = pair.axis_of_ratio(ratio, names) if ratio > 0 else None
    text = f"{said}: the learning rate or the clip coefficient differs where the recorder does not see it"
    return report("learning rate", text, ratio=ratio, axis=None if match is None else match.axis)


def _decay(pair: StepPair, name: str) -> float | None:
    """Return c if the updates of a parameter differ by c times its weight; None if they do not."""
    weight, (a, b) = pair.a.figures[name]["weight"], pair.both(name, "update")
    if pair.numel(name) < 4 or not (weight.norm and weight.sketch and a.sketch and b.sketch):
        return None
    change = tuple(y - x for x, y in zip(a.sketch, b.sketch, strict=True))
    return multiple(Figures(hypot(*weight.sketch), None, weight.sketch), Figures(hypot(*change), None, change), 1e-2)


def _shown(ratio: float) -> str:
    nearest = round(1 / ratio) if 0 < ratio < 1 else 0
    return f"1/{nearest}" if nearest > 1 and abs(ratio * nearest - 1) < 1e-4 else f"{ratio:.6g}"
