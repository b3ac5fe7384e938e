"""Outputs of row calls, their check, and the answers that are read from them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen_client.errors import ServerError
from varlen_client.wire import Floats, ModelInfo

# One output of a request, with a row per row of the request.
Output: TypeAlias = npt.NDArray[Any]
Vectors: TypeAlias = npt.NDArray[Any]

# The last dimension of an output whose rows decide it.
ANY_WIDTH = -1


@dataclass(frozen=True, slots=True)
class RowOutput:
    """One requested output.

    Attributes:
        rank: number of its dimensions, without the rows.
        dtype: dtype of its elements; object for strings.
        width: its last dimension; None takes the one in the model's config, where -1 is any.
        packs: features in one element.
    """

    name: str
    rank: int = 1
    dtype: type[np.generic] = np.float32
    width: int | None = None
    packs: int = 1

    def of_model(self, method: str, info: ModelInfo) -> RowOutput:
        """Return this output with its width.

        Raises:
            InvalidRequest: the model does not have it.
        """
        width = info.width(method, self.name, rank=self.rank)
        width = width if self.width is None else self.width
        return replace(self, width=width if width == ANY_WIDTH else -(-width // self.packs))

    def checked(self, array: Output | None, rows: int) -> Output:
        """Return an array if it has the expected shape and dtype.

        Raises:
            ServerError: it is missing, or has another shape or dtype.
        """
        if not isinstance(array, np.ndarray):
            raise ServerError(f"the response has no output {self.name}")
        width = array.shape[-1] if self.width == ANY_WIDTH else self.width
        fits = array.ndim == self.rank + 1 and (array.shape[0], array.shape[-1]) == (rows, width)
        if not fits or array.dtype != self.dtype:
            raise ServerError(
                f"{self.name} is {array.dtype} {list(array.shape)}; expected"
                f" {np.dtype(self.dtype).name} with {rows} rows of {self.width} values in"
                f" {self.rank + 1} dimensions"
            )
        return array


TOKEN_COUNTS = RowOutput("num_tokens", dtype=np.int32)


@dataclass(frozen=True, slots=True)
class RowAnswers:
    """The outputs of all requests of a call.

    Attributes:
        outputs: requested outputs, with the widths of the model.
        requests: the checked outputs of each request, by name and in order.
    """

    outputs: tuple[RowOutput, ...]
    options: Mapping[str, Any]
    requests: Sequence[Mapping[str, Output]]

    @property
    def num_tokens(self) -> int | None:
        """Number of tokens of all rows; None if it was not requested."""
        if all(output.name != TOKEN_COUNTS.name for output in self.outputs):
            return None
        return sum(int(request[TOKEN_COUNTS.name].sum()) for request in self.requests)

    def each(self, *names: str) -> Iterator[tuple[Output, ...]]:
        """Yield these outputs of each request, whose rows are padded."""
        for request in self.requests:
            yield tuple(request[name] for name in names)

    def joined(self, output: RowOutput) -> Output:
        """Return an output of all rows in one array, [rows, width]."""
        if not self.requests:
            return np.empty((0, max(output.width or 0, 0)), output.dtype)
        return np.concatenate([request[output.name] for request in self.requests])


@dataclass(frozen=True, slots=True)
class LabelScore:
    """A label of a classifier and its score for a row."""

    label: str
    score: float


@dataclass(frozen=True, slots=True)
class Ranking:
    """The scores of documents and their order.

    Attributes:
        scores: [documents] fp32, in the order of the documents.
        best_first: [documents], indices of the documents in the order of their logits, the largest first. Scores of
            different logits may be equal.
    """

    scores: Floats
    best_first: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SparseVector:
    """The terms of a text and their weights, the largest weight first.

    Attributes:
        indices: [terms] int32, numbers of the terms in the model's vocabulary.
        values: [terms] fp32, their weights, all positive.
        terms: their texts, if they were asked for.
    """

    indices: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]
    terms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FilledToken:
    """A token that may take the place of a mask.

    Attributes:
        token_id, text: number and text of the token.
        score: probability of the token.
    """

    token_id: int
    text: str
    score: float


@dataclass(frozen=True, slots=True)
class TokenLabel:
    """A token and its best label.

    Attributes:
        token: text as the tokenizer writes it, such as "[CLS]", "##ing" or "▁London".
        label: name of its best label.
        score: score of this label.
    """

    token: str
    label: str
    score: float


@dataclass(frozen=True, slots=True)
class Span:
    """A span of a text that has a label of the call.

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
class Entity:
    """A span of a text with a label.

    Attributes:
        label: name of the label; without aggregation also its B- or I-.
        score: probability of the label.
        word: text as the tokenizer joins its tokens.
        start, end: first character of the text in the span, and the first one behind it.
        index: number of the token, without aggregation; else None.
    """

    label: str
    score: float
    word: str
    start: int
    end: int
    index: int | None = None


