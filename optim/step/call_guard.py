"""Guard of a wrapped torch optimizer: `step` on it is refused, its other methods act on the `ParallelOptimizer`."""

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
    """Context of the library's own calls of a wrapped optimizer, which the guard lets through; per thread."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


own_calls = _OwnCalls()


class CallGuard:
    """Step pre-hook of one wrapped torch optimizer, which refuses calls of its `step` from outside of the library.

    Args:
        optimizer: The torch optimizer; referenced weakly.
        listed: It is one of the list that the `ParallelOptimizer` was given.

    When the last `ParallelOptimizer` over ``optimizer`` is garbage, the guard removes itself.
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
        """Raise RuntimeError unless the library itself called ``optimizer.step``."""
        if not own_calls.depth and self.owner() is not None:
            raise RuntimeError(
                f"step() was called on the {kind_of(optimizer)} that a ParallelOptimizer wraps, which would step this rank "
                "by gradients that are neither reduced over ranks nor clipped: call step() of the ParallelOptimizer, and "
                "give that to schedules, scalers and trainers"
            )

    def owner(self) -> Any:
        """Return the newest `ParallelOptimizer` over the optimizer; None if all are garbage."""
        return next((owner for ref in reversed(self._owners) if (owner := ref()) is not None), None)

    def add_owner(self, owner: object) -> None:
        """Keep the guard up for as long as ``owner`` lives."""
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
    """Return what replaces a method of a wrapped optimizer."""
    name = method.__name__

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        owner = None if own_calls.depth else guard.owner()
        if owner is None:
            return method(optimizer(), *args, **kwargs)
        if listed and name in ("load_state_dict", "add_param_group"):
            raise RuntimeError(
                f"{name}() was called on one of the optimizers of which a ParallelOptimizer was made: call {name}() of the "
                "ParallelOptimizer, which has the param groups and the state of all of them"
            )
        return getattr(owner, name)(*args, **kwargs)

    call._meshstep_forwarded = True  # type: ignore[attr-defined]
    return call


def guard_calls(optimizer: torch.optim.Optimizer, owner: object) -> None:
    """Let only ``owner``, a `ParallelOptimizer`, step the optimizer that it wraps, for as long as it lives."""
    guarded = [optimizer, *parts_of(optimizer)] if isinstance(optimizer, CombinedOptimizer) else [optimizer]
    for index, part in enumerate(guarded):
        guard = next((hook for hook in _step_pre_hooks(part).values() if type(hook) is CallGuard), None)
        (guard or CallGuard(part, listed=index > 0)).add_owner(owner)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether step hooks other than the guard are registered on ``optimizer``."""
    others = any(type(hook) is not CallGuard for hook in _step_pre_hooks(optimizer).values())
    return others or bool(optimizer._optimizer_step_post_hooks)


def _step_pre_hooks(optimizer: torch.optim.Optimizer) -> dict[int, Any]:
    """Return the step pre-hooks. torch has methods to register and remove a hook, and none to list or order hooks."""
    return optimizer._optimizer_step_pre_hooks


def remove_forwarding(optimizer: torch.optim.Optimizer) -> None:
    """Give ``optimizer`` the methods of its class back."""
    for name in FORWARDED:
        if hasattr(vars(optimizer).get(name), "_meshstep_forwarded"):
            del vars(optimizer)[name]


def remove_guard(copied: torch.optim.Optimizer) -> None:
    """Make a shallow copy of a wrapped optimizer an unguarded one; the original keeps its guard."""
    remove_forwarding(copied)
    kept = OrderedDict((key, hook) for key, hook in _step_pre_hooks(copied).items() if type(hook) is not CallGuard)
    copied._optimizer_step_pre_hooks = kept  # its own: the original has the other
