"""Qwen3 / Llama-style decoder in torch, the weights stacked and named as in sparrow_jax/model.py.

One block, for hidden states x: x += attention(norm(x)) o ; x += (silu(h gate) * (h up)) down with
h = norm(x). Two ways through the same weights:
  `hidden`  whole sequences (training, scoring, replay), attention by flash_prefill;
  `extend`  new tokens on top of a paged cache (prefill and decode), attention by sparse_decode.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from common.config import ModelConfig
from common.model.geometry import layer_shapes
from kernels_triton.ops import REFERENCE, Ops
from kernels_triton.reference import NUM_RESERVED


class Decoder(torch.nn.Module):
    """Parameters and forward passes; see the file's docstring. ops: kernels or references."""

    def __init__(self, g: ModelConfig, *, ops: Ops = REFERENCE, dtype=torch.float32, device=None):
        super().__init__()
        self.geometry, self.ops = g, ops
        self.project, self.finish = _project, _finish  # of `extend`; may be compiled
        place = {"dtype": dtype, "device": device}

        def zeros(*shape):
            return torch.nn.Parameter(torch.zeros(shape, **place))

        self.embed_VD = zeros(g.vocab_size, g.hidden_size)
        self.final_norm_D = zeros(g.hidden_size)
        if not g.tie_embeddings:
            self.head_VD = zeros(g.vocab_size, g.hidden_size)
        self.layers = torch.nn.ParameterDict(
            {name: zeros(*shape) for name, shape in layer_shapes(g).items()}
        )

    @torch.no_grad()
    def load(self, weights: Mapping[str, Any]) -> None:
        """Copy weights by name ("layers.q_LDNH"): anything with __dlpack__, or numpy arrays.

        A copy in this model's type and on its device: a learner reuses its buffers. ValueError for
        names or shapes of another geometry.
        """
        own = dict(self.named_parameters())
        if own.keys() != weights.keys():
            differ = ", ".join(sorted(own.keys() ^ weights.keys()))
            raise ValueError(f"weights of another geometry: {differ} on one side only")
        for name, x in weights.items():
            tensor = torch.tensor(x) if isinstance(x, np.ndarray) else torch.from_dlpack(x)
            if tensor.shape != own[name].shape:
                raise ValueError(
                    f"{name}: shape {tuple(tensor.shape)}, expected {tuple(own[name].shape)}; "
                    "pass the weights of the same geometry"
                )
            own[name].copy_(tensor)

    def head(self) -> torch.Tensor:
        """Output head [V, D]; the embedding when tied."""
        return self.embed_VD if self.geometry.tie_embeddings else self.head_VD

    def logits(self, hidden_BD) -> torch.Tensor:
        """Next-token logits [B, V] in float32."""
        head_VD = self.head()
        if hidden_BD.is_cuda and hidden_BD.dtype != torch.float32:
            return torch.mm(hidden_BD, head_VD.mT, out_dtype=torch.float32)
        return hidden_BD.float() @ head_VD.float().mT

    def hidden(
        self, tokens_BT, *, remat=False, budget_T=None, prompt_len_B=None, page=16, num_dense=2,
        policy="mean", observe=None,
    ):  # fmt: skip
        """Final hidden states [B, T, D] of right-padded sequences (causal: padding cannot leak).

        budget_T int32 [T] replays sparse decode in all layers but the first num_dense, the pages
        chosen by a policy of kernels_triton/policies.py (not "mean": always by the reference).
        observe(q=, k=, v=, a=, x=) makes facts of a layer: then the result is (hidden states, list
        of them).
        """
        g = self.geometry
        prefill = self.ops.flash_prefill
        if policy != "mean":
            prefill = functools.partial(REFERENCE.flash_prefill, policy=policy)
        position_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None]
        turn = _rope_angles(position_BT, g.head_dim, g.rope_theta)
        x = self.embed_VD[tokens_BT]

        def block(x, layer):
            w = self._layer(layer)
            q, k, v = _project(g, w, x, *turn)
            budget = None if layer < num_dense else budget_T
            a = prefill(q, k, v, budget_T=budget, prompt_len_B=prompt_len_B, page=page)
            x = _finish(g, w, x, a)
            if observe:
                facts.append(observe(q=q, k=k, v=v, a=a, x=x))
            return x

        facts: list[Any] = []
        for layer in range(g.num_layers):
            x = checkpoint(block, x, layer, use_reentrant=False) if remat else block(x, layer)
        hidden = _rms_norm(x, self.final_norm_D, g.norm_eps)
        return (hidden, facts) if observe else hidden

    def extend(
        self, cache, tokens_BT, start_B, num_new_B, page_table_BP, *, k_B=None, max_selected=0,
        num_dense=2, observe=None,
    ) -> Any:  # fmt: skip
        """Append tokens to the paged cache, in place; hidden states [B, T, D] of the new positions.

        Row b adds num_new_B[b] <= T tokens at position start_B[b]; the rest of the row is padding.
        k_B None = dense decode, any T. Otherwise T = 1 and k_B is the budget of each row; layers
        past the first num_dense read min(k + 3, pages). cache = (kv_pages_LKMxCH, landmarks_LMKH).
        observe(layer=, q=, marks=, pages=, lse=, sparse=) makes facts of a layer: then the result
        is (hidden states, list of them).
        """
        g = self.geometry
        assert k_B is None or tokens_BT.shape[1] == 1, "sparse decode selects for one token per row"
        kv, marks = cache
        page = kv.shape[4]
        steps = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        position_BT = start_B[:, None] + steps
        start_B = torch.where(num_new_B > 0, start_B, 0)
        length_B = start_B + num_new_B
        num_pages_B = (length_B + page - 1) // page
        dense = start_B, length_B
        if k_B is not None:  # the same number of pages in every layer
            skipped = (num_pages_B - k_B - NUM_RESERVED).clamp(min=0) * page
            sparse = start_B - skipped, length_B - skipped
        turn = _rope_angles(position_BT, g.head_dim, g.rope_theta)
        x, facts = self.embed_VD[tokens_BT], []
        for layer in range(g.num_layers):
            w = self._layer(layer)
            q, k, v = self.project(g, w, x, *turn)
            self.ops.append_kv(kv, marks, layer, k, v, page_table_BP, start_B, num_new_B)
            pages, listed = page_table_BP, dense
            is_sparse = k_B is not None and layer >= num_dense
            if is_sparse:
                pages, _ = self.ops.select_pages(
                    q[:, 0], marks, layer, page_table_BP, num_pages_B, k_B,
                    max_selected=max_selected,
                )  # fmt: skip
                listed = sparse
            a, lse = self.ops.sparse_decode(q, kv, layer, pages, *listed)
            if observe:
                seen = {"layer": layer, "q": q, "marks": marks, "pages": pages, "lse": lse}
                facts.append(observe(**seen, sparse=is_sparse))
            x = self.finish(g, w, x, a)
        hidden = _rms_norm(x, self.final_norm_D, g.norm_eps)
        return (hidden, facts) if observe else hidden

    def _layer(self, layer: int) -> dict[str, torch.Tensor]:
        return {name: w[layer] for name, w in self.layers.items()}


