"""Base classes of full-tensor optimizers, whose update of an element depends on the full tensor, not on a shard alone.

A subclass defines a step in `WholeOptimizer.updates`, with the operations of `WholeTensors`. The same code runs in a
single process, where each parameter is a full tensor, and on many ranks, where `meshstep.optim.ParallelOptimizer` binds
the optimizer to shards.

`HomeOptimizer` is the base class of optimizers that keep the state of a matrix on one rank only, the matrix's owner
rank.

A position is the index of a stepped tensor over all param groups.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from ...amp.casting import is_half
from ...parallel.layout.shard import Box, Shape
from ...parallel.layout.spec import P
from ...parallel.mesh.agreement import gather_objects
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..norm.param_table import ParamTable, SteppedTensor
from ..norm.plan_agreement import with_names
from ..states.chain import named_params_of, params_of
from .exchange import Homes, Matrix
from .tensors import Blocks, LogicalTensor, WholeTensors, matrices_of


@dataclass
class Slot:
    """A stepped tensor with its gradient and state during a step.

    Args:
        position: The tensor's index over all param groups.
        param: The stepped tensor. In a single process it may be non-contiguous.
        grad: Its unscaled gradient, of the same shape and dtype, contiguous; zeros if a shard has no gradient.
        state: The optimizer state of the tensor. To change it, return new values in an `Update`, or call
            `WholeOptimizer.write` or `WholeOptimizer.descend`, which do nothing in a skipped step.
        group: The param group.
        step: Number of steps, including the present one; 0-dim float64, on the device of ``param``.
    """

    position: int
    param: Tensor
    grad: Tensor
    state: dict[str, Any]
    group: dict[str, Any]
    step: Tensor


class Update(NamedTuple):
    """The result of a step for one `Slot`: the slot, the new values of its parameter, and the state tensors that change."""

    slot: Slot
    param: Tensor
    state: Mapping[str, Tensor]


class WholeOptimizer(torch.optim.Optimizer):
    """The base class of full-tensor optimizers, whose update needs norms, sums or products of full tensors.

    In a single process each parameter is a full tensor. Under `ParallelOptimizer` the optimizer receives shards. A
    missing gradient of a shard then counts as zeros, because other shards of the tensor may have a gradient. If the
    attribute ``found_inf``, a tensor, is 1, the step is skipped: it only creates missing states.

    Attributes:
        tensors: Operations on the full tensors.
        whole_states: Names of the states that belong to the full tensor, not to the shard. They are equal on all ranks
            that have them.
        kept: Names of the subclass's attributes that copies and pickles of the optimizer keep.
        not_captured: Reason why a CUDA graph can't capture the step, worded to follow the optimizer's class name; None:
            a CUDA graph can capture it.
    """

    asks_other_ranks = True
    _step_supports_amp_scaling = True
    whole_states: ClassVar[frozenset[str]] = frozenset()
    kept: ClassVar[tuple[str, ...]] = ()
    not_captured: ClassVar[str | None] = None

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._tensors: WholeTensors | None = None
        self._frozen: set[int] = set()
        super().__init__(params, defaults)

    # For subclasses -------------------------------------------------------------------------------------------------

    def metadata_for(self, name: str | None, shape: tuple[int, ...], group: Mapping[str, Any], spec: P | None) -> Any:
        """Return the metadata of a full tensor, which `LogicalTensor.metadata` holds; None (default): no metadata.

        It must be equal on all ranks that hold shards of the tensor.

        Args:
            name: Name of the parameter; None if the optimizer received no names.
            shape: Shape of the full tensor.
            group: The param group.
            spec: The parameter's layout; None if `bind` was not called.
        """
        return None

    @abstractmethod
    def initial(self, slot: Slot) -> dict[str, Any]:
        """Return the initial state of a stepped tensor, before its first step.

        Collectives: none.
        """

    @abstractmethod
    def updates(self, slots: Sequence[Slot]) -> Iterator[Update]:
        """Compute one step and yield its updates.

        Collectives: must be the same on all ranks, independent of the tensors that a rank holds.
        Host synchronization: see the subclass.
        """

    def is_whole_state(self, key: str) -> bool:
        """Return True if the state named ``key`` belongs to a full tensor."""
        return key in self.whole_states

    def keeps(self, param: Tensor, key: str) -> bool:
        """Return True if ``key`` is a state of the full tensor of ``param``, and this rank has the state."""
        return self.is_whole_state(key)

    # Binding --------------------------------------------------------------------------------------------------------

    @property
    def tensors(self) -> WholeTensors:
        """Return the operations on the full tensors. Without a binding by `bind`, all parameters are full tensors."""
        if self._tensors is None:
            pairs = [(group, *pair) for group in self.param_groups for pair in named_params_of([group])]
            metadata = [self.metadata_for(name, tuple(param.shape), group, None) for group, name, param in pairs]
            self.bound(WholeTensors.alone([param for _, _, param in pairs], metadata))
        assert self._tensors is not None
        return self._tensors

    @staticmethod
    def bind_all(parts: Sequence[WholeOptimizer], table: ParamTable, registry: ProcessGroupRegistry) -> None:
        """Bind full-tensor optimizers to the tensors that they step.

        Args:
            parts: At least one optimizer.
            table: The stepped tensors of all optimizers.
            registry: The process groups.

        Raises:
            ValueError: On every rank, in the cases of `bind`.

        Collectives: object all-gathers.
        """
        plan = table.model_plan if table.model_plan.parameter_names else with_names(table.model_plan, registry)
        times, bound = Counter(entry.name for entry in plan.entries), dict[int, tuple[str, SteppedTensor]]()
        for row in table:
            local = row.model_entry.name
            # Tensors of this rank with equal names keep that name. `bind` then raises if they have common elements, as tied
            # tensors have.
            name = plan.parameter_names[plan.parameter_slots[row.index]] if times[local] == 1 else local
            bound[id(row.tensor)] = name, row
        for part in parts:
            part.bind([bound[id(tensor)] for tensor in params_of(part.param_groups)], registry)

    def bind(self, rows: Sequence[tuple[str, SteppedTensor]], registry: ProcessGroupRegistry) -> None:
        """Bind the optimizer to shards, so that it computes the updates of full tensors together with other ranks.

        Args:
            rows: Per stepped tensor, in the order of the param groups: the unique name of its full tensor, and its row
                in the param table.
            registry: The process groups.

        Raises:
            ValueError: On every rank, in the cases of `WholeTensors.of`.

        Collectives: an object all-gather.
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
        """Set `tensors`. Subclasses override it to prepare objects that depend on the binding, such as owner ranks."""
        self._tensors = tensors

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict as torch does, except that states of full tensors keep their saved dtypes.

        torch alone would cast these states to the parameters' dtypes.
        """
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, param in zip(saved, params_of(self.param_groups), strict=True):
            given = state_dict["state"].get(index, {})
            for key in filter(self.is_whole_state, [key for key, value in given.items() if isinstance(value, Tensor)]):
                self.state[param][key] = given[key].to(param.device, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_kept": {name: getattr(self, name) for name in self.kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = state.get("_kept")
        super().__setstate__({key: value for key, value in state.items() if key != "_kept"})
        if kept is not None:  # present in a copy or a pickle, absent in a call from load_state_dict
            vars(self).update(kept, _tensors=None, _frozen=set())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, and remove the binding: call `bind_all` afterwards if ranks hold shards."""
        super().add_param_group(param_group)
        self._tensors, self._frozen = None, set()

    # The step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make one step, and return the loss of ``closure``; None without one.

        If the attribute ``found_inf`` (which a grad scaler sets) is 1, parameters and existing states do not change.

        Args:
            closure: Recomputes and returns the loss, as in torch. None: no closure.

        Raises:
            RuntimeError: The param groups do not contain all tensors of the binding.

        Collectives, host synchronization: those of `updates`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for slot, param, state in self.updates(self._slots(getattr(self, "grad_scale", None))):
            self.write(slot.param, param)
            for key, value in state.items():
                self.write(slot.state[key], value)
            self.write(slot.state["step"], slot.step.to(slot.state["step"].dtype))
        return loss

    def write(self, target: Tensor, value: Tensor) -> None:
        """Copy ``value`` to ``target``, unless the step is skipped because ``found_inf`` is 1.

        Host synchronization: none.
        """
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if value is target:
            return
        if found_inf is None:
            target.copy_(value)
        else:
            torch.where(found_inf.to(target.device) > 0, target, value.to(target.dtype), out=target)

    def descend(self, target: Tensor, direction: Tensor, rate: float | Tensor, decay: float = 0.0) -> None:
        """Set ``target`` to ``target - rate (direction + decay target)`` in place, unless the step is skipped.

        Call it within `updates`. The `Update` may then have ``target`` itself as the new value.

        Args:
            target: The tensor to change.
            direction: Tensor of the same shape.
            rate: A number or a 0-dim tensor.
            decay: Weight decay. Default: 0.

        Host synchronization: none.
        """
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if not target.is_cpu or not target.is_contiguous() or is_half(target):
            # The fused kernel below is for CPU tensors, where allocating memory is slow. It ignores strides, and loses
            # updates of half-precision tensors (torch 2.12, 2.13).
            whole = target.float() if is_half(target) else target
            self.write(target, whole - rate * (direction.to(whole.dtype) + decay * whole))
            return
        sgd(
            [target],
            [direction.to(target.dtype).contiguous()],
            [None],
            fused=True,
            found_inf=found_inf,
            lr=rate,
            weight_decay=decay,
            momentum=0.0,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )

    def _slots(self, grad_scale: Tensor | None) -> list[Slot]:
        alone = self.tensors.registry is None
        slots: list[Slot] = []
        pairs = [(group, param) for group in self.param_groups for param in group["params"]]
        if len(pairs) != len(self.tensors.tensors):
            raise RuntimeError(
                f"{type(self).__name__} has {len(self.tensors.tensors)} tensors, and this step has only {len(pairs)}; step "
                "all tensors in one call, because other ranks wait in the collectives of the missing tensors"
            )
        for position, (group, param) in enumerate(pairs):
            if position in self._frozen or (alone and param.grad is None):
                continue
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            if grad_scale is not None:
                grad = grad / grad_scale.to(grad.device)
            grad = grad.to(param.dtype).contiguous()
            slot = Slot(position, param, grad, self.state[param], group, torch.zeros(()))
            if "step" not in slot.state:
                slot.state.update(self.initial(slot), step=torch.zeros((), device=param.device))
            slot.step = slot.state["step"].double() + 1
            slots.append(slot)
        return slots


