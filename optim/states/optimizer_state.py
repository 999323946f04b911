"""State dicts of a `ParallelOptimizer`: saving, checking, and loading on all ranks or on none. Also copies and pickles."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ...amp.loss_scale import LossScale
from ...amp.modes import Precision
from ...parallel.layout.annotation import Annotation, annotation_of, attach
from ...parallel.mesh.agreement import on_all_ranks
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.text import printable
from ...parallel.mesh.value_checks import (
    MAX_COUNT,
    anything,
    check_like,
    check_number,
    check_text,
    dict_of,
    fields,
    is_number,
    list_of,
    wrong,
)
from ..clip.base import ClipState
from ..norm.plan import ReductionPlan
from ..step.c_engine import SUPPORTED_OPTIMIZERS
from ..step.skips import SkipMonitor
from ..step.torch_engine import lay_out_states
from ..step.wrapped_optimizer import (
    COPIED_ATTRIBUTES,
    OPTIMIZER_INDEX,
    check_indices,
    guard_calls,
    own_calls,
    params_of,
    parts_of,
    remove_guard,
    saved_positions,
)
from .chain import TransformChain

# The rank that a state dict belongs to ---------------------------------------------------------------------------------

# The state dict of a rank contains the rank's coordinates. Only a rank with the same coordinates can load it.


@dataclass(frozen=True)
class Coordinates:
    """This rank's (index, size) on each mesh axis along which ranks step different tensors or shards.

    This object is pickled as an ``OrderedDict``, so that a file can be read without this class.
    `torch.distributed.checkpoint` treats plain tensors with equal keys as replicas, so it would store the state of one
    rank only. Before it saves, it calls `__create_write_items__`, which raises an error if ``axes`` is not empty.
    """

    axes: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, plan: ReductionPlan, registry: ProcessGroupRegistry) -> Coordinates:
        """Return the index of this rank and the size of each axis along which ranks step different tensors."""
        named = {axis for b in plan.buckets for axis in (*b.distinct, *dict(b.owned), *dict(b.tied))}
        sizes = {axis: registry.size(axis) for axis in registry.topology.axes if axis in named}
        return cls({axis: (registry.coordinate[axis], size) for axis, size in sizes.items() if size > 1})

    def check(self, saved: object) -> None:
        """Raise ValueError if the saved coordinates differ from the coordinates of this rank.

        ``saved`` is a `Coordinates` object or a mapping from axis to (index, size); None, as in a state dict of a plain
        torch optimizer, is accepted.
        """
        if saved is None:
            return
        axes = saved.axes if isinstance(saved, Coordinates) else saved
        if not isinstance(axes, Mapping):
            raise ValueError(f"the state has coordinates={saved!r}, not a mapping; give the result of state_dict()")
        found = {axis: tuple(where) for axis, where in axes.items()}
        if found != dict(self.axes):
            is_same_mesh = {axis: where[1:] for axis, where in found.items()} == {
                axis: where[1:] for axis, where in self.axes.items()
            }
            write = (
                "load on every rank the state that the same rank saved"
                if is_same_mesh
                else "continue on the mesh and with the layouts of the saved run"
            )
            raise ValueError(
                f"the state was saved at mesh coordinate {_shown(found)}, but this rank has mesh coordinate "
                f"{_shown(self.axes)}: {write}, or use save_checkpoint and load_checkpoint, which reshard"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ([(axis, list(where)) for axis, where in self.axes.items()],)

    def __create_write_items__(self, *_: object) -> Iterable[Any]:
        """Raise ValueError if ranks step different tensors; else return no items.

        `torch.distributed.checkpoint` calls this method before it saves a state dict that contains this object.
        """
        if not self.axes:
            return []
        raise ValueError(
            f"optimizer.state_dict() is the state of one rank, at mesh coordinate {_shown(self.axes)}; with "
            "torch.distributed.checkpoint ranks would overwrite each other's states: save "
            "get_optimizer_state_dict(model, TorchStates(optimizer)), or use meshstep.optim.save_checkpoint"
        )


def check_caller(
    module: str,
    where: Coordinates,
    stepped: Iterable[Tensor],
    given: Iterable[Tensor],
    *,
    makes_states: bool,
) -> None:
    """Raise ValueError if torch's state-dict functions called `state_dict`, and would save wrong states or none.

    These functions look up the state of a model parameter by the parameter itself. So they don't find states of shards
    or master weights, and save shards of different ranks as if they were replicas. Only the calling ``module`` shows
    that these functions are used. ``makes_states`` is True if states exist, or if the step with zero gradients that
    torch's functions run creates them.
    """
    if module != "torch.distributed.checkpoint.state_dict":
        return
    own = {id(param) for param in given}
    if where.axes or any(id(param) not in own for param in stepped):
        raise ValueError(
            "torch's state-dict functions would save wrong optimizer states, because the optimizer steps other tensors "
            "than the model's parameters (shards, master weights or CPU copies), or ranks step different parameters: pass "
            "these functions meshstep.optim.TorchStates(optimizer), or use save_checkpoint"
        )
    if not makes_states:
        raise ValueError(
            "the optimizer has no states yet. torch's state-dict functions would call step() once to create them, but with "
            "accumulation_steps= this call updates nothing: pass these functions meshstep.optim.TorchStates(optimizer), or "
            "use save_checkpoint"
        )


def _shown(axes: Mapping[str, tuple[int, ...]]) -> str:
    places = [f"{axis} {where[0]} of {where[1]}" for axis, where in axes.items()]
    return ", ".join(places) or "none (unsharded parameters)"


# Checks of loaded states ----------------------------------------------------------------------------------------------

# Types and ranges in a state dict are checked before the optimizer is changed.

_FLAGS = ("foreach", "fused", "capturable", "differentiable", "maximize", "amsgrad", "nesterov")
_LARGEST = sys.float_info.max
_RANGES = {
    "lr": (0.0, _LARGEST),
    "initial_lr": (0.0, _LARGEST),
    "betas": (0.0, 1.0),
    "eps": (0.0, _LARGEST),
    "momentum": (0.0, _LARGEST),
    "weight_decay": (-_LARGEST, _LARGEST),
}


def check_groups(saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if the param groups ``saved`` do not fit ``groups``.

    They must have as many parameters per group, and valid hyper-parameters of the same types. Param groups of a
    `CombinedOptimizer` must belong to the same optimizers of its list.
    """
    list_of(fields({"params": list_of(anything)}))(saved, "param_groups")
    if any(OPTIMIZER_INDEX in group for group in groups):
        check_indices(saved, groups)
    sizes, own = ([len(group["params"]) for group in of] for of in (saved, groups))
    if sizes != own:
        raise ValueError(
            f"the state's param groups have {_listed(sizes)} parameters, but the optimizer's have {_listed(own)}: make the "
            "optimizer with the param groups of the run that saved the state"
        )
    for index, (new, group) in enumerate(zip(saved, groups, strict=True)):
        for name, value in new.items():
            if name not in ("params", "param_names"):
                check_hyper(name, value, group.get(name), f"param_groups[{index}]")


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) or "no"


