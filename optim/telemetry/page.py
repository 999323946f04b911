"""A run as one page of HTML that needs nothing else: no network, and for the curves no scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import isfinite

from ...parallel.mesh.text import printable
from .curves import COLORS, Point, chart, number
from .labels import TOTAL
from .page_parts import SCRIPT, STYLE

WORDS = {
    "loss": "mean over the steps since the report before",
    "grad_norm": "of the unscaled gradient, before clipping",
    "clip_coef": "what the last step's gradients were multiplied by",
    "clipped_fraction": "of the steps since the report before",
    "skipped_fraction": "of the steps since the report before",
    "skipped_steps": "in all",
    "update_ratio": "norm of what the step changed, by that of the weights",
    "update_norm": "of what the step changed",
    "param_norm": "of the weights before the step",
    "spectral_norm": "largest singular value, by power iteration",
    "grad_zeros": "fraction of elements whose gradient is 0",
    "grad_underflow": "fraction of elements below 2⁻¹⁴ as they lie, zeros among them",
    "noise_scale": "S / |G|², in samples: how large a batch is worth while",
    "noise_signal": "|G|², estimated",
    "noise_trace": "S, the trace of the covariance of one sample's gradient",
    "flops_utilization": "of the devices' peak",
    "loss_scale": "of the last step",
}
TILES = ("loss", "grad_norm", "update_ratio", "clipped_fraction", "skipped_steps", "noise_scale", "flops_utilization")
ASIDE = ("step", "measured_step")


def page(title: str, reports: Sequence[Mapping[str, float]]) -> str:
    """The document. Figures whose names are alike up to a slash share a chart, the whole model's curve first.

    Args:
        reports: What `read_json_lines` returned, >= 1.
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
    said = f"<p>{escape(WORDS[kind])}</p>" if kind in WORDS else ""
    return (
        f"<figure><figcaption><h2>{escape(kind.replace('_', ' '))}</h2>{said}</figcaption>"
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
    """The last numbers of the whole model: those that have no other label."""
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
