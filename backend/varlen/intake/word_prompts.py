"""Texts and labels to the prompts of a model that extracts spans.

A prompt is a mark and the text of each label, a separator, then the words of the text, each tokenized apart. A word
that has no tokens of its own is read at the token before it.
Source: the prompt follows `UniEncoderSpanProcessor` of the library gliner.
"""

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from varlen.errors import CheckpointError, RequestError, shorten
from varlen.intake.input_limits import InputLimits
from varlen.intake.tokenization import Tokenizer
from varlen.models.checkpoint.extraction import CONFIG, ExtractionConfig
from varlen.request.request import Int32Array, Prompt, Words
from varlen.request.spans import word_bounds

# Scores of a row: 16 MiB in fp32.
_MOST_SCORES = 1 << 22

_Places = npt.NDArray[np.intp]


class WordPrompts:
    """Makes the prompts of one model. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, config: ExtractionConfig, limits: InputLimits) -> None:
        """Check the tokens of the prompt.

        Raises:
            CheckpointError: tokenizer.json has other tokens than gliner_config.json says.
        """
        if tokenizer.find_token([config.label_mark]) != config.label_token:
            raise CheckpointError(
                f"{CONFIG} has class_token_index {config.label_token}, which is not the token {config.label_mark} of"
                " tokenizer.json; save the folder with the library gliner again"
            )
        self._tokenizer, self._config, self._limits = tokenizer, config, limits

    def prompt(
        self, row: int, text: str, labels: Sequence[str], *, max_tokens: int, is_cut: bool
    ) -> Prompt:
        """Return the prompt of a text.

        Args:
            row: number of the row, for errors.
            max_tokens: longest prompt.
            is_cut: whether a text that is too long loses its last words; else it is refused.

        Raises:
            RequestError: the text or the labels are too long, or a label holds the mark.
        """
        most_words = self._config.max_words
        words = [text[slice(*bounds)] for bounds in word_bounds(text, most_words + 1)]
        if len(words) > most_words and not is_cut:
            raise RequestError(
                f"row {row}: text has more than {most_words} words; this model takes at most {most_words}"
                f"{self._limits.remedy}"
            )
        is_part = is_cut and len(text.encode()) > self._limits.max_text_bytes
        if is_part and len(words) <= most_words:
            self._limits.refuse_part(row, max_tokens)
        words = words[:most_words]
        before = [each for label in labels for each in (self._config.label_mark, label)]
        before.append(self._config.separator)
        ids, word_of_token = self._tokenizer.encode_words([*before, *words])
        kept = len(words)
        if len(ids) > max_tokens:
            if not is_cut:
                raise RequestError(
                    f"row {row}: text and labels have {len(ids)} tokens; this model takes at most {max_tokens}"
                    f"{self._limits.remedy}"
                )
            ids, word_of_token, kept = _cut(ids, word_of_token, len(before), max_tokens)
            if not kept:
                self._refuse_labels(row, max_tokens)
        prompt_tokens = word_of_token < len(before)
        if (ids[prompt_tokens] == self._config.label_token).sum() != len(labels):
            mark = self._config.label_mark
            wrong = next((each for each in labels if mark in each), labels[0])
            raise RequestError(
                f"row {row}: the label {shorten(repr(wrong))} holds the token {mark}; send it without"
            )
        self._check_rows(row, kept, len(labels), len(ids))
        self._limits.check_ids(row, "text", ids, None)
        self._limits.check_arena(row, len(ids))
        return Prompt(
            ids, payload=self._payload(ids, word_of_token, len(before), kept, len(labels))
        )

    def _payload(
        self, ids: Int32Array, word_of_token: _Places, before: int, kept: int, labels: int
    ) -> Words:
        """Return the places of the tokens that stand for labels and for words."""
        places = np.full(before + kept, -1, np.int32)
        tokens = np.flatnonzero(word_of_token >= 0)
        if self._config.subtoken == "first":
            # the first of equal indices is written last
            tokens = tokens[::-1]
        places[word_of_token[tokens]] = tokens
        marks = np.flatnonzero(ids == self._config.label_token)[:labels]
        if not self._config.reads_mark:
            marks = marks + 1
        # a word without tokens has the place before it
        words = np.maximum.accumulate(places)[before:]
        return Words(np.concatenate([marks, words]).astype(np.int32), labels)

    def _check_rows(self, row: int, words: int, labels: int, tokens: int) -> None:
        # batches and their memory are planned for a token of each word and label
        if words + labels > tokens:
            raise RequestError(
                f"row {row}: {words} words and {labels} labels have {tokens} tokens; allowed: a token for each. Send"
                " the text without control characters, which the tokenizer removes"
            )
        scores = words * labels * self._config.columns
        if scores > _MOST_SCORES:
            raise RequestError(
                f"row {row}: {words} words and {labels} labels have {scores} scores; allowed: {_MOST_SCORES}. Send"
                " fewer labels, or a shorter text"
            )

    def _refuse_labels(self, row: int, max_tokens: int) -> NoReturn:
        raise RequestError(
            f"row {row}: labels leave no token for the text; this model takes {max_tokens} tokens: send fewer labels"
        )


def _cut(
    ids: Int32Array, word_of_token: _Places, before: int, max_tokens: int
) -> tuple[Int32Array, _Places, int]:
    """Return the tokens of as many whole words as fit, and the number of words.

    Tokens that the tokenizer adds at the end stay.
    """
    last = int(np.flatnonzero(word_of_token >= 0)[-1]) + 1
    room = max_tokens - (len(ids) - last)
    # the word that has no room for all its tokens
    first_cut = int(word_of_token[room]) if 0 <= room < last else before
    is_kept = word_of_token < first_cut
    return ids[is_kept], word_of_token[is_kept], max(0, first_cut - before)
