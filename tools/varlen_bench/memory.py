"""The memory benchmark: varlen with and without its arena beside transformers, and a server's processes.

docs/benchmarks/memory.md has the method; `make bench-memory` runs it with its defaults.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias

import typer
from tokenizers import Tokenizer

from varlen_bench.compare.results import Result, csv_row
from varlen_bench.compare.subject import Subject, command
from varlen_bench.compare.systems import System
from varlen_bench.compare.turns import noted_failure
from varlen_bench.harness import machine
from varlen_bench.harness.command import Only, Progress, Threads, select
from varlen_bench.harness.resident import MIB, family_bytes, model_process, resident_bytes
from varlen_bench.harness.rows import Cell, csv_table
from varlen_bench.harness.summary import flatness, ratio, rounded, worst
from varlen_bench.harness.worker import Message, WorkerError, ask_once
from varlen_bench.paper_plan import lengths
from varlen_bench.peers.checkpoints import BERT_BASE, MINILM, EncoderShape, random_checkpoint
from varlen_bench.workers.memory import NO_ARENA, OURS, PEER, Case
from varlen_client import Client, RetryPolicy, VarlenClientError
from varlen_tools.local_server import LocalServer, ServerError, end_on_sigterm
from varlen_tools.tables import Table

Device: TypeAlias = Literal["cpu", "cuda"]
# Measures the memory of a system on a case, or varlen's speed without a system.
Ask: TypeAlias = Callable[[System | None, Case], Message]

POSITIONS = 512
ENCODERS = {shape.name: shape for shape in (MINILM, BERT_BASE)}
_REQUESTS, _QUICK_REQUESTS, _LONGEST = 150, 12, 500
# Batch sizes of each encoder. Larger ones run every n-th request by length, so that no case takes an hour.
_STEPS = {"minilm": {1: 1, 4: 2, 20: 10}, "bert-base": {1: 3, 4: 10}}
# Without an arena, every third request by length is run.
_NO_ARENA_STEP = 3
# Rows beside the compared systems: an arena of the exact size, and the processes of a server.
EXACT, STUB, SERVER = (
    System(name, "varlen", "fp32", "engine") for name in ("exact-arena", "stub", "server")
)
_NAMES = ("encoder", "batch", "requests", "system")
# Columns of each table after the names; it has the rows that have the first of them.
_TABLES = {
    "memory above weights": "weights_mib peak_mib allocated_mib vs_pytorch asked_mib_longest seconds",
    "the arena": "new_mib_per_request bound_largest_mib reserved_mib reserved_vs_bound footprint_vs_bound "
    "footprint_vs_bound_max plan_share vs_no_arena vs_no_arena_p20 vs_no_arena_p80",
    "processes of the server": "rss_flatness rss_least_mib rss_median_mib rss_most_mib peak_mib",
}
_COLUMNS = (
    "encoder batch requests system device weights_mib footprint_vs_bound footprint_vs_bound_max bound_largest_mib "
    "reserved_mib reserved_vs_bound new_mib_per_request asked_mib_longest peak_mib allocated_mib vs_pytorch seconds "
    "plan_share vs_no_arena vs_no_arena_p20 vs_no_arena_p80 rss_least_mib rss_median_mib rss_most_mib rss_flatness note"
).split()
_IN_FLIGHT = 16
_SHORTEST = 5
_READY_SECONDS = 120.0
# The served process releases memory once a second.
_REST_SECONDS = 1.5


@dataclass(kw_only=True)
class MemorySubject(Subject[Result]):
    """Compare the memory of a forward pass with transformers, and watch a server's."""

    name: ClassVar = "memory"
    packages: ClassVar = ("torch", "transformers", "varlen")

    only: Only = ""
    device: Annotated[Device, typer.Option(help="Where encoders run.")] = "cpu"
    threads: Threads = 0
    served: Annotated[int, typer.Option(min=0, help="Requests to a server; 0: none.")] = 20_000
    longest: Annotated[int, typer.Option(min=5, help="Their words, uniform from 5 on.")] = 256
    repository: Annotated[Path, typer.Option(help="Model repository of the server.")] = Path(
        "model_repository"
    )
    model: Annotated[str, typer.Option(help="Model of the server.")] = "minilm"
    encoders: list[EncoderShape] = field(init=False)

    @property
    def cores(self) -> int:
        """Number of cores that a run uses."""
        return self.threads or machine.cpu_count()

    def prepare(self) -> None:
        """Choose the encoders that `only` names."""
        self.encoders = [ENCODERS[name] for name in select(self.only, ENCODERS)]

    def measure(self, progress: Progress) -> Iterator[list[Result]]:
        """Yield the results of each case, and of the server's processes."""
        for encoder in self.encoders:
            with random_checkpoint(encoder, POSITIONS) as folder:
                ask = partial(ask_worker, folder=folder, device=self.device, threads=self.cores)
                for case in cases(encoder, quick=self.quick):
                    yield measure_case(case, self.device, ask, progress)
        parts = {"requests": min(self.served, 500), "warmup": 100, "every": 50}
        settings = parts if self.quick else {"requests": self.served}
        soak = Soak(self.repository, self.model, longest=self.longest, **settings)
        if soak.requests:
            yield measure_server(soak, progress)

    def rows(self, results: Sequence[Result]) -> list[dict[str, Cell]]:
        """Return a row for each result, also for those that failed."""
        return [
            csv_row(result, _COLUMNS, encoder=result.model, device=result.workload)
            for result in results
        ]

    def figures(self, results: Sequence[Result]) -> dict[str, Cell]:
        """Return the keys of the BENCH line: the worst of each figure, None without one."""

        def of(system: System, name: str, choose: Callable[[list[float]], float]) -> float | None:
            return worst(choose, [each.median(name) for each in results if each.system == system])

        new = of(OURS, "new_mib_per_request", max)
        return {
            "footprint_vs_bound": rounded(of(OURS, "footprint_vs_bound", max)),
            "vs_pytorch": rounded(of(OURS, "vs_pytorch", max)),
            "plan_share": rounded(of(OURS, "plan_share", max), 6),
            "speed_vs_no_arena": rounded(of(OURS, "vs_no_arena", min)),
            "new_bytes_per_request": None if new is None else round(new * MIB),
            "rss_flatness": rounded(of(STUB, "rss_flatness", max)),
        }

    def tables(self, results: Sequence[Result]) -> list[Table | str]:
        """Return the tables that have rows, and what did not run."""
        found = []
        for title, names in _TABLES.items():
            first, *_ = columns = names.split()
            kept = [row for row in self.rows(results) if row[first] is not None]
            found.append(csv_table(title, (*_NAMES, *columns), kept))
        return [*(table for table in found if table.lines), *notes(results)]

    def has_failed(self, results: Sequence[Result]) -> bool:
        """Return whether varlen did not run."""
        return any(result.note for result in results if result.system == OURS)


