"""Traces of both backends agree; a fault planted in one is found, and located, by `compare`."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from common.config import Config, GrpoConfig, LearnerConfig, ModelConfig, RolloutConfig
from common.crosscheck import compare, trace
from common.crosscheck.trace_file import Trace
from common.crosscheck.trace_setup import read_prompts
from common.errors import UserError
from common.objective import batching
from kernels_triton.ops import REFERENCE
from sparrow_torch import backend, model, scorer
from tests.jax import tiny_model

pytestmark = pytest.mark.usefixtures("quick_compilation")


class Traces:
    """Recorded once: jax's, and torch's over the same tokens."""

    def __init__(self, folder):
        self.folder = folder
        self.model = tiny_model.write(folder / "model")
        self.prompts = folder / "prompts.json"
        self.prompts.write_text(json.dumps(tiny_model.tokens(8, 40).tolist()))
        self.jax = self.record("jax", "jax")

    def config(self, **rollout):
        settings = {"page_size": 4, "num_dense_layers": 1, "temperature": 0.6, "prefill_chunk": 16}
        return Config(
            model=ModelConfig(path=self.model),
            rollout=RolloutConfig(**settings | rollout),
            learner=LearnerConfig(warmup_steps=0),
        )

    def record(self, backend, name, *, config=None, force=None, num_tokens=12, num_prompts=3):
        out = self.folder / f"{name}.npz"
        trace.trace(
            config or self.config(), backend, self.prompts, out, force=force,
            num_prompts=num_prompts, prompt_tokens=40, num_tokens=num_tokens,
        )  # fmt: skip
        return Trace(out)

    def torch(self, name):
        return self.record("torch", name, force=self.jax.path)


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    return Traces(tmp_path_factory.mktemp("traces"))


@pytest.fixture(scope="module")
def same(traces):
    return compare.compare(traces.jax, traces.torch("torch"))


def test_both_backends_record_the_same(same):
    assert same.ok and same.verdict == "SAME within the tolerances" and not same.missing
    assert same.notes == ["the weights after the step are not the same bit by bit"]
    judged = {row.name for row in same.rows if row.ok}
    assert {"decode/lse", "decode/pages", "grpo/loss", "step/embed_VD", "stream/sparse"} <= judged
    assert len([n for n in judged if n.startswith("grad/")]) == 13
    assert all(row.ok for row in same.rows)
    for _, _, count, mean, p5 in same.floor:
        assert count and mean == pytest.approx(1, abs=1e-5) and p5 == pytest.approx(1, abs=1e-5)


def test_what_is_recorded_is_what_was_asked_for(traces):
    t = traces.jax
    B, T = t["tokens/tokens"].shape
    assert (B, T) == (6, 52) and len(set(t["tokens/total_len"])) == 4
    assert t["forward/q"].shape == (2, B, T, 2) and t["forward/block_norm"].shape == (2, B, T)
    assert t["decode/lse"].shape == (2, B, 12, 4) and t["decode/pages"].shape[0] == 1
    pages, gap = t["decode/pages"], t["decode/page_gap"]
    read = (pages >= 0).sum(-1)
    assert set(np.unique(read)) == {0, 5}  # k = 2 and three reserved; 0 after a row's end
    assert (gap[np.isfinite(gap)] >= 0).all() and np.isfinite(gap).any()
    alpha = t["replay/alpha"][:, 41:]
    assert alpha.min() < 0.99  # sparse attention makes a difference here
    assert t["grpo/loss"] != 0 and t["grad/embed_VD/norm"][0] > 0


def half_swapped(x, cos, sin):
    a, b = x.float()[..., ::2], x.float()[..., 1::2]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def other_eps(x, weight, eps, right=model._rms_norm):
    return right(x, weight, 1e-2)


def interleaved(f):
    """KV head j serves query heads j, j + K, ..., as if heads were laid out the other way."""

    def wrong(q, *args, **kwargs):
        *lead, N, H = q.shape
        regroup = lambda x, g: x.reshape(*lead, g, N // g, H).transpose(-2, -3).reshape(q.shape)  # noqa: E731
        out = f(regroup(q, 2), *args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        return (
            (regroup(first, N // 2), out[1]) if isinstance(out, tuple) else regroup(first, N // 2)
        )

    return wrong


def with_ops(patch, **faults):
    ops = dataclasses.replace(REFERENCE, **faults)
    patch.setattr(backend, "resolve", lambda *a, **k: ops)


def one_page_off(*args, **kwargs):
    ids, count = REFERENCE.select_pages(*args, **kwargs)
    chosen = ids.clone()
    chosen[..., 1] = torch.where(ids[..., 1] - 1 > ids[..., 0], ids[..., 1] - 1, ids[..., 1] + 1)
    return chosen.int(), count


def sums_for_means(kv, marks, *args):
    REFERENCE.append_kv(kv, marks, *args)
    marks[args[0]] *= 1.5


def sequence_mean(rollout, *args, right=batching.pack, **kwargs):
    batch = right(rollout, *args, **kwargs)
    micro = []
    for m in batch.minibatches[0]:
        length = np.maximum(m.loss_mask_BT.sum(1, keepdims=True), 1)
        share = batch.denominators[0] / len(rollout.prompts) / length
        micro.append(dataclasses.replace(m, weight_BT=(m.weight_BT * share).astype(np.float32)))
    return dataclasses.replace(batch, minibatches=[micro])


FAULTS = {
    "RoPE pairs neighbours": (
        lambda p: p.setattr(model, "_rotate", half_swapped),
        "forward/q", 0, {"forward/v"},
    ),
    "epsilon": (
        lambda p: p.setattr(model, "_rms_norm", other_eps), "forward/q", 0, set(),
    ),
    "GQA grouping": (
        lambda p: with_ops(p, flash_prefill=interleaved(REFERENCE.flash_prefill),
                           sparse_decode=interleaved(REFERENCE.sparse_decode)),
        "forward/attention", 0, set(),
    ),
    "one page off": (
        lambda p: with_ops(p, select_pages=one_page_off),
        "decode/pages", 1, {"forward/block", "score/logp", "replay/alpha", "decode/page_scores"},
    ),
    "landmark": (
        lambda p: with_ops(p, append_kv=sums_for_means),
        "decode/page_scores", 1, {"forward/block", "score/logp", "replay/alpha"},
    ),
    "temperature": (
        lambda p: p.setattr(scorer.Scorer, "_temperature", lambda *_: np.float32(1)),
        "score/logp", 0, {"forward/block", "stream/dense"},
    ),
    "sequence mean": (
        lambda p: p.setattr(batching, "pack", sequence_mean),
        "grpo/loss", 0, {"forward/block", "score/logp", "replay/alpha", "decode/lse"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_located(traces, monkeypatch, fault):
    plant, name, layer, unharmed = FAULTS[fault]
    plant(monkeypatch)
    result = compare.compare(traces.jax, traces.torch("faulty"))
    rows = {row.name: row for row in result.rows}
    assert not result.ok and result.verdict.startswith(f"DIFFERENT, first in {name} ("), (
        result.verdict
    )
    assert rows[name].layer == layer
    for other in unharmed:
        row = rows[other]
        assert row.ok or row.layer > layer, other


def test_bfloat16_is_within_its_own_limits_and_a_fault_is_not(traces, monkeypatch):
    learner = dataclasses.replace(traces.config().learner, dtype="bfloat16")
    config = dataclasses.replace(traces.config(), learner=learner)
    half = traces.record("torch", "half", config=config, force=traces.jax.path)
    result = compare.compare(traces.jax, half)
    rows = {row.name: row for row in result.rows}
    assert result.ok, result.verdict
    assert rows["forward/block"].largest > 1e-3  # it is another type
    assert rows["stream/dense"].ok is None and rows["step/embed_VD"].ok is None
    assert not any(row.ok for row in compare.compare(half, half).rows if row.largest > 0)
    monkeypatch.setattr(model, "_rotate", half_swapped)
    faulty = traces.record("torch", "half", config=config, force=traces.jax.path)
    verdict = compare.compare(traces.jax, faulty).verdict
    assert verdict.startswith(
        "DIFFERENT, first in forward/q (queries after norm and RoPE), layer 0"
    )


def test_transformers_is_the_judge_from_outside(traces):
    pytest.importorskip("transformers", reason="transformers is not installed")
    theirs = traces.record("transformers", "theirs", force=traces.jax.path)
    result = compare.compare(traces.jax, theirs)
    judged = {row.name for row in result.rows if row.ok}
    assert result.ok, result.verdict
    assert {"forward/v", "forward/attention", "forward/block", "score/logp", "grpo/loss",
            "grad/layers.o_LNHD", "step/embed_VD", "stream/greedy"} <= judged  # fmt: skip
    assert not any(name.startswith("decode") for name in theirs)
    with pytest.raises(UserError, match="does not sample; give --force_tokens"):
        traces.record("transformers", "alone")


def test_what_cannot_be_traced_is_refused_in_one_line(traces, tmp_path):
    def refused(words, backend="torch", prompts=None, **changes):
        with pytest.raises(UserError, match=words) as caught:
            trace.trace(
                changes.pop("config", traces.config()), backend, prompts or traces.prompts,
                tmp_path / "x.npz", **{"force": None, "num_prompts": 3, "prompt_tokens": 40,
                                       "num_tokens": 4} | changes,
            )  # fmt: skip
        assert "\n" not in str(caught.value) and not list(tmp_path.glob("*.npz"))

    refused("--backend=numpy: not built in; use jax, torch, transformers, vllm", backend="numpy")
    refused("8 prompts of 24 to 40 tokens, expected 9", num_prompts=9)
    refused("0 prompts of 24 to 20 tokens", prompt_tokens=20)
    wide = traces.config(schedule="k=9")
    refused("0 prompts of 52 to 40 tokens", config=wide)  # no step would leave a page out
    refused("num_dense_layers=2: the model has 2 layers", config=traces.config(num_dense_layers=2))
    refused("rollout.top_p=0.5 has no effect", config=traces.config(top_p=0.5))
    nothing = GrpoConfig(correction="icepop", correction_low=9, correction_cap=9.1)
    refused("grpo.correction=icepop drops every token", num_tokens=12,
            config=dataclasses.replace(traces.config(), grpo=nothing))  # fmt: skip
    refused("trace needs --model", config=Config())
    other = {"force": traces.jax.path, "num_tokens": 12}
    refused("of other settings; record both with the same num_tokens", **other | {"num_tokens": 5})
    refused("is a trace of other prompts; record both on the same prompts", num_prompts=2, **other)
    broken = tmp_path / "p.json"
    for content, words in (
        ("[[1, 2", "is no JSON"), ('{"a": 1}', "list of lists"), ("[[1.5]]", "list of lists"),
        (json.dumps([[260] * 40] * 3), "has token 260, the model has 260"),
    ):  # fmt: skip
        broken.write_text(content)
        refused(words, prompts=broken)
    (tmp_path / "p.txt").write_bytes(b"\xff\xfe\x00")
    refused("is no UTF-8 text", prompts=tmp_path / "p.txt")


def test_prompts_come_from_text_and_from_rows_of_a_task(traces, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    codec = tokenizers.Tokenizer.from_file(f"{traces.model}/tokenizer.json")
    text = "The quick brown fox jumps over the lazy dog. " * 5
    (tmp_path / "p.txt").write_text(text)
    rows = read_prompts(traces.config(), tmp_path / "p.txt", 3, 40, least=24)
    assert [codec.decode(p.tokens) for p in rows] == [text[i : i + 40] for i in (0, 40, 80)]
    assert [p.prompt_id for p in rows] == [0, 1, 2]
    row = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "1"}}
    lines = [row | {"prompt": [{"role": "user", "content": f"{i} {text}"}]} for i in range(3)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (Path(traces.model) / "chat_template.jinja").write_text("> {{ messages[0]['content'] }}")
    rows = read_prompts(traces.config(), tmp_path / "p.jsonl", 2, 40, least=24)
    assert [codec.decode(p.tokens) for p in rows] == [f"> {i} {text}"[:40] for i in (0, 1)]
