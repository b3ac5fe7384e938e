"""The ops of CPUs on whole sequences, against float64 arithmetic in numpy."""

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.float64 import (
    DTYPES,
    assert_out_is_overwritten,
    attention64,
    bounds_of,
    check,
    f64,
    rand,
)
from varlen_kernels import Pooling, cpu, reference

# lengths of the sequences of a batch
BATCHES = pytest.mark.parametrize(
    "lengths",
    [[1], [1, 1, 1], [3, 3, 3], [1, 2, 3], [5, 1, 5, 5, 2], [63, 1, 100], [17, 17, 1, 1, 17]],
    ids=str,
)
BATCHES_WITH_EMPTY = pytest.mark.parametrize(
    "lengths",
    [[0], [0, 3], [3, 0], [0, 0, 4, 0, 0], [2, 0, 2], [0, 2, 0, 3, 0, 0, 3], [1, 0, 0, 1]],
    ids=str,
)
OPS = [reference, cpu]
MODES = pytest.mark.parametrize("mode", get_args(Pooling))


@pytest.fixture(params=OPS, ids=["reference", "cpu"], scope="module")
def ops(request):
    return request.param


def sequences_of(x, lengths):
    """Return the rows of each sequence."""
    return np.split(x[: sum(lengths)], np.cumsum(lengths)[:-1])


@DTYPES
@pytest.mark.parametrize(
    "num_heads, head_dim", [(1, 1), (1, 64), (3, 5), (5, 32), (12, 32), (7, 9)], ids=str
)
@BATCHES
def test_attention_varlen_matches_float64(ops, lengths, num_heads, head_dim, dtype):
    qkv = rand(sum(lengths), 3 * num_heads * head_dim, dtype=dtype)
    scale = head_dim**-0.5

    actual = ops.attention_varlen(qkv, bounds_of(lengths), num_heads=num_heads, scale=scale)

    check(actual, attention64(qkv, lengths, num_heads, scale), dtype)


@DTYPES
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("reach", [0, 2, 130])
@BATCHES
def test_attention_varlen_adds_a_bias_and_hides_later_tokens(
    ops, lengths, reach, causal, has_bias, dtype
):
    qkv = rand(sum(lengths), 3 * 5 * 8, dtype=dtype)
    # narrower or wider than the longest sequence needs
    bias = 3 * rand(5, 2 * reach + 1, dtype=dtype, seed=1) if has_bias else None

    actual = ops.attention_varlen(
        qkv, bounds_of(lengths), num_heads=5, scale=0.3, causal=causal, bias=bias
    )

    check(actual, attention64(qkv, lengths, 5, 0.3, causal=causal, bias=bias), dtype)


def test_a_bias_is_not_rounded_to_the_dtype_of_qkv(ops):
    qkv = rand(2, 3 * 8, dtype=torch.bfloat16)
    # bfloat16 has no number between 256 and 258
    bias = torch.tensor([[0.0, 256.0, 257.0]])

    actual = ops.attention_varlen(qkv, bounds_of([2]), num_heads=1, scale=0.3, bias=bias)

    check(actual, attention64(qkv, [2], 1, 0.3, bias=bias), torch.bfloat16)


@BATCHES_WITH_EMPTY
def test_attention_varlen_skips_empty_sequences(ops, lengths):
    qkv = rand(sum(lengths), 3 * 2 * 8)
    out = torch.full((sum(lengths), 16), torch.nan)

    ops.attention_varlen(qkv, bounds_of(lengths), num_heads=2, scale=0.3, out=out)

    check(out, attention64(qkv, lengths, 2, 0.3))


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=10),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
)
def test_attention_varlen_matches_float64_for_any_lengths(
    ops, lengths, num_heads, causal, has_bias
):
    qkv = rand(sum(lengths), 3 * num_heads * 4)
    bias = rand(num_heads, 2 * 12 - 1, seed=1) if has_bias else None
    out = torch.full((sum(lengths), num_heads * 4), torch.nan)

    ops.attention_varlen(
        qkv,
        bounds_of(lengths),
        num_heads=num_heads,
        scale=0.5,
        causal=causal,
        bias=bias,
        out=out,
    )

    check(out, attention64(qkv, lengths, num_heads, 0.5, causal=causal, bias=bias))


def test_attention_varlen_of_large_scores_does_not_overflow(ops):
    qkv = 100 * rand(9, 3 * 2 * 8)

    actual = ops.attention_varlen(qkv, bounds_of([4, 5]), num_heads=2, scale=1.0)

    check(actual, attention64(qkv, [4, 5], 2, 1.0))