def empty_result(
    system: System, model: str, device: str, requests: int, *, batch: int | None = None
) -> Result:
    """Return the result of a system without figures; its speed is compared with no arena."""
    return Result(
        system=system,
        workload=device,
        requests=requests,
        work=requests,
        speed="vs_no_arena",
        model=model,
        batch=batch,
    )


def add_ratios(results: Sequence[Result]) -> None:
    """Add the peak of each system over the peak of transformers, all of one case."""
    peer = next(result for result in results if result.system == PEER).median("peak_mib")
    for result in results:
        over = ratio(result.median("peak_mib"), peer)
        if over is not None:
            result.rounds[0]["vs_pytorch"] = over


def notes(results: Sequence[Result]) -> list[str]:
    """Return what did not run, and why."""
    noted = (each for each in results if each.note)
    return [f"{each.model} {each.batch or ''} {each.system.name}: {each.note}" for each in noted]


def cases(encoder: EncoderShape, *, quick: bool) -> list[Case]:
    """Return the cases of an encoder, smallest batch first; quick ones have few requests."""
    steps = _STEPS[encoder.name]
    stream = tuple(lengths(_REQUESTS, _LONGEST))
    if quick:
        largest = max(steps)
        return [Case(encoder, size, stream[:_QUICK_REQUESTS]) for size in steps if size < largest]
    return [Case(encoder, size, stream).every(step) for size, step in steps.items()]


