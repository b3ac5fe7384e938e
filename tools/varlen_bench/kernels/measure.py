"""Cases measured one by one: first whether a system is right, then how long it takes.

A system that is missing, wrong or breaks leaves a row that says so, and the others alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from varlen_bench.kernels.case import Call, Case, Inputs, Unavailable, as_tensor
from varlen_bench.kernels.machine import Budget, Machine
from varlen_bench.kernels.timing import WARM, Timing, copy_time

OURS, COPY = "varlen", "copy"
# Ours as a server calls it, from ids to vectors.
RUN = "varlen-run"


@dataclass(frozen=True, slots=True)
class Result:
    """What one system did with one case.

    Attributes:
        op, shape, dtype: of the case.
        system: who; OURS, RUN, COPY for a copy that moves as many bytes, or a peer's name.
        bytes_moved, flops, tokens: of the case.
        sets: of inputs that took turns.
        graph: in a CUDA graph.
        eager: launched by Python.
        error: of the result, relative to float64.
        note: why a time is missing.
    """

    op: str
    shape: str
    dtype: str
    system: str
    bytes_moved: int = 0
    flops: int = 0
    tokens: int = 0
    sets: int = 0
    graph: Timing | None = None
    eager: Timing | None = None
    error: float | None = None
    note: str = ""

    @property
    def is_peer(self) -> bool:
        """Whether it is someone else's, and computes the op."""
        return self.system not in {OURS, COPY, RUN}

    @property
    def best(self) -> float | None:
        """The shorter of its times in microseconds: of a peer, the way that its users would choose."""
        times = [timing.median for timing in (self.graph, self.eager) if timing is not None]
        return min(times, default=None)


@dataclass(frozen=True, slots=True)
class _System:
    name: str
    build: Callable[[], Call]
    read: Callable[[object, Inputs], Tensor]
    compile_seconds: float = 0.0
    no_graph: str = ""


@torch.inference_mode()
def measure(case: Case, machine: Machine, budget: Budget) -> Iterator[Result]:
    """Yield a result for ours, a copy of as many bytes, and each peer.

    Raises:
        DeviceLostError: the device cannot be used any more; the result that says so came before.
    """
    if not budget.allows():
        yield _without_time(case, OURS, f"skipped: the budget of {budget.seconds:.0f} s is spent")
        return
    try:
        count = machine.timer.num_sets(WARM if case.warm else case.bytes_moved)
        sets = [case.make(machine.device, seed) for seed in range(count)]
        exact = case.exact(sets[0])
    except Exception as error:  # the next case may do
        yield _failed(case, OURS, error)
        machine.stop_if_lost(case.name)
        return
    for system in _systems(case, machine):
        reserve = system.compile_seconds
        if budget.allows(reserve):
            yield _measure_system(case, system, machine, sets, exact)
            machine.stop_if_lost(f"{case.name}, {system.name}")
        else:
            left = (
                f"less than {reserve:.0f} s of the budget" if reserve else "nothing of the budget"
            )
            yield _without_time(
                case, system.name, f"skipped: {left} of {budget.seconds:.0f} s left"
            )
    if not case.warm and budget.allows():
        yield _measure_copy(case, machine)


def _measure_copy(case: Case, machine: Machine) -> Result:
    size = case.bytes_moved // 2
    try:
        timing = copy_time(machine.timer, machine.device, size)
    except Exception as failure:
        return _failed(case, COPY, failure)
    return Result(case.op, case.shape, _name(case.dtype), COPY, 2 * size, graph=timing)


def failed_note(error: BaseException) -> str:
    """Return what a row says of a system that failed: the error's first line."""
    if isinstance(error, Unavailable):
        return f"not here: {error}"
    text = str(error).strip().splitlines() or [""]
    return f"failed: {type(error).__name__}: {text[0][:160]}"


def _systems(case: Case, machine: Machine) -> Iterator[_System]:
    def ours() -> Call:
        return lambda inputs: case.call(machine.kernels, inputs)

    yield _System(OURS, ours, case.read or as_tensor)
    for peer in case.peers:
        yield _System(
            peer.name,
            lambda peer=peer: peer.build(machine.compile),  # type: ignore[misc]
            peer.read or as_tensor,
            peer.compile_seconds,
            peer.no_graph,
        )


def _measure_system(
    case: Case, system: _System, machine: Machine, sets: Sequence[Inputs], exact: Tensor
) -> Result:
    try:
        call = system.build()
        error = case.error(system.read(call(sets[0]), sets[0]), exact)
    except Exception as failure:  # one peer that fails is a row that says so
        return _failed(case, system.name, failure)
    if not error <= case.most_error():
        note = f"wrong: an error of {error:.2g}, allowed {case.most_error():.2g}"
        return _without_time(case, system.name, note, error)

    def verify(result: object) -> None:
        replayed = case.error(system.read(result, sets[0]), exact)
        if not replayed <= case.most_error():
            raise ValueError(f"replayed with an error of {replayed:.2g}")

    graph, eager, notes = None, None, []
    moved = WARM if case.warm else case.bytes_moved
    if system.no_graph:
        notes.append(f"not in a graph: {system.no_graph}")
    else:
        try:
            graph = machine.timer.graph(call, sets, moved, verify=verify)
        except Exception as failure:
            notes.append(f"in a graph {failed_note(failure)}")
    try:
        eager = machine.timer.eager(call, sets, moved)
    except Exception as failure:
        notes.append(f"eager {failed_note(failure)}")
    return Result(
        op=case.op,
        shape=case.shape,
        dtype=_name(case.dtype),
        system=system.name,
        bytes_moved=case.bytes_moved,
        flops=case.flops,
        tokens=case.tokens,
        sets=len(sets),
        graph=graph,
        eager=eager,
        error=error,
        note="; ".join(notes),
    )


def _failed(case: Case, system: str, error: Exception) -> Result:
    return _without_time(case, system, failed_note(error))


def _without_time(case: Case, system: str, note: str, error: float | None = None) -> Result:
    return Result(
        op=case.op,
        shape=case.shape,
        dtype=_name(case.dtype),
        system=system,
        bytes_moved=case.bytes_moved,
        flops=case.flops,
        tokens=case.tokens,
        error=error,
        note=note,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
