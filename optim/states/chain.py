"""The chain of an optimizer's parameter transforms (`TransformChain`), and the observers of its steps (`StepObserver`).

The chain installs the transforms over the param groups, and calls them in each step. `param_transform` describes the order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor

from ...parallel.layout.annotation import label_of
from ...parallel.mesh.deprecation import renamed_members, warn_deprecated
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..gradients.fixed_order import SlicedBucket
from ..kernels.memory import PLAIN, resolve_
from ..norm.param_table import ParamPosition, ParamTable, make_table
from ..norm.plan import ParameterEntry, ReductionPlan
from ..step.update_request import Update, UpdateRequest
from ..step.window import Window
from ..step.wrapped_optimizer import named_params_of, own_calls, params_of, replace_params
from .param_transform import ParamTransform, Replacements

# Pickles of earlier versions refer to these classes, and to `ParamTransform`, by the name of this module.
from .param_transform import PlacementContext as PlacementContext
from .param_transform import Position as Position
from .param_transform import StatePlacement as StatePlacement

# Observers ------------------------------------------------------------------------------------------------------------


class StepObserver:
    """An observer of the steps of a `ParallelOptimizer`; pass it to `ParallelOptimizer.add_observer`.

        class UpdateTime(StepObserver):
            def update(self, request, update):
                start = time.perf_counter()
                update(request)
                self.seconds = time.perf_counter() - start

    Subclasses override the methods that they need. In each step the optimizer calls `local_grads`, `reduced_grads` and
    `update` on every rank, in this order. So an observer that was added on all ranks may use collectives. A step that
    raises an error may omit the later calls. An observer must not change gradients, weights or the request.

    If an observer raises an error, the step raises it at its end. After an error of `local_grads` or `reduced_grads` on
    any rank, all ranks skip the step. After an error of `update`, the step is taken. With one rank, errors of
    `local_grads` and `reduced_grads` are raised at once.
    """

    def not_captured(self) -> str | None:
        """Return the reason why a CUDA graph can't capture a step with this observer; None (default) if it can."""
        return None

    def local_grads(self, window: Window) -> None:
        """Read the gradients after backward, before `step` reduces them. Backward may have reduced some of them."""

    def reduced_grads(self, window: Window) -> None:
        """Read the reduced gradients before clipping: ``grad_tensor.grad`` of each record in `stepped_tensors`.

        `ParallelOptimizer.stepped_tensors` returns these records. The gradients are still multiplied by the loss scale
        (``window.scale``). They are not yet divided by the sum of the micro-batches' weights or, with
        ``accumulation_steps`` and no weights, by the number of micro-batches. With ``sum_order="fixed"`` they are sums
        over the data ranks instead of averages.
        """

    def update(self, request: UpdateRequest, update: Update) -> None:
        """Call ``update(request)`` exactly once. This call takes or skips the step, and writes the weights to the model."""
        update(request)


# The chain of transforms ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GivenParam:
    """A model parameter, with the dtype and device that it had when the optimizer received it.

    ``trained`` is the value of ``param.requires_grad`` when param groups were last added or refreshed.
    """

    name: str
    param: Tensor
    trained: bool
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, name: str, param: Tensor) -> GivenParam:
        return cls(name, param, param.requires_grad, param.dtype, param.device)

    @property
    def is_converted(self) -> bool:
        return self.param.dtype != self.dtype or self.param.device != self.device


