"""Figures of schedules and profiles: curves by hand, names in the figure."""

import numpy as np

from common.report import plots_schedules
from common.report.plots import Run
from common.schedule.schedule import DENSE, Schedule
from tests.common.report.test_plots import SCHEDULE, record, words


def test_pages_read_by_hand():
    x, y = plots_schedules.pages_read(SCHEDULE)
    at = dict(zip(x[:33].tolist(), y[:33].tolist(), strict=True))
    assert at[32] == 2  # 32 / 16 pages, fewer than 4 + 3
    assert y[x == 128].tolist() == [5, 8]  # k + 3 = 5 before the step, all 128 / 16 = 8 after it
    assert y[-1] == 12  # dense: 192 / 16
    assert y[x == 112].tolist() == [5]  # 7 pages cached, 2 + 3 read


def test_the_last_bin_holds_beyond_its_end():
    schedule = {"page_size": 16, "bins": [{"start": 0, "end": 64, "k": 2}]}
    x, y = plots_schedules.pages_read(schedule, longest=512)
    assert (x[-1], y[-1]) == (512, 5)  # k + 3 of 32 pages
    assert plots_schedules.pages_read(schedule, longest=32)[0][-1] == 64


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
    svg = plots_schedules.profile_plot(profile(), SCHEDULE, statistic="p5", tau=0.86)
    expected = {"k = 4", "k = 8", "dense", "tau 0.86", "every page"}
    assert expected <= set(words(svg))
    alone = plots_schedules.profile_plot(profile(), None, statistic="p5", tau=0.86)
    assert "every page" not in words(alone)
    assert plots_schedules.profile_plot(profile(), None, statistic="p1", tau=0.86) is None


def test_budgets_by_step_draws_bins_that_moved():
    def bins(*ks):
        return [{"bin": b, "start": 64 * b, "end": 64 * b + 64, "k": k} for b, k in enumerate(ks)]

    records = [record(step) for step in range(4)]
    for entry, ks in zip(
        records, [(4, 4, 4, 9), (4, 8, 8, 9), (4, "dense", "dense", 9), (4, 8, 8)], strict=True
    ):
        entry["bins"] = bins(*ks)
    svg = plots_schedules.budgets_by_step(Run(name="a", records=records))
    found = words(svg)
    assert {"64-192", "dense", "4", "training step"} <= set(found)  # two bins, one history
    assert not any(word in found for word in ("0-64", "192-256"))
    for still in (records[:1], [records[0], {**records[3], "bins": bins(4, 4)}]):
        assert plots_schedules.budgets_by_step(Run(name="a", records=still)) is None


def test_curves_by_hand():
    """Pages of 16, k = 2 up to 128, then 9, then dense. 64 tokens: 4 pages, all read: 64. 128:
    (2 + 3) * 16 = 80. 129: (9 + 3) * 16 = 192 > 129: all. 256: 192. 257: dense. k is at most all
    pages: at 16 tokens 1; beyond its last bin dense stays dense."""
    s = Schedule(page_size=16, bin_tokens=128, budgets=(2, 9, DENSE))
    length, tokens, k = plots_schedules.curves(s, 1000)
    at = {int(n): (t, x) for n, t, x in zip(length, tokens, k, strict=True)}
    assert at[128] == (80, 2) and at[129] == (129, 129 / 16)
    assert at[256] == (192, 9) and at[257] == (257, 257 / 16)
    assert at[1000] == (1000, 62.5) and at[1] == (1, 1 / 16)
    assert (np.diff(length) > 0).all()
