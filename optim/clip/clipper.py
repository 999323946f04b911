"""Compute clip coefficients from measured norms, and apply them to the gradients.

    final gradient = gradient * factor,            factor = inverse * coef
    coef = rule(norms * inverse, state),           inverse = D / W / loss scale

Before clipping, a gradient still contains the loss scale. Gradient reduction has divided it by the number D of
data-parallel ranks. But the mean over an accumulation window (the micro-batches of one step) needs a division by the
window's total weight W, such as its number of tokens. Without weights, W is D times the number of micro-batches in the
mean. With ``sum_order="fixed"``, gradient reduction only sums, and D is 1. Rules and `GradStats` receive the norms of
``gradient * inverse``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...parallel.layout.shard import Region
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..gradients.in_place import keep_complete_marks, scale_each, widen_gradients
from ..kernels.device_constants import Constants
from ..norm.exact_norm import ExactNorm
from ..norm.global_norm import GlobalNorm, Named, UnitDim, Units
from ..norm.measure import CheckReplicas, Commit, Fingerprints, GradStats, Level, Norms, Reduction
from ..norm.packed_sum import PackedSum
from ..norm.plan import ReductionPlan
from ..norm.replicas import EqualShards, FingerprintMonitor, ReplicaCheck, ReplicaMismatchError
from .base import NOTHING, Clip, ClipState, check_number_threshold
from .rules import ByGroup, ByNorm, ByValue

# Votes on a step ------------------------------------------------------------------------------------------------------

# The collective that computes the norm also sums the votes of all ranks to skip a step.


class SkipVote:
    """Combines the votes of all ranks to skip a step. The result is equal on all ranks.

    ``commit`` is the argument of `ParallelOptimizer`; None: ranks do not vote. ``watch`` compares replicas
    periodically; None: not compared.

    Attributes:
        problem: The exception that ``commit`` raised on this rank in the last step, or a TypeError if its result was
            neither a bool nor a 0-dim bool tensor. Both count as a vote to skip. None: no exception.
    """

    def __init__(self, commit: Commit | None, watch: FingerprintMonitor | None, device: torch.device) -> None:
        self.commit, self.watch, self.device = commit, watch, device
        self.problem: Exception | None = None

    def fields(self, gradients: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Call ``commit``, and return this rank's votes as fields of a `PackedSum`.

        With ``commit``, the field ``"veto"`` is 1 to skip the step, else 0. If a periodic comparison of replicas is due,
        each `ReplicaCheck` of ``watch`` has a field (`FingerprintMonitor.fields`).

        Host synchronization: by ``commit``; otherwise none if all tensors are on one device.
        """
        votes = {} if self.commit is None else {"veto": self._vote(self.commit).view(1)}
        return votes if self.watch is None else votes | self.watch.fields(gradients)

    def _vote(self, commit: Commit) -> Tensor:
        self.problem = None
        try:
            answer = commit()
            if isinstance(answer, Tensor) and answer.dtype == torch.bool and answer.dim() == 0:
                if not answer.is_cpu:
                    return answer.logical_not().to(self.device, torch.float64, non_blocking=True)
                answer = bool(answer)  # a CPU tensor: no synchronization
            if not isinstance(answer, bool):
                raise TypeError(f"commit= returned {answer!r}: return True or False, or a 0-dim tensor of dtype bool")
        except Exception as error:  # the caller raises it after the collective in which the other ranks wait
            self.problem, answer = error, False
        return torch.full((), float(not answer), dtype=torch.float64, device=self.device)

    def count(self, sums: Mapping[str, Tensor], finite: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return (rejected, replicas_diverged), each 0-dim float32, for `GradStats`, from the votes of all ranks.

        ``rejected`` is None without ``commit``, and ``replicas_diverged`` is None without ``watch``. ``sums`` has the sum
        of each field over all ranks.
        """
        rejected = None
        if self.commit is not None:
            rejected = (sums["veto"][0] > 0).float()
        if self.watch is None:
            return rejected, None
        self.watch.record(sums, finite)
        return rejected, self.watch.replicas_diverged


# The decision of a step, and the scale that the gradients still contain -----------------------------------------------


SHARD_COUNTS = "shards with a gradient"  # name of the field of `MissingShards` in the `PackedSum`


class StepDecision(NamedTuple):
    """The decision of a step: skip it if ``skipped`` is 1, else multiply all gradients by ``factor`` in the update.

    ``factor`` is a 0-dim factor that the update must apply; None: gradients are already multiplied, or need no factor.
    ``bypassed`` is True if the step is skipped because its gradients bypassed `ParallelOptimizer.backward`, or in
    `clip_grad_norm_` because a rank found an error (``"bypassed"`` in `GradScaleInfo`); None: not checked. ``problem`` is
    the exception that ``commit=`` raised on this rank. ``shard_counts`` has for each logical parameter the number of its
    shards with a gradient, summed over all ranks; None: not counted, for example because no parameter is sharded.
    """

    stats: GradStats
    skipped: Tensor
    factor: Tensor | None
    bypassed: Tensor | None = None
    problem: Exception | None = None
    shard_counts: Tensor | None = None

    def after(self, earlier: StepDecision) -> StepDecision:
        """Return this decision combined with an ``earlier`` decision of the same accumulation window.

        The step is skipped if ``earlier`` skips it, or if this decision has ``found_inf`` or ``ranks_disagree``. The
        fields ``rejected``, ``replicas_diverged``, ``spiked`` and ``problem`` are taken from ``earlier``. ``factor`` is
        None.
        """
        found_inf = torch.maximum(self.stats.found_inf, earlier.stats.found_inf)
        votes = {name: getattr(earlier.stats, name) for name in ("rejected", "replicas_diverged", "spiked")}
        disagreed, before = self.stats.ranks_disagree, earlier.stats.ranks_disagree
        if disagreed is None or before is None:
            disagreed = before if disagreed is None else disagreed
        else:
            disagreed = disagreed | before
        stats = replace(self.stats, found_inf=found_inf, ranks_disagree=disagreed, **votes)
        return self._replace(stats=stats, skipped=stats.skipped, factor=None, problem=earlier.problem)


class WindowMean(NamedTuple):
    """The mean that the reduced gradients of an accumulation window must become.

    Args:
        data_ranks: Number of data ranks over which the gradients were averaged. Default: 1.
        mean_of: Number by which the gradients must be divided if no micro-batch of any rank has a weight: the number of
            micro-batches, with ``sum_order="fixed"`` on all data ranks together. Default: 1.
    """

    data_ranks: int = 1
    mean_of: int = 1

    def inverse(self, totals: Tensor) -> Tensor:
        """Return the factor for the gradients. ``totals``: the field ``"window_weight"``, summed over all ranks."""
        return inverse_weight(totals, self.data_ranks, self.mean_of)


class GradScaleInfo(NamedTuple):
    """The factors that gradients still contain, and fields that the measurement sums over all ranks.

    Args:
        pack: It may have these fields:
            ``"window_weight"``: the accumulation window's weight per pipeline stage (`window_fields`);
            ``"agreement"``: the sum is 0 if the settings of all ranks agree (`StepAgreement`);
            `SHARD_COUNTS`: for each logical parameter the number of shards with a gradient (`MissingShards`);
            ``"bypassed"``: the sum is negative if gradients must not be applied, because their loss was not scaled or,
                in `clip_grad_norm_`, because a rank found an error.
        scale: The loss scale that gradients still contain.
        mean: The mean that the step makes of the gradients; needs the field ``"window_weight"``. None: gradients are not
            divided.
        loss_scale: The loss scale of the backward pass, for `GradStats`.
    """

    pack: PackedSum
    scale: Tensor | None = None
    mean: WindowMean | None = None
    loss_scale: Tensor | None = None


# Thresholds of param groups -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AgreedThresholds:
    """The ``max_norm`` of each param group of the model, also of groups that only other ranks (pipeline stages) have.

    A group whose value is None has no ``max_norm``. ``everywhere``: every rank has all param groups.
    """

    values: tuple[float | None, ...]
    everywhere: bool

    @cached_property
    def has_any(self) -> bool:
        return any(value is not None for value in self.values)

    def now(self, param_groups: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """Return one threshold per param group: for this rank's groups their present ``max_norm``, else the agreed value.

        It raises ValueError if a threshold of this rank differs from the agreed value, and some ranks have fewer param
        groups.
        """
        own = [group.get("max_norm") for group in param_groups]
        if not self.everywhere and own != list(self.values[: len(own)]):
            before = list(self.values[: len(own)])
            raise ValueError(
                f"max_norm of this rank's param groups is {own}, but the ranks agreed on {before}. Ranks without some of "
                "these groups do not see the change: set the same values on all ranks that have the group, then call "
                "optimizer.refresh() on every rank"
            )
        return own + list(self.values[len(own) :])

    def rule(self, clip: Clip | None, param_groups: Sequence[Mapping[str, Any]], norm_type: float) -> Clip | None:
        """Return ``clip`` combined with the thresholds of param groups into a `ByGroup`; ``clip`` if there are none."""
        check_thresholds(clip, param_groups)
        thresholds = self.now(param_groups)
        if not any(threshold is not None for threshold in thresholds):
            return clip
        others = clip.max_norm if isinstance(clip, ByNorm) else None
        return ByGroup(tuple(thresholds), others, norm_type, clip.clip_value if isinstance(clip, ByValue) else None)


def check_thresholds(clip: Clip | None, param_groups: Sequence[Mapping[str, Any]]) -> None:
    """Check the ``max_norm`` of each param group. None or a missing ``max_norm`` is accepted."""
    for index, group in enumerate(param_groups):
        if group.get("max_norm") is not None:
            check_number_threshold(group["max_norm"], f"max_norm of param group {index}", infinite=True)
            if not isinstance(clip, ByNorm | ByValue | None):
                raise ValueError(
                    f"param group {index} has its own max_norm, but max_norm={clip!r} is a rule for all groups; give only "
                    "one of them"
                )


def agreed_thresholds(by_rank: Sequence[Sequence[Any]]) -> AgreedThresholds:
    """Return the ``max_norm`` of all param groups of the model, from the values of every rank."""
    longest = max(by_rank, key=len)
    for rank, own in enumerate(by_rank):
        for index, value in enumerate(own):
            if value != longest[index]:
                raise ValueError(
                    f"max_norm of param group {index} is {value} on rank {rank} and {longest[index]} on another rank: give "
                    "each group the same value on all ranks"
                )
    return AgreedThresholds(tuple(longest), all(len(own) == len(longest) for own in by_rank))


# Measure gradients and apply a clipping rule --------------------------------------------------------------------------


class MeasurementSpec(NamedTuple):
    """A description of the norms that a clipping rule needs. The fields mean the same as the attributes of `Clip`."""

    norm_type: float
    level: Level = "total"
    weights: bool = False
    unit_dim: UnitDim = 0
    patterns: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash((self.norm_type, self.level, self.weights, repr(self.unit_dim), self.patterns))

    @classmethod
    def of(cls, rule: Clip | None, norm_type: float) -> MeasurementSpec:
        """Return the norms that ``rule`` needs. ``norm_type`` is used if the rule has no p."""
        if rule is None:
            return cls(norm_type)
        p = norm_type if rule.norm_type is None else rule.norm_type
        return cls(p, rule.level, rule.weights, rule.unit_dim, rule.patterns)


class StepFlags(NamedTuple):
    """Flags of a step that do not depend on the clipping rule, each 0-dim. They are equal on all ranks.

    ``finite`` is False if the norm is non-finite or ``bypassed`` is True. The other fields mean the same as in
    `StepDecision` and `GradStats`.
    """

    finite: Tensor
    bypassed: Tensor | None
    rejected: Tensor | None
    replicas_diverged: Tensor | None
    ranks_disagree: Tensor | None


class GradientClipper:
    """Measures gradients (by default in one collective), and applies a clipping rule to them.

    Args:
        params: The tensors whose gradients are clipped, in the order of the plan's entries.
        regions: For each tensor the part of the full tensor that it holds; None: not known (see `SteppedTensor`).
        checks: Comparisons of replicas, of which the first compares gradients too. The attribute has those that the
            next measurement runs.
        shards: The search for replicas that are declared as shards, which runs with ``checks`` until it has compared
            all shards once.
        norm_type: The p of the norms, unless the rule has a ``norm_type``.
        thresholds: The ``max_norm`` of the param groups, for `add_thresholds`. None (default): it is not called.
        check_replicas: True: run ``checks`` in every measurement. Otherwise, run them until the first measurement with
            a finite norm, and once more if gradients of replicas were zero in it.
        exact: True: measure by `ExactNorm`, whose results do not depend on the number of data ranks.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        regions: Sequence[Region | None],
        plan: ReductionPlan,
        registry: ProcessGroupRegistry,
        checks: Sequence[ReplicaCheck] = (),
        vote: SkipVote | None = None,
        shards: EqualShards | None = None,
        *,
        norm_type: float,
        reduction: Reduction,
        thresholds: AgreedThresholds | None = None,
        per_parameter_norms: bool = False,
        check_replicas: CheckReplicas = False,
        exact: bool = False,
    ) -> None:
        self.params, self.plan, self.registry = list(params), plan, registry
        self.norm_type, self._reduction = norm_type, reduction
        self._per_parameter_norms, self._check_replicas = per_parameter_norms, check_replicas
        self.thresholds, self._exact = thresholds, exact
        self._regions, self.checks, self.vote = list(regions), list(checks), vote
        self._shards = shards if self.checks else None
        self._is_repeated = False  # True after the first comparison of replicas
        self._measurers: dict[MeasurementSpec, GlobalNorm] = {}
        self._last_needs: MeasurementSpec | None = None  # of the last measurement, in which all ranks took part
        self._named: dict[tuple[str, ...], Named] = {}
        self._constants = Constants()
        self._one: Tensor | None = None

    def replan(self, plan: ReductionPlan) -> None:
        self.plan = plan
        self._measurers.clear()
        self._named.clear()

    def not_captured(self) -> Iterator[str]:
        if self.vote is not None and self.vote.commit is not None:
            yield "commit= is called in Python: leave it out, and decide before a replay"
        if isinstance(self._check_replicas, Fingerprints):
            yield "check_replicas=Fingerprints(...) counts steps in Python: leave it out"
        elif self._check_replicas is True:
            yield "check_replicas=True synchronizes the host: leave it out, replicas are compared in the first step"
        elif self.checks:
            yield "replicas have not been compared yet in a step with a finite norm: make more steps without a graph"

    def start_over(self) -> None:
        """Discard detected replica divergence, and compare replicas in the next step if `Fingerprints` are used.

        Call it after other code replaced weights or optimizer states.
        """
        if self.vote is not None and self.vote.watch is not None:
            self.vote.watch.start_over()

    def __call__(
        self,
        clip: ClipState | None,
        scale_info: GradScaleInfo,
        *,
        in_place: bool = False,
        earlier: StepDecision | None = None,
        captured: bool,
        rule: Clip | None,
    ) -> StepDecision:
        """Measure the gradients, apply the rule, and return the decision of the step.

        The gradients are clipped in place, unless the decision has a ``factor``.

        Args:
            clip: The rule and its state. The state is updated, unless the step is skipped for a reason other than the
                rule itself. None: gradients are unscaled, and clipped only in param groups with a ``max_norm``.
            in_place: True: unscale and clip in place. False: if one factor applies to all gradients, and the rule does
                not change gradients in place, only return this factor in the decision.
            earlier: An earlier decision of the same accumulation window. Ranks vote only in the first decision of a
                window (None).
            captured: True: a CUDA graph is being captured.
            rule: The rule in ``clip``, combined with the thresholds of param groups (`add_thresholds`). None: no rule.
        Raises:
            ValueError: On every rank: all shards of a parameter are equal, so it is probably replicated.
            ReplicaMismatchError: On every rank, if replicas are compared and differ.
        Collectives: as `GlobalNorm` (one with ``reduction="packed"``) or `ExactNorm` (up to two). After a
            change of the rule that needs another collective, up to twice, with one more host synchronization.
        Host synchronization: by ``commit=``, as `GlobalNorm`, and one if ``checks`` run.
        """
        vote = self.vote if earlier is None else None
        needs = MeasurementSpec.of(rule, self.norm_type)
        norms, inverse, sums, needs_met = self._measure_on_all_ranks(needs, scale_info, vote, captured)
        if not needs_met:  # ranks disagree, so the step is skipped, and no rule is applied
            clip = rule = None
        flags = self._read_flags(norms.total, sums, vote)
        coef, reported, spiked = self._apply_rule(rule, clip, norms, flags, earlier, captured)
        factor = self._scale_in_place(rule, needs, coef, inverse, in_place)
        stats = self._stats(rule, needs, norms, flags, reported, spiked, scale_info.loss_scale)
        problem = None if vote is None else vote.problem
        decision = StepDecision(stats, stats.skipped, factor, flags.bypassed, problem, sums.get(SHARD_COUNTS))
        return decision if earlier is None else decision.after(earlier)

    def _read_flags(self, total: Tensor, sums: Mapping[str, Tensor], vote: SkipVote | None) -> StepFlags:
        """Return the flags of a step from the total norm and the packed fields, summed over all ranks."""
        finite, bypassed = total < inf, None  # False for NaN
        if "bypassed" in sums:
            # Gradients of a backward that bypassed the optimizer must not be applied. A norm of 0 is accepted, because
            # torch's state-dict functions make a step with gradients of zeros, to create optimizer states.
            bypassed = (sums["bypassed"][0] < 0) & (total != 0)
            finite = finite & ~bypassed
        rejected, replicas_diverged = (None, None) if vote is None else vote.count(sums, finite)
        ranks_disagree = sums["agreement"][0] != 0 if "agreement" in sums else None
        return StepFlags(finite, bypassed, rejected, replicas_diverged, ranks_disagree)

    def _apply_rule(
        self,
        rule: Clip | None,
        clip: ClipState | None,
        norms: Norms,
        flags: StepFlags,
        earlier: StepDecision | None,
        captured: bool,
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """Return (coef, reported, spiked) of a step, and update the rule's state. Gradients are unchanged.

        ``coef`` has the clip coefficients at the rule's level; None: the rule has none, or there is no rule. All are 1 if
        ``flags.finite`` is False. ``reported`` and ``spiked`` are the values of `GradStats.clip_coef` and
        `GradStats.spiked`.
        """
        one, finite = self._one, flags.finite
        # The constant is created in the first step, because `Constants` creates none during the capture of a CUDA graph.
        if one is None or one.device != norms.total.device:
            one = self._one = self._constants("one", lambda: [1.0], norms.total.dtype, norms.total.device)[0]
        if rule is None:
            return None, torch.ones_like(norms.total), None
        state = ClipState(rule) if clip is None else clip
        result = state.decide(norms, rule) if captured or state.initial else rule.decide(norms, NOTHING)
        if result.state:
            state.remember(result, _is_applied(flags, earlier))
        spiked = result.spiked(finite)
        if result.factors is None:
            return None, torch.ones_like(norms.total), spiked
        shown = rule.reported_coef(result.factors, norms)
        coef = torch.where(finite, result.factors, one)
        return coef, coef if shown is result.factors else torch.where(finite, shown, one), spiked

    def _scale_in_place(
        self, rule: Clip | None, needs: MeasurementSpec, coef: Tensor | None, inverse: Tensor | None, in_place: bool
    ) -> Tensor | None:
        """Multiply the gradients by ``inverse * coef`` if the update can't, and let the rule finish them in place.

        ``coef`` and ``inverse`` are 1 if None. Return the factor that the update must apply, or None.
        """
        factor, level = inverse, needs.level
        if coef is None:
            level = "total"
        else:
            factor = coef if inverse is None else coef * inverse
        rule_writes = rule is not None and rule.in_place
        if factor is not None and (in_place or level != "total" or rule_writes):
            self._multiply_(needs, level, factor)
            factor = None
        if rule is not None and rule_writes:
            rule.finish_(self.params)
        return factor

    def _stats(
        self,
        rule: Clip | None,
        needs: MeasurementSpec,
        norms: Norms,
        flags: StepFlags,
        reported: Tensor,
        spiked: Tensor | None,
        loss_scale: Tensor | None,
    ) -> GradStats:
        finite, names = flags.finite, self.plan.parameter_names if self._per_parameter_norms else ()
        return GradStats(
            total_norm=norms.total,
            clip_coef=reported,
            found_inf=torch.logical_not(finite, out=torch.empty((), dtype=torch.float32, device=finite.device)),
            group_norms=norms.groups,
            loss_scale=None if loss_scale is None else loss_scale.clone(),
            parameter_norms=dict(zip(names, norms.parameters.unbind(), strict=True)) if names else {},
            rejected=flags.rejected,
            replicas_diverged=flags.replicas_diverged,
            spiked=spiked,
            named_norms=dict(zip(needs.patterns, norms.named.unbind(), strict=False)) if needs.patterns else {},
            ranks_disagree=flags.ranks_disagree,
            unclipped=() if rule is None else rule.unclipped,
        )

    def add_thresholds(
        self, clip: ClipState | None, param_groups: Sequence[Mapping[str, Any]]
    ) -> tuple[Clip | None, Exception | None]:
        """Return the rule in ``clip`` combined with the ``max_norm`` of param groups, and this rank's error or None.

        The error is an error of `AgreedThresholds.rule`. It is returned with the rule in ``clip``, so that this rank takes
        part in the collectives of `__call__`. The caller must then make all ranks skip the step.
        """
        assert self.thresholds is not None
        given = None if clip is None else clip.rule
        if not (self.thresholds.has_any or any(group.get("max_norm") is not None for group in param_groups)):
            return given, None
        try:
            norm_type = self.norm_type if given is None or given.norm_type is None else given.norm_type
            return self.thresholds.rule(given, param_groups, norm_type), None
        except Exception as error:  # of any type: a threshold may be any object
            return given, error

    # Measuring -------------------------------------------------------------------------------------------------------

    def _measure_on_all_ranks(
        self, needs: MeasurementSpec, scale_info: GradScaleInfo, vote: SkipVote | None, captured: bool
    ) -> tuple[Norms, Tensor | None, Mapping[str, Tensor], bool]:
        """Return the result of `_measure_unscaled`, and True if it has the norms that ``needs`` describes.

        If ``needs`` changed so that the collective differs, the norms of the former ``needs`` are measured first. Their
        collective shows whether all ranks changed their rule. If so, the norms of the new ``needs`` are measured too.
        Otherwise ranks that changed their rule would issue other collectives than the other ranks.

        Collectives: as `_measure`; after such a change, up to twice.
        Host synchronization: one after such a change.
        """
        last = self._last_needs
        if (
            last is None
            or needs == last
            or captured
            or "agreement" not in scale_info.pack.sizes
            or self._measurer(needs).layout == self._measurer(last).layout
        ):
            self._last_needs = needs
            return *self._measure_unscaled(needs, scale_info, vote), True
        norms, inverse, sums = self._measure_unscaled(last, scale_info, vote)
        if bool(sums["agreement"][0] != 0):
            return norms, inverse, sums, False
        self._last_needs = needs
        norms, inverse, new_sums = self._measure_unscaled(needs, scale_info, None)
        return norms, inverse, {**sums, **new_sums}, True

    def _measurer(self, needs: MeasurementSpec) -> GlobalNorm:
        measurer = self._measurers.get(needs)
        if measurer is None:
            measurer = self._measurers[needs] = self._make_global_norm(needs)
        return measurer

    def _measure_unscaled(
        self, needs: MeasurementSpec, scale_info: GradScaleInfo, vote: SkipVote | None
    ) -> tuple[Norms, Tensor | None, Mapping[str, Tensor]]:
        """Return the norms of ``gradient * inverse``, the factor ``inverse`` (None: 1), and the sums of the packed fields.

        ``inverse`` removes the loss scale. It also divides by the window's weight per data rank or, without weights, by
        the window's number of micro-batches if ``accumulation_steps`` is set.
        """
        norms, sums = self._measure(needs, scale_info.pack, vote)
        inverse = None if scale_info.scale is None else scale_info.scale.to(norms.extra).reciprocal()
        if scale_info.mean is not None:
            weight = scale_info.mean.inverse(sums["window_weight"])
            inverse = weight if inverse is None else weight * inverse
        if inverse is None:
            return norms, None, sums
        inverse = inverse.to(norms.total)
        total = norms.total * inverse
        groups = total.view(1) if norms.groups.numel() == 1 else norms.groups * inverse
        norms = norms._replace(total=total, groups=groups)
        for level in ("parameters", "units", "named"):
            if (values := getattr(norms, level)).numel():  # saves a kernel for empty norms
                norms = norms._replace(**{level: values * inverse})
        return norms, inverse, sums

    def _measure(
        self, needs: MeasurementSpec, pack: PackedSum, vote: SkipVote | None
    ) -> tuple[Norms, Mapping[str, Tensor]]:
        """Return the norms of the gradients before unscaling, and the sums of the packed fields.

        On every rank, it raises ReplicaMismatchError if replicas are compared and differ, and ValueError if all shards
        of a parameter are equal.
        Collectives: as `GlobalNorm` (one with ``reduction="packed"``) or `ExactNorm` (up to two).
        """
        measurer = self._measurer(needs)
        gradients = [param.grad for param in self.params]
        weights = self.params if needs.weights else ()
        compared: dict[str, Tensor] = {}
        for index, check in enumerate(self.checks):
            numbers = check.numbers(None if index else gradients)
            compared[f"replicas {index}"] = check.weighted(numbers)
            if index == 0 and self._shards is not None:
                compared["equal shards"] = self._shards.slots(numbers, check.params, gradients)
        if self.checks and not self._is_repeated and self._check_replicas is not True:
            compared["zero gradients"] = self.checks[0].count_zero(gradients)
        pack = pack.with_fields(compared if vote is None else {**compared, **vote.fields(gradients)})
        norms = measurer(gradients, pack.values, weights)
        if needs.level == "named":
            norms = self._add_named_norms(needs, norms)
        sums = pack.split(norms.extra)
        if compared:
            self._compare(norms.total, {name: sums[name] for name in compared})
        return norms, sums

    def _compare(self, total: Tensor, sums: Mapping[str, Tensor]) -> None:
        """Raise ReplicaMismatchError if replicas differ, ValueError if shards are replicas. Host synchronization: one.

        After a successful comparison, remove the checks that run only once. If the gradients of some replicas were zero,
        run these checks once more in the next measurement. For example, one factor of a new LoRA adapter is zero, so the
        gradient of the other factor is zero in the first step. If this gradient lacks its sum over ranks, the replicas
        differ only in the second step.

        If the total norm is non-finite, nothing is compared, unless ``check_replicas`` is True. ``sums`` has the fields
        of `_measure`, summed over all ranks.
        """
        packed = PackedSum.of({"total": total.view(1), **sums})
        totals = packed.split(packed.values.cpu())
        # After an overflow, gradients of replicas may differ, so the next step is compared instead.
        always = self._check_replicas is True
        if always or bool(totals["total"].isfinite()):
            found = (check.mismatches(totals[f"replicas {index}"]) for index, check in enumerate(self.checks))
            if mismatches := [mismatch for of_check in found for mismatch in of_check]:
                raise ReplicaMismatchError(mismatches)
            if self._shards is not None:
                self._shards.check(totals["equal shards"])
                self._shards = None
            repeats = "zero gradients" in totals and bool(totals["zero gradients"] > 0)
            self._is_repeated = True
            self.checks = self.checks if always or repeats else []

    def _make_global_norm(self, needs: MeasurementSpec) -> GlobalNorm:
        if self._exact:
            by_parameter = self._per_parameter_norms or needs.level in ("parameters", "named")
            return ExactNorm(self.plan, self.registry, needs.norm_type, by_parameter)
        return GlobalNorm(
            self.plan,
            self.registry,
            needs.norm_type,
            self._reduction,
            self._per_parameter_norms or needs.level in ("parameters", "named"),
            Units.of(self.plan, self._regions, needs.unit_dim) if needs.level == "units" else None,
            None if not needs.weights else "parameters" if needs.level == "named" else needs.level,
        )

    def _add_named_norms(self, needs: MeasurementSpec, norms: Norms) -> Norms:
        if needs.patterns not in self._named:
            self._named[needs.patterns] = Named.of(self.plan.parameter_names, needs.patterns)
        named, p = self._named[needs.patterns], needs.norm_type
        weights = named.norms(norms.weights, p, self._constants) if needs.weights else norms.weights
        return norms._replace(named=named.norms(norms.parameters, p, self._constants), weights=weights)

    def _multiply_(self, needs: MeasurementSpec, level: Level, factors: Tensor) -> None:
        """Multiply the gradients by ``factors`` in place. Gradients that are marked as already reduced stay marked.

        ``factors`` are 0-dim for level "total"; otherwise 1-dim: one factor per param group, parameter, named group or
        unit.
        """
        # One call for all marks: the gradients may be views of one buffer, and a write to one view increments the
        # version counter of all views, which would make their marks invalid.
        with keep_complete_marks((param, None) for param in self.params):
            widen_gradients(self.params)
            gradients = [param.grad for param in self.params]
            if level == "total":
                scale_each(gradients, factors)
                return
            if (units := self._measurers[needs].units) is not None:
                for index, gradient in enumerate(gradients):
                    if gradient is not None:
                        units.multiply_(index, gradient, factors)
                return
            if torch.float64 not in {gradient.dtype for gradient in gradients if gradient is not None}:
                factors = factors.float()  # one cast for all gradients
            by_factor: dict[int, list[Tensor | None]] = {}
            for index, gradient in zip(self._factor_indices(needs), gradients, strict=True):
                by_factor.setdefault(index, []).append(gradient)
            for index, members in by_factor.items():
                scale_each(members, factors[index])

    def _factor_indices(self, needs: MeasurementSpec) -> Sequence[int]:
        """Return the index of each gradient's factor among the factors per param group, parameter or named group."""
        if needs.level == "groups":
            return [entry.group for entry in self.plan.entries]
        if needs.level == "named":
            groups = self._named[needs.patterns].groups
            return [groups[slot] for slot in self.plan.parameter_slots]
        return self.plan.parameter_slots


def inverse_weight(totals: Tensor, data_ranks: int, mean_of: int = 1) -> Tensor:
    """Return D / W as a 0-dim tensor; 1 / ``mean_of`` if the total weight W is 0; NaN if W is negative or NaN.

    W is the maximum of ``totals``, because pipeline stages that compute no loss have a total of 0.

    ``totals`` has the sum over all ranks of the field ``"window_weight"`` per pipeline stage. ``data_ranks`` is D, and
    ``mean_of`` the number of micro-batches over which the window's gradient is the mean.
    """
    total = totals.amax() if len(totals) > 1 else totals[0]
    return (data_ranks / total).masked_fill_(total < 0, torch.nan).masked_fill_(total == 0, 1.0 / mean_of)


def _is_applied(flags: StepFlags, earlier: StepDecision | None) -> Tensor:
    """Return a 0-dim bool: True if the step is applied, unless the rule itself skips it."""
    applied = flags.finite
    skips = None if earlier is None else earlier.skipped
    for skip in (flags.rejected, flags.replicas_diverged, flags.ranks_disagree, skips):
        if skip is not None:
            applied = applied & (skip == 0)
    return applied
