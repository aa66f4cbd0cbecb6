"""The controller on simulated processes, with planted faults; its state, limits and refusals."""

import dataclasses
import json

import numpy as np
import pytest

from common.config import MismatchConfig
from common.errors import UserError
from common.mismatch import controller as module
from common.mismatch.controller import Controller, check_controller, open_controller
from common.mismatch.tail_share import Share, student
from common.rollout.budgets import plan_budgets
from common.schedule import schedule as schedules
from common.schedule.schedule import DENSE
from tests.common.simulated_alpha import (
    BUDGETS,
    TAU,
    WIDTH,
    config_of,
    draw,
    num_changes,
    p5_of,
    show,
    simulate,
    start_of,
)


def noise_only():
    """Most changes of a bin in 500 steps where the tail is right and does not move."""
    return num_changes(simulate(lambda k, b, s: 0.87 if k >= 16 else 0.8, steps=500)[0]).max()


def no_rung_fits():
    """The same where 16 is well above tau + margin, and 12 under tau: each try down is a mistake.

    Waits of 4, 8, 16, 32, 64 times 5 steps leave room for 5 tries, and back.
    """
    return num_changes(simulate(lambda k, b, s: 0.93 if k >= 16 else 0.8, steps=500)[0]).max()


def overshoot():
    """Steps that bins spend above the budget that is right, after a start far below it."""
    right = lambda k, b, s: 0.87 if k >= 24 else 0.6  # noqa: E731
    return (simulate(right, steps=30)[0] > 24).sum()


LIMITS = {noise_only: 1, no_rung_fits: 10, overshoot: 0}


@pytest.mark.parametrize("measure", LIMITS)
def test_no_oscillation(measure):
    assert measure() <= LIMITS[measure]


@pytest.mark.parametrize(
    ("fault", "measure"),
    [
        ("no hysteresis", no_rung_fits),
        ("no uncertainty", noise_only),
        ("keeps what was measured at another budget", overshoot),
    ],
)
def test_planted_faults_oscillate(monkeypatch, fault, measure):
    if fault == "no hysteresis":
        monkeypatch.setattr(module, "FIRST_WAIT", 0)
    elif fault == "no uncertainty":
        monkeypatch.setattr(module, "POOL_Z", 0.0)
        monkeypatch.setattr(module, "STEP_Z", 0.0)
    else:
        monkeypatch.setattr(module.Bin, "restart", lambda self: None)
    assert measure() > 3 * LIMITS[measure]


def test_a_fall_is_answered_at_once_and_only_as_far_as_needed():
    fall = lambda k, b, s: 0.87 if k >= 32 or s < 50 else 0.81  # noqa: E731
    budgets, true, _ = simulate(fall, steps=90, start=(24,))
    assert (budgets[50] == 24).all() and (budgets[55:] == 32).all()  # within 5 steps
    big = lambda k, b, s: 0.93 if k >= 24 or s < 20 else 0.6  # noqa: E731
    budgets, _, _ = simulate(big, steps=25, controller_patience=30)
    assert (budgets[20] == 16).all() and (budgets[21:] == 24).all()  # the very next step


def test_nothing_helps_so_it_ends_dense_and_comes_back_when_the_process_recovers():
    bad = lambda k, b, s: p5_of(k, 3 if 20 <= s < 150 else 1)  # noqa: E731
    budgets, true, _ = simulate(bad, steps=450, start=(24,))
    assert (budgets[24:40] == DENSE).all()  # 24, 32, dense: at most two steps each
    assert (true[20:150] < TAU).mean() < 0.06  # tries of the largest budget, rarer each time
    tries = np.flatnonzero((budgets[:150, 0] == 32) & (np.roll(budgets[:150, 0], 1) == DENSE))
    assert 1 <= len(tries) <= 3 and (np.diff(tries) >= 2 * 20).all()
    assert (budgets[-1] == 24).all() and (true[150:] < TAU).mean() < 0.02


@pytest.mark.parametrize(
    ("truth", "most_changes"),
    [
        (lambda k, b, s: p5_of(k, 0.6 + 0.8 * s / 500), 8),  # slow drift, from rung 8 to 32
        (lambda k, b, s: p5_of(k, 1 + 0.25 * np.sin(s * np.pi / 50)), 20),  # five seasons
    ],
)
def test_never_far_under_tau_while_the_process_moves(truth, most_changes):
    budgets, true, _ = simulate(truth, steps=500, start=(24,), seed=1)
    assert num_changes(budgets).max() <= most_changes
    assert (true < TAU).mean() < 0.25  # what five percent of some thousand tokens cannot tell
    assert (true < TAU - 0.02).mean() < 0.02
    fixed = np.array([truth(16, 0, s) for s in range(500)])
    assert (fixed < TAU - 0.02).mean() > 0.2  # without a controller


