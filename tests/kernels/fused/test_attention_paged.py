"""Paged attention on a GPU or in the interpreter, against the reference in fp64."""

from itertools import accumulate

import pytest
import torch

from varlen_kernels import attention_decode, attention_paged, kv_blocks, reference
from varlen_kernels.attention_paged import attention_paged as attend
from varlen_kernels.tuning import forced_launch

from .compare import DTYPES, assert_close, rand, spread
from .guards import write_guarded

# (new tokens, context) of each sequence
DECODE = [(1, 1), (1, 33), (1, 64), (1, 70)]
CHUNKS = [(5, 5), (1, 40), (20, 66), (0, 0), (3, 19)]
STEPS = pytest.mark.parametrize("step", [DECODE, CHUNKS], ids=["decode", "chunks"])
HEADS = {"num_heads": 4, "num_kv_heads": 2}


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def paged_inputs(step, head_dim, dtype, device, heads=HEADS, block_size=16, cache_dtype=None):
    """Return the arguments for a step, with NaN in every place that no sequence has written."""
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
    inputs = paged_inputs(step, head_dim, dtype, device, heads, **changes)
    shape = (len(inputs["qkv"]), heads["num_heads"] * head_dim)

    actual = write_guarded(
        lambda out: attend(**inputs, **settings, out=out), shape, dtype, device, gap
    )

    assert_close(actual, reference64(inputs, **settings), dtype, factor)


@pytest.fixture
def short_splits(monkeypatch):
    """Make splits short enough for a small test."""
    monkeypatch.setattr(attention_decode, "_MIN_SPLIT", type(attention_decode._MIN_SPLIT)(16))


@DTYPES
@STEPS
def test_matches_the_reference(step, dtype, device):
    check_against_reference(step, 64, dtype, device)


@STEPS
@pytest.mark.parametrize("head_dim", [1, 5, 16, 80, 128, 256])
def test_accepts_any_head_dim(head_dim, step, device):
    check_against_reference(step[:3], head_dim, torch.float32, device, factor=3.0)


@STEPS
@pytest.mark.parametrize("block_size", [16, 48, 128])
def test_accepts_any_multiple_of_16_as_block_size(block_size, step, device):
    check_against_reference(step, 16, torch.float16, device, block_size=block_size)
