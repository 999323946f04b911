"""From the measured norms to what is done with the gradients.

    gradient to step with = gradient as it is * inverse * factor,      factor = rule(norms * inverse, what it remembers)
    inverse = D / W / loss scale

Gradients were multiplied by the loss scale, and divided by the number D of data ranks in place of the window's weight W
(without weights: of D times the micro-batches that make one mean). A rule sees the norms of the gradients as they will be
stepped with, and so does whoever reads the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from ...parallel.layout.pieces import Region
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..gradients.in_place import is_complete, mark_complete, widen_gradients
from ..norm.constants import Constants
from ..norm.equal_shards import EqualShards
from ..norm.global_norm import GlobalNorm
from ..norm.measure import Measure
from ..norm.named import Named
from ..norm.norms import Level, Norms
from ..norm.plan import ReductionPlan
from ..norm.replicas import ReplicaCheck, ReplicaMismatchError
from ..norm.stats import GradStats
from ..norm.units import UnitDim, Units
from .ballot import Ballot
from .multiply import multiply_
from .policies import ByGroup
from .rule import NOTHING, Clip, Decision
from .state import ClipState
from .thresholds import AgreedThresholds
from .verdict import Divisor, Verdict


@dataclass(frozen=True)
class Needs:
    """What one measurement needs besides the total and the groups; the key under which its `GlobalNorm` is kept."""

    norm_type: float
    level: Level = "total"
    weights: bool = False
    unit_dim: UnitDim = 0
    patterns: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash((self.norm_type, self.level, self.weights, repr(self.unit_dim), self.patterns))

    @classmethod
    def of(cls, clip: Clip | None, norm_type: float) -> Needs:
        """What a rule needs, with the p of the norms."""
        if clip is None:
            return cls(norm_type)
        return cls(norm_type, clip.level, clip.weights, clip.unit_dim, clip.patterns)


class Clipping:
    """Measures gradients, in one collective, and applies a rule to them.

    Args:
        params: The tensors whose gradients are stepped with, in the order of the plan's entries.
        regions: For each of them which part of the logical tensor it is; None where pieces are of unequal sizes.
        plan: Agreed by all ranks.
        registry: The groups.
        measure: What is measured besides what a rule needs.
        thresholds: Those of single param groups.
        optimizer: Its param groups may have them.
        checks: Of copies, in the first measurement or in all; the first one of what is measured, gradients too.
        ballot: What else ranks say there.
        shards: The comparison of shards in the first measurement, with the first of ``checks``; None: not compared.

    Attributes:
        checks: Those that are still to be made.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        regions: Sequence[Region | None],
        plan: ReductionPlan,
        registry: ProcessGroupRegistry,
        measure: Measure,
        thresholds: AgreedThresholds,
        optimizer: torch.optim.Optimizer,
        checks: Sequence[ReplicaCheck] = (),
        ballot: Ballot | None = None,
        shards: EqualShards | None = None,
    ) -> None:
        self.params, self.plan, self.registry, self.measure = list(params), plan, registry, measure
        self.thresholds, self.optimizer = thresholds, optimizer
        self._regions, self.checks, self.ballot = list(regions), list(checks), ballot
        self._shards = shards if self.checks else None
        self._measurers: dict[Needs, GlobalNorm] = {}
        self._named: dict[tuple[str, ...], Named] = {}
        self._constants = Constants()
        self._one: Tensor | None = None

    def replan(self, plan: ReductionPlan) -> None:
        """The same plan, of which more is known now."""
        self.plan = plan
        self._measurers.clear()
        self._named.clear()

    def start_over(self) -> None:
        """Other weights and states are there now."""
        if self.ballot is not None and self.ballot.watch is not None:
            self.ballot.watch.start_over()

    def __call__(
        self,
        clip: ClipState | None,
        divisor: Divisor,
        *,
        now: bool = False,
        earlier: Verdict | None = None,
        captured: bool,
    ) -> Verdict:
        """What is done with the gradients; it has been done where it is not one factor for all.

        Args:
            clip: The rule, which remembers this step unless it is skipped by others than itself; None: measure only.
            divisor: What is still in the gradients.
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
        norm_type = self.measure.norm_type if given is None or given.norm_type is None else given.norm_type
        ballot = self.ballot if earlier is None else None
        rule = self._with_thresholds(given, norm_type, divisor.slots, ballot)
        needs = Needs.of(rule, norm_type)
        norms, inverse, cast = self._unscaled(needs, divisor, ballot)
        finite, past = norms.total < inf, None  # not where it is NaN
        if divisor.is_missing is not None:
            past = divisor.is_missing(norms.extra) & (norms.total != 0)  # states are also made by gradients of zeros
            finite = finite & ~past
        vetoed, parted = (None, None) if ballot is None else ballot.count(cast, finite)
        disagreed = None if divisor.agreement is None else norms.extra.select(0, divisor.agreement) != 0
        decision = Decision(None)
        if rule is not None:
            state = ClipState(rule) if clip is None else clip
            decision = state.decide(norms, rule) if captured or state.initial else rule.decide(norms, NOTHING)
            if decision.state:
                state.remember(decision, _is_taken(finite, vetoed, parted, disagreed))
        factors, one = decision.factors, self._one
        if one is None or one.device != norms.total.device:  # in the first step: a graph must not make it
            one = self._one = self._constants("one", lambda: [1.0], norms.total.dtype, norms.total.device)[0]
        factor, level = inverse, Needs.level
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
        spiked, names = decision.spiked(finite), self.plan.parameter_names if self.measure.per_parameter else ()
        stats = GradStats(
            total_norm=norms.total,
            clip_coef=coef,
            found_inf=torch.logical_not(finite, out=torch.empty((), dtype=torch.float32, device=finite.device)),
            group_norms=norms.groups,
            loss_scale=None if divisor.loss_scale is None else divisor.loss_scale.clone(),
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
        verdict = Verdict(stats, skipped, factor, past, None if ballot is None else ballot.problem)
        return verdict if earlier is None else verdict.after(earlier)

    def _with_thresholds(
        self, clip: Clip | None, norm_type: float, slots: Tensor, ballot: Ballot | None
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
            self._measured(Needs(norm_type), slots, ballot)  # as the other ranks do, which must not wait
            raise

    # Measuring -------------------------------------------------------------------------------------------------------

    def _unscaled(
        self, needs: Needs, divisor: Divisor, ballot: Ballot | None
    ) -> tuple[Norms, Tensor | None, Sequence[Tensor]]:
        """The norms of the gradients as they will be stepped with; ``inverse``; and what ranks said, summed."""
        norms, cast = self._measured(needs, divisor.slots, ballot)
        inverse = None if divisor.scale is None else divisor.scale.to(norms.extra).reciprocal()
        if divisor.stages:
            weight = inverse_weight(norms.extra[: divisor.stages], divisor.data_ranks, divisor.mean_of)
            inverse = weight if inverse is None else weight * inverse
        if inverse is None:
            return norms, None, cast
        inverse = inverse.to(norms.total)
        total = norms.total * inverse
        groups = total.view(1) if norms.groups.numel() == 1 else norms.groups * inverse
        norms = norms._replace(total=total, groups=groups)
        for level in ("parameters", "units", "named"):
            if (values := getattr(norms, level)).numel():  # a kernel would multiply nothing too
                norms = norms._replace(**{level: values * inverse})
        return norms, inverse, cast

    def _measured(self, needs: Needs, extra: Tensor, ballot: Ballot | None) -> tuple[Norms, Sequence[Tensor]]:
        """The norms of the gradients as they are, and the sums of what the ``ballot`` says; ``Norms.extra`` is the sum of
        all ranks' ``extra``."""
        if needs not in self._measurers:
            self._measurers[needs] = self._measurer(needs)
        gradients = [param.grad for param in self.params]
        weights = self.params if needs.weights else ()
        numbers = [check.numbers(None if index else gradients) for index, check in enumerate(self.checks)]
        slots = [check.weighted(of_check) for check, of_check in zip(self.checks, numbers, strict=True)]
        if self._shards is not None:
            slots.append(self._shards.slots(numbers[0], self.checks[0].params, gradients))
        cast = [] if ballot is None else ballot.slots(gradients)
        more = torch.cat([extra, *slots, *cast]) if slots or cast else extra
        norms = self._measurers[needs](gradients, more, weights)
        if needs.level == "named":
            norms = self._with_named(needs, norms)
        if not slots and not cast:
            return norms, ()
        extra, *totals = norms.extra.split([len(extra), *map(len, slots), *map(len, cast)])
        if slots:
            self._compare(norms.total, totals[: len(slots)])
        return norms._replace(extra=extra), totals[len(slots) :]

    def _compare(self, total: Tensor, sums: Sequence[Tensor]) -> None:
        """Raise ReplicaMismatchError where copies differ, ValueError where shards are copies. Host reads: one."""
        # One read of all of it.
        total, *totals = torch.cat([total.view(1), *sums]).cpu().split([1, *map(len, sums)])
        # A step that is skipped says nothing of copies yet: an overflow may be in one of them alone.
        first = self.measure.check_replicas is not True
        if not first or bool(total.isfinite()):
            found = (check.mismatches(of_check) for check, of_check in zip(self.checks, totals, strict=False))
            if mismatches := [mismatch for of_check in found for mismatch in of_check]:
                raise ReplicaMismatchError(mismatches)
            if self._shards is not None:
                self._shards.check(totals[-1])
                self._shards = None
            self.checks = [] if first else self.checks

    def _measurer(self, needs: Needs) -> GlobalNorm:
        return GlobalNorm(
            self.plan,
            self.registry,
            needs.norm_type,
            self.measure.reduction,
            self.measure.per_parameter or needs.level in ("parameters", "named"),
            Units.of(self.plan, self._regions, needs.unit_dim) if needs.level == "units" else None,
            None if not needs.weights else "parameters" if needs.level == "named" else needs.level,
        )

    def _with_named(self, needs: Needs, norms: Norms) -> Norms:
        """The norms, of named groups too."""
        if needs.patterns not in self._named:
            self._named[needs.patterns] = Named.of(self.plan.parameter_names, needs.patterns)
        named, p = self._named[needs.patterns], needs.norm_type
        weights = named.norms(norms.weights, p, self._constants) if needs.weights else norms.weights
        return norms._replace(named=named.norms(norms.parameters, p, self._constants), weights=weights)

    def _multiply_(self, needs: Needs, level: Level, factors: Tensor) -> None:
        """Multiply the gradients by factors at that level, in place; sums that have been made stay so."""
        # All at once: gradients that are views of one buffer are written to together, as far as torch can tell.
        complete = [param for param in self.params if is_complete(param)]
        widen_gradients(self.params)
        units = self._measurers[needs].units
        multiply_(
            [param.grad for param in self.params], level, factors, self.plan, units, self._named.get(needs.patterns)
        )
        for param in complete:
            mark_complete(param)


def inverse_weight(totals: Tensor, data_ranks: int, count: int = 1) -> Tensor:
    """0-dim: D / W; 1 / ``count`` where no rank gave a weight (or all gave 0), NaN where W is negative or NaN. Host reads:
    none.

    Args:
        totals: The sum over ranks of `weight_slots`, without a vote.
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
