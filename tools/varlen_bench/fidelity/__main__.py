"""The fidelity board: the answers of engines, beside the original libraries.

A run goes on where the last one ended: what the CSV has of a checkpoint and an engine, both unchanged, is not asked
again. varlen is unchanged at the same commit. A difference without a reason is asked for again: there may be a new one.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from threading import Event
from typing import Annotated, ClassVar
from zlib import crc32

import typer

from varlen_bench.compare.subject import Subject, command
from varlen_bench.fidelity.board import read_board, write_page
from varlen_bench.fidelity.corpus import KINDS, Entry, entries, inputs_of, write_entry
from varlen_bench.fidelity.engines import ENGINES
from varlen_bench.fidelity.judge import Answered, judge
from varlen_bench.fidelity.reasons import NO_REASON
from varlen_bench.harness.command import Only, Progress, csv_path, select
from varlen_bench.harness.rows import Cell, provenance
from varlen_bench.harness.worker import LateError, Message, WorkerError, WorkerProcess

_WORKER = "varlen_bench.fidelity.engines"
_ORACLE = "original"
# A checkpoint is tiny. What takes longer has no row, and is asked again by the next run: the machine may be busy.
_SECONDS = 600.0
_MEMORY_GIB = 8
_PATHS = re.compile(r"(/[\w.\-]+){2,}/?")
_LONGEST_REMARK = 140


@dataclass(kw_only=True)
class FidelitySubject(Subject[Answered]):
    """Compare the answers of engines with sentence-transformers and transformers."""

    name: ClassVar = "fidelity"
    packages: ClassVar = "torch transformers sentence-transformers tokenizers varlen".split()

    only: Only = ""
    engines: Annotated[str, typer.Option(help="Engines, comma-separated; all if empty.")] = ""
    environments: Annotated[Path, typer.Option(help="Folder with the peers' environments.")] = Path(
        ".venv"
    )
    keep: Annotated[
        Path | None, typer.Option(help="Folder that keeps checkpoints and originals' answers.")
    ] = None
    jobs: Annotated[int, typer.Option(min=1, help="Engines that run side by side.")] = 2
    page: Annotated[
        Path | None, typer.Option(help="Page whose tables are written from all rows of the CSV.")
    ] = None
    chosen: list[Entry] = field(init=False)
    pythons: dict[str, Path | None] = field(init=False)

    def prepare(self) -> None:
        """Choose checkpoints and engines."""
        # in an order without a meaning, so that a run that ends early has rows of all kinds
        mixed = sorted(entries(), key=lambda each: crc32(each.name.encode()))
        known = {each.name: each for each in mixed}
        self.chosen = [known[name] for name in select(self.only, known)]
        if self.quick:
            self.chosen = self.chosen[::40]
        pythons: dict[str, Path | None] = {}
        for name, engine in ENGINES.items():
            python = self.environments / f"peers-{engine.environment}/bin/python"
            if not engine.environment:
                pythons[name] = None
            elif python.exists():
                pythons[name] = python
        del pythons[_ORACLE]
        self.pythons = {name: pythons[name] for name in select(self.engines, pythons)}

    def measure(self, progress: Progress) -> Iterator[list[Answered]]:
        """Yield the verdicts of each engine for each checkpoint."""
        with TemporaryDirectory(prefix="varlen-fidelity-") as scratch:
            folder = self.keep or Path(scratch)
            folder.mkdir(exist_ok=True)
            made = [each for each in self.chosen if _is_made(each, folder / _file(each), progress)]
            with closing(_Asked(_ORACLE, None, folder)) as original:
                oracle = {each.name: _kept(original, each, folder, progress) for each in made}
            work = _Work(made, oracle, folder)
            with ThreadPoolExecutor(self.jobs) as pool:
                for name in self.pythons:
                    pool.submit(self._ask, name, work)
                try:
                    yield from self._found(work, progress)
                finally:
                    work.stop.set()

    def _found(self, work: _Work, progress: Progress) -> Iterator[list[Answered]]:
        """Yield what the threads find, until all engines are done."""
        left = len(self.pythons)
        while left:
            found = work.found.get()
            if isinstance(found, BaseException):
                raise found
            if isinstance(found, Answered):
                progress(f"{found.engine}: {found.checkpoint}")
                yield [found]
            else:
                progress(f"{found} is done")
                left -= 1
                self._write_page()

    def _ask(self, name: str, work: _Work) -> None:
        """Find the verdicts of an engine, then put its name or an error."""
        try:
            with (
                closing(_Asked(name, self.pythons[name], work.folder)) as asked,
                closing(_Asked(_ORACLE, None, work.folder, log=f"{name}.original")) as original,
            ):
                version = self._version(asked)
                done = self._done(name, version)
                for entry in work.made:
                    if (entry.name, entry.digest) in done or work.stop.is_set():
                        continue
                    answer = asked.ask(entry)
                    if answer is None:
                        continue
                    found = _answered(entry, name, version, work.oracle[entry.name], answer)
                    explained = _explained(original, entry, found, answer)
                    if explained is not None:
                        work.found.put(explained)
            work.found.put(name)
        except BaseException as error:  # the main thread raises it
            work.found.put(error)

    def rows(self, results: Sequence[Answered]) -> list[Mapping[str, Cell]]:
        """Return a row for each checkpoint and engine."""
        return [each.row(KINDS) for each in results]

    def figures(self, results: Sequence[Answered]) -> dict[str, Cell]:
        """Return how many kinds of input each engine answers as the original does."""
        counts = Counter(
            (each.engine, verdict.result) for each in results for verdict in each.verdicts.values()
        )
        return {f"{engine}_{result}": count for (engine, result), count in sorted(counts.items())}

    def _write_page(self) -> None:
        path = csv_path(self.name, self.output, is_trial=self.quick)
        if self.page is not None and path is not None and path.exists():
            current = {each.name: each.digest for each in entries()}
            write_page(self.page, read_board(path, current))

    def _version(self, asked: _Asked) -> str:
        """Return the version of an engine; of varlen, the commit."""
        if asked.engine != "varlen":
            return asked.version()
        now = provenance(
            threads=1, packages=(), command="", root=Path.cwd(), revision=self.revision
        )
        return f"varlen {now.revision}"

    def _done(self, engine: str, version: str) -> set[tuple[str, str]]:
        path = csv_path(self.name, self.output, is_trial=self.quick)
        if path is None or not path.exists() or version.endswith("+changes"):
            return set()
        with path.open(newline="", encoding="utf-8") as file:
            return {
                (row["checkpoint"], row["corpus"])
                for row in csv.DictReader(file)
                if row["engine"] == engine and row["engine_version"] == version
                if not any(row[kind].endswith(NO_REASON) for kind in KINDS)
            }


@dataclass(frozen=True, slots=True)
class _Work:
    """What the threads of a run share.

    Attributes:
        oracle: answers of the original by checkpoint.
        found: verdicts, and the name of each engine that is done, or an error.
    """

    made: Sequence[Entry]
    oracle: Mapping[str, Message]
    folder: Path
    found: Queue[Answered | str | BaseException] = field(default_factory=Queue)
    stop: Event = field(default_factory=Event)


class _Asked:
    """The process of an engine, which is started again after it has ended."""

    def __init__(self, engine: str, python: Path | None, folder: Path, log: str = "") -> None:
        self.engine, self._python, self._folder = engine, python, folder
        self._log = folder / f"{log or engine}.log"
        self._process: WorkerProcess | None = None

    def version(self) -> str:
        """Return the engine's package and version."""
        return str(self._ask()["version"])

    def ask(self, entry: Entry, **more: object) -> Message | None:
        """Return the engine's answers; None if they take too long.

        A process that ends is an error.
        """
        try:
            return self._ask(
                folder=str(self._folder / _file(entry)),
                task=entry.task,
                requests=inputs_of(entry),
                **more,
            )
        except LateError:
            self.close()
            return None
        except WorkerError as error:
            self.close()
            return {"error": f"ended: {error}"}

    def _ask(self, **order: object) -> Message:
        if self._process is None:
            argument = {"engine": self.engine, "memory_gib": _MEMORY_GIB}
            self._process = WorkerProcess(
                _WORKER, argument, self._log, threads=1, python=self._python, timeout=_SECONDS
            )
        return self._process.ask(**order)

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            with suppress(OSError, ValueError):
                self._process.__exit__()
        self._process = None


