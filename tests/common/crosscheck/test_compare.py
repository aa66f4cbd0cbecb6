"""The judge of two traces on made-up ones: what it must see, and where."""

import numpy as np
import pytest

from common.crosscheck import compare
from tests.common.made_up_traces import P, judged


def test_a_trace_is_the_same_as_itself(write):
    result, rows = judged(write, None)
    assert result.ok and result.verdict == "SAME within the tolerances" and not result.notes
    assert len(rows) == 22 and all(row.ok for row in rows.values())
    assert all(row.largest == 0 for row in rows.values())
    # 4 + 3 response tokens from position 8 on, bins of 5: the query at 9 made token 10
    assert [part[:3] for part in result.floor] == [(8, 10, 6), (11, 11, 1)]
    for *_, mean, p5 in result.floor:
        assert mean == pytest.approx(1, abs=1e-6) and p5 == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("name, where, size, first, words", [
    ("forward/attention", (1, 0, 5, 0), 0.01, "forward/attention", "layer 1, row 0, position 5"),
    ("forward/q", (2, 1, 3, 1), 0.01, "forward/q", "layer 2, row 1, position 3"),
    ("score/logp", (1, 9), 0.01, "score/logp", "row 1, position 9"),
    ("replay/alpha", (0, 11), 0.01, "replay/alpha", "row 0, position 11"),
    ("decode/lse", (0, 1, 2, 3), 0.01, "decode/lse", "layer 0, row 1, step 2, head 3"),
    ("decode/page_scores", (0, 1, 0, 0, 4), 0.01, "decode/page_scores", "layer 1, row 1, step 0"),
    ("grpo/loss", (), 1e-3, "grpo/loss", ""),
    ("grad/layers.q_LDNH/projection", (1, 0), 0.01, "grad/layers.q_LDNH", "layer 1"),
    ("step/layers.q_LDNH/norm", (2,), 0.1, "step_norm/layers.q_LDNH", "layer 2"),
    ("stream/greedy/logp", (1, 3), 0.01, "stream/greedy/logp", "row 1, token 3"),
    ("forward/v", (1, 0, 5, 0), np.nan, "forward/v", "layer 1, row 0, position 5"),
    ("grpo/loss", (), np.nan, "grpo/loss", ""),
    ("grad/layers.q_LDNH/projection", (1, 0), np.nan, "grad/layers.q_LDNH", "layer 1"),
    ("score/logp", (1, 9), -np.inf, "score/logp", "row 1, position 9"),
])  # fmt: skip
def test_one_number_that_is_off_is_found_and_located(write, name, where, size, first, words):
    def change(arrays):
        arrays[name][where] += size

    result, rows = judged(write, change)
    assert result.verdict.startswith(f"DIFFERENT, first in {first} (")
    assert result.verdict.endswith(words) and rows[first].where == words
    assert [row.name for row in result.rows if row.ok is False] == [first]


@pytest.mark.parametrize("name, where", [
    ("forward/q", (0, 1, 11, 0)), ("score/logp", (0, 3)), ("score/logp", (1, 11)),
    ("score/top_logp", (0, 0, 3)),
])  # fmt: skip
def test_padding_prompts_and_void_columns_are_not_compared(write, name, where):
    def change(arrays):
        arrays[name][where] += 9

    assert judged(write, change)[0].ok


def test_deviations_are_relative_to_their_layer_and_small_ones_pass(write):
    def change(arrays):
        arrays["forward/q"][0] *= 1e3
        arrays["forward/q"][0, 0, 0, 0] += 0.05

    def larger(arrays):
        arrays["forward/q"][0] *= 1e3

    a, b = write("a", larger), write("b", change)
    row = next(row for row in compare.compare(a, b).rows if row.name == "forward/q")
    assert row.ok and 1e-6 < row.largest < 1e-4


def test_the_lowest_layer_is_named_not_the_first_quantity(write):
    def change(arrays):
        arrays["forward/q"][2] += 1
        arrays["forward/block"][1] += 1

    assert "first in forward/block (hidden state after the block), layer 1" in judged(
        write, change)[0].verdict  # fmt: skip


