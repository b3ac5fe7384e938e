"""Scheduling state: an admitted request, its sequences, and the batch in which they run.

The engine's thread owns all of it. An encoder's sequence runs once; a generated one runs until a stopping rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from varlen.costs.batch_shape import BatchShape
from varlen.errors import VarlenError
from varlen.request import Float32Array, Prompt, Reply, Request, RequestOptions

Status: TypeAlias = Literal["waiting", "running", "finished"]
Failure: TypeAlias = Literal["memory", "batch", "model"]


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected run time of a request, in seconds.

    Attributes:
        seconds: the sum over its sequences of their part of a full batch.
        batch_seconds: a full batch of sequences like its longest, which may have to run before the answer.
    """

    seconds: float = 0.0
    batch_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class RequestState:
    """An admitted request and its progress.

    Attributes:
        request, reply: what came, and where the answer goes.
        arrival: time of admission, in seconds of the engine's clock, as are all times here.
        deadline: time after which the answer is useless; infinity if there is none.
        forecast: expected run time, when it was admitted.
        sequences: one per prompt, in order; empty once it is answered.
        seconds_per_token: expected run time of its sequences, by token.
        unfinished: number of sequences that are not finished.
        started: whether any sequence has run or runs.
    """

    request: Request
    reply: Reply
    arrival: float
    deadline: float = math.inf
    forecast: Forecast = Forecast()
    sequences: tuple[SequenceState, ...] = field(init=False)
    seconds_per_token: float = field(init=False)
    unfinished: int = field(init=False)
    started: bool = False

    def __post_init__(self) -> None:
        prompts = self.request.prompts
        self.sequences = tuple(
            SequenceState(self, row, prompt, len(prompt.token_ids))
            for row, prompt in enumerate(prompts)
        )
        self.seconds_per_token = self.forecast.seconds / self.request.num_tokens
        self.unfinished = len(self.sequences)

    @property
    def is_finished(self) -> bool:
        """Whether all its sequences are finished."""
        return not self.unfinished


@dataclass(slots=True, eq=False)
class SequenceState:
    """One prompt of a request and its state.

    Attributes:
        request: the request that it belongs to.
        row: its row in that request.
        prompt: its tokens.
        num_tokens: length of the prompt.
        status: set by `finish`, and by the scheduler.
    """

    request: RequestState
    row: int
    prompt: Prompt
    num_tokens: int
    status: Status = "waiting"

    @property
    def options(self) -> RequestOptions:
        """Options of its request."""
        return self.request.request.options

    def finish(self) -> None:
        """Mark it as finished; it is not scheduled again."""
        if self.status != "finished":
            self.status = "finished"
            self.request.unfinished -= 1


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Sequences that run together: decided by the scheduler, run by the executor.

    Attributes:
        sequences: at least one, in any order.
        shape: what decides the cost.
        seconds: expected run time.
        reason: why these sequences, for the log.
    """

    sequences: tuple[SequenceState, ...]
    shape: BatchShape
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The result of a batch.

    Attributes:
        outputs: one per sequence of the batch, in its order; empty after an error.
        seconds: run time.
        padding_tokens: number of padding tokens that ran.
        failure: why there are no outputs: memory ran out, this batch failed, or the model cannot run any more.
    """

    outputs: list[Float32Array]
    seconds: float
    padding_tokens: int = 0
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """A part of an answer; the sequence goes on unless it is finished."""

    sequence: SequenceState
    output: Float32Array


@dataclass(frozen=True, slots=True)
class SequenceFailure:
    """A sequence that has no answer, which ends its request."""

    sequence: SequenceState
    error: VarlenError


Event: TypeAlias = SequenceOutput | SequenceFailure
