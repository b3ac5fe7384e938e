"""Limits of the texts and token ids of one model, and their checks.

An error says what came and what is allowed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from varlen.errors import RequestError
from varlen.intake.tokenization import Text
from varlen.parameter import MAX_JSON_MARKS, JsonLimits

IntegerArray: TypeAlias = npt.NDArray[np.int32] | npt.NDArray[np.int64]

# How much longer than a text its chat messages may be, as JSON: escapes have up to 6 bytes for one of the text.
_MESSAGE_FACTOR = 8


@dataclass(frozen=True, slots=True)
class InputLimits:
    """Limits of one sequence.

    Attributes:
        max_sequence_tokens: longest sequence, in tokens.
        max_text_bytes: longest text, in bytes of UTF-8; of a pair, each text.
        vocab_size, type_vocab_size: token ids and token type ids are below these.
        max_arena_tokens: longest sequence that the arena has memory for; None if a longer one runs in chunks.
    """

    max_sequence_tokens: int
    max_text_bytes: int
    vocab_size: int
    type_vocab_size: int
    max_arena_tokens: int | None = None

    @property
    def messages(self) -> JsonLimits:
        """Limits of chat messages as JSON. Their texts may consist of commas."""
        return JsonLimits(
            _MESSAGE_FACTOR * self.max_text_bytes, MAX_JSON_MARKS + self.max_text_bytes
        )

    def check_texts(self, texts: Sequence[Text]) -> list[int]:
        """Return the length of each row in UTF-8, or raise RequestError."""
        if not texts:
            raise RequestError("text has no rows; send at least one row")
        sizes = []
        for row, text in enumerate(texts):
            if isinstance(text, tuple) and len(text) != 2:
                raise RequestError(
                    f"row {row}: text is a tuple of {len(text)}; send a pair of two texts"
                )
            parts = text if isinstance(text, tuple) else (text,)
            sizes.append(sum(self._check_text(row, part) for part in parts))
        return sizes

    def check_text_bytes(self, row: int, size: int) -> None:
        """Raise RequestError if a text of this length in UTF-8 is too long."""
        if size > self.max_text_bytes:
            raise RequestError(
                f"row {row}: text has {size} bytes; this model takes at most {self.max_text_bytes}"
            )

    def check_sequence(
        self, row: int, ids: npt.NDArray[np.int64], types: npt.NDArray[np.int64] | None
    ) -> None:
        """Raise RequestError unless these are the token ids, and type ids, of one sequence."""
        if ids.ndim != 1:
            raise RequestError(f"row {row}: input_ids has shape {list(ids.shape)}; send [tokens]")
        if not len(ids):
            raise RequestError(f"row {row}: input_ids has no tokens; send at least one")
        if len(ids) > self.max_sequence_tokens:
            raise RequestError(
                f"row {row}: input_ids has {len(ids)} tokens; this model takes at most {self.max_sequence_tokens}"
            )
        self.check_ids(row, "input_ids", ids, types)

    def check_ids(
        self,
        row: int,
        name: str,
        ids: IntegerArray,
        types: IntegerArray | None,
    ) -> None:
        """Raise RequestError if a token id or type id is out of range.

        Args:
            row: row of the request, for the error.
            name: name of the input that holds the token ids, for the error.
            ids, types: `[tokens]` each.
        """
        _check_range(row, name, ids, self.vocab_size)
        if types is not None:
            _check_range(row, "token_type_ids", types, self.type_vocab_size)

    def check_arena(self, row: int, tokens: int) -> None:
        """Raise RequestError if the arena has no memory for a sequence of this length."""
        most = self.max_arena_tokens
        if most is not None and tokens > most:
            raise RequestError(
                f"row {row}: {tokens} tokens; the memory of this model is enough for {most} tokens (arena_bytes)"
            )

    def _check_text(self, row: int, text: str) -> int:
        """Return the length of a text in UTF-8, or raise RequestError."""
        if not isinstance(text, str):
            raise RequestError(f"row {row}: text is a {type(text).__name__}; send a string")
        # characters are bytes, or more: a text that is much too long is only counted
        if len(text) > self.max_text_bytes:
            self.check_text_bytes(row, len(text.encode(errors="surrogatepass")))
        if not text.strip():
            raise RequestError(f"row {row}: text is empty; send at least one word")
        if "\0" in text:
            raise RequestError(f"row {row}: text holds a NUL character; remove it")
        try:
            size = len(text.encode("utf-8"))
        except UnicodeEncodeError:
            raise RequestError(
                f"row {row}: text holds half a surrogate pair; send valid Unicode"
            ) from None
        self.check_text_bytes(row, size)
        return size


def _check_range(row: int, name: str, ids: IntegerArray, size: int) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise RequestError(f"row {row}: {name} holds {wrong}; this model takes 0 to {size - 1}")
