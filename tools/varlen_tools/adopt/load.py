"""Load on two models by turns: a closed loop of single texts, in short rounds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median

import numpy as np
from tritonclient.grpc.aio import InferenceServerClient

from varlen_tools.adopt.existing import Request

# Rounds of each model; the first one of each warms up and is not counted.
_ROUNDS = 4


@dataclass(slots=True)
class Measured:
    """Rounds of one model.

    Attributes:
        rates: answers in a second, by round.
        latencies: seconds from a request to its answer, of all rounds.
    """

    rates: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """The median of the rounds, in answers in a second."""
        return median(self.rates)

    def percentile(self, share: float) -> float:
        """Return the latency that a share of requests does not exceed, in milliseconds."""
        return 1000 * float(np.percentile(self.latencies, 100 * share))


async def compare_loads(
    url: str, models: Sequence[Sequence[Request]], *, concurrency: int, seconds: float
) -> list[Measured]:
    """Send requests to each model in turn, and return what was measured.

    Args:
        url: host and port of the server's gRPC endpoint.
        models: the same requests in the form of each model.
        seconds: time of all counted rounds of one model.
    """
    measured = [Measured() for _ in models]
    async with InferenceServerClient(url) as client:
        for number in range(_ROUNDS):
            for requests, into in zip(models, measured, strict=True):
                part = Measured() if number == 0 else into
                await _round(client, requests, part, concurrency, seconds / (_ROUNDS - 1))
    return measured


async def _round(
    client: InferenceServerClient,
    requests: Sequence[Request],
    into: Measured,
    concurrency: int,
    seconds: float,
) -> None:
    began, numbers, done = time.perf_counter(), count(), 0

    async def caller() -> None:
        nonlocal done
        while time.perf_counter() - began < seconds:
            request = requests[next(numbers) % len(requests)]
            sent = time.perf_counter()
            await client.infer(
                request.model,
                list(request.inputs),
                outputs=request.outputs,
                parameters=dict(request.parameters),
            )
            into.latencies.append(time.perf_counter() - sent)
            done += 1

    await asyncio.gather(*(caller() for _ in range(concurrency)))
    into.rates.append(done / (time.perf_counter() - began))