@renamed_members(links="transforms", publish="write_back")
class TransformChain:
    """The parameter transforms of an optimizer, installed over its param groups. The groups are changed in place.

    ``optimizer`` may have optimizer state already. ``plan`` is the reduction plan of the parameters in its param
    groups, in their order.
    Attributes:
        positions: One `ParamPosition` per stepped tensor (a tensor in the param groups), in the order of the param
            groups.
        given: One record per model parameter that the optimizer received, even if this rank steps no shard of it.
        frozen: Model parameters that were trained earlier, and were frozen when param groups were last added or
            refreshed. Their stepped tensors and optimizer states are kept.
        left_out: (name, parameter) pairs of frozen parameters that are not in the param groups.
        pulling_grads, catching_up: The transforms that override the method and are not idle, from the model to the
            optimizer.
        around_update: The functions around an update, innermost first: the transforms' `step`, then the observers'
            `update`.
    Collectives: those of the transforms' `agree` and `install`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        transforms: Sequence[ParamTransform],
        registry: ProcessGroupRegistry,
        plan: ReductionPlan,
    ) -> None:
        self.optimizer, self.transforms, self.registry = optimizer, list(transforms), registry
        self.observers: list[StepObserver] = []
        self._error: Exception | None = None
        self.positions: list[ParamPosition] = []
        self.given: list[GivenParam] = []
        self.frozen: list[Tensor] = []
        self.left_out: list[tuple[str, Tensor]] = []
        self._prepared: set[int] = set()  # ids of parameters that required gradients when transforms were installed
        self._renew([named_params_of([group]) for group in optimizer.param_groups], plan)

    def add_param_group(
        self,
        param_group: dict[str, Any],
        groups: Sequence[Sequence[tuple[str | None, Tensor]]],
        plan: ReductionPlan,
    ) -> None:
        """Add a param group to the optimizer, and `refresh` all param groups.

        If a transform raises an error, the group is removed again. ``groups``, including the new group, and ``plan``
        are as in `refresh`.
        Collectives: those of the transforms' `agree` and `install`.
        """
        before = len(self.optimizer.param_groups)
        with own_calls:
            self.optimizer.add_param_group(param_group)
        try:
            self.refresh(groups, plan)
        except Exception:
            del self.optimizer.param_groups[before:]
            raise

    def refresh(self, groups: Sequence[Sequence[tuple[str | None, Tensor]]], plan: ReductionPlan) -> None:
        """Install the transforms over parameters that are new, or that were unfrozen since the last call.

        The other parameters keep their transforms, stepped tensors and states. If a transform raises an error, the
        param groups are restored. ``plan`` is the reduction plan of the model parameters in ``groups``, in their order.
        Collectives: those of the transforms' `agree` and `install`.
        """
        kept = self.positions, self.given, self.frozen, set(self._prepared)
        groups_before: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (group, {key: group[key] for key in ("params", "param_names") if key in group}) for group in self._groups
        ]
        try:
            self._renew(groups, plan)
        except Exception:
            self.positions, self.given, self.frozen, self._prepared = kept
            for group, params in groups_before:
                group.update(params)
            raise

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def _renew(self, groups: Sequence[Sequence[tuple[str | None, Tensor]]], plan: ReductionPlan) -> None:
        positions, new = self._arrange(groups)
        for param in (at.param for at in new if type(at.param) in PLAIN and at.param.is_neg()):
            resolve_(param)  # writes the negated values to memory, which transforms read directly
        installed: dict[int, list[ParamPosition]] = {at.index: [] for at in new}
        for at in self._install_all(new, plan):
            installed[at.index].append(at)
        self.positions = []
        for at in positions:
            self.positions += installed.get(at.index, [at])
        self.frozen = [of.param for of in self.given if id(of.param) in self._prepared and not of.param.requires_grad]
        self._prepared |= {id(of.param) for of in self.given if of.trained}
        self.pulling_grads, self.catching_up = self._those_with("pull_grads"), self._those_with("catch_up")
        stepping = self._those_with("step", "write_back")[::-1]
        for index, transform in enumerate(stepping):
            transform.may_step_partially = all(inner.supports_partial_step for inner in stepping[:index])
        self._stepping = [_step_of(transform) for transform in stepping]
        self.set_observers(self.observers)

    def _arrange(
        self, groups: Sequence[Sequence[tuple[str | None, Tensor]]]
    ) -> tuple[list[ParamPosition], list[ParamPosition]]:
        """Set `given` and the parameters of the param groups to ``groups``, before transforms are installed.

        Return the positions of all stepped tensors in the order of ``groups``, and new positions of the parameters over
        which transforms must be installed. Each of these parameters has one position.
        """
        known, found = {id(of.param): of for of in self.given}, dict[int, list[ParamPosition]]()
        for at in self.positions:
            found.setdefault(id(at.leaf), []).append(at)
        self.given, positions, new = [], [], list[ParamPosition]()
        for group, pairs in zip(self._groups, groups, strict=True):
            named: list[tuple[str, Tensor]] = []
            for name, param in pairs:
                index, of = len(self.given), known.get(id(param))
                label = name or f"parameter {index}" if of is None else of.name
                at_param = [replace(at, index=index) for at in found.get(id(param), [])]
                if of is None or (param.requires_grad and id(param) not in self._prepared):
                    at_param = at_param or [ParamPosition(index, label, param, param)]
                    new.append(ParamPosition(index, label, param, param))
                positions += at_param
                named += [(label, at.tensor) for at in at_param]
                of = of or GivenParam.of(label, param)
                self.given.append(replace(of, trained=param.requires_grad))
            group["params"] = [tensor for _, tensor in named]
            if "param_names" in group:
                group["param_names"] = [name for name, _ in named]
        return positions, new

    def unfrozen(self) -> list[tuple[str, Tensor]]:
        """Return (name, parameter) pairs of unfrozen parameters that were frozen whenever transforms were installed."""
        given = [(of.name, of.param) for of in self.given if id(of.param) not in self._prepared]
        return [(name, param) for name, param in [*given, *self.left_out] if param.requires_grad]

    def explain(self, error: Exception) -> None:
        """Raise RuntimeError from ``error`` if the dtype or device of a parameter changed, a likely cause of ``error``."""
        if (text := self.converted()) and text != str(error):
            raise RuntimeError(text) from error

    def converted(self) -> str | None:
        """Return the error message for the first parameter whose dtype or device changed; None: no parameter changed."""
        for of in self.given:
            if of.is_converted:
                param = of.param
                was, now = (of.dtype, param.dtype) if param.dtype != of.dtype else (of.device, param.device)
                return (
                    f"{of.name} was {was} when the optimizer was made, and is {now} now: convert and move the model before "
                    "you make ParallelOptimizer, or make the torch optimizer and the ParallelOptimizer again"
                )
        return None

    def set_observers(self, observers: Sequence[StepObserver]) -> None:
        self.observers = list(observers)
        observed: list[Callable[[UpdateRequest, Update], object]]
        observed = [partial(self._observe_update, observer) for observer in self.observers]
        self.around_update = [*self._stepping, *observed]

    def _observe_update(self, observer: StepObserver, request: UpdateRequest, update: Update) -> None:
        """Call the observer's `update`. If the observer raises an error, keep it for `take_error`.

        Other ranks take the step without an error. So the step is also taken on this rank, even if the observer raised
        before it called ``update``.
        """
        called = has_failed = False

        def observed(request: UpdateRequest) -> object:
            nonlocal called, has_failed
            called = has_failed = True
            result = update(request)
            has_failed = False
            return result

        try:
            observer.update(request, observed)
        except Exception as error:
            if has_failed:  # an error of the update itself
                raise
            self._error = self._error or error
            if not called:
                update(request)

    def take_error(self) -> Exception | None:
        error, self._error = self._error, None
        return error

    def _those_with(self, *methods: str) -> list[ParamTransform]:
        """Return the transforms that override any of these methods and are not idle. A step calls only these."""
        return [
            transform
            for transform in self.transforms
            if not transform.idle
            and any(getattr(type(transform), name) is not getattr(ParamTransform, name) for name in methods)
        ]

    def _install_all(self, positions: list[ParamPosition], plan: ReductionPlan) -> list[ParamPosition]:
        """Install all transforms over the tensors at ``positions``, and return the positions of their replacements.

        Raise the error of a transform only after all transforms agreed with the other ranks, which would otherwise wait.
        """
        failed: Exception | None = None
        for transform in self.transforms:
            transform.agree(positions, plan, failed)
            try:
                if failed is None:
                    positions = self._install(transform, self._groups, positions)
            except Exception as error:
                failed = error
        if failed is not None:
            raise failed
        return positions

    def _install(
        self, transform: ParamTransform, groups: list[dict[str, Any]], positions: list[ParamPosition]
    ) -> list[ParamPosition]:
        stand_ins: Replacements = _call_with_positions(transform.install, self.optimizer, positions)
        for tensor, targets in stand_ins.items():
            transform.move_state(self.optimizer, tensor, targets)
        for group in groups:
            group.update(replace_params(group, lambda tensor: [new for new, _ in stand_ins.get(tensor, [(tensor, 0)])]))
        return [
            at.replaced_by(new, offset, transform.is_local)
            for at in positions
            for new, offset in stand_ins.get(at.tensor, [(at.tensor, 0)])
        ]

    @property
    def params(self) -> list[Tensor]:
        return [of.param for of in self.given]

    def params_by_entry(self, model_plan: ReductionPlan) -> list[tuple[ParameterEntry, Tensor]]:
        """Return each model parameter with its entry in the reduction plan of the model parameters."""
        return list(model_plan.pair_entries(self.params))

    # Stepped tensors --------------------------------------------------------------------------------------------------

    @property
    def stepped(self) -> list[Tensor]:
        return params_of(self.optimizer)

    def values(self) -> list[Tensor]:
        """Return the values of the stepped tensors, one tensor each.

        For a bfloat16 tensor with split master weights (`SplitMasters`), it is a new float32 master weight. Otherwise
        it is the stepped tensor itself.
        """
        transforms = self._those_with("master_of")
        return [
            next((master for transform in transforms if (master := transform.master_of(tensor)) is not None), tensor)
            for tensor in self.stepped
        ]

    def table(self, model_plan: ReductionPlan) -> ParamTable:
        return make_table(self.positions, self._grad_tensor, self._replica_tensor, self.derive(model_plan), model_plan)

    def _grad_tensor(self, at: ParamPosition) -> Tensor:
        return self._first_on_path(at, lambda transform, given: transform.keeps_grad_here(given))

    def _replica_tensor(self, at: ParamPosition) -> Tensor:
        return self._first_on_path(at, lambda transform, given: transform.replica_dependent)

    def _first_on_path(self, at: ParamPosition, stops: Callable[[ParamTransform, Tensor], bool]) -> Tensor:
        return next(
            (given for transform, given in zip(self.transforms, at.path, strict=True) if stops(transform, given)),
            at.tensor,
        )

    def derive(self, model_plan: ReductionPlan) -> ReductionPlan:
        """Derive the reduction plan of the stepped tensors from the plan of the model parameters."""
        entries = tuple(model_plan.entries[at.index] for at in self.positions)
        slots = model_plan.parameter_slots
        plan = replace(
            model_plan,
            entries=entries,
            parameter_slots=tuple(slots[at.index] for at in self.positions) if slots else (),
        )
        for transform in self.transforms:
            plan = _call_with_positions(transform.derive, plan, self.positions)
        return plan

    def states(self) -> list[dict[str, Tensor]]:
        """Return one dict of tensors by name per stepped tensor: its optimizer state, and the transforms' `extra_state`."""
        state, transforms = self.optimizer.state, self._those_with("extra_state")
        return [
            {key: value for key, value in state.get(tensor, {}).items() if isinstance(value, Tensor)}
            | {key: value for transform in transforms for key, value in transform.extra_state(tensor).items()}
            for tensor in self.stepped
        ]

    # The step --------------------------------------------------------------------------------------------------------

    @property
    def around_backward(self) -> list[Callable[[Window], AbstractContextManager[None]]]:
        return [transform.micro_batch for transform in self._those_with("micro_batch")]

    @property
    def completes_failed_backward(self) -> bool:
        return all(transform.completes_failed_backward for transform in self._those_with("micro_batch"))

    def sliced(self) -> list[SlicedBucket]:
        return [bucket for transform in self.transforms for bucket in transform.sliced()]

    def summed_in_backward(self) -> list[Tensor]:
        return [param for transform in self.transforms for param in transform.summed_in_backward()]

    def has_copies(self) -> bool:
        return any(transform.has_copies() for transform in self.transforms)

    @torch.no_grad()
    def find_overwritten(self) -> str | None:
        """Return the name of the first parameter with values that other code wrote and the next step would overwrite.

        None: no such parameter was found. In-place writes that do not increment the version counter, such as those through
        ``.data``, are found if the tensor keeps its storage. Other writes may not be found: the next step then uses the
        written values or raises an error.

        Host synchronization: a few per tensor that has a copy.
        """
        for transform in self.transforms:
            tensor = transform.find_overwritten()
            if tensor is not None:
                names = (at.name for at in self.positions if any(tensor is given for given in at.path))
                return next(names, None) or label_of(tensor)
        return None

    def clear(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model parameters, of the stepped tensors, and of all tensors between them."""
        with own_calls:
            self.optimizer.zero_grad(set_to_none)
            for transform in self.transforms:
                transform.clear(set_to_none)

    # Saving ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {key: value for transform in self.transforms for key, value in transform.state_dict().items()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        for transform in self.transforms:
            transform.check_state(state)
        if "shards" in state and "shards" not in self.state_dict():
            raise other_layout(state["shards"], None)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict` on this rank. Every rank must call `write_back` afterwards."""
        self.check_state(state)
        for transform in self.transforms:
            transform.load_state_dict(state)

    def write_back(self) -> None:
        """Write the values of the stepped tensors into the model. Every rank must call it after a load."""
        for transform in reversed(self.transforms):
            transform.write_back()


def _call_with_positions(method: Any, first: object, positions: Sequence[ParamPosition]) -> Any:
    """Call a transform's `install` or `derive`. The method may have the deprecated third argument, a list of tensors."""
    if len(signature(method).parameters) != 3:
        return method(first, positions)
    name = method.__name__
    wanted = f"{name}({', '.join(signature(getattr(ParamTransform, name)).parameters)})"
    warn_deprecated(
        f"{type(method.__self__).__name__}.{name} with a list of tensors as its third argument",
        f"write {wanted}; each position has its tensor as position.tensor",
    )
    return method(first, positions, [at.tensor for at in positions])


def _step_of(transform: ParamTransform) -> Callable[[UpdateRequest, Update], object]:
    """Return the transform's `step` as a function of (request, update), even if it has the deprecated form step(update)."""
    if len(signature(transform.step).parameters) != 1:
        return transform.step
    warn_deprecated(
        f"{type(transform).__name__}.step(update)", "write step(self, request, update) and call update(request)"
    )
    step = cast(Callable[[Callable[[], object]], object], transform.step)
    return lambda request, update: step(partial(update, request))


def other_layout(saved: Mapping[str, Any] | None, own: Mapping[str, Any] | None) -> ValueError:
    """Return the error for saved optimizer states that are sharded in another way than the states of the optimizer."""
    layouts = [
        f"sharded over {shards['axis']}={shards['size']} in {len(shards['pieces'])} shards" if shards else "unsharded"
        for shards in (saved, own)
    ]
    return ValueError(
        f"the state was saved with optimizer states {layouts[0]}, but the states of this optimizer are {layouts[1]}; load "
        "a state that was saved with the same model, topology, rank and states=, or use save_checkpoint and "
        "load_checkpoint, which reshard"
    )