def _project(g, w, x_BTD, cos, sin):
    """Queries, keys (both normed where the geometry says so, then rotated) and values."""
    h = _rms_norm(x_BTD, w["attn_norm_LD"], g.norm_eps)
    q, k, v = (torch.einsum("btd,dnh->btnh", h, w[name]) for name in ("q_LDNH", "k_LDKH", "v_LDKH"))
    if g.qk_norm:
        q = _rms_norm(q, w["q_norm_LH"], g.norm_eps)
        k = _rms_norm(k, w["k_norm_LH"], g.norm_eps)
    return _rotate(q, cos, sin), _rotate(k, cos, sin), v


def _finish(g, w, x_BTD, attention_BTNH):
    """Output projection and feed-forward with their residuals."""
    x = x_BTD + torch.einsum("btnh,nhd->btd", attention_BTNH, w["o_LNHD"])
    h = _rms_norm(x, w["mlp_norm_LD"], g.norm_eps)
    gated = torch.nn.functional.silu(h @ w["gate_LDF"]) * (h @ w["up_LDF"])
    return x + gated @ w["down_LFD"]


def _rms_norm(x, weight, eps):
    x32 = x.float()
    scale = torch.rsqrt((x32 * x32).mean(-1, keepdim=True) + eps)
    return (x32 * scale).to(x.dtype) * weight


def _rope_angles(position_BT, head_dim, theta):
    """cos and sin [B, T, 1, H/2] of the rotation angles position * theta^(-2i/H), in float32."""
    i = torch.arange(0, head_dim // 2, dtype=torch.float32, device=position_BT.device)
    angle = position_BT[..., None, None].float() * theta ** (-i * 2 / head_dim)
    return angle.cos(), angle.sin()


def _rotate(x, cos, sin):
    """RoPE in the Hugging Face convention: halves, not interleaved pairs."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
