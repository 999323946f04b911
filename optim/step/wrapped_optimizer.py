"""The torch optimizer that a `ParallelOptimizer` wraps: several combined into one, param groups, and a guard of calls.

The guard (`CallGuard`) raises an error if other code calls the wrapped optimizer's `step`.

An example of a combination is Muon for matrices and AdamW for the rest:

    ParallelOptimizer([Muon(matrices, lr=0.02), AdamW(others, lr=1e-3, fused=True)], registry, max_norm=1.0)

Combined optimizers have a common gradient norm and step decision. Their param groups are in one list, and
``"optimizer"`` in a param group is the index of its optimizer. Their states are in one dict. Sharding, master weights,
checkpoints and schedules therefore handle them as one optimizer; only the update steps each optimizer (`parts_of`).
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...parallel.layout.annotation import annotation_of
from ...parallel.mesh.text import some
from ..norm.plan import check_unused

OPTIMIZER_INDEX = "optimizer"
COPIED_ATTRIBUTES = ("elementwise", "_step_supports_amp_scaling")  # torch's copies and pickles omit these attributes


class CombinedOptimizer(torch.optim.Optimizer):
    """One optimizer made of several torch optimizers, with the param groups and the states of all of them.

    ``parts`` are changed: their param groups and states become those of this object. Step and save only this object
    from then on.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        _check(parts)
        self._parts: list[torch.optim.Optimizer] = []
        super().__init__([{"params": []}], {})
        self._parts = list(parts)
        self._given = [(part, part.param_groups, part.state) for part in parts]
        self.param_groups = [group for part in parts for group in part.param_groups]
        self.state = defaultdict(dict)
        for index, part in enumerate(parts):
            for group in part.param_groups:
                group[OPTIMIZER_INDEX] = index
            self.state.update(part.state)
        self._share()

    @property
    def parts(self) -> list[torch.optim.Optimizer]:
        """Return the combined optimizers, after setting their param groups and ``state`` to those of this object."""
        self._share()
        return self._parts

    def _share(self) -> None:
        for index, part in enumerate(self._parts):
            part.param_groups = [group for group in self.param_groups if group[OPTIMIZER_INDEX] == index]
            part.state = self.state

    def release(self) -> None:
        """Restore the original param groups and states of the combined optimizers.

        No effect after `keep`, in a second call, or in a copy.
        """
        for part, groups, state in self._given:  # empty in a copy
            part.param_groups, part.state = groups, state
            for group in groups:
                del group[OPTIMIZER_INDEX]
        self._given = []

    def keep(self) -> None:
        """Drop the original param groups and states, so that their memory is freed. `release` then has no effect."""
        self._given = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each of the combined optimizers. Raises ValueError if ``closure`` is not None."""
        if closure is not None:
            raise ValueError(
                "step(closure) of several optimizers is not supported, because each would evaluate the closure: call "
                "backward, then step()"
            )
        for part in self.parts:
            part.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group to the optimizer with index ``param_group["optimizer"]``, with that optimizer's defaults."""
        if not self._parts:
            self.param_groups.append(param_group)  # the call from torch's constructor, before parts exist
            return
        index = param_group.get(OPTIMIZER_INDEX)
        if not isinstance(index, int) or not 0 <= index < len(self._parts):
            raise ValueError(
                f"the param group has {OPTIMIZER_INDEX!r}={index!r}: set it to the position (0 to "
                f"{len(self._parts) - 1}) of the group's optimizer in the list of optimizers, for example {{'params': "
                f"[...], {OPTIMIZER_INDEX!r}: 0}}"
            )
        part = self.parts[index]
        part.add_param_group(param_group)
        self.param_groups.append(part.param_groups[-1])

    # Modes -----------------------------------------------------------------------------------------------------------

    def train(self) -> None:
        self._change_mode("train")

    def eval(self) -> None:
        self._change_mode("eval")

    def _change_mode(self, name: str) -> None:
        for part in self.parts:
            change = getattr(part, name, None)
            if callable(change):
                change()

    # State -----------------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict: each of the combined optimizers loads its own param groups and their states.

        If it raises ValueError, this object keeps its param groups and states.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        check_indices(state_dict["param_groups"], self.param_groups)
        own = [group[OPTIMIZER_INDEX] for group in self.param_groups]
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        loaded = []
        for index, part in enumerate(self.parts):
            groups = [group for group in state_dict["param_groups"] if group[OPTIMIZER_INDEX] == index]
            ids = {param for group in groups for param in group["params"]}
            part.load_state_dict(
                {
                    "state": {key: value for key, value in state_dict["state"].items() if key in ids},
                    "param_groups": groups,
                }
            )
            state.update(part.state)
            loaded.append(iter(part.param_groups))
        self.state, self.param_groups = state, [next(loaded[index]) for index in own]
        self._share()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        said = [
            {name: getattr(part, name) for name in COPIED_ATTRIBUTES if hasattr(part, name)} for part in self._parts
        ]
        return {**super().__getstate__(), "_parts": [_emptied(part) for part in self._parts], "_said": said}

    def __setstate__(self, state: dict[str, Any]) -> None:
        said = state.get("_said", [])
        super().__setstate__({"_given": [], **{key: value for key, value in state.items() if key != "_said"}})
        for part, attributes in zip(self._parts, said, strict=False):
            vars(part).update(attributes)
        for part in self.parts:
            # Lets each optimizer upgrade groups and states of older torch versions in place.
            part.__setstate__({"state": part.state, "param_groups": part.param_groups})

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self.parts))}]"


