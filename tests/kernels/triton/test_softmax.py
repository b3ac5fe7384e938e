"""Masked softmax on a GPU or in the interpreter, against the reference."""

import pytest
import torch

from varlen_kernels import reference
from varlen_kernels.triton import softmax
from varlen_kernels.triton.rows import vector_width
from varlen_kernels.triton.softmax import MAX_HELD, masked_softmax
from varlen_kernels.tuning import forced_launch

from .compare import DTYPES, assert_close, rand, spread
from .guards import write_guarded

KEYS = [1, 5, 10, 40, 63, 64, 65, 80, 500, 501, 768, 1000, 2052]


def inputs(batch, num_heads, queries, keys, dtype, device):
    """Return random scores, and lengths of none, one, all and some of the keys."""
    x = 4 * rand(batch, num_heads, queries, keys, dtype=dtype, device=device)
    lengths = [0, 1, keys, keys - keys // 3, keys // 2]
    return x, torch.tensor((lengths * batch)[:batch], dtype=torch.int32, device=device)


@DTYPES
@pytest.mark.parametrize("keys", KEYS)
def test_matches_the_reference(keys, dtype, device):
    x, seqlens = inputs(5, 1, 3, keys, dtype, device)

    actual = write_guarded(
        lambda out: masked_softmax(x, seqlens, scale=0.3, out=out),
        tuple(x.shape),
        dtype,
        device,
    )

    expected = reference.masked_softmax(x.float(), seqlens, scale=0.3)
    assert_close(actual, expected, dtype)
    assert torch.equal(actual == 0, expected.to(dtype) == 0)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@DTYPES
@pytest.mark.parametrize("keys", [MAX_HELD + 1, 2 * MAX_HELD + 96])
def test_rows_beyond_one_program_match_the_reference(keys, dtype, causal, device):
    x, seqlens = inputs(5, 1, 2, keys, dtype, device)

    actual = write_guarded(
        lambda out: masked_softmax(x, seqlens, scale=0.3, causal=causal, out=out),
        tuple(x.shape),
        dtype,
        device,
    )

    expected = reference.masked_softmax(x.float(), seqlens, scale=0.3, causal=causal)
    assert_close(actual, expected, dtype)


@DTYPES
@pytest.mark.parametrize(
    "queries, keys", [(1, 1), (1, 64), (7, 3), (3, 7), (64, 64), (130, 33), (3, 500)], ids=str
)
def test_a_causal_query_reads_its_own_past(queries, keys, dtype, device):
    x = rand(2, 2, queries, keys, dtype=dtype, device=device)
    seqlens = torch.tensor([keys, keys // 2], dtype=torch.int32, device=device)

    actual = masked_softmax(x, seqlens, scale=1.0, causal=True)

    expected = reference.masked_softmax(x.float(), seqlens, scale=1.0, causal=True)
    assert_close(actual, expected, dtype)


@DTYPES
@pytest.mark.parametrize("keys", [10, 500, 2048, MAX_HELD + 8])
def test_padding_is_not_read(keys, dtype, device):
    x, seqlens = inputs(5, 2, 2, keys, dtype, device)
    fresh = masked_softmax(x, seqlens, scale=1.0)
    for scores, length in zip(x, seqlens.tolist(), strict=True):
        scores[..., length:] = torch.nan

    assert torch.equal(masked_softmax(x, seqlens, scale=1.0), fresh)


@pytest.mark.parametrize("keys", [10, 500, 65])
def test_skipping_the_load_of_padding_changes_no_bit(keys, monkeypatch, device):
    x, seqlens = inputs(5, 2, 2, keys, torch.float16, device)
    loaded = masked_softmax(x, seqlens, scale=1.0, causal=True)
    monkeypatch.setattr(softmax, "_SKIP_FROM_BYTES", 0)

    assert torch.equal(masked_softmax(x, seqlens, scale=1.0, causal=True), loaded)


@DTYPES
@pytest.mark.parametrize("keys", [10, 500, 2048, MAX_HELD + 8])
def test_in_place_writes_the_same_bits(keys, dtype, device):
    x, seqlens = inputs(3, 2, 2, keys, dtype, device)
    fresh = masked_softmax(x, seqlens, scale=1.0)

    returned = masked_softmax(x, seqlens, scale=1.0, out=x)

    assert returned.data_ptr() == x.data_ptr()
    assert torch.equal(x, fresh)


@pytest.mark.parametrize("keys", [10, 501, 504, MAX_HELD + 8])
def test_rows_may_have_gaps_between_them(keys, device):
    x, seqlens = inputs(3, 2, 2, keys, torch.float16, device)

    actual = write_guarded(
        lambda out: masked_softmax(spread(x), seqlens, scale=1.0, out=out),
        tuple(x.shape),
        torch.float16,
        device,
        gap=16,
    )

    expected = reference.masked_softmax(x.float(), seqlens, scale=1.0)
    assert_close(actual, expected, torch.float16)


@pytest.mark.full
@pytest.mark.parametrize("keys", [10, 100, 101, 1024, 4000, MAX_HELD + 8])
def test_every_candidate_launch_is_right(keys, device):
    x, seqlens = inputs(5, 1, 2, keys, torch.float16, device)
    expected = reference.masked_softmax(x.float(), seqlens, scale=1.0)
    vector = vector_width(torch.float16, keys)
    bucket = 1 << (keys - 1).bit_length()
    key = (bucket, vector, torch.float16)

    for launch in softmax.candidate_launches(*key):
        with forced_launch("masked_softmax", key, launch):
            actual = masked_softmax(x, seqlens, scale=1.0)
        assert_close(actual, expected, torch.float16)


@pytest.mark.parametrize("keys", [64, MAX_HELD + 8])
def test_scores_beyond_the_range_of_exp_are_shifted_into_it(keys, device):
    x = 1e4 * rand(1, 1, 2, keys, device=device)
    seqlens = torch.tensor([keys], dtype=torch.int32, device=device)

    for scale in (1.0, -1.0):
        actual = masked_softmax(x, seqlens, scale=scale)
        expected = reference.masked_softmax(x, seqlens, scale=scale)
        # an exponent of 1e4 * log2(e) has an error of 1e-3
        assert_close(actual, expected, torch.float32, factor=2e3)


@pytest.mark.parametrize("keys", [64, MAX_HELD + 8])
def test_infinities_and_nan_match_the_reference(keys, device):
    x = rand(1, 1, 6, keys, device=device)
    x[0, 0, 0, 3] = torch.inf
    x[0, 0, 1, 3] = torch.nan
    x[0, 0, 2, 3] = -torch.inf
    # all keys that the query may read, and then their first half
    x[0, 0, 3, :] = -torch.inf
    x[0, 0, 4, : keys // 2] = -torch.inf
    seqlens = torch.tensor([keys - 2], dtype=torch.int32, device=device)

    actual = masked_softmax(x, seqlens, scale=1.0)

    expected = reference.masked_softmax(x, seqlens, scale=1.0)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7, equal_nan=True)


def test_equal_scores_get_equal_weights(device):
    x = torch.full((1, 1, 2, 500), 7.0, device=device)
    seqlens = torch.tensor([4], dtype=torch.int32, device=device)

    actual = masked_softmax(x, seqlens, scale=1.0)

    assert (actual[..., :4] == 0.25).all()
    assert (actual[..., 4:] == 0).all()


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 2, 0, 8), (2, 2, 3, 0)], ids=str)
def test_an_empty_tensor_stays_empty(shape, device):
    x = torch.zeros(shape, device=device)
    seqlens = torch.zeros(shape[0], dtype=torch.int32, device=device)

    assert masked_softmax(x, seqlens, scale=1.0).shape == shape


@pytest.mark.parametrize(
    "x, seqlens, message",
    [
        (torch.zeros(2, 4, 8), [8, 8], r"x is \[2, 4, 8\]; it must be \[batch, num_heads"),
        (torch.zeros(2, 4, 3, 8), [8], r"seqlens is \[1\] torch.int32"),
        (torch.zeros(2, 3, 4, 8).transpose(1, 2), [8, 8], "rows must lie one stride apart"),
        (torch.zeros(2, 4, 8, 3).transpose(2, 3), [8, 8], "x has strides .*; the last must be 1"),
    ],
    ids=["dimensions", "lengths", "heads inside queries", "keys apart"],
)
def test_rejects_an_invalid_argument(x, seqlens, message, device):
    seqlens = torch.tensor(seqlens, dtype=torch.int32, device=device)

    with pytest.raises(ValueError, match=message):
        masked_softmax(x.to(device), seqlens, scale=1.0)


def test_rejects_lengths_of_another_type(device):
    x = torch.zeros(1, 1, 1, 4, device=device)

    with pytest.raises(ValueError, match="seqlens is .* torch.int64"):
        masked_softmax(x, torch.tensor([4], device=device), scale=1.0)
