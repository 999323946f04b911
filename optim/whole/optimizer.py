"""Base classes of full-tensor optimizers, whose update of an element depends on the full tensor, not on a shard alone.

A subclass defines a step in `WholeOptimizer.updates`, with the operations of `WholeTensors`. The same code runs in a
single process, where each parameter is a full tensor, and on many ranks, where `meshstep.optim.ParallelOptimizer` binds
the optimizer to shards.

`HomeOptimizer` is the base class of optimizers that keep the state of a matrix on one rank only, the matrix's owner
rank.

A stepped tensor is a tensor in the optimizer's param groups. A position is the index of a stepped tensor over all param
groups.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from ...amp.casting import is_half
from ...parallel.layout.shard import Box, Shape
from ...parallel.layout.spec import P
from ...parallel.mesh.agreement import gather_objects
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..norm.param_table import ParamTable, SteppedTensor
from ..norm.plan_agreement import with_names
from ..step.host_copy import HostCopy
from ..step.wrapped_optimizer import named_params_of, params_of, saved_positions
from . import batching
from .exchange import Homes, Matrix
from .tensors import Blocks, LogicalTensor, WholeTensors, matrices_of


@dataclass
class Slot:
    """A tensor that the optimizer steps, with its gradient and state during a step.

    Args:
        position: The tensor's index over all param groups.
        param: The tensor: a shard, or in a single process a full parameter. A full parameter may be non-contiguous.
        scaled_grad: The gradient times ``grad_scale``, in any dtype and with any strides; zeros if a shard has no
            gradient.
        grad_scale: 0-dim; None: 1.
        state: The optimizer state of the tensor. To change it, return new values in an `Update`, or call
            `WholeOptimizer.write` or `WholeOptimizer.descend`, which do nothing in a skipped step.
        group: The param group of the tensor.
    """

    position: int
    param: Tensor
    scaled_grad: Tensor
    grad_scale: Tensor | None
    state: dict[str, Any]
    group: dict[str, Any]

    @cached_property
    def grad(self) -> Tensor:
        """Return the unscaled gradient, of the tensor's shape and dtype, contiguous."""
        grad = self.scaled_grad
        if self.grad_scale is not None:
            grad = grad / self.grad_scale.to(grad.device)
        return grad.to(self.param.dtype).contiguous()

    @cached_property
    def step(self) -> Tensor:
        """Return the number of steps of the tensor, including the present one; 0-dim float64."""
        count: Tensor = self.state["step"]
        return count.double() + 1

    @property
    def is_batched(self) -> bool:
        """Return True if fused kernels may step the tensor and its states together with other tensors (`batching`)."""
        states = (value for value in self.state.values() if isinstance(value, Tensor))
        return batching.is_batched(self.param) and all(value.is_contiguous() for value in states)


class Update(NamedTuple):
    """The result of a step for one tensor.

    Args:
        slot: The tensor, with its gradient and state.
        param: The new values of the tensor. ``slot.param`` itself if they do not change, or if `WholeOptimizer.descend`
            has written them already.
        state: The new values of the states that change, by name, except of those that `WholeOptimizer.updates` has changed
            in place.
    """

    slot: Slot
    param: Tensor
    state: Mapping[str, Tensor]


