"""The command ``report``, which writes the curves of a training run as one HTML page.

The page needs no network and no other files. The curves are visible without scripts.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10
from pathlib import Path

from ...parallel.mesh.text import printable
from .telemetry import TOTAL
from .writers import read_json_lines

# Style sheet, and the script that shows the values of all curves at the mouse pointer ---------------------------------

_LIGHT = ("#2f6ad0", "#c8641b", "#2e8b50", "#c23f48", "#7d55bd", "#8a6a45", "#bd4f93", "#20868e")
_DARK = ("#7aa9f5", "#f0a263", "#67c58a", "#f2808a", "#b595ec", "#c3a17f", "#ef90c6", "#62c9d0")


def _colors(colors: tuple[str, ...]) -> str:
    return "".join(f"--c{index}:{color};" for index, color in enumerate(colors))


_CURVES = "".join(f".c{index}{{--c:var(--c{index})}}" for index in range(len(_LIGHT)))

STYLE = f"""
:root{{color-scheme:light dark;--ink:#1d2129;--soft:#667085;--line:#e4e7ec;--paper:#f6f7f9;--card:#fff;{_colors(_LIGHT)}}}
@media (prefers-color-scheme:dark){{
:root{{--ink:#e6e8ec;--soft:#98a1b0;--line:#2e3440;--paper:#14171c;--card:#1c2027;{_colors(_DARK)}}}}}
{_CURVES}
*{{box-sizing:border-box}}
body{{margin:0 auto;padding:28px 24px 60px;max-width:1240px;background:var(--paper);color:var(--ink);
font:14px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}}
h1{{font-size:22px;margin:0}} header p{{margin:2px 0 18px;color:var(--soft)}}
.tiles{{display:flex;flex-wrap:wrap;gap:10px;margin:0 0 18px}}
.tiles div{{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:8px 14px;min-width:112px}}
.tiles dt{{font-size:12px;color:var(--soft)}} .tiles dd{{margin:0;font-size:19px;font-variant-numeric:tabular-nums}}
main{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,440px),1fr));gap:14px}}
figure{{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px}}
figcaption{{display:flex;align-items:baseline;gap:10px;margin-bottom:4px}}
figcaption h2{{font-size:14px;margin:0;white-space:nowrap}} figcaption p{{margin:0;font-size:12px;color:var(--soft)}}
svg.chart{{display:block;width:100%;height:auto;overflow:visible;touch-action:pan-y}}
.grid{{stroke:var(--line)}} .tick{{font-size:11px;fill:var(--soft);font-variant-numeric:tabular-nums}}
polyline{{fill:none;stroke:var(--c);stroke-width:1.4;stroke-linejoin:round}} .main polyline{{stroke-width:2.2}}
.dot{{fill:var(--c)}} .point{{fill:var(--c);opacity:0}} .point:hover{{opacity:.9}} .broken{{fill:#d92d20}}
.cursor{{stroke:var(--soft);stroke-dasharray:3 3;visibility:hidden;pointer-events:none}}
.legend{{list-style:none;display:flex;flex-wrap:wrap;gap:2px 14px;margin:6px 0 0;padding:0;font-size:12px;
color:var(--soft)}}
.legend li::before{{content:"";display:inline-block;width:14px;height:3px;border-radius:2px;margin:0 6px 3px 0;
background:var(--c)}}
details{{margin-top:18px}} details.more{{margin-top:6px;font-size:12px;color:var(--soft)}} summary{{cursor:pointer}}
table{{border-collapse:collapse;margin-top:10px;font-variant-numeric:tabular-nums}}
td,th{{padding:3px 18px 3px 0;text-align:left;border-bottom:1px solid var(--line)}} td+td,th+th{{text-align:right}}
.bad{{color:#d92d20}}
#tip{{position:fixed;pointer-events:none;background:var(--card);color:var(--ink);border:1px solid var(--line);
border-radius:6px;padding:6px 10px;font-size:12px;box-shadow:0 4px 14px #0003;font-variant-numeric:tabular-nums;z-index:2}}
#tip b{{display:block}} #tip i{{display:inline-block;width:10px;height:3px;margin-right:6px;vertical-align:middle}}
@media print{{figure{{break-inside:avoid}} details{{display:none}}}}
"""

SCRIPT = """
"use strict";
const tip = document.getElementById("tip");
const shown = v => typeof v === "string" ? v : v === 0 ? "0"
  : Math.abs(v) >= 1e-3 && Math.abs(v) < 1e7 ? String(+v.toPrecision(5)) : v.toExponential(2);
for (const svg of document.querySelectorAll("svg.chart")) {
  const data = JSON.parse(svg.dataset.points), cursor = svg.querySelector(".cursor");
  const steps = [...new Set(data.series.flatMap(([, points]) => points.map(p => p[0])))].sort((a, b) => a - b);
  // a curve without a point at this step shows its previous point
  const before = (points, step) => points.filter(point => point[0] <= step).at(-1)?.[1];
  for (const title of svg.querySelectorAll("title")) title.remove();
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const wanted = data.low + (x - data.left) / (data.right - data.left) * (data.high - data.low);
    const step = steps.reduce((a, b) => Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a);
    const at = data.high > data.low ? (step - data.low) / (data.high - data.low) : 0;
    const place = data.left + at * (data.right - data.left);
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    cursor.style.visibility = "visible";
    const all = data.series.map(([label, points], i) => [label, before(points, step), i]);
    const rows = all.filter(row => row[1] !== undefined);
    rows.sort((a, b) => (a[2] > 0) - (b[2] > 0) || Number(b[1]) - Number(a[1]));
    tip.replaceChildren(Object.assign(document.createElement("b"), {textContent: "step " + step.toLocaleString("en")}));
    for (const [label, value, i] of rows.slice(0, 14)) {
      const row = document.createElement("div"), mark = document.createElement("i");
      mark.style.background = `var(--c${i % 8})`;
      row.append(mark, data.series.length > 1 ? `${label}  ${shown(value)}` : shown(value));
      tip.append(row);
    }
    if (rows.length > 14) tip.append(`and ${rows.length - 14} more`);
    tip.hidden = false;
    const room = innerWidth - event.clientX > tip.offsetWidth + 24;
    tip.style.left = (room ? event.clientX + 16 : event.clientX - tip.offsetWidth - 16) + "px";
    tip.style.top = Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 8) + "px";
  });
  svg.addEventListener("pointerleave", () => {
    tip.hidden = true;
    cursor.style.visibility = "hidden";
  });
}
"""


# Charts as inline SVG -------------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 560, 230
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 10, 34
COLORS = 8
MOST = 600  # a curve with more points is thinned to about this number
Point = tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """Map from the values ``low`` to ``high`` to the chart's pixels ``first`` to ``last``, linear or logarithmic."""

    low: float
    high: float
    first: float
    last: float
    log: bool = False

    @classmethod
    def of(cls, values: Sequence[float], first: float, last: float, may_be_log: bool = True) -> Scale:
        """Return a scale for the range of the finite values."""
        finite = [value for value in values if isfinite(value)]
        low, high = min(finite, default=0.0), max(finite, default=1.0)
        if may_be_log and low > 0 and high / low > 30:
            return cls(low, high, first, last, log=True)
        if low == high:
            low, high = min(0.0, 1.25 * low), max(0.0, 1.25 * low) or float(low == 0)
        return cls(low, high, first, last)

    def __call__(self, value: float) -> float:
        if self.log:
            part = log10(value / self.low) / log10(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return round(self.first + part * (self.last - self.first), 1)

    def ticks(self, most: int) -> list[float]:
        """Return about ``most`` round numbers between ``low`` and ``high``, at which to draw grid lines."""
        if self.log:
            first, last = floor(log10(self.low)), ceil(log10(self.high))
            decades = [10.0**k for k in range(first, last + 1, max(1, ceil((last - first) / most)))]
            fine = [m * 10.0**k for k in range(first, last + 1) for m in (1, 2, 5)]
            inside = [value for value in decades if self.low <= value <= self.high]
            return inside if len(inside) > 1 else [value for value in fine if self.low <= value <= self.high]
        rough = (self.high - self.low) / most
        unit = 10.0 ** floor(log10(rough))
        width = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= rough * (1 - 1e-9))
        first = ceil(self.low / width - 1e-9)
        return [k * width for k in range(first, floor(self.high / width + 1e-9) + 1)]


def chart(name: str, series: Mapping[str, Sequence[Point]]) -> str:
    """Return an SVG element with curves. Non-finite values interrupt a curve, and are drawn as marks at the upper edge."""
    steps = [step for points in series.values() for step, _ in points]
    x = Scale.of(steps, LEFT, WIDTH - RIGHT, may_be_log=False)
    y = Scale.of([value for points in series.values() for _, value in points], HEIGHT - BOTTOM, TOP)
    parts = [_grid(x, y)]
    drawn = {label: thinned(points) for label, points in series.items()}
    # the first curve, which is the full model's if there is one, is drawn last, above the other curves
    for index, (label, points) in reversed([*enumerate(drawn.items())]):
        parts.append(_curve(label, points, x, y, f"c{index % COLORS}" + " main" * (label == TOTAL or len(drawn) == 1)))
    known = [
        [label, [[step, value if isfinite(value) else str(value)] for step, value in points]]
        for label, points in drawn.items()
    ]
    data = escape(json.dumps({"left": x.first, "right": x.last, "low": x.low, "high": x.high, "series": known}))
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)}" data-points="{data}">'
        f'{"".join(parts)}<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
    )


