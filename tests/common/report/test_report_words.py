"""The verdict compares each sparse run with the dense one, and says when a training fails."""

from common.report.plots import Run
from common.report.report_words import LoadedRun, verdict


def run(name, start, end, half, schedule):
    """A finished run of one step, held-out reward `start` before it and `end` +- half after it."""
    values = {"eval/start_reward": start}
    values |= {"eval/start_reward_low": start - half, "eval/start_reward_high": start + half}
    values |= {"eval/reward": end, "eval/reward_low": end - half, "eval/reward_high": end + half}
    record = {"step": 0, "bins": [], "alarms": [], **values}
    plot = Run(name=name, records=[record], schedule=schedule, tau=0.95, page_size=16)
    return LoadedRun(plot=plot, config={"name": name, "num_steps": 1}, about={})


SPARSE = {"page_size": 16, "bins": [{"start": 0, "k": 2}]}


def test_difference_to_dense_with_its_interval():
    dense, sparse = run("dense", 0.5, 0.8, 0.03, "dense"), run("s", 0.5, 0.78, 0.04, SPARSE)
    text = verdict([dense, sparse])
    # half-width sqrt(0.03^2 + 0.04^2) = 0.05
    assert "s minus dense: -0.020 [-0.070, +0.030] over held-out prompts" in text
    assert "the same within this noise" in text and "fails" not in text


def test_a_run_that_ends_under_its_start_is_said_to_fail():
    dense, sparse = run("dense", 0.5, 0.8, 0.03, "dense"), run("k=2", 0.5, 0.36, 0.04, SPARSE)
    text = verdict([dense, sparse])
    assert "k=2 minus dense: -0.440 [-0.490, -0.390] over held-out prompts" in text
    assert "ends under the 0.500 it started from: this training fails" in text


def test_no_comparison_with_a_dense_run_of_another_length():
    dense, sparse = run("dense", 0.5, 0.8, 0.03, "dense"), run("s", 0.5, 0.78, 0.04, SPARSE)
    sparse.plot.records[0]["step"] = 4
    assert "minus dense" not in verdict([dense, sparse])
