"""Decode at length in a report: its numbers, and files that are something else."""

import json

import pytest

from common.errors import UserError
from common.report.report_bench import table

NUMBERS = {
    "batch": 8, "context": 16384, "selected": 224, "page": 16, "speedup": 4.0, "byte_bound": 4.27,
    "dense_paged_ms": 320.0, "dense_paged_gb_per_s": 3.3, "dense_contiguous_ms": 250.0,
    "dense_contiguous_gb_per_s": 4.2, "sparse_ms": 80.0, "sparse_gb_per_s": 3.0,
    "step_dense_ms": 700.0, "step_sparse_ms": 200.0,
}  # fmt: skip


def test_what_the_table_says(tmp_path):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(NUMBERS))
    html = table(path)
    assert "8 sequences of 16,384 tokens, 224 pages of 16 read" in html
    assert "4.0x faster" in html and "the bytes allow 4.3x" in html
    assert "a whole decode step of two layers 3.5x" in html  # 700 / 200
    assert ">320<" in html and ">80<" in html


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sparse_ms": "fast"}, "no sparse_ms"),
        ({"speedup": None}, "speedup=None"),
        ({"step_sparse_ms": 0}, "step_sparse_ms=0"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path, change, words):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(NUMBERS | change))
    with pytest.raises(UserError, match=words):
        table(path)


@pytest.mark.parametrize("text", ["", "[" * 100_000, "[1, 2]", "{}"])
def test_another_file_is_one_line(tmp_path, text):
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"bench\.json: no"):
        table(path)
