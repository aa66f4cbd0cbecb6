"""What the vLLM tracer sees of a made-up engine; of vLLM itself: test_vllm_tracer.py."""

import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

from common.config import Config, RolloutConfig
from common.errors import UserError
from common.types import Prompt
from sparrow_torch import vllm_tracer
from sparrow_torch.tracer import facts_of_layer

V, D, T = 11, 6, 7


class Attention(nn.Module):
    attn_backend = types.SimpleNamespace(get_name=lambda: "MADE_UP")

    def forward(self, q, k, v):
        return q + 2 * k + 3 * v


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.o_proj = Attention(), nn.Linear(D, D, bias=False)

    def forward(self, x):
        return self.o_proj(self.attn(x, x + 1, x + 2))


class Layer(nn.Module):
    """As vLLM's layers: the sum is left to the next one, which makes it in place."""

    def __init__(self):
        super().__init__()
        self.self_attn = SelfAttention()

    def forward(self, x, residual):
        residual += x
        return self.self_attn(residual), residual


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([Layer(), Layer()])
        self.logits_processor = nn.Linear(D, V)

    def forward(self, tokens):
        x, residual = self.embed(tokens), torch.zeros(len(tokens), D)
        for layer in self.model.layers:
            x, residual = layer(x, residual)
        return x + residual


class Engine:
    """generate() prefills, then says the logits of the next token, then those of the prompt."""

    def __init__(self, pieces=1, passes=1):
        torch.manual_seed(0)
        self.model, self.pieces, self.passes = Model(), pieces, passes

    def apply_model(self, act):
        return [act(self.model)]

    @torch.no_grad()
    def generate(self, prompts, how, use_tqdm):
        answers = []
        for prompt in prompts:
            hidden = None
            for part in np.array_split(prompt["prompt_token_ids"], self.passes):
                hidden = self.model(torch.tensor(part))
            self.model.logits_processor(hidden[-1:])
            if "prompt_logprobs" in how:
                for piece in torch.tensor_split(hidden[:-1], self.pieces):
                    self.model.logits_processor(piece)
            said = [{t: types.SimpleNamespace(logprob=-t / 2)} for t in range(how["max_tokens"])]
            answer = types.SimpleNamespace(token_ids=range(how["max_tokens"]), logprobs=said)
            answers.append(types.SimpleNamespace(outputs=[answer]))
        return answers


@pytest.fixture
def build(monkeypatch):
    """build(pieces, passes): a tracer of a made-up engine."""
    vllm = types.SimpleNamespace(SamplingParams=dict, __version__="0")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    config = Config(rollout=RolloutConfig(temperature=0.5))
    return lambda **how: vllm_tracer.VllmTracer(Engine(**how), config)


def tokens(rows=2):
    return np.random.default_rng(0).integers(0, V, (rows, T))


def test_facts_are_those_of_each_layer_and_row_before_anything_is_changed_in_place(build):
    tracer = build()
    facts, tokens_BT = tracer.forward(tokens()), tokens()
    assert facts["q"].shape == (2, 2, T, 2) and facts["block_norm"].shape == (2, 2, T)
    for b, row_T in enumerate(tokens_BT):
        x, residual = tracer.model.embed(torch.tensor(row_T)), torch.zeros(T, D)
        for i, layer in enumerate(tracer.model.model.layers):
            residual = residual + x
            x = layer.self_attn(residual)
            want = facts_of_layer(q=residual[None], x=(x + residual)[None])
            for name in ("q", "block", "block_norm"):
                got, expected = facts[name][i, b], want[name][0].detach().numpy()
                np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5, err_msg=name)
    assert len({facts[name].tobytes() for name in ("q", "k", "v", "attention", "block")}) == 5
    assert not tracer.model.model.layers[0]._forward_hooks  # none is left


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_log_probs_of_a_prompt_are_put_together_from_pieces(build, pieces):
    tracer = build(pieces=pieces)
    row = tokens()[0]
    want = tracer.model.logits_processor(tracer.model(torch.tensor(row)))[:-1].detach()
    assert torch.equal(tracer.logits(row), want)
    logp, entropy = tracer.scorer.score(tokens(), 0.5)
    want = torch.log_softmax(want / 0.5, -1).numpy()
    np.testing.assert_allclose(logp[0, 1:], want[np.arange(T - 1), row[1:]], atol=1e-5)
    np.testing.assert_allclose(entropy[0, 1:], -(np.exp(want) * want).sum(-1), atol=1e-5)
    ids, top = tracer.top(tokens(), 3)
    assert ids.shape == top.shape == (2, T, 3)
    np.testing.assert_allclose(top[0, 1:], -np.sort(-want, -1)[:, :3], atol=1e-5)


def test_a_prompt_that_is_prefilled_in_parts_is_refused(build):
    tracer = build(passes=2)
    with pytest.raises(UserError, match="vllm: 3 positions recorded in a forward pass, expected 7"):
        tracer.forward(tokens())
    with pytest.raises(
        UserError, match="vllm: 2 positions recorded in logits of a prompt, expected 6"
    ):
        tracer.top(tokens(), 3)


def test_greedy_tokens_and_log_probs_are_what_the_engine_says(build):
    prompts = [Prompt(prompt_id=i, task="x", answer={}, tokens=np.int32([1, 2])) for i in range(2)]
    found, logp = build().greedy(prompts, 3)
    assert found.tolist() == [[0, 1, 2]] * 2 and logp.tolist() == [[0, -0.5, -1]] * 2


def test_what_the_engine_cannot_do_is_one_line(build, monkeypatch):
    tracer = build()

    def fail(*args, **how):
        raise RuntimeError("Unsupported:\nhead_dim=8")

    monkeypatch.setattr(tracer._llm, "generate", fail)
    with pytest.raises(UserError, match="vllm cannot run this model here: Unsupported: head_dim=8"):
        tracer.forward(tokens())
    assert not tracer.model.model.layers[0]._forward_hooks
