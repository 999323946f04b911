"""The order of a step's stages: complete the gradients -> measure -> decide -> apply -> count."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..amp.by_name import precision_of
from ..amp.precision import Precision
from ..parallel.mesh.agreement import on_all_ranks
from ..parallel.mesh.registry import ProcessGroupRegistry
from .clip.decision import Decision, decide
from .clip.functional import checked_threshold
from .clip.thresholds import agreed_thresholds
from .gradients.bound import BoundGradients
from .gradients.checks import check_thresholds
from .norm.agreement import agree
from .norm.global_norm import Reduction, checked_norm_type, checked_reduction
from .norm.plan import ReductionPlan, entries_of
from .norm.stats import GradStats
from .states.dtensors import DTensorParameters, check_update
from .states.frozen import FrozenParameters
from .states.make_weights import check_placement, make_stepped_weights
from .states.saved import load_checked
from .states.sharded import Sharding
from .states.stepped_weights import named_params_of
from .step.facade import OptimizerFacade
from .step.skips import SkipMonitor
from .step.update import apply_update
from .step.window import DataParallelSwitch, Window, inverse_weight


class _Clip(NamedTuple):
    """What an explicit call asks for."""

    norm_type: float
    max_norm: float | None
    clip_value: float | None


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

    A parameter that is frozen when the optimizer is made has no part in any collective, and to unfreeze it later is an
    error; one that is frozen later, on all ranks, is left out of the steps from then on.

    Args:
        optimizer: A torch optimizer over declared parameters. Adam, AdamW, SGD and Adagrad with ``fused=True`` take the
            factor and the skip on the device; any other costs one pass over the gradients and one host read a step.
            In modes with master weights its param groups then hold the masters, and in the place of DTensor parameters
            (`fully_shard`, `parallelize_module`; see `meshstep.parallel.interop.dtensor`) their local tensors.
        registry: The groups of the mesh that the specs name.
        max_norm: Clip the global norm to this; in unscaled gradient units, finite, > 0; None: measure only. A param group
            with its own ``"max_norm"`` is clipped by its own norm, and the others by theirs together. Ranks agree on these
            here; they may be changed later where all ranks have all groups.
        norm_type: p >= 1, or inf.
        clip_value: Clamp every gradient element to [-clip_value, clip_value] instead, after measuring.
        precision: The mode's name or object (`meshstep.amp`). ``precision.prepare(model)`` makes the model run in it;
            here it says whether there are master weights and a loss scale.
        on_nonfinite: ``"skip"`` the step on every rank, or ``"raise"`` FloatingPointError on every rank with the
            parameters' names (one host read a step).
        accumulation_steps: K: manage windows of K micro-batches, each a `backward`; `step` and `zero_grad` do nothing
            before the K-th, and the gradient is the mean over the window. None: gradients add up until you call `step`.
        data_parallel: The `DistributedDataParallel` or `fully_shard` module that averages gradients over the data axes;
            it synchronises in the last micro-batch of a window only. None: `step` averages, in a few collectives, as
            it does for parameters that were left out of `fully_shard`.
        average_data: False where something else than ``data_parallel`` averages gradients over the data axes.
        shard_states: The axis over which optimizer states and master weights are sharded, usually ``"data"`` (ZeRO-1); see
            `ShardedWeights`. The param groups then hold this rank's pieces.
        shard_gradients: Shard the gradients as well (ZeRO-2): every backward reduces them into this rank's slice, and all
            ranks must call `backward` for every micro-batch. Bucket by bucket while it runs; where the model itself uses
            the axis (a spec names it, or it is no data axis by its name), only when it has ended.
        offload: The fraction of the elements whose masters and optimizer states are kept and stepped on the CPU; see
            `OffloadedWeights`. A step then waits for the device.
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
        accumulation_steps: int | None = None,
        data_parallel: nn.Module | None = None,
        average_data: bool = True,
        shard_states: str | None = None,
        shard_gradients: bool = False,
        offload: float | None = None,
        reduction: Reduction = "packed",
        per_parameter_norms: bool = False,
        check_replicas: bool = False,
        max_skips_in_a_row: int = 50,
    ) -> None:
        super().__init__(optimizer)
        self.registry = registry
        self.max_norm, self.clip_value, self.norm_type = max_norm, clip_value, norm_type
        self.on_nonfinite, self.reduction = on_nonfinite, reduction
        # What fully_shard averages are its DTensors; parameters left out of it are averaged here.
        by_ddp = isinstance(data_parallel, DistributedDataParallel)
        self.average_data, self.accumulation_steps = average_data and not by_ddp, accumulation_steps
        self.per_parameter_norms, self.check_replicas = per_parameter_norms, check_replicas
        self.max_skips_in_a_row = max_skips_in_a_row
        self.shard_states, self.shard_gradients, self.offload = shard_states, shard_gradients, offload
        self._model_groups = [named_params_of([group]) for group in self.param_groups]
        plan = self._agreed_plan(precision, data_parallel)
        self.precision = precision_of(precision)
        self.window = Window(accumulation_steps)
        self._switch = None if data_parallel is None else DataParallelSwitch(data_parallel)
        self.loss_scale = self.precision.make_loss_scale(registry.device)
        # Where backward leaves gradients; local tensors and masters take their place in the param groups below.
        self._model_params = [param for group in self.param_groups for param in group["params"]]
        self._frozen = FrozenParameters()
        self._frozen.add(named for group in self._model_groups for named in group)
        self._dtensors = DTensorParameters(optimizer, registry.topology)
        # DDP reduces gradients in the parameters' dtype and breaks on main grads.
        main_grads = self._switch is None or not self._switch.is_ddp
        sharding = Sharding(shard_states, shard_gradients, self.average_data) if shard_states else None
        self._weights = make_stepped_weights(
            optimizer, self.precision, registry, main_grads=main_grads, sharding=sharding, offload=offload
        )
        self._gradients = self._bind(plan)
        self._monitor = SkipMonitor(registry.device)
        self.last_stats: GradStats | None = None
        self._synced = False
        self._clipped: GradStats | None = None  # by an explicit call, in this window
        self._clip_later: _Clip | None = None  # an explicit call before the end of the window
        self._expect_next()

    # Binding ---------------------------------------------------------------------------------------------------------

    def _agreed_plan(self, precision: str | Precision, data_parallel: nn.Module | None = None) -> ReductionPlan:
        """Check arguments and parameters together with all other ranks, before anything is changed."""

        def plan_locally() -> ReductionPlan:
            self._check_arguments(precision)
            check_placement(
                self.optimizer,
                precision_of(precision),
                self.registry,
                shard_states=self.shard_states,
                shard_gradients=self.shard_gradients,
                offload=self.offload,
                averages_data=self.average_data,
                data_parallel=None if data_parallel is None else DataParallelSwitch(data_parallel),
            )
            topology = self.registry.topology
            return ReductionPlan.of(entries_of(self._named_groups(), topology), topology, self.registry.global_rank)

        names = self.per_parameter_norms or self.check_replicas
        plan = agree(on_all_ranks(plan_locally, self.registry), self.registry, names)
        self._agreed_thresholds = agreed_thresholds(self.param_groups, self.registry)
        return plan

    def _bind(self, plan: ReductionPlan) -> BoundGradients:
        return BoundGradients(
            self._weights.measured(),
            self._weights.compared(),
            self._weights.derive(plan),
            self.registry,
            average_data=self.average_data,
            reduction=self.reduction,
            per_parameter_norms=self.per_parameter_norms,
            check_replicas=self.check_replicas,
        )

    def _check_arguments(self, precision: str | Precision) -> None:
        if isinstance(self.optimizer, ParallelOptimizer):
            raise TypeError("the optimizer is a ParallelOptimizer already; wrap a plain torch optimizer")
        if self.on_nonfinite not in ("skip", "raise"):
            raise ValueError(f"on_nonfinite={self.on_nonfinite!r}: give 'skip' or 'raise'")
        if self.max_skips_in_a_row < 1:
            raise ValueError(f"max_skips_in_a_row={self.max_skips_in_a_row}: give a number >= 1")
        precision_of(precision)
        Window(self.accumulation_steps)
        check_update(self.optimizer)
        checked_norm_type(self.norm_type)
        checked_reduction(self.reduction)
        check_thresholds(self.max_norm, self.clip_value, self.param_groups)

    def _named_groups(self) -> list[list[Tensor | tuple[str, Tensor]]]:
        return [[param if name is None else (name, param) for name, param in group] for group in self._model_groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group and plan anew; every rank must, at the same point. Nothing changes where it raises.

        Raises, collectives: as the constructor.
        """
        before, given = len(self.param_groups), param_group["params"]
        params = [given] if isinstance(given, Tensor) else list(given)
        added = named_params_of([{**param_group, "params": params}])

        def add_for_a_moment() -> None:
            # First as it is, so that nothing but the list of groups has to be undone.
            self.optimizer.add_param_group({**param_group, "params": params})
            known = {id(param) for group in self._model_groups for _, param in group}
            if any(id(param) in known for _, param in added):
                raise ValueError("some parameters of the new group are in another group already; give each once")
            self._model_groups.append(added)

        try:
            on_all_ranks(add_for_a_moment, self.registry)
            plan = self._agreed_plan(self.precision)
        except (ValueError, TypeError, RuntimeError):
            del self._model_groups[before:]
            raise
        finally:
            del self.param_groups[before:]
        self._model_params += [param for _, param in added]
        self._frozen.add(added)
        self._weights.add_param_group({**param_group, "params": self._dtensors.localized(params)})
        self._gradients = self._bind(plan)

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

    def backward(self, loss: Tensor | None, *, weight: float | Tensor | None = None, **kwargs: Any) -> None:
        """Scale the loss and call backward, with ``kwargs``: one micro-batch. Gradients add up.

        Args:
            loss: 0-dim; None on a rank that has nothing to compute in this micro-batch.
            weight: What the window's summed losses are divided by, all together and over all data ranks: give a loss
                that is a sum, and e.g. its number of tokens. A number or a 0-dim tensor (which is not read by the host);
                the same on ranks that share a data coordinate. None: the loss is a mean, see ``accumulation_steps``.
        Raises:
            ValueError: Only some micro-batches of a window have a weight, or it is negative.
            RuntimeError: Gradients were cleared in the middle of a window by somebody else; the gradients have been clipped
                already; an earlier backward of the window raised (`zero_grad` then gives the window up).
        Collectives: none but those of the model's and data_parallel's backward. Host reads: none.
        """
        if self._clipped is not None:
            raise RuntimeError(
                "the gradients of this window have been clipped, and no more can be added to them: call step() or "
                "zero_grad() before the next backward, and clip when the last micro-batch has come"
            )
        self._synced = False
        self.window.check_whole()
        self.window.check_gradients(self._model_params)
        self.window.add(weight, empty=loss is None and weight is None)
        try:
            with self._weights.micro_batch():
                if loss is not None:
                    self.scale_loss(loss).backward(**kwargs)
        except BaseException:
            self.window.is_broken = True
            raise
        self.window.note_gradients(self._model_params)
        if self._switch is not None:
            self._switch.note_backward()
        self._expect_next()

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it ``data_parallel`` does not synchronise: for all micro-batches of a window but the last, where you
        decide when to step. Forward and backward both belong inside. Without ``data_parallel`` it changes nothing: the
        optimizer synchronises once, in `step`."""
        return nullcontext() if self._switch is None else self._switch.off()

    def window_ends(self) -> None:
        """Say before the forward of a micro-batch that it is the last one of its window, though it is not the K-th.

        The window of the last few batches of an epoch is right without it (``step(last=True)``), but for `fully_shard`,
        which can't reduce its gradients later.
        """
        if self._switch is not None:
            self._switch.set(True)

    def _expect_next(self) -> None:
        """Tell data parallelism whether the micro-batch that comes next is the last one of its window."""
        if self._switch is not None and self.window.steps is not None:
            self._switch.set(self.window.micro_batches % self.window.steps == self.window.steps - 1)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], object] | None = None, *, last: bool = False
    ) -> GradStats | None:
        """Complete, measure and clip the gradients, and step; or skip on every rank. Then update the loss scale.

        Args:
            last: Step now though fewer than ``accumulation_steps`` micro-batches have come: the tail of an epoch. Its
                gradient is the mean over those that have.
        Returns:
            GradStats: the norm before clipping, the coefficient, and whether the step was skipped. Device tensors. None
            in the middle of a window, where nothing is done.
        Raises:
            FloatingPointError: With ``on_nonfinite="raise"``; or too many steps in a row were skipped. On every rank.
            ReplicaMismatchError: With ``check_replicas=True``. On every rank.
            TypeError: A gradient is complex or sparse. On every rank in the first step; later on the rank that has it,
                while all others skip.
            ValueError: A closure is given.
            RuntimeError: `fully_shard` has not reduced the window's gradients (see `window_ends`); a backward of the window
                raised; a parameter was unfrozen that was frozen when the optimizer was made.
        Collectives: as the class says. Host reads: none, but where the class says so.
        """
        if closure is not None:
            raise ValueError("step takes no closure: a skipped step can't be evaluated again; call backward, then step")
        self.window.check_whole()
        if not self.window.is_full and not (last and self.window.micro_batches):
            return None
        problem = self._complete_gradients()
        if self._clip_later is not None and self._clipped is None:
            self._clip_now(self._clip_later)
        if self._clipped is None:
            decision = self._decide(self.norm_type, self.max_norm)
            if self.clip_value is not None:
                self._gradients.apply(decision, self.clip_value)
            elif decision.group_factors is not None:
                self._gradients.apply(decision)
        else:
            decision = Decision(self._clipped, None, None)
        stats = decision.stats
        self._stop_if_nonfinite(stats)
        folded = None if self.clip_value is not None else decision.factor
        self._weights.step(lambda: apply_update(self.optimizer, stats.found_inf, folded))
        self._dtensors.return_gradients()
        # Only now: the gradients were divided by the scale that backward used.
        self._count(stats)
        self._open_window()
        if problem is not None:
            raise problem
        return stats

    @torch.no_grad()
    def clip_grad_by_norm(self, max_norm: float, norm_type: float | None = None) -> GradStats | None:
        """Complete, measure, unscale and clip the gradients now, in place; `step` then does none of it again.

        In the middle of a window of managed accumulation `step` does it when the window ends.

        Args:
            max_norm: Threshold in unscaled gradient units, finite, > 0; replaces the constructor's for this step.
            norm_type: p >= 1 or inf; None: the constructor's.
        Returns:
            GradStats with the norm before clipping; None in the middle of a window.
        Raises:
            ValueError: An argument is out of range; nothing is changed.
        Collectives: those of a step. Host reads: none.
        """
        max_norm = checked_threshold(max_norm, "max_norm")
        p = self.norm_type if norm_type is None else checked_norm_type(norm_type)
        return self._clip(_Clip(p, max_norm, None))

    @torch.no_grad()
    def clip_grad_by_value(self, clip_value: float) -> GradStats | None:
        """Complete, measure and unscale the gradients now, and clamp every element to [-clip_value, clip_value].

        In the middle of a window of managed accumulation `step` does it when the window ends.

        Returns:
            GradStats with the norm before clamping, None in the middle of a window; `step` then neither measures nor clips
            again.
        Raises:
            ValueError: clip_value is not finite and positive; nothing is changed.
        Collectives: those of a step. Host reads: none.
        """
        return self._clip(_Clip(self.norm_type, None, checked_threshold(clip_value, "clip_value")))

    def _clip(self, clip: _Clip) -> GradStats | None:
        if self.window.is_full:
            return self._clip_now(clip)
        self._clip_later = clip
        return None

    def _clip_now(self, clip: _Clip) -> GradStats:
        problem = self._complete_gradients()
        decision = self._decide(clip.norm_type, clip.max_norm)
        self._gradients.apply(decision, clip.clip_value)
        stats = decision.stats
        if self._clipped is not None:  # a second clip in one window must not hide what the first one found
            stats = replace(stats, found_inf=torch.maximum(stats.found_inf, self._clipped.found_inf))
        self._clipped = stats
        if problem is not None:
            raise problem  # only now: `step` must do on this rank what it does on the others
        return stats

    def _open_window(self) -> None:
        """What is known of the gradients no longer holds."""
        self._synced, self._clipped, self._clip_later = False, None, None
        self.window.open()
        self._expect_next()

    def _complete_gradients(self) -> TypeError | None:
        """Reduce the gradients, once a window. Returns what is wrong with this rank's, after all ranks have been served."""
        if self._synced:
            return None
        # False if DDP left the last micro-batch out; what it averaged before is the same on all ranks, and stays as it is.
        averaged = self._switch is None or self._switch.synchronised()
        frozen_since = self._frozen.since()
        self._dtensors.share_gradients()
        self._weights.collect(averaged)
        problem = self._gradients.complete(averaged)
        if frozen_since:  # the zeros that the other ranks got for it are no gradient either
            for piece, param in zip(self._weights.pieces(), self._gradients.params, strict=True):
                if id(piece.param) in frozen_since:
                    param.grad = None
        self._synced = True
        return problem

    def _decide(self, norm_type: float, max_norm: float | None) -> Decision:
        norms = self._gradients.measure(norm_type, self.window.weight)
        inverse = None if self._clipped is not None else self._inverse(norms.extra)
        thresholds = self._agreed_thresholds.now(self.param_groups)
        names = self._gradients.plan.parameter_names if self.per_parameter_norms else ()
        decision = decide(norms, inverse, max_norm, thresholds, norm_type, names)
        if self.loss_scale is None:
            return decision
        return decision._replace(stats=replace(decision.stats, loss_scale=self.loss_scale.scale.clone()))

    def _inverse(self, weights: Tensor) -> Tensor | None:
        """What undoes the loss scale and divides by the window's weight; 0-dim, None for 1.

        Gradients that were clipped in place in this window have it in them already.
        """
        scale = None if self.loss_scale is None else self.loss_scale.scale.to(weights).reciprocal()
        if self.registry.topology.world_size == 1 and not self.window.has_weight:
            return scale
        weight = inverse_weight(weights, self.registry)
        return weight if scale is None else weight * scale

    def _stop_if_nonfinite(self, stats: GradStats) -> None:
        in_a_row = self._monitor.in_a_row_before()
        if in_a_row >= self.max_skips_in_a_row:
            reason = f"{in_a_row} steps in a row were skipped because the gradient norm was not finite"
        elif self.on_nonfinite == "raise" and bool(stats.found_inf):
            reason = f"the gradient norm is {float(stats.total_norm)}"
        else:
            return
        names = self._gradients.nonfinite_names()
        self._count(stats)  # whoever catches the error goes on with a lower loss scale
        self._open_window()
        raise FloatingPointError(
            f"{reason}; gradients that are not finite now: {', '.join(names) or 'none (the norm itself overflowed)'}. "
            "Nothing was stepped: look for a too large learning rate, a division by zero or a too large loss scale"
        )

    def _count(self, stats: GradStats) -> None:
        if self.loss_scale is not None:
            self.loss_scale.update(stats.found_inf)
        self._monitor.update(stats.found_inf)
        self.last_stats = stats

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as torch's optimizers do, of the model's parameters too where there are masters.

        Nothing happens in the middle of a window of managed accumulation, unless a backward of it raised.

        Raises:
            RuntimeError: `fully_shard` has gradients of the window that it has not reduced, and that can't be cleared.
        """
        if self.window.steps is None or not self.window.micro_batches or self.window.is_broken:
            if self._switch is not None:
                self._switch.check_clearing()
            self._weights.zero_grad(set_to_none)
            self._dtensors.zero_grad(set_to_none)
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
        return self._gradients.plan

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
        Collectives: two object all-gathers. Host reads: a few.
        """
        load_checked(self, self._weights, state_dict)
        self._weights.synchronize()
        self._monitor.restore(int(state_dict.get("meshstep", {}).get("skipped_steps", 0)))
        self._open_window()

    def __repr__(self) -> str:
        clip = f"clip_value={self.clip_value}" if self.clip_value is not None else f"max_norm={self.max_norm}"
        how = f"{clip}, norm_type={self.norm_type}, precision={self.precision.name!r}"
        return f"ParallelOptimizer({how}, {self.registry.topology!r}, {self.optimizer!r})"
