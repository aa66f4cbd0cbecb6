"""vLLM's own models against ours: `make crosscheck-vllm`. Each engine lives in a process alone."""

import json
import shutil

import numpy as np
import pytest

from common.crosscheck import compare, matrix
from common.crosscheck.trace_file import Trace

pytestmark = pytest.mark.vllm

UNSEEN = "replay, decode, grpo, grad, step, stream/dense, stream/sparse"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The models of the matrix, each with a trace by the torch backend."""
    path = tmp_path_factory.mktemp("vllm")
    for name, geometry in matrix.MODELS.items():
        matrix.write_model(path / name, geometry)
        matrix.record(path / name, "torch", "float32", None)
    return path


def judged(folder, name):
    first = folder / name / "torch-float32.npz"
    second = matrix.record(folder / name, "vllm", "float32", first)
    return compare.compare(Trace(first), Trace(second)), Trace(second)


@pytest.mark.parametrize("name", matrix.MODELS)
def test_vllm_computes_what_our_torch_backend_computes(folder, name):
    result, trace = judged(folder, name)
    assert result.verdict == f"SAME within the tolerances; not compared: {UNSEEN}"
    rows = {row.name: row for row in result.rows}
    assert {"forward/q", "forward/k", "forward/attention", "score/entropy"} <= rows.keys()
    assert rows["stream/greedy"].ok and rows["stream/greedy/logp"].largest < 1e-4
    assert trace["forward/q"].shape == (2, 4, 184, 2) and trace.meta["versions"]["vllm"]
    assert min(p5 for *_, p5 in result.floor) > 0.99999


@pytest.mark.parametrize("key, value, first", [
    ("rope_theta", 2e6, "forward/q (queries after norm and RoPE), layer 0"),
    ("rms_norm_eps", 1e-2, "layer 0"),
])  # fmt: skip
def test_a_fault_in_what_vllm_runs_is_found_in_the_first_layer(folder, tmp_path, key, value, first):
    """Same weights, other settings of the model."""
    shutil.copytree(folder / "qwen3", tmp_path / "qwen3")
    path = tmp_path / "qwen3" / "config.json"
    content = json.loads(path.read_text())
    assert content[key] != value
    path.write_text(json.dumps(content | {key: value}))
    result, _ = judged(tmp_path, "qwen3")
    assert result.verdict.startswith("DIFFERENT, first in forward/") and first in result.verdict


def test_log_probs_are_those_that_vllm_returns_for_a_prompt(folder):
    """A hook records logits, for any temperature; at T = 1 vLLM returns log-probs itself."""
    import torch

    from common.config import Config, ModelConfig
    from common.crosscheck import trace_setup
    from common.crosscheck.trace_setup import read_prompts
    from sparrow_torch import vllm_tracer

    config = Config(model=ModelConfig(path=str(folder / "llama")))
    prompts = read_prompts(config, folder / "llama" / "prompts.json", 2, 100, least=1)
    tracer = vllm_tracer.build(trace_setup.sized(config, "vllm", prompts, 8))
    tokens = prompts[0].tokens
    (answer,) = tracer._run([tokens], 1, prompt_logprobs=0)
    said = [at[t].logprob for t, at in zip(tokens[1:], answer.prompt_logprobs[1:], strict=True)]
    logp = tracer.scorer.score(tokens[None], 1.0)[0][0]
    assert logp[0] == 0 and np.abs(logp[1:] - said).max() < 1e-5
    hot = tracer.scorer.score(tokens[None], 2.0)[0][0]
    want = torch.log_softmax(tracer.logits(torch.as_tensor(tokens)) / 2, -1)
    assert np.abs(hot[1:] - want[np.arange(99), tokens[1:]].numpy()).max() < 1e-5
    assert np.abs(hot[1:] - said).max() > 0.1
