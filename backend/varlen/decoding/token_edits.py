"""Changes of logits: `logit_bias` and `bad_words` of requests, and rules of beam search.

A bad word is tokenized with and without a space before it; each form is forbidden, also where vLLM, which has the same
option, forbids only the first. The last token of a form is forbidden where the answer ends with its other tokens.

Edits of a search change the log probability of single tokens and leave all others as they are, so the kernel applies
them while it reads the logits. A `TokenHistory` has the earlier tokens that they need. It grows token by token; beams
with common tokens share it.
Source: the logits processors of Hugging Face's `generate`, version 5, which in beam search act on log probabilities.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from varlen.errors import RequestError, shorten
from varlen.request.generation import GenerationOptions
from varlen.request.request import Float32Array, Int32Array

# Lists of words whose tokens are kept: clients often send the same one.
_MAX_CACHED = 64

_Tokens: TypeAlias = tuple[int, ...]
_NO_TOKENS: Int32Array = np.empty(0, np.int32)
# Tokens that follow each (n - 1)-gram.
_Followers: TypeAlias = Mapping[_Tokens, _Tokens]


@dataclass(frozen=True)
class ForbiddenTokens:
    """Tokens that an answer must not go on with.

    Attributes:
        after: last tokens of other words, by the tokens before.
    """

    always: _Tokens = ()
    after: Mapping[_Tokens, _Tokens] = field(default_factory=dict)

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int]], vocab_size: int) -> ForbiddenTokens:
        """Return the tokens that keep an answer free of these token sequences."""
        always: set[int] = set()
        after: defaultdict[_Tokens, set[int]] = defaultdict(set)
        for *prefix, last in sequences:
            if last < vocab_size:
                (after[tuple(prefix)] if prefix else always).add(last)
        lasts = {prefix: tuple(sorted(tokens)) for prefix, tokens in after.items()}
        return cls(tuple(sorted(always)), lasts)

    @cached_property
    def sizes(self) -> _Tokens:
        """Distinct lengths of the keys of `after`, ascending."""
        return tuple(sorted({len(prefix) for prefix in self.after}))

    @property
    def longest(self) -> int:
        """Number of the last tokens of an answer that `next` reads."""
        return self.sizes[-1] if self.sizes else 0

    def next(self, generated: Sequence[int]) -> list[int]:
        """Return the tokens that `after` forbids now.

        Args:
            generated: last tokens of the answer, at least `longest` if it has as many.
        """
        found: list[int] = []
        for size in self.sizes:
            if size > len(generated):
                break
            found += self.after.get(tuple(generated[len(generated) - size :]), ())
        return found


NOTHING_FORBIDDEN = ForbiddenTokens()


class BadWords:
    """Tokenizes the bad words of requests to one model. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Collection[int]) -> None:
        """Prepare an empty cache.

        Args:
            tokenizer: tokenizer of the checkpoint, without truncation and padding.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = frozenset(end_ids)
        self._lock = Lock()
        self._tokenized: OrderedDict[tuple[str, ...], ForbiddenTokens] = OrderedDict()

    def check(self, options: GenerationOptions) -> None:
        """Tokenize the words of a request, and keep their tokens for its sequences.

        Raises:
            RequestError: a word has no tokens, or hardly a token of the model is left.
        """
        forbidden = self.forbidden(options.bad_words)
        lasts = {token for tokens in forbidden.after.values() for token in tokens}
        never = lasts.union(forbidden.always, self._end_ids, options.stop_token_ids)
        if (
            options.bad_words
            and len([e for e in never if e < self._vocab_size]) == self._vocab_size
        ):
            raise RequestError("bad_words forbid every token of this model; send fewer words")

    def forbidden(self, words: tuple[str, ...]) -> ForbiddenTokens:
        """Return the tokens that these words forbid.

        Raises:
            RequestError: a word has no tokens.
        """
        with self._lock:
            if words in self._tokenized:
                self._tokenized.move_to_end(words)
                return self._tokenized[words]
        forms = (form for word in words for form in self._forms(word))
        forbidden = ForbiddenTokens.of(forms, self._vocab_size)
        with self._lock:
            self._tokenized[words] = forbidden
            while len(self._tokenized) > _MAX_CACHED:
                self._tokenized.popitem(last=False)
        return forbidden

    def _forms(self, word: str) -> list[list[int]]:
        bare, spaced = (
            self._tokenizer.encode(space + word.lstrip(), add_special_tokens=False).ids
            for space in ("", " ")
        )
        if not bare:
            raise RequestError(f"bad_words has {shorten(repr(word))}, which has no tokens")
        return [bare, spaced] if spaced != bare else [bare]


def bias_arrays(bias: Sequence[tuple[int, float]]) -> tuple[npt.NDArray[np.int64], Float32Array]:
    """Return token ids, and the number that is added to the logit of each."""
    ids, numbers = zip(*bias, strict=True)
    return np.array(ids, np.int64), np.array(numbers, np.float32)


def add_to_rows(
    logits: Tensor, changes: Mapping[int, tuple[npt.NDArray[np.int64], Float32Array]]
) -> None:
    """Add numbers to the logits of some rows, in place.

    Args:
        logits: `[rows, vocabulary]` fp32.
        changes: token ids and the number for each, by row.
    """
    if not changes:
        return
    ids, numbers = zip(*changes.values(), strict=True)
    rows = np.repeat(np.array([*changes], np.int64), [len(each) for each in ids])
    index = torch.from_numpy(np.stack((rows, np.concatenate(ids)))).to(logits.device).unbind()
    added = torch.from_numpy(np.concatenate(numbers)).to(logits.device)
    logits.index_put_(index, added, accumulate=True)


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Rules of a checkpoint for generated tokens, from its `generation_config.json`.

    Attributes:
        forced_first_id: the first token after a prompt of one token; Hugging Face's `forced_bos_token_id`.
        forced_last_id: the token at `max_tokens`; Hugging Face's `forced_eos_token_id`.
        suppressed_ids: tokens that are not generated; `suppress_tokens`.
        first_suppressed_ids: tokens that are not the first one, forced ones aside; `begin_suppress_tokens`.
        banned_ids: tokens that are not generated, whatever a request suppresses; `bad_words_ids`.
    """

    end_ids: tuple[int, ...] = ()
    forced_first_id: int | None = None
    forced_last_id: int | None = None
    suppressed_ids: tuple[int, ...] = ()
    first_suppressed_ids: tuple[int, ...] = ()
    banned_ids: tuple[int, ...] = ()

    def with_options(self, options: GenerationOptions) -> TokenRules:
        requested: dict[str, Any] = {
            "end_ids": () if options.ignore_eos else None,
            "forced_first_id": options.forced_bos_token_id,
            "forced_last_id": options.forced_eos_token_id,
            "suppressed_ids": options.suppress_tokens,
            "first_suppressed_ids": options.begin_suppress_tokens,
        }
        given = {name: value for name, value in requested.items() if value is not None}
        return replace(self, **given)


