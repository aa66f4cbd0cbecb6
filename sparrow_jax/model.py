"""The decoder in JAX: Qwen3 (with QK norm) or Llama style, one scan over stacked layers.

One block, for hidden states x:

    x += attention(norm(x)) o
    x += (silu(h gate) * (h up)) down     with h = norm(x)

The same weights are used in two ways:
  `hidden`  whole sequences (training, scoring, replay), attention by flash_prefill;
  `extend`  new tokens after those in a paged cache (prefill, decode), attention by sparse_decode.
Parameters are stored in float32 and cast to `dtype` inside a pass.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from common.model.geometry import Geometry, layer_shapes
from kernels_pallas.layout import logical_pages
from kernels_pallas.ops import REFERENCE, Ops

Cache = tuple[jax.Array, jax.Array]
"""kv_pages_LKM and landmarks_LMKH, as sparrow_jax/cache.py allocates them."""


class Layers(nnx.Module):
    """Parameters of all blocks, stacked along the first axis."""

    def __init__(self, g: Geometry):
        for name, shape in layer_shapes(g).items():
            setattr(self, name, nnx.Param(jnp.zeros(shape, jnp.float32)))


class Decoder(nnx.Module):
    """Parameters and forward passes; see the file's docstring.

    A new decoder's weights are zeros, for nnx.eval_shape; hf.to_state fills them. ops: kernels or
    references, a static value.
    """

    def __init__(self, g: Geometry, *, ops: Ops = REFERENCE):
        self.geometry, self.ops = g, ops

        def zeros(*shape: int) -> nnx.Param:
            return nnx.Param(jnp.zeros(shape, jnp.float32))

        self.embed_VD = zeros(g.vocab_size, g.hidden_size)
        self.final_norm_D = zeros(g.hidden_size)
        if not g.tie_embeddings:
            self.head_VD = zeros(g.vocab_size, g.hidden_size)
        self.layers = Layers(g)

    def head(self, dtype) -> jax.Array:
        """Output head [V, D]; the embedding if the geometry ties them."""
        tied = self.geometry.tie_embeddings
        return (self.embed_VD if tied else self.head_VD)[...].astype(dtype)

    def _stack(self) -> dict[str, jax.Array]:
        """The stacked layer parameters by name."""
        return {name: getattr(self.layers, name)[...] for name in layer_shapes(self.geometry)}

    def hidden(
        self,
        tokens_BT,
        *,
        dtype,
        remat=False,
        budget_T=None,
        sparse_BT=None,
        page=16,
        num_dense=2,
        policy="mean",
        observe=None,
    ) -> Any:
        """Final hidden states [B, T, D] of right-padded sequences.

        Attention is causal, so padding cannot change the states before it.
        budget_T int32 [T]: replay sparse decode with these budgets in all layers but the first
        num_dense, for the queries in sparse_BT; all others are dense. policy: the rule of
        kernels_pallas/policies.py that chooses the pages; rules other than "mean" are computed by
        the reference.
        observe(q=, k=, v=, a=, x=), if given, is called in every layer and returns a tree of
        arrays; the result then is (hidden states, those arrays stacked to [L, ...]).
        """
        g = self.geometry
        prefill = self.ops.flash_prefill
        if policy != "mean":
            prefill = functools.partial(REFERENCE.flash_prefill, policy=policy)
        position_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        x = self.embed_VD[...].astype(dtype)[tokens_BT]
        stack = self._stack()

        def block(x: jax.Array, layer: Any, sparse: bool) -> tuple[jax.Array, Any]:
            w = _layer(stack, layer, dtype)
            q, k, v = _project(g, w, x, position_BT)
            budget = budget_T if sparse else None
            a = prefill(q, k, v, budget_T=budget, sparse_BT=sparse_BT, page=page)
            x = _finish(g, w, x, a)
            return x, observe and observe(q=q, k=k, v=v, a=a, x=x)

        split = min(num_dense, g.num_layers) if budget_T is not None else g.num_layers
        facts = []
        for first, last, sparse in ((0, split, False), (split, g.num_layers, True)):
            body = functools.partial(block, sparse=sparse)
            body = jax.checkpoint(body) if remat else body
            x, found = lax.scan(body, x, jnp.arange(first, last))
            facts.append(found)
        hidden = _rms_norm(x, self.final_norm_D[...].astype(dtype), g.norm_eps)
        return (hidden, jax.tree.map(lambda *s: jnp.concatenate(s), *facts)) if observe else hidden

    def extend(
        self, cache, tokens_BT, start_B, num_new_B, page_table_BP, *, dtype, k_B=None,
        max_selected=0, num_dense=2, observe=None,
    ) -> Any:  # fmt: skip
        """Append tokens to the paged cache; returns (cache, hidden [B, T, D] of the new tokens).

        Row b adds num_new_B[b] <= T tokens from position start_B[b] on; the rest of the row is
        padding. k_B None decodes densely, with any T. Otherwise T = 1, k_B is the budget of each
        row, and all layers but the first num_dense read min(k + 3, number of pages) pages.
        observe(layer=, q=, marks=, pages=, lse=, sparse=), if given, is called in every layer; the
        list of what it returned then comes last in the result.
        """
        g = self.geometry
        assert k_B is None or tokens_BT.shape[1] == 1, "sparse decode selects for one token per row"
        page_size = logical_pages(cache[0], g.head_dim).shape[4]
        position_BT = start_B[:, None] + jnp.arange(tokens_BT.shape[1])
        start_B = jnp.where(num_new_B > 0, start_B, 0)
        length_B = start_B + num_new_B
        num_pages_B = (length_B + page_size - 1) // page_size
        x = self.embed_VD[...].astype(dtype)[tokens_BT]
        stack = self._stack()

        def block(layer: Any, carry: Any, sparse: bool) -> Any:
            x, kv, marks = carry
            w = _layer(stack, layer, dtype)
            q, k, v = _project(g, w, x, position_BT)
            kv, marks = self.ops.append_kv(
                kv, marks, layer, k, v, page_table_BP, start_B, num_new_B
            )
            if sparse:
                ids, count_B = self.ops.select_pages(
                    q[:, 0],
                    marks,
                    layer,
                    page_table_BP,
                    num_pages_B,
                    k_B,
                    max_selected=max_selected,
                )
                skipped = (num_pages_B - count_B) * page_size
                a, lse = self.ops.sparse_decode(
                    q, kv, layer, ids, start_B - skipped, length_B - skipped
                )
            else:
                ids = page_table_BP
                a, lse = self.ops.sparse_decode(q, kv, layer, ids, start_B, length_B)
            if observe:
                given = {"layer": layer, "q": q, "marks": marks, "pages": ids, "lse": lse}
                facts.append(observe(**given, sparse=sparse))
            return _finish(g, w, x, a), kv, marks

        carry, facts = (x, *cache), []
        split = min(num_dense, g.num_layers) if k_B is not None else g.num_layers
        for first, last, sparse in ((0, split, False), (split, g.num_layers, True)):
            if first < last:
                # The barrier hides the bounds from XLA. It would unroll a loop over one layer and
                # then copy the pool between that layer's reads and the next layer's writes.
                bounds = lax.optimization_barrier((jnp.int32(first), jnp.int32(last)))
                body = functools.partial(block, sparse=sparse)
                if observe:  # a Python loop, because a list of arrays cannot leave a compiled one
                    carry = functools.reduce(lambda c, i: body(i, c), range(first, last), carry)
                else:
                    carry = lax.fori_loop(*bounds, body, carry)
        x, kv, marks = carry
        hidden = _rms_norm(x, self.final_norm_D[...].astype(dtype), g.norm_eps)
        return ((kv, marks), hidden, facts) if observe else ((kv, marks), hidden)


def _layer(stack: dict[str, jax.Array], layer: Any, dtype: Any) -> dict[str, jax.Array]:
    """Parameters of one layer in `dtype`; XLA fuses the slice into its use."""
    return {
        name: lax.dynamic_index_in_dim(w, layer, 0, keepdims=False).astype(dtype)
        for name, w in stack.items()
    }


def _project(
    g: Geometry, w: dict[str, jax.Array], x_BTD: jax.Array, position_BT: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values; queries and keys with QK norm, if the model has it, and RoPE."""
    h = _rms_norm(x_BTD, w["attn_norm_LD"], g.norm_eps)
    q, k, v = (_heads(h, w[name]) for name in ("q_LDNH", "k_LDKH", "v_LDKH"))
    if g.qk_norm:
        q = _rms_norm(q, w["q_norm_LH"], g.norm_eps)
        k = _rms_norm(k, w["k_norm_LH"], g.norm_eps)
    cos, sin = _rope_angles(position_BT, g.head_dim, g.rope_theta)
    return _rotate(q, cos, sin), _rotate(k, cos, sin), v


