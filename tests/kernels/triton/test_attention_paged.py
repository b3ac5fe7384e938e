"""Paged attention on a GPU or in the interpreter, against the reference in fp64."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from triton.runtime.interpreter import interpreter_builder

from varlen_kernels import reference
from varlen_kernels.reference.paged import FP8
from varlen_kernels.triton import attention_paged as paged
from varlen_kernels.triton import attention_tiles, splits
from varlen_kernels.triton.attention_paged import attention_paged as attend
from varlen_kernels.triton.splits import Splits, choose_splits
from varlen_kernels.tuning import forced_launch

from .compare import DTYPES, assert_close, rand, spread
from .guards import write_guarded

# (new tokens, context) of each sequence
DECODE = [(1, 70), (1, 33)]
CHUNKS = [(20, 66), (1, 40), (0, 0)]
STEPS = pytest.mark.parametrize("step", [DECODE, CHUNKS], ids=["decode", "chunks"])
HEADS = {"num_heads": 2, "num_kv_heads": 1}


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def paged_inputs(step, head_dim, dtype, device, heads=HEADS, block_size=16, cache_dtype=None):
    """Return the arguments for a step, with NaN in all places without a key."""
    new, contexts = [n for n, _ in step], [length for _, length in step]
    counts = [-(-length // block_size) for length in contexts]
    queries, keys = heads["num_heads"], heads["num_kv_heads"]
    blocks = sum(counts) + 2
    generator = torch.Generator().manual_seed(1)
    block_ids = torch.randperm(blocks, generator=generator)[: sum(counts)]
    caches = []
    for seed in (2, 3):
        cache = torch.full((blocks, keys, block_size, head_dim), torch.nan)
        filled = rand(blocks, keys, block_size, head_dim, seed=seed)
        table = iter(block_ids.tolist())
        for length in contexts:
            for first in range(0, length, block_size):
                block, count = next(table), min(block_size, length - first)
                cache[block, :, :count] = filled[block, :, :count]
        caches.append(cache.to(device, cache_dtype or dtype))
    qkv = rand(sum(new), (queries + 2 * keys) * head_dim, dtype=dtype, device=device)
    # only the queries are read
    qkv[:, queries * head_dim :] = torch.nan
    return {
        "qkv": qkv,
        "key_cache": caches[0],
        "value_cache": caches[1],
        "cu_seqlens": ints([0, *accumulate(new)], device),
        "context_lens": ints(contexts, device),
        "block_ids": ints(block_ids.tolist(), device),
        "cu_blocks": ints([0, *accumulate(counts)], device),
    }


def reference64(inputs, **settings):
    wide = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    width = settings["num_heads"] * inputs["key_cache"].shape[3]
    out = inputs["qkv"].new_full((len(inputs["qkv"]), width), torch.nan, dtype=torch.float64)
    return reference.attention_paged(**wide, **settings, out=out)


def check_against_reference(step, head_dim, dtype, device, factor=2.0, gap=0, **changes):
    heads = {**HEADS, **{name: changes.pop(name) for name in HEADS if name in changes}}
    settings = {**heads, "scale": head_dim**-0.5, "window": changes.pop("window", 0)}
    settings["soft_cap"] = changes.pop("soft_cap", 0.0)
    inputs = paged_inputs(step, head_dim, dtype, device, heads, **changes)
    shape = (len(inputs["qkv"]), heads["num_heads"] * head_dim)

    actual = write_guarded(
        lambda out: attend(**inputs, **settings, out=out), shape, dtype, device, gap
    )

    assert_close(actual, reference64(inputs, **settings), dtype, factor)


@pytest.fixture(autouse=True)
def small_launches(monkeypatch, device):
    """Run few programs, and short splits, so that small tests have several."""

    def short_splits(programs, wave, longest):
        chosen = choose_splits(programs, 4 if device.type == "cpu" else wave, longest)
        return replace(chosen, min_keys=32)

    monkeypatch.setattr(paged, "choose_splits", short_splits)


@DTYPES
@STEPS
def test_matches_the_reference(step, dtype, device):
    check_against_reference(step, 64, dtype, device)


@STEPS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_reads_keys_and_values_of_fp8(step, dtype, device):
    check_against_reference(step, 16, dtype, device, cache_dtype=FP8)


@pytest.mark.full
@STEPS
@pytest.mark.parametrize("head_dim", [5, 80, 256])
def test_accepts_any_head_dim(head_dim, step, device):
    check_against_reference(step, head_dim, torch.float32, device, factor=3.0)


@STEPS
# blocks of 64 hold all keys of a tile, and blocks of 48 do not
@pytest.mark.parametrize("block_size", [48, 64])
def test_accepts_any_multiple_of_16_as_block_size(block_size, step, device):
    check_against_reference(step, 16, torch.float16, device, block_size=block_size)


@STEPS
@pytest.mark.parametrize("heads, key_heads", [(3, 3), (18, 1)], ids=str)
def test_query_heads_share_key_heads(heads, key_heads, step, device):
    settings = {"num_heads": heads, "num_kv_heads": key_heads}

    check_against_reference(step, 16, torch.float16, device, **settings)


@STEPS
@pytest.mark.parametrize("window", [0, 33])
def test_scores_have_a_limit(window, step, device):
    check_against_reference(step, 16, torch.float32, device, window=window, soft_cap=0.25)


@STEPS
@pytest.mark.parametrize("window", [1, 33, 1000])
def test_a_window_hides_earlier_tokens(window, step, device):
    check_against_reference(step, 16, torch.float32, device, window=window)


@STEPS
@pytest.mark.parametrize("window, heads", [(0, 3), (33, 18)])
def test_adds_a_bias_by_distance(window, heads, step, device):
    settings = {"num_heads": heads, "num_kv_heads": heads // 3, "scale": 0.3, "window": window}
    inputs = paged_inputs(step, 16, torch.float32, device, settings)
    # keys further away than 20 tokens have the bias of 20
    inputs["bias"] = 2 * rand(heads, 41, device=device)

    assert_close(attend(**inputs, **settings), reference64(inputs, **settings), torch.float32, 2.0)


@pytest.mark.parametrize("new, context", [(33, 33), (17, 65), (1, 31)])
def test_a_chunk_may_begin_and_end_anywhere_in_a_block(new, context, device):
    # a second token keeps the step from being a decode step
    check_against_reference([(new, context), (2, 2)], 16, torch.float32, device)


@pytest.mark.parametrize("context", [1, 64, 65, 100])
@pytest.mark.parametrize("splits", [1, 3])
def test_splits_may_be_full_partial_or_empty(splits, context, device, monkeypatch):
    monkeypatch.setattr(paged, "choose_splits", lambda *_: Splits(splits, 32))

    check_against_reference([(1, context)], 16, torch.float32, device)


@pytest.mark.parametrize(
    "heads, key_heads, head_dim", [(3, 1, 80), (20, 1, 16), (2, 2, 256)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_last_program_merges_more_splits_than_it_reads_at_once(
    heads, key_heads, head_dim, dtype, device, monkeypatch
):
    monkeypatch.setattr(paged, "choose_splits", lambda *_: Splits(9, 1))
    settings = {"num_heads": heads, "num_kv_heads": key_heads}

    # nine splits, two, and one, which nothing merges
    step = [(1, 300), (1, 64), (1, 1)]
    check_against_reference(step, head_dim, dtype, device, factor=3.0, **settings)


def test_counters_of_arrivals_are_0_after_each_launch(device, monkeypatch):
    monkeypatch.setattr(paged, "choose_splits", lambda *_: Splits(4, 1))
    inputs = paged_inputs([(1, 300), (3, 200), (1, 33)], 16, torch.float32, device)
    settings = {**HEADS, "scale": 0.25}

    found = [attend(**inputs, **settings) for _ in range(3)]

    (counters,) = splits._arrivals[inputs["qkv"].device, 0]
    assert not counters.any()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_the_result_does_not_depend_on_the_order_of_programs(device, monkeypatch):
    if device.type == "cuda":
        pytest.skip("a GPU has an order of its own")
    monkeypatch.setattr(paged, "choose_splits", lambda *_: Splits(4, 1))
    inputs = paged_inputs([(1, 300), (1, 70), (1, 20)], 16, torch.float32, device)
    settings = {**HEADS, "scale": 0.25}
    expected = attend(**inputs, **settings)

    forward = interpreter_builder.set_grid_idx

    def backward(*place):
        last = interpreter_builder.grid_dim
        forward(*(size - 1 - index for size, index in zip(last, place, strict=True)))

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", backward)

    assert torch.equal(attend(**inputs, **settings), expected)


def test_more_sequences_than_before_have_more_counters(device, monkeypatch):
    monkeypatch.setattr(paged, "choose_splits", lambda *_: Splits(2, 1))
    monkeypatch.setattr(splits, "_FEWEST_ARRIVALS", 1)
    monkeypatch.setattr(splits, "_arrivals", {})

    for count in (1, 3, 2):
        check_against_reference([(1, 70)] * count, 16, torch.float32, device)

    (kept,) = splits._arrivals.values()
    # the first one may be in a graph
    assert [len(counters) for counters in kept] == [1, 4]


@STEPS
def test_caches_may_have_another_dtype(step, device):
    inputs = paged_inputs(step, 16, torch.float32, device, cache_dtype=torch.float16)
    inputs["qkv"] = inputs["qkv"].half().float()
    settings = {**HEADS, "scale": 0.25}

    actual = attend(**inputs, **settings)

    assert actual.dtype == torch.float32
    assert_close(actual.half(), reference64(inputs, **settings), torch.float16, 2.0)


@STEPS
def test_accepts_strided_rows(step, device):
    inputs = paged_inputs(step, 16, torch.float16, device)
    settings = {**HEADS, "scale": 0.25}
    expected = reference64(inputs, **settings)
    inputs["qkv"] = spread(inputs["qkv"])

    actual = write_guarded(
        lambda out: attend(**inputs, **settings, out=out),
        tuple(expected.shape),
        torch.float16,
        device,
        gap=16,
    )

    assert_close(actual, expected, torch.float16, 2.0)


def test_sequences_may_share_blocks(device):
    inputs = paged_inputs([(1, 40), (3, 40)], 16, torch.float32, device)
    # the first two of three blocks
    inputs["block_ids"][3:5] = inputs["block_ids"][:2]
    settings = {**HEADS, "scale": 0.25}

    assert_close(attend(**inputs, **settings), reference64(inputs, **settings), torch.float32)


@pytest.mark.parametrize("step", [[(1, 20), (1, 33)], [(3, 20), (1, 33)]], ids=["decode", "chunks"])
def test_padding_of_a_captured_batch_is_neither_read_nor_written(step, device):
    new = sum(count for count, _ in step)
    inputs = paged_inputs([*step, (0, 0), (0, 0)], 16, torch.float32, device)
    padding = torch.full((2, inputs["qkv"].shape[1]), torch.nan, device=device)
    inputs["qkv"] = torch.cat([inputs["qkv"], padding])
    # no block has this id
    inputs["block_ids"] = torch.cat([inputs["block_ids"], ints([10**6] * 3, device)])
    settings = {**HEADS, "scale": 0.25}

    actual = write_guarded(
        lambda out: attend(**inputs, **settings, out=out), (new + 2, 32), torch.float32, device
    )

    assert_close(actual[:new], reference64(inputs, **settings)[:new], torch.float32)
    assert actual[new:].isnan().all()


@pytest.mark.parametrize("step", [[(3, 9), (0, 0), (1, 40), (0, 0)]], ids=str)
def test_chunks_among_empty_sequences_are_right_if_tokens_are_as_many_as_sequences(step, device):
    check_against_reference(step, 16, torch.float32, device)


def test_finds_sequences_past_the_first_read_of_cu_seqlens(device, monkeypatch):
    monkeypatch.setattr(attention_tiles, "BLOCK_BATCH", 4)
    lengths = [(1, 3), (0, 0), (1, 17), (0, 0), (0, 0), (1, 9)]

    check_against_reference(lengths, 16, torch.float32, device)
    check_against_reference([*lengths, (9, 20)], 16, torch.float32, device)


def test_other_sequences_change_no_bit(device):
    inputs = paged_inputs([(1, 40), (1, 50), (1, 20)], 16, torch.float16, device)
    settings = {**HEADS, "scale": 0.25}
    before = attend(**inputs, **settings)
    for cache in (inputs["key_cache"], inputs["value_cache"]):
        cache[inputs["block_ids"][3:7].long()] = torch.nan

    after = attend(**inputs, **settings)

    assert torch.equal(after[[0, 2]], before[[0, 2]])


@STEPS
def test_large_scores_do_not_overflow(step, device):
    inputs = paged_inputs(step, 16, torch.float32, device)
    inputs["key_cache"] *= 1000
    settings = {**HEADS, "scale": 1.0}

    # an error of 2 ** -24 in a score of thousands is one of 1e-4 in its weight
    assert_close(
        attend(**inputs, **settings), reference64(inputs, **settings), torch.float32, factor=300
    )


@pytest.mark.full
@pytest.mark.parametrize("mean", [1, 16, 64, 256])
@pytest.mark.parametrize("window", [0, 20])
def test_every_candidate_launch_of_tiles_matches_the_reference(window, mean, device):
    inputs = paged_inputs([(20, 70), (9, 9)], 64, torch.float16, device)
    settings = {**HEADS, "scale": 0.2, "window": window}
    expected = reference64(inputs, **settings)
    key = (64, torch.float16, window > 0)

    launches = attention_tiles.paged_launches(*key, mean)
    # in the interpreter a launch takes a second
    for launch in launches if device.type == "cuda" else launches[:1]:
        with forced_launch("attention_paged", (*key, 16), launch):
            actual = attend(**inputs, **settings)
        assert_close(actual, expected, torch.float16)


@pytest.mark.full
def test_every_candidate_launch_of_splits_matches_the_reference(device):
    inputs = paged_inputs([(1, 70), (1, 9)], 64, torch.float16, device)
    settings = {**HEADS, "scale": 0.2}
    expected = reference64(inputs, **settings)
    key = (64, 2, torch.float16)

    launches = paged.candidate_launches(*key)
    for launch in launches if device.type == "cuda" else launches[:1]:
        with forced_launch("attention_decode", key, launch):
            actual = attend(**inputs, **settings)
        assert_close(actual, expected, torch.float16)


@STEPS
def test_accepts_queries_alone(step, device):
    inputs = paged_inputs(step, 16, torch.float16, device)
    settings = {**HEADS, "scale": 0.25}
    expected = attend(**inputs, **settings)
    inputs["qkv"] = inputs["qkv"][:, :32].contiguous()

    assert torch.equal(attend(**inputs, **settings), expected)


@pytest.mark.parametrize("step", [[], [(0, 0)], [(0, 5), (0, 0)]], ids=str)
def test_no_tokens(step, device):
    inputs = paged_inputs(step, 16, torch.float32, device)

    assert attend(**inputs, **HEADS, scale=0.3).shape == (0, 32)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"qkv": torch.zeros(3, 127)},
            "rows of 127; allowed: multiples of 4 . 2 · 2 heads, or 64 for only queries",
        ),
        ({"num_kv_heads": 3}, "num_kv_heads is 3; allowed: divisors of 4 heads"),
        ({"scale": 0.0}, "scale is 0.0; allowed: above 0"),
        ({"soft_cap": -1.0}, "soft_cap is -1.0; allowed: 0"),
        ({"window": -1}, "window is -1; allowed: 0"),
        ({"bias": torch.zeros(4, 8)}, r"bias is \[4, 8\]; it must be \[4, an odd number\]"),
        (
            {"key_cache": torch.zeros(5, 2, 16, 8)},
            r"key_cache is \[5, 2, 16, 8\]; it must be \[blocks, 2, block_size, 16\]",
        ),
        (
            {"value_cache": torch.zeros(4, 2, 16, 16)},
            r"value_cache is \[4, 2, 16, 16\] .*; key_cache",
        ),
        (
            {"value_cache": torch.zeros(5, 2, 16, 16).half()},
            "value_cache is .* torch.float16; key_",
        ),
        (
            {"key_cache": torch.zeros(5, 2, 24, 16), "value_cache": torch.zeros(5, 2, 24, 16)},
            "block_size is 24; allowed: multiples of 16",
        ),
        ({"key_cache": torch.zeros(5, 16, 2, 16).transpose(1, 2)}, "key_cache has strides"),
        ({"cu_seqlens": torch.tensor([0, 3])}, r"cu_seqlens is \[2\] torch.int64"),
        ({"context_lens": torch.zeros(3).int()}, r"context_lens has shape \[3\]"),
        ({"cu_blocks": torch.zeros(1).int()}, r"cu_blocks has shape \[1\]"),
        ({"block_ids": torch.zeros(5)}, "block_ids is torch.float32; allowed: torch.int32"),
        ({"out": torch.zeros(3, 63)}, r"out is \[3, 63\] .* must be \[3, 64\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_rejects_invalid_arguments(change, message, device):
    heads = {"num_heads": 4, "num_kv_heads": 2}
    arguments = {
        "qkv": torch.zeros(3, 128),
        "key_cache": torch.zeros(5, 2, 16, 16),
        "value_cache": torch.zeros(5, 2, 16, 16),
        "cu_seqlens": torch.tensor([0, 3], dtype=torch.int32),
        "context_lens": torch.tensor([9], dtype=torch.int32),
        "block_ids": torch.tensor([2], dtype=torch.int32),
        "cu_blocks": torch.tensor([0, 1], dtype=torch.int32),
        "scale": 0.25,
        **heads,
    }
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in (arguments | change).items()
    }

    with pytest.raises(ValueError, match=message):
        attend(**arguments)
