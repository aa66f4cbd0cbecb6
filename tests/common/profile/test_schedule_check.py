"""A schedule is measured by itself: what it does to the keys of early bins is in its tail."""

import dataclasses
import json
import sys
import types

import numpy as np
import pytest

from common import setup
from common.errors import UserError
from common.profile import schedule_check
from common.schedule.schedule import Schedule
from common.tasks import registry
from common.types import Replay
from tests.common.fake_backend import Fake, make_config


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """checked(schedule name): (record, fake) of a check with the fake backend."""

    def call(name):
        config = make_config(rollout={"schedule": name, "prompts_per_step": 4})
        watched = dataclasses.replace(config.mismatch, profile_prompts=4, profile_samples=2)
        config = dataclasses.replace(config, mismatch=watched)
        fake = Fake(config)
        fake.load_weights(0, 0)
        fake.load_scorer(0, 0)

        def replay(rollout, rows, schedule, *, temperature=None):
            """Any bin is bad under k = 1, and so is a later one whose keys bin 0 wrote with 1."""
            logp = rollout.logp_sparse_BT[rows]
            k = schedule.budgets_at(np.arange(logp.shape[1]))
            alpha = np.where((k > 1) & (schedule.budgets[0] > 1), 1.0, 0.3)
            return Replay(
                rows=rows, alpha_BT=np.broadcast_to(alpha, logp.shape), logp_replay_BT=logp
            )

        fake.replay = replay
        backend = types.SimpleNamespace(build=lambda config, *, vocab_size, stop_ids: fake.parts())
        monkeypatch.setattr(setup, "LEARNER", "fake_backend")
        monkeypatch.setitem(sys.modules, "fake_backend", backend)
        monkeypatch.setattr(registry, "score", lambda task, r, pool: np.ones(len(r.prompts)))
        out = tmp_path / "check.json"
        record = schedule_check.check(config, out)
        assert json.loads(out.read_text()) == record and not list(tmp_path.glob("*.parts"))
        return record, fake

    return call


def test_a_schedule_is_sampled_and_replayed_with_itself(checked, tmp_path, capsys):
    """Uniform k = 4 holds in every bin; after k = 1 in bin 0 the same k fails in use."""
    path = tmp_path / "s.json"
    budgets = (1, *[4] * 9)
    Schedule(page_size=4, bin_tokens=8, budgets=budgets, name="found").save(path)
    record, fake = checked(str(path))
    assert [call["schedule"].budgets for call in fake.calls] == [budgets]
    assert record["meets"] is False and record["schedule"]["name"] == "found"
    assert all(
        b["end"] - b["start"] == 8 and b["k"] == 4 and b["p5"] == 0.3 for b in record["bins"]
    )
    assert {b["num_units"] for b in record["bins"]} <= {1, 2, 3, 4}
    assert record["failing_bins"] == [b["bin"] for b in record["bins"]]
    said = capsys.readouterr().out
    assert "FAILS" in said and f"in use, 0 of {len(record['bins'])} judged bins hold p5" in said

    uniform, _ = checked("k=4")
    assert uniform["meets"] is True and uniform["bins"][0]["p5_high"] == 1.0


def test_samples_stand_beside_what_the_profile_promised(checked, tmp_path, capsys):
    """The profile said 0.95 of every bin, and in use it is 0.3: lower by 0.65."""
    evidence = {"k": 4, "measured_k": 4, "p5": 0.95, "low": 0.9, "high": 0.97}
    history = {"tau": 0.86, "quantile": 0.05}
    history |= {"bins": [{"start": 8 * i, "end": 8 * i + 8, **evidence} for i in range(10)]}
    path = tmp_path / "s.json"
    Schedule(page_size=4, bin_tokens=8, budgets=(1, *[4] * 9), provenance=history).save(path)
    record, _ = checked(str(path))
    reached = [b["bin"] for b in record["bins"]]
    assert set(range(10)) - set(reached) <= set(record["unjudged_bins"])
    want = {"k": 4, "p5": 0.95, "p5_low": 0.9, "p5_high": 0.97}
    assert all(b["promised"] == want for b in record["bins"])
    said = capsys.readouterr().out
    judged = len(reached) - sum(not b["enough"] for b in record["bins"])
    assert f"promised in {judged} of {judged} bins, by 0.650 at most" in said
    assert ", promised 0.950 [0.900, 0.970]" in said and "was found for" not in said
    assert "prompts  FAILS" in said


def test_a_dense_schedule_has_no_tail(checked):
    with pytest.raises(UserError, match="name a sparse schedule"):
        checked("dense")
