"""The command `varlen status`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from varlen_client.cli.options import DEFAULT_URLS, Urls, exit_on_error, fail, usage_error
from varlen_client.errors import VarlenClientError
from varlen_client.metrics import (
    MetricsSample,
    all_series,
    fetch_metrics,
    pages_by_model,
    rates,
    read_metrics,
)
from varlen_client.sync import Client
from varlen_client.transport.endpoint import Endpoint
from varlen_client.transport.session import Status

SAMPLE_SECONDS = 1.0
METRICS_TIMEOUT_SECONDS = 3.0
_COLUMNS = ("model", "state", "task", "queued", "requests/s", "tokens/s", "requests")


def status(
    *,
    metrics_url: Annotated[
        str | None,
        typer.Option(
            help="Default: the port after the server's gRPC port, else 8002, of the same host, path /metrics."
        ),
    ] = None,
    urls: Urls = DEFAULT_URLS,
    model: Annotated[
        str | None, typer.Option(envvar="VARLEN_MODEL", help="Default: all models of the server.")
    ] = None,
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
        _print_replica(
            url, model, [metrics_url] if metrics_url else endpoint.metrics_urls, len(urls) > 1
        )
        for url, endpoint in zip(urls, endpoints, strict=True)
    ]
    if not any(ready):
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Model:
    """A model of a server.

    Attributes:
        state: state in the server's list of models, such as READY; empty if it is not loaded.
        task: its task, if it is ready and the task is known.
    """

    name: str
    state: str
    task: str

    @property
    def is_ready(self) -> bool:
        """Whether it answers requests."""
        return self.state == "READY"


def _print_replica(
    url: str, model: str | None, metrics_urls: Sequence[str], has_others: bool
) -> bool:
    """Print server and models of one replica, and return whether it is ready.

    Args:
        model: the only model to show; None shows all.
        has_others: a replica that does not answer is a line then, not an error.
    """
    console = Console()
    try:
        with Client(url, model) as client:
            found = client.status()
            models = _models(client, model, found)
    except VarlenClientError as error:
        if not has_others:
            fail(str(error))
        console.print(f"server   NOT READY: {url}: {error}", markup=False, highlight=False)
        return False
    state = "ready" if found.server_ready else "NOT READY"
    lines = [("server", f"{state}: {found.server.name} {found.server.version} at {url}")]
    metrics_url = _metrics_url(metrics_urls, {each.name for each in found.models})
    tried = " or ".join(metrics_urls)
    lines.append(
        ("metrics", metrics_url or f"off, or not at {tried} (give their address: --metrics-url)")
    )
    if not models:
        lines.append(("models", "NOT READY: the server has none"))
    header = Table.grid(padding=(0, 2))
    for name, value in lines:
        header.add_row(name, escape(value))
    console.print(header)
    if models:
        loads = _loads(metrics_url, models) if metrics_url else {}
        console.print(_table(models, loads))
    return found.server_ready and any(each.is_ready for each in models)


def _models(client: Client, model: str | None, found: Status) -> list[_Model]:
    """Return the models of a server by name, or only the chosen one."""
    # of several versions, the one that answers
    states = {each.name: each.state for each in sorted(found.models, key=lambda each: each.ready)}
    names = sorted(states) if model is None else [model]
    infos = client.model_infos([name for name in names if states.get(name) == "READY"])
    tasks = {name: info.known_task or "" for name, info in infos.items()}
    return [_Model(name, states.get(name, ""), tasks.get(name, "")) for name in names]


def _metrics_url(urls: Sequence[str], models: set[str]) -> str | None:
    """Return the first address whose page has metrics of one of these models.

    A server does not say where its metrics are.
    """
    for url in urls:
        page = fetch_metrics(url, timeout=METRICS_TIMEOUT_SECONDS)
        if page is not None and any(
            labels.get("model") in models for _, labels, _ in all_series(page)
        ):
            return url
    return None


def _loads(url: str, models: Sequence[_Model]) -> dict[str, list[str]]:
    """Return state and load, in columns, of each model that has metrics of varlen."""
    before = _samples(url, models)
    time.sleep(SAMPLE_SECONDS)
    now = _samples(url, models)
    return {name: _load(before[name], now[name]) for name in before.keys() & now.keys()}


def _samples(url: str, models: Sequence[_Model]) -> dict[str, MetricsSample]:
    page = fetch_metrics(url, timeout=METRICS_TIMEOUT_SECONDS) or ""
    pages = pages_by_model(page)
    samples = {each.name: read_metrics(pages.get(each.name, ""), each.name) for each in models}
    return {name: sample for name, sample in samples.items() if sample is not None}


def _load(before: MetricsSample, now: MetricsSample) -> list[str]:
    rate = rates(before, now)
    outcomes = sorted(now.requests.items(), key=lambda each: (each[0] != "ok", each[0]))
    tokens = f" ({now.queued_tokens:.0f} tokens)" if now.queued_tokens else ""
    return [
        "draining" if now.is_draining else "ready",
        f"{now.queued_requests:.0f}{tokens}",
        f"{rate.requests:.1f}",
        f"{rate.tokens:.0f}",
        ", ".join(f"{name} {count:.0f}" for name, count in outcomes if count) or "none so far",
    ]


def _table(models: Sequence[_Model], loads: Mapping[str, list[str]]) -> Table:
    """Return a row for each model."""
    columns = _COLUMNS if loads else _COLUMNS[:3]
    table = Table(box=None, pad_edge=False, header_style="")
    for name in columns:
        table.add_column(name, no_wrap=name != "requests")
    for each in models:
        state, *load = loads.get(each.name, ["ready"])
        if not each.is_ready:
            state = f"NOT READY ({each.state or 'not loaded'})"
        row = [each.name, state, each.task, *load]
        table.add_row(*map(escape, row))
    return table