def _file(entry: Entry) -> str:
    return f"{entry.name.replace('/', '--')}.{entry.digest}"


def _is_made(entry: Entry, folder: Path, progress: Progress) -> bool:
    """Return whether a checkpoint could be made."""
    if folder.exists():
        return True
    try:
        write_entry(entry, folder)
    except (AttributeError, ValueError) as error:
        progress(f"no original has {entry.name}: {error}")
        return False
    return True


def _kept(asked: _Asked, entry: Entry, folder: Path, progress: Progress) -> Message:
    """Return the answers of the original libraries, which the folder keeps."""
    path = folder / f"{_file(entry)}.json"
    if not path.exists():
        progress(f"original: {entry.name}")
        found = asked.ask(entry)
        if found is None:
            raise WorkerError(f"the original's answer for {entry.name} takes too long")
        path.write_text(json.dumps(found), encoding="utf-8")
    answer: Message = json.loads(path.read_text(encoding="utf-8"))
    return answer


def _answered(
    entry: Entry, engine: str, version: str, oracle: Message, answer: Message
) -> Answered:
    verdicts = {}
    for kind in inputs_of(entry):
        expected = oracle.get("answers", {}).get(kind, {"error": oracle.get("error", "")})
        actual = answer.get("answers", {}).get(kind, {"error": answer.get("error", "")})
        verdict = judge(entry.task, expected, actual)
        remark = _PATHS.sub("PATH", verdict.remark)[:_LONGEST_REMARK]
        verdicts[kind] = replace(verdict, remark=remark)
    return Answered(
        entry.name, entry.digest, entry.task, entry.tokenizer, engine, version, verdicts
    )


def _explained(original: _Asked, entry: Entry, found: Answered, answer: Message) -> Answered | None:
    """Return verdicts whose differences have a reason; None if that takes too long."""
    different = [kind for kind, each in found.verdicts.items() if each.result == "different"]
    if not different:
        return found
    answers = {kind: answer["answers"][kind] for kind in different}
    reasons = original.ask(entry, answers=answers)
    if reasons is None:
        return None
    named = {
        kind: replace(found.verdicts[kind], remark=reasons.get(kind, NO_REASON))
        for kind in different
    }
    return replace(found, verdicts={**found.verdicts, **named})


app = command(FidelitySubject)

if __name__ == "__main__":
    app()
