"""`sparrow bench decode` on a tiny shape: all numbers, memory and compilations."""

import pytest

from common.config import ModelConfig
from common.errors import UserError
from sparrow_jax import bench

TINY = ModelConfig(
    vocab_size=64, num_layers=2, hidden_size=32, intermediate_size=32, num_heads=4, num_kv_heads=2,
    head_dim=16,
)  # fmt: skip
# The contiguous path reads 4,096 tokens at a time; the cache is filled 512 pages at a time.
SHAPE = bench.Shape(batch=2, context=8192, page=16, selected=16, repeats=2)


@pytest.fixture(scope="module")
def result(quick_compilation):
    """(numbers, printed lines); the copy, 256 MiB, is not measured."""
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "copy_bandwidth", lambda: 10.0)
        numbers = bench.run(TINY, SHAPE, lines.append)
    return numbers, lines


def test_every_number_of_the_issue_is_measured(result):
    numbers, _ = result
    paths = ("dense_paged", "dense_contiguous", "sparse")
    expected = {f"{p}_{unit}" for p in paths for unit in ("ms", "gb_per_s")}
    expected |= {f"step_{kind}_{what}" for kind in ("dense", "sparse") for what in ("ms", "memory")}
    expected |= {
        "copy_gb_per_s", "device", "speedup", "select_share", "weights_and_cache_bytes",
        "peak_rss", "compilations",
    }  # fmt: skip
    assert expected <= numbers.keys()
    assert all(numbers[k] > 0 for k in expected - {"device"})
    for name, path in (("speedup", "paged"), ("speedup_over_contiguous", "contiguous")):
        ratio = numbers[f"dense_{path}_ms"] / numbers["sparse_ms"]
        assert numbers[name] == pytest.approx(ratio)


def test_one_compilation_each_and_memory_within_the_limit(result):
    numbers, _ = result
    assert numbers["compilations"] == 2  # dense and sparse, whatever lengths and budgets
    # keys and values: 1,025 pages x 16 tokens x 2 layers x 2 heads x 16 x 2 x 4 B = 8,396,800 B
    # landmarks: 1,025 x 2 x 2 x 16 x 4 B = 262,400 B; weights: 82 kB
    assert 8_659_200 < numbers["weights_and_cache_bytes"] < 8_760_000
    for kind in ("dense", "sparse"):
        assert 1 <= numbers[f"step_{kind}_memory"] < 1.2


def test_bandwidth_counts_the_bytes_that_have_to_be_read(result):
    numbers, _ = result
    # dense: 2 rows x 8,192 tokens x 2 heads x 16 x (K + V) x 4 B = 4,194,304 B
    seconds = numbers["dense_paged_ms"] / 1e3
    assert numbers["dense_paged_gb_per_s"] * 1e9 * seconds == pytest.approx(4_194_304)
    # sparse: 2 x 256 tokens x 256 B = 131,072 B and a landmark of 128 B for each of 1,024 pages
    # of both heads: a 32nd of the whole cache, 131,072 B
    seconds = numbers["sparse_ms"] / 1e3
    assert numbers["sparse_gb_per_s"] * 1e9 * seconds == pytest.approx(262_144)


def test_lines_for_people(result):
    numbers, lines = result
    text = "\n".join(lines)
    assert "copy bandwidth" in text and "10.0 GB/s" in text
    assert f"sparse is {numbers['speedup']:.1f}x faster" in text
    assert "2 compilations for 6 steps" in text  # 2 kinds x (2 repeats + 1)


@pytest.mark.parametrize(("context", "pages"), [(8192, 128), (16384, 224), (32768, 256)])
def test_pages_of_the_published_schedule_at_a_context(monkeypatch, context, pages):
    # qwen3-1.7b-0.86, bins of 2,000 tokens: k = 125 in bin 4, 221 in bin 8, 253 in bin 16; plus 3
    monkeypatch.setattr(bench, "run", lambda geometry, shape, say: shape)
    shape = bench.main(context)
    assert (shape.context, shape.selected) == (context, pages)


@pytest.mark.parametrize("context", [0, -4096, 5000, 10**9])
def test_a_context_that_the_paths_cannot_share_is_refused(context):
    with pytest.raises(UserError, match=r"--context=.* expected a multiple of 4096"):
        bench.main(context)