# AdamW for parameters that need no full tensor (arXiv:1711.05101) -----------------------------------------------------

# m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
# w <- w - lr (wd w + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))

ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def moments(slot: Slot) -> dict[str, Any]:
    """Return the initial state of Adam: two moments, zeros of the stepped tensor's shape and dtype."""
    zeros = torch.zeros_like(slot.param, memory_format=torch.contiguous_format)
    return {"exp_avg": zeros, "exp_avg_sq": zeros.clone()}


def adamw_update(slot: Slot) -> Update:
    """Return the `Update` of one step of AdamW for a stepped tensor.

    Collectives: none.
    Host synchronization: none.
    """
    group, t = slot.group, slot.step
    beta1, beta2 = group["betas"]
    m = slot.state["exp_avg"].lerp(slot.grad, 1 - beta1)
    v = slot.state["exp_avg_sq"].lerp(slot.grad.square(), 1 - beta2)
    m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
    param = slot.param * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * m_hat / (v_hat.sqrt() + group["eps"])
    return Update(slot, param, {"exp_avg": m, "exp_avg_sq": v})


# Lazily computed tensors ----------------------------------------------------------------------------------------------


class LazyTensors(Mapping[int, Tensor]):
    """A mapping from positions to tensors that computes a tensor on each access, to keep few of them in memory.

    Args:
        slots: The slots whose positions are the keys.
        make: Computes the tensor of a slot; called on every access, and its result is not kept.
    """

    def __init__(self, slots: Sequence[Slot], make: Callable[[Slot], Tensor]) -> None:
        self._slots, self._make = {slot.position: slot for slot in slots}, make

    def __getitem__(self, position: int) -> Tensor:
        return self._make(self._slots[position])

    def __contains__(self, position: object) -> bool:
        return position in self._slots

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)


