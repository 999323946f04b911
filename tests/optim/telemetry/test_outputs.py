"""Report outputs: JSON lines, CSV, terminal, services, HTML page; resumed runs continue in their files."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
from collections import deque
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked_python
import pytest
import torch
from meshstep.optim import CsvFile, Flops, JsonLines, Monitor, ParallelOptimizer, Report, Terminal, WeightsAndBiases
from meshstep.optim.__main__ import main
from meshstep.optim.telemetry.page import Scale, chart, number, page, thinned
from meshstep.optim.telemetry.writers import drawn, read_json_lines
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import nn


def report(step: int, **more: Any) -> Report:
    values: dict[str, Any] = {"loss": 1 / step, "grad_norm": 2.0 * step, "clip_coef": 0.5, "loss_scale": None}
    return Report(**{"step": step, "skipped_steps": 0, "per_second": 10.0, "unit": "tokens", **values, **more})


FIGURES = {"update_ratio/total": 0.01, "update_ratio/up": 0.02}


# JSON lines and CSV ---------------------------------------------------------------------------------------------------


def test_json_lines_writes_one_report_per_line(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a.jsonl"
    with JsonLines(path) as lines:
        assert not path.exists(), "a writer without reports must not create a file"
        lines(report(10))
        assert len(read_json_lines(path)) == 1, "each report must be flushed"
        lines(report(20, loss=math.nan, grad_norm=math.inf, measured_step=15, figures=FIGURES))
    first, second = read_json_lines(path)
    assert first == {"step": 10, **report(10).scalars()}
    assert math.isnan(second["loss"])
    assert second["grad_norm/total"] == math.inf
    assert second["measured_step"] == 15
    assert second["update_ratio/up"] == 0.02
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_csv_file_adds_columns_for_new_figures(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with CsvFile(path) as rows:
        rows(report(10))
        rows(report(20, figures=FIGURES, loss=math.inf))
        rows(report(30))
    assert path.read_text().splitlines() == [
        "step,loss,grad_norm/total,clip_coef,skipped_steps,tokens_per_second,update_ratio/total,update_ratio/up",
        "10,0.1,20.0,0.5,0,10.0,,",
        "20,inf,40.0,0.5,0,10.0,0.01,0.02",
        f"30,{1 / 30},60.0,0.5,0,10.0,,",
    ]


def steps_in(path: Path) -> list[int]:
    if path.suffix == ".csv":
        return [int(line.partition(",")[0]) for line in path.read_text().splitlines()[1:]]
    return [int(found["step"]) for found in read_json_lines(path)]


def monitored(file: Any, steps: int, state: dict[str, int] | None = None) -> Monitor:
    monitor = Monitor(ProcessGroupRegistry(Topology()), file, every=2)
    if state is not None:
        monitor.load_state_dict(state)
    stats: Any = SimpleNamespace(
        total_norm=torch.tensor(1.0),
        clip_coef=torch.tensor(1.0),
        found_inf=torch.tensor(0.0),
        skipped=torch.tensor(0.0),
        group_norms=torch.ones(1),
        parameter_norms={},
        loss_scale=None,
    )
    for _ in range(steps):
        monitor(stats, 1.0)
    return monitor


@pytest.mark.default_cases(99)  # all cases: unlike other tests of this file, these start no process
@pytest.mark.parametrize("kind", [JsonLines, CsvFile])
def test_resumed_run_appends_to_file_and_moves_later_steps_to_dropped_file(kind: Any, tmp_path: Path) -> None:
    path = tmp_path / ("run.csv" if kind is CsvFile else "run.jsonl")
    with kind(path) as file:
        monitored(file, 8)
    assert steps_in(path) == [2, 4, 6, 8]
    with open(path, "a") as cut:
        cut.write('{"step": 10, "lo' if kind is JsonLines else "1")  # as if the process died here
    with kind(path) as file:
        monitored(file, 3, {"step": 5, "skipped_steps": 0})
    assert steps_in(path) == [2, 4, 6, 8]
    dropped = Path(f"{path}.dropped").read_text()
    assert [re.findall(r"\d+", line)[0] for line in dropped.splitlines()] == [
        "6",
        "8",
        "10" if kind is JsonLines else "1",
    ]
    with kind(path) as file:  # a new run
        monitored(file, 2)
    assert steps_in(path) == [2]
    assert len(Path(f"{path}.dropped").read_text().splitlines()) == 3 + 4


def test_read_json_lines_rejects_invalid_line_but_ignores_cut_last_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1}\nhello\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"line 2 of .* is no report"):
        read_json_lines(path)
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_json_lines(path) == [{"step": 1}]


# The terminal ---------------------------------------------------------------------------------------------------------


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_prints_plain_lines_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    for screen in (io.StringIO(), Screen()):
        monkeypatch.setitem(sys.modules, "rich.live", None)
        with Terminal(screen) as terminal:
            terminal(report(10, loss=0.25))
        assert screen.getvalue() == "step 10: loss 0.2500, norm 20, clip 0.5, 10 tokens/s\n"


def test_terminal_shows_live_table_with_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    screen = Screen()
    with Terminal(screen, rows=4) as terminal:
        for step in range(1, 9):
            terminal(report(step, figures=FIGURES, loss=math.nan if step == 5 else float(step)))
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    final = plain[plain.rindex("step 8") :]
    assert re.search(r"loss +│ +8 │ ▁▂▃▄!▆▇█", final), final
    assert "grad_norm/total" in final
    assert "and 3 more" in final
    assert "update_ratio/up" not in final
    assert final.index("loss") < final.index("grad_norm/total") < final.index("clip_coef")


NAMES = {"grad_norm/[/]": 1.0, "grad_norm/[bold]up[/bold]": 2.0, "grad_norm/\x1b]0;title\x07\x1b[31m": 3.0}


def test_terminal_shows_markup_and_escape_codes_in_names_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    screen = Screen()
    with Terminal(screen) as terminal:
        terminal(report(1, figures=NAMES))
    found = screen.getvalue()
    for name in ("grad_norm/[/]", "grad_norm/[bold]up[/bold]", r"grad_norm/\x1b]0;title\x07\x1b[31m"):
        assert name in found
    assert "\x1b]0" not in found
    assert "\x07" not in found


def test_terminal_without_unicode_prints_plain_lines() -> None:
    class Ascii(Screen):
        encoding = "ascii"

    screen = Ascii()
    with Terminal(screen) as terminal:
        terminal(report(10, loss=0.25, unit="\x1b[31mtokens"))
    assert screen.getvalue() == "step 10: loss 0.2500, norm 20, clip 0.5, 10 \\x1b[31mtokens/s\n"


@pytest.mark.default_cases(99)  # all cases: unlike other tests of this file, these start no process
@pytest.mark.parametrize("kind", [JsonLines, CsvFile])
def test_output_files_escape_control_characters_in_names(kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with kind(path) as file:
        file(report(1, figures={**NAMES, "grad_norm/a\nb\udc80": 4.0}))
    lines = path.read_bytes().decode().splitlines()
    assert len(lines) == (1 if kind is JsonLines else 2)
    assert all(line.isprintable() for line in lines)
    assert r"\x1b]0;title" in lines[0].replace("\\\\", "\\")
    with kind(path) as file:  # a new CsvFile reads the header of the existing file
        file(report(2, figures=NAMES))
    assert len(path.read_text().splitlines()) == len(lines) + 1


def test_sparkline_of_constant_values_depends_on_value() -> None:
    assert [drawn(deque([value] * 2)) for value in (0.0, 1.0, math.inf)] == ["▁▁", "██", "!!"]


# Services -------------------------------------------------------------------------------------------------------------


def test_weights_and_biases_writer_makes_documented_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake package records the calls, which must be those in the package's documentation. The test needs no network."""
    calls: list[Any] = []

    class Run:
        def log(self, data: dict[str, float], step: int) -> None:
            calls.append((data, step))

        def finish(self, exit_code: int) -> None:
            calls.append(exit_code)

    def init(**options: Any) -> Run:
        calls.append(options)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with WeightsAndBiases(project="p", mode="offline") as board:
        assert calls == [], "a writer without reports must not start a run"
        board(report(10, figures=FIGURES))
        board(report(20))
        board.close()
    assert calls == [
        {"project": "p", "mode": "offline"},
        (report(10, figures=FIGURES).scalars(), 10),
        (report(20).scalars(), 20),
        0,
    ]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"needs the package wandb .*pip install 'meshstep\[wandb\]'"):
        WeightsAndBiases()


