"""The table of streams: as committed, and a chunk list that releases when it says."""

import csv

import pytest

from varlen.memory.planner import Rules
from varlen_tools.bench_report import write_table
from varlen_tools.plan_streams import (
    OUTPUT,
    ChunkList,
    ExactlyEnough,
    OneChunk,
    footprint_of,
    measure,
    policies,
    streams,
)
from varlen_tools.setup_server import PROJECT


def test_the_committed_table_is_what_comes_out(tmp_path):
    with (PROJECT / OUTPUT).open(newline="") as file:
        committed = list(csv.DictReader(file))
    short = {name: lengths for name, lengths in streams().items() if len(lengths) <= 150}
    table = [
        {"stream": stream, **measure(name, make(), lengths)}
        for stream, lengths in short.items()
        for name, make in policies()
    ]

    write_table(tmp_path / "table.csv", table)

    with (tmp_path / "table.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [row for row in committed if row["stream"] in short]
    assert {row["stream"] for row in committed} == set(streams())


@pytest.mark.parametrize("grace, left", [(0, 1), (1, 2), (2, 2)])
def test_a_chunk_is_released_after_so_many_requests_without_it(grace, left):
    chunks = ChunkList(Rules(), grace)
    chunks(240)
    assert len(chunks.chunks) == 3

    for _ in range(grace):
        step = chunks(10)
        assert len(chunks.chunks) == 3
        assert step.taken == 0
    chunks(10)

    assert len(chunks.chunks) == 1


def test_a_chunk_in_use_now_and_then_stays():
    chunks = ChunkList(Rules(), grace=2)

    steps = [chunks(length) for length in [240, 10, 10] * 5]

    assert sum(step.taken for step in steps) == steps[0].taken


def test_one_chunk_takes_what_a_request_needs_in_steps_and_gives_it_back():
    memory = OneChunk(window=4)

    steps = [memory(length) for length in [500, *[10] * 8]]

    assert steps[0].taken == steps[0].held >= footprint_of(500)
    assert steps[0].taken - footprint_of(500) < 2 << 20
    assert [step.taken for step in steps[1:]] == [0] * 8
    assert steps[-1].held == 2 << 20


def test_memory_of_its_own_is_taken_for_every_request():
    row = measure("exact", ExactlyEnough(), [10, 20, 10])

    assert row["taken_bytes"] == 2 * footprint_of(10) + footprint_of(20)
    assert row["allocations"] == 3
