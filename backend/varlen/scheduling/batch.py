"""Batches: sequences that run together, their results, and what these add to answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from varlen.costs.batch_shape import BatchShape
from varlen.errors import VarlenError
from varlen.request.request import Float32Array, Output, Prompt, RequestOptions
from varlen.scheduling.choices import BeamStep, SampledToken
from varlen.scheduling.sequence import GeneratedSequence, SequenceState

Failure: TypeAlias = Literal["memory", "batch", "worker", "model", "skipped"]
# Of a batch: one, or all since it ran alone, or both in turn.
Cores: TypeAlias = Literal["one", "all", "both"]


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
        follows: row of the logits of the step before that the only token is chosen from; `token_ids` has 0 in its
            place.
        beam_places: places of the beams of a search among all beams that run; none without a search.
        beams: number of beams that continue this search, each with one token; `token_ids` has 0 for each, and
            `block_ids` a table for each, in which 0 stands for blocks that only the device knows. 0 is a prompt.
    """

    sequence: GeneratedSequence
    start: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    samples: tuple[GeneratedSequence, ...]
    source_block_ids: tuple[int, ...] = ()
    encodes: tuple[int, ...] = ()
    follows: int | None = None
    beam_places: tuple[int, ...] = ()
    beams: int = 0

    @property
    def end(self) -> int:
        """Position after the last of these tokens."""
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
        """Number of outputs: one for each sample and each search."""
        return sum(len(chunk.samples) for chunk in self.chunks)

    @property
    def num_logit_rows(self) -> int:
        """Number of rows of logits."""
        return sum(chunk.num_logit_rows for chunk in self.chunks)

    @property
    def sampled(self) -> tuple[list[GeneratedSequence], list[int]]:
        """The sequence of each output, and the length of its answer."""
        chunks = self.chunks
        sequences = [sequence for chunk in chunks for sequence in chunk.samples]
        lengths = [chunk.num_generated for chunk in chunks for _ in chunk.samples]
        return sequences, lengths


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The result of a batch.

    Attributes:
        outputs: one per sequence of the batch, in its order; of a step, one per sample and per search, chunk by chunk;
            empty after an error.
        seconds: run time.
        padding_tokens: number of padding tokens that ran.
        failure: reason why there are no outputs: memory ran out, this batch failed, the worker process ended and its
            KV memory is lost, the model cannot run any more, or the step before, which this one needs, failed.
        reason: reason why the model cannot run any more, if it is known.
        cores: cores that it ran on, where workers have one core each.
    """

    outputs: Sequence[Float32Array] | Sequence[SampledToken | BeamStep]
    seconds: float
    padding_tokens: int = 0
    failure: Failure | None = None
    reason: str = ""
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
