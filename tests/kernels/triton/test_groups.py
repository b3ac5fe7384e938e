"""Products of groups on a GPU or in the interpreter, against the reference in fp64."""

import pytest
import torch

from varlen_kernels import reference
from varlen_kernels.triton import groups
from varlen_kernels.triton.groups import linear_groups
from varlen_kernels.tuning import forced_launch

from .compare import DTYPES, assert_close, cu_seqlens_of, rand, spread
from .guards import write_guarded

COUNTS = pytest.mark.parametrize(
    "counts", [[0, 1, 0, 5], [70, 3, 0], [1] * 9, [0, 0], [33, 40]], ids=str
)
SIZES = pytest.mark.parametrize(
    "hidden, features",
    [
        (1, 1),
        (16, 100),
        (65, 16),
        *(pytest.param(*each, marks=pytest.mark.full) for each in [(130, 63), (3, 129)]),
    ],
    ids=str,
)


def layer_of(counts, hidden, features, dtype, device, rest=2):
    x = rand(sum(counts) + rest, hidden, dtype=dtype, device=device)
    weight = rand(len(counts), features, hidden, dtype=dtype, device=device, seed=1)
    bias = rand(len(counts), features, dtype=dtype, device=device, seed=2)
    return x, weight, cu_seqlens_of(counts, device), bias


def expected_of(x, weight, bounds, bias):
    wide = None if bias is None else bias.double()
    return reference.linear_groups(x.double(), weight.double(), bounds, wide)


@DTYPES
@COUNTS
@SIZES
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_matches_the_reference(counts, hidden, features, has_bias, dtype, device):
    x, weight, bounds, bias = layer_of(counts, hidden, features, dtype, device)
    bias = bias if has_bias else None

    actual = write_guarded(
        lambda out: linear_groups(x, weight, bounds, bias, out=out),
        (len(x), features),
        dtype,
        device,
    )

    assert_close(actual, expected_of(x, weight, bounds, bias), dtype)
    assert not actual[sum(counts) :].any()


def test_accepts_strided_rows(device):
    x, weight, bounds, bias = layer_of([3, 2], 24, 16, torch.float16, device)

    actual = linear_groups(spread(x), weight, bounds, bias)

    assert_close(actual, expected_of(x, weight, bounds, bias), torch.float16)


def test_every_candidate_launch_matches_the_reference(device):
    x, weight, bounds, bias = layer_of([40, 0, 7], 40, 24, torch.float16, device)
    expected = expected_of(x, weight, bounds, bias)

    for has_many_rows in (False, True):
        key = (40, 24, has_many_rows, torch.float16)
        for launch in groups.candidate_launches(*key):
            rows = (40, 24, len(x) >= 32 * len(weight), torch.float16)
            with forced_launch("linear_groups", rows, launch):
                assert_close(linear_groups(x, weight, bounds, bias), expected, torch.float16)


def test_a_row_has_the_same_bits_in_a_group_of_any_number(device):
    x, weight, bounds, bias = layer_of([20, 0, 9], 40, 24, torch.float16, device, rest=0)
    expected = linear_groups(x, weight, bounds, bias)

    for row, counts in ((3, [1, 0, 0]), (25, [0, 0, 1])):
        alone = linear_groups(x[row : row + 1], weight, cu_seqlens_of(counts, device), bias)
        assert torch.equal(alone[0], expected[row])


def test_no_rows(device):
    weight = torch.zeros(2, 5, 8, device=device)

    assert linear_groups(
        torch.zeros(0, 8, device=device), weight, cu_seqlens_of([0, 0], device)
    ).shape == (0, 5)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weight": (2, 5, 7)}, r"weight is \[2, 5, 7\] torch.float32; it must be \[groups"),
        ({"bias": (2, 4)}, r"bias is \[2, 4\] torch.float32; it must be \[2, 5\]"),
        ({"out": (3, 4)}, r"out is \[3, 4\] torch.float32; it must be \[3, 5\]"),
    ],
    ids=["weight", "bias", "out"],
)
def test_rejects_what_does_not_fit(change, message, device):
    shapes = {"x": (3, 8), "weight": (2, 5, 8), "bias": (2, 5), "out": (3, 5)} | change
    given = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}

    with pytest.raises(ValueError, match=message):
        linear_groups(cu_groups=cu_seqlens_of([1, 2], device), **given)
