"""Figures that sum up runs: stage times, throughput, hand-worked intervals, studies."""

import numpy as np
import pytest

from common.report import plots_overview
from common.report.plots import Run
from tests.common.report.test_plots import SCHEDULE, record, run, words


def test_stage_means_leave_out_the_first_step_and_add_up():
    records = [
        record(s, time__rollout=r, time__update=u, time__step=t, time__push=2)
        for s, (r, u, t) in enumerate([(50, 50, 200), (2, 1, 4), (4, 1, 6)])
    ]
    means = plots_overview.stage_means(Run(name="a", records=records))
    # rollout (2 + 4) / 2 = 3, update 1, step (4 + 6) / 2 = 5, other 5 - 3 - 1 = 1; push comes later
    assert means == {"rollout": 3.0, "update": 1.0, "push": 2.0, "other": 1.0}
    assert "7 s" in words(plots_overview.stage_times([Run(name="a", records=records)]))


def test_throughput_states_the_ratio_to_the_dense_run():
    key = "throughput__rollout_tokens_per_second"
    dense = run([1, 100, 100], name="D", key=key, schedule="dense")
    sparse = run([1, 250, 250], name="S", key=key, schedule=SCHEDULE)
    assert "250 (2.50x)" in words(plots_overview.throughput([dense, sparse]))
    assert "250" in words(plots_overview.throughput([sparse]))


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