def _finish(
    g: Geometry, w: dict[str, jax.Array], x_BTD: jax.Array, attention_BTNH: jax.Array
) -> jax.Array:
    """Output projection and feed-forward layer, each added to the residual stream."""
    D = x_BTD.shape[-1]
    o_XD = w["o_LNHD"].reshape(-1, D)
    x_XD = x_BTD.reshape(-1, D) + attention_BTNH.reshape(-1, o_XD.shape[0]) @ o_XD
    h = _rms_norm(x_XD, w["mlp_norm_LD"], g.norm_eps)
    gated = jax.nn.silu(h @ w["gate_LDF"]) * (h @ w["up_LDF"])
    return (x_XD + gated @ w["down_LFD"]).reshape(x_BTD.shape)


def _heads(x_BTD: jax.Array, w_DNH: jax.Array) -> jax.Array:
    """x w as [B, T, N, H], by one matrix product: its backward pass is faster on a CPU."""
    B, T, D = x_BTD.shape
    flat = x_BTD.reshape(-1, D) @ w_DNH.reshape(D, -1)
    return flat.reshape(B, T, *w_DNH.shape[1:])


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * weight over the last axis; the mean square is computed in float32."""
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight


def _rope_angles(
    position_BT: jax.Array, head_dim: int, theta: float
) -> tuple[jax.Array, jax.Array]:
    """cos and sin [B, T, 1, H/2] of the rotation angles position * theta^(-2i/H), in float32."""
    frequency = theta ** (-jnp.arange(0, head_dim // 2, dtype=jnp.float32) * 2 / head_dim)
    angle = position_BT[..., None, None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding in the Hugging Face convention: dimension i is paired with i + H / 2."""
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