def test_a_process_that_gets_easier_saves_pages():
    budgets, true, _ = simulate(lambda k, b, s: p5_of(k, 0.4), steps=150, start=(32,))
    assert (budgets[-1] <= 8).all() and (budgets.min(0) >= 4).all()
    assert (true < TAU).mean() < 0.05


def test_a_dense_bin_that_fails_raises_the_bins_whose_keys_it_reads():
    """Bin 1 is under tau whenever bin 0, which it reads, has less than 16."""
    controller = Controller(config_of(2), start_of(8, DENSE))
    rng = np.random.default_rng(0)
    seen = []
    for _ in range(12):
        first, _ = controller.schedule.budgets
        seen.append(controller.schedule.budgets)
        alpha = np.concatenate([draw(0.87, rng), draw(0.6 if first < 16 else 0.999, rng)], 1)
        values = show(controller, alpha)
    assert seen[:3] == [(8, DENSE), (12, DENSE), (16, DENSE)] and seen[-1][0] == 16
    assert values["controller/dense_bins"] == sum(k == DENSE for k in controller.schedule.budgets)


def step(controller, *percentiles, seed=0, rows=8):
    """One update; percentile None: no tokens in that bin."""
    rng = np.random.default_rng(seed)
    alpha = np.concatenate([draw(p or 1.0, rng, rows) for p in percentiles], 1)
    mask = np.repeat([p is not None for p in percentiles], WIDTH) & np.ones(alpha.shape, bool)
    return show(controller, alpha, mask)


def test_a_low_token_belongs_to_the_bin_of_its_query():
    """Token 64 is made by the query at 63, under the budget of bin 0: bin 0 rises, bin 1 not."""
    controller = Controller(config_of(2, min_tokens=1), start_of(24, 4))
    alpha = np.ones((8, 2 * WIDTH + 1))
    alpha[:, WIDTH] = 0.1
    mask = np.arange(alpha.shape[1]) >= np.full((8, 1), WIDTH - 4)  # 5 tokens of bin 0: 1 in 5 low
    for _ in range(3):
        controller.update(alpha, mask, np.arange(8))
    first, second = controller.schedule.budgets
    assert first > 24 and second == 4


