"""Scheduling state: an admitted request, its sequences, and the batch in which they run.

The engine's thread owns all of it. An encoder's sequence runs once; a generated one runs until a stopping rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from varlen.costs.batch_shape import BatchShape
from varlen.errors import VarlenError
from varlen.request.generation import GenerationOptions
from varlen.request.request import (
    FinishReason,
    Float32Array,
    GeneratedPart,
    Output,
    Prompt,
    Reply,
    Request,
    RequestOptions,
    TokenLogprobs,
)

Status: TypeAlias = Literal["waiting", "running", "finished"]
Failure: TypeAlias = Literal["memory", "batch", "worker", "model", "skipped"]
# Of a batch: one, or all since it ran alone, or both in turn.
Cores: TypeAlias = Literal["one", "all", "both"]


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected run time of a request, in seconds.

    Attributes:
        seconds: the sum over its sequences of their part of a full batch.
        batch_seconds: a full batch of sequences like its longest, which may have to run before the answer.
        least_seconds: its run time if nothing else runs, where that is longer than `seconds`.
        part_before: part of the waiting work that runs before it.
    """

    seconds: float = 0.0
    batch_seconds: float = 0.0
    least_seconds: float = 0.0
    part_before: float = 1.0


@dataclass(slots=True, eq=False)
class RequestState:
    """An admitted request and its progress.

    Attributes:
        request, reply: the request, and the receiver of its answer.
        arrival: arrival time of the request, in seconds of the engine's clock, as are all times here.
        deadline: time after which the answer is useless; infinity if there is none.
        forecast: expected run time, when it was admitted.
        sequences: one per prompt, or per sample of a prompt, in order; empty once it is answered.
        seconds_per_token: expected run time of its sequences, by token.
        unfinished: number of sequences that are not finished.
        started: whether any sequence has run or runs.
        crashes: number of worker processes that ended while they ran a step with one of its sequences.
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
    crashes: int = 0

    def __post_init__(self) -> None:
        prompts = self.request.prompts
        options = self.request.options.generation
        if options is None:
            self.sequences = tuple(
                SequenceState(self, row, prompt, len(prompt.token_ids))
                for row, prompt in enumerate(prompts)
            )
        else:
            samples = [(prompt, sample) for prompt in prompts for sample in range(options.n)]
            self.sequences = tuple(
                GeneratedSequence(self, row, prompt, len(prompt.token_ids), sample=sample)
                for row, (prompt, sample) in enumerate(samples)
            )
        self.unfinished = len(self.sequences)
        self.seconds_per_token = self.forecast.seconds / self.request.num_tokens

    @property
    def is_finished(self) -> bool:
        """Whether all its sequences are finished."""
        return not self.unfinished


def unanswered_sequences(request: Request) -> tuple[SequenceState, ...]:
    """Return the sequences of a request that has no client, to run a model with."""
    return RequestState(request, cast(Reply, None), 0.0).sequences


@dataclass(slots=True, eq=False)
class SequenceState:
    """One prompt of a request and its state.

    Attributes:
        request: the request that it belongs to.
        row: its row in the answer.
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
    def may_run_again(self) -> bool:
        """Whether more of it has to run than what runs now."""
        return self.status == "waiting"

    @property
    def options(self) -> RequestOptions:
        """Options of its request."""
        return self.request.request.options

    def finish(self) -> None:
        """Mark it as finished; it is not scheduled again."""
        if self.status != "finished":
            self.status = "finished"
            self.request.unfinished -= 1


class OutputWriter(Protocol):
    """Turns the tokens of one sequence into its answer, and knows when it ends."""

    def write(self, output: SampledToken | BeamAnswer) -> GeneratedPart:
        """Return the part that a token adds, perhaps without text, or a whole answer."""


@dataclass(slots=True, eq=False)
class GeneratedSequence(SequenceState):
    """A sequence that grows by a token in each step.

    Attributes:
        sample: its number among the samples of its prompt.
        token_ids: the prompt, then what was generated.
        num_computed: number of its tokens whose keys and values are stored when the steps in flight have run.
        num_unknown: number of tokens that steps in flight choose.
        block_ids: its block table.
        writer: set by the engine when it is submitted.
        sampler_state: kept by the sampler, or the search, from one token to the next.
        is_searched: whether its answer is searched with beams, one or more; else its tokens are sampled.
    """

    sample: int = 0
    token_ids: list[int] = field(init=False)
    num_computed: int = 0
    num_unknown: int = 0
    block_ids: list[int] = field(default_factory=list)
    writer: OutputWriter = field(init=False)
    sampler_state: object = field(default=None, init=False)
    is_searched: bool = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = self.prompt.token_ids.tolist()
        self.is_searched = self.generation.is_search or self.prompt.num_source_tokens > 0

    def finish(self) -> None:
        """Mark it as finished, and release what its tokens were chosen with.

        A step that holds beams of a search may still run.
        """
        SequenceState.finish(self)
        if not self.is_searched:
            self.sampler_state = None

    @property
    def generation(self) -> GenerationOptions:
        """Generation options of its request."""
        options = self.options.generation
        assert options is not None
        return options

    @property
    def first_sample(self) -> tuple[RequestState, int]:
        """The request, and the row of the first sample of its prompt."""
        return self.request, self.row - self.sample

    @property
    def length(self) -> int:
        """Number of tokens of the prompt and of the answer, unknown ones included."""
        return len(self.token_ids) + self.num_unknown

    @property
    def num_generated(self) -> int:
        """Number of generated tokens that are known."""
        return len(self.token_ids) - self.num_tokens

    @property
    def may_run_again(self) -> bool:
        """Whether it is not finished."""
        return self.status != "finished"


