"""The verdict compares each sparse run with the dense one, and says when a training fails."""

from common.report.plots import Run
from common.report.report_runs import LoadedRun, load_runs
from common.report.report_words import seeds_per_arm, tiles, verdict
from tests.common.report.test_report_runs import write_records


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


def speed(step, rollout, whole):
    return {
        "step": step,
        "throughput/rollout_tokens_per_second": rollout,
        "throughput/step_tokens_per_second": whole,
    }


def test_verdict_by_hand(tmp_path):
    # the first step is left out: medians 100 and 250 -> 2.50x; whole step 50 and 60 -> 1.20x
    dense = [speed(0, 1, 1), speed(1, 90, 50), speed(2, 110, 50)]
    sparse = [speed(0, 9, 9), speed(1, 250, 60), speed(2, 250, 60)]
    for step, p5 in enumerate([0.9, 0.8, 0.84]):
        sparse[step]["mismatch/p5_min"] = p5
    sparse[0]["eval/reward"] = 0.25
    sparse[2] |= {"eval/reward": 0.5, "eval/reward_low": 0.41, "eval/reward_high": 0.59}
    dense[2]["reward/mean"] = 0.4
    config = {"num_steps": 3, "mismatch": {"tau": 0.86}, "task": {"seed": 1}}
    a = write_records(
        tmp_path / "a",
        dense,
        config={**config, "name": "D", "rollout": {"schedule": "dense"}},
    )
    b = write_records(
        tmp_path / "b", sparse, config={**config, "name": "S", "rollout": {"schedule": "x.json"}}
    )
    runs = load_runs([a, b])
    assert verdict(runs) == (
        "D: no held-out evaluation; training reward 0.400 (mean of the last 1 step(s)). "
        "S: held-out reward 0.500 (95 % interval 0.410 to 0.590) after 3 step(s), from 0.250. "
        "S: the lowest 5th percentile of alpha was 0.800 (step 1), below tau = 0.86 at 2 of 3 "
        "measured steps. "
        "S sampled 2.50x the tokens per second of D and 1.20x in the whole step "
        "(medians, measured). "
        "One seed each: differences between runs may be chance."
    )
    assert dict(tiles(runs))["Rollout tokens/s"] == [("100", ""), ("250", "2.50x")]
    assert "no speedup is stated" in verdict(runs[1:])


def test_a_recipe_that_judges_p1_is_judged_by_p1(tmp_path):
    records = [speed(step, 9, 9) | {"mismatch/p5_min": 0.95, "mismatch/p1_min": p1}
               for step, p1 in enumerate([0.9, 0.7])]  # fmt: skip
    for quantile, words, tile in (
        (0.01, "lowest 1st percentile of alpha was 0.700 (step 1), below tau = 0.86 at 1 of 2 ",
         ("0.700", "p1, tau 0.86")),
        (0.05, "lowest 5th percentile of alpha was 0.950, at or above", ("0.950", "p5, tau 0.86")),
    ):  # fmt: skip
        config = {"name": "S", "mismatch": {"tau": 0.86, "quantile": quantile}}
        runs = load_runs([write_records(tmp_path / str(quantile), records, config=config)])
        assert words in verdict(runs) and dict(tiles(runs))["Lowest tail of alpha"] == [tile]


def test_seeds_are_counted_per_arm(tmp_path):
    configs = [
        {"name": "d0", "task": {"seed": 0}, "rollout": {"schedule": "dense", "seed": 0}},
        {"name": "d1", "task": {"seed": 1}, "rollout": {"schedule": "dense", "seed": 1}},
        {"name": "s0", "task": {"seed": 0}, "rollout": {"schedule": "k=8", "seed": 0}},
    ]
    dirs = [write_records(tmp_path / c["name"], [{"step": 0}], config=c) for c in configs]
    runs = load_runs(dirs)
    assert seeds_per_arm(runs) == [2, 1]
    assert "2 arm(s) with 2, 1 seed(s)." in verdict(runs)
