"""The answer of one sequence: its text in parts, and when it ends.

A token adds bytes to the UTF-8 of an answer. It may be a part of a character, which has no text of its own.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from tokenizers import Tokenizer

from varlen.request.generation import GenerationOptions
from varlen.request.request import FinishReason, GeneratedPart, new_tuple
from varlen.scheduling.device_plan import BeamAnswer, SampledToken

# What decoders write for bytes that are no character, or not yet.
_REPLACEMENT = "\ufffd"
# A character has up to four bytes: only this many replacements may still become one.
_MAX_UNFINISHED = 3
# Tokens before a token that may change its text. A window has up to twice as many, if characters end in it.
_CONTEXT = 8
# The largest window: with no end of a character in it, it is cut anywhere.
_MAX_WINDOW = 64


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


class Detokenizer:
    """Text of one sequence of tokens, in parts of whole characters.

    The text of a token depends on the tokens around it: bytes of one character, spaces between words. So a window of
    the last tokens is decoded again with each token, and the part that is new comes out. Where tokens are only bytes,
    nothing before the end of a character matters: the window is empty there, and a token that ends with whole
    characters has the text that it had before.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        texts: dict[int, str] | None,
    ) -> None:
        """Start behind a prompt, whose text does not come out.

        Args:
            prompt_ids: tokens before the first one; its last ones decide whether a space starts the text.
            texts: `TokenBytes.texts`; added to.
        """
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._texts = texts
        length = _CONTEXT
        self._window = list(prompt_ids[-length:])
        # a window has to start with a whole character
        text = self._decode()
        while _REPLACEMENT in text and length < min(_MAX_WINDOW, len(prompt_ids)):
            length += 1
            self._window = list(prompt_ids[-length:])
            text = self._decode()
        # characters of the window's text that have come out
        self._written = len(text)
        # length of the window when a character ended; the window may be cut there
        self._boundary = len(self._window)

    def add(self, token_id: int) -> str:
        """Return the text that a token completes; it may be empty."""
        window, texts = self._window, self._texts
        if not window and texts is not None and (known := texts.get(token_id)) is not None:
            return known
        window.append(token_id)
        text = self._decode()
        # more bytes may turn all of these into characters
        end = len(text.rstrip(_REPLACEMENT)) if text.endswith(_REPLACEMENT) else len(text)
        if len(window) == _MAX_WINDOW:
            end = max(end, len(text) - _MAX_UNFINISHED)
        new = text[self._written : end]
        self._written = max(self._written, end)
        if texts is not None and end == len(text):
            if len(window) == 1:
                texts[token_id] = text
            window.clear()
            self._written = self._boundary = 0
        elif len(window) == _MAX_WINDOW:
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


class StopStrings:
    """Passes text on up to the first stop string; text that may become one waits.

    Each stop string has an automaton that reads one character after the other, so the result does not depend on how
    the text is divided into tokens. Source: Knuth, Morris, Pratt 1977, "Fast pattern matching in strings".
    """

    def __init__(self, strings: Sequence[str], *, keep: bool) -> None:
        """Prepare the search.

        Args:
            strings: none of them empty; may be none.
            keep: whether the string that ends the text stays part of it.
        """
        self._strings = [(string, _fallbacks(string)) for string in strings]
        self._keep = keep
        # number of characters of each string with which the text ends
        self._matched = [0] * len(strings)
        self._pending = ""

    def add(self, text: str, *, may_end: bool) -> tuple[str, bool]:
        """Return the text that is certain now, and whether a stop string has ended it.

        The string that is complete first ends the text; of several, the longest.

        Args:
            text: the next part.
            may_end: whether a string that is complete in this part ends the text.
        """
        first = len(self._pending) + 1
        text = self._pending + text
        for end in range(first, len(text) + 1):
            length = self._read(text[end - 1])
            if length and may_end:
                return text[: end if self._keep else end - length], True
        certain = len(text) - max(self._matched)
        self._pending = text[certain:]
        return text[:certain], False

    def finish(self) -> str:
        return self._pending

    def _read(self, character: str) -> int:
        """Return the length of the longest string that this character completes; 0 is none."""
        longest = 0
        for index, (string, fallbacks) in enumerate(self._strings):
            matched = self._matched[index]
            while matched and string[matched] != character:
                matched = fallbacks[matched - 1]
            matched += string[matched] == character
            if matched == len(string):
                longest = max(longest, matched)
                matched = fallbacks[-1]
            self._matched[index] = matched
        return longest


