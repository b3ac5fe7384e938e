"""Limits of texts and token ids, and texts that are embedded in parts.

Parts are spans, and windows of texts longer than the model. A span has the mean of the tokens that begin inside it. The
span with the first token of the text has those in front of it too, special ones and the prompt's, and the span with the
last token has those behind it. So a span that is the whole text has the vector of the text. A window is a sequence of
its own, with prompt and special tokens. Where windows overlap, a token counts in the first of them, as in the paper.
Sources: Günther et al. 2024, arXiv:2409.04701, algorithm 2 and section 4.1 (spans). OpenAI's cookbook, "Embedding texts
that are longer than the model's maximum context length" (the mean of windows by their tokens).
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen.errors import RequestError
from varlen.intake.found import MAX_WINDOW_TOKENS, overlapping, slices_of
from varlen.intake.tokenization import Text
from varlen.parameter import MAX_JSON_MARKS, JsonLimits
from varlen.request.request import (
    MAX_SPAN_SHARE,
    Float32Array,
    Int32Array,
    Payload,
    Prompt,
    Spans,
    TokenizationTask,
    Unpooled,
    steps_of,
)
from varlen.request.row_parameters import TextPrefix, TruncationSide
from varlen.request.vectors import normalized

if TYPE_CHECKING:
    from tokenizers import Encoding

    from varlen.intake.checks import Intake

IntegerArray: TypeAlias = npt.NDArray[np.int32] | npt.NDArray[np.int64]

# How much longer than a text its chat messages may be, as JSON: escapes have up to 6 bytes for one of the text.
_MESSAGE_FACTOR = 8
# Of UTF-8, in bytes.
_LONGEST_CHARACTER = 4
# Default overlap of windows, in tokens; of short windows a quarter.
_OVERLAP = 256
_OVERLAP_PART = 4
# Bytes of a text that is read in windows, per token of all windows: most texts have fewer.
_BYTES_PER_TOKEN = 8
MAX_WINDOWED_BYTES = _BYTES_PER_TOKEN * MAX_WINDOW_TOKENS

_Places = npt.NDArray[np.intp]


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
        try:
            return utf_8_decode(data[begin:end], "strict", end == len(data))[0]
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
            sizes.append(sum([self._check_text(row, part, truncate) for part in parts]))
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
        """Raise RequestError if there is no token, or an id is out of range.

        Args:
            ids, types: `[tokens]` each.
        """
        if not len(ids):
            raise RequestError(
                f"row {row}: {name} has no tokens, and the tokenizer adds none; send at least one character that it"
                " reads"
            )
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


@dataclass(frozen=True, slots=True)
class LongTextRules:
    """What a model makes of parts of texts.

    Attributes:
        max_bytes: longest text that is read in windows, in bytes of UTF-8.
        no_spans: reason why it has no vectors of spans; empty if it has.
        behind: layer behind pooling that is not linear, so that windows of one span cannot be joined; empty for none.
    """

    max_bytes: int = MAX_WINDOWED_BYTES
    no_spans: str = ""
    behind: str = ""


@dataclass(frozen=True, slots=True)
class LongTextForm:
    """How texts are read in parts.

    Attributes:
        spans: beginning and end of each span, one after the other, see `read_spans`; None for whole texts.
        overlap: tokens that two windows share; None is the default.
        normalize: whether vectors have length 1.
    """

    spans: Sequence[int] | None = None
    windows: bool = False
    overlap: int | None = None
    normalize: bool = False


@dataclass(frozen=True, slots=True)
class _Part:
    """What one sequence has of the vectors of its text.

    Attributes:
        vectors: numbers of these vectors, `[vectors]`; a whole text has one.
    """

    vectors: _Places
    counts: _Places


class LongTexts:
    """The texts of a request that are embedded in parts.

    Attributes:
        normalizes_parts: whether the vectors of sequences are normalized, and not only the result.
    """

    def __init__(
        self, intake: Intake, texts: Sequence[Any], form: LongTextForm, prefix: TextPrefix
    ) -> None:
        """Check the texts and what is asked of them.

        Args:
            texts: a text for each row; one text with spans.

        Raises:
            RequestError: the model does not serve it, a text is too long, or a span is outside of its text.
        """
        rules, spans = intake.long_texts, form.spans
        if form.overlap is not None and not form.windows:
            raise RequestError(
                "the request has window_overlap without windows; send windows: true too"
            )
        if spans is not None:
            if rules.no_spans:
                raise RequestError(
                    f"the request has spans, and this model {rules.no_spans}; send spans as texts"
                )
            if len(texts) != 1:
                raise RequestError(
                    f"the request has spans and {len(texts)} texts; send one text in a request"
                )
        for row, text in enumerate(texts):
            if isinstance(text, tuple):
                raise RequestError(
                    f"row {row}: text is a pair, which has no spans or windows; send a single text"
                )
        limits = limits_of(intake, windows=form.windows)
        limits.check_texts(texts)
        self._intake, self._texts, self._form, self._limits = intake, texts, form, limits
        self._role = intake.role(prefix)
        self._parts: list[list[_Part]] = [[] for _ in texts]
        # of each row the parts that are tokenized so far
        self._tokens: list[list[_Tokens]] = [[] for _ in texts]
        self.num_vectors = len(texts) if spans is None else len(spans) // 2
        self.normalizes_parts = form.normalize and spans is None
        if spans is not None and max(spans) > len(texts[0]):
            number = int(np.argmax(spans)) // 2
            self._refuse_span(
                number, f"is outside of the text, which has {len(texts[0])} characters"
            )

    @property
    def steps(self) -> tuple[TokenizationTask, ...]:
        """The steps that make a prompt for each sequence.

        A long text is tokenized in parts. The last step of a row raises RequestError for a text that is too long, or
        has too many windows.
        """
        texts = [self._role.prompt + text for text in self._texts]
        parts = [
            (row, text, part)
            for row, text in enumerate(texts)
            for part in self._intake.tokenizer.parts_apart(text)
        ]
        sizes = [len(text[part].encode()) for _, text, part in parts]

        def run(some: range) -> tuple[Prompt, ...]:
            return tuple(
                each
                for row, text, part in parts[some.start : some.stop]
                for each in self._prompts(row, text, part)
            )

        return steps_of(sizes, run)

    def count(self, tokens: Sequence[int]) -> list[int]:
        return [sum(tokens[part]) for part in slices_of(self._parts)]

    def vectors(self, outputs: Sequence[Float32Array]) -> Float32Array:
        """Return the vector of each text, or of each span, `[vectors, features]`."""
        return np.concatenate(
            [
                self._joined(parts, outputs[place])
                for parts, place in zip(self._parts, slices_of(self._parts), strict=True)
            ]
        )

    def _joined(self, parts: Sequence[_Part], outputs: Sequence[Float32Array]) -> Float32Array:
        if self._form.spans is None and len(outputs) == 1:
            return outputs[0][None]
        count = 1 if self._form.spans is None else self.num_vectors
        sums = np.zeros((count, outputs[0].shape[-1]))
        weights = np.zeros((count, 1))
        for part, output in zip(parts, outputs, strict=True):
            # no vector is in a part twice
            sums[part.vectors] += part.counts[:, None] * output.reshape(len(part.vectors), -1)
            weights[part.vectors] += part.counts[:, None]
        means = sums / weights
        return normalized(means) if self._form.normalize else means.astype(np.float32)

    def _prompts(self, row: int, text: str, part: slice) -> list[Prompt]:
        """Tokenize a part of a text; after the last one, return its prompts.

        What each prompt has of the text's vectors is kept.
        """
        found = self._tokens[row]
        encoding, _ = self._intake.tokenizer.encode_whole(text[part])
        found.append(_Tokens.of(encoding, text[part], part.start))
        if part.stop < len(text):
            return []
        self._tokens[row] = []
        ids, first, places = _joined_tokens(found)
        self._limits.check_ids(row, "text", ids, None)
        # tokens of the prompt come before each window
        behind = len(text) - len(self._texts[row])
        before = int(np.searchsorted(places, behind))
        first, places = first + before, places[before:] - behind
        spans = self._spans_of(places)
        prompts, parts = [], []
        for window, owned in self._windows(row, len(ids) - len(places), len(places)):
            own = slice(first + window.start, first + window.stop)
            kept = np.r_[:first, own, first + len(places) : len(ids)]
            if spans is None:
                counts = max(1, window.stop - window.start)
                parts.append(_Part(np.zeros(1, np.intp), np.array([counts])))
                payload: Payload = Unpooled(count=min(self._role.num_unpooled, len(kept)))
            else:
                # places in the window, with the tokens around the text at its ends
                inside = np.clip(spans, owned.start, owned.stop)
                chosen = np.flatnonzero(inside[0] < inside[1])
                begins, ends = inside[:, chosen] - window.start + first
                begins[(spans[0, chosen] == 0) & (window.start == 0)] = 0
                begins = np.maximum(begins, self._role.num_unpooled)
                ends[(spans[1, chosen] == len(places)) & (window.stop == len(places))] = len(kept)
                if not len(chosen):
                    # no span needs this window
                    continue
                self._check_spans(row, chosen, begins, ends, len(kept))
                parts.append(_Part(chosen, ends - begins))
                payload = Spans(np.concatenate([begins, ends]).astype(np.int32))
            self._limits.check_arena(row, len(kept))
            prompts.append(Prompt(ids[kept], payload=payload))
        if spans is not None:
            self._check_joined(parts)
        self._parts[row] = parts
        return prompts

    def _spans_of(self, places: _Places) -> _Places | None:
        """Return the tokens of each span, `[2, spans]`: the first, and the first behind it."""
        if self._form.spans is None:
            return None
        bounds = np.array(self._form.spans).reshape(-1, 2).T
        found = np.searchsorted(places, bounds)
        empty = np.flatnonzero(found[0] >= found[1])
        if len(empty):
            self._refuse_span(int(empty[0]), "has no token of the text that begins in it")
        return found

    def _windows(self, row: int, others: int, count: int) -> list[tuple[slice, slice]]:
        """Return the tokens of each window, and the tokens that spans have there."""
        longest = self._limits.max_sequence_tokens
        if self._form.windows:
            longest = min(longest, self._limits.max_arena_tokens or longest)
        room = longest - others
        if count <= room:
            return [(slice(0, count), slice(0, count))]
        if not self._form.windows:
            raise RequestError(
                f"row {row}: text has {count + others} tokens; this model takes at most {longest}; windows: true reads"
                " it in parts"
            )
        overlap = self._form.overlap
        if overlap is None:
            overlap = min(_OVERLAP, max(0, room) // _OVERLAP_PART)
        if room <= overlap:
            raise RequestError(
                f"row {row}: prompt and special tokens leave {max(0, room)} tokens for the text in a window of"
                f" {longest}, and two windows share {overlap} (window_overlap); send a shorter prompt, or a smaller"
                " window_overlap"
            )
        parts = overlapping(
            count, room, overlap, size=longest, named=(f"row {row}: the text", "window_overlap")
        )
        return [
            (part, slice(part.start + overlap if at else 0, part.stop))
            for at, part in enumerate(parts)
        ]

    def _check_spans(
        self, row: int, chosen: _Places, begins: _Places, ends: _Places, tokens: int
    ) -> None:
        empty = np.flatnonzero(begins >= ends)
        if len(empty):
            self._refuse_span(
                int(chosen[empty[0]]),
                "has only tokens of the prompt, which the model does not pool",
            )
        # batches and their memory are planned for these
        count, pooled = len(chosen), int((ends - begins).sum())
        if count > tokens:
            raise RequestError(
                f"row {row}: {count} spans are in {tokens} tokens; allowed: a span for each token. Send fewer spans"
            )
        if pooled > MAX_SPAN_SHARE * tokens:
            raise RequestError(
                f"row {row}: spans of {pooled} tokens are in {tokens} tokens; allowed: each token in {MAX_SPAN_SHARE}"
                " spans on average. Send the spans in several requests"
            )

    def _check_joined(self, parts: Sequence[_Part]) -> None:
        """Raise RequestError if a span is in windows whose vectors cannot be joined."""
        behind = self._intake.long_texts.behind
        if not behind or len(parts) < 2:
            return
        times = np.bincount(np.concatenate([part.vectors for part in parts]))
        several = np.flatnonzero(times > 1)
        if len(several):
            self._refuse_span(
                int(several[0]),
                f"is in {times[several[0]]} windows, which the layer behind pooling does not join ({behind})",
            )

    def _refuse_span(self, number: int, why: str) -> NoReturn:
        assert self._form.spans is not None
        begin, end = self._form.spans[2 * number : 2 * number + 2]
        raise RequestError(f"spans[{number}] is [{begin}, {end}] and {why}; send other spans")


def limits_of(intake: Intake, *, windows: bool) -> InputLimits:
    """Return the limits of texts that are embedded in parts, perhaps in windows."""
    most = intake.limits.max_text_bytes
    if windows:
        most = max(most, intake.long_texts.max_bytes)
    return replace(intake.limits, max_text_bytes=most, can_truncate=False)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens of a part of a text, with special ones around them.

    Attributes:
        ids: `[tokens]` int32.
        first: place of the first token of the text itself.
        begins: character of the whole text at which each of its tokens begins.
    """

    ids: Int32Array
    first: int
    begins: _Places

    @classmethod
    def of(cls, encoding: Encoding, text: str, start: int) -> _Tokens:
        """Return the tokens of a part that begins at this character.

        White space at the beginning of a token is no part of it, unless it is all white space: tokenizers differ in
        whether the space before a word is in its token.
        """
        ids = np.array(encoding.ids, np.int32)
        own = np.flatnonzero([each is not None for each in encoding.sequence_ids])
        if not len(own):
            return cls(ids, len(ids), np.empty(0, np.intp))
        begins, ends = np.array(encoding.offsets, np.intp)[own].T
        count = len(text)
        solid = np.where([not letter.isspace() for letter in text], np.arange(count), count)
        # [characters + 1] the next one that is no white space
        following = np.append(np.minimum.accumulate(solid[::-1])[::-1], count)
        later = following[begins]
        return cls(ids, int(own[0]), np.where(later < ends, later, begins) + start)

    @property
    def own(self) -> slice:
        """Where the tokens of the text itself are."""
        return slice(self.first, self.first + len(self.begins))


def _joined_tokens(parts: Sequence[_Tokens]) -> tuple[Int32Array, int, _Places]:
    """Return the tokens of a text, where its own ones begin, and their characters.

    Special tokens are only around the whole text. Characters ascend.
    """
    around = next((each for each in parts if len(each.begins)), parts[0])
    ids = [around.ids[: around.first], *(each.ids[each.own] for each in parts)]
    ids.append(around.ids[around.own.stop :])
    begins = np.maximum.accumulate(np.concatenate([each.begins for each in parts]))
    return np.concatenate(ids), around.first, begins
