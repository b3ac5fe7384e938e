"""Sums and joins between ranks: exact, equal on all ranks, and never an endless wait."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from varlen_kernels import cpu, reference
from varlen_kernels.reference.rank_memory import BUFFER_BYTES, LONGEST_WAIT, rank_words
from varlen_kernels.reference.ranks import failed_rank

FORMS = {"reference": reference, "cpu": cpu}
# Forms of the ranks of a group.
GROUPS = [("reference",) * 2, ("cpu",) * 2, ("cpu",) * 3, ("reference", "cpu", "cpu", "reference")]
DTYPES = [torch.float32, torch.bfloat16]


def memory_of(size):
    return torch.zeros(rank_words(size), dtype=torch.int64)


def on_all_ranks(group, run):
    """Return what each rank returns, all of them threads."""
    ranks = memory_of(len(group))
    with ThreadPoolExecutor(len(group)) as pool:
        jobs = [pool.submit(run, FORMS[form], ranks, rank) for rank, form in enumerate(group)]
        return [job.result() for job in jobs]


def random(shape, dtype, *seed):
    numbers = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(numbers).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS, ids="-".join)
# none, one number, and more than a buffer
@pytest.mark.parametrize("shape", [(0, 7), (1, 1), (5, 33), (3, BUFFER_BYTES // 4 + 1)], ids=str)
def test_a_sum_is_the_sum_of_all_ranks_rounded_once(group, dtype, shape):
    size = len(group)
    parts = [random(shape, dtype, rank) for rank in range(size)]

    def run(form, ranks, rank):
        x = parts[rank].clone()
        result = form.all_reduce(x, ranks, rank=rank, size=size, out=x)
        assert result is x
        return x

    results = on_all_ranks(group, run)

    total = torch.zeros(shape)
    for part in parts:
        total += part.float()
    for result in results:
        torch.testing.assert_close(result, total.to(dtype), rtol=0, atol=0)


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
        return form.gather_columns(mine, ranks, rank=rank, size=size, width=width)

    first, *_ = on_all_ranks(group, run)

    assert torch.equal(first, whole)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_tokens_of_other_ranks_have_the_row_after_the_last(form):
    ids = torch.tensor([0, 9, 10, 14, 15, 200], dtype=torch.int32)

    rows = form.local_ids(ids, first=10, count=5)

    assert rows.tolist() == [5, 5, 0, 4, 5, 5]
    assert rows.dtype == torch.int32


@pytest.mark.parametrize("group", GROUPS, ids="-".join)
def test_many_turns_in_a_row_lose_nothing(group):
    size, rounds = len(group), 300

    def run(form, ranks, rank):
        numbers, found = np.random.default_rng(1), []
        for number in range(rounds):
            rows, columns = numbers.integers(1, 40, 2).tolist()
            x = torch.full((rows, columns), float(rank + number))
            found.append(form.all_reduce(x, ranks, rank=rank, size=size))
            if number % 3 == 0:
                width = max(columns, size)
                first, last = (min(width, each * -(-width // size)) for each in (rank, rank + 1))
                mine = torch.arange(first, last).float().expand(rows, -1).contiguous()
                join = form.gather_columns(mine, ranks, rank=rank, size=size, width=width)
                if not rank:
                    assert join[-1].tolist() == list(range(width))
        return found

    for number, results in enumerate(zip(*on_all_ranks(group, run), strict=True)):
        expected = sum(rank + number for rank in range(size))
        for result in results:
            assert (result == expected).all()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_rank_that_does_not_come_is_named_and_waited_for_once(form):
    ranks, x = memory_of(3), torch.ones(2, 2)
    ranks[LONGEST_WAIT] = 10_000_000
    assert failed_rank(ranks) is None

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(form.all_reduce, x.clone(), ranks, rank=1, size=3)
        form.all_reduce(x, ranks, rank=0, size=3)
        other.result()

    assert failed_rank(ranks) == 2
    ranks[LONGEST_WAIT] = 0
    # without a limit, this would wait for ever
    form.all_reduce(x, ranks, rank=0, size=3)
    form.gather_columns(x, ranks, rank=0, size=3, width=6)