def test_weights_and_biases_offline_writes_run(tmp_path: Path) -> None:
    """The test runs only if the package is installed."""
    pytest.importorskip("wandb")
    with WeightsAndBiases(project="p", mode="offline", dir=str(tmp_path)) as board:
        board(report(10, figures=FIGURES))
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


# The HTML page --------------------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "circle", "line", "polyline", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("circle", "line", "polyline", "path"):
            assert self.open.pop() == tag


def test_report_command_writes_self_contained_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    with JsonLines(path) as lines:
        for step in range(10, 60, 10):
            lines(report(step, loss=math.nan if step == 30 else 1 / step, figures=FIGURES if step == 20 else {}))
    assert main(["report", str(path)]) == 0
    assert "5 reports, to step 50" in capsys.readouterr().out
    text = (tmp_path / "run.html").read_text()
    elements = Elements()
    elements.feed(text)
    assert elements.open == []
    assert not [attrs for _, attrs in elements.found if {"src", "href", "xlink:href"} & attrs.keys()]
    assert "http" not in text
    assert "@import" not in text
    charts = [json.loads(attrs["data-points"] or "") for tag, attrs in elements.found if tag == "svg"]
    by_name = dict(zip(re.findall(r"<h2>(.*?)</h2>", text), charts, strict=True))
    assert by_name["loss"]["series"] == [["loss", [[10, 0.1], [20, 0.05], [30, "nan"], [40, 0.025], [50, 0.02]]]]
    assert [label for label, _ in by_name["update ratio"]["series"]] == ["total", "up"]
    assert "<title>loss, step 20: 0.05</title>" in text, "values must be readable without scripts"
    assert text.count('class="broken"') == 1