def check_indices(saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if the saved param groups belong to other optimizers than ``groups`` of a `CombinedOptimizer`."""
    whose, own = ([group.get(OPTIMIZER_INDEX) for group in of] for of in (saved, groups))
    if whose != own:
        raise ValueError(
            f"the param groups of the state dict belong to the optimizers with the indices {whose} (None: saved from a "
            f"single optimizer), but the indices in this list of optimizers are {own}: load the state of the same "
            "optimizers in the same order"
        )


def _emptied(part: torch.optim.Optimizer) -> torch.optim.Optimizer:
    new = copy(part)
    new.state, new.param_groups = defaultdict(dict), []
    return new


def _check(parts: Sequence[object]) -> None:
    if not parts:
        raise ValueError("the list of optimizers is empty: give at least one optimizer")
    seen: dict[int, int] = {}
    for index, part in enumerate(parts):
        if (
            not isinstance(part, torch.optim.Optimizer)
            or hasattr(part, "steps_windows")
            or isinstance(part, CombinedOptimizer)
        ):
            raise TypeError(f"optimizer {index} of the list is a {type(part).__name__}: give plain torch optimizers")
        for param in params_of(part):
            if (other := seen.setdefault(id(param), index)) != index:
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} is in optimizers {other} and {index} of the list, which "
                    "would both step it: give each parameter to one optimizer"
                )


def parts_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    return optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    return " + ".join(type(part).__name__ for part in parts_of(optimizer))


def asks_other_ranks(optimizer: object) -> bool:
    """Return True for the full-tensor optimizers of `meshstep.optim.whole`, whose steps issue collectives."""
    return bool(getattr(optimizer, "asks_other_ranks", False))


# Param groups, and the parameters in them -----------------------------------------------------------------------------


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def saved_positions(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[Tensor, Any]:
    """Return for each parameter of ``optimizer`` its key in ``saved["state"]``. ``saved`` is a state dict that fits it."""
    positions = [position for group in saved["param_groups"] for position in group["params"]]
    return dict(zip(params_of(optimizer), positions, strict=True))


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


@contextmanager
def unchanged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Return a context manager that restores the param groups and states of an optimizer if its body raises.

    It also undoes the combination of a `CombinedOptimizer`. The elements of tensors are not restored.
    """
    groups = [(group, {**group, "params": [*group["params"]]}) for group in optimizer.param_groups]
    state = dict(optimizer.state)
    of_params = [(of_param, dict(of_param)) for of_param in state.values() if isinstance(of_param, dict)]
    with uncombined_on_error(optimizer):
        try:
            yield
        except BaseException:
            for group, entries in groups:
                group.clear()
                group.update(entries)
            for of_param, entries in of_params:
                of_param.clear()
                of_param.update(entries)
            optimizer.state.clear()
            optimizer.state.update(state)
            raise


@contextmanager
def uncombined_on_error(optimizer: object) -> Iterator[None]:
    """Return a context manager that undoes the combination of a `CombinedOptimizer` if its body raises."""
    try:
        yield
    except BaseException:
        if isinstance(optimizer, CombinedOptimizer):
            optimizer.release()
        raise
    if isinstance(optimizer, CombinedOptimizer):
        optimizer.keep()


# The guard of a wrapped optimizer: `step` raises, and other methods call the `ParallelOptimizer` ----------------------

FORWARDED = ("zero_grad", "load_state_dict", "add_param_group", "train", "eval")
"""Methods of the wrapped optimizer that call the `ParallelOptimizer`'s method of the same name."""
_FORWARDED = "_meshstep_forwarded"  # name of an attribute that marks the functions that replace these methods


class _OwnCalls(threading.local):
    """A per-thread context manager within which `CallGuard` accepts calls of a wrapped optimizer's methods."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


own_calls = _OwnCalls()


class CallGuard:
    """A step pre-hook of a wrapped torch optimizer. It raises if code outside this library calls the optimizer's `step`.

    It also replaces the methods in `FORWARDED` by calls of the `ParallelOptimizer`. The guard removes itself after all
    `ParallelOptimizer` objects that wrap ``optimizer`` have been garbage-collected.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, listed: bool) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._owners: list[weakref.ref[Any]] = []
        self._handle = optimizer.register_step_pre_hook(self)
        if isinstance(hooks := _step_pre_hooks(optimizer), OrderedDict):
            hooks.move_to_end(self._handle.id, last=False)  # so that it raises before hooks of the user run
        for name in FORWARDED:
            method = getattr(type(optimizer), name, None)
            if callable(method) and name not in vars(optimizer):
                vars(optimizer)[name] = _forwarded(self, self._optimizer, method, listed)

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Raise RuntimeError unless this library called ``optimizer.step``, or no `ParallelOptimizer` exists any more."""
        if not own_calls.depth and self.owner() is not None:
            raise RuntimeError(
                f"step() was called on the {kind_of(optimizer)} that a ParallelOptimizer wraps, which would step this rank "
                "with gradients that are neither reduced over ranks nor clipped: call step() of the ParallelOptimizer, and "
                "pass the ParallelOptimizer to schedules, scalers and trainers"
            )

    def owner(self) -> Any:
        return next((owner for ref in reversed(self._owners) if (owner := ref()) is not None), None)

    def add_owner(self, owner: object) -> None:
        """Add a `ParallelOptimizer` that wraps the optimizer. The guard stays while any such `ParallelOptimizer` exists."""
        self._owners.append(weakref.ref(owner, self._drop))

    def _drop(self, ref: weakref.ref[Any]) -> None:
        self._owners.remove(ref)
        optimizer = self._optimizer()
        if not self._owners and optimizer is not None:
            self._handle.remove()
            remove_forwarding(optimizer)


def _forwarded(
    guard: CallGuard, optimizer: weakref.ref[Any], method: Callable[..., Any], listed: bool
) -> Callable[..., Any]:
    """Return a function that replaces ``method`` of a wrapped optimizer, and calls the `ParallelOptimizer`'s method.

    In calls by this library, or if no `ParallelOptimizer` exists, the function calls ``method``. With ``listed``,
    ``load_state_dict`` and ``add_param_group`` raise RuntimeError, because they concern all optimizers of the list.
    """
    name = method.__name__

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        owner = None if own_calls.depth else guard.owner()
        if owner is None:
            return method(optimizer(), *args, **kwargs)
        if listed and name in ("load_state_dict", "add_param_group"):
            raise RuntimeError(
                f"{name}() was called on one of the optimizers that a ParallelOptimizer wraps: call {name}() of the "
                "ParallelOptimizer, which has the param groups and the state of all of them"
            )
        return getattr(owner, name)(*args, **kwargs)

    vars(call)[_FORWARDED] = True
    return call


def guard_calls(optimizer: torch.optim.Optimizer, owner: object) -> None:
    """Make ``optimizer.step`` raise while ``owner``, the `ParallelOptimizer` that wraps the optimizer, exists."""
    guarded = [optimizer, *parts_of(optimizer)] if isinstance(optimizer, CombinedOptimizer) else [optimizer]
    for index, part in enumerate(guarded):
        guard = next((hook for hook in _step_pre_hooks(part).values() if type(hook) is CallGuard), None)
        (guard or CallGuard(part, listed=index > 0)).add_owner(owner)


# A second wrapper around the same torch optimizer --------------------------------------------------------------------

_REMAINS = "_meshstep_remains"  # name of an attribute of a wrapped torch optimizer; torch's copies omit it


class Remains(NamedTuple):
    """The changes to a torch optimizer's param groups that stay after its `ParallelOptimizer` is deleted.

    ``replaced``: the groups have other tensors than the model's parameters. ``left_out``: frozen parameters that were
    removed from the groups, by name.
    """

    replaced: bool
    left_out: Sequence[tuple[str, Tensor]]


def record_remains(
    optimizer: torch.optim.Optimizer, given: Sequence[Tensor], left_out: Sequence[tuple[str, Tensor]]
) -> None:
    """Record the `Remains` of a `ParallelOptimizer` that trains the model parameters ``given``.

    Parameters that an earlier `ParallelOptimizer` left out stay recorded, except those in ``given``.
    """
    own = {id(param) for param in given}
    for part in parts_of(optimizer):
        replaced = any(id(tensor) not in own for tensor in params_of(part))
        earlier: Remains | None = vars(part).get(_REMAINS)
        known = {id(param): (name, param) for name, param in (*(earlier.left_out if earlier else ()), *left_out)}
        vars(part)[_REMAINS] = Remains(replaced, [pair for key, pair in known.items() if key not in own])


def check_not_replaced(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if an earlier `ParallelOptimizer` took trained parameters out of the optimizer's param groups.

    A second `ParallelOptimizer` would silently not train these parameters.
    """
    for part in parts_of(optimizer):
        remains: Remains | None = vars(part).get(_REMAINS)
        if remains is None:
            continue
        unfrozen = [name for name, param in remains.left_out if param.requires_grad]
        if remains.replaced or unfrozen:
            change = (
                "replaced parameters in its param groups by other tensors (master weights, shards or copies)"
                if remains.replaced
                else f"removed {some(unfrozen)} from its param groups, frozen then and trained now"
            )
            raise ValueError(
                f"a ParallelOptimizer has wrapped this {type(part).__name__} before, and {change}: create the torch "
                "optimizer again from the model's parameters, and wrap the new one"
            )


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    others = any(type(hook) is not CallGuard for hook in _step_pre_hooks(optimizer).values())
    return others or bool(optimizer._optimizer_step_post_hooks)


def _step_pre_hooks(optimizer: torch.optim.Optimizer) -> dict[int, Any]:
    """Return the step pre-hooks. torch has methods to register and remove hooks, but none to list or reorder them."""
    return optimizer._optimizer_step_pre_hooks


def remove_forwarding(optimizer: torch.optim.Optimizer) -> None:
    for name in FORWARDED:
        if hasattr(vars(optimizer).get(name), _FORWARDED):
            del vars(optimizer)[name]


def remove_guard(copied: torch.optim.Optimizer) -> None:
    """Remove the guard from a shallow copy of a wrapped optimizer. The original keeps its guard."""
    remove_forwarding(copied)
    vars(copied).pop(_REMAINS, None)
    kept = OrderedDict((key, hook) for key, hook in _step_pre_hooks(copied).items() if type(hook) is not CallGuard)
    copied._optimizer_step_pre_hooks = kept  # a new dict, because the copy has the dict of the original
