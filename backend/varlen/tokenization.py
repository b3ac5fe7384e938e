"""Text to token ids, with the checkpoint's own `tokenizer.json`.

The tokenizers library does the work and lets other threads run meanwhile; this file limits
the length of texts.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from tokenizers import Tokenizer as HuggingFaceTokenizer

from varlen.errors import CheckpointError
from varlen.request import Prompt

Text: TypeAlias = str | tuple[str, str]


class Tokenizer:
    """Tokenizes texts and pairs of texts, with special tokens, whole or cut to a length."""

    def __init__(self, folder: Path, max_sequence_tokens: int, *, prompt: str = "") -> None:
        """Load `tokenizer.json`, without its settings of padding and truncation.

        Args:
            folder: of the checkpoint.
            max_sequence_tokens: length of a truncated text, special tokens included.
            prompt: put before every single text.

        Raises:
            CheckpointError: the file cannot be read.
        """
        # two objects, since one cannot switch truncation off and on while another thread uses it
        self._whole = _load(folder)
        self._cut = _load(folder)
        self._cut.enable_truncation(max_sequence_tokens)
        self._prompt = prompt

    @property
    def huggingface(self) -> HuggingFaceTokenizer:
        """The library's tokenizer, for decoding; not to be changed."""
        return self._whole

    def encode(
        self, texts: Sequence[Text], *, truncate: bool, special_tokens: bool = True
    ) -> list[Prompt]:
        """Return one sequence per text or pair of texts; type ids only for pairs.

        Args:
            texts: checked: not empty.
            truncate: cut sequences longer than max_sequence_tokens, the longer text of a pair first.
            special_tokens: whether to add special tokens.
        """
        tokenizer = self._cut if truncate else self._whole
        if self._prompt:
            texts = [self._prompt + text if isinstance(text, str) else text for text in texts]
        encodings = tokenizer.encode_batch(list(texts), add_special_tokens=special_tokens)
        return [
            Prompt(
                np.array(encoding.ids, dtype=np.int32),
                np.array(encoding.type_ids, dtype=np.int32) if isinstance(text, tuple) else None,
            )
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def token_text(self, token_id: int) -> str:
        """Return the text of a token, special ones included."""
        text: str = self._whole.decode([token_id], skip_special_tokens=False)
        return text


def _load(folder: Path) -> HuggingFaceTokenizer:
    try:
        tokenizer = HuggingFaceTokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"tokenizer.json cannot be read: {error}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
