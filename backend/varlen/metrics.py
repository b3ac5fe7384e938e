"""Metrics: counters of this process, and their export to the server's /metrics page.

Engine and sender threads add to plain counters. An exporter thread copies them to the server twice a
second, since each call there is a round trip between processes.
"""

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from threading import Event, Lock, Thread
from typing import Literal, Protocol, TypeAlias, get_args

_log = logging.getLogger(__name__)

Outcome: TypeAlias = Literal["ok", "invalid", "refused", "cancelled", "failed"]
HistogramName: TypeAlias = Literal[
    "varlen_queue_wait_seconds",
    "varlen_request_latency_seconds",
    "varlen_batch_sequences",
    "varlen_batch_tokens",
    "varlen_batch_seconds",
    "varlen_batch_predicted_seconds",
]
CounterName: TypeAlias = Literal[
    "varlen_sequences_total",
    "varlen_tokens_total",
    "varlen_padding_tokens_total",
    "varlen_split_batches_total",
    "varlen_scheduling_seconds_total",
]
Refusal: TypeAlias = Literal["queue_full", "deadline", "expired"]
# Values that the service reads from its parts, not counted here.
GaugeName: TypeAlias = Literal[
    "varlen_queued_requests",
    "varlen_queued_tokens",
    "varlen_weight_bytes",
    "varlen_arena_capacity_bytes",
    "varlen_arena_reserved_bytes",
    "varlen_arena_chunks",
    "varlen_arena_footprint_bytes",
    "varlen_arena_peak_live_bytes",
    "varlen_response_cache_bytes",
    "varlen_response_cache_entries",
]
TotalName: TypeAlias = Literal[
    "varlen_plan_seconds_total",
    "varlen_plan_cache_hits_total",
    "varlen_plan_cache_misses_total",
    "varlen_response_cache_hits_total",
    "varlen_response_cache_joined_total",
    "varlen_response_cache_misses_total",
    "varlen_response_cache_evictions_total",
]
MetricsSnapshot: TypeAlias = Mapping["GaugeName | TotalName", float]

_SECONDS = [0.001 * 2**power for power in range(16)]
_POWERS_OF_TWO = [float(2**power) for power in range(15)]
_FLUSH_SECONDS = 0.5
# Observations of each histogram between drains. Without an exporter, as in process, the oldest are dropped.
_MOST_OBSERVATIONS = 1 << 16

_HISTOGRAMS: dict[HistogramName, tuple[str, list[float]]] = {
    "varlen_queue_wait_seconds": ("Seconds from a request's arrival to its first batch", _SECONDS),
    "varlen_request_latency_seconds": (
        "Seconds from a request's arrival to its response",
        _SECONDS,
    ),
    "varlen_batch_sequences": ("Sequences per batch", _POWERS_OF_TWO),
    "varlen_batch_tokens": ("Tokens per batch, without padding", _POWERS_OF_TWO),
    "varlen_batch_seconds": ("Measured seconds per batch", _SECONDS),
    "varlen_batch_predicted_seconds": ("Predicted seconds per batch", _SECONDS),
}
_COUNTERS: dict[CounterName, str] = {
    "varlen_sequences_total": "Sequences that ran",
    "varlen_tokens_total": "Tokens that ran, without padding",
    "varlen_padding_tokens_total": "Padding tokens that ran",
    "varlen_scheduling_seconds_total": "Seconds spent on scheduling",
    "varlen_split_batches_total": "Batches split after running out of memory",
}
_GAUGES: dict[GaugeName, str] = {
    "varlen_queued_requests": "Requests in the queue",
    "varlen_queued_tokens": "Tokens in the queue",
    "varlen_weight_bytes": "Bytes of the model's weights, outside the arena",
    "varlen_arena_capacity_bytes": "Largest size of the arena in bytes",
    "varlen_arena_reserved_bytes": "Bytes that the arena has allocated",
    "varlen_arena_chunks": "Memory chunks that the arena has allocated",
    "varlen_arena_footprint_bytes": "Bytes of the arena that the plan of the last batch uses",
    "varlen_arena_peak_live_bytes": "Peak live bytes of the last batch, a lower bound of any plan",
    "varlen_response_cache_bytes": "Bytes of the response cache, keys and bookkeeping included",
    "varlen_response_cache_entries": "Entries in the response cache",
}
_TOTALS: dict[TotalName, str] = {
    "varlen_plan_seconds_total": "Seconds spent planning memory",
    "varlen_plan_cache_hits_total": "Batches whose memory plan was cached",
    "varlen_plan_cache_misses_total": "Batches whose memory plan was computed",
    "varlen_response_cache_hits_total": "Sequences answered from the response cache",
    "varlen_response_cache_joined_total": "Sequences that shared the run of an equal sequence in flight",
    "varlen_response_cache_misses_total": "Sequences that were not in the response cache",
    "varlen_response_cache_evictions_total": "Entries that the response cache evicted, for size or age",
}
_REQUESTS = ("varlen_requests_total", "Requests answered, by outcome")
_REFUSALS = (
    "varlen_refused_requests_total",
    "Requests refused, by reason: full queue, deadline too soon, deadline passed in the queue",
)


@dataclass(frozen=True, slots=True)
class Drained:
    """Counts since the last drain: requests by outcome and refusal, counters, observations."""

    outcomes: Mapping[Outcome, int]
    refusals: Mapping[Refusal, int]
    counts: Mapping[CounterName, float]
    observed: Mapping[HistogramName, deque[float]]


