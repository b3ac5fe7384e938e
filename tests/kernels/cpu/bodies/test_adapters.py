"""What adapters add to rows is exact; a row always has the same bits."""

import pytest
import torch

from tests.kernels.float64 import DTYPES, bounds_of, check, rand
from varlen_kernels import cpu, reference
from varlen_kernels.cpu.native.threads import using_cores
from varlen_kernels.functions import RANK_STEP, WIDTH_STEP

HIDDEN, TOKENS = 70, 40
# features of each part
PARTS = (100, 7, 64)
# Rows of each adapter, and its rank in each part: of none, of less than a tile, of several.
ADAPTERS = (
    (5, (16, 3, 0)),
    (0, (1, 1, 1)),
    (13, (0, 0, 0)),
    (8, (1, 33, 16)),
    (3, (40, 0, 9)),
)
COUNTS = [count for count, _ in ADAPTERS]


def steps(count, step):
    return -(-count // step) * step


def tables(dtype, adapters=ADAPTERS):
    """Return the tables of adapters, which hold NaN where nothing may be read."""
    columns, first_column = [], 0
    for part in range(len(PARTS)):
        columns.append(first_column)
        first_column += steps(max(ranks[part] for _, ranks in adapters), RANK_STEP)
    first = torch.full((len(adapters), HIDDEN, first_column), torch.nan, dtype=dtype)
    width = steps(max(PARTS), WIDTH_STEP)
    second = torch.full((len(adapters), first_column, width), torch.nan, dtype=dtype)
    spans = torch.zeros(len(adapters), len(PARTS), 4, dtype=torch.int32)
    for number, (_, ranks) in enumerate(adapters):
        feature = 0
        for part, (rank, features) in enumerate(zip(ranks, PARTS, strict=True)):
            begin, end = columns[part], columns[part] + rank
            seed = 10 * number + part
            first[number, :, begin:end] = rand(HIDDEN, rank, dtype=dtype, seed=seed)
            second[number, begin:end, :features] = rand(rank, features, dtype=dtype, seed=seed)
            if rank:
                spans[number, part] = torch.tensor([begin, end, feature, feature + features])
            feature += features
    return first, second, spans


def layer(dtype):
    y, x = (rand(TOKENS, size, dtype=dtype, seed=i) for i, size in enumerate((sum(PARTS), HIDDEN)))
    rows = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))[: sum(COUNTS)].int()
    return y, x, rows


def exact(y, x, rows, first, second, spans, bias=None):
    total = y.double()
    groups = [group for group, count in enumerate(COUNTS) for _ in range(count)]
    for row, group in zip(rows.tolist(), groups, strict=True):
        for rank, last_rank, feature, last_feature in spans[group].tolist():
            added = x[row].double() @ first[group, :, rank:last_rank].double()
            if second is not None:
                added = added @ second[group, rank:last_rank, : last_feature - feature].double()
            total[row, feature:last_feature] += added
        if bias is not None:
            total[row] += bias[group].double()
    return total


KERNELS = pytest.mark.parametrize("kernels", [cpu, reference], ids=["cpu", "reference"])


@DTYPES
@KERNELS
@pytest.mark.parametrize("is_in_place", [True, False], ids=["in-place", "apart"])
def test_rows_that_are_named_get_what_their_adapter_adds_and_others_stay(
    kernels, dtype, is_in_place
):
    y, x, rows = layer(dtype)
    of_adapters = tables(dtype)
    out = y.clone() if is_in_place else torch.full_like(y, torch.nan)
    given = out if is_in_place else y

    actual = kernels.add_adapters(given, x, rows, bounds_of(COUNTS), *of_adapters, out=out)

    assert actual is out
    check(actual, exact(y, x, rows, *of_adapters), dtype)
    others = [token for token in range(TOKENS) if token not in rows.tolist()]
    assert torch.equal(actual[others], y[others])
    fresh = kernels.add_adapters(y, x, rows, bounds_of(COUNTS), *of_adapters)
    assert torch.equal(fresh, actual)


@DTYPES
@KERNELS
@pytest.mark.parametrize("features", [3, 50])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
def test_an_adapter_may_add_a_whole_layer(kernels, dtype, features, has_bias):
    x, y = rand(TOKENS, HIDDEN, dtype=dtype), rand(TOKENS, features, dtype=dtype, seed=1)
    rows = layer(dtype)[2]
    shape = len(COUNTS), HIDDEN, steps(features, RANK_STEP)
    first = torch.full(shape, torch.nan, dtype=dtype)
    first[..., :features] = rand(len(COUNTS) * HIDDEN, features, dtype=dtype).view(*shape[:2], -1)
    spans = torch.tensor([[[0, features, 0, features]]] * len(COUNTS), dtype=torch.int32)
    bias = rand(len(COUNTS), features, dtype=dtype, seed=3) if has_bias else None

    actual = kernels.add_adapters(y, x, rows, bounds_of(COUNTS), first, None, spans, bias)

    check(actual, exact(y, x, rows, first, None, spans, bias), dtype)


@DTYPES
def test_a_row_has_the_same_bits_alone_among_others_and_on_any_number_of_cores(dtype):
    y, x, rows = layer(dtype)
    of_adapters = tables(dtype)

    def results(rows, counts, cores=1):
        with using_cores(cores):
            return cpu.add_adapters(y, x, rows, bounds_of(counts), *of_adapters)

    expected = results(rows, COUNTS)

    assert torch.equal(results(rows, COUNTS, cores=2), expected)
    place = 0
    for group, count in enumerate(COUNTS):
        for row in rows[place : place + count]:
            alone = results(row[None], [int(each == group) for each in range(len(COUNTS))])
            assert torch.equal(alone[row], expected[row])
        place += count


def test_no_rows_change_nothing():
    y, x, rows = layer(torch.float32)
    actual = cpu.add_adapters(y, x, rows[:0], bounds_of([0] * len(COUNTS)), *tables(torch.float32))
    assert torch.equal(actual, y)
