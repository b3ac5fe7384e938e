"""Candidate launches of the benchmark's calls, and their compilation in other processes.

Nothing is compiled or launched to find the candidates, so a list takes a second. Processes that see no GPU compile
them with the fake driver of `dry_run`, and leave the result in Triton's cache on disk. A launch in this process then
loads it.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import TypeAlias

import torch

from varlen_bench.dry_run import SHARED_MEMORY_LIMITS, dry_run, no_launches
from varlen_bench.kernels.grid import Grid, calls_of
from varlen_bench.kernels.measure import failed_note
from varlen_bench.ops.call import OpCall, kernels
from varlen_kernels import tuning
from varlen_kernels.tuning import Key, Launch

# Returns the same list of calls of launchers, on CPU tensors, in every process. Must be picklable.
Runs: TypeAlias = Callable[[], Sequence[Callable[[], object]]]

_runs: Sequence[Callable[[], object]] = ()
_MAX_CALLS = 3


@dataclass(slots=True)
class Choice:
    """A key of an op, its candidate launches, and the calls with this key.

    Attributes:
        launches: the default first.
        calls: the largest first.
    """

    op: str
    key: Key
    launches: Sequence[Launch]
    calls: list[OpCall] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Op and key, for messages."""
        return f"{self.op} {tuning.key_text(self.key)}"


@torch.inference_mode()
def collect_choices(
    calls: Iterable[OpCall], ops: object, report: Callable[[str], None]
) -> list[Choice]:
    """Return the keys of these calls, in the order in which they are met.

    Each has its largest, middle and smallest call.

    Args:
        report: receives a line per call that fails.
    """
    found: dict[tuple[str, Key], Choice] = {}
    for call in calls:
        try:
            with no_launches(), tuning.record_picks() as picks:
                call.run(ops, call.make_empty())
        except Exception as error:  # other calls may succeed
            report(f"{call.name}: {failed_note(error)}")
            continue
        for op, key, candidate_launches in picks:
            choice = found.setdefault((op, key), Choice(op, key, candidate_launches(*key)))
            if call not in choice.calls:
                choice.calls.append(call)
    for choice in found.values():
        choice.calls.sort(key=lambda call: -call.bytes_moved)
        if len(choice.calls) > _MAX_CALLS:
            middle = choice.calls[len(choice.calls) // 2]
            choice.calls = [choice.calls[0], middle, choice.calls[-1]]
    return list(found.values())


def candidate_runs(
    grid: Grid, groups: Sequence[str], dtypes: Sequence[str]
) -> list[Callable[[], object]]:
    """Return a call for each candidate launch, in the order of the choices."""
    # the caller has listed the same choices and reported the calls that fail
    failed: list[str] = []
    calls = calls_of(grid, groups, dtypes)
    choices = collect_choices(calls, kernels("fused"), failed.append)
    return [
        partial(_run_launch, choice, launch) for choice in choices for launch in choice.launches
    ]


def default_runs(
    grid: Grid, groups: Sequence[str], dtypes: Sequence[str]
) -> list[Callable[[], object]]:
    """Return one of those calls of these groups that launch the same kernels by default."""
    distinct: dict[object, OpCall] = {}
    for call in calls_of(grid, groups, dtypes):
        distinct.setdefault(_kernels_of(call), call)
    return [partial(run_empty, call) for call in distinct.values()]


def _kernels_of(call: OpCall) -> object:
    """Return what decides the kernels of a call: launches and widths."""
    inputs = call.make_empty()
    with no_launches(), tuning.record_picks() as picks:
        run_empty(call)
    widths = {
        name: (value.shape[1:], value.dtype)
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor)
    }
    return call.op, str(call.options), str(widths), str([pick[:2] for pick in picks])


def _run_launch(choice: Choice, launch: Launch) -> None:
    with tuning.forced_launch(choice.op, choice.key, launch):
        run_empty(choice.calls[0])


@torch.inference_mode()
def run_empty(call: OpCall) -> None:
    """Run a call on unfilled inputs on the CPU, inside `dry_run` or `no_launches`."""
    ops, inputs = kernels("fused"), call.make_empty()
    call.prepare(ops, inputs)
    call.run(ops, inputs)


class CompileAhead:
    """The compilations in progress; their numbers are indices into the list of runs."""

    def __init__(self, futures: Sequence["Future[int]"]) -> None:
        self._futures = futures

    def wait(self, numbers: Iterable[int], seconds: float) -> int:
        """Return how many kernels these runs compiled, after at most `seconds`.

        A run that has not ended, or failed, counts nothing: its launch will compile or fail again.
        """
        chosen = [self._futures[number] for number in numbers] if self._futures else []
        done = wait(chosen, timeout=seconds).done
        return sum(future.result() for future in done if future.exception() is None)


@contextmanager
def compile_ahead(
    runs: Runs, count: int, capability: str, processes: int
) -> Iterator[CompileAhead]:
    """Yield the compilations of `runs`, in its order; those not begun end with the context.

    Args:
        capability: compute capability of the GPU, such as "sm_90"; nothing is compiled for an unknown one.
        processes: 0 compiles nothing.
    """
    arch = int(capability.removeprefix("sm_")) if capability.startswith("sm_") else 0
    if not processes or arch not in SHARED_MEMORY_LIMITS:
        yield CompileAhead([])
        return
    pool = ProcessPoolExecutor(
        processes, get_context("spawn"), initializer=_start, initargs=(runs, count)
    )
    try:
        yield CompileAhead([pool.submit(_compile, number, arch) for number in range(count)])
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start(runs: Runs, count: int) -> None:
    """Prepare a process: no GPU, one thread, the list of runs.

    Raises:
        RuntimeError: the list has another length here.
    """
    global _runs  # noqa: PLW0603  # the pool has no other place for the state of a process
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    _runs = runs()
    if len(_runs) != count:
        raise RuntimeError(f"this process lists {len(_runs)} runs; the one that times has {count}")


def _compile(number: int, arch: int) -> int:
    """Return the number of kernels that a run added to the cache."""
    with dry_run(arch) as compiled:
        _runs[number]()
    return sum(not compilation.cached for compilation in compiled)
