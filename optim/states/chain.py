"""The chain of what stands in for parameters: it alone knows the order, the nesting, and which piece is what."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...amp.master_weights import SCALAR_STATE as SCALAR_STATE
from ...amp.master_weights import label_of
from ...amp.precision import Precision
from ...parallel.layout.annotation import annotation_of
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..kernels.memory import PLAIN, resolve_
from ..norm.param_table import ParamPosition, ParamTable, make_table
from ..norm.plan import ReductionPlan
from ..step.call_guard import own_calls
from ..step.data_parallel import TorchGradSync
from ..step.update_request import Update, UpdateRequest
from ..step.window import Window

# Positions of the param groups ----------------------------------------------------------------------------------------


Replacements = Mapping[Tensor, Sequence[tuple[Tensor, int]]]
"""For each tensor that is replaced the (tensor, offset) pairs that stand for it, none or several."""


def params_of(param_groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """The parameters of param groups, in one list."""
    return [param for _, param in named_params_of(param_groups)]


def named_params_of(param_groups: Sequence[Mapping[str, Any]]) -> list[tuple[str | None, Tensor]]:
    """The parameters of param groups, with the names that the optimizer was given, else the annotations'."""
    named: list[tuple[str | None, Tensor]] = []
    for group in param_groups:
        given = group.get("param_names")
        for position, item in enumerate(group["params"]):
            name, param = item if isinstance(item, tuple) else (given[position] if given else None, item)
            annotation = annotation_of(param)
            named.append((name or (annotation.name if annotation else None), param))
    return named


def match_names(new: dict[str, Any], groups: Sequence[dict[str, Any]]) -> None:
    """Give groups without parameters an empty ``param_names`` where the others have names: torch wants all or none.

    Args:
        new: The param group to add; its parameters may be (name, parameter) pairs.
        groups: The optimizer's groups. Empty ones may be changed.
    """
    if not new["params"]:
        if any("param_names" in group for group in groups):
            new["param_names"] = []
        else:
            new.pop("param_names", None)
    elif not any(group["params"] for group in groups):
        named = "param_names" in new or isinstance(new["params"][0], tuple)
        for group in groups:
            group.update({"param_names": []}) if named else group.pop("param_names", None)


def positions_in(param_groups: Sequence[Mapping[str, Any]], first: int = 0) -> list[ParamPosition]:
    """Return the positions of param groups in which no tensor has been replaced; parameters are numbered from ``first``."""
    return [
        ParamPosition(index, name or f"parameter {index}", param, param)
        for index, (name, param) in enumerate(named_params_of(param_groups), first)
    ]


def replaced(param_group: Mapping[str, Any], replacement: Callable[[Tensor], Iterable[Tensor]]) -> dict[str, Any]:
    """The ``params`` of a group with others, none or several, in the place of each, and ``param_names`` if it has any."""
    named = [(name or "", new) for name, param in named_params_of([param_group]) for new in replacement(param)]
    result: dict[str, Any] = {"params": [param for _, param in named]}
    return {**result, "param_names": [name for name, _ in named]} if "param_names" in param_group else result


def move_state(optimizer: torch.optim.Optimizer, param: Tensor, targets: Sequence[tuple[Tensor, int]]) -> None:
    """Move the optimizer's state of ``param``, if it has any, to those that stand for pieces of it.

    Args:
        targets: (tensor, offset): it has the elements from ``offset`` on of the flattened parameter.
    """
    state = optimizer.state.pop(param, None)
    for target, offset in targets if state else ():
        optimizer.state[target] = {
            key: _part_of(value, key, param, target, offset) for key, value in (state or {}).items()
        }


