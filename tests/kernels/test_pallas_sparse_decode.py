"""What only kernels_pallas.sparse_decode has: copies in flight, its ring of buffers, tunings."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.tuning import tune_decode
from tests.kernels.packages import EAGER, PALLAS
from tests.kernels.test_sparse_decode import reject


def no_wait(buf_ref, sem_ref):
    pass


def wrong_buffer(page_ref, buf_refs, slot, odd, j, sem_ref):
    """The buffer after the right one; with two buffers that is the one in use."""
    return pltpu.make_async_copy(
        page_ref, buf_refs[1 - odd].at[jax.lax.div(slot, 2), j], sem_ref.at[slot]
    )


def page_before(ids_ref, j):
    return ids_ref[jnp.maximum(j - 1, 0)]


def visible_one_longer(*args, right):
    *args, start, length, shape = args
    return right(*args, start + 1, length + 1, shape)


FAULTS = [
    ("sparse_decode._wait", no_wait), ("sparse_decode._page_copy", wrong_buffer),
    ("sparse_decode._page_id", page_before), ("decode_block.visible", visible_one_longer),
]  # fmt: skip


@pytest.mark.parametrize(("place", "fault"), FAULTS)
def test_faults_are_rejected(place, fault, monkeypatch):
    reject(PALLAS, place, fault, monkeypatch)


def test_missing_wait_is_a_race(monkeypatch):
    reject(EAGER, "sparse_decode._wait", no_wait, monkeypatch, match="race")


def test_tuning_keeps_enough_in_flight():
    for chip in ("TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x", "cpu"):
        for dtype, head_dim in ((jnp.bfloat16, 128), (jnp.float8_e4m3fn, 64), (jnp.float32, 128)):
            t = tune_decode(dtype, head_dim, 16, chip)
            page = 32 * head_dim * jnp.dtype(dtype).itemsize
            in_flight = (t.num_buffers - 1) * t.pages_per_block * page
            assert 2**17 <= in_flight and t.num_buffers * t.pages_per_block * page <= 2**22
