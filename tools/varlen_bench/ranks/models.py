"""Models that several processes hold, beside the same model in one process.

That process has as many threads as the others have together.

Both have processes of their own, as on a server, and take turns in rounds. A figure of a step is the time between two
tokens of the first sequence, with the engine and its messages.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from varlen_bench.harness.resident import MIB, resident_bytes
from varlen_bench.peers.checkpoints import (
    BERT_BASE,
    GPT2_SMALL,
    save_random_checkpoint,
    save_random_decoder,
)

if TYPE_CHECKING:
    from varlen.config import DType
    from varlen.execution.workers.workers import Workers
    from varlen.in_process.generator import Generator

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


def control_seconds(sequences: int, samples: int, messages: int) -> list[float]:
    """Return samples of the seconds to pack a decode step and send it."""
    from varlen.execution.workers.step_messages import step_message

    from varlen.execution.step_packing import part_of_step

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
        for _ in range(messages):
            left.send_bytes(step_message(part_of_step(inputs)))
        found.append((time.perf_counter() - began) / messages)
        for _ in range(messages):
            right.recv_bytes()
    return found


@contextmanager
def generators(
    scratch: Path, processes: int, dtype: DType, setting: str = "tensor_parallel"
) -> Iterator[Mapping[str, Generator]]:
    """Yield a GPT-2-small in one process, and the same in several, which `setting` asks for."""
    from varlen.config import EngineConfig
    from varlen.in_process.generator import Generator
    from varlen.service.generation import GenerationService
    from varlen.telemetry.metrics import Stats

    folder = scratch / GPT2_SMALL.name
    if not folder.exists():
        save_random_decoder(GPT2_SMALL, folder)

    def load(count: int) -> Generator:
        settings = {"device": "cpu", "dtype": dtype, "threads": str(processes), setting: str(count)}
        config = EngineConfig.from_parameters(settings)
        return Generator(GenerationService.load(folder, config, Stats(), isolated=True))

    name = "ranks" if setting == "tensor_parallel" else "stages"
    with load(1) as one, load(processes) as several:
        yield {"one process": one, name: several}


def step_seconds(generator: Generator, sequences: int) -> list[float]:
    """Return the seconds of steps that decode some sequences."""
    from varlen.request.generation import GenerationOptions

    options = GenerationOptions(temperature=0.0, max_tokens=_ANSWER, ignore_eos=True)
    times: list[float] = []
    answers = [
        generator.submit(
            np.random.default_rng(number).integers(1, GPT2_SMALL.vocabulary, _PROMPT),
            options,
            (lambda *_: times.append(time.perf_counter())) if not number else None,
        )
        for number in range(sequences)
    ]
    for answer in answers:
        answer.result()
    return [after - before for before, after in pairwise(times)][_FIRST_STEPS:]


def shares_of_tokens(generator: Generator, sequences: int) -> tuple[float, float]:
    """Return the seconds of a token, and the part of the time without work.

    A process that waits for another one sleeps. One that waits for a core has work. All sequences generate all the
    time that is measured.
    """
    from varlen.request.generation import GenerationOptions

    processes = _processes_of(generator)
    ends = {sequences * _FIRST_STEPS, sequences * (_ANSWER - _FIRST_STEPS)}
    count, marks = 0, list[tuple[float, float]]()

    def arrived(*_: object) -> None:
        nonlocal count
        count += 1
        if count in ends:
            marks.append((time.perf_counter(), sum(map(_busy_seconds, processes))))

    options = GenerationOptions(temperature=0.0, max_tokens=_ANSWER, ignore_eos=True)
    answers = [
        generator.submit(
            np.random.default_rng(number).integers(1, GPT2_SMALL.vocabulary, _PROMPT),
            options,
            arrived,
        )
        for number in range(sequences)
    ]
    for answer in answers:
        answer.result()
    (began, used_before), (ended, used) = marks
    seconds = ended - began
    tokens = max(ends) - min(ends)
    return seconds / tokens, 1.0 - (used - used_before) / (seconds * len(processes))


def _busy_seconds(pid: int) -> float:
    """Return the seconds in which a process's main thread had work."""
    on_core, waited, _ = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()
    return (int(on_core) + int(waited)) / 1e9


def rank_mebibytes(generator: Generator) -> float:
    """Return the resident memory of the largest process of a model, in MiB."""
    return max(map(resident_bytes, _processes_of(generator))) / MIB


def _processes_of(generator: Generator) -> list[int]:
    """Return the process ids of a model."""
    from varlen.execution.workers.step_process import StepProcess

    model = generator._service.runner
    assert isinstance(model, StepProcess)
    leader = model.pid
    children = Path(f"/proc/{leader}/task/{leader}/children").read_text(encoding="ascii").split()
    return [leader, *map(int, children)]


@contextmanager
def encoders(scratch: Path, ranks: int) -> Iterator[Mapping[str, Workers]]:
    """Yield a BERT-base in one worker per core, and the same in ranks."""
    from varlen.config import EngineConfig
    from varlen.execution.workers.workers import load_workers
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
    from varlen.execution.workers.process import WorkerProcess
    from varlen.request.request import DEFAULT_OPTIONS, Prompt

    ids = np.random.default_rng(length).integers(1, BERT_BASE.vocabulary, length, dtype=np.int32)
    runner, found = workers.runners[0], []
    assert isinstance(runner, WorkerProcess)
    for _ in range(_TEXTS):
        began = time.perf_counter()
        runner.run([Prompt(ids)], [DEFAULT_OPTIONS])
        found.append(time.perf_counter() - began)
    return found
