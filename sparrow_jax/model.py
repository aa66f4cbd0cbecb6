"""The decoder: Qwen3 (QK norm) and Llama-style geometry, layers stacked and scanned.

One block, for hidden states x: x += attention(norm(x)) o ; x += (silu(h gate) * (h up)) down with
h = norm(x). Two ways through the same weights:
  `hidden`  whole sequences (training, scoring, replay), attention by flash_prefill;
  `extend`  new tokens on top of a paged cache (prefill and decode), attention by sparse_decode.
Parameters are float32 masters; `compute_dtype` is what they are cast to inside a pass.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from common.config import ModelConfig
from common.model.geometry import layer_shapes
from kernels_pallas.layout import logical_pages
from kernels_pallas.ops import REFERENCE, Ops
from sparrow_jax import induction_init

# Partition of every parameter over the mesh axes (data, fsdp, tensor); leading None = layer axis.
PARTITION = {
    "embed_VD": P("tensor", "fsdp"),
    "head_VD": P("tensor", "fsdp"),
    "final_norm_D": P(None),
    "attn_norm_LD": P(None, None),
    "mlp_norm_LD": P(None, None),
    "q_LDNH": P(None, "fsdp", "tensor", None),
    "k_LDKH": P(None, "fsdp", "tensor", None),
    "v_LDKH": P(None, "fsdp", "tensor", None),
    "o_LNHD": P(None, "tensor", None, "fsdp"),
    "gate_LDF": P(None, "fsdp", "tensor"),
    "up_LDF": P(None, "fsdp", "tensor"),
    "down_LFD": P(None, "tensor", "fsdp"),
    "q_norm_LH": P(None, None),
    "k_norm_LH": P(None, None),
}


def draw(rng: np.random.Generator | None, shape: tuple[int, ...], scale: float) -> Any:
    """float32 normal numbers of standard deviation `scale`; without a generator, abstract zeros."""
    if rng is None:
        return jnp.zeros(shape, jnp.float32)
    return rng.standard_normal(shape, np.float32) * np.float32(scale)


class Layers(nnx.Module):
    """Stacked parameters of all blocks, drawn as N(0, 1/fan_in); residual outputs at half."""

    def __init__(self, g: ModelConfig, rng: np.random.Generator | None):
        for name, shape in layer_shapes(g).items():
            if "norm" in name:
                gain = g.qk_gain if name in ("q_norm_LH", "k_norm_LH") else 1.0
                value = jnp.full(shape, gain, jnp.float32)
            else:
                fan_in = shape[1] * shape[2] if name == "o_LNHD" else shape[1]
                gain = 0.5 if name in ("o_LNHD", "down_LFD") else 1.0
                value = draw(rng, shape, gain * fan_in**-0.5)
            setattr(self, name, nnx.Param(jnp.asarray(value)))


class Decoder(nnx.Module):
    """Parameters and forward passes; see the file's docstring.

    rng draws the weights, on the host: nothing is compiled for it. Without one they are zeros, for
    nnx.eval_shape and for weights that are loaded. ops: kernels or references, a static value.
    """

    def __init__(
        self, g: ModelConfig, rng: np.random.Generator | None = None, *, ops: Ops = REFERENCE
    ):
        self.geometry, self.ops = g, ops
        V, D = g.vocab_size, g.hidden_size
        embed = draw(rng, (V, D), D**-0.5)
        if g.embed_offset and rng is not None:
            embed += np.float32(g.embed_offset * D**-0.5) * rng.choice((-1, 1), D).astype(
                np.float32
            )
        self.embed_VD = nnx.Param(jnp.asarray(embed))
        self.final_norm_D = nnx.Param(jnp.ones(D, jnp.float32))
        if not g.tie_embeddings:
            self.head_VD = nnx.Param(jnp.asarray(draw(rng, (V, D), D**-0.5)))
        self.layers = Layers(g, rng)
        if g.induction_init and rng is not None:
            stack = {name: np.array(w) for name, w in self._stack().items()}
            for name, value in induction_init.draw_circuit(g, embed, stack, rng).items():
                getattr(self.layers, name)[...] = jnp.asarray(value)

    def head(self, dtype) -> jax.Array:
        """Output head [V, D]; the embedding when tied."""
        tied = self.geometry.tie_embeddings
        return (self.embed_VD if tied else self.head_VD)[...].astype(dtype)

    def _stack(self) -> dict[str, jax.Array]:
        return {name: getattr(self.layers, name)[...] for name in layer_shapes(self.geometry)}

    def hidden(
        self,
        tokens_BT,
        *,
        dtype,
        remat=False,
        budget_T=None,
        prompt_len_B=None,
        page=16,
        num_dense=2,
        policy="mean",
        observe=None,
    ):
        """Final hidden states [B, T, D] of right-padded sequences (causal: padding cannot leak).

        budget_T int32 [T] replays sparse decode in all layers but the first num_dense, the pages
        chosen by a policy of kernels_pallas/policies.py (not "mean": always by the reference).
        observe(q=, k=, v=, a=, x=) makes facts of a layer, a tree of arrays: then the result is
        (hidden states, facts [L, ...]).
        """
        g = self.geometry
        prefill = self.ops.flash_prefill
        if policy != "mean":
            prefill = functools.partial(REFERENCE.flash_prefill, policy=policy)
        position_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        x = self.embed_VD[...].astype(dtype)[tokens_BT]
        stack = self._stack()

        def block(x, layer, sparse):
            w = _layer(stack, layer, dtype)
            q, k, v = _project(g, w, x, position_BT)
            budget = budget_T if sparse else None
            a = prefill(q, k, v, budget_T=budget, prompt_len_B=prompt_len_B, page=page)
            x = _finish(g, w, x, a)
            return x, observe and observe(q=q, k=k, v=v, a=a, x=x)

        split = min(num_dense, g.num_layers) if budget_T is not None else g.num_layers
        facts = []
        for first, last, sparse in ((0, split, False), (split, g.num_layers, True)):
            body = functools.partial(block, sparse=sparse)
            body = jax.checkpoint(body) if remat else body
            x, seen = lax.scan(body, x, jnp.arange(first, last))
            facts.append(seen)
        hidden = _rms_norm(x, self.final_norm_D[...].astype(dtype), g.norm_eps)
        return (hidden, jax.tree.map(lambda *s: jnp.concatenate(s), *facts)) if observe else hidden

    def extend(
        self, cache, tokens_BT, start_B, num_new_B, page_table_BP, *, dtype, k_B=None,
        max_selected=0, num_dense=2, observe=None,
    ):  # fmt: skip
        """Append tokens to the paged cache; (cache, hidden [B, T, D]) of the new positions.

        Row b adds num_new_B[b] <= T tokens at position start_B[b]; the rest of the row is padding.
        k_B None = dense decode, any T. Otherwise T = 1 and k_B is the budget of each row; layers
        past the first num_dense read min(k + 3, pages). cache = (kv_pages_LKM, landmarks_LMKH).
        observe(layer=, q=, marks=, pages=, lse=, sparse=) makes facts of a layer: then a list of
        them, one per layer, comes last in the result.
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

        def block(layer, carry, sparse):
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
                seen = {"layer": layer, "q": q, "marks": marks, "pages": ids, "lse": lse}
                facts.append(observe(**seen, sparse=sparse))
            return _finish(g, w, x, a), kv, marks

        carry, facts = (x, *cache), []
        split = min(num_dense, g.num_layers) if k_B is not None else g.num_layers
        for first, last, sparse in ((0, split, False), (split, g.num_layers, True)):
            if first < last:
                # Bounds that XLA cannot see through: it would unroll a loop over one layer, and
                # then copy the pool between that layer's reads and the next one's writes.
                bounds = lax.optimization_barrier((jnp.int32(first), jnp.int32(last)))
                body = functools.partial(block, sparse=sparse)
                if observe:  # layer by layer, so that facts come out of the loop
                    carry = functools.reduce(lambda c, i: body(i, c), range(first, last), carry)
                else:
                    carry = lax.fori_loop(*bounds, body, carry)
        x, kv, marks = carry
        hidden = _rms_norm(x, self.final_norm_D[...].astype(dtype), g.norm_eps)
        return ((kv, marks), hidden, facts) if observe else ((kv, marks), hidden)


