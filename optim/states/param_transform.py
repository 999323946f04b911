"""Base classes of state placements (`StatePlacement`) and of parameter transforms (`ParamTransform`).

A user passes state placements, such as ``states=(Sharded("data"), Offloaded(0.5))``. A placement checks the optimizer's
settings and makes a parameter transform. Transforms are installed in the order of their `Position`. Up to
`Position.DTYPE`, each one replaces tensors that the previous one returned:

    model parameter -> local tensor of a DTensor -> shard -> copy on the CPU -> float32 master

The last tensor is the stepped tensor. Transforms at `Position.STATE` and `Position.UPDATE` replace no tensor: they change
the optimizer state, or run around the update.

At the end of an accumulation window, `pull_grads` moves gradients from left to right. With a copy on the CPU,
`pull_grads` stops at the tensor before the copy; `step` moves gradients to the copy and beyond. After the update, weights
move from right to left (`step`, `write_back`). A transform handles only its own replacements; `TransformChain` calls the
transforms in the right order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...amp.master_weights import SCALAR_STATE
from ...amp.modes import Precision
from ...parallel.mesh.deprecation import renamed_members
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..gradients.fixed_order import SlicedBucket, TreeRanks
from ..norm.param_table import ParamPosition
from ..norm.plan import ReductionPlan
from ..step.data_parallel import TorchGradSync
from ..step.update_request import Update, UpdateRequest
from ..step.window import Window

Replacements = Mapping[Tensor, Sequence[tuple[Tensor, int]]]
"""For each replaced tensor, (replacement, offset in the flattened tensor) pairs. A tensor with an empty sequence is
removed from the param groups."""


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
        """Move the optimizer state of ``tensor``, if it has any, to its replacements.

        Args:
            optimizer: The optimizer.
            tensor: The replaced tensor.
            targets: (replacement, offset) pairs. Each replacement holds elements of the flattened tensor, beginning at
                ``offset``. Empty: the state is dropped.
        """
        if state := optimizer.state.pop(tensor, None):
            for target, offset in targets:
                optimizer.state[target] = {
                    key: _part_of(value, key, tensor, target, offset) for key, value in state.items()
                }

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


def _part_of(value: Any, key: str, param: Tensor, target: Tensor, offset: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    if key not in SCALAR_STATE and value.shape == param.shape != target.shape:
        value = value.reshape(-1)[offset : offset + target.numel()].view(target.shape)
    elif target.device == param.device:
        return value.clone()  # on the device of ``value``: optimizers without fused kernels keep step counts on the CPU
    return value.to(target.device, copy=True)
