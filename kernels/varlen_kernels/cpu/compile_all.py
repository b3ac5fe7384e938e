"""Compiles ops ahead, on all cores: `python -m varlen_kernels.cpu.compile_all [--all | LEVEL ...]`.

By default code is for the level of this CPU (`target_cpu`). Code for all levels, which any x86-64 machine can compile,
goes into the wheels and images of a release. `machine_code` says where it is stored. The first start of a kind of model
compiles what it needs in the same way (`compile_missing`). `make demo` compiles the common ops while pip installs the
rest.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from platform import machine

from varlen_kernels import CPU_LEVEL_VARIABLE
from varlen_kernels.cpu.native.target_cpu import LEVELS, target_cpu
from varlen_kernels.cpu.native.threads import usable_cores
from varlen_kernels.machine_memory import free_memory

_log = logging.getLogger(__name__)

# The functions that take longest.
_LONGEST = ("attend_distances", "attend", "attend_chunks", "multiply")
# Functions of most encoders, then of most decoders. A function of a dtype has a second form, for bf16.
_OF_ENCODERS = ("attend", "multiply", "norm", "activate", "gather")
_OF_STEPS = ("attend_tokens", "attend_chunks", "append")
_OF_PROGRAMS = ("run_alone", "run_shared")
# Functions that a model which generates needs besides its programs.
OF_DECODERS = (
    "advance_searches",
    "copy_blocks",
    "edit_logits",
    "follow_beams",
    "sample",
    "step_beams",
)
_LONGEST_REASON = 300
# Memory of a process that compiles: torch, numba and what LLVM works with.
_PROCESS_BYTES = 512 << 20
# After it, a first start goes on by itself. All ops take a minute on two cores.
_MOST_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class _Part:
    """The work for one level.

    Attributes:
        place: number of the level and of all levels, such as "1 of 4".
        ops: names of the functions; None for all.
    """

    level: str
    place: str
    processes: int
    ops: tuple[str, ...] | None


def compile_all(levels: Sequence[str], ops: Sequence[str] | None = None) -> tuple[str, ...]:
    """Compile ops for levels of CPUs, with progress; return the names of the functions.

    Args:
        levels: names of levels. They are compiled at the same time if each has a process, else one after another.

    Raises:
        RuntimeError: a function does not exist, or cannot be compiled or stored here.
    """
    began = time.perf_counter()
    processes = _process_count()
    at_once = len(levels) if len(levels) <= processes else 1
    parts = [
        _Part(
            level,
            f"{i + 1} of {len(levels)}",
            processes // at_once + (i % at_once < processes % at_once),
            None if ops is None else tuple(ops),
        )
        for i, level in enumerate(levels)
    ]
    with ThreadPoolExecutor(at_once) as threads:
        *_, names = threads.map(_compile_level, parts)
    seconds = time.perf_counter() - began
    _show(f"compiled {len(names)} ops for {', '.join(levels)} in {seconds:.0f} s", is_last=True)
    return names


def common_ops(level: str) -> tuple[str, ...]:
    """Return the functions that most models need in their default dtype, an encoder's first."""
    [features] = [each.features for each in LEVELS if each.level == level]
    suffix = "_bf16" if "avx512bf16" in features else ""
    of_encoders, of_steps = (
        tuple(f"{name}{suffix}" for name in names) for names in (_OF_ENCODERS, _OF_STEPS)
    )
    return (*of_encoders, *_OF_PROGRAMS, *of_steps, *OF_DECODERS)


def compile_missing(names: Iterable[str], python: Callable[[], str]) -> None:
    """Compile the functions that are not stored for this CPU, in several processes.

    Nothing is raised: what it has not stored is compiled by whoever needs it, one function after another.

    Args:
        names: names of machine code, see `functions.ENTRIES`.
        python: returns the command of this Python, which starts other processes.
    """
    missing = _missing(names)
    # the command that starts them is one more
    processes = min(len(missing), _process_count(others=1))
    if processes < 2:
        return
    _log.info("compiling %d ops, which later starts read: %s", len(missing), ", ".join(missing))
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": str(processes),
    }
    options = [target_cpu().level, "--ops", ",".join(_longest_first(missing))]
    try:
        _run([python(), "-m", __name__, *options], environment)
    except Exception as error:
        _log.warning("ops are compiled on one core: %s", str(error).strip()[-_LONGEST_REASON:])


def _process_count(others: int = 0) -> int:
    """Return how many processes may compile, by cores and by the memory that is left.

    Args:
        others: number of further processes that need memory.
    """
    most = free_memory() // _PROCESS_BYTES - others
    return max(1, min(usable_cores(), most))


