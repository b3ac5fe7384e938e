"""The compiled attention of CPUs on long sequences, and in batches, groups, windows and threads."""

from functools import partial

import pytest
import torch

from tests.kernels.float64 import DTYPES, assert_same_bits_alone, bounds_of, check, rand
from varlen_kernels import cpu, reference

# around the numbers of queries and keys that are read together
LENGTHS = [15, 16, 17, 127, 128, 0, 129, 300, 1]
SHAPES = {"equal": (3, 3, 32), "groups": (6, 2, 40), "one-key-head": (4, 1, 8)}
READS = {
    "all": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 20},
    "window-of-one": {"causal": True, "window": 1},
    "wide-window": {"causal": True, "window": 200},
    "both-sides": {"window": 20},
    "both-sides-wide": {"window": 129},
    "capped": {"causal": True, "window": 200, "soft_cap": 0.5},
    "capped-both-sides": {"soft_cap": 5.0},
}


@DTYPES
@pytest.mark.parametrize("heads, kv_heads, dim", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("reads", READS.values(), ids=READS)
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_long_sequences_are_read_as_by_the_reference(heads, kv_heads, dim, reads, has_bias, dtype):
    qkv = rand(sum(LENGTHS), (heads + 2 * kv_heads) * dim, dtype=dtype)
    bias = 3 * rand(heads, 2 * 150 + 1, seed=1) if has_bias else None
    options = {"num_heads": heads, "num_kv_heads": kv_heads, "scale": dim**-0.5, **reads}
    out = torch.full((sum(LENGTHS), heads * dim), torch.nan, dtype=dtype)

    actual = cpu.attention_varlen(qkv, bounds_of(LENGTHS), bias, **options, out=out)

    assert actual is out
    check(out, reference.attention_varlen(qkv, bounds_of(LENGTHS), bias, **options), dtype)


@DTYPES
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(causal, threads, dtype, monkeypatch):
    qkv = rand(sum(LENGTHS), 3 * 12 * 16, dtype=dtype)
    options = {"num_heads": 12, "scale": 0.25, "causal": causal}

    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    assert_same_bits_alone(partial(cpu.attention_varlen, **options), qkv, LENGTHS)


@pytest.mark.parametrize("dim", [5, 16, 48, 64], ids=str)
def test_keys_past_an_odd_last_one_count_nothing(dim):
    # memory of an earlier call may hold anything
    poisoned = torch.full((129, 3 * dim), torch.nan, dtype=torch.bfloat16)
    cpu.attention_varlen(poisoned, bounds_of([129]), num_heads=1, scale=1.0)
    qkv = rand(127, 3 * dim, dtype=torch.bfloat16)

    actual = cpu.attention_varlen(qkv, bounds_of([127]), num_heads=1, scale=0.3)

    expected = reference.attention_varlen(qkv, bounds_of([127]), num_heads=1, scale=0.3)
    check(actual, expected, torch.bfloat16)


def test_a_query_without_keys_gets_zeros_in_bf16():
    qkv = rand(30, 3 * 16, dtype=torch.bfloat16)
    lengths = torch.tensor([3], dtype=torch.int32)

    actual = cpu.attention_varlen(
        qkv, bounds_of([30]), key_lengths=lengths, num_heads=1, scale=0.3, window=4
    )

    assert (actual[6:] == 0).all()
    assert actual[:6].isfinite().all()


@pytest.mark.parametrize("scale", [1e4, 1e-6], ids=str)
@DTYPES
def test_scores_of_any_size_give_weights_that_sum_to_one(scale, dtype):
    qkv = rand(200, 3 * 16, dtype=dtype)
    qkv[:, 32:] = 1.0

    actual = cpu.attention_varlen(qkv, bounds_of([200]), num_heads=1, scale=scale)

    check(actual, torch.ones(200, 16), dtype)


@DTYPES
def test_nan_in_a_query_gives_nan(dtype):
    qkv = rand(5, 3 * 16, dtype=dtype)
    qkv[2, 3] = torch.nan

    actual = cpu.attention_varlen(qkv, bounds_of([5]), num_heads=1, scale=0.3)

    assert actual[2].isnan().all()
    assert actual[[0, 1, 3, 4]].isfinite().all()
