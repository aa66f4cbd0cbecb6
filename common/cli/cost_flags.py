"""The flags of `sparrow cost`; the help must load no numpy."""

from __future__ import annotations

from common.cli.command_types import Flag

COST_FLAGS = (
    Flag(
        name="model",
        help="qwen3-1.7b, -4b, -8b, -14b, a config.json or the directory it lies in",
        required=True,
    ),
    Flag(
        name="schedule",
        help="a published name, a schedule file, or k=64 (pages of 16)",
        required=True,
    ),
    Flag(
        name="lengths",
        help='response tokens: a number or a file {"edges": [0, 512, 4096], "counts": [30, 8]}',
        required=True,
    ),
    Flag(name="prompt", help="prompt tokens", kind=int, default=1024),
    Flag(
        name="samples",
        help="responses to a prompt; they share its prefill and its full pages",
        kind=int,
        default=8,
    ),
    Flag(
        name="chip",
        help="a100, h100, h200, b200, mi300x, v5e, v5p, v6e, tpu7x; this = measure this CPU",
        default="h200",
    ),
    Flag(
        name="chips",
        help="chips that share one copy of the model (tensor parallel, communication free)",
        kind=int,
        default=1,
    ),
    Flag(
        name="memory_share",
        help="share of the memory for weights and cache; a larger cache means a larger batch",
        kind=float,
        default=0.8,
    ),
    Flag(
        name="batch",
        help="rows decoded at once; 0 = as many as fit, which dilutes the weights most",
        kind=int,
        default=0,
    ),
    Flag(
        name="reserve",
        help="rows take pages for the longest response at once (our engines), not as they grow",
        kind=bool,
        default=False,
    ),
    Flag(
        name="page_sizes",
        help="page sizes to compare at as many selected tokens",
        default="16,32,64,128",
    ),
    Flag(name="num_dense_layers", help="first layers that read everything", kind=int, default=2),
    Flag(name="kv_bytes", help="bytes of a cached number; 1 = float8", kind=int, default=2),
    Flag(name="weight_bytes", help="bytes of a weight", kind=int, default=2),
    Flag(
        name="train_share",
        help="share of a dense RL step that is not rollout; the paper's was 0.10 at 1.7B and 4B",
        kind=float,
        default=0.1,
    ),
    Flag(name="out", help="also write all numbers there, JSON"),
)
