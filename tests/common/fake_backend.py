"""A backend in numpy for tests of the loop, and a configuration for it."""

import json
import types

import numpy as np

from common.config import (
    Config,
    GrpoConfig,
    LearnerConfig,
    MismatchConfig,
    RolloutConfig,
    TaskConfig,
)
from common.protocols import Backend
from common.records import metrics
from common.types import Replay, Rollout, Scored, UpdateResult

SAMPLES, LENGTH = 4, 5


class Fake:
    """A backend in numpy that writes what is asked of it into `log`.

    The weights are one number, the count of updates. Response tokens are drawn from (seed, prompt,
    sample, weights), their log-prob is -1, the dense one -1 too. Checkpoints live in the object.
    """

    def __init__(self, config, *, deaf=False):
        self.log, self.deaf, self.config = [], deaf, config
        self.weights, self.version, self.batches, self.calls = 0, -1, [], []
        self.saved = []

    def parts(self):
        return Backend(
            engine=types.SimpleNamespace(generate=self.generate, load_weights=self.load_weights),
            scorer=types.SimpleNamespace(
                logprobs=self.logprobs, replay=self.replay, load_weights=self.load_scorer
            ),
            reference=None,
            learner=self,
            open_checkpoints=lambda path: self,
            save_model=lambda path: self.log.append("save model"),
            export_weights=lambda params: {"weights": params},
            geometry=self.config.model,
            description={"backend": "fake"},
        )

    params = property(lambda self: self.weights)

    def load_weights(self, params, version):
        self.log.append(f"push {version}")
        if not self.deaf:
            self.loaded, self.version = params, version

    def load_scorer(self, params, version):
        self.scorer_version = version

    def generate(self, prompts, *, num_samples, schedule, seed, temperature=None, progress=None):
        kind = "greedy" if temperature == 0 else "rollout"
        self.log.append(f"{kind} {self.version}")
        self.calls.append({"seed": seed, "schedule": schedule, "samples": num_samples})
        rows = [p for p in prompts for _ in range(num_samples)]
        sample = np.tile(np.arange(num_samples), len(prompts))
        start = np.array([len(p.tokens) for p in rows], np.int32)
        shape = (len(rows), start.max() + LENGTH)
        mask = (np.arange(shape[1]) >= start[:, None]) & (
            np.arange(shape[1]) < start[:, None] + LENGTH
        )
        tokens, self.length = np.zeros(shape, np.int32), shape[1]
        for b, p in enumerate(rows):
            rng = np.random.default_rng([seed % 2**32, p.prompt_id, sample[b], self.loaded])
            tokens[b, : start[b]] = p.tokens
            tokens[b, mask[b]] = rng.integers(0, 9, LENGTH)
        return Rollout(
            prompts=rows,
            group_B=np.repeat(np.arange(len(prompts)), num_samples).astype(np.int32),
            sample_B=sample.astype(np.int32),
            tokens_BT=tokens,
            response_mask_BT=mask,
            logp_sparse_BT=np.where(mask, -1, 0).astype(np.float32),
            sparse_BT=mask & (schedule is not None),
            prompt_len_B=start,
            total_len_B=start + LENGTH,
            finished_B=np.ones(len(rows), bool),
            version_BT=np.where(mask, self.version, -1).astype(np.int32),
            stats={"prefill_tokens": 1.0},
        )

    def logprobs(self, rollout, *, temperature=None):
        self.log.append(f"score {self.scorer_version}")
        logp = rollout.logp_sparse_BT
        return Scored(logp_dense_BT=logp, entropy_BT=-logp)

    def replay(self, rollout, rows, schedule, *, temperature=None):
        self.log.append("replay")
        logp = rollout.logp_sparse_BT[rows]
        return Replay(rows=rows, alpha_BT=np.ones_like(logp), logp_replay_BT=logp)

    def update(self, batch):
        self.log.append("update")
        self.batches.append(batch)
        self.weights += 1
        clipped = np.zeros(self.length, int)
        clipped[-1] = 1  # one token was clipped, at the last position
        return UpdateResult(values={"grpo/loss": 0.0}, clipped_T=clipped)

    def save(self, step, extra):
        records = metrics.read_metrics(self.path)
        self.log.append(f"checkpoint {step} after {len(records)} records")
        self.saved.append((self.weights, json.loads(json.dumps(extra))))

    def restore(self):
        if not self.saved:
            return None
        self.weights, extra = self.saved[-1]
        return extra

    def close(self):
        self.log.append("close")


def make_config(**changes):
    grpo = {"num_minibatches": 2, "correction": "none", **changes.pop("grpo", {})}
    rollout = {
        "prompts_per_step": 2, "samples_per_prompt": SAMPLES, "max_prompt_tokens": 60,
        "max_response_tokens": LENGTH, "schedule": "k=1", "page_size": 4,
    } | changes.pop("rollout", {})  # fmt: skip
    return Config(**{
        "num_steps": 3,
        "eval_every": 0,
        "task": TaskConfig(args={"num_symbols": 8, "min_entries": 4, "max_entries": 6,
                                 "header_tokens": 4, "partial_credit": True}, num_eval_prompts=3),
        "rollout": RolloutConfig(**rollout),
        "grpo": GrpoConfig(**grpo),
        "learner": LearnerConfig(tokens_per_microbatch=1000),
        "mismatch": MismatchConfig(num_rows=2, bin_tokens=16, min_tokens=1),
    } | changes)  # fmt: skip
