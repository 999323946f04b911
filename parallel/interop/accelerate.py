"""accelerate and a Transformers `Trainer` around an optimizer: they clip gradients themselves.

Their norm is one of gradients that may not be averaged or summed yet, or of a rank's own pieces, and their clip comes
before the optimizer's own. They are found among the objects of the process, once: the frames of their calls would do too,
but to read a frame's variables keeps them alive, the user's first batch and logits among them (Python 3.10 to 3.12).
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
    """From here on what accelerate clips by is ``optimizer`` itself."""
    _TAKEN.add(optimizer)


def innermost(optimizer: Any) -> Any:
    """The optimizer within what accelerate has made of it."""
    kind: Any = loaded_class("accelerate.optimizer", "AcceleratedOptimizer")
    while kind is not None and isinstance(optimizer, kind):
        optimizer = optimizer.optimizer
    return optimizer


def wrong_around(param_groups: object) -> str | None:
    """Return what is wrong with the `Trainer`, or accelerate, that steps the optimizer of these param groups: it clips by a
    norm of its own. None: nothing.

    Args:
        param_groups: The list of the optimizer itself, by which it is known whatever wraps it.
    Host reads, collectives: none.
    """
    trainer_kind = loaded_class("transformers.trainer", "Trainer")
    optimizer_kind = loaded_class("accelerate.optimizer", "AcceleratedOptimizer")
    if optimizer_kind is None:
        return None
    if trainer_kind is not None:
        for trainer in _objects_of(trainer_kind):
            if getattr(getattr(trainer, "optimizer", None), "param_groups", None) is param_groups:
                return _wrong_with_trainer(trainer)
    around = [one for one in _objects_of(optimizer_kind) if getattr(one, "param_groups", None) is param_groups]
    if all(innermost(accelerated) in _TAKEN for accelerated in around):
        return None
    return (
        "accelerate steps this optimizer, and its clip_grad_norm_ would clip gradients before the optimizer does, by a "
        "norm of its own: "
        + TAKE_OVER.format("accelerator")
        + " after accelerator.prepare, whether you clip by it or not"
    )


def _objects_of(kind: type) -> Iterator[Any]:
    """All objects of a class in this process."""
    return (found for found in gc.get_objects() if issubclass(type(found), kind))


def _wrong_with_trainer(trainer: Any) -> str | None:
    optimizer, norm = innermost(trainer.optimizer), trainer.args.max_grad_norm
    if norm and optimizer not in _TAKEN:
        return (
            f"the Trainer has clipped the gradients by max_grad_norm={norm}, by a norm of its own, before the optimizer's "
            "own step: " + TAKE_OVER.format("trainer") + ", or write TrainingArguments(max_grad_norm=0) and give "
            "ParallelOptimizer max_norm="
        )
    return None
