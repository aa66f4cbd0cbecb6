"""Float64 numpy versions of the formulas, which tests compare references and kernels with.

Only tests import them. They are slow and plain on purpose: inputs are cast to float64, nothing is
batched, and a position is a Python loop where that is clearer. Axes: T query tokens, S key tokens,
N query heads, K KV heads, R = N / K query heads per KV head, H head width, J selected pages,
V vocabulary.
"""

from common.oracles.decoder import decoder_forward, rms_norm, rope
from common.oracles.grpo_loss import PolicyLoss, policy_loss, policy_loss_grad
from common.oracles.sparse_attention import (
    Budgets,
    attention,
    num_pages,
    page_scores,
    pages_to_tokens,
    replay_mask,
    select_pages,
    sparse_decode,
)
from common.oracles.token_head import (
    acceptance_overlap,
    gumbel_argmax,
    log_softmax,
    token_logprob,
    topk_estimate,
)

__all__ = [
    "Budgets",
    "PolicyLoss",
    "acceptance_overlap",
    "attention",
    "decoder_forward",
    "gumbel_argmax",
    "log_softmax",
    "num_pages",
    "page_scores",
    "pages_to_tokens",
    "policy_loss",
    "policy_loss_grad",
    "replay_mask",
    "rms_norm",
    "rope",
    "select_pages",
    "sparse_decode",
    "token_logprob",
    "topk_estimate",
]
