"""The figures of the memory benchmark: rows of a case, and BENCH keys."""

from dataclasses import asdict, replace
from pathlib import Path

from varlen_bench.harness.resident import MIB
from varlen_bench.harness.worker import WorkerError
from varlen_bench.memory.cases import NO_ARENA, OURS, PEER, Case
from varlen_bench.memory.rows import EXACT, STUB, Row, bench_figures, notes, tables
from varlen_bench.memory.run import measure_case
from varlen_bench.memory.soak import Soak
from varlen_bench.peers.checkpoints import MINILM

CASE = Case(MINILM, 2, (1, 2, 3, 4))
SPEED = {"vs_no_arena": 1.2, "vs_no_arena_p20": 1.1, "vs_no_arena_p80": 1.3}


def rows_of(name, case):
    row = Row("minilm", 2, len(case.lengths), name, "cpu", weights_mib=100.0, seconds=2.0)
    if name != OURS:
        return [replace(row, peak_mib={NO_ARENA: 30.0, PEER: 50.0}[name])]
    ours = replace(
        row,
        footprint_vs_bound=1.02,
        new_mib_per_request=3.0,
        peak_mib=20.0,
        plan_share=0.005,
    )
    exact = Row("minilm", 2, len(case.lengths), EXACT, "cpu", new_mib_per_request=5.0)
    return [ours, exact]


def measured(*failing):
    def ask(what, case):
        if what in failing:
            raise WorkerError(f"{what} is broken")
        if what == "speed":
            return {"speed": SPEED}
        return {"rows": [asdict(row) for row in rows_of(what, case)]}

    return measure_case(CASE, "cpu", ask, lambda _: None)


def test_a_case_has_a_row_for_each_system_and_the_exact_arena():
    ours, without, peer, exact = measured()

    assert [row.system for row in (ours, without, peer, exact)] == [OURS, NO_ARENA, PEER, EXACT]
    assert [row.requests for row in (ours, without, peer, exact)] == [4, 2, 4, 4]
    assert (ours.vs_pytorch, without.vs_pytorch, peer.vs_pytorch) == (0.4, 0.6, 1.0)
    assert (ours.vs_no_arena, ours.vs_no_arena_p20, ours.vs_no_arena_p80) == (1.2, 1.1, 1.3)
    assert (exact.new_mib_per_request, exact.vs_pytorch) == (5.0, None)


def test_the_bench_line_has_the_worst_of_each_figure():
    better = Row("tiny", 1, 4, OURS, "cpu", footprint_vs_bound=1.0, vs_pytorch=0.3)
    stub = replace(Soak(Path(), "tiny").row(STUB), rss_flatness=2 / 101)

    assert bench_figures([better, *measured(), stub]) == {
        "footprint_vs_bound": 1.02,
        "vs_pytorch": 0.4,
        "plan_share": 0.005,
        "speed_vs_no_arena": 1.2,
        "new_bytes_per_request": 3 * MIB,
        "rss_flatness": 0.0198,
    }


def test_a_peer_that_fails_leaves_its_reason_and_no_ratio():
    rows = measured(PEER)

    assert rows[0].peak_mib == 20
    assert [row.vs_pytorch for row in rows] == [None] * 4
    assert notes(rows)[-1] == "minilm 2 transformers: did not run: transformers is broken"
    assert bench_figures(rows)["vs_pytorch"] is None
    assert bench_figures(rows)["speed_vs_no_arena"] == 1.2
    systems, arenas = tables(rows)
    assert [line[3] for line in systems.lines] == [OURS, NO_ARENA]
    assert [line[3] for line in arenas.lines] == [OURS, EXACT]


def test_our_own_failure_leaves_a_row_too():
    rows = measured(OURS, "speed")

    assert [row.system for row in rows] == [OURS, NO_ARENA, PEER]
    assert rows[0].note == "did not run: varlen is broken; no speed: speed is broken"
    assert set(bench_figures(rows).values()) == {None}
