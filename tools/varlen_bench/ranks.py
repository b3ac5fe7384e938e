"""The benchmark of ranks: one model in several processes, and in one.

The one process has as many threads as the others have together. Both have processes of their own, as on a server, and
take turns in rounds. docs/benchmarks/ranks.md has the method; `make bench-ranks` runs it with its defaults.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeAlias, TypeVar

import numpy as np
import typer

from varlen_bench.compare.subject import Subject, command
from varlen_bench.compare.turns import in_turn
from varlen_bench.harness.command import Only, Progress, select
from varlen_bench.harness.neighbour import half_a_busy_core
from varlen_bench.harness.resident import MIB, resident_bytes
from varlen_bench.harness.rows import Cell, csv_table
from varlen_bench.harness.summary import Spread, rounded
from varlen_bench.harness.worker import WorkerProcess
from varlen_bench.peers.checkpoints import (
    BERT_BASE,
    GPT2_SMALL,
    save_random_checkpoint,
    save_random_decoder,
)
from varlen_tools.tables import Table

if TYPE_CHECKING:
    from varlen.config import DType
    from varlen.execution.workers.worker import Workers
    from varlen.in_process.generator import Generator

Row: TypeAlias = dict[str, Cell]
_System = TypeVar("_System")
_Sample = TypeVar("_Sample")

_COLUMNS = "measurement case system ranks unit median p20 p80 least samples load".split()
# Shapes of hidden states of 768 features: one token, a decode step of 32 sequences, and a prefill.
SHAPES = ((1, 768), (32, 768), (512, 768))
# How ranks add: inside a step, as an op that Python calls, and by PyTorch's own library for CPUs.
SYSTEMS = ("step", "op", "gloo")
_SAMPLES_OF_ROUND, _EXCHANGES = 20, 50
# Messages of a sample, fewer than a socket holds: nothing reads them meanwhile.
_MESSAGES = 8
# Sequences of a step, tokens of each prompt and of each answer.
SEQUENCES = (1, 4, 16)
_PROMPT, _ANSWER = 32, 40
# Steps before the first one that counts.
_FIRST_STEPS = 5
DTYPES: tuple[DType, ...] = ("fp32", "bf16")
# Tokens of a lone text.
LENGTHS = (32, 512)
_TEXTS = 5
# Tokens of context of a sequence in a message, and of a KV block.
_CONTEXT, _BLOCK = 500, 64


@dataclass(kw_only=True)
class RanksSubject(Subject[Row]):
    """Measure what it costs that several processes hold one model."""

    name: ClassVar = "ranks"
    packages: ClassVar = ("torch",)

    only: Only = ""
    ranks: Annotated[int, typer.Option(min=2, help="Processes that hold a model.")] = 2
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which systems take turns.")] = 9
    chosen: list[str] = field(init=False)
    # of the machine, when a case began
    load: float = field(init=False, default=0.0)

    @property
    def cores(self) -> int:
        """Number of threads of a process."""
        return 1

    def prepare(self) -> None:
        """Choose the measurements that `only` names."""
        self.chosen = select(self.only, MEASUREMENTS)
        self.rounds = 1 if self.quick else self.rounds

    def measure(self, progress: Progress) -> Iterator[list[Row]]:
        """Yield each row as it is found."""
        for name in self.chosen:
            with TemporaryDirectory(prefix="varlen-bench-") as scratch:
                for row in MEASUREMENTS[name](self, Path(scratch)):
                    progress("{measurement} {case}, {system}: {median} {unit}".format(**row))
                    yield [row]

    def rows(self, results: Sequence[Row]) -> list[Row]:
        """Return the rows."""
        return list(results)

    def tables(self, results: Sequence[Row]) -> list[Table]:
        """Return the table of all rows."""
        return [csv_table(f"{self.ranks} ranks", _COLUMNS, results)]

    def figures(self, results: Sequence[Row]) -> Row:
        """Return the median of each row."""
        return {
            f"{row['measurement']}_{row['case']}_{row['system']}".replace(" ", "_"): row["median"]
            for row in results
        }

    def row(
        self, measurement: str, case: str, system: str, found: Sequence[float], unit: str = "us"
    ) -> Row:
        """Return the row of some samples, in seconds if the unit is "us"."""
        found = [1e6 * each for each in found] if unit == "us" else found
        spread = Spread.of(found)
        return {
            "measurement": measurement,
            "case": case,
            "system": system,
            "ranks": self.ranks,
            "unit": unit,
            "median": rounded(spread.median, 2),
            "p20": rounded(spread.p20, 2),
            "p80": rounded(spread.p80, 2),
            "least": rounded(min(found), 2),
            "samples": spread.count,
            "load": rounded(self.load, 2),
        }

    def in_turns(
        self, compared: Mapping[str, _System], ask: Callable[[_System], Sequence[_Sample]]
    ) -> dict[str, list[_Sample]]:
        """Return the samples of systems that take turns, after one round that does not count."""
        self.load = os.getloadavg()[0]
        found: dict[str, list[_Sample]] = {system: [] for system in compared}
        for number in range(self.rounds + 1):
            for system in in_turn(list(compared), number + 1):
                samples = ask(compared[system])
                found[system] += samples if number else []
        return found


def _sums(subject: RanksSubject, scratch: Path) -> Iterator[Row]:
    """Measure sums of hidden states over all ranks."""
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                WorkerProcess(
                    "varlen_bench.workers.ranks",
                    {"rank": rank, "size": subject.ranks, "folder": str(scratch)},
                    scratch / f"rank{rank}.log",
                    threads=1,
                )
            )
            for rank in range(subject.ranks)
        ]
        pool = stack.enter_context(ThreadPoolExecutor(subject.ranks))

        def samples(**order: object) -> list[float]:
            """Return the samples of rank 0; all ranks run the order together."""
            first, *_ = [each.result() for each in [pool.submit(w.ask, **order) for w in workers]]
            seconds: list[float] = first["seconds"]
            return seconds

        counts = {"samples": _SAMPLES_OF_ROUND, "exchanges": _EXCHANGES}
        for rows, columns in SHAPES:
            subject.load = os.getloadavg()[0]
            seconds: dict[str, list[float]] = {system: [] for system in SYSTEMS}
            for number in range(subject.rounds):
                first = number % len(SYSTEMS)
                for system in SYSTEMS[first:] + SYSTEMS[:first]:
                    seconds[system] += samples(system=system, rows=rows, columns=columns, **counts)
            for system, found in seconds.items():
                yield subject.row("all_reduce", f"{rows}x{columns} fp32", system, found)


def _control(subject: RanksSubject, _: Path) -> Iterator[Row]:
    """Measure what rank 0 does for the other ranks before each step."""
    for sequences in (1, 32):
        subject.load = os.getloadavg()[0]
        found = control_seconds(sequences, subject.rounds * _SAMPLES_OF_ROUND)
        yield subject.row("control", f"{sequences} sequences", "pack and send", found)


def _decode(subject: RanksSubject, scratch: Path, *, is_beside: bool = False) -> Iterator[Row]:
    """Measure decode steps of a GPT-2-small, and the memory of its processes.

    Args:
        is_beside: other work keeps half a core busy meanwhile, and no memory is measured.
    """
    for dtype in DTYPES:
        with generators(scratch, subject.ranks, dtype) as compared:
            for sequences in SEQUENCES:
                case = f"gpt2-small {dtype}, {sequences} sequences"
                case += ", half a core busy" if is_beside else ""
                with half_a_busy_core() if is_beside else nullcontext():
                    samples = subject.in_turns(compared, partial(step_seconds, sequences=sequences))
                for system, found in samples.items():
                    yield subject.row("decode", case, system, found)
            subject.load = os.getloadavg()[0]
            for system, generator in () if is_beside else compared.items():
                largest = max(map(resident_bytes, _processes_of(generator))) / MIB
                yield subject.row("memory", f"gpt2-small {dtype}", system, [largest], "MiB")


def _stages(subject: RanksSubject, scratch: Path) -> Iterator[Row]:
    """Measure tokens of a GPT-2-small that stages hold, and their idle time."""
    for dtype in DTYPES:
        with generators(scratch, subject.ranks, dtype, "pipeline_parallel") as compared:
            for sequences in SEQUENCES:
                case = f"gpt2-small {dtype}, {sequences} sequences"
                ask = partial(shares_of_tokens, sequences=sequences)
                for system, samples in subject.in_turns(compared, ask).items():
                    seconds, idle = zip(*samples, strict=True)
                    yield subject.row("token", case, system, seconds)
                    if system == "stages":
                        percent = [100 * each for each in idle]
                        yield subject.row("bubble", case, system, percent, "%")


def _encoder(subject: RanksSubject, scratch: Path) -> Iterator[Row]:
    """Measure lone texts of a BERT-base."""
    with encoders(scratch, subject.ranks) as compared:
        for length in LENGTHS:
            samples = subject.in_turns(compared, partial(text_seconds, length=length))
            for system, found in samples.items():
                case = f"bert-base fp32, one text of {length} tokens"
                yield subject.row("encoder", case, system, found)


MEASUREMENTS: Mapping[str, Callable[[RanksSubject, Path], Iterator[Row]]] = {
    "all_reduce": _sums,
    "control": _control,
    "decode": _decode,
    "beside": partial(_decode, is_beside=True),
    "stages": _stages,
    "encoder": _encoder,
}


def control_seconds(sequences: int, samples: int) -> list[float]:
    """Return samples of the seconds to pack a decode step and send it."""
    from varlen.execution.packing import part_of_step
    from varlen.execution.workers.messages import step_message

    blocks = -(-_CONTEXT // _BLOCK)
    ones = np.ones(sequences, np.int32)
    inputs = {
        "token_ids": ones,
        "position_ids": ones * (_CONTEXT - 1),
        "slots": np.arange(sequences, dtype=np.int64),
        "cu_seqlens": np.arange(sequences + 1, dtype=np.int32),
        "context_lens": ones * _CONTEXT,
        "block_ids": np.arange(sequences * blocks, dtype=np.int32),
        "cu_blocks": np.arange(sequences + 1, dtype=np.int32) * blocks,
        "logit_rows": np.arange(sequences, dtype=np.int32),
    }
    left, right = (Connection(each.detach()) for each in socket.socketpair())
    found = []
    for _ in range(samples):
        began = time.perf_counter()
        for _ in range(_MESSAGES):
            left.send_bytes(step_message(part_of_step(inputs)))
        found.append((time.perf_counter() - began) / _MESSAGES)
        for _ in range(_MESSAGES):
            right.recv_bytes()
    return found


@contextmanager
def generators(
    scratch: Path, processes: int, dtype: DType, setting: str = "tensor_parallel"
) -> Iterator[Mapping[str, Generator]]:
    """Yield a GPT-2-small in one process, and the same in several, which `setting` asks for."""
    from varlen.config import EngineConfig
    from varlen.in_process.generator import Generator
    from varlen.service.generation import GeneratorParts
    from varlen.service.service import Service
    from varlen.telemetry.metrics import Stats

    folder = scratch / GPT2_SMALL.name
    if not folder.exists():
        save_random_decoder(GPT2_SMALL, folder)

    def load(count: int) -> Generator:
        settings = {"device": "cpu", "dtype": dtype, "threads": str(processes), setting: str(count)}
        config = EngineConfig.from_parameters(settings)
        return Generator(Service.load(GeneratorParts, folder, config, Stats(), isolated=True))

    name = "ranks" if setting == "tensor_parallel" else "stages"
    with load(1) as one, load(processes) as several:
        yield {"one process": one, name: several}


def step_seconds(generator: Generator, sequences: int) -> list[float]:
    """Return the seconds of decode steps: the time between two tokens of the first sequence."""
    times: list[float] = []

    def arrived(*_: object) -> None:
        times.append(time.perf_counter())

    _generate(generator, [arrived, *[None] * (sequences - 1)])
    return [after - before for before, after in pairwise(times)][_FIRST_STEPS:]


def shares_of_tokens(generator: Generator, sequences: int) -> list[tuple[float, float]]:
    """Return a sample: seconds of a token, and the part of the time without work.

    A process that waits for another one sleeps. One that waits for a core has work. All sequences generate all the
    time that is measured.
    """
    processes = _processes_of(generator)
    ends = {sequences * _FIRST_STEPS, sequences * (_ANSWER - _FIRST_STEPS)}
    count, marks = 0, list[tuple[float, float]]()

    def arrived(*_: object) -> None:
        nonlocal count
        count += 1
        if count in ends:
            marks.append((time.perf_counter(), sum(map(_busy_seconds, processes))))

    _generate(generator, [arrived] * sequences)
    (began, used_before), (ended, used) = marks
    seconds, tokens = ended - began, max(ends) - min(ends)
    return [(seconds / tokens, 1.0 - (used - used_before) / (seconds * len(processes)))]


def _generate(generator: Generator, arrived: Sequence[Callable[..., None] | None]) -> None:
    """Generate a sequence for each function, which is called for each of its tokens."""
    from varlen.request.generation import GenerationOptions

    options = GenerationOptions(temperature=0.0, max_tokens=_ANSWER, ignore_eos=True)
    answers = [
        generator.submit(
            np.random.default_rng(number).integers(1, GPT2_SMALL.vocabulary, _PROMPT),
            options,
            on_part,
        )
        for number, on_part in enumerate(arrived)
    ]
    for answer in answers:
        answer.result()


def _busy_seconds(pid: int) -> float:
    """Return the seconds in which a process's main thread had work."""
    on_core, waited, _ = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()
    return (int(on_core) + int(waited)) / 1e9


