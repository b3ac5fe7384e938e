"""Scheduling state: an admitted request and its sequences, batches of them and their results.

The engine's thread owns all of it. An encoder's sequence runs once; a generated one runs until a stopping rule.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from typing import Literal, NamedTuple, Protocol, TypeAlias, cast

from varlen.costs.model import BatchShape
from varlen.errors import EngineError, VarlenError
from varlen.request.generation import GenerationOptions
from varlen.request.request import (
    Float32Array,
    GeneratedPart,
    Output,
    Prompt,
    Reply,
    Request,
    RequestOptions,
    new_tuple,
)
from varlen.scheduling.device_plan import BeamAnswer, BeamStep, SampledToken

Status: TypeAlias = Literal["waiting", "running", "finished"]
Failure: TypeAlias = Literal["memory", "adapter", "batch", "worker", "model", "skipped"]
# Steps of generation in flight without a pipeline: one runs, and the next one is ready.
MAX_STEPS = 2
# Cores of a batch: one, or all since it ran alone, or both in turn.
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
        arrival: arrival time of the request, in seconds of the engine's clock, as are all times here.
        deadline: time after which the answer is useless; infinity if there is none.
        forecast: expected run time, when it was admitted.
        seconds_per_token: expected run time of its sequences, by token.
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


def unanswered_sequences(request: Request) -> tuple[SequenceState, ...]:
    """Return the sequences of a request that has no client, to run a model with."""
    return RequestState(request, cast(Reply, None), 0.0).sequences


@dataclass(slots=True, eq=False)
class SequenceState:
    """One prompt of a request and its state."""

    request: RequestState
    row: int
    prompt: Prompt
    num_tokens: int
    status: Status = "waiting"

    @property
    def may_run_again(self) -> bool:
        """Whether it has tokens to run after the present batch."""
        return self.status == "waiting"

    @property
    def options(self) -> RequestOptions:
        return self.request.request.options

    def finish(self) -> None:
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
        num_unknown: number of tokens that steps in flight choose; of a search, of all tokens of a beam.
        block_ids: its block table, see `Chunk`.
        writer: set by the engine when it is submitted.
        sampler_state: kept by the sampler, or the search, from one token to the next.
        is_searched: whether its answer is searched with beams, one or more; else its tokens are sampled.
    """

    sample: int = 0
    generation: GenerationOptions = field(init=False)
    token_ids: list[int] = field(init=False)
    num_computed: int = 0
    num_unknown: int = 0
    block_ids: array[int] = field(default_factory=partial(array, "i"))
    writer: OutputWriter = field(init=False)
    sampler_state: object = field(default=None, init=False)
    is_searched: bool = field(init=False)

    def __post_init__(self) -> None:
        self.generation = cast(GenerationOptions, self.options.generation)
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
    def first_sample(self) -> tuple[RequestState, int]:
        """The request, and the row of the first sample of its prompt."""
        return self.request, self.row - self.sample

    @property
    def length(self) -> int:
        """Number of tokens of the prompt and of the answer, unknown ones included."""
        return len(self.token_ids) + self.num_unknown

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_tokens

    @property
    def may_run_again(self) -> bool:
        return self.status != "finished"


NewWriter: TypeAlias = Callable[[GeneratedSequence], OutputWriter]


