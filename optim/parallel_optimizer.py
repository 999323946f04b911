"""The order of a step's stages: complete the gradients -> measure -> decide -> update -> count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..amp.by_name import precision_of
from ..amp.precision import Precision
from ..parallel.mesh.agreement import on_all_ranks
from ..parallel.mesh.registry import ProcessGroupRegistry
from .clip.decide import Verdict, decide
from .clip.policies import ByNorm, ByValue, Clip, clip_of
from .gradients.gradients import Measure, Needs
from .norm.plan import ReductionPlan
from .norm.stats import GradStats
from .setup import Setup
from .states.frozen import FrozenParameters
from .states.link import Placement
from .states.pieces import Piece, named_params_of
from .states.saved import Saved
from .step.data_parallel import Overlap, Reduce
from .step.facade import OptimizerFacade
from .step.old_arguments import refuse_arguments
from .step.skips import OnNonfinite, SkipMonitor, reason_to_stop
from .step.update import apply_update
from .step.window import Window, inverse_weight, weight_slots


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
        max_norm: Clip the global norm to this; in unscaled gradient units, finite, > 0. Or another rule (`Clip`: `ByNorm`,
            `ByValue`, `PerParameter`, `Adaptive`, your own). None: measure only. A param group with its own ``"max_norm"``
            is clipped by its own norm, and the others by theirs together. Ranks agree on these here; they may be changed
            later where all ranks have all groups.
        precision: The mode's name or object (`meshstep.amp`). ``precision.prepare(model)`` makes the model run in it;
            here it says whether there are master weights and a loss scale.
        accumulation_steps: K: manage windows of K micro-batches, each a `backward`; `step` and `zero_grad` do nothing
            before the K-th, and the gradient is the mean over the window. None: gradients add up until you call `step`.
        data_parallel: The `DistributedDataParallel` or `fully_shard` module that averages gradients over the data axes;
            it synchronises in the last micro-batch of a window only. None: `step` averages, in a few collectives, as
            it does for parameters that were left out of `fully_shard`. `Reduce` says how, or that something else does.
        states: Where optimizer states and masters are kept: `Sharded`, `Offloaded`, both, or a `Placement` of your own.
            The param groups then hold what is stepped; see `pieces`.
        measure: What is measured, and how; see `Measure`.
        on_nonfinite: ``"skip"`` the step on every rank (`Skip` says how many in a row are an error), or ``"raise"``
            FloatingPointError on every rank with the parameters' names (one host read a step).

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
        max_norm: float | Clip | None = None,
        precision: str | Precision = "fp32",
        accumulation_steps: int | None = None,
        data_parallel: nn.Module | Reduce | None = None,
        states: Placement | Sequence[Placement] = (),
        measure: Measure = Measure(),  # noqa: B008 (frozen)
        on_nonfinite: OnNonfinite = "skip",
        **removed: object,
    ) -> None:
        refuse_arguments(removed)
        if isinstance(optimizer, ParallelOptimizer):
            raise TypeError("the optimizer is a ParallelOptimizer already; wrap a plain torch optimizer")
        super().__init__(optimizer)
        self.registry, self.on_nonfinite = registry, on_nonfinite
        self._measure = measure
        self._setup = Setup(
            optimizer,
            registry,
            max_norm,
            precision,
            accumulation_steps,
            data_parallel,
            states,
            measure,
            on_nonfinite,
        )
        self._groups = [named_params_of([group]) for group in self.param_groups]
        self._plan, self._thresholds = self._setup.agreed_plan(self._groups)
        self.clip, self.precision = clip_of(max_norm), precision_of(precision)
        self.window: Window[Clip, Verdict] = Window(accumulation_steps)
        self.loss_scale = self.precision.make_loss_scale(registry.device)
        self._frozen = FrozenParameters()
        self._frozen.add(named for group in self._groups for named in group)
        self._states = self._setup.chain(self.precision)
        self._bind()
        self._monitor = SkipMonitor(registry.device)
        self.last_stats: GradStats | None = None

    def _bind(self) -> None:
        """What belongs to the plan as it is now."""
        # Where backward leaves gradients.
        self._model_params = [param for group in self._groups for _, param in group]
        self._gradients = self._setup.gradients(self._plan, self._states)
        self._switch = self._setup.switch(self._gradients)
        self._expect_next()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group and plan anew; every rank must, at the same point. Nothing changes where it raises.

        Raises, collectives: as the constructor.
        """
        before, given = len(self.param_groups), param_group["params"]
        group = {**param_group, "params": [given] if isinstance(given, Tensor) else list(given)}
        added = named_params_of([group])

        def add_for_a_moment() -> None:
            # First as it is, so that nothing but the list of groups has to be undone.
            self.optimizer.add_param_group({**group, "params": group["params"][:]})
            known = {id(param) for params in self._groups for _, param in params}
            if any(id(param) in known for _, param in added):
                raise ValueError("some parameters of the new group are in another group already; give each once")

        try:
            on_all_ranks(add_for_a_moment, self.registry)
            self._plan, self._thresholds = self._setup.agreed_plan([*self._groups, added])
        finally:
            del self.param_groups[before:]
        self._groups.append(added)
        self._frozen.add(added)
        self._states.add_param_group(group)
        if isinstance(self._switch, Overlap):
            self._switch.close()
        self._bind()

    # The window ------------------------------------------------------------------------------------------------------

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
        Collectives: none but those of the model's and data_parallel's backward, and of `Sharded` and `Reduce`. Host reads:
        none.
        """
        self.window.begin(weight, self._model_params, empty=loss is None and weight is None)
        try:
            with self._states.micro_batch(self.window), self._switch.micro_batch(self.window):
                if loss is not None:
                    self.scale_loss(loss).backward(**kwargs)
        except BaseException:
            self.window.phase = "broken"
            raise
        self.window.end(self._model_params, left_out=not self._switch.on)
        self._expect_next()

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it nothing is reduced in backward, by ``data_parallel`` or with ``Reduce(overlap=True)``: for all
        micro-batches of a window but the last, where you decide when to step. Forward and backward both belong inside.
        Else it changes nothing: the optimizer synchronises once, in `step`."""
        return self._switch.off()

    def window_ends(self) -> None:
        """Say before the forward of a micro-batch that it is the last one of its window, though it is not the K-th.

        The window of the last few batches of an epoch is right without it (``step(last=True)``), but for `fully_shard`,
        which can't reduce its gradients later.
        """
        self._switch.set(True)

    def _expect_next(self) -> None:
        """Say whether the micro-batch that comes next is the last one of its window."""
        if self.window.steps is not None:
            self._switch.set(self.window.next_is_last)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as torch's optimizers do, of the model's parameters too where there are masters.

        Nothing happens in the middle of a window of managed accumulation, unless a backward of it raised.

        Raises:
            RuntimeError: `fully_shard` has gradients of the window that it has not reduced, and that can't be cleared.
        """
        if self.window.may_clear():
            self._switch.check_clearing(self.window.left_out)
            self._states.clear(set_to_none)
            self.window.clear()
            self._expect_next()

    # The step --------------------------------------------------------------------------------------------------------

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
            ReplicaMismatchError: With ``Measure(check_replicas=True)``. On every rank.
            TypeError: A gradient is complex or sparse. On every rank in the first step; later on the rank that has it,
                while all others skip.
            ValueError: A closure is given.
            RuntimeError: `fully_shard` has not reduced the window's gradients (see `window_ends`); a backward of the window
                raised; a parameter was unfrozen that was frozen when the optimizer was made.
        Collectives: as the class says. Host reads: none, but where the class says so.
        """
        if closure is not None:
            raise ValueError("step takes no closure: a skipped step can't be evaluated again; call backward, then step")
        if not self.window.ends(last):
            return None
        problem = self._complete()
        verdict = self._explicit() or self._decide(self.clip)
        self._stop_if_nonfinite(verdict.stats)
        self._states.step(partial(apply_update, self.optimizer, verdict.stats.found_inf, verdict.factor))
        self._close(verdict.stats)
        if problem is not None:
            raise problem
        return verdict.stats

    def _complete(self) -> TypeError | None:
        """Reduce the gradients, once a window. Returns what is wrong with this rank's, after all ranks have been served."""
        if self.window.phase in ("complete", "clipped"):
            return None
        self._switch.check_reduced(self.window.left_out)
        # DDP left the last micro-batch out; what it averaged before is the same on all ranks, and stays as it is.
        averaged = not (self._switch.is_ddp and self.window.left_out)
        frozen_since = self._frozen.since()
        self._states.bring(self.window, averaged)
        problem = self._gradients.complete(averaged, self.window.reduced)
        self._states.forget(frozen_since)  # the zeros that the other ranks got for them are no gradients either
        self.window.complete()
        return problem

    def _decide(self, clip: Clip | None, *, now: bool = False) -> Verdict:
        """Measure, in one collective, and apply the rule."""
        measure = self._measure
        norm_type = measure.norm_type if clip is None or clip.norm_type is None else clip.norm_type
        clip = self._thresholds.rule(clip, self.param_groups, norm_type)
        needs = Needs(norm_type) if clip is None else Needs(norm_type, clip.level, clip.weights, clip.unit_dim)
        norms = self._gradients.measure(needs, weight_slots(self.window.weight, self.registry))
        scale = None if self.loss_scale is None else self.loss_scale.scale
        names = self._gradients.plan.parameter_names if measure.per_parameter else ()
        inverse = self._inverse(norms.extra, scale)
        return decide(clip, norms, inverse, self._gradients, now=now, names=names, loss_scale=scale)

    def _inverse(self, weights: Tensor, scale: Tensor | None) -> Tensor | None:
        """What undoes the loss scale and divides by the window's weight; 0-dim, None for 1."""
        if self.window.verdict is not None:
            return None  # the gradients were clipped in place in this window, and have it in them already
        inverse = None if scale is None else scale.to(weights).reciprocal()
        if self.registry.topology.world_size == 1 and not self.window.has_weight:
            return inverse
        weight = inverse_weight(weights, self.registry)
        return weight if inverse is None else weight * inverse

    def _stop_if_nonfinite(self, stats: GradStats) -> None:
        reason = reason_to_stop(self.on_nonfinite, self._monitor, stats)
        if reason is None:
            return
        names = self._gradients.nonfinite_names()
        self._close(stats)  # whoever catches the error goes on with a lower loss scale
        raise FloatingPointError(
            f"{reason}; gradients that are not finite now: {', '.join(names) or 'none (the norm itself overflowed)'}. "
            "Nothing was stepped: look for a too large learning rate, a division by zero or a too large loss scale"
        )

    def _close(self, stats: GradStats) -> None:
        """Count the step, only now: the gradients were divided by the scale that backward used."""
        if self.loss_scale is not None:
            self.loss_scale.update(stats.found_inf)
        self._monitor.update(stats.found_inf)
        self.last_stats = stats
        self.window.close()
        self._expect_next()

    # Explicit clipping -----------------------------------------------------------------------------------------------

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
        return self._clip_or_ask(ByNorm(max_norm, norm_type))

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
        return self._clip_or_ask(ByValue(clip_value))

    def _clip_or_ask(self, clip: Clip) -> GradStats | None:
        clip_of(clip)
        if self.window.is_full:
            return self._clip_now(clip).stats
        self.window.asked = clip
        return None

    def _explicit(self) -> Verdict | None:
        """What an explicit call decided in this window, or what it asked for in the middle of it."""
        if self.window.verdict is None and self.window.asked is not None:
            self._clip_now(self.window.asked)
        return self.window.verdict

    def _clip_now(self, clip: Clip) -> Verdict:
        problem = self._complete()
        verdict = self._decide(clip, now=True)
        if self.window.verdict is not None:  # a second clip in one window must not hide what the first one found
            found_inf = torch.maximum(verdict.stats.found_inf, self.window.verdict.stats.found_inf)
            verdict = Verdict(replace(verdict.stats, found_inf=found_inf), None)
        self.window.clipped(verdict)
        if problem is not None:
            raise problem  # only now: `step` must do on this rank what it does on the others
        return verdict

    # Reports and state -----------------------------------------------------------------------------------------------

    @property
    def max_norm(self) -> float | Clip | None:
        """The threshold of `ByNorm`, or another rule; may be set between steps, on all ranks together.

        Raises: as the constructor; nothing is changed then. Collectives: an object all-gather, the first time that a rule
        speaks of parameters.
        """
        return self.clip.max_norm if isinstance(self.clip, ByNorm) else self.clip

    @max_norm.setter
    def max_norm(self, value: float | Clip | None) -> None:
        setup = replace(self._setup, max_norm=value)
        plan = setup.plan_for_clip(self._plan)
        if plan is not self._plan:
            self._gradients.replan(self._states.derive(plan))
        self._setup, self._plan, self.clip = setup, plan, clip_of(value)

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

    def pieces(self) -> list[Piece]:
        """Everything that the optimizer steps on this rank, with which part of which logical tensor it is; in the order of
        the param groups."""
        return self._states.pieces(self._plan.entries)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state of this rank's pieces, and under ``"meshstep"`` all else a new process needs:
        precision mode, loss scale, master weights, count of skipped steps. Host reads: a few."""
        return self._saved().state_dict(self.skipped_steps)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue, bit for bit, from what `state_dict` gave; every rank must call it, with the state of its own pieces.

        In a mode without master weights and loss scale a plain dict of the wrapped optimizer loads too.

        Raises:
            ValueError: On every rank, when on any rank it comes from another precision mode or does not fit; nothing is
                changed then.
        Collectives: two object all-gathers. Host reads: a few.
        """
        self._monitor.restore(self._saved().load(state_dict))
        self.window.close()
        self._expect_next()

    def _saved(self) -> Saved:
        params = self._model_params
        return Saved(self.optimizer, self._states, self.precision, self.loss_scale, params, self.registry)

    def __repr__(self) -> str:
        how = f"max_norm={self.max_norm}, norm_type={self._measure.norm_type}, precision={self.precision.name!r}"
        return f"ParallelOptimizer({how}, {self.registry.topology!r}, {self.optimizer!r})"
