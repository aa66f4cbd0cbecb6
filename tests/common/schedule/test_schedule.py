"""Schedules: hand-worked budgets, files that are refused, published presets."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from common.schedule import schedule
from common.schedule.schedule import DENSE, Schedule, load, resolve


def make(budgets=(4, 8, DENSE), page_size=16, bin_tokens=64, **kw):
    return Schedule(page_size=page_size, bin_tokens=bin_tokens, budgets=budgets, **kw)


def test_budget_of_a_position():
    """Bins of 64: 0..63 -> 4, 64..127 -> 8, from 128 on -> dense; the last bin holds beyond."""
    s = make()
    assert [s.budget(t) for t in (0, 63, 64, 127, 128, 10**9)] == [4, 4, 8, 8, DENSE, DENSE]
    positions = np.array([[0, 63], [64, 5000]])
    assert s.budgets_at(positions).tolist() == [[4, 4], [8, DENSE]]
    assert s.budgets_at(positions).dtype == np.int32
    assert not s.is_dense
    assert make((DENSE, DENSE)).is_dense


@given(
    budgets=st.lists(st.integers(0, DENSE), min_size=1, max_size=6),
    positions=st.lists(st.integers(0, 3000), min_size=1, max_size=20),
    width=st.integers(1, 700),
)
def test_array_and_scalar_agree_and_files_keep_them(tmp_path_factory, budgets, positions, width):
    s = make(tuple(budgets), bin_tokens=width, name="x")
    assert s.budgets_at(np.array(positions)).tolist() == [s.budget(t) for t in positions]
    again = schedule.parse(json.loads(json.dumps(s.to_json())))
    assert again == s


def test_share_of_pages():
    """k = 4 and 8, pages of 16. Length 64: 4 pages, 4 + 3 >= 4: all 4. Length 128: query at 127,
    bin 1, k = 8: all 8 pages. Length 320: query at 319, last bin, k = 8: 11 of 20 pages.
    Length 113: 8 pages (7 full and one key), k = 8: 8. Sum (4 + 8 + 11 + 8) / (4 + 8 + 20 + 8)."""
    assert make((4, 8)).share_of_pages([64, 128, 320, 113]) == pytest.approx(31 / 40)
    # k = 0: three reserved pages of 20
    assert make((0,)).share_of_pages([320]) == pytest.approx(3 / 20)
    # length 65 is the first whose query (at 64) stands in bin 1: k = 0 then, 3 of 5 pages
    assert make((9, 0)).share_of_pages([64]) == 1
    assert make((9, 0)).share_of_pages([65]) == pytest.approx(3 / 5)
    assert make((DENSE,)).share_of_pages([1, 100, 10**6]) == 1
    with pytest.raises(ValueError, match="at least 1"):
        make().share_of_pages([0])


@pytest.mark.parametrize("k", [-1, 1.0, True, "8", None, DENSE + 1, np.float32(3), np.bool_(True)])
def test_budgets_that_are_no_page_count_are_refused(k):
    with pytest.raises(ValueError, match=r"budgets\[1\]=.*expected an integer"):
        make((4, k))
    data = make((4, 8)).to_json()
    data["bins"][1]["k"] = k
    with pytest.raises(UserError, match=r"bins\[1\].k=.*expected an integer"):
        schedule.parse(data)


def test_numpy_integers_are_fine_and_become_int():
    assert type(make((np.int64(4),)).budgets[0]) is int
    with pytest.raises(ValueError, match="at least one bin"):
        make(())
    with pytest.raises(ValueError, match="position"):
        make().budget(-1)


def drop(bins):
    del bins[1]


def swap(bins):
    bins[0], bins[1] = bins[1], bins[0]


def overlap(bins):
    bins[1]["start"] -= 1


def hole(bins):
    bins[1]["start"] += 1


def narrow(bins):
    bins[2]["end"] -= 10


def double(bins):
    bins.insert(1, dict(bins[1]))


@pytest.mark.parametrize("fault", [drop, swap, overlap, hole, narrow, double])
def test_files_with_a_hole_or_overlap_are_refused(tmp_path, fault):
    data = make().to_json()
    fault(data["bins"])
    path = tmp_path / "s.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"s.json: bins\[\d\] covers .* without hole") as error:
        load(path, page_size=16)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 32}, "made for page_size=32, got page_size=16"),
        ({"format": "sparrow-schedule-9"}, "format='sparrow-schedule-9', expected"),
        ({"binn_tokens": 3}, "unknown key 'binn_tokens'; did you mean 'bin_tokens'"),
        ({"bins": []}, "at least one bin"),
        ({"bins": {}}, "at least one bin"),
        ({"bins": [4]}, "expected a JSON object, got int"),
        ({"bins": [{"start": 0, "end": 64}]}, "'k' is missing"),
        ({"bins": [{"start": 0, "end": 64, "k": 4, "n": 1}]}, "unknown key 'n'"),
        ({"bin_tokens": 0}, "bin_tokens=0: expected an integer at least 1"),
        ({"name": 3}, "name must be a string"),
        ({"provenance": []}, "provenance an object"),
    ],
)
def test_wrong_files_get_one_line(tmp_path, change, message):
    path = tmp_path / "s.json"
    path.write_text(json.dumps(make().to_json() | change))
    with pytest.raises(UserError) as error:
        load(path, page_size=16)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null", b"[" * 100_000])
def test_what_is_no_json_object_gets_one_line(tmp_path, content):
    path = tmp_path / "s.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match="s.json") as error:
        load(path, page_size=16)
    assert "\n" not in str(error.value)


def test_save_keeps_everything_and_replaces_in_one_step(tmp_path):
    s = make(name="mine", provenance={"model": "m", "tau": 0.9, "bins": [1]})
    path = tmp_path / "s.json"
    path.write_text("old")
    s.save(path)
    assert load(path, page_size=16) == s
    assert json.loads(path.read_text())["bins"][2] == {"start": 128, "end": 192, "k": "dense"}
    with pytest.raises(ValueError):
        make(provenance={"p5": float("nan")}).save(path)  # not JSON: the old file stays
    assert load(path, page_size=16) == s
    assert [p.name for p in tmp_path.iterdir()] == ["s.json"]


def test_resolve(tmp_path):
    assert resolve("dense", page_size=16, bin_tokens=64) is None
    k8 = resolve("k=8", page_size=32, bin_tokens=64)
    assert (k8.budgets, k8.page_size, k8.bin_tokens, k8.name) == ((8,), 32, 64, "k=8")
    s = resolve("qwen3-1.7b-0.86", page_size=16, bin_tokens=64)
    # arXiv 2606.08446, section 4: 29 up to 2K, 61 up to 4K, ..., 253 from 18K on
    assert (s.budget(1999), s.budget(2000), s.budget(17_999), s.budget(99_999)) == (
        29,
        61,
        221,
        253,
    )
    assert s.provenance["tau"] == 0.86 and s.provenance["model"] == "qwen3-1.7b"
    make().save(tmp_path / "s.json")
    assert resolve(str(tmp_path / "s.json"), page_size=16, bin_tokens=2000) == make()


@pytest.mark.parametrize(
    ("text", "page_size", "message"),
    [
        ("qwen3-1.7b-0.86", 32, "made for page_size=16, got page_size=32"),
        ("qwen3-1.7-0.86", 16, "nearest name: 'qwen3-1.7b-0.86'"),
        ("denes", 16, "nearest name: 'dense'"),
        ("no/such/file.json", 16, "no such file"),
        ("", 16, "no such file"),
        ("k=-1", 16, "expected k=<non-negative integer>"),
        ("k=", 16, "expected k=<non-negative integer>"),
        ("k=8.0", 16, "expected k=<non-negative integer>"),
        ("k=9999999", 16, "expected an integer"),
    ],
)
def test_resolve_refuses_in_one_line(text, page_size, message):
    with pytest.raises(UserError) as error:
        resolve(text, page_size=page_size, bin_tokens=64)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_describe_names_every_step():
    text = make((4, 4, 8, DENSE), name="mine").describe()
    assert text == "mine (pages of 16): k = 4 from 0, 8 from 128, dense from 192"
