"""What other code expects of a torch optimizer: param groups, state, reports. The step itself is not here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..amp.loss_scale import LossScale
from ..amp.precision import Precision
from ..parallel.mesh.agreement import on_all_ranks
from ..parallel.mesh.call_tracker import public_call, public_constructor
from ..parallel.mesh.registry import ProcessGroupRegistry
from .build import Setup
from .clip.clipper import AgreedThresholds, Clipping, Verdict
from .clip.rule import ByNorm, Clip, ClipState
from .clip.rules import Given, in_use
from .norm.measure import GradStats
from .norm.plan import ReductionPlan, check_unused
from .states.chain import Chain, Piece, match_names, named_params_of
from .states.gradient_completion import Completion
from .states.optimizer_state import Coordinates, Copied, Saved, check_caller
from .step.call_guard import own_calls
from .step.combined_optimizer import WHOSE
from .step.data_parallel import Switch
from .step.grad_scaler import scale_of_scaler
from .step.skips import OnNonfinite, SkipMonitor
from .step.step_agreement import StepAgreement
from .step.stopped import stopped
from .step.torch_engine import lay_out_states
from .step.update import UpdateEngine
from .step.window import Window
from .whole.optimizer import bind_whole


def _run_as_it_is(kind: Any) -> None:
    """Let ``torch.compile`` call the class's `step` and not trace it: hooks, collectives and counts are no graph."""
    if not getattr(kind.step, "untraced", False):
        kind.step = torch.compiler.disable(kind.step)
        kind.step.untraced = True


