"""Spans of traced requests: their parent, times, attributes and errors."""

import json
import sys
import time
from threading import Event, Thread

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from varlen.telemetry.tracing import RequestTracer

# Longer than a close takes on a busy machine.
SECONDS = 20.0
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def context(flags="01"):
    """Return a context as the server passes it."""
    return json.dumps({"traceparent": f"00-{TRACE}-{PARENT}-{flags}"})


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter):
    tracer = RequestTracer("minilm", "1", lambda: SimpleSpanProcessor(exporter))
    yield tracer
    tracer.close()


def spans(exporter):
    """Return the spans by name, in order of their begin."""
    found = sorted(exporter.get_finished_spans(), key=lambda span: span.start_time)
    return {span.name: span for span in found}


def seconds(span):
    return (span.end_time - span.start_time) / 1e9


def test_the_spans_of_a_request_follow_each_other_below_the_servers_span(tracer, exporter):
    arrival = time.monotonic() - 3
    trace = tracer.begin(context(), arrival)
    trace.accept(rows=2, tokens=30)
    trace.start(arrival + 1, sequences=8, tokens=100)
    trace.finished = arrival + 2.5

    tracer.end(trace, "ok")

    queue, run, send = spans(exporter).values()
    assert [queue.name, run.name, send.name] == ["varlen.queue", "varlen.run", "varlen.send"]
    assert seconds(queue) == pytest.approx(1, abs=1e-3)
    assert seconds(run) == pytest.approx(1.5, abs=1e-3)
    assert (run.start_time, send.start_time) == (queue.end_time, run.end_time)
    assert abs(send.end_time / 1e9 - time.time()) < 10
    for span in (queue, run, send):
        assert f"{span.context.trace_id:032x}" == TRACE
        assert f"{span.parent.span_id:016x}" == PARENT
        assert span.status.status_code is StatusCode.UNSET
        assert dict(span.attributes) == {
            "varlen.model": "minilm",
            "varlen.model.version": "1",
            "varlen.rows": 2,
            "varlen.tokens": 30,
            "varlen.batch.sequences": 8,
            "varlen.batch.tokens": 100,
            "varlen.outcome": "ok",
        }


@pytest.mark.parametrize("starts", [True, False], ids=["in the run", "in the queue"])
def test_the_phase_in_which_a_request_failed_has_the_error(tracer, exporter, starts):
    trace = tracer.begin(context(), time.monotonic())
    if starts:
        trace.start(time.monotonic(), sequences=1, tokens=1)

    tracer.end(trace, "failed", "it failed")

    *others, failed, send = spans(exporter).values()
    assert failed.name == ("varlen.run" if starts else "varlen.queue")
    assert (failed.status.status_code, failed.status.description) == (StatusCode.ERROR, "it failed")
    assert all(span.status.status_code is StatusCode.UNSET for span in [*others, send])


@pytest.mark.parametrize(
    "given",
    [None, context("00"), "{}", '{"traceparent": "00-nonsense-01"}', '{"tracestate": "a"b"}'],
    ids=["no tracing", "not sampled", "empty", "not valid", "not JSON"],
)
def test_a_request_that_is_not_sampled_has_no_trace(tracer, given):
    assert tracer.begin(given, 0.0) is None


def test_the_environment_names_the_service(monkeypatch, exporter):
    def service():
        tracer = RequestTracer("m", "1", lambda: SimpleSpanProcessor(exporter))
        tracer.end(tracer.begin(context(), 0.0), "ok")
        return exporter.get_finished_spans()[-1].resource.attributes["service.name"]

    assert service() == "varlen"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "embeddings")
    assert service() == "embeddings"


def test_packages_are_imported_with_the_first_context(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    tracer = RequestTracer("m", "1")

    assert tracer.begin(None, 0.0) is None
    with pytest.raises(ImportError):
        tracer.begin(context(), 0.0)
    tracer.close()


def test_a_wrong_variable_of_the_packages_is_an_error_of_the_first_context(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4096")
    tracer = RequestTracer("m", "1")

    with pytest.raises(ValueError, match="max_export_batch_size"):
        tracer.begin(context(), 0.0)


def test_a_collector_that_does_not_answer_holds_up_an_unload_for_seconds_only(monkeypatch):
    monkeypatch.setattr("varlen.telemetry.tracing._CLOSE_SECONDS", 0.01)
    answered, asked = Event(), Event()

    def shutdown():
        asked.set()
        answered.wait()

    processor = SimpleSpanProcessor(InMemorySpanExporter())
    monkeypatch.setattr(processor, "shutdown", shutdown)
    tracer = RequestTracer("m", "1", lambda: processor)
    tracer.begin(context(), 0.0)
    closing = Thread(target=tracer.close)

    closing.start()
    is_asked = asked.wait(SECONDS)
    closing.join(SECONDS)

    is_closed = not closing.is_alive()
    answered.set()
    closing.join()
    assert is_asked
    assert is_closed