# Base class of optimizers that keep a full matrix state on the matrix's owner rank only -------------------------------

# The owner rank stores the state of a matrix with the state of the first shard of the tensor that it holds. The key is
# "<name>.<number of the matrix>", followed by ".<index>" if the matrix has several states of this name. The state
# belongs to the full tensor, so a checkpoint contains it once. A load gives it to the owner rank in the new layout.

_AT_HOME = re.compile(r"(\w+)\.(\d+)(?:\.|$)")


class HomeOptimizer(WholeOptimizer):
    """A full-tensor optimizer that assigns every matrix to an owner rank, which alone keeps the matrix's state.

    If the optimizer is bound again, a rank that has the state of a matrix stays its owner rank if it holds part of it.

    Attributes:
        lists: Number of tensors per matrix that are sent to the owner rank, such as 1 for the gradient alone.
        blocks: The blocks of fused weights, each a separate matrix, by glob over parameter names.
        homes: The owner ranks and the exchanges with them.
        taken: The number of steps of each stepped tensor.

    Collectives: `bind` has an object all-gather in addition to that of `WholeOptimizer.bind`.
    """

    lists = 1
    blocks: Blocks = MappingProxyType({})
    not_captured = "counts steps on the host, and computes more in some steps than in others"
    _with_others = False

    def metadata_for(self, name: str | None, shape: Shape, group: Mapping[str, Any], spec: P | None) -> Any:
        """Return the matrices of a tensor as a tuple of boxes; empty if it has fewer than two dims."""
        return tuple(matrices_of(name, shape, self.blocks, spec)) if len(shape) > 1 else ()

    def boxes(self, tensor: LogicalTensor) -> Sequence[Box]:
        """Return the boxes of a tensor's matrices; empty if it has none."""
        return tensor.metadata or ()

    def cost(self, shape: Shape) -> float:
        """Return the approximate relative cost of a step of one matrix; the choice of owner ranks balances it."""
        raise NotImplementedError

    def bound(self, tensors: WholeTensors) -> None:
        """Choose the owner ranks.

        Raises:
            ValueError: On every rank: on a rank, the optimizer has states from steps without `ParallelOptimizer`.
        """
        super().bound(tensors)
        self.homes = Homes(tensors, self.boxes, self.cost, self.lists, settled=self._agreed(self._settled(tensors)))
        self.taken = StepsTaken()
        self._own: dict[int, list[Matrix]] = {}
        for matrix in self.homes.own:
            self._own.setdefault(tensors.positions(matrix.tensor)[0], []).append(matrix)

    def _agreed(self, own: set[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Return {(tensor name, matrix number): rank that has the matrix's state}; ``own`` is this rank's set of keys."""
        registry = self.tensors.registry
        if registry is None:
            return dict.fromkeys(own, 0)
        ranks = gather_objects((own, bool(own) and not self._with_others), registry)
        self._with_others = True
        if alone := [rank for rank, (_, stepped_alone) in enumerate(ranks) if stepped_alone]:
            raise ValueError(
                f"{type(self).__name__} has stepped without ParallelOptimizer on rank {alone[0]}, and has states; pass it "
                "to ParallelOptimizer before its first step, or continue from a checkpoint (load_checkpoint)"
            )
        return {which: rank for rank, (found, _) in enumerate(ranks) for which in found}

    def _settled(self, tensors: WholeTensors) -> set[tuple[str, int]]:
        """Return (tensor name, matrix number) of each matrix whose state this rank has already."""
        return {
            (tensor.name, number)
            for tensor, param in zip(tensors.tensors, params_of(self.param_groups), strict=True)
            for number in map(_number, self.state.get(param, {}))
            if number is not None
        }

    def own(self, slot: Slot) -> list[Matrix]:
        """Return the matrices that this rank owns and whose states it stores in ``slot``.

        Empty unless ``slot`` is this rank's first shard of the tensor.
        """
        return self._own.get(slot.position, [])

    # State ----------------------------------------------------------------------------------------------------------

    def is_whole_state(self, key: str) -> bool:
        return _number(key) is not None

    def keeps(self, param: Tensor, key: str) -> bool:
        assert self.tensors, "the property binds the optimizer"
        position = next(index for index, other in enumerate(params_of(self.param_groups)) if other is param)
        return _number(key) in {matrix.number for matrix in self._own.get(position, [])}

    # The step -------------------------------------------------------------------------------------------------------

    def at_home(self, slots: Sequence[Slot]) -> Callable[[Matrix], Slot]:
        """Return a function from a matrix that this rank owns to the slot that stores the matrix's state."""
        by_position = {slot.position: slot for slot in slots}
        return lambda matrix: by_position[self.tensors.positions(matrix.tensor)[0]]


def _number(key: str) -> int | None:
    found = _AT_HOME.match(key)
    return int(found[2]) if found else None


class StepsTaken:
    """The number of steps of each stepped tensor, on the host, without waiting for the current step.

    At the end of a step, `note` starts asynchronous copies of the device counts to the host. `of` waits for the copies
    in the next step. If other code changed a count in between, such as a load, `of` reads it from the device.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Tensor, int]] = {}  # by position: the device count and its version
        self._copies: dict[int, Tensor] = {}
        self._arrived: dict[torch.device, torch.cuda.Event] = {}

    def of(self, slot: Slot) -> int:
        """Return the number of steps of ``slot`` before the current step.

        Host synchronization: on a GPU, the host waits for the previous step; in the first step and after loading, for
        all work on the device.
        """
        count, seen = slot.state["step"], self._seen.get(slot.position)
        if not count.is_cuda or seen is None or seen[0] is not count or seen[1] != count._version:
            return _number_in(count.detach().cpu())
        self._arrived[count.device].synchronize()
        return _number_in(self._copies[slot.position])

    def note(self, slots: Sequence[Slot]) -> None:
        """Start copying the step counts to the host. Call it after the step's last update."""
        for slot in slots:
            count: Tensor = slot.state["step"]
            if count.is_cuda:
                copy = self._copies.setdefault(slot.position, torch.empty((), dtype=count.dtype, pin_memory=True))
                copy.copy_(count, non_blocking=True)
                self._seen[slot.position] = count, count._version
        for device in {slot.state["step"].device for slot in slots if slot.state["step"].is_cuda}:
            event = self._arrived[device] = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))


def _number_in(count: Tensor) -> int:
    number: Any = count.tolist()
    return int(number)


def named(name: str, matrix: Matrix, which: Any = None) -> str:
    """Return the state key of a matrix.

    Args:
        name: Name of the state.
        matrix: The matrix.
        which: Index, if the matrix has several states of that name. None: it has one.
    """
    return f"{name}.{matrix.number}" if which is None else f"{name}.{matrix.number}.{which}"
