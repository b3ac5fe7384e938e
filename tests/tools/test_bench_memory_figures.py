"""The memory benchmark's arithmetic: rows of the CSV from figures, the worst of each, what did not run."""

from pathlib import Path

import pytest

from varlen_bench.kernels.grid import TINY
from varlen_bench.memory import run
from varlen_bench.memory.cases import NO_ARENA, OURS, PEER, Case
from varlen_bench.memory.process import WorkerError
from varlen_bench.memory.report import bench_figures, notes, soak_lines, tables
from varlen_bench.memory.rows import EXACT, Row, case_rows, failed_soak, soak_rows
from varlen_bench.memory.run import Settings, measure_cases
from varlen_bench.memory.soak import Flatness, Soak

MIB = 1 << 20
CASE = Case(TINY.encoders[0], 2, (1, 2, 3, 4))
KEYS = [
    "footprint_vs_bound",
    "vs_pytorch",
    "plan_share",
    "speed_vs_no_arena",
    "new_bytes_per_request",
    "rss_flatness",
]


def memory_answer(peak, **more):
    found = {
        "requests": 4,
        "weights": 100 * MIB,
        "peak": peak * MIB,
        "allocated": None,
        "asked_longest": 8 * MIB,
        "seconds": 2.0,
        "plan_seconds": None,
        "new": None,
        "reserved": None,
    }
    return found | more


def answers(**changes):
    plan = {"ratio": 1.02, "ratio_most": 1.1, "footprint": 5 * MIB, "bound_largest": 10 * MIB}
    ours = memory_answer(20, plan_seconds=0.01, new=12 * MIB, reserved=12 * MIB)
    found = {
        OURS: {"memory": ours, "plan": plan},
        NO_ARENA: {"memory": memory_answer(30)},
        PEER: {"memory": memory_answer(50)},
        "speed": {"speed": {"ratio": 1.2, "ratio_p20": 1.1, "ratio_p80": 1.3, "requests": 4}},
    }
    return found | changes


def test_rows_hold_a_cases_figures():
    ours, without, peer, exact = case_rows(CASE, "cpu", answers())

    assert [row.system for row in (ours, without, peer, exact)] == [OURS, NO_ARENA, PEER, EXACT]
    assert (ours.vs_pytorch, without.vs_pytorch, peer.vs_pytorch) == (0.4, 0.6, 1.0)
    assert (ours.reserved_vs_bound, ours.new_mib_per_request) == (1.2, 3.0)
    assert (ours.plan_share, ours.vs_no_arena) == (0.005, 1.2)
    assert (exact.new_mib_per_request, exact.peak_mib) == (5.0, None)


def test_the_bench_line_has_the_worst_of_each_figure():
    better = Row("tiny", 1, 4, OURS, "cpu", footprint_vs_bound=1.0, vs_pytorch=0.3)
    served = soak_rows(
        Soak(Path(), "tiny"),
        [Flatness("stub", (100, 102, 101), 110), Flatness("server", (10, 90), 90)],
    )

    figures = bench_figures([better, *case_rows(CASE, "cpu", answers()), *served])

    assert list(figures) == KEYS
    assert list(figures.values()) == [1.02, 0.4, 0.005, 1.2, 3 * MIB, pytest.approx(0.0198)]


def test_a_peer_that_fails_leaves_its_reason_and_no_ratio():
    rows = case_rows(CASE, "cpu", answers(**{PEER: {"error": "no module"}}))

    assert rows[0].peak_mib == 20
    assert [row.vs_pytorch for row in rows] == [None] * 4
    assert notes(rows) == ["tiny 2 transformers: did not run: no module"]
    assert bench_figures(rows)["vs_pytorch"] is None
    assert bench_figures(rows)["speed_vs_no_arena"] == 1.2


def test_our_own_failure_leaves_a_row_too():
    failed = {"error": "out of luck"}

    rows = case_rows(CASE, "cpu", answers(**{OURS: failed, "speed": failed}))

    assert [row.system for row in rows] == [OURS, NO_ARENA, PEER]
    assert rows[0].note == "did not run: out of luck; no speed: out of luck"
    assert set(bench_figures(rows).values()) == {None}


def test_a_server_that_fails_leaves_a_row():
    row = failed_soak(Soak(Path(), "tiny"), "no server")

    assert notes([row]) == ["tiny stub: did not run: no server"]
    assert soak_lines([row]) == []


def test_tables_show_systems_that_ran_and_the_exact_arena():
    systems, arenas = tables(case_rows(CASE, "cpu", answers(**{PEER: {"error": "gone"}})))

    assert systems.row_count == 2
    assert arenas.row_count == 2


def test_a_peer_without_a_process_loses_no_other_row(monkeypatch):
    def answer(order):
        if order.system == PEER:
            raise WorkerError("killed")
        return answers()["speed" if order.task == "speed" else order.system]

    monkeypatch.setattr(run, "ask", answer)
    monkeypatch.setattr(run, "save_random_checkpoint", lambda *_: None)

    (rows,) = measure_cases([CASE], Settings("cpu", 1), lambda _: None)

    assert [row.note for row in rows] == ["", "", "did not run: killed", ""]
