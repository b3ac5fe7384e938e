"""Loads of damaged checkpoints and wrong settings, in a process of their own.

`Loader.load` is a load as the server does it, with a request, and without the server's seconds of start.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import tempfile
import traceback
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeAlias

import numpy as np

from .endings import Ending

# Longer than any load of a tiny checkpoint takes.
_LOAD_SECONDS = 150.0
# Limit of address space: a wrong number must not take the machine's memory.
_MEMORY_BYTES = 24 << 30

LoadEnd: TypeAlias = Literal["served", "refused", "failed"]


@dataclass(frozen=True, slots=True)
class Load:
    """How a load ended.

    Attributes:
        end: time limits of the load and of one request.
        text: the message of a refusal, the frames of a failure.
        answer: the vector that an encoder has answered.
    """

    end: LoadEnd
    text: str = ""
    answer: tuple[float, ...] = ()

    def ending(self, what: str) -> Ending:
        """Return the end as the end of a request; `what` was loaded."""
        if self.end == "failed":
            return Ending("wrong", message=f"{what}: {self.text[-900:]}")
        return Ending("refused" if self.end == "refused" else "answered", message=self.text)

    def must_serve(self, before: Load) -> Load:
        """Return a failure unless the model is served and answers as `before`, up to rounding."""
        if before.end != "served":
            return Load("failed", f"nothing was damaged yet: {before.text}")
        if self.end == "refused":
            return Load("failed", self.text)
        if self.end == "served" and not np.allclose(
            self.answer, before.answer, rtol=1e-4, atol=1e-4
        ):
            return Load("failed", "the answer is another one")
        return self


class Loader:
    """A process that loads models, replaced after a crash. Used inside `with`."""

    def __init__(self, scratch: Path, compiled: Path | None = None) -> None:
        """Start the process.

        Args:
            scratch: gets the folder of its cache.
            compiled: folder of its compiled code; by default the folder of all processes.
        """
        self._cache, self._compiled = scratch / "loader-cache", compiled
        self._pool = self._new_pool()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def load(self, folder: Path, parameters: Mapping[str, str]) -> Load:
        """Load a checkpoint with the parameters of a config.pbtxt, and ask the model something."""
        future = self._pool.submit(_load, str(folder), dict(parameters))
        try:
            return future.result(_LOAD_SECONDS)
        except FutureTimeoutError:
            problem = f"the load takes more than {_LOAD_SECONDS:g} s"
        except BrokenProcessPool:
            problem = "the load ended its process"
        self._end()
        self._pool = self._new_pool()
        return Load("failed", problem)

    def _new_pool(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(
            1, context, _prepare, (str(self._cache), str(self._compiled or ""))
        )

    def _end(self) -> None:
        processes = list(self._pool._processes.values())
        for process in processes:
            process.kill()
        self._pool.shutdown(cancel_futures=True)


def _prepare(cache: str, compiled: str) -> None:
    """Set up the process before it imports anything large."""
    os.environ["XDG_CACHE_HOME"] = cache
    # nothing else is written, and what libraries print does not mix with the campaign's lines
    os.chdir(tempfile.gettempdir())
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123  # a descriptor, not a file's content
        os.dup2(nowhere.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    if compiled:
        from varlen_kernels.cpu.calls import machine_code

        machine_code.BESIDE = Path(compiled)


def _load(folder: str, parameters: dict[str, str]) -> Load:
    from varlen.errors import VarlenError

    try:
        answer = _load_and_ask(folder, parameters)
    except VarlenError as error:
        # as the server does it
        message = str(error).replace(folder, "the checkpoint folder")
        return Load("refused", f"{type(error).__name__}: {message}")
    except BaseException:
        return Load("failed", traceback.format_exc())
    return Load("served", answer=answer)


def _load_and_ask(folder: str, parameters: dict[str, str]) -> tuple[float, ...]:
    from varlen import Encoder, Generator
    from varlen.models.checkpoint_folder import Checkpoint
    from varlen.server.config import read_model
    from varlen.service.generation import GeneratorParts
    from varlen.service.one_shot import EncoderParts
    from varlen.service.service import Service
    from varlen.tasks import TASKS
    from varlen.telemetry.metrics import Stats

    entries = {key: {"string_value": value} for key, value in parameters.items()}
    model = read_model(
        {"parameters": entries, "max_batch_size": 0, "input": [], "output": []},
        lambda _: Checkpoint.open(folder),
        is_complete=False,
    )
    config, task = model.config, model.task
    if TASKS[task].is_iterative:
        with Generator(Service.load(GeneratorParts, folder, config, Stats())) as generator:
            generator.generate(["the cat"], max_tokens=3)
        return ()
    with Encoder(Service.load(EncoderParts, folder, config, Stats())) as encoder:
        ask = {"rerank": encoder.classify}.get(task) or getattr(encoder, task)
        return tuple(np.ravel(ask(["the cat"])[0]).tolist())
