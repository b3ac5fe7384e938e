"""A running model and its sandbox, for the server's model class and in process."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from tokenizers import Tokenizer

from varlen.config import EngineConfig
from varlen.decoding.grammar.grammars import grammar_tokens
from varlen.decoding.text.chat import ChatTemplate, template_setup
from varlen.execution.executor import ModelExecutor
from varlen.execution.model_info import generation_limit, text_limit
from varlen.intake.checks import Intake
from varlen.intake.pool import TokenizerPool
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.notes import checkpoint_notes
from varlen.processes import trim_heap
from varlen.request.request import Reply, Request
from varlen.sandbox.limits import SandboxLimits
from varlen.sandbox.process import Sandbox
from varlen.scheduling.admission import Admission
from varlen.scheduling.engine import Engine
from varlen.tasks import Task
from varlen.telemetry.metrics import MetricsSnapshot, SnapshotMetric, Stats

_log = logging.getLogger(__name__)

MEGABYTE = 1e6


class Kind(Protocol):
    """What differs between models of one step and models that generate."""

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        config: EngineConfig,
        stats: Stats,
        opened: ExitStack,
        *,
        gpu: int,
        isolated: bool,
    ) -> "Service[Any]":
        """Return the model, warmed up, with an engine that is not started yet; see `Service.load`.

        `opened` closes the opened resources if the load fails.
        """

    def submit(self, request: Request, reply: Reply) -> None:
        """Answer a request, now or later. Any thread may call this.

        Raises:
            VarlenError: the request is not admitted; the caller answers it. See `Engine.submit`.
        """

    def metrics(self) -> MetricsSnapshot:
        """Return the values of gauges and totals of this kind of model. From any thread."""

    def release(self) -> None:
        """Release what the executor runs."""

    def log_loaded(self, checkpoint: Checkpoint, config: EngineConfig, seconds: float) -> None:
        """Log what was loaded in this time."""


_Kind = TypeVar("_Kind", bound=Kind)


@dataclass(frozen=True, slots=True)
class Service(Generic[_Kind]):
    """A running model, whose engine is started.

    Attributes:
        sandbox: processes of the chat template and of grammars.
        queues: requests that wait for something else before the engine.
    """

    checkpoint: Checkpoint
    task: Task
    intake: Intake
    admission: Admission
    engine: Engine
    executor: ModelExecutor
    sandbox: Sandbox
    model: _Kind
    queues: Sequence[TokenizerPool] = ()

    @classmethod
    def load(
        cls,
        kind: type[_Kind],
        folder: str | Path,
        config: EngineConfig,
        stats: Stats,
        *,
        gpu: int = 0,
        isolated: bool = False,
    ) -> "Service[_Kind]":
        """Return the model of a checkpoint folder, warmed up.

        Args:
            kind: `EncoderParts` or `GeneratorParts`.
            stats: gets the counts of the engine.
            isolated: whether workers on a CPU are processes, whose faults stay theirs, instead of threads.

        Raises:
            CheckpointError: the checkpoint is incomplete or of a kind that is not served.
            ConfigError: a setting does not fit the checkpoint.
        """
        began = time.monotonic()
        checkpoint = Checkpoint.open(folder, **config.of_checkpoint)
        with ExitStack() as opened:
            service = kind.load(checkpoint, config, stats, opened, gpu=gpu, isolated=isolated)
            # nothing fails from here on
            opened.pop_all()
        # converting weights leaves free memory in the heap
        trim_heap()
        service.engine.start()
        for queue in service.queues:
            queue.start()
        service.model.log_loaded(checkpoint, config, time.monotonic() - began)
        return service

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted; False for good after a fault of the device."""
        return self.engine.is_ready

    @property
    def waiting_requests(self) -> int:
        """Number of requests that wait for tokenization, a grammar or a batch."""
        return self.admission.depth[0] + sum(queue.depth[0] for queue in self.queues)

    def snapshot(self) -> MetricsSnapshot:
        """Return the values of all gauges and totals. From any thread."""
        return {
            SnapshotMetric.QUEUED_REQUESTS: self.waiting_requests,
            SnapshotMetric.QUEUED_TOKENS: self.admission.depth[1],
            SnapshotMetric.QUEUED_SECONDS: self.admission.queued_seconds,
            SnapshotMetric.SLOTS: self.admission.slots,
            **self.model.metrics(),
        }

    def close(self) -> bool:
        """Run what is queued, then stop.

        Returns:
            Whether all memory was released. False after the GPU has hung: its process should end.
        """
        for queue in self.queues:
            queue.close()
        self.engine.close()
        is_idle = self.executor.close()
        if is_idle:
            self.model.release()
        self.sandbox.close()
        return is_idle


def log_notes(
    checkpoint: Checkpoint,
    task: Task,
    longest: int,
    limits: Sequence[str],
    *,
    keeps_codes: bool,
) -> None:
    """Log what a user should know of a checkpoint, and limits below its own.

    Args:
        longest: its longest sequence, in tokens.
    """
    for note in (*checkpoint_notes(checkpoint, task, longest, keeps_codes=keeps_codes), *limits):
        _log.warning("%s", note)


def template_sandbox(
    checkpoint: Checkpoint,
    config: EngineConfig,
    *,
    max_characters: int,
    tokens: Callable[[], Mapping[str, object] | None] = lambda: None,
) -> tuple[Sandbox, ChatTemplate | None]:
    """Return a sandbox that renders the chat template of a checkpoint, if it has one.

    Args:
        tokens: returns what compiles grammars, if anything does.
    """
    templates = checkpoint.chat_templates

    def setup() -> Mapping[str, object]:
        template = None
        if templates:
            template = template_setup(
                templates, checkpoint.special_tokens, max_characters=max_characters
            )
        return {"tokens": tokens(), "template": template}

    sandbox = Sandbox(setup, SandboxLimits(config.sandbox_seconds, config.sandbox_bytes))
    if not templates:
        return sandbox, None
    return sandbox, ChatTemplate(sandbox, [*templates], max_characters=max_characters)


def generation_sandbox(
    checkpoint: Checkpoint,
    config: EngineConfig,
    tokenizer: Tokenizer,
    ends: Collection[int],
) -> tuple[Sandbox, ChatTemplate | None]:
    """Return a sandbox that also compiles grammars, whose answers end with one of these tokens."""

    def tokens() -> Mapping[str, object] | None:
        # a search has no grammar
        is_searched = checkpoint.translate is not None
        return (
            None if is_searched else grammar_tokens(tokenizer, checkpoint.target_vocab_size, ends)
        )

    most = text_limit(config, generation_limit(checkpoint, config))
    return template_sandbox(checkpoint, config, max_characters=most, tokens=tokens)
