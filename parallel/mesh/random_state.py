"""Read, restore, check and seed the global random number generators of this process.

The generators are those of Python, of torch for the CPU, of NumPy, and of torch for the current GPU. `random_state` skips
the GPU generator before CUDA is initialised. NumPy's generator is skipped while no module has imported NumPy. Only the CPU
generators are seeded.
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
    """Return the states of all generators, in containers that ``torch.load(weights_only=True)`` reads.

    Returns:
        State per generator: ``"python"``, ``"cpu"`` (torch), and ``"numpy"`` and ``"cuda"`` unless they are skipped.
    Host synchronization: once, for the state of the GPU generator.
    """
    state = cpu_random_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def cpu_random_state() -> dict[str, Any]:
    """Return the states of the CPU generators (Python, torch, NumPy), in the form that `random_state` returns.

    Host synchronization: none.
    """
    state: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, list(map(int, keys)), *rest)
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the states that `random_state` or `cpu_random_state` returned.

    Args:
        state: State per generator. The NumPy state is ignored if NumPy is not imported, and the CUDA state if CUDA is not
            available.
    """
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(state["numpy"])


def check_random_state(state: object) -> None:
    """Raise ValueError if `set_random_state` can't restore ``state``. The global generators stay unchanged.

    The check restores each state into a temporary generator. It skips states that `set_random_state` would ignore.
    """
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
        raise ValueError(
            f"the saved state of a random number generator can't be restored: {str(problem).splitlines()[0]}; load another "
            "checkpoint"
        ) from None


@contextmanager
def cpu_random_state_kept() -> Iterator[None]:
    """Context manager that restores the states of the CPU generators when the ``with`` block ends.

    Random numbers that are drawn in the block therefore do not change the numbers drawn after it.

    Host synchronization: none.
    """
    state = cpu_random_state()
    try:
        yield
    finally:
        set_random_state(state)


def seed_cpu_generators(seed: int) -> None:
    """Seed the generators of Python, torch (CPU) and NumPy; GPU generators are unchanged.

    Args:
        seed: 0..2^32-1, the range that NumPy accepts.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