def measure_case(case: Case, device: Device, ask: Ask, report: Progress) -> list[Result]:
    """Return the results of a case; one that failed has the reason."""
    named = f"{case.encoder.name}, {case.batch} a request"
    empty = partial(empty_result, model=case.encoder.name, device=device, batch=case.batch)
    results: list[Result] = []
    exact = empty(EXACT, requests=len(case.lengths))
    for system in (OURS, NO_ARENA, PEER):
        report(f"{named}: memory of {system.name}")
        part = case.every(_NO_ARENA_STEP) if system == NO_ARENA else case
        result = empty(system, requests=len(part.lengths))
        results.append(result)
        with noted_failure([result], report):
            own, *others = ask(system, part)["figures"]
            result.rounds.append(own)
            exact.rounds += others
    add_ratios(results)
    ours = results[0]
    report(f"{named}: speed of {ours.system.name}")
    try:
        ours.rounds += [{ours.speed: speed} for speed in ask(None, case)["speeds"]]
    except WorkerError as error:
        ours.note = "; ".join(filter(None, [ours.note, f"no speed: {error}"]))
    return [*results, exact] if exact.rounds else results


def ask_worker(
    system: System | None, case: Case, folder: Path, device: Device, threads: int
) -> Message:
    """Return the answer of a process that measures a system, with the checkpoint in `folder`."""
    argument = {"case": asdict(case), "folder": str(folder), "device": device, "threads": threads}
    module, log = "varlen_bench.workers.memory", folder / "worker.log"
    return ask_once(module, argument, log, threads=threads, system=system and asdict(system))


def measure_server(settings: Soak, report: Progress) -> list[Result]:
    """Return the results of a server's processes, or one with the reason why it failed."""
    report(f"{settings.requests:,} requests to a server with {settings.model}")
    found = [settings.result(STUB)]
    with noted_failure(found, report, ServerError, VarlenClientError, OSError):
        found[:] = soak(settings)
    return found


@dataclass(frozen=True, slots=True)
class Soak:
    """Requests to a server."""

    repository: Path
    model: str
    requests: int = 20_000
    warmup: int = 1_000
    # number of requests between two samples
    every: int = 500
    # in words; most words are one token
    longest: int = 256

    def result(self, process: System) -> Result:
        """Return the result of one process of the server, without figures."""
        return empty_result(process, self.model, "as served", self.requests)


def soak(settings: Soak) -> list[Result]:
    """Return the results of the process that serves the model and of the server."""
    with LocalServer([settings.repository / settings.model]) as server:
        server.wait_ready(_READY_SECONDS)
        stub = model_process(server.pid, settings.model)
        # the model's process has workers
        read: dict[System, Callable[[], int]] = {
            STUB: partial(family_bytes, stub),
            SERVER: partial(resident_bytes, server.pid),
        }
        samples: dict[System, list[int]] = {process: [] for process in read}
        for _ in _send(settings, server.grpc_url):
            time.sleep(_REST_SECONDS)
            for process, resident in read.items():
                samples[process].append(resident())
        results = [settings.result(process) for process in read]
    for result, sampled in zip(results, samples.values(), strict=True):
        mib = [size / MIB for size in sampled]
        figures = {
            "peak_mib": max(mib),
            "rss_least_mib": min(mib),
            "rss_median_mib": statistics.median(mib),
            "rss_most_mib": max(mib),
            "rss_flatness": flatness(mib),
        }
        result.rounds.append(figures)
    return results


def _send(settings: Soak, url: str) -> Iterator[None]:
    """Send all requests; yield when a sample is due and none is in flight."""
    draw = random.Random(0)
    tokenizer = Tokenizer.from_file(
        str(settings.repository / settings.model / "1" / "tokenizer.json")
    )
    words = sorted(filter(str.isalpha, tokenizer.get_vocab()))

    def lengths(count: int) -> list[int]:
        return [draw.randint(_SHORTEST, settings.longest) for _ in range(count)]

    stream, warmup = lengths(settings.requests), lengths(settings.warmup)
    parts = [stream[at : at + settings.every] for at in range(0, len(stream), settings.every)]
    once = RetryPolicy(max_retries=0)
    client = Client(url, settings.model, rows_per_request=1, concurrency=_IN_FLIGHT, retry=once)
    with client:
        for part in (warmup, *parts):
            texts = [" ".join(draw.choices(words, k=length)) for length in part]
            client.embed(texts, truncate=True)
            yield


app = command(MemorySubject)

if __name__ == "__main__":
    end_on_sigterm()
    app()
