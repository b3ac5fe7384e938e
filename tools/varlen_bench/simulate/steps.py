"""Simulated steps: the scheduler of generation on a virtual clock, and its policies under load."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import cast

from varlen.config import NO_LIMIT, SHORT_TOKENS, EngineConfig
from varlen.memory.blocks import BlockPool
from varlen.request.generation import GenerationOptions
from varlen.request.request import GeneratedPart
from varlen.scheduling.admission import Admission
from varlen.scheduling.batch import Batch, BatchResult, GeneratedSequence
from varlen.scheduling.device_plan import BeamAnswer, SampledToken
from varlen.scheduling.iteration.iteration import GenerationCounts, IterationScheduler
from varlen.scheduling.iteration.step_size import StepLimits
from varlen_bench.simulate.command import MILLISECONDS
from varlen_bench.simulate.costs import StepCosts, kv_tokens
from varlen_bench.simulate.virtual import (
    LEAST_SERVED,
    Run,
    VirtualReply,
    highest,
    percentile,
    play,
)
from varlen_bench.workloads import Arrival, at_rate

_TOKEN = SampledToken(0)
_PART = GeneratedPart("", (0,))
_LAST_PART = GeneratedPart("", (0,), finish_reason="stop")


@dataclass(frozen=True, slots=True)
class Step:
    """A step that ran.

    Attributes:
        kv_tokens: tokens whose keys and values are read: each chunk reads its whole context once.
        blocks_used, blocks_reserved: KV blocks while it ran; reserved ones include used ones.
    """

    tokens: int
    kv_tokens: int
    seconds: float
    blocks_used: int
    blocks_reserved: int


@dataclass(frozen=True, slots=True)
class StepRun(Run):
    """A run of the scheduler of generation."""

    steps: list[Step]
    end: GenerationCounts


def simulate(
    arrivals: Sequence[Arrival],
    config: EngineConfig,
    num_blocks: int,
    seconds: Callable[[Batch], float],
    *,
    max_tokens: int | None = None,
) -> StepRun:
    """Return the run of an engine over arrivals of generation.

    Args:
        arrivals: requests in order of time, each with the length of its answer.
        num_blocks: number of KV blocks, of `kv_block_tokens` each.
        max_tokens: limit of every request, and its longest answer; None: just the length of its answer.
    """
    blocks = BlockPool(num_blocks, config.kv_block_tokens, prefix_cache=False)
    limits = StepLimits(
        max_step_tokens=config.max_step_tokens,
        inter_token_latency_seconds=config.inter_token_latency_ms / MILLISECONDS,
        max_running_sequences=config.max_running_sequences,
        # what is too long for the blocks is refused
        max_sequence_tokens=num_blocks * config.kv_block_tokens + 1,
        short_slots=config.short_slots,
        short_tokens=SHORT_TOKENS,
    )
    admission = Admission(config.max_queued_requests, config.max_queued_tokens or NO_LIMIT)
    scheduler = IterationScheduler(limits, blocks, config.kv_policy, admission)
    steps: list[Step] = []

    def run_batch(batch: Batch) -> BatchResult:
        counts = blocks.counts()
        taken, reserved = seconds(batch), counts.used + counts.reserved
        steps.append(Step(batch.shape.tokens, kv_tokens(batch), taken, counts.used, reserved))
        return BatchResult([_TOKEN] * batch.num_outputs, taken)

    def generation(arrival: Arrival) -> GenerationOptions:
        most = max_tokens or arrival.generated or 1
        return GenerationOptions(max_tokens=most, temperature=0.0, ignore_eos=True)

    outcomes = play(scheduler, run_batch, arrivals, generation=generation, new_writer=_Writer)
    return StepRun(outcomes, steps, scheduler.snapshot())


class _Writer:
    """Ends an answer at the length that its arrival says, or at `max_tokens`."""

    def __init__(self, sequence: GeneratedSequence) -> None:
        arrival = cast(VirtualReply, sequence.request.reply).outcome.arrival
        self._left = min(arrival.generated or 1, sequence.generation.max_tokens)

    def write(self, output: SampledToken | BeamAnswer) -> GeneratedPart:  # noqa: ARG002  # all are the same
        """Return a part without text, the last one with a reason."""
        self._left -= 1
        return _PART if self._left else _LAST_PART


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Figures of a policy and step size under a load: columns of a CSV file.

    Attributes:
        offered: requests per second.
        tokens: generated tokens per second, from the first arrival to the last answer.
        ttft_p50, ttft_p99: time to the first token, in seconds.
        token_p50, token_p99: mean seconds between the tokens of an answer.
        gap_p99, gap: time between two tokens of an answer and its longest, in seconds.
        preemptions: number of times that sequences gave back their blocks.
        used, reserved: most KV blocks at a time, as shares of all; reserved ones include used ones.
        kept_up: share of the requests whose first token came before the last arrival.
        latency_mean, latency_p99: time to the last token, in seconds.
    """

    policy: str
    max_step_tokens: int
    inter_token_latency_ms: int
    offered: float
    tokens: float
    ttft_p50: float
    ttft_p99: float
    token_p50: float
    token_p99: float
    gap_p99: float
    gap: float
    preemptions: int
    used: float
    reserved: float
    refused: int
    kept_up: float
    latency_mean: float
    latency_p99: float


