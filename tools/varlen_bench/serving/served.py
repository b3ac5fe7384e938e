"""A real server with one or more systems, and the generator that loads them, for as long as both are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen_bench.harness.accuracy import cosines
from varlen_bench.harness.resident import model_process, resident_bytes
from varlen_bench.harness.worker import WorkerProcess
from varlen_bench.serving.arrivals import Mix, poisson
from varlen_bench.serving.client import INPUT, OUTPUT
from varlen_bench.serving.figures import Point, point_of
from varlen_bench.serving.generator import Offering
from varlen_bench.serving.repository import Checkpoint, write_model
from varlen_bench.serving.rows import Kind, Row, point_row
from varlen_bench.serving.scrape import counted, metrics_after, model_metrics
from varlen_bench.serving.speed import gflops
from varlen_bench.serving.systems import System
from varlen_tools.local_server import LocalServer

READY_SECONDS = 240.0
_ANSWER_SECONDS = 600.0
_CHECK_SECONDS = 120.0
# of a load's seconds, beside them
WARMUP_SECONDS = 1.0

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Reference:
    """Requests, and the vectors that every system has to answer them with."""

    requests: Sequence[Sequence[int]]
    vectors: Vectors


@dataclass(frozen=True, slots=True)
class Load:
    """Requests to offer.

    Attributes:
        mix: of lengths.
        rate: requests/s.
        seconds: that are measured, after those that warm up.
        seed: of arrivals and lengths.
        outstanding: most that may wait.
        late_seconds: of what counts as late.
        late_share: of requests that may be, before offering is given up; None never gives up.
        deadline_ms: that each request is given.
        patience: seconds to wait for the last answers.
    """

    mix: Mix
    rate: float
    seconds: float
    seed: int
    outstanding: int
    late_seconds: float = 0.5
    late_share: float | None = None
    deadline_ms: int | None = None
    patience: float = 60.0


class Generator:
    """The process that sends requests. Close it."""

    def __init__(self, log: Path, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._process = WorkerProcess(
            "varlen_bench.serving.worker",
            {},
            log,
            threads=1,
            timeout_seconds=_ANSWER_SECONDS,
        )
        self._process.answer()

    def offer(self, address: str, model: str, load: Load) -> tuple[Offering, Point]:
        """Offer a load and return what became of it."""
        total = WARMUP_SECONDS + load.seconds
        dues = poisson(load.rate, total, load.seed)
        late = {}
        if load.late_share is not None:
            # one more than the share, since the last digit of a percentile is chance
            late_most = int(load.late_share * len(dues)) + 1
            late = {"late_seconds": load.late_seconds, "late_most": late_most}
        parameters = {} if load.deadline_ms is None else {"deadline_ms": load.deadline_ms}
        told = self._process.ask(
            do="offer",
            address=address,
            model=model,
            lengths=load.mix.take(len(dues), load.seed),
            vocabulary=self._vocabulary,
            seed=load.seed,
            outstanding=load.outstanding,
            dues=dues,
            patience=load.patience,
            parameters=parameters,
            **late,
        )
        offering = Offering.from_json(told)
        deadline = None if load.deadline_ms is None else load.deadline_ms / 1000
        point = point_of(
            offering, rate=load.rate, warmup=WARMUP_SECONDS, end=total, deadline=deadline
        )
        return offering, point

    def saturate(
        self, address: str, model: str, mix: Mix, *, in_flight: int, seconds: float, seed: int
    ) -> tuple[Offering, Point]:
        """Keep so many requests in flight and return what became of them."""
        total = WARMUP_SECONDS + seconds
        told = self._process.ask(
            do="saturate",
            address=address,
            model=model,
            lengths=mix.take(1024, seed),
            vocabulary=self._vocabulary,
            seed=seed,
            outstanding=in_flight,
            seconds=total,
        )
        offering = Offering.from_json(told)
        return offering, point_of(offering, rate=None, warmup=WARMUP_SECONDS, end=total)

    def close(self) -> None:
        """End the process."""
        self._process.close()


class Served:
    """A server of its own for a few systems, ready for load; use it inside `with`.

    Args:
        systems: that it serves, each as a model of the system's name.
        checkpoint: what they serve.
        generator: that loads them.
        caches: where servers keep what they measured of this machine.

    Raises:
        ServerError: it does not get ready.
    """

    def __init__(
        self, systems: Sequence[System], checkpoint: Checkpoint, generator: Generator, caches: Path
    ) -> None:
        self._systems = systems
        self._checkpoint = checkpoint
        self._generator = generator
        self._caches = caches
        self._held = ExitStack()

    def __enter__(self) -> Served:
        with ExitStack() as held:
            folder = Path(held.enter_context(TemporaryDirectory(prefix="varlen-serving-")))
            for system in self._systems:
                write_model(folder, system, self._checkpoint)
            self.server = held.enter_context(
                LocalServer(
                    folder,
                    # their configurations are complete
                    arguments=["--disable-auto-complete-config"],
                    environment={"XDG_CACHE_HOME": str(self._caches), "HF_HUB_OFFLINE": "1"},
                )
            )
            self.server.wait_ready(READY_SECONDS)
            self._held = held.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._held.close()

    @property
    def address(self) -> str:
        """Host and port for gRPC."""
        return self.server.grpc_url.removeprefix("grpc://")

    def check(self, system: System, reference: Reference) -> float:
        """Return the least cosine of a system's answers, asked for at once, to what they have to be.

        Raises:
            InferenceServerException: a request fails.
        """
        answers = embed(self.address, system.name, reference.requests)
        return float(cosines(answers, reference.vectors).min())

    def load(self, system: System, kind: Kind, load: Load) -> tuple[Row, Point]:
        """Offer a load to a system; return its row and what was measured."""
        before, speed = self._metrics(system), gflops()
        offering, point = self._generator.offer(self.address, system.name, load)
        return self._row(system, kind, load.mix, offering, point, before, speed), point

    def saturate(
        self, system: System, mix: Mix, *, in_flight: int, seconds: float, seed: int
    ) -> tuple[Row, Point]:
        """Keep so many requests in flight for so long; return the row and what was measured."""
        before, speed = self._metrics(system), gflops()
        offering, point = self._generator.saturate(
            self.address, system.name, mix, in_flight=in_flight, seconds=seconds, seed=seed
        )
        return self._row(system, "closed", mix, offering, point, before, speed), point

    def resident(self, system: System) -> int:
        """Return the bytes that the process which serves a system has resident now."""
        return resident_bytes(model_process(self.server.pid, system.name))

    def _metrics(self, system: System) -> dict[str, float]:
        return model_metrics(self.server.metrics_url, system.name)

    def _row(
        self,
        system: System,
        kind: Kind,
        mix: Mix,
        offering: Offering,
        point: Point,
        before: Mapping[str, float],
        speed: float,
    ) -> Row:
        answered = point.sent - point.lost
        after = metrics_after(self.server.metrics_url, system.name, before, answered)
        return point_row(
            mix.label,
            system.name,
            kind,
            point,
            found=counted(before, after),
            rss=self.resident(system),
            speed=speed,
            note="; ".join(
                [
                    *(["given up: too many were late"] if offering.is_given_up else []),
                    *offering.reasons,
                ]
            ),
        )


def embed(address: str, model: str, requests: Sequence[Sequence[int]]) -> Vectors:
    """Return a model's answers to requests that are all sent at once, `[requests, hidden]`.

    Raises:
        InferenceServerException: one fails.
    """
    from tritonclient.grpc import InferenceServerClient, InferInput

    answers: Queue[tuple[int, Any, Any]] = Queue()
    with InferenceServerClient(address) as client:
        for number, ids in enumerate(requests):
            tensor = InferInput(INPUT, [1, len(ids)], "INT64")
            tensor.set_data_from_numpy(np.asarray([ids], dtype=np.int64))

            def answered(result: Any, error: Any, number: int = number) -> None:
                answers.put((number, result, error))

            client.async_infer(model, [tensor], callback=answered)
        found = sorted(
            (answers.get(timeout=_CHECK_SECONDS) for _ in requests), key=lambda answer: answer[0]
        )
    for _, _, error in found:
        if error is not None:
            raise error
    return np.concatenate([result.as_numpy(OUTPUT) for _, result, _ in found])