class WholeOptimizer(torch.optim.Optimizer):
    """The base class of full-tensor optimizers, whose update needs norms, sums or products of full tensors.

    In a single process each parameter is a full tensor. Under `ParallelOptimizer` the optimizer receives shards. A
    missing gradient of a shard counts as zeros if another shard of the tensor has a gradient. A parameter that has no
    gradient on any rank keeps its value and state, as in torch. All ranks still compute its update, because they must
    issue the same collectives.

    Attributes:
        found_inf: 0-dim; 1: the step is skipped, so parameters and existing states do not change. `ParallelOptimizer` or a
            grad scaler sets it during a step. None (default): the step is not skipped.
        tensors: Operations on the full tensors.
        whole_states: Names of the states that belong to the full tensor, not to the shard. They are equal on all ranks
            that have them.
        kept: Names of the subclass's attributes that copies and pickles of the optimizer keep.
        skip_of: For each parameter whose missing gradient was replaced by zeros, a 0-dim flag: 1 if no rank has a gradient
            of the full tensor, or if the step is skipped. `UpdateEngine` sets it during a step. If a parameter has no
            gradient and no flag, no rank may have a gradient of its full tensor.
        divides_gradients: True: on a GPU, `updates` divides gradients by the scale itself, so `step` does not compute
            `Slot.grad` in advance.
        fixed_order: True: the rounding of a tensor's update must not depend on the tensors that are computed together
            with it, because a different number of ranks would combine different tensors.
        not_captured: Reason why a CUDA graph can't capture the step, worded to follow the optimizer's class name. None
            (default): a CUDA graph can capture it.
    """

    asks_other_ranks = True
    _step_supports_amp_scaling = True
    whole_states: ClassVar[frozenset[str]] = frozenset()
    kept: ClassVar[tuple[str, ...]] = ()
    not_captured: ClassVar[str | None] = None
    divides_gradients: ClassVar[bool] = False
    fixed_order: bool = False
    found_inf: Tensor | None = None
    skip_of: Mapping[Tensor, Tensor] = MappingProxyType({})

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._tensors: WholeTensors | None = None
        self._frozen: set[int] = set()
        self._skip_flags: dict[torch.device, Tensor] | None = None  # None outside a step
        super().__init__(params, defaults)

    # For subclasses -------------------------------------------------------------------------------------------------

    def metadata_for(self, name: str | None, shape: tuple[int, ...], group: Mapping[str, Any], spec: P | None) -> Any:
        """Return data that the optimizer needs about a full tensor, such as the boxes of its matrices.

        The base class returns None. The result is stored in `LogicalTensor.metadata`. It must be equal on all ranks
        that step shards of the tensor.

        Args:
            name: Name of the parameter. None if it is not known.
            shape: Shape of the full tensor.
            group: The param group.
            spec: The parameter's layout. None in a single process without `ParallelOptimizer`.
        """
        return None

    @abstractmethod
    def initial(self, slot: Slot) -> dict[str, Any]:
        """Return the state of a tensor before its first step, by name. The caller adds the step count, ``"step"``.

        Collectives: none.
        """

    @abstractmethod
    def updates(self, slots: Sequence[Slot]) -> Iterator[Update]:
        """Compute one step, and yield one `Update` per slot. `step` then writes it and adds 1 to the slot's step count.

        Yield nothing for a slot that is skipped, or whose step count `updates` has changed itself.

        Args:
            slots: The tensors that this rank steps, in the order of the param groups. May be empty.

        Collectives: each must be issued by all ranks of its process group, even by a rank without gradients.
        Host synchronization: see the subclass.
        """

    def finish_step(self, slots: Sequence[Slot]) -> None:
        """Do nothing; a subclass may override it. `step` calls it after it has written all updates and step counts."""

    def is_whole_state(self, key: str) -> bool:
        """Return True if the state named ``key`` belongs to a full tensor, not to a shard."""
        return key in self.whole_states

    def keeps(self, param: Tensor, key: str) -> bool:
        """Return True if ``key`` is a state of the full tensor of ``param``, and this rank must have this state."""
        return self.is_whole_state(key)

    # Binding --------------------------------------------------------------------------------------------------------

    @property
    def tensors(self) -> WholeTensors:
        """Return the operations on the full tensors. Before `bind`, every parameter counts as a full tensor."""
        if self._tensors is None:
            params = [
                (param, self.metadata_for(name, tuple(param.shape), group, None))
                for group in self.param_groups
                for name, param in named_params_of([group])
            ]
            self.bound(WholeTensors.alone(params))
        assert self._tensors is not None
        return self._tensors

    @staticmethod
    def bind_all(
        parts: Sequence[WholeOptimizer], table: ParamTable, registry: ProcessGroupRegistry, fixed_order: bool
    ) -> None:
        """Bind full-tensor optimizers to the shards that they step. Every rank must call it.

        Args:
            parts: The optimizers, in the same order on all ranks.
            table: The stepped tensors of all optimizers.
            registry: The process groups.
            fixed_order: Set as the attribute ``fixed_order`` of each optimizer.

        Raises:
            ValueError: On every rank, in the cases of `bind`.

        Collectives: object all-gathers; none with one rank.
        """
        plan = table.model_plan if table.model_plan.parameter_names else with_names(table.model_plan, registry)
        times, bound = Counter(entry.name for entry in plan.entries), dict[int, tuple[str, SteppedTensor]]()
        for row in table:
            local = row.model_entry.name
            # If several parameters of this rank have the same name, they keep it. `bind` then raises if their elements
            # overlap, as those of tied parameters do.
            name = plan.parameter_names[plan.parameter_slots[row.index]] if times[local] == 1 else local
            bound[id(row.tensor)] = name, row
        for part in parts:
            part.fixed_order = fixed_order
            part.bind([bound[id(tensor)] for tensor in params_of(part)], registry)

    def bind(self, rows: Sequence[tuple[str, SteppedTensor]], registry: ProcessGroupRegistry) -> None:
        """Bind the optimizer to shards, so that it computes the updates of full tensors together with other ranks.

        Args:
            rows: Per stepped tensor, in the order of the param groups: the unique name of its full tensor, and its row
                in the param table.
            registry: The process groups.

        Raises:
            ValueError: On every rank: the region of a shard is not known (see `WholeTensors.of`); ranks have different
                shapes, dtypes or metadata for a full tensor; no rank holds some elements of a full tensor; a rank holds
                an element twice; or the subclass's `metadata_for` or `bound` raised it.

        Collectives: an object all-gather, and those of `bound`; none with one rank.
        """
        groups = [group for group in self.param_groups for _ in group["params"]]

        def metadata(position: int) -> Any:
            _, row = rows[position]
            if not row.region or not row.trained:
                return None
            return self.metadata_for(row.name, row.region.full_shape, groups[position], row.model_entry.spec)

        tensors = WholeTensors.of([(name, row.tensor, row.region) for name, row in rows], registry, metadata)
        self._frozen = {position for position, (_, row) in enumerate(rows) if not row.trained}
        self.bound(tensors)

    def bound(self, tensors: WholeTensors) -> None:
        """Set `tensors`. Subclasses extend it to set attributes that depend on full tensors, such as owner ranks."""
        self._tensors = tensors

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict as torch does, except that tensor states of full tensors keep their saved dtypes.

        `torch.optim.Optimizer.load_state_dict` would cast them to the parameters' dtypes.
        """
        super().load_state_dict(state_dict)
        for param, index in saved_positions(state_dict, self).items():
            for key, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and self.is_whole_state(key):
                    self.state[param][key] = value.to(param.device, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_kept": {name: getattr(self, name) for name in self.kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = state.get("_kept")
        super().__setstate__({key: value for key, value in state.items() if key != "_kept"})
        if kept is not None:  # a copy or a pickle has this key, a call from load_state_dict does not
            vars(self).update(kept, _tensors=None, _frozen=set(), _skip_flags=None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, and undo `bind`. If ranks hold shards, call `bind_all` afterwards.

        `ParallelOptimizer.add_param_group` calls both methods.
        """
        super().add_param_group(param_group)
        self._tensors, self._frozen = None, set()

    # The step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make one step, and return the loss of ``closure``; None without one.

        Args:
            closure: Recomputes and returns the loss, as in torch. None: no closure.

        Raises:
            RuntimeError: The number of tensors in the param groups is not the number of tensors that `bind` received.
            ValueError: `bind` was not called, and a parameter does not fit the optimizer (see the subclass).

        Collectives, host synchronization: those of the subclass's `updates`. One more host synchronization per parameter in
            ``skip_of`` whose states `updates` replaces.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        counted = []
        self._skip_flags = {}
        try:
            slots = self._slots()
            # Of these, no rank has a gradient of the full tensor, or only the device knows whether one has.
            idle = [slot for slot in slots if slot.param.grad is None or slot.param in self.skip_of]
            kept = [_Kept(slot, self.skip_of.get(slot.param)) for slot in idle]
            for slot, param, state in self.updates(slots):
                self.write(slot.param, param)
                for key, value in state.items():
                    self.write(slot.state[key], value)
                counted.append(slot)
            self._count(counted)
            for before in kept:
                before.restore()
            self.finish_step(slots)
        finally:
            self._skip_flags = None
        return loss

    def write(self, target: Tensor, value: Tensor) -> None:
        """Copy ``value`` to ``target``, unless the step is skipped because ``found_inf`` is 1.

        Host synchronization: none if ``value``, ``target`` and ``found_inf`` are on one device.
        """
        if value is target:
            return
        skip = self._skip_flag(target.device)
        if skip is None:
            target.copy_(value)
        else:
            torch.where(skip, target, value.to(target.dtype), out=target)

    def _skip_flag(self, device: torch.device) -> Tensor | None:
        """Return ``found_inf > 0`` on ``device``; None without ``found_inf``. `step` computes it once per device."""
        if self.found_inf is None:
            return None
        flags = {} if self._skip_flags is None else self._skip_flags
        if device not in flags:
            flags[device] = self.found_inf.to(device) > 0
        return flags[device]

    def descend(self, target: Tensor, direction: Tensor, rate: float | Tensor, decay: float = 0.0) -> None:
        """Set ``target`` to ``target - rate * (direction + decay * target)`` in place, unless the step is skipped.

        Call it within `updates`. The `Update` may then have ``target`` itself as the new value.

        Args:
            target: The tensor to change.
            direction: Tensor of the same shape.
            rate: A number or a 0-dim tensor.
            decay: Weight decay. Default: 0.

        Host synchronization: none if all tensors and ``found_inf`` are on one device.
        """
        self.descend_each([target], [direction], rate, decay)

    def descend_each(
        self,
        targets: Sequence[Tensor],
        directions: Sequence[Tensor],
        rate: float | Tensor,
        decay: float = 0.0,
        grad_scale: Tensor | None = None,
    ) -> None:
        """Change each target as `descend` does, with few kernels for many tensors.

        Args:
            targets: The tensors to change.
            directions: One tensor per target, of its shape.
            rate: A number or a 0-dim tensor.
            decay: Weight decay. Default: 0.
            grad_scale: 0-dim. The directions are first divided in place by this number, unless the step is skipped.
                They must then be contiguous and have the dtypes of the targets, and `batching.is_batched` must be True
                for all targets. None: 1.

        Host synchronization: none if all tensors and ``found_inf`` are on one device.
        """
        fused: list[tuple[Tensor, Tensor]] = []
        for target, direction in zip(targets, directions, strict=True):
            # torch's fused SGD ignores strides, so it needs contiguous tensors. On a CPU, the fused SGD of some torch
            # versions leaves half-precision tensors unchanged, so these are computed in float32 here, and rounded once.
            if batching.is_batched(target) or (target.is_cpu and target.is_contiguous() and not is_half(target)):
                fused.append((target, direction.to(target.dtype).contiguous()))
            else:
                whole = target.float() if is_half(target) else target
                self.write(target, whole - rate * (direction.to(whole.dtype) + decay * whole))
        if fused:
            sgd(
                [target for target, _ in fused],
                [direction for _, direction in fused],
                [None] * len(fused),
                fused=True,
                grad_scale=grad_scale,
                found_inf=self.found_inf,
                lr=rate,
                weight_decay=decay,
                momentum=0.0,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )

    def _count(self, slots: Sequence[Slot]) -> None:
        """Add 1 to the step counts of the slots, unless the step is skipped."""
        together = batching.grouped(slots, lambda slot: (slot.state["step"].device, slot.state["step"].dtype))
        for (device, dtype), of_kind in together.items():
            if batching.batches_on(device):
                taken = torch.ones((), device=device) if self.found_inf is None else 1 - self.found_inf.to(device)
                # `torch._foreach_add_` would read ``taken`` on the host
                torch.ops.aten._foreach_add_.Tensor([slot.state["step"] for slot in of_kind], taken.to(dtype))
            else:
                for slot in of_kind:
                    self.write(slot.state["step"], slot.step.to(dtype))

    def _slots(self) -> list[Slot]:
        alone, grad_scale = self.tensors.registry is None, getattr(self, "grad_scale", None)
        slots: list[Slot] = []
        pairs = [(group, param) for group in self.param_groups for param in group["params"]]
        if len(pairs) != len(self.tensors.tensors):
            raise RuntimeError(
                f"the number of tensors in the param groups of {type(self).__name__} changed from "
                f"{len(self.tensors.tensors)} to {len(pairs)}; step all tensors in one call, because other ranks "
                "wait in the collectives of the missing tensors"
            )
        for position, (group, param) in enumerate(pairs):
            if position in self._frozen or (alone and param.grad is None):
                continue
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            slot = Slot(position, param, grad, grad_scale, self.state[param], group)
            if "step" not in slot.state:
                slot.state.update(self.initial(slot), step=torch.zeros((), device=param.device))
            slots.append(slot)
        if not self.divides_gradients:
            _prepare_together([slot for slot in slots if batching.batches_on(slot.param.device)])
        return slots