def test_a_token_reads_its_own_sequence_only(ops):
    qkv = rand(10, 3 * 3 * 4)
    bounds = bounds_of([4, 2, 4])
    before = ops.attention_varlen(qkv, bounds, num_heads=3, scale=0.5)
    poisoned = qkv.clone()
    poisoned[4:6] = torch.nan

    after = ops.attention_varlen(poisoned, bounds, num_heads=3, scale=0.5)

    assert torch.equal(after[:4], before[:4])
    assert torch.equal(after[6:], before[6:])


def test_tokens_past_the_last_sequence_get_no_attention(ops):
    qkv = rand(7, 3 * 2 * 4)
    out = torch.full((7, 8), torch.nan)

    ops.attention_varlen(qkv, bounds_of([3, 2, 0, 0]), num_heads=2, scale=0.5, out=out)

    check(out[:5], attention64(qkv[:5], [3, 2], 2, 0.5))
    assert out[5:].isnan().all()


def pool64(x, lengths, mode, unpooled=None):
    unpooled = [0] * len(lengths) if unpooled is None else unpooled
    pick = {
        "cls": lambda row, first: row[first if first < len(row) else 0],
        "last": lambda row, first: row[-1] if first < len(row) else 0 * row[-1],
        "mean": lambda row, first: row[first:].sum(axis=0) / max(len(row) - first, 1),
        "max": lambda row, first: row[first:].max(axis=0, initial=-np.inf),
        "sum": lambda row, first: row[first:].sum(axis=0),
        "mean_sqrt": lambda row, first: row[first:].sum(axis=0) / max(len(row) - first, 1) ** 0.5,
        "weighted_mean": lambda row, first: (
            ((places := np.arange(len(row)) + 1)[first:] @ row[first:])
            / max(places[first:].sum(), 1)
        ),
    }[mode]
    zeros = np.zeros(x.shape[1])
    rows = zip(sequences_of(x, lengths), unpooled, strict=True)
    return np.stack([pick(row, first) if len(row) else zeros for row, first in rows])


@DTYPES
@pytest.mark.parametrize("hidden", [1, 63, 384])
@MODES
@BATCHES
def test_pool_matches_float64(lengths, mode, hidden, dtype):
    x = rand(sum(lengths), hidden, dtype=dtype) - 3

    actual = reference.pool(x, bounds_of(lengths), mode=mode)

    assert actual.dtype == torch.float32
    check(actual, pool64(f64(x), lengths, mode))


@MODES
@BATCHES_WITH_EMPTY
def test_pool_gives_zeros_for_an_empty_sequence(lengths, mode):
    x = rand(sum(lengths), 5) - 3

    actual = reference.pool(x, bounds_of(lengths), mode=mode)

    check(actual, pool64(f64(x), lengths, mode))


@MODES
def test_pool_does_not_read_tokens_past_the_last_sequence(mode):
    x = rand(9, 5) - 3
    lengths = [3, 2, 0, 0]
    x[5:] = torch.nan

    actual = reference.pool(x, bounds_of(lengths), mode=mode)

    check(actual, pool64(f64(x), lengths, mode))


@MODES
def test_pool_leaves_out_the_start_of_sequences(mode):
    """No token is left in the last sequences; those past them are not read."""
    lengths, unpooled = [9, 0, 4, 1, 3, 1, 2], [2, 0, 3, 0, 1, 1, 5]
    x = rand(sum(lengths) + 3, 5) - 3
    x[sum(lengths) :] = torch.nan
    skipped = torch.tensor(unpooled, dtype=torch.int32)

    actual = reference.pool(x, bounds_of(lengths), None, skipped, mode=mode)

    check(actual, pool64(f64(x), lengths, mode, unpooled))
    x[0] = torch.nan
    again = reference.pool(x, bounds_of(lengths), None, skipped, mode=mode)
    assert torch.equal(again, actual)


@MODES
def test_pool_gathers_the_rows_of_each_vector(mode):
    """Rows may be in several vectors, in any order; without rows all are pooled."""
    x, rows = rand(9, 5) - 3, [4, 5, 6, 2, 0, 1, 2, 5]
    x[7:] = torch.nan
    lengths, places = [3, 1, 0, 4], torch.tensor(rows, dtype=torch.int32)

    actual = reference.pool(x, bounds_of(lengths), None, None, places, mode=mode)

    check(actual, pool64(f64(x)[rows], lengths, mode))
    plain = reference.pool(x, bounds_of([3, 4]), None, None, places[:0], mode=mode)
    check(plain, pool64(f64(x), [3, 4], mode))


