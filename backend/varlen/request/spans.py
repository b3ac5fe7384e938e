"""Words of a text, and the spans that a model finds for labels or questions.

Sources: the greedy choice of spans follows the library gliner (`greedy_search`, `has_overlapping`), as do the words of
a text (its splitter "whitespace"). Words of GLiNER2 follow the library gliner2 (`WhitespaceTokenSplitter`). Answers to
questions, which are read in windows, follow `QuestionAnsweringPipeline` of transformers 4.57
(src/transformers/pipelines/question_answering.py); transformers 5 has no such pipeline.
"""

import json
import re
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from varlen.errors import RequestError
from varlen.parameter import MAX_INT32, check_count, read_json, refuse
from varlen.request.request import Float32Array, Int32Array
from varlen.request.vectors import scores_of

# What a model scores with each label: spans of words; words that begin, end or continue a span; or spans for the labels
# of a schema, the fields of GLiNER2.
Scored: TypeAlias = Literal["spans", "words", "fields"]

DEFAULT_THRESHOLD = 0.5
# Labels of a request, and characters of one.
MAX_LABELS = 256
MAX_LABEL_CHARACTERS = 512
# Labels of all instances of a schema, whose scores a row has.
MAX_LABEL_ROWS = 512
# Spans of a row whose scores exceed the threshold, before those that overlap are left out.
MAX_CANDIDATES = 1 << 14
LABELS_TEXT = (
    f"a list of 1 to {MAX_LABELS} strings with 1 to {MAX_LABEL_CHARACTERS} characters, none of them blank, or a text"
    " that holds one as JSON"
)

_WORD = re.compile(r"\w+(?:[-_]\w+)*|\S")
# Ends of sentences: GLiNER2 reads one behind each text.
_SENTENCE_ENDS = (".", "!", "?")
# Characters before the @ of an address, so that the search for one is short.
_MOST_LOCAL = 256


@dataclass(frozen=True, slots=True)
class Span:
    """A span of a text with its label.

    Attributes:
        start, end: its first character, and the one behind its last.
        score: probability of the label.
    """

    start: int
    end: int
    text: str
    label: str
    score: float


@dataclass(frozen=True, slots=True)
class SpanForm:
    """What a request asks of spans.

    Attributes:
        threshold: scores above it count.
        flat_ner: whether no two spans share a word; else one may contain the other.
        multi_label: whether a span may have several labels.
        scored: things that the model scores.
    """

    texts: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    threshold: float = DEFAULT_THRESHOLD
    flat_ner: bool = True
    multi_label: bool = False
    scored: Scored = "spans"

    def spans(self, row: int, scores: Float32Array) -> list[Span]:
        """Return the spans of a row in the order of their beginnings.

        Args:
            scores: `[words · labels, columns]`, logits.

        Raises:
            RequestError: too many spans have scores above the threshold.
        """
        text, count = self.texts[row], len(self.labels)
        words = len(scores) // count
        probabilities = sigmoid(scores.reshape(words, count, scores.shape[1]))
        find = _of_words if self.scored == "words" else candidates
        begins, ends, labels, found = find(probabilities, np.float32(self.threshold), row)
        order = np.argsort(-found, kind="stable").tolist()
        bounds = list(word_bounds(text, words, self.scored))
        free = new_filter(words, is_flat=self.flat_ner, multi_label=self.multi_label)
        kept = [each for each in order if free.take(begins[each], ends[each])]
        kept.sort(key=begins.__getitem__)
        return [
            self._span(text, bounds[begins[each]][0], bounds[ends[each]][1], labels[each], score)
            for each, score in zip(kept, found[kept].tolist(), strict=True)
        ]

    def _span(self, text: str, start: int, end: int, label: int, score: float) -> Span:
        return Span(start, end, text[start:end], self.labels[label], score)


def word_bounds(text: str, most: int, scored: Scored) -> Iterator[tuple[int, int]]:
    """Yield where each of the first `most` words begins and ends, in characters.

    Where `scored` is "fields", the last one may end behind the text.
    """
    text, pattern = _as_read(text, scored)
    for _, match in zip(range(most), pattern.finditer(text), strict=False):
        yield match.span()


def words_of(text: str, most: int, scored: Scored) -> list[str]:
    """Return the first `most` words of a text, as the model reads them."""
    read, _ = _as_read(text, scored)
    words = [read[begin:end] for begin, end in word_bounds(text, most, scored)]
    return [word.lower() for word in words] if scored == "fields" else words


