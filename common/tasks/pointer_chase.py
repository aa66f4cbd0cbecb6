"""Pointer chasing: a verifiable task with its own tokens that needs long-range attention.

The prompt states a table of facts "key -> value" in random order and asks for the chain that starts
at one key; the response follows it, one hop at a time, until a fact says `end`.

    <bos> . .  c>d ; a>b ; b>c ; d>end ;  ? a ;     (four facts, header of two fillers)
    a>b ; b>c ; c>d ; d>end ; <eos>                 (the response that follows the chain)

Every value in the response has to be looked up somewhere in the prompt: one missed page spoils the
answer. Facts that are not on the chain are decoys, and form chains of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from common.errors import UserError
from common.types import Prompt

PAD, BOS, EOS, QUERY, END, SEPARATOR, ARROW, FILLER = range(8)
NUM_SPECIAL = 8
_NAMES = ("<pad>", "<bos>", "<eos>", "?", "end", ";", ">", ".")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PointerChase:
    """The task; every field is an option of `TaskConfig.args`.

    num_symbols: number of keys. shared_values: a value is written with the token of the key (True),
    or with a second token per symbol (False), which makes the look-up easier to learn.
    min_entries, max_entries: facts in a prompt, uniformly distributed. chain_low, chain_high: share
    of the facts that lie on the asked chain. header_tokens: tokens before the first fact (<bos> and
    filler).
    fact_repeats: how often `key value` is written in a fact; fact_copies: how often the whole table
    is stated, each time in another order; fact_fillers: filler tokens after each fact.
    hop_repeats: how often `key value` is written in a hop of the response. arrow_tokens:
    tokens between key and value; separator_tokens: tokens after each fact and hop.
    partial_credit: see `score`. Raises UserError for settings that no prompt can meet.
    """

    num_symbols: int = 64
    shared_values: bool = False
    min_entries: int = 24
    max_entries: int = 48
    chain_low: float = 0.75
    chain_high: float = 0.9
    header_tokens: int = 16
    fact_repeats: int = 2
    fact_copies: int = 1
    fact_fillers: int = 0
    hop_repeats: int = 2
    arrow_tokens: int = 0
    separator_tokens: int = 0
    partial_credit: bool = False

    name = "pointer_chase"
    pad_id = PAD
    stop_ids = (EOS,)
    num_items = None
    deadline_seconds = None
    files = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), {"int": int, "float": float, "bool": bool}
            want = kind[str(field.type)]
            if want is float and type(value) is int:
                object.__setattr__(self, field.name, float(value))
            elif type(value) is not want:
                raise UserError(f"{field.name}={value!r}: expected {want.__name__}")
        for name in ("min_entries", "header_tokens", "fact_repeats", "fact_copies", "hop_repeats"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: expected at least 1")
        for name in ("fact_fillers", "arrow_tokens", "separator_tokens"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)}: expected at least 0")
        if not 2 <= self.min_entries <= self.max_entries <= self.num_symbols:
            raise UserError(
                f"min_entries={self.min_entries}, max_entries={self.max_entries}, "
                f"num_symbols={self.num_symbols}: expected 2 <= min <= max <= symbols"
            )
        if not 0 < self.chain_low <= self.chain_high <= 1:
            raise UserError(
                f"chain_low={self.chain_low}, chain_high={self.chain_high}: "
                "expected 0 < low <= high <= 1"
            )

    @property
    def vocab_size(self) -> int:
        """8 special tokens, then the keys, then (unless shared_values) the values."""
        return NUM_SPECIAL + self.num_symbols * (1 if self.shared_values else 2)

    @property
    def hop_tokens(self) -> int:
        """Number of response tokens in one hop."""
        return self.hop_repeats * (2 + self.arrow_tokens) + self.separator_tokens

    @property
    def max_prompt_tokens(self) -> int:
        """Length of the longest prompt."""
        pair = 2 + self.arrow_tokens
        fact = self.fact_repeats * pair + self.separator_tokens + self.fact_fillers
        return (
            self.header_tokens
            + self.fact_copies * self.max_entries * fact
            + 2
            + (self.separator_tokens)
        )

    @property
    def max_response_tokens(self) -> int:
        """Length of the longest correct response, <eos> included."""
        return self._chain_range(self.max_entries)[1] * self.hop_tokens + 1

    @property
    def min_response_tokens(self) -> int:
        """Length of the shortest response that can get more than 0, <eos> included."""
        hops = 1 if self.partial_credit else self._chain_range(self.min_entries)[0]
        return hops * self.hop_tokens + 1

    def prompt(self, seed: int, index: int) -> Prompt:
        """Problem number `index` of the stream `seed`: a pure function of both."""
        rng = np.random.default_rng([seed, index])
        tokens, chain, _ = self._problem(rng, self.min_entries, self.max_entries)
        answer = {"chain": [int(symbol) for symbol in chain]}
        return Prompt(prompt_id=index, tokens=tokens, task=self.name, answer=answer)

    def demonstration(
        self, rng: np.random.Generator, min_entries: int, max_entries: int, noise: float = 0.0
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A problem with its answer written out, for supervised warm-up.

        Each look-up is replaced with probability `noise`: in nine of ten cases by a random symbol
        of the table, which may be the right one, else by `end`. The walk goes on from there, until
        `end` or until it is as long as the true chain.

        Returns prompt int32 [n], response int32 [m], and decisions bool [m], which is True at the
        first statement of each hop's value: these tokens need a look-up.
        """
        prompt, chain, following = self._problem(rng, min_entries, max_entries)
        if noise == 0:
            hops = list(zip(chain, [*chain[1:], None], strict=True))
        else:
            hops = _noisy_walk(rng, chain, following, noise)
        decisions = np.zeros(len(hops) * self.hop_tokens + 1, bool)
        decisions[1 + self.arrow_tokens : -1 : self.hop_tokens] = True
        return prompt, self.response(hops), decisions

    def response(self, hops: Sequence[tuple[int, int | None]]) -> np.ndarray:
        """Tokens of a walk of hops (symbol, next symbol or None = end), then <eos>; int32."""
        tokens: list[int] = []
        for symbol, target in hops:
            tokens += self._pair(symbol, target) * self.hop_repeats
            tokens += [SEPARATOR] * self.separator_tokens
        return np.asarray([*tokens, EOS], np.int32)

    def stated_before(self, prompt: np.ndarray) -> np.ndarray:
        """True at prompt tokens that are the value of a fact which was stated before; bool [n].

        Only these tokens of a prompt can be predicted, so warm-up may train on them.
        """
        prompt, offset = np.asarray(prompt), 1 + self.arrow_tokens
        mask, seen = np.zeros(len(prompt), bool), set()
        at = self.header_tokens
        while at + offset < len(prompt) and prompt[at] != QUERY:
            for _ in range(self.fact_repeats):
                mask[at + offset] = int(prompt[at]) in seen
                seen.add(int(prompt[at]))
                at += 1 + offset
            at += self.separator_tokens + self.fact_fillers
        return mask

    def score(self, answer: Mapping[str, Any], response: np.ndarray) -> float:
        """1 for a correct answer, else 0 or partial credit; in [0, 1] for any response.

        A response is correct if it ends with <eos>, has as many tokens as the true walk, and its
        last hop is the true one; the hops before are not judged. With partial_credit, another
        response with <eos> gets min(h, n - 1) / n, where h hops precede the first wrong one and n
        is the length of the chain. A response without <eos> gets 0.
        """
        chain = [int(symbol) for symbol in answer["chain"]]
        truth = self.response(list(zip(chain, [*chain[1:], None], strict=True)))
        response = np.asarray(response).reshape(-1)
        stops = np.flatnonzero(response == EOS)
        if len(stops) == 0:
            return 0.0
        response, hop = response[: stops[0] + 1], self.hop_tokens
        if len(response) == len(truth) and np.array_equal(response[-hop - 1 :], truth[-hop - 1 :]):
            return 1.0
        if not self.partial_credit:
            return 0.0
        same = min(len(response), len(truth)) - 1
        wrong = np.flatnonzero(response[:same] != truth[:same])
        right = int(wrong[0] if len(wrong) else same) // hop
        return min(right, len(chain) - 1) / len(chain)

    def job(self, answer: Mapping[str, Any], response: np.ndarray) -> None:
        """None: `score` is pure and quick, so that no worker is needed."""

    def text(self, tokens: np.ndarray) -> str:
        """Tokens for people to read: keys k0 k1 ..., values v0 v1 ..., <n?> if unknown."""
        return " ".join(self._word(int(token)) for token in np.asarray(tokens).reshape(-1))

    def tokens(self, text: str) -> np.ndarray:
        """The inverse of `text`, int32; UserError names the first unknown word."""
        ids = []
        for word in text.split():
            number = (
                int(word[1:]) if word.isascii() and word[1:].isdecimal() and len(word) < 10 else -1
            )
            first = {"k": NUM_SPECIAL, "v": NUM_SPECIAL + self.num_symbols}.get(word[0], -1)
            if word in _NAMES:
                ids.append(_NAMES.index(word))
            elif first < 0 or first >= self.vocab_size or not 0 <= number < self.num_symbols:
                raise UserError(
                    f"{word=}: expected a token of {self.name} with {self.num_symbols} symbols"
                )
            else:
                ids.append(first + number)
        return np.asarray(ids, np.int32)

    def _word(self, token: int) -> str:
        if 0 <= token < NUM_SPECIAL:
            return _NAMES[token]
        kind, number = divmod(token - NUM_SPECIAL, self.num_symbols)
        return f"{'kv'[kind]}{number}" if 0 <= token < self.vocab_size else f"<{token}?>"

    def _pair(self, symbol: int, target: int | None) -> list[int]:
        first = NUM_SPECIAL if self.shared_values else NUM_SPECIAL + self.num_symbols
        value = END if target is None else first + int(target)
        return [NUM_SPECIAL + int(symbol), *[ARROW] * self.arrow_tokens, value]

    def _chain_range(self, num_entries: int) -> tuple[int, int]:
        """Smallest and largest number of hops in a table of `num_entries` facts."""
        low = min(num_entries, max(2, int(self.chain_low * num_entries)))
        return low, max(low, int(self.chain_high * num_entries))

    def _problem(
        self, rng: np.random.Generator, min_entries: int, max_entries: int
    ) -> tuple[np.ndarray, np.ndarray, dict[int, int | None]]:
        """(prompt tokens int32, symbols of the asked chain, the whole table)."""
        if not 2 <= min_entries <= max_entries <= self.num_symbols:
            raise UserError(
                f"{min_entries=}, {max_entries=}: expected 2 <= min <= max <= {self.num_symbols=}"
            )
        num_entries = int(rng.integers(min_entries, max_entries + 1))
        low, high = self._chain_range(num_entries)
        symbols = rng.permutation(self.num_symbols)[:num_entries]
        chain, rest = np.split(symbols, [int(rng.integers(low, high + 1))])
        chains = [chain]
        while len(rest):
            decoy, rest = np.split(rest, [int(rng.integers(1, len(rest) + 1))])
            chains.append(decoy)
        following: dict[int, int | None] = {}
        for one in chains:
            following |= zip(one.tolist(), [*one[1:].tolist(), None], strict=True)
        return self._write_prompt(rng, following, int(chain[0])), chain, following

    def _write_prompt(
        self, rng: np.random.Generator, following: Mapping[int, int | None], start: int
    ) -> np.ndarray:
        facts = list(following.items())
        after = [SEPARATOR] * self.separator_tokens
        tokens = [BOS] + [FILLER] * (self.header_tokens - 1)
        for _ in range(self.fact_copies):
            for i in rng.permutation(len(facts)):
                tokens += self._pair(*facts[i]) * self.fact_repeats
                tokens += after + [FILLER] * self.fact_fillers
        return np.asarray([*tokens, QUERY, NUM_SPECIAL + start, *after], np.int32)


def _noisy_walk(
    rng: np.random.Generator, chain: np.ndarray, following: Mapping[int, int | None], noise: float
) -> list[tuple[int, int | None]]:
    """A walk with look-ups that are random with probability `noise`; at most as long as `chain`."""
    symbols, at, hops = list(following), int(chain[0]), []
    for _ in range(len(chain)):
        target = following[at]
        if rng.random() < noise:
            target = symbols[int(rng.integers(len(symbols)))] if rng.random() < 0.9 else None
        hops.append((at, target))
        if target is None:
            break
        at = target
    return hops
