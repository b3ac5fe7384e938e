"""Metrics: counters of this process, and their export to the server's /metrics page.

Engine and sender threads add to plain counters. An exporter thread copies them to the server twice a
second, since each call there is a round trip between processes.
"""

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from threading import Event, Lock, Thread
from typing import Literal, Protocol, TypeAlias, TypeVar, get_args

_log = logging.getLogger(__name__)

Outcome: TypeAlias = Literal["ok", "invalid", "refused", "cancelled", "failed"]
Refusal: TypeAlias = Literal["queue_full", "deadline", "expired", "shared_memory", "draining"]
Kind: TypeAlias = Literal["COUNTER", "GAUGE", "HISTOGRAM"]

ADAPTER = "adapter"
_SECONDS = [0.001 * 2**power for power in range(16)]
_POWERS_OF_TWO = [float(2**power) for power in range(15)]
_FLUSH_SECONDS = 0.5
# Observations of each histogram between drains. Without an exporter, as in process, the oldest are dropped.
_MOST_OBSERVATIONS = 1 << 16


class Metric(str, Enum):
    """A metric of the /metrics page; its value is its name there.

    Attributes:
        kind: the server's name of it.
        label: name of the label that tells its series apart, beside the labels of every metric.
        label_values: the values of `label`; each has a series. Values of the label `adapter` come with the
            model.
    """

    kind: Kind
    description: str
    label: str
    label_values: tuple[str, ...]

    def __new__(
        cls, name: str, kind: Kind, description: str, label: str = "", *label_values: str
    ) -> "Metric":
        metric = str.__new__(cls, name)
        metric._value_ = name
        metric.kind, metric.description = kind, description
        metric.label, metric.label_values = label, label_values
        return metric

    @property
    def unit(self) -> str:
        """The unit, which is part of the name; empty for plain counts."""
        words = self.value.split("_")
        return next((unit for unit in ("seconds", "bytes") if unit in words), "")

    @property
    def buckets(self) -> list[float] | None:
        if self.kind != "HISTOGRAM":
            return None
        return _SECONDS if self.unit == "seconds" else _POWERS_OF_TWO


# fmt: off
class CountedMetric(Metric):
    """Metrics that `Stats` counts."""

    REQUESTS = "varlen_requests_total", "COUNTER", "Requests answered, by outcome", "outcome", *get_args(Outcome)
    REFUSED_REQUESTS = (
        "varlen_refused_requests_total", "COUNTER",
        "Requests refused, by reason: full queue, deadline too soon or passed in the queue, no shared memory,"
        " shutting down",
        "reason", *get_args(Refusal),
    )
    REQUEST_LATENCY = "varlen_request_latency_seconds", "HISTOGRAM", "Seconds from a request's arrival to its response"
    QUEUE_WAIT = "varlen_queue_wait_seconds", "HISTOGRAM", "Seconds from a request's arrival to its first batch"
    SEQUENCES = "varlen_sequences_total", "COUNTER", "Sequences that ran"
    TOKENS = "varlen_tokens_total", "COUNTER", "Tokens that ran, without padding"
    PADDING_TOKENS = "varlen_padding_tokens_total", "COUNTER", "Padding tokens that ran"
    BATCH_SEQUENCES = "varlen_batch_sequences", "HISTOGRAM", "Sequences per batch"
    BATCH_TOKENS = "varlen_batch_tokens", "HISTOGRAM", "Tokens per batch, without padding"
    BATCH_SECONDS = "varlen_batch_seconds", "HISTOGRAM", "Measured seconds per batch"
    BATCH_PREDICTED_SECONDS = "varlen_batch_predicted_seconds", "HISTOGRAM", "Predicted seconds per batch"
    BUSY_SECONDS = (
        "varlen_busy_seconds_total", "COUNTER",
        "Seconds that batches ran; their rate over varlen_slots is the load, 0 to 1"
    )
    SPLIT_BATCHES = "varlen_split_batches_total", "COUNTER", "Batches that ran out of memory and were run in parts"
    WORKER_RESTARTS = "varlen_worker_restarts_total", "COUNTER", "Worker processes that ended and were started again"
    TIME_TO_FIRST_TOKEN = (
        "varlen_time_to_first_token_seconds", "HISTOGRAM",
        "Seconds from a request's arrival to the first token of each sequence",
    )
    TIME_PER_OUTPUT_TOKEN = (
        "varlen_time_per_output_token_seconds", "HISTOGRAM",
        "Mean seconds between the tokens of a sequence, one observation per sequence",
    )
    SCHEDULING_SECONDS = "varlen_scheduling_seconds_total", "COUNTER", "Seconds spent on scheduling"
    ADAPTER_REQUESTS = "varlen_adapter_requests_total", "COUNTER", "Requests accepted for the adapter", ADAPTER