NewWriter: TypeAlias = Callable[[GeneratedSequence], OutputWriter]


class Chunk(NamedTuple):
    """Tokens of one sequence that run in one step.

    A tuple, because a step may have hundreds, and a frozen dataclass takes four times as long to make.

    Attributes:
        sequence: the sequence.
        start: position of the first of these tokens.
        token_ids: the tokens, at least one; their keys and values are stored.
        block_ids: block table of the sequence up to these tokens.
        samples: the sequences that take a token from the logits of the last of these tokens; none in the middle of a
            prompt, several for the samples of one prompt.
        source_block_ids: blocks of the keys and values of its source text.
        encodes: the tokens of that text if it is encoded in this step, before these tokens.
        follows: output of the step before that is the only token, by number; `token_ids` has 0 in its place.
    """

    sequence: GeneratedSequence
    start: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    samples: tuple[GeneratedSequence, ...]
    source_block_ids: tuple[int, ...] = ()
    encodes: tuple[int, ...] = ()
    follows: int | None = None

    @property
    def num_generated(self) -> int:
        """Number of tokens of the answer up to the last of these tokens."""
        return self.start + len(self.token_ids) - self.sequence.num_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Sequences that run together: decided by the scheduler, run by the executor.

    Attributes:
        sequences: one or more sequences, in any order.
        shape: sizes that decide the cost.
        seconds: expected run time.
        reason: reason for these sequences, for the log.
    """

    sequences: tuple[SequenceState, ...]
    shape: BatchShape
    seconds: float
    reason: str

    @property
    def prompts(self) -> list[Prompt]:
        """The prompt of each sequence."""
        return [sequence.prompt for sequence in self.sequences]

    @property
    def options(self) -> list[RequestOptions]:
        """The options of each sequence."""
        return [sequence.options for sequence in self.sequences]

    @property
    def num_outputs(self) -> int:
        """Number of outputs of its result."""
        return len(self.sequences)


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch(Batch):
    """One step of generation.

    Attributes:
        chunks: one per sequence of the batch, in its order; chunks of one token come first.
        copies: (source, destination) blocks to copy before the step.
        number: its number among all steps.
        after: number of the step that was in flight when this one was scheduled. If that one fails, this one must not
            run.
    """

    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...] = ()
    number: int = 0
    after: int | None = None

    @property
    def num_outputs(self) -> int:
        """Number of tokens that are sampled."""
        return sum(len(chunk.samples) for chunk in self.chunks)

    @property
    def sampled(self) -> tuple[list[GeneratedSequence], list[int]]:
        """The sequence of each token that is sampled, and the length of its answer."""
        chunks = self.chunks
        sequences = [sequence for chunk in chunks for sequence in chunk.samples]
        lengths = [chunk.num_generated for chunk in chunks for _ in chunk.samples]
        return sequences, lengths


class Draws(NamedTuple):
    """What the tokens of a step are drawn with, if nothing else changes their choice.

    Attributes:
        limits: temperature, top-k, top-p and min-p of each row.
        uniform: `[rows]` fp64, a random number from 0 to below 1 for each; None if all temperatures are 0.
    """

    limits: Sequence[tuple[float, int, float, float]]
    uniform: npt.NDArray[np.float64] | None


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token that was chosen for a sequence.

    Attributes:
        token_id: the token.
        logprobs: log probabilities, if the request asks for them.
        error: reason why no token could be chosen; ends the request.
        is_pending: whether no token could be chosen yet; the same token is computed again in the next step.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: VarlenError | None = None
    is_pending: bool = False


@dataclass(frozen=True, slots=True)
class BeamAnswer:
    """One of the answers that a beam search has found.

    Attributes:
        token_ids: generated tokens, with the end token.
        score: sum of log probabilities, divided by the length penalty.
        finish_reason: whether it ended with an end token, or at `max_tokens`.
    """

    token_ids: tuple[int, ...]
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class BeamStep:
    """What one step of a beam search has chosen.

    Attributes:
        parents: parent index of each new beam; none once the search has ended.
        token_ids: token appended to each beam.
        answers: set once the search has ended: the best first. There are fewer than the request asks for, perhaps none,
            only if its rules allow fewer.
        error: reason why the search cannot go on; ends the request.
    """

    parents: tuple[int, ...]
    token_ids: tuple[int, ...]
    answers: tuple[BeamAnswer, ...] | None = None
    error: VarlenError | None = None


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The result of a batch.

    Attributes:
        outputs: one per sequence of the batch, in its order; of a step, one per sequence that samples, chunk by chunk,
            where all beams of a search have the same one; empty after an error.
        seconds: run time.
        padding_tokens: number of padding tokens that ran.
        failure: reason why there are no outputs: memory ran out, this batch failed, the worker process ended and its
            KV memory is lost, the model cannot run any more, or the step before, which this one needs, failed.
        cores: cores that it ran on, where workers have one core each.
    """

    outputs: Sequence[Float32Array] | Sequence[SampledToken | BeamStep]
    seconds: float
    padding_tokens: int = 0
    failure: Failure | None = None
    cores: Cores = "one"


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """A part of an answer; the sequence goes on unless it is finished."""

    sequence: SequenceState
    output: Output


@dataclass(frozen=True, slots=True)
class SequenceFailure:
    """A sequence that has no answer, which ends its request."""

    sequence: SequenceState
    error: VarlenError


Event: TypeAlias = SequenceOutput | SequenceFailure
