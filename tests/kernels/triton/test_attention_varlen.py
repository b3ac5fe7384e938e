"""Packed attention on a GPU or in the interpreter, against the reference in fp64."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varlen_kernels import reference
from varlen_kernels.triton import attention_varlen as module
from varlen_kernels.triton.attention_tiles import (
    attention_launch,
    attention_tiles,
    candidate_launches,
    mean_length_bucket,
)
from varlen_kernels.triton.attention_varlen import attention_varlen
from varlen_kernels.tuning import forced_launch

from .compare import DTYPES, assert_close, cu_seqlens_of, rand, spread
from .guards import write_guarded

HEADS = 2
# `make test` runs each of the two branches on and off
FORMS = pytest.mark.parametrize(
    "causal, has_bias",
    [
        pytest.param(False, False, id="plain"),
        pytest.param(True, False, id="causal", marks=pytest.mark.full),
        pytest.param(False, True, id="bias", marks=pytest.mark.full),
        pytest.param(True, True, id="causal-bias"),
    ],
)


def bias_for(lengths, device, dtype=torch.float32):
    return 2 * rand(HEADS, 2 * max(lengths) - 1, dtype=dtype, device=device, seed=7)


def reference64(qkv, cu_seqlens, bias=None, **settings):
    if bias is not None:
        bias = bias.double()
    # tokens past the last sequence are not written
    heads = settings["num_heads"]
    head_dim = qkv.shape[1] // (heads + 2 * settings.get("num_kv_heads", heads))
    out = qkv.new_full((len(qkv), heads * head_dim), torch.nan, dtype=torch.float64)
    return reference.attention_varlen(qkv.double(), cu_seqlens, bias=bias, out=out, **settings)


def check_against_reference(lengths, head_dim, dtype, device, factor=2.0, **settings):
    """Compare attention in sequences of these lengths with the reference."""
    settings = {"num_heads": HEADS, "scale": head_dim**-0.5} | settings
    heads = settings["num_heads"]
    tokens, width = sum(lengths), heads * head_dim
    key_heads = settings.get("num_kv_heads", heads)
    qkv = rand(tokens, width + 2 * key_heads * head_dim, dtype=dtype, device=device)

    actual = write_guarded(
        lambda out: attention_varlen(qkv, cu_seqlens_of(lengths, device), out=out, **settings),
        (tokens, width),
        dtype,
        device,
    )

    assert_close(
        actual, reference64(qkv, cu_seqlens_of(lengths, device), **settings), dtype, factor
    )


@DTYPES
@pytest.mark.parametrize("lengths", [[1, 64, 63], [0, 65, 0, 0, 1], [100, 16, 15]], ids=str)
def test_matches_the_reference(lengths, dtype, device):
    check_against_reference(lengths, 64, dtype, device)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65])
def test_a_sequence_may_end_anywhere_in_a_tile(length, device):
    check_against_reference([length], 16, torch.float16, device)


@FORMS
@DTYPES
def test_adds_a_bias_and_hides_later_tokens(causal, has_bias, dtype, device):
    lengths = [70, 1, 0, 33]
    bias = bias_for(lengths, device) if has_bias else None

    check_against_reference(lengths, 32, dtype, device, causal=causal, bias=bias)


@pytest.mark.parametrize(
    "window, has_tiles",
    [
        (0, False),
        (9, True),
        *(pytest.param(*each, marks=pytest.mark.full) for each in [(0, True), (9, False)]),
    ],
    ids=["", "window-tiles", "tiles", "window"],
)
@FORMS
def test_reads_the_first_keys_of_a_sequence(causal, has_bias, window, has_tiles, device):
    lengths, dtype = [70, 1, 0, 33, 40], torch.float16
    key_lengths = torch.tensor([18, 1, 0, 33, 3], dtype=torch.int32, device=device)
    bias = bias_for(lengths, device) if has_bias else None
    bounds = cu_seqlens_of(lengths, device)
    qkv = rand(sum(lengths), 3 * HEADS * 32, dtype=dtype, device=device)
    form = {"causal": causal, "num_heads": HEADS}
    tiles = None
    if has_tiles:
        tiles = attention_tiles(qkv, bounds, bias, None, key_lengths, **form)
    settings = {**form, "window": window, "scale": 0.2}

    actual = write_guarded(
        lambda out: attention_varlen(
            qkv, bounds, bias, tiles, key_lengths=key_lengths, out=out, **settings
        ),
        (sum(lengths), HEADS * 32),
        dtype,
        device,
    )

    expected = reference64(qkv, bounds, bias, key_lengths=key_lengths, **settings)
    assert_close(actual, expected, dtype)


@pytest.mark.parametrize("heads, key_heads", [(2, 1), (6, 2)], ids=str)
def test_neighbouring_heads_share_a_key_head(heads, key_heads, device):
    settings = {"num_heads": heads, "num_kv_heads": key_heads, "causal": True}

    check_against_reference([35, 1], 24, torch.float16, device, **settings)


@pytest.mark.full
@pytest.mark.parametrize(
    "heads, key_heads, form",
    [
        (1, 1, {}),
        (3, 3, {}),
        (4, 4, {"causal": True}),
        (6, 3, {}),
        (8, 2, {"window": 5}),
        (8, 1, {"causal": True, "window": 3}),
    ],
    ids=str,
)
def test_a_program_has_several_heads_of_short_sequences(heads, key_heads, form, device):
    lengths = [13, 0, 16, 1, 17]
    launch = attention_launch(16, torch.float16, form.get("causal", False), False, False, 47, 5)
    assert launch["HEADS"] == 4
    settings = {"num_heads": heads, "num_kv_heads": key_heads, **form}

    check_against_reference(lengths, 16, torch.float16, device, **settings)


@FORMS
@pytest.mark.parametrize("window", [1, 33, 1000])
def test_a_window_hides_tokens_that_are_far(window, causal, has_bias, device):
    lengths = [70, 1]
    bias = bias_for(lengths, device) if has_bias else None

    check_against_reference(
        lengths, 16, torch.float32, device, causal=causal, window=window, bias=bias
    )


@pytest.mark.parametrize("causal, has_bias", [(False, False), (True, True)], ids=["", "bias"])
@pytest.mark.parametrize("window", [0, 33])
def test_scores_have_a_limit(window, causal, has_bias, device):
    lengths = [70, 1]
    bias = bias_for(lengths, device) if has_bias else None
    options = {"scale": 3.0, "soft_cap": 2.5, "causal": causal, "window": window, "bias": bias}

    check_against_reference(lengths, 16, torch.float32, device, **options)


@pytest.mark.full
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_a_window_of_16_bit_keys_has_many_masked_blocks(causal, device):
    check_against_reference([150, 3], 64, torch.float16, device, causal=causal, window=65)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("head_dim", [1, 5, 16, 63, 65, 96, 128, 256])
def test_accepts_any_head_dim(head_dim, dtype, device):
    check_against_reference([17, 34], head_dim, dtype, device, factor=3.0)


@pytest.mark.full
@pytest.mark.parametrize("mean", [1, 16, 64, 256])
@FORMS
def test_every_candidate_launch_matches_the_reference(causal, has_bias, mean, device):
    lengths = [33, 66]
    qkv = rand(sum(lengths), 3 * HEADS * 64, dtype=torch.float16, device=device)
    settings = {"num_heads": HEADS, "scale": 0.2, "causal": causal}
    settings["bias"] = bias_for(lengths, device) if has_bias else None
    expected = reference64(qkv, cu_seqlens_of(lengths, device), **settings)
    key = (64, torch.float16, causal, has_bias, False)

    launches = candidate_launches(*key, mean)
    # in the interpreter a launch takes a second
    for launch in launches if device.type == "cuda" else launches[:1]:
        with forced_launch("attention_varlen", (*key, mean_length_bucket(len(qkv), 2)), launch):
            actual = attention_varlen(qkv, cu_seqlens_of(lengths, device), **settings)
        assert_close(actual, expected, torch.float16)


@pytest.mark.full
def test_keys_in_many_blocks(device):
    check_against_reference([200], 16, torch.float32, device, factor=3.0)


def test_finds_sequences_past_the_first_read_of_cu_seqlens(device, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BATCH", 4)

    check_against_reference([1, 2, 0, 1, 3, 1, 0, 0, 0, 17, 1], 16, torch.float32, device)


@FORMS
def test_padding_of_a_captured_batch_is_neither_read_nor_written(causal, has_bias, device):
    lengths, tokens = [20, 3], 40
    bounds = torch.tensor([0, 20, 23, 23, 23, 23], dtype=torch.int32, device=device)
    qkv = rand(tokens, 3 * HEADS * 16, device=device)
    qkv[23:] = torch.nan
    bias = bias_for(lengths, device) if has_bias else None
    settings = {"num_heads": HEADS, "scale": 0.3, "causal": causal, "bias": bias}

    actual = write_guarded(
        lambda out: attention_varlen(qkv, bounds, out=out, **settings),
        (tokens, HEADS * 16),
        torch.float32,
        device,
    )

    assert_close(actual[:23], reference64(qkv, bounds, **settings)[:23], torch.float32)
    assert actual[23:].isnan().all()


@FORMS
def test_other_sequences_change_no_bit(causal, has_bias, device):
    lengths = [37, 6, 41]
    bounds = cu_seqlens_of(lengths, device)
    qkv = rand(sum(lengths), 3 * HEADS * 24, dtype=torch.float16, device=device)
    bias = bias_for(lengths, device) if has_bias else None
    settings = {"num_heads": HEADS, "scale": 0.3, "causal": causal, "bias": bias}
    before = attention_varlen(qkv, bounds, **settings)
    qkv[37:40], qkv[40:43] = torch.nan, torch.inf

    after = attention_varlen(qkv, bounds, **settings)

    assert torch.equal(after[:37], before[:37])
    assert torch.equal(after[43:], before[43:])


def test_other_heads_change_no_bit(device):
    qkv = rand(40, 3 * HEADS * 24, device=device)
    settings = {"num_heads": HEADS, "scale": 0.3}
    before = attention_varlen(qkv, cu_seqlens_of([40], device), **settings)
    # a tile has 32 columns, and a head 24: the other 8 belong to the next head
    qkv.view(40, 3, HEADS, 24)[5:, 1:, 1] = torch.nan

    after = attention_varlen(qkv, cu_seqlens_of([40], device), **settings)

    assert torch.equal(after[:, :24], before[:, :24])


def test_later_tokens_change_no_bit_if_causal(device):
    qkv = rand(70, 3 * HEADS * 16, device=device)
    settings = {"num_heads": HEADS, "scale": 0.3, "causal": True}
    before = attention_varlen(qkv, cu_seqlens_of([70], device), **settings)
    # not NaN: a weight of 0 times NaN is NaN, here as in torch
    qkv[41:] = 1e6

    after = attention_varlen(qkv, cu_seqlens_of([70], device), **settings)

    assert torch.equal(after[:41], before[:41])


def test_the_same_sequence_alone_and_in_a_batch_gives_the_same_answer(device):
    qkv = rand(90, 3 * HEADS * 16, device=device)
    settings = {"num_heads": HEADS, "scale": 0.3}

    together = attention_varlen(qkv, cu_seqlens_of([25, 40, 25], device), **settings)
    alone = attention_varlen(qkv[25:65], cu_seqlens_of([40], device), **settings)

    assert_close(together[25:65], alone, torch.float32)


def test_large_scores_do_not_overflow(device):
    qkv = 30 * rand(70, 3 * HEADS * 16, device=device)
    bounds = cu_seqlens_of([70], device)
    settings = {"num_heads": HEADS, "scale": 1.0}

    # an error of 2 ** -24 in a score of thousands is one of 1e-4 in its weight
    assert_close(
        attention_varlen(qkv, bounds, **settings),
        reference64(qkv, bounds, **settings),
        torch.float32,
        factor=300,
    )


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_distances_past_the_ends_of_the_bias_have_its_last_entries(causal, device):
    bias = 2 * rand(HEADS, 15, device=device)

    check_against_reference([50, 3], 16, torch.float32, device, causal=causal, bias=bias)


@DTYPES
def test_a_bias_of_minus_infinity_hides_keys(dtype, device):
    lengths = [70, 3]
    # a window from 5 tokens before a query to 2 after it hides most blocks of keys
    distance = torch.arange(-69, 70, device=device)
    bias = torch.where((distance >= -5) & (distance <= 2), 0.0, -torch.inf).repeat(HEADS, 1)

    check_against_reference(lengths, 16, dtype, device, bias=bias)


def test_a_query_that_may_read_no_key_gets_zeros(device):
    qkv = rand(9, 3 * HEADS * 16, device=device)
    # each query reads only the key before it; the first query reads none
    bias = torch.full((HEADS, 17), -torch.inf, device=device)
    bias[:, 7] = 0

    actual = attention_varlen(
        qkv, cu_seqlens_of([9], device), num_heads=HEADS, scale=0.3, bias=bias
    )

    assert torch.equal(actual[0], torch.zeros_like(actual[0]))
    # on tensor cores, 1 * v is a product of TF32 parts of v
    assert_close(actual[1:], qkv[:-1, 2 * HEADS * 16 :], torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_accepts_a_bias_of_another_dtype_and_wider_than_needed(dtype, device):
    bias = bias_for([50], device, dtype)

    check_against_reference([20, 30], 16, torch.float32, device, bias=bias)


@DTYPES
def test_accepts_strided_rows(dtype, device):
    lengths = [33, 4]
    qkv = rand(37, 3 * HEADS * 16, dtype=dtype, device=device)
    settings = {"num_heads": HEADS, "scale": 0.3}

    actual = write_guarded(
        lambda out: attention_varlen(
            spread(qkv), cu_seqlens_of(lengths, device), out=out, **settings
        ),
        (37, HEADS * 16),
        dtype,
        device,
        gap=16,
    )

    assert_close(actual, reference64(qkv, cu_seqlens_of(lengths, device), **settings), dtype, 2.0)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]], ids=str)
def test_no_tokens(lengths, device):
    qkv = rand(0, 3 * HEADS * 16, device=device)

    actual = attention_varlen(qkv, cu_seqlens_of(lengths, device), num_heads=HEADS, scale=0.3)

    assert actual.shape == (0, HEADS * 16)


@given(
    st.lists(st.integers(0, 300) | st.integers(0, 3), min_size=1, max_size=40),
    st.sampled_from([16, 32, 64, 128]),
    st.integers(0, 70),
)
def test_every_query_is_in_one_tile(lengths, BLOCK_M, extra):
    """The map from tiles to sequences, in plain Python, covers each query once."""
    bounds = [0, *accumulate(lengths)]
    first_tiles = [begin // BLOCK_M + i for i, begin in enumerate(bounds[:-1])]
    tiles = (bounds[-1] + extra) // BLOCK_M + len(lengths)

    owned = []
    for tile in range(tiles):
        owner = sum(first <= tile for first in first_tiles) - 1
        first_query = (tile - first_tiles[owner]) * BLOCK_M
        if first_query < lengths[owner]:
            owned.append((owner, first_query))

    assert owned == [(i, q) for i, n in enumerate(lengths) for q in range(0, n, BLOCK_M)]


@pytest.mark.parametrize(
    "tokens, batch, mean",
    [
        (1, 1, 1),
        (15, 1, 1),
        (16, 1, 16),
        (500, 1, 256),
        (8192, 128, 64),
        (8192, 129, 16),
        (5, 9, 1),
    ],
)
def test_the_mean_length_has_four_buckets(tokens, batch, mean):
    assert mean_length_bucket(tokens, batch) == mean


@pytest.mark.parametrize(
    "change, message",
    [
        ({"qkv": torch.zeros(4, 95)}, "qkv has rows of 95; allowed: multiples of 2 . 2 · 2 heads"),
        ({"qkv": torch.zeros(4, 6 * 257)}, "head_dim is 257; allowed: 1 to 256"),
        ({"qkv": torch.zeros(4, 96).double()}, "qkv is torch.float64; allowed: torch.float32"),
        ({"qkv": torch.zeros(96, 4).t()}, "qkv has strides .1, 4.; the last must be 1"),
        ({"cu_seqlens": torch.tensor([0, 4])}, r"cu_seqlens is \[2\] torch.int64"),
        ({"scale": 0.0}, "scale is 0.0; allowed: above 0"),
        ({"window": -1}, "window is -1; allowed: 0 .all tokens. and above"),
        ({"soft_cap": -1.0}, "soft_cap is -1.0; allowed: 0 .no limit. and above"),
        ({"num_kv_heads": 3}, "num_kv_heads is 3; allowed: divisors of 2 heads"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0; allowed: divisors of 2 heads"),
        ({"out": torch.zeros(4, 31)}, r"out is \[4, 31\] .* must be \[4, 32\]"),
        (
            {"bias": torch.zeros(2, 8)},
            r"bias is \[2, 8\]; it must be \[2, an odd",
        ),
        (
            {"bias": torch.zeros(3, 9)},
            r"bias is \[3, 9\]; it must be \[2, an odd",
        ),
        ({"bias": torch.zeros(9, 2).t()}, "bias has strides .1, 2."),
        (
            {"qkv": torch.zeros(4, 6 * 129), "bias": torch.zeros(2, 9)},
            "head_dim is 129; allowed with bias in torch.float32: 1 to 128",
        ),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else "",
)
def test_rejects_invalid_arguments(change, message, device):
    arguments = {
        "qkv": torch.zeros(4, 96),
        "cu_seqlens": torch.tensor([0, 4], dtype=torch.int32),
        "scale": 0.25,
    }
    arguments |= change
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }

    with pytest.raises(ValueError, match=message):
        attention_varlen(**arguments, num_heads=HEADS)
