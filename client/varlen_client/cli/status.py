"""The command `varlen status`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from varlen_client.cli.options import (
    DEFAULT_URLS,
    Model,
    Urls,
    exit_on_error,
    fail,
    usage_error,
)
from varlen_client.errors import VarlenClientError
from varlen_client.metrics import MetricsSample, fetch_metrics, rates, read_metrics
from varlen_client.sync import Client
from varlen_client.transport.endpoint import Endpoint
from varlen_client.transport.session import Status

SAMPLE_SECONDS = 1.0
METRICS_TIMEOUT_SECONDS = 3.0


def status(
    *,
    metrics_url: Annotated[
        str | None, typer.Option(help="Default: port 8002 of the server's host, path /metrics.")
    ] = None,
    urls: Urls = DEFAULT_URLS,
    model: Model = None,
) -> None:
    """Print whether server and models are ready, and the load.

    The load of each replica is its queue and its current rates.
    The exit code is 1 when no replica is ready.
    """
    if metrics_url is not None and len(urls) > 1:
        usage_error("--metrics-url belongs to one server; give one --url with it")
    with exit_on_error():
        endpoints = Endpoint.parse_all(urls)
    ready = [
        _print_replica(url, model, metrics_url or endpoint.default_metrics_url, len(urls) > 1)
        for url, endpoint in zip(urls, endpoints, strict=True)
    ]
    if not any(ready):
        raise typer.Exit(1)


def _print_replica(url: str, model: str | None, metrics_url: str, has_others: bool) -> bool:
    """Print the lines of one replica, and return whether it is ready.

    Args:
        has_others: a replica that does not answer is a line of the table then, not an error.
    """
    lines: list[tuple[str, str]]
    try:
        with Client(url, model) as client:
            found = client.status()
    except VarlenClientError as error:
        if not has_others:
            fail(str(error))
        is_ready, lines = False, [("server", f"NOT READY: {url}: {error}")]
    else:
        is_ready = found.server_ready and found.model_ready
        lines = [
            *_server_lines(url, found),
            *(_traffic_lines(metrics_url, found.model) if found.model else []),
        ]
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in lines:
        table.add_row(name, escape(value))
    Console().print(table)
    return is_ready


def _server_lines(url: str, status: Status) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of each line about the server and its models."""
    state = "ready" if status.server_ready else "NOT READY"
    yield "server", f"{state}: {status.server.name} {status.server.version} at {url}"
    if status.model is None:
        yield "model", "NOT READY: the server has no ready model"
    else:
        yield "model", f"{'ready' if status.model_ready else 'NOT READY'}: {status.model}"
    others = [f"{model.name} ({model.state or 'not loaded'})" for model in status.models]
    if len(others) > 1 or not status.model_ready:
        yield "models", ", ".join(others) or "none"


def _traffic_lines(metrics_url: str, model: str) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of each line about the queue and the requests of `model`."""
    samples: list[MetricsSample] = []
    for delay in (0.0, SAMPLE_SECONDS):
        time.sleep(delay)
        page = fetch_metrics(metrics_url, timeout=METRICS_TIMEOUT_SECONDS)
        if page is None:
            yield "metrics", f"off, or not at {metrics_url} (see --metrics-url)"
            return
        sample = read_metrics(page, model)
        if sample is None:
            yield "metrics", f"{metrics_url} has no varlen metrics of model {model} yet"
            return
        samples.append(sample)
    before, now = samples
    rate = rates(before, now)
    outcomes = ", ".join(
        f"{name} {count:.0f}" for name, count in sorted(now.requests.items(), key=_ok_first)
    )
    yield "queue", f"{now.queued_requests:.0f} requests, {now.queued_tokens:.0f} tokens"
    yield (
        "rates",
        f"{rate.requests:.1f} requests/s, {rate.sequences:.1f} sequences/s, "
        f"{rate.tokens:.0f} tokens/s",
    )
    yield "requests", outcomes or "none so far"


def _ok_first(outcome: tuple[str, float]) -> tuple[bool, str]:
    return outcome[0] != "ok", outcome[0]
