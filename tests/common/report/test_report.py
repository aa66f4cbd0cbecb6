"""The report: what it says, that it is self-contained and robust, and how a browser lays it out."""

import dataclasses
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest

from common.config import Config, MismatchConfig, RolloutConfig
from common.errors import UserError
from common.records.metrics import MetricsWriter
from common.report.report import bench_table, write_report
from tests.common.report.test_report_runs import write_records
from tests.common.report.test_report_words import speed

NUM_BINS = 7
SCHEDULE = {
    "format": "sparrow-schedule-1",
    "bin_tokens": 64,
    "page_size": 16,
    "bins": [
        {"start": 64 * b, "end": 64 * b + 64, "k": k}
        for b, k in enumerate([4, 6, 8, 10, 14, "dense", "dense"])
    ],
}


def bins_of(step, sparse, rng):
    entries = []
    for b in range(NUM_BINS):
        p5 = 0.99 - 0.02 * b * sparse - 0.03 * rng.random()
        p1 = p5 - 0.1 - 0.2 * sparse * rng.random()
        entry = {"bin": b, "start": 64 * b, "end": 64 * b + 64, "count": 900 - 120 * b}
        entry |= {"mean": 0.99, "p1": p1, "p5": p5, "p50": 1.0, "p5_low": p5 - 0.01}
        entry |= {"p5_high": p5 + 0.005, "p1_low": p1 - 0.02, "p1_high": p1 + 0.02}
        entry |= {"share_above_0_999": 0.9, "enough": b < 6, "k1": 1e-3, "k3": 2e-3, "ess": 0.97}
        entry |= {"clip_fraction": 0.002, "masked_fraction": 0.0}
        entry["k"] = SCHEDULE["bins"][b]["k"] if sparse else "dense"
        entries.append(entry)
    return entries


def values_of(step, sparse, rng, *, evaluate):
    reward = 0.33 + 0.4 * (1 - np.exp(-step / 6)) - 0.03 * sparse
    values = {"reward/mean": reward + 0.04 * rng.normal(), "reward/groups_with_signal": 0.7}
    values |= {"response/len_mean": 310 + 2 * step + 5 * rng.normal(), "response/len_max": 447}
    values |= {"mismatch/ess": 1 - 0.03 * sparse, "mismatch/k3": 2e-3 * (1 + sparse)}
    values |= {"grpo/clip_fraction": 2e-3 + 1e-3 * rng.random(), "grpo/masked_fraction": 0.0}
    values |= {"grpo/truncated_fraction": 0.01 * sparse, "grpo/entropy": 0.4 - 0.01 * step}
    values |= {
        "grpo/grad_norm": 0.5 + 0.1 * rng.random(),
        "rollout/share_of_pages": 1 - 0.4 * sparse,
    }
    speed = (2100 if sparse else 1500) * (0.3 if step == 0 else 1) + 40 * rng.normal()
    rollout = 19000 / speed
    times = {"rollout": rollout, "reward": 0.02, "score": 1.1, "mismatch": 0.8, "pack": 0.01}
    times |= {"update": 2.6, "push": 0.02, "checkpoint": 0.4}
    values |= {f"time/{k}": v for k, v in times.items()}
    values["time/step"] = sum(times.values()) + 0.1
    values["throughput/rollout_tokens_per_second"] = speed
    values["throughput/step_tokens_per_second"] = 19000 / values["time/step"]
    if evaluate and step % 5 == 4:
        held = reward - 0.01
        values |= {"eval/reward": held, "eval/reward_low": held - 0.08}
        values["eval/reward_high"] = held + 0.08
    return values


