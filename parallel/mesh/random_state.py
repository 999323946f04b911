"""Read, restore, check and seed the global random number generators of this process.

The CPU generators are those of Python, of torch for the CPU, and of NumPy. NumPy's generator is skipped while no module
has imported NumPy. `random_state` also reads torch's generator of the current GPU if CUDA is initialized, and
`set_random_state` restores it. No function seeds the GPU generator.
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

    The keys are those of `cpu_random_state`, and ``"cuda"`` if CUDA is initialized.
    """
    state = cpu_random_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def cpu_random_state() -> dict[str, Any]:
    """Return the states of the CPU generators: ``"python"``, ``"cpu"`` (torch) and, if it is imported, ``"numpy"``."""
    state: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, list(map(int, keys)), *rest)
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the states that `random_state` or `cpu_random_state` returned.

    The state of NumPy is ignored if no module has imported NumPy, and the state of CUDA if CUDA is not available.
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

    Each state is restored into a temporary generator. States that `set_random_state` ignores are not checked.
    """
    fields({"python": items(check_count, list_of(check_count), anything), "cpu": anything})(state, "the random state")
    assert isinstance(state, dict)
    version, numbers, gauss = state["python"]
    if gauss is not None:
        check_number(gauss, "the random state['python'][2]")
    devices = {"cpu": "cpu", **({"cuda": "cuda"} if "cuda" in state and torch.cuda.is_available() else {})}
    numpy = sys.modules.get("numpy") if "numpy" in state else None
    try:
        random.Random().setstate((version, tuple(numbers), gauss))
        for name, device in devices.items():
            torch.Generator(device).set_state(state[name])
        if numpy:
            numpy.random.RandomState().set_state(state["numpy"])
    except Exception as problem:
        reason = (str(problem) or type(problem).__name__).splitlines()[0]
        raise ValueError(
            f"the saved state of a random number generator can't be restored: {reason}; load another checkpoint"
        ) from None
    if numpy:
        check_numpy = items(check_text, list_of(check_count), check_count, check_count, check_number)
        check_numpy(state["numpy"], "the random state['numpy']")


@contextmanager
def cpu_random_state_kept() -> Iterator[None]:
    """Restore the states of the CPU generators when the ``with`` block ends; of NumPy only if it was imported before."""
    state = cpu_random_state()
    try:
        yield
    finally:
        set_random_state(state)


def seed_cpu_generators(seed: int) -> None:
    """Seed the generators of Python, of torch for the CPU, and of NumPy if it is imported; 0 <= ``seed`` < 2^32."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
