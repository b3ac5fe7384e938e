"""Policies and step sizes compared on one stream, and the highest rate of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from varlen.config import EngineConfig
from varlen_tools.simulate.generate.costs import StepCosts
from varlen_tools.simulate.generate.run import Run, simulate
from varlen_tools.simulate.study import LEAST_SERVED, highest, percentile
from varlen_tools.workloads import Arrival, at_rate


@dataclass(frozen=True, slots=True)
class Setup:
    """What all runs of a study share.

    Attributes:
        arrivals: at any rate; each run scales their gaps.
        costs: of steps.
        num_blocks: KV blocks.
        max_tokens: of every request; None: just the length of its answer.
    """

    arrivals: Sequence[Arrival]
    costs: StepCosts
    num_blocks: int
    max_tokens: int | None = None

    def run(self, config: EngineConfig, rate: float) -> Run:
        """Return a run of the arrivals at a rate per second."""
        arrivals = at_rate(self.arrivals, rate)
        return simulate(
            arrivals, config, self.num_blocks, self.costs.seconds, max_tokens=self.max_tokens
        )


@dataclass(frozen=True, slots=True)
class Result:
    """One policy and step size under one load.

    Attributes:
        policy, max_step_tokens: of the engine.
        offered: requests per second.
        tokens: generated tokens per second, from the first arrival to the last answer.
        ttft_p50, ttft_p99: time to the first token, in seconds.
        token_p50, token_p99: mean seconds between the tokens of an answer.
        gap: longest time between two tokens of an answer, in seconds.
        preemptions: how often sequences gave back their blocks.
        used, reserved: most KV blocks at a time, as shares of all; reserved ones include used ones.
        refused: requests answered with an error.
        kept_up: share of the requests whose first token came before the last arrival.
    """

    policy: str
    max_step_tokens: int
    offered: float
    tokens: float
    ttft_p50: float
    ttft_p99: float
    token_p50: float
    token_p99: float
    gap: float
    preemptions: int
    used: float
    reserved: float
    refused: int
    kept_up: float


def measure(setup: Setup, config: EngineConfig, rate: float) -> Result:
    """Return the result of a run; there is at least one arrival."""
    run = setup.run(config, rate)
    answered = run.answered
    first = sorted(outcome.sent[0] - outcome.arrival.at for outcome in answered)
    token = sorted(
        (outcome.sent[-1] - outcome.sent[0]) / (len(outcome.sent) - 1)
        for outcome in answered
        if len(outcome.sent) > 1
    )
    gaps = (after - before for outcome in answered for before, after in pairwise(outcome.sent))
    began, last = (run.outcomes[at].arrival.at for at in (0, -1))
    seconds = max((outcome.sent[-1] for outcome in answered), default=math.inf) - began
    return Result(
        policy=config.kv_policy,
        max_step_tokens=config.max_step_tokens,
        offered=rate,
        tokens=sum(len(outcome.sent) for outcome in answered) / seconds,
        ttft_p50=percentile(first, 0.50),
        ttft_p99=percentile(first, 0.99),
        token_p50=percentile(token, 0.50),
        token_p99=percentile(token, 0.99),
        gap=max(gaps, default=float("nan")),
        preemptions=run.end.preemptions,
        used=max((step.blocks_used for step in run.steps), default=0) / setup.num_blocks,
        reserved=max((step.blocks_reserved for step in run.steps), default=0) / setup.num_blocks,
        refused=len(run.outcomes) - len(answered),
        kept_up=sum(outcome.sent[0] <= last for outcome in answered) / len(run.outcomes),
    )


def compare(
    setup: Setup, configs: Sequence[EngineConfig], rates: Sequence[float]
) -> Iterator[Result]:
    """Yield a result for every rate and configuration; all of them see the same requests."""
    for rate in rates:
        for config in configs:
            yield measure(setup, config, rate)


def most_within(
    setup: Setup, config: EngineConfig, *, ttft: float, token: float, upper: float
) -> float:
    """Return the highest rate up to `upper` that is sustained within the limits.

    Args:
        setup, config: of the runs.
        ttft, token: limits of the p99 of time to first token and of time per token, in seconds.
        upper: requests per second.
    """

    def sustains(rate: float) -> bool:
        result = measure(setup, config, rate)
        # a run of answers of one token has no time per token
        is_slow = result.ttft_p99 > ttft or result.token_p99 > token
        return not is_slow and result.kept_up >= LEAST_SERVED

    return highest(sustains, upper)


def full_load(setup: Setup, max_running_sequences: int) -> float:
    """Return requests per second that keep all running sequences busy: a load of 1."""
    costs = setup.costs

    def seconds(arrival: Arrival) -> float:
        decoded = (arrival.generated or 1) - 1
        context = arrival.tokens + (decoded + 1) / 2
        own = costs.of(arrival.tokens + decoded, 0) - costs.step
        reads = costs.kv_token * (arrival.tokens + decoded * context)
        return own + reads + costs.step * (decoded + 1) / max_running_sequences

    return 1 / fmean(map(seconds, setup.arrivals))
