"""Logits that a request changes: `logit_bias`, and the tokens of `bad_words`.

A word is tokenized with and without a space before it; each form is forbidden, also where vLLM, which has the same
option, forbids only the first. The last token of a form is forbidden where the answer ends with its other tokens.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from varlen.errors import RequestError, shorten
from varlen.request.generation import GenerationOptions
from varlen.request.request import Float32Array

# Lists of words whose tokens are kept: clients often send the same one.
_MAX_CACHED = 64

_Tokens: TypeAlias = tuple[int, ...]


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
