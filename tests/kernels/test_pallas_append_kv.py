"""What only kernels_pallas.append_kv has: pages copied in and out, in groups, buffers, races."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels import ladder
from tests.kernels.packages import EAGER, PALLAS
from tests.kernels.test_append_kv import kernel, refuse, reject, small_groups  # noqa: F401

module = PALLAS.module("append_kv")


def test_pages_too_small_for_a_row_of_lanes_are_refused():
    refuse(PALLAS, {"kv": np.zeros((2, 2, 6, 2, 1, 64), np.float32)}, "larger page")


def no_wait(copy):
    pass


def same_buffer(group):
    return 0


def read_unless_completed(lo, hi, C):
    """A page that new tokens complete loses its old tokens."""
    return (lo < hi) & (hi < C)


def next_page(table, start, num, T, C, right=module._items):
    return right(table, start + C, num, T, C)


def one_token_less(old, new, lo, hi, H, right=module._merge):
    return right(old, new, lo, hi - 1, H)


def mean_of_values(page, H, lanes, right=module._mean_key):
    return right(jnp.roll(page, page.shape[1] // 2, 1), H, lanes)


TIMING = [("_wait_read", no_wait), ("_wait_write", no_wait), ("_slot", same_buffer)]


@pytest.mark.parametrize(("name", "fault"), [
    *TIMING, ("_is_partial", read_unless_completed), ("_items", next_page),
    ("_merge", one_token_less), ("_mean_key", mean_of_values),
])  # fmt: skip
def test_faults_are_rejected(name, fault, monkeypatch):
    reject(PALLAS, name, fault, monkeypatch)


@pytest.mark.parametrize(("name", "fault"), TIMING)
def test_faults_of_timing_are_races(name, fault, monkeypatch):
    monkeypatch.setattr(module, name, fault)
    with pytest.raises(AssertionError, match="race"):
        ladder.check_append(kernel(EAGER), [[3, 5, 5, 4]], head_dim=64)