def _fallbacks(string: str) -> list[int]:
    """Return, for each prefix, the length of the longest shorter prefix with which it ends."""
    fallbacks = [0]
    matched = 0
    for character in string[1:]:
        while matched and string[matched] != character:
            matched = fallbacks[matched - 1]
        matched += string[matched] == character
        fallbacks.append(matched)
    return fallbacks


class TextWriter:
    """Makes the parts of an answer from its tokens: a `sequence.OutputWriter`.

    An answer ends with an end token, with a stop string, or after `max_tokens`. The text of the end token, or the
    stop string, is left out unless the request asks for it; the token ids have all tokens. Text that may become a stop
    string waits for the next tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: GenerationOptions,
        *,
        prompt_ids: Sequence[int],
        eos_ids: Collection[int],
        token_bytes: TokenBytes,
    ) -> None:
        """Start an answer.

        Args:
            prompt_ids: tokens of the prompt, whose text is not part of the answer.
            token_bytes: bytes of the tokens, for answers with log probabilities.
        """
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt_ids,
            skip_special_tokens=options.skip_special_tokens,
            texts=token_bytes.texts(skip_special_tokens=options.skip_special_tokens),
        )
        self._stop_strings = StopStrings(options.stop, keep=options.include_stop_str_in_output)
        self._end_ids = frozenset(
            (*options.stop_token_ids, *(() if options.ignore_eos else eos_ids))
        )
        self._token_bytes = token_bytes
        # whether the text so far does not end inside of a character
        self._is_complete = True
        self._options = options
        self._num_tokens = 0

    def write(self, output: SampledToken | BeamAnswer) -> GeneratedPart:
        if isinstance(output, BeamAnswer):
            return self._whole(output)
        token_id = output.token_id
        self._num_tokens += 1
        # most tokens of most answers
        if (
            self._num_tokens < self._options.max_tokens
            and token_id not in self._end_ids
            and output.logprobs is None
            and not self._options.stop
        ):
            fields = self._detokenizer.add(token_id), (token_id,), (), None, None
            return new_tuple(GeneratedPart, fields)
        return self._add(output)

    def _whole(self, answer: BeamAnswer) -> GeneratedPart:
        # the end token is no text, whichever it is
        text_ids = answer.token_ids[: -1 if answer.finish_reason == "stop" else None]
        return GeneratedPart(
            self._detokenizer.whole(text_ids),
            answer.token_ids,
            finish_reason=answer.finish_reason,
            score=answer.score,
        )

    def _add(self, token: SampledToken) -> GeneratedPart:
        options, token_id = self._options, token.token_id
        # the sampler chooses no end token before `min_tokens`, unless a grammar leaves no other
        is_end = token_id in self._end_ids
        is_last = is_end or self._num_tokens >= options.max_tokens
        text, added = "", b""
        if not is_end or options.include_stop_str_in_output:
            text = self._detokenizer.add(token_id)
            if token.logprobs is not None:
                added = self._added_bytes(token_id, text)
        if is_last:
            text += self._detokenizer.finish()
        is_stopped = False
        if options.stop:
            may_end = self._num_tokens > options.min_tokens
            text, is_stopped = self._stop_strings.add(text, may_end=may_end)
        if is_last and not is_stopped:
            text += self._stop_strings.finish()
        finish_reason: FinishReason | None = None
        if is_end or is_stopped:
            finish_reason = "stop"
        elif is_last:
            finish_reason = "length"
        logprobs = () if token.logprobs is None else (replace(token.logprobs, token_bytes=added),)
        return GeneratedPart(text, (token_id,), logprobs, finish_reason)

    def _added_bytes(self, token_id: int, text: str) -> bytes:
        """Return the UTF-8 that a token adds, given the text that it completes.

        An answer may start without the space of its first token, so the text decides. Only a part of a character has
        the bytes of the token itself; if they are no character in the end, the text has replacement characters.
        """
        was_complete, self._is_complete = self._is_complete, self._detokenizer.is_complete
        if was_complete and self._is_complete:
            return text.encode(errors="replace")
        skip = self._options.skip_special_tokens
        return self._token_bytes.of(token_id, skip_special_tokens=skip)