@pytest.mark.parametrize("mode", ["mean", "max"])
def test_nan_changes_only_its_feature(mode):
    x = rand(4, 3)
    x[1, 2] = torch.nan

    actual = reference.pool(x, bounds_of([3, 1]), mode=mode)

    expected = torch.tensor([[False, False, True], [False, False, False]])
    assert torch.equal(actual.isnan(), expected)


@MODES
@BATCHES
def test_pool_normalizes_the_chosen_vectors(lengths, mode):
    x = rand(sum(lengths), 63)
    chosen = torch.arange(len(lengths)) % 2 == 0

    actual = reference.pool(x, bounds_of(lengths), chosen, mode=mode)

    pooled = pool64(f64(x), lengths, mode)
    norms = np.sqrt((pooled**2).sum(axis=1, keepdims=True))
    check(actual, np.where(chosen.numpy()[:, None], pooled / norms, pooled))


@MODES
def test_pool_does_not_normalize_a_vector_of_zeros(mode):
    actual = reference.pool(torch.zeros(2, 4), bounds_of([2, 0]), torch.ones(2).bool(), mode=mode)

    assert torch.equal(actual, torch.zeros(2, 4))


@DTYPES
@BATCHES
def test_first_tokens_returns_the_first_token_of_each_sequence(lengths, dtype):
    x = rand(sum(lengths), 33, dtype=dtype)

    actual = reference.first_tokens(x, bounds_of(lengths))

    assert actual.dtype == dtype
    np.testing.assert_array_equal(f64(actual), pool64(f64(x), lengths, "cls"))


@BATCHES_WITH_EMPTY
def test_first_tokens_gives_zeros_for_an_empty_sequence(lengths):
    x = rand(sum(lengths), 5)

    actual = reference.first_tokens(x, bounds_of(lengths))

    np.testing.assert_array_equal(f64(actual), pool64(f64(x), lengths, "cls"))


@DTYPES
@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("lengths", [[1], [5, 1, 5, 0, 5, 2], [0, 3], [63, 1, 100, 0]], ids=str)
def test_a_product_of_windows_is_a_convolution_of_each_sequence(ops, lengths, size, dtype):
    hidden, channels = 5, 7
    x = rand(sum(lengths), hidden, dtype=dtype)
    weight = torch.from_numpy(f64(rand(channels, hidden, size, seed=1)))

    windows = ops.window_rows(x, bounds_of(lengths), size=size)

    actual = f64(windows) @ weight.permute(2, 1, 0).reshape(-1, channels).numpy()
    assert windows.dtype == dtype
    for rows, expected in zip(
        sequences_of(actual, lengths), sequences_of(f64(x), lengths), strict=True
    ):
        if len(rows):
            whole = torch.from_numpy(expected.T)[None]
            convolved = torch.nn.functional.conv1d(whole, weight, padding=size // 2)
            np.testing.assert_allclose(rows, convolved[0].numpy().T, atol=1e-12)


def test_tokens_past_the_last_sequence_are_in_no_window():
    x = torch.arange(1.0, 6.0)[:, None]

    windows = reference.window_rows(x, bounds_of([2, 1]), size=3)

    assert windows[:3].tolist() == [[0, 1, 2], [1, 2, 0], [0, 3, 0]]


def calls(ops, dtype):
    """Return a call for each op, as a function of `out`."""
    lengths = [5, 1, 5, 0, 5, 2]
    tokens, hidden = sum(lengths), 12
    x, qkv = rand(tokens, hidden, dtype=dtype), rand(tokens, 3 * hidden, dtype=dtype, seed=1)
    bounds, chosen = bounds_of(lengths), torch.arange(len(lengths)) % 3 == 0
    pools = {
        f"pool_{mode}": lambda out, mode=mode: ops.pool(x, bounds, chosen, mode=mode, out=out)
        for mode in get_args(Pooling)
    }
    return pools | {
        "attention_varlen": lambda out: ops.attention_varlen(
            qkv, bounds, num_heads=3, scale=0.5, causal=True, out=out
        ),
        "first_tokens": lambda out: ops.first_tokens(x, bounds, out=out),
        "window_rows": lambda out: ops.window_rows(x, bounds, size=3, out=out),
    }


@DTYPES
@pytest.mark.parametrize("op", calls(reference, torch.float32))
def test_a_poisoned_out_is_fully_overwritten_with_the_same_bits(ops, op, dtype):
    assert_out_is_overwritten(calls(ops, dtype)[op])
