"""One vector for each sequence, on a GPU or in the interpreter, against the reference."""

from typing import get_args

import pytest
import torch

from varlen_kernels import Pooling, reference
from varlen_kernels.triton import pooling
from varlen_kernels.triton.pooling import first_tokens, pool
from varlen_kernels.tuning import forced_launch, record_picks

from .compare import DTYPES, assert_close, cu_seqlens_of, rand, spread
from .guards import write_guarded

LENGTHS = [3, 0, 1, 65, 0]
# long enough on average to be pooled in parts
LONG_LENGTHS = [200, 0, 1, 33, 513]
MODES = pytest.mark.parametrize("mode", ["cls", "mean", "max", "last"])


def every_other(lengths, device):
    return torch.arange(len(lengths), device=device) % 2 == 0


@MODES
@DTYPES
@pytest.mark.parametrize("hidden", [1, 63, 501, 768])
@pytest.mark.parametrize("normalized", [False, True], ids=["", "normalized"])
def test_matches_the_reference(normalized, hidden, dtype, mode, device):
    x = rand(sum(LENGTHS), hidden, dtype=dtype, device=device) + 1
    bounds = cu_seqlens_of(LENGTHS, device)
    normalize = every_other(LENGTHS, device) if normalized else None

    actual = write_guarded(
        lambda out: pool(x, bounds, normalize, mode=mode, out=out),
        (len(LENGTHS), hidden),
        torch.float32,
        device,
    )

    # the reference reads the same x, so its dtype adds no error
    expected = reference.pool(x, bounds, normalize, mode=mode)
    assert_close(actual, expected, torch.float32)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["mean", "max"])
@DTYPES
@pytest.mark.parametrize("hidden", [63, 300])
@pytest.mark.parametrize("normalized", [False, True], ids=["", "normalized"])
def test_long_sequences_match_the_reference(normalized, hidden, dtype, mode, device):
    x = rand(sum(LONG_LENGTHS), hidden, dtype=dtype, device=device) + 1
    bounds = cu_seqlens_of(LONG_LENGTHS, device)
    normalize = every_other(LONG_LENGTHS, device) if normalized else None

    with record_picks() as picks:
        actual = write_guarded(
            lambda out: pool(x, bounds, normalize, mode=mode, out=out),
            (len(LONG_LENGTHS), hidden),
            torch.float32,
            device,
        )

    assert [op for op, _, _ in picks] == ["pool_parts", "merge_parts"]
    assert_close(actual, reference.pool(x, bounds, normalize, mode=mode), torch.float32)


@pytest.mark.parametrize("mode", sorted({*get_args(Pooling)} - {"cls", "mean", "max", "last"}))
@pytest.mark.parametrize("lengths", [LENGTHS, LONG_LENGTHS], ids=["short", "long"])
def test_other_sums_match_the_reference(lengths, mode, device):
    x = rand(sum(lengths), 63, dtype=torch.float16, device=device) + 1
    bounds, normalize = cu_seqlens_of(lengths, device), every_other(lengths, device)

    actual = pool(x, bounds, normalize, mode=mode)

    assert_close(actual, reference.pool(x, bounds, normalize, mode=mode), torch.float32)


