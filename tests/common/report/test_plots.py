"""Figures: what is drawn where, hand-worked intervals, stand-alone files."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.report import plots, plots_overview
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
    assert plots.schedule_steps([empty]) is None
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


def test_pages_read_by_hand():
    x, y = plots.pages_read(SCHEDULE)
    at = dict(zip(x[:33].tolist(), y[:33].tolist(), strict=True))
    assert at[32] == 2  # 32 / 16 pages, fewer than 4 + 3
    assert y[x == 128].tolist() == [5, 8]  # k + 3 = 5 before the step, all 128 / 16 = 8 after it
    assert y[-1] == 12  # dense: 192 / 16
    assert y[x == 112].tolist() == [5]  # 7 pages cached, 2 + 3 read


def test_the_last_bin_holds_beyond_its_end():
    schedule = {"page_size": 16, "bins": [{"start": 0, "end": 64, "k": 2}]}
    x, y = plots.pages_read(schedule, longest=512)
    assert (x[-1], y[-1]) == (512, 5)  # k + 3 of 32 pages
    assert plots.pages_read(schedule, longest=32)[0][-1] == 64


def test_stage_means_leave_out_the_first_step_and_add_up():
    records = [
        record(s, time__rollout=r, time__update=u, time__step=t)
        for s, (r, u, t) in enumerate([(50, 50, 200), (2, 1, 4), (4, 1, 6)])
    ]
    means = plots_overview.stage_means(Run(name="a", records=records))
    # rollout (2 + 4) / 2 = 3, update 1, step (4 + 6) / 2 = 5, other 5 - 3 - 1 = 1
    assert means == {"rollout": 3.0, "update": 1.0, "other": 1.0}
    assert "5 s" in words(plots_overview.stage_times([Run(name="a", records=records)]))


def test_throughput_states_the_ratio_to_the_dense_run():
    key = "throughput__rollout_tokens_per_second"
    dense = run([1, 100, 100], name="D", key=key, schedule="dense")
    sparse = run([1, 250, 250], name="S", key=key, schedule=SCHEDULE)
    assert "250 (2.50x)" in words(plots_overview.throughput([dense, sparse]))
    assert "250" in words(plots_overview.throughput([sparse]))


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


def profile(ks=(4, 8, "dense")):
    rows = []
    for i, k in enumerate(ks):
        for b in range(4):
            p5 = min(1.0, 0.9 - 0.2 * b + 0.1 * i)
            row = {"k": k, "bin": b, "start": 64 * b, "end": 64 * b + 64, "count": 500}
            row |= {"p5": p5, "p5_low": p5 - 0.02, "p5_high": p5 + 0.02, "enough": b < 3}
            rows.append(row)
    return {"page_size": 16, "bin_tokens": 64, "rows": rows}


def test_profile_names_every_budget_and_the_threshold():
    svg = plots_overview.profile_plot(profile(), SCHEDULE, statistic="p5", tau=0.86)
    expected = {"k = 4", "k = 8", "dense", "tau 0.86", "every page"}
    assert expected <= set(words(svg))
    alone = plots_overview.profile_plot(profile(), None, statistic="p5", tau=0.86)
    assert "every page" not in words(alone)
    assert plots_overview.profile_plot(profile(), None, statistic="p1", tau=0.86) is None


@pytest.mark.parametrize(("df", "exact"), [(1, 12.7062), (2, 4.3027), (11, 2.2010), (30, 2.0423)])
def test_t_quantile(df, exact):
    assert plots_overview.t_quantile(df) == pytest.approx(exact, abs=5e-4)


def test_mean_interval_by_hand():
    # mean 0.5, s = 0.1, t(2) = 4.303: half width 4.303 * 0.1 / sqrt(3) = 0.24843
    mean, low, high = plots_overview.mean_interval([0.4, 0.5, 0.6])
    assert (mean, low, high) == pytest.approx((0.5, 0.25157, 0.74843), abs=1e-5)
    mean, low, high = plots_overview.mean_interval([0.4])
    assert mean == 0.4 and np.isnan(low) and np.isnan(high)
    with pytest.raises(ValueError, match="two seeds"):
        plots_overview.t_quantile(0)


def test_study_counts_seeds_and_takes_common_steps():
    arms = {"dense": [[(0, 0.3), (10, 0.7)], [(0, 0.35)]], "k=8": [[(0, 0.3), (10, 0.5)]]}
    svg = plots_overview.study_figure(arms, {"dense": [[], []], "k=8": [[]]})
    assert {"dense (n=2)", "k=8 (n=1)"} <= set(words(svg))
    assert not any("alpha" in word for word in words(svg))


def test_study_shows_the_tail_of_the_arms_that_have_one():
    arms = {"dense": [[(0, 0.3), (2, 0.7)]], "k=8": [[(0, 0.3), (2, 0.5)]]}
    svg = plots_overview.study_figure(arms, {"dense": [[]], "k=8": [[(1, 0.9), (2, 0.8)]]})
    found = words(svg)
    assert "5th percentile of alpha, worst length bin of a step" in found
    assert found.count("k=8 (n=1)") == 2 and found.count("dense (n=1)") == 1


def test_budgets_by_step_draws_bins_that_moved():
    def bins(*ks):
        return [{"bin": b, "start": 64 * b, "end": 64 * b + 64, "k": k} for b, k in enumerate(ks)]

    records = [record(step) for step in range(4)]
    for entry, ks in zip(
        records, [(4, 4, 4, 9), (4, 8, 8, 9), (4, "dense", "dense", 9), (4, 8, 8)], strict=True
    ):
        entry["bins"] = bins(*ks)
    svg = plots_overview.budgets_by_step(Run(name="a", records=records))
    found = words(svg)
    assert {"64-192", "dense", "4", "training step"} <= set(found)  # two bins, one history
    assert not any(word in found for word in ("0-64", "192-256"))
    for still in (records[:1], [records[0], {**records[3], "bins": bins(4, 4)}]):
        assert plots_overview.budgets_by_step(Run(name="a", records=still)) is None


def test_saved_file_stands_alone(tmp_path):
    svg = plots.lines([run([0, 1])], "reward/mean", title="t")
    assert "var(--" in svg
    plots.save(svg, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert "var(--" not in text and "#0072b2" in text and "background: #ffffff" in text
    ElementTree.fromstring(text)


def test_matplotlib_is_loaded_on_first_use_and_left_as_it_was():
    code = (
        "import sys\nfrom common.report import plots, plots_overview, report\n"
        "assert 'matplotlib' not in sys.modules\nimport matplotlib\n"
        "p = matplotlib.rcParams\nbefore = {k: p[k] for k in p if k != 'backend'}\n"
        "r = plots.Run(name='a', records=[{'step': 0, 'bins': [], 'reward/mean': 1.0}])\n"
        "assert plots.reward_curves([r])\n"
        "assert {k: p[k] for k in before} == before\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True)
    assert result.returncode == 0, result.stderr
