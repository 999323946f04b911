"""From the measured norms to what is done with the gradients.

    gradient to step with = gradient as it is * inverse * factor,      factor = rule(norms * inverse, what it remembers)
    inverse = D / W / loss scale

Gradients were multiplied by the loss scale, and divided by the number D of data ranks in place of the window's weight W
(without weights: of D times the micro-batches that make one mean). A rule sees the norms of the gradients as they will be
stepped with, and so does whoever reads the report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...parallel.layout.regions import Region
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..gradients.in_place import keep_complete_marks, scale_each, widen_gradients
from ..kernels.device_constants import Constants
from ..norm.global_norm import GlobalNorm
from ..norm.groupings import Named, UnitDim, Units
from ..norm.measure import CheckReplicas, Commit, Fingerprints, GradStats, Level, Norms, Reduction
from ..norm.packed_sum import PackedSum
from ..norm.plan import ReductionPlan
from ..norm.replicas import EqualShards, FingerprintMonitor, ReplicaCheck, ReplicaMismatchError
from .rule import NOTHING, ByNorm, Clip, ClipState, Decision, checked_threshold
from .rules import ByGroup, ByValue

# Votes on a step ------------------------------------------------------------------------------------------------------

# What ranks say of a step besides their gradients, in the collective that measures: whether it is to be made at all.


class SkipVote:
    """One rank's say, and the outcome; the same on all ranks.

    Args:
        commit: Asked on each rank, once for each update.
        watch: Of copies.
        device: Where votes are counted.

    Attributes:
        problem: What `commit` raised on this rank, or was wrong with its answer, in the last round: a veto elsewhere.
    """

    def __init__(self, commit: Commit | None, watch: FingerprintMonitor | None, device: torch.device) -> None:
        self.commit, self.watch, self.device = commit, watch, device
        self.problem: Exception | None = None

    def fields(self, gradients: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Return this rank's part of the packed sum: ``"veto"``, and ``"fingerprints"``, by number. Host reads: none."""
        votes = {} if self.commit is None else {"veto": self._vote(self.commit).view(1)}
        fingerprints = [] if self.watch is None else self.watch.slots(gradients)
        return votes | {f"fingerprints {index}": values for index, values in enumerate(fingerprints)}

    def _vote(self, commit: Commit) -> Tensor:
        """0-dim: 1 against the step, else 0."""
        self.problem = None
        try:
            answer = commit()
            if isinstance(answer, Tensor) and answer.dtype == torch.bool and answer.dim() == 0:
                if not answer.is_cpu:
                    return answer.logical_not().to(self.device, torch.float64, non_blocking=True)
                answer = bool(answer)  # it is here, and nobody waits
            if not isinstance(answer, bool):
                raise TypeError(f"commit= returned {answer!r}: return True or False, or a 0-dim tensor of dtype bool")
        except Exception as error:  # the others are in the collective, or will be
            self.problem, answer = error, False
        return torch.full((), float(not answer), dtype=torch.float64, device=self.device)

    def count(self, sums: Mapping[str, Tensor], finite: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(vetoed, parted), each 0-dim float32, from the sums of `fields`.

        Args:
            finite: 0-dim bool: the gradients' norm is.
        """
        vetoed = None
        if self.commit is not None:
            vetoed = (sums["veto"][0] > 0).float()
        if self.watch is None:
            return vetoed, None
        self.watch.look([values for name, values in sums.items() if name.startswith("fingerprints")], finite)
        return vetoed, self.watch.parted


# Multiply gradients by clip coefficients ------------------------------------------------------------------------------


def multiply_(
    gradients: Sequence[Tensor | None],
    level: Level,
    factors: Tensor,
    plan: ReductionPlan,
    units: Units | None = None,
    named: Named | None = None,
) -> None:
    """Multiply gradients, one for each entry of the plan, by factors at that level, in place. Host reads: none."""
    if level == "total":
        scale_each(gradients, factors)
    elif level == "units" and units is not None:
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                units.multiply_(index, gradient, factors)
    else:
        if torch.float64 not in {gradient.dtype for gradient in gradients if gradient is not None}:
            factors = factors.float()  # once, and not for each
        together: dict[int, list[Tensor | None]] = {}
        for slot, gradient in zip(_slots(level, plan, named), gradients, strict=True):
            together.setdefault(slot, []).append(gradient)
        for slot, members in together.items():
            scale_each(members, factors[slot])


def _slots(level: Level, plan: ReductionPlan, named: Named | None) -> Sequence[int]:
    """For each entry of the plan the place of its factor."""
    if level == "groups":
        return [entry.group for entry in plan.entries]
    if named is not None:
        return [named.groups[slot] for slot in plan.parameter_slots]
    return plan.parameter_slots


# The decision of a step, and the scale that is still in its gradients -------------------------------------------------


class StepDecision(NamedTuple):
    """What a step does: it skips where ``skipped`` is 1, else multiplies all gradients by ``factor`` (None: by 1, or it
    has been done).

    Args:
        skipped: ``stats.skipped``.
        past: 0-dim bool: it skips because gradients came past `backward`. None: they may come as they like.
        problem: What ``commit=`` raised on this rank.
    """

    stats: GradStats
    skipped: Tensor
    factor: Tensor | None
    past: Tensor | None = None
    problem: Exception | None = None

    def after(self, earlier: StepDecision) -> StepDecision:
        """Of a second clip in one window, which must not hide what the first one found."""
        found_inf = torch.maximum(self.stats.found_inf, earlier.stats.found_inf)
        said = {name: getattr(earlier.stats, name) for name in ("vetoed", "parted", "spiked")}
        disagreed, before = self.stats.disagreed, earlier.stats.disagreed
        if disagreed is None or before is None:
            disagreed = before if disagreed is None else disagreed
        else:
            disagreed = disagreed | before
        stats = replace(self.stats, found_inf=found_inf, disagreed=disagreed, **said)
        return self._replace(stats=stats, skipped=stats.skipped, factor=None, problem=earlier.problem)


class GradScaleInfo(NamedTuple):
    """What gradients are to be divided by, which only the sum over all ranks tells.

    Args:
        pack: Summed over all ranks in the collective that measures. It may have these fields:
            ``"window_weight"``: the window's weight by pipeline stage, see `window_fields`;
            ``"agreement"``: 0 where ranks agree, see `StepAgreement`;
            ``"bypassed"``: negative where gradients must not be stepped with: their loss was not scaled, say.
        scale: The loss scale that is still in them; None: there is none, or it has been undone.
        is_weighted: Divide by the window's weight, or by ``mean_of`` where no rank gave a weight.
        data_ranks: The number of ranks over which gradients have been averaged.
        loss_scale: The scale that backward multiplied by, for the report.
        mean_of: The number of micro-batches whose mean the window's gradient is.
    """

    pack: PackedSum
    scale: Tensor | None = None
    is_weighted: bool = False
    data_ranks: int = 1
    loss_scale: Tensor | None = None
    mean_of: int = 1


# Thresholds of param groups -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AgreedThresholds:
    """``max_norm`` by param group of the whole model. A pipeline stage that has fewer groups clips by the same norms.

    Args:
        values: One for each group; None: the group has no threshold of its own.
        everywhere: All ranks have all groups.
    """

    values: tuple[float | None, ...]
    everywhere: bool

    @cached_property
    def some(self) -> bool:
        """Whether any group has one."""
        return any(value is not None for value in self.values)

    def now(self, param_groups: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """The thresholds, with those of this rank's groups as they are now.

        Raises:
            ValueError: One was changed, of which ranks without the group would not know.
        """
        own = [group.get("max_norm") for group in param_groups]
        if not self.everywhere and own != list(self.values[: len(own)]):
            before = list(self.values[: len(own)])
            raise ValueError(
                f"max_norm of the param groups is {own} and was {before} when the optimizer was made; "
                "other pipeline stages have fewer groups and would clip by the old ones: make the optimizer anew"
            )
        return own + list(self.values[len(own) :])

    def rule(self, clip: Clip | None, param_groups: Sequence[Mapping[str, Any]], norm_type: float) -> Clip | None:
        """``clip``, with the thresholds of single groups in it; raises as `now` and `check_thresholds`.

        Args:
            norm_type: The p of the norms.
        """
        check_thresholds(clip, param_groups)
        thresholds = self.now(param_groups)
        if not any(threshold is not None for threshold in thresholds):
            # The others' norm is made of norms, with their p.
            return replace(clip, norm_type=norm_type) if isinstance(clip, ByGroup) else clip
        others = clip.max_norm if isinstance(clip, ByNorm) else None
        return ByGroup(tuple(thresholds), others, norm_type, clip.clip_value if isinstance(clip, ByValue) else None)


def check_thresholds(clip: Clip | None, param_groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for thresholds of param groups that are out of range, or don't go with the rule."""
    for index, group in enumerate(param_groups):
        if group.get("max_norm") is not None:
            checked_threshold(group["max_norm"], f"max_norm of param group {index}", infinite=True)
            if not isinstance(clip, ByNorm | ByValue | None):
                raise ValueError(
                    f"param group {index} has a max_norm of its own, and max_norm={clip!r} is a rule for all groups; give "
                    "one of them"
                )


def agreed_thresholds(by_rank: Sequence[Sequence[Any]]) -> AgreedThresholds:
    """What all ranks say about the thresholds.

    Args:
        by_rank: The ``max_norm`` of each param group, or None, as each rank has it.
    Raises:
        ValueError: Two say different things about one group.
    """
    longest = max(by_rank, key=len)
    for rank, own in enumerate(by_rank):
        for index, value in enumerate(own):
            if value != longest[index]:
                raise ValueError(
                    f"max_norm of param group {index} is {value} on rank {rank} and {longest[index]} on another: give the "
                    "groups of all ranks the same"
                )
    return AgreedThresholds(tuple(longest), all(len(own) == len(longest) for own in by_rank))


# Measure gradients and apply a clip rule ------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasurementSpec:
    """What one measurement needs besides the total and the groups; the key under which its `GlobalNorm` is kept."""

    norm_type: float
    level: Level = "total"
    weights: bool = False
    unit_dim: UnitDim = 0
    patterns: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash((self.norm_type, self.level, self.weights, repr(self.unit_dim), self.patterns))

    @classmethod
    def of(cls, clip: Clip | None, norm_type: float) -> MeasurementSpec:
        """What a rule needs, with the p of the norms."""
        if clip is None:
            return cls(norm_type)
        return cls(norm_type, clip.level, clip.weights, clip.unit_dim, clip.patterns)


class GradientClipper:
    """Measures gradients, in one collective, and applies a rule to them.

    Args:
        params: The tensors whose gradients are stepped with, in the order of the plan's entries.
        regions: For each of them which part of the logical tensor it is; None where pieces are of unequal sizes.
        plan: Agreed by all ranks.
        registry: The groups.
        thresholds: Those of single param groups.
        optimizer: Its param groups may have them.
        checks: Of copies, in the first measurement or in all; the first one of what is measured, gradients too.
        vote: What else ranks say there.
        shards: The comparison of shards in the first measurement, with the first of ``checks``; None: not compared.
        norm_type: The p of the norms, unless a rule has its own.
        reduction: As in `GlobalNorm`.
        per_parameter_norms: Report the norm of every logical parameter.
        check_replicas: As in `ParallelOptimizer`. True: make ``checks`` in every measurement, not only until one has
            compared.

    Attributes:
        checks: Those that are still to be made.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        regions: Sequence[Region | None],
        plan: ReductionPlan,
        registry: ProcessGroupRegistry,
        thresholds: AgreedThresholds,
        optimizer: torch.optim.Optimizer,
        checks: Sequence[ReplicaCheck] = (),
        vote: SkipVote | None = None,
        shards: EqualShards | None = None,
        *,
        norm_type: float = 2.0,
        reduction: Reduction = "packed",
        per_parameter_norms: bool = False,
        check_replicas: CheckReplicas = False,
    ) -> None:
        self.params, self.plan, self.registry = list(params), plan, registry
        self.norm_type, self._reduction = norm_type, reduction
        self._per_parameter_norms, self._check_replicas = per_parameter_norms, check_replicas
        self.thresholds, self.optimizer = thresholds, optimizer
        self._regions, self.checks, self.vote = list(regions), list(checks), vote
        self._shards = shards if self.checks else None
        self._measurers: dict[MeasurementSpec, GlobalNorm] = {}
        self._named: dict[tuple[str, ...], Named] = {}
        self._constants = Constants()
        self._one: Tensor | None = None

    def replan(self, plan: ReductionPlan) -> None:
        """The same plan, of which more is known now."""
        self.plan = plan
        self._measurers.clear()
        self._named.clear()

    def not_captured(self) -> Iterator[str]:
        """Yield the reasons why a step can't be captured in a CUDA graph with what it measures."""
        if self.vote is not None and self.vote.commit is not None:
            yield "commit= is asked in Python: leave it out, and decide before a replay"
        if isinstance(self._check_replicas, Fingerprints):
            yield "check_replicas=Fingerprints(...) counts steps in Python: leave it out"
        elif self._check_replicas is True:
            yield "check_replicas=True reads what it compared: leave it out, copies are compared in the first step"
        elif self.checks:
            yield "copies have not been compared yet, in a step that was not skipped: make some steps more without a graph"

    def start_over(self) -> None:
        """Other weights and states are there now."""
        if self.vote is not None and self.vote.watch is not None:
            self.vote.watch.start_over()

    def __call__(
        self,
        clip: ClipState | None,
        scale_info: GradScaleInfo,
        *,
        now: bool = False,
        earlier: StepDecision | None = None,
        captured: bool,
    ) -> StepDecision:
        """What is done with the gradients; it has been done where it is not one factor for all.

        Args:
            clip: The rule, which remembers this step unless it is skipped by others than itself; None: measure only.
            scale_info: What is still in the gradients.
            now: Unscale and clip in place, even where the factor could be folded into the update.
            earlier: Of the same window, in which ranks have had their say.
            captured: A CUDA graph is made of it.
        Raises:
            ValueError: A group's threshold was changed, of which other ranks would not know.
            ReplicaMismatchError: On every rank, if copies are compared and differ.
            ValueError: On every rank, in the first measurement, if shards of a parameter are copies.
        Collectives: one. Host reads: none, unless copies are compared.
        """
        given = None if clip is None else clip.rule
        norm_type = self.norm_type if given is None or given.norm_type is None else given.norm_type
        vote = self.vote if earlier is None else None
        rule = self._with_thresholds(given, norm_type, scale_info.pack, vote)
        needs = MeasurementSpec.of(rule, norm_type)
        norms, inverse, sums = self._unscaled(needs, scale_info, vote)
        finite, past = norms.total < inf, None  # not where it is NaN
        if "bypassed" in sums:
            past = (sums["bypassed"][0] < 0) & (norms.total != 0)  # states are also made by gradients of zeros
            finite = finite & ~past
        vetoed, parted = (None, None) if vote is None else vote.count(sums, finite)
        disagreed = sums["agreement"][0] != 0 if "agreement" in sums else None
        clip_result = Decision(None)
        if rule is not None:
            state = ClipState(rule) if clip is None else clip
            clip_result = state.decide(norms, rule) if captured or state.initial else rule.decide(norms, NOTHING)
            if clip_result.state:
                state.remember(clip_result, _is_taken(finite, vetoed, parted, disagreed))
        factors, one = clip_result.factors, self._one
        if one is None or one.device != norms.total.device:  # in the first step: a graph must not make it
            one = self._one = self._constants("one", lambda: [1.0], norms.total.dtype, norms.total.device)[0]
        factor: Tensor | None = inverse
        level: Level = "total"
        if rule is None or factors is None:
            coef = torch.ones_like(norms.total)
        else:
            shown = rule.shown(factors, norms)
            coef = safe = torch.where(finite, factors, one)
            if shown is not factors:
                coef = torch.where(finite, shown, one)
            factor, level = safe if inverse is None else safe * inverse, rule.level
        if factor is not None and (now or level != "total" or (rule is not None and rule.in_place)):
            self._multiply_(needs, level, factor)
            factor = None
        if rule is not None and rule.in_place:
            rule.finish_(self.params)
        spiked, names = clip_result.spiked(finite), self.plan.parameter_names if self._per_parameter_norms else ()
        stats = GradStats(
            total_norm=norms.total,
            clip_coef=coef,
            found_inf=torch.logical_not(finite, out=torch.empty((), dtype=torch.float32, device=finite.device)),
            group_norms=norms.groups,
            loss_scale=None if scale_info.loss_scale is None else scale_info.loss_scale.clone(),
            parameter_norms=dict(zip(names, norms.parameters.unbind(), strict=True)) if names else {},
            vetoed=vetoed,
            parted=parted,
            spiked=spiked,
            named_norms=dict(zip(needs.patterns, norms.named.unbind(), strict=False)) if needs.patterns else {},
            disagreed=disagreed,
        )
        if vetoed is parted is spiked is None:
            skipped = stats.found_inf if disagreed is None else torch.maximum(stats.found_inf, disagreed)
        else:
            skipped = stats.skipped
        decision = StepDecision(stats, skipped, factor, past, None if vote is None else vote.problem)
        return decision if earlier is None else decision.after(earlier)

    def _with_thresholds(
        self, clip: Clip | None, norm_type: float, pack: PackedSum, vote: SkipVote | None
    ) -> Clip | None:
        """The rule, with the thresholds of single param groups in it."""
        groups = self.optimizer.param_groups
        if not (
            self.thresholds.some or isinstance(clip, ByGroup) or any(g.get("max_norm") is not None for g in groups)
        ):
            return clip
        try:
            return self.thresholds.rule(clip, groups, norm_type)
        except ValueError:
            self._measured(MeasurementSpec(norm_type), pack, vote)  # as the other ranks do, which must not wait
            raise

    # Measuring -------------------------------------------------------------------------------------------------------

    def _unscaled(
        self, needs: MeasurementSpec, scale_info: GradScaleInfo, vote: SkipVote | None
    ) -> tuple[Norms, Tensor | None, Mapping[str, Tensor]]:
        """Return the norms of the gradients as they will be stepped with; ``inverse``; the sums of the packed fields."""
        norms, sums = self._measured(needs, scale_info.pack, vote)
        inverse = None if scale_info.scale is None else scale_info.scale.to(norms.extra).reciprocal()
        if scale_info.is_weighted:
            weight = inverse_weight(sums["window_weight"], scale_info.data_ranks, scale_info.mean_of)
            inverse = weight if inverse is None else weight * inverse
        if inverse is None:
            return norms, None, sums
        inverse = inverse.to(norms.total)
        total = norms.total * inverse
        groups = total.view(1) if norms.groups.numel() == 1 else norms.groups * inverse
        norms = norms._replace(total=total, groups=groups)
        for level in ("parameters", "units", "named"):
            if (values := getattr(norms, level)).numel():  # a kernel would multiply nothing too
                norms = norms._replace(**{level: values * inverse})
        return norms, inverse, sums

    def _measured(
        self, needs: MeasurementSpec, pack: PackedSum, vote: SkipVote | None
    ) -> tuple[Norms, Mapping[str, Tensor]]:
        """Return the norms of the gradients as they are, and the sums of the packed fields. Collectives: exactly one."""
        if needs not in self._measurers:
            self._measurers[needs] = self._measurer(needs)
        gradients = [param.grad for param in self.params]
        weights = self.params if needs.weights else ()
        numbers = [check.numbers(None if index else gradients) for index, check in enumerate(self.checks)]
        compared = {
            f"replicas {index}": check.weighted(of_check)
            for index, (check, of_check) in enumerate(zip(self.checks, numbers, strict=True))
        }
        if self._shards is not None:
            compared["equal shards"] = self._shards.slots(numbers[0], self.checks[0].params, gradients)
        pack = pack.with_fields(compared).with_fields({} if vote is None else vote.fields(gradients))
        norms = self._measurers[needs](gradients, pack.values, weights)
        if needs.level == "named":
            norms = self._with_named(needs, norms)
        sums = pack.split(norms.extra)
        if compared:
            self._compare(norms.total, [sums[name] for name in compared])
        return norms, sums

    def _compare(self, total: Tensor, sums: Sequence[Tensor]) -> None:
        """Raise ReplicaMismatchError where copies differ, ValueError where shards are copies. Host reads: one."""
        # One read of all of it.
        total, *totals = torch.cat([total.view(1), *sums]).cpu().split([1, *map(len, sums)])
        # A step that is skipped says nothing of copies yet: an overflow may be in one of them alone.
        always = self._check_replicas is True
        if always or bool(total.isfinite()):
            found = (check.mismatches(of_check) for check, of_check in zip(self.checks, totals, strict=False))
            if mismatches := [mismatch for of_check in found for mismatch in of_check]:
                raise ReplicaMismatchError(mismatches)
            if self._shards is not None:
                self._shards.check(totals[-1])
                self._shards = None
            self.checks = self.checks if always else []

    def _measurer(self, needs: MeasurementSpec) -> GlobalNorm:
        return GlobalNorm(
            self.plan,
            self.registry,
            needs.norm_type,
            self._reduction,
            self._per_parameter_norms or needs.level in ("parameters", "named"),
            Units.of(self.plan, self._regions, needs.unit_dim) if needs.level == "units" else None,
            None if not needs.weights else "parameters" if needs.level == "named" else needs.level,
        )

    def _with_named(self, needs: MeasurementSpec, norms: Norms) -> Norms:
        """The norms, of named groups too."""
        if needs.patterns not in self._named:
            self._named[needs.patterns] = Named.of(self.plan.parameter_names, needs.patterns)
        named, p = self._named[needs.patterns], needs.norm_type
        weights = named.norms(norms.weights, p, self._constants) if needs.weights else norms.weights
        return norms._replace(named=named.norms(norms.parameters, p, self._constants), weights=weights)

    def _multiply_(self, needs: MeasurementSpec, level: Level, factors: Tensor) -> None:
        """Multiply the gradients by factors at that level, in place; sums that have been made stay so."""
        # All at once: gradients that are views of one buffer are written to together, as far as torch can tell.
        units, named = self._measurers[needs].units, self._named.get(needs.patterns)
        with keep_complete_marks((param, None) for param in self.params):
            widen_gradients(self.params)
            multiply_([param.grad for param in self.params], level, factors, self.plan, units, named)


def inverse_weight(totals: Tensor, data_ranks: int, count: int = 1) -> Tensor:
    """0-dim: D / W; 1 / ``count`` where no rank gave a weight (or all gave 0), NaN where W is negative or NaN. Host reads:
    none.

    Args:
        totals: The sum over ranks of the field ``"window_weight"``.
        data_ranks: D.
        count: Micro-batches whose mean the window's gradient is.
    """
    total = totals.amax() if len(totals) > 1 else totals[0]
    return (data_ranks / total).masked_fill_(total < 0, torch.nan).masked_fill_(total == 0, 1.0 / count)


def _is_taken(finite: Tensor, *flags: Tensor | None) -> Tensor:
    """0-dim bool: the step is made, as far as the rule does not skip it itself."""
    for flag in flags:
        if flag is not None:
            finite = finite & (flag == 0)
    return finite
