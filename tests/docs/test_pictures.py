"""Every picture equals the output of its script and is readable on light and dark pages; most figures match a run.

Figures that take minutes (200 steps in six layouts) or a quiet machine (times) are stored as JSON. A short run is compared
with the beginning of stored curves, or with the order of stored events. The times of other libraries (`peers`) are not
measured again. `tests/examples/test_linear_2d_picture.py` compares `linear_2d.svg` with its script.
"""

from __future__ import annotations

import importlib
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from meshstep.parallel import P, Topology, shard
from meshstep.parallel.__main__ import main as command
from meshstep.parallel.layout.picture import DARK, STYLE, Shown, cells_of, draw, held, parameters
from world import World

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docs" / "pictures"
SVG = "{http://www.w3.org/2000/svg}"
MEASURED = ("wrong_norms", "curves", "drift", "memory", "timeline", "peers")
PICTURES = sorted(FOLDER.glob("*.svg"))


def script(name: str) -> Any:
    """Import a script of docs/pictures as a module."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


def kept(name: str) -> Any:
    return script("common").figures_of(name)


def on_a_rank(name: str, function: str, *arguments: Any) -> Any:
    return getattr(script(name), function)(*arguments)


# Picture files and their scripts --------------------------------------------------------------------------------------


def test_picture_files_are_exactly_the_expected_ones() -> None:
    layouts = {f"layout_{name}" for name in script("who_holds_what").LAYOUTS}
    assert {path.stem for path in PICTURES} == {*MEASURED, *layouts, "linear_2d"}


@pytest.mark.parametrize("name", MEASURED)
def test_picture_file_equals_the_output_of_its_script(name: str) -> None:
    drawn = script(name).draw(kept(name))
    assert (FOLDER / f"{name}.svg").read_text() == drawn, f"run: python docs/pictures/{name}.py --draw"


def test_layout_pictures_equal_output_of_topology_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, axes in script("who_holds_what").LAYOUTS.items():
        command([*axes.split(), "--svg", str(tmp_path / "here.svg")])
        assert (tmp_path / "here.svg").read_text() == (FOLDER / f"layout_{name}.svg").read_text(), (
            "run: python docs/pictures/who_holds_what.py"
        )
    assert "ranks of each group" in capsys.readouterr().out


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_picture_fits_its_frame_and_has_light_and_dark_colours(path: Path) -> None:
    root = ET.fromstring(path.read_text())
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    kinds = set()
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        assert min(x, y) >= 0
        assert x + w <= width
        assert y + h <= height
    for words in root.iter(f"{SVG}text"):
        kinds |= set(words.attrib["class"].split())
        wide = 7.3 if "name" not in words.attrib["class"] else 8.4
        if "rotate" not in str(words.attrib) and words.attrib["text-anchor"] == "start" and words.text:
            assert float(words.attrib["x"]) + wide * len(words.text) <= width + 40, words.text
    light, dark = "".join(STYLE.split()), "".join(DARK.split())
    for kind in kinds - {"title", "name", "code"}:  # these classes have the colour of the text
        assert f".{kind}{{fill:" in light
        assert f".{kind}{{fill:" in dark
    assert "prefers-color-scheme: dark" in path.read_text()


# Stored figures compared with runs ------------------------------------------------------------------------------------


def test_stored_numbers_of_the_picture_wrong_norms_match_a_new_run(world: World) -> None:
    found = world.run(4, on_a_rank, "wrong_norms", "rows")[0]
    assert [method for method, _ in found] == [method for method, _ in kept("wrong_norms")]
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in kept("wrong_norms")], rel=1e-4)


def test_pages_quote_the_figures_of_pictures_correctly() -> None:
    readme, page = ((ROOT / name).read_text() for name in ("README.md", "docs/explanation/NORMS_OF_LAYOUTS.md"))
    (_, truth), *rows = kept("wrong_norms")
    off = [f"{norm / truth - 1:+.2%}" for _, norm in rows]
    assert f"is {off[0][1:]} to {off[3][1:]} too small" in readme
    assert f"{off[4][1:]} too large or {off[5][1:]} too small" in readme
    assert f"{rows[0][1] / truth - 1:+.1%}" in readme
    assert f"diverge by {kept('drift')['own']['apart'][-1]:.0%}" in page
    speed = " ".join((ROOT / "docs" / "explanation" / "SPEED.md").read_text().split())
    assert f"the picture has {kept('peers')['one rank']['fp32']['meshstep']:.2f} for meshstep" in speed


@pytest.mark.parametrize("topology", ["data=1", "tensor=4", "row=2,col=2", "data=2,tensor=2"])
def test_stored_training_curves_start_like_a_new_run(world: World, topology: str) -> None:
    ranks = Topology.parse(topology).world_size
    found = world.run(ranks, on_a_rank, "curves", "train", topology, 200, 3)[0]
    for name in ("loss", "norm"):
        assert found[name] == pytest.approx(kept("curves")[topology][name][:3], rel=2e-5)


def test_stored_training_curves_of_all_layouts_agree() -> None:
    figures = kept("curves")
    assert list(figures) == list(script("curves").LAYOUTS)
    dense = figures["data=1"]
    for values in figures.values():
        assert len(values["loss"]) == 200
        assert values["loss"][-1] == pytest.approx(dense["loss"][-1], abs=5e-6)
        assert values["norm"] == pytest.approx(dense["norm"], rel=1e-2)


def test_train_digits_results_in_examples_readme_match_end_of_stored_curves() -> None:
    """`.ci/run` runs `examples/train_digits.py` for all steps; this test only compares stored figures."""
    page = (ROOT / "examples" / "README.md").read_text()
    rows = re.findall(r"^\| (?:none.*?|`([\w=,]+)`.*?) \| .*? \| ([\d.]+) \| ([\d.]+)% \|", page, re.MULTILINE)
    said = {topology or "data=1": (float(loss), float(accuracy)) for topology, loss, accuracy in reversed(rows)}
    rows_of_the_job = {topology: said[topology] for topology in kept("curves")}
    for topology, (loss, accuracy) in rows_of_the_job.items():
        figures = kept("curves")[topology]
        assert round(figures["loss"][-1], 6) == pytest.approx(loss, abs=1e-6)
        assert 100 * figures["accuracy"] == pytest.approx(accuracy, abs=5e-3)


def test_replica_divergence_picture_starts_like_a_new_run(world: World) -> None:
    found = world.run(4, on_a_rank, "drift", "train", 4)[0]
    figures = kept("drift")
    for run in ("own", "exact"):
        assert found[run]["loss"] == pytest.approx(figures[run]["loss"][:4], rel=1e-4)
        assert found[run]["apart"] == pytest.approx(figures[run]["apart"][:4], rel=1e-2)
    assert max(figures["exact"]["apart"]) == 0
    assert max(figures["own"]["apart"]) > 1e-2
    last = {run: sum(figures[run]["loss"][100:]) for run in figures}
    assert last["own"] > 1.3 * last["exact"]


def test_memory_picture_matches_measured_bytes(world: World) -> None:
    by_rank = world.run(4, on_a_rank, "memory", "kept")
    assert kept("memory") == script("common").rounded(by_rank[0])
    whole, *sharded = (sum(parts.values()) for parts in kept("memory").values())
    assert all(total < whole for total in sharded)


def test_timeline_picture_has_the_stage_order_of_a_run(world: World) -> None:
    def order(spans: list[Any]) -> list[str]:
        return [stage for stage, *_ in spans]

    for rank in world.run(2, on_a_rank, "timeline", "steps", 2, 8):
        for spans in rank:
            assert order(spans) == order(kept("timeline")["ranks"][0])
    for spans in kept("timeline")["ranks"]:
        assert all(start <= stop for _, start, stop in spans)


# Layout pictures ------------------------------------------------------------------------------------------------------


def elements(shown: Shown, sizes: tuple[int, ...], topology: Topology, rank: int) -> set[int]:
    """Return the indices of the cells in the shard that `shard` gives to a rank."""
    full = torch.arange(torch.Size(sizes).numel()).reshape(sizes)

    class Place:
        coordinate = topology.coordinate(rank)

        def __init__(self) -> None:
            self.topology = topology

        def size(self, *axes: str) -> int:
            return topology.size(*axes)

    place: Any = Place()
    return set(shard(full, shown.spec.resolve(topology), place).flatten().tolist())


@pytest.mark.parametrize("axes", [*script("who_holds_what").LAYOUTS.values(), "pipe=2 tensor=3", "data=3"])
def test_layout_picture_shows_the_shard_of_each_rank(axes: str) -> None:
    topology = Topology.parse(axes)
    for shown in parameters(topology):
        sizes = cells_of(shown, topology)
        cells = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
        for rank in range(topology.world_size):
            found = {int(cells[cell]) for cell in held(shown, topology, rank)}
            assert found == elements(shown, sizes, topology, rank), (shown, rank)
    assert f">{topology.world_size - 1}</text>" in draw(topology)


def test_layout_picture_differs_for_a_wrong_spec() -> None:
    topology = Topology(row=2, col=2)
    right, wrong = Shown("weight", P("row", "col"), 2), Shown("weight", P("col", "row"), 2)
    assert [held(right, topology, rank) for rank in range(4)] != [held(wrong, topology, rank) for rank in range(4)]


def test_layout_picture_of_a_too_large_world_is_rejected(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        command(["data=65", "--svg", str(tmp_path / "large.svg")])
    assert "Topology(data=65) has 65 ranks, but a picture shows at most 64; leave --svg out" in capsys.readouterr().err
    assert not (tmp_path / "large.svg").exists()
