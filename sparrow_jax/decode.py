"""The device programs of the engine: prefill a chunk, fork samples, decode a chunk.

Shapes depend on the engine's settings only, so each is compiled once however sequences grow. The
cache is donated: it is updated in place.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from sparrow_jax.sampling import sample


@functools.partial(jax.jit, static_argnames=("graph", "dtype"), donate_argnames=("cache",))
def prefill(
    params, cache, tokens_BT, start_B, num_new_B, page_table_BP, hidden_BD, *, graph, dtype
):
    """Dense pass over the next tokens of some prompts; (cache, state of the newest token)."""
    model = nnx.merge(graph, params)
    cache, hidden_BTD = model.extend(
        cache, tokens_BT, start_B, num_new_B, page_table_BP, dtype=dtype
    )
    last = jnp.maximum(num_new_B - 1, 0)[:, None, None]
    newest = jnp.take_along_axis(hidden_BTD, last, 1)[:, 0]
    return cache, jnp.where((num_new_B > 0)[:, None], newest, hidden_BD)


@functools.partial(jax.jit, donate_argnames=("cache", "hidden_SD"))
def fork(cache, hidden_SD, prompt_hidden_BD, source_F, slot_F, page_from_F, page_to_F, count):
    """Start `count` samples: copy each one's part-filled prompt page and last hidden state.

    Entry i puts prompt_hidden_BD[source_F[i]] into slot slot_F[i] and copies page page_from_F[i] to
    page_to_F[i] (0 to 0 where the prompt ends on a page boundary).
    """

    def one(i, state):
        kv, hidden = state
        page = lax.dynamic_slice_in_dim(kv, page_from_F[i], 1, 2)
        kv = lax.dynamic_update_slice_in_dim(kv, page, page_to_F[i], 2)
        return kv, hidden.at[slot_F[i]].set(prompt_hidden_BD[source_F[i]])

    kv, hidden_SD = lax.fori_loop(0, count, one, (cache[0], hidden_SD))
    return (kv, cache[1]), hidden_SD


def budget_at(position_B: jax.Array, budgets: jax.Array, bin_tokens: jax.Array) -> jax.Array:
    """Budget of the query at each position: `budget_at` of common/schedule/schedule.py in JAX."""
    return budgets[jnp.minimum(position_B // bin_tokens, budgets.shape[0] - 1)]


@functools.partial(
    jax.jit,
    static_argnames=(
        "graph", "dtype", "num_tokens", "stop_ids", "max_selected", "num_dense", "greedy",
        "nucleus",
    ),
    donate_argnames=("cache", "hidden_SD"),
)  # fmt: skip
def decode(
    params, cache, hidden_SD, active_S, cached_S, limit_S, key_S, page_table_SP, budgets,
    bin_tokens, temperature, top_p, *, graph, dtype, num_tokens, stop_ids, max_selected, num_dense,
    greedy, nucleus,
):  # fmt: skip
    """Sample up to num_tokens tokens in every active slot.

    A step draws a token from hidden_SD, then runs it through the model at position cached_S. A row
    stops at a stop id or when it has limit_S tokens. max_selected = 0 decodes densely; otherwise
    the row's budget is budgets[min(position // bin_tokens, last)].
    Returns (cache, hidden_SD, active_S, cached_S, tokens [S, num_tokens], logp [S, num_tokens],
    number of tokens drawn per slot).
    """
    model = nnx.merge(graph, params)
    head_VD = model.head(dtype)

    def step(state):
        i, cache, hidden, active, cached, tokens, logps, drawn = state
        logits = jnp.einsum("sd,vd->sv", hidden, head_VD, preferred_element_type=jnp.float32)
        token, logp = sample(
            logits, key_S, cached, temperature, top_p, greedy=greedy, nucleus=nucleus
        )
        tokens = tokens.at[:, i].set(jnp.where(active, token, 0))
        logps = logps.at[:, i].set(jnp.where(active, logp, 0))
        drawn = drawn + active
        stop = functools.reduce(
            jnp.logical_or, [token == s for s in stop_ids], cached + 1 >= limit_S
        )
        active = active & ~stop
        k_B = budget_at(cached, budgets, bin_tokens)
        sparse = {"k_B": k_B, "max_selected": max_selected} if max_selected else {}
        cache, out = model.extend(
            cache, token[:, None], cached, active.astype(jnp.int32), page_table_SP,
            dtype=dtype, num_dense=num_dense, **sparse,
        )  # fmt: skip
        hidden = jnp.where(active[:, None], out[:, 0], hidden)
        return i + 1, cache, hidden, active, cached + active, tokens, logps, drawn

    S = hidden_SD.shape[0]
    tokens = jnp.zeros((S, num_tokens), jnp.int32)
    logps = jnp.zeros((S, num_tokens), jnp.float32)
    start = (0, cache, hidden_SD, active_S, cached_S, tokens, logps, jnp.zeros(S, jnp.int32))
    more = lambda s: (s[0] < num_tokens) & s[3].any()  # noqa: E731
    return lax.while_loop(more, step, start)[1:]
