"""Saving and restoring the random number generators of Python, torch and, if it is imported, numpy."""

from __future__ import annotations

import io
import random
import sys
from typing import Any

import pytest
import torch
from meshstep.parallel.mesh.random_state import (
    check_random_state,
    cpu_random_state_kept,
    random_state,
    seed_cpu_generators,
    set_random_state,
)

numpy = pytest.importorskip("numpy")


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(torch.rand(())), float(numpy.random.rand())]


def test_restored_random_state_repeats_the_draws() -> None:
    random.gauss(0, 1)  # computes two numbers, and keeps the second for the next call
    stored = io.BytesIO()
    torch.save(random_state(), stored)
    first = draws()
    assert draws() != first
    stored.seek(0)
    set_random_state(torch.load(stored, weights_only=True))
    assert draws() == first


def draw_and_fail() -> None:
    with cpu_random_state_kept():
        seed_cpu_generators(4)
        draws()
        raise KeyError("planted")


def test_cpu_random_state_kept_restores_generators_after_an_error() -> None:
    seed_cpu_generators(3)
    expected = draws()
    seed_cpu_generators(3)
    with pytest.raises(KeyError, match="planted"):
        draw_and_fail()
    assert draws() == expected


def test_random_state_functions_do_not_import_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    with_numpy = random_state()
    monkeypatch.delitem(sys.modules, "numpy")
    state: dict[str, Any] = random_state()
    assert with_numpy.keys() - state.keys() == {"numpy"}
    set_random_state(with_numpy)
    seed_cpu_generators(0)
    assert "numpy" not in sys.modules


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_random_state_is_ignored_on_machine_without_cuda() -> None:
    state = random_state() | {"cuda": torch.zeros(16, dtype=torch.uint8)}
    check_random_state(state)
    set_random_state(state)
    with pytest.raises(
        ValueError, match="can't be restored"
    ):  # negative control: the state of a used generator is checked
        check_random_state(state | {"cpu": torch.zeros(16, dtype=torch.uint8)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"python": (3, [1], None)}, "can't be restored: state vector is the wrong size; load another checkpoint"),
        ({"numpy": ("PCG64", [1], 1, 0, 0.0)}, "can't be restored: set_state can only be used with legacy MT19937"),
        (
            {"numpy": ("MT19937", [2.5] * 624, 1, 0, 0.0)},
            r"the random state\['numpy'\]\[1\]\[0\] is 2.5; expected an int",
        ),
        ({"cpu": torch.zeros(3)}, "can't be restored: RNG state must be a torch.ByteTensor; load another checkpoint"),
    ],
)
def test_check_random_state_rejects_states_that_cannot_be_restored(change: dict[str, Any], message: str) -> None:
    pytest.importorskip("numpy")
    check_random_state(random_state())
    with pytest.raises(ValueError, match=message):
        check_random_state(random_state() | change)
