"""Tasks that find parts of texts: prompts and answers of their requests.

A task of them is a class, and its line in `FOUND`.

A model that extracts spans has prompts of a mark and the text of each label, a separator, then the words of the text,
each tokenized apart. One of GLiNER2 begins with a schema, and its words are lower case. A word that has no tokens of
its own is read at the token before it. Where an encoder of their own reads labels, a prompt has only words.

A question has its context, which is read in windows that overlap where it is long.

Sources: prompts with labels follow `UniEncoderSpanProcessor` and `BaseBiEncoderProcessor` of the library gliner, and
`SchemaTransformer` of gliner2. The library tokenizers divides contexts so (`truncate_encodings` with `OnlySecond`,
`Encoding::truncate`), as `QuestionAnsweringPipeline` of transformers 4.57 asks for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding

from varlen.errors import CheckpointError, RequestError, shorten
from varlen.intake.tokenization import Text, Tokenizer
from varlen.models.checkpoint.extraction import CONFIG, ExtractionConfig, LabelEncoderConfig
from varlen.parameter import refuse
from varlen.request.request import (
    ApartLabels,
    Float32Array,
    Int32Array,
    Prompt,
    TokenizationTask,
    Words,
    steps_of,
)
from varlen.request.row_parameters import RowParameters, TruncationSide
from varlen.request.schema import SCHEMA_TEXT, TOKENS, PromptTexts, Schema, SchemaForm
from varlen.request.spans import (
    DEFAULT_ANSWERS,
    LABELS_TEXT,
    ContextAnswer,
    ContextWindow,
    QuestionForm,
    Scored,
    Span,
    SpanForm,
    answers_json,
    span_tensors,
    words_of,
)
from varlen.tasks import Task

if TYPE_CHECKING:
    from varlen.intake.checks import Intake
    from varlen.intake.long_texts import InputLimits

# Scores of a row: 16 MiB in fp32.
_MOST_SCORES = 1 << 22
# Tokens of the labels of a request that an encoder of their own reads.
_MOST_LABEL_TOKENS = 4096
# Labels of a probe that has none.
_PROBE_LABELS = ("a",)

_WINDOW_TOKENS, _STRIDE_TOKENS = 384, 128
# Windows of a row, and tokens of all of them.
MAX_WINDOWS = 512
MAX_WINDOW_TOKENS = 1 << 17

_Places = npt.NDArray[np.intp]


class ApartLabelTokens:
    """Makes the tokens of labels that an encoder of their own reads. Thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer, config: LabelEncoderConfig, limits: InputLimits
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = replace(limits, vocab_size=config.vocab_size)
        self._longest = min(config.longest, limits.max_arena_tokens or config.longest)

    def of(self, labels: Sequence[str]) -> list[Int32Array]:
        """Return the tokens of each label, cut to the longest one.

        Raises:
            RequestError: a label has no tokens, or they have too many.
        """
        found = [
            each.token_ids
            for each in self._tokenizer.encode(labels, truncate=True, max_tokens=self._longest)
        ]
        for label, ids in zip(labels, found, strict=True):
            if not len(ids):
                raise RequestError(f"the label {shorten(repr(label))} has no tokens; send words")
            self._limits.check_ids(0, "labels", ids, None)
        total = sum(map(len, found))
        if total > _MOST_LABEL_TOKENS:
            raise RequestError(
                f"labels have {total} tokens; allowed: {_MOST_LABEL_TOKENS}. Send fewer or shorter labels"
            )
        return found


