"""What a checkpoint keeps of a run, of its controller, and parts of long work: damaged, seeded."""

import json
import random

import numpy as np
import pytest

from common import setup
from common.errors import UserError
from common.mismatch.controller import Controller
from common.profile.kept_parts import KeptParts
from tests.common.mismatch.test_controller import config_of, start_of
from tests.common.records.test_damaged_runs import changed


def test_where_a_run_goes_on():
    assert setup.resume_point(None) == (0, 0)
    assert setup.resume_point({"step": 3, "version": 5}) == (3, 5)
    for odd in ({}, {"step": 3}, {"step": "3", "version": 5}, {"step": -1, "version": 0},
                {"step": True, "version": 0}, {"step": 10**400, "version": 0}):  # fmt: skip
        with pytest.raises(UserError, match="the checkpoint's (step|version)"):
            setup.resume_point(odd)


def test_a_changed_state_of_the_controller_is_refused_or_can_be_used():
    config, start = config_of(2), start_of(8, 16)
    alpha = np.full((4, 80), 0.5)
    groups = np.arange(4)
    state = Controller(config, start).state_dict()
    rng, refused = random.Random(6), 0
    for _ in range(300):
        text = json.dumps(state)
        for _ in range(rng.choice((1, 1, 2))):
            text = changed(text, rng)
        try:
            controller = Controller(config, start, json.loads(text))
        except UserError as error:
            assert "\n" not in str(error)
            refused += 1
            continue
        controller.update(alpha, alpha > 0, groups)
        assert controller.schedule.budgets
    assert 200 < refused < 300
    for odd in ([], 7, "x", {}):
        with pytest.raises(UserError, match="controller of other budgets"):
            Controller(config, start, odd)


def test_a_damaged_part_is_made_again(tmp_path):
    """Flipped bits and noise: the arrays that were put, or none."""
    arrays = {"alpha": np.arange(200, dtype=np.float32), "line": np.array("text")}
    rng, lost = random.Random(8), 0
    with KeptParts(tmp_path / "out", "key") as parts:
        parts.put("a", **arrays)
        path = tmp_path / "out.parts" / "a.npz"
        sound = path.read_bytes()
        for i in range(200):
            data = bytearray(sound)
            at = rng.randrange(len(data))
            if i % 4 == 0:
                data[at : at + 8] = rng.randbytes(8)
            elif i % 4 == 1:
                del data[at:]
            else:
                data[at] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
            found = parts.get("a")
            lost += found is None
            if found is not None and set(found) == set(arrays):
                assert all((found[name] == arrays[name]).all() for name in arrays)
        (tmp_path / "out.parts" / "key").write_bytes(b"\xff\xfe")
    assert 100 < lost < 200
