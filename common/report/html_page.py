"""The frame of an HTML page of ours: no scripts, nothing fetched, light and dark mode, for phones
and print.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

_CSS = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fffffe;--ink:#24292f;--muted:#5b636b;
--grid:#dfe3e8;--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#b8609a;--c4:#b07d00;--c5:#3a8fc4;
--c6:#7a6a53}
@media (prefers-color-scheme:dark){:root{--page:#0f1216;--card:#181c22;--ink:#e6e9ed;
--muted:#a3abb5;--grid:#2e353e;--c0:#4ea8de;--c1:#ff8c42;--c2:#2fcf9f;--c3:#e39cc6;--c4:#e0b341;
--c5:#8fd0f5;--c6:#c2b093}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,sans-serif;
overflow-wrap:anywhere}
main{max-width:1240px;margin:0 auto;padding:20px 14px 48px}
h1{font-size:1.5rem;margin:.2em 0 .1em}h2{font-size:1.15rem;margin:1.8em 0 .6em}
p{margin:.5em 0}.muted{color:var(--muted);font-size:.9rem}
.verdict{background:var(--card);border-left:4px solid var(--c0);padding:10px 14px;border-radius:6px}
.tiles,.figures{display:grid;gap:12px;grid-template-columns:repeat(auto-fill,
minmax(min(100%,var(--least)),1fr))}
.tiles{--least:300px;margin-top:14px}.figures{--least:340px;align-items:start}
.tile,figure{background:var(--card);border:1px solid var(--grid);border-radius:8px;margin:0}
.tile{padding:8px 12px}.tile h3{font-size:.85rem;font-weight:500;color:var(--muted);margin:0 0 4px}
.tile div{display:flex;justify-content:space-between;gap:10px}
.tile .who{color:var(--muted);font-size:.85rem;white-space:nowrap}
.tile b{font-size:1.05rem;text-align:right}
.tile small{font-weight:400;color:var(--muted);white-space:nowrap}
@media (max-width:480px){main{padding:12px 8px 32px}}
figure{padding:6px 4px;min-width:0}figure svg{display:block;width:100%;height:auto}
figcaption{color:var(--muted);font-size:.85rem;padding:2px 8px}
.key span{white-space:nowrap;margin-right:14px}.dot{display:inline-block;width:.75em;height:.75em;
border-radius:2px;margin-right:.4em}
.table{overflow-x:auto;background:var(--card);border:1px solid var(--grid);border-radius:8px;
margin:.5em 0}
table{border-collapse:collapse;font-size:.88rem;width:100%}
th,td{padding:4px 10px;text-align:left;border-top:1px solid var(--grid);white-space:nowrap}
td.long{white-space:normal;min-width:11em}
tr:first-child th{border-top:0}th{color:var(--muted);font-weight:600}
td.number{text-align:right;font-variant-numeric:tabular-nums}.low{color:var(--c1);font-weight:600}
details>summary{cursor:pointer;padding:4px 0}code{font-size:.9em}
@media print{body{background:#fff}.figures{grid-template-columns:1fr 1fr}
figure,.tile,tr{break-inside:avoid}.table{overflow:visible}td,th{white-space:normal}}
"""


def page(title: str, parts: Sequence[str]) -> str:
    """A whole page; parts are HTML, empty ones are left out."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{text(title)}</title><style>{_CSS}</style></head>\n<body><main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main></body></html>\n"
    )


def text(value: Any) -> str:
    """Returns a value as escaped text of a page."""
    return html.escape(str(value))


def figures(drawn: Sequence[tuple[str | None, str]]) -> str:
    """Cards of (SVG or None, caption); those without a figure are left out."""
    cards = [
        f"<figure>{svg}<figcaption>{text(caption)}</figcaption></figure>"
        for svg, caption in drawn
        if svg
    ]
    if not cards:
        return '<p class="muted">Nothing measured yet.</p>'
    return f'<div class="figures">{"".join(cards)}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in a container that scrolls by itself; cells are HTML already."""
    header = "".join(f"<th>{text(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(row) + "</tr>" for row in rows)
    return f'<div class="table"><table><tr>{header}</tr>{body}</table></div>'