@dataclass(frozen=True, slots=True)
class ContextAnswer:
    """A part of a context that answers a question.

    Attributes:
        score: probability of its beginning and its end.
        start, end: its first character in the context, and the one behind its last.
        answer: its characters; none where the context has no answer.
    """

    score: float
    start: int
    end: int
    answer: str


def read_context_answers(answers: RowAnswers) -> list[list[ContextAnswer]]:
    """Return the answers of each row, the best first."""
    return [
        [ContextAnswer(**each) for each in json.loads(row)]
        for row in answers.joined(answers.outputs[0])[:, 0]
    ]


def read_entities(answers: RowAnswers) -> list[list[Entity]]:
    """Return the entities of each row."""
    return [
        [
            Entity(
                each["entity_group"] if "entity_group" in each else each["entity"],
                each["score"],
                each["word"],
                each["start"],
                each["end"],
                each.get("index"),
            )
            for each in json.loads(row)
        ]
        for row in answers.joined(answers.outputs[0])[:, 0]
    ]


def read_matrix(answers: RowAnswers) -> Output:
    """Return the first output, [rows, width]."""
    return answers.joined(answers.outputs[0])


def read_column(answers: RowAnswers) -> Floats:
    """Return the first output, whose width is 1, as [rows]."""
    return read_matrix(answers)[:, 0]


def read_ranking(answers: RowAnswers) -> Ranking:
    """Return the scores and their order; the second output is the logits."""
    scores, logits = (answers.joined(output)[:, 0] for output in answers.outputs[:2])
    return Ranking(scores, np.argsort(-logits, kind="stable"))


def read_arrays(answers: RowAnswers) -> list[Floats]:
    """Return the first output of each request of one row, without the batch dimension."""
    return [output[0].copy() for (output,) in answers.each(answers.outputs[0].name)]


def read_labels(answers: RowAnswers) -> list[list[LabelScore]]:
    """Return the labels of each row with their scores, the best `top_k` first."""
    # [rows, labels] each
    scores, labels, logits = (answers.joined(output) for output in answers.outputs[:3])
    order = np.argsort(-logits, axis=1, kind="stable")[:, : answers.options.get("top_k")]
    return [
        [LabelScore(_text(labels[row, at]), float(scores[row, at])) for at in best]
        for row, best in enumerate(order)
    ]


def read_sparse_vectors(answers: RowAnswers) -> list[SparseVector]:
    """Return the vector of each row, with texts of terms if they were requested."""
    vectors = []
    for request in answers.requests:
        for row, count in enumerate(request["num_terms"][:, 0].tolist()):
            terms = request["terms"][row, :count] if "terms" in request else ()
            # not views, which would keep the whole response alive
            indices, values = (request[name][row, :count].copy() for name in ("indices", "values"))
            vectors.append(SparseVector(indices, values, tuple(map(_text, terms))))
    return vectors


def read_filled_masks(answers: RowAnswers) -> list[list[list[FilledToken]]]:
    """Return the tokens of each mask of each row."""
    return [
        [
            [
                FilledToken(token_id, _text(text), score)
                for token_id, text, score in zip(ids, texts, values, strict=True)
            ]
            for ids, texts, values in zip(
                token_ids[row, :count].tolist(),
                tokens[row, :count].tolist(),
                scores[row, :count].tolist(),
                strict=True,
            )
        ]
        for token_ids, tokens, scores, counts in answers.each(
            "token_ids", "tokens", "scores", "num_masks"
        )
        for row, count in enumerate(counts[:, 0].tolist())
    ]


def read_spans(answers: RowAnswers) -> list[list[Span]]:
    """Return the spans of each row in the order of their beginnings."""
    names = ("starts", "ends", "spans", "span_labels", "scores", "num_spans")
    return [
        [
            Span(start, end, _text(text), _text(label), score)
            for start, end, text, label, score in zip(
                *(array[row, :count].tolist() for array in arrays), strict=True
            )
        ]
        for *arrays, counts in answers.each(*names)
        for row, count in enumerate(counts[:, 0].tolist())
    ]


def read_token_labels(answers: RowAnswers) -> list[list[TokenLabel]]:
    """Return each row's tokens with their best labels."""
    rows = []
    names = ("scores", "labels", "tokens", "num_tokens", "logits")
    for scores, labels, tokens, counts, logits in answers.each(*names):
        best = logits.argmax(axis=2)  # [rows, tokens]
        rows += [
            [
                TokenLabel(
                    _text(tokens[row, at]), _text(labels[row, label]), float(scores[row, at, label])
                )
                for at, label in enumerate(best[row, :count])
            ]
            for row, count in enumerate(counts[:, 0].tolist())
        ]
    return rows


def _text(text: bytes) -> str:
    return text.decode(errors="replace")
