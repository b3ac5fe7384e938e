"""One simulated run of generation: the real scheduler and blocks on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from varlen.config import EngineConfig
from varlen.memory.blocks import BlockPool
from varlen.request.generation import GenerationOptions
from varlen.request.request import GeneratedPart, Request, RequestOptions
from varlen.scheduling.admission import Admission
from varlen.scheduling.iteration import GenerationCounts, IterationScheduler
from varlen.scheduling.sequence import (
    Batch,
    BatchResult,
    BeamAnswer,
    GeneratedSequence,
    SampledToken,
    StepBatch,
)
from varlen.scheduling.step_limits import StepLimits
from varlen_tools.simulate.virtual import Outcome, VirtualReply, play, prompt_of
from varlen_tools.workloads import Arrival

_TOKEN = SampledToken(0)
_PART = GeneratedPart("", (0,))
_LAST_PART = GeneratedPart("", (0,), finish_reason="stop")


@dataclass(frozen=True, slots=True)
class Step:
    """A step that ran.

    Attributes:
        tokens: of all chunks.
        kv_tokens: tokens whose keys and values are read: each chunk reads its whole context once.
        seconds: run time.
        blocks_used, blocks_reserved: KV blocks while it ran; reserved ones include used ones.
    """

    tokens: int
    kv_tokens: int
    seconds: float
    blocks_used: int
    blocks_reserved: int


@dataclass(frozen=True, slots=True)
class Run:
    """A whole simulated run.

    Attributes:
        outcomes: of every arrival, in order.
        steps: in order.
        end: what the scheduler counted, when all was answered.
    """

    outcomes: list[Outcome]
    steps: list[Step]
    end: GenerationCounts

    @property
    def answered(self) -> list[Outcome]:
        """Outcomes of requests that were answered without an error."""
        return [outcome for outcome in self.outcomes if outcome.answers and outcome.error is None]


def simulate(
    arrivals: Sequence[Arrival],
    config: EngineConfig,
    num_blocks: int,
    seconds: Callable[[StepBatch], float],
    *,
    max_tokens: int | None = None,
) -> Run:
    """Return the run of an engine over arrivals of generation.

    Args:
        arrivals: in order of time, each with the length of its answer.
        config: the settings.
        num_blocks: KV blocks, of `kv_block_tokens` each.
        seconds: returns the run time of a step.
        max_tokens: of every request, and its longest answer; None: just the length of its answer.
    """
    blocks = BlockPool(num_blocks, config.kv_block_tokens, prefix_cache=False)
    scheduler = IterationScheduler(
        StepLimits(
            max_step_tokens=config.max_step_tokens,
            max_running_sequences=config.max_running_sequences,
            # what is too long for the blocks is refused
            max_sequence_tokens=num_blocks * config.kv_block_tokens + 1,
        ),
        blocks,
        config.kv_policy,
        Admission(config.max_queued_requests, config.max_queued_tokens),
    )
    steps: list[Step] = []

    def run_batch(batch: Batch) -> BatchResult:
        step, counts = cast(StepBatch, batch), blocks.counts()
        taken, reserved = seconds(step), counts.used + counts.reserved
        steps.append(Step(step.shape.tokens, kv_tokens(step), taken, counts.used, reserved))
        return BatchResult([_TOKEN] * step.num_outputs, taken)

    def make_request(arrival: Arrival) -> Request:
        generation = GenerationOptions(
            max_tokens=max_tokens or arrival.generated or 1, temperature=0.0, ignore_eos=True
        )
        options = RequestOptions(
            priority=arrival.priority,
            deadline_seconds=arrival.deadline_seconds,
            generation=generation,
        )
        return Request((prompt_of(arrival.tokens),), options)

    outcomes = play(scheduler, run_batch, arrivals, make_request, new_writer=_Writer)
    return Run(outcomes, steps, scheduler.snapshot())


def kv_tokens(step: StepBatch) -> int:
    """Return the number of tokens whose keys and values a step reads."""
    return sum(chunk.start + len(chunk.token_ids) for chunk in step.chunks)


class _Writer:
    """Ends an answer at the length that its arrival says, or at `max_tokens`."""

    def __init__(self, sequence: GeneratedSequence) -> None:
        arrival = cast(VirtualReply, sequence.request.reply).outcome.arrival
        self._left = min(arrival.generated or 1, sequence.generation.max_tokens)

    def write(self, output: SampledToken | BeamAnswer) -> GeneratedPart:  # noqa: ARG002  # all are the same
        """Return a part without text, the last one with a reason."""
        self._left -= 1
        return _PART if self._left else _LAST_PART
