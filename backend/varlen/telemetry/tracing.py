"""OpenTelemetry spans of requests, as children of the server's own.

The server passes a trace context with each request that it samples. While such a request runs, only times are kept;
its spans are made after its answer has been sent:

    varlen.queue    from its arrival to the start of its first batch, tokenization included
    varlen.run      until its last output
    varlen.send     until its final response has been sent

The extra `tracing` has the packages; their environment variables say where spans go.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Thread
from typing import TYPE_CHECKING, TypeAlias

from varlen.errors import shorten

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

Attributes: TypeAlias = dict[str, int | str]

# A collector that does not answer may not hold up an unload for longer.
_CLOSE_SECONDS = 3.0
_NANOSECONDS = 1e9


@dataclass(slots=True)
class RequestTrace:
    """Times of a traced request, in seconds of `time.monotonic`.

    Attributes:
        parent: the server's span.
        started: start of its first batch; None if it has not run.
        finished: time of its last output or error.
    """

    parent: Context
    arrival: float
    attributes: Attributes = field(default_factory=dict)
    started: float | None = None
    finished: float | None = None

    def accept(self, *, rows: int, tokens: int) -> None:
        self.attributes |= {"varlen.rows": rows, "varlen.tokens": tokens}

    def start(self, now: float, *, sequences: int, tokens: int) -> None:
        """Note the start and the size of its first batch."""
        self.started = now
        self.attributes |= {"varlen.batch.sequences": sequences, "varlen.batch.tokens": tokens}

    def finish(self) -> None:
        self.finished = time.monotonic()

    def phases(self, now: float) -> list[tuple[str, float, float]]:
        """Return name, begin and end of each span, given that the answer has been sent."""
        finished = now if self.finished is None else self.finished
        if self.started is None:
            # refused, or answered from the cache
            return [("varlen.queue", self.arrival, finished), ("varlen.send", finished, now)]
        return [
            ("varlen.queue", self.arrival, self.started),
            ("varlen.run", self.started, finished),
            ("varlen.send", finished, now),
        ]


class RequestTracer:
    """Makes the spans of the requests of one model. Thread-safe.

    The packages are imported with the first context, which takes 0.2 s: without one they take 7 MiB for nothing.
    """

    def __init__(
        self, model: str, version: str, new_processor: Callable[[], SpanProcessor] | None = None
    ) -> None:
        """Wait for the first context.

        Args:
            new_processor: returns what gets the spans; None is the exporter that the environment describes.
        """
        self._new_processor = new_processor or _exporting
        self._provider: TracerProvider | None = None
        self._attributes: Attributes = {"varlen.model": model, "varlen.model.version": version}

    def _start(self) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider

        processor = self._new_processor()
        # the variables of the environment take precedence
        resource = Resource({SERVICE_NAME: "varlen"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("varlen")

    def begin(self, context: str | None, arrival: float) -> RequestTrace | None:
        """Return the trace of a request; None if it is not sampled.

        Args:
            context: the server's headers of W3C Trace Context as a JSON object; None if it traces nothing.
            arrival: time of the request's arrival, in seconds of `time.monotonic`.

        Raises:
            ImportError, ValueError: a package is absent, or a variable of theirs is wrong.
        """
        if context is None:
            return None
        if self._provider is None:
            self._start()
        from opentelemetry.trace import get_current_span
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        try:
            headers = json.loads(context)
        except ValueError:
            # a client's header, which the server repeats
            return None
        parent = TraceContextTextMapPropagator().extract(headers)
        if not get_current_span(parent).get_span_context().trace_flags.sampled:
            return None
        return RequestTrace(parent, arrival, dict(self._attributes))

    def end(self, trace: RequestTrace, outcome: str, error: str | None = None) -> None:
        """Make the spans of a request whose final response has been sent.

        Args:
            error: sent to the client, if it failed.
        """
        from opentelemetry.trace import Status, StatusCode

        now = time.monotonic()
        attributes = {**trace.attributes, "varlen.outcome": outcome}
        # of the system's clock against the monotonic one
        offset = time.time() - now
        phases = trace.phases(now)
        for index, (name, begin, end) in enumerate(phases):
            span = self._tracer.start_span(
                name,
                context=trace.parent,
                attributes=attributes,
                start_time=int((begin + offset) * _NANOSECONDS),
            )
            # what failed came before the send
            if error is not None and index == len(phases) - 2:
                span.set_status(Status(StatusCode.ERROR, shorten(error)))
            span.end(int((end + offset) * _NANOSECONDS))

    def close(self) -> None:
        """Export the last spans, for a few seconds at most."""
        if self._provider is None:
            return
        thread = Thread(target=self._provider.shutdown, name="varlen-tracer", daemon=True)
        thread.start()
        thread.join(_CLOSE_SECONDS)


def _exporting() -> SpanProcessor:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(OTLPSpanExporter())
