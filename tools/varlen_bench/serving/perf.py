"""A second opinion: the server's own load generator, perf_analyzer, at one of our loads.

It sends the same lengths at the same mean rate, Poisson too. Its own report leaves out what it calls unstable and
understates throughput when it is told how many requests to send, so figures are taken from its record of every
request. Its latency begins when a request is sent, not when it was due.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from varlen_bench.harness.worker import last_line
from varlen_bench.serving.arrivals import token_ids
from varlen_bench.serving.client import INPUT
from varlen_bench.serving.figures import percentile
from varlen_bench.serving.rows import Row
from varlen_bench.serving.served import WARMUP_SECONDS, Load
from varlen_tools.local_server import find_command

_TIMEOUT_SECONDS = 300.0
_NANOSECONDS = 1e9


class AnalyzerError(Exception):
    """perf_analyzer gave no figures; the message is its last words."""


def cross_check(address: str, model: str, load: Load, vocabulary: int) -> Row:
    """Return the row of a load as perf_analyzer offers and sees it.

    Raises:
        AnalyzerError: it failed.
        ServerError: it is not there.
    """
    count = round(load.rate * (WARMUP_SECONDS + load.seconds))
    ids = token_ids(load.mix.take(count, load.seed), vocabulary, load.seed)
    data = [{INPUT: {"content": one, "shape": [len(one)]}} for one in ids]
    with TemporaryDirectory(prefix="varlen-perf-") as scratch:
        folder = Path(scratch)
        (folder / "requests.json").write_text(json.dumps({"data": data}), encoding="utf-8")
        _run(folder, address, model, load, count)
        record = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    return analyzer_row(record, model, load)


def analyzer_row(record: dict[str, Any], model: str, load: Load) -> Row:
    """Return the row that a record of perf_analyzer makes, less what was sent while we would warm up."""
    (experiment,) = record["experiments"]
    requests = sorted(experiment["requests"], key=lambda request: request["timestamp"])
    begin = requests[0]["timestamp"] + WARMUP_SECONDS * _NANOSECONDS
    measured = [request for request in requests if request["timestamp"] >= begin]
    answered = [request for request in measured if request["response_timestamps"]]
    latencies = [_seconds(request, request["response_timestamps"][-1]) for request in answered]
    span = (measured[-1]["timestamp"] - begin) / _NANOSECONDS
    end = measured[-1]["timestamp"]
    done = sum(
        begin <= moment < end for request in requests for moment in request["response_timestamps"]
    )
    return Row(
        load.mix.label,
        model,
        "perf_analyzer",
        offered=load.rate,
        seconds=span,
        warmup=len(requests) - len(measured),
        sent=len(requests),
        ok=sum(bool(request["response_timestamps"]) for request in requests),
        served=done / span,
        mean_ms=1000 * statistics.fmean(latencies),
        p50_ms=1000 * (percentile(latencies, 50) or 0.0),
        p99_ms=1000 * (percentile(latencies, 99) or 0.0),
    )


def _seconds(request: dict[str, Any], until: int) -> float:
    return float(until - request["timestamp"]) / _NANOSECONDS


def _run(folder: Path, address: str, model: str, load: Load, count: int) -> None:
    command = [
        find_command("perf_analyzer"),
        *("-m", model, "-b", "1", "-i", "grpc", "-u", address, "-a"),
        *("--input-data", "requests.json"),
        *("--request-rate-range", f"{load.rate:g}", "--request-distribution", "poisson"),
        # one window of so many requests, stable or not
        *("--request-count", str(count), "-s", "999"),
        *("--profile-export-file", "profile.json"),
    ]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise AnalyzerError(f"perf_analyzer did not end within {_TIMEOUT_SECONDS:.0f} s") from None
    if done.returncode != 0:
        raise AnalyzerError(last_line(done.stderr + done.stdout))
