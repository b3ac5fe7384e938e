"""Words of a text, and the spans of words that a model finds for labels.

Source: the greedy choice of spans follows the library gliner (`greedy_search`, `has_overlapping`), as do the words of
a text (its splitter "whitespace").
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.errors import RequestError
from varlen.parameter import read_json, refuse
from varlen.request.request import Float32Array

DEFAULT_THRESHOLD = 0.5
# Labels of a request, and characters of one.
MAX_LABELS = 256
MAX_LABEL_CHARACTERS = 512
# Spans of a row whose scores exceed the threshold, before those that overlap are left out.
MAX_CANDIDATES = 1 << 14
LABELS_TEXT = (
    f"a list of 1 to {MAX_LABELS} strings with 1 to {MAX_LABEL_CHARACTERS} characters, none of them blank, or a text"
    " that holds one as JSON"
)

_WORD = re.compile(r"\w+(?:[-_]\w+)*|\S")


@dataclass(frozen=True, slots=True)
class Span:
    """A span of a text with its label.

    Attributes:
        start, end: its first character, and the one behind its last.
        text: its characters.
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
        texts: the text of each row.
        labels: labels, each once.
        threshold: scores above it count.
        flat_ner: whether no two spans share a word; else one may contain the other.
        multi_label: whether a span may have several labels.
        scores_words: whether scores are of words that begin, end or continue a span.
    """

    texts: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    threshold: float = DEFAULT_THRESHOLD
    flat_ner: bool = True
    multi_label: bool = False
    scores_words: bool = False

    def spans(self, row: int, scores: Float32Array) -> list[Span]:
        """Return the spans of a row in the order of their beginnings.

        Args:
            row: number of the row.
            scores: `[words · labels, columns]`, logits.

        Raises:
            RequestError: too many spans have scores above the threshold.
        """
        text, count = self.texts[row], len(self.labels)
        words = len(scores) // count
        probabilities = _sigmoid(scores.reshape(words, count, scores.shape[1]))
        find = _of_words if self.scores_words else _of_spans
        begins, ends, labels, found = find(probabilities, np.float32(self.threshold), row)
        order = np.argsort(-found, kind="stable").tolist()
        bounds = list(word_bounds(text, words))
        is_free = _Flat(words, self.multi_label) if self.flat_ner else _Nested(self.multi_label)
        kept = [each for each in order if is_free.take(begins[each], ends[each])]
        kept.sort(key=begins.__getitem__)
        return [
            self._span(text, bounds[begins[each]][0], bounds[ends[each]][1], labels[each], score)
            for each, score in zip(kept, found[kept].tolist(), strict=True)
        ]

    def _span(self, text: str, start: int, end: int, label: int, score: float) -> Span:
        return Span(start, end, text[start:end], self.labels[label], score)


def word_bounds(text: str, most: int) -> Iterator[tuple[int, int]]:
    """Yield where each of the first `most` words begins and ends, in characters."""
    for _, match in zip(range(most), _WORD.finditer(text), strict=False):
        yield match.span()


def read_labels(value: object) -> tuple[str, ...]:
    """Return the labels of a request, each once.

    Raises:
        RequestError: this is no list of labels.
    """
    given = read_json("labels", value) if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not all(map(_is_label, given)):
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


def _is_label(value: object) -> bool:
    if not isinstance(value, str) or len(value) > MAX_LABEL_CHARACTERS or not value.strip():
        return False
    # half a surrogate pair is no text
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


def _sigmoid(logits: Float32Array) -> Float32Array:
    with np.errstate(over="ignore"):
        result: Float32Array = np.float32(1) / (np.float32(1) + np.exp(-logits))
    return result


_Places = npt.NDArray[np.intp]
_Found = tuple[list[int], list[int], list[int], Float32Array]


def _of_spans(scores: Float32Array, threshold: np.float32, row: int) -> _Found:
    """Return first word, last word, label and score of each span of `[words, labels, width]`."""
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
        """Return whether a span was free, and take it."""
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
