"""Negative controls: the harness detects wrong outcomes. MISTAKES.md lists all mistakes, LIMITS.md those without an error.

``PYTHONPATH=tests/harness:tests/mistakes python tests/mistakes/test_mistake_harness.py`` writes the tables of MISTAKES.md.
"""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path

import pytest
import torch
from mistakes import (
    MISTAKES,
    PENDING,
    AsTorch,
    Dense,
    Error,
    Mistake,
    Outcome,
    Right,
    Run,
    Script,
    Warned,
    check,
    section,
)
from world import World

FILES = {
    "The training loop": "test_loop_mistakes",
    "Before training": "test_setup_mistakes",
    "Clipping, learning rates, precision": "test_number_mistakes",
    "Changes during training, checkpoints, reports": "test_state_mistakes",
}
REFERENCE = Path(__file__).parent.parent.parent / "docs" / "reference"
SECTION = re.compile(r"(?<=\n)\| mistake \|.*?\n(?=\n## |\Z)", re.DOTALL)


def correct(run: Run) -> None:
    """The correct loop."""
    run.train(run.optimizer())


def other_learning_rate(run: Run) -> None:
    """A learning rate that is one part in a million larger."""
    optimizer = run.optimizer()
    optimizer.param_groups[0]["lr"] *= 1 + 1e-6
    run.train(optimizer)


def one_bit(run: Run) -> None:
    """One bit of one replica differs."""
    run.train(run.optimizer())
    if run.rank == 1:
        run.model.down.bias.data.view(torch.int64)[0] ^= 1


def warned(run: Run) -> None:
    """A warning, and correct steps."""
    warnings.warn("a remedy", stacklevel=1)
    run.train(run.optimizer())


def error_on_one_rank(run: Run) -> None:
    """An error on rank 1 alone."""
    if run.rank == 1:
        raise ValueError("a remedy")


def error_after_a_wrong_step(run: Run) -> None:
    """An error after the weights have been changed."""
    with torch.no_grad():
        run.model.down.bias.add_(1)
    raise ValueError("a remedy")


def error_after_right_steps(run: Run) -> None:
    """An error after two correct steps."""
    run.train(run.optimizer(), range(2))
    raise ValueError("a remedy")


def error_after_a_step_and_zeros(run: Run) -> None:
    """An error after a correct step, and after the script set a bias to zeros."""
    run.train(run.optimizer(), [0])
    run.model.down.bias.data.zero_()
    raise ValueError("a remedy")


def step_and_zeros(dense: Dense) -> None:
    dense.train([0])
    dense.model.down.bias.data.zero_()


def one_step(dense: Dense) -> None:
    dense.train([0])


def error_after_a_skipped_step(run: Run) -> None:
    """An error after the steps 0 and 2, without step 1."""
    run.train(run.optimizer(), [0, 2])
    raise ValueError("a remedy")


def error_after_a_cast(run: Run) -> None:
    """An error after a correct step and a cast to float32."""
    run.train(run.optimizer(), [0])
    run.model.float()
    raise ValueError("a remedy")


REMEDY = Error(ValueError, "a remedy")
LEFT_OUT = Error(ValueError, "a remedy", left_out=(1,))


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        (correct, Right()),
        (warned, Warned("a remedy")),
        (error_after_right_steps, REMEDY),
        (error_on_one_rank, Error(ValueError, "remedy", ranks=(1,))),
        (error_after_a_step_and_zeros, Error(ValueError, "a remedy", dense=step_and_zeros)),
        (error_after_a_skipped_step, LEFT_OUT),
        (error_after_a_cast, REMEDY),
    ],
)
def test_mistake_harness_accepts_the_stated_outcome(script: Script, outcome: Outcome, world: World) -> None:
    check(Mistake(script, "data=2,tensor=2" if script is correct else "data=2", outcome, "nothing"), world)


@pytest.mark.parametrize(
    ("script", "outcome", "text"),
    [
        (other_learning_rate, Right(), "is off by"),
        (one_bit, Right(), "down.bias differs between ranks 0 and 1"),
        (warned, Right(), "unexpected warning: a remedy"),
        (correct, Warned("a remedy"), "no rank warned"),
        (correct, REMEDY, "rank 0 raised nothing"),
        (error_after_right_steps, Right(), "ValueError: a remedy"),
        (error_on_one_rank, REMEDY, "rank 0 raised nothing"),
        (error_on_one_rank, Error(ValueError, "remedy", ranks=(0,)), "rank 0 raised nothing"),
        (error_after_a_wrong_step, REMEDY, "not those of any number of correct steps"),
        (error_after_a_skipped_step, REMEDY, "not those of any number of correct steps"),
        (error_after_right_steps, LEFT_OUT, "not those of any number of correct steps"),
        (error_after_right_steps, Error(ValueError, "another text"), "is not"),
        (error_after_a_step_and_zeros, Error(ValueError, "a remedy", dense=one_step), "down.bias is off by"),
        (error_after_right_steps, Error(TypeError, "a remedy"), "rank 0: ValueError"),
    ],
)
def test_mistake_harness_rejects_outcomes_that_differ_from_the_stated_one(
    script: Script, outcome: Outcome, text: str, world: World
) -> None:
    with pytest.raises(AssertionError, match=re.escape(text)):
        check(Mistake(script, "data=2", outcome, "nothing"), world)


def tables() -> list[str]:
    """Return the tables of the page, one text per section."""
    for module in FILES.values():
        importlib.import_module(module)
    return [section(one for one in MISTAKES if one.script.__module__ == module) for module in FILES.values()]


def test_at_least_sixty_different_mistakes_are_listed() -> None:
    tables()
    names = [one.name for one in MISTAKES]
    assert len({*names}) == len(names) >= 60
    assert len({one.says for one in MISTAKES}) == len(names)
    assert PENDING.keys() <= {*names}


def test_mistakes_page_lists_all_tested_mistakes() -> None:
    page = (REFERENCE / "MISTAKES.md").read_text()
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == [*FILES]
    assert SECTION.findall(page) == tables()


def test_limits_page_lists_every_silent_mistake() -> None:
    tables()
    silent = {one.says for one in MISTAKES if isinstance(one.outcome, AsTorch)}
    listed = (REFERENCE / "LIMITS.md").read_text().partition("## Mistakes that raise no error")[2].partition("\n## ")[0]
    assert {" ".join(row.split()) for row in re.findall(r"^\* (.*?)$", listed, re.MULTILINE)} == silent


if __name__ == "__main__":
    found = iter(tables())
    page = REFERENCE / "MISTAKES.md"
    page.write_text(SECTION.sub(lambda _: next(found), page.read_text()))
