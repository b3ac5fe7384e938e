"""Pack and unpack on a GPU or interpreted: the same bits as the reference."""

import pytest
import torch

from varlen_bench.padded import packing, reference
from varlen_bench.padded.packing import pack, unpack
from varlen_kernels.tuning import forced_launch

from .compare import DTYPES, cu_seqlens_of, rand, spread
from .guards import write_guarded

BATCHES = pytest.mark.parametrize("lengths", [[1], [64], [31, 0, 33], [3, 1, 2, 0]], ids=str)


@BATCHES
@DTYPES
@pytest.mark.parametrize("hidden", [1, 65, 768])
def test_unpack_matches_the_reference(hidden, dtype, lengths, device):
    x, bounds = (
        rand(sum(lengths), hidden, dtype=dtype, device=device),
        cu_seqlens_of(lengths, device),
    )
    max_seqlen = max(lengths) + 2

    actual = write_guarded(
        lambda out: unpack(x, bounds, max_seqlen=max_seqlen, out=out),
        (len(lengths), max_seqlen, hidden),
        dtype,
        device,
    )

    assert torch.equal(actual, reference.unpack(x, bounds, max_seqlen=max_seqlen))


@BATCHES
@DTYPES
@pytest.mark.parametrize("hidden", [1, 65, 768])
def test_pack_matches_the_reference(hidden, dtype, lengths, device):
    padded = rand(len(lengths), max(lengths) + 2, hidden, dtype=dtype, device=device)
    bounds, tokens = cu_seqlens_of(lengths, device), sum(lengths)

    actual = write_guarded(
        lambda out: pack(padded, bounds, tokens=tokens, out=out), (tokens, hidden), dtype, device
    )

    assert torch.equal(actual, reference.pack(padded, bounds, tokens=tokens))


@pytest.mark.full
@pytest.mark.parametrize("hidden", [65, 768])
def test_every_candidate_launch_is_right(hidden, device):
    x, bounds = rand(40, hidden, dtype=torch.float16, device=device), cu_seqlens_of([33, 7], device)
    key = (hidden, torch.float16)

    for launch in packing.candidate_launches(*key):
        with forced_launch("unpack", key, launch), forced_launch("pack", key, launch):
            padded = unpack(x, bounds, max_seqlen=35)
            packed = pack(padded, bounds, tokens=40)
        assert torch.equal(padded, reference.unpack(x, bounds, max_seqlen=35))
        assert torch.equal(packed, x)


def test_rows_may_have_gaps_between_them(device):
    x, bounds = rand(10, 63, device=device), cu_seqlens_of([7, 3], device)

    padded = write_guarded(
        lambda out: unpack(spread(x), bounds, max_seqlen=9, out=out),
        (2, 9, 63),
        torch.float32,
        device,
        gap=5,
    )
    packed = write_guarded(
        lambda out: pack(spread(padded), bounds, tokens=10, out=out),
        (10, 63),
        torch.float32,
        device,
        gap=3,
    )

    assert torch.equal(padded, reference.unpack(x, bounds, max_seqlen=9))
    assert torch.equal(packed, x)


def test_padding_is_not_read(device):
    padded = torch.full((2, 9, 40), torch.nan, device=device)
    padded[0, :7], padded[1, :3] = 1, 2

    packed = pack(padded, cu_seqlens_of([7, 3], device), tokens=10)

    assert packed.sum() == (7 + 2 * 3) * 40


def test_pack_does_not_write_past_a_small_output(device):
    padded = rand(2, 9, 40, device=device)

    actual = write_guarded(
        lambda out: pack(padded, cu_seqlens_of([7, 3], device), tokens=8, out=out),
        (8, 40),
        torch.float32,
        device,
    )

    assert torch.equal(actual, torch.cat([padded[0, :7], padded[1, :1]]))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]], ids=str)
def test_no_tokens(lengths, device):
    x, bounds = rand(0, 8, device=device), cu_seqlens_of(lengths, device)

    padded = unpack(x, bounds, max_seqlen=3)

    assert torch.equal(padded, torch.zeros(len(lengths), 3, 8, device=device))
    assert pack(padded, bounds, tokens=0).shape == (0, 8)
    assert unpack(x, bounds, max_seqlen=0).shape == (len(lengths), 0, 8)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(2, 3, 8).double()}, "x is torch.float64; allowed: torch.float32"),
        ({"x": torch.zeros(4, 8)}, r"x is \[4, 8\]; it must be \[batch, max_seqlen, hidden\]"),
        ({"x": torch.zeros(3, 2, 8).transpose(0, 1)}, "its rows must lie one stride apart"),
        ({"cu_seqlens": torch.zeros(2, dtype=torch.int32)}, r"it must be \[3\] torch.int32"),
        ({"out": torch.zeros(3, 8)}, r"out is \[3, 8\] torch.float32; it must be \[4, 8\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_pack_rejects_an_invalid_argument(change, message, device):
    arguments = {
        "x": torch.zeros(2, 3, 8),
        "cu_seqlens": torch.tensor([0, 3, 4], dtype=torch.int32),
    }
    arguments |= change

    with pytest.raises(ValueError, match=message):
        pack(**{name: t.to(device) for name, t in arguments.items()}, tokens=4)


def test_unpack_rejects_an_output_of_another_width(device):
    x, out = torch.zeros(4, 8, device=device), torch.zeros(2, 4, 8, device=device)

    with pytest.raises(ValueError, match=r"out is \[2, 4, 8\] .* must be \[2, 3, 8\]"):
        unpack(x, cu_seqlens_of([3, 1], device), max_seqlen=3, out=out)