class WordPrompts:
    """Makes the prompts of one model. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: ExtractionConfig,
        limits: InputLimits,
        labels: ApartLabelTokens | None = None,
    ) -> None:
        """Check the tokens of the prompt.

        Args:
            labels: makes tokens of labels, if they are no tokens of a text.

        Raises:
            CheckpointError: tokenizer.json has other tokens than gliner_config.json says.
        """
        token = tokenizer.find_token([config.label_mark])
        needed = TOKENS if config.reads_schema else ()
        missing = next((each for each in needed if tokenizer.find_token([each]) is None), None)
        if missing is not None:
            raise CheckpointError(
                f"tokenizer.json has no token {missing}, which prompts have; save the folder with the library gliner2"
                " again"
            )
        if config.label_token not in (None, token):
            raise CheckpointError(
                f"{CONFIG} has class_token_index {config.label_token}, which is not the token {config.label_mark} of"
                " tokenizer.json; save the folder with the library gliner again"
            )
        self._tokenizer, self._config, self._limits = tokenizer, config, limits
        self._labels = labels
        self._mark = token

    @property
    def scored(self) -> Scored:
        return self._config.scored

    @property
    def reads_schema(self) -> bool:
        """Whether it reads a schema; else only labels."""
        return self._config.reads_schema

    def steps(
        self,
        texts: Sequence[str],
        asked: Sequence[str] | Schema,
        *,
        truncate: bool,
        max_tokens: int | None = None,
    ) -> tuple[TokenizationTask, ...]:
        """Return the steps that make prompts of texts with labels, or with a schema.

        Args:
            asked: the same for all rows.
            truncate: whether texts that are too long lose their last words.
            max_tokens: length to which they are cut, with the labels; None is the longest.

        Raises:
            RequestError: a text is no text of `InputLimits`; a step raises it for a text that is too long.
        """
        before = self._before(asked)
        of_labels = sum(len(each.encode()) for each in (*before.names, *before.words))
        sizes = [of_labels + size for size in self._limits.check_texts(texts, truncate=truncate)]
        longest = self._limits.max_sequence_tokens
        if max_tokens is not None and not 1 <= max_tokens <= longest:
            refuse("truncate_prompt_tokens", max_tokens, f"whole numbers from 1 to {longest}")

        def tokenize(rows: range) -> tuple[Prompt, ...]:
            most = max_tokens or longest
            apart = None if self._labels is None else self._labels.of(before.names)
            return tuple(
                self._prompt(row, texts[row], before, apart, max_tokens=most, is_cut=truncate)
                for row in rows
            )

        return steps_of(sizes, tokenize)

    def _before(self, asked: Sequence[str] | Schema) -> _Before:
        if self._config.reads_schema:
            schema = asked if isinstance(asked, Schema) else Schema.of_labels(asked)
            made = schema.prompt()
            return _Before(made.texts, schema.choice_words, made)
        assert not isinstance(asked, Schema)
        if self._labels is not None:
            return _Before(asked, [], PromptTexts([], [], []))
        texts = [each for label in asked for each in (self._config.label_mark, label)]
        made = PromptTexts([*texts, *self._config.closing], [], list(range(0, len(texts), 2)))
        return _Before(asked, [], made)

    def _prompt(
        self,
        row: int,
        text: str,
        asked: _Before,
        apart: Sequence[Int32Array] | None,
        *,
        max_tokens: int,
        is_cut: bool,
    ) -> Prompt:
        """Return the prompt of a text.

        Args:
            apart: tokens of labels that an encoder of their own reads; None if they are tokens of the prompt.
            is_cut: whether a text that is too long loses its last words; else it is refused.

        Raises:
            RequestError: the text or the labels are too long, or a label of GLiNER holds the mark.
        """
        most_words = self._config.max_words
        words = words_of(text, most_words + 1, self._config.scored)
        if len(words) > most_words and not is_cut:
            raise RequestError(
                f"row {row}: text has more than {most_words} words; this model takes at most {most_words}"
                f"{self._limits.remedy}"
            )
        is_part = is_cut and len(text.encode()) > self._limits.max_text_bytes
        if is_part and len(words) <= most_words:
            self._limits.refuse_part(row, max_tokens)
        words = [*asked.words, *words[:most_words]]
        before = asked.prompt.texts
        ids, word_of_token = self._tokenizer.encode_words([*before, *words])
        kept = len(words)
        if len(ids) > max_tokens:
            if not is_cut:
                raise RequestError(
                    f"row {row}: {'text and labels have' if before else 'text has'} {len(ids)} tokens; this model takes"
                    f" at most {max_tokens}"
                    f"{self._limits.remedy}"
                )
            ids, word_of_token, kept = _cut(ids, word_of_token, len(before), max_tokens)
            if kept <= len(asked.words):
                self._refuse_labels(row, max_tokens)
        labels = asked.names if apart is not None or not before else asked.prompt.marks
        if before and not self.reads_schema:
            self._check_marks(row, ids[word_of_token < len(before)], asked.names)
        in_prompt = len(set(asked.prompt.marks))
        self._check_rows(row, kept, len(labels), in_prompt, len(ids))
        self._limits.check_ids(row, "text", ids, None)
        self._limits.check_arena(row, len(ids))
        places = self._places(word_of_token, len(before), kept)
        # a word without tokens has the place before it
        of_words = np.maximum.accumulate(places)[len(before) :]
        if apart is not None:
            return Prompt(ids, payload=ApartLabels.of(apart, np.maximum(of_words, 0)))
        prompt = asked.prompt
        marks = places[prompt.marks] + (0 if self._config.reads_mark else 1)
        instances = [(int(places[at]), number, size) for at, number, size in prompt.instances]
        return Prompt(ids, payload=Words.at(marks, of_words, instances))

    def _places(self, word_of_token: _Places, before: int, kept: int) -> Int32Array:
        """Return the token of each part of the prompt, -1 where it has none."""
        places = np.full(before + kept, -1, np.int32)
        tokens = np.flatnonzero(word_of_token >= 0)
        if self._config.subtoken == "first":
            # the first of equal indices is written last
            tokens = tokens[::-1]
        places[word_of_token[tokens]] = tokens
        return places

    def _check_marks(self, row: int, ids: Int32Array, labels: Sequence[str]) -> None:
        # the library takes each mark for a label
        if (ids == self._mark).sum() != len(labels):
            mark = self._config.label_mark
            wrong = next((each for each in labels if mark in each), labels[0])
            raise RequestError(
                f"row {row}: the label {shorten(repr(wrong))} holds the token {mark}; send it without"
            )

    def _check_rows(self, row: int, words: int, labels: int, in_prompt: int, tokens: int) -> None:
        # batches and their memory are planned for a token of each word, and of each label that is in the prompt
        if words + in_prompt > tokens:
            of_labels = f" and {in_prompt} labels" if in_prompt else ""
            raise RequestError(
                f"row {row}: {words} words{of_labels} have {tokens} tokens; allowed: a token for each. Send the text"
                " without control characters, which the tokenizer removes"
            )
        scores = words * labels * self._config.columns
        if scores > _MOST_SCORES:
            raise RequestError(
                f"row {row}: {words} words and {labels} labels have {scores} scores; allowed: {_MOST_SCORES}. Send"
                " fewer labels, or a shorter text"
            )

    def _refuse_labels(self, row: int, max_tokens: int) -> NoReturn:
        raise RequestError(
            f"row {row}: no token is left for the text; {max_tokens} tokens are read, labels included: send fewer"
            " labels, or a larger truncate_prompt_tokens"
        )


@dataclass(frozen=True, slots=True)
class _Before:
    """What is before each text of a request.

    Attributes:
        names: labels, or texts of the prompt.
    """

    names: Sequence[str]
    words: list[str]
    prompt: PromptTexts


class SpanTexts:
    """The texts of a request for spans; see `Found`."""

    needs: ClassVar[str] = "only text, and the parameter labels or schema"

    def __init__(
        self,
        prompts: WordPrompts,
        texts: Sequence[str],
        given: RowParameters,
    ) -> None:
        """Check the texts; errors are as in `WordPrompts.steps`.

        Raises:
            RequestError: the request has a schema, which the model does not read.
        """
        schema, labels, own = given.schema, given.labels or (), tuple(texts)
        self._has_schema = schema is not None
        self.form: SchemaForm | SpanForm
        if prompts.reads_schema:
            schema = schema or Schema.of_labels(labels)
            self.form = SchemaForm(own, schema, given.threshold, given.flat_ner)
        elif schema is not None:
            raise RequestError(
                "the request has a schema, which models of GLiNER2 read; this model finds spans: send labels"
            )
        else:
            self.form = SpanForm(
                own, labels, given.threshold, given.flat_ner, given.multi_label, prompts.scored
            )
        self.steps = prompts.steps(
            own, schema or labels, truncate=given.is_cut, max_tokens=given.truncate_prompt_tokens
        )

    @classmethod
    def check(cls, given: RowParameters) -> RowParameters:
        if given.probe and given.labels is None and given.schema is None:
            # one request probes models of every task
            given = replace(given, labels=_PROBE_LABELS)
        if given.labels is None and given.schema is None:
            raise RequestError(
                f"the request has no labels; send the parameter labels: {LABELS_TEXT}; or schema: {SCHEMA_TEXT}"
            )
        if given.labels is not None and given.schema is not None:
            raise RequestError(
                "the request has labels and a schema; send one of them: labels are entities of a schema"
            )
        if given.truncation_side == "left":
            raise RequestError("truncation_side is left; allowed with this model: right")
        return given

    @classmethod
    def of(cls, texts: Sequence[Any], given: RowParameters, intake: Intake) -> SpanTexts:
        assert intake.word_prompts is not None
        return cls(intake.word_prompts, texts, given)

    def count(self, tokens: Sequence[int]) -> Sequence[int]:
        return tokens

    def answers(self, outputs: Sequence[Float32Array]) -> list[list[Span]]:
        return [self.form.spans(row, scores) for row, scores in enumerate(outputs)]

    def results(self, outputs: Sequence[Float32Array]) -> list[dict[str, Any]]:
        if not self._has_schema or isinstance(self.form, SpanForm):
            return [{} for _ in outputs]
        return [self.form.result(row, scores) for row, scores in enumerate(outputs)]

    def tensors(self, outputs: Sequence[Float32Array]) -> Mapping[str, npt.NDArray[Any]]:
        """Return the spans of all rows, and what a schema asks of them."""
        results = [json.dumps(each, ensure_ascii=False).encode() for each in self.results(outputs)]
        column = np.array(results, dtype=np.object_)[:, None]
        return {**span_tensors(self.answers(outputs)), "result": column}


def _cut(
    ids: Int32Array, word_of_token: _Places, before: int, max_tokens: int
) -> tuple[Int32Array, _Places, int]:
    """Return the tokens of as many whole words as fit, and the number of words.

    Tokens that the tokenizer adds at the end stay.
    """
    last = int(np.flatnonzero(word_of_token >= 0).max(initial=-1)) + 1
    room = max_tokens - (len(ids) - last)
    # the word that has no room for all its tokens
    first_cut = int(word_of_token[room]) if 0 <= room < last else before
    is_kept = word_of_token < first_cut
    return ids[is_kept], word_of_token[is_kept], max(0, first_cut - before)


class ContextWindows:
    """Makes the prompts of questions, and keeps where their answers are; see `Found`.

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
                self._pairs, self.windows, slices_of(self.windows), strict=True
            )
        ]

    def tensors(self, outputs: Sequence[Float32Array]) -> Mapping[str, npt.NDArray[Any]]:
        texts = [answers_json(row) for row in self.answers(outputs)]
        return {"answers": np.array(texts, dtype=np.object_)[:, None]}

    def count(self, tokens: Sequence[int]) -> list[int]:
        return [sum(tokens[part]) for part in slices_of(self.windows)]

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