def swap_page(arrays, gap):
    """Another list at layer 0 of the sparse ones, row 1, step 1; then what follows from it."""
    pages = arrays["decode/pages"][0, 1, 1, 0]
    pages[-1] = next(p for p in range(P) if p not in pages)
    arrays["decode/page_gap"][0, 1, 1, 0] = gap
    arrays["decode/lse"][1, 1, 1:] += 0.5
    arrays["decode/lse"][2, 1, 1:] += 0.5


def test_a_tie_explains_other_pages_and_what_follows_is_not_judged(write):
    result, rows = judged(write, lambda arrays: swap_page(arrays, 1e-5))
    # by hand: 2 layers x (4 + 3) steps; after it come the next layer and one more step
    assert result.ok and rows["decode/pages"].where == (
        "3.12% of the lists differ, the first of each row by a tie; "
        "21% of decode comes after one and is not judged"
    )


def test_other_pages_without_a_tie_are_a_fault(write):
    result, rows = judged(write, lambda arrays: swap_page(arrays, 0.7))
    assert "first in decode/pages (pages read), layer 1, row 1, step 1, head 0" in result.verdict
    assert rows["decode/lse"].ok  # only what came before is judged


def test_lse_before_the_tie_is_still_judged(write):
    def change(arrays):
        swap_page(arrays, 1e-5)
        arrays["decode/lse"][1, 1, 0] += 0.5

    assert "decode/lse" in judged(write, change)[0].verdict


def test_tokens_that_part_limit_the_comparison_and_are_said(write):
    def change(arrays):
        arrays["tokens/tokens"][0, 9] += 1
        for name in ("forward/q", "forward/block"):
            arrays[name][:, 0, 9:] += 5
        arrays["grpo/loss"] += 1

    result, rows = judged(write, change)
    assert result.ok and "grpo/loss" not in rows and rows["forward/q"].ok
    assert "part in 1 of 2 rows" in result.notes[0] and "--force_tokens=a.npz" in result.notes[0]

    def earlier(arrays):
        change(arrays)
        arrays["forward/q"][:, 0, 8] += 5

    assert "position 8" in judged(write, earlier)[0].verdict


def test_sampled_tokens_are_judged_in_float32_only(write):
    def change(arrays):
        arrays["stream/greedy/tokens"][1, 2] += 1

    result, rows = judged(write, change)
    assert not result.ok and "1 of 2 rows part, the first at token 2" in result.verdict
    result, rows = judged(write, change, dtype="bfloat16")
    assert result.ok and rows["stream/greedy"].ok is None and rows["stream/greedy"].largest == 0.25


def test_in_bfloat16_the_mean_decides(write):
    def noisy(arrays):
        arrays["forward/q"] *= 1 + 0.02 * np.sign(arrays["forward/q"])

    def faulty(arrays):
        arrays["forward/q"][1] *= 1 + 0.1 * np.sign(arrays["forward/q"][1])

    result, rows = judged(write, noisy, dtype="bfloat16")
    assert result.ok and rows["forward/q"].largest > 0.01
    assert "forward/q" in judged(write, noisy)[0].verdict  # in float32 it is a fault
    result, _ = judged(write, faulty, dtype="bfloat16")
    assert "first in forward/q (queries after norm and RoPE), layer 1" in result.verdict


