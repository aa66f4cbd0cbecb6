"""The published schedules: names, bins and budgets."""

from common.schedule import presets


def test_published_table():
    """20 schedules of 20 bins; rising with length; in one model a higher tau never asks for less.
    All of that holds without exception. k = 13 + 16 n but for one number, the 385 of 8b-0.86."""
    assert len(presets.PUBLISHED) == 20
    by_model, odd = {}, []
    for name, budgets in presets.PUBLISHED.items():
        model, _, tau = name.rpartition("-")
        by_model.setdefault(model, []).append((float(tau), budgets))
        assert len(budgets) == 20, name
        assert list(budgets) == sorted(budgets), name
        odd += [(name, k) for k in budgets if (k - 13) % 16]
    assert odd == [("qwen3-8b-0.86", 385)]
    for model, rows in by_model.items():
        assert [tau for tau, _ in rows] == sorted({tau for tau, _ in rows}), model
        for (_, lower), (_, higher) in zip(rows, rows[1:], strict=False):
            assert all(a <= b for a, b in zip(lower, higher, strict=True)), model
    assert {model.removeprefix("qwen3-"): len(rows) for model, rows in by_model.items()} == {
        **{"1.7b": 8, "4b": 6, "8b": 5, "14b": 1}
    }
    # one row by hand: 29 + 45 + 77 + 125 + 253 + 10 * 381 + 509 + 2 * 637 + 2 * 893 = 7908
    assert sum(presets.PUBLISHED["qwen3-14b-0.86"]) == 7908
