"""Sums and joins between ranks: exact, equal on all ranks, and never an endless wait."""

import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
import torch

from tests.kernels.rank_exchanges import (
    FORMS,
    exchange_all,
    exchange_over_gloo,
    expected_sums,
    shared_memory,
)
from varlen_kernels import reference
from varlen_kernels.cpu.calls.run_calls import has_compiled_ops
from varlen_kernels.reference.rank_memory import (
    BUFFER_BYTES,
    FAILED,
    LINE_WORDS,
    LONGEST_WAIT,
    TURNS,
    rank_words,
)
from varlen_kernels.reference.ranks import failed_rank

# Forms of the ranks of a group.
GROUPS = [("reference",) * 2, ("cpu",) * 2, ("cpu",) * 3, ("reference", "cpu", "cpu", "reference")]
DTYPES = [torch.float32, torch.bfloat16]


def memory_of(size):
    return torch.zeros(rank_words(size), dtype=torch.int64)


def on_all_ranks(group, run):
    """Return the result of each rank, each run in a thread."""
    ranks = memory_of(len(group))
    with ThreadPoolExecutor(len(group)) as pool:
        jobs = [pool.submit(run, form, ranks, rank) for rank, form in enumerate(group)]
        return [job.result() for job in jobs]


def bits(x):
    """Return the bits of some numbers, in which the two zeros differ."""
    return x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


def random(shape, dtype, *seed):
    numbers = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(numbers).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS, ids="-".join)
