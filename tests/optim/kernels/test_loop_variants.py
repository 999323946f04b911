"""The choice of the fastest variant of the compiled loops."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping

import pytest
from loops import loops
from meshstep.optim.kernels import choice
from meshstep.optim.kernels.native import VARIANTS, StepTimer


@pytest.fixture(autouse=True)
def _widest_variant() -> Iterator[None]:
    yield
    loops().take(None)


def chosen_with(times: Mapping[str, float]) -> str:
    """Return the selected variant if the variants of this machine take ``times``, in seconds."""
    assert [*loops().take_fastest(lambda: times[loops().variant])] == loops().supported()
    return loops().variant


def test_loop_variant_later_in_list_is_selected_only_if_clearly_faster() -> None:
    first, *others = loops().supported()
    slow = dict.fromkeys(others, 2.0)
    assert chosen_with({**slow, first: 1.0}) == first
    assert chosen_with({**slow, first: 2.05}) == first  # slower than another variant by less than 5 %
    assert chosen_with({**slow, first: 2.2, others[-1]: 1.8}) == others[-1]
    assert chosen_with({**slow, first: 2.2, others[0]: 1.85, others[-1]: 1.8}) == others[0]


def test_unknown_variant_raises_error_with_known_names() -> None:
    before = loops().variant
    with pytest.raises(ValueError, match=r"the loops 'sse9' are unknown, or .*; give one of \('avx512', .*\) or None"):
        loops().take("sse9")
    assert loops().variant == before


def test_each_supported_instruction_set_has_second_variant_with_suffix_in_turn() -> None:
    found = loops().supported()
    assert found == [name for name in VARIANTS if name in found]
    assert found[-2:] == ["plain", "plain in turn"]
    assert {name + " in turn" for name in found[::2]} == {*found[1::2]}


def test_kernel_choice_measures_and_logs_time_of_each_variant(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "built", loops)
    with caplog.at_level(logging.INFO, "meshstep"):
        found = choice._found.__wrapped__()
    assert found is loops()
    assert f"CPU kernels: native, {loops().variant}, the fastest of " in caplog.text
    assert re.findall(r"(\w+(?: in turn)?) \d+\.\d\d ms", caplog.text) == loops().supported()


def test_measured_kernel_time_grows_with_number_of_elements() -> None:
    short, long = StepTimer(loops(), 2**10), StepTimer(loops(), 2**20)
    assert 0 < min(short() for _ in range(3)) < min(long() for _ in range(3))


def test_take_fastest_measures_variants_alternately_and_returns_shortest_times() -> None:
    measured = list[str]()

    def timed() -> float:
        measured.append(loops().variant)
        return 3.0 - len(measured) / 100

    names = loops().supported()
    times = loops().take_fastest(timed, rounds=2)
    assert measured == names * 2
    assert list(times) == names
    assert list(times.values()) == [3.0 - (len(names) + index + 1) / 100 for index in range(len(names))]
