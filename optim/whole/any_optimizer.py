"""Any torch optimizer, on whole tensors: each parameter and its gradient travel to one rank, which steps it."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ...parallel.layout.regions import Box, Shape
from ...parallel.layout.spec import P
from ..states.elementwise import check_each_alone
from ..step.combined_optimizer import asks_other_ranks
from ..step.torch_engine import step_within
from ..step.update import check_steps_without_closure
from .at_home import HomeOptimizer
from .layout import LogicalTensor
from .optimizer import Slot, Update
from .tensors import WholeTensors

# The state of any optimizer for a tensor, dictionaries and lists within each other, as tensors alone ------------------

# What is no tensor, and how all hangs together, is text in one of them. So it travels, is saved and restored like the
# rest.

PLAN = "plan"
_KINDS: dict[type, str] = {list: "list", tuple: "tuple"}


def flattened(nested: Any) -> dict[str, Any]:
    """By path; under `PLAN` the text, as bytes. What is neither plain nor a container of such is there as it is."""
    found: dict[str, Any] = {}
    plan = _planned(nested, "", found)
    return {PLAN: torch.frombuffer(bytearray(json.dumps(plan).encode()), dtype=torch.uint8), **found}


def is_plain(value: Any) -> bool:
    """Whether text says it exactly."""
    return value is None or type(value) in (bool, int, float, str)


def _planned(value: Any, path: str, found: dict[str, Any]) -> dict[str, Any]:
    if is_plain(value):
        return {"value": value}
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        inner = [[key, _planned(one, _beneath(path, key), found)] for key, one in value.items()]
        return {"dict": inner}
    if type(value) in _KINDS:
        return {_KINDS[type(value)]: [_planned(one, _beneath(path, at), found) for at, one in enumerate(value)]}
    while path in found or path == PLAN:
        path += "_"
    found[path] = value
    return {"at": path, "cpu": isinstance(value, Tensor) and value.is_cpu}


def _beneath(path: str, key: Any) -> str:
    name = str(key).replace("/", "_")
    return f"{path}.{name}" if path else name


def nested(found: Mapping[str, Any], device: torch.device) -> Any:
    """What `flattened` was given.

    Args:
        device: Of what was not on the CPU.
    """
    plan = json.loads(bytes(found[PLAN].cpu().tolist()).decode())
    return _followed(plan, found, device)


def _followed(plan: Mapping[str, Any], found: Mapping[str, Any], device: torch.device) -> Any:
    ((kind, content), *_) = plan.items()
    if kind == "value":
        return content
    if kind == "dict":
        return {key: _followed(one, found, device) for key, one in content}
    if kind == "at":
        value = found[content]
        return value.to("cpu" if plan["cpu"] else device) if isinstance(value, Tensor) else value
    items = [_followed(one, found, device) for one in content]
    return tuple(items) if kind == "tuple" else items


# Any optimizer --------------------------------------------------------------------------------------------------------

_HOME = "inner.0."
_OF_WRAPPER = ("params", "param_names")


def whole(optimizer: torch.optim.Optimizer) -> AnyOptimizer:
    """The optimizer, to be given to `ParallelOptimizer` where parameters are split: it steps whole ones.

        optimizer = ParallelOptimizer(whole(torch.optim.Adafactor(model.parameters())), registry)

    Each parameter has a home among the ranks that have some of it. Parameter and gradient travel there, a copy of the
    optimizer steps them as in a model of that one parameter, and the new weights travel back: the dense model's, whatever
    the optimizer does within a tensor. Its state is at the home alone, and is saved as the logical parameter's.

    It is for optimizers that step each tensor by itself. One that estimates something from all of them together is refused
    where it is known; one that draws random numbers draws others than in one process.

    Args:
        optimizer: A torch optimizer that has not stepped yet. Its param groups become those of what is returned: set rates
            there.
    Raises:
        TypeError: It is none, steps by a closure, or is whole already.
        ValueError: It has a state; it steps all parameters together, or by another optimizer within it; it has modes.
    Collectives: two all-to-alls a round (see `Homes.map`): weights and gradients, 64 MiB a home, and the weights back.
    Host reads: one a step, whether it is skipped, besides the optimizer's own.
    Memory: three rounds of whole parameters and gradients at most; of states, those of the tensors whose home this rank is.
    """
    return AnyOptimizer(optimizer)


class AnyOptimizer(HomeOptimizer):
    """See `whole`."""

    lists = 2
    not_captured = "reads on the host whether to skip, and what it wraps may read more"
    kept = ("kind", "attributes")

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        _check(optimizer)
        self.kind = type(optimizer)
        apart = ("param_groups", "state", "defaults", "step")
        self.attributes = {
            key: value
            for key, value in vars(optimizer).items()
            if key not in apart and not key.startswith("_optimizer_")
        }
        super().__init__([_without_names(group) for group in optimizer.param_groups], dict(optimizer.defaults))

    def bound(self, tensors: WholeTensors) -> None:
        super().bound(tensors)
        self._copies: dict[int, torch.optim.Optimizer] = {}
        self._live: dict[int, tuple[Tensor, int, Any]] = {}  # by position: the text, its version, what it says

    def said_of(self, name: str | None, shape: Shape, group: Mapping[str, Any], spec: P | None) -> Any:
        return self.kind.__qualname__

    def boxes(self, tensor: LogicalTensor) -> Sequence[Box]:
        return [Box((0,) * len(tensor.shape), tensor.shape)] if tensor.said and prod(tensor.shape) else []

    def cost(self, shape: Shape) -> float:
        """As if it were a product of the matrix with itself."""
        return float(prod(shape) * min(shape[-2:])) if len(shape) > 1 else float(prod(shape))

    # The step -------------------------------------------------------------------------------------------------------

    def initial(self, slot: Slot) -> dict[str, Any]:
        return {}

    def updates(self, slots: Sequence[Slot]) -> Iterator[Update]:
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return
        values = [{slot.position: slot.param.detach() for slot in slots}, {slot.position: slot.grad for slot in slots}]
        slot_of = self.at_home(slots)
        found = dict(self.homes.map(values, lambda matrix, lists: self._stepped(lists, slot_of(matrix))))
        for slot in slots:
            yield Update(slot, found.get(slot.position, slot.param), {})

    def _stepped(self, lists: list[Tensor], slot: Slot) -> Tensor:
        """The new weights; the state is written."""
        param, grad = lists
        one = nn.Parameter(param.to(slot.param.device, copy=True))
        one.grad = grad.to(slot.param.device)
        before = self._state(slot)
        if slot.position not in self._copies:
            self._copies[slot.position] = self._copied()
        inner = self._copies[slot.position]
        given = {key: value for key, value in slot.group.items() if key not in _OF_WRAPPER}
        inner.param_groups = [{**given, **before["group"], "params": [one]}]
        inner.state = defaultdict(dict, before["others"])
        if before["own"]:
            inner.state[one] = before["own"]
        vars(inner).update(before["self"])
        step_within(inner)
        (group,) = inner.param_groups
        after = {
            "own": inner.state.get(one, {}),
            "others": {key: value for key, value in inner.state.items() if key is not one},
            "group": {key: value for key, value in group.items() if key != "params" and _changed(key, value, given)},
            "self": {key: value for key, value in vars(inner).items() if is_plain(value) and self._counted(key, value)},
        }
        inner.param_groups, inner.state = [], defaultdict(dict)
        for key in [key for key in slot.state if key.startswith(_HOME)]:
            del slot.state[key]
        slot.state.update({_HOME + path: value for path, value in flattened(after).items()})
        written = slot.state[_HOME + PLAN]
        self._live[slot.position] = written, written._version, after
        return one.detach().to(param.device)

    def _state(self, slot: Slot) -> Any:
        """As the last step has left it, or a checkpoint."""
        written: Tensor | None = slot.state.get(_HOME + PLAN)
        if written is None:
            return {"own": {}, "others": {}, "group": {}, "self": {}}
        kept = self._live.get(slot.position)
        if kept is not None and kept[0] is written and kept[1] == written._version:
            return kept[2]
        found = {key.removeprefix(_HOME): value for key, value in slot.state.items() if key.startswith(_HOME)}
        return nested(found, slot.param.device)

    def _counted(self, key: str, value: Any) -> bool:
        """Whether the optimizer has changed an attribute of its own."""
        return not key.startswith("_") and (key not in self.attributes or bool(self.attributes[key] != value))

    def _copied(self) -> torch.optim.Optimizer:
        """Of the optimizer, for one tensor."""
        copy: torch.optim.Optimizer = object.__new__(self.kind)
        for name, value in self.attributes.items():
            with suppress(TypeError, RuntimeError):  # what can't be copied is shared
                value = deepcopy(value)
            vars(copy)[name] = value
        copy.defaults = dict(self.defaults)
        copy._optimizer_step_pre_hooks, copy._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        return copy

    def __repr__(self) -> str:
        return f"whole({self.kind.__name__}, {super().__repr__()})"


def _changed(key: str, value: Any, given: Mapping[str, Any]) -> bool:
    """Whether the optimizer has put something else there than it was given."""
    if key not in given:
        return True
    return value is not given[key] and (isinstance(value, Tensor) or bool(value != given[key]))


def _without_names(group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group, to be made anew."""
    params: list[Any] = list(group["params"])
    if "param_names" in group:
        params = list(zip(group["param_names"], params, strict=True))
    return {**{key: value for key, value in group.items() if key != "param_names"}, "params": params}


def _check(optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "steps_windows"):
        raise TypeError(f"whole({type(optimizer).__name__}): give a plain torch optimizer")
    name = type(optimizer).__name__
    if asks_other_ranks(optimizer):
        raise TypeError(f"whole({name}): it steps whole tensors already; give it to ParallelOptimizer as it is")
    check_steps_without_closure(optimizer)
    check_each_alone(optimizer, "whole() steps each tensor by itself")
    if optimizer.state:
        raise ValueError(
            f"whole({name}): it has stepped already; wrap it before its first step, and load its state from a checkpoint "
            "of the wrapped one"
        )
    if within := [key for key, value in vars(optimizer).items() if isinstance(value, torch.optim.Optimizer)]:
        raise ValueError(f"whole({name}): it steps by the optimizer in its {', '.join(within)}: wrap that one")
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise ValueError(
            f"whole({name}): it changes the weights between training and evaluation, which copies of it can't; those that "
            "are schedule-free are elementwise, and need no wrapper"
        )
