"""Gradient clipping by the global norm of a `ParallelOptimizer` in accelerate and in the Transformers `Trainer`."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from functools import partial
from math import isinf
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from ...parallel.interop.local_parameters import loaded_class
from ...parallel.mesh.agreement import on_all_ranks
from ..parallel_optimizer import ParallelOptimizer
from ..step.data_parallel import find_misplaced_ddp
from ..step.first_window_checks import check_in_first_window


def take_over_clipping(driver: Any, optimizer: Any) -> None:
    """Replace the clipping methods of accelerate, or of a `Trainer`, by the clipping of ``optimizer``.

        take_over_clipping(trainer, optimizer)  # the threshold is TrainingArguments(max_grad_norm=...)
        take_over_clipping(accelerator, optimizer)  # after prepare; then call accelerator.clip_grad_norm_(...) as usual

    accelerate's own norm is wrong for sharded models. The new ``accelerator.clip_grad_norm_`` calls
    `ParallelOptimizer.clip_grad_by_norm`: it reduces and measures the gradients of all parameters of the optimizer,
    clips them in place, and returns the global norm before clipping, 0-dim. The Trainer logs this norm. The threshold
    of the call is used instead of the optimizer's ``max_norm=``. If the threshold is ``inf``, which a Trainer without
    ``max_grad_norm`` passes to measure the norm, the optimizer's ``max_norm=`` is used. The new
    ``accelerator.clip_grad_value_`` calls `ParallelOptimizer.clip_grad_by_value`.

    Args:
        driver: The accelerator, or the Trainer before its ``train``.
        optimizer: The `ParallelOptimizer`, or the wrapper that accelerate created for it.

    Raises:
        TypeError: On every rank: ``driver`` is neither an accelerator nor a Trainer. On this rank: ``optimizer`` is not a
            `ParallelOptimizer`.
        ValueError: On every rank: accelerate has its own loss scale (``mixed_precision="fp16"``), the optimizer manages
            accumulation windows too (``accumulation_steps=``), or a `DistributedDataParallel` contains a sharded model.
            Nothing is changed.

    The new clipping methods raise ValueError if some parameters of the optimizer are not passed to them. They raise
    RuntimeError in the middle of an accumulation window; write ``if accelerator.sync_gradients:`` before the call.
    Before the first step, they raise these errors on every rank. They then also raise ValueError if a
    `DistributedDataParallel` contains a sharded model.

    Collectives: an object all-gather here, and another one per call of a clipping method before the first step. A
        clipping method also reduces and measures the gradients, as `step` does otherwise.
    Host synchronization: yes, here. In a clipping method as in `step`, and one more before the first step.
    """
    inner, accelerator = innermost(optimizer), getattr(driver, "accelerator", driver)
    if not isinstance(inner, ParallelOptimizer):
        raise TypeError(
            f"take_over_clipping(..., {type(optimizer).__name__}): give the ParallelOptimizer, or accelerate's "
            "wrapper of it"
        )
    on_all_ranks(lambda: _check(driver, accelerator, inner), inner.registry)
    clip = partial(_clip_norm, accelerator, inner)
    accelerator.clip_grad_norm_, accelerator.clip_grad_value_ = clip, partial(_clip_value, accelerator, inner)
    if driver is not accelerator:  # a Trainer calls this method for gradients on several meshes
        driver._mixed_mesh_grad_norm = lambda model, max_norm: clip(model.parameters(), max_norm)
    taken_over(inner)


def _check(driver: Any, accelerator: Any, optimizer: ParallelOptimizer[Any]) -> None:
    if not hasattr(accelerator, "clip_grad_norm_") or not hasattr(accelerator, "sync_gradients"):
        raise TypeError(f"take_over_clipping({type(driver).__name__}, ...): give an Accelerator or a Trainer")
    if getattr(accelerator, "scaler", None) is not None:
        raise ValueError(
            'mixed_precision="fp16" of accelerate has a separate loss scale per rank; give the accelerator "bf16" or "no"'
        )
    if optimizer.accumulation_steps is not None:
        raise ValueError(
            "accelerate manages gradient accumulation itself; leave accumulation_steps= of ParallelOptimizer out"
        )
    _check_not_wrapped(optimizer)


@torch.no_grad()
def _clip_norm(
    accelerator: Any,
    optimizer: ParallelOptimizer[Any],
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float | None = None,
) -> Tensor:
    _look_at_call(accelerator, optimizer, parameters)
    stats = optimizer.clip_grads() if isinf(max_norm) else optimizer.clip_grad_by_norm(float(max_norm), norm_type)
    norm: Tensor = stats.total_norm
    return norm


def _clip_value(
    accelerator: Any, optimizer: ParallelOptimizer[Any], parameters: Tensor | Iterable[Tensor], clip_value: float
) -> None:
    _look_at_call(accelerator, optimizer, parameters)
    optimizer.clip_grad_by_value(clip_value)


def _look_at_call(accelerator: Any, optimizer: ParallelOptimizer[Any], parameters: Tensor | Iterable[Tensor]) -> None:
    """Check a call of a clipping method with ``parameters``. Before the first step, an error is raised on every rank.

    Raise ValueError if ``parameters`` lacks parameters of the optimizer, and RuntimeError in the middle of an
    accumulation window. Before the first step, also raise ValueError if a `DistributedDataParallel` contains a sharded
    model.

    Collectives: before the first step, an object all-gather.
    """

    def check() -> None:
        given = {id(param) for param in ([parameters] if isinstance(parameters, Tensor) else parameters)}
        own = optimizer.transforms.params
        missing = sum(id(param) not in given for param in own)
        if missing:
            raise ValueError(
                f"{missing} of the optimizer's {len(own)} parameters are not passed to the clip function, which clips all "
                "of them; pass model.parameters(), or to clip some parameters only, leave the call out and give their "
                "param group a 'max_norm'"
            )
        if not accelerator.sync_gradients:
            raise RuntimeError(
                "the clip function was called before the last micro-batch of a step, when gradients are incomplete; "
                "write `if accelerator.sync_gradients:` before the call"
            )
        if optimizer.last_stats is None:
            _check_not_wrapped(optimizer)

    if optimizer.last_stats is None:
        on_all_ranks(check, optimizer.registry)
    else:
        check()


def _check_not_wrapped(optimizer: ParallelOptimizer[Any]) -> None:
    """Raise ValueError if a `DistributedDataParallel` contains a parameter of which its ranks hold different shards.

    Searches all objects of the process for wrappers, because accelerate does not report which models it wrapped.
    """
    found = find_misplaced_ddp(optimizer.transforms.params_by_entry(optimizer.model_plan), optimizer.registry)
    if found is not None:
        name, ranks = found
        raise ValueError(
            f"{name} is in a DistributedDataParallel over the ranks {ranks}, which hold different shards of {name}. "
            "DistributedDataParallel overwrites all shards with the shard of one rank, and averages their gradients: load "
            "the model again, and call accelerator.prepare_model(model, evaluation_mode=True), which does not wrap the "
            "model"
        )


# Detection of accelerate, or of a Transformers `Trainer`, that clips the gradients itself -----------------------------

# accelerate computes its norm from gradients that may not be reduced yet, or from one rank's shards only, and clips
# before the optimizer does. To detect this, the first step searches all objects of the process for Trainers and
# accelerate's wrappers of optimizers. Stack frames are not searched, because in Python 3.10 to 3.12 reading a frame's
# variables keeps them alive, including the user's first batch and logits.

_TAKEN: WeakSet[object] = WeakSet()
TAKE_OVER = "call meshstep.optim.take_over_clipping({}, optimizer)"


def taken_over(optimizer: object) -> None:
    """Record that accelerate's clipping methods now call the clipping methods of ``optimizer``."""
    _TAKEN.add(optimizer)


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's wrappers, or ``optimizer`` itself if it is not wrapped."""
    kind: Any = loaded_class("accelerate.optimizer", "AcceleratedOptimizer")
    while kind is not None and isinstance(optimizer, kind):
        optimizer = optimizer.optimizer
    return optimizer


def wrong_around(param_groups: object) -> str | None:
    """Return an error text if accelerate or a `Trainer` may clip an optimizer's gradients by its own norm, else None.

    A Trainer clips if it has ``max_grad_norm``. accelerate without a Trainer counts as clipping if it wraps the
    optimizer. After `take_over_clipping` the result is None.
    Wrappers share the list object ``param_groups``, so it identifies the optimizer.
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


check_in_first_window(wrong_around)
