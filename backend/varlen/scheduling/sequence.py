"""Scheduling state: an admitted request and its sequences.

The engine's thread owns all of it. An encoder's sequence runs once; a generated one runs until a stopping rule.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol, TypeAlias, cast

from varlen.request.generation import GenerationOptions
from varlen.request.request import GeneratedPart, Prompt, Reply, Request, RequestOptions
from varlen.scheduling.device_plan import BeamAnswer, SampledToken

Status: TypeAlias = Literal["waiting", "running", "finished"]


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
    """One prompt of a request and its state.

    Attributes:
        row: its row in the answer.
    """

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
    token_ids: list[int] = field(init=False)
    num_computed: int = 0
    num_unknown: int = 0
    block_ids: array[int] = field(default_factory=partial(array, "i"))
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
        return len(self.token_ids) - self.num_tokens

    @property
    def may_run_again(self) -> bool:
        return self.status != "finished"


NewWriter: TypeAlias = Callable[[GeneratedSequence], OutputWriter]