class SnapshotMetric(Metric):
    """Metrics whose current value the service reads: gauges, and totals since the start."""

    QUEUED_REQUESTS = "varlen_queued_requests", "GAUGE", "Requests in the queue, those not tokenized yet included"
    QUEUED_TOKENS = "varlen_queued_tokens", "GAUGE", "Tokens in the queue"
    QUEUED_SECONDS = (
        "varlen_queued_seconds", "GAUGE", "Predicted seconds until the queue has run, if nothing else comes"
    )
    SLOTS = "varlen_slots", "GAUGE", "Batches that run at the same time"
    OPEN_REQUESTS = "varlen_open_requests", "GAUGE", "Requests that were accepted and are not answered yet"
    DRAINING = "varlen_draining", "GAUGE", "0 while the replica serves; 1: probes are refused; 2: all new requests are"
    QUEUED_TEXT_BYTES = "varlen_queued_text_bytes", "GAUGE", "Bytes of text that wait for tokenization"
    WEIGHT_BYTES = "varlen_weight_bytes", "GAUGE", "Bytes of the model's weights, outside the arena"
    ARENA_CAPACITY = "varlen_arena_capacity_bytes", "GAUGE", "Largest size of all arenas in bytes"
    ARENA_RESERVED = "varlen_arena_reserved_bytes", "GAUGE", "Bytes that the arenas have allocated"
    ARENA_CHUNKS = "varlen_arena_chunks", "GAUGE", "Memory chunks that the arenas have allocated"
    ARENA_FOOTPRINT = (
        "varlen_arena_footprint_bytes", "GAUGE", "Bytes that the plan of each worker's last batch uses, together"
    )
    ARENA_PEAK_LIVE = (
        "varlen_arena_peak_live_bytes", "GAUGE",
        "Peak live bytes of each worker's last batch, together: no plan needs less",
    )
    PLAN_SECONDS = "varlen_plan_seconds_total", "COUNTER", "Seconds spent planning memory"
    PLAN_CACHE_HITS = "varlen_plan_cache_hits_total", "COUNTER", "Batches whose memory plan was cached"
    PLAN_CACHE_MISSES = "varlen_plan_cache_misses_total", "COUNTER", "Batches whose memory plan was computed"
    GRAPHS = "varlen_cuda_graphs", "GAUGE", "CUDA graphs that were captured when the model was loaded"
    GRAPH_BYTES = (
        "varlen_cuda_graph_bytes", "GAUGE",
        "Bytes of device memory that these captures took, kernels and workspaces included",
    )
    GRAPH_SECONDS = "varlen_cuda_graph_capture_seconds", "GAUGE", "Seconds that these captures took"
    RUNNING_SEQUENCES = "varlen_running_sequences", "GAUGE", "Sequences that generate"
    WAITING_SEQUENCES = "varlen_waiting_sequences", "GAUGE", "Sequences that wait to generate"
    KV_BLOCKS_USED = "varlen_kv_blocks_used", "GAUGE", "KV blocks that hold keys and values of sequences"
    KV_BLOCKS_RESERVED = "varlen_kv_blocks_reserved", "GAUGE", "KV blocks reserved for sequences, those in use included"
    KV_BLOCKS_CAPACITY = "varlen_kv_blocks_capacity", "GAUGE", "KV blocks that the model has memory for"
    PREFILL_TOKENS = "varlen_prefill_tokens_total", "COUNTER", "Prompt tokens that ran, those computed again included"
    DECODE_TOKENS = (
        "varlen_decode_tokens_total", "COUNTER", "Generated tokens that ran; the last token of an answer does not run"
    )
    DRAFT_TOKENS = "varlen_draft_tokens_total", "COUNTER", "Drafted tokens that ran (`speculation`)"
    ACCEPTED_DRAFT_TOKENS = "varlen_draft_tokens_accepted_total", "COUNTER", "Drafted tokens that were chosen"
    DRAFT_SECONDS = (
        "varlen_draft_saved_seconds", "GAUGE",
        "Seconds of steps that drafts have saved; a loss is below 0",
    )
    PREEMPTIONS = "varlen_preemptions_total", "COUNTER", "Sequences that gave back their KV blocks to be computed again"
    ORDER_PREEMPTIONS = (
        "varlen_order_preemptions_total", "COUNTER",
        "Preempted sequences that gave way to a request before them in the fair order; all others lacked KV blocks",
    )
    PREFIX_CACHE_HIT_TOKENS = (
        "varlen_prefix_cache_hit_tokens_total", "COUNTER", "Prompt tokens whose KV blocks another sequence had computed"
    )
    GRAMMARS = "varlen_grammars", "GAUGE", "Grammars of structured outputs that have a process"
    GRAMMAR_BYTES = "varlen_grammar_bytes", "GAUGE", "Private bytes of the processes of grammars"
    GRAMMAR_COMPILATIONS = "varlen_grammar_compilations_total", "COUNTER", "Grammars that were compiled, or refused"
    GRAMMAR_EVICTIONS = "varlen_grammar_evictions_total", "COUNTER", "Grammars that were ended to free memory"
    CACHE_BYTES = "varlen_response_cache_bytes", "GAUGE", "Bytes of the response cache, keys and bookkeeping included"
    CACHE_ENTRIES = "varlen_response_cache_entries", "GAUGE", "Entries in the response cache"
    CACHE_HITS = "varlen_response_cache_hits_total", "COUNTER", "Sequences answered from the response cache"
    CACHE_JOINED = "varlen_response_cache_joined_total", "COUNTER", "Sequences that joined an equal sequence in flight"
    CACHE_MISSES = "varlen_response_cache_misses_total", "COUNTER", "Sequences that were not in the response cache"
    CACHE_EVICTIONS = "varlen_response_cache_evictions_total", "COUNTER", "Entries evicted for size or age"
    ADAPTER_LOADS = (
        "varlen_adapter_loads_total", "COUNTER", "Times that a worker read the adapter into memory", ADAPTER
    )
    ADAPTER_EVICTIONS = (
        "varlen_adapter_evictions_total", "COUNTER", "Times that the adapter made room for another one in a worker",
        ADAPTER,
    )
    ADAPTER_BYTES = (
        "varlen_adapter_resident_bytes", "GAUGE", "Bytes of the adapter in the memory of all workers", ADAPTER
    )
