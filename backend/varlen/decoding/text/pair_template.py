"""Pairs of texts to the tokens of a prompt, for a model that judges them.

A known form has the texts around a pair, or the checkpoint's chat template has them. With the template a pair is, as in
sentence-transformers, two messages with the roles query and document, behind an instruction with the role system. A
pair that is cut keeps the end of the prompt, which the score is read from.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Protocol

import numpy as np

from varlen.errors import CheckpointError, RequestError
from varlen.intake.tokenization import Tokenized
from varlen.models.checkpoint.logit_score import LogitScore, PairForm
from varlen.request.request import Int32Array

# Stand for texts; no tokenizer gives their last tokens the same ids.
_FILLERS = ("0", "1 2 3 4")
# Parts of a form that are tokenized once: forms have few, and instructions of clients are not kept.
_MAX_FIXED = 16

Tokenize = Callable[[str], Tokenized]


class Renderer(Protocol):
    """Makes the text of a prompt out of chat messages."""

    def render(
        self, messages: list[Mapping[str, object]], /, *, add_generation_prompt: bool
    ) -> str:
        """Return the text, special tokens included, or raise RequestError."""


class ChatPairTemplate:
    """Makes the prompts of pairs with a chat template. Thread-safe.

    Attributes:
        ending: `[tokens]` int32, the last tokens of every prompt.
        takes_instruction: whether the template reads an instruction.
    """

    def __init__(self, template: Renderer, score: LogitScore, tokenize: Tokenize) -> None:
        """Check the template.

        Args:
            score: format of the messages for a pair.
            tokenize: returns the tokens of a text, without special ones.

        Raises:
            CheckpointError: the template leaves out the query or the document.
        """
        self._template, self._score, self._tokenize = template, score, tokenize
        try:
            first, second = (self._pair(filler, filler, None).token_ids for filler in _FILLERS)
            text = self._render("a-query", "a-document", "an-instruction")
        except RequestError as error:
            raise CheckpointError(str(error)) from None
        if "a-query" not in text or "a-document" not in text:
            raise CheckpointError(
                "the chat template leaves out messages of the role query or document; the task rerank of a model that"
                " answers in words needs both"
            )
        self.takes_instruction = "an-instruction" in text
        self.ending = _common_ending(first, second)

    def tokens(
        self, query: str, document: str, instruction: str | None, _max_tokens: int | None, /
    ) -> Tokenized:
        return self._pair(query, document, instruction)

    def _pair(self, query: str, document: str, instruction: str | None) -> Tokenized:
        return self._tokenize(self._render(query, document, instruction))

    def _render(self, query: str, document: str, instruction: str | None) -> str:
        messages = [("query", query), ("document", document)]
        system = self._score.system if instruction is None else instruction
        if system:
            messages.insert(0, ("system", system))
        return self._template.render(
            [{"role": role, "content": self._content(text)} for role, text in messages],
            add_generation_prompt=False,
        )

    def _content(self, text: str) -> object:
        return [{"type": "text", "text": text}] if self._score.has_parts else text


class FormPairTemplate:
    """Makes the prompts of pairs in a known form. Thread-safe.

    Attributes:
        ending: `[tokens]` int32, the last tokens of every prompt.
        takes_instruction: whether a request may have an instruction.
    """

    def __init__(self, form: PairForm, tokenize: Tokenize) -> None:
        self._form, self._tokenize = form, tokenize
        self.takes_instruction = bool(form.instruction)
        self._fixed = lru_cache(_MAX_FIXED)(lambda text: tokenize(text).token_ids)
        self.ending = np.concatenate([self._fixed(text) for text in form.ending])

    def tokens(
        self, query: str, document: str, instruction: str | None, max_tokens: int | None, /
    ) -> Tokenized:
        form = self._form
        instruction = form.default_instruction if instruction is None else instruction
        before = form.instruction.format(instruction) if instruction else ""
        opening = self._fixed(form.opening)
        asked = self._tokenize(before + form.query.format(query)).token_ids
        if max_tokens is not None:
            room = max_tokens - len(opening) - len(self.ending)
            asked = asked[: max(0, int(room * form.query_part))]
        between = [self._fixed(form.between)] if form.between else []
        found = self._tokenize(form.document.format(document))
        parts = [opening, asked, *between, found.token_ids, self.ending]
        return Tokenized(np.concatenate(parts), None, found.is_complete)


def _common_ending(first: Int32Array, second: Int32Array) -> Int32Array:
    size = min(len(first), len(second))
    same = first[len(first) - size :] == second[len(second) - size :]
    count = size - (int(np.flatnonzero(~same)[-1]) + 1 if not same.all() else 0)
    return first[len(first) - count :]
