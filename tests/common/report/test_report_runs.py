"""Run directories in memory: names are unique, settings are flat."""

import json

from common.report.report_runs import flatten, load_runs


def write_records(path, records, *, config=None, about=None):
    path.mkdir()
    lines = [json.dumps({"bins": [], "alarms": [], **record}) + "\n" for record in records]
    (path / "metrics.jsonl").write_text("".join(lines))
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    if about is not None:
        (path / "run.json").write_text(json.dumps(about))
    return path


def test_flatten():
    assert flatten({"a": {"b": 1, "c": {}}, "d": [2]}) == {"a.b": 1, "a.c": {}, "d": [2]}


def test_runs_of_one_name_are_told_apart(tmp_path):
    dirs = [write_records(tmp_path / d, [{"step": 0}], config={"name": "same"}) for d in ("a", "b")]
    assert [run.plot.name for run in load_runs([*dirs, dirs[1]])] == [
        "same",
        "same (b)",
        "same (b)'",
    ]