def _grid(x: Scale, y: Scale) -> str:
    rows = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(v)}" y2="{y(v)}"/>'
        f'<text class="tick" x="{LEFT - 7}" y="{y(v) + 3.5}" text-anchor="end">{number(v)}</text>'
        for v in y.ticks(5)
    ]
    columns = [
        f'<text class="tick" x="{x(v)}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{v:,.0f}</text>'
        for v in x.ticks(6)
        if v == round(v)
    ]
    texts = [f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 1}" text-anchor="end">step</text>']
    if y.log:
        texts.append(f'<text class="tick" x="{LEFT + 6}" y="{TOP + 8}">logarithmic</text>')
    return "".join(rows + columns + texts)


def _curve(label: str, points: Sequence[Point], x: Scale, y: Scale, kind: str) -> str:
    runs: list[list[Point]] = [[]]
    marks, titles = [], []
    for step, value in points:
        title = f"<title>{escape(label)}, step {step:,.0f}: {number(value)}</title>"
        if isfinite(value):
            runs[-1].append((x(step), y(value)))
            titles.append(f'<circle class="point" cx="{x(step)}" cy="{y(value)}" r="5">{title}</circle>')
        else:
            runs.append([])
            marks.append(f'<path class="broken" d="M{x(step) - 4} {TOP}h8l-4 7z">{title}</path>')
    lines = [f'<polyline points="{" ".join(f"{a},{b}" for a, b in run)}"/>' for run in runs if len(run) > 1]
    dots = [f'<circle class="dot" cx="{run[0][0]}" cy="{run[0][1]}" r="2.5"/>' for run in runs if len(run) == 1]
    return f'<g class="{kind}">{"".join(lines + dots + titles)}</g>{"".join(marks)}'


