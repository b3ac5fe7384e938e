"""Texts and labels to the prompts of a model that extracts spans.

A prompt is a mark and the text of each label, a separator, then the words of the text, each tokenized apart. One of
GLiNER2 begins with a schema, and its words are lower case. A word that has no tokens of its own is read at the token
before it. Where an encoder of their own reads labels, a prompt has only words.
Sources: the prompt follows `UniEncoderSpanProcessor` and `BaseBiEncoderProcessor` of the library gliner, and
`SchemaTransformer` of gliner2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np
import numpy.typing as npt

from varlen.errors import CheckpointError, RequestError, shorten
from varlen.intake.tokenization import Tokenizer
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
from varlen.request.row_parameters import RowParameters
from varlen.request.schema import SCHEMA_TEXT, TOKENS, PromptTexts, Schema, SchemaForm
from varlen.request.spans import LABELS_TEXT, Scored, Span, SpanForm, span_tensors, words_of

if TYPE_CHECKING:
    from varlen.intake.checks import Intake
    from varlen.intake.long_texts import InputLimits

# Scores of a row: 16 MiB in fp32.
_MOST_SCORES = 1 << 22
# Tokens of the labels of a request that an encoder of their own reads.
_MOST_LABEL_TOKENS = 4096
# Labels of a probe that has none.
_PROBE_LABELS = ("a",)

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
    """The texts of a request for spans; see `found.Found`."""

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
    last = int(np.flatnonzero(word_of_token >= 0)[-1]) + 1
    room = max_tokens - (len(ids) - last)
    # the word that has no room for all its tokens
    first_cut = int(word_of_token[room]) if 0 <= room < last else before
    is_kept = word_of_token < first_cut
    return ids[is_kept], word_of_token[is_kept], max(0, first_cut - before)