# none, one number, and more than a buffer
@pytest.mark.parametrize("shape", [(0, 7), (1, 1), (5, 33), (3, BUFFER_BYTES // 4 + 1)], ids=str)
@pytest.mark.parametrize("is_in_place", [False, True], ids=["fresh", "in place"])
def test_a_sum_is_the_sum_of_all_ranks_rounded_once(group, dtype, shape, is_in_place):
    size = len(group)
    parts = [random(shape, dtype, rank) for rank in range(size)]

    def run(form, ranks, rank):
        x = parts[rank].clone()
        out = x if is_in_place else torch.full_like(x, torch.nan)
        assert FORMS[form].all_reduce(x, ranks, rank=rank, size=size, out=out) is out
        assert is_in_place or torch.equal(x, parts[rank])
        return out

    first, *others = on_all_ranks(group, run)

    exact = sum(part.double() for part in parts)
    scale = sum(part.double().abs() for part in parts)
    # half a unit for each sum, and for the last rounding
    assert ((first - exact).abs() <= scale * size * torch.finfo(dtype).eps / 2).all()
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    assert torch.equal(first, total.to(dtype))
    assert all(torch.equal(bits(other), bits(first)) for other in others)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS, ids="-".join)
def test_sums_of_zeros_infinities_and_nan_are_those_of_ieee(group, dtype):
    size = len(group)
    x = torch.tensor([[-0.0, 0.0, torch.inf, -torch.inf, torch.nan, 1e38]]).to(dtype)

    def run(form, ranks, rank):
        return FORMS[form].all_reduce(x, ranks, rank=rank, size=size)

    for result in on_all_ranks(group, run):
        total = sum([x.float()] * (size - 1), start=x.float()).to(dtype)
        assert torch.equal(result.signbit()[:, :4], x.signbit()[:, :4])
        torch.testing.assert_close(result, total, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS, ids="-".join)
@pytest.mark.parametrize(
    "rows, width", [(0, 9), (1, 3), (7, 263), (9, 20_001), (2, 4 * BUFFER_BYTES + 5)]
)
def test_columns_of_all_ranks_are_side_by_side_on_the_first(group, dtype, rows, width):
    size = len(group)
    whole = random((rows, width), dtype, rows, width)
    most = -(-width // size)

    def run(form, ranks, rank):
        mine = whole[:, rank * most : (rank + 1) * most].contiguous()
        return FORMS[form].gather_columns(mine, ranks, rank=rank, size=size, width=width)

    first, *_ = on_all_ranks(group, run)

    assert torch.equal(first, whole)


@pytest.mark.parametrize("form", FORMS)
def test_tokens_of_other_ranks_have_the_row_after_the_last(form):
    ids = torch.tensor([0, 9, 10, 14, 15, 200], dtype=torch.int32)

    rows = FORMS[form].local_ids(ids, first=10, count=5)

    assert rows.tolist() == [5, 5, 0, 4, 5, 5]
    assert rows.dtype == torch.int32


@pytest.mark.skipif(not has_compiled_ops(), reason="a function of tables, which are compiled")
@pytest.mark.parametrize("first, count", [(0, 300), (10, 5), (290, 10), (300, 0)])
def test_rows_of_tokens_are_equal_in_a_table(first, count):
    from varlen_kernels.cpu.calls.calls import run_op

    ids = torch.arange(300, dtype=torch.int32)
    rows = torch.full_like(ids, -1)

    run_op("local_ids", (ids,), [rows], first=first, count=count)

    assert torch.equal(rows, reference.local_ids(ids, first=first, count=count))


@pytest.mark.parametrize("group", GROUPS, ids="-".join)
def test_many_exchanges_of_threads_lose_nothing(group):
    size, count = len(group), 300

    def run(form, ranks, rank):
        return exchange_all(form, ranks, rank, size, count)

    assert set(on_all_ranks(group, run)) == {expected_sums(size, count)}


@pytest.fixture(scope="module")
def processes():
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        yield pool


@pytest.mark.full
@pytest.mark.parametrize("group", [("reference",) * 2, *GROUPS[1:]], ids="-".join)
def test_many_exchanges_of_processes_lose_nothing(group, processes, tmp_path):
    size, count = len(group), 1000
    path = str(tmp_path / "ranks")
    memory = shared_memory(path, size)

    jobs = [
        processes.submit(exchange_all, form, path, rank, size, count)
        for rank, form in enumerate(group)
    ]

    assert {job.result() for job in jobs} == {expected_sums(size, count)}
    assert failed_rank(memory) is None


@pytest.mark.full
def test_exchanges_of_gpus_give_the_same_sums_over_gloo(processes, tmp_path):
    # of two numbers the sum is rounded once in any case
    size, count, path = 2, 100, str(tmp_path / "ranks")

    jobs = [processes.submit(exchange_over_gloo, path, rank, size, count) for rank in range(size)]

    assert {job.result() for job in jobs} == {expected_sums(size, count)}


def wait_for_turns(memory, turns, ranks):
    """Wait until each of some ranks has come to as many turns."""
    while any(int(memory[LINE_WORDS * (1 + rank) + TURNS]) < turns for rank in ranks):
        time.sleep(1e-3)


@pytest.mark.parametrize("group", GROUPS, ids="-".join)
def test_a_rank_that_does_not_come_is_named_and_awaited_once(group):
    size, x = len(group) + 1, torch.ones(2, 2)
    memory = memory_of(size)
    assert failed_rank(memory) is None

    def run(rank):
        ops = FORMS[group[rank]]
        for _ in range(3):
            ops.all_reduce(x, memory, rank=rank, size=size)
            ops.gather_columns(x, memory, rank=rank, size=size, width=2 * size)

    with ThreadPoolExecutor(len(group)) as pool:
        jobs = [pool.submit(run, rank) for rank in range(len(group))]
        # with a limit from the start, a rank that begins late would be the lost one
        wait_for_turns(memory, 1, range(len(group)))
        memory[LONGEST_WAIT] = 10_000_000
        # returns at once from all that follow
        for job in jobs:
            job.result()

    assert failed_rank(memory) == len(group)


@pytest.mark.full
@pytest.mark.parametrize("group", [("reference",) * 2, *GROUPS[1:]], ids="-".join)
def test_a_process_that_stops_in_the_middle_is_named(group, processes, tmp_path):
    size, last = len(group), len(group) - 1
    path = str(tmp_path / "ranks")
    memory = shared_memory(path, size)
    counts = [50] * last + [20]

    jobs = [
        processes.submit(exchange_all, form, path, rank, size, count)
        for rank, (form, count) in enumerate(zip(group, counts, strict=True))
    ]
    assert jobs[last].result() == expected_sums(size, counts[last])
    wait_for_turns(memory, 2 * counts[last] + 1, range(last))
    memory[LONGEST_WAIT] = 10_000_000

    # joins of rank 0 are then undefined
    assert isinstance(jobs[0].exception(), AssertionError)
    for job in jobs[1:]:
        job.result()
    assert failed_rank(memory) == last


@pytest.mark.parametrize("form", FORMS)
def test_a_failed_group_waits_for_nothing_without_a_limit(form):
    memory, x = memory_of(3), torch.ones(2, 2)
    memory[FAILED] = 1 + 2

    FORMS[form].all_reduce(x, memory, rank=0, size=3)
    FORMS[form].gather_columns(x, memory, rank=0, size=3, width=6)

    assert failed_rank(memory) == 2
