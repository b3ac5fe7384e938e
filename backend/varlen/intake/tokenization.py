"""Text to token ids, with the checkpoint's own `tokenizer.json`.

The tokenizers library does the work and lets other threads run meanwhile; this file limits the length of texts. Of a
text that is much too long, only the part up to a safe boundary (`boundaries`) is tokenized, or the part from one on if
its beginning is cut: the result equals the whole text's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import TypeAlias

import numpy as np
from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as HuggingFaceTokenizer

from varlen.errors import CheckpointError
from varlen.intake.boundaries import safe_boundary, safe_start
from varlen.models.checkpoint.files import TOKENIZER, read_bytes
from varlen.request.request import Int32Array
from varlen.request.row_parameters import TruncationSide

Text: TypeAlias = str | tuple[str, str]


# Characters of the first part of a long text, per token of the limit: most texts have fewer per token.
_CHARACTERS_PER_TOKEN = 6
# How much longer the next part is, if the last one has too few tokens.
_GROWTH = 4


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The tokens of a text or of a pair of texts.

    Attributes:
        token_ids: `[tokens]` int32.
        type_ids: `[tokens]` int32, for pairs only.
        is_complete: False if these tokens exceed the limit, and the text has even more.
    """

    token_ids: Int32Array
    type_ids: Int32Array | None
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class TextTokens:
    """The tokens of a text, for a client.

    Attributes:
        token_ids: id of each token.
        tokens: text of each token as the vocabulary has it, such as `##ing`.
        is_special: whether the tokenizer added the token.
        offsets: first character of the text in each token, and the first one behind it.
    """

    token_ids: list[int]
    tokens: list[str]
    is_special: list[bool]
    offsets: list[tuple[int, int]]


