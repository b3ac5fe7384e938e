"""Models of a GPU in a real server: kept answers, and loads of many clients."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from varlen_bench.gpu_report.figures import MUST_BE_0, Figure, figure
from varlen_bench.gpu_report.served_models import BIG, EIGHT, Served, Task, served_models
from varlen_bench.harness.resident import MIB, family_bytes
from varlen_bench.harness.summary import percentile_ms
from varlen_bench.harness.worker import WorkerProcess
from varlen_bench.serving import perf_analyzer
from varlen_bench.workers.requests import RequestLoad
from varlen_bench.workers.serving import Load
from varlen_bench.workloads import WORDS, named_mix
from varlen_client import Client, VarlenClientError
from varlen_tools.local_server import LOOPBACK, LocalServer

# GPU metrics need DCGM. A model that does not load must not keep the others from it.
_ARGUMENTS = (
    *("--allow-gpu-metrics=false", "--model-load-thread-count=8"),
    *("--exit-on-error=false", "--strict-readiness=false"),
)
# In a rehearsal the limit of the stage decides.
_READY_SECONDS = {"cuda": 90.0, "cpu": 900.0}
_CLIENT = "varlen_bench.workers.requests"
_MOST_CLIENTS = 8
# Seconds of a load, and what its clients and its last answers take.
_LOAD_SECONDS, _TINY_SECONDS, _AROUND_LOAD = 3.0, 0.3, 3.0
_SHORT_WORDS = (3, 30)
# The most important first, in case the time runs out.
_LOADS = (
    *(RequestLoad("minilm", "embed", count, _LOAD_SECONDS) for count in (1, 8, 64)),
    *(RequestLoad("gpt2_small", "greedy", count, _LOAD_SECONDS) for count in (1, 8, 64)),
    *(RequestLoad("llama_1b", "greedy", count, _LOAD_SECONDS) for count in (1, 8, 64)),
    RequestLoad(BIG, "translate", 1, _LOAD_SECONDS, prompt_tokens=30, answer_tokens=64),
    RequestLoad("gpt2_small", "sampled", 64, _LOAD_SECONDS),
    *(RequestLoad("bert_base", "embed", count, _LOAD_SECONDS) for count in (1, 8, 64)),
    RequestLoad(BIG, "translate", 16, _LOAD_SECONDS, prompt_tokens=30, answer_tokens=64),
    RequestLoad("minilm", "embed short", 64, _LOAD_SECONDS, words=_SHORT_WORDS),
    RequestLoad("llama_1b", "penalty", 64, _LOAD_SECONDS),
    RequestLoad("gpt2_small", "beams", 8, _LOAD_SECONDS, answer_tokens=64),
    RequestLoad("llama_1b", "sampled", 8, _LOAD_SECONDS),
    RequestLoad("minilm_growing", "embed", 64, _LOAD_SECONDS),
    RequestLoad("gpt2_of_server", "greedy", 8, _LOAD_SECONDS),
)
# Load of a translator among eight.
_EIGHT_LOAD = RequestLoad(
    BIG, "translate", 4, 2 * _LOAD_SECONDS, prompt_tokens=30, answer_tokens=64
)
_ANALYZED = "minilm"
# Requests/s that perf_analyzer offers, as a part of what 64 requests in flight reach.
_ANALYZED_PART = 0.5
_ANSWER_TOKENS = 32


def measure_server(served: Served) -> Iterator[Figure]:
    """Yield the figures of a server with all models; keep its answers for `judge`."""
    row = partial(figure, "server")
    # the stage before may have ended too early
    models = served_models(served.device)
    names = [each for each in models if (served.repository / each / "config.pbtxt").is_file()]
    with _serving(served, names) as server:
        began = perf_counter()
        server.wait_ready(_READY_SECONDS[served.device])
        yield row("all models", "ready after", perf_counter() - began, "s")
        lost = [name for name in models if not (name in names and _is_ready(server, name))]
        yield row(", ".join(lost) or "all models", "models that do not load", len(lost), MUST_BE_0)
        ready = {name: each for name, each in models.items() if name not in lost}
        kept: dict[str, Any] = {}
        for name, model in ready.items():
            try:
                kept[name] = answers_of(server.grpc_url, name, model.task)
            except VarlenClientError as error:
                yield row(f"{name}: {error}", "models without an answer", 1, MUST_BE_0)
        served.answers.write_text(json.dumps(kept), encoding="utf-8")
        yield from _loads(
            served, server, [each for each in _loads_of(served) if each.model in ready]
        )
        yield row("all models", "exit status of the server", server.stop(), MUST_BE_0)


def measure_eight(served: Served) -> Iterator[Figure]:
    """Yield memory and speed of eight translators on one card, of two in a rehearsal."""
    count = 2 if served.is_small else EIGHT
    names = [BIG, *(f"{BIG}_{number}" for number in range(2, count + 1))]
    row = partial(figure, "eight", f"{count} Transformer-big")
    before = _device_memory()
    with _serving(served, names) as server:
        began = perf_counter()
        server.wait_ready(_READY_SECONDS[served.device])
        yield row("ready after", perf_counter() - began, "s")
        lost = sum(not _is_ready(server, each) for each in names)
        yield row("models that do not load", lost, MUST_BE_0)
        after = _device_memory()
        if before is None or after is None:
            used = family_bytes(server.pid) / MIB
            yield row("memory of a model, on the host", used / count, "MiB")
        else:
            yield row("memory of a model", (after - before) / count, "MiB")
        load = _sized(served, _EIGHT_LOAD)
        with _clients(server, count) as clients:
            yield from _load_figures(f"{BIG} alone", [load], clients)
            together = [replace(load, model=name, seed=seed) for seed, name in enumerate(names)]
            yield from _load_figures(f"{count} models", together, clients)


@contextmanager
def _serving(served: Served, names: Sequence[str]) -> Iterator[LocalServer]:
    """Yield a server of some models, and keep its log beside the answers."""
    models = [served.repository / name for name in names]
    with LocalServer(models, arguments=_ARGUMENTS, ends_with_thread=True) as server:
        try:
            yield server
        finally:
            print(server.log_tail())
            shutil.copy(server.log_file, served.folder / "server.log")


def _is_ready(server: LocalServer, name: str) -> bool:
    connection = http.client.HTTPConnection(LOOPBACK, server.http_port, timeout=10)
    try:
        connection.request("GET", f"/v2/models/{name}/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def answers_of(url: str, name: str, task: Task) -> dict[str, Any]:
    """Return inputs and answers of a model, which `judge` compares with transformers.

    Raises:
        VarlenClientError: a request failed.
    """
    with Client(url, model=name) as client:
        if task == "embed":
            # vectors of texts with a word of their own differ most
            words = [
                [WORDS[(i if j % 2 else i // 7) % 7] for j in range(1 + 3 * i)] for i in range(16)
            ]
            texts = [" ".join(each) for each in words]
            alone = [client.embed([text])[0].tolist() for text in texts[:4]]
            return {"inputs": texts, "answers": client.embed(texts).tolist(), "alone": alone}
        if task == "translate":
            sources = [[2 + (7 * i + j) % 240 for j in range(5 + 3 * i)] + [0] for i in range(8)]
            found = client.translate(sources, num_beams=4, max_tokens=_ANSWER_TOKENS)
            pairs = [[list(each.token_ids), each.score] for each in found]
            return {"inputs": sources, "answers": pairs}
        prompts = [[2 + (11 * i + 3 * j) % 240 for j in range(4 + 9 * i)] for i in range(8)]
        options: dict[str, Any] = {"max_tokens": _ANSWER_TOKENS, "ignore_eos": True}
        greedy = [client.generate(each, temperature=0.0, **options) for each in prompts]
        drawn = [client.generate(prompts[1], temperature=0.9, seed=5, **options) for _ in range(2)]
        return {
            "inputs": prompts,
            "answers": [list(each.token_ids) for each in greedy],
            "drawn": [list(each.token_ids) for each in drawn],
        }


def _loads_of(served: Served) -> list[RequestLoad]:
    return [_sized(served, load) for load in _LOADS]


def _sized(served: Served, load: RequestLoad) -> RequestLoad:
    """Return a load, or a short and small one for a rehearsal."""
    if not served.is_small:
        return load
    small = replace(load, seconds=_TINY_SECONDS, words=(1, 8), prompt_tokens=5, answer_tokens=3)
    return replace(small, in_flight=min(2, load.in_flight))


def _loads(served: Served, server: LocalServer, loads: Sequence[RequestLoad]) -> Iterator[Figure]:
    """Yield the figures of each load that fits into the time, and perf_analyzer's."""
    with _clients(server, 2 if served.is_small else _MOST_CLIENTS) as clients:
        for load, following in zip_longest(loads, loads[1:]):
            if not served.budget.allows(load.seconds + _AROUND_LOAD):
                print(served.budget.spent_note)
                return
            parts, rate = _split(load, len(clients)), 0.0
            for row in _load_figures(f"{load.model} {load.kind} x{load.in_flight}", parts, clients):
                rate = float(row["value"] or 0.0) if row["figure"] == "requests/s" else rate
                yield row
            is_last = following is None or following.model != load.model
            if load.model == _ANALYZED and load.kind == "embed" and is_last:
                yield from _analyzed(served, server, _ANALYZED_PART * rate)


