"""The table of tiles, and attention that reads it, on a GPU or interpreted."""

from itertools import accumulate

import pytest
import torch

from varlen_kernels import reference
from varlen_kernels.triton import attention_tiles as module
from varlen_kernels.triton.attention_tiles import attention_launch, attention_tiles
from varlen_kernels.triton.attention_varlen import attention_varlen

from .compare import cu_seqlens_of, rand
from .guards import write_guarded

HEADS = 2
HEAD_DIM = 16
WIDTH = 3 * HEADS * HEAD_DIM


def batch_of(lengths, device, padding=0):
    bounds = cu_seqlens_of(lengths, device)
    return rand(sum(lengths) + padding, WIDTH, dtype=torch.float16, device=device), bounds


def expected_rows(lengths, tokens):
    """Return the rows of the table in plain Python."""
    launch = attention_launch(HEAD_DIM, torch.float16, False, False, False, tokens, len(lengths))
    queries = launch["BLOCK_M"]
    begins = [0, *accumulate(lengths)][:-1]
    first_tiles = [begin // queries + i for i, begin in enumerate(begins)]
    rows = []
    for tile in range(tokens // queries + len(lengths)):
        owner = sum(first <= tile for first in first_tiles) - 1
        rows.append([begins[owner], lengths[owner], (tile - first_tiles[owner]) * queries])
    return rows


@pytest.mark.parametrize("block_batch", [4, 256])
@pytest.mark.parametrize(
    "lengths, padding",
    [
        ([1], 0),
        ([64], 0),
        ([65, 1, 0, 200], 0),
        ([1, 2, 0, 1, 3, 1, 0, 0, 0, 17, 1], 9),
        ([500, 300, 0, 0], 224),
        ([3] * 90, 0),
    ],
    ids=str,
)
def test_rows_are_those_of_every_tile(lengths, padding, block_batch, device, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BATCH", block_batch)
    qkv, bounds = batch_of(lengths, device, padding)
    expected = expected_rows(lengths, len(qkv))

    actual = write_guarded(
        lambda out: attention_tiles(qkv, bounds, num_heads=HEADS, out=out),
        (len(qkv) + len(bounds), 3),
        torch.int32,
        device,
    )

    assert actual[: len(expected)].tolist() == expected
    assert actual[len(expected) :].eq(-1).all()


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("lengths", [[33, 0, 66, 1], [3, 0, 2, 17]], ids=str)
def test_attention_has_the_same_bits_with_and_without_tiles(lengths, causal, biased, device):
    qkv, bounds = batch_of(lengths, device, padding=5)
    bias = rand(HEADS, 2 * max(lengths) - 1, device=device) if biased else None
    settings = {"num_heads": HEADS, "causal": causal}
    tiles = attention_tiles(qkv, bounds, bias, **settings)

    searched = attention_varlen(qkv, bounds, bias, scale=0.3, **settings)
    actual = attention_varlen(qkv, bounds, bias, tiles, scale=0.3, **settings)

    used = sum(lengths)
    assert torch.equal(actual[:used], searched[:used])


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]], ids=str)
def test_no_tokens(lengths, device):
    qkv, bounds = batch_of(lengths, device)

    assert attention_tiles(qkv, bounds, num_heads=HEADS).shape == (len(lengths) + 1, 3)


def test_the_reference_covers_each_sequence_once():
    qkv, bounds = batch_of([3, 0, 5], "cpu")

    actual = reference.attention_tiles(qkv, bounds, num_heads=HEADS)

    assert actual.shape == (8 + 4, 3)
    assert actual[:3].tolist() == [[0, 3, 0], [3, 0, 0], [3, 5, 0]]


def test_rejects_a_table_of_another_batch(device):
    qkv, bounds = batch_of([3, 5], device)
    tiles = attention_tiles(qkv[:7], bounds, num_heads=HEADS)

    with pytest.raises(ValueError, match=r"tiles is \[10, 3\] torch.int32, .* must be \[11, 3\]"):
        attention_varlen(qkv, bounds, None, tiles, num_heads=HEADS, scale=0.3)