@pytest.mark.parametrize("mode", get_args(Pooling))
@pytest.mark.parametrize("normalized", [False, True], ids=["", "normalized"])
@pytest.mark.parametrize(
    "lengths, unpooled",
    [
        ([3, 0, 1, 65, 2, 9], [1, 0, 0, 40, 2, 12]),
        ([200, 0, 1, 40, 513, 70], [7, 0, 1, 8, 470, 99]),
    ],
    ids=["short", "long"],
)
def test_the_start_of_sequences_is_left_out(lengths, unpooled, normalized, mode, device):
    """In some sequences, no token is left."""
    x = rand(sum(lengths), 63, device=device) + 1
    bounds = cu_seqlens_of(lengths, device)
    skipped = torch.tensor(unpooled, dtype=torch.int32, device=device)
    normalize = every_other(lengths, device) if normalized else None
    expected = reference.pool(x, bounds, normalize, skipped, mode=mode)
    # the first sequence has tokens that are left out
    x[0] = torch.nan

    actual = write_guarded(
        lambda out: pool(x, bounds, normalize, skipped, mode=mode, out=out),
        (len(lengths), 63),
        torch.float32,
        device,
    )

    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("lengths", [[1, 1, 1], [64, 70, 90]], ids=["short", "long"])
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-13, 1e-6, 1e15, 1e18, 1e30, 3e35])
def test_vectors_of_any_size_are_normalized_as_in_float64(size, lengths, device):
    x = (rand(sum(lengths), 384, device=device) + 1) * size
    normalize = torch.tensor([True, True, False], device=device)

    actual = pool(x, cu_seqlens_of(lengths, device), normalize, mode="mean")

    means = torch.stack([rows.double().mean(0) for rows in x.split(lengths)])
    units = torch.nn.functional.normalize(means, dim=1)
    expected = torch.where(normalize[:, None], units, means)
    scale = expected.abs().amax(1, keepdim=True)
    torch.testing.assert_close(actual / scale, expected / scale, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["mean", "max"])
def test_other_sequences_change_no_bit_of_a_long_one(mode, device):
    x = rand(700, 40, device=device)
    alone = pool(x[100:400], cu_seqlens_of([300], device), mode=mode)
    x[:100], x[400:] = torch.nan, torch.inf

    together = pool(x, cu_seqlens_of([100, 300, 300], device), mode=mode)

    assert torch.equal(together[1:2], alone)


def test_nan_in_a_part_changes_only_its_feature(device):
    x = rand(300, 40, device=device)
    x[290, 3], x[7, 5] = torch.nan, -torch.inf
    bounds = cu_seqlens_of([300], device)

    for mode in ("mean", "max"):
        expected = reference.pool(x, bounds, mode=mode)
        torch.testing.assert_close(
            pool(x, bounds, mode=mode), expected, rtol=1e-5, atol=1e-6, equal_nan=True
        )


@pytest.mark.full
@MODES
def test_every_candidate_launch_matches_the_reference(mode, device):
    x = rand(sum(LENGTHS), 768, dtype=torch.float16, device=device)
    bounds, normalize = cu_seqlens_of(LENGTHS, device), every_other(LENGTHS, device)
    expected = reference.pool(x.float(), bounds, normalize, mode=mode)
    key = (768, torch.float16, mode, True)

    for launch in pooling.candidate_launches(*key):
        with forced_launch("pool", key, launch):
            actual = pool(x, bounds, normalize, mode=mode)
        assert_close(actual, expected, torch.float32)


@MODES
def test_accepts_strided_rows(mode, device):
    x, bounds = rand(100, 63, device=device), cu_seqlens_of(LENGTHS, device)

    actual = write_guarded(
        lambda out: pool(spread(x), bounds, mode=mode, out=out),
        (len(LENGTHS), 63),
        torch.float32,
        device,
        gap=5,
    )

    assert_close(actual, reference.pool(x, bounds, mode=mode), torch.float32)


@MODES
def test_accepts_the_widest_row(mode, device):
    x, bounds = rand(5, 16_384, device=device), cu_seqlens_of([3, 2], device)
    normalize = torch.ones(2, dtype=torch.bool, device=device)

    actual = pool(x, bounds, normalize, mode=mode)

    assert_close(actual, reference.pool(x, bounds, normalize, mode=mode), torch.float32)


