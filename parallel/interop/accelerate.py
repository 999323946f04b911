"""Detection of accelerate, or of a Transformers `Trainer`, that clips the gradients of an optimizer itself.

accelerate computes its norm from gradients that may not be averaged or summed yet, or from a rank's shards alone, and
clips before the optimizer does. The Trainer and accelerator objects are searched once, among all objects of the
process. Stack frames would reveal them too, but reading a frame's variables keeps them alive in Python 3.10 to 3.12,
including the user's first batch and logits.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from .local_parameters import loaded_class

_TAKEN: WeakSet[object] = WeakSet()
TAKE_OVER = "call meshstep.optim.take_over_clipping({}, optimizer)"


def taken_over(optimizer: object) -> None:
    """Record that accelerate's clipping now goes through ``optimizer``."""
    _TAKEN.add(optimizer)


def innermost(optimizer: Any) -> Any:
    """Return the optimizer within accelerate's wrappers."""
    kind: Any = loaded_class("accelerate.optimizer", "AcceleratedOptimizer")
    while kind is not None and isinstance(optimizer, kind):
        optimizer = optimizer.optimizer
    return optimizer


def wrong_around(param_groups: object) -> str | None:
    """Return an error message if a `Trainer` or accelerate clips this optimizer's gradients itself, else None.

    Args:
        param_groups: The optimizer's list of param groups. Wrappers share the list object, so it identifies the
            optimizer.
    Collectives: none. Host synchronization: none.
    """
    trainer_kind = loaded_class("transformers.trainer", "Trainer")
    optimizer_kind = loaded_class("accelerate.optimizer", "AcceleratedOptimizer")
    if optimizer_kind is None:
        return None
    if trainer_kind is not None:
        for trainer in _objects_of(trainer_kind):
            if getattr(getattr(trainer, "optimizer", None), "param_groups", None) is param_groups:
                return _wrong_with_trainer(trainer)
    wrappers = [
        wrapper for wrapper in _objects_of(optimizer_kind) if getattr(wrapper, "param_groups", None) is param_groups
    ]
    if all(innermost(wrapper) in _TAKEN for wrapper in wrappers):
        return None
    return (
        "accelerate steps this optimizer, and its clip_grad_norm_ would clip gradients before the optimizer does, with "
        "accelerate's own norm; "
        + TAKE_OVER.format("accelerator")
        + " after accelerator.prepare, also if you do not call clip_grad_norm_"
    )


def _objects_of(kind: type) -> Iterator[Any]:
    return (found for found in gc.get_objects() if issubclass(type(found), kind))


def _wrong_with_trainer(trainer: Any) -> str | None:
    optimizer, norm = innermost(trainer.optimizer), trainer.args.max_grad_norm
    if norm and optimizer not in _TAKEN:
        return (
            f"the Trainer has clipped the gradients by max_grad_norm={norm}, with its own norm, before the optimizer's "
            "step; " + TAKE_OVER.format("trainer") + ", or write TrainingArguments(max_grad_norm=0) and give "
            "ParallelOptimizer max_norm="
        )
    return None
