"""Text of tokens as they come, in whole characters.

The text of a token depends on the tokens around it: bytes of one character, spaces between words. So a window of the
last tokens is decoded again with each token, and the part that is new comes out.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

# What decoders write for bytes that are no character, or not yet.
_REPLACEMENT = "\ufffd"
# A character has up to four bytes: only this many replacements may still become one.
_MAX_UNFINISHED = 3
# Tokens before a token that may change its text. A window has up to twice as many, if characters end in it.
_CONTEXT = 8
# The largest window: with no end of a character in it, it is cut anywhere.
_MAX_WINDOW = 64


class Detokenizer:
    """Text of one sequence of tokens, in parts."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        """Start behind a prompt, whose text does not come out.

        Args:
            tokenizer: tokenizer of the checkpoint; not changed.
            prompt_ids: tokens before the first one; its last ones decide whether a space starts the text.
            skip_special_tokens: whether the text leaves out special tokens.
        """
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        length = _CONTEXT
        self._window = list(prompt_ids[-length:])
        # a window has to start with a whole character
        while _REPLACEMENT in self._decode() and length < min(_MAX_WINDOW, len(prompt_ids)):
            length += 1
            self._window = list(prompt_ids[-length:])
        # characters of the window's text that have come out
        self._written = len(self._decode())
        # length of the window when a character ended; the window may be cut there
        self._boundary = len(self._window)

    def add(self, token_id: int) -> str:
        """Return the text that a token completes; it may be empty."""
        window = self._window
        window.append(token_id)
        text = self._decode()
        # more bytes may turn all of these into characters
        end = len(text.rstrip(_REPLACEMENT)) if text.endswith(_REPLACEMENT) else len(text)
        if len(window) == _MAX_WINDOW:
            end = max(end, len(text) - _MAX_UNFINISHED)
        new = text[self._written : end]
        self._written = max(self._written, end)
        if len(window) == _MAX_WINDOW:
            self._cut(_MAX_WINDOW - _CONTEXT, unwritten=len(text) - self._written)
            self._boundary = 0
        elif end == len(text) and len(window) - self._boundary >= _CONTEXT:
            self._cut(self._boundary, unwritten=0)
            self._boundary = len(window)
        return new

    @property
    def is_complete(self) -> bool:
        """Whether no character is unfinished: the text so far has all tokens."""
        return self._written >= len(self._decode())

    def finish(self) -> str:
        """Return the rest of the text: bytes that are no character, as replacement characters."""
        return self._decode()[self._written :]

    def whole(self, token_ids: Sequence[int]) -> str:
        """Return the text of all tokens of an answer, which come at once."""
        return self._text([*self._window, *token_ids])[self._written :]

    def _cut(self, length: int, *, unwritten: int) -> None:
        """Remove the first tokens of the window; its last characters are unwritten."""
        del self._window[:length]
        self._written = len(self._decode()) - unwritten

    def _decode(self) -> str:
        return self._text(self._window)

    def _text(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        return text
