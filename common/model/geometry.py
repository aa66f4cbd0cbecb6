"""Names and shapes of a decoder's parameters, layers stacked, in both backends; Qwen3's sizes."""

from __future__ import annotations

from common.config import ModelConfig

_QWEN3 = {"vocab_size": 151_936, "num_kv_heads": 8, "head_dim": 128, "rope_theta": 1e6}
QWEN3 = {
    "qwen3-1.7b": ModelConfig(
        num_layers=28, hidden_size=2048, intermediate_size=6144, num_heads=16, **_QWEN3
    ),
    "qwen3-4b": ModelConfig(
        num_layers=36, hidden_size=2560, intermediate_size=9728, num_heads=32, **_QWEN3
    ),
    "qwen3-8b": ModelConfig(
        num_layers=36, hidden_size=4096, intermediate_size=12_288, num_heads=32,
        tie_embeddings=False, **_QWEN3,
    ),
    "qwen3-14b": ModelConfig(
        num_layers=40, hidden_size=5120, intermediate_size=17_408, num_heads=40,
        tie_embeddings=False, **_QWEN3,
    ),
}  # fmt: skip
"""The models of arXiv 2606.08446, as their config.json on Hugging Face (Qwen/Qwen3-*) states."""


def layer_shapes(g: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each stacked layer parameter."""
    L, D, F, N, K, H = (
        g.num_layers, g.hidden_size, g.intermediate_size, g.num_heads, g.num_kv_heads, g.head_dim,
    )  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
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