class _Kept:
    """A copy of a shard and of its state from before a step, which `restore` writes back.

    ``flag`` (0-dim): restore if it is 1. None: restore always. The host reads the flag if the step replaces or adds
    states.
    """

    def __init__(self, slot: Slot, flag: Tensor | None) -> None:
        self._slot, self._flag = slot, flag
        self._param = slot.param.detach().clone()
        self._state = dict(slot.state)
        self._copies = {key: value.clone() for key, value in slot.state.items() if isinstance(value, Tensor)}

    @torch.no_grad()
    def restore(self) -> None:
        slot, before, copies = self._slot, self._state, self._copies
        if slot.state.keys() == before.keys() and all(slot.state[key] is before[key] for key in before):
            for target, value in ((slot.param, self._param), *((before[key], value) for key, value in copies.items())):
                if self._flag is None:
                    target.copy_(value)
                else:
                    torch.where(self._flag.to(target.device) > 0, value, target, out=target)
        elif self._flag is None or bool(self._flag):
            slot.param.copy_(self._param)
            slot.state.clear()
            slot.state.update({**before, **copies})


def _prepare_together(slots: Sequence[Slot]) -> None:
    """Compute `Slot.step` and `Slot.grad` of all slots with few kernels. The slots are on a GPU.

    `Slot.grad` computes a gradient on access if it has another dtype than the parameter, or no ``grad_scale``.
    """
    for alike in batching.grouped(slots, lambda slot: (slot.state["step"].device, slot.state["step"].dtype)).values():
        steps = torch.stack([slot.state["step"] for slot in alike]).double() + 1
        for slot, step in zip(alike, steps.unbind(), strict=True):
            slot.step = step
    scaled = [slot for slot in slots if slot.grad_scale is not None and slot.scaled_grad.dtype == slot.param.dtype]
    for alike in batching.grouped(scaled, lambda slot: (slot.param.device, slot.param.dtype)).values():
        scale = alike[0].grad_scale
        assert scale is not None
        grads = [slot.scaled_grad.contiguous() for slot in alike]
        for slot, grad in zip(alike, torch._foreach_div(grads, scale.to(grads[0])), strict=True):
            slot.grad = grad


