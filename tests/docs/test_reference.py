"""PARALLEL_OPTIMIZER.md names every argument with its default, every public method and attribute, and fields of `stats`.

Former names and names for internal use (`FORMER`, `INTERNAL`) may be missing.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import meshstep.optim
import pytest
import torch
from meshstep.optim import GradStats, ParallelOptimizer

PATH = Path(__file__).parent.parent.parent / "docs"
PAGE = (PATH / "reference" / "PARALLEL_OPTIMIZER.md").read_text()
NONE = "\N{EN DASH}"
FORMER = {"pieces", "vetoed_steps", "window_ends"}
INTERNAL = {
    "check_state_dict",
    "defaults",
    "grad_sync",
    "model_plan",
    "not_local",
    "observers",
    "steps_windows",
    "transforms",
}


def rows(heading: str) -> list[list[str]]:
    """Return the cells of each row of the table under a heading."""
    text = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]


def test_reference_page_shows_argument_defaults_of_the_signature() -> None:
    parameters = list(inspect.signature(ParallelOptimizer.__init__).parameters.values())[1:-1]
    defaults = [NONE if p.default is p.empty else repr(p.default).replace("'", '"') for p in parameters]
    names = [p.name for p in parameters]
    assert [(name.strip("`"), default.strip("`")) for name, default, _ in rows("Arguments")] == list(
        zip(names, defaults, strict=True)
    )


def test_methods_on_reference_page_exist_with_the_shown_arguments() -> None:
    shown = [call for first, *_ in rows("Methods") for call in re.findall(r"`(\w+)\(([^)]*)\)`", first)]
    assert len(shown) >= 20
    for name, arguments in shown:
        assert callable(getattr(ParallelOptimizer, name))
        real = inspect.signature(getattr(ParallelOptimizer, name)).parameters
        for argument in re.findall(r"(\w+)=(\w+)", arguments):
            assert repr(real[argument[0]].default) == argument[1], name


def test_reference_page_lists_public_names_except_former_and_internal_ones() -> None:
    public = {name for name in dir(ParallelOptimizer) if not name.startswith("_")} - {*dir(torch.optim.Optimizer)}
    missing = {name for name in public if not re.search(rf"[`.]{name}\b", PAGE)}
    assert missing <= FORMER | INTERNAL


def test_reference_page_lists_every_field_of_stats() -> None:
    shown = {name for first, *_ in rows("Fields of `stats`") for name in re.findall(r"`(\w+)", first)}
    assert shown == {field.name for field in dataclasses.fields(GradStats)} | {"skipped", "clip_coef_for"}


# Defaults on other pages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["CLIP_RULES.md", "FULL_TENSOR_OPTIMIZERS.md"])
def test_defaults_in_howto_tables_match_signatures(page: str) -> None:
    """Rows such as "`ZClip` | `z=2.5`, ..." show defaults of the named class."""
    text = (PATH / "howto" / page).read_text()
    found = re.findall(r"^\| `(\w+)` \| (.*`\w+=[^`]+`.*) \|$", text, re.MULTILINE)
    assert len(found) >= 4
    for name, cells in found:
        parameters = inspect.signature(getattr(meshstep.optim, name)).parameters
        for argument, default in re.findall(r"`(\w+)=([^`]+)`", cells):
            assert parameters[argument].default == ast.literal_eval(default), (name, argument)
