"""Bounds of every setting: what cannot work is refused with one line, what is accepted works."""

import dataclasses
import math
import random

import numpy as np
import pytest

from common import oracles
from common.config import (
    BASELINES,
    Config,
    GrpoConfig,
    LearnerConfig,
    MismatchConfig,
    ModelConfig,
    RolloutConfig,
    TaskConfig,
    WarmupConfig,
)
from common.config.fields import check_within
from common.errors import UserError
from common.objective import grpo

GROUPS = [Config, *(type(getattr(Config(), f.name)) for f in dataclasses.fields(Config))]
NUMBERS = [
    (cls, f)
    for cls in GROUPS
    if dataclasses.is_dataclass(cls)
    for f in dataclasses.fields(cls)
    if any(kind in str(f.type) for kind in ("int", "float")) and f.name != "stages"
]
EXTREMES = (
    math.nan, math.inf, -math.inf, -1, -1e-30, 0, 1e-320, 1e-30, 0.99999999, 1, 2, 3, 1e30, 1e308,
    10**9, 2**31 - 1, 2**31, 2**63, 10**400,
)  # fmt: skip


def refusal(cls, **values):
    try:
        cls(**values)
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 300
        return str(error)
    return ""


def value_of(field, x):
    return (x,) * (3 if field.name == "mesh" else 1) if "tuple" in str(field.type) else x


def test_every_number_has_bounds():
    assert len(NUMBERS) > 50
    for cls, field in NUMBERS:
        assert field.metadata["within"] or field.metadata["choices"], (cls, field.name)


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [
        (LearnerConfig, "learning_rate", 1e30),
        (LearnerConfig, "beta2", 0.99999999),  # 1 in float32: the bias correction divides by 0
        (RolloutConfig, "temperature", 1e308),
        (RolloutConfig, "temperature", 1e-30),
        (RolloutConfig, "decode_chunk", 10**9),
        (RolloutConfig, "num_slots", 2**31),
        (RolloutConfig, "page_size", 2.5),
        (RolloutConfig, "page_size", True),
        (GrpoConfig, "clip_high", 1e308),
        (GrpoConfig, "dual_clip", 1.0),
        (ModelConfig, "norm_eps", 0.0),
        (ModelConfig, "norm_eps", 1e30),
        (ModelConfig, "rope_theta", -1.0),
        (ModelConfig, "rope_theta", 1e300),
        (MismatchConfig, "budgets", (4, 2**31)),
        (WarmupConfig, "stages", ((10**12, 1, 2, 2, 1.0),)),
        (TaskConfig, "deadline_seconds", 1e308),
    ],
)
def test_settings_that_cannot_work_are_refused(cls, name, value):
    assert name in refusal(cls, **{name: value})


@pytest.mark.parametrize(
    ("cls", "field"), NUMBERS, ids=[f"{c.__name__}.{f.name}" for c, f in NUMBERS]
)
def test_no_number_may_be_absurd(cls, field):
    for x in (math.nan, math.inf, -math.inf, 1e308, 10**400):
        assert field.name in refusal(cls, **{field.name: value_of(field, x)})


def test_ends_of_an_interval():
    for within, good, bad in (("[0, 1)", (0, 0.5), (1, -1e-9)), ("(0, 1]", (1e-9, 1), (0, 1.1))):
        for x in good:
            check_within("x", x, within)
        for x in bad:
            with pytest.raises(UserError, match=r"^x=.*: expected (at least|more than) 0 and"):
                check_within("x", x, within)


@pytest.mark.parametrize("baseline", BASELINES)
def test_a_group_of_one_can_learn_or_is_refused(baseline):
    for normalize_std in (None, True, False):
        c = GrpoConfig(baseline=baseline, normalize_std=normalize_std, num_minibatches=1)
        message = refusal(Config, rollout=RolloutConfig(samples_per_prompt=1), grpo=c)
        got = grpo.advantages(
            np.array([1.0, 0, 1]), np.arange(3), config=c, greedy_reward_B=np.zeros(3)
        )
        assert bool(message) != got.advantage_B.any()
        assert not message or "samples_per_prompt=1" in message


def test_random_settings_are_refused_or_keep_the_objective_finite():
    """300 of them, two fields each; float32 throughout, as in the learners."""
    rng, accepted = random.Random(0), 0
    rho = np.float32([[1e-3, 0.5, 1, 1.5, 1e3]])
    for _ in range(300):
        picked = rng.sample([f for c, f in NUMBERS if c is GrpoConfig], 2)
        values = {f.name: value_of(f, rng.choice(EXTREMES)) for f in picked}
        if refusal(GrpoConfig, **values):
            continue
        accepted += 1
        c = GrpoConfig(**values)
        numbers = dict(
            zip(("clip_low", "clip_high", "kl_coef", "dual_clip"), c.loss_numbers, strict=True)
        )
        for A in (-3.0, 3.0):
            grad = oracles.policy_loss_grad(
                np.log(rho), 0 * rho, A, np.float32(c.correction_cap), rho > 0,
                logp_ref_BT=-np.log(rho), **numbers,
            )  # fmt: skip
            assert np.isfinite(np.float32(grad) ** 2).all()
    assert accepted >= 10
