"""A running model: what models of one step and models that generate share."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from varlen.execution.executor import ModelExecutor
from varlen.intake.checks import Intake
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.notes import checkpoint_notes
from varlen.request.request import Reply, Request
from varlen.scheduling.admission import Admission
from varlen.scheduling.engine import Engine
from varlen.tasks import Task
from varlen.telemetry.metrics import MetricsSnapshot, SnapshotMetric

_log = logging.getLogger(__name__)

MEGABYTE = 1e6


@dataclass(frozen=True, slots=True)
class RunningModel(ABC):
    """A running model. The server's model class and the in-process API use it.

    Attributes:
        checkpoint: the loaded checkpoint.
        intake: checks inputs and makes prompts of them.
        admission: counts waiting work.
        engine: schedules requests; started.
        executor: runs batches.
    """

    checkpoint: Checkpoint
    intake: Intake
    admission: Admission
    engine: Engine
    executor: ModelExecutor

    @property
    @abstractmethod
    def task(self) -> Task:
        """The task of the model."""

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted; False for good after a fault of the device."""
        return self.engine.is_ready

    @property
    def waiting_requests(self) -> int:
        """Number of requests that wait to run, or for what they need to run."""
        return self.admission.depth[0]

    @abstractmethod
    def submit(self, request: Request, reply: Reply) -> None:
        """Answer a request, now or later. Any thread may call this.

        Raises:
            VarlenError: the request is not admitted; the caller answers it. See `Engine.submit`.
        """

    @abstractmethod
    def snapshot(self) -> MetricsSnapshot:
        """Return the values of all gauges and totals. From any thread."""

    @abstractmethod
    def release(self) -> None:
        """Release what the executor runs."""

    def close(self) -> bool:
        """Run what is queued, then stop.

        Returns:
            Whether all memory was released. False after the GPU has hung: its process should end.
        """
        self.engine.close()
        is_idle = self.executor.close()
        if is_idle:
            self.release()
        return is_idle

    def queue_metrics(self) -> MetricsSnapshot:
        """Return how much work waits."""
        return {
            SnapshotMetric.QUEUED_REQUESTS: self.waiting_requests,
            SnapshotMetric.QUEUED_TOKENS: self.admission.depth[1],
            SnapshotMetric.QUEUED_SECONDS: self.admission.queued_seconds,
            SnapshotMetric.SLOTS: self.admission.slots,
        }

    def log_notes(self, max_sequence_tokens: int, limits: Sequence[str]) -> None:
        """Log what a user should know of the checkpoint, and limits below its own."""
        notes = checkpoint_notes(self.checkpoint, self.task, max_sequence_tokens)
        for note in (*notes, *limits):
            _log.warning("%s", note)