def _as_read(text: str, scored: Scored) -> tuple[str, re.Pattern[str]]:
    """Return a text as a model reads it, and the pattern of its words."""
    if scored != "fields":
        return text, _WORD
    return text if text.endswith(_SENTENCE_ENDS) else f"{text}.", _word_of_fields()


@cache
def _word_of_fields() -> re.Pattern[str]:
    """Return the pattern of the words of GLiNER2, where an address is one word."""
    marks = "".join(
        chr(code)
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)).startswith("M")
    )
    # joiners of letters too
    letter = rf"[\w{marks}\u200c\u200d]"
    return re.compile(
        r"(?:https?://\S+|www\.\S+)"
        rf"|[a-z0-9._%+-]{{1,{_MOST_LOCAL}}}@[a-z0-9.-]+\.[a-z]{{2,}}"
        r"|@[a-z0-9_]+"
        rf"|{letter}+(?:[-_]{letter}+)*"
        r"|\S",
        re.IGNORECASE,
    )


def read_labels(value: object) -> tuple[str, ...]:
    """Return the labels of a request, each once.

    Raises:
        RequestError: this is no list of labels.
    """
    given = read_json("labels", value) if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not all(map(is_label, given)):
        refuse("labels", value, LABELS_TEXT)
    labels = tuple(dict.fromkeys(given))
    if not 1 <= len(labels) <= MAX_LABELS:
        refuse("labels", value, LABELS_TEXT)
    return labels


