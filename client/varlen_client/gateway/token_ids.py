"""Rows of token ids: does a model take them, did its own tokenizer make them?

Clients of OpenAI's embeddings send ids of OpenAI's tokenizer. Another model has most of these ids too, and would answer
with a wrong vector. Ids of a model's own tokenizer have its special tokens, which OpenAI's have not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from varlen_client.errors import InvalidRequest
from varlen_client.tokenizer_call import TokenizedText
from varlen_client.wire import ModelInfo

# Tokenized to find the special tokens around a text.
SAMPLE = "a"
_REMEDY = (
    "send texts (OpenAIEmbeddings of LangChain sends them with check_embedding_ctx_length=False)"
)


def takes_ids(info: ModelInfo) -> bool:
    """Return whether the model has a tokenizer to compare ids with.

    Raises:
        InvalidRequest: the model takes no ids.
    """
    if info.inputs and "input_ids" not in info.inputs:
        raise InvalidRequest(f"model {info.name!r} takes texts, and no token ids; {_REMEDY}")
    return not info.inputs or "text" in info.inputs


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Special tokens that a tokenizer puts around every text.

    Attributes:
        before, after: their ids and names.
    """

    before: Sequence[tuple[int, str]]
    after: Sequence[tuple[int, str]]

    @classmethod
    def of(cls, found: TokenizedText) -> SpecialTokens:
        """Return the special tokens around a tokenized text."""
        tokens = list(zip(found.token_ids, found.tokens, found.special, strict=True))
        before = [(each, name) for each, name, _ in takewhile(_is_special, tokens)]
        behind = takewhile(_is_special, reversed(tokens[len(before) :]))
        return cls(before, [(each, name) for each, name, _ in behind][::-1])

    def check(self, rows: Sequence[Sequence[int]]) -> None:
        """Raise InvalidRequest unless every row has these tokens around it."""
        before, after = ([each for each, _ in tokens] for tokens in (self.before, self.after))
        for index, row in enumerate(rows):
            begins = list(row[: len(before)]) == before
            ends = list(row[max(len(before), len(row) - len(after)) :]) == after
            if not (begins and ends):
                raise InvalidRequest(
                    f"row {index}: the token ids are not {self._form()}, as by this model's tokenizer;"
                    f" {_REMEDY}, or ids of that tokenizer with its special tokens"
                )

    def _form(self) -> str:
        named = [[f"{each} ({name})" for each, name in part] for part in (self.before, self.after)]
        return " ".join([*named[0], "…", *named[1]])


def _is_special(token: tuple[int, str, bool]) -> bool:
    return token[2]
