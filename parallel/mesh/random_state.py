"""The states of this process's global random number generators: taken, put back, kept and seeded, in one place.

They are Python's, torch's on the CPU and, as far as they are in use, numpy's and that of torch's current GPU. Nobody can
draw from numpy's who has not imported numpy, so nobody here imports it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..mesh.value_checks import anything, check_count, check_number, check_text, fields, items, list_of


def random_state() -> dict[str, Any]:
    """Of all of them, in containers that ``torch.load(weights_only=True)`` reads. Host reads: one, of a GPU's generator."""
    state = cpu_random_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def cpu_random_state() -> dict[str, Any]:
    """As `random_state`, without the GPU's. Host reads: none."""
    state: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, list(map(int, keys)), *rest)
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Continue from what `random_state` or `cpu_random_state` returned, as far as this process has such generators."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(state["numpy"])


def check_random_state(state: object) -> None:
    """Raise ValueError where `set_random_state` can't take ``state``: each part is set in a generator of its own."""
    fields({"python": items(check_count, list_of(check_count), anything), "cpu": anything})(state, "the random state")
    assert isinstance(state, dict)
    version, numbers, gauss = state["python"]
    if gauss is not None:
        check_number(gauss, "python's gauss")
    devices = {"cpu": "cpu", **({"cuda": "cuda"} if "cuda" in state and torch.cuda.is_available() else {})}
    try:
        random.Random().setstate((version, tuple(numbers), gauss))
        for name, device in devices.items():
            torch.Generator(device).set_state(state[name])
        if "numpy" in state and (numpy := sys.modules.get("numpy")):
            numpy.random.RandomState().set_state(state["numpy"])
            items(check_text, list_of(check_count), check_count, check_count, check_number)(state["numpy"], "numpy")
    except ValueError:
        raise
    except Exception as problem:
        raise ValueError(f"the state of a random number generator is none: {str(problem).splitlines()[0]}") from None


@contextmanager
def cpu_random_state_kept() -> Iterator[None]:
    """Put the CPU generators back as they were, whatever is drawn within. Host reads: none."""
    state = cpu_random_state()
    try:
        yield
    finally:
        set_random_state(state)


def seed_cpu_generators(seed: int) -> None:
    """Seed Python's, torch's CPU and numpy's generator, and no GPU's.

    Args:
        seed: 0..2^32-1, which is what numpy takes.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
