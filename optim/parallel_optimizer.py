"""The order of a step's stages: complete the gradients -> measure -> decide -> apply -> count."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..parallel.agreement import gather_objects, on_all_ranks
from ..parallel.registry import ProcessGroupRegistry
from .apply import apply_update
from .clipping import checked_threshold, clamp_gradients, clip_coefficient, scale_gradients
from .global_norm import GlobalNorm, Norms, Reduction, checked_norm_type, checked_reduction
from .grad_stats import GradStats
from .gradient_sync import GradientSync
from .plan_agreement import agree
from .reduction_plan import ReductionPlan, check_dense_real, entries_of
from .replica_check import ReplicaCheck, ReplicaMismatchError
from .skip_monitor import SkipMonitor


class _Bound(NamedTuple):
    """What follows from the parameters; made anew when they change."""

    params: list[Tensor]
    plan: ReductionPlan
    sync: GradientSync
    replicas: ReplicaCheck | None


class ParallelOptimizer(torch.optim.Optimizer):
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
        registry: The groups of the mesh that the specs name.
        max_norm: Clip the global norm to this; in unscaled gradient units, finite, > 0; None: measure only. A param group
            with its own ``"max_norm"`` is clipped by its own norm, and the others by theirs together.
        norm_type: p >= 1, or inf.
        clip_value: Clamp every gradient element to [-clip_value, clip_value] instead, after measuring.
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
        on_nonfinite: Literal["skip", "raise"] = "skip",
        average_data: bool = True,
        reduction: Reduction = "packed",
        per_parameter_norms: bool = False,
        check_replicas: bool = False,
        max_skips_in_a_row: int = 50,
    ) -> None:
        # Not super().__init__: the wrapped optimizer has the parameters and the state; this one passes them on.
        self.optimizer, self.registry = optimizer, registry
        self._optimizer_step_pre_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._patch_step_function()
        self.max_norm, self.clip_value, self.norm_type = max_norm, clip_value, norm_type
        self.on_nonfinite, self.average_data, self.reduction = on_nonfinite, average_data, reduction
        self.per_parameter_norms, self.check_replicas = per_parameter_norms, check_replicas
        self.max_skips_in_a_row = max_skips_in_a_row
        self._bound = self._bind()
        self._measurers: dict[float, GlobalNorm] = {}
        self._monitor = SkipMonitor(registry.device)
        self._checked_kinds = False
        self.last_stats: GradStats | None = None
        self._open_window()

    # Binding ---------------------------------------------------------------------------------------------------------

    def _bind(self) -> _Bound:
        """Check arguments and parameters together with all other ranks, and plan what follows from them."""

        def plan_locally() -> ReductionPlan:
            self._check_arguments()
            topology = self.registry.topology
            return ReductionPlan.of(entries_of(self._named_groups(), topology), topology, self.registry.global_rank)

        names = self.per_parameter_norms or self.check_replicas
        plan = agree(on_all_ranks(plan_locally, self.registry), self.registry, names)
        params = [param for group in self.param_groups for param in group["params"]]
        sync = GradientSync(params, plan, self.registry, self.average_data)
        return _Bound(params, plan, sync, ReplicaCheck(plan) if self.check_replicas else None)

    def _check_arguments(self) -> None:
        if isinstance(self.optimizer, ParallelOptimizer):
            raise TypeError("the optimizer is a ParallelOptimizer already; wrap a plain torch optimizer")
        if self.max_norm is not None and self.clip_value is not None:
            raise ValueError("max_norm and clip_value are both given; choose one, or call clip_grad_by_value yourself")
        if self.on_nonfinite not in ("skip", "raise"):
            raise ValueError(f"on_nonfinite={self.on_nonfinite!r}: give 'skip' or 'raise'")
        if self.max_skips_in_a_row < 1:
            raise ValueError(f"max_skips_in_a_row={self.max_skips_in_a_row}: give a number >= 1")
        checked_norm_type(self.norm_type)
        checked_reduction(self.reduction)
        for value, name in ((self.max_norm, "max_norm"), (self.clip_value, "clip_value")):
            if value is not None:
                checked_threshold(value, name)
        for index, group in enumerate(self.param_groups):
            if group.get("max_norm") is not None:
                checked_threshold(group["max_norm"], f"max_norm of param group {index}")

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
        try:
            on_all_ranks(lambda: self.optimizer.add_param_group(param_group), self.registry)
            self._bound = self._bind()
        except (ValueError, TypeError, RuntimeError):
            del self.param_groups[before:]
            raise
        self._measurers.clear()
        self._checked_kinds = False

    # The step --------------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """``loss.backward(**kwargs)``; gradients add up until `zero_grad`."""
        self._open_window()
        loss.backward(**kwargs)

    @torch.no_grad()
    def step(self, closure: None = None) -> GradStats:  # type: ignore[override]
        """Complete, measure and clip the gradients, and step; or skip on every rank.

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
        stats = self._clipped
        if stats is None:
            stats, factor = self._decide(self._measure(self.norm_type), self.max_norm)
            if self.clip_value is not None:
                clamp_gradients(self._bound.params, self.clip_value)
        else:
            factor = None
        self._stop_if_nonfinite(stats)
        apply_update(self.optimizer, stats.found_inf, factor)
        self._monitor.update(stats.found_inf)
        self.last_stats = stats
        self._open_window()
        if problem is not None:
            raise problem
        return stats

    @torch.no_grad()
    def clip_grad_by_norm(self, max_norm: float, norm_type: float | None = None) -> GradStats:
        """Complete and measure the gradients now and clip them in place; `step` then neither measures nor clips again.

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
        self._raise(self._complete_gradients())
        stats, factor = self._decide(self._measure(p), max_norm)
        if factor is not None:
            scale_gradients(self._bound.params, factor)
        return self._keep(stats)

    @torch.no_grad()
    def clip_grad_by_value(self, clip_value: float) -> GradStats:
        """Complete and measure the gradients now, then clamp every element to [-clip_value, clip_value] in place.

        Returns:
            GradStats with the norm before clamping; `step` then neither measures nor clips again.
        Raises:
            ValueError: clip_value is not finite and positive; nothing is changed.
        Collectives: those of a step. Host reads: none.
        """
        clip_value = checked_threshold(clip_value, "clip_value")
        self._raise(self._complete_gradients())
        stats, _ = self._decide(self._measure(self.norm_type), None)
        clamp_gradients(self._bound.params, clip_value)
        return self._keep(stats)

    def _open_window(self) -> None:
        """Gradients are about to change: what is known of them no longer holds."""
        self._synced = False
        self._clipped: GradStats | None = None

    def _keep(self, stats: GradStats) -> GradStats:
        if self._clipped is not None:  # clamping after a clip, say, must not hide what the first measurement found
            stats = GradStats(
                stats.total_norm,
                stats.clip_coef,
                torch.maximum(stats.found_inf, self._clipped.found_inf),
                stats.group_norms,
                stats.parameter_norms,
            )
        self._clipped = stats
        return stats

    def _complete_gradients(self) -> TypeError | None:
        """Reduce the gradients, once a window. Returns what is wrong with this rank's, after all ranks have been served."""
        if self._synced:
            return None
        problem = None
        if not self._checked_kinds:
            on_all_ranks(self._check_kinds, self.registry)
            self._checked_kinds = True
        else:
            problem = self._poison_bad_kinds()
        self._bound.sync()
        self._synced = True
        return problem

    def _check_kinds(self) -> None:
        gradients = [param.grad for param in self._bound.params]
        kinds = {(gradient.layout, gradient.dtype) for gradient in gradients if gradient is not None}
        if all(layout is torch.strided and not dtype.is_complex for layout, dtype in kinds):
            return
        for param, entry in zip(self._bound.params, self._bound.plan.entries, strict=True):
            if param.grad is not None:
                check_dense_real(param.grad, f"the gradient of {entry.name}")

    def _poison_bad_kinds(self) -> TypeError | None:
        """NaN in place of gradients that have no norm: this rank keeps its part in the collectives, and all ranks skip."""
        try:
            self._check_kinds()
        except TypeError as problem:
            for param in self._bound.params:
                if param.grad is not None and (param.grad.is_complex() or param.grad.layout != torch.strided):
                    param.grad = torch.full_like(param, torch.nan)
            return problem
        return None

    @staticmethod
    def _raise(problem: TypeError | None) -> None:
        if problem is not None:
            raise problem

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

    def _decide(self, norms: Norms, max_norm: float | None) -> tuple[GradStats, Tensor | None]:
        """The statistics, and the factor for all gradients that is still to be applied (None: none)."""
        own = [group.get("max_norm") for group in self.param_groups]
        found_inf = norms.total.isfinite().logical_not().float()
        factor = None if max_norm is None else clip_coefficient(norms.total, max_norm)
        if any(value is not None for value in own):
            factor = self._clip_by_group(norms, max_norm, own)
        coef = torch.ones_like(norms.total) if factor is None else factor
        names = self._bound.plan.parameter_names if self.per_parameter_norms else ()
        stats = GradStats(
            norms.total, coef, found_inf, norms.groups, dict(zip(names, norms.parameters.unbind(), strict=True))
        )
        return stats, None if any(value is not None for value in own) else factor

    def _clip_by_group(self, norms: Norms, max_norm: float | None, own: list[float | None]) -> Tensor:
        """Clip each group that has its own threshold by its own norm, the others by theirs together, in place."""
        others = [index for index, value in enumerate(own) if value is None]
        others += range(len(own), self._bound.plan.num_groups)
        rest = torch.linalg.vector_norm(norms.groups[others], self.norm_type)
        common = torch.ones_like(norms.total) if max_norm is None else clip_coefficient(rest, max_norm)
        finite = norms.total.isfinite()
        for group, norm, threshold in zip(self.param_groups, norms.groups.unbind(), own, strict=False):
            factor = common if threshold is None else clip_coefficient(norm, threshold)
            scale_gradients(group["params"], torch.where(finite, factor, torch.ones_like(factor)))
        return common

    def _stop_if_nonfinite(self, stats: GradStats) -> None:
        in_a_row = self._monitor.in_a_row_before()
        if in_a_row >= self.max_skips_in_a_row:
            reason = f"{in_a_row} steps in a row were skipped because the gradient norm was not finite"
        elif self.on_nonfinite == "raise" and bool(stats.found_inf):
            reason = f"the gradient norm is {float(stats.total_norm)}"
        else:
            return
        mine = [
            entry.name
            for param, entry in zip(self._bound.params, self._bound.plan.entries, strict=True)
            if param.grad is not None and not bool(param.grad.isfinite().all())
        ]
        names = dict.fromkeys(name for report in gather_objects(mine, self.registry) for name in report)
        self._open_window()
        raise FloatingPointError(
            f"{reason}; gradients that are not finite now: {', '.join(names) or 'none (the norm itself overflowed)'}. "
            "Nothing was stepped: look for a too large learning rate, a division by zero or a too large loss scale"
        )

    # What other code expects of a torch optimizer --------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as torch's optimizers do."""
        self.optimizer.zero_grad(set_to_none)
        self._open_window()

    @property
    def grad_norm(self) -> Tensor | None:
        """The global norm that the last step measured, before clipping; a device tensor, None before the first step."""
        return None if self.last_stats is None else self.last_stats.total_norm

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped so far. Host reads: one."""
        return self._monitor.total()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's param groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    @property
    def plan(self) -> ReductionPlan:
        """What the norm sums over which ranks, agreed by all ranks; print it."""
        return self._bound.plan

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state of this rank's pieces, and under ``"meshstep"`` the count of skipped steps."""
        return {**self.optimizer.state_dict(), "meshstep": {"skipped_steps": self.skipped_steps}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, or the plain dict of the wrapped optimizer (the count starts at 0 then).

        Raises:
            ValueError: It doesn't fit the wrapped optimizer; nothing is changed.
        """
        own = state_dict.get("meshstep", {"skipped_steps": 0})
        self.optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != "meshstep"})
        self._monitor.restore(int(own["skipped_steps"]))
        self._open_window()

    def __repr__(self) -> str:
        clip = f"clip_value={self.clip_value}" if self.clip_value is not None else f"max_norm={self.max_norm}"
        p = self.norm_type
        return f"ParallelOptimizer({clip}, norm_type={p}, {self.registry.topology!r}, {self.optimizer!r})"