def test_report_command_explains_invalid_input_and_prints_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    cases = (
        (tmp_path / "none.jsonl", "No such file"),
        (empty, "contains no report yet"),
        (Path(__file__), "is no report"),
    )
    for path, said in cases:
        assert main(["report", str(path), "-o", str(tmp_path / "out.html")]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out.html").exists()
    done = forked_python.run("-m", "meshstep.optim", "report", "--help")
    assert done.returncode == 0
    assert "RUN.jsonl" in done.stdout


@pytest.mark.long
def test_report_command_writes_non_ascii_title_in_ascii_locale(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with JsonLines(path) as lines:
        lines(report(10))
    ascii_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    titles = {
        "Lauf für Änne".encode(): "<h1>Lauf für Änne</h1>",
        b"\xff\x1b[31m": "<h1>\ufffd\\x1b[31m</h1>",
    }
    program = """
import sys
from meshstep.optim.__main__ import main
_, run, *titles = sys.argv
for title in titles:
    assert main(["report", run, "--title", title, "-o", f"{run}.{titles.index(title)}"]) == 0
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(path), *titles], capture_output=True, env={**os.environ, **ascii_locale}
    )
    assert done.returncode == 0, done.stderr
    for index, shown in enumerate(titles.values()):
        assert shown in (tmp_path / f"run.jsonl.{index}").read_text(encoding="utf-8")


@pytest.mark.default_cases(99)  # all cases: unlike other tests of this file, these start no process
@pytest.mark.parametrize("line", ['{"step": 1, "x": [1]}', '{"step": 1, "x": "a"}', '{"step": 1' + "0" * 400 + "}"])
def test_report_command_rejects_line_with_invalid_value(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run\x1b[31m.jsonl"
    path.write_text(line + "\n")
    assert main(["report", str(path)]) == 2
    error = capsys.readouterr().err
    assert r"line 1 of " in error
    assert r"run\x1b[31m.jsonl is no report" in error


def test_html_report_escapes_titles_and_names() -> None:
    text = page("<b>&", [{"step": 1, "x/<script>": 1.0}])
    assert "<b>&</" not in text
    assert "x/<script>" not in text
    assert "&lt;script&gt;" in text
    text = page("a\x1b[31m", [{"step": 1, "x/\x1b]0;\x07": 1.0}])
    assert "\x1b" not in text
    assert "\x07" not in text


def test_html_report_charts_have_fitting_scales_and_short_numbers() -> None:
    assert Scale.of([0.0, 10.0], 0, 100).ticks(5) == [0, 2, 4, 6, 8, 10]
    assert Scale.of([1e-3, 50.0], 0, 100).ticks(5) == pytest.approx([1e-3, 1e-2, 1e-1, 1, 10])
    assert Scale.of([0.3, 10.0], 0, 100).log
    for alike, low, high in ((2.0, 0.0, 2.5), (-2.0, -2.5, 0.0), (0.0, 0.0, 1.0)):
        assert Scale.of([alike, alike], 0, 100) == Scale(low, high, 0, 100), "constant values are scaled from zero"
    assert Scale.of([], 0, 100).ticks(5)
    assert chart("one", {"one": [(3, 1.0)]}).count('class="dot"') == 1
    assert [number(value) for value in (0.0, 1234.5678, 12345678.0, 1e-5, math.inf)] == [
        "0",
        "1235",
        "1.23e7",
        "1e-5",
        "inf",
    ]


def test_thinned_curve_of_html_report_keeps_spikes_and_nan() -> None:
    points = [(float(step), 1.0) for step in range(10_000)]
    points[4321] = (4321.0, 99.0)
    points[8765] = (8765.0, math.nan)
    found = thinned(points)
    assert len(found) <= 602
    assert (4321.0, 99.0) in found
    assert any(math.isnan(value) for _, value in found)


# Flops ----------------------------------------------------------------------------------------------------------------


def test_utilization_is_needed_flops_divided_by_peak_flops() -> None:
    registry = ProcessGroupRegistry(Topology())
    assert Flops(per_unit=6e9, peak=1e15).utilization(50_000, registry) == pytest.approx(0.3)
    model = nn.Linear(9, 10)
    declare(model, {"*": P()})
    optimizer = ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), registry)
    assert Flops.of_parameters(optimizer, 1e12) == Flops(600.0, 1e12)
    assert Flops.of_parameters(optimizer, 1e12, active=0.5).per_unit == 300
    with pytest.raises(ValueError, match=r"active=0\): give a finite number > 0"):
        Flops.of_parameters(optimizer, 1e12, active=0)
    reports: list[Report] = []
    monitor = Monitor(registry, reports.append, every=1, flops=Flops(1e3, 1e6))
    optimizer.backward(model(torch.ones(9)).sum())
    monitor(optimizer.step(), 1.0)
    assert reports[0].utilization == pytest.approx(reports[0].per_second * 1e-3)
    assert "mfu" in str(reports[0])
    with pytest.raises(ValueError, match=r"Flops\(peak=0\): give a finite number > 0"):
        Flops(1.0, 0)
