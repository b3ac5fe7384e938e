"""Attention that reads the first keys of each sequence, on a CPU, against float64."""

import pytest
import torch

from varlen_kernels import cpu, reference

from .float64 import DTYPES, attention64, bounds_of, check, rand, tables_of

# around the numbers of queries and keys that are read together, and two neighbours of one length
LENGTHS = [15, 33, 33, 0, 200, 161, 1]
KEY_LENGTHS = [15, 4, 17, 0, 129, 3, 1]
HEADS, DIM = 2, 40
READS = {
    "all": {},
    "causal": {"causal": True},
    # queries far behind the keys read none of them
    "window": {"window": 20},
    "near": {"window": 2},
    "biased": {"bias": 3 * rand(HEADS, 41, seed=5)},
    "biased window": {"bias": 3 * rand(HEADS, 41, seed=5), "window": 20},
}


@pytest.fixture(params=[reference, cpu], ids=["reference", "cpu"])
def ops(request):
    return request.param


def attend(ops, qkv, key_lengths, lengths=LENGTHS, **more):
    out = torch.full((len(qkv), HEADS * DIM), torch.nan, dtype=qkv.dtype)
    keys = torch.tensor(key_lengths, dtype=torch.int32)
    bounds = bounds_of(lengths)
    return ops.attention_varlen(
        qkv, bounds, key_lengths=keys, num_heads=HEADS, scale=0.2, out=out, **more
    )


@DTYPES
@pytest.mark.parametrize("reads", READS.values(), ids=READS)
def test_queries_read_the_first_keys(ops, reads, dtype):
    qkv = rand(sum(LENGTHS), 3 * HEADS * DIM, dtype=dtype)

    actual = attend(ops, qkv, KEY_LENGTHS, **reads)

    expected = attention64(qkv, LENGTHS, HEADS, 0.2, key_lengths=KEY_LENGTHS, **reads)
    check(actual, expected, dtype)


@pytest.mark.parametrize("reads", [{}, {"window": 20}], ids=["all", "window"])
def test_distances_are_those_of_the_first_keys(ops, reads):
    qkv, tables = rand(sum(LENGTHS), 3 * HEADS * DIM), tables_of(HEADS, DIM, torch.float32, 40)

    actual = attend(ops, qkv, KEY_LENGTHS, distances=tables, **reads)

    expected = attention64(qkv, LENGTHS, HEADS, 0.2, tables, key_lengths=KEY_LENGTHS, **reads)
    check(actual, expected)


@pytest.mark.parametrize("window", [0, 7])
def test_other_keys_may_hold_anything(ops, window):
    qkv = rand(sum(LENGTHS), 3 * HEADS * DIM)
    expected = attend(ops, qkv, KEY_LENGTHS, window=window)
    begin = 0
    for length, num_keys in zip(LENGTHS, KEY_LENGTHS, strict=True):
        qkv[begin + num_keys : begin + length, HEADS * DIM :] = 1e9
        begin += length

    assert torch.equal(attend(ops, qkv, KEY_LENGTHS, window=window), expected)


def test_all_keys_are_the_default(ops):
    qkv = rand(sum(LENGTHS), 3 * HEADS * DIM)
    options = {"num_heads": HEADS, "scale": 0.2, "window": 9}

    plain = ops.attention_varlen(qkv, bounds_of(LENGTHS), **options)

    assert torch.equal(attend(ops, qkv, LENGTHS, window=9), plain)
