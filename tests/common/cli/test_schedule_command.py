"""`sparrow schedule` as a user meets it: find, validate, export, compare, and what is refused."""

import json
import shlex
import xml.etree.ElementTree as ElementTree

import pytest

from common.cli import command_line
from common.schedule import presets, schedule
from common.schedule.schedule import DENSE, Schedule
from tests.common.profile_tables import TABLE, profile

# p5 of k = 4 and 8 in two bins; the lower bound of k = 4 in bin 0 is 0.8.
PLAIN = {4: [(0.95, 0.8), 0.5], 8: [1.0, 0.9]}
SHORT = {4: [0.95, 0.5], 8: [1.0, 0.7]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with profiles: plain, with gaps, with halves, of pages of 32."""
    monkeypatch.chdir(tmp_path)
    for name, data in {
        "p": profile(PLAIN),
        "gaps": profile(TABLE),
        "halves": profile(PLAIN, halves=(PLAIN, SHORT)),
        "large": profile({0: [0.99, 0.99]}, 32),
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    (tmp_path / "strict.py").write_text(
        "from common.config import Config, MismatchConfig\n"
        "def get_config():\n    return Config(mismatch=MismatchConfig(tau=0.92))\n"
    )
    return tmp_path


def sparrow(capsys, line, status=0):
    """Output of `sparrow schedule LINE`; its one line on stderr if it fails."""
    assert command_line.main(["schedule", *shlex.split(line)]) == status
    out, err = capsys.readouterr()
    if status:
        assert out == "" and err.startswith("sparrow: ") and err.count("\n") == 1
    else:
        assert err == ""
    return err if status else out


@pytest.mark.parametrize(
    ("flags", "budgets"),
    [
        ("", (4, 8)),
        ("--tau=0.96", (8, DENSE)),
        ("--quantile=0.01 --tau=0.79", (4, 8)),
        ("--quantile=0.01", (8, DENSE)),
        ("--config=strict.py", (4, DENSE)),
        ("--config=strict.py --tau=0.4", (4, 4)),
        ("--config=strict.py --config.mismatch.tau=0.4", (4, 4)),
        ("--rule=point", (4, 8)),
        ("--rule=lower", (8, 8)),
        ("--extrapolate", (4, 8)),
    ],
)
def test_criterion_comes_from_flags_recipe_or_defaults(folder, capsys, flags, budgets):
    text = sparrow(capsys, f"--profile=p.json --out=s.json {flags}")
    found = schedule.load("s.json", page_size=16)
    assert found.budgets == budgets
    assert text.startswith(found.describe()) and "extrapolated" not in text
    assert (folder / "s.svg").stat().st_size > 1000
    assert "validation" not in found.provenance


def test_monotone_is_the_default(folder, capsys):
    for flag, budgets in [("", (4, 4, 8, 8)), ("--monotone", (4, 4, 8, 8))] + [
        (flag, (4, 4, 8, 4)) for flag in ("--nomonotone", "--monotone=false")
    ]:
        sparrow(capsys, f"--profile=gaps.json --extrapolate --tau=0.9 --out=s.json {flag}")
        assert schedule.load("s.json", page_size=16).budgets[:4] == budgets, flag


def test_bins_without_tokens_need_the_flag_and_are_named(folder, capsys):
    before = sorted(p.name for p in folder.iterdir())
    line = sparrow(capsys, "--profile=gaps.json --out=s.json", status=2)
    assert "bins 0, 4 (positions 0..63, 256..319)" in line and "--extrapolate" in line
    assert sorted(p.name for p in folder.iterdir()) == before
    text = sparrow(capsys, "--profile=gaps.json --out=s.json --extrapolate")
    assert "extrapolated, not measured: bins 0, 4 (positions 0..63, 256..319)" in text
    assert schedule.load("s.json", page_size=16).provenance["extrapolated_bins"] == [0, 4]


def test_halves_are_validated_in_two_lines_and_kept(folder, capsys):
    """A takes 4 and 8 (0.9): B has 0.95 and 0.70. B takes 4 and dense: A has 0.95 in bin 0."""
    text = sparrow(capsys, "--profile=halves.json --out=s.json")
    lines = [line for line in text.splitlines() if line.startswith("found on half")]
    assert len(lines) == 2
    assert "1 of 2 bins hold p5 >= 0.86; worst p5 0.700" in lines[0]
    assert "2 of 2 bins hold p5 >= 0.86 (1 of them dense)" in lines[1]
    validation = schedule.load("s.json", page_size=16).provenance["validation"]
    assert validation["share_held"] == 0.75
    assert validation["worst_shortfall"] == pytest.approx(0.16)
    text = sparrow(capsys, "--profile=halves.json --rule=lower --out=s.json")
    validation = schedule.load("s.json", page_size=16).provenance["validation"]
    assert validation["rule"] == "lower"


def test_the_page_size_that_reads_least_is_written(folder, capsys):
    """Lengths 32 and 96; every row has 500 tokens. Pages of 16: 2 pages of 2 and 6 of 6:
    (33 + 99) / 2 = 66; of 32 with k = 0: 1 of 1 and 3 of 3: (32.5 + 97.5) / 2 = 65."""
    text = sparrow(capsys, "--profile=p.json,large.json --out=s.json")
    assert "pages of 16: 66 tokens" in text and "pages of 32: 65 tokens" in text
    found = schedule.load("s.json", page_size=32)
    assert found.provenance["page_size_costs"] == {"16": 66, "32": 65}


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("--profile=p.json --preset=qwen3-1.7b-0.86", "either --profile=FILE or --preset=NAME"),
        ("--preset=qwen3-1.7b-0.86 --compare=p.json", "either --profile=FILE or --preset=NAME"),
        ("--preset=qwen-14b-0.86", "did you mean qwen3-14b-0.86?"),
        ("--preset=qwen3-1.7b-0.86 --tau=0.9", "--tau=0.9: has no effect with --preset"),
        ("--preset=qwen3-1.7b-0.86 --rule=point", "--rule=point: has no effect with --preset"),
        ("--compare=qwen3-1.7b-0.86 --nomonotone", "has no effect with --compare"),
        ("--preset=qwen3-1.7b-0.86 --extrapolate", "--extrapolate=True: has no effect"),
        ("--profile=p.json --rule=low", "rule='low': expected 'point'"),
        ("--profile=p.json,q.json", "--profile=q.json: no such file"),
        ("--profile=p.json,p.json", "give one for each page size"),
        ("--profile=p.json large.json", "large.json: not a flag"),
        ("--profile=p.json --out=s.svg", "--out=s.svg: expected a .json"),
        ("--compare=qwen3-1.7b-0.86 --out=s.json", "--out=s.json: expected an .svg file"),
        ("--compare=qwen3-1.7-0.86", "no file and no published schedule of that name; did you"),
        ("--compare=p.json", "p.json: format='sparrow-profile-1', expected 'sparrow-schedule-1'"),
        ("--compare=qwen3-1.7b-0.86,qwen3-1.7b-0.86", "is given twice"),
    ],
)
def test_mistakes_end_in_one_line(folder, capsys, line, part):
    before = sorted(p.name for p in folder.iterdir())
    assert part in sparrow(capsys, line, status=2)
    assert sorted(p.name for p in folder.iterdir()) == before


@pytest.mark.parametrize("name", presets.PUBLISHED)
def test_every_published_schedule_is_printed_and_exported(folder, capsys, name):
    text = sparrow(capsys, f"--preset={name}")
    first, last = presets.PUBLISHED[name][0], presets.PUBLISHED[name][-1]
    assert text.startswith(f"{name} (pages of 16): k = {first} from 0, ")
    assert f", {last} from " in text
    if name == "qwen3-1.7b-0.86":
        sparrow(capsys, f"--preset={name} --out=s/x.json")
        found = schedule.load("s/x.json", page_size=16)
        assert found.budgets[:3] == (29, 61, 93)  # paper, section 4
        assert (folder / "s" / "x.svg").read_text().count("<svg") == 1


def words(path):
    return {element.text for element in ElementTree.parse(path).iter() if element.text}


def test_all_published_schedules_side_by_side(folder, capsys):
    text = sparrow(capsys, f"--compare={','.join(presets.PUBLISHED)} --out=c.svg")
    for name in presets.PUBLISHED:
        assert sum(line.startswith(f"{name} ") for line in text.splitlines()) == 2
    assert set(presets.PUBLISHED) <= words("c.svg")


def test_presets_and_files_side_by_side(folder, capsys):
    """Share of pages at 2,500, 5,000 ... 40,000 tokens. 40,000: n = 2,500 pages; 1.7b-0.86 reads
    253 + 3: 10.24 %; my k = 0 reads 3: 0.12 %. 2,500: n = 157; 61 + 3: 40.8 %; 3: 1.9 %."""
    mine = Schedule(page_size=16, bin_tokens=64, budgets=(0,), name="mine")
    mine.save("mine.json")
    mine.save("again.json")
    text = sparrow(capsys, "--compare=qwen3-1.7b-0.86,mine.json,again.json --out=c.svg")
    assert mine.describe() in text
    table = [line.split() for line in text.splitlines() if line.count("%") == 5]
    assert [line[0] for line in table] == ["qwen3-1.7b-0.86", "mine", "again.json"]
    assert (table[0][1], table[0][-1]) == ("40.8%", "10.2%")
    assert (table[1][1], table[1][-1]) == ("1.9%", "0.1%") and table[1][1:] == table[2][1:]
    assert {"qwen3-1.7b-0.86", "mine", "again.json", "every token"} <= words("c.svg")
    apart = sparrow(capsys, "--compare qwen3-1.7b-0.86 mine.json again.json")
    assert apart == text.replace("wrote c.svg\n", "")
