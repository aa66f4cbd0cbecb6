"""What the tests of tasks read: a tokenizer, rows in verl's columns, a rollout."""

import json

import numpy as np

from common.types import Rollout


def write_tokenizer(folder, template=None, eos="<eos>"):
    """A byte-level tokenizer without merges: one token per byte, <eos> on top."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tok = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens(["<eos>"])
    folder.mkdir(exist_ok=True)
    tok.save(str(folder / "tokenizer.json"))
    config = {"eos_token": eos} if eos else {}
    config |= {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder / "tokenizer.json")


def row(content="1 + 1?", truth="2", source="openai/gsm8k", **extra):
    model = {"style": "rule", "ground_truth": truth}
    messages = [{"role": "user", "content": content}]
    return {"data_source": source, "prompt": messages, "reward_model": model, **extra}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def rollout(prompts, responses):
    """A rollout with these sampled tokens; only what scoring reads is filled in sensibly."""
    width = max(len(p.tokens) + len(r) for p, r in zip(prompts, responses, strict=True))
    tokens = np.zeros((len(prompts), width), np.int32)
    for b, (p, r) in enumerate(zip(prompts, responses, strict=True)):
        tokens[b, : len(p.tokens) + len(r)] = [*p.tokens, *r]
    prompt_len = np.array([len(p.tokens) for p in prompts], np.int32)
    total_len = prompt_len + np.array([len(r) for r in responses], np.int32)
    return Rollout(
        prompts=prompts,
        group_B=np.arange(len(prompts)),
        sample_B=np.zeros(len(prompts), np.int32),
        tokens_BT=tokens,
        response_mask_BT=tokens > 0,
        logp_sparse_BT=np.zeros(tokens.shape, np.float32),
        sparse_BT=np.zeros(tokens.shape, bool),
        prompt_len_B=prompt_len,
        total_len_B=total_len,
        finished_B=np.ones(len(prompts), bool),
        version_BT=np.zeros(tokens.shape, np.int32),
        stats={},
    )