class Tokenizer:
    """Tokenizes texts and pairs of texts, with special tokens, whole or cut to a length."""

    def __init__(
        self,
        folder: Path,
        max_sequence_tokens: int,
        *,
        has_types: bool = True,
        prefixes: Sequence[str] = (),
    ) -> None:
        """Load `tokenizer.json`, without its settings of padding and truncation.

        Args:
            folder: folder of the checkpoint.
            max_sequence_tokens: length of a truncated text, special tokens included.
            has_types: whether pairs get token types.
            prefixes: texts that become one token each, if the vocabulary has it, or their first word.

        Raises:
            CheckpointError: the file cannot be read.
        """
        # several objects, since one cannot switch truncation off and on while another thread uses it
        self._whole = _load(folder)
        _add_prefixes(self._whole, prefixes)
        # by length and side, loaded when the first request asks for it
        self._cut: dict[tuple[int, TruncationSide], HuggingFaceTokenizer] = {}
        self._loading = Lock()
        self._has_types = has_types
        self._max_tokens = max_sequence_tokens
        self._cutting(max_sequence_tokens, "right")
        self._boundary = safe_boundary(self._whole)
        self._start = safe_start(self._whole)

    @property
    def huggingface(self) -> HuggingFaceTokenizer:
        """The library's tokenizer, for decoding; not to be changed."""
        return self._whole

    def encode(
        self,
        texts: Sequence[Text],
        *,
        truncate: bool,
        side: TruncationSide = "right",
        special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> list[Tokenized]:
        """Return one sequence per text or pair of texts; type ids only for pairs.

        Args:
            texts: checked: not empty.
            truncate: cut sequences longer than max_tokens, the longer text of a pair first. Otherwise some tokens
                beyond that number may be missing.
            side: side on which they are cut.
            special_tokens: whether to add special tokens.
            max_tokens: None is max_sequence_tokens.
        """
        limit = max_tokens or self._max_tokens
        cut = side if truncate else None
        # one that is much too long is not tokenized as a whole
        parts = [self._encode_part(text, cut, special_tokens, limit) for text in texts]
        others = [text for text, part in zip(texts, parts, strict=True) if part is None]
        whole = iter(_encode(self._tokenizer(limit, cut), others, special_tokens))
        return [
            Tokenized(
                np.array((encoding := part or next(whole)).ids, dtype=np.int32),
                self._type_ids(text, encoding),
                is_complete=truncate or part is None,
            )
            for text, part in zip(texts, parts, strict=True)
        ]

    def tokens_of(
        self,
        texts: Sequence[str],
        *,
        truncate: bool,
        side: TruncationSide = "right",
        special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> list[TextTokens]:
        """Return the tokens of each text, of any length.

        Args:
            texts, truncate, side, special_tokens, max_tokens: see `encode`.
        """
        limit, cut = max_tokens or self._max_tokens, side if truncate else None
        return [self._tokens_of(text, cut, special_tokens, limit) for text in texts]

    def text_of(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of tokens."""
        text: str = self._whole.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def count_leading(self, text: str) -> int:
        """Return the number of tokens of a text at the start of a longer one.

        It is the text's own length, cut to the longest sequence, without a special token at its end. Tokens that the
        end of the text shares with what follows it are counted as if they were apart, as in sentence-transformers.
        """
        (encoding,) = _encode(self._cutting(self._max_tokens, "right"), [text], True)
        if not encoding.ids:
            return 0
        added = self._whole.get_added_tokens_decoder().get(encoding.ids[-1])
        is_special = encoding.special_tokens_mask[-1] or (added is not None and added.special)
        return len(encoding.ids) - bool(is_special)

    def find_token(self, names: Sequence[str]) -> int | None:
        """Return the id of the first of these tokens that exists, None without one."""
        found = (self._whole.token_to_id(name) for name in names)
        return next((token for token in found if token is not None), None)

    def token_text(self, token_id: int) -> str:
        """Return the text of a token, special ones included."""
        return self.text_of([token_id], skip_special_tokens=False)

    def _tokenizer(self, limit: int, cut: TruncationSide | None) -> HuggingFaceTokenizer:
        """Return the tokenizer that cuts texts on this side, if on any."""
        return self._whole if cut is None else self._cutting(limit, cut)

    def _cutting(self, limit: int, side: TruncationSide) -> HuggingFaceTokenizer:
        """Return the tokenizer that cuts texts to this length on this side."""
        with self._loading:
            if (limit, side) not in self._cut:
                # not from the file, which may have changed since the model was loaded
                made = HuggingFaceTokenizer.from_str(self._whole.to_str())
                made.enable_truncation(limit, direction=side)
                self._cut[limit, side] = made
            return self._cut[limit, side]

    def _type_ids(self, text: Text, encoding: Encoding) -> Int32Array | None:
        if not self._has_types or isinstance(text, str):
            return None
        return np.array(encoding.type_ids, dtype=np.int32)

    def _encode_part(
        self, text: Text, cut: TruncationSide | None, special_tokens: bool, limit: int
    ) -> Encoding | None:
        """Return the encoding of a part of a long text; None if all is needed.

        It is as for the whole text, or too long like it.

        Args:
            text: text or pair of texts.
            cut: side on which it is cut; None cuts nothing.
            special_tokens, limit: see `encode`.
        """
        if isinstance(text, tuple):
            return self._encode_pair_part(text, cut, special_tokens, limit)
        tokenizer = self._tokenizer(limit, cut)
        for part in self._parts(text, limit, cut or "right"):
            (encoding,) = _encode(tokenizer, [text[part]], special_tokens)
            if len(encoding.ids) >= limit + (cut is None):
                return encoding
        return None

    def _encode_pair_part(
        self, pair: tuple[str, str], cut: TruncationSide | None, special_tokens: bool, limit: int
    ) -> Encoding | None:
        """Return the encoding of a pair with a part of its longer text."""
        longer = int(len(pair[1]) > len(pair[0]))
        other = 1 - longer
        # of two long texts, each has to be known whole: truncation begins with the longer one, in tokens
        if len(pair[other]) > limit * _CHARACTERS_PER_TOKEN:
            return None
        for part in self._parts(pair[longer], limit, cut or "right"):
            shorter = pair[longer][part]
            shortened = (pair[0], shorter) if longer else (shorter, pair[1])
            (encoding,) = _encode(self._whole, [shortened], special_tokens)
            if cut is None and len(encoding.ids) > limit:
                return encoding
            # truncation depends on the length of the shorter text only, in tokens
            sequences = encoding.sequence_ids
            if cut and sequences.count(longer) > max(limit, sequences.count(other)):
                return _encode(self._cutting(limit, cut), [shortened], special_tokens)[0]
        return None

    def _tokens_of(
        self, text: str, cut: TruncationSide | None, special_tokens: bool, limit: int
    ) -> TextTokens:
        """Return the tokens of a text, from a part of it if that has enough."""
        tokenizer = self._tokenizer(limit, cut)
        parts = self._parts(text, limit, cut) if cut else ()
        for part in chain(parts, [slice(0, len(text))]):
            [encoding] = tokenizer.encode_batch([text[part]], add_special_tokens=special_tokens)
            if len(encoding.ids) >= limit:
                break
        return _text_tokens(encoding, part.start)

    def _parts(self, text: str, limit: int, side: TruncationSide) -> Iterator[slice]:
        """Yield longer and longer parts of a long text.

        Args:
            text: tokens of the parts are tokens of it, without the special ones.
            limit: number of tokens that are kept.
            side: side on which the other tokens are.
        """
        pattern = self._boundary if side == "right" else self._start
        size = limit * _CHARACTERS_PER_TOKEN
        while pattern and len(text) > size:
            found = pattern.search(text, size if side == "right" else len(text) - size)
            if found is None and side == "right":
                return
            if found is not None:
                part = slice(0, found.end()) if side == "right" else slice(found.end(), len(text))
                size = max(size, part.stop - part.start)
                yield part
            size *= _GROWTH


def _text_tokens(encoding: Encoding, start: int) -> TextTokens:
    """Return the tokens of the part of a text that begins at this character."""
    is_special = [bool(flag) for flag in encoding.special_tokens_mask]
    offsets = [
        (begin, end) if special else (start + begin, start + end)
        for (begin, end), special in zip(encoding.offsets, is_special, strict=True)
    ]
    return TextTokens(encoding.ids, encoding.tokens, is_special, offsets)


def _encode(
    tokenizer: HuggingFaceTokenizer, texts: Sequence[Text], special_tokens: bool
) -> list[Encoding]:
    # the fast way omits offsets, which nothing reads, and the type ids of pairs where no template sets them
    has_pairs = any(isinstance(text, tuple) for text in texts)
    encode = tokenizer.encode_batch if has_pairs else tokenizer.encode_batch_fast
    encodings: list[Encoding] = encode(list(texts), add_special_tokens=special_tokens)
    return encodings


def _add_prefixes(tokenizer: HuggingFaceTokenizer, prefixes: Sequence[str]) -> None:
    """Make each of these texts, or its first word, one token that the vocabulary has."""
    for text in prefixes:
        names = (text, *text.split(maxsplit=1)[:1])
        name = next((each for each in names if tokenizer.token_to_id(each) is not None), None)
        if name and tokenizer.encode(name, add_special_tokens=False).tokens != [name]:
            tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True)])


def _load(folder: Path) -> HuggingFaceTokenizer:
    content = read_bytes(folder, TOKENIZER)
    try:
        tokenizer = HuggingFaceTokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"tokenizer.json cannot be read: {error}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