def _run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a command; raise an exception with its errors if it fails or hangs."""
    process = subprocess.Popen(
        command,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            _, said = process.communicate(timeout=_MOST_SECONDS)
        except BaseException:
            # with its own processes, which would wait for it forever
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise RuntimeError(said or f"status {process.returncode}")


def _missing(names: Iterable[str]) -> list[str]:
    """Return the functions without a file; none where no file can be kept."""
    from varlen_kernels.cpu.calls.machine_code import BESIDE, code_folder, file_name

    files = {name: file_name(name, target_cpu().level) for name in names}
    try:
        folders = (BESIDE, code_folder())
        return [
            name
            for name, file in files.items()
            if not any((each / file).exists() for each in folders)
        ]
    except OSError:
        # such as a home of another user
        return []


def _compile_level(part: _Part) -> tuple[str, ...]:
    most = part.processes if part.ops is None else min(part.processes, len(part.ops))
    processes = ProcessPoolExecutor(most, get_context("spawn"), _choose, (part.level,))
    try:
        with processes:
            names = processes.submit(_names, part.ops).result()
            _show_op(part, 0, len(names), "")
            works = as_completed([processes.submit(_compile, name) for name in names])
            for i, done in enumerate(works):
                name, seconds = done.result()
                _show_op(part, i + 1, len(names), f": {name} in {seconds:.1f} s")
    except Exception as error:
        raise RuntimeError(f"the ops cannot be compiled for {part.level}: {error!r}") from error
    return names


def _show_op(part: _Part, number: int, count: int, what: str) -> None:
    _show(f"level {part.place} ({part.level}), op {number} of {count}{what}")


def _show(line: str, *, is_last: bool = False) -> None:
    """Print a line; on a terminal it takes the place of the one before."""
    if sys.stdout.isatty():
        print(f"\r\x1b[K{line}", end="\n" if is_last else "", flush=True)
    else:
        print(line, flush=True)


def _choose(level: str) -> None:
    """Choose the level of a process that has not imported the ops."""
    os.environ[CPU_LEVEL_VARIABLE] = level
    # where memory runs out all the same, the system ends this process before any model
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _names(ops: tuple[str, ...] | None) -> tuple[str, ...]:
    from varlen_kernels.functions import ENTRIES

    if ops is None:
        return _longest_first(ENTRIES)
    if unknown := sorted({*ops} - {*ENTRIES}):
        raise ValueError(f"there is no op {unknown[0]}; allowed: {', '.join(sorted(ENTRIES))}")
    return ops


def _longest_first(names: Iterable[str]) -> tuple[str, ...]:
    """Return names in the order in which several cores end at about the same time."""
    return tuple(sorted(names, key=lambda name: not name.startswith(_LONGEST)))


def _compile(name: str) -> tuple[str, float]:
    from varlen_kernels.cpu.calls.machine_code import code_of

    began = time.perf_counter()
    code_of(name)
    return name, time.perf_counter() - began


def _remove_others(levels: Sequence[str], names: Sequence[str]) -> None:
    """Remove all other code than of these levels and functions beside the package."""
    from varlen_kernels.cpu.calls.machine_code import BESIDE, file_name

    wanted = {file_name(name, level) for name in names for level in levels}
    for path in BESIDE.iterdir() if BESIDE.exists() else ():
        if path.name not in wanted:
            path.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile ops for the levels of a command line."""
    parser = argparse.ArgumentParser(prog="compile_all", description=__doc__.splitlines()[0])
    names = [each.level for each in LEVELS]
    parser.add_argument("levels", nargs="*", metavar="LEVEL", help=", ".join(names))
    parser.add_argument("--all", action="store_true", help="all levels")
    parser.add_argument("--ops", metavar="OP,OP", help="only these ops, in this order")
    parser.add_argument(
        "--common",
        action="store_true",
        help="only what most models need in their default dtype, for the level of this CPU",
    )
    parser.add_argument(
        "--only",
        action="store_true",
        help="remove all other code beside the package, as for a wheel",
    )
    options = parser.parse_args(arguments)
    if unknown := sorted({*options.levels} - {*names}):
        parser.error(f"there is no level {unknown[0]}; allowed: {', '.join(names)}")
    try:
        levels = options.levels or (names if options.all else [target_cpu().level])
    except RuntimeError as error:
        levels = []
        print(f"nothing is compiled: {error}")
    except (ImportError, ValueError) as error:
        parser.error(str(error))
    if machine() != "x86_64":
        levels = []
        print(f"nothing is compiled: {machine()} has none of the levels")
    ops = options.ops.split(",") if options.ops else None
    if options.common and levels:
        if len(levels) > 1:
            parser.error(f"--common takes one level, not {len(levels)}")
        ops = common_ops(*levels)
    try:
        done = compile_all(levels, ops) if levels else ()
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    if options.only:
        _remove_others(levels, done)


if __name__ == "__main__":
    main()