@dataclass(frozen=True, slots=True, eq=False)
class TokenEdits:
    """Changed log probabilities: each one is multiplied by its factor.

    Attributes:
        rows: `[edits]` int32, ascending.
        tokens: `[edits]` int32, unique within a row.
        factors: `[edits]` fp32; infinity bans the token.
    """

    rows: Int32Array
    tokens: Int32Array
    factors: Float32Array


@dataclass(frozen=True, slots=True, eq=False)
class TokenHistory:
    """The generated tokens of one beam, as edits need them.

    Attributes:
        factors: the factor of each distinct token, where it has no edit in every step.
        followers: followers of each (n - 1)-gram before a generated token.
        suffix: the last n - 1 tokens, or fewer.
        generated: the last generated tokens, as many as the longest bad word needs before its last one.
    """

    factors: Mapping[int, float] = field(default_factory=dict)
    followers: _Followers = field(default_factory=dict)
    suffix: _Tokens = ()
    generated: _Tokens = ()


class TokenEditor:
    """Forced tokens and edits of the beams of one prompt, by `options` of its request."""

    @classmethod
    def of_request(
        cls,
        rules: TokenRules,
        options: GenerationOptions,
        prompt_ids: Sequence[int],
        *,
        vocab_size: int,
        forbidden: ForbiddenTokens,
    ) -> TokenEditor:
        """Return the editor of a request, whose own rules replace the checkpoint's."""
        rules = rules.with_options(options)
        ends = dict.fromkeys((*rules.end_ids, *options.stop_token_ids))
        return cls(
            replace(rules, end_ids=tuple(ends)),
            options,
            prompt_ids,
            vocab_size=vocab_size,
            forbidden=forbidden,
        )

    def __init__(
        self,
        rules: TokenRules,
        options: GenerationOptions,
        prompt_ids: Sequence[int],
        *,
        vocab_size: int,
        forbidden: ForbiddenTokens = NOTHING_FORBIDDEN,
    ) -> None:
        """Prepare the edits.

        Args:
            prompt_ids: tokens before the first generated one; for an encoder-decoder, tokens of the decoder.
            vocab_size: number of tokens of the model; rules for other tokens are ignored.
        """
        self.options = options
        self._rules = rules
        self._forbidden = forbidden
        self.end_ids = tuple(token for token in rules.end_ids if token < vocab_size)
        self._max_tokens, self._min_tokens = options.max_tokens, options.min_tokens
        self._vocab_size = vocab_size
        self._has_forced_first = rules.forced_first_id is not None and len(prompt_ids) == 1
        first = rules.first_suppressed_ids
        self._first_suppressed = tuple(token for token in first if token < vocab_size)

        penalty = options.repetition_penalty
        self._penalty = penalty
        fixed = dict.fromkeys(prompt_ids, penalty) if penalty != 1 else {}
        banned = (*rules.suppressed_ids, *rules.banned_ids, *forbidden.always)
        fixed |= dict.fromkeys(banned, math.inf)
        # tokens with an edit in every step, of every beam
        self._fixed = {token: factor for token, factor in fixed.items() if token < vocab_size}
        self._fixed_tokens = np.array(list(self._fixed), dtype=np.int32)
        self._fixed_factors = np.array(list(self._fixed.values()), dtype=np.float32)
        self._fixed_index = {token: index for index, token in enumerate(self._fixed)}
        # by number of rows
        self._fixed_edits_of: dict[int, TokenEdits] = {}

        size = self._ngram_size = options.no_repeat_ngram_size
        self._prompt_followers: defaultdict[_Tokens, set[int]] = defaultdict(set)
        for start in range(len(prompt_ids) - size + 1 if size else 0):
            *prefix, last = prompt_ids[start : start + size]
            self._prompt_followers[tuple(prefix)].add(last)
        suffix = tuple(prompt_ids[max(len(prompt_ids) - size + 1, 0) :]) if size else ()
        self.start = TokenHistory(suffix=suffix)

    def extend(self, history: TokenHistory, token: int) -> TokenHistory:
        size, longest = self._ngram_size, self._forbidden.longest
        if self._penalty == 1 and not size and not longest:
            return history
        factors, followers, suffix = history.factors, history.followers, history.suffix
        if self._penalty != 1 and token not in factors and token not in self._fixed:
            factors = {**factors, token: self._penalty}
        if size:
            if len(suffix) == size - 1:
                followers = {**followers, suffix: (*followers.get(suffix, ()), token)}
            suffix = (*suffix, token)
            suffix = suffix[max(len(suffix) - size + 1, 0) :]
        generated = (*history.generated, token)[-longest:] if longest else ()
        return TokenHistory(factors, followers, suffix, generated)

    def forced(self, num_generated: int) -> int | None:
        """Return the only token that may follow `num_generated` ones; None if there is a choice.

        A forced token comes even if another rule bans it.
        """
        if num_generated == self._max_tokens - 1 and self._rules.forced_last_id is not None:
            return self._rules.forced_last_id
        return self._rules.forced_first_id if self._has_forced_first and not num_generated else None

    def banned(self, num_generated: int) -> Int32Array:
        """Return the tokens that may not come next, where no edit depends on a beam."""
        if not self._early_bans(num_generated):
            return self._fixed_tokens
        edits = self.edits([self.start], num_generated)
        return _NO_TOKENS if edits is None else edits.tokens

    def edits(self, histories: Sequence[TokenHistory], num_generated: int) -> TokenEdits | None:
        """Return the edits of the next tokens, a row per beam; None without any."""
        early = self._early_bans(num_generated)
        has_own = self._penalty != 1 or self._ngram_size or self._forbidden.longest
        if not early and not has_own:
            return self._fixed_edits(len(histories))
        bans: list[list[int]] = []
        added: list[Mapping[int, float]] = []
        for history in histories:
            forbidden = self._forbidden.next(history.generated)
            banned = [*early, *self._repeated(history), *forbidden]
            bans.append(
                [index for token in banned if (index := self._fixed_index.get(token)) is not None]
            )
            new = dict.fromkeys((token for token in banned if token not in self._fixed), math.inf)
            added.append({**history.factors, **new} if new else history.factors)

        fixed = len(self._fixed)
        sizes = [fixed + len(each) for each in added]
        tokens, factors = np.empty(sum(sizes), np.int32), np.empty(sum(sizes), np.float32)
        end = 0
        for indices, each, size in zip(bans, added, sizes, strict=True):
            start, end = end, end + size
            tokens[start : start + fixed] = self._fixed_tokens
            factors[start : start + fixed] = self._fixed_factors
            if indices:
                factors[[start + index for index in indices]] = math.inf
            tokens[start + fixed : end] = list(each)
            factors[start + fixed : end] = list(each.values())
        if not end:
            return None
        return TokenEdits(np.repeat(np.arange(len(sizes), dtype=np.int32), sizes), tokens, factors)

    def _fixed_edits(self, rows: int) -> TokenEdits | None:
        """Return only the edits of every step: most requests have no others."""
        if not self._fixed:
            return None
        if rows not in self._fixed_edits_of:
            self._fixed_edits_of[rows] = TokenEdits(
                np.repeat(np.arange(rows, dtype=np.int32), len(self._fixed)),
                np.concatenate([self._fixed_tokens] * rows),
                np.concatenate([self._fixed_factors] * rows),
            )
        return self._fixed_edits_of[rows]

    def _early_bans(self, num_generated: int) -> tuple[int, ...]:
        ends = self.end_ids if num_generated < self._min_tokens else ()
        is_first = num_generated == (1 if self._has_forced_first else 0)
        return (*ends, *self._first_suppressed) if is_first else ends

    def _repeated(self, history: TokenHistory) -> list[int]:
        key = history.suffix
        found = (*self._prompt_followers.get(key, ()), *history.followers.get(key, ()))
        return [token for token in found if token < self._vocab_size]