# AdamW, for parameters whose update needs no full tensor (arXiv:1711.05101) -------------------------------------------

# m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
# w <- w - lr (wd w + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))

ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def moments(slot: Slot) -> dict[str, Any]:
    """Return the initial state of Adam: ``exp_avg`` and ``exp_avg_sq``, zeros of the parameter's shape and dtype."""
    zeros = torch.zeros_like(slot.param, memory_format=torch.contiguous_format)
    return {"exp_avg": zeros, "exp_avg_sq": zeros.clone()}


def adamw_in_place(slots: Sequence[Slot], found_inf: Tensor | None) -> None:
    """Make one step of AdamW by torch's fused AdamW, with few kernels for many tensors.

    Parameters, moments and step counts change in place, unless ``found_inf`` is 1. Gradients with a ``grad_scale`` may
    be divided by it in place, as in torch's own fused optimizers. Results equal those of `adamw_update` up to rounding.

    Requires `Slot.is_batched` of every slot.
    """
    for of_group in batching.grouped(slots, lambda slot: id(slot.group)).values():
        params, steps = [slot.param for slot in of_group], [slot.state["step"] for slot in of_group]
        lr, decay, betas, eps = (of_group[0].group[key] for key in ("lr", "weight_decay", "betas", "eps"))
        fused_adamw(of_group, params, steps, found_inf, lr, decay, betas, eps)