# fmt: on


_SomeMetric = TypeVar("_SomeMetric", bound=Metric)

METRICS: tuple[Metric, ...] = (*CountedMetric, *SnapshotMetric)
# Values of metrics; of a metric with a label, by the label's value.
MetricsSnapshot: TypeAlias = Mapping[SnapshotMetric | tuple[SnapshotMetric, str], float]


@dataclass(frozen=True, slots=True)
class Drained:
    """Counts since the last drain, as in a `MetricsSnapshot`, and observations."""

    counts: Mapping[CountedMetric | tuple[CountedMetric, str], float]
    observed: Mapping[CountedMetric, deque[float]]


class Stats:
    """Counts since they were last drained. Any thread may add."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._clear()

    def _clear(self) -> None:
        self._counts: defaultdict[CountedMetric | tuple[CountedMetric, str], float]
        self._observed: defaultdict[CountedMetric, deque[float]]
        self._counts = defaultdict(float)
        self._observed = defaultdict(lambda: deque(maxlen=_MOST_OBSERVATIONS))

    def count_request(self, outcome: Outcome, seconds: float) -> None:
        with self._lock:
            self._counts[CountedMetric.REQUESTS, outcome] += 1
            self._observed[CountedMetric.REQUEST_LATENCY].append(seconds)

    def count_start(self, scheduling_seconds: float, waits: Iterable[float]) -> None:
        """Record the start of a batch.

        Args:
            scheduling_seconds: time spent choosing it.
            waits: time in the queue of each request that starts with it, in seconds.
        """
        with self._lock:
            self._counts[CountedMetric.SCHEDULING_SECONDS] += scheduling_seconds
            self._observed[CountedMetric.QUEUE_WAIT].extend(waits)

    def count_refusal(self, reason: Refusal) -> None:
        self.count((CountedMetric.REFUSED_REQUESTS, reason))

    def count_adapter(self, name: str) -> None:
        self.count((CountedMetric.ADAPTER_REQUESTS, name))

    def count_batch(self, sequences: int, tokens: int, padding: int) -> None:
        with self._lock:
            self._observed[CountedMetric.BATCH_SEQUENCES].append(sequences)
            self._observed[CountedMetric.BATCH_TOKENS].append(tokens)
            self._counts[CountedMetric.SEQUENCES] += sequences
            self._counts[CountedMetric.TOKENS] += tokens
            self._counts[CountedMetric.PADDING_TOKENS] += padding

    def count_batch_seconds(self, *, predicted: float, actual: float) -> None:
        """Record the predicted and the measured time of a batch, in seconds."""
        with self._lock:
            self._observed[CountedMetric.BATCH_PREDICTED_SECONDS].append(predicted)
            self._observed[CountedMetric.BATCH_SECONDS].append(actual)
            self._counts[CountedMetric.BUSY_SECONDS] += actual

    def count(self, metric: CountedMetric | tuple[CountedMetric, str]) -> None:
        with self._lock:
            self._counts[metric] += 1

    def observe(self, metric: CountedMetric, value: float) -> None:
        with self._lock:
            self._observed[metric].append(value)

    def drain(self) -> Drained:
        with self._lock:
            drained = Drained(self._counts, self._observed)
            self._clear()
        return drained


class Series(Protocol):
    """One series of a metric, as the server registers it."""

    def increment(self, value: float) -> None: ...
    def set(self, value: float) -> None: ...
    def observe(self, value: float) -> None: ...


# (metric, labels) -> series
SeriesMaker: TypeAlias = Callable[[Metric, dict[str, str]], Series]


class Exporter:
    """A thread that copies `Stats` and snapshots of queue and memory to the server's metrics."""

    def __init__(
        self,
        stats: Stats,
        snapshot: Callable[[], MetricsSnapshot],
        make_series: SeriesMaker,
        labels: dict[str, str],
        adapters: Iterable[str] = (),
    ) -> None:
        """Register every series, so that each is on the page from the start.

        Args:
            stats: counts that only this object drains.
            snapshot: returns the value of each gauge, and of each total since the start; 0 where it has none.
            make_series: registers one series with the server; raises when metrics are off.
        """
        self._stats = stats
        self._snapshot = snapshot
        # kept alive: the families that it holds must outlive their series
        self._make_series = make_series
        names = list(adapters)
        self._series: dict[Metric | tuple[Metric, str], Series] = {}
        for key in _keys(METRICS, names):
            metric, value = key if isinstance(key, tuple) else (key, "")
            self._series[key] = make_series(
                metric, {**labels, metric.label: value} if value else labels
            )
        # a call of the server is a round trip: only what has changed is exported
        self._exported = dict.fromkeys(_keys(SnapshotMetric, names), 0.0)
        self._stop = Event()
        self._thread = Thread(target=self._loop, name="varlen-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def flush(self) -> None:
        drained = self._stats.drain()
        for key, number in drained.counts.items():
            self._series[key].increment(number)
        for histogram, values in drained.observed.items():
            for value in values:
                self._series[histogram].observe(value)
        snapshot = self._snapshot()
        for read, before in self._exported.items():
            value = snapshot.get(read, 0.0)
            if value == before:
                continue
            metric = read[0] if isinstance(read, tuple) else read
            if metric.kind == "GAUGE":
                self._series[read].set(value)
            else:
                self._series[read].increment(value - before)
            self._exported[read] = value

    def _loop(self) -> None:
        while not self._stop.wait(_FLUSH_SECONDS):
            try:
                self.flush()
            except Exception:
                _log.exception("metrics could not be exported; trying again at the next export")


def _keys(
    metrics: Iterable[_SomeMetric], adapters: Sequence[str]
) -> Iterator[_SomeMetric | tuple[_SomeMetric, str]]:
    for metric in metrics:
        if metric.label:
            values = adapters if metric.label == ADAPTER else metric.label_values
            yield from ((metric, value) for value in values)
        else:
            yield metric