@MODES
@DTYPES
def test_nan_changes_only_its_feature(dtype, mode, device):
    x = rand(9, 40, dtype=dtype, device=device)
    x[0, 3], x[6, 7], x[8, 9] = torch.nan, torch.nan, -torch.inf
    bounds = cu_seqlens_of([4, 5], device)

    actual = pool(x, bounds, mode=mode)

    expected = reference.pool(x, bounds, mode=mode)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_nan_changes_all_features_of_a_normalized_vector(device):
    x = rand(4, 40, device=device)
    x[1, 3] = torch.nan
    normalize = torch.ones(2, dtype=torch.bool, device=device)

    actual = pool(x, cu_seqlens_of([2, 2], device), normalize, mode="mean")

    assert actual[0].isnan().all()
    assert not actual[1].isnan().any()


def test_the_maximum_of_minus_infinities_is_minus_infinity(device):
    x = torch.full((3, 5), -torch.inf, device=device)

    actual = pool(x, cu_seqlens_of([3], device), mode="max")

    assert torch.equal(actual, x[:1])


@MODES
def test_a_vector_of_zeros_stays_zero_when_it_is_normalized(mode, device):
    x, normalize = torch.zeros(2, 40, device=device), torch.ones(2, dtype=torch.bool)

    actual = pool(x, cu_seqlens_of([2, 0], device), normalize.to(device), mode=mode)

    assert torch.equal(actual, torch.zeros_like(x))


@MODES
def test_padding_of_a_captured_batch_is_not_read(mode, device):
    x = rand(12, 40, device=device)
    x[7:] = torch.nan
    bounds = torch.tensor([0, 4, 7, 7, 7], dtype=torch.int32, device=device)

    actual = pool(x, bounds, mode=mode)

    assert_close(actual[:2], reference.pool(x[:7], bounds[:3], mode=mode), torch.float32)
    assert torch.equal(actual[2:], torch.zeros_like(actual[2:]))


@DTYPES
@pytest.mark.parametrize("hidden", [5, 768])
def test_first_tokens_are_copies(hidden, dtype, device):
    x = rand(sum(LENGTHS), hidden, dtype=dtype, device=device)
    # the last sequence is empty, and cu_seqlens_of past the last token
    bounds = cu_seqlens_of([*LENGTHS, 0], device)

    actual = write_guarded(
        lambda out: first_tokens(x, bounds, out=out), (len(LENGTHS) + 1, hidden), dtype, device
    )

    assert torch.equal(actual, reference.first_tokens(x, bounds))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]], ids=str)
@MODES
def test_no_tokens(lengths, mode, device):
    x, bounds = rand(0, 8, device=device), cu_seqlens_of(lengths, device)

    assert torch.equal(pool(x, bounds, mode=mode), torch.zeros(len(lengths), 8, device=device))
    assert torch.equal(first_tokens(x, bounds), torch.zeros(len(lengths), 8, device=device))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(4, 8).double()}, "x is torch.float64; allowed: torch.float32"),
        ({"x": torch.zeros(8, 4).t()}, r"x has strides \(1, 4\); the last must be 1"),
        ({"cu_seqlens": torch.tensor([0, 4])}, r"cu_seqlens is \[2\] torch.int64"),
        ({"normalize": torch.ones(1)}, r"normalize is \[1\] torch.float32"),
        ({"normalize": torch.ones(2).bool()}, r"normalize is \[2\] torch.bool, .* must be \[1\]"),
        (
            {"unpooled_lengths": torch.zeros(1)},
            r"unpooled_lengths is \[1\] torch.float32, .*torch.int32",
        ),
        ({"out": torch.zeros(1, 8).half()}, r"out is \[1, 8\] torch.float16; it must be"),
        ({"x": torch.zeros(4, 16_385)}, "x has rows of 16385; allowed: 1 to 16384"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_rejects_invalid_arguments(change, message, device):
    arguments = {
        "x": torch.zeros(4, 8),
        "cu_seqlens": torch.tensor([0, 4], dtype=torch.int32),
    }
    arguments |= change

    with pytest.raises(ValueError, match=message):
        pool(**{name: t.to(device) for name, t in arguments.items()}, mode="mean")