def _part_of(value: Any, key: str, param: Tensor, target: Tensor, offset: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    if key not in SCALAR_STATE and value.shape == param.shape != target.shape:
        value = value.reshape(-1)[offset : offset + target.numel()].view(target.shape)
    elif target.device == param.device:
        return value.clone()  # torch keeps step counts on the CPU for optimizers that are not fused
    return value.to(target.device, copy=True)


# Parameter transforms -------------------------------------------------------------------------------------------------

# A placement (`Placement`) is what a user writes, ``states=(Sharded("data"), Offloaded(0.5))``: a frozen object that
# checks itself and makes the link. Links are installed in the order of their `Position`, each over what the one before
# put there:
#
#     model's parameter -> local tensor of a DTensor -> piece -> copy on the CPU -> float32 master -> stepped
#
# Gradients go down the chain (`bring`), the update comes up (`step`). A link knows its own replacement and nothing else;
# nesting, order, clearing and which piece is what are those of `TransformChain`.


class Position(IntEnum):
    """Where in the chain a link belongs."""

    LOCAL = 0
    """A plain tensor for a DTensor."""
    CUT = 1
    """Pieces of parameters."""
    DEVICE = 2
    """Copies elsewhere."""
    DTYPE = 3
    """Copies of another dtype."""
    STATE = 4
    """Nothing is replaced; the optimizer's state is."""
    UPDATE = 5
    """Nothing is replaced at all; next to the optimizer."""


@dataclass(frozen=True)
class Binding:
    """What a placement is to fit.

    Args:
        optimizer: The torch optimizer, as it was given.
        precision: The mode.
        registry: The groups.
        averages_data: Whether the optimizer itself averages gradients over the data axes.
        data_parallel: torch's, if that is used.
        overlap: Whether gradients are reduced while backward runs.
        placements: All that were given.
    """

    optimizer: torch.optim.Optimizer
    precision: Precision
    registry: ProcessGroupRegistry
    averages_data: bool = True
    data_parallel: TorchGradSync | None = None
    overlap: bool = False
    placements: Sequence[Placement] = ()

    @property
    def main_grads(self) -> bool:
        """Whether half-precision parameters have float32 gradients."""
        wanted = self.precision.masters and self.precision.main_grads
        return wanted and (self.data_parallel is None or self.data_parallel.float32_grads)


class Placement(ABC):
    """Where optimizer states and what they belong to are kept; an argument, frozen."""

    position: ClassVar[Position]
    draws: ClassVar[bool] = False
    """Its link rounds by draws of the step's own."""

    @abstractmethod
    def check(self, binding: Binding) -> None:
        """Raise ValueError, before anything is changed, where it does not fit. Collectives: none."""

    @abstractmethod
    def link(self, binding: Binding) -> Link:
        """The link, not installed yet. Collectives: none."""


class Link:
    """Stands in for nothing; subclasses override what they need.

    ``update`` is what steps the optimizer, or skips; `step` is around it.
    """

    idle = False
    """There is nothing that it stands in for; asked after `install`."""
    is_local = False
    """Its stand-ins are what the library calls the model's parameters."""
    differs = False
    """Ranks that hold copies of a tensor may differ in whether it is replaced."""
    divisible = False
    """`step` may be called several times for one update, each time with a part of what the param groups hold."""
    in_parts = False
    """All links between this one and the optimizer are; the chain says so."""

    def holds_back(self, tensor: Tensor) -> bool:
        """Whether the gradient stays at ``tensor``, which it was given, to be completed, measured and clipped there."""
        return False

    def not_captured(self) -> str | None:
        """Why a step can't be captured in a CUDA graph with it: its name, and what it does in Python or on the host."""
        return None

    def install(self, optimizer: torch.optim.Optimizer, positions: Sequence[ParamPosition]) -> Replacements:
        """Return the tensors that replace those of ``positions``; a tensor that is not a key stays.

        Called again for param groups that are added.
        """
        return {}

    def move_state(
        self, optimizer: torch.optim.Optimizer, tensor: Tensor, targets: Sequence[tuple[Tensor, int]]
    ) -> None:
        """Give the stand-ins of ``tensor`` its optimizer state."""
        move_state(optimizer, tensor, targets)

    def derive(self, plan: ReductionPlan, positions: Sequence[ParamPosition]) -> ReductionPlan:
        """Return the plan of the stepped tensors, given a plan with one entry per position."""
        return plan

    def micro_batch(self, window: Window) -> AbstractContextManager[None]:
        """Around the backward of one micro-batch; every rank enters it, whether it has something to compute or not."""
        return nullcontext()

    def catch_up(self, window: Window) -> None:
        """Do what backward does, where this rank ran none: ranks then have done the same collectives, in one order, before
        anything that they do together at the end of a window."""

    def bring(self, window: Window, averaged: bool) -> Exception | None:
        """Give the stand-ins the gradients of what they stand for, at the end of a window.

        Args:
            averaged: False where torch's data parallelism was to average them over the data axes, but has not.
        Returns:
            What is wrong with those of this rank, of which it has put NaN there.
        """
        return None

    def step(self, request: UpdateRequest, update: Update) -> None:
        """Call ``update`` with the request, or a changed copy of it, and bring the result back; a skipped step changes
        nothing."""
        update(request)
        self.publish()

    def publish(self) -> None:
        """Bring the values of the stand-ins into what they stand for; on all ranks."""

    def reload(self) -> None:
        """Set the stand-ins to the values of what they stand for, after the model's weights were written."""

    def has_copies(self) -> bool:
        """Return True if a stand-in has memory of its own, so that `publish` would undo a write to what it stands for."""
        return False

    def find_overwritten(self) -> Tensor | None:
        """Return the first tensor whose values `publish` would undo, because its stand-in does not have them.

        Tensors that `bring` reads anew are left out. Host synchronization: one per tensor that has a copy.
        """
        return None

    def clear(self, set_to_none: bool) -> None:
        """Clear the gradients of what it replaced."""

    def cut_over(self, tensor: Tensor) -> tuple[str, ...] | None:
        """The axes over whose ranks ``tensor``, which it was given, is cut into pieces; None: it is not."""
        return None

    def kept(self, tensor: Tensor) -> Mapping[str, Tensor]:
        """What belongs to a tensor that the optimizer steps, besides its state, by name: it has copies where that has."""
        return {}

    def master_of(self, tensor: Tensor) -> Tensor | None:
        """A float32 copy of what a tensor that the optimizer holds is stepped as, where that is more than the tensor."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What must be saved beside the optimizer's own state. No other link has the same keys. But for masters and layouts
        a checkpoint keeps rank 0's: plain values that are the same on all ranks."""
        return {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the state was saved in another layout; nothing is changed."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it on this rank; `publish` follows, on all. ValueError where it does not fit, and nothing changed."""


# Observers ------------------------------------------------------------------------------------------------------------


class StepObserver:
    """Follows the steps of a `ParallelOptimizer`; give it to `ParallelOptimizer.add_observer`.

        class UpdateTime(StepObserver):
            def update(self, request, update):
                start = time.perf_counter()
                update(request)
                self.seconds = time.perf_counter() - start

    Subclasses override the methods that they need. Each rank calls them in this order, once per step, so an observer on
    all ranks may use collectives of its own. An observer must not change gradients, weights or the request.
    """

    def not_captured(self) -> str | None:
        """Return why a step can't be captured in a CUDA graph with this observer; None: it can be."""
        return None

    def local_grads(self, window: Window) -> None:
        """Look at gradients where backward left them: this rank's own, except those that backward has reduced."""

    def reduced_grads(self, window: Window) -> None:
        """Look at averaged and summed gradients of the stepped tensors (`ParallelOptimizer.pieces`), before clipping.

        They still contain the loss scale (``window.scale``) and are not divided by the window's weight.
        """

    def update(self, request: UpdateRequest, update: Update) -> None:
        """Call ``update(request)`` exactly once. It steps or skips, and writes the result into the model."""
        update(request)


# The chain of transforms ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GivenParam:
    """One model parameter, as the optimizer was given it.

    Args:
        trained: It required a gradient when the last param group was added.
        dtype, device: Those that it had when it was given.
    """

    name: str
    param: Tensor
    trained: bool
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, name: str, param: Tensor) -> GivenParam:
        """Return the record of a parameter as it is now."""
        return cls(name, param, param.requires_grad, param.dtype, param.device)

    @property
    def is_converted(self) -> bool:
        """Return True if the parameter has another dtype or device than when it was given."""
        return self.param.dtype != self.dtype or self.param.device != self.device


class TransformChain:
    """Links, installed over an optimizer's param groups, which are changed in place.

    Args:
        optimizer: It may have stepped already.
        links: From the model's side on.
        registry: The groups.

    Attributes:
        positions: Those of the param groups, with the tensors that are stepped.
        given: The model parameters, some of which this rank may have no shard of.
        frozen: Those of them that were frozen between their group's and a later group's addition.
        bringing: The links that have gradients to `bring`, from the model's side on.
        catching_up: Those that `catch_up`.
        observers: In the order in which they are called.
        around_update: What is around an update: the links' `step`, of the one next to the optimizer first, and observers.
    Collectives: those of the links.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, links: Sequence[Link], registry: ProcessGroupRegistry) -> None:
        self.optimizer, self.links, self.registry = optimizer, list(links), registry
        self.observers: list[StepObserver] = []
        self.positions: list[ParamPosition] = []
        self.given: list[GivenParam] = []
        self.frozen: list[Tensor] = []
        self._add(optimizer.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group to the optimizer, and the stand-ins of its parameters; nothing changes where it raises."""
        before, given, frozen = len(self.optimizer.param_groups), self.given[:], self.frozen[:]
        with own_calls:
            self.optimizer.add_param_group(param_group)
        try:
            self._add(self.optimizer.param_groups[-1:])
        except Exception:
            del self.optimizer.param_groups[before:]
            self.given, self.frozen = given, frozen
            raise

    def _add(self, groups: list[dict[str, Any]]) -> None:
        positions = positions_in(groups, first=len(self.given))
        for param in (at.param for at in positions if type(at.param) in PLAIN and at.param.is_neg()):
            resolve_(param)  # links read memory: pieces are views of it
        # The plan is agreed anew, without what has been frozen since: that is frozen for good.
        self.frozen += [of.param for of in self.given if of.trained and not of.param.requires_grad]
        self.given = [replace(of, trained=of.trained and of.param.requires_grad) for of in self.given]
        self.given += [GivenParam.of(at.name, at.param) for at in positions]
        for link in self.links:
            positions = self._install(link, groups, positions)
        self.positions += positions
        self.bringing, self.catching_up = self._those_with("bring"), self._those_with("catch_up")
        stepping = self._those_with("step", "publish")[::-1]
        for index, link in enumerate(stepping):
            link.in_parts = all(inner.divisible for inner in stepping[:index])
        self._stepping = [_step_of(link) for link in stepping]
        self.set_observers(self.observers)

    def explain(self, error: Exception) -> None:
        """Raise RuntimeError from ``error`` if any parameter was converted, which explains the error."""
        if (text := self.converted()) and text != str(error):
            raise RuntimeError(text) from error

    def converted(self) -> str | None:
        """Return the error of the first parameter that has another dtype or device than when it was given."""
        for of in self.given:
            if of.is_converted:
                param = of.param
                was, now = (of.dtype, param.dtype) if param.dtype != of.dtype else (of.device, param.device)
                return (
                    f"{of.name} was {was} when the optimizer was made, and is {now} now: convert and move the model before "
                    "ParallelOptimizer is made, or make the optimizer anew"
                )
        return None

    def set_observers(self, observers: Sequence[StepObserver]) -> None:
        """Call these observers from now on, and no others."""
        self.observers = list(observers)
        self.around_update = [*self._stepping, *(observer.update for observer in self.observers)]

    def _those_with(self, *methods: str) -> list[Link]:
        """The links that do something there: a step should not pass through the others."""
        return [
            link
            for link in self.links
            if not link.idle and any(getattr(type(link), name) is not getattr(Link, name) for name in methods)
        ]

    def _install(self, link: Link, groups: list[dict[str, Any]], positions: list[ParamPosition]) -> list[ParamPosition]:
        stand_ins = _install_by(link, self.optimizer, positions)
        for tensor, targets in stand_ins.items():
            link.move_state(self.optimizer, tensor, targets)
        for group in groups:
            group.update(replaced(group, lambda tensor: [new for new, _ in stand_ins.get(tensor, [(tensor, 0)])]))
        return [
            at.replaced_by(new, offset, link.is_local)
            for at in positions
            for new, offset in stand_ins.get(at.tensor, [(at.tensor, 0)])
        ]

    @property
    def params(self) -> list[Tensor]:
        """Return the model parameters that the optimizer was given."""
        return [of.param for of in self.given]

    # What is stepped --------------------------------------------------------------------------------------------------

    @property
    def stepped(self) -> list[Tensor]:
        """All that the optimizer steps, in the order of its param groups."""
        return params_of(self.optimizer.param_groups)

    def values(self) -> list[Tensor]:
        """What is stepped, with all of its bits: copies, where a link keeps some of them apart."""
        links = self._those_with("master_of")
        return [
            next((master for link in links if (master := link.master_of(tensor)) is not None), tensor)
            for tensor in self.stepped
        ]

    def table(self, model_plan: ReductionPlan) -> ParamTable:
        """Return one record per stepped tensor. Collectives, host synchronization: none.

        Args:
            model_plan: The agreed plan of the model parameters.
        """
        grad_tensors = [self._first_on_path(at, lambda link, given: link.holds_back(given)) for at in self.positions]
        replica_tensors = [self._first_on_path(at, lambda link, given: link.differs) for at in self.positions]
        return make_table(self.positions, grad_tensors, replica_tensors, self.derive(model_plan), model_plan)

    def _first_on_path(self, at: ParamPosition, stops: Callable[[Link, Tensor], bool]) -> Tensor:
        """Return the tensor that was given to the first link for which ``stops`` is true, else the stepped tensor."""
        return next((given for link, given in zip(self.links, at.path, strict=True) if stops(link, given)), at.tensor)

    def derive(self, model_plan: ReductionPlan) -> ReductionPlan:
        """Return the plan of the stepped tensors, from that of the model parameters; no collective."""
        entries = tuple(model_plan.entries[at.index] for at in self.positions)
        slots = model_plan.parameter_slots
        plan = replace(
            model_plan,
            entries=entries,
            parameter_slots=tuple(slots[at.index] for at in self.positions) if slots else (),
        )
        for link in self.links:
            plan = _derive_by(link, plan, self.positions)
        return plan

    def states(self) -> list[dict[str, Tensor]]:
        """The tensors of the optimizer's state of what is stepped, and what links keep of it; by name, in that order."""
        state, links = self.optimizer.state, self._those_with("kept")
        return [
            {key: value for key, value in state.get(tensor, {}).items() if isinstance(value, Tensor)}
            | {key: value for link in links for key, value in link.kept(tensor).items()}
            for tensor in self.stepped
        ]

    # The step --------------------------------------------------------------------------------------------------------

    @property
    def around_backward(self) -> list[Callable[[Window], AbstractContextManager[None]]]:
        """What every rank enters around the backward of one micro-batch, with the window."""
        return [link.micro_batch for link in self._those_with("micro_batch")]

    def has_copies(self) -> bool:
        """Return True if on this rank a stand-in has memory of its own."""
        return any(link.has_copies() for link in self.links)

    @torch.no_grad()
    def find_overwritten(self) -> str | None:
        """Return the name of the first parameter whose values the next step would undo. Host synchronization: yes."""
        for link in self.links:
            tensor = link.find_overwritten()
            if tensor is not None:
                names = (at.name for at in self.positions if any(tensor is given for given in at.path))
                return next(names, None) or label_of(tensor)
        return None

    def clear(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        with own_calls:
            self.optimizer.zero_grad(set_to_none)
            for link in self.links:
                link.clear(set_to_none)

    # Saving ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What must be saved beside the optimizer's own state."""
        return {key: value for link in self.links for key, value in link.state_dict().items()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if it is of states that were sharded in another way."""
        for link in self.links:
            link.check_state(state)
        if "shards" in state and "shards" not in self.state_dict():
            raise other_layout(state["shards"], None)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it on this rank; `publish` must follow, on all.

        Raises:
            ValueError: It does not fit; nothing is changed.
        """
        self.check_state(state)
        for link in self.links:
            link.load_state_dict(state)

    def publish(self) -> None:
        """Bring the stepped weights into the model on all ranks, after they were loaded."""
        for link in reversed(self.links):
            link.publish()


def _install_by(link: Link, optimizer: torch.optim.Optimizer, positions: Sequence[ParamPosition]) -> Replacements:
    """Call the link's `install`; with a DeprecationWarning also one that takes (optimizer, held, tensors)."""
    if len(signature(link.install).parameters) != 3:
        return link.install(optimizer, positions)
    _warn_of_tensors(link, "install(self, optimizer, positions)")
    install: Callable[..., Replacements] = link.install
    return install(optimizer, positions, [at.tensor for at in positions])


def _derive_by(link: Link, plan: ReductionPlan, positions: Sequence[ParamPosition]) -> ReductionPlan:
    """Call the link's `derive`; with a DeprecationWarning also one that takes (plan, held, tensors)."""
    if len(signature(link.derive).parameters) != 3:
        return link.derive(plan, positions)
    _warn_of_tensors(link, "derive(self, plan, positions)")
    derive: Callable[..., ReductionPlan] = link.derive
    return derive(plan, positions, [at.tensor for at in positions])


def _warn_of_tensors(link: Link, wanted: str) -> None:
    name = wanted.partition("(")[0]
    warnings.warn(
        f"{type(link).__name__}.{name} takes a list of tensors as its third argument, which is deprecated: write {wanted}; "
        "each position has its tensor as position.tensor",
        DeprecationWarning,
        stacklevel=2,
    )


def _step_of(link: Link) -> Callable[[UpdateRequest, Update], object]:
    """Return the link's `step`; with a DeprecationWarning also one of the form ``step(update)``."""
    if len(signature(link.step).parameters) != 1:
        return link.step
    warnings.warn(
        f"{type(link).__name__}.step(update) gets the request of the update now: write step(self, request, update) and "
        "call update(request)",
        DeprecationWarning,
        stacklevel=2,
    )
    step: Callable[[Callable[[], object]], object] = link.step  # type: ignore[assignment]
    return lambda request, update: step(partial(update, request))


def other_layout(saved: Mapping[str, Any] | None, own: Mapping[str, Any] | None) -> ValueError:
    """The error that optimizer states were saved in another layout than they have here (None: whole)."""
    layouts = [
        f"sharded over {cut['axis']}={cut['size']} in {len(cut['pieces'])} pieces" if cut else "whole"
        for cut in (saved, own)
    ]
    return ValueError(
        f"the state was saved with optimizer states {layouts[0]}, but here they are {layouts[1]}; a state fits the same "
        "model, topology, rank and states= (save_checkpoint and load_checkpoint reshard)"
    )