def test_the_floor_is_the_overlap_of_the_two_lists(write):
    def change(arrays):  # half of the listed mass moves to other tokens
        arrays["score/top_ids"][..., :10] += 100

    (*_, mean, p5), *_ = judged(write, change)[0].floor  # 10 of 20 left
    assert mean == pytest.approx(1.0) and p5 == pytest.approx(1.0)  # nothing is known of the rest

    def sharper(arrays):  # disjoint lists of which the first token has nearly all
        change(arrays)
        arrays["score/top_ids"][..., 10:] += 100
        arrays["score/top_logp"][:] = np.log(1e-3)
        arrays["score/top_logp"][..., 0] = np.log(0.98)

    (*_, mean, _), *_ = judged(write, sharper)[0].floor
    assert mean == pytest.approx(20 * 1e-3 + (0.04 + 19 * 1e-3) + 0.001)  # by hand

    def other(arrays):
        arrays["score/top_logp"][..., 0] = np.log(0.24)
        arrays["score/top_logp"][..., 1:] = np.log(0.76 / 19)

    (*_, mean, _), *_ = judged(write, other)[0].floor
    assert mean == pytest.approx(0.04 + 19 * min(0.04, 0.76 / 19), abs=1e-3)

    def once(arrays):  # 20 tokens of which b knows none at one of six positions
        arrays["score/top_ids"][0, 8] += 200
        arrays["score/top_logp"][0, 8] = np.log(0.001)

    (*_, mean, p5), _ = judged(write, once)[0].floor
    low = 20 * 0.001 + 20 * 0.001 + min(1 - 0.8, 1 - 0.02)
    assert p5 == pytest.approx(low) and mean == pytest.approx((5 + low) / 6)


def test_scores_are_matched_to_their_own_steps(write):
    """24 steps, scores at 0 and 16; pages part by a tie at step 14, so step 16 is not judged."""

    def longer(arrays):
        for name in ("pages", "page_gap", "lse"):
            arrays[f"decode/{name}"] = np.repeat(arrays[f"decode/{name}"], 6, 2)
        arrays["decode/page_scores"] = np.repeat(arrays["decode/page_scores"], 2, 2)
        arrays["tokens/prompt_len"][:] = 0
        for name in ("tokens", "logp"):
            arrays[f"tokens/{name}"] = np.tile(arrays[f"tokens/{name}"], 2)
        arrays["tokens/total_len"][:] = 24
        for name in [n for n in arrays if n.startswith(("forward", "score", "replay"))]:
            axis = 2 if name.startswith("forward") else 1
            arrays[name] = np.concatenate([arrays[name], arrays[name]], axis)

    def tie(arrays):
        longer(arrays)
        pages = arrays["decode/pages"][0, 1, 14, 0]
        pages[-1] = next(p for p in range(P) if p not in pages)
        arrays["decode/page_gap"][0, 1, 14, 0] = 1e-5
        arrays["decode/page_scores"][:, 1, 1] += 1

    def earlier(arrays):
        longer(arrays)
        arrays["decode/page_scores"][1, 1, 1] += 1

    assert compare.compare(write("a", longer), write("b", tie)).ok
    assert "decode/page_scores (scores of pages), layer 2, row 1, step 16" in compare.compare(
        write("a", longer), write("c", earlier)).verdict  # fmt: skip


def test_a_position_of_huge_activations_hides_no_other(write):
    def huge(arrays):
        arrays["forward/block"][1, :, 0] *= 1e4

    def change(arrays):
        huge(arrays)
        arrays["forward/block"][1, 1, 6] *= 1.01

    verdict = compare.compare(write("a", huge), write("b", change)).verdict
    assert "first in forward/block (hidden state after the block), layer 1, row 1, pos" in verdict


def test_gradients_are_located_from_above(write):
    def change(arrays):
        for name in ("layers.q_LDNH", "embed_VD", "final_norm_D"):
            arrays.setdefault(f"grad/{name}/norm", np.full(1, 2.0))
            arrays.setdefault(f"grad/{name}/projection", np.ones((1, 2)))

    def wrong(arrays):
        change(arrays)
        arrays["grad/layers.q_LDNH/projection"][:2] += 1
        arrays["grad/embed_VD/projection"] += 1

    def higher(arrays):
        wrong(arrays)
        arrays["grad/final_norm_D/projection"] += 1

    a = write("a", change)
    verdict = compare.compare(a, write("b", wrong)).verdict
    assert verdict == "DIFFERENT, first in grad/layers.q_LDNH (gradient of a parameter), layer 1"
    assert "first in grad/final_norm_D (" in compare.compare(a, write("c", higher)).verdict
