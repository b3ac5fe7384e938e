"""What one system takes above its weights while it runs a stream of requests."""

from __future__ import annotations

import gc
import json
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from varlen.execution.packing import dims_of
from varlen.memory.arena import Arena, alignment_of
from varlen.memory.layout import Layout
from varlen.program.program import Program
from varlen_bench.harness.resident import ResidentPeak
from varlen_bench.memory.cases import Case, Ids
from varlen_bench.memory.systems import Loaded, Run

_TINY_TOKENS = 2


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """What plans of the requests say, in bytes.

    Attributes:
        ratio, ratio_most: footprint over peak live bytes, mean and maximum.
        footprint: mean.
        bound_largest: peak live bytes of the largest request.
    """

    ratio: float
    ratio_most: float
    footprint: float
    bound_largest: int


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """What was measured, in bytes and seconds.

    Attributes:
        requests: that were run.
        weights: memory of the weights.
        peak: above them.
        allocated: of the peak, what was in use; known on a GPU.
        asked_longest: of torch's allocator, during the longest request.
        seconds: of all requests.
        plan_seconds: of that, spent planning.
        new: taken by the arena, over all requests.
        reserved: the most that the arena held.
    """

    requests: int
    weights: int
    peak: int
    allocated: int | None
    asked_longest: int
    seconds: float
    plan_seconds: float | None = None
    new: int | None = None
    reserved: int | None = None


def measure_memory(system: Loaded, case: Case) -> MemoryFigures:
    """Return what a system takes that was loaded in this process and has run nothing."""
    _settle(system, case)
    arena, cuda = system.arena, system.device.type == "cuda"
    stream = _Stream(system.run, arena)
    gauge = ResidentPeak()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(system.device)
    with gauge:
        for ids in case.requests():
            stream.run(ids)
    reserved = torch.cuda.max_memory_reserved(system.device) if cuda else 0
    allocated = torch.cuda.max_memory_allocated(system.device) if cuda else 0
    return MemoryFigures(
        requests=len(case.lengths),
        weights=system.weight_bytes,
        peak=reserved - system.weight_bytes if cuda else gauge.above,
        allocated=allocated - system.weight_bytes if cuda else None,
        asked_longest=asked_bytes(system, case.longest()),
        seconds=stream.seconds,
        plan_seconds=stream.plan_seconds,
        new=stream.new if arena else None,
        reserved=stream.reserved if arena else None,
    )


def plan_figures(program: Program, device: torch.device, case: Case) -> PlanFigures:
    """Return what the plans of whole requests say; nothing is run."""
    layout = Layout(program.buffers, alignment_of(device))
    plans = [layout.plan(dims_of([length] * case.batch)) for length in case.lengths]
    ratios = [plan.footprint / plan.peak_live for plan in plans]
    return PlanFigures(
        ratio=float(np.mean(ratios)),
        ratio_most=max(ratios),
        footprint=float(np.mean([plan.footprint for plan in plans])),
        bound_largest=max(plan.peak_live for plan in plans),
    )


def asked_bytes(system: Loaded, ids: Ids) -> int:
    """Return the bytes that one request asks of torch's allocator, those given back before its end too."""
    if system.device.type == "cuda":
        before = _asked_of_device(system.device)
        system.run(ids)
        return _asked_of_device(system.device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        system.run_in_one_thread(ids)
    with TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    sizes = (event["args"]["Bytes"] for event in events if event.get("name") == "[memory]")
    return sum(size for size in sizes if size > 0)


class _Stream:
    """Runs requests and adds up what they took.

    An arena that gives memory back for a batch takes none for it, so what it holds more after a
    batch than before is what it took.
    """

    def __init__(self, run: Run, arena: Arena | None) -> None:
        self._run = run
        self._arena = arena
        self._planned_before = self._planned()
        self.seconds = 0.0
        self.new = self.reserved = self._reserved()

    @property
    def plan_seconds(self) -> float | None:
        """Time spent planning since the start."""
        return self._planned() - self._planned_before if self._arena else None

    def run(self, ids: Ids) -> None:
        """Run one request."""
        before, began = self._reserved(), time.perf_counter()
        self._run(ids)
        self.seconds += time.perf_counter() - began
        after = self._reserved()
        self.new += max(0, after - before)
        self.reserved = max(self.reserved, after)

    def _reserved(self) -> int:
        return self._arena.use().reserved_bytes if self._arena else 0

    def _planned(self) -> float:
        return self._arena.layout.plan_seconds if self._arena else 0.0


def _settle(system: Loaded, case: Case) -> None:
    """Read every weight, so that its pages count before the measuring begins, and start threads and libraries."""
    with torch.inference_mode():
        for weight in system.weights:
            weight.sum()
    shape = case.batch, min(_TINY_TOKENS, *case.lengths)
    system.run(np.zeros(shape, dtype=np.int32))
    gc.collect()


def _asked_of_device(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device)["allocated_bytes.all.allocated"])