def make_run(path, *, sparse, steps=20, evaluate=True, config=None, schedule=SCHEDULE, name=None):
    """A run directory with made-up, reproducible numbers."""
    path.mkdir(parents=True)
    config = config or Config(
        name=name or ("scheduled" if sparse else "dense"),
        rollout=RolloutConfig(schedule="demo.json" if sparse else "dense"),
        mismatch=MismatchConfig(bin_tokens=64),
    )
    (path / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    about = {"machine": {"cpus": 2}, "versions": {"numpy": "2.0"}, "started": "2026-11-29T12:00"}
    about["schedule"] = schedule if sparse else "dense"
    (path / "run.json").write_text(json.dumps(about))
    rng = np.random.default_rng(sparse)
    with MetricsWriter(path, resume_step=0, console=False, total_steps=20) as writer:
        for step in range(steps):
            values = values_of(step, sparse, rng, evaluate=evaluate)
            bins = bins_of(step, sparse, rng)
            judged = [entry for entry in bins if entry["enough"]]
            for q in ("p5", "p1"):
                values[f"mismatch/{q}_min"] = min(entry[q] for entry in judged)
            alarms = ["p5 below tau in bin 5"] if values["mismatch/p5_min"] < 0.86 else []
            writer.write(step, values, bins=bins, alarms=alarms)
    return path


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(report file, its text) of a dense and a scheduled run."""
    root = tmp_path_factory.mktemp("pair")
    dirs = [make_run(root / "a", sparse=False), make_run(root / "b", sparse=True)]
    write_report(dirs, root / "report.html")
    return root / "report.html", (root / "report.html").read_text(encoding="utf-8")


class Page(HTMLParser):
    """Collects tags, ids and external references; checks that tags are balanced."""

    VOID = {"meta", "link", "br", "use", "path"}

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.tags, self.references, self.words = [], [], [], [], []
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        self.ids += [attributes["id"]] if "id" in attributes else []
        links = (attributes.get(k) for k in ("src", "href", "xlink:href"))
        self.references += [link for link in links if link]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in ("meta", "link", "br"):
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_report_is_self_contained_and_sound(pair):
    page = Page(pair[1])
    assert "script" not in page.tags and "img" not in page.tags
    assert all(r.startswith(("#", "data:")) for r in page.references)
    assert {r[1:] for r in page.references if r.startswith("#")} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert "@import" not in pair[1] and not re.search(r"url\((?!#)", pair[1])


def test_all_plots_of_the_issue_are_there(pair):
    for title in (
        "Reward",
        "Response length",
        "Lowest p5 of alpha",
        "Lowest p1 of alpha",
        "p5 of alpha by length: scheduled",
        "Schedule: pages read",
        "Share of pages read",
        "Tokens per second",
        "Seconds per step",
        "Clip fraction",
        "Effective sample size",
    ):
        assert f'aria-label="{title}"' in pair[1], title


def test_svg_colours_follow_the_page(pair):
    assert "var(--ink, #24292f)" in pair[1] and "var(--c1, #d55e00)" in pair[1]
    bare = re.sub(r"var\(--\w+, #[0-9a-f]{6}\)|<style>.*?</style>", "", pair[1], flags=re.S)
    assert "#24292f" not in bare and "#000000" not in bare


NULLS = {"reward/mean": None, "mismatch/p5_min": None, "eval/reward": None, "time/step": None}
AWKWARD = {
    "no step": [],
    "one step": [{"step": 0, "reward/mean": 0.5, "time/step": 2.0, "time/rollout": 1.0}],
    "nulls": [{"step": 0, **NULLS}, {"step": 1, **NULLS}],
    "null bins": [
        {"step": 0, "bins": [{"bin": 0, "start": 0, "end": 64, "p5": None, "k": 4, "count": 0}]}
    ],
    "constant": [{"step": s, "reward/mean": 0.0, "grpo/clip_fraction": 0.0} for s in range(3)],
    "no interval": [{"step": 0, "eval/reward": 0.5, "eval/reward_low": None}],
    "first bin missing": [
        {"step": 0, "bins": [{"bin": 3, "start": 192, "end": 256, "p5": 0.7, "p1": 0.1, "k": 4}]}
    ],
    "all zero speed": [speed(0, 0.0, 0.0), speed(1, 0.0, 0.0)],
}


def sound_words(path):
    words = " ".join(Page(path.read_text(encoding="utf-8")).words)
    assert not re.search(r"\b(nan|inf|None)\b", words)
    return words


@pytest.mark.parametrize(("case", "with_config"), [(c, i % 2 == 0) for i, c in enumerate(AWKWARD)])
def test_awkward_runs_give_a_sound_page(tmp_path, case, with_config):
    config = {"name": "odd", "num_steps": 9, "rollout": {"schedule": "dense"}}
    run = write_records(tmp_path / "a", AWKWARD[case], config=config if with_config else None)
    write_report([run], tmp_path / "r.html")
    words = sound_words(tmp_path / "r.html")
    assert ("still running or stopped" in words) == with_config


def test_all_awkward_runs_on_the_same_axes(tmp_path):
    dirs = [make_run(tmp_path / "b", sparse=True, steps=2, evaluate=False, schedule=None)]
    for case, records in AWKWARD.items():
        config = {"name": case, "num_steps": 1}
        dirs.append(write_records(tmp_path / case, records, config=config))
    write_report(dirs, tmp_path / "r.html")
    words = sound_words(tmp_path / "r.html")
    assert all(case in words for case in AWKWARD) and "no step finished yet" in words


def test_torn_last_line_of_a_running_run(tmp_path):
    run = write_records(tmp_path / "a", [{"step": 0, "reward/mean": 0.5}])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "rew')
    write_report([run], tmp_path / "r.html")
    assert "a: 1 steps" in sound_words(tmp_path / "r.html")


def test_everything_is_escaped(tmp_path):
    evil = "<script>alert('1')</script>&\"$x_2$"
    config = {"name": evil, evil: evil, "num_steps": 1, "rollout": {"schedule": "dense"}}
    about = {"command": [evil], "machine": {evil: evil}}
    records = [{"step": 0, "reward/mean": 1.0, "alarms": [evil], **speed(0, 5.0, 4.0)}]
    records[0]["bins"] = [
        {"bin": 0, "start": evil, "end": 64, "p5": None, "k": evil, "count": None, "p1": None}
    ]
    run = write_records(tmp_path / "a", records, config=config, about=about)
    write_report([run], tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<script" not in text
    assert "script" not in Page(text).tags
    assert text.count("&lt;script&gt;alert(&#x27;1&#x27;)&lt;/script&gt;&amp;") > 6


def test_differing_settings_come_first(pair):
    differs, common = pair[1].index("Settings that differ"), pair[1].index("Common settings")
    assert differs < pair[1].index("<td>rollout.schedule</td>") < common
    assert common < pair[1].index("<td>rollout.page_size</td>")


@pytest.mark.parametrize("missing", [[], ["nowhere"]])
def test_no_run_is_one_clear_line(tmp_path, missing):
    with pytest.raises(ValueError, match="expected"):
        write_report([tmp_path / name for name in missing], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--allow-file-access-from-files",
    "--enable-logging=stderr",
    "--virtual-time-budget=4000",
]
PROBE = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><body>
<pre id="result">not loaded</pre><script>
const results = {}, widths = WIDTHS;
function measure(frame, width) {
  const page = frame.contentDocument, root = page.documentElement;
  page.querySelectorAll("details").forEach(d => { d.open = true; });
  const wide = [...page.querySelectorAll("body *")].filter(e =>
    !e.closest("svg, .table") && e.getBoundingClientRect().right > width + 0.5);
  const sizes = [...page.querySelectorAll("svg text")].map(t =>
    parseFloat(getComputedStyle(t).fontSize) * t.getScreenCTM().a);
  const cut = [...page.querySelectorAll("svg")].flatMap(svg => {
    const box = svg.getBoundingClientRect();
    return [...svg.querySelectorAll("text")].filter(t => {
      const b = t.getBoundingClientRect();
      return b.left < box.left - 1 || b.right > box.right + 1 || b.bottom > box.bottom + 1;
    }).map(t => svg.getAttribute("aria-label") + ": " + t.textContent);
  });
  return {scroll: root.scrollWidth, wide: wide.map(e => e.tagName + "." + e.className),
    smallest: Math.min(...sizes), cut: cut, svgs: page.querySelectorAll("svg").length};
}
for (const width of widths) {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:900px;border:0`;
  frame.onload = () => {
    results[width] = measure(frame, width);
    if (Object.keys(results).length == widths.length)
      document.getElementById("result").textContent = JSON.stringify(results);
  };
  frame.src = "report.html";
  document.body.append(frame);
}
</script></body>"""


def look(folder, widths, profile):
    """Load folder/report.html in frames of these widths; ({width: measurements}, console lines)."""
    (folder / "probe.html").write_text(PROBE.replace("WIDTHS", str(widths)))
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--dump-dom"]
    result = subprocess.run(
        [*command, f"file://{folder}/probe.html"], capture_output=True, text=True, timeout=120
    )
    found = re.search(r'<pre id="result">({.*?})</pre>', result.stdout, re.S)
    assert found, result.stderr[-2000:]
    console = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    return {int(k): v for k, v in json.loads(html.unescape(found[1])).items()}, console


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not on PATH")
def test_in_a_browser(pair, tmp_path):
    measured, console = look(pair[0].parent, [320, 390, 1200], tmp_path / "profile")
    assert console == []
    for width, seen in measured.items():
        assert seen["wide"] == [] and seen["scroll"] <= width, width
        assert seen["cut"] == [], width
        assert seen["svgs"] >= 15
        assert seen["smallest"] >= 8, width  # CSS pixels; 10 user units, scaled to 320 px


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not on PATH")
def test_the_browser_check_sees_faults(pair, tmp_path):
    text = pair[1].replace("</main>", '<p style="width:700px">wide</p></main>')
    text = text.replace("</body>", "<script>console.error('boom')</script></body>")
    text = text.replace("training step</text>", f"{'training step ' * 5}</text>")
    (tmp_path / "report.html").write_text(text, encoding="utf-8")
    measured, console = look(tmp_path, [390], tmp_path / "profile")
    assert "P." in measured[390]["wide"] and measured[390]["scroll"] > 390
    assert any("boom" in line for line in console)
    assert measured[390]["cut"]


BENCH = {
    "batch": 8, "context": 16384, "selected": 224, "page": 16, "speedup": 4.0, "byte_bound": 4.27,
    "dense_paged_ms": 320.0, "dense_paged_gb_per_s": 3.3, "dense_contiguous_ms": 250.0,
    "dense_contiguous_gb_per_s": 4.2, "sparse_ms": 80.0, "sparse_gb_per_s": 3.0,
    "step_dense_ms": 700.0, "step_sparse_ms": 200.0,
}  # fmt: skip


def test_what_the_bench_table_says(tmp_path):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(BENCH))
    html = bench_table(path)
    assert "8 sequences of 16,384 tokens, 224 pages of 16 read" in html
    assert "4.0x faster" in html and "the bytes allow 4.3x" in html
    assert "a whole decode step of two layers 3.5x" in html  # 700 / 200
    assert ">320<" in html and ">80<" in html


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sparse_ms": "fast"}, "no sparse_ms"),
        ({"speedup": None}, "speedup=None"),
        ({"step_sparse_ms": 0}, "step_sparse_ms=0"),
    ],
)
def test_a_damaged_bench_file_is_one_line(tmp_path, change, words):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(BENCH | change))
    with pytest.raises(UserError, match=words):
        bench_table(path)


@pytest.mark.parametrize("text", ["", "[" * 100_000, "[1, 2]", "{}"])
def test_another_file_than_a_bench_is_one_line(tmp_path, text):
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"bench\.json: no"):
        bench_table(path)
