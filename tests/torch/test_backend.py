"""What attention=kernel demands of whom, what a run's log says, and the memory of CUDA graphs."""

import contextlib
import dataclasses

import pytest
import torch

from common import setup
from common.config import Config, ModelConfig, RolloutConfig
from common.errors import UserError
from common.model.geometry import Geometry
from kernels_triton import cuda_graph
from kernels_triton.ops import REFERENCE, resolve
from sparrow_torch import backend, engine, sampling

MODEL = ModelConfig(
    vocab_size=48, num_layers=1, hidden_size=64, intermediate_size=32, num_heads=1, num_kv_heads=1,
    head_dim=64, rope_theta=1e4,
)  # fmt: skip
G = Geometry.from_config(MODEL)


class FakeEngine:
    """Stands for the torch engine: keeps the operations it was built with."""

    description = "fake"

    def __init__(self, geometry, config, stop_ids, dtype, *, ops, device):
        self.made = ops.name, device

    def generate(self, prompts):
        return self.made

    def load_weights(self, params, version):
        pass


def config(framework, attention="kernel"):
    return Config(model=MODEL, attention=attention, rollout=RolloutConfig(engine=framework))


def test_kernels_are_demanded_of_the_engine_and_not_of_the_learner(monkeypatch):
    """A torch engine on CUDA beside a JAX learner that has no kernels (here on a CPU)."""
    pytest.importorskip("triton", reason="there is no triton for this machine")
    monkeypatch.setattr(backend, "Engine", FakeEngine)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    built = setup.build_backend(config("torch"), vocab_size=40, stop_ids=[39])
    assert built.engine.generate([]) == ("kernel", "cuda")
    assert built.description["attention"] == "reference"


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_an_engine_that_has_no_kernels_refuses(framework):
    with pytest.raises(UserError, match="config.attention='kernel'.*set reference or auto"):
        setup.build_backend(config(framework), vocab_size=40, stop_ids=[39])


def test_a_head_without_kernels_is_said(monkeypatch):
    """What announce prints: nothing to say on a CPU, the reason on a GPU."""
    monkeypatch.setattr(engine, "Decoder", lambda *args, **kwargs: None)
    settings, place = RolloutConfig(), {"device": "cuda"}
    ops = resolve("auto", "cuda", head_dim=256)
    made = engine.Engine(G, settings, [], torch.float32, ops=ops, **place)
    assert made.description.endswith(
        "on cuda, reference (no kernel for heads of 256), no CUDA graphs"
    )
    made = engine.Engine(G, settings, [], torch.float32, ops=REFERENCE, device="cpu")
    assert made.description.endswith("on cpu, reference")


def test_kernels_draw_in_one_pass_and_references_as_before():
    """The choice, and that torch.compile leaves the kernel alone and takes the rest."""
    fused = dataclasses.replace(REFERENCE, name="kernel")
    for ops, want in ((REFERENCE, sampling.sample), (fused, sampling.fused_sample)):
        made = engine.Engine(G, RolloutConfig(), [], torch.float32, ops=ops, device="cpu")
        programs = made.open()
        assert programs.sample is want
        programs.fuse(backend="eager")
        assert (getattr(programs.sample, "func", None) is want) == (ops is fused)


def test_all_graphs_of_an_engine_share_one_pool(monkeypatch):
    """Three captures, one handle; another engine has another; a graph alone has its own pool."""
    pools, handles = [], iter("ABC")

    class Stream:
        def wait_stream(self, other):
            pass

    class Graph:
        def replay(self):
            pass

    @contextlib.contextmanager
    def graph(made, pool=None):
        pools.append(pool)
        yield

    stand_ins = {
        "Stream": Stream, "current_stream": Stream, "stream": contextlib.nullcontext,
        "CUDAGraph": Graph, "graph": graph, "graph_pool_handle": lambda: next(handles),
    }  # fmt: skip
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)
    first, second = cuda_graph.cuda_graphs(), cuda_graph.cuda_graphs()
    calls = []
    for capture in (first, first, second, first, cuda_graph.cuda_graph):
        capture(lambda: calls.append(1))
    assert pools == ["A", "A", "B", "A", None]
    assert len(calls) == 5 * 3  # twice before each capture, and in it
