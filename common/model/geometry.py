"""What a decoder is: its sizes, and the names and shapes of its parameters in both backends."""

from __future__ import annotations

import dataclasses

from common.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """The architecture of a decoder: all that its forward pass depends on besides its weights.

    Where the weights come from (a directory, or a seed and the settings of a random start) is not
    part of it: see ModelConfig of common/config.
    """

    vocab_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    qk_norm: bool = True
    tie_embeddings: bool = True

    @classmethod
    def from_config(cls, c: ModelConfig) -> Geometry:
        """The geometry of a model from scratch, whose settings have been checked by ModelConfig."""
        return cls(**{field.name: getattr(c, field.name) for field in dataclasses.fields(cls)})


_QWEN3 = {"vocab_size": 151_936, "num_kv_heads": 8, "head_dim": 128, "rope_theta": 1e6}
QWEN3 = {
    "qwen3-1.7b": Geometry(
        num_layers=28, hidden_size=2048, intermediate_size=6144, num_heads=16, **_QWEN3
    ),
    "qwen3-4b": Geometry(
        num_layers=36, hidden_size=2560, intermediate_size=9728, num_heads=32, **_QWEN3
    ),
    "qwen3-8b": Geometry(
        num_layers=36, hidden_size=4096, intermediate_size=12_288, num_heads=32,
        tie_embeddings=False, **_QWEN3,
    ),
    "qwen3-14b": Geometry(
        num_layers=40, hidden_size=5120, intermediate_size=17_408, num_heads=40,
        tie_embeddings=False, **_QWEN3,
    ),
}  # fmt: skip
"""The models of arXiv 2606.08446, by their config.json on Hugging Face (Qwen/Qwen3-*)."""


def layer_shapes(g: Geometry) -> dict[str, tuple[int, ...]]:
    """Shape of each layer parameter, all layers stacked along the first axis."""
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


def param_shapes(g: Geometry) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by its full name; names of layer parameters begin with "layers."."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed_VD": (g.vocab_size, g.hidden_size),
        "final_norm_D": (g.hidden_size,),
    }
    if not g.tie_embeddings:
        shapes["head_VD"] = (g.vocab_size, g.hidden_size)
    return shapes | {f"layers.{name}": shape for name, shape in layer_shapes(g).items()}
