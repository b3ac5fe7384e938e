"""The table of tiles of paged attention, on a GPU or interpreted."""

from itertools import accumulate, pairwise

import pytest
import torch

from varlen_kernels import reference
from varlen_kernels.triton import attention_paged as paged
from varlen_kernels.triton import attention_tiles as module
from varlen_kernels.triton.attention_paged import attention_paged
from varlen_kernels.triton.attention_tiles import paged_launch, paged_tiles
from varlen_kernels.triton.splits import Splits

from .compare import rand
from .guards import write_guarded
from .test_attention_paged import CHUNKS, DECODE, HEADS, paged_inputs

# Arguments of `attention_paged` that the table depends on.
NAMES = ("qkv", "key_cache", "cu_seqlens", "context_lens", "cu_blocks")


def table_inputs(step, device, padding=0):
    inputs = paged_inputs(step, 16, torch.float16, device)
    table = {name: inputs[name] for name in NAMES}
    table["qkv"] = rand(len(table["qkv"]) + padding, 64, dtype=torch.float16, device=device)
    return inputs, table


def expected_rows(inputs):
    """Return the rows of the table in plain Python, without the rows of spare tiles."""
    tokens, sequences = len(inputs["qkv"]), len(inputs["context_lens"])
    bounds, contexts, blocks = (
        inputs[name].tolist() for name in ("cu_seqlens", "context_lens", "cu_blocks")
    )
    new = [end - begin for begin, end in pairwise(bounds)]
    of_sequence = [
        [bounds[i], new[i], 0, contexts[i] - new[i], blocks[i]] for i in range(sequences)
    ]

    def rows_of(step):
        for row in of_sequence:
            for query in range(0, row[1], step):
                yield [*row[:2], query, *row[3:]]

    if tokens <= sequences:
        return list(rows_of(1))
    launch = paged_launch(16, torch.float16, window=0, rows=2 * tokens, sequences=sequences)
    return [*rows_of(launch["BLOCK_M"] // 2), *(row for row in of_sequence if row[1])]


@pytest.mark.parametrize("block_batch", [2, 256])
@pytest.mark.parametrize(
    "step, padding",
    [
        (DECODE, 0),
        (CHUNKS, 0),
        ([(1, 5)], 0),
        ([(70, 90)], 0),
        ([(0, 0), (1, 17), (0, 0), (1, 33), (0, 3)], 2),
        ([(9, 9), (1, 40), (0, 7), (33, 65), (1, 1)], 7),
        # as many sequences as tokens, but not a token each
        ([(3, 20), (0, 0), (1, 16), (0, 0)], 0),
    ],
    ids=str,
)
def test_rows_are_those_of_every_tile(step, padding, block_batch, device, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BATCH", block_batch)
    _, inputs = table_inputs(step, device, padding)

    actual = write_guarded(
        lambda out: paged_tiles(**inputs, **HEADS, out=out),
        (len(inputs["qkv"]) + 2 * (len(step) + 1), 5),
        torch.int32,
        device,
    )

    written = actual[actual[:, 1] >= 0].tolist()
    # rows without queries begin at or after the end of their sequence
    assert [row for row in written if row[2] < row[1]] == expected_rows(inputs)


@pytest.mark.full
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("step", [DECODE, [*CHUNKS, (1, 90)]], ids=["decode", "chunks"])
def test_attention_has_the_same_bits_with_a_table_made_before(step, window, device):
    inputs, table = table_inputs(step, device)
    tiles = paged_tiles(**table, **HEADS, window=window)
    settings = {**HEADS, "scale": 0.3, "window": window}

    expected = attention_paged(**inputs, **settings)

    assert torch.equal(attention_paged(**inputs, tiles=tiles, **settings), expected)


def test_a_long_context_beside_a_chunk_is_read_in_splits(device, monkeypatch):
    monkeypatch.setattr(paged, "choose_splits", lambda *_: Splits(4, 32))
    inputs, _ = table_inputs([(5, 9), (1, 100)], device)
    settings = {**HEADS, "scale": 0.3}
    made, allocate = [], torch.empty

    def empty(size, *args, **kwargs):
        made.append(size)
        return allocate(size, *args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)

    actual = attention_paged(**inputs, **settings)

    # contexts and sums of 4 splits, for 2 sequences with 2 heads of 16
    assert made == [2 * 2 * 4 * 16, 2 * 2 * 4 * 2]
    expected = reference.attention_paged(**inputs, **settings)
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("step", [[], [(0, 0)], [(0, 5), (0, 0)]], ids=str)
def test_no_tokens(step, device):
    _, inputs = table_inputs(step, device)

    assert paged_tiles(**inputs, **HEADS).shape == (2 * (len(step) + 1), 5)


def test_the_reference_covers_each_sequence_once():
    step = [(3, 20), (0, 4), (1, 33)]
    _, inputs = table_inputs(step, "cpu")

    actual = reference.paged_tiles(**inputs, **HEADS)

    starts = list(accumulate((2, 1, 3), initial=0))[:-1]
    assert actual.shape == (4 + 8, 5)
    assert actual[:3].tolist() == [
        [0, 3, 0, 17, starts[0]],
        [3, 0, 0, 4, starts[1]],
        [3, 1, 0, 32, starts[2]],
    ]


def test_rejects_a_table_of_another_step(device):
    inputs, table = table_inputs(CHUNKS, device)
    tiles = paged_tiles(**table, **HEADS)[1:]

    with pytest.raises(ValueError, match=r"tiles is \[28, 5\] torch.int32, .* must be \[29, 5\]"):
        attention_paged(**inputs, tiles=tiles, **HEADS, scale=0.3)
