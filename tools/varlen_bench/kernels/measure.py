"""Measurement of one call: first the error of each system, then its time.

A system that is missing, wrong or fails gets a row with the reason. The others are measured all the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from varlen_bench.harness.summary import Spread
from varlen_bench.kernels.machine import Budget, Machine
from varlen_bench.kernels.peers import Call, Peer, Peers, Unavailable
from varlen_bench.kernels.timing import WARM, copy_time
from varlen_bench.ops.call import Inputs, OpCall

OURS, COPY = "varlen", "copy"
# Our encoder from token ids to vectors, both on the host.
OURS_ON_HOST = "varlen-run"


@dataclass(frozen=True, slots=True)
class Result:
    """The measurement of one system on one call.

    Attributes:
        system: OURS, OURS_ON_HOST, COPY for a copy that moves as many bytes, or a peer's name.
        graph, eager: microseconds in a CUDA graph, and launched by Python.
        error: relative error against float64.
        note: reason why a time is missing.
    """

    op: str
    shape: str
    dtype: str
    system: str
    bytes_moved: int = 0
    flops: int = 0
    tokens: int = 0
    sets: int = 0
    graph: Spread | None = None
    eager: Spread | None = None
    error: float | None = None
    note: str = ""

    @classmethod
    def of(cls, call: OpCall, system: str, **figures: Any) -> "Result":
        """Return the result of a system for a call."""
        sizes = (call.bytes_moved, call.flops, call.tokens)
        return cls(call.op, call.shape, call.dtype_name, system, *sizes, **figures)

    @property
    def is_peer(self) -> bool:
        """Whether the system is another implementation of the op."""
        return self.system not in {OURS, COPY, OURS_ON_HOST}

    @property
    def best(self) -> float | None:
        """The shorter of both times in microseconds, because users would choose that way."""
        return min((time.median for time in (self.graph, self.eager) if time), default=None)

    @property
    def summary(self) -> str:
        """Times and note for a line of progress."""
        ways = {"in a graph": self.graph, "by Python": self.eager}
        times = [f"{time.median:.1f} us {way}" for way, time in ways.items() if time]
        return ", ".join([*times, self.note] if self.note else times)


@torch.inference_mode()
def measure(
    call: OpCall, run: Call, peers: Peers, machine: Machine, budget: Budget, *, warm: bool = False
) -> Iterator[Result]:
    """Yield the results of our op, its peers, and a copy of as many bytes.

    Args:
        warm: whether calls may find their tensors in the cache.

    Raises:
        DeviceLostError: the device is unusable; the result with the reason was yielded before.
    """
    if not budget.allows():
        yield Result.of(call, OURS, note=budget.spent_note)
        return
    moved = WARM if warm else call.bytes_moved
    try:
        sets = [call.make(machine.device, seed) for seed in range(machine.timer.num_sets(moved))]
        for inputs in sets:
            call.prepare(machine.kernels, inputs)
        peer_sets = [{**inputs, **peers.prepare(inputs)} for inputs in sets]
        exact = call.exact(sets[0])
    except Exception as error:  # other calls may succeed
        yield Result.of(call, OURS, note=failed_note(error))
        machine.stop_if_lost(call.name)
        return
    yield _measure_system(call, Peer(OURS, lambda _: run, call.read), machine, sets, moved, exact)
    machine.stop_if_lost(f"{call.name}, {OURS}")
    for peer in peers.systems:
        reserve = peer.compile_seconds
        if budget.allows(reserve):
            yield _measure_system(call, peer, machine, peer_sets, moved, exact)
            machine.stop_if_lost(f"{call.name}, {peer.name}")
        else:
            left = f"less than {reserve:.0f} s" if reserve else "nothing"
            note = f"skipped: {left} of the budget of {budget.seconds:.0f} s left"
            yield Result.of(call, peer.name, note=note)
    if not warm and budget.allows():
        yield _measure_copy(call, machine)


def failed_note(error: BaseException) -> str:
    """Return the note of a failed system: type and first line of the error."""
    if isinstance(error, Unavailable):
        return f"not available: {error}"
    text = str(error).strip().splitlines() or [""]
    return f"failed: {type(error).__name__}: {text[0][:160]}"


def _measure_system(
    call: OpCall, system: Peer, machine: Machine, sets: Sequence[Inputs], moved: int, exact: Tensor
) -> Result:
    call_of_system = replace(call, read=system.read)
    try:
        run = system.build(machine.compile)
        error = call_of_system.error(run(sets[0]), sets[0], exact)
    except Exception as failure:  # a peer that fails gets a row with the reason
        return Result.of(call, system.name, note=failed_note(failure))
    if not error <= call.max_error:
        note = f"wrong: an error of {error:.2g}, allowed {call.max_error:.2g}"
        return Result.of(call, system.name, error=error, note=note)

    def verify(result: object) -> None:
        replayed = call_of_system.error(result, sets[0], exact)
        if not replayed <= call.max_error:
            raise ValueError(f"replayed with an error of {replayed:.2g}")

    graph, eager, notes = None, None, []
    if system.no_graph:
        notes.append(f"not in a graph: {system.no_graph}")
    else:
        try:
            graph = machine.timer.graph(run, sets, moved, verify=verify)
        except Exception as failure:
            notes.append(f"in a graph {failed_note(failure)}")
    try:
        eager = machine.timer.eager(run, sets, moved)
    except Exception as failure:
        notes.append(f"eager {failed_note(failure)}")
    figures = {"sets": len(sets), "graph": graph, "eager": eager, "error": error}
    return Result.of(call, system.name, **figures, note="; ".join(notes))


def _measure_copy(call: OpCall, machine: Machine) -> Result:
    size = call.bytes_moved // 2
    copy = replace(call, moved=2 * size, flops=0, tokens=0)
    try:
        return Result.of(copy, COPY, graph=copy_time(machine.timer, machine.device, size))
    except Exception as failure:
        return Result.of(call, COPY, note=failed_note(failure))
