"""The command `varlen status`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from varlen_client.cli.options import DEFAULT_URL, Model, Url, exit_on_error
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
    url: Url = DEFAULT_URL,
    model: Model = None,
) -> None:
    """Print whether server and model are ready, the queue, and current rates.

    The exit code is 1 when the server or the model is not ready.
    """
    with exit_on_error(), Client(url, model) as client:
        server_status = client.status()
        metrics_url = metrics_url or Endpoint.parse(url).default_metrics_url

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in [
        *_server_lines(url, server_status),
        *(_traffic_lines(metrics_url, server_status.model) if server_status.model else []),
    ]:
        table.add_row(name, escape(value))
    Console().print(table)
    if not (server_status.server_ready and server_status.model_ready):
        raise typer.Exit(1)


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
