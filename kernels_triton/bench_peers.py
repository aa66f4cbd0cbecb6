"""Times dense decode attention of other libraries on rows of the same shape, for bench.py.

Each library has a cache of its own layout with random values, so that times are compared and not
results. For a library that is not installed, or that refuses the shape, the reason stands in place
of a time.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

Clock = Callable[[Callable[[], Any]], float]
REFUSALS = (RuntimeError, TypeError, ValueError, AttributeError, ImportError)
"""What other libraries raise for shapes, cards or versions that they do not support."""


def torch_sdpa(x: dict[str, Any], clock: Clock) -> float | str:
    """torch.nn.functional.scaled_dot_product_attention over a contiguous cache."""
    K, H = x["kv"].shape[1], x["kv"].shape[-1]
    shape = (len(x["length"]), K, int(x["length"][0]), H)
    try:
        key, value = (x["kv"].new_empty(shape).normal_() for _ in range(2))
        q = x["q"].transpose(1, 2)
        attend = torch.nn.functional.scaled_dot_product_attention
        return clock(lambda: attend(q, key, value, enable_gqa=True))
    except REFUSALS as e:
        return _refused(e)


def flashinfer(x: dict[str, Any], clock: Clock) -> float | str:
    """BatchDecodeWithPagedKVCacheWrapper over pages of the same size, with tensor cores."""
    if importlib.util.find_spec("flashinfer") is None:
        return "not installed"
    _, K, M, _, C, H = x["kv"].shape
    B, P = x["table"].shape
    place = {"dtype": torch.int32, "device": x["kv"].device}
    try:
        module = importlib.import_module("flashinfer")
        workspace = torch.empty(2**28, dtype=torch.uint8, device=x["kv"].device)
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(
            torch.arange(B + 1, **place) * P, x["table"].flatten(), torch.full((B,), C, **place),
            x["q"].shape[2], K, H, C, q_data_type=x["q"].dtype, kv_data_type=x["kv"].dtype,
        )  # fmt: skip
        pools = tuple(x["kv"].new_empty(M, K, C, H).normal_() for _ in range(2))
        q = x["q"][:, 0]
        return clock(lambda: wrapper.run(q, pools))
    except REFUSALS as e:
        return _refused(e)


def flash_attention(x: dict[str, Any], clock: Clock) -> float | str:
    """flash_attn_with_kvcache over a contiguous cache."""
    if importlib.util.find_spec("flash_attn") is None:
        return "not installed"
    K, H = x["kv"].shape[1], x["kv"].shape[-1]
    shape = (len(x["length"]), int(x["length"][0]), K, H)
    try:
        attend = importlib.import_module("flash_attn").flash_attn_with_kvcache
        key, value = (x["kv"].new_empty(shape).normal_() for _ in range(2))
        return clock(lambda: attend(x["q"], key, value, cache_seqlens=x["length"]))
    except REFUSALS as e:
        return _refused(e)


def _refused(e: Exception) -> str:
    return f"refused: {' '.join(str(e).split())[:80]}"


PEERS = {"torch": torch_sdpa, "flashinfer": flashinfer, "flash_attn": flash_attention}
