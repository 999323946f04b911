"""How the page of a run looks, light and dark, and the script that shows all curves' values at the pointer."""

from __future__ import annotations

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
  // Of a curve that has no point at the step, the one before.
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