@dataclass(frozen=True, slots=True)
class StepStudy:
    """Runs of several policies, step sizes and rates that share costs and requests.

    Attributes:
        arrivals: requests at any rate, at least one; each run scales their gaps.
        max_tokens: limit of every request; None: just the length of its answer.
    """

    arrivals: Sequence[Arrival]
    costs: StepCosts
    num_blocks: int
    max_tokens: int | None = None

    def run(self, config: EngineConfig, rate: float) -> StepRun:
        """Return a run of the arrivals at a rate per second."""
        arrivals, seconds = at_rate(self.arrivals, rate), self.costs.seconds
        return simulate(arrivals, config, self.num_blocks, seconds, max_tokens=self.max_tokens)

    def measure(self, config: EngineConfig, rate: float) -> StepFigures:
        """Return the figures of one run."""
        run = self.run(config, rate)
        sent = [outcome.sent for outcome in run.answered]
        first = sorted(outcome.sent[0] - outcome.arrival.at for outcome in run.answered)
        token = sorted((each[-1] - each[0]) / (len(each) - 1) for each in sent if len(each) > 1)
        gaps = sorted(after - before for each in sent for before, after in pairwise(each))
        began, last = (run.outcomes[at].arrival.at for at in (0, -1))
        seconds = max((each[-1] for each in sent), default=math.inf) - began
        return StepFigures(
            policy=config.kv_policy,
            max_step_tokens=config.max_step_tokens,
            inter_token_latency_ms=config.inter_token_latency_ms,
            offered=rate,
            tokens=sum(map(len, sent)) / seconds,
            ttft_p50=percentile(first, 0.50),
            ttft_p99=percentile(first, 0.99),
            token_p50=percentile(token, 0.50),
            token_p99=percentile(token, 0.99),
            gap_p99=percentile(gaps, 0.99),
            gap=max(gaps, default=math.nan),
            preemptions=run.end.preemptions,
            used=max((step.blocks_used for step in run.steps), default=0) / self.num_blocks,
            reserved=max((step.blocks_reserved for step in run.steps), default=0) / self.num_blocks,
            refused=len(run.outcomes) - len(sent),
            kept_up=sum(each[0] <= last for each in sent) / len(run.outcomes),
            latency_mean=fmean(run.latencies) if sent else math.nan,
            latency_p99=percentile(run.latencies, 0.99),
        )

    def most_within(
        self, config: EngineConfig, *, ttft: float, token: float, upper: float
    ) -> float:
        """Return the highest rate up to `upper` that is sustained within the limits.

        Args:
            ttft, token: limits of the p99 of time to first token and of time per token, in seconds.
        """

        def sustains(rate: float) -> bool:
            result = self.measure(config, rate)
            # a run of answers of one token has no time per token
            is_slow = result.ttft_p99 > ttft or result.token_p99 > token
            return not is_slow and result.kept_up >= LEAST_SERVED

        return highest(sustains, upper)

    def full_load(self, max_running_sequences: int) -> float:
        """Return requests per second that keep all running sequences busy: a load of 1."""
        costs = self.costs

        def seconds(arrival: Arrival) -> float:
            decoded = (arrival.generated or 1) - 1
            context = arrival.tokens + (decoded + 1) / 2
            own = costs.of(arrival.tokens + decoded, 0) - costs.step
            reads = costs.kv_token * (arrival.tokens + decoded * context)
            return own + reads + costs.step * (decoded + 1) / max_running_sequences

        return 1 / fmean(map(seconds, self.arrivals))
