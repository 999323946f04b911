"""`prove`: that every gradient of a parallel model, completed as its layout says, is the derivative of the loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...parallel.mesh.registry import ProcessGroupRegistry
from .examination import examined
from .findings import Proof
from .objective import M


def prove(
    model: M,
    loss_fn: Callable[[M], Tensor | None],
    registry: ProcessGroupRegistry,
    *,
    max_parameters: int | None = None,
    dtype: torch.dtype | None = torch.float64,
    seed: int = 0,
) -> Proof:
    """Check the gradient of every parameter against the loss itself, which needs no other model to compare with.

        proof = prove(model, lambda model: model(batch), registry)
        print(proof)

    Every parameter is moved along a random direction, copies of it together and pieces each along its own; the central
    difference of the loss is compared with what the gradients promise, put together as the specs say. Where they promise
    something else, it is found out under which layout they would be right, and in which module backward goes wrong. What it
    can't see is a model that computes, and differentiates rightly, another function than the one it is meant to be.

    Call it on every rank, in a test, at the start of training or between two steps; not between a backward that reduces
    (`Reduce(overlap=True)`) and its step, which would refuse the gradients. Dropout sees the same random numbers at every
    forward; gradients, buffers, parameters and random states are afterwards what they were.

    Args:
        model: With declared parameters (`declare`); what a layer or a DTensor's placements say needs no more.
        loss_fn: Given the model, returns this rank's loss, a mean over its samples; None where there is none. Ranks along
            model axes return the same loss; the mean over data ranks is what is differentiated. Where it has called
            backward itself, as a pipeline's schedule does, it returns the loss detached, or None.
        max_parameters: Prove only so many, evenly over the model.
        dtype: What to compute in: parameters and buffers are cast for the time, and casts to lower dtypes in the model are
            left out. None: in the parameters' own, float32 telling errors of half a percent.
        seed: Of the directions.

    Raises:
        ValueError: On every rank: a parameter is not declared; a loss is not finite, or missing.
        RuntimeError: ``loss_fn`` raised on another rank, whose own error is logged there at once. (Ranks that wait for it
            in the model's collectives learn of it when these time out.)
        TypeError: Half precision and ``dtype=None``; DTensors that would have to be cast.
    Collectives: the model's, in one backward and about two forwards for 64 parameters that are right, and object
        all-gathers over the world. Host reads: yes.
    """
    return examined(model, loss_fn, registry, max_parameters, dtype, seed).proof