def check_hyper(name: str, value: object, now: object, where: str) -> None:
    """Raise ValueError if the value of hyper-parameter ``name`` is out of range, or has another type than ``now``."""
    field = f"{where}[{name!r}]"
    check_text(name, f"a key of {where}")
    if name in _FLAGS and not (value is None or isinstance(value, bool)):
        raise wrong(field, value, "True, False or None")
    check_like(value, now, field)
    within = _RANGES.get(name)
    for number in value if isinstance(value, (list, tuple)) else (value,):
        number = number.item() if isinstance(number, Tensor) and number.numel() == 1 else number
        if within is not None and is_number(number) and not within[0] <= number <= within[1]:
            raise wrong(field, value, f"a number from {within[0]:g} to {within[1]:g}")


def check_states(saved: object) -> None:
    """Raise ValueError if the saved optimizer states have a NaN float, or a "step" that is not from 0 to `MAX_COUNT`."""
    dict_of(dict_of(anything), key=anything)(saved, "state")
    assert isinstance(saved, Mapping), "`dict_of` accepts no other type"
    for position, state in saved.items():
        for name, value in state.items():
            check_state_value(name, value, f"state[{position!r}]")


def check_state_value(name: str, value: object, where: str) -> None:
    """Raise ValueError if ``value`` is a NaN float, or if it is a "step" that is not a number from 0 to `MAX_COUNT`.

    A tensor is only checked if it is a "step"; then it must be 0-dim, and is read on the host.
    """
    number = value.item() if isinstance(value, Tensor) and value.dim() == 0 and name == "step" else value
    if isinstance(number, float) or name == "step":
        check_number(number, f"{where}[{name!r}]")
    if name == "step" and not 0 <= cast(float, number) <= MAX_COUNT:
        raise wrong(f"{where}[{name!r}]", number, f"a number of steps from 0 to {MAX_COUNT}")


