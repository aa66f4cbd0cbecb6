"""Figures: what is drawn where, stand-alone files."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from common.report import plots, plots_overview, plots_schedules
from common.report.plots import Run

SCHEDULE = {
    "page_size": 16,
    "bins": [
        {"start": 0, "end": 64, "k": 4},
        {"start": 64, "end": 128, "k": 2},
        {"start": 128, "end": 192, "k": "dense"},
    ],
}


def words(svg):
    """All text of an SVG; parsing it shows that it is well-formed XML."""
    return [element.text for element in ElementTree.fromstring(svg).iter() if element.text]


def record(step, **values):
    return {"step": step, "bins": [], **{k.replace("__", "/"): v for k, v in values.items()}}


def run(values, name="dense", key="reward__mean", **options):
    records = [record(step, **{key: value}) for step, value in enumerate(values)]
    return Run(name=name, records=records, **options)


def test_nothing_to_draw_gives_none():
    empty = Run(name="x", records=[record(0, reward__mean=None)])
    assert plots.lines([empty], "reward/mean", title="t") is None
    assert plots.reward_curves([empty]) is None
    assert plots.acceptance_map(empty, "p5", title="t") is None
    assert plots_schedules.schedule_steps([empty]) is None
    assert plots_overview.stage_times([empty]) is None
    assert plots_overview.throughput([empty]) is None
    assert plots_overview.study_figure({"a": [[]]}, {}) is None


def test_series_skips_what_is_no_finite_number():
    steps, values = run([1.0, None, float("nan"), True, 3]).series("reward/mean")
    assert steps.tolist() == [0, 4] and values.tolist() == [1.0, 3.0]


def test_settled_leaves_out_compilation():
    assert run([9, 1, 2]).settled("reward/mean").tolist() == [1, 2]
    assert run([9, 1]).settled("reward/mean").tolist() == [9, 1]


def test_one_run_one_step():
    svg = plots.lines([run([0.5])], "reward/mean", title="Reward", tau=0.86, limits=(0, 1))
    assert {"Reward", "dense", "tau 0.86", "training step"} <= set(words(svg))


def test_names_with_markup_and_math_are_drawn_literally():
    svg = plots.lines([run([0, 1], name="<b>&$x_1$")], "reward/mean", title='a "b" <c>')
    assert "<b>&$x_1$" in words(svg)
    assert ElementTree.fromstring(svg).get("aria-label") == 'a "b" <c>'


def test_figures_are_reproducible_and_ids_differ_between_figures():
    one, again = (plots.lines([run([0, 1])], "reward/mean", title="t") for _ in range(2))
    other = plots.lines([run([0, 2])], "reward/mean", title="t")
    assert one == again
    ids = [set(re.findall(r'id="([^"]+)"', svg)) for svg in (one, other)]
    assert ids[0] and not ids[0] & ids[1]


@settings(deadline=None, max_examples=8)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=7))
def test_end_labels_never_overlap(heights):
    with plots.Canvas("t", labels=["name"]) as figure:
        figure.axes.set_ylim(0, 1)
        figure.end_labels([(y, f"run{i}", plots.INK) for i, y in enumerate(heights)])
    found = re.findall(r'y="([\d.]+)"[^>]*>run\d', figure.svg) or re.findall(
        r"translate\([\d.]+ ([\d.]+)\)[^>]*>run\d", figure.svg
    )
    at = np.sort([float(y) for y in found])
    assert len(at) == len(heights) and np.diff(at).min() > 11  # text is 10.5 units high


def test_a_schedule_of_dense_bins_is_dense():
    assert Run(name="a", records=[], schedule={"bins": [{"k": "dense"}]}).is_dense
    assert not Run(name="a", records=[], schedule=SCHEDULE).is_dense
    assert not Run(name="a", records=[]).is_dense


def bins(p5s, enough=True):
    return [
        {"bin": b, "start": 64 * b, "end": 64 * b + 64, "p5": p5, "enough": enough}
        for b, p5 in enumerate(p5s)
    ]


def cells(svg):
    """Fill colours of the map's cells."""
    return re.findall(r'<path d="[^"]*z[^"]*"[^>]*style="fill: (#\w+); stroke: #\w+', svg) + (
        re.findall(r'style="fill: (#\w+); stroke: \1', svg)
    )


def test_map_shows_both_sides_of_tau():
    records = [{"step": s, "bins": bins([0.99, 0.3])} for s in range(3)]
    svg = plots.acceptance_map(Run(name="a", records=records, tau=0.86), "p5", title="t")
    red = {c: int(c[1:3], 16) - int(c[5:7], 16) for c in cells(svg)}
    assert any(v > 60 for v in red.values()) and any(v < -60 for v in red.values())


def test_map_groups_many_steps_and_keeps_the_lowest():
    records = [{"step": s, "bins": bins([0.99])} for s in range(300)]
    records[137]["bins"] = bins([0.05])
    svg = plots.acceptance_map(Run(name="a", records=records, tau=0.86), "p5", title="t")
    fills = cells(svg)
    assert 60 <= len(fills) <= 200
    assert any(int(c[1:3], 16) - int(c[5:7], 16) > 100 for c in fills)


def test_saved_file_stands_alone(tmp_path):
    svg = plots.lines([run([0, 1])], "reward/mean", title="t")
    assert "var(--" in svg
    plots.save(svg, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert "var(--" not in text and "#0072b2" in text and "background: #ffffff" in text
    ElementTree.fromstring(text)


def test_matplotlib_is_loaded_on_first_use_and_left_as_it_was():
    code = (
        "import sys\nfrom common.report import plots, plots_overview, plots_schedules, report\n"
        "assert 'matplotlib' not in sys.modules\nimport matplotlib\n"
        "p = matplotlib.rcParams\nbefore = {k: p[k] for k in p if k != 'backend'}\n"
        "r = plots.Run(name='a', records=[{'step': 0, 'bins': [], 'reward/mean': 1.0}])\n"
        "assert plots.reward_curves([r])\n"
        "assert {k: p[k] for k in before} == before\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True)
    assert result.returncode == 0, result.stderr
