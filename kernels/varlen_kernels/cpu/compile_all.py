"""Compiles every op ahead, on all cores: `python -m varlen_kernels.cpu.compile_all [--all | LEVEL ...]`.

Otherwise the first start of each kind of model compiles what it needs, on one core. By default code is for the level of
this CPU (`target_cpu`). Code for all levels, which any x86-64 machine can compile, goes into wheels and images.
`machine_code` says where it is stored.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from platform import machine

from varlen_kernels import CPU_LEVEL_VARIABLE
from varlen_kernels.cpu.target_cpu import LEVELS, target_cpu
from varlen_kernels.cpu.threads import usable_cores

# The functions that take longest: they begin first, so that cores end at about the same time.
_LONGEST = ("attend_distances", "attend", "attend_chunks", "multiply")


def compile_all(level: str) -> None:
    """Compile all ops for a level of CPUs, and print how long it takes.

    Raises:
        RuntimeError: an op cannot be compiled or stored here.
    """
    began = time.perf_counter()
    processes = ProcessPoolExecutor(usable_cores(), get_context("spawn"), _choose, (level,))
    try:
        with processes:
            names = processes.submit(_names).result()
            for done in as_completed([processes.submit(_compile, name) for name in names]):
                name, seconds = done.result()
                print(f"compiled {name} in {seconds:.1f} s", flush=True)
    except Exception as error:
        raise RuntimeError(f"the ops cannot be compiled for {level}: {error!r}") from error
    print(f"compiled all ops for {level} in {time.perf_counter() - began:.0f} s")


def _choose(level: str) -> None:
    """Choose the level of a process that has not imported the ops."""
    os.environ[CPU_LEVEL_VARIABLE] = level


def _names() -> list[str]:
    from varlen_kernels.cpu.entries import MAKERS

    return sorted(MAKERS, key=lambda name: not name.startswith(_LONGEST))


def _compile(name: str) -> tuple[str, float]:
    from varlen_kernels.cpu.machine_code import code_of

    began = time.perf_counter()
    code_of(name)
    return name, time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile all ops for the levels of a command line."""
    parser = argparse.ArgumentParser(prog="compile_all", description=__doc__.splitlines()[0])
    names = [each.level for each in LEVELS]
    parser.add_argument("levels", nargs="*", metavar="LEVEL", help=", ".join(names))
    parser.add_argument("--all", action="store_true", help="all levels")
    options = parser.parse_args(arguments)
    if unknown := sorted({*options.levels} - {*names}):
        parser.error(f"there is no level {unknown[0]}; allowed: {', '.join(names)}")
    try:
        levels = options.levels or (names if options.all else [target_cpu().level])
    except RuntimeError as error:
        print(f"nothing is compiled: {error}")
        return
    except (ImportError, ValueError) as error:
        parser.error(str(error))
    if machine() != "x86_64":
        print(f"nothing is compiled: {machine()} has none of the levels")
        return
    try:
        for level in levels:
            compile_all(level)
    except RuntimeError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
