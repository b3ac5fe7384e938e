"""Metrics of the gateway itself, in Prometheus text. The server exports its own."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.routing import Route

# Seconds; a long answer streams for minutes.
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

# Ignored fields that have a name in metrics and in the log; all others are "other".
MAX_IGNORED_NAMES = 64
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

_LOG = logging.getLogger("varlen.gateway")

# The status of a request whose client left before its answer, as in nginx's log.
CLIENT_LEFT = 499


@dataclass(slots=True)
class Observed:
    """A request in progress, and its status so far."""

    status: int = 500


def path_names(routes: Sequence[Route]) -> Callable[[str], str]:
    """Return a function from paths to names of routes, such as `/v1/models/{name}`, or `other`."""
    plain = {route.path_format for route in routes if "{" not in route.path_format}

    def name_of(path: str) -> str:
        if path in plain:
            return path
        found = (route.path_format for route in routes if route.path_regex.match(path))
        return next(found, "other")

    return name_of


class GatewayMetrics:
    """The gateway's counters, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "varlen_gateway_requests",
            "Requests by path and status; 499 is a client that left before its answer",
            ["path", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "varlen_gateway_request_seconds",
            "Time from the head of a request to the end of its answer",
            ["path"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._in_flight = Gauge(
            "varlen_gateway_requests_in_flight", "Requests in progress", registry=self._registry
        )
        self._tokens = Counter(
            "varlen_gateway_tokens",
            "Tokens of answered requests, as reported in usage",
            ["kind"],
            registry=self._registry,
        )
        self._ignored = Counter(
            "varlen_gateway_ignored_fields",
            "Requests with a field that is not served and ignored",
            ["field"],
            registry=self._registry,
        )
        self._ignored_names: set[str] = set()
        # each look-up of a child takes a lock
        self._prompt_tokens, self._completion_tokens = map(
            self._tokens.labels, ("prompt", "completion")
        )
        self._of_path = cache(self._find_of_path)

    @contextmanager
    def request(self, path: str) -> Iterator[Observed]:
        """Count a request, whose status the caller sets."""
        observed = Observed()
        start = time.perf_counter()
        with self._in_flight.track_inprogress():
            try:
                yield observed
            finally:
                requests, seconds = self._of_path(path, observed.status)
                requests.inc()
                seconds.observe(time.perf_counter() - start)

    def _find_of_path(self, path: str, status: int) -> tuple[Counter, Histogram]:
        return self._requests.labels(path, str(status)), self._seconds.labels(path)

    def count_tokens(self, prompt: int, completion: int = 0) -> None:
        """Count the tokens of an answered request."""
        self._prompt_tokens.inc(prompt)
        self._completion_tokens.inc(completion)

    def count_ignored(self, names: Collection[str]) -> None:
        """Count the unknown fields of a request; the first of each name is logged."""
        for name in {self._ignored_name(name) for name in names}:
            self._ignored.labels(name).inc()

    def _ignored_name(self, name: str) -> str:
        """Return the name of an unknown field in metrics."""
        if name in self._ignored_names:
            return name
        if len(self._ignored_names) >= MAX_IGNORED_NAMES or not _PLAIN_NAME.fullmatch(name):
            return "other"
        self._ignored_names.add(name)
        _LOG.warning("requests have the field %s, which is not served and ignored", name)
        return name

    def page(self) -> bytes:
        """Return the metrics page."""
        return generate_latest(self._registry)