def _processes_of(generator: Generator) -> list[int]:
    """Return the process ids of a model."""
    from varlen.execution.workers.steps import ProcessSteps

    model = generator._service.model.runner
    assert isinstance(model, ProcessSteps)
    leader = model.pid
    children = Path(f"/proc/{leader}/task/{leader}/children").read_text(encoding="ascii").split()
    return [leader, *map(int, children)]


@contextmanager
def encoders(scratch: Path, ranks: int) -> Iterator[Mapping[str, Workers]]:
    """Yield a BERT-base in one worker per core, and the same in ranks."""
    from varlen.config import EngineConfig
    from varlen.execution.workers.worker import load_workers
    from varlen.models.checkpoint_folder import Checkpoint
    from varlen.telemetry.metrics import Stats

    folder = scratch / BERT_BASE.name
    save_random_checkpoint(BERT_BASE, folder, max(LENGTHS))
    checkpoint = Checkpoint.open(folder)
    with ExitStack() as stack:

        def load(count: int) -> Workers:
            config = EngineConfig(device="cpu", dtype="fp32", threads=ranks, tensor_parallel=count)
            workers = load_workers(checkpoint, config, Stats(), gpu=0, isolated=True)
            stack.callback(workers.close)
            # a lone batch has the cores of all workers
            workers.use_all_cores()
            assert workers.share is not None
            workers.share.set_alone(True)
            return workers

        yield {"one process": load(1), "ranks": load(ranks)}


def text_seconds(workers: Workers, length: int) -> list[float]:
    """Return the seconds of lone texts, one after another."""
    from varlen.execution.workers.messages import batch_message
    from varlen.execution.workers.worker import WorkerProcess
    from varlen.request.request import DEFAULT_OPTIONS, Prompt

    ids = np.random.default_rng(length).integers(1, BERT_BASE.vocabulary, length, dtype=np.int32)
    runner, found = workers.runners[0], []
    assert isinstance(runner, WorkerProcess)
    for _ in range(_TEXTS):
        began = time.perf_counter()
        runner.launch(batch_message([Prompt(ids)], [DEFAULT_OPTIONS]))()
        found.append(time.perf_counter() - began)
    return found


app = command(RanksSubject)

if __name__ == "__main__":
    app()
