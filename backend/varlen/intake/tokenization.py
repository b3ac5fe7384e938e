"""Text to token ids, with the checkpoint's own `tokenizer.json`.

The tokenizers library does the work and lets other threads run meanwhile; this file limits the length of texts. It
tokenizes only the part of a much too long text up to a safe boundary (`boundaries`), or the part from one on if the
text's beginning is cut: the result equals the whole text's.

A request's text may itself be a part, of a text that is too long to be read. It counts if it ends at a safe boundary,
or has `spare_tokens` more than are kept, which are the same if a character less is read
(docs/decisions/0078-limits-of-the-checkpoint.md).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as HuggingFaceTokenizer

from varlen.errors import CheckpointError
from varlen.intake.boundaries import safe_boundary, safe_start
from varlen.models.checkpoint.files import TOKENIZER, read_bytes
from varlen.request.request import Int32Array
from varlen.request.row_parameters import TruncationSide

Text: TypeAlias = str | tuple[str, str]

# The token of unknown words where the model of the tokenizer does not name it.
_UNKNOWN_TOKENS = ("<unk>", "[UNK]")


# Characters of the first part of a long text, per token of the limit: most texts have fewer per token.
_CHARACTERS_PER_TOKEN = 6
# How much longer the next part is, if the last one has too few tokens.
_GROWTH = 4
# Tokens next to the end of a part that the rest of the text may change, at least: more than most words have.
_SPARE_TOKENS = 256
# Characters of a part that is tokenized apart, and characters behind them in which it may end.
_APART_CHARACTERS = 1 << 13
_APART_MORE = 1 << 10


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The tokens of a text or of a pair of texts.

    Attributes:
        token_ids: `[tokens]` int32.
        type_ids: `[tokens]` int32, for pairs only.
        is_complete: False if there are more tokens: of a text that is not cut, these exceed the limit already; of a
            part that is cut, these are too few to tell which are kept.
    """

    token_ids: Int32Array
    type_ids: Int32Array | None
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class TextTokens:
    """The tokens of a text, for a client.

    Attributes:
        tokens: text of each token as the vocabulary has it, such as `##ing`.
        is_special: whether the tokenizer added the token.
        offsets: first character of the text in each token, and the first one behind it.
    """

    token_ids: list[int]
    tokens: list[str]
    is_special: list[bool]
    offsets: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class WordRules:
    """How tokens become words.

    Attributes:
        has_word_pieces: whether the vocabulary marks tokens that continue a word. Otherwise a token without white space
            in front of it does.
        unknown: token of unknown words, which continues no word; None without one.
        join: returns the text of tokens.
    """

    has_word_pieces: bool
    unknown: int | None
    join: Callable[[list[str]], str]


