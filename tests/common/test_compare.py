"""The judge of two traces on made-up ones: what it must see, where, and what it must refuse."""

import numpy as np
import pytest

from common import compare, compare_page, crosscheck, deviations, hf, trace_file
from common.errors import UserError
from common.trace_file import Trace, TraceWriter

L, B, T, PROMPT, R, K, J, P, N = 3, 2, 12, 8, 4, 2, 5, 9, 4
META = {
    "backend": "jax", "model_checksum": "m", "prompts_checksum": "p", "dtype": "float32",
    "settings": {"seed": 0, "temperature": 1.0}, "device": "cpu", "versions": {"numpy": "2"},
    "config": {"mismatch": {"bin_tokens": 5}},
}  # fmt: skip


def facts():
    """A trace's arrays: three layers of which the first is dense, two rows of 8 + 4 tokens."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    pages = np.sort(rng.permuted(np.tile(np.arange(P), (L - 1, B, R, K, 1)), axis=-1)[..., :J])
    arrays = {
        "tokens/tokens": rng.integers(0, 50, (B, T)),
        "tokens/prompt_len": np.full(B, PROMPT),
        "tokens/total_len": np.array([T, T - 1]),
        "tokens/logp": -abs(draw(B, T)),
        "score/logp": -abs(draw(B, T)),
        "score/entropy": abs(draw(B, T)),
        "score/top_ids": rng.permuted(np.tile(np.arange(50), (B, T, 1)), axis=-1)[..., :20],
        "score/top_logp": np.log(np.full((B, T, 20), 0.04, np.float32)),
        "replay/alpha": np.full((B, T), 0.9, np.float32),
        "replay/logp": -abs(draw(B, T)),
        "decode/page_scores": draw(L - 1, B, 1, K, P),
        "decode/pages": pages.astype(np.int16),
        "decode/page_gap": abs(draw(L - 1, B, R, K)) + 0.5,
        "decode/lse": draw(L, B, R, N),
        "grpo/loss": np.float64(0.25),
        "grpo/scale": np.float64(1.0),
        "grpo/weight": np.ones((B, T), np.float32),
        "stream/greedy/tokens": rng.integers(0, 50, (B, R)),
        "stream/greedy/logp": -abs(draw(B, R)),
    }
    for name in deviations.FORWARD:
        shape = (L, B, T) if name == "block_norm" else (L, B, T, 2)
        arrays[f"forward/{name}"] = 3 * draw(*shape)
    for stage in ("grad", "step"):
        arrays[f"{stage}/layers.q_LDNH/norm"] = np.full(L, 2.0)
        arrays[f"{stage}/layers.q_LDNH/projection"] = np.ones((L, 2))
    return arrays


@pytest.fixture
def write(tmp_path):
    def write(name, change=None, **meta):
        arrays = {key: np.array(x) for key, x in facts().items()}
        if change:
            change(arrays)
        with TraceWriter(tmp_path / f"{name}.npz") as file:
            for key, x in arrays.items():
                file.put(key, x)
            file.finish(META | meta)
        return Trace(tmp_path / f"{name}.npz")

    return write


def judged(write, change, **meta):
    result = compare.compare(write("a", **meta), write("b", change, **meta))
    return result, {row.name: row for row in result.rows}


def test_a_trace_is_the_same_as_itself(write):
    result, rows = judged(write, None)
    assert result.ok and result.verdict == "SAME within the tolerances" and not result.notes
    assert len(rows) == 22 and all(row.ok for row in rows.values())
    assert all(row.largest == 0 for row in rows.values())
    # 4 + 3 response tokens from position 8 on, bins of 5
    assert [part[:3] for part in result.floor] == [(8, 9, 4), (10, 11, 3)]
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


def test_what_is_missing_is_said_and_what_has_another_shape_is_refused(write):
    def without(arrays):
        for name in [n for n in arrays if n.startswith(("decode", "replay", "forward/q"))]:
            del arrays[name]

    result, rows = judged(write, without)
    missing = "replay, decode, forward/q"
    assert result.verdict == f"SAME within the tolerances; not compared: {missing}"
    assert "forward/q" not in rows and not result.notes

    def partly(arrays):
        for name in ("grad/layers.q_LDNH/norm", "grad/layers.q_LDNH/projection", "score/top_logp"):
            arrays[name.replace("q_LDNH", "k_LDKH")] = arrays[name] + 0

    assert judged(write, partly)[0].missing == ["grad/layers.k_LDKH"]

    def untrained(arrays):
        for name in [n for n in arrays if n.startswith(("grpo", "grad", "step"))]:
            del arrays[name]

    assert judged(write, untrained)[0].missing == ["grpo", "grad", "step"]

    def cut(arrays):
        arrays["forward/q"] = arrays["forward/q"][:1]

    with pytest.raises(UserError, match="forward/q has shape"):
        judged(write, cut)

    def no_tokens(arrays):
        del arrays["tokens/total_len"]

    with pytest.raises(UserError, match="has no tokens/total_len"):
        compare.compare(write("x", no_tokens), write("y", no_tokens))

    def words(arrays):
        arrays["score/logp"] = np.full((B, T), "x")

    with pytest.raises(UserError, match="score/logp holds no numbers"):
        judged(write, words)
    for config in ({}, None, {"mismatch": {"bin_tokens": 0}}, {"mismatch": {"bin_tokens": "5"}}):
        with pytest.raises(UserError, match="has no mismatch.bin_tokens"):
            judged(write, None, config=config)


@pytest.mark.parametrize("key, value, words", [
    ("model_checksum", "x", "other weights"), ("prompts_checksum", "x", "other prompts"),
    ("settings", {"seed": 1, "temperature": 1.0}, "the same seed"),
])  # fmt: skip
def test_traces_of_something_else_are_refused(write, key, value, words):
    with pytest.raises(UserError, match=words):
        compare.compare(write("a"), write("b", **{key: value}))


def test_broken_files_get_one_line(write, tmp_path):
    sound = write("a").path
    for name, content in (("empty", b""), ("text", b"hello"), ("cut", sound.read_bytes()[:-300])):
        path = tmp_path / f"{name}.npz"
        path.write_bytes(content)
        with pytest.raises(UserError, match="is no trace") as caught:
            Trace(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="no such file"):
        Trace(tmp_path / "missing.npz")
    np.savez(tmp_path / "other.npz", meta=np.frombuffer(b'{"format": "x"}', np.uint8))
    with pytest.raises(UserError, match="expected format"):
        Trace(tmp_path / "other.npz")
    np.savez(tmp_path / "none.npz", x=np.zeros(3))
    with pytest.raises(UserError, match="is no trace"):
        Trace(tmp_path / "none.npz")
    for at in range(100, sound.stat().st_size - 1, 997):
        damaged = bytearray(sound.read_bytes())
        damaged[at] ^= 0xFF
        (tmp_path / "damaged.npz").write_bytes(damaged)
        try:
            compare.compare(Trace(tmp_path / "damaged.npz"), Trace(sound))
        except UserError as error:
            assert "\n" not in str(error)


def test_a_trace_that_was_cut_short_leaves_no_file(tmp_path):
    with pytest.raises(KeyboardInterrupt), TraceWriter(tmp_path / "a.npz") as file:
        file.put("x", np.zeros(3))
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_checksums_tell_names_shapes_and_values_apart():
    x = np.arange(6, dtype=np.float32)
    others = ([("b", x)], [("a", x.reshape(2, 3))], [("a", x + 1)], [("a", np.float64(x))])
    sums = {trace_file.checksum(pairs) for pairs in ([("a", x)], *others)}
    assert len(sums) == 5 and trace_file.checksum([("a", x.copy())]) in sums


def test_the_page_names_verdict_quantities_and_both_sides(write, tmp_path):
    a = write("a")
    b = write("b", lambda x: x["forward/v"].__iadd__(1), backend="torch", device="<gpu>")
    result = compare.compare(a, b)
    compare_page.write(result, a, b, tmp_path / "c.html")
    page = (tmp_path / "c.html").read_text()
    for words in ("DIFFERENT, first in forward/v", "torch float32 on &lt;gpu&gt;", "Noise floor",
                  "decode/pages", "grad/layers.q_LDNH", "<svg"):  # fmt: skip
        assert words in page, words
    assert "<script" not in page


def test_the_command_line_ends_with_the_verdict(write, sparrow, tmp_path):
    write("a"), write("b", lambda x: x["forward/v"].__iadd__(1)), write("c", model_checksum="x")
    same = sparrow("compare", "a.npz", "a.npz", "--out=p.html", cwd=tmp_path)
    assert same.returncode == 0 and "SAME" in same.stdout and (tmp_path / "p.html").is_file()
    other = sparrow("compare", "a.npz", "b.npz", cwd=tmp_path)
    assert other.returncode == 1 and "first in forward/v" in other.stdout.splitlines()[-1]
    refused = sparrow("compare", "a.npz", "c.npz", cwd=tmp_path)
    assert refused.returncode == 2 and "other weights" in refused.stderr


def test_the_matrix_marks_what_differs(write):
    def change(arrays):
        arrays["forward/q"][1, 0, 5, 0] += 1
        arrays["stream/greedy/tokens"][1, 2] += 1

    result, _ = judged(write, change)
    cells = {name: crosscheck.cell(result, key) for name, key in crosscheck.COLUMNS.items()}
    assert cells["activations"].endswith(" !") and cells["tokens"] == "75% same !"
    assert cells["LSE"] == "0e+00" and cells["gradients"] == "0e+00"
    assert crosscheck.cell(result, ("nothing/",)) == "-"


@pytest.mark.parametrize("name", crosscheck.MODELS)
def test_the_matrix_writes_models_that_can_be_read(tmp_path, name):
    crosscheck.write_model(tmp_path, crosscheck.MODELS[name])
    geometry, weights = hf.load(tmp_path)
    assert geometry.qk_norm == (name == "qwen3") and geometry.num_layers == 2
    q = dict(weights)["layers.q_LDNH"]
    assert q.std() == pytest.approx(1.2 / np.sqrt(96), rel=0.02)
    assert (tmp_path / "prompts.json").is_file()
