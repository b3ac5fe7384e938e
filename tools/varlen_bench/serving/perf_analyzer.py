"""A cross-check: one of our loads, sent by the server's own load generator.

Its report omits what it calls unstable, and understates throughput if it is told the number of requests, so figures
are from its record of every request. Its latency begins when a request is sent, not when it was due.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from varlen_bench.harness.generator import LoadRecord, RequestRecord
from varlen_bench.harness.worker import last_line
from varlen_bench.workers.serving import INPUT, Load, Row, load_row
from varlen_tools.local_server import find_command

_MAX_SECONDS = 300.0
_NANOSECONDS = 1e9
# Columns that its record of requests gives.
_COLUMNS = ("offered", "seconds", "warmup", "sent", "ok", "served", "mean_ms", "p50_ms", "p99_ms")


def measure(address: str, model: str, load: Load, requests: list[list[int]]) -> Row:
    """Return the row of a load that perf_analyzer offers.

    Raises:
        RuntimeError: it failed; the message is its last line.
        ServerError: it is not installed.
    """
    data = [{INPUT: {"content": ids, "shape": [len(ids)]}} for ids in requests]
    with TemporaryDirectory(prefix="varlen-perf-") as scratch:
        folder = Path(scratch)
        (folder / "requests.json").write_text(json.dumps({"data": data}), encoding="utf-8")
        _run(folder, address, model, load.rate or 0.0, len(requests))
        record = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    return analyzer_row(record, model, load)


def analyzer_row(record: dict[str, Any], model: str, load: Load) -> Row:
    """Return the row of perf_analyzer's record."""
    (experiment,) = record["experiments"]
    begin = min(request["timestamp"] for request in experiment["requests"])
    requests = []
    for number, request in enumerate(experiment["requests"]):
        sent = (request["timestamp"] - begin) / _NANOSECONDS
        requests.append(RequestRecord(number, due=sent, sent=sent))
        if answers := request["response_timestamps"]:
            requests[-1].done = (answers[-1] - begin) / _NANOSECONDS
            requests[-1].outcome = "ok"
    end = max(request.sent for request in requests)
    row = load_row(load, model, LoadRecord(requests), end)
    figures: dict[str, Any] = {column: getattr(row, column) for column in _COLUMNS}
    return Row(load.mix.label, model, "perf_analyzer", **figures)


def _run(folder: Path, address: str, model: str, rate: float, count: int) -> None:
    command = [
        find_command("perf_analyzer"),
        *("-m", model, "-b", "1", "-i", "grpc", "-u", address, "-a"),
        *("--input-data", "requests.json"),
        *("--request-rate-range", f"{rate:g}", "--request-distribution", "poisson"),
        # one window of all requests, stable or not
        *("--request-count", str(count), "-s", "999"),
        *("--profile-export-file", "profile.json"),
    ]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_MAX_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"perf_analyzer did not end within {_MAX_SECONDS:.0f} s") from None
    if done.returncode != 0:
        raise RuntimeError(last_line(done.stderr + done.stdout))
