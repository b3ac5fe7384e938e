"""Attention with keys and queries of distances on a CPU, against float64 arithmetic in numpy."""

from functools import partial

import pytest
import torch

from tests.kernels.float64 import (
    DTYPES,
    assert_same_bits_alone,
    attention64,
    bounds_of,
    check,
    rand,
    tables_of,
)
from varlen_kernels import cpu, reference

# around the numbers of queries and keys that are read together
LENGTHS = [15, 16, 17, 0, 127, 161, 1]
TABLES = pytest.mark.parametrize(
    "has_keys, has_queries",
    [(True, True), (True, False), (False, True)],
    ids=["both", "keys", "queries"],
)
READS = {
    "all": {},
    "causal": {"causal": True},
    "window": {"window": 20},
    "biased": {"bias": 3 * rand(3, 41, seed=5)},
}


@pytest.fixture(params=[reference, cpu], ids=["reference", "cpu"])
def ops(request):
    return request.param


@DTYPES
@TABLES
@pytest.mark.parametrize("dim, reach", [(16, 0), (7, 40), (40, 200)], ids=str)
def test_distances_have_keys_and_queries(ops, dim, reach, has_keys, has_queries, dtype):
    qkv = rand(sum(LENGTHS), 3 * 2 * dim, dtype=dtype)
    tables = tables_of(2, dim, dtype, reach, has_keys=has_keys, has_queries=has_queries)
    out = torch.full((sum(LENGTHS), 2 * dim), torch.nan, dtype=dtype)
    scale = (3 * dim) ** -0.5

    actual = ops.attention_varlen(
        qkv, bounds_of(LENGTHS), distances=tables, num_heads=2, scale=scale, out=out
    )

    assert actual is out
    check(out, attention64(qkv, LENGTHS, 2, scale, tables), dtype)


@pytest.mark.parametrize("reads", READS.values(), ids=READS)
def test_distances_go_with_hidden_keys_and_a_bias(ops, reads):
    lengths = [33, 150, 2]
    qkv, tables = rand(sum(lengths), 3 * 3 * 16), tables_of(3, 16, torch.float32, 100)

    actual = ops.attention_varlen(
        qkv, bounds_of(lengths), distances=tables, **reads, num_heads=3, scale=0.3
    )

    check(actual, attention64(qkv, lengths, 3, 0.3, tables, **reads))


@DTYPES
@pytest.mark.parametrize("threads", [1, 3])
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(threads, dtype, monkeypatch):
    qkv, tables = rand(sum(LENGTHS), 3 * 12 * 16, dtype=dtype), tables_of(12, 16, dtype, 90)
    options = {"num_heads": 12, "scale": 0.2, "distances": tables}

    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    assert_same_bits_alone(partial(cpu.attention_varlen, **options), qkv, LENGTHS)


def test_nan_in_a_key_reaches_no_other_sequence():
    qkv, tables = rand(40, 3 * 2 * 16), tables_of(2, 16, torch.float32, 20)
    options = {"num_heads": 2, "scale": 0.2, "distances": tables}
    before = cpu.attention_varlen(qkv, bounds_of([17, 6, 17]), **options)
    qkv[17:23] = torch.nan

    after = cpu.attention_varlen(qkv, bounds_of([17, 6, 17]), **options)

    assert torch.equal(after[:17], before[:17])
    assert torch.equal(after[23:], before[23:])
