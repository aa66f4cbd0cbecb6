"""Decode attention at length in a report: the numbers of `sparrow bench decode --out=FILE`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.report import html_page
from common.report.plots import is_number

_PATHS = {
    "dense_paged": "dense, the engine's path",
    "dense_contiguous": "dense, contiguous cache",
    "sparse": "sparse, with its selection",
}
_NUMBERS = (
    *("batch", "context", "selected", "page"),
    *("speedup", "byte_bound", "step_dense_ms", "step_sparse_ms"),
)


def table(path: Path) -> str:
    """What `sparrow bench decode` measured, as HTML; UserError if the file is something else."""
    data = _read(path)
    rows = []
    for key, words in _PATHS.items():
        values = [data.get(f"{key}_{unit}") for unit in ("ms", "gb_per_s")]
        if not all(is_number(value) for value in values):
            raise UserError(
                f"{path}: no {key}_ms; expected what `sparrow bench decode --out={path}` writes"
            )
        cells = [f'<td class="number">{value:.3g}</td>' for value in values]
        rows.append([f"<td>{words}</td>", *cells])
    numbers: dict[str, float] = {}
    for key in _NUMBERS:
        value = data.get(key)
        if value is None or not is_number(value) or value <= 0:
            raise UserError(f"{path}: {key}={value!r}: expected a positive number; measure anew")
        numbers[key] = value
    whole = numbers["step_dense_ms"] / numbers["step_sparse_ms"]
    words = (
        f"{numbers['batch']:.0f} sequences of {numbers['context']:,.0f} tokens, "
        f"{numbers['selected']:.0f} pages of {numbers['page']:.0f} read: sparse attention is "
        f"{numbers['speedup']:.1f}x faster than the engine's dense attention (the bytes allow "
        f"{numbers['byte_bound']:.1f}x), a whole decode step of two layers {whole:.1f}x. At the "
        "lengths of the runs above there is little to gain."
    )
    head = ("attention of one layer", "ms", "GB/s")
    return f"<h3>Decode at length</h3><p>{html_page.text(words)}</p>{html_page.table(head, rows)}"


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: no JSON ({str(error)[:80]}); measure anew") from None
    return data if isinstance(data, dict) else {}
