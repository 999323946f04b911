"""The order of a step's stages: complete the gradients -> measure -> decide -> apply -> count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..amp.precision import Precision, precision_of
from ..amp.weights import make_weights
from ..parallel.agreement import on_all_ranks
from ..parallel.registry import ProcessGroupRegistry
from .apply import apply_update
from .checks import check_kinds, check_thresholds, nonfinite_names, poison_bad_kinds
from .clipping import checked_threshold, clamp_gradients, scale_gradients
from .decision import Decision, decide
from .facade import OptimizerFacade
from .global_norm import GlobalNorm, Norms, Reduction, checked_norm_type, checked_reduction
from .grad_stats import GradStats
from .gradient_sync import GradientSync
from .plan_agreement import agree
from .reduction_plan import ReductionPlan, entries_of
from .replica_check import ReplicaCheck, ReplicaMismatchError
from .saved_state import load_checked
from .skip_monitor import SkipMonitor


class _Bound(NamedTuple):
    """What follows from the parameters; made anew when they change."""

    params: list[Tensor]
    plan: ReductionPlan
    sync: GradientSync
    replicas: ReplicaCheck | None


class ParallelOptimizer(OptimizerFacade):
    """Steps a torch optimizer by the exact global gradient norm of a model that is split over a mesh.

        optimizer = ParallelOptimizer(torch.optim.AdamW(model.parameters(), fused=True), registry, max_norm=1.0)
        optimizer.backward(loss)
        stats = optimizer.step()
        optimizer.zero_grad()

    `step` completes the gradients (data axes averaged, pending sums made, tied copies combined), measures them, clips,
    and steps the wrapped optimizer, on every rank or on none: a norm that is not finite skips the step everywhere. Every
    rank must construct it at the same point with its own part of the model (a rank that has none gives
    ``[{"params": []}]``), and call the same methods in the same order.

    Args:
        optimizer: A torch optimizer over declared parameters. Adam, AdamW, SGD and Adagrad with ``fused=True`` take the
            factor and the skip on the device; any other costs one pass over the gradients and one host read a step.
            In modes with master weights its param groups then hold the masters.
        registry: The groups of the mesh that the specs name.
        max_norm: Clip the global norm to this; in unscaled gradient units, finite, > 0; None: measure only. A param group
            with its own ``"max_norm"`` is clipped by its own norm, and the others by theirs together.
        norm_type: p >= 1, or inf.
        clip_value: Clamp every gradient element to [-clip_value, clip_value] instead, after measuring.
        precision: The mode's name or object (`meshstep.amp`). ``precision.prepare(model)`` makes the model run in it;
            here it says whether there are master weights and a loss scale.
        on_nonfinite: ``"skip"`` the step on every rank, or ``"raise"`` FloatingPointError on every rank with the
            parameters' names (one host read a step).
        average_data: False where something else (DDP, FSDP) averages gradients over the data axes.
        reduction: ``"packed"`` or ``"per_group"``; see `GlobalNorm`.
        per_parameter_norms: Put the norm of every logical parameter into GradStats.
        check_replicas: Compare the bits of all replicas before every step and raise `ReplicaMismatchError`, on every
            rank, where they differ. For debugging: it reads everything once more and costs one host read a step.
        max_skips_in_a_row: So many skipped steps in a row are an error on every rank, noticed at most 16 steps late.

    Raises:
        ValueError, TypeError: On every rank, when an argument is out of range or when, on any rank, a parameter is
            undeclared, complex, sparse or laid out in a way that does not fit; when ranks declare different things.
            The optimizer is left as it was.
    Collectives: here, object all-gathers. A step: those of `GradientSync`, and one to measure. Host reads: none in a
    step but where said above, and on the first one, which checks on all ranks that gradients are dense and real.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        registry: ProcessGroupRegistry,
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        clip_value: float | None = None,
        precision: str | Precision = "fp32",
        on_nonfinite: Literal["skip", "raise"] = "skip",
        average_data: bool = True,
        reduction: Reduction = "packed",
        per_parameter_norms: bool = False,
        check_replicas: bool = False,
        max_skips_in_a_row: int = 50,
    ) -> None:
        super().__init__(optimizer)
        self.registry = registry
        self.max_norm, self.clip_value, self.norm_type = max_norm, clip_value, norm_type
        self.on_nonfinite, self.average_data, self.reduction = on_nonfinite, average_data, reduction
        self.per_parameter_norms, self.check_replicas = per_parameter_norms, check_replicas
        self.max_skips_in_a_row = max_skips_in_a_row
        plan = self._agreed_plan(precision)
        self.precision = precision_of(precision)
        self.loss_scale = self.precision.make_loss_scale(registry.device)
        self._weights = make_weights(optimizer, self.precision, registry)
        self._bound = self._bind(plan)
        self._measurers: dict[float, GlobalNorm] = {}
        self._monitor = SkipMonitor(registry.device)
        self._checked_kinds = False
        self.last_stats: GradStats | None = None
        self._synced = False
        self._clipped: GradStats | None = None  # by an explicit call, in this window

    # Binding ---------------------------------------------------------------------------------------------------------

    def _agreed_plan(self, precision: str | Precision) -> ReductionPlan:
        """Check arguments and parameters together with all other ranks, before anything is changed."""

        def plan_locally() -> ReductionPlan:
            self._check_arguments(precision)
            topology = self.registry.topology
            return ReductionPlan.of(entries_of(self._named_groups(), topology), topology, self.registry.global_rank)

        names = self.per_parameter_norms or self.check_replicas
        return agree(on_all_ranks(plan_locally, self.registry), self.registry, names)

    def _bind(self, plan: ReductionPlan) -> _Bound:
        params = [param for group in self.param_groups for param in group["params"]]
        sync = GradientSync(params, plan, self.registry, self.average_data)
        return _Bound(params, plan, sync, ReplicaCheck(plan) if self.check_replicas else None)

    def _check_arguments(self, precision: str | Precision) -> None:
        if isinstance(self.optimizer, ParallelOptimizer):
            raise TypeError("the optimizer is a ParallelOptimizer already; wrap a plain torch optimizer")
        if self.on_nonfinite not in ("skip", "raise"):
            raise ValueError(f"on_nonfinite={self.on_nonfinite!r}: give 'skip' or 'raise'")
        if self.max_skips_in_a_row < 1:
            raise ValueError(f"max_skips_in_a_row={self.max_skips_in_a_row}: give a number >= 1")
        precision_of(precision)
        checked_norm_type(self.norm_type)
        checked_reduction(self.reduction)
        check_thresholds(self.max_norm, self.clip_value, self.param_groups)

    def _named_groups(self) -> list[list[Tensor | tuple[str, Tensor]]]:
        return [
            list(zip(group["param_names"], group["params"], strict=True)) if "param_names" in group else group["params"]
            for group in self.param_groups
        ]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group and plan anew; every rank must, at the same point. Nothing changes where it raises.

        Raises, collectives: as the constructor.
        """
        before = len(self.param_groups)
        candidate = dict(param_group)
        try:
            # First as it is, so that nothing but the list of groups has to be undone.
            on_all_ranks(lambda: self.optimizer.add_param_group(candidate), self.registry)
            plan = self._agreed_plan(self.precision)
        finally:
            del self.param_groups[before:]
        self._weights.add_param_group(param_group)
        self._bound = self._bind(plan)
        self._measurers.clear()
        self._checked_kinds = False

    # The step --------------------------------------------------------------------------------------------------------

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for code that calls backward itself (a pipeline's last stage).

        Args:
            loss: 0-dim; float32 or float64 in modes with a loss scale, or it is cast: scaled half types overflow.
        Returns:
            0-dim; ``loss`` itself in modes without a loss scale.
        """
        if self.loss_scale is None:
            return loss
        return (loss if loss.dtype == torch.float64 else loss.float()) * self.loss_scale.scale

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Scale the loss and call backward, with ``kwargs``; gradients add up until `zero_grad`."""
        self._open_window()
        self.scale_loss(loss).backward(**kwargs)

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> GradStats:  # type: ignore[override]
        """Complete, measure and clip the gradients, and step; or skip on every rank. Then update the loss scale.

        Returns:
            GradStats: the norm before clipping, the coefficient, and whether the step was skipped. Device tensors.
        Raises:
            FloatingPointError: With ``on_nonfinite="raise"``; or too many steps in a row were skipped. On every rank.
            ReplicaMismatchError: With ``check_replicas=True``. On every rank.
            TypeError: A gradient is complex or sparse. On every rank in the first step; later on the rank that has it,
                while all others skip.
            ValueError: A closure is given.
        Collectives: as the class says. Host reads: none, but where the class says so.
        """
        if closure is not None:
            raise ValueError("step takes no closure: a skipped step can't be evaluated again; call backward, then step")
        problem = self._complete_gradients()
        if self._clipped is None:
            decision = self._decide(self.norm_type, self.max_norm)
            if self.clip_value is not None:
                self._apply_in_place(decision, self.clip_value)
        else:
            decision = Decision(self._clipped, None, None)
        stats = decision.stats
        self._stop_if_nonfinite(stats)
        if decision.group_factors is not None:
            self._apply_in_place(decision)
        folded = None if self.clip_value is not None else decision.factor
        self._weights.step(lambda: apply_update(self.optimizer, stats.found_inf, folded))
        # Only now: the gradients were divided by the scale that backward used.
        if self.loss_scale is not None:
            self.loss_scale.update(stats.found_inf)
        self._monitor.update(stats.found_inf)
        self.last_stats = stats
        self._open_window()
        if problem is not None:
            raise problem
        return stats

    @torch.no_grad()
    def clip_grad_by_norm(self, max_norm: float, norm_type: float | None = None) -> GradStats:
        """Complete, measure, unscale and clip the gradients now, in place; `step` then does none of it again.

        Args:
            max_norm: Threshold in unscaled gradient units, finite, > 0; replaces the constructor's for this step.
            norm_type: p >= 1 or inf; None: the constructor's.
        Returns:
            GradStats with the norm before clipping.
        Raises:
            ValueError: An argument is out of range; nothing is changed.
        Collectives: those of a step. Host reads: none.
        """
        max_norm = checked_threshold(max_norm, "max_norm")
        p = self.norm_type if norm_type is None else checked_norm_type(norm_type)
        return self._clip_now(p, max_norm, None)

    @torch.no_grad()
    def clip_grad_by_value(self, clip_value: float) -> GradStats:
        """Complete, measure and unscale the gradients now, and clamp every element to [-clip_value, clip_value].

        Returns:
            GradStats with the norm before clamping; `step` then neither measures nor clips again.
        Raises:
            ValueError: clip_value is not finite and positive; nothing is changed.
        Collectives: those of a step. Host reads: none.
        """
        return self._clip_now(self.norm_type, None, checked_threshold(clip_value, "clip_value"))

    def _clip_now(self, norm_type: float, max_norm: float | None, clip_value: float | None) -> GradStats:
        problem = self._complete_gradients()
        if problem is not None:
            raise problem
        decision = self._decide(norm_type, max_norm)
        self._apply_in_place(decision, clip_value)
        stats = decision.stats
        if self._clipped is not None:  # a second clip in one window must not hide what the first one found
            stats = replace(stats, found_inf=torch.maximum(stats.found_inf, self._clipped.found_inf))
        self._clipped = stats
        return stats

    def _open_window(self) -> None:
        """Gradients are about to change: what is known of them no longer holds."""
        self._synced = False
        self._clipped = None

    def _complete_gradients(self) -> TypeError | None:
        """Reduce the gradients, once a window. Returns what is wrong with this rank's, after all ranks have been served."""
        if self._synced:
            return None
        self._weights.collect()
        params, plan, sync, _ = self._bound
        problem = None
        if self._checked_kinds:
            problem = poison_bad_kinds(params, plan.entries)
        else:
            on_all_ranks(lambda: check_kinds(params, plan.entries), self.registry)
            self._checked_kinds = True
        sync()
        self._synced = True
        return problem

    def _measure(self, norm_type: float) -> Norms:
        params, plan, _, replicas = self._bound
        if norm_type not in self._measurers:
            self._measurers[norm_type] = GlobalNorm(
                plan, self.registry, norm_type, self.reduction, self.per_parameter_norms
            )
        extra = replicas.slots(params, self.registry.device) if replicas else None
        norms = self._measurers[norm_type]([param.grad for param in params], extra)
        if replicas and (mismatches := replicas.mismatches(norms.extra)):
            raise ReplicaMismatchError(mismatches)
        return norms

    def _decide(self, norm_type: float, max_norm: float | None) -> Decision:
        # Gradients that were clipped in place in this window are unscaled already.
        scaled = self.loss_scale if self._clipped is None else None
        thresholds = [group.get("max_norm") for group in self.param_groups]
        names = self._bound.plan.parameter_names if self.per_parameter_norms else ()
        inverse = None if scaled is None else scaled.scale.double().reciprocal()
        decision = decide(self._measure(norm_type), inverse, max_norm, thresholds, norm_type, names)
        if self.loss_scale is None:
            return decision
        return decision._replace(stats=replace(decision.stats, loss_scale=self.loss_scale.scale.clone()))

    def _apply_in_place(self, decision: Decision, clip_value: float | None = None) -> None:
        """Multiply the gradients by the decision's factors, unless they are not finite, and clamp them."""
        if decision.group_factors is not None:
            for group, factor in zip(self.param_groups, decision.group_factors, strict=False):
                scale_gradients(group["params"], factor)
        elif decision.factor is not None:
            scale_gradients(self._bound.params, decision.factor)
        if clip_value is not None:
            clamp_gradients(self._bound.params, clip_value)

    def _stop_if_nonfinite(self, stats: GradStats) -> None:
        in_a_row = self._monitor.in_a_row_before()
        if in_a_row >= self.max_skips_in_a_row:
            reason = f"{in_a_row} steps in a row were skipped because the gradient norm was not finite"
        elif self.on_nonfinite == "raise" and bool(stats.found_inf):
            reason = f"the gradient norm is {float(stats.total_norm)}"
        else:
            return
        names = nonfinite_names(self._bound.params, self._bound.plan.entries, self.registry)
        self._open_window()
        raise FloatingPointError(
            f"{reason}; gradients that are not finite now: {', '.join(names) or 'none (the norm itself overflowed)'}. "
            "Nothing was stepped: look for a too large learning rate, a division by zero or a too large loss scale"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as torch's optimizers do; those of the model's parameters too where there are masters."""
        self._weights.zero_grad(set_to_none)
        self._open_window()

    # Reports and state -----------------------------------------------------------------------------------------------

    @property
    def grad_norm(self) -> Tensor | None:
        """The global norm that the last step measured, unscaled, before clipping; None before the first step."""
        return None if self.last_stats is None else self.last_stats.total_norm

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped so far. Host reads: one."""
        return self._monitor.total()

    @property
    def plan(self) -> ReductionPlan:
        """What the norm sums over which ranks, agreed by all ranks; print it."""
        return self._bound.plan

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state of this rank's pieces, and under ``"meshstep"`` all else a new process needs:
        precision mode, loss scale, master weights, count of skipped steps. Host reads: a few."""
        own = {
            "precision": self.precision.name,
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state_dict(),
            "weights": self._weights.state_dict(),
            "skipped_steps": self.skipped_steps,
        }
        return {**self.optimizer.state_dict(), "meshstep": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue, bit for bit, from what `state_dict` gave; every rank must call it, with the state of its own pieces.

        In a mode without master weights and loss scale a plain dict of the wrapped optimizer loads too.

        Raises:
            ValueError: On every rank, when on any rank it comes from another precision mode or does not fit; nothing is
                changed then.
        Collectives: an object all-gather. Host reads: a few.
        """
        load_checked(self, self._weights, state_dict)
        self._monitor.restore(int(state_dict.get("meshstep", {}).get("skipped_steps", 0)))
        self._open_window()

    def __repr__(self) -> str:
        clip = f"clip_value={self.clip_value}" if self.clip_value is not None else f"max_norm={self.max_norm}"
        how = f"{clip}, norm_type={self.norm_type}, precision={self.precision.name!r}"
        return f"ParallelOptimizer({how}, {self.registry.topology!r}, {self.optimizer!r})"
