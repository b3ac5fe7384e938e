"""What is counted, and how it reaches the server's /metrics.

Engine and sender threads add to plain counters. One thread of its own carries them over to the
server now and then, since each call there is a round trip between processes. Names, units and
meanings are in `METRICS`.
"""

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from threading import Event, Lock, Thread
from typing import Literal, Protocol, TypeAlias, get_args

_log = logging.getLogger(__name__)

Outcome: TypeAlias = Literal["ok", "invalid", "refused", "cancelled", "failed"]
HistogramName: TypeAlias = Literal[
    "varlen_queue_wait_seconds",
    "varlen_request_latency_seconds",
    "varlen_batch_sequences",
    "varlen_batch_tokens",
]
CounterName: TypeAlias = Literal[
    "varlen_sequences_total", "varlen_tokens_total", "varlen_split_batches_total"
]
# Read from their owners, not counted here.
GaugeName: TypeAlias = Literal[
    "varlen_queued_requests",
    "varlen_queued_tokens",
    "varlen_weight_bytes",
    "varlen_arena_capacity_bytes",
    "varlen_arena_reserved_bytes",
    "varlen_arena_chunks",
    "varlen_arena_footprint_bytes",
    "varlen_arena_peak_live_bytes",
]
TotalName: TypeAlias = Literal[
    "varlen_plan_seconds_total", "varlen_plan_cache_hits_total", "varlen_plan_cache_misses_total"
]
Readings: TypeAlias = Mapping["GaugeName | TotalName", float]

_SECONDS = [0.001 * 2**power for power in range(16)]
_POWERS_OF_TWO = [float(2**power) for power in range(15)]
_FLUSH_SECONDS = 0.5
# Observations kept between drains, of each kind; where nobody drains, in process say, the oldest go.
_MOST_OBSERVATIONS = 1 << 16

_HISTOGRAMS: dict[HistogramName, tuple[str, list[float]]] = {
    "varlen_queue_wait_seconds": ("Seconds from a request's arrival to its first batch", _SECONDS),
    "varlen_request_latency_seconds": ("Seconds from a request's arrival to its answer", _SECONDS),
    "varlen_batch_sequences": ("Sequences that ran together", _POWERS_OF_TWO),
    "varlen_batch_tokens": ("Tokens that ran together, none of them padding", _POWERS_OF_TWO),
}
_COUNTERS: dict[CounterName, str] = {
    "varlen_sequences_total": "Sequences that ran",
    "varlen_tokens_total": "Tokens that ran, none of them padding",
    "varlen_split_batches_total": "Batches that ran in halves, since memory had run out",
}
_GAUGES: dict[GaugeName, str] = {
    "varlen_queued_requests": "Requests that wait",
    "varlen_queued_tokens": "Tokens that wait",
    "varlen_weight_bytes": "Bytes of the model's weights, which are no part of the arena",
    "varlen_arena_capacity_bytes": "Most bytes that the arena may take",
    "varlen_arena_reserved_bytes": "Bytes of memory that the arena holds now",
    "varlen_arena_chunks": "Allocations that the arena is made of",
    "varlen_arena_footprint_bytes": "Bytes of the arena that the last batch's plan used",
    "varlen_arena_peak_live_bytes": "Most bytes live at once in the last batch, which no plan can go below",
}
_TOTALS: dict[TotalName, str] = {
    "varlen_plan_seconds_total": "Seconds spent planning memory",
    "varlen_plan_cache_hits_total": "Batches whose plan was at hand",
    "varlen_plan_cache_misses_total": "Batches that had to be planned",
}
_REQUESTS = ("varlen_requests_total", "Requests answered, by outcome")


class Stats:
    """Counts since they were last drained. Any thread may add."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._outcomes: Counter[Outcome] = Counter()
        self._counts: Counter[CounterName] = Counter()
        self._observed: defaultdict[HistogramName, deque[float]] = _observations()

    def count_request(self, outcome: Outcome, seconds: float) -> None:
        """Add one answered request and the time it took."""
        with self._lock:
            self._outcomes[outcome] += 1
            self._observed["varlen_request_latency_seconds"].append(seconds)

    def count_wait(self, seconds: float) -> None:
        """Add the time that one request waited for its first batch."""
        with self._lock:
            self._observed["varlen_queue_wait_seconds"].append(seconds)

    def count_batch(self, sequences: int, tokens: int) -> None:
        """Add one batch."""
        with self._lock:
            self._observed["varlen_batch_sequences"].append(sequences)
            self._observed["varlen_batch_tokens"].append(tokens)
            self._counts["varlen_sequences_total"] += sequences
            self._counts["varlen_tokens_total"] += tokens

    def count(self, name: CounterName) -> None:
        """Add one to a counter."""
        with self._lock:
            self._counts[name] += 1

    def drain(
        self,
    ) -> tuple[
        Mapping[Outcome, int], Mapping[CounterName, int], Mapping[HistogramName, deque[float]]
    ]:
        """Return what was added since the last drain: outcomes, counts, observations."""
        with self._lock:
            drained = self._outcomes, self._counts, self._observed
            self._outcomes, self._counts, self._observed = Counter(), Counter(), _observations()
        return drained


def _observations() -> defaultdict[HistogramName, deque[float]]:
    return defaultdict(lambda: deque(maxlen=_MOST_OBSERVATIONS))


class Metric(Protocol):
    """One series of the server."""

    def increment(self, value: float) -> None: ...
    def set(self, value: float) -> None: ...
    def observe(self, value: float) -> None: ...


# (kind, name, description, labels, buckets) -> series
MetricMaker: TypeAlias = Callable[
    [Literal["COUNTER", "GAUGE", "HISTOGRAM"], str, str, dict[str, str], list[float] | None], Metric
]


class Exporter:
    """Carries `Stats` and readings of queue and memory over to the server's metrics, in a thread of its own."""

    def __init__(
        self,
        stats: Stats,
        read: Callable[[], Readings],
        make_metric: MetricMaker,
        labels: dict[str, str],
    ) -> None:
        """Register every series, so that each shows from the start.

        Args:
            stats: drained by this object alone.
            read: returns the value of each gauge, and of each total since the start.
            make_metric: registers one series with the server; raises when metrics are off.
            labels: of every series.
        """
        self._stats = stats
        self._read = read
        # kept alive: the families that it holds must outlive their series
        self._make_metric = make_metric
        self._outcomes = {
            outcome: make_metric("COUNTER", *_REQUESTS, {**labels, "outcome": outcome}, None)
            for outcome in get_args(Outcome)
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
        self._carried = dict.fromkeys(_TOTALS, 0.0)
        self._stop = Event()
        self._thread = Thread(target=self._loop, name="varlen-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._thread.join()

    def flush(self) -> None:
        """Carry over what was counted since the last flush."""
        outcomes, counts, observed = self._stats.drain()
        for outcome, count in outcomes.items():
            self._outcomes[outcome].increment(count)
        for name, count in counts.items():
            self._counters[name].increment(count)
        for histogram, values in observed.items():
            for value in values:
                self._histograms[histogram].observe(value)
        readings = self._read()
        for gauge, metric in self._gauges.items():
            metric.set(readings[gauge])
        for total, metric in self._totals.items():
            metric.increment(readings[total] - self._carried[total])
            self._carried[total] = readings[total]

    def _loop(self) -> None:
        while not self._stop.wait(_FLUSH_SECONDS):
            try:
                self.flush()
            except Exception:
                _log.exception("metrics could not be carried over; the next ones will be tried")
