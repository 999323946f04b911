"""The choice of the fastest instruction set of the compiled loops. Their bits are equal; see the tests of each loop."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping

import pytest
from loops import loops
from meshstep.optim.kernels import choice
from meshstep.optim.kernels.native import time_of_step


@pytest.fixture(autouse=True)
def _widest_instructions() -> Iterator[None]:
    yield
    loops().take(None)


def chosen_with(times: Mapping[str, float]) -> str:
    """Return the instruction set that is selected if the sets of this machine take these times in seconds."""
    assert [*loops().take_fastest(lambda: times[loops().instructions])] == loops().supported()
    return loops().instructions


def test_narrower_instruction_set_is_selected_only_if_clearly_faster() -> None:
    widest, *narrower = loops().supported()
    if not narrower:
        pytest.skip("this machine has one instruction set")
    slow = dict.fromkeys(narrower, 2.0)
    assert chosen_with({**slow, widest: 1.0}) == widest
    assert chosen_with({**slow, widest: 2.05}) == widest  # within 5 %
    assert chosen_with({**slow, widest: 2.2, narrower[-1]: 1.9}) == narrower[-1]


def test_unknown_instruction_set_raises_error_with_known_names() -> None:
    before = loops().instructions
    with pytest.raises(
        ValueError, match=r"'sse9' is unknown, or this machine .*; give 'plain', 'avx2', 'avx512' or None"
    ):
        loops().take("sse9")
    assert loops().instructions == before


def test_kernel_choice_measures_and_logs_time_of_each_instruction_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "built", loops)
    with caplog.at_level(logging.INFO, "meshstep"):
        found = choice._found.__wrapped__()
    assert found is loops()
    assert f"CPU kernels: native, {loops().instructions}, the fastest of " in caplog.text
    assert re.findall(r"(\w+) \d+\.\d\d ms", caplog.text) == loops().supported()


def test_measured_kernel_time_grows_with_number_of_elements() -> None:
    assert 0 < time_of_step(loops(), 2**10) < time_of_step(loops(), 2**20)
