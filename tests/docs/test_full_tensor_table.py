"""The table of optimizers that need full tensors is correct: each cell is run.

After ten steps in float64, every rank matches the same optimizer in one process to 1e-12, and replicas are bitwise
identical, with every state placement that the cell lists.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from whole_runs import STATES, WHOLE_LAYOUTS, alone, copies_differ, largest_error
from whole_services import each_trained
from whole_table import LAYOUTS, OPTIMIZERS, PLACEMENTS, fitting
from world import World

PAGE = (Path(__file__).parent.parent.parent / "docs" / "reference" / "FULL_TENSOR_TABLE.md").read_text()
EXACT = 1e-12


def table() -> dict[tuple[str, str], str]:
    """Return (optimizer, layout) -> text of the cell."""
    tables = [text.splitlines() for text in PAGE.split("\n\n") if text[:1] == "|"]
    lines = next(lines for lines in tables if "`tensor=2`" in lines[0])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    layouts = [cell.replace("`", "") for cell in rows[0][1:]]
    return {
        (row[0].strip("`"), layout): cell for row in rows[2:] for layout, cell in zip(layouts, row[1:], strict=True)
    }


TABLE = table()


def test_full_tensor_table_has_a_cell_for_every_optimizer_and_layout() -> None:
    assert list(TABLE) == [(optimizer, layout) for optimizer in OPTIMIZERS for layout in LAYOUTS]
    for (_, layout), cell in TABLE.items():
        assert cell.split(", ") == fitting(layout)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_optimizers_in_full_tensor_table_match_single_process_training(world: World, layout: str) -> None:
    planted = WHOLE_LAYOUTS[LAYOUTS[layout]]
    expected = {name: alone(planted, make) for name, make in OPTIMIZERS.items()}
    for placement in PLACEMENTS:
        names = [name for name in OPTIMIZERS if placement in TABLE[name, layout].split(", ")]
        if not names:
            continue
        makes, options = [OPTIMIZERS[name] for name in names], STATES[PLACEMENTS[placement]]
        by_rank = world.run(planted.topology.world_size, each_trained, planted, makes, options)
        for index, name in enumerate(names):
            own = [of_rank[index] for of_rank in by_rank]
            assert largest_error(own, expected[name]) <= EXACT, f"{name}, {placement}"
            assert copies_differ(own) == [], f"{name}, {placement}"
