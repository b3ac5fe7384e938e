"""The reference ops against float64 arithmetic written out in numpy, on awkward sizes.

The reference is the specification of every kernel, so nothing here calls the torch function that it is built on.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from varlen_kernels import reference

EPS = 1e-12
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SIZES = pytest.mark.parametrize(
    "tokens, hidden", [(1, 1), (1, 64), (63, 100), (7, 768), (5, 1023)], ids=str
)
# lengths of the sequences of a batch
BATCHES = pytest.mark.parametrize(
    "lengths",
    [[1], [1, 1, 1], [3, 3, 3], [1, 2, 3], [5, 1, 5, 5, 2], [63, 1, 100], [17, 17, 1, 1, 17]],
    ids=str,
)


def rand(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def f64(tensor):
    return tensor.to(torch.float64).numpy()


def bounds_of(lengths):
    return torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)


def check(actual, expected, dtype=torch.float32):
    assert tuple(actual.shape) == expected.shape
    # sums over thousands of addends are judged by their own size
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    np.testing.assert_allclose(f64(actual), expected, rtol=0, atol=TOLERANCE[dtype] * scale)


def layer_norm64(x, weight, bias, eps=EPS):
    mean = x.mean(axis=1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * weight + bias


def attention64(qkv, lengths, num_heads, scale):
    tokens, width = qkv.shape
    head_dim = width // (3 * num_heads)
    out = np.full((tokens, num_heads * head_dim), np.nan)
    begin = 0
    for length in lengths:
        rows = slice(begin, begin + length)
        for head in range(num_heads):
            q, k, v = (
                qkv[rows, part * num_heads * head_dim + head * head_dim :][:, :head_dim]
                for part in range(3)
            )
            scores = q @ k.T * scale
            weights = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf))
            weights /= weights.sum(axis=1, keepdims=True)
            out[rows, head * head_dim : (head + 1) * head_dim] = weights @ v
        begin += length
    return out


@DTYPES
@SIZES
def test_embed_layer_norm_matches_float64(tokens, hidden, dtype):
    rng = np.random.default_rng(0)
    tables = [rand(rows, hidden, dtype=dtype, seed=i) for i, rows in enumerate((11, 70, 3))]
    ids = [torch.from_numpy(rng.integers(0, len(t), tokens, dtype=np.int32)) for t in tables]
    weight, bias = rand(hidden, dtype=dtype, seed=4), rand(hidden, dtype=dtype, seed=5)

    # 1 / sqrt(eps) would magnify the rounding of a single feature, whose variance is 0
    actual = reference.embed_layer_norm(*ids, *tables, weight, bias, eps=1e-3)

    summed = sum(f64(t)[i.numpy()] for t, i in zip(tables, ids, strict=True))
    check(actual, layer_norm64(summed, f64(weight), f64(bias), 1e-3), dtype)
    assert actual.dtype == dtype


@DTYPES
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_embed_layer_norm_takes_both_integer_types(dtype, index_dtype):
    table, one = rand(5, 8, dtype=dtype), torch.ones(8, dtype=dtype)
    ids = torch.tensor([4, 0, 4], dtype=index_dtype)

    actual = reference.embed_layer_norm(ids, ids, ids, table, table, table, one, one, eps=EPS)

    check(actual, layer_norm64(3 * f64(table)[[4, 0, 4]], 1.0, 1.0), dtype)


@DTYPES
@pytest.mark.parametrize("features", [1, 3, 64, 129])
@SIZES
def test_linear_matches_float64(tokens, hidden, features, dtype):
    x, weight = rand(tokens, hidden, dtype=dtype), rand(hidden, features, dtype=dtype, seed=1)
    bias = rand(features, dtype=dtype, seed=2)

    check(reference.linear(x, weight, bias), f64(x) @ f64(weight) + f64(bias), dtype)


def activate64(x, kind):
    if kind == "relu":
        return np.maximum(x, 0)
    if kind == "gelu":
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@DTYPES
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu"])
@SIZES
def test_activate_matches_float64(tokens, hidden, kind, dtype):
    x = 4 * rand(tokens, hidden, dtype=dtype)

    check(reference.activate(x, kind=kind), activate64(f64(x), kind), dtype)


def test_gelu_and_its_tanh_form_are_two_functions():
    x = torch.linspace(-4, 4, 999)

    assert not torch.equal(
        reference.activate(x, kind="gelu"), reference.activate(x, kind="gelu_tanh")
    )


@DTYPES
@SIZES
def test_tanh_matches_float64(tokens, hidden, dtype):
    x = 3 * rand(tokens, hidden, dtype=dtype)

    check(reference.tanh(x), np.tanh(f64(x)), dtype)


@DTYPES
@SIZES
def test_add_layer_norm_matches_float64(tokens, hidden, dtype):
    x, residual = rand(tokens, hidden, dtype=dtype), rand(tokens, hidden, dtype=dtype, seed=1)
    weight, bias = rand(hidden, dtype=dtype, seed=2), rand(hidden, dtype=dtype, seed=3)

    actual = reference.add_layer_norm(x, residual, weight, bias, eps=1e-3)

    expected = layer_norm64(f64(x) + f64(residual), f64(weight), f64(bias), 1e-3)
    check(actual, expected, dtype)


def test_add_layer_norm_leaves_its_inputs_alone_without_out():
    x, residual, one = rand(3, 8), rand(3, 8, seed=1), torch.ones(8)
    before = x.clone(), residual.clone()

    reference.add_layer_norm(x, residual, one, one, eps=EPS)

    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@DTYPES
@pytest.mark.parametrize(
    "num_heads, head_dim", [(1, 1), (1, 64), (3, 5), (5, 32), (12, 32), (7, 9)], ids=str
)
@BATCHES
def test_attention_varlen_matches_float64(lengths, num_heads, head_dim, dtype):
    qkv = rand(sum(lengths), 3 * num_heads * head_dim, dtype=dtype)
    scale = head_dim**-0.5

    actual = reference.attention_varlen(
        qkv, bounds_of(lengths), max(lengths), num_heads=num_heads, scale=scale
    )

    check(actual, attention64(f64(qkv), lengths, num_heads, scale), dtype)


@pytest.mark.parametrize(
    "lengths",
    [[0, 3], [3, 0], [0, 0, 4, 0, 0], [2, 0, 2], [0, 2, 0, 3, 0, 0, 3], [1, 0, 0, 1]],
    ids=str,
)
def test_attention_varlen_skips_empty_sequences(lengths):
    qkv = rand(sum(lengths), 3 * 2 * 8)
    out = torch.full((sum(lengths), 16), torch.nan)

    reference.attention_varlen(
        qkv, bounds_of(lengths), max(lengths), num_heads=2, scale=0.3, out=out
    )

    check(out, attention64(f64(qkv), [n for n in lengths if n], 2, 0.3))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=10), st.integers(1, 4))
def test_attention_varlen_matches_float64_for_any_lengths(lengths, num_heads):
    qkv = rand(sum(lengths), 3 * num_heads * 4)
    out = torch.full((sum(lengths), num_heads * 4), torch.nan)

    reference.attention_varlen(
        qkv, bounds_of(lengths), max(lengths), num_heads=num_heads, scale=0.5, out=out
    )

    check(out, attention64(f64(qkv), [n for n in lengths if n], num_heads, 0.5))


def test_attention_varlen_survives_large_scores():
    qkv = 100 * rand(9, 3 * 2 * 8)

    actual = reference.attention_varlen(qkv, bounds_of([4, 5]), 5, num_heads=2, scale=1.0)

    check(actual, attention64(f64(qkv), [4, 5], 2, 1.0))


def test_a_token_reads_its_own_sequence_only():
    qkv = rand(10, 3 * 3 * 4)
    bounds = bounds_of([4, 2, 4])
    before = reference.attention_varlen(qkv, bounds, 4, num_heads=3, scale=0.5)
    poisoned = qkv.clone()
    poisoned[4:6] = torch.nan

    after = reference.attention_varlen(poisoned, bounds, 4, num_heads=3, scale=0.5)

    assert torch.equal(after[:4], before[:4])
    assert torch.equal(after[6:], before[6:])


def pool64(x, lengths, mode):
    ends = np.cumsum(lengths)
    rows = [x[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    pick = {
        "cls": lambda row: row[0],
        "last": lambda row: row[-1],
        "mean": lambda row: row.sum(axis=0) / len(row),
        "max": lambda row: row.max(axis=0),
    }[mode]
    return np.stack([pick(row) for row in rows])


@DTYPES
@pytest.mark.parametrize("hidden", [1, 63, 384])
@pytest.mark.parametrize("mode", ["cls", "mean", "max", "last"])
@BATCHES
def test_pool_matches_float64(lengths, mode, hidden, dtype):
    x = rand(sum(lengths), hidden, dtype=dtype) - 3

    actual = reference.pool(x, bounds_of(lengths), mode=mode)

    assert actual.dtype == torch.float32
    check(actual, pool64(f64(x), lengths, mode))


@DTYPES
@BATCHES
def test_first_tokens_picks_each_sequence_s_first(lengths, dtype):
    x = rand(sum(lengths), 33, dtype=dtype)

    actual = reference.first_tokens(x, bounds_of(lengths))

    assert actual.dtype == dtype
    np.testing.assert_array_equal(f64(actual), pool64(f64(x), lengths, "cls"))


@pytest.mark.parametrize("batch, hidden", [(1, 1), (5, 63), (3, 1023)], ids=str)
def test_l2_normalize_divides_the_chosen_rows(batch, hidden):
    x = rand(batch, hidden)
    chosen = torch.arange(batch) % 2 == 0

    actual = reference.l2_normalize(x, chosen)

    norms = np.sqrt((f64(x) ** 2).sum(axis=1, keepdims=True))
    check(actual, np.where(chosen.numpy()[:, None], f64(x) / norms, f64(x)))


def test_l2_normalize_leaves_a_row_of_zeros_zero():
    actual = reference.l2_normalize(torch.zeros(2, 4), torch.tensor([True, False]))

    assert torch.equal(actual, torch.zeros(2, 4))


@DTYPES
def test_to_fp32_copies(dtype):
    x = rand(3, 5, dtype=dtype)

    actual = reference.to_fp32(x)

    np.testing.assert_array_equal(f64(actual), f64(x))
    assert actual.dtype == torch.float32
    assert actual.data_ptr() != x.data_ptr()


def calls(dtype):
    """Return, by op, a call that takes `out`, and the arguments that it may overwrite first."""
    lengths = [5, 1, 5, 5, 2]
    tokens, hidden = sum(lengths), 12
    x, other = rand(tokens, hidden, dtype=dtype), rand(tokens, hidden, dtype=dtype, seed=1)
    weight, bias = rand(hidden, dtype=dtype, seed=2), rand(hidden, dtype=dtype, seed=3)
    ids = torch.arange(tokens, dtype=torch.int32)
    qkv = rand(tokens, 3 * hidden, dtype=dtype, seed=4)
    bounds = bounds_of(lengths)
    chosen = torch.arange(tokens) % 3 == 0
    return {
        "embed_layer_norm": lambda out: reference.embed_layer_norm(
            ids, ids, ids, x, other, x, weight, bias, eps=EPS, out=out
        ),
        "linear": lambda out: reference.linear(
            x, rand(hidden, 7, dtype=dtype, seed=5), bias[:7], out=out
        ),
        "gelu": lambda out: reference.activate(x, kind="gelu", out=out),
        "gelu_tanh": lambda out: reference.activate(x, kind="gelu_tanh", out=out),
        "relu": lambda out: reference.activate(x, kind="relu", out=out),
        "tanh": lambda out: reference.tanh(x, out=out),
        "add_layer_norm": lambda out: reference.add_layer_norm(
            x, other, weight, bias, eps=EPS, out=out
        ),
        "attention_varlen": lambda out: reference.attention_varlen(
            qkv, bounds, 5, num_heads=3, scale=0.5, out=out
        ),
        "pool_cls": lambda out: reference.pool(x, bounds, mode="cls", out=out),
        "pool_mean": lambda out: reference.pool(x, bounds, mode="mean", out=out),
        "pool_max": lambda out: reference.pool(x, bounds, mode="max", out=out),
        "pool_last": lambda out: reference.pool(x, bounds, mode="last", out=out),
        "first_tokens": lambda out: reference.first_tokens(x, bounds, out=out),
        "l2_normalize": lambda out: reference.l2_normalize(x.float(), chosen, out=out),
        "to_fp32": lambda out: reference.to_fp32(x, out=out),
    }


@DTYPES
@pytest.mark.parametrize("op", calls(torch.float32))
def test_a_poisoned_out_is_fully_overwritten_with_the_same_bits(op, dtype):
    call = calls(dtype)[op]
    fresh = call(None)
    out = torch.full_like(fresh, torch.nan)

    returned = call(out)

    assert returned.data_ptr() == out.data_ptr()
    assert torch.equal(out, fresh)


IN_PLACE_CALLS = {
    "activate": lambda x, other, out: reference.activate(x, kind="gelu", out=out),
    "add_layer_norm": lambda x, other, out: reference.add_layer_norm(
        x, other, other[0], other[1], eps=EPS, out=out
    ),
    "tanh": lambda x, other, out: reference.tanh(x, out=out),
    "l2_normalize": lambda x, other, out: reference.l2_normalize(
        x, torch.arange(len(x)) % 2 == 0, out=out
    ),
}


def test_every_op_that_may_work_in_place_is_tested_so():
    assert set(IN_PLACE_CALLS) == reference.IN_PLACE


@SIZES
@pytest.mark.parametrize("op", IN_PLACE_CALLS)
def test_an_op_in_place_writes_the_same_bits(op, tokens, hidden):
    x, other = rand(tokens + 1, hidden), rand(tokens + 1, hidden, seed=1)
    fresh = IN_PLACE_CALLS[op](x.clone(), other, None)

    returned = IN_PLACE_CALLS[op](x, other, x)

    assert returned.data_ptr() == x.data_ptr()
    assert torch.equal(x, fresh)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu"])
def test_every_activation_works_in_place(kind):
    x = rand(63, 100)
    fresh = reference.activate(x.clone(), kind=kind)

    reference.activate(x, kind=kind, out=x)

    assert torch.equal(x, fresh)


def test_add_layer_norm_in_place_of_a_value_that_is_its_own_residual():
    x, one = rand(7, 100), torch.ones(100)
    fresh = reference.add_layer_norm(x.clone(), x.clone(), one, one, eps=EPS)

    reference.add_layer_norm(x, x, one, one, eps=EPS, out=x)

    assert torch.equal(x, fresh)
