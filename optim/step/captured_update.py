"""An update that is captured in a CUDA graph: what torch must be told for it, and what must be there before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...amp.capture import is_captured


@contextmanager
def capturable(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Say, while a graph is made, that the fused kernels can be captured, as torch's Adams want to hear.

    Said for good it would be a warning in every run that steps without a graph.

    Raises:
        RuntimeError: A parameter has its first gradient, for which the optimizer would make a state.
    """
    if not is_captured():
        yield
        return
    _check_states_are_made(optimizer)
    said = [group for group in optimizer.param_groups if group.get("capturable") is False]
    for group in said:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in said:
            group["capturable"] = False


def _check_states_are_made(optimizer: torch.optim.Optimizer) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    with_state = [bool(optimizer.state.get(param)) for param in params]
    if not any(with_state):
        return  # it makes none
    for param, has_state in zip(params, with_state, strict=True):
        if param.grad is not None and not has_state:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} has its first gradient in a step that is captured in a CUDA "
                "graph, and each replay would make its optimizer state anew: make steps before, in which every parameter "
                "that is ever to be trained has a gradient"
            )
