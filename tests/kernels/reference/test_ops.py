"""The reference ops against float64 arithmetic written out in numpy, on awkward sizes.

The reference is the specification of every kernel, so nothing here calls the torch function that it is built on.
"""

import math

import numpy as np
import pytest
import torch

from tests.kernels.float64 import DTYPES, assert_out_is_overwritten, check, f64, rand
from varlen_kernels import reference
from varlen_kernels.op_table import OPS

EPS = 1e-12
SIZES = pytest.mark.parametrize(
    "tokens, hidden", [(1, 1), (1, 64), (63, 100), (7, 768), (5, 1023)], ids=str
)


def layer_norm64(x, weight, bias, eps=EPS):
    mean = x.mean(axis=1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * weight + bias


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
def test_embed_layer_norm_accepts_both_integer_types(dtype, index_dtype):
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
    if kind == "silu":
        return x / (1 + np.exp(-x))
    if kind == "gelu":
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@DTYPES
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu", "silu"])
@SIZES
def test_activate_matches_float64(tokens, hidden, kind, dtype):
    x = 4 * rand(tokens, hidden, dtype=dtype)

    check(reference.activate(x, kind=kind), activate64(f64(x), kind), dtype)


@DTYPES
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu", "silu"])
@SIZES
def test_activate_adds_a_bias_first(tokens, hidden, kind, dtype):
    x, bias = rand(tokens, hidden, dtype=dtype), rand(hidden, dtype=dtype, seed=1)
    before = x.clone()

    actual = reference.activate(x, bias, kind=kind)

    check(actual, activate64(f64(x) + f64(bias), kind), dtype)
    assert torch.equal(x, before)


@DTYPES
@pytest.mark.parametrize("kind", ["gelu_tanh", "silu"])
@SIZES
def test_activate_gate_matches_float64(tokens, hidden, kind, dtype):
    x = 3 * rand(tokens, 2 * hidden, dtype=dtype)

    gate, up = f64(x)[:, :hidden], f64(x)[:, hidden:]
    check(reference.activate_gate(x, kind=kind), activate64(gate, kind) * up, dtype)


def test_gelu_and_its_tanh_form_differ():
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


def test_add_layer_norm_without_out_leaves_its_inputs_unchanged():
    x, residual, one = rand(3, 8), rand(3, 8, seed=1), torch.ones(8)
    before = x.clone(), residual.clone()

    reference.add_layer_norm(x, residual, one, one, eps=EPS)

    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def rms_norm64(x, weight, eps):
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps) * weight


@DTYPES
@SIZES
def test_rms_norm_matches_float64(tokens, hidden, dtype):
    x, weight = rand(tokens, hidden, dtype=dtype), rand(hidden, dtype=dtype, seed=1)

    actual = reference.rms_norm(x, weight, eps=1e-3)

    check(actual, rms_norm64(f64(x), f64(weight), 1e-3), dtype)
    assert actual.dtype == dtype


@DTYPES
@SIZES
def test_residual_rms_norm_returns_the_sum_and_its_norm(tokens, hidden, dtype):
    x, residual = rand(tokens, hidden, dtype=dtype), rand(tokens, hidden, dtype=dtype, seed=1)
    weight = rand(hidden, dtype=dtype, seed=2)

    total, normed = reference.residual_rms_norm(x, residual, weight, eps=1e-3)

    check(total, f64(x) + f64(residual), dtype)
    check(normed, rms_norm64(f64(x) + f64(residual), f64(weight), 1e-3), dtype)


@DTYPES
@SIZES
def test_layer_norm_matches_float64(tokens, hidden, dtype):
    x = rand(tokens, hidden, dtype=dtype)
    weight, bias = rand(hidden, dtype=dtype, seed=1), rand(hidden, dtype=dtype, seed=2)

    actual = reference.layer_norm(x, weight, bias, eps=1e-3)

    check(actual, layer_norm64(f64(x), f64(weight), f64(bias), 1e-3), dtype)


@DTYPES
def test_the_bias_of_layer_norms_is_optional(dtype):
    x, residual = rand(7, 100, dtype=dtype), rand(7, 100, dtype=dtype, seed=1)
    weight = rand(100, dtype=dtype, seed=2)

    normed = reference.layer_norm(x, weight, None, eps=EPS)
    _, normed_sum = reference.residual_layer_norm(x, residual, weight, None, eps=EPS)

    check(normed, layer_norm64(f64(x), f64(weight), 0.0), dtype)
    check(normed_sum, layer_norm64(f64(x) + f64(residual), f64(weight), 0.0), dtype)


