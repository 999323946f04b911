"""The guard of a wrapped torch optimizer: it refuses `step`, and forwards other methods to the `ParallelOptimizer`."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from .combined_optimizer import CombinedOptimizer, kind_of, parts_of

FORWARDED = ("zero_grad", "load_state_dict", "add_param_group", "train", "eval")
"""Methods of the wrapped optimizer that call the `ParallelOptimizer`'s method of the same name."""


class _OwnCalls(threading.local):
    """A per-thread context manager for this library's calls of a wrapped optimizer, which the guard accepts."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


own_calls = _OwnCalls()


class CallGuard:
    """A step pre-hook of one wrapped torch optimizer that refuses calls of its `step` from outside this library.

    The guard removes itself after the last `ParallelOptimizer` over ``optimizer`` has been garbage-collected.

    Args:
        optimizer: The torch optimizer, referenced weakly.
        listed: True if it is an element of the list that was passed to `ParallelOptimizer`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, listed: bool) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._owners: list[weakref.ref[Any]] = []
        self._handle = optimizer.register_step_pre_hook(self)
        if isinstance(hooks := _step_pre_hooks(optimizer), OrderedDict):
            hooks.move_to_end(self._handle.id, last=False)  # before user hooks run
        for name in FORWARDED:
            method = getattr(type(optimizer), name, None)
            if callable(method) and name not in vars(optimizer):
                vars(optimizer)[name] = _forwarded(self, self._optimizer, method, listed)

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Raise RuntimeError unless this library called ``optimizer.step``."""
        if not own_calls.depth and self.owner() is not None:
            raise RuntimeError(
                f"step() was called on the {kind_of(optimizer)} that a ParallelOptimizer wraps, which would step this rank "
                "with gradients that are neither reduced over ranks nor clipped: call step() of the ParallelOptimizer, and "
                "pass that to schedules, scalers and trainers"
            )

    def owner(self) -> Any:
        """Return the newest `ParallelOptimizer` over the optimizer; None: all have been garbage-collected."""
        return next((owner for ref in reversed(self._owners) if (owner := ref()) is not None), None)

    def add_owner(self, owner: object) -> None:
        """Keep the guard until ``owner`` is garbage-collected."""
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
    """Return the replacement of a method of a wrapped optimizer."""
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

    call._meshstep_forwarded = True  # type: ignore[attr-defined]
    return call


def guard_calls(optimizer: torch.optim.Optimizer, owner: object) -> None:
    """Refuse calls of ``optimizer.step`` while ``owner``, the `ParallelOptimizer` that wraps it, exists."""
    guarded = [optimizer, *parts_of(optimizer)] if isinstance(optimizer, CombinedOptimizer) else [optimizer]
    for index, part in enumerate(guarded):
        guard = next((hook for hook in _step_pre_hooks(part).values() if type(hook) is CallGuard), None)
        (guard or CallGuard(part, listed=index > 0)).add_owner(owner)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if ``optimizer`` has step hooks other than the guard."""
    others = any(type(hook) is not CallGuard for hook in _step_pre_hooks(optimizer).values())
    return others or bool(optimizer._optimizer_step_post_hooks)


def _step_pre_hooks(optimizer: torch.optim.Optimizer) -> dict[int, Any]:
    """Return the step pre-hooks. torch has methods to register and remove hooks, but none to list or reorder them."""
    return optimizer._optimizer_step_pre_hooks


def remove_forwarding(optimizer: torch.optim.Optimizer) -> None:
    """Restore the methods of the optimizer's class."""
    for name in FORWARDED:
        if hasattr(vars(optimizer).get(name), "_meshstep_forwarded"):
            del vars(optimizer)[name]


def remove_guard(copied: torch.optim.Optimizer) -> None:
    """Remove the guard from a shallow copy of a wrapped optimizer. The original keeps its guard."""
    remove_forwarding(copied)
    kept = OrderedDict((key, hook) for key, hook in _step_pre_hooks(copied).items() if type(hook) is not CallGuard)
    copied._optimizer_step_pre_hooks = kept  # a new dict, because the copy shares the original's
