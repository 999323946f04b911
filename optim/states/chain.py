"""Parameter transforms, which replace the model's parameters in an optimizer's param groups, and the transform chain.

A transform replaces parameters by local tensors of DTensors, by shards, by CPU copies, or by float32 master weights.
The chain applies the transforms in this order. The last transforms of a chain replace no tensor: they change the
optimizer state, or run around the update.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from inspect import signature
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ...amp.casting import is_half
from ...amp.master_weights import SCALAR_STATE as SCALAR_STATE
from ...amp.modes import Precision
from ...parallel.interop.local_parameters import has_dtensors, local_tensor
from ...parallel.layout.annotation import annotation_of, label_of
from ...parallel.mesh.deprecation import renamed_members, warn_deprecated
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from ..gradients.fixed_order import SlicedBucket, TreeRanks
from ..gradients.in_place import clear_gradients
from ..kernels.memory import PLAIN, resolve_
from ..norm.param_table import ParamPosition, ParamTable, make_table
from ..norm.plan import ParameterEntry, ReductionPlan, check_unused
from ..step.data_parallel import TorchGradSync
from ..step.update_request import Update, UpdateRequest
from ..step.window import Window
from ..step.wrapped_optimizer import own_calls, params_of

# Param groups: their parameters, and the tensors that replace them ---------------------------------------------------


Replacements = Mapping[Tensor, Sequence[tuple[Tensor, int]]]
"""For each replaced tensor, (replacement, offset in the flattened tensor) pairs. A tensor with an empty sequence is
removed from the param groups."""


def named_params_of(param_groups: Sequence[Mapping[str, Any]]) -> list[tuple[str | None, Tensor]]:
    """Return a (name, parameter) pair per parameter of all param groups."""
    named: list[tuple[str | None, Tensor]] = []
    for group in param_groups:
        given = group.get("param_names")
        for position, item in enumerate(group["params"]):
            name, param = item if isinstance(item, tuple) else (given[position] if given else None, item)
            annotation = annotation_of(param)
            named.append((name or (annotation.name if annotation else None), param))
    return named


def checked_group(param_group: object) -> dict[str, Any]:
    """Return a copy of a param group whose ``"params"`` is a list; a single tensor becomes a list of one item."""
    if not isinstance(param_group, dict):
        raise TypeError(f"param_group is a {type(param_group).__name__}; give a dict with the key 'params'")
    if "params" not in param_group:
        raise ValueError(f"the param group has only the keys {[*param_group]}; give a dict with the key 'params'")
    given = param_group["params"]
    check_unused(given)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"'params' of the param group is {given!r}; give a list of parameters")
    return {**param_group, "params": [given] if isinstance(given, Tensor) else list(given)}


def match_names(new: dict[str, Any], groups: Sequence[dict[str, Any]]) -> None:
    """Make ``param_names`` consistent in all param groups, before ``new`` is added to the optimizer.

    torch requires ``param_names`` in all groups or in none. This function adds or removes them in groups without
    parameters, which may be ``new`` itself. Groups with parameters are unchanged.
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


