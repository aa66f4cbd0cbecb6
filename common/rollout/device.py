"""What a backend does for the paged engine: three programs, and the arrays that go in and out.

Letters: A slots (rows of the decode program), P pages of a sequence, T tokens, B rows of a prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

PREFILL_ROWS = 8
"""Rows of the prefill program: the most prompts that are prefilled together."""


class Decoding(NamedTuple):
    """Input of a decode program: state of the slots (A), budgets, sampling.

    active_A bool. cached_A, limit_A int32: tokens in the cache, and at most at the end. key_A: the
    two words of each row's noise key. page_table_AP int32: physical pages of each row, 0 = none.
    The budget of a row is budgets[min(position // bin_tokens, last)]; max_selected is the width of
    the list of selected pages, or 0 to decode densely. temperature 0 decodes greedily.
    """

    active_A: np.ndarray
    cached_A: np.ndarray
    limit_A: np.ndarray
    key_A: tuple[np.ndarray, np.ndarray]
    page_table_AP: np.ndarray
    budgets: np.ndarray
    bin_tokens: int
    max_selected: int
    temperature: float
    top_p: float


class DecodeResult(NamedTuple):
    """Output of a decode program, in numpy.

    active_A: False where a row is finished. cached_A: tokens in the cache. tokens_AT, logp_AT: the
    sampled tokens and their log-probs; the first num_sampled_A[s] columns of row s are valid. The
    token that ends a row is sampled but not cached.
    """

    active_A: np.ndarray
    cached_A: np.ndarray
    tokens_AT: np.ndarray
    logp_AT: np.ndarray
    num_sampled_A: np.ndarray


class Fork(NamedTuple):
    """Start of one sample: its slot gets the last hidden state of a prefilled prompt.

    prompt_row: row of the last prefill. page_from, page_to: the part-filled page to copy, and the
    sample's own page for it; 0 and 0 where the prompt ends on a page boundary.
    """

    prompt_row: int
    slot: int
    page_from: int
    page_to: int


class Device(Protocol):
    """The programs of one generate call, with the cache and hidden states that they work on."""

    def prefill(
        self,
        tokens_BT: np.ndarray,
        start_B: np.ndarray,
        num_new_B: np.ndarray,
        page_table_BP: np.ndarray,
    ) -> None:
        """Dense pass over the next tokens of PREFILL_ROWS prompts; rows with num_new 0 are idle."""

    def fork(self, starts: Sequence[Fork]) -> None:
        """Start samples of the prompts that were prefilled last."""

    def decode(self, decoding: Decoding) -> DecodeResult:
        """Sample up to config.decode_chunk tokens in every active slot."""

    def close(self) -> None:
        """End of the generate call, also after an error; buffers may be kept for the next call."""
