"""The figures of the memory benchmark: rows of a case, and BENCH keys."""

from pathlib import Path

import pytest

from varlen_bench.harness.resident import MIB
from varlen_bench.harness.worker import WorkerError
from varlen_bench.memory.cases import NO_ARENA, OURS, PEER, Case
from varlen_bench.memory.rows import (
    EXACT,
    STUB,
    bench_figures,
    csv_rows,
    empty_result,
    notes,
    tables,
)
from varlen_bench.memory.run import measure_case
from varlen_bench.memory.soak import Soak
from varlen_bench.peers.checkpoints import MINILM

pytestmark = pytest.mark.full

CASE = Case(MINILM, 2, (1, 2, 3, 4))
SPEEDS = [1.0, 1.1, 1.2, 1.2, 1.3, 1.4]
FIGURES = {
    OURS: [
        {
            "weights_mib": 100.0,
            "footprint_vs_bound": 1.02,
            "new_mib_per_request": 3.0,
            "peak_mib": 20.0,
            "plan_share": 0.005,
        },
        {"new_mib_per_request": 5.0},
    ],
    NO_ARENA: [{"weights_mib": 100.0, "peak_mib": 30.0}],
    PEER: [{"weights_mib": 100.0, "peak_mib": 50.0}],
}


def measured(*failing):
    def ask(system, case):
        if system in failing:
            raise WorkerError(f"{system.name if system else 'speed'} is broken")
        return {"figures": map(dict, FIGURES[system])} if system else {"speeds": SPEEDS}

    return measure_case(CASE, "cpu", ask, lambda _: None)


def columns(results, *names):
    return [tuple(row[name] for name in names) for row in csv_rows(results)]


def test_a_case_has_a_row_for_each_system_and_the_exact_arena():
    results = measured()

    assert columns(results, "system", "requests", "vs_pytorch") == [
        ("varlen", 4, 0.4),
        ("varlen-no-arena", 2, 0.6),
        ("transformers", 4, 1.0),
        ("exact-arena", 4, None),
    ]
    assert set(columns(results, "encoder", "batch", "device")) == {("minilm", 2, "cpu")}
    speeds = columns(results, "vs_no_arena", "vs_no_arena_p20", "vs_no_arena_p80")
    assert speeds[0] == (1.2, 1.1, 1.3)
    assert columns(results, "new_mib_per_request")[-1] == (5.0,)


def test_the_bench_line_has_the_worst_of_each_figure():
    better = empty_result(OURS, "tiny", "cpu", 4)
    better.rounds.append({"footprint_vs_bound": 1.0, "vs_pytorch": 0.3})
    stub = Soak(Path(), "tiny").result(STUB)
    stub.rounds.append({"rss_flatness": 2 / 101})

    assert bench_figures([better, *measured(), stub]) == {
        "footprint_vs_bound": 1.02,
        "vs_pytorch": 0.4,
        "plan_share": 0.005,
        "speed_vs_no_arena": 1.2,
        "new_bytes_per_request": 3 * MIB,
        "rss_flatness": 0.0198,
    }


def test_a_peer_that_fails_leaves_its_reason_and_no_ratio():
    results = measured(PEER)

    assert results[0].median("peak_mib") == 20
    assert columns(results, "vs_pytorch") == [(None,)] * 4
    assert notes(results)[-1] == "minilm 2 transformers: did not run: transformers is broken"
    assert bench_figures(results)["vs_pytorch"] is None
    assert bench_figures(results)["speed_vs_no_arena"] == 1.2
    systems, arenas = tables(results)
    assert [line[3] for line in systems.lines] == [OURS.name, NO_ARENA.name]
    assert [line[3] for line in arenas.lines] == [OURS.name, EXACT.name]


def test_our_own_failure_leaves_a_row_too():
    results = measured(OURS, None)

    assert [result.system for result in results] == [OURS, NO_ARENA, PEER]
    assert results[0].note == "did not run: varlen is broken; no speed: speed is broken"
    assert set(bench_figures(results).values()) == {None}
