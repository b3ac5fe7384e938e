"""Parts of contexts that answer questions: `question_answer`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np
from typing_extensions import Unpack

from varlen_client.tasks.answers import RowAnswers, RowOutput
from varlen_client.tasks.command import Command, Flag, shown_score
from varlen_client.tasks.row_task import Asked, ModelOptions, RowTask, method
from varlen_client.wire import Pairs


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


class QuestionMethods:
    """Methods for questions."""

    @method
    def question_answer(
        self, pairs: Pairs, **options: Unpack[QuestionOptions]
    ) -> Asked[list[list[ContextAnswer]]]:
        """Return the answers to each question, parts of its context, the best first.

        A row is a question and its context; see `QuestionOptions`. Errors are the same as in `embed`.
        """
        return QUESTION_ANSWER.of(pairs, options)