def thinned(points: Sequence[Point], most: int = MOST) -> list[Point]:
    """Return about ``most`` points: each interval's smallest and largest, to keep spikes, and all non-finite values."""
    if len(points) <= most:
        return [*points]
    kept = set[int]()
    length = ceil(2 * len(points) / most)
    for start in range(0, len(points), length):
        stretch = range(start, min(start + length, len(points)))
        finite = [index for index in stretch if isfinite(points[index][1])]
        kept |= {index for index in stretch if index not in finite}
        if finite:
            kept |= {min(finite, key=lambda i: points[i][1]), max(finite, key=lambda i: points[i][1])}
    return [points[index] for index in sorted(kept)]


def number(value: float) -> str:
    """Return a number as a short text, rounded to three to five significant digits; integers below 10 million in full."""
    if not isfinite(value) or value == 0:
        return f"{value:g}"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    if 1e4 <= abs(value) < 1e7:
        return f"{value:,.0f}" if value == round(value) else f"{value:,.5g}"
    return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e")


# Page -----------------------------------------------------------------------------------------------------------------

WORDS = {
    "loss": "mean over the steps since the previous report",
    "grad_norm": "norm of the unscaled gradient, before clipping",
    "clip_coef": "factor on the last step's gradients",
    "clipped_fraction": "fraction of clipped steps since the previous report",
    "skipped_fraction": "fraction of skipped steps since the previous report",
    "skipped_steps": "number of skipped steps so far",
    "update_ratio": "norm of the update, divided by the norm of the weights",
    "update_norm": "norm of the update",
    "param_norm": "norm of the weights before the step",
    "spectral_norm": "largest singular value, by power iteration",
    "grad_zeros": "fraction of elements whose gradient is 0",
    "grad_underflow": "fraction of elements below 2⁻¹⁴ in the scaled gradient, including zeros",
    "noise_scale": "S / |G|²: an estimate of the largest useful batch size",
    "noise_signal": "|G|², estimated",
    "noise_trace": "S, the trace of the covariance of one sample's gradient",
    "flops_utilization": "fraction of the devices' peak",
    "loss_scale": "loss scale of the last step",
}
TILES = ("loss", "grad_norm", "update_ratio", "clipped_fraction", "skipped_steps", "noise_scale", "flops_utilization")
ASIDE = ("step", "measured_step")


