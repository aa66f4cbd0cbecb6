"""Names and shapes of a decoder's parameters, layers stacked, the same in both backends."""

from __future__ import annotations

from common.config import ModelConfig


def layer_shapes(g: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each stacked layer parameter."""
    L, D, F, N, K, H = (
        g.num_layers, g.hidden_size, g.intermediate_size, g.num_heads, g.num_kv_heads, g.head_dim,
    )  # fmt: skip
    shapes = {
        "attn_norm_LD": (L, D),
        "mlp_norm_LD": (L, D),
        "q_LDNH": (L, D, N, H),
        "k_LDKH": (L, D, K, H),
        "v_LDKH": (L, D, K, H),
        "o_LNHD": (L, N, H, D),
        "gate_LDF": (L, D, F),
        "up_LDF": (L, D, F),
        "down_LFD": (L, F, D),
    }
    if g.qk_norm:
        shapes |= {"q_norm_LH": (L, H), "k_norm_LH": (L, H)}
    return shapes


def param_shapes(g: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by its full name; those of the layers begin with "layers."."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed_VD": (g.vocab_size, g.hidden_size),
        "final_norm_D": (g.hidden_size,),
    }
    if not g.tie_embeddings:
        shapes["head_VD"] = (g.vocab_size, g.hidden_size)
    return shapes | {f"layers.{name}": shape for name, shape in layer_shapes(g).items()}
