"""Limits of the texts and token ids of one model, and their checks.

An error says what came and what is allowed.
"""

from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen.errors import RequestError
from varlen.intake.tokenization import Text
from varlen.parameter import MAX_JSON_MARKS, JsonLimits
from varlen.request.row_parameters import TruncationSide

IntegerArray: TypeAlias = npt.NDArray[np.int32] | npt.NDArray[np.int64]

# How much longer than a text its chat messages may be, as JSON: escapes have up to 6 bytes for one of the text.
_MESSAGE_FACTOR = 8
# Of UTF-8, in bytes.
_LONGEST_CHARACTER = 4


@dataclass(frozen=True, slots=True)
class InputLimits:
    """Limits of one sequence.

    Attributes:
        max_sequence_tokens: longest sequence, in tokens.
        max_text_bytes: longest text, in bytes of UTF-8; of a pair, each text. About as much is read of a longer text
            that is cut.
        vocab_size, type_vocab_size: token ids and token type ids are below these.
        max_arena_tokens: longest sequence that the arena has memory for; None if a longer one runs in chunks.
        can_truncate: whether requests may ask for long texts to be cut.
    """

    max_sequence_tokens: int
    max_text_bytes: int
    vocab_size: int
    type_vocab_size: int
    max_arena_tokens: int | None = None
    can_truncate: bool = True

    @property
    def remedy(self) -> str:
        """What a client can do about a text that is too long, for errors."""
        return " (truncate=true cuts it)" if self.can_truncate else ""

    @property
    def messages(self) -> JsonLimits:
        """Limits of chat messages as JSON. Their texts may consist of commas."""
        return JsonLimits(
            _MESSAGE_FACTOR * self.max_text_bytes, MAX_JSON_MARKS + self.max_text_bytes
        )

    def decoded(self, row: int, name: str, data: bytes, cut: TruncationSide | None = None) -> str:
        """Return a text of UTF-8, or the part that is read of a longer one.

        Only a text that is cut has parts. A part has more than `max_text_bytes`, by at most a character.

        Args:
            cut: side on which a text that is too long is cut; None refuses it.

        Raises:
            RequestError: the text is too long, or not UTF-8.
        """
        size, begin = self.max_text_bytes + _LONGEST_CHARACTER, 0
        if cut is None:
            # before it is decoded
            self.check_text_bytes(row, len(data))
        elif cut == "left":
            begin = max(0, len(data) - size)
            # up to three bytes within a character
            while 0 < begin < len(data) - self.max_text_bytes and data[begin] & 0xC0 == 0x80:
                begin += 1
        end = min(begin + size, len(data))
        decoder = getincrementaldecoder("utf-8")()
        try:
            return decoder.decode(data[begin:end], final=end == len(data))
        except UnicodeDecodeError as error:
            raise RequestError(
                f"row {row}: {name} is not UTF-8 at byte {begin + error.start}; send UTF-8"
            ) from None

    def check_texts(self, texts: Sequence[Text], *, truncate: bool = False) -> list[int]:
        """Return the length of each row in UTF-8, or raise RequestError.

        Args:
            truncate: whether texts that are too long are cut.
        """
        if not texts:
            raise RequestError("text has no rows; send at least one row")
        sizes = []
        for row, text in enumerate(texts):
            if isinstance(text, tuple) and len(text) != 2:
                raise RequestError(
                    f"row {row}: text is a tuple of {len(text)}; send a pair of two texts"
                )
            parts = text if isinstance(text, tuple) else (text,)
            sizes.append(sum(self._check_text(row, part, truncate) for part in parts))
        return sizes

    def check_text_bytes(self, row: int, size: int) -> None:
        if size > self.max_text_bytes:
            raise RequestError(
                f"row {row}: text has {size} bytes; this model takes at most {self.max_text_bytes}"
                f"{self.remedy}"
            )

    def refuse_part(self, row: int, max_tokens: int) -> NoReturn:
        """Raise RequestError: the part of a text has too few tokens to cut it."""
        raise RequestError(
            f"row {row}: {self.max_text_bytes} bytes of text are read (max_text_bytes), which have too few tokens to"
            f" cut the text to {max_tokens}; send less white space, or shorter words"
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
                f"row {row}: {tokens} tokens; the memory of this model is enough for {most} tokens (arena_bytes);"
                f" truncate_prompt_tokens={most} cuts a text there"
            )

    def _check_text(self, row: int, text: str, truncate: bool) -> int:
        if not isinstance(text, str):
            raise RequestError(f"row {row}: text is a {type(text).__name__}; send a string")
        # characters are bytes, or more: a text that is much too long is only counted
        if len(text) > self.max_text_bytes and not truncate:
            self.check_text_bytes(row, len(text.encode(errors="surrogatepass")))
        try:
            size = len(text.encode("utf-8"))
        except UnicodeEncodeError:
            raise RequestError(
                f"row {row}: text holds half a surrogate pair; send valid Unicode"
            ) from None
        if not truncate:
            self.check_text_bytes(row, size)
        return size


def _check_range(row: int, name: str, ids: IntegerArray, size: int) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise RequestError(f"row {row}: {name} holds {wrong}; this model takes 0 to {size - 1}")
