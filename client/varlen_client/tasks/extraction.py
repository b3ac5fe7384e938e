"""Parts of texts, with labels or for a schema: `extract`; for a question: `question_answer`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from typing_extensions import Unpack

from varlen_client.tasks.answers import ANY_WIDTH, RowAnswers, RowOutput, text_of
from varlen_client.tasks.command import Command, Flag, shown_score
from varlen_client.tasks.row_task import Asked, ModelOptions, RowOptions, RowTask, method
from varlen_client.wire import Pairs


class ExtractOptions(RowOptions, total=False):
    """Options of spans.

    labels: labels such as "person", for all rows; needed.
    threshold: return spans whose score is above this; by default 0.5.
    flat_ner: no two spans share a word, the default; with False a span may contain another one.
    multi_label: a span may have several labels; by default the one of the highest score.
    """

    labels: Sequence[str]
    threshold: float | None
    flat_ner: bool | None
    multi_label: bool | None


class SchemaOptions(RowOptions, total=False):
    """Options of schemas.

    schema: entities, classifications, structures and relations, as `Schema.from_dict` of gliner2 takes them; needed.
    threshold: scores from it on count, unless the schema says another one; by default 0.5.
    flat_ner: no two spans of a label share a word, the default; with False a span may contain another one.
    """

    schema: Mapping[str, Any]
    threshold: float | None
    flat_ner: bool | None


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


def _read_spans(answers: RowAnswers) -> list[list[Span]]:
    """Return the spans of each row in the order of their beginnings."""
    names = ("starts", "ends", "spans", "span_labels", "scores", "num_spans")
    return [
        [
            Span(start, end, text_of(text), text_of(label), score)
            for start, end, text, label, score in zip(
                *(array[row, :count].tolist() for array in arrays), strict=True
            )
        ]
        for *arrays, counts in answers.each(*names)
        for row, count in enumerate(counts[:, 0].tolist())
    ]


EXTRACT: RowTask[list[list[Span]]] = RowTask(
    "extract",
    ExtractOptions,
    (
        # a row may have no span
        RowOutput("starts", dtype=np.int32, width=ANY_WIDTH),
        RowOutput("ends", dtype=np.int32, width=ANY_WIDTH),
        RowOutput("spans", dtype=np.object_, width=ANY_WIDTH),
        RowOutput("span_labels", dtype=np.object_, width=ANY_WIDTH),
        RowOutput("scores", width=ANY_WIDTH),
        RowOutput("num_spans", dtype=np.int32),
    ),
    _read_spans,
    command=Command(
        task="extract",
        words=("extracts spans", "spans of labels", "a model of GLiNER"),
        summary="Print the spans of texts that have the labels (GLiNER).",
        details="A line per span, with its first character and the one behind its last.",
        synonyms="entities gliner ner pii spans",
        flags={
            "labels": Flag(
                list[str],
                "A label, such as person; give several.",
                ("--label", "-l"),
                default=...,
            ),
            "threshold": Flag(
                float | None, "Spans have scores above this; default: 0.5.", min=0, max=1
            ),
            "nested": Flag(bool, "A span may contain another one.", ("--nested",), default=False),
            "multi_label": Flag(
                bool, "A span may have several labels.", ("--multi-label",), default=False
            ),
        },
        sent=lambda *, nested, **given: {**given, "flat_ner": not nested},
        fields=lambda spans: {"spans": [asdict(each) for each in spans]},
        lines=lambda spans: [
            f"{each.start}-{each.end}  {each.label}  {shown_score(each.score)}  {each.text}"
            for each in spans
        ],
    ),
)


def _read_results(answers: RowAnswers) -> list[dict[str, Any]]:
    """Return what the schema asks of each row."""
    return [
        json.loads(text_of(text))
        for (results,) in answers.each("result")
        for text in results[:, 0].tolist()
    ]


EXTRACT_SCHEMA: RowTask[list[dict[str, Any]]] = RowTask(
    "extract_schema", SchemaOptions, (RowOutput("result", dtype=np.object_),), _read_results
)


class QuestionOptions(ModelOptions, total=False):
    """Options of questions, by the names of the pipeline of transformers.

    top_k: most answers of each question; by default 1.
    max_answer_len: longest answer, in tokens; by default 15.
    handle_impossible_answer: whether "no answer" is an answer too, without characters; False by default.
    align_to_words: answers begin and end with whole words, the default.
    max_seq_len: longest window of a context with its question, in tokens; by default 384, or the longest sequence.
    doc_stride: tokens of a long context that two windows share; by default 128, or half a window.
    """

    top_k: int | None
    max_answer_len: int | None
    handle_impossible_answer: bool | None
    align_to_words: bool | None
    max_seq_len: int | None
    doc_stride: int | None


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


def _read_context_answers(answers: RowAnswers) -> list[list[ContextAnswer]]:
    """Return the answers of each row, the best first."""
    return [
        [ContextAnswer(**each) for each in json.loads(row)]
        for row in answers.joined(answers.outputs[0])[:, 0]
    ]


# Its rows are pairs of a question and its context.
QUESTION_ANSWER: RowTask[list[list[ContextAnswer]]] = RowTask(
    "question_answer",
    QuestionOptions,
    (RowOutput("answers", dtype=np.object_),),
    _read_context_answers,
    takes_pairs=True,
    command=Command(
        task="question_answer",
        words=("answers questions", "answers to questions", "a model for questions"),
        summary="Print the parts of contexts that answer a question.",
        details="A line per answer, with its first character and the one behind its last.",
        synonyms="answer qa question question-answering squad",
        question="What is asked of each context.",
        texts="Contexts, each with an answer of its own.",
        file="Ask each line of this UTF-8 file; - is stdin.",
        json="Print one JSON object per context.",
        flags={
            "top_k": Flag(int | None, "Most answers of each context; default: 1.", min=1),
            "max_answer_len": Flag(int | None, "Longest answer in tokens; default: 15.", min=1),
            "handle_impossible_answer": Flag(
                bool | None, "No answer is an answer too.", ("--handle-impossible-answer",)
            ),
        },
        fields=lambda answers: {"answers": [asdict(each) for each in answers]},
        lines=lambda answers: [
            f"{each.start}-{each.end}  {shown_score(each.score)}  {each.answer or '(no answer)'}"
            for each in answers
        ],
    ),
)


class ExtractionMethods:
    """Methods for parts of texts."""

    @method
    def extract(
        self, inputs: Sequence[str], **options: Unpack[ExtractOptions]
    ) -> Asked[list[list[Span]]]:
        """Return the spans of each text that have a label, by their beginnings.

        For models of GLiNER; `labels` are an option, see `ExtractOptions`. Errors are the same as in `embed`.
        """
        return EXTRACT.of(inputs, options)

    @method
    def extract_schema(
        self, inputs: Sequence[str], **options: Unpack[SchemaOptions]
    ) -> Asked[list[dict[str, Any]]]:
        """Return what a schema asks of each text, by name.

        For models of GLiNER2; `schema` is an option, see `SchemaOptions`. Errors are the same as in `embed`.
        """
        return EXTRACT_SCHEMA.of(inputs, options)

    @method
    def question_answer(
        self, pairs: Pairs, **options: Unpack[QuestionOptions]
    ) -> Asked[list[list[ContextAnswer]]]:
        """Return the answers to each question, parts of its context, the best first.

        A row is a question and its context; see `QuestionOptions`. Errors are the same as in `embed`.
        """
        return QUESTION_ANSWER.of(pairs, options)
