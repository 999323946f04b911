"""The base of optimizers that need whole tensors: a torch optimizer whose update asks other ranks for what it lacks.

An optimizer says how a step makes new values from old ones (`WholeOptimizer.updates`), in terms of `WholeTensors`, and is
the same on one rank and on many: alone, each parameter is whole. `meshstep.optim.ParallelOptimizer` binds it to what it
steps.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from ...amp.casting import is_half
from ...parallel.layout.spec import P
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..norm.param_table import ParamTable, SteppedTensor
from ..norm.plan_agreement import with_names
from ..states.chain import named_params_of, params_of
from .tensors import WholeTensors


@dataclass
class Slot:
    """A position of the param groups in one step.

    Args:
        position: In the param groups, counted through.
        param, grad: Of the piece's shape; contiguous. The gradient is unscaled.
        state: The optimizer's of this piece. Not to be written to: `Update` says what it becomes.
        group: The param group.
        step: How many steps there will have been after this one, 0-dim float64, on the device.
    """

    position: int
    param: Tensor
    grad: Tensor
    state: dict[str, Any]
    group: dict[str, Any]
    step: Tensor


class Update(NamedTuple):
    """What a step makes of a position: the parameter's new values, and those of the state's tensors that change."""

    slot: Slot
    param: Tensor
    state: Mapping[str, Tensor]


class WholeOptimizer(torch.optim.Optimizer):
    """A torch optimizer that sees logical tensors.

    Used alone, each parameter is whole. Under `ParallelOptimizer` it gets pieces, and a parameter that has no gradient on
    this rank counts as one of zeros: other ranks may have one. An overflow is decided on the device; nothing changes then.

    Attributes:
        tensors: What it may ask of the logical tensors.
        whole_states: The names of the states that belong to logical tensors, not to pieces: the same on all ranks that have
            them.
        kept: The names of a subclass's own attributes, which a copy has too.
        not_captured: Why its step can't be in a CUDA graph, after its name; None: it can.
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

    def said_of(self, name: str | None, shape: tuple[int, ...], group: Mapping[str, Any], spec: P | None) -> Any:
        """What all ranks that have some of a parameter must say alike of it, and what its logical tensor has as ``said``.

        Args:
            name: None where the optimizer was given none.
            shape: Of the logical tensor.
        """
        return None

    @abstractmethod
    def initial(self, slot: Slot) -> dict[str, Any]:
        """The state of a position before its first step. Collectives: none."""

    @abstractmethod
    def updates(self, slots: Sequence[Slot]) -> Iterator[Update]:
        """One step: the formula. Collectives: the same on all ranks, whatever this one has; host reads: none."""

    def is_whole_state(self, key: str) -> bool:
        """Whether the state of that name belongs to a logical tensor."""
        return key in self.whole_states

    def keeps(self, param: Tensor, key: str) -> bool:
        """Whether this rank has such a state, of the logical tensor of which ``param`` is a piece."""
        return self.is_whole_state(key)

    # Binding --------------------------------------------------------------------------------------------------------

    @property
    def tensors(self) -> WholeTensors:
        """Of what it steps."""
        if self._tensors is None:
            pairs = [(group, *pair) for group in self.param_groups for pair in named_params_of([group])]
            said = [self.said_of(name, tuple(param.shape), group, None) for group, name, param in pairs]
            self.bound(WholeTensors.alone([param for _, _, param in pairs], said))
        assert self._tensors is not None
        return self._tensors

    @staticmethod
    def bind_all(parts: Sequence[WholeOptimizer], table: ParamTable, registry: ProcessGroupRegistry) -> None:
        """Bind full-tensor optimizers to the tensors that they step.

        Args:
            parts: At least one.
            table: The stepped tensors of all optimizers.
        Raises:
            ValueError: On every rank, as `bind`.
        Collectives: object all-gathers.
        """
        plan = table.model_plan if table.model_plan.parameter_names else with_names(table.model_plan, registry)
        times, bound = Counter(entry.name for entry in plan.entries), dict[int, tuple[str, SteppedTensor]]()
        for row in table:
            local = row.model_entry.name
            # Two layers with one name, or one tensor that is tied on this rank: `bind` raises for the repeated name.
            name = plan.parameter_names[plan.parameter_slots[row.index]] if times[local] == 1 else local
            bound[id(row.tensor)] = name, row
        for part in parts:
            part.bind([bound[id(tensor)] for tensor in params_of(part.param_groups)], registry)

    def bind(self, rows: Sequence[tuple[str, SteppedTensor]], registry: ProcessGroupRegistry) -> None:
        """Step these tensors from now on, together with other ranks.

        Args:
            rows: By position in the param groups: the unique name of the full tensor, and the stepped tensor.
        Raises:
            ValueError: On every rank, see `WholeTensors.of`.
        Collectives: an object all-gather.
        """
        groups = [group for group in self.param_groups for _ in group["params"]]

        def say() -> list[Any]:
            return [
                self.said_of(row.name, row.region.full_shape, group, row.model_entry.spec)
                if row.region and row.trained
                else None
                for (_, row), group in zip(rows, groups, strict=True)
            ]

        tensors = WholeTensors.of([(name, row.tensor, row.region) for name, row in rows], registry, say)
        self._frozen = {position for position, (_, row) in enumerate(rows) if not row.trained}
        self.bound(tensors)

    def bound(self, tensors: WholeTensors) -> None:
        """``tensors`` are what it steps; to be extended by what is settled once."""
        self._tensors = tensors

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which casts states to the parameters' dtypes; those of logical tensors stay in theirs."""
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
        if kept is not None:  # a copy; else a state is being loaded
            vars(self).update(kept, _tensors=None, _frozen=set())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's."""
        super().add_param_group(param_group)
        self._tensors, self._frozen = None, set()

    # The step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; where ``found_inf`` is set and 1, nothing changes. Collectives: of `updates`. Host reads: none."""
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
        """Copy, within a step; nothing, where that is skipped: ``found_inf`` is 1. Host reads: none."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if value is target:
            return
        if found_inf is None:
            target.copy_(value)
        else:
            torch.where(found_inf.to(target.device) > 0, target, value.to(target.dtype), out=target)

    def descend(self, target: Tensor, direction: Tensor, rate: float | Tensor, decay: float = 0.0) -> None:
        """target <- target - rate (direction + decay target), within a step, in place and in one pass; nothing, where that
        is skipped. What is stepped so is an `Update`'s own value. Host reads: none.

        Args:
            rate: A number or 0-dim.
        """
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if not target.is_cpu or not target.is_contiguous() or is_half(target):
            # Fresh memory is what costs on a CPU. torch's fused kernels there walk through tensors as they lie, and lose
            # updates of half-precision ones (2.12, 2.13).
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
                f"{type(self).__name__} is to step {len(pairs)} of its {len(self.tensors.tensors)} tensors: step all of "
                "them at once, for other ranks wait for what it asks them"
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


# AdamW, for what has no whole to ask for: elementwise (arXiv:1711.05101) ----------------------------------------------

# m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
# w <- w - lr (wd w + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))

ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def moments(slot: Slot) -> dict[str, Any]:
    """Adam's two of a position, before its first step: of the piece's shape and dtype."""
    zeros = torch.zeros_like(slot.param, memory_format=torch.contiguous_format)
    return {"exp_avg": zeros, "exp_avg_sq": zeros.clone()}


def adamw_update(slot: Slot) -> Update:
    """One step. Collectives, host reads: none."""
    group, t = slot.group, slot.step
    beta1, beta2 = group["betas"]
    m = slot.state["exp_avg"].lerp(slot.grad, 1 - beta1)
    v = slot.state["exp_avg_sq"].lerp(slot.grad.square(), 1 - beta2)
    m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
    param = slot.param * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * m_hat / (v_hat.sqrt() + group["eps"])
    return Update(slot, param, {"exp_avg": m, "exp_avg_sq": v})


# Tensors by position that are made when they are asked for ------------------------------------------------------------


class OnDemand(Mapping[int, Tensor]):
    """By position of some slots what is made of each: to be measured one after another, without memory for all at once.

    Args:
        slots: The positions.
        make: Called whenever the tensor is asked for, which is not kept.
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
