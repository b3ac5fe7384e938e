"""Answers to questions that are parts of a context, read in windows.

Source: `QuestionAnsweringPipeline` of transformers 4.57 (src/transformers/pipelines/question_answering.py), whose
answers these are. Transformers 5 has no such pipeline.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from varlen.parameter import MAX_INT32, check_count
from varlen.request.request import Float32Array, Int32Array
from varlen.request.scores import scores_of

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