@contextmanager
def _clients(server: LocalServer, count: int) -> Iterator[list[WorkerProcess]]:
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="varlen-report-")))
        argument = {"url": server.grpc_url}
        yield [
            stack.enter_context(WorkerProcess(_CLIENT, argument, scratch / f"{i}.log", threads=1))
            for i in range(count)
        ]


def _split(load: RequestLoad, count: int) -> list[RequestLoad]:
    """Return the parts of a load for at most `count` clients."""
    used = min(count, load.in_flight)
    sizes = [load.in_flight // used + (i < load.in_flight % used) for i in range(used)]
    return [replace(load, in_flight=size, seed=seed) for seed, size in enumerate(sizes)]


def _load_figures(
    case: str, parts: Sequence[RequestLoad], clients: Sequence[WorkerProcess]
) -> Iterator[Figure]:
    """Yield the figures of loads that run together, each in its own client."""
    row = partial(figure, "load", case)
    with ThreadPoolExecutor(len(parts)) as threads:
        asked = [
            threads.submit(client.ask, **asdict(part))
            for part, client in zip(parts, clients, strict=False)
        ]
        found = [each.result() for each in asked]

    def all_of(name: str) -> list[float]:
        return [value for each in found for value in each[name]]

    latencies = all_of("latencies")
    span = max(each["seconds"] for each in found)
    failed = sum(each["failed"] for each in found)
    reason = next((each["reasons"][0] for each in found if each["reasons"]), "")
    yield row("requests/s", len(latencies) / span, "1/s")
    yield row("latency p50", percentile_ms(latencies, 50), "ms")
    yield row("latency p99", percentile_ms(latencies, 99), "ms")
    if tokens := sum(each["tokens"] for each in found):
        yield row("tokens/s", tokens / span, "1/s")
    if first := all_of("first"):
        yield row("first token p50", percentile_ms(first, 50), "ms")
        yield row("between tokens p50", percentile_ms(all_of("between"), 50), "ms")
        yield row("between tokens p99", percentile_ms(all_of("between"), 99), "ms")
    yield row(f"failed requests {reason}".strip(), failed, MUST_BE_0)


def _analyzed(served: Served, server: LocalServer, rate: float) -> Iterator[Figure]:
    """Yield figures of perf_analyzer, whose requests come at random times."""
    load = Load(
        "load", named_mix("uniform", 500 if not served.is_small else 20), _LOAD_SECONDS, 0, rate
    )
    requests = load.token_ids(240)
    address = server.grpc_url.removeprefix("grpc://")
    row = partial(figure, "perf_analyzer", f"{_ANALYZED} at {rate:.0f} requests/s")
    measured = perf_analyzer.measure(address, _ANALYZED, load, requests)
    for name in ("served", "p50_ms", "p99_ms"):
        yield row(name, getattr(measured, name), "1/s" if name == "served" else "ms")


def _device_memory() -> float | None:
    """Return the memory of the GPU that is in use, in MiB; None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=15)
    first = done.stdout.strip().partition("\n")[0]
    return float(first) if done.returncode == 0 and first.isdecimal() else None