_ELEMENTWISE = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
        torch.optim.SparseAdam,
    }
)
"""Optimizers of torch. Each of their states that is a tensor is 0-dim or has its parameter's shape, as for all
`SUPPORTED_OPTIMIZERS`."""


def check_state_shapes(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if states of an elementwise optimizer of torch have wrong shapes, or lack required tensors.

    torch's fused kernels do not check shapes: they read and write memory beyond a state that is too small. The param
    groups of ``saved`` must have been checked before.
    """
    saved_of = saved_positions(saved, optimizer)
    for part in parts_of(optimizer):
        if type(part) not in _ELEMENTWISE and type(part) not in SUPPORTED_OPTIMIZERS:
            continue
        for param in params_of(part):
            position = saved_of[param]
            for name, value in saved["state"].get(position, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0 and value.shape != param.shape:
                    raise ValueError(
                        f"state[{position!r}][{name!r}] has shape {tuple(value.shape)}, but its parameter has shape "
                        f"{tuple(param.shape)}; load a state of this model, saved on a mesh of this shape"
                    )
            state, spec = saved["state"].get(position), SUPPORTED_OPTIMIZERS.get(type(part))
            if not state or spec is None:
                continue
            for name in spec.states if spec.last is None else spec.states[:-1]:
                if not isinstance(state.get(name), Tensor):
                    raise wrong(f"state[{position!r}][{name!r}]", state.get(name), "a tensor of the parameter's shape")


# Saving and loading ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """The parts of a `ParallelOptimizer` that have a state, with methods that save, check and load the state dict."""

    optimizer: torch.optim.Optimizer
    chain: TransformChain
    precision: Precision
    loss_scale: LossScale | None
    model_params: Sequence[Tensor]
    registry: ProcessGroupRegistry
    coordinates: Coordinates
    clip: ClipState | None = None

    def state_dict(self, counts: Mapping[str, int]) -> dict[str, Any]:
        """Return the wrapped optimizer's state dict with one more entry ``"meshstep"``, a dict.

        ``"meshstep"`` has the precision mode, the loss scale, the transforms' entries (such as masters), this rank's
        coordinates, the state of the clipping rule if the rule has one, and ``counts``.
        Host synchronization: yes.
        """
        own = {
            "precision": self.precision.name,
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state_dict(),
            "weights": self.chain.state_dict(),
            **counts,
            "coordinates": self.coordinates,
        }
        if self.clip is not None and self.clip.rule.initial():
            own["clip"] = self.clip.state_dict()
        return {**self.optimizer.state_dict(), "meshstep": own}

    def load(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Load a result of `state_dict`, and return its entry ``"meshstep"``, which has the counts of skipped steps.

        If the precision mode has no masters and no loss scale, and without `Sharded`, the state of a plain torch
        optimizer is accepted as well. The result is then empty.

        On every rank, it raises ValueError and changes nothing if the state of a rank does not fit.
        Collectives: two object all-gathers; with `Sharded` also all-gathers of weights.
        Host synchronization: yes.
        """
        inner, scale = self.optimizer, self.loss_scale
        backup, scale_backup = (
            {"state": inner.state, "param_groups": inner.param_groups},
            scale.state_dict() if scale else {},
        )
        # If ``state`` is not a dict, `check` raises the error below, on every rank.
        own = state.get("meshstep") if isinstance(state, Mapping) else None

        def load() -> None:
            self.check(state)
            with own_calls:
                inner.load_state_dict({key: value for key, value in state.items() if key != "meshstep"})
            lay_out_states(inner)
            if own is not None and scale is not None:
                scale.load_state_dict(own["loss_scale"])

        try:
            on_all_ranks(partial(_all_there, load), self.registry)
            self._load_weights(own)
        except Exception:
            # torch's `load_state_dict` replaces dicts and lists and does not change them, so the backup has the old
            # values.
            inner.__setstate__(backup)
            if scale is not None:
                scale.load_state_dict(scale_backup)
            raise
        self.chain.write_back()
        if self.clip is not None:
            self.clip.load_state_dict((own or {}).get("clip"))
        return own or {}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError, with the name of the wrong entry, if `load` can't load ``state``; change nothing."""
        _all_there(partial(self._check, state))

    def _check(self, state: Mapping[str, Any]) -> None:
        dict_of(anything)(state, "the state")
        own = state.get("meshstep")
        if own is not None:
            dict_of(anything)(own, "meshstep")
        self._check_mode(own)
        weights = {} if own is None else own["weights"]
        dict_of(anything)(weights, "weights")
        if ("shards" in weights) == ("shards" in self.chain.state_dict()):
            self.coordinates.check((own or {}).get("coordinates"))
        self.chain.check_state(weights)
        check_groups(state["param_groups"], self.optimizer.param_groups)
        check_states(state["state"])
        check_state_shapes(state, self.optimizer)
        if own is not None:
            SkipMonitor.check_state(own)
            if self.loss_scale is not None:
                deepcopy(self.loss_scale).load_state_dict(own["loss_scale"])
        if self.clip is not None:
            self.clip.check_state((own or {}).get("clip"))

    def _load_weights(self, own: Mapping[str, Any] | None) -> None:
        """Load the parameter transforms' state on all ranks or on none. Call it last: masters overwrite weights."""
        model = [(param, param.detach().clone()) for param in self.model_params if self.precision.masters]
        backup = _cloned(self.chain.state_dict())

        def load() -> None:
            if own is not None:
                self.chain.load_state_dict(own["weights"])

        try:
            on_all_ranks(partial(_all_there, load), self.registry)
        except Exception:
            self.chain.load_state_dict(backup)
            with torch.no_grad():
                for param, value in model:
                    param.copy_(value)
            raise

    def _check_mode(self, own: Mapping[str, Any] | None) -> None:
        mode = self.precision
        if own is None:
            if mode.masters or self.loss_scale is not None:
                raise ValueError(
                    f"the state is a torch optimizer's, but precision={mode.name!r} also needs a loss scale or master "
                    "weights; load a state that ParallelOptimizer saved in this mode"
                )
        elif own["precision"] != mode.name:
            raise ValueError(
                f"the state was saved with precision={own['precision']!r}, but this optimizer runs with {mode.name!r}; "
                "continue in that mode, or load only the model's weights and start with a new optimizer"
            )


def _all_there(load: Callable[[], None]) -> None:
    """Call ``load()``, and convert errors that an incomplete state causes, such as KeyError, to a ValueError."""
    try:
        load()
    except (KeyError, IndexError, AttributeError, TypeError, OverflowError) as error:
        raise ValueError(
            f"the state is incomplete or malformed ({type(error).__name__}: {printable(str(error))}); give the "
            "result of state_dict()"
        ) from error


def _cloned(state: dict[str, Any]) -> dict[str, Any]:
    masters = state.get("masters")
    return state if masters is None else {**state, "masters": {key: value.clone() for key, value in masters.items()}}


# copy.deepcopy and pickle ---------------------------------------------------------------------------------------------

# Parameter transforms have hooks, process groups, and memory that they share with the parameters, so they are not
# copied. Instead, a new optimizer is constructed from the same arguments over copied parameters, and loads the state.

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


@dataclass(frozen=True)
class Recipe:
    """The arguments and the state from which a copy of a `ParallelOptimizer` is constructed; can be copied and pickled.

    ``plain`` is a copy of the wrapped torch optimizer, without state, over the model's parameters. ``attributes`` are
    those that torch leaves out of copies. ``annotations`` (declared layouts) are not copied with the parameters; there is
    one per parameter of ``plain``, or None. Pickles contain these fields, so their form must not change.
    """

    plain: torch.optim.Optimizer
    attributes: Mapping[str, Any]
    annotations: Sequence[Annotation | None]
    registry: ProcessGroupRegistry
    options: Mapping[str, Any]
    state: dict[str, Any]

    @classmethod
    def of(
        cls,
        wrapped: torch.optim.Optimizer,
        groups: Sequence[Sequence[tuple[str | None, Tensor]]],
        registry: ProcessGroupRegistry,
        options: Mapping[str, Any],
        state: dict[str, Any],
    ) -> Recipe:
        """Return the recipe of the `ParallelOptimizer` that consists of these parts.

        ``groups`` has the (name, model parameter) pairs of each param group, before transforms replaced parameters.
        """
        plain = copy.copy(wrapped)
        remove_guard(plain)
        plain.state, plain.param_groups = defaultdict(dict), []
        for group, named in zip(wrapped.param_groups, groups, strict=True):
            names = {"param_names": [name for name, _ in named]} if "param_names" in group else {}
            plain.param_groups.append({**group, "params": [param for _, param in named], **names})
        attributes = {name: getattr(wrapped, name) for name in COPIED_ATTRIBUTES if hasattr(wrapped, name)}
        annotations = [annotation_of(param) for param in params_of(plain)]
        return cls(plain, attributes, annotations, registry, options, state)


def rebuilt(make: Callable[..., T], recipe: Recipe) -> T:
    for param, annotation in zip(params_of(recipe.plain), recipe.annotations, strict=True):
        if annotation is not None:
            attach(param, annotation)
    for name, value in recipe.attributes.items():
        setattr(recipe.plain, name, value)
    optimizer = make(recipe.plain, recipe.registry, **recipe.options)
    cast(Any, optimizer).load_state_dict(recipe.state)
    return optimizer


class PicklableOptimizer:
    """Base class of `ParallelOptimizer`: copying, pickling, and registration of state-dict hooks."""

    optimizer: torch.optim.Optimizer
    registry: ProcessGroupRegistry
    on_nonfinite: Any
    _groups: list[list[tuple[str | None, Tensor]]]
    _setup: Any

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a new process needs to continue training. Subclasses implement it."""
        raise NotImplementedError

    # Hooks are registered on the wrapped optimizer, because the wrapped optimizer's methods call them.

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        return self.optimizer.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        return self.optimizer.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        return self.optimizer.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        return self.optimizer.register_load_state_dict_post_hook(hook, prepend)

    def _recipe(self) -> Recipe:
        options = self._setup.options | {"on_nonfinite": self.on_nonfinite}
        return Recipe.of(self.optimizer, self._groups, self.registry, options, self.state_dict())

    def __copy__(self) -> Self:
        """Return a shallow copy without step hooks. It shares parameters, param groups, state and accumulation window."""
        new = object.__new__(type(self))
        new.__dict__.update({key: value for key, value in self.__dict__.items() if key != "step"})
        hooks: dict[str, Any] = {
            "_optimizer_step_pre_hooks": OrderedDict(),
            "_optimizer_step_post_hooks": OrderedDict(),
        }
        new.__dict__.update(hooks)
        guard_calls(new.optimizer, new)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy over copied parameters, without hooks and gradients."""
        commit = self._setup.commit
        memo[id(commit)] = commit  # not copied: a callback may reference objects outside the optimizer
        return rebuilt(type(self), copy.deepcopy(self._recipe(), memo))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the function and arguments with which pickle makes a deep copy. Unpickling needs an equal world size."""
        return rebuilt, (type(self), self._recipe())