class Tokenizer:
    """Tokenizes texts and pairs of texts, with special tokens, whole or cut to a length.

    Attributes:
        side: side on which texts are cut where a request names none.
        spare_tokens: number of tokens next to the end of a part that the rest of the text may change.
    """

    def __init__(
        self,
        folder: Path,
        max_sequence_tokens: int,
        *,
        has_types: bool = True,
        adds_special_tokens: bool = True,
        side: TruncationSide = "right",
        prefixes: Sequence[str] = (),
    ) -> None:
        """Load `tokenizer.json`, without its settings of padding and truncation.

        Args:
            max_sequence_tokens: length of a truncated text, special tokens included.
            has_types: whether pairs get token types.
            prefixes: texts that become one token each, if the vocabulary has it, or their first word.

        Raises:
            CheckpointError: the file cannot be read.
        """
        self._whole = _load(folder)
        if not adds_special_tokens:
            self._whole.post_processor = None
        _add_prefixes(self._whole, prefixes)
        self._has_types = has_types
        self.side: TruncationSide = side
        self._max_tokens = max_sequence_tokens
        self._boundary = safe_boundary(self._whole)
        self._start = safe_start(self._whole)
        # a longer word is one token of WordPiece, and a part of it is many
        longest_word = getattr(self._whole.model, "max_input_chars_per_word", 0)
        self.spare_tokens = max(_SPARE_TOKENS, longest_word + 1)

    @property
    def huggingface(self) -> HuggingFaceTokenizer:
        """The library's tokenizer, for decoding; not to be changed."""
        return self._whole

    def encode(
        self,
        texts: Sequence[Text],
        *,
        truncate: bool,
        side: TruncationSide | None = None,
        special_tokens: bool = True,
        max_tokens: int | None = None,
        max_text_bytes: int | None = None,
    ) -> list[Tokenized]:
        """Return one sequence per text or pair of texts; type ids only for pairs.

        Args:
            texts: valid Unicode.
            truncate: cut sequences longer than max_tokens, the longer text of a pair first. Otherwise some tokens
                beyond that number may be missing.
            side: side on which they are cut; None is the checkpoint's.
            max_tokens: None is max_sequence_tokens.
            max_text_bytes: a text that is cut and has more bytes of UTF-8 is a part, which goes on where it is cut.
        """
        limit = max_tokens or self._max_tokens
        cut = (side or self.side) if truncate else None
        most_bytes = max_text_bytes if truncate else None
        found: list[Tokenized | None] = []
        for text in texts:
            are_parts = _are_longer(text, most_bytes)
            # one that is much too long is not tokenized as a whole
            encoding = self._encode_part(text, are_parts, cut, special_tokens, limit)
            if encoding is not None:
                found.append(self._tokenized(text, encoding, cut, limit, is_complete=truncate))
            elif cut is not None and any(are_parts):
                encoding = self._encode_read(text, are_parts, cut, special_tokens, limit)
                found.append(
                    Tokenized(np.empty(0, np.int32), None, is_complete=False)
                    if encoding is None
                    else self._tokenized(text, encoding, cut, limit, is_complete=True)
                )
            else:
                found.append(None)
        others = [text for text, each in zip(texts, found, strict=True) if each is None]
        whole = iter(_encode(self._whole, others, special_tokens))
        return [
            each or self._tokenized(text, next(whole), cut, limit, is_complete=True)
            for text, each in zip(texts, found, strict=True)
        ]

    def encode_words(self, words: Sequence[str]) -> tuple[Int32Array, npt.NDArray[np.intp]]:
        """Return the tokens of words that are tokenized apart, with special tokens.

        Returns:
            `[tokens]` int32, and the number of the word of each token, -1 of special ones.
        """
        encoding = self._whole.encode(list(words), is_pretokenized=True)
        numbers = [-1 if word is None else word for word in encoding.word_ids]
        return np.array(encoding.ids, np.int32), np.array(numbers, np.intp)

    def parts_apart(self, text: str) -> list[slice]:
        """Return parts of a text that are tokenized apart.

        The tokens of the parts, one after the other, are the tokens of the text. A text is one part if it is short, or
        if this tokenizer has no places where texts can begin.
        """
        ends = [0]
        if self._start is not None:
            for near in range(_APART_CHARACTERS, len(text) - _APART_MORE, _APART_CHARACTERS):
                found = self._start.search(text, near, near + _APART_MORE)
                ends += [] if found is None else [found.end()]
        return [slice(*bounds) for bounds in pairwise([*ends, len(text)])]

    def encode_whole(self, text: Text) -> tuple[Encoding, Int32Array | None]:
        """Return a text or a pair with offsets, and type ids, if any."""
        (encoding,) = _encode(self._whole, [text], True, with_offsets=True)
        return encoding, self._type_ids(text, encoding)

    def tokens_of(
        self,
        texts: Sequence[str],
        *,
        truncate: bool,
        side: TruncationSide | None = None,
        special_tokens: bool = True,
        max_tokens: int | None = None,
        max_text_bytes: int | None = None,
    ) -> list[TextTokens | None]:
        """Return the tokens of each text; None for a part that has too few."""
        limit, cut = max_tokens or self._max_tokens, (side or self.side) if truncate else None
        most_bytes = max_text_bytes if truncate else None
        return [self._tokens_of(text, cut, special_tokens, limit, most_bytes) for text in texts]

    @property
    def word_rules(self) -> WordRules:
        """How tokens become words, as in transformers."""
        model, decoder = self._whole.model, self._whole.decoder
        name = getattr(model, "unk_token", None)
        return WordRules(
            bool(getattr(model, "continuing_subword_prefix", None)),
            self.find_token([name] if name else _UNKNOWN_TOKENS),
            " ".join if decoder is None else decoder.decode,
        )

    def num_special_tokens(self, *, is_pair: bool) -> int:
        return self._whole.num_special_tokens_to_add(is_pair)

    def text_of(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self._whole.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def count_leading(self, text: str) -> int:
        """Return the number of tokens of a text at the start of a longer one.

        It is the text's own length, cut to the longest sequence, without a special token at its end. Tokens that the
        end of the text shares with what follows it are counted as if they were apart, as in sentence-transformers.
        """
        (encoding,) = _encode(self._whole, [text], True)
        if not encoding.ids:
            return 0
        last = _kept(encoding, "right", self._max_tokens)[-1]
        added = self._whole.get_added_tokens_decoder().get(encoding.ids[last])
        is_special = encoding.special_tokens_mask[last] or (added is not None and added.special)
        return min(len(encoding.ids), self._max_tokens) - bool(is_special)

    def find_token(self, names: Sequence[str]) -> int | None:
        """Return the id of the first of these tokens that exists, None without one."""
        found = (self._whole.token_to_id(name) for name in names)
        return next((token for token in found if token is not None), None)

    def token_text(self, token_id: int) -> str:
        return self.text_of([token_id], skip_special_tokens=False)

    def _tokenized(
        self,
        text: Text,
        encoding: Encoding,
        cut: TruncationSide | None,
        limit: int,
        *,
        is_complete: bool,
    ) -> Tokenized:
        ids = np.array(encoding.ids, dtype=np.int32)
        types = self._type_ids(text, encoding)
        if cut is not None and len(ids) > limit:
            kept = _kept(encoding, cut, limit)
            ids, types = ids[kept], None if types is None else types[kept]
        return Tokenized(ids, types, is_complete)

    def _type_ids(self, text: Text, encoding: Encoding) -> Int32Array | None:
        if not self._has_types or isinstance(text, str):
            return None
        return np.array(encoding.type_ids, dtype=np.int32)

    def _encode_part(
        self,
        text: Text,
        are_parts: tuple[bool, ...],
        cut: TruncationSide | None,
        special_tokens: bool,
        limit: int,
    ) -> Encoding | None:
        """Return the encoding of a part of a long text; None if all is needed.

        It is as for the whole text, or too long like it.

        Args:
            cut: side on which it is cut; None cuts nothing.
        """
        if isinstance(text, tuple):
            return self._encode_pair_part(text, are_parts, cut, special_tokens, limit)
        for part in self._parts(text, limit, cut or "right"):
            (encoding,) = _encode(self._whole, [text[part]], special_tokens)
            if len(encoding.ids) >= limit + (cut is None):
                return encoding
        return None

    def _encode_pair_part(
        self,
        pair: tuple[str, str],
        are_parts: tuple[bool, ...],
        cut: TruncationSide | None,
        special_tokens: bool,
        limit: int,
    ) -> Encoding | None:
        longer = int(len(pair[1]) > len(pair[0]))
        other = 1 - longer
        # of two long texts, each has to be known whole: truncation begins with the longer one, in tokens
        if are_parts[other] or len(pair[other]) > limit * _CHARACTERS_PER_TOKEN:
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
                return encoding
        return None

    def _encode_read(
        self,
        text: Text,
        are_parts: tuple[bool, ...],
        cut: TruncationSide,
        special_tokens: bool,
        limit: int,
        *,
        with_offsets: bool = False,
    ) -> Encoding | None:
        """Return the encoding of what is read of a text or a pair.

        It is None if the whole text may keep other tokens.
        """
        both = [text, _shortened(text, are_parts, cut)]
        encoding, shorter = _encode(self._whole, both, special_tokens, with_offsets=with_offsets)
        sequences = encoding.sequence_ids
        counts = [sequences.count(number) for number in range(len(are_parts))]
        # of a pair, the number of tokens of a whole text decides how many of the other one are kept
        known = [count for count, is_part in zip(counts, are_parts, strict=True) if not is_part]
        needed = max([limit, *known]) + self.spare_tokens
        if any(count < needed for count, is_part in zip(counts, are_parts, strict=True) if is_part):
            return None
        kept, still_kept = (
            [each.ids[place] for place in _kept(each, cut, limit)] for each in (encoding, shorter)
        )
        return encoding if kept == still_kept else None

    def _tokens_of(
        self,
        text: str,
        cut: TruncationSide | None,
        special_tokens: bool,
        limit: int,
        max_text_bytes: int | None,
    ) -> TextTokens | None:
        """Return the tokens of a text, from a part of it if that has enough."""
        for part in self._parts(text, limit, cut) if cut else ():
            (encoding,) = _encode(self._whole, [text[part]], special_tokens, with_offsets=True)
            if len(encoding.ids) >= limit:
                return _text_tokens(encoding, part.start, cut, limit)
        are_parts = _are_longer(text, max_text_bytes)
        if cut is not None and any(are_parts):
            read = self._encode_read(text, are_parts, cut, special_tokens, limit, with_offsets=True)
            return None if read is None else _text_tokens(read, 0, cut, limit)
        (encoding,) = _encode(self._whole, [text], special_tokens, with_offsets=True)
        return _text_tokens(encoding, 0, cut, limit)

    def _parts(self, text: str, limit: int, side: TruncationSide) -> Iterator[slice]:
        """Yield longer and longer parts of a long text.

        Args:
            text: tokens of the parts are tokens of it, without the special ones.
            limit: number of tokens that are kept.
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


def _text_tokens(
    encoding: Encoding, start: int, cut: TruncationSide | None, limit: int
) -> TextTokens:
    """Return the tokens of the part of a text that begins at this character."""
    ids, tokens, offsets = encoding.ids, encoding.tokens, encoding.offsets
    is_special = [bool(flag) for flag in encoding.special_tokens_mask]
    count = len(ids)
    kept = range(count) if cut is None or count <= limit else _kept(encoding, cut, limit).tolist()
    return TextTokens(
        [ids[place] for place in kept],
        [tokens[place] for place in kept],
        [is_special[place] for place in kept],
        [
            offsets[place]
            if is_special[place]
            else (start + offsets[place][0], start + offsets[place][1])
            for place in kept
        ],
    )


def _kept(encoding: Encoding, side: TruncationSide, limit: int) -> npt.NDArray[np.intp]:
    """Return the places of the tokens that are kept, `[tokens]`.

    Special tokens that were added all are.

    The longer text of a pair is cut first. The library's own truncation also makes every combination of the parts of
    two texts that it cuts off, which takes gigabytes for two long ones.

    Source: LongestFirst in tokenizers/src/utils/truncation.rs of huggingface/tokenizers.
    """
    texts = np.array([-1 if each is None else each for each in encoding.sequence_ids], np.intp)
    places = [np.flatnonzero(texts == number) for number in range(texts.max(initial=-1) + 1)]
    room = max(0, limit - int((texts == -1).sum()))
    counts = [len(each) for each in places]
    if len(counts) == 1:
        counts = [min(counts[0], room)]
    elif sum(counts) > room:
        shorter = min(counts)
        longer = max(shorter, room - shorter)
        if shorter + longer > room:
            shorter, longer = room // 2, room - room // 2
        counts = [longer, shorter] if counts[0] > counts[1] else [shorter, longer]
    is_kept = texts == -1
    for each, count in zip(places, counts, strict=True):
        is_kept[each[:count] if side == "right" else each[len(each) - count :]] = True
    return np.flatnonzero(is_kept)


def _encode(
    tokenizer: HuggingFaceTokenizer,
    texts: Sequence[Text],
    special_tokens: bool,
    *,
    with_offsets: bool = False,
) -> list[Encoding]:
    # the fast way omits offsets, and the type ids of pairs where no template sets them
    has_pairs = any(isinstance(text, tuple) for text in texts)
    is_fast = not has_pairs and not with_offsets
    encode = tokenizer.encode_batch_fast if is_fast else tokenizer.encode_batch
    encodings: list[Encoding] = encode(list(texts), add_special_tokens=special_tokens)
    return encodings


def _are_longer(text: Text, max_bytes: int | None) -> tuple[bool, ...]:
    parts = text if isinstance(text, tuple) else (text,)
    if max_bytes is None:
        return (False,) * len(parts)
    # a character has up to 4
    return tuple(4 * len(part) > max_bytes and len(part.encode()) > max_bytes for part in parts)


def _shortened(text: Text, are_parts: tuple[bool, ...], cut: TruncationSide) -> Text:
    """Return a text or a pair whose parts have a character less, where reading ended."""
    kept = slice(0, -1) if cut == "right" else slice(1, None)
    if isinstance(text, str):
        return text[kept]
    first, second = (
        each[kept] if is_part else each for each, is_part in zip(text, are_parts, strict=True)
    )
    return first, second


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
