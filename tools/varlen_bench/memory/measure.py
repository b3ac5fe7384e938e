"""The worker process of one measurement: memory above weights, or speed.

The order {"system": a system} gives its figures, {"system": None} the speed in each round.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from varlen.execution.packing import dims_of
from varlen_bench.compare.systems import System
from varlen_bench.harness.accuracy import Vectors
from varlen_bench.harness.resident import MIB, resident_peak
from varlen_bench.harness.worker import Message, run_worker
from varlen_bench.memory.cases import Case, Ids
from varlen_bench.memory.systems import (
    EmbedIds,
    LoadedSystem,
    load,
    load_runner,
    planned,
    unplanned,
)

_TINY_TOKENS = 2
# The speed is measured on every third round of a case.
_ROUND_STEP = 3


def start(argument: Message) -> Callable[[Message], Message]:
    """Return the function that answers the order of this process."""
    torch.set_num_threads(argument["threads"])
    case, folder = Case.from_json(argument["case"]), Path(argument["folder"])
    device = argument["device"]

    def handle(order: Message) -> Message:
        if order["system"] is None:
            return {"speeds": measure_speed(folder, device, case)}
        system = load(System(**order["system"]), folder, device, case.max_tokens)
        return {"figures": measure_memory(system, case)}

    return handle


def measure_memory(system: LoadedSystem, case: Case) -> list[dict[str, float]]:
    """Return the figures of a fresh system; for varlen also of an exact arena."""
    _settle(system, case)
    device, weights, arena = system.device, system.weight_bytes, system.arena
    held = [arena.use().reserved_bytes] if arena else []
    planned_before = arena.layout.plan_seconds if arena else 0.0
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    seconds = 0.0
    with resident_peak() as resident:
        for ids in map(case.ids, range(len(case.lengths))):
            began = time.perf_counter()
            system.embed(ids)
            seconds += time.perf_counter() - began
            if arena:
                held.append(arena.use().reserved_bytes)
    planned = arena.layout.plan_seconds - planned_before if arena else 0.0
    figures = {"weights_mib": weights / MIB, "peak_mib": resident.above / MIB, "seconds": seconds}
    if device.type == "cuda":
        peaks = {
            "peak_mib": torch.cuda.max_memory_reserved(device),
            "allocated_mib": torch.cuda.max_memory_allocated(device),
        }
        figures |= {name: (peak - weights) / MIB for name, peak in peaks.items()}
    figures["asked_mib_longest"] = asked_bytes(system, case.longest()) / MIB
    if arena is None:
        return [figures]
    plans = [arena.layout.plan(dims_of([length] * case.batch)) for length in case.lengths]
    ratios = [plan.footprint / plan.peak_live for plan in plans]
    bound = max(plan.peak_live for plan in plans)
    figures |= {
        "footprint_vs_bound": statistics.fmean(ratios),
        "footprint_vs_bound_max": max(ratios),
        "bound_largest_mib": bound / MIB,
        "reserved_mib": max(held) / MIB,
        "reserved_vs_bound": max(held) / bound,
        "new_mib_per_request": allocated_bytes(held) / len(case.lengths) / MIB,
        "plan_share": planned / seconds,
    }
    exact = statistics.fmean(plan.footprint for plan in plans) / MIB
    return [figures, {"new_mib_per_request": exact}]


def allocated_bytes(held: Sequence[int]) -> int:
    """Return the bytes that an arena allocated, from those that it held after each request."""
    # no request both allocates and releases
    return held[0] + sum(max(0, after - before) for before, after in pairwise(held))


def measure_speed(folder: Path, device: str, case: Case) -> list[float]:
    """Return the speed with the arena over the speed without it, by round."""
    runner = load_runner(folder, device, case.max_tokens)
    without = unplanned(runner.program, runner.device, case.max_tokens)
    systems = planned(runner).embed, without.embed
    compare(systems, case.longest(), turn=0)
    ratios = []
    for numbers in case.rounds()[::_ROUND_STEP]:
        seconds = [compare(systems, case.ids(number), turn) for turn, number in enumerate(numbers)]
        ours, fresh = map(sum, zip(*seconds, strict=True))
        ratios.append(fresh / ours)
    return ratios


def compare(systems: tuple[EmbedIds, EmbedIds], ids: Ids, turn: int) -> tuple[float, float]:
    """Return the seconds of both systems on one request; they take turns in going first."""
    seconds, answers = [0.0, 0.0], dict[int, Vectors]()
    for which in (0, 1) if turn % 2 == 0 else (1, 0):
        began = time.perf_counter()
        answers[which] = systems[which](ids)
        seconds[which] = time.perf_counter() - began
    if not np.array_equal(answers[0], answers[1]):
        raise RuntimeError(f"the answers to a request of shape {ids.shape} differ")
    return seconds[0], seconds[1]


def asked_bytes(system: LoadedSystem, ids: Ids) -> int:
    """Return the bytes that one request asks of torch's allocator, freed ones included."""
    if system.device.type == "cuda":
        asked = "allocated_bytes.all.allocated"
        before = torch.cuda.memory_stats(system.device)[asked]
        system.embed(ids)
        return int(torch.cuda.memory_stats(system.device)[asked] - before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        system.embed(ids)
    with TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    sizes = (event["args"]["Bytes"] for event in events if event.get("name") == "[memory]")
    return sum(size for size in sizes if size > 0)


def _settle(system: LoadedSystem, case: Case) -> None:
    """Read every weight and run a tiny request, which the peak does not include."""
    with torch.inference_mode():
        for weight in system.weights:
            weight.sum()
    shape = case.batch, min(_TINY_TOKENS, *case.lengths)
    system.embed(np.zeros(shape, dtype=np.int32))
    gc.collect()


if __name__ == "__main__":
    run_worker(start)
