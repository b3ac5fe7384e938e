"""Resident memory of a model behind a real tritonserver, over thousands of requests.

Requests are single texts of random words over gRPC, 16 in flight. Memory is read while no request is in flight,
after a rest in which the process releases what it freed.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from varlen_bench.compare.results import Result
from varlen_bench.compare.systems import System
from varlen_bench.harness.resident import MIB, family_bytes, model_process, resident_bytes
from varlen_bench.harness.summary import flatness
from varlen_bench.memory.rows import SERVER, STUB, empty_result
from varlen_client import Client, RetryPolicy
from varlen_tools.local_server import LocalServer

_IN_FLIGHT = 16
_SHORTEST = 5
_READY_SECONDS = 120.0
# The served process releases memory once a second.
_REST_SECONDS = 1.5


@dataclass(frozen=True, slots=True)
class Soak:
    """Requests to a server."""

    repository: Path
    model: str
    requests: int = 20_000
    warmup: int = 1_000
    # number of requests between two samples
    every: int = 500
    # in words; most words are one token
    longest: int = 256

    def result(self, process: System) -> Result:
        """Return the result of one process of the server, without figures."""
        return empty_result(process, self.model, "as served", self.requests)


def soak(settings: Soak) -> list[Result]:
    """Return the results of the process that serves the model and of the server."""
    with LocalServer([settings.repository / settings.model]) as server:
        server.wait_ready(_READY_SECONDS)
        stub = model_process(server.pid, settings.model)
        # the model's process has workers
        read: dict[System, Callable[[], int]] = {
            STUB: partial(family_bytes, stub),
            SERVER: partial(resident_bytes, server.pid),
        }
        samples: dict[System, list[int]] = {process: [] for process in read}
        for _ in _send(settings, server.grpc_url):
            time.sleep(_REST_SECONDS)
            for process, resident in read.items():
                samples[process].append(resident())
        results = [settings.result(process) for process in read]
    for result, sampled in zip(results, samples.values(), strict=True):
        mib = [size / MIB for size in sampled]
        figures = {
            "peak_mib": max(mib),
            "rss_least_mib": min(mib),
            "rss_median_mib": statistics.median(mib),
            "rss_most_mib": max(mib),
            "rss_flatness": flatness(mib),
        }
        result.rounds.append(figures)
    return results


def _send(settings: Soak, url: str) -> Iterator[None]:
    """Send all requests; yield when a sample is due and none is in flight."""
    draw = random.Random(0)
    tokenizer = Tokenizer.from_file(
        str(settings.repository / settings.model / "1" / "tokenizer.json")
    )
    words = sorted(filter(str.isalpha, tokenizer.get_vocab()))

    def lengths(count: int) -> list[int]:
        return [draw.randint(_SHORTEST, settings.longest) for _ in range(count)]

    stream, warmup = lengths(settings.requests), lengths(settings.warmup)
    parts = [stream[at : at + settings.every] for at in range(0, len(stream), settings.every)]
    once = RetryPolicy(max_retries=0)
    client = Client(url, settings.model, rows_per_request=1, concurrency=_IN_FLIGHT, retry=once)
    with client:
        for part in (warmup, *parts):
            texts = [" ".join(draw.choices(words, k=length)) for length in part]
            client.embed(texts, truncate=True)
            yield