def test_samples_of_one_prompt_are_one_observation():
    """Eight rows under tau: of eight prompts beyond doubt, of two they decide nothing."""
    alpha = np.ones((8, WIDTH + 1))
    alpha[:, 1::4] = 0.1
    mask = np.arange(WIDTH + 1) > np.zeros((8, 1))
    for group, budget in ((np.arange(8), 24), (np.arange(8) // 4, 16)):
        controller = Controller(config_of(2, controller_window=1), start_of(16))
        controller.update(alpha, mask, group)
        assert controller.schedule.budgets[0] == budget


def test_budgets_that_never_fell_with_length_do_not_fall_and_moves_are_told():
    controller = Controller(config_of(), start_of(8, 8, 16, 24))
    values = step(controller, 0.87, 0.6, 0.87, None)
    assert controller.schedule.budgets == (8, 12, 16, 24)
    values = step(controller, 0.87, 0.6, 0.87, None)
    values = step(controller, 0.87, 0.6, 0.87, None)  # 24 lifts bin 2; bin 3 has it already
    assert controller.schedule.budgets == (8, 24, 24, 24)
    assert values["controller/changes"] == 2 and values["controller/dense_bins"] == 0
    first, second = values["controller/moves"]
    assert first.startswith("64-128: k 16 -> 24 (") and "under tau=0.86" in first
    assert second == "128-192: k 16 -> 24 (no less than the bin before it)"
    values = step(controller, 0.87, 0.6, 0.6, None)  # 32 lifts what follows: one line for both
    assert values["controller/moves"][1] == "128-256: k 24 -> 32 (no less than the bin before it)"
    assert values["controller/changes"] == 3
    # a start that falls with length is left so: each bin for itself
    free = Controller(config_of(), start_of(24, 8, 16, 8))
    for _ in range(3):
        values = step(free, 0.87, 0.6, 0.87, 0.87)
    assert free.schedule.budgets == (24, 24, 16, 8)
    step(free, 0.87, 0.87, 0.87, 0.87)
    assert "controller/moves" not in step(free, 0.87, 0.87, 0.87, 0.87)


def test_a_bin_comes_down_after_the_bin_before_it():
    controller = Controller(config_of(2), start_of(16, 16))
    for seed in range(30):
        step(controller, 0.87, 0.99, seed=seed)  # bin 1 would like 4; bin 0 is right at 16
    assert controller.schedule.budgets == (16, 16)
    free = Controller(config_of(2), start_of(24, 16))
    for seed in range(30):
        step(free, 0.87, 0.99, seed=seed)
    assert free.schedule.budgets == (24, 4)  # the smallest rung, and no less


def test_bins_that_never_had_tokens_hold_no_later_one_up():
    controller = Controller(config_of(), start_of(16, 16, 16, 16))
    for seed in range(30):  # prompts fill bin 0
        values = step(controller, None, 0.99, 0.99, 0.87, seed=seed)
        told = values.get("controller/moves", [])
        assert not told or told[0].startswith("0-64: ") and "never had tokens" in told[0]
    assert controller.schedule.budgets == (4, 4, 4, 16)
    step(controller, 0.3, 0.99, 0.99, 0.87)  # a short prompt: what it teaches holds at once
    assert controller.schedule.budgets == (8, 8, 8, 16)


@pytest.mark.parametrize(("p5", "budget"), [(0.5, 24), (0.999, 4)])
def test_a_bin_that_few_responses_reach_is_judged_when_its_tokens_are_together(p5, budget):
    """Ten tokens of one row a step: 80 in a window of 8 steps, min_tokens is 100."""
    controller = Controller(config_of(2), start_of(4, 16))
    rng = np.random.default_rng(0)
    mask = np.zeros((8, 2 * WIDTH), bool)
    mask[0, WIDTH : WIDTH + 10] = True
    for step in range(60):
        assert controller.schedule.budgets[1] == 16 or step > 8  # nothing is said before
        now = 0.87 if controller.schedule.budgets[1] >= 24 else p5
        show(controller, draw(now, rng, tokens=2 * WIDTH), np.roll(mask, step, 0))
    assert controller.schedule.budgets == (4, budget)


@pytest.mark.parametrize("last", [32, DENSE])
def test_a_bin_that_is_helped_in_this_step_blames_no_other(last):
    controller = Controller(config_of(3), start_of(8, 32, last))
    values = step(controller, 0.87, 0.3, 0.3)
    assert controller.schedule.budgets == (8, DENSE, DENSE)  # bin 0 is right at 8
    assert values["controller/moves"][0].startswith("64-128: k 32 -> dense (")
    assert controller.bins[0].fails == [0] * len(controller.ladder)


@pytest.mark.parametrize(
    ("rows", "changes"), [({"rows": 2}, {}), ({"rows": 8}, {"min_tokens": 10_000})]
)
def test_too_few_sequences_or_tokens_decide_nothing(rows, changes):
    for percentile in (0.3, 1.0):
        controller = Controller(config_of(2, controller_window=1, **changes), start_of(16))
        for seed in range(12):
            step(controller, percentile, None, seed=seed, **rows)
        assert controller.schedule.budgets == (16, 16)


def test_state_goes_through_json_and_the_run_goes_on_as_if_never_stopped():
    truth = lambda k, b, s: p5_of(k, 1 + 0.4 * np.sin(s / 9))  # noqa: E731
    whole, _, end = simulate(truth, steps=120, start=(12, 16, 24))

    def resume(controller):
        state = json.loads(json.dumps(controller.state_dict(), allow_nan=False))
        return Controller(config_of(), start_of(12, 16, 24), state)

    again, _, resumed = simulate(truth, steps=120, start=(12, 16, 24), between=resume)
    np.testing.assert_array_equal(whole, again)
    assert num_changes(whole).min() >= 2 and resumed.state_dict() == end.state_dict()
    forgetful, _, _ = simulate(
        truth, steps=120, start=(12, 16, 24),
        between=lambda c: Controller(config_of(), c.schedule),
    )  # fmt: skip
    assert not np.array_equal(whole, forgetful)


def test_bins_and_ladder_of_the_start():
    start = schedules.Schedule(page_size=16, bin_tokens=2 * WIDTH, budgets=(5, DENSE))
    controller = Controller(config_of(), start)
    assert controller.ladder == sorted({*BUDGETS, 5, DENSE})
    assert controller.schedule.budgets == (5, 5, DENSE, DENSE)  # bins of WIDTH now
    positions = np.arange(4 * WIDTH)
    np.testing.assert_array_equal(
        controller.schedule.budgets_at(positions), start.budgets_at(positions)
    )


def test_saved_schedule_can_be_used(tmp_path):
    controller = Controller(config_of(), start_of(8, 16))
    step(controller, 0.6, None, None, None)
    controller.save(tmp_path / "s.json", 1)
    loaded = schedules.resolve(str(tmp_path / "s.json"), page_size=16, bin_tokens=1)
    assert loaded.budgets == controller.schedule.budgets == (12, 16, 16, 16)
    assert loaded.provenance["start"]["bins"][0]["k"] == 8
    assert loaded.provenance["steps"] == 1 and loaded.provenance["tau"] == TAU


def test_a_changing_schedule_needs_three_programs_at_most():
    def widths(size):
        rng, found = np.random.default_rng(0), set()
        ladder = [*BUDGETS, DENSE]
        for step in range(200):
            some = ladder[: 1 + step % len(ladder)] if step else [DENSE]
            budgets = tuple(rng.choice(some, 4).tolist())
            made = schedules.Schedule(page_size=16, bin_tokens=64, budgets=budgets, sized_for=size)
            found.add(plan_budgets(made, 100).max_selected)
        return found

    assert widths(32) == {0, 48, 100}  # all dense; up to 32 and 3 pages, by sixteens; a dense bin
    assert len(widths(0)) > 3
    assert Controller(config_of(), start_of(8)).schedule.sized_for == 32


def test_interval_of_a_share_by_hand_and_its_coverage():
    # n = 100 tokens each in 4 sequences, x = 2, 4, 6, 8 under: share 20 / 400 = 0.05, m = 4,
    # sum (x - 5)^2 = 9 + 1 + 1 + 9 = 20, variance = 4/3 * 20 / 400^2 = 1.667e-4 > 0.0475 / 400
    share = Share().add(np.full(4, 100), np.array([2, 4, 6, 8]), 0.0)
    low, high = share.interval(0.05, 2.0)
    assert share.share == pytest.approx(0.05)
    assert (high - low) / 2 == pytest.approx(student(2.0, 3) * np.sqrt(80 / 3) / 400)
    # a step later with decay 1/2: sum w n = 400 / 2 + 100 = 300, sum w x = 20 / 2 + 0 = 10
    assert share.add(np.array([100]), np.array([0]), 0.5).share == pytest.approx(10 / 300)
    # nothing under: the variance of independent tokens, 0.05 * 0.95 / 400
    zero = Share().add(np.full(4, 100), np.zeros(4), 0.0)
    assert zero.interval(0.05, 2.0)[1] == pytest.approx(student(2.0, 3) * np.sqrt(0.0475 / 400))
    assert Share().interval(0.05, 2.0) == (0.0, 1.0)
    rng = np.random.default_rng(0)
    inside = []
    for _ in range(300):
        alpha = draw(TAU, rng, rows=12)
        low, high = Share().add(np.full(12, WIDTH), (alpha < TAU).sum(1), 0.0).interval(0.05, 1.96)
        inside.append(low <= 0.05 <= high)
    assert 0.91 <= np.mean(inside) <= 0.99


@pytest.mark.parametrize(
    ("z", "df", "exact"),  # from scipy.stats: t.isf(norm.sf(z), df)
    [(1.959964, 3, 3.1824), (1.959964, 10, 2.2281), (3.0, 3, 9.2187), (3.0, 30, 3.2699)],
)
def test_student(z, df, exact):
    assert exact <= student(z, df) * 1.001 and student(z, df) < 1.07 * exact


@pytest.mark.parametrize(
    ("change", "schedule", "words"),
    [
        ({}, None, "rollout.schedule=k=16: a dense rollout has no budget to adapt"),
        ({}, start_of(DENSE, DENSE), "a dense rollout has no budget"),
        ({"every": 0}, start_of(8), "set mismatch.every=1"),
        ({"bin_tokens": 48}, start_of(8, 16), "no multiple of mismatch.bin_tokens=48"),
        ({"num_rows": 2, "controller_window": 1}, start_of(8), "rows of 2 prompts tell nothing"),
    ],
)
def test_refused_in_one_line(change, schedule, words):
    config = config_of(**change)
    with pytest.raises(UserError) as error:
        check_controller(config, schedule)
    assert words in str(error.value) and "\n" not in str(error.value)
    off = dataclasses.replace(config.mismatch, controller=False)
    check_controller(dataclasses.replace(config, mismatch=off), schedule)
    check_controller(config_of(), start_of(8, 16))


def test_a_checkpoint_without_the_controller_or_of_another_one_is_refused_in_one_line():
    state = Controller(config_of(), start_of(8)).state_dict()
    assert open_controller(config_of(), start_of(8), {"controller": state}).state_dict() == state
    assert open_controller(config_of(), start_of(8), None).schedule.budgets == (8,) * 4
    assert open_controller(config_of(controller=False), None, {"step": 3}) is None
    for start, extra, words in (
        (start_of(8), {"step": 3}, "was written without a controller"),
        (start_of(7), {"controller": state}, "other budgets or another schedule"),
        (start_of(*[8] * 5), {"controller": state}, "other budgets or another schedule"),
    ):
        with pytest.raises(UserError, match=words) as error:
            open_controller(config_of(), start, extra)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change",
    [{"controller_margin": 0.14}, {"controller_patience": 0}, {"controller_window": 0}]
    + [{"controller_margin": -0.1}],
)
def test_settings_out_of_range(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        MismatchConfig(**{"controller": True, **change})
