"""The worker process of one measurement: memory of a system above its weights, or speed with and without the arena.

The order {"measure": name of a system} gives rows, {"measure": "speed"} gives columns of a row.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from varlen.execution.packing import dims_of
from varlen_bench.harness.accuracy import Vectors
from varlen_bench.harness.resident import ResidentPeak
from varlen_bench.harness.summary import Spread
from varlen_bench.harness.worker import Message, run_worker
from varlen_bench.memory.cases import Case, Ids
from varlen_bench.memory.rows import EXACT, MIB, Row, empty_row
from varlen_bench.memory.systems import Loaded, Run, load, load_runner, planned, unplanned

_TINY_TOKENS = 2
# The speed is measured on every third round of a case.
_ROUND_STEP = 3


def start(argument: Message) -> Callable[[Message], Message]:
    """Return the function that answers the order of this process."""
    torch.set_num_threads(argument["threads"])
    case, folder = Case.from_json(argument["case"]), Path(argument["folder"])
    device = argument["device"]

    def handle(order: Message) -> Message:
        if order["measure"] == "speed":
            return {"speed": measure_speed(folder, device, case)}
        system = load(order["measure"], folder, device, case.max_tokens)
        return {"rows": [asdict(row) for row in measure_memory(system, case)]}

    return handle


def measure_memory(system: Loaded, case: Case) -> list[Row]:
    """Return the row of a system that has run nothing yet; of varlen, also that of the exact arena."""
    _settle(system, case)
    device, weights = system.device, system.weight_bytes
    arena = system.arena
    held = [arena.use().reserved_bytes] if arena else []
    planned_before = arena.layout.plan_seconds if arena else 0.0
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    seconds = 0.0
    with ResidentPeak() as resident:
        for ids in map(case.ids, range(len(case.lengths))):
            began = time.perf_counter()
            system.run(ids)
            seconds += time.perf_counter() - began
            if arena:
                held.append(arena.use().reserved_bytes)
    planned = arena.layout.plan_seconds - planned_before if arena else 0.0
    peak, allocated = resident.above, None
    if device.type == "cuda":
        peak = torch.cuda.max_memory_reserved(device) - weights
        allocated = (torch.cuda.max_memory_allocated(device) - weights) / MIB
    row = replace(
        empty_row(case, system.name, device.type),
        weights_mib=weights / MIB,
        peak_mib=peak / MIB,
        allocated_mib=allocated,
        asked_mib_longest=asked_bytes(system, case.longest()) / MIB,
        seconds=seconds,
    )
    if arena is None:
        return [row]
    plans = [arena.layout.plan(dims_of([length] * case.batch)) for length in case.lengths]
    ratios = [plan.footprint / plan.peak_live for plan in plans]
    bound = max(plan.peak_live for plan in plans)
    exact = float(np.mean([plan.footprint for plan in plans]))
    row = replace(
        row,
        footprint_vs_bound=float(np.mean(ratios)),
        footprint_vs_bound_max=max(ratios),
        bound_largest_mib=bound / MIB,
        reserved_mib=max(held) / MIB,
        reserved_vs_bound=max(held) / bound,
        new_mib_per_request=allocated_bytes(held) / len(case.lengths) / MIB,
        plan_share=planned / seconds,
    )
    return [row, replace(empty_row(case, EXACT, device.type), new_mib_per_request=exact / MIB)]


def allocated_bytes(held: Sequence[int]) -> int:
    """Return the bytes that an arena allocated, from those that it held after each request."""
    # no request both allocates and releases
    return held[0] + sum(max(0, after - before) for before, after in pairwise(held))


def measure_speed(folder: Path, device: str, case: Case) -> dict[str, float]:
    """Return the columns of the speed with the arena over that without it."""
    runner = load_runner(folder, device, case.max_tokens)
    without = unplanned(runner.program, runner.device, case.max_tokens)
    runs = planned(runner).run, without.run
    compare(runs, case.longest(), turn=0)
    ratios = []
    for numbers in case.rounds()[::_ROUND_STEP]:
        seconds = [compare(runs, case.ids(number), turn) for turn, number in enumerate(numbers)]
        ours, fresh = map(sum, zip(*seconds, strict=True))
        ratios.append(fresh / ours)
    spread = Spread.of(ratios)
    return {
        "vs_no_arena": spread.median,
        "vs_no_arena_p20": spread.p20,
        "vs_no_arena_p80": spread.p80,
    }


def compare(runs: tuple[Run, Run], ids: Ids, turn: int) -> tuple[float, float]:
    """Return the seconds of both systems on one request; they take turns in going first."""
    seconds, answers = [0.0, 0.0], dict[int, Vectors]()
    for which in (0, 1) if turn % 2 == 0 else (1, 0):
        began = time.perf_counter()
        answers[which] = runs[which](ids)
        seconds[which] = time.perf_counter() - began
    if not np.array_equal(answers[0], answers[1]):
        raise RuntimeError(f"the answers to a request of shape {ids.shape} differ")
    return seconds[0], seconds[1]


def asked_bytes(system: Loaded, ids: Ids) -> int:
    """Return the bytes that one request asks of torch's allocator, freed ones included."""
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


def _settle(system: Loaded, case: Case) -> None:
    """Read every weight and run a tiny request, so that only requests count from now on."""
    with torch.inference_mode():
        for weight in system.weights:
            weight.sum()
    shape = case.batch, min(_TINY_TOKENS, *case.lengths)
    system.run(np.zeros(shape, dtype=np.int32))
    gc.collect()


def _asked_of_device(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device)["allocated_bytes.all.allocated"])


if __name__ == "__main__":
    run_worker(start)