def fused_adamw(
    slots: Sequence[Slot],
    params: Sequence[Tensor],
    steps: Sequence[Tensor],
    found_inf: Tensor | None,
    lr: float | Tensor,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Step ``params`` by torch's fused AdamW, with the gradients and moments of ``slots``, as `adamw_in_place` does.

    Requires `Slot.is_batched` of every slot, and one ``grad_scale`` of all slots. ``params`` are contiguous. ``steps`` are
    the counts before this step, one tensor per slot; they change in place.
    """
    adamw(
        list(params),
        [slot.scaled_grad.to(slot.param.dtype).contiguous() for slot in slots],
        [slot.state["exp_avg"] for slot in slots],
        [slot.state["exp_avg_sq"] for slot in slots],
        [],
        list(steps),
        fused=True,
        grad_scale=slots[0].grad_scale,
        found_inf=found_inf,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )


LATE = 1e9
"""A step count at which Adam's bias corrections 1 - b^t are 1, unless b > 1 - 1e-7."""


def late_steps(slots: Sequence[Slot]) -> list[Tensor]:
    """Return a new step count `LATE` per slot, so that `fused_adamw` makes no bias correction."""
    return list(torch.full_like(slots[0].state["step"], LATE).expand(len(slots)).clone().unbind())


def next_moments(slot: Slot) -> tuple[Tensor, Tensor]:
    """Return Adam's new moments, m and v. ``slot`` itself is unchanged."""
    beta1, beta2 = slot.group["betas"]
    m, v = slot.state["exp_avg"], slot.state["exp_avg_sq"]
    return m.lerp(slot.grad, 1 - beta1), v.lerp(slot.grad.square(), 1 - beta2)


def adamw_update(slot: Slot) -> Update:
    """Compute one step of AdamW for a tensor, and return its new values and moments. ``slot`` itself is unchanged."""
    group, t, (m, v) = slot.group, slot.step, next_moments(slot)
    beta1, beta2 = group["betas"]
    m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
    param = slot.param * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * m_hat / (v_hat.sqrt() + group["eps"])
    return Update(slot, param, {"exp_avg": m, "exp_avg_sq": v})


# Base class of optimizers that keep a full matrix state on the matrix's owner rank only -------------------------------

# The owner rank of a matrix stores the state of the matrix in the optimizer state of its own first shard of the tensor.
# The key is "<name>.<number of the matrix>", followed by ".<suffix>" if the matrix has several states of this name. The
# state belongs to the full tensor, so a checkpoint contains it once. A load gives it to the owner rank in the new layout.

_AT_HOME = re.compile(r"(\w+)\.(\d+)(?:\.|$)")


class HomeOptimizer(WholeOptimizer):
    """The base class of full-tensor optimizers that assign every matrix to an owner rank.

    Only the owner rank keeps the state of the matrix. If `bind` is called again, a rank that has the state of a matrix
    stays the owner rank if it still holds a part of the matrix.

    Attributes:
        lists: Number of tensors per matrix that are sent to the owner rank. Default: 1, the gradient alone.
        blocks: The blocks of fused weights, each a separate matrix, by glob over parameter names. Default: no globs; the
            blocks are then those of the parameter's layout.
        homes: The owner rank of each matrix, and the exchanges with it; set by `bound`.
        taken: Reads the step counts of stepped tensors on the host; set by `bound`.

    Collectives: `bind` issues one more object all-gather than `WholeOptimizer.bind`; none with one rank.
    """

    lists = 1
    blocks: Blocks = MappingProxyType({})
    not_captured = (
        "counts steps on the host, and computes more in some steps than in others: make its steps without a graph"
    )
    _with_others = False

    def metadata_for(self, name: str | None, shape: Shape, group: Mapping[str, Any], spec: P | None) -> Any:
        """Return a tuple with the `Box` (rectangular region) of each matrix; () for a tensor with fewer than two dims."""
        return tuple(matrices_of(name, shape, self.blocks, spec)) if len(shape) > 1 else ()

    def boxes(self, tensor: LogicalTensor) -> Sequence[Box]:
        """Return the boxes of a tensor's matrices; empty if it has none."""
        return tensor.metadata or ()

    def cost(self, shape: Shape) -> float:
        """Return the approximate cost of a step of one matrix, in any unit. Subclasses must implement it.

        The choice of owner ranks balances the sum of these costs between ranks.
        """
        raise NotImplementedError

    def bound(self, tensors: WholeTensors) -> None:
        """Set `tensors`, and choose the owner rank of each matrix.

        Raises:
            ValueError: On every rank: on some rank, the optimizer got states of matrices before `ParallelOptimizer` bound
                it.

        Collectives: an object all-gather; none with one rank.
        """
        super().bound(tensors)
        self.homes = Homes(tensors, self.boxes, self.cost, self.lists, settled=self._agreed(self._settled(tensors)))
        self.taken = StepsTaken()
        self._own: dict[int, list[Matrix]] = {}
        for matrix in self.homes.own:
            self._own.setdefault(tensors.positions(matrix.tensor)[0], []).append(matrix)

    def _agreed(self, own: set[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Gather from all ranks which rank has the state of each matrix: {(tensor name, matrix number): rank}."""
        registry = self.tensors.registry
        if registry is None:
            return dict.fromkeys(own, 0)
        ranks = gather_objects((own, bool(own) and not self._with_others), registry)
        self._with_others = True
        if alone := [rank for rank, (_, stepped_alone) in enumerate(ranks) if stepped_alone]:
            raise ValueError(
                f"{type(self).__name__} has states on rank {alone[0]} from a step or load_state_dict without "
                "ParallelOptimizer; pass it to ParallelOptimizer before its first step and load, or continue from a "
                "checkpoint (load_checkpoint)"
            )
        return {which: rank for rank, (found, _) in enumerate(ranks) for which in found}

    def _settled(self, tensors: WholeTensors) -> set[tuple[str, int]]:
        """Return (tensor name, matrix number) of each matrix whose state is in this rank's ``state``."""
        return {
            (tensor.name, number)
            for tensor, param in zip(tensors.tensors, params_of(self), strict=True)
            for number in map(_number, self.state.get(param, {}))
            if number is not None
        }

    def own(self, slot: Slot) -> list[Matrix]:
        """Return this rank's own matrices of the full tensor. Their states are in ``slot.state``.

        The list is empty unless ``slot`` is this rank's first shard of the full tensor.
        """
        return self._own.get(slot.position, [])

    # State ----------------------------------------------------------------------------------------------------------

    def is_whole_state(self, key: str) -> bool:
        return _number(key) is not None

    def keeps(self, param: Tensor, key: str) -> bool:
        _ = self.tensors  # binds the optimizer, which sets `_own`
        position = next(index for index, other in enumerate(params_of(self)) if other is param)
        return _number(key) in {matrix.number for matrix in self._own.get(position, [])}

    # The step -------------------------------------------------------------------------------------------------------

    def at_home(self, slots: Sequence[Slot]) -> Callable[[Matrix], Slot]:
        """Return a function from a matrix to the slot that stores its states. This rank must own the matrix."""
        by_position = {slot.position: slot for slot in slots}
        return lambda matrix: by_position[self.tensors.positions(matrix.tensor)[0]]


def _number(key: str) -> int | None:
    found = _AT_HOME.match(key)
    return int(found[2]) if found else None


@dataclass(frozen=True)
class SeenCount:
    """The step count of a tensor at the end of a step.

    Args:
        count: The step count on the GPU.
        version: Its version counter.
        copies: The copies on the host of the counts of several tensors of the GPU, [number of tensors] float64.
        index: The index of the count in the copies.
    """

    count: Tensor
    version: int
    copies: HostCopy
    index: int


class StepsTaken:
    """Reads the step counts of stepped tensors on the host, without waiting for the current step.

    At the end of a step, `note` starts an asynchronous copy of the counts of each GPU to the host. In the next step,
    `of` waits for these copies only. If a count was replaced or changed in between, for example by a load, `of` reads
    it from the GPU.
    """

    def __init__(self) -> None:
        self._seen: dict[int, SeenCount] = {}  # by position
        # The positions of the counts in the last copy from each GPU, and its buffer.
        self._last: dict[torch.device, tuple[list[int], Tensor]] = {}

    def of(self, slots: Sequence[Slot]) -> dict[int, int]:
        """Return {position: number of steps that the slot has taken before the current step}.

        Host synchronization: the host waits once per GPU for the end of the previous step. In the first step, and in the
            first step after a load, it waits once per GPU for all work in the current stream.
        """
        found: dict[int, int] = {}
        copied: dict[int, list[float]] = {}
        on_device: list[Slot] = []
        for slot in slots:
            count, seen = slot.state["step"], self._seen.get(slot.position)
            if seen is None or seen.count is not count or seen.version != count._version:
                on_device.append(slot)
                continue
            if id(seen.copies) not in copied:
                copied[id(seen.copies)] = seen.copies.wait().tolist()
            found[slot.position] = int(copied[id(seen.copies)][seen.index])
        for of_device in batching.grouped(on_device, lambda slot: slot.state["step"].device).values():
            numbers = zip(of_device, _stacked_counts(of_device).tolist(), strict=True)
            found.update({slot.position: int(number) for slot, number in numbers})
        return found

    def note(self, slots: Sequence[Slot]) -> None:
        """Start copying the step counts of ``slots`` from GPUs to the host. Call it after the step's last update."""
        on_gpus = [slot for slot in slots if slot.state["step"].is_cuda]
        for device, of_device in batching.grouped(on_gpus, lambda slot: slot.state["step"].device).items():
            positions, (before, buffer) = [slot.position for slot in of_device], self._last.get(device, (None, None))
            # A tensor that this step does not step has its count in the previous buffer, which must then not be written.
            if buffer is None or before != positions:
                buffer = torch.empty(len(positions), dtype=torch.float64, pin_memory=True)
                self._last[device] = positions, buffer
            copies = HostCopy(_stacked_counts(of_device), buffer)
            for index, slot in enumerate(of_device):
                count = slot.state["step"]
                self._seen[slot.position] = SeenCount(count, count._version, copies, index)


def _stacked_counts(slots: Sequence[Slot]) -> Tensor:
    """Return the step counts of slots of one device, [number of slots] float64."""
    return torch.stack([slot.state["step"].detach() for slot in slots]).double()


def named(name: str, matrix: Matrix, which: Any = None) -> str:
    """Return the key of a matrix's state in the optimizer state, such as ``"exp_avg.0"`` or ``"root.0.1"``."""
    return f"{name}.{matrix.number}" if which is None else f"{name}.{matrix.number}.{which}"