def leave_out(optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> None:
    removed = {id(param): param for param in params}
    for group in optimizer.param_groups if removed else ():
        group.update(replace_params(group, lambda tensor: () if id(tensor) in removed else (tensor,)))
    for param in removed.values():
        optimizer.state.pop(param, None)


def replace_params(param_group: Mapping[str, Any], replacement: Callable[[Tensor], Iterable[Tensor]]) -> dict[str, Any]:
    """Return a dict with the new ``params`` of a group, without changing the group."""
    named = [(name or "", new) for name, param in named_params_of([param_group]) for new in replacement(param)]
    result: dict[str, Any] = {"params": [param for _, param in named]}
    return {**result, "param_names": [name for name, _ in named]} if "param_names" in param_group else result


def move_state(optimizer: torch.optim.Optimizer, param: Tensor, targets: Sequence[tuple[Tensor, int]]) -> None:
    """Move the optimizer's state of ``param``, if it has any, to the tensors that replace it.

    ``targets`` are (tensor, offset) pairs. Each tensor holds elements of the flattened parameter, beginning at ``offset``.
    If ``targets`` is empty, the state is dropped.
    """
    if state := optimizer.state.pop(param, None):
        for target, offset in targets:
            optimizer.state[target] = {key: _part_of(value, key, param, target, offset) for key, value in state.items()}


def _part_of(value: Any, key: str, param: Tensor, target: Tensor, offset: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    if key not in SCALAR_STATE and value.shape == param.shape != target.shape:
        value = value.reshape(-1)[offset : offset + target.numel()].view(target.shape)
    elif target.device == param.device:
        return value.clone()  # on the device of ``value``: optimizers without fused kernels keep step counts on the CPU
    return value.to(target.device, copy=True)


# Parameter transforms -------------------------------------------------------------------------------------------------

# A user passes state placements (`StatePlacement`), such as ``states=(Sharded("data"), Offloaded(0.5))``. A placement
# checks the optimizer's settings and makes a parameter transform (`ParamTransform`). Transforms are installed in the
# order of their `Position`. Up to `Position.DTYPE`, each one replaces tensors that the previous one returned:
#
#     model parameter -> local tensor of a DTensor -> shard -> copy on the CPU -> float32 master
#
# The last tensor is the stepped tensor. Transforms at `Position.STATE` and `Position.UPDATE` replace no tensor.
#
# At the end of an accumulation window, `pull_grads` moves gradients from left to right. With a copy on the CPU,
# `pull_grads` stops at the tensor before the copy; `step` moves gradients to the copy and beyond. After the update, weights
# move from right to left (`step`, `write_back`). A transform handles only its own replacements; `TransformChain` calls the
# transforms in the right order.


@renamed_members(CUT="SHARD")
class Position(IntEnum):
    """The order of parameter transforms in the chain, from the model to the optimizer."""

    LOCAL = 0
    """Replaces a DTensor by its local tensor."""
    SHARD = 1
    """Replaces a parameter by this rank's shards of it."""
    DEVICE = 2
    """Replaces a tensor by a copy on another device."""
    DTYPE = 3
    """Replaces a tensor by a copy of another dtype."""
    STATE = 4
    """Replaces no tensor; changes the optimizer state."""
    UPDATE = 5
    """Replaces no tensor and no state; runs directly around the update."""


@dataclass(frozen=True)
class PlacementContext:
    """The optimizer's settings, against which a state placement checks its compatibility.

    Args:
        optimizer: The torch optimizer that the user passed.
        precision: The precision mode.
        registry: The process groups of the mesh.
        averages_data: True (default) if meshstep averages gradients over the data axes. False if other code averages
            them, and with ``sum_order="fixed"``, which sums them.
        data_parallel: The controller of torch's or Megatron's data parallelism. None (default): neither is used.
        overlap: The argument ``overlap`` of `ParallelOptimizer`. Default False.
        placements: All state placements of the optimizer. Default: none.
        tree: With ``sum_order="fixed"``, the data ranks that sum gradients. None (default): ``sum_order="any"``.
    """

    optimizer: torch.optim.Optimizer
    precision: Precision
    registry: ProcessGroupRegistry
    averages_data: bool = True
    data_parallel: TorchGradSync | None = None
    overlap: bool = False
    placements: Sequence[StatePlacement] = ()
    tree: TreeRanks | None = None

    @property
    def main_grads(self) -> bool:
        """Return True if the gradients of half-precision parameters are accumulated in float32 (main gradients)."""
        wanted = self.precision.masters and self.precision.main_grads
        return wanted and (self.data_parallel is None or self.data_parallel.float32_grads)


@renamed_members(link="transform", draws="rounds_stochastically")
class StatePlacement(ABC):
    """A state placement: an item of the argument ``states`` of `ParallelOptimizer`, which makes a parameter transform.

    It is immutable. For example, `Sharded` shards optimizer states, and `Offloaded` keeps some of them on the CPU.

    ```python
    class CountedUpdates(StatePlacement):
        position = Position.UPDATE

        def check(self, context):
            if context.overlap:
                raise ValueError("CountedUpdates needs overlap=False")

        def transform(self, context):
            return CountUpdates()    # a `ParamTransform`
    ```
    """

    position: ClassVar[Position]
    rounds_stochastically: ClassVar[bool] = False
    """True if the transform rounds stochastically, so that repeating an update gives other values."""

    @abstractmethod
    def check(self, context: PlacementContext) -> None:
        """Raise ValueError if the placement is incompatible with the optimizer's settings. Collectives: none.

        Raise TypeError or ValueError if an argument of the placement is wrong.
        """

    @abstractmethod
    def transform(self, context: PlacementContext) -> ParamTransform:
        """Return the parameter transform of this placement. The caller installs it. Collectives: none."""


@renamed_members(
    bring="pull_grads",
    publish="write_back",
    holds_back="keeps_grad_here",
    kept="extra_state",
    differs="replica_dependent",
    divisible="supports_partial_step",
    in_parts="may_step_partially",
    cut_over="sharded_over",
)
class ParamTransform:
    """Base class of parameter transforms, which replace tensors in an optimizer's param groups, such as by master weights.

    The base class itself replaces no tensor. Subclasses override the methods that they need.

        class CountUpdates(ParamTransform):
            updates = 0

            def step(self, request, update):
                self.updates += 1
                super().step(request, update)

    The argument ``update`` of `step` calls the `step` of the transforms nearer to the optimizer, and then the
    optimizer. "Window" in the methods means accumulation window: the micro-batches of one optimizer step.
    """

    idle = False
    """True if the transform has nothing to do, so that a step does not call its methods. Read after `install`."""
    is_local = False
    """True if the rest of meshstep must treat the transform's replacements as the model's parameters."""
    replica_dependent = False
    """True if replica checks, except `Fingerprints`, compare the transform's inputs instead of its replacements.

    It must be True if the transform may replace a tensor on one rank, and not replace its replica on another rank.
    """
    supports_partial_step = False
    """True if an update may consist of several calls of `step`, each with some of the parameters in the param groups."""
    completes_failed_backward = False
    """True if an override of `micro_batch` issues all of its collectives even if its body raises."""
    may_step_partially = False
    """True if the transforms between this one and the optimizer that override `step` or `write_back` all have
    ``supports_partial_step``. `TransformChain` sets it."""

    def keeps_grad_here(self, tensor: Tensor) -> bool:
        """Return True if gradients are reduced, measured and clipped in place on ``tensor``, an input of this transform.

        False (default): this is done on the replacement of ``tensor``. An update that gets a clip coefficient
        (`UpdateRequest.factor`) applies it to the gradients of the stepped tensors in either case.
        """
        return False

    def not_captured(self) -> str | None:
        """Return the reason why a CUDA graph can't capture a step with this transform; None (default) if it can.

        The text begins with the name of the placement or feature.
        """
        return None

    def agree(self, positions: Sequence[ParamPosition], plan: ReductionPlan, earlier_error: Exception | None) -> None:
        """Agree with the other ranks on the tensors that `install` will replace. Default: no agreement.

        `TransformChain` calls this method before each `install`, and also after an earlier transform failed on this rank.
        Otherwise the other ranks, which may issue a collective here, would wait for this rank.

        Args:
            positions: As in `install`. After an error, the positions before the transform that failed.
            plan: The reduction plan of the model parameters. ``position.index`` is an index of its entries.
            earlier_error: The error of an earlier transform's `install` on this rank; None: there was no error. If the
                method issues collectives, it must raise this error on all ranks.
        """

    def install(self, optimizer: torch.optim.Optimizer, positions: Sequence[ParamPosition]) -> Replacements:
        """Return the replacements of the tensors in ``positions``. A tensor without an entry is not replaced.

        `TransformChain` calls it again when param groups are added or refreshed, with the positions of the parameters
        that are new or were unfrozen; there may be none.
        """
        return {}

    def move_state(
        self, optimizer: torch.optim.Optimizer, tensor: Tensor, targets: Sequence[tuple[Tensor, int]]
    ) -> None:
        """Move the optimizer state of ``tensor`` to its replacements.

        Args:
            optimizer: The optimizer.
            tensor: The replaced tensor.
            targets: (replacement, offset in the flattened tensor) pairs.
        """
        move_state(optimizer, tensor, targets)

    def derive(self, plan: ReductionPlan, positions: Sequence[ParamPosition]) -> ReductionPlan:
        """Return the plan of the replacements: the layouts by which gradients are reduced and norms are summed.

        Args:
            plan: A plan with one entry per position, for the tensor before this transform replaced it.
            positions: The positions of all stepped tensors.
        """
        return plan

    def micro_batch(self, window: Window) -> AbstractContextManager[None]:
        """Return a context manager around the backward of one micro-batch.

        Ranks without samples enter it too. On a rank without micro-batches in a window, `catch_up` issues the collectives.
        """
        return nullcontext()

    def sliced(self) -> Sequence[SlicedBucket]:
        """Return the buckets whose gradient sums this transform needs in slices (``sum_order="fixed"``). Default: none."""
        return ()

    def summed_in_backward(self) -> Sequence[Tensor]:
        """Return the parameters whose gradients `micro_batch` sums with ``sum_order="fixed"``. Default: none."""
        return ()

    def catch_up(self, window: Window) -> None:
        """Issue the collectives of this transform's `micro_batch`, if this rank ran no backward in the window.

        It is called at the end of each window, so that all ranks issue the same collectives in the same order.
        """

    def pull_grads(self, window: Window, averaged: bool) -> Exception | None:
        """Move gradients from the replaced tensors to their replacements, at the end of a window.

        A transform that replaces parameters by shards reduces their gradients here. Collectives: none, or those of the
        transform, the same on all ranks.

        Args:
            window: The accumulation window that ends.
            averaged: False if torch's data parallelism should have averaged the gradients over the data axes, but did
                not.
        Returns:
            The error for an unusable gradient of this rank; None: all gradients are usable. The replacement of an
            unusable gradient is filled with NaN, so that all ranks skip the step.
        """
        return None

    def step(self, request: UpdateRequest, update: Update) -> None:
        """Call ``update`` with the request or a changed copy of it, then write the new weights to the replaced tensors.

        If ``request.skip`` is 1, no weight and no optimizer state may change.
        """
        update(request)
        self.write_back()

    def write_back(self) -> None:
        """Write the values of the replacements into the replaced tensors. Every rank must call it."""

    def reload(self) -> None:
        """Set the replacements to the values of the replaced tensors. It is called after other code wrote weights."""

    def has_copies(self) -> bool:
        """Return True if a replacement has memory of its own, so that `write_back` overwrites the replaced tensor."""
        return False

    def find_overwritten(self) -> Tensor | None:
        """Return the first tensor with values that other code wrote and `write_back` would overwrite, or None.

        It finds writes that change neither the tensor's version counter nor its memory, such as in-place writes through
        ``.data``. After other writes, `pull_grads` copies the tensor to its replacement or raises an error, so nothing
        is lost.

        Host synchronization: a few per tensor that has a copy.
        """
        return None

    def clear(self, set_to_none: bool) -> None:
        """Clear the gradients of the tensors that this transform replaced."""

    def sharded_over(self, tensor: Tensor) -> tuple[str, ...] | None:
        """Return the axes over which this transform shards its input ``tensor``, even if this rank has no shard of it.

        None: this transform does not shard it.
        """
        return None

    def extra_state(self, tensor: Tensor) -> Mapping[str, Tensor]:
        """Return the state tensors that this transform keeps for the stepped tensor ``tensor``, by name; default: none.

        Ranks with replicas of ``tensor`` must return bitwise equal state tensors.
        """
        return {}

    def master_of(self, tensor: Tensor) -> Tensor | None:
        """Return a new float32 tensor with the master weight of ``tensor``, or None.

        Only `SplitMasters`, which stores remainders instead of master weights, returns a tensor. Default: None.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the entries that a checkpoint needs in addition to the optimizer's own state.

        Keys must be unique among transforms. `save_checkpoint` stores the entry ``"masters"`` of each rank. It does not
        store ``"shards"`` and ``"dtypes"``; `load_checkpoint` takes these from the optimizer that it loads into. It stores
        all other entries from rank 0 only, so they must be plain values that are equal on all ranks.
        """
        return {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if ``state`` was saved in another layout or is malformed; change nothing."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the entries of `state_dict` on this rank. The caller then calls `write_back` on all ranks.

        Raises:
            ValueError: The state does not fit; nothing is changed.
        """


# The first transform of a chain: local tensors of DTensors ------------------------------------------------------------

# Attribute that marks a gradient as the local tensor of a DTensor's gradient. A gradient that other code set lacks it.
_SHARED = "_meshstep_shared"


class LocalTensors(ParamTransform):
    """The transform that replaces each DTensor by its local tensor.

    The local tensor is a parameter with the memory, name and layout of the DTensor. FSDP2 and torch's tensor
    parallelism create DTensor parameters. torch's fused optimizers reject a mixture of DTensors and plain tensors;
    local tensors avoid this. An update then issues no hidden collectives, and later transforms handle plain tensors
    only. The optimizer state becomes local as well. If the optimizer has no DTensors, the transform does nothing.
    """

    is_local = True

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._pairs: list[tuple[Any, nn.Parameter]] = []
        self.idle = True  # until there are DTensors

    def install(self, optimizer: torch.optim.Optimizer, positions: Sequence[ParamPosition]) -> Replacements:
        """Return the local parameters of the DTensors. Raise ValueError for an unsupported layout."""
        tensors = [at.tensor for at in positions]
        if not has_dtensors(tensors):
            return {}
        from ...parallel.interop.dtensor import DTensor, accumulate_like_piece, local_parameter

        new = [(param, local_parameter(param, self._topology)) for param in tensors if isinstance(param, DTensor)]
        for param, piece in new:
            if is_half(param) and param.requires_grad:
                accumulate_like_piece(param, piece)
        known = {id(param) for param, _ in self._pairs}
        self._pairs += [pair for pair in new if id(pair[0]) not in known]
        self.idle = False
        return {param: [(piece, 0)] for param, piece in new}

    def move_state(
        self, optimizer: torch.optim.Optimizer, tensor: Tensor, targets: Sequence[tuple[Tensor, int]]
    ) -> None:
        """Move the state of a DTensor to its local parameter, with the local tensors of state DTensors."""
        if state := optimizer.state.pop(tensor, None):
            for target, _ in targets:
                optimizer.state[target] = {
                    key: local_tensor(value) if isinstance(value, Tensor) else value for key, value in state.items()
                }

    def pull_grads(self, window: Window, averaged: bool) -> Exception | None:
        """Set the gradient of each local parameter to the local tensor of its DTensor's gradient.

        The local gradient may be partial: it must still be summed over ranks. If the DTensor has no gradient, a
        gradient that other code set on the local parameter is kept. For example, some trainers set zero gradients and make
        a step to create optimizer states, before they load states.

        Return the error for a gradient that is not a DTensor or has unsupported placements; its local gradient is
        filled with NaN.
        Collectives: for each parameter, one all-reduce per axis that shards the parameter and over which its gradient
            was partial in the first step.
        """
        from ...parallel.interop.dtensor import local_parameter, poison_gradient, share_gradient

        problem = None
        for param, _ in self._pairs:
            piece = local_parameter(param)
            if param.grad is None and piece.grad is not None and not hasattr(piece.grad, _SHARED):
                continue
            try:
                share_gradient(param, piece, to_sum=True)
            except ValueError as error:
                poison_gradient(param, piece)
                problem = error
            if piece.grad is not None:
                setattr(piece.grad, _SHARED, True)
        return problem

    def step(self, request: UpdateRequest, update: Update) -> None:
        """Call ``update``, then remove the local gradients, so that clearing the DTensors' gradients frees memory.

        A DTensor without a gradient first gets the gradient of its local parameter.
        """
        from ...parallel.interop.dtensor import return_gradient

        update(request)
        for param, piece in self._pairs:
            return_gradient(param, piece)

    def clear(self, set_to_none: bool) -> None:
        clear_gradients([param for param, _ in self._pairs], set_to_none)


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
        return list(zip(model_plan.entries, self.params, strict=True))

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
        grad_tensors = [
            self._first_on_path(at, lambda transform, given: transform.keeps_grad_here(given)) for at in self.positions
        ]
        replica_tensors = [
            self._first_on_path(at, lambda transform, given: transform.replica_dependent) for at in self.positions
        ]
        return make_table(self.positions, grad_tensors, replica_tensors, self.derive(model_plan), model_plan)

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
