"""The device programs of the engine: prefill a chunk, fork samples, decode a chunk.

`Programs` holds the arrays and calls the compiled functions below it. Their shapes depend on the
engine's settings only, so each is compiled once, however sequences grow. The cache is donated to
them and updated in place:

    prefill  prompt tokens ---> pages of the cache, prompt_hidden (last hidden state of a prompt)
    fork     prompt_hidden ---> hidden_AD of a slot; copies the partly filled last page
    decode   hidden_AD -> logits -> token -> model.extend -> cache, hidden_AD   (repeated)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from common.config import RolloutConfig
from common.rollout.device import PREFILL_ROWS, DecodeResult, Decoding, Fork
from sparrow_jax.model import Cache
from sparrow_jax.sampling import sample


class Programs:
    """Device of common/rollout/device.py for one generate call."""

    def __init__(
        self, params: Any, cache: Cache, *, graph: nnx.GraphDef, dtype: Any, width: int,
        config: RolloutConfig, stop_ids: Sequence[int], keep_cache: Callable[[Cache], None],
    ):  # fmt: skip
        """width: of the hidden states. keep_cache: gets the cache when the call is over."""
        self.params, self.cache, self.config = params, cache, config
        self.stop_ids, self.keep_cache = tuple(stop_ids), keep_cache
        self.hidden_AD = jnp.zeros((config.num_slots, width), dtype)
        self.prompt_hidden = jnp.zeros((PREFILL_ROWS, width), dtype)
        self._static = {"graph": graph, "dtype": dtype}

    def prefill(self, tokens_BT, start_B, num_new_B, page_table_BP) -> None:
        """Dense pass over the next tokens of up to PREFILL_ROWS prompts."""
        self.cache, self.prompt_hidden = prefill(
            self.params, self.cache, tokens_BT, start_B, num_new_B, page_table_BP,
            self.prompt_hidden, **self._static,
        )  # fmt: skip

    def fork(self, starts: Sequence[Fork]) -> None:
        """Start samples of the prompts that were prefilled last."""
        table = np.zeros((4, self.config.num_slots), np.int32)
        table[:, : len(starts)] = np.array(starts, np.int32).T
        self.cache, self.hidden_AD = fork(
            self.cache, self.hidden_AD, self.prompt_hidden, source_I=table[0], slot_I=table[1],
            page_from_I=table[2], page_to_I=table[3], count=len(starts),
        )  # fmt: skip

    def decode(self, d: Decoding) -> DecodeResult:
        """Sample up to config.decode_chunk tokens in every active slot."""
        out = decode(
            self.params, self.cache, self.hidden_AD, d.active_A, d.cached_A, d.limit_A, d.key_A,
            d.page_table_AP, d.budgets, np.int32(d.bin_tokens), np.float32(d.temperature or 1.0),
            np.float32(d.top_p), num_tokens=self.config.decode_chunk, stop_ids=self.stop_ids,
            max_selected=d.max_selected, num_dense=self.config.num_dense_layers,
            greedy=d.temperature == 0, nucleus=d.top_p < 1, **self._static,
        )  # fmt: skip
        self.cache, self.hidden_AD = out[:2]
        active_A, cached_A, tokens_AT, logp_AT, num_sampled_A = jax.device_get(out[2:])
        return DecodeResult(
            active_A=active_A, cached_A=cached_A, tokens_AT=tokens_AT, logp_AT=logp_AT,
            num_sampled_A=num_sampled_A,
        )  # fmt: skip

    def close(self) -> None:
        """End the call and give the cache back."""
        self.keep_cache(self.cache)


@functools.partial(jax.jit, static_argnames=("graph", "dtype"), donate_argnames=("cache",))
def prefill(
    params, cache, tokens_BT, start_B, num_new_B, page_table_BP, hidden_BD, *, graph, dtype
) -> tuple[Cache, jax.Array]:
    """Dense pass over the next tokens of some prompts.

    Returns (cache, hidden_BD with the hidden state of the newest token of each row that has one).
    """
    model = nnx.merge(graph, params)
    cache, hidden_BTD = model.extend(
        cache, tokens_BT, start_B, num_new_B, page_table_BP, dtype=dtype
    )
    last = jnp.maximum(num_new_B - 1, 0)[:, None, None]
    newest = jnp.take_along_axis(hidden_BTD, last, 1)[:, 0]
    return cache, jnp.where((num_new_B > 0)[:, None], newest, hidden_BD)


@functools.partial(jax.jit, donate_argnames=("cache", "hidden_AD"))
def fork(
    cache, hidden_AD, prompt_hidden_BD, source_I, slot_I, page_from_I, page_to_I, count
) -> tuple[Cache, jax.Array]:
    """Start `count` samples: copy the prompt's last hidden state and partly filled page to each.

    Entry i puts prompt_hidden_BD[source_I[i]] into slot slot_I[i] and copies page page_from_I[i] to
    page_to_I[i] (0 to 0 if the prompt ends on a page boundary). Returns (cache, hidden_AD).
    """

    def one(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        kv, hidden = state
        page = lax.dynamic_slice_in_dim(kv, page_from_I[i], 1, 2)
        kv = lax.dynamic_update_slice_in_dim(kv, page, page_to_I[i], 2)
        return kv, hidden.at[slot_I[i]].set(prompt_hidden_BD[source_I[i]])

    kv, hidden_AD = lax.fori_loop(0, count, one, (cache[0], hidden_AD))
    return (kv, cache[1]), hidden_AD


def budget_at(position_B: jax.Array, budgets: jax.Array, bin_tokens: jax.Array) -> jax.Array:
    """Budget of the query at each position: `budget_at` of common/schedule/schedule.py in JAX."""
    return budgets[jnp.minimum(position_B // bin_tokens, budgets.shape[0] - 1)]


@functools.partial(
    jax.jit,
    static_argnames=(
        "graph", "dtype", "num_tokens", "stop_ids", "max_selected", "num_dense", "greedy",
        "nucleus",
    ),
    donate_argnames=("cache", "hidden_AD"),
)  # fmt: skip
def decode(
    params, cache, hidden_AD, active_A, cached_A, limit_A, key_A, page_table_AP, budgets,
    bin_tokens, temperature, top_p, *, graph, dtype, num_tokens, stop_ids, max_selected, num_dense,
    greedy, nucleus,
) -> tuple[Any, ...]:  # fmt: skip
    """Sample up to num_tokens tokens in every active slot.

    A step samples a token from hidden_AD, then runs it through the model at position cached_A. A
    row stops at a stop id, or when it has limit_A tokens. max_selected = 0 decodes densely;
    otherwise budget_at gives the budget of the row.
    Returns (cache, hidden_AD, active_A, cached_A, tokens [A, num_tokens], logp [A, num_tokens],
    number of sampled tokens [A]).
    """
    model = nnx.merge(graph, params)
    head_VD = model.head(dtype)

    def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
        i, cache, hidden, active, cached, tokens, logps, num_sampled = state
        logits = jnp.einsum("sd,vd->sv", hidden, head_VD, preferred_element_type=jnp.float32)
        token, logp = sample(
            logits, key_A, cached, temperature, top_p, greedy=greedy, nucleus=nucleus
        )
        tokens = tokens.at[:, i].set(jnp.where(active, token, 0))
        logps = logps.at[:, i].set(jnp.where(active, logp, 0))
        num_sampled = num_sampled + active
        stop = functools.reduce(
            jnp.logical_or, [token == s for s in stop_ids], cached + 1 >= limit_A
        )
        active = active & ~stop
        k_B = budget_at(cached, budgets, bin_tokens)
        sparse = {"k_B": k_B, "max_selected": max_selected} if max_selected else {}
        cache, out = model.extend(
            cache, token[:, None], cached, active.astype(jnp.int32), page_table_AP,
            dtype=dtype, num_dense=num_dense, **sparse,
        )  # fmt: skip
        hidden = jnp.where(active[:, None], out[:, 0], hidden)
        return i + 1, cache, hidden, active, cached + active, tokens, logps, num_sampled

    A = hidden_AD.shape[0]
    tokens = jnp.zeros((A, num_tokens), jnp.int32)
    logps = jnp.zeros((A, num_tokens), jnp.float32)
    start = (0, cache, hidden_AD, active_A, cached_A, tokens, logps, jnp.zeros(A, jnp.int32))
    more = lambda s: (s[0] < num_tokens) & s[3].any()  # noqa: E731
    return lax.while_loop(more, step, start)[1:]
