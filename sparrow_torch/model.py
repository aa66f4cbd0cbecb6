"""The decoder in torch: Qwen3 (with QK norm) or Llama style, weights named as in sparrow_jax.

One block, for hidden states x:

    x += attention(norm(x)) o
    x += (silu(h gate) * (h up)) down     with h = norm(x)

The same weights are used in two ways:
  `hidden`  whole sequences (training, scoring, replay), attention by flash_prefill;
  `extend`  new tokens after those in a paged cache (prefill, decode), attention by sparse_decode.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from common.model.geometry import Geometry, layer_shapes
from kernels_triton.ops import REFERENCE, Ops
from kernels_triton.reference import NUM_RESERVED


class Decoder(torch.nn.Module):
    """Parameters and forward passes; see the file's docstring. ops: kernels or references."""

    def __init__(self, g: Geometry, *, ops: Ops = REFERENCE, dtype=torch.float32, device=None):
        super().__init__()
        self.geometry, self.ops = g, ops
        self.project, self.finish = _project, _finish  # `extend` calls these; may be compiled
        place = {"dtype": dtype, "device": device}

        def zeros(*shape: int) -> torch.nn.Parameter:
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
        """Copy weights by name ("layers.q_LDNH"): numpy arrays, or anything with __dlpack__.

        They are copied to this model's type and device, because a learner reuses its buffers.
        Raises: ValueError if a name or a shape belongs to another geometry.
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
        """Output head [V, D]; the embedding if the geometry ties them."""
        return self.embed_VD if self.geometry.tie_embeddings else self.head_VD

    def logits(self, hidden_BD) -> torch.Tensor:
        """Next-token logits [B, V] in float32."""
        head_VD = self.head()
        if hidden_BD.is_cuda and hidden_BD.dtype != torch.float32:
            return torch.mm(hidden_BD, head_VD.mT, out_dtype=torch.float32)
        return hidden_BD.float() @ head_VD.float().mT

    def hidden(
        self, tokens_BT, *, remat=False, budget_T=None, sparse_BT=None, page=16, num_dense=2,
        policy="mean", observe=None,
    ) -> Any:  # fmt: skip
        """Final hidden states [B, T, D] of right-padded sequences.

        Attention is causal, so padding cannot change the states before it.
        budget_T int32 [T]: replay sparse decode with these budgets in all layers but the first
        num_dense, for the queries in sparse_BT; all others are dense. policy: the rule of
        kernels_triton/policies.py that chooses the pages; rules other than "mean" are computed by
        the reference.
        observe(q=, k=, v=, a=, x=), if given, is called in every layer; the result then is (hidden
        states, list of what it returned).
        """
        g = self.geometry
        prefill = self.ops.flash_prefill
        if policy != "mean":
            prefill = functools.partial(REFERENCE.flash_prefill, policy=policy)
        position_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None]
        angles = _rope_angles(position_BT, g.head_dim, g.rope_theta)
        x = self.embed_VD[tokens_BT]

        def block(x: torch.Tensor, layer: int) -> torch.Tensor:
            w = self._layer(layer)
            q, k, v = _project(g, w, x, *angles)
            budget = None if layer < num_dense else budget_T
            a = prefill(q, k, v, budget_T=budget, sparse_BT=sparse_BT, page=page)
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
        """Append tokens to the paged cache, in place; returns hidden [B, T, D] of the new tokens.

        Row b adds num_new_B[b] <= T tokens from position start_B[b] on; the rest of the row is
        padding. k_B None decodes densely, with any T. Otherwise T = 1, k_B is the budget of each
        row, and all layers but the first num_dense read min(k + 3, number of pages) pages.
        cache = (kv_pages_LKMxCH, landmarks_LMKH).
        observe(layer=, q=, marks=, pages=, lse=, sparse=), if given, is called in every layer; the
        result then is (hidden, list of what it returned).
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
        if k_B is not None:  # every layer skips the same number of pages
            skipped = (num_pages_B - k_B - NUM_RESERVED).clamp(min=0) * page
            sparse = start_B - skipped, length_B - skipped
        angles = _rope_angles(position_BT, g.head_dim, g.rope_theta)
        x, facts = self.embed_VD[tokens_BT], []
        for layer in range(g.num_layers):
            w = self._layer(layer)
            q, k, v = self.project(g, w, x, *angles)
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
                given = {"layer": layer, "q": q, "marks": marks, "pages": pages, "lse": lse}
                facts.append(observe(**given, sparse=is_sparse))
            x = self.finish(g, w, x, a)
        hidden = _rms_norm(x, self.final_norm_D, g.norm_eps)
        return (hidden, facts) if observe else hidden

    def _layer(self, layer: int) -> dict[str, torch.Tensor]:
        """Parameters of one layer by name."""
        return {name: w[layer] for name, w in self.layers.items()}


def _project(
    g: Geometry, w: dict[str, torch.Tensor], x_BTD: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Queries, keys and values; queries and keys with QK norm, if the model has it, and RoPE."""
    h = _rms_norm(x_BTD, w["attn_norm_LD"], g.norm_eps)
    q, k, v = (torch.einsum("btd,dnh->btnh", h, w[name]) for name in ("q_LDNH", "k_LDKH", "v_LDKH"))
    if g.qk_norm:
        q = _rms_norm(q, w["q_norm_LH"], g.norm_eps)
        k = _rms_norm(k, w["k_norm_LH"], g.norm_eps)
    return _rotate(q, cos, sin), _rotate(k, cos, sin), v


def _finish(
    g: Geometry, w: dict[str, torch.Tensor], x_BTD: torch.Tensor, attention_BTNH: torch.Tensor
) -> torch.Tensor:
    """Output projection and feed-forward layer, each added to the residual stream."""
    x = x_BTD + torch.einsum("btnh,nhd->btd", attention_BTNH, w["o_LNHD"])
    h = _rms_norm(x, w["mlp_norm_LD"], g.norm_eps)
    gated = torch.nn.functional.silu(h @ w["gate_LDF"]) * (h @ w["up_LDF"])
    return x + gated @ w["down_LFD"]


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last axis; the mean square is computed in float32."""
    x32 = x.float()
    scale = torch.rsqrt((x32 * x32).mean(-1, keepdim=True) + eps)
    return (x32 * scale).to(x.dtype) * weight


def _rope_angles(
    position_BT: torch.Tensor, head_dim: int, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [B, T, 1, H/2] of the rotation angles position * theta^(-2i/H), in float32."""
    i = torch.arange(0, head_dim // 2, dtype=torch.float32, device=position_BT.device)
    angle = position_BT[..., None, None].float() * theta ** (-i * 2 / head_dim)
    return angle.cos(), angle.sin()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in the Hugging Face convention: dimension i is paired with i + H / 2."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
