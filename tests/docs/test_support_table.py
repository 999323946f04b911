"""The table of combinations in SUPPORT.md is correct: each cell is run in every precision mode (three modes in `SOME`).

The table lists the modes that work for each layout and form of data parallelism. These must reach the result of one
process in the same mode, within rounding. The other modes that are run must raise an error that says what to do instead.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from support_cells import FORMS, LAYOUTS, MAX_NORM, MODES, SOME, Run, differences, run_cells, topology_of
from world import World

PAGE = (Path(__file__).parent.parent.parent / "docs" / "reference" / "SUPPORT.md").read_text()
REFUSALS = {  # text of the cell -> error
    "—": r"needs a data axis, and Topology\(.*\) has none; give data_parallel=None",
    "[^1]": r"needs float32 gradients, which DistributedDataParallel does not make: leave data_parallel out",
}


def section() -> str:
    return PAGE.partition("\n## ")[0]


def table() -> dict[tuple[str, str], str]:
    """Return (layout, form) -> text of the cell."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section().splitlines() if line[:1] == "|"]
    layouts = [cell.removesuffix(" [^2]").strip("`") for cell in rows[0][1:]]
    return {
        (layout, row[0].strip("`").replace("`, `Offloaded(0.5)", ", offload")): cell
        for row in rows[2:]
        for layout, cell in zip(layouts, row[1:], strict=True)
    }


TABLE = table()
CELLS: list[tuple[str, str]] = sorted(TABLE, key=lambda cell: topology_of(cell[0]).world_size)


def modes_of(cell: str) -> set[str]:
    """Return the modes that a cell lists as working."""
    if cell == "no masters [^1]":
        return {mode for mode, precision in MODES.items() if not precision.masters}
    words = cell.removesuffix("[^1]").replace("—", "").replace(",", " ").split()
    return set(MODES) if words == ["all"] else set(words)


@cache
def one_process() -> dict[str, Run]:
    return run_cells("one process", ["None"])["None"]


@cache
def on_ranks(world: World, layout: str, kind: str) -> list[dict[str, dict[str, Run]]]:
    """Return the runs of each rank for one kind of data parallelism, with and without offload."""
    forms = [form for form in FORMS if kind_of(form) == kind]
    size = topology_of(layout).world_size
    return [run_cells(layout, forms)] if size == 1 else world.run(size, run_cells, layout, forms)


def kind_of(form: str) -> str:
    return form.partition(",")[0]


def test_support_table_has_a_cell_for_every_layout_and_data_parallel_option() -> None:
    assert list(TABLE) == [(layout, form) for form in FORMS for layout in LAYOUTS]
    listed = re.findall(r"`([^`]+)`", section().partition("|")[0])
    assert [mode for mode in listed if mode in MODES] == list(MODES), "the text above the table must name all modes"
    assert all((cell == "all") <= (layout not in SOME) for (layout, _), cell in TABLE.items())


@pytest.mark.parametrize(("layout", "form"), CELLS, ids=lambda word: word)
def test_precision_modes_match_one_process_or_raise_as_support_table_shows(
    world: World, layout: str, form: str
) -> None:
    cell, ranks = TABLE[layout, form], [runs[form] for runs in on_ranks(world, layout, kind_of(form))]
    assert {mode for mode, run in ranks[0].items() if not run.refusal} == modes_of(cell)
    for runs in ranks:
        for mode, run in runs.items():
            if mode in modes_of(cell):
                assert not run.refusal
                assert differences(run, one_process()[mode], mode) == [], mode
            else:
                assert re.search(REFUSALS[cell.split()[-1]], run.refusal), run.refusal


@pytest.mark.parametrize("mode", MODES)
def test_comparison_detects_planted_wrong_norms_and_weights_in_every_mode(mode: str) -> None:
    """The planted norms are 2% too large, as if a bias counted twice; the planted weights are 20% too large."""
    reference = one_process()[mode]
    assert min(reference.norms) > 1.5 * MAX_NORM, "every step should clip"
    off = Run([1.02 * norm for norm in reference.norms], {name: 1.2 * w for name, w in reference.weights.items()}, "")
    assert len(differences(off, reference, mode)) == len(off.norms) + len(off.weights)
    nan = Run([torch.nan] * 3, {name: torch.nan * weight for name, weight in reference.weights.items()}, "")
    assert len(differences(nan, reference, mode)) == len(off.norms) + len(off.weights)
