"""The command `varlen drain`: makes the end of a server lose no request.

    varlen drain && kill -TERM $(pidof tritonserver)

It runs beside the server: on its machine or in its container, as its user or root. The hook `preStop` of a container
calls it. See `varlen.server.draining` for what the models do meanwhile.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from varlen.server.draining import DrainState, marker_of, remove_stale_markers, write_state
from varlen_client.cli.progress import show_stage
from varlen_client.metrics import all_series, fetch_metrics

_PAUSE_SECONDS = 0.25
# The models export their metrics twice a second.
_EXPORT_SECONDS = 0.6
_FETCH_SECONDS = 2.0
_COMMAND = "tritonserver"


class DrainError(Exception):
    """The server cannot be drained, or did not become idle in time."""


@dataclass(frozen=True, slots=True)
class _Seen:
    # the least `varlen_draining` of any model
    step: int
    open_requests: int


def drain(
    *,
    server_pid: Annotated[
        int | None,
        typer.Option(help="Process id of the server; default: the only tritonserver there is."),
    ] = None,
    metrics_url: Annotated[
        str, typer.Option(help="Metrics page of the server.")
    ] = "http://127.0.0.1:8002/metrics",
    seen_seconds: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Seconds after which every proxy has seen that probes are refused: its interval times its failures.",
        ),
    ] = 10.0,
    timeout: Annotated[
        float, typer.Option(min=0.0, help="Longest time in seconds, `--seen-seconds` included.")
    ] = 60.0,
    undo: Annotated[
        bool, typer.Option("--undo", help="Let the server take requests again, and return at once.")
    ] = False,
) -> None:
    """Take a server out of service without losing a request.

    First its readiness probes fail, so that proxies send requests elsewhere. After `--seen-seconds` it refuses new
    requests. The command returns once all requests are answered. The exit code is 1 if some are still open after
    `--timeout`.
    """
    try:
        marker = _marker(server_pid)
        if undo:
            _mark(marker, "serving")
            return
        _drain(marker, metrics_url, seen_seconds=seen_seconds, timeout=timeout)
    except DrainError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


def _drain(marker: Path, metrics_url: str, *, seen_seconds: float, timeout: float) -> None:
    began = time.monotonic()
    end = began + timeout
    remove_stale_markers()
    _seen(metrics_url)
    _mark(marker, "draining")
    typer.echo(f"draining: readiness probes are refused; waiting {seen_seconds:g} s for proxies")
    with show_stage("waiting for proxies") as on_stage:
        _wait_for_step(1, metrics_url, end)
        time.sleep(max(0.0, min(began + seen_seconds, end) - time.monotonic()))
        _mark(marker, "refusing")
        _wait_for_step(2, metrics_url, end)
        _wait_until_idle(metrics_url, end, timeout, on_stage)
    typer.echo(f"drained in {time.monotonic() - began:.1f} s; the server may be ended")


def _wait_until_idle(
    metrics_url: str, end: float, timeout: float, on_stage: Callable[[str], object]
) -> None:
    idle_since: float | None = None
    while True:
        seen, now = _seen(metrics_url), time.monotonic()
        on_stage(f"waiting for {seen.open_requests} open requests")
        if seen.open_requests:
            idle_since = None
        elif idle_since is None:
            idle_since = now
        elif now - idle_since > _EXPORT_SECONDS:
            return
        if now > end:
            raise DrainError(f"{seen.open_requests} requests are still open after {timeout:g} s")
        time.sleep(_PAUSE_SECONDS)


def _mark(marker: Path, state: DrainState) -> None:
    try:
        write_state(marker, state)
    except OSError as error:
        raise DrainError(
            f"{marker.parent} cannot be written ({error.strerror}); drain as the user of the server, or as the user who"
            " has drained it before"
        ) from None


def _wait_for_step(step: int, metrics_url: str, end: float) -> None:
    last = max(end, time.monotonic() + 4 * _EXPORT_SECONDS)
    while _seen(metrics_url).step < step:
        if time.monotonic() > last:
            raise DrainError(
                f"the models at {metrics_url} do not drain: they are of another server, or run as another user"
            )
        time.sleep(_PAUSE_SECONDS)


def _seen(metrics_url: str) -> _Seen:
    page = fetch_metrics(metrics_url, timeout=_FETCH_SECONDS)
    if page is None:
        raise DrainError(f"there are no metrics at {metrics_url}; name the page with --metrics-url")
    steps = [value for name, _, value in all_series(page) if name == "varlen_draining"]
    if not steps:
        raise DrainError(f"the server at {metrics_url} has no model of varlen")
    waiting = (value for name, _, value in all_series(page) if name == "varlen_open_requests")
    return _Seen(int(min(steps)), int(sum(waiting)))


def _marker(server_pid: int | None) -> Path:
    pid = server_pid if server_pid is not None else _only_server()
    marker = marker_of(pid)
    if marker is None:
        raise DrainError(f"there is no process {pid}")
    return marker


def _only_server() -> int:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and (entry / "comm").read_text().strip() == _COMMAND:
                found.append(int(entry.name))
        except (OSError, UnicodeDecodeError):
            # ended meanwhile, or a name of other bytes
            continue
    if len(found) != 1:
        which = ", ".join(map(str, sorted(found))) or "none"
        raise DrainError(
            f"one {_COMMAND} is expected, and there is {which}: name it with --server-pid"
        )
    return found[0]


if __name__ == "__main__":
    typer.run(drain)
