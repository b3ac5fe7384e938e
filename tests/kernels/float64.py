"""Helpers of the reference tests: random inputs, attention and comparison with float64 in numpy."""

import numpy as np
import pytest
import torch

from tests.closeness import assert_close
from varlen_kernels.reference.attention import Distances

# Roundings of the longest sum in these tests; in bfloat16, of the intermediate results of an op.
ROUNDINGS = {torch.float32: 4096, torch.bfloat16: 16}
# Rows of tables of distances.
ROWS = 30
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def rand(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def f64(tensor):
    return tensor.to(torch.float64).numpy()


def bounds_of(lengths):
    return torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)


def assert_out_is_overwritten(call):
    """Assert that a call fills an output of NaN with a fresh one's bits."""
    fresh = call(None)
    out = torch.full_like(fresh, torch.nan)

    returned = call(out)

    assert returned.data_ptr() == out.data_ptr()
    assert torch.equal(out, fresh)


def assert_same_bits_alone(attend, qkv, lengths):
    """Assert that each sequence alone has the bits that it has among the others."""
    together = attend(qkv, bounds_of(lengths))
    begin = 0
    for length in lengths:
        rows = slice(begin, begin + length)
        assert torch.equal(attend(qkv[rows], bounds_of([length])), together[rows])
        begin += length


def check(actual, expected, dtype=torch.float32):
    assert_close(actual, expected, roundings=ROUNDINGS[dtype], dtype=dtype)


def tables_of(heads, dim, dtype, reach, *, has_keys=True, has_queries=True):
    """Return rows that several distances share, in any order, and the tables."""
    rows = torch.from_numpy(np.random.default_rng(0).integers(0, ROWS, 2 * reach + 1))
    return Distances(
        rows.int(),
        rand(ROWS, heads * dim, dtype=dtype, seed=1) if has_keys else None,
        rand(ROWS, heads * dim, dtype=dtype, seed=2) if has_queries else None,
    )


def attention64(
    qkv, lengths, heads, scale, tables=None, *, causal=False, window=0, bias=None, key_lengths=None
):
    """Return attention whose scores have the tables' rows of each pair of tokens."""
    outs = []
    tables = tables or Distances(torch.zeros(1, dtype=torch.int32), None, None)
    rows = tables.rows.numpy()
    key_lengths = lengths if key_lengths is None else key_lengths
    sequences = np.split(f64(qkv), np.cumsum(lengths)[:-1])
    for tokens, num_keys in zip(sequences, key_lengths, strict=True):
        length = len(tokens)
        q, k, v = np.moveaxis(tokens.reshape(length, 3, heads, qkv.shape[1] // (3 * heads)), 1, 0)
        distance = np.arange(length) - np.arange(length)[:, None]
        at = rows[np.clip(distance, -(len(rows) // 2), len(rows) // 2) + len(rows) // 2]
        scores = np.einsum("qhd,khd->hqk", q, k)
        for table, by, indices in ((tables.keys, q, "qhd"), (tables.queries, k, "khd")):
            if table is not None:
                of_pairs = f64(table)[at].reshape(length, length, *q.shape[1:])
                scores += np.einsum(f"{indices},qkhd->hqk", by, of_pairs)
        scores *= scale
        if bias is not None:
            reach = bias.shape[1] // 2
            scores += f64(bias)[:, np.clip(distance, -reach, reach) + reach]
        is_hidden = (distance > 0) & causal | (np.abs(distance) >= (window or length))
        is_hidden = is_hidden | (np.arange(length) >= num_keys)
        scores = np.where(is_hidden, -np.inf, scores)
        weights = np.exp(
            scores - np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), -1e9)
        )
        # a query without keys gets zeros
        weights /= np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)
        outs.append(np.einsum("hqk,khd->qhd", weights, v).reshape(length, qkv.shape[1] // 3))
    return np.concatenate(outs)


def whole_range():
    """Return numbers of all sizes that fp32 has: `[rows, 1024]` fp32."""
    sizes = torch.logspace(-44, 38, 16_000, dtype=torch.float64)
    return torch.cat([torch.linspace(-110, 110, 33_536), sizes.float(), -sizes.float()]).view(
        -1, 1024
    )


def activation64(x, kind):
    """Return an activation in float64."""
    x = x.double()
    if kind == "relu":
        return x.clamp_min(0)
    if kind == "gelu":
        return 0.5 * x * torch.erfc(-x / 2**0.5)
    # 1 + tanh(y) is 2 · sigmoid(2 y), without cancellation
    inner = x if kind == "silu" else 2 * (2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)
    return x * torch.sigmoid(inner)


def check_activation(actual, x, kind):
    """Raise AssertionError unless each error is at most eight roundings of the input."""
    error = (actual.double() - activation64(x, kind)).abs()
    assert (error <= 8 * 2**-24 * x.double().abs() + 2**-149).all()