def _layer(stack, layer, dtype):
    """Parameters of one layer, cast for the pass (the slice is fused into its use)."""
    return {
        name: lax.dynamic_index_in_dim(w, layer, 0, keepdims=False).astype(dtype)
        for name, w in stack.items()
    }


def _project(g, w, x_BTD, position_BT):
    """Queries, keys (both normed where the geometry says so, then rotated) and values."""
    h = _rms_norm(x_BTD, w["attn_norm_LD"], g.norm_eps)
    q, k, v = (_heads(h, w[name]) for name in ("q_LDNH", "k_LDKH", "v_LDKH"))
    if g.qk_norm:
        q = _rms_norm(q, w["q_norm_LH"], g.norm_eps)
        k = _rms_norm(k, w["k_norm_LH"], g.norm_eps)
    cos, sin = _rope_angles(position_BT, g.head_dim, g.rope_theta)
    return _rotate(q, cos, sin), _rotate(k, cos, sin), v


def _finish(g, w, x_BTD, attention_BTNH):
    """Output projection and feed-forward with their residuals."""
    D = x_BTD.shape[-1]
    o_XD = w["o_LNHD"].reshape(-1, D)
    x_XD = x_BTD.reshape(-1, D) + attention_BTNH.reshape(-1, o_XD.shape[0]) @ o_XD
    h = _rms_norm(x_XD, w["mlp_norm_LD"], g.norm_eps)
    gated = jax.nn.silu(h @ w["gate_LDF"]) * (h @ w["up_LDF"])
    return (x_XD + gated @ w["down_LFD"]).reshape(x_BTD.shape)


def _heads(x_BTD, w_DNH):
    """x w as [B, T, N, H]; as one flat product, whose backward pass is the faster one on CPU."""
    B, T, D = x_BTD.shape
    flat = x_BTD.reshape(-1, D) @ w_DNH.reshape(D, -1)
    return flat.reshape(B, T, *w_DNH.shape[1:])


def _rms_norm(x, weight, eps):
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight


def _rope_angles(position_BT, head_dim, theta):
    """cos and sin [B, T, 1, H/2] of the rotation angles position * theta^(-2i/H), in float32."""
    frequency = theta ** (-jnp.arange(0, head_dim // 2, dtype=jnp.float32) * 2 / head_dim)
    angle = position_BT[..., None, None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def _rotate(x, cos, sin):
    """RoPE in the Hugging Face convention: halves, not interleaved pairs."""
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
