"""Captured decode steps, with a stand-in for CUDA graphs that runs on CPU.

It remembers every operation of a step with the very tensors and Python values that it had, and
repeats those: a length, budget or page that were a Python value would stay what they were. As a
CUDA graph does, it refuses a step that waits for the device.
"""

import dataclasses
import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels_triton.ops import REFERENCE
from sparrow_jax.backend import export_weights
from sparrow_torch import decode
from sparrow_torch.engine import Engine
from tests.torch import test_engine
from tests.torch.test_engine import QWEN, SPARSE, STOP, assert_same, generate

pytestmark = pytest.mark.usefixtures("quick_compilation")


class Recording(TorchDispatchMode):
    """The operations of a step; a kernel (`whole`) is one of them."""

    def __init__(self):
        super().__init__()
        self.calls, self.inside_kernel = [], False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.inside_kernel and func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("waits for the device")
        return self.remember(func, args, kwargs or {})

    def remember(self, func, args, kwargs):
        outer, self.inside_kernel = self.inside_kernel, True
        out = func(*args, **kwargs)
        self.inside_kernel = outer
        if not outer:
            self.calls.append((func, args, kwargs, out))
        return out

    def replay(self):
        for func, args, kwargs, out in self.calls:
            for mine, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(mine, torch.Tensor) and mine.data_ptr() != new.data_ptr():
                    mine.copy_(new)


class Recorder:
    """`capture` of an engine, and its operations as kernels."""

    def __init__(self):
        self.now, self.count = None, 0

    def capture(self, step):
        self.now, self.count = Recording(), self.count + 1
        with self.now:
            step()
        recording, self.now = self.now, None
        return recording.replay

    def ops(self):
        def whole(kernel):
            def call(*args, **kwargs):
                if self.now is None:
                    return kernel(*args, **kwargs)
                return self.now.remember(kernel, args, kwargs)

            return call

        names = ("select_pages", "sparse_decode", "append_kv")
        return dataclasses.replace(REFERENCE, **{n: whole(getattr(REFERENCE, n)) for n in names})


def captured_engine(recorder, seed=0, **settings):
    engine = Engine(
        QWEN, test_engine.config(**settings), STOP, torch.float32, ops=recorder.ops(),
        device="cpu", capture=recorder.capture,
    )  # fmt: skip
    engine.load_weights(export_weights(test_engine.weights(QWEN, seed)[1]), 3)
    return engine


@functools.cache
def plain(schedule=SPARSE, seed=test_engine.SEED):
    """What an engine samples without captured steps."""
    return generate(test_engine.torch_engine(), schedule, seed=seed)


def test_captured_steps_sample_the_same_tokens():
    """27 sequences on 8 slots; then other noise, then other budgets in as wide a list."""
    recorder = Recorder()
    engine = captured_engine(recorder, decode_chunk=3)
    assert_same(generate(engine), plain())
    shapes = list(engine.open().steps)
    assert {shape.rows for shape in shapes} >= {8, 4} and recorder.count == len(shapes)
    assert_same(generate(engine, seed=9), plain(seed=9))
    other = dataclasses.replace(SPARSE, budgets=(2, 0, 1))
    assert_same(generate(engine, other), plain(other))
    again = [s for s in engine.open().steps if s not in shapes]
    assert {s.rows for s in again}.isdisjoint(s.rows for s in shapes)  # only new buckets


def test_captured_steps_take_new_weights():
    engine, other = captured_engine(Recorder()), captured_engine(Recorder(), seed=1)
    before = generate(engine)
    engine.load_weights(export_weights(test_engine.weights(QWEN, 1)[1]), 3)
    assert_same(generate(engine), generate(other))
    assert (before.tokens_BT[:, :30] != generate(engine).tokens_BT[:, :30]).any()


def test_dense_steps_and_temperatures_are_captured_apart():
    engine = captured_engine(Recorder())
    for schedule in (None, SPARSE, None):
        assert_same(generate(engine, schedule), plain(schedule))
    assert {s.max_selected > 0 for s in engine.open().steps} == {False, True}
    generate(engine, temperature=0.5)
    assert {s.temperature for s in engine.open().steps} == {1.0, 0.5}


def test_a_step_that_waits_for_the_device_cannot_be_captured():
    engine = captured_engine(Recorder())
    engine.model.ops = REFERENCE  # its sparse_decode asks for the longest row
    with pytest.raises(RuntimeError, match="waits for the device"):
        generate(engine)


@pytest.mark.parametrize("name", ["cached_B", "limit_B", "slot_B", "table_BP", "budgets", "key_B"])
def test_a_value_that_is_not_read_anew_is_seen(name):
    """A planted fault: a buffer is as it was when the step was captured."""
    recorder = Recorder()
    right = recorder.capture

    def capture(step):
        buffer = getattr(step.__self__, name)
        old = tuple(x.clone() for x in buffer) if name == "key_B" else buffer.clone()
        setattr(step.__self__, name, old)
        replay = right(step)
        setattr(step.__self__, name, buffer)
        return replay

    recorder.capture = capture
    got, want = generate(captured_engine(recorder)), plain()
    assert got.tokens_BT.shape != want.tokens_BT.shape or (got.tokens_BT != want.tokens_BT).any()


@pytest.mark.parametrize(("rows", "want"), [(1, 1), (2, 2), (3, 4), (8, 8), (9, 12), (12, 12)])
def test_buckets(rows, want):
    assert decode.bucket(rows, 12) == want


def test_torch_compile_takes_the_small_operations_whole():
    """No graph break; a few programs for prefill and all buckets; the same numbers."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    engine = Engine(QWEN, test_engine.config(), STOP, torch.float32, ops=REFERENCE, device="cpu")
    engine.open().fuse(backend=backend)
    engine.load_weights(export_weights(test_engine.weights(QWEN)[1]), 3)
    assert_same(generate(engine, seed=5), plain(seed=5))  # as other lengths may add a program
    assert 3 <= len(graphs) <= 9  # each of three functions: prefill, one row, several rows
