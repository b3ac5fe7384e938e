"""Attention with keys and queries of distances on a CPU, against float64 arithmetic in numpy."""

import numpy as np
import pytest
import torch

from varlen_kernels import cpu, reference

from .float64 import DTYPES, bounds_of, check, f64, rand

# around the numbers of queries and keys that are read together
LENGTHS = [15, 16, 17, 0, 127, 161, 1]
ROWS = 30
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


def tables_of(heads, dim, dtype, reach, *, has_keys=True, has_queries=True):
    """Return rows that several distances share, in any order, and the tables."""
    rows = torch.from_numpy(np.random.default_rng(0).integers(0, ROWS, 2 * reach + 1))
    return {
        "distance_rows": rows.int(),
        "distance_keys": rand(ROWS, heads * dim, dtype=dtype, seed=1) if has_keys else None,
        "distance_queries": rand(ROWS, heads * dim, dtype=dtype, seed=2) if has_queries else None,
    }


def attention64(qkv, lengths, heads, scale, tables, *, causal=False, window=0, bias=None):
    """Return attention whose scores have the tables' rows of each pair of tokens."""
    outs = []
    rows = tables["distance_rows"].numpy()
    for tokens in np.split(f64(qkv), np.cumsum(lengths)[:-1]):
        length = len(tokens)
        q, k, v = np.moveaxis(tokens.reshape(length, 3, heads, qkv.shape[1] // (3 * heads)), 1, 0)
        distance = np.arange(length) - np.arange(length)[:, None]
        at = rows[np.clip(distance, -(len(rows) // 2), len(rows) // 2) + len(rows) // 2]
        scores = np.einsum("qhd,khd->hqk", q, k)
        for name, by, indices in (("distance_keys", q, "qhd"), ("distance_queries", k, "khd")):
            if tables[name] is not None:
                of_pairs = f64(tables[name])[at].reshape(length, length, *q.shape[1:])
                scores += np.einsum(f"{indices},qkhd->hqk", by, of_pairs)
        scores *= scale
        if bias is not None:
            reach = bias.shape[1] // 2
            scores += f64(bias)[:, np.clip(distance, -reach, reach) + reach]
        is_hidden = (distance > 0) & causal | (np.abs(distance) >= (window or length))
        scores = np.where(is_hidden, -np.inf, scores)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-np.inf))
        weights /= weights.sum(axis=-1, keepdims=True)
        outs.append(np.einsum("hqk,khd->qhd", weights, v).reshape(length, qkv.shape[1] // 3))
    return np.concatenate(outs)


@DTYPES
@TABLES
@pytest.mark.parametrize("dim, reach", [(16, 0), (7, 40), (40, 200)], ids=str)
def test_distances_have_keys_and_queries(ops, dim, reach, has_keys, has_queries, dtype):
    qkv = rand(sum(LENGTHS), 3 * 2 * dim, dtype=dtype)
    tables = tables_of(2, dim, dtype, reach, has_keys=has_keys, has_queries=has_queries)
    out = torch.full((sum(LENGTHS), 2 * dim), torch.nan, dtype=dtype)
    scale = (3 * dim) ** -0.5

    actual = ops.attention_varlen(
        qkv, bounds_of(LENGTHS), **tables, num_heads=2, scale=scale, out=out
    )

    assert actual is out
    check(out, attention64(qkv, LENGTHS, 2, scale, tables), dtype)


@pytest.mark.parametrize("reads", READS.values(), ids=READS)
def test_distances_go_with_hidden_keys_and_a_bias(ops, reads):
    lengths = [33, 150, 2]
    qkv, tables = rand(sum(lengths), 3 * 3 * 16), tables_of(3, 16, torch.float32, 100)

    actual = ops.attention_varlen(
        qkv, bounds_of(lengths), **tables, **reads, num_heads=3, scale=0.3
    )

    check(actual, attention64(qkv, lengths, 3, 0.3, tables, **reads))


@DTYPES
@pytest.mark.parametrize("threads", [1, 3])
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(threads, dtype, monkeypatch):
    qkv, tables = rand(sum(LENGTHS), 3 * 12 * 16, dtype=dtype), tables_of(12, 16, dtype, 90)
    options = {"num_heads": 12, "scale": 0.2, **tables}

    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    together = cpu.attention_varlen(qkv, bounds_of(LENGTHS), **options)

    begin = 0
    for length in LENGTHS:
        rows = slice(begin, begin + length)
        alone = cpu.attention_varlen(qkv[rows], bounds_of([length]), **options)
        assert torch.equal(alone, together[rows])
        begin += length


def test_nan_in_a_key_reaches_no_other_sequence():
    qkv, tables = rand(40, 3 * 2 * 16), tables_of(2, 16, torch.float32, 20)
    options = {"num_heads": 2, "scale": 0.2, **tables}
    before = cpu.attention_varlen(qkv, bounds_of([17, 6, 17]), **options)
    qkv[17:23] = torch.nan

    after = cpu.attention_varlen(qkv, bounds_of([17, 6, 17]), **options)

    assert torch.equal(after[:17], before[:17])
    assert torch.equal(after[23:], before[23:])