@DTYPES
@SIZES
def test_residual_layer_norm_returns_the_sum_and_its_norm(tokens, hidden, dtype):
    x, residual = rand(tokens, hidden, dtype=dtype), rand(tokens, hidden, dtype=dtype, seed=1)
    weight, bias = rand(hidden, dtype=dtype, seed=2), rand(hidden, dtype=dtype, seed=3)

    total, normed = reference.residual_layer_norm(x, residual, weight, bias, eps=1e-3)

    check(total, f64(x) + f64(residual), dtype)
    check(normed, layer_norm64(f64(x) + f64(residual), f64(weight), f64(bias), 1e-3), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_norms_with_fp32_weights_are_fp32(dtype):
    # more rows than one step of the ops has
    x, residual = rand(300, 100, dtype=dtype), rand(300, 100, dtype=dtype, seed=1)
    weight, bias = rand(100, seed=2), rand(100, seed=3)

    added = reference.add_layer_norm(x, residual, weight, bias, eps=1e-3)
    normed = reference.layer_norm(x, weight, bias, eps=1e-3)
    total, normed_sum = reference.residual_layer_norm(x, residual, weight, bias, eps=1e-3)
    scaled = reference.rms_norm(x, weight, eps=1e-3)
    _, scaled_sum = reference.residual_rms_norm(x, residual, weight, eps=1e-3)

    assert total.dtype == dtype
    vectors = f64(weight), f64(bias)
    check(added, layer_norm64(f64(x) + f64(residual), *vectors, 1e-3), torch.float32)
    check(normed, layer_norm64(f64(x), *vectors, 1e-3), torch.float32)
    check(normed_sum, layer_norm64(f64(total), *vectors, 1e-3), torch.float32)
    check(scaled, rms_norm64(f64(x), f64(weight), 1e-3), torch.float32)
    check(scaled_sum, rms_norm64(f64(total), f64(weight), 1e-3), torch.float32)


@DTYPES
@SIZES
def test_embed_adds_positions_to_tokens(tokens, hidden, dtype):
    rng = np.random.default_rng(0)
    token_table, position_table = rand(11, hidden, dtype=dtype), rand(70, hidden, dtype=dtype)
    token_ids, position_ids = (
        torch.from_numpy(rng.integers(0, rows, tokens, dtype=np.int32)) for rows in (11, 70)
    )

    actual = reference.embed(token_ids, token_table, position_ids, position_table)

    positions = f64(position_table)[position_ids.numpy()]
    check(actual, f64(token_table)[token_ids.numpy()] + positions, dtype)
    assert torch.equal(reference.embed(token_ids, token_table), token_table[token_ids.long()])


HEADS = pytest.mark.parametrize(
    "num_heads, num_kv_heads, head_dim", [(1, 1, 2), (4, 4, 16), (6, 2, 10), (8, 1, 64)], ids=str
)


def random_heads(num_heads, num_kv_heads, head_dim, dtype, tokens=9):
    return rand(tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)


@DTYPES
@HEADS
def test_norm_heads_norms_each_query_and_key(num_heads, num_kv_heads, head_dim, dtype):
    qkv = random_heads(num_heads, num_kv_heads, head_dim, dtype)
    weights = rand(head_dim, dtype=dtype, seed=1), rand(head_dim, dtype=dtype, seed=2)

    actual = reference.norm_heads(
        qkv, *weights, num_heads=num_heads, num_kv_heads=num_kv_heads, eps=1e-3
    )

    expected = f64(qkv).reshape(9, -1, head_dim)
    for token in expected:
        token[:num_heads] = rms_norm64(token[:num_heads], f64(weights[0]), 1e-3)
        keys = slice(num_heads, num_heads + num_kv_heads)
        token[keys] = rms_norm64(token[keys], f64(weights[1]), 1e-3)
    check(actual, expected.reshape(9, -1), dtype)


@DTYPES
@pytest.mark.parametrize("rotated_part", [1, 2], ids=["whole", "half"])
@HEADS
def test_rotary_rotates_pairs_by_the_angle_of_their_position(
    num_heads, num_kv_heads, head_dim, rotated_part, dtype
):
    qkv = random_heads(num_heads, num_kv_heads, head_dim, dtype)
    half = max(head_dim // 2 // rotated_part, 1)
    angles = np.outer(np.arange(50), 100.0 ** -(np.arange(half) / half))
    cos_sin = torch.from_numpy(np.hstack([np.cos(angles), np.sin(angles)])).float()
    positions = torch.tensor([0, 1, 2, 49, 7, 7, 0, 3, 20], dtype=torch.int32)

    actual = reference.rotary(
        qkv, positions, cos_sin, num_heads=num_heads, num_kv_heads=num_kv_heads
    )

    expected = f64(qkv).reshape(9, -1, head_dim)
    pairs = expected[:, : num_heads + num_kv_heads, :half] * (1 + 0j)
    pairs += 1j * expected[:, : num_heads + num_kv_heads, half : 2 * half]
    # a pair is a complex number, multiplied by exp(i angle)
    pairs *= np.exp(1j * angles[positions.numpy()])[:, None]
    expected[:, : num_heads + num_kv_heads, :half] = pairs.real
    expected[:, : num_heads + num_kv_heads, half : 2 * half] = pairs.imag
    check(actual, expected.reshape(9, -1), dtype)


def test_select_rows_copies_rows():
    x = rand(7, 5)

    actual = reference.select_rows(x, torch.tensor([6, 0, 6], dtype=torch.int32))

    assert torch.equal(actual, x[[6, 0, 6]])


@DTYPES
def test_to_fp32_copies(dtype):
    x = rand(3, 5, dtype=dtype)

    actual = reference.to_fp32(x)

    np.testing.assert_array_equal(f64(actual), f64(x))
    assert actual.dtype == torch.float32
    assert actual.data_ptr() != x.data_ptr()


def calls(dtype):
    """Return a call for each op, as a function of `out`."""
    tokens, hidden = 18, 12
    x, other = rand(tokens, hidden, dtype=dtype), rand(tokens, hidden, dtype=dtype, seed=1)
    weight, bias = rand(hidden, dtype=dtype, seed=2), rand(hidden, dtype=dtype, seed=3)
    ids = torch.arange(tokens, dtype=torch.int32)
    return {
        "embed_layer_norm": lambda out: reference.embed_layer_norm(
            ids, ids, ids, x, other, x, weight, bias, eps=EPS, out=out
        ),
        "linear": lambda out: reference.linear(
            x, rand(hidden, 7, dtype=dtype, seed=5), bias[:7], out=out
        ),
        "linear_activate": lambda out: reference.linear_activate(
            x, rand(hidden, 7, dtype=dtype, seed=5), bias[:7], kind="gelu", out=out
        ),
        "gelu": lambda out: reference.activate(x, kind="gelu", out=out),
        "gelu_with_bias": lambda out: reference.activate(x, bias, kind="gelu", out=out),
        "gelu_tanh": lambda out: reference.activate(x, kind="gelu_tanh", out=out),
        "relu": lambda out: reference.activate(x, kind="relu", out=out),
        "silu": lambda out: reference.activate(x, kind="silu", out=out),
        "tanh": lambda out: reference.tanh(x, out=out),
        "add_layer_norm": lambda out: reference.add_layer_norm(
            x, other, weight, bias, eps=EPS, out=out
        ),
        "rms_norm": lambda out: reference.rms_norm(x, weight, eps=EPS, out=out),
        "layer_norm": lambda out: reference.layer_norm(x, weight, bias, eps=EPS, out=out),
        "embed": lambda out: reference.embed(ids, x, ids, other, out=out),
        "norm_heads": lambda out: reference.norm_heads(
            x, weight[:3], bias[:3], num_heads=2, num_kv_heads=1, eps=EPS, out=out
        ),
        "rotary": lambda out: reference.rotary(
            x, ids, other[:, :2].float(), num_heads=2, num_kv_heads=1, out=out
        ),
        "select_rows": lambda out: reference.select_rows(x, ids[:5], out=out),
        "activate_gate": lambda out: reference.activate_gate(x, kind="silu", out=out),
        "to_fp32": lambda out: reference.to_fp32(x, out=out),
    }


@DTYPES
@pytest.mark.parametrize("op", calls(torch.float32))
def test_a_poisoned_out_is_fully_overwritten_with_the_same_bits(op, dtype):
    assert_out_is_overwritten(calls(dtype)[op])


# Calls with arguments of `in_place_arguments`, by position.
IN_PLACE_CALLS = {
    "activate": {"kind": "gelu"},
    "add": {},
    "add_layer_norm": {"eps": EPS},
    "layer_norm": {"eps": EPS},
    "linear_residual": {},
    "norm_heads": {"num_heads": 2, "num_kv_heads": 1, "eps": EPS},
    "residual_layer_norm": {"eps": EPS},
    "residual_rms_norm": {"eps": EPS},
    "rms_norm": {"eps": EPS},
    "rotary": {"num_heads": 2, "num_kv_heads": 1},
    "round_tanh": {"limit": 127.0},
    "tanh": {},
}


def in_place_arguments(op, tokens, hidden, dtype):
    """Return the positional arguments of an in-place op."""
    x, other = (rand(tokens, hidden, dtype=dtype, seed=seed) for seed in (0, 1))
    weight, bias = (rand(hidden, dtype=dtype, seed=seed) for seed in (2, 3))
    heads = rand(tokens, 4 * 2 * hidden, dtype=dtype)
    return {
        "add": (x, other),
        "add_layer_norm": (x, other, weight, bias),
        "layer_norm": (x, weight, bias),
        "linear_residual": (x, rand(hidden, hidden, dtype=dtype, seed=4), bias, other),
        "norm_heads": (heads, weight.repeat(2), bias.repeat(2)),
        "residual_layer_norm": (x, other, weight, bias),
        "residual_rms_norm": (x, other, weight),
        "rms_norm": (x, weight),
        "rotary": (heads, torch.arange(tokens, dtype=torch.int32), rand(2 * tokens, 2 * hidden)),
    }.get(op, (x,))


def test_every_in_place_op_is_tested():
    # an op that also changes caches, see test_append_kv; a sum of ranks, see test_ranks; see test_softmax; rows with
    # adapters, see test_adapters
    others = {"append_kv", "all_reduce", "masked_softmax", "add_adapters"}
    assert set(IN_PLACE_CALLS) == {name for name, op in OPS.items() if op.in_place} - others


@DTYPES
@SIZES
@pytest.mark.parametrize("op", IN_PLACE_CALLS)
def test_an_op_in_place_writes_the_same_bits(op, tokens, hidden, dtype):
    call, options = getattr(reference, op), IN_PLACE_CALLS[op]
    arguments = in_place_arguments(op, tokens, hidden, dtype)
    before = [argument.clone() for argument in arguments]
    fresh = call(*arguments, **options)
    assert all(map(torch.equal, arguments, before))

    out = tuple(arguments[position] for position in OPS[op].in_place)
    returned = call(*arguments, **options, out=out if len(out) > 1 else out[0])

    results = returned if len(out) > 1 else (returned,)
    for result, given, expected in zip(
        results, out, fresh if len(out) > 1 else (fresh,), strict=True
    ):
        assert result.data_ptr() == given.data_ptr()
        assert torch.equal(given, expected)


@DTYPES
@pytest.mark.parametrize("op", IN_PLACE_CALLS)
def test_many_tokens_are_computed_as_few_are(op, dtype):
    call, options = getattr(reference, op), IN_PLACE_CALLS[op]
    arguments = in_place_arguments(op, 700, 6, dtype)
    last = [argument[400:] if len(argument) == 700 else argument for argument in arguments]

    many, few = call(*arguments, **options), call(*last, **options)

    for result, expected in (
        zip(many, few, strict=True) if isinstance(many, tuple) else [(many, few)]
    ):
        check(result[400:], f64(expected), dtype)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu", "silu"])
def test_every_activation_works_in_place(kind):
    x = rand(63, 100)
    fresh = reference.activate(x.clone(), kind=kind)

    reference.activate(x, kind=kind, out=x)

    assert torch.equal(x, fresh)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu", "silu"])
def test_every_activation_works_in_place_with_a_bias(kind):
    x, bias = rand(63, 100), rand(100, seed=1)
    fresh = reference.activate(x.clone(), bias, kind=kind)

    reference.activate(x, bias, kind=kind, out=x)

    assert torch.equal(x, fresh)


def test_add_layer_norm_in_place_when_x_is_also_the_residual():
    x, one = rand(7, 100), torch.ones(100)
    fresh = reference.add_layer_norm(x.clone(), x.clone(), one, one, eps=EPS)

    reference.add_layer_norm(x, x, one, one, eps=EPS, out=x)

    assert torch.equal(x, fresh)