def slices_of(parts: Sequence[Sequence[object]]) -> list[slice]:
    """Return the place of the parts of each row among all of them."""
    bounds = np.cumsum([0, *map(len, parts)]).tolist()
    return [slice(*each) for each in pairwise(bounds)]


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


class Found(Protocol):
    """The rows of one request, and what is found in them.

    Attributes:
        needs: inputs of a request, in words.
    """

    needs: ClassVar[str]

    @classmethod
    def check(cls, given: RowParameters) -> RowParameters:
        """Return the parameters of a request; raises RequestError if they do not fit the task."""

    @classmethod
    def of(cls, texts: Sequence[Text], given: RowParameters, intake: Intake) -> Found:
        """Return the rows of a request with checked parameters.

        Raises:
            RequestError: a text cannot be served.
        """

    @property
    def steps(self) -> tuple[TokenizationTask, ...]:
        """The steps that make the prompts, each perhaps several for a row."""

    def count(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens of each row, given the tokens of each prompt."""

    def tensors(self, outputs: Sequence[Float32Array]) -> Mapping[str, npt.NDArray[Any]]:
        """Return the answers as tensors by name, given the output of each prompt."""


FOUND: Mapping[Task, type[Found]] = MappingProxyType(
    {"extract": SpanTexts, "question_answer": ContextWindows}
)