def page(title: str, reports: Sequence[Mapping[str, float]]) -> str:
    """Return the HTML page with the curves of ``reports``.

    Numbers whose names are equal up to the first slash share a chart. The full model's curve, if there is one, is the
    first curve of its chart.
    """
    kinds: dict[str, dict[str, list[Point]]] = {}
    for report in reports:
        for name, value in report.items():
            if name not in ASIDE:
                kind, _, label = printable(name).partition("/")
                kinds.setdefault(kind, {}).setdefault(label or kind, []).append((report["step"], value))
    title, order = printable(title), [*WORDS]
    ordered = sorted(kinds, key=lambda kind: order.index(kind) if kind in order else len(order))
    first, last = reports[0]["step"], reports[-1]["step"]
    body = "".join(_figure(kind, _total_first(kinds[kind])) for kind in ordered)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{STYLE}</style></head>
<body><header><h1>{escape(title)}</h1>
<p>steps {first:,.0f} to {last:,.0f}, {len(reports):,} reports</p></header>
<dl class="tiles">{_tiles(kinds)}</dl>
<main>{body}</main>
<details><summary>All figures of the last report that had them</summary>{_table(kinds)}</details>
<div id="tip" hidden></div>
<script>{SCRIPT}</script></body></html>
"""


def _figure(kind: str, series: Mapping[str, Sequence[Point]]) -> str:
    description = f"<p>{escape(WORDS[kind])}</p>" if kind in WORDS else ""
    return (
        f"<figure><figcaption><h2>{escape(kind.replace('_', ' '))}</h2>{description}</figcaption>"
        f"{chart(kind, series)}{_legend(series) if len(series) > 1 else ''}</figure>"
    )


def _legend(series: Mapping[str, Sequence[Point]]) -> str:
    items = "".join(f'<li class="c{index % COLORS}">{escape(label)}</li>' for index, label in enumerate(series))
    if len(series) <= COLORS:
        return f'<ul class="legend">{items}</ul>'
    return f'<details class="more"><summary>{len(series)} curves</summary><ul class="legend">{items}</ul></details>'


def _total_first(series: Mapping[str, list[Point]]) -> dict[str, list[Point]]:
    return dict(sorted(series.items(), key=lambda item: item[0] != TOTAL))


def _tiles(kinds: Mapping[str, Mapping[str, Sequence[Point]]]) -> str:
    """Return HTML with the last value of each number in `TILES`, and of each number named ``..._per_second``."""
    shown = {kind: series.get(TOTAL, next(iter(series.values()))) for kind, series in kinds.items()}
    alone = [(kind, shown[kind][-1][1]) for kind in TILES if kind in shown]
    alone += [(kind, points[-1][1]) for kind, points in shown.items() if kind.endswith("_per_second")]
    return "".join(
        f"<div><dt>{escape(kind.replace('_', ' '))}</dt><dd>{number(value)}</dd></div>" for kind, value in alone
    )


def _table(kinds: Mapping[str, Mapping[str, Sequence[Point]]]) -> str:
    rows = [
        f"<tr><td>{escape(kind if label in (kind, '') else f'{kind}/{label}')}</td><td>{points[-1][0]:,.0f}</td>"
        f"<td{'' if isfinite(points[-1][1]) else ' class=bad'}>{number(points[-1][1])}</td></tr>"
        for kind, series in kinds.items()
        for label, points in series.items()
    ]
    head = "<tr><th>figure</th><th>step</th><th>value</th></tr>"
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


# Command ``python -m meshstep.optim report run.jsonl [-o report.html]`` -----------------------------------------------


def add_report_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``report`` to the commands of a parser; ``options.run_command(options)`` then runs it."""
    report = commands.add_parser(
        "report",
        help="write the curves of a run as one HTML page",
        description="Write one HTML page with the curves of a run. It needs no network, and shows values at the pointer.",
        epilog="example: python -m meshstep.optim report run.jsonl -o report.html",
        allow_abbrev=False,
    )
    report.add_argument("run", metavar="RUN.jsonl", type=Path, help="a file written by JsonLines")
    report.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="default: the run's path with the suffix .html"
    )
    report.add_argument("--title", help="default: the file's name without its suffix")
    report.set_defaults(run_command=write_report)


def write_report(options: argparse.Namespace) -> int:
    """Write the HTML page of a run, and return the exit code 0."""
    output: Path = options.output or options.run.with_suffix(".html")
    # in an ASCII locale, Python decodes other bytes to lone surrogates, which can't be encoded to UTF-8
    title = os.fsencode(options.title or options.run.stem).decode("utf-8", "replace")
    reports = read_json_lines(options.run)
    if not reports:
        raise ValueError(f"{options.run} contains no report yet; run the training for some steps first")
    output.write_bytes(page(title, reports).encode())
    print(f"{printable(str(output))}: {len(reports)} reports, to step {reports[-1]['step']:,.0f}")
    return 0
