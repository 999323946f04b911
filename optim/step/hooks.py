"""torch's global step hooks, which are to run once a step: around that of the optimizer that the user calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim import optimizer as torch_optimizer


def step_within(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.step()``, around which only its own hooks run: it is a part of another optimizer's step."""
    with _no_global_hooks():
        optimizer.step()


@contextmanager
def _no_global_hooks() -> Iterator[None]:
    """Without the hooks of `register_optimizer_step_pre_hook` and ``..._post_hook``."""
    registries = [torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]
    kept = [dict(hooks) for hooks in registries]
    for hooks in registries:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(registries, kept, strict=True):
            new = dict(hooks)
            hooks.clear()
            hooks.update({**before, **new})
