"""`whole`, an adapter for any torch optimizer: the owner rank of a parameter gathers the full tensor and steps it."""

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

from ...parallel.layout.shard import Box, Shape
from ...parallel.layout.spec import P
from ..states.elementwise import check_each_alone
from ..step.torch_engine import step_within
from ..step.update import check_steps_without_closure
from ..step.wrapped_optimizer import asks_other_ranks
from .optimizer import HomeOptimizer, Slot, Update
from .tensors import LogicalTensor, WholeTensors

# Flattening of a nested optimizer state into tensors ------------------------------------------------------------------

# A nested optimizer state is stored as a flat dict, so that checkpoints can save and restore it. One tensor in this dict
# holds JSON text, which describes the nesting and contains all numbers, strings and None.

PLAN = "plan"


def flattened(nested: Any) -> dict[str, Any]:
    """Return a flat dict with the tensors in ``nested`` by path, and under `PLAN` the JSON text of the rest.

    The JSON text is a uint8 tensor. It contains the nesting (lists, tuples, and mappings with str or int keys) and all
    values that JSON can hold (see `is_plain`). All other values are in the dict under their paths, like the tensors.
    """
    found: dict[str, Any] = {}
    plan = _flatten(nested, "", found)
    return {PLAN: torch.frombuffer(bytearray(json.dumps(plan).encode()), dtype=torch.uint8), **found}


def is_plain(value: Any) -> bool:
    """Return True for None, and for objects of exactly the types bool, int, float and str. JSON text can hold these."""
    return value is None or type(value) in (bool, int, float, str)


def _flatten(value: Any, path: str, found: dict[str, Any]) -> dict[str, Any]:
    if is_plain(value):
        return {"value": value}
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        inner = [[key, _flatten(one, _beneath(path, key), found)] for key, one in value.items()]
        return {"dict": inner}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_flatten(one, _beneath(path, at), found) for at, one in enumerate(value)]}
    while path in found or path == PLAN:
        path += "_"
    found[path] = value
    return {"at": path, "cpu": isinstance(value, Tensor) and value.is_cpu}


def _beneath(path: str, key: Any) -> str:
    name = str(key).replace("/", "_")
    return f"{path}.{name}" if path else name


