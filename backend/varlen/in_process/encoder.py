"""The engine in process, without a server: a few lines in any Python program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from varlen.config import RerankForm
from varlen.errors import ConfigError, RequestError
from varlen.in_process.model import InProcess, ModelSettings, config_of
from varlen.intake.checks import TokenIds
from varlen.intake.found import ContextWindows, Found, SpanTexts
from varlen.intake.long_texts import LongTextForm, LongTexts
from varlen.intake.tokenization import Text
from varlen.parameter import check_count
from varlen.request.request import (
    Float32Array,
    Output,
    Prompt,
    Request,
    RequestOptions,
    split_outputs,
)
from varlen.request.row_parameters import NO_PREFIX, ROW_PARAMETERS, RowParameters, TextPrefix
from varlen.request.schema import read_schema
from varlen.request.spans import (
    DEFAULT_ANSWER_TOKENS,
    DEFAULT_ANSWERS,
    DEFAULT_THRESHOLD,
    ContextAnswer,
    QuestionForm,
    Span,
    read_labels,
)
from varlen.request.vectors import (
    DEFAULT_TOP_K,
    FilledToken,
    SparseVector,
    VectorForm,
    largest_top_k,
    read_spans,
    sparse_vector,
)
from varlen.service.one_shot import EncoderParts
from varlen.service.service import Service
from varlen.tasks import Task
from varlen.telemetry.metrics import Stats

if TYPE_CHECKING:
    from typing_extensions import Unpack

Inputs: TypeAlias = Sequence[Text] | Sequence[TokenIds]

_NO_ANSWER: Float32Array = np.empty(0, dtype=np.float32)


class EncoderSettings(ModelSettings, total=False):
    """Settings of an `Encoder`; docs/reference/configuration.md describes them."""

    task: Task | None
    outputs: str
    rerank_form: RerankForm
    max_batch_tokens: int
    arena_bytes: int | str
    response_cache_bytes: int
    response_cache_seconds: int
    warmup_seconds: int


@dataclass(frozen=True, slots=True)
class _Cut:
    """How texts are cut.

    Attributes:
        max_tokens: length to which texts are cut, also without `truncate`; None is the longest sequence.
    """

    truncate: bool
    max_tokens: int | None


class Encoder(InProcess):
    """A loaded encoder. Thread-safe: sequences of several threads share batches.

    Inputs are texts, pairs of texts (tuples), or rows of token ids. A text that is too long is an
    error unless `truncate`.
    """

    _service: Service[EncoderParts]

    @classmethod
    def from_pretrained(cls, folder: str | Path, **settings: Unpack[EncoderSettings]) -> Encoder:
        """Return the encoder of a Hugging Face checkpoint folder, ready to run.

        Args:
            folder: holds config.json, tokenizer.json and safetensors weights.
            settings: see docs/reference/configuration.md.

        Raises:
            CheckpointError: the checkpoint is incomplete or of a kind that is not served.
            ConfigError: a setting is out of range or does not fit the checkpoint.
        """
        return cls(
            Service.load(EncoderParts, folder, config_of(settings, EncoderSettings), Stats())
        )

    @property
    def task(self) -> Task:
        """The task of the model."""
        return self._service.task

    def embed(
        self,
        inputs: Inputs,
        *,
        normalize: bool | None = None,
        truncate: bool = False,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        instruction: str | None = None,
        prompt: str | None = None,
        dimensions: int | None = None,
        spans: Sequence[tuple[int, int]] | None = None,
        windows: bool = False,
        window_overlap: int | None = None,
    ) -> Float32Array:
        """Return one vector per input, `[inputs, features]` fp32, or one per span.

        Args:
            inputs: texts or rows of token ids.
            normalize: divide each vector by its length; None takes the checkpoint's default.
            truncate: cut texts that are too long.
            truncate_prompt_tokens: cut texts to this many tokens, special tokens included; no `truncate` is needed.
            prompt_name: name of the checkpoint's prompt to put before texts; None selects its default.
            instruction: task in words, in the place of the prompt's own.
            prompt: text to put before texts, instead of a prompt of the checkpoint.
            dimensions: number of first dimensions to keep, normalized again; None keeps all.
            spans: parts of the only text, first character and the first behind it, that have a vector each.
            windows: read texts that are longer than the model in windows.
            window_overlap: tokens that two windows share; None is 256, or a quarter of a window.

        Raises:
            RequestError: an input cannot be served; the message names its row. Or there is no such prompt, or the
                model has fewer features.
        """
        checkpoint = self._service.checkpoint
        normalize = checkpoint.normalize if normalize is None else normalize
        form = VectorForm(dimensions, normalize)
        form.check(checkpoint.vector_size("embed"))
        cut = _Cut(truncate, truncate_prompt_tokens)
        prefix = TextPrefix(prompt_name, None, instruction, prompt)
        if spans is None and not windows and window_overlap is None:
            vectors = np.stack(self._run(("embed",), inputs, cut, normalize, prefix))
            return form.of(vectors)
        self._check_task("embed")
        if truncate or truncate_prompt_tokens is not None:
            raise RequestError(
                "spans and windows are parts of whole texts; leave truncate and truncate_prompt_tokens out"
            )
        _check_is_list(inputs)
        read = None if spans is None else read_spans(spans)
        given = LongTextForm(read, windows, window_overlap, normalize)
        long = LongTexts(self._service.intake, inputs, given, prefix)
        prompts = tuple(prompt for step in long.steps for prompt in step.run())
        return form.of(long.vectors(self._asked(("embed",), prompts, long.normalizes_parts)))

    def token_embed(
        self,
        inputs: Inputs,
        *,
        normalize: bool | None = None,
        truncate: bool = False,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
    ) -> list[Float32Array]:
        """Return the vectors of each input, `[vectors, features]` fp32, one for each token that has one.

        Args:
            inputs, normalize, truncate, truncate_prompt_tokens: see `embed`.
            prompt_name: "query", "document", or another prompt of the checkpoint; None takes its default one.

        Raises:
            RequestError: see `embed`.
        """
        normalize = self._service.checkpoint.normalize if normalize is None else normalize
        cut = _Cut(truncate, truncate_prompt_tokens)
        return self._run(("token_embed",), inputs, cut, normalize, TextPrefix(prompt_name))

    def sparse_embed(
        self,
        inputs: Inputs,
        *,
        truncate: bool = False,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        max_active_dims: int | None = None,
    ) -> list[SparseVector]:
        """Return the sparse vector of each input: terms of the vocabulary and their weights.

        Args:
            inputs, truncate, truncate_prompt_tokens, prompt_name: see `embed`.
            max_active_dims: number of largest weights to keep in a vector; None takes the checkpoint's number,
                or all.

        Raises:
            RequestError: see `embed`.
        """
        checkpoint = self._service.checkpoint
        if max_active_dims is not None:
            check_count("max_active_dims", max_active_dims, checkpoint.vocab_size)
        most = max_active_dims or checkpoint.splade.max_active_dims
        cut = _Cut(truncate, truncate_prompt_tokens)
        rows = self._run(("sparse_embed",), inputs, cut, prefix=TextPrefix(prompt_name))
        return [sparse_vector(row, most) for row in rows]

    def fill_mask(
        self,
        inputs: Inputs,
        *,
        top_k: int = DEFAULT_TOP_K,
        truncate: bool = False,
        truncate_prompt_tokens: int | None = None,
    ) -> list[list[list[FilledToken]]]:
        """Return the most likely tokens of each mask of each input, the most likely first.

        Args:
            inputs: texts or rows of token ids with 1 to 8 masks, such as "Paris is the [MASK] of France.".
            top_k: tokens of a mask, at most 100.
            truncate, truncate_prompt_tokens: see `embed`.

        Raises:
            RequestError: see `embed`.
        """
        check_count("top_k", top_k, largest_top_k(self._service.checkpoint.vocab_size))
        text = self._service.intake.token_text
        return [
            [
                [
                    FilledToken(int(token), text(int(token)), float(score))
                    for token, score in zip(*mask[:, :top_k].tolist(), strict=True)
                ]
                for mask in masks
            ]
            for masks in self._run(("fill_mask",), inputs, _Cut(truncate, truncate_prompt_tokens))
        ]

    def extract(
        self,
        texts: Sequence[str],
        labels: Sequence[str],
        *,
        threshold: float = DEFAULT_THRESHOLD,
        flat_ner: bool = True,
        multi_label: bool = False,
        truncate: bool = False,
        truncate_prompt_tokens: int | None = None,
    ) -> list[list[Span]]:
        """Return the spans of each text that have a label, by their beginnings.

        Args:
            texts: texts.
            labels: labels such as "person", the same for all texts.
            threshold: spans have scores above this.
            flat_ner: whether no two spans share a word; else a span may contain another one.
            multi_label: whether a span may have several labels.
            truncate, truncate_prompt_tokens: see `embed`; labels count.

        Raises:
            RequestError: see `embed`; or there are no labels, or too many.
        """
        found = self._span_texts(
            texts,
            labels=read_labels(labels),
            threshold=threshold,
            flat_ner=flat_ner,
            multi_label=multi_label,
            truncate=truncate,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        return found.answers(self._found(found))

    def extract_schema(
        self,
        texts: Sequence[str],
        schema: Mapping[str, Any],
        *,
        threshold: float = DEFAULT_THRESHOLD,
        flat_ner: bool = True,
        truncate: bool = False,
        truncate_prompt_tokens: int | None = None,
    ) -> list[dict[str, Any]]:
        """Return what a schema asks of each text, by name, of a model of GLiNER2.

        Args:
            texts: texts.
            schema: entities, classifications, structures and relations, as `Schema.from_dict` of gliner2 takes them.
            threshold: scores from it on count, unless the schema says another one.
            flat_ner: whether no two spans of a label share a word; else a span may contain another one.
            truncate, truncate_prompt_tokens: see `embed`; the schema counts.

        Raises:
            RequestError: see `embed`; or the schema is wrong or too large, or the model is of GLiNER.
        """
        found = self._span_texts(
            texts,
            schema=read_schema(schema),
            threshold=threshold,
            flat_ner=flat_ner,
            truncate=truncate,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        return found.results(self._found(found))

    def _span_texts(self, texts: Sequence[str], **given: Any) -> SpanTexts:
        self._check_task("extract")
        _check_is_list(texts)
        prompts = self._service.intake.word_prompts
        assert prompts is not None
        ROW_PARAMETERS["threshold"].check("threshold", given["threshold"])
        return SpanTexts(prompts, texts, RowParameters(**given))

    def question_answer(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        top_k: int = DEFAULT_ANSWERS,
        max_answer_len: int = DEFAULT_ANSWER_TOKENS,
        handle_impossible_answer: bool = False,
        align_to_words: bool = True,
        max_seq_len: int | None = None,
        doc_stride: int | None = None,
    ) -> list[list[ContextAnswer]]:
        """Return the answers to each question, parts of its context, the best first.

        Args:
            pairs: questions with their contexts.
            top_k: largest number of answers, at most 100.
            max_answer_len: longest answer, in tokens, at most 512.
            handle_impossible_answer: whether "no answer" is an answer too, which has no characters.
            align_to_words: whether answers begin and end with whole words.
            max_seq_len: longest window of a context with its question, in tokens; None is 384, or the longest sequence.
            doc_stride: tokens of a long context that two windows share; None is 128, or half a window.

        Raises:
            RequestError: see `embed`; or a context has too many windows.
        """
        self._check_task("question_answer")
        _check_is_list(pairs)
        form = QuestionForm(
            top_k=top_k,
            max_answer_len=max_answer_len,
            handle_impossible_answer=handle_impossible_answer,
            align_to_words=align_to_words,
            max_seq_len=max_seq_len,
            doc_stride=doc_stride,
        )
        intake = self._service.intake
        windows = ContextWindows(intake.tokenizer, intake.limits, pairs, form)
        return windows.answers(self._found(windows))

    def classify(
        self,
        inputs: Inputs,
        *,
        truncate: bool = False,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
    ) -> Float32Array:
        """Return the logits of each text or pair of texts, `[inputs, labels]` fp32.

        Args:
            inputs, truncate, truncate_prompt_tokens: see `embed`.
            instruction: task in words, for a reranker that reads one; None takes the checkpoint's.
        """
        cut, prefix = _Cut(truncate, truncate_prompt_tokens), TextPrefix(instruction=instruction)
        return np.stack(self._run(("classify", "rerank"), inputs, cut, prefix=prefix))

    def hidden(
        self,
        inputs: Inputs,
        *,
        truncate: bool = False,
        truncate_prompt_tokens: int | None = None,
    ) -> list[Float32Array]:
        """Return the last hidden state of each input, `[tokens, hidden]` fp32."""
        return self._run(("hidden",), inputs, _Cut(truncate, truncate_prompt_tokens))

    def token_classify(
        self,
        inputs: Inputs,
        *,
        truncate: bool = False,
        truncate_prompt_tokens: int | None = None,
    ) -> list[Float32Array]:
        """Return the logits of each token of each input, `[tokens, labels]` fp32."""
        return self._run(("token_classify",), inputs, _Cut(truncate, truncate_prompt_tokens))

    def outputs(
        self,
        inputs: Inputs,
        tasks: Sequence[Task],
        *,
        normalize: bool | None = None,
        truncate: bool = False,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
    ) -> list[dict[Task, Float32Array]]:
        """Return several outputs of each input, made in one pass, by their tasks.

        Args:
            inputs, normalize, truncate, truncate_prompt_tokens, prompt_name: see `embed`.
            tasks: the model's own task, or further outputs: its setting `outputs`.

        Returns:
            Per input and task: embed `[features]`; sparse_embed `[terms, 2]`, numbers of terms and their weights, the
            largest first; token_embed `[vectors, features]`; hidden `[tokens, hidden]`; classify, rerank `[labels]`;
            token_classify `[tokens, labels]`.

        Raises:
            ConfigError: the model has no such output.
            RequestError: see `embed`.
        """
        for task in tasks:
            self._check_task(task)
        normalize = self._service.checkpoint.normalize if normalize is None else normalize
        cut, wished = _Cut(truncate, truncate_prompt_tokens), tuple(dict.fromkeys(tasks))
        prompts = self._prompts(inputs, cut, TextPrefix(prompt_name))
        if wished == (self.task,):
            return [{self.task: row} for row in self._answers(prompts, normalize)]
        rows = self._answers(prompts, normalize, wished)
        return [dict(zip(wished, split_outputs(row), strict=True)) for row in rows]

    def _run(
        self,
        tasks: tuple[Task, ...],
        inputs: Inputs,
        cut: _Cut,
        normalize: bool = False,
        prefix: TextPrefix = NO_PREFIX,
    ) -> list[Float32Array]:
        self._check_task(*tasks)
        return self._asked(tasks, self._prompts(inputs, cut, prefix), normalize)

    def _asked(
        self, tasks: tuple[Task, ...], prompts: tuple[Prompt, ...], normalize: bool
    ) -> list[Float32Array]:
        if self.task in tasks:
            return self._answers(prompts, normalize)
        [task] = [task for task in tasks if task in self._service.model.info.outputs]
        return [split_outputs(row)[0] for row in self._answers(prompts, normalize, (task,))]

    def _check_task(self, *tasks: Task) -> None:
        if {self.task, *self._service.model.info.outputs}.isdisjoint(tasks):
            raise ConfigError(f'this encoder was loaded for the task "{self.task}", not {tasks[0]}')

    def _found(self, found: Found) -> list[Float32Array]:
        return self._answers(tuple(prompt for step in found.steps for prompt in step.run()))

    def _answers(
        self, prompts: tuple[Prompt, ...], normalize: bool = False, outputs: tuple[Task, ...] = ()
    ) -> list[Float32Array]:
        # neighbours of equal length share an attention call, so a long list is sorted
        order = sorted(range(len(prompts)), key=lambda i: prompts[i].num_tokens)
        reply = _FutureReply(len(order))
        options = RequestOptions(normalize, outputs, adapter=self._adapter)
        self._service.model.submit(Request(tuple(prompts[i] for i in order), options), reply)
        answers: list[Float32Array] = [_NO_ANSWER] * len(order)
        for index, row in zip(order, reply.rows.result(), strict=True):
            # cached answers are read-only; the caller may change its own
            answers[index] = row if row.flags.writeable else row.copy()
        return answers

    def _prompts(self, inputs: Inputs, cut: _Cut, prefix: TextPrefix) -> tuple[Prompt, ...]:
        _check_is_list(inputs)
        if len(inputs) and _is_text(inputs[0]):
            return self._service.intake.texts(
                cast(Sequence[Text], inputs),
                truncate=cut.truncate or cut.max_tokens is not None,
                max_tokens=cut.max_tokens,
                prefix=prefix,
            )
        prefix.check_has_texts()
        return self._service.intake.token_ids([_row(row, ids) for row, ids in enumerate(inputs)])


def _check_is_list(inputs: object) -> None:
    if isinstance(inputs, str):
        raise RequestError("inputs is one string; send a list of them")


def _is_text(value: object) -> bool:
    # a tuple may also be a row of ids
    return isinstance(value, str) or (
        isinstance(value, tuple) and any(isinstance(part, str) for part in value)
    )


def _row(row: int, ids: object) -> npt.NDArray[np.int64]:
    """Return one row of token ids, `[tokens]`, or raise RequestError."""
    try:
        array = np.asarray(ids)
    except ValueError:
        # rows of different lengths inside one row
        array = np.empty((), dtype=object)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise RequestError(f"row {row}: token ids are not a list of whole numbers; send one")
    return array.astype(np.int64)


class _FutureReply:
    def __init__(self, rows: int) -> None:
        self.rows: Future[list[Float32Array]] = Future()
        self._outputs = [_NO_ANSWER] * rows

    def is_cancelled(self) -> bool:
        return False

    def send(self, row: int, output: Output) -> None:
        assert isinstance(output, np.ndarray)
        self._outputs[row] = output

    def finish(self) -> None:
        self.rows.set_result(self._outputs)

    def fail(self, error: Exception) -> None:
        self.rows.set_exception(error)
