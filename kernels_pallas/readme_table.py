"""A generated table in a README, between two comments that a rendered page does not show.

<!-- tpu-compile: begin -->
what a command writes; everything between the comments is replaced
<!-- tpu-compile: end -->
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def replace_table(file: Path, name: str, text: str) -> None:
    """Write text between the comments `name: begin` and `name: end` of a Markdown file."""
    before, after = split_at_table(file, name)
    file.write_text(f"{before}\n\n{text.strip()}\n\n{after}")


def split_at_table(file: Path, name: str) -> tuple[str, str]:
    """The file up to and with the first comment, and from the second comment on.

    Raises ValueError if the file lacks a comment, has one twice, or ends before it begins.
    """
    begin, end = (f"<!-- {name}: {where} -->" for where in ("begin", "end"))
    page = file.read_text()
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(end) < page.index(begin):
        raise ValueError(f"{file}: expected one line {begin} and after it one line {end}; add them")
    return page[: page.index(begin)] + begin, page[page.index(end) :]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The lines of a Markdown table."""
    assert all(len(row) == len(header) for row in rows), (header, rows)
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])
