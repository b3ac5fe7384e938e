"""The table of streams: as committed, with a chunk list that releases when it says and the arena's own one chunk."""

import csv

import pytest
import torch

from varlen.execution.packing import dims_of, largest_dims
from varlen.memory import arena
from varlen.memory.layout import Layout
from varlen.memory.planner import Rules
from varlen_tools import paper_records, weightless
from varlen_tools.bench_kernels.grid import FULL
from varlen_tools.bench_report import write_table
from varlen_tools.plan_records import all_records, paper
from varlen_tools.plan_streams import (
    OUTPUT,
    ChunkList,
    ExactlyEnough,
    OneChunk,
    measure,
    rows,
    streams,
)
from varlen_tools.setup_server import PROJECT

CPU = torch.device("cpu")


def footprint_of(length):
    return paper().in_one_chunk(length).footprint


def test_the_committed_table_is_what_comes_out(tmp_path):
    with (PROJECT / OUTPUT).open(newline="") as file:
        committed = list(csv.DictReader(file))
    short = {name for name, lengths in streams().items() if len(lengths) <= 150}

    write_table(tmp_path / "table.csv", rows(longest_stream=150))

    with (tmp_path / "table.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [row for row in committed if row["stream"] in short]
    assert {row["stream"] for row in committed} == set(streams())


@pytest.mark.parametrize("shape", FULL.encoders, ids=lambda shape: shape.name)
def test_one_chunk_holds_what_the_arena_holds(shape):
    records = next(found for found in all_records() if found.name == shape.name)
    stand_in = OneChunk(arena._WINDOW, records)
    real = arena.Arena(Layout(weightless.record(shape).buffers, 64), largest_dims(1000), CPU)
    # long ones are rare at the end, so that memory is given back
    stream = [*paper_records.lengths(150, 500), *paper_records.lengths(150, 60)]

    held = []
    for length in stream:
        real.allocate_whole(dims_of([length]))
        held.append(real.use().reserved_bytes)

    assert held == [stand_in(length).held for length in stream]
    assert held[-1] < max(held)


@pytest.mark.parametrize("grace, left", [(0, 1), (1, 2), (2, 2)])
def test_a_chunk_is_released_after_so_many_requests_without_it(grace, left):
    chunks = ChunkList(Rules(), grace, paper())
    chunks(240)
    assert len(chunks.chunks) == 3

    for _ in range(grace):
        step = chunks(10)
        assert len(chunks.chunks) == 3
        assert step.taken == 0
    chunks(10)

    assert len(chunks.chunks) == 1


def test_a_chunk_is_kept_for_good_where_none_is_ever_released():
    chunks = ChunkList(Rules(), None, paper())

    steps = [chunks(length) for length in [240, *[10] * 100, 240]]

    assert steps[-1].taken == 0
    assert {step.held for step in steps} == {steps[0].held}


def test_what_a_plan_releases_is_not_held_while_its_request_runs():
    chunks = ChunkList(Rules(), 0, paper())

    steps = [chunks(length) for length in [240, 10]]

    assert steps[1].held == sum(chunks.chunks) < steps[0].held


def test_a_chunk_in_use_now_and_then_stays():
    chunks = ChunkList(Rules(), 2, paper())

    steps = [chunks(length) for length in [240, 10, 10] * 5]

    assert sum(step.taken for step in steps) == steps[0].taken


def test_one_chunk_takes_what_a_request_needs_in_steps_and_gives_it_back():
    memory = OneChunk(4, paper())

    steps = [memory(length) for length in [500, *[10] * 8]]

    assert steps[0].taken == steps[0].held >= footprint_of(500)
    assert steps[0].taken - footprint_of(500) < 2 << 20
    assert [step.taken for step in steps[1:]] == [0] * 8
    assert steps[-1].held == 2 << 20


def test_memory_of_its_own_is_taken_for_every_request():
    row = measure(ExactlyEnough(paper()), paper(), [10, 20, 10])

    assert row["taken_bytes"] == 2 * footprint_of(10) + footprint_of(20)
    assert row["allocations"] == 3