class Stats:
    """Counts since they were last drained. Any thread may add."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._outcomes: Counter[Outcome] = Counter()
        self._refusals: Counter[Refusal] = Counter()
        self._counts: defaultdict[CounterName, float] = defaultdict(float)
        self._observed: defaultdict[HistogramName, deque[float]] = _observations()

    def count_request(self, outcome: Outcome, seconds: float) -> None:
        """Count one answered request and its latency in seconds."""
        with self._lock:
            self._outcomes[outcome] += 1
            self._observed["varlen_request_latency_seconds"].append(seconds)

    def count_start(self, scheduling_seconds: float, waits: Iterable[float]) -> None:
        """Record the start of a batch.

        Args:
            scheduling_seconds: time spent choosing it.
            waits: time in the queue of each request that starts with it, in seconds.
        """
        with self._lock:
            self._counts["varlen_scheduling_seconds_total"] += scheduling_seconds
            self._observed["varlen_queue_wait_seconds"].extend(waits)

    def count_refusal(self, reason: Refusal) -> None:
        """Count one request that is refused."""
        with self._lock:
            self._refusals[reason] += 1

    def count_batch(self, sequences: int, tokens: int, padding: int) -> None:
        """Count one batch and its tokens."""
        with self._lock:
            self._observed["varlen_batch_sequences"].append(sequences)
            self._observed["varlen_batch_tokens"].append(tokens)
            self._counts["varlen_sequences_total"] += sequences
            self._counts["varlen_tokens_total"] += tokens
            self._counts["varlen_padding_tokens_total"] += padding

    def count_batch_seconds(self, *, predicted: float, actual: float) -> None:
        """Record the predicted and the measured time of a batch, in seconds."""
        with self._lock:
            self._observed["varlen_batch_predicted_seconds"].append(predicted)
            self._observed["varlen_batch_seconds"].append(actual)

    def count(self, name: CounterName) -> None:
        """Add one to a counter."""
        with self._lock:
            self._counts[name] += 1

    def drain(self) -> Drained:
        """Return all counts since the last drain."""
        with self._lock:
            drained = Drained(self._outcomes, self._refusals, self._counts, self._observed)
            self._outcomes, self._refusals = Counter(), Counter()
            self._counts, self._observed = defaultdict(float), _observations()
        return drained


def _observations() -> defaultdict[HistogramName, deque[float]]:
    return defaultdict(lambda: deque(maxlen=_MOST_OBSERVATIONS))


class Metric(Protocol):
    """One metric series of the server."""

    def increment(self, value: float) -> None: ...
    def set(self, value: float) -> None: ...
    def observe(self, value: float) -> None: ...


# (kind, name, description, labels, buckets) -> series
MetricMaker: TypeAlias = Callable[
    [Literal["COUNTER", "GAUGE", "HISTOGRAM"], str, str, dict[str, str], list[float] | None], Metric
]


class Exporter:
    """A thread that copies `Stats` and snapshots of queue and memory to the server's metrics."""

    def __init__(
        self,
        stats: Stats,
        snapshot: Callable[[], MetricsSnapshot],
        make_metric: MetricMaker,
        labels: dict[str, str],
    ) -> None:
        """Register every series, so that each is on the page from the start.

        Args:
            stats: drained by this object alone.
            snapshot: returns the value of each gauge, and of each total since the start.
            make_metric: registers one series with the server; raises when metrics are off.
            labels: of every series.
        """
        self._stats = stats
        self._snapshot = snapshot
        # kept alive: the families that it holds must outlive their series
        self._make_metric = make_metric
        self._outcomes = {
            outcome: make_metric("COUNTER", *_REQUESTS, {**labels, "outcome": outcome}, None)
            for outcome in get_args(Outcome)
        }
        self._refusals = {
            reason: make_metric("COUNTER", *_REFUSALS, {**labels, "reason": reason}, None)
            for reason in get_args(Refusal)
        }
        self._counters = {
            name: make_metric("COUNTER", name, about, labels, None)
            for name, about in _COUNTERS.items()
        }
        self._histograms = {
            name: make_metric("HISTOGRAM", name, about, labels, buckets)
            for name, (about, buckets) in _HISTOGRAMS.items()
        }
        self._gauges = {
            name: make_metric("GAUGE", name, about, labels, None) for name, about in _GAUGES.items()
        }
        self._totals = {
            name: make_metric("COUNTER", name, about, labels, None)
            for name, about in _TOTALS.items()
        }
        self._exported = dict.fromkeys(_TOTALS, 0.0)
        self._stop = Event()
        self._thread = Thread(target=self._loop, name="varlen-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._thread.join()

    def flush(self) -> None:
        """Export everything since the last flush."""
        drained = self._stats.drain()
        for outcome, number in drained.outcomes.items():
            self._outcomes[outcome].increment(number)
        for reason, number in drained.refusals.items():
            self._refusals[reason].increment(number)
        for name, count in drained.counts.items():
            self._counters[name].increment(count)
        for histogram, values in drained.observed.items():
            for value in values:
                self._histograms[histogram].observe(value)
        snapshot = self._snapshot()
        for gauge, metric in self._gauges.items():
            metric.set(snapshot[gauge])
        for total, metric in self._totals.items():
            metric.increment(snapshot[total] - self._exported[total])
            self._exported[total] = snapshot[total]

    def _loop(self) -> None:
        while not self._stop.wait(_FLUSH_SECONDS):
            try:
                self.flush()
            except Exception:
                _log.exception("metrics could not be exported; the next export is tried")
