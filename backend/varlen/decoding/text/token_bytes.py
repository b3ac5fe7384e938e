"""Bytes of tokens: bytes that each token adds to the UTF-8 of an answer.

A token may be a part of a character, which has no text of its own.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache

from tokenizers import Tokenizer

# Tokens whose text does not depend on what follows, in the forms of different tokenizers.
_ANCHORS = ("a", "▁a", "x", "▁the", "the", "Ġthe")


class TokenBytes:
    """Bytes of the tokens of a tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Read how the tokenizer writes bytes; it is not changed."""
        self._tokenizer = tokenizer
        kinds = {*_kinds(_decoder(tokenizer))}
        self._is_byte_level = "ByteLevel" in kinds
        self._texts: tuple[dict[int, str], dict[int, str]] | None = None
        if kinds == {"ByteLevel"}:
            self._texts = {}, {}
        self._has_byte_tokens = "ByteFallback" in kinds
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, each in added.items() if each.special)
        anchors = (tokenizer.token_to_id(text) for text in _ANCHORS)
        self._anchor = next((each for each in anchors if each is not None), None)
        self._anchor_text = "" if self._anchor is None else self._text([self._anchor])

    def texts(self, *, skip_special_tokens: bool) -> dict[int, str] | None:
        """Return the texts of tokens behind whole characters; detokenizers add to them.

        None where tokens are more than bytes: the text of a token may depend on those before it in other ways.
        """
        return None if self._texts is None else self._texts[skip_special_tokens]

    def of(self, token_id: int, *, skip_special_tokens: bool) -> bytes:
        """Return the bytes of a token inside a text.

        A special token has none if special tokens are left out.
        """
        if skip_special_tokens and token_id in self._special:
            return b""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._has_byte_tokens and (byte := _byte_of(token)) is not None:
            return byte
        if self._is_byte_level:
            values = [_bytes_of_characters().get(each) for each in token]
            # a token with another character, such as an added one, stands for its text
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else token.encode()
        return self._text_behind_anchor(token_id).encode()

    def _text_behind_anchor(self, token_id: int) -> str:
        """Return the text of a token that does not come first, so with its space."""
        if self._anchor is not None:
            text = self._text([self._anchor, token_id])
            if text.startswith(self._anchor_text):
                return text[len(self._anchor_text) :]
        return self._text([token_id])

    def _text(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


def _decoder(tokenizer: Tokenizer) -> object:
    return None if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())


def _kinds(decoder: object) -> Iterator[str]:
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for each in decoder.get("decoders") or ():
            yield from _kinds(each)


def _byte_of(token: str) -> bytes | None:
    """Return the byte that a token such as <0xE2> stands for; None for any other."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return None
    return None


@cache
def _bytes_of_characters() -> Mapping[str, int]:
    """Return the byte of each character of byte-level tokens, as of GPT-2.

    Printable bytes stand for themselves, the others for characters from 256 on, in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }
