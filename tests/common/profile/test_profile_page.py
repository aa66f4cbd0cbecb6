"""The page of a profile: a figure for everything measured, whatever is missing; names escaped."""

import json
from html.parser import HTMLParser

import numpy as np
import pytest

from common.config import Config, MismatchConfig
from common.profile import profile_page
from common.profile.profile_rows import Measured, Profile
from common.schedule.profile_file import check_profile

BIN = 100


def record(budgets, tokens=300, rows=4, min_tokens=50, model="models/tiny", **more):
    """A profile file's content of drawn alphas; `budgets` may have "dense"."""
    config = Config(mismatch=MismatchConfig(bin_tokens=BIN, min_tokens=min_tokens))
    about = {"model": model, "source": "drawn", "policy": "mean"} | more
    content = Profile(config, **about)
    rng, mask = np.random.default_rng(0), np.ones((rows, tokens), bool)
    for k in budgets:
        alpha = np.ones(mask.shape)
        if k != "dense":
            low = rng.random(mask.shape) < 0.4
            alpha[low] = rng.beta(2 + k, 1, low.sum())
        content.add(
            Measured(k=k, alpha_BT=alpha, mask_BT=mask, group_B=np.arange(rows),
                     estimate_BT=None if k == "dense" else 0.99 * alpha)
        )  # fmt: skip
    result = content.record()
    check_profile(result)
    return json.loads(json.dumps(result, allow_nan=False))


class Parsed(HTMLParser):
    """Tags that are open at the end, and how often each was opened."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen = [], {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen[tag] = self.seen.get(tag, 0) + 1
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.seen[tag] = self.seen.get(tag, 0) + 1


def page(profile, tmp_path, summary=()):
    profile_page.write(profile, tmp_path / "p.html", summary)
    text = (tmp_path / "p.html").read_text()
    parsed = Parsed(text)
    assert parsed.open == []
    return text, parsed.seen


def test_a_figure_for_everything_measured(tmp_path):
    profile = record(["dense", 2, 8])
    text, seen = page(profile, tmp_path, ["k = 2 pages read 10 %"])
    assert seen["svg"] == seen["figure"] == 2 + 1 + 2  # p5, p1; mean and p5; a histogram per budget
    assert seen["table"] == 3 and "k = 2 pages read 10 %" in text
    assert seen["tr"] == (1 + 3) + (1 + 9) + (1 + 6)  # shapes, rows, estimates
    for row in profile["rows"]:
        assert f"{row['p5']:.4f}" in text
    for number in (profile["shape"][1]["ks"], profile["shape"][2]["beta_a"]):
        assert f"{number:.4f}" in text
    for words in ("tau 0.86", "k = 8", "leaving out one of the prompts", "policy mean"):
        assert words in text
    assert "(too few)" not in text


def test_bars_of_a_histogram_can_be_seen(tmp_path):
    """Those above 0.99 are bins of a hundredth and a thousandth, and hold most tokens."""
    from common.report import plots

    widths, bar = [], []
    original = plots.Canvas.__exit__

    def watch(self, kind, *rest):
        widths.extend(p.get_width() / np.ptp(self.axes.get_xlim()) for p in self.axes.patches)
        bar.append(len(self.axes.patches))
        return original(self, kind, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots.Canvas, "__exit__", watch)
        page(record([2]), tmp_path)
    assert bar.count(22) == 1 and min(widths) > 0.03


@pytest.mark.parametrize(
    ("more", "figures"),
    [
        ({"tokens": 60}, 4),  # a single bin
        ({"tokens": 250, "min_tokens": 300}, 4),  # the last bin has too few
        ({"min_tokens": 10**6}, 3),  # nothing can be judged: no mean against p5
        ({"rows": 1, "tokens": 40}, 3),  # few tokens, one sequence, no fit
    ],
)
def test_page_of_little(tmp_path, more, figures):
    profile = record([2], **more)
    text, seen = page(profile, tmp_path)
    assert seen["svg"] == seen["figure"] == figures
    assert ("(too few)" in text) == any(not row["enough"] for row in profile["rows"])


def test_page_without_sparse_rows(tmp_path):
    text, seen = page(record(["dense"]), tmp_path)
    assert seen["figure"] == 2 and "dense" in text and "<h2>Estimated" not in text
    text, seen = page(record([]), tmp_path)
    assert seen.get("figure", 0) == 0 and "Nothing measured yet" in text


def test_names_are_escaped(tmp_path):
    name = "models/<b>x&y"
    text, seen = page(record([2], model=name, source='<i>"book"', policy="mean"), tmp_path)
    assert "b" not in seen and "i" not in seen
    assert "&lt;b&gt;x&amp;y" in text and "&lt;i&gt;" in text
    plain, _ = page(record([2], model="models/plain"), tmp_path)
    assert "Profile: plain" in plain and "models/" not in plain