class OptimizerFacade(Copied, torch.optim.Optimizer):
    """A `torch.optim.Optimizer` whose param groups, state and defaults are those of ``self.optimizer``.

    Schedulers, ``isinstance`` checks and step hooks work on it; hooks run around the whole `step`. ``torch.compile`` leaves
    `step` as it is.
    """

    on_nonfinite: OnNonfinite
    steps_windows = True  # `step` may come within a window, where weights stay what they are
    _step_supports_amp_scaling = True  # a GradScaler then calls `step` on every rank, overflow or not

    registry: ProcessGroupRegistry
    precision: Precision
    loss_scale: LossScale | None
    _window: Window[Clip, Verdict]
    _clip: ClipState | None
    last_stats: GradStats | None
    _setup: Setup
    _device: torch.device
    _groups: list[list[tuple[str | None, Tensor]]]
    _plan: ReductionPlan
    _clipping: Clipping
    _states: Chain
    _completion: Completion
    _switch: Switch | None
    _micro_batch: Callable[..., AbstractContextManager[None]]
    _skips: SkipMonitor
    _agreement: StepAgreement | None
    _model_params: Sequence[Tensor]

    def __init_subclass__(cls) -> None:
        """To make one is a call of its class's name, and so are methods that a class of one's own writes anew: an error
        of ranks that wait in vain there says so."""
        super().__init_subclass__()  # of `Generic`: without it ParallelOptimizer[GradStats] is an error
        if OptimizerFacade not in cls.__bases__:
            for name in cls.__dict__.keys() & {"step", "backward", "clip_grad_by_norm", "clip_grad_by_value"}:
                setattr(cls, name, public_call(cls.__dict__[name]))
        cls.__init__ = public_constructor(cls.__init__)  # type: ignore[method-assign]

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Not super().__init__: the wrapped optimizer has the parameters and the state.
        self.optimizer = optimizer
        self._engine = UpdateEngine(optimizer)
        self._optimizer_step_pre_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._optimizer_state_dict_pre_hooks = optimizer._optimizer_state_dict_pre_hooks
        self._optimizer_state_dict_post_hooks = optimizer._optimizer_state_dict_post_hooks
        self._optimizer_load_state_dict_pre_hooks = optimizer._optimizer_load_state_dict_pre_hooks
        self._optimizer_load_state_dict_post_hooks = optimizer._optimizer_load_state_dict_post_hooks
        self._patch_step_function()
        _run_as_it_is(type(self))

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

    def _scale_of_scaler(self) -> Tensor | None:
        self._window.forget_gradients()  # which the scaler may have unscaled
        in_sight = not self._states.bringing and self.loss_scale is None
        return scale_of_scaler(self, in_sight, self.precision.name)

    # Binding ---------------------------------------------------------------------------------------------------------

    def _bind(self, thresholds: AgreedThresholds) -> None:
        """What belongs to the plan as it is now."""
        # Where backward leaves gradients.
        self._model_params = [param for group in self._groups for _, param in group]
        bind_whole(self.optimizer, self._plan, self._states, self.registry)
        lay_out_states(self.optimizer)
        if self._clip is not None:
            self._clip.bind(self._plan.parameter_names)
        self._completion = self._setup.completion(self._plan, self._states, self._agreement)
        self._clipping = self._setup.clipping(self._plan, self._states, thresholds)
        self._switch = self._setup.switch(self._completion, getattr(self, "_switch", None))
        registry = self.registry
        around = self._states.around_backward
        if self._switch is not None:
            around.append(self._switch.micro_batch)
            self._switch.expect(self._window)
        self._micro_batch = partial(self._window.micro_batch, params=self._model_params, around=around)
        if registry.device.type == "cuda":  # or NCCL connects ranks in the first step, when memory is nearly full
            registry.meet(*self._clipping.plan.groups(self._setup.measure.reduction))

    @public_call
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group and plan anew; every rank must, at the same point. Nothing changes where it raises.

        Raises, collectives: as the constructor.
        """
        before, given = len(self.param_groups), param_group["params"]
        check_unused(given)
        group = {**param_group, "params": [given] if isinstance(given, Tensor) else list(given)}
        added = named_params_of([group])
        match_names(group, [own for own in self.param_groups if own.get(WHOSE) == group.get(WHOSE)])

        def add_for_a_moment() -> None:
            # First as it is, so that nothing but the list of groups has to be undone.
            with own_calls:
                self.optimizer.add_param_group({**group, "params": group["params"][:]})
            known = {id(param) for params in self._groups for _, param in params}
            if twice := sum(id(param) in known for _, param in added):
                raise ValueError(f"{twice} of the new group's parameters are in another group already; give each once")

        try:
            on_all_ranks(add_for_a_moment, self.registry)
            plan, thresholds, agreement = self._setup.agreed_plan([*self._groups, added])
        finally:
            del self.param_groups[before:]
        self._states.add_param_group(group)
        self._plan, self._agreement = plan, agreement
        self._groups.append(added)
        self._bind(thresholds)

    @torch.no_grad()
    def reload_from_model(self) -> None:
        """Start the next step from the model's weights as they are now: call it after you wrote them.

        Sets master weights, pieces of sharded states and offloaded copies to the weights, and drops the remainders of split
        masters. Needed with these after writes through ``.data``, which the optimizer cannot see and would undo, and after
        any write where a step asks for it. Moments and step counts stay. Call it on every rank that wrote weights, between
        two windows; replicas must have the same weights.

            with torch.no_grad():
                for param in critic.parameters():
                    param.clamp_(-0.01, 0.01)
            optimizer.reload_from_model()

        Collectives: none. Host synchronization: with `Offloaded`, one per bucket.
        """
        for link in self._states.links:
            link.reload()

    # Modes of the wrapped optimizer ----------------------------------------------------------------------------------

    @public_call
    def train(self) -> None:
        """Tell an optimizer that has modes (a schedule-free one), and bring the weights that it sets, which may be those of
        masters and pieces, into the model. Nothing happens to others. Every rank must call it.

        Collectives: those that bring weights into the model, see `Sharded`.
        """
        self._change_mode("train")

    @public_call
    def eval(self) -> None:
        """As `train`, before an evaluation or a checkpoint of the weights that are evaluated."""
        self._change_mode("eval")

    def _change_mode(self, name: str) -> None:
        change = getattr(self.optimizer, name, None)
        if callable(change):
            with own_calls:
                change()
            self._states.publish()

    # Reports and state -----------------------------------------------------------------------------------------------

    @property
    def max_norm(self) -> float | Clip | None:
        """The threshold of `ByNorm`, or another rule; may be set between steps, on all ranks together. One that does not
        equal that before begins with nothing remembered. Raises: as the constructor; nothing is changed then. Collectives:
        an object all-gather, the first time that a rule speaks of parameters.
        """
        clip = self.clip
        plain = isinstance(clip, ByNorm) and clip.norm_type is None and not callable(clip.max_norm)
        return clip.max_norm if plain else clip  # type: ignore[union-attr]

    @max_norm.setter
    def max_norm(self, value: Given) -> None:
        setup = replace(self._setup, max_norm=value)
        plan = setup.plan_for_clip(self._plan)
        if plan is not self._plan:
            self._clipping.replan(self._states.derive(plan))
        self._setup, self._plan, new = setup, plan, in_use(value)
        if new is None or new.rule != self.clip:
            self._clip = new
        if self._agreement is not None:
            self._agreement.used_clip.set_rule(self.clip)
        if self._clip is not None:
            self._clip.bind(plan.parameter_names)

    @property
    def clip(self) -> Clip | None:
        """The rule that ``max_norm`` stands for."""
        return None if self._clip is None else self._clip.rule

    @property
    def clip_state(self) -> Mapping[str, Tensor]:
        """What the rule remembers, by name: device tensors, the same bits on every rank; of parameters in the order of
        ``plan.parameter_names``. None are there before the first step. Host reads: none."""
        return {} if self._clip is None else dict(self._clip.tensors)

    @property
    def grad_norm(self) -> Tensor | None:
        """The global norm that the last step measured, unscaled, before clipping; None before the first step."""
        return None if self.last_stats is None else self.last_stats.total_norm

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped so far, whatever the reason. Host reads: one."""
        return self._skips.total()

    @property
    def vetoed_steps(self) -> int:
        """Those of them that ``commit=`` of any rank refused. Host reads: one."""
        return self._skips.vetoed()

    @public_call
    def poll(self) -> None:
        """Raise what `step` would have raised by now, for steps that a CUDA graph replays, of which nobody hears here.
        Every rank calls it, at the same replay, every few dozen of them.

        Raises: FloatingPointError, RuntimeError: On every rank, as `step`: too many steps in a row were skipped; gradients
            came past `backward`; ranks disagreed. ReplicaMismatchError: copies have parted. Collectives: where it raises.
            Host reads: one.
        """
        if reason := self._skips.poll(self.on_nonfinite):
            raise stopped(reason, self._clipping, self._agreement, self._skips)

    @property
    def plan(self) -> ReductionPlan:
        """What the norm sums over which ranks, agreed by all ranks; print it."""
        return self._clipping.plan

    def pieces(self) -> list[Piece]:
        """Everything that the optimizer steps on this rank, with which part of which logical tensor it is; in the order of
        the param groups."""
        return self._states.pieces(self._plan.entries)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state of this rank's pieces, and under ``"meshstep"`` all else a new process needs:
        mode, loss scale, master weights, what a clip rule remembers, counts of steps, coordinates. Host reads: a few."""
        saved = self._saved()
        given = (param for group in self._groups for _, param in group)
        makes_states = bool(self.state) or self._setup.accumulation_steps is None
        check_caller(saved.coordinates, self._states.stepped, given, makes_states=makes_states)
        return saved.state_dict(self._skips.state_dict())

    @public_call
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue, bit for bit, from what `state_dict` gave; every rank must call it, with the state of its own pieces.

        In a mode without master weights and loss scale a plain dict of the wrapped optimizer loads too. A clip rule of
        which it has nothing begins anew, with a warning.

        Raises:
            ValueError: On every rank, when on any rank it comes from another precision mode or does not fit; nothing is
                changed then.
        Collectives: two object all-gathers. Host reads: a few.
        """
        self._skips.load_state_dict(self._saved().load(state_dict))
        self._clipping.start_over()
        self._window.close()
        if self._switch is not None:
            self._switch.expect(self._window)

    def _saved(self) -> Saved:
        params = self._model_params
        where = Coordinates.of(self.plan, self.registry)
        return Saved(
            self.optimizer, self._states, self.precision, self.loss_scale, params, self.registry, where, self._clip
        )

    def __repr__(self) -> str:
        how = (
            f"max_norm={self.max_norm}, norm_type={self._clipping.measure.norm_type}, precision={self.precision.name!r}"
        )
        return f"ParallelOptimizer({how}, {self.registry.topology!r}, {self.optimizer!r})"