class Chunk(NamedTuple):
    """Tokens of one sequence that run in one step.

    A tuple, because a step may have hundreds, and a frozen dataclass takes four times as long to make.

    Attributes:
        start: position of the first of these tokens.
        token_ids: the tokens, at least one; their keys and values are stored.
        block_ids: block table of the sequence up to these tokens, of 4 bytes each.
        samples: the sequences that take a token from the logits of the last of these tokens; none in the middle of a
            prompt, several for the samples of one prompt.
        source_block_ids: blocks of the keys and values of its source text.
        encodes: the tokens of that text if it is encoded in this step, before these tokens.
        follows: row of the logits of the step before that the only token is chosen from; `token_ids` has 0
            instead.
        beam_slots: slots of the beams of a search; none without a search.
        beams: number of beams that continue this search, each with one token; `token_ids` has 0 for each, and
            `block_ids` a table for each, in which 0 stands for blocks that only the device knows. 0 is a prompt. One
            of a single token may have a row for each beam, too.
        drafted: guesses of the last tokens up to this one, if it is a drafted token.
    """

    sequence: GeneratedSequence
    start: int
    token_ids: tuple[int, ...]
    block_ids: array[int]
    samples: tuple[GeneratedSequence, ...]
    source_block_ids: tuple[int, ...] = ()
    encodes: tuple[int, ...] = ()
    follows: int | None = None
    beam_slots: tuple[int, ...] = ()
    beams: int = 0
    drafted: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + (1 if self.beams else len(self.token_ids))

    @property
    def num_generated(self) -> int:
        """Number of tokens of the answer, or of a beam, with these tokens."""
        return self.end - self.sequence.num_tokens

    @property
    def num_logit_rows(self) -> int:
        """Number of rows of logits: one for each beam, or for each sample."""
        return self.beams or len(self.samples)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Sequences that run together, each with some tokens.

    Attributes:
        sequences: one or more sequences, in any order.
        shape: sizes that decide the cost.
        reason: reason for these sequences, for the log.
        chunks: the tokens of each sequence in a step of generation, in its order; chunks of one token come first. Empty
            if each sequence runs all its tokens and then ends.
        copies: (source, destination) blocks to copy before the step.
        number: its number among all steps.
        after: number of the step that was in flight when this one was scheduled. If that one fails, this one must not
            run.
        steps: most steps of its launch; more than one only of searches; their chunks are of the first step.
    """

    sequences: tuple[SequenceState, ...]
    shape: BatchShape
    seconds: float
    reason: str
    chunks: tuple[Chunk, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    number: int = 0
    after: int | None = None
    steps: int = 1

    @property
    def prompts(self) -> list[Prompt]:
        return [sequence.prompt for sequence in self.sequences]

    @property
    def options(self) -> list[RequestOptions]:
        return [sequence.options for sequence in self.sequences]

    @property
    def num_outputs(self) -> int:
        """Number of outputs: one per sequence, or per sample and search of a step."""
        if not self.chunks:
            return len(self.sequences)
        return sum([len(chunk.samples) for chunk in self.chunks])

    def tokens_of(self, steps: int) -> int:
        """Return the tokens of some steps; the first one encodes sources."""
        sources = sum([len(chunk.encodes) for chunk in self.chunks])
        return steps * (self.shape.tokens - sources) + sources

    @property
    def num_logit_rows(self) -> int:
        return sum([chunk.beams or len(chunk.samples) for chunk in self.chunks])

    @property
    def sampled(self) -> tuple[list[GeneratedSequence], list[int], list[tuple[int, ...]]]:
        """The sequence of each output of a step, the length of its answer, and `Chunk.drafted`."""
        chunks = self.chunks
        drafted = [chunk.drafted for chunk in chunks for _ in chunk.samples]
        sequences = [sequence for chunk in chunks for sequence in chunk.samples]
        lengths = [chunk.num_generated for chunk in chunks for _ in chunk.samples]
        return sequences, lengths, drafted


@dataclass(slots=True)
class BatchResult:
    """The result of a batch, to which its executor adds times and cores.

    Attributes:
        outputs: one per sequence of the batch, in its order; of a step, one per sample and per search, chunk by chunk;
            empty after an error.
        seconds: run time.
        idle: seconds between the end of the batch before and its launch, if none was in flight.
        failure: reason why there are no outputs: memory ran out, an adapter cannot be read, this batch failed, the
            worker process ended and its KV memory is lost, the model cannot run any more, or the step before, which
            this one needs, failed.
        reason: reason why the adapter cannot be read, or the model cannot run any more, if it is known.
        adapter: name of the adapter that cannot be read.
        cores: cores that it ran on, where workers have one core each.
    """

    outputs: Sequence[Float32Array] | Sequence[SampledToken | BeamStep]
    seconds: float
    failure: Failure | None = None
    reason: str = ""
    adapter: str = ""
    cores: Cores = "one"
    idle: float = 0.0

    @property
    def steps(self) -> int:
        """Number of steps that ran in this launch."""
        return max([each.count for each in self.outputs if isinstance(each, BeamStep)], default=1)

    def named(self, sequences: Iterable[SequenceState]) -> list[SequenceState]:
        """Return the sequences whose adapter cannot be read."""
        return [each for each in sequences if each.options.adapter == self.adapter]


class SequenceOutput(NamedTuple):
    """A part of an answer; the sequence goes on unless it is finished."""

    sequence: SequenceState
    output: Output


@dataclass(frozen=True, slots=True)
class SequenceFailure:
    """A sequence that has no answer, which ends its request."""

    sequence: SequenceState
    error: VarlenError


Event: TypeAlias = SequenceOutput | SequenceFailure

OUT_OF_MEMORY = "the server had too little memory to run this request; it may pass later"

_log = logging.getLogger(__name__)

_TEXT_FAILED = "the text of the answer could not be made; the server's log says why"
# Where a search has found fewer answers than the request asks for.
_NO_ANSWER = BeamAnswer((), -math.inf, "length")


def add_writers(request: RequestState, new_writer: NewWriter) -> None:
    """Give each sequence of a request its writer.

    Raises:
        EngineError: a writer could not be made.
    """
    try:
        for sequence in cast(tuple[GeneratedSequence, ...], request.sequences):
            sequence.writer = new_writer(sequence)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        # a panic of the tokenizers library is no Exception
        _log.exception("the text of an answer could not be made; its request fails")
        raise EngineError(_TEXT_FAILED) from None


def append_token(sequence: GeneratedSequence, token: SampledToken) -> Event:
    """Append a token to a sequence; return the part of the answer."""
    sequence.token_ids.append(token.token_id)
    if token.error is not None:
        return SequenceFailure(sequence, token.error)
    return _write(sequence, token)


def write_answers(
    sequences: Iterable[GeneratedSequence], answers: Iterable[BeamAnswer]
) -> list[Event]:
    """Return the answers of a search that has ended, one for each sequence."""
    found = chain(answers, repeat(_NO_ANSWER))
    return [_write(*each) for each in zip(sequences, found, strict=False)]


def _write(sequence: GeneratedSequence, output: SampledToken | BeamAnswer) -> Event:
    """Return what a token, or the end of a search, adds to an answer."""
    try:
        part = sequence.writer.write(output)
    except BaseException:
        # a panic of the tokenizers library is no Exception
        _log.exception("the text of an answer could not be made; its request fails")
        return SequenceFailure(sequence, EngineError(_TEXT_FAILED))
    if part.finish_reason is not None:
        sequence.finish()
    return new_tuple(SequenceOutput, (sequence, part))