def span_tensors(rows: Sequence[Sequence[Span]]) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of all rows by name, `[rows, most spans]`, padded with zeros and empty texts."""
    counts = [len(row) for row in rows]
    shape = len(rows), max(counts)
    tensors: dict[str, npt.NDArray[Any]] = {
        "starts": np.zeros(shape, np.int32),
        "ends": np.zeros(shape, np.int32),
        "scores": np.zeros(shape, np.float32),
        "spans": np.full(shape, b"", dtype=np.object_),
        "span_labels": np.full(shape, b"", dtype=np.object_),
        "num_spans": np.array(counts, np.int32)[:, None],
    }
    for index, row in enumerate(rows):
        for place, each in enumerate(row):
            at = index, place
            tensors["starts"][at], tensors["ends"][at] = each.start, each.end
            tensors["scores"][at] = each.score
            tensors["spans"][at], tensors["span_labels"][at] = (
                each.text.encode(),
                each.label.encode(),
            )
    return tensors


def is_label(value: object) -> bool:
    """Return whether a value may be a label."""
    return is_text(value, MAX_LABEL_CHARACTERS) and bool(str(value).strip())


def is_text(value: object, most: int) -> bool:
    """Return whether a value is a text of at most `most` characters."""
    if not isinstance(value, str) or len(value) > most:
        return False
    # half a surrogate pair is no text
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


def sigmoid(logits: Float32Array) -> Float32Array:
    """Return probabilities of logits."""
    with np.errstate(over="ignore"):
        result: Float32Array = np.float32(1) / (np.float32(1) + np.exp(-logits))
    return result


_Places = npt.NDArray[np.intp]
_Found = tuple[list[int], list[int], list[int], Float32Array]


def candidates(scores: Float32Array, threshold: np.float32 | Float32Array, row: int) -> _Found:
    """Return first word, last word, label and score of spans above a threshold.

    Args:
        scores: `[words, labels, width]`, probabilities.
        threshold: one for all labels, or `[labels]`.

    Raises:
        RequestError: there are too many.
    """
    # in the order of the library: by word, width and label
    scores = scores.transpose(0, 2, 1)
    begins, widths, labels = np.nonzero(scores > threshold)
    _check_count(len(begins), row)
    ends = begins + widths
    return begins.tolist(), ends.tolist(), labels.tolist(), scores[begins, widths, labels]


def _of_words(scores: Float32Array, threshold: np.float32, row: int) -> _Found:
    """Return first word, last word, label and score of each span of `[words, labels, 3]`.

    The score of a span is the lowest of its beginning, its end and its words.
    """
    starts, stops, insides = np.moveaxis(scores, 2, 0)  # [words, labels] each
    words, count = starts.shape
    begins, labels = np.nonzero(starts > threshold)
    # [words, labels] the first word from each one on that is not inside
    outside = np.where(insides < threshold, np.arange(words)[:, None], words)
    limits = np.minimum.accumulate(outside[::-1], axis=0)[::-1]
    is_end = stops > threshold
    # [words + 1, labels] ends before each word
    before = np.concatenate([np.zeros((1, count), np.intp), is_end.cumsum(axis=0)])
    first = before[begins, labels]
    each = before[limits[begins, labels], labels] - first
    _check_count(int(each.sum()), row)
    # ends of the first label, then of the next one
    of_label = np.cumsum(before[-1]) - before[-1]
    place = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
    place += np.repeat(of_label[labels] + first, each)
    ends = np.nonzero(is_end.T)[1][place]
    # in the order of the library: by beginning, then by end
    begins, labels = np.repeat(begins, each), np.repeat(labels, each)
    lowest = _lowest(insides, begins, ends, labels)
    values = np.minimum(np.minimum(lowest, stops[ends, labels]), starts[begins, labels])
    return begins.tolist(), ends.tolist(), labels.tolist(), values


def _lowest(scores: Float32Array, begins: _Places, ends: _Places, labels: _Places) -> Float32Array:
    """Return the lowest score of each span, given `[words, labels]`.

    A span is two parts of a power of two of its words, which may overlap.
    """
    lowest = np.empty(len(begins), np.float32)
    sizes, length = ends - begins + 1, 1
    while len(scores):
        of_length = np.flatnonzero((length <= sizes) & (sizes < 2 * length))
        column = labels[of_length]
        lowest[of_length] = np.minimum(
            scores[begins[of_length], column], scores[ends[of_length] + 1 - length, column]
        )
        # [words - 2 · length + 1, labels] the lowest of twice as many words
        scores = np.minimum(scores[:-length], scores[length:])
        length *= 2
    return lowest


def _check_count(count: int, row: int) -> None:
    if count > MAX_CANDIDATES:
        raise RequestError(
            f"row {row}: {count} spans have scores above the threshold; allowed: {MAX_CANDIDATES}. Send a"
            " higher threshold, or fewer labels"
        )


def new_filter(words: int, *, is_flat: bool, multi_label: bool = False) -> "_Flat | _Nested":
    """Return what takes spans of a text, and none that overlaps those before it.

    Args:
        is_flat: whether no two spans share a word; else one may contain another one.
        multi_label: whether a span may be taken twice.
    """
    return _Flat(words, multi_label) if is_flat else _Nested(multi_label)


class _Flat:
    """The spans that were taken; no two share a word."""

    def __init__(self, words: int, multi_label: bool) -> None:
        self._ends = [-1] * words
        self._begins = [-1] * words
        self._multi_label = multi_label

    def take(self, begin: int, end: int) -> bool:
        """Return whether a span was free, and take it."""
        if self._begins[begin] == begin and self._ends[begin] == end:
            return self._multi_label
        part = slice(begin, end + 1)
        if max(self._ends[part]) >= 0:
            return False
        self._ends[part] = [end] * (end + 1 - begin)
        self._begins[part] = [begin] * (end + 1 - begin)
        return True


class _Nested:
    """The spans that were taken; one may contain another one."""

    def __init__(self, multi_label: bool) -> None:
        self._multi_label = multi_label
        self._taken: set[tuple[int, int]] = set()
        # of spans that begin at a word the furthest end, and of those that end there the furthest beginning
        self._ends: dict[int, int] = {}
        self._begins: dict[int, int] = {}

    def take(self, begin: int, end: int) -> bool:
        if (begin, end) in self._taken:
            return self._multi_label
        crosses = any(self._ends.get(word, -1) > end for word in range(begin + 1, end + 1)) or any(
            self._begins.get(word, begin) < begin for word in range(begin, end)
        )
        if crosses:
            return False
        self._taken.add((begin, end))
        self._ends[begin] = max(end, self._ends.get(begin, -1))
        self._begins[end] = min(begin, self._begins.get(end, begin))
        return True


DEFAULT_ANSWERS = 1
MAX_ANSWERS = 100
DEFAULT_ANSWER_TOKENS = 15
MAX_ANSWER_TOKENS = 512


class ContextAnswer(TypedDict):
    """A part of a context that answers a question.

    `score` is the probability of its beginning and its end, summed over equal texts; `start` and `end` are its first
    character and the one behind its last. An answer without characters says that the context has none.
    """

    score: float
    start: int
    end: int
    answer: str


@dataclass(frozen=True, slots=True)
class ContextWindow:
    """A part of a context that is read with its question as one prompt.

    Attributes:
        first: place in the prompt of the first token of the context.
        starts, ends: `[tokens]` int32, where an answer begins or ends that begins or ends with a token of the context:
            its first character, and the one behind its last.
        others: `[others]` int32, places of other tokens that share the probability: the first one, which says that
            there is no answer, and its copies.
    """

    first: int
    starts: Int32Array
    ends: Int32Array
    others: Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionForm:
    """What a request asks of its questions and their answers.

    Attributes:
        max_answer_len: longest answer, in tokens.
        align_to_words: whether answers begin and end with whole words.
        max_seq_len: longest window of a context with its question, in tokens; None is 384, or the longest sequence.
        doc_stride: tokens of the context that two windows share; None is 128, or half a window.
    """

    top_k: int = DEFAULT_ANSWERS
    max_answer_len: int = DEFAULT_ANSWER_TOKENS
    handle_impossible_answer: bool = False
    align_to_words: bool = True
    max_seq_len: int | None = None
    doc_stride: int | None = None

    def check(self) -> None:
        check_count("top_k", self.top_k, MAX_ANSWERS)
        check_count("max_answer_len", self.max_answer_len, MAX_ANSWER_TOKENS)
        if self.max_seq_len is not None:
            check_count("max_seq_len", self.max_seq_len, MAX_INT32)
        if self.doc_stride:
            check_count("doc_stride", self.doc_stride, MAX_INT32)

    def answers(
        self, context: str, windows: Sequence[ContextWindow], logits: Sequence[Float32Array]
    ) -> list[ContextAnswer]:
        """Return the answers of a context, the best first.

        There is none if the context has no tokens. Answers whose texts differ only in case are one.

        Args:
            logits: `[tokens, 2]` fp32 of each window, of beginnings and ends.
        """
        # some become one answer
        most = 2 * self.top_k + 10 if self.align_to_words else self.top_k
        found: dict[str, ContextAnswer] = {}
        nothing = np.inf
        for window, each in zip(windows, logits, strict=True):
            begins, ends, scores, without = self._best(window, each, most)
            nothing = min(nothing, without)
            for begin, end, score in zip(begins, ends, scores, strict=True):
                start, stop = int(window.starts[begin]), int(window.ends[end])
                text = context[start:stop]
                first = found.setdefault(
                    text.lower(), {"score": 0.0, "start": start, "end": stop, "answer": text}
                )
                first["score"] += score
        answers = list(found.values())
        if self.handle_impossible_answer:
            answers.append({"score": nothing, "start": 0, "end": 0, "answer": ""})
        answers.sort(key=lambda each: -each["score"])
        return answers[: self.top_k]

    def _best(
        self, window: ContextWindow, logits: Float32Array, most: int
    ) -> tuple[list[int], list[int], list[float], float]:
        """Return first token, last token and score of answers, and the score of none.

        Only scores above zero count. Tokens are counted from the first one of the context.
        """
        count, others = len(window.starts), len(window.others)
        places = np.concatenate([window.others, window.first + np.arange(count)])
        begins, ends = scores_of(logits[places].T, "softmax")
        nothing = float(begins[0] * ends[0]) if others else 0.0
        if not count:
            return [], [], [], nothing
        width = min(self.max_answer_len, count)
        later = np.concatenate([ends[others:], np.zeros(width - 1, np.float32)])
        # [tokens, width], by the first token and the length
        scores = begins[others:, None] * np.lib.stride_tricks.sliding_window_view(later, width)
        flat = scores.ravel()
        best = np.arange(len(flat))
        if most < len(flat):
            best = np.argpartition(-flat, most - 1)[:most]
        best = best[flat[best] > 0]
        best = best[np.lexsort((best, -flat[best]))]
        first, length = np.divmod(best, width)
        return first.tolist(), (first + length).tolist(), flat[best].tolist(), nothing


def answers_json(answers: Sequence[ContextAnswer]) -> bytes:
    """Return answers as JSON."""
    return json.dumps(answers, ensure_ascii=False, separators=(",", ":")).encode()