def nested(found: Mapping[str, Any], device: torch.device) -> Any:
    """Return the nested value from which `flattened` made ``found``. Mappings of any type become dicts.

    Tensors that were not on the CPU go to ``device``, the other tensors to the CPU.

    Host synchronization: yes, if the JSON text, or a tensor that was on the CPU, is on a GPU.
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
    """Wrap a torch optimizer so that `ParallelOptimizer` steps full tensors with it.

        optimizer = ParallelOptimizer(whole(torch.optim.Adafactor(model.parameters())), registry)

    Each parameter has an owner rank among the ranks that hold part of it. The shards of the parameter and its gradient
    are sent to the owner rank. There, a copy of the optimizer steps the full tensor as if the model had only this
    parameter, and the new weights are sent back. So the step equals that of the dense model, whatever the optimizer
    computes within a tensor. A parameter that has no gradient on any rank is not stepped. The state exists on the owner
    rank only, and a checkpoint saves it for the full parameter.

    The optimizer must step each tensor separately. Optimizers that are known to compute a value from all tensors
    together are rejected. An optimizer that draws random numbers draws different numbers than in a single process.

    Args:
        optimizer: A torch optimizer that has not stepped yet.

    Returns:
        The optimizer to pass to `ParallelOptimizer`. It has copies of the param groups. Set learning rates in these
        copies.

    Raises:
        TypeError: ``optimizer`` is not a torch optimizer or is a `ParallelOptimizer`, needs a closure, or already steps
            full tensors.
        ValueError: ``optimizer`` has a state, is known to compute a value from all parameters together, has another
            optimizer in an attribute, or has the methods ``train`` and ``eval``.

    Collectives: per step, parameters are exchanged in rounds. In a round, each owner rank receives up to 64 MiB of
        weights and gradients, or one larger parameter. Each round has at most two all-to-alls among the ranks that step
        shards of its parameters.
    Host synchronization: one per step, to read whether the step is skipped, in addition to the optimizer's own. One more
        per sharded parameter that this rank owns and whose shard on this rank has no gradient. After a load, also to read
        the states.
    Memory: in a step, the full weights and gradients of two rounds, the new full weights of two rounds, the
        communication buffers, and the new weights of this rank's shards. In addition, the states of the parameters that
        this rank owns.
    """
    return AnyOptimizer(optimizer)


class AnyOptimizer(HomeOptimizer):
    """A full-tensor optimizer that steps each parameter with a copy of a torch optimizer.

    One rank, the owner rank of the parameter, gathers the full tensor and steps it. `whole` creates this optimizer.
    """

    lists = 2
    not_captured = (
        "reads the skip flag on the host, and the wrapped optimizer may synchronize too: make its steps without a graph"
    )
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
        # {position of the stepped tensor: (tensor with the JSON text, its version counter, the nested state)}
        self._live: dict[int, tuple[Tensor, int, Any]] = {}

    def metadata_for(self, name: str | None, shape: Shape, group: Mapping[str, Any], spec: P | None) -> Any:
        return self.kind.__qualname__

    def boxes(self, tensor: LogicalTensor) -> Sequence[Box]:
        return [Box((0,) * len(tensor.shape), tensor.shape)] if tensor.metadata and prod(tensor.shape) else []

    def cost(self, shape: Shape) -> float:
        """Return the number of elements, times the smaller of the last two dims if there are two or more dims."""
        return float(prod(shape) * min(shape[-2:])) if len(shape) > 1 else float(prod(shape))

    # The step -------------------------------------------------------------------------------------------------------

    def initial(self, slot: Slot) -> dict[str, Any]:
        return {}

    def updates(self, slots: Sequence[Slot]) -> Iterator[Update]:
        if self.found_inf is not None and bool(self.found_inf):
            return
        values = [{slot.position: slot.param.detach() for slot in slots}, {slot.position: slot.grad for slot in slots}]
        slot_of = self.at_home(slots)
        found = dict(self.homes.map(values, lambda matrix, lists: self._stepped(lists, slot_of(matrix))))
        for slot in slots:
            yield Update(slot, found.get(slot.position, slot.param), {})

    def _stepped(self, lists: list[Tensor], slot: Slot) -> Tensor:
        """Step one full tensor on its owner rank, update its state in ``slot.state``, and return the new weights."""
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
        """Return the nested state of a parameter that this rank owns, from its last step or from loaded tensors."""
        written: Tensor | None = slot.state.get(_HOME + PLAN)
        if written is None:
            return {"own": {}, "others": {}, "group": {}, "self": {}}
        kept = self._live.get(slot.position)
        if kept is not None and kept[0] is written and kept[1] == written._version:
            return kept[2]
        found = {key.removeprefix(_HOME): value for key, value in slot.state.items() if key.startswith(_HOME)}
        return nested(found, slot.param.device)

    def _counted(self, key: str, value: Any) -> bool:
        """Return True if ``key`` is a public attribute that the wrapped optimizer has added or changed."""
        return not key.startswith("_") and (key not in self.attributes or bool(self.attributes[key] != value))

    def _copied(self) -> torch.optim.Optimizer:
        """Return a copy of the wrapped optimizer, without param groups, states and step hooks."""
        copy: torch.optim.Optimizer = object.__new__(self.kind)
        for name, value in self.attributes.items():
            with suppress(TypeError, RuntimeError):  # a value that can't be copied is shared
                value = deepcopy(value)
            vars(copy)[name] = value
        copy.defaults = dict(self.defaults)
        copy._optimizer_step_pre_hooks, copy._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        return copy

    def __repr__(self) -> str:
        return f"whole({self.kind.__name__}, {super().__repr__()})"


def _changed(key: str, value: Any, given: Mapping[str, Any]) -> bool:
    """Return True if the optimizer has added or changed the option ``key``. A tensor is changed only if it was replaced."""
    if key not in given:
        return True
    return value is not given[key] and (isinstance(value, Tensor) or bool(value != given[key]))


def _without_names(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a param group without "param_names", with (name, parameter) pairs in "params" if it had them."""
    params: list[Any] = list(group["params"])
    if "param_names" in group:
        params = list(zip(group["param_names"], params, strict=True))
    return {**{key: value for key, value in group.items() if key != "param_names"}, "params": params}


def _check(optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "steps_windows"):
        raise TypeError(
            f"whole() got a {type(optimizer).__name__}, not a plain torch optimizer; give the torch optimizer, and pass "
            "the result of whole() to ParallelOptimizer"
        )
    name = type(optimizer).__name__
    if asks_other_ranks(optimizer):
        raise TypeError(
            f"whole({name}): {name} already steps full tensors; pass it to ParallelOptimizer without whole()"
        )
    check_steps_without_closure(optimizer)
    check_each_alone(optimizer, "whole() steps each tensor by itself")
    if optimizer.state:
        raise ValueError(
            f"whole({name}): the optimizer already has a state; wrap it before its first step, and continue a run with "
            "load_checkpoint from a checkpoint that was saved with whole()"
        )
    if within := [key for key, value in vars(optimizer).items() if isinstance(value, torch.optim.Optimizer)]:
        raise ValueError(
            f"whole({name}): {name} has another optimizer in its attribute {', '.join(within)}, which whole() would step "
            f"without full tensors; leave {name} out, and pass whole() and ParallelOptimizer the inner optimizer alone"
        )
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise ValueError(
            f"whole({name}): {name} has the methods train() and eval(), which whole() doesn't support; "
            "schedule-free optimizers are elementwise: pass them to ParallelOptimizer without whole()"
        )
