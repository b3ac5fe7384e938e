"""Generation in process, without a server: a few lines in any Python program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, cast

import numpy as np

from varlen.config import GenerationDefaults, KvCacheDtype, KvPolicy, SpeculationMethod
from varlen.errors import RequestError
from varlen.in_process.model import InProcess, ModelSettings, config_of
from varlen.intake.checks import TokenIds
from varlen.request.generation import GenerationOptions
from varlen.request.request import (
    FinishReason,
    GeneratedPart,
    Output,
    Prompt,
    Request,
    RequestOptions,
    TokenLogprobs,
)
from varlen.scheduling.iteration.iteration import GenerationCounts
from varlen.service.generation import GeneratorParts
from varlen.service.service import Service
from varlen.telemetry.metrics import Stats

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True, slots=True)
class Generation:
    """A generated answer.

    Attributes:
        finish_reason: whether a stop condition held, or `max_tokens` was reached.
        logprobs: one per token, if they were asked for.
        score: score of an answer that a beam search has found.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()
    score: float | None = None


class GeneratorSettings(ModelSettings, total=False):
    """Settings of a `Generator`; docs/reference/configuration.md describes them."""

    max_running_sequences: int
    max_step_tokens: int
    inter_token_latency_ms: int
    kv_bytes: int | str
    kv_block_tokens: int
    kv_cache_dtype: KvCacheDtype
    kv_policy: KvPolicy
    prefix_cache: bool
    generation_config: GenerationDefaults
    speculation: SpeculationMethod
    num_speculative_tokens: int
    prompt_lookup_min: int
    draft_model: str


class Generator(InProcess):
    """A loaded decoder. Thread-safe: sequences of several threads share steps.

    Prompts are texts or rows of token ids. Options are the fields of `GenerationOptions`:
    `generator.generate(["Once"], max_tokens=32, temperature=0.0)`.
    """

    _service: Service[GeneratorParts]

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, **settings: Unpack[GeneratorSettings]
    ) -> Generator:
        """Return the generator of a Hugging Face checkpoint folder, ready to run.

        Args:
            folder: holds config.json, tokenizer.json and safetensors weights.
            settings: see docs/reference/configuration.md.

        Raises:
            CheckpointError: the checkpoint is incomplete or of a kind that is not served.
            ConfigError: a setting is out of range or does not fit the checkpoint.
        """
        return cls(
            Service.load(GeneratorParts, folder, config_of(settings, GeneratorSettings), Stats())
        )

    def generate(
        self, prompts: Sequence[str] | Sequence[TokenIds], **options: object
    ) -> list[Generation]:
        """Return the answers to each prompt, `n` per prompt, one after another.

        Raises:
            RequestError: a prompt or an option cannot be served; the message says why.
        """
        checked = self._service.model.options(options)
        if isinstance(prompts, str):
            raise RequestError("prompts is one string; send a list of them")
        if not len(prompts):
            return []
        answers = self.submit_all(prompts, checked)
        try:
            return answers.result()
        finally:
            # after an interrupt it would run on
            answers.cancel()

    def stream(self, prompt: str | TokenIds, **options: object) -> Iterator[GeneratedPart]:
        """Return an iterator of the parts of one answer; closing it stops the generation.

        Raises:
            RequestError: see `generate`, or there are several answers.
        """
        checked = self._service.model.options(options)
        if checked.n != 1:
            raise RequestError(f"n is {checked.n}; one answer can be streamed")
        parts: SimpleQueue[GeneratedPart | None] = SimpleQueue()
        answer = self.submit(prompt, checked, lambda _, part: parts.put(part))
        answer.add_done_callback(lambda _: parts.put(None))
        return _parts(parts, answer)

    def submit(
        self,
        prompt: str | TokenIds,
        options: GenerationOptions,
        on_part: Callable[[int, GeneratedPart], None] | None = None,
    ) -> Future[list[Generation]]:
        """Start to generate for one prompt; see `submit_all`."""
        return self.submit_all([prompt], options, on_part)

    def submit_all(
        self,
        prompts: Sequence[str | TokenIds],
        options: GenerationOptions,
        on_part: Callable[[int, GeneratedPart], None] | None = None,
    ) -> Future[list[Generation]]:
        """Start to generate; cancel the returned future to stop. A prompt that fails ends all.

        Args:
            prompts: texts, or rows of token ids; at least one.
            on_part: called with the number of the sample among all, and each part, in the engine's thread.

        Raises:
            RequestError: see `generate`.
        """
        reply = _FutureReply(options.n * len(prompts), on_part)
        request_options = RequestOptions(
            generation=options, streams=on_part is not None, adapter=self._adapter
        )
        request = Request(self._prompts(prompts), request_options)
        self._service.model.submit(request, reply)
        return reply.answers

    def snapshot(self) -> GenerationCounts:
        """Return how many sequences run and wait, the use of KV blocks, and totals."""
        return self._service.model.scheduler.snapshot()

    def _prompts(self, prompts: Sequence[str | TokenIds]) -> tuple[Prompt, ...]:
        intake = self._service.intake
        if any(isinstance(prompt, str) for prompt in prompts):
            return intake.texts(cast("Sequence[str]", prompts), truncate=False)
        return intake.token_ids([np.asarray(prompt, dtype=np.int64) for prompt in prompts])


def _parts(
    parts: SimpleQueue[GeneratedPart | None], answer: Future[list[Generation]]
) -> Iterator[GeneratedPart]:
    try:
        while (part := parts.get()) is not None:
            yield part
        # raises if the request failed
        answer.result()
    finally:
        answer.cancel()


class _FutureReply:
    def __init__(self, rows: int, on_part: Callable[[int, GeneratedPart], None] | None) -> None:
        self.answers: Future[list[Generation]] = Future()
        self._parts: list[list[GeneratedPart]] = [[] for _ in range(rows)]
        self._on_part = on_part

    def is_cancelled(self) -> bool:
        return self.answers.cancelled()

    def send(self, row: int, output: Output) -> None:
        assert isinstance(output, GeneratedPart)
        self._parts[row].append(output)
        if self._on_part is not None:
            self._on_part(row, output)

    def finish(self) -> None:
        if self.answers.set_running_or_notify_cancel():
            self.answers.set_result([_join(parts) for parts in self._parts])

    def fail(self, error: Exception) -> None:
        if self.answers.set_running_or_notify_cancel():
            self.answers.set_exception(error)


def _join(parts: Sequence[GeneratedPart]) -> Generation:
    reason = parts[-1].finish_reason
    assert reason is not None
    return Generation(
        text="".join(part.text for part in parts),
        token_ids=tuple(chain.from_iterable(part.token_ids for part in parts)),
        finish_reason=reason,
        logprobs=tuple(each for part in parts for each in part.logprobs),
        score=parts[-1].score,
    )
