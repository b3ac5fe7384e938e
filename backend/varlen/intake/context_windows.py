"""Questions with their contexts to prompts: a long context is read in windows that overlap.

Source: the library tokenizers divides contexts so (`truncate_encodings` with `OnlySecond`, `Encoding::truncate`), as
`QuestionAnsweringPipeline` of transformers 4.57 asks for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding

from varlen.errors import RequestError
from varlen.intake.tokenization import Tokenizer
from varlen.parameter import refuse
from varlen.request.request import Float32Array, Int32Array, Prompt, TokenizationTask, steps_of
from varlen.request.row_parameters import RowParameters, TruncationSide
from varlen.request.spans import (
    DEFAULT_ANSWERS,
    ContextAnswer,
    ContextWindow,
    QuestionForm,
    answers_json,
)

if TYPE_CHECKING:
    from varlen.intake.checks import Intake
    from varlen.intake.long_texts import InputLimits

_WINDOW_TOKENS, _STRIDE_TOKENS = 384, 128
# Windows of a row, and tokens of all of them.
MAX_WINDOWS = 512
MAX_WINDOW_TOKENS = 1 << 17

_Places = npt.NDArray[np.intp]


class ContextWindows:
    """Makes the prompts of questions, and keeps where their answers are; see `found.Found`.

    Attributes:
        windows: windows of each row, once the steps have run.
    """

    needs: ClassVar[str] = "text, the question, and text_pair, its context"

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: InputLimits,
        pairs: Sequence[tuple[str, str]],
        form: QuestionForm,
    ) -> None:
        """Check the texts and the numbers.

        Args:
            pairs: question and context of each row.

        Raises:
            RequestError: a text is empty or too long, or a number is out of range; the message names it.
        """
        form.check()
        # nothing cuts a context
        self._limits = replace(limits, can_truncate=False)
        self._sizes = self._limits.check_texts(pairs)
        for row, pair in enumerate(pairs):
            if isinstance(pair, str):
                raise RequestError(f"row {row}: the context is missing; send a pair of two texts")
            for name, text in zip(("question", "context"), pair, strict=True):
                if not text:
                    raise RequestError(f"row {row}: the {name} is empty; send a text")
        longest = min(
            limits.max_sequence_tokens, limits.max_arena_tokens or limits.max_sequence_tokens
        )
        self._max_tokens = form.max_seq_len or min(_WINDOW_TOKENS, longest)
        if self._max_tokens > longest:
            refuse("max_seq_len", self._max_tokens, f"whole numbers from 1 to {longest}")
        self._stride = form.doc_stride
        if self._stride is None:
            self._stride = min(_STRIDE_TOKENS, self._max_tokens // 2)
        if self._stride > self._max_tokens:
            refuse(
                "doc_stride",
                self._stride,
                f"whole numbers from 0 to {self._max_tokens} (max_seq_len)",
            )
        self._tokenizer = tokenizer
        self._form = form
        self._pairs = pairs
        self.windows: list[tuple[ContextWindow, ...]] = [()] * len(pairs)

    @classmethod
    def check(cls, given: RowParameters) -> RowParameters:
        if given.is_cut or given.truncation_side is not None:
            raise RequestError(
                "the request cuts texts, and this model reads a long context in windows; leave truncate,"
                " truncate_prompt_tokens and truncation_side out (max_seq_len is the length of a window)"
            )
        return given

    @classmethod
    def of(cls, texts: Sequence[Any], given: RowParameters, intake: Intake) -> ContextWindows:
        form = QuestionForm(
            top_k=given.top_k or DEFAULT_ANSWERS,
            max_answer_len=given.max_answer_len,
            handle_impossible_answer=given.handle_impossible_answer,
            align_to_words=given.align_to_words,
            max_seq_len=given.max_seq_len,
            doc_stride=given.doc_stride,
        )
        return cls(intake.tokenizer, intake.limits, texts, form)

    @property
    def steps(self) -> tuple[TokenizationTask, ...]:
        """The steps that make a prompt for each window.

        A step raises RequestError for a question or a context that is too long.
        """
        return steps_of(
            self._sizes, lambda rows: tuple(each for row in rows for each in self._prompts(row))
        )

    def answers(self, outputs: Sequence[Float32Array]) -> list[list[ContextAnswer]]:
        """Return the answers of each row, the best first.

        Args:
            outputs: `[tokens, 2]` fp32 of each prompt.
        """
        return [
            self._form.answers(context, windows, outputs[part])
            for (_, context), windows, part in zip(
                self._pairs, self.windows, self._prompts_of_rows(), strict=True
            )
        ]

    def tensors(self, outputs: Sequence[Float32Array]) -> Mapping[str, npt.NDArray[Any]]:
        texts = [answers_json(row) for row in self.answers(outputs)]
        return {"answers": np.array(texts, dtype=np.object_)[:, None]}

    def count(self, tokens: Sequence[int]) -> list[int]:
        return [sum(tokens[part]) for part in self._prompts_of_rows()]

    def _prompts_of_rows(self) -> list[slice]:
        bounds = np.cumsum([0, *map(len, self.windows)]).tolist()
        return [slice(begin, end) for begin, end in pairwise(bounds)]

    def _prompts(self, row: int) -> list[Prompt]:
        encoding, types = self._tokenizer.encode_whole(self._pairs[row])
        ids = np.array(encoding.ids, np.int32)
        if not len(ids):
            raise RequestError(
                f"row {row}: the question and the context have no tokens; send characters that the tokenizer reads"
            )
        self._limits.check_ids(row, "text", ids, types)
        places = np.flatnonzero(np.array([each == 1 for each in encoding.sequence_ids]))
        first, count = (int(places[0]), len(places)) if len(places) else (len(ids), 0)
        words, offsets = _words(encoding, first, count)
        prompts, windows = [], []
        for part in self._parts(row, len(ids) - count, count):
            kept = np.r_[:first, first + part.start : first + part.stop, first + count : len(ids)]
            starts, ends = offsets[part].T
            if self._form.align_to_words:
                starts, ends = _aligned(words[part], starts, ends)
            others = (
                np.flatnonzero(ids[kept] == ids[0]) if encoding.special_tokens_mask[0] else kept[:0]
            )
            is_other = (others < first) | (others >= first + len(starts))
            windows.append(ContextWindow(first, starts, ends, others[is_other].astype(np.int32)))
            prompts.append(Prompt(ids[kept], None if types is None else types[kept]))
        self.windows[row] = tuple(windows)
        return prompts

    def _parts(self, row: int, others: int, count: int) -> list[slice]:
        room, stride = self._max_tokens - others, self._stride
        assert stride is not None
        if count <= room:
            return [slice(0, count)]
        if room <= stride:
            raise RequestError(
                f"row {row}: the question leaves {max(0, room)} tokens for the context in a window of"
                f" {self._max_tokens} (max_seq_len), and two windows share {stride} (doc_stride); send a shorter"
                " question, a larger max_seq_len or a smaller doc_stride"
            )
        parts = overlapping(
            count,
            room,
            stride,
            size=self._max_tokens,
            named=(f"row {row}: the context", "doc_stride"),
        )
        side: TruncationSide = self._tokenizer.side
        if side == "left":
            # the first window is the end of the context
            parts = [slice(count - part.stop, count - part.start) for part in parts]
        return parts


def overlapping(
    count: int, room: int, overlap: int, *, size: int, named: tuple[str, str]
) -> list[slice]:
    """Return the tokens of each window of a text.

    Args:
        room: tokens of the text in a window.
        overlap: tokens that two windows share, less than `room`.
        size: tokens of a window with all others.
        named: names of the text and of the parameter of the overlap, for the error.

    Raises:
        RequestError: these are too many windows.
    """
    step = room - overlap
    number = 1 + max(0, -(-(count - room) // step))
    if number > MAX_WINDOWS or number * size > MAX_WINDOW_TOKENS:
        text, parameter = named
        raise RequestError(
            f"{text} has {count} tokens, which are {number} windows of {size} tokens; allowed: {MAX_WINDOWS} windows"
            f" with {MAX_WINDOW_TOKENS} tokens. Send a smaller {parameter}, or the {text.split()[-1]} in parts"
        )
    return [slice(at * step, min(at * step + room, count)) for at in range(number)]


def _words(encoding: Encoding, first: int, count: int) -> tuple[_Places, Int32Array]:
    """Return word and bounds of each token of a context.

    Returns:
        `[tokens]`, the number of the word, -1 for none; and `[tokens, 2]` int32, its characters.
    """
    kept = slice(first, first + count)
    words = [-1 if word is None else word for word in encoding.word_ids[kept]]
    return (
        np.array(words, np.intp),
        np.array(encoding.offsets[kept], np.int32).reshape(count, 2),
    )


def _aligned(words: _Places, starts: Int32Array, ends: Int32Array) -> tuple[Int32Array, Int32Array]:
    """Return the bounds of the word of each token in its window."""
    # words are in order
    if not len(words) or words.min() < 0:
        return starts, ends
    first = np.searchsorted(words, words, "left")
    last = np.searchsorted(words, words, "right") - 1
    return starts[first], ends[last]
