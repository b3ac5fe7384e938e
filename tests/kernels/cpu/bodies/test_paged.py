"""The ops on KV blocks that are compiled for CPUs match the reference."""

import numpy as np
import pytest
import torch

from tests.kernels.float64 import DTYPES, bounds_of, check, rand
from varlen_kernels import cpu, reference
from varlen_kernels.cpu.calls import calls


def paged_inputs(new, contexts, *, heads, kv_heads, dim, block_size, dtype=torch.float32):
    """Return the arguments of attention over random caches; slots past a context hold NaN."""
    tables = [-(-context // block_size) for context in contexts]
    blocks = sum(tables) + 3
    block_ids = torch.randperm(blocks, generator=torch.Generator().manual_seed(0))[: sum(tables)]
    shape = blocks, kv_heads, block_size, dim
    caches = [rand(*shape, dtype=dtype, seed=seed) for seed in (1, 2)]
    for cache in caches:
        unused = torch.ones(blocks, block_size, dtype=torch.bool)
        for context, ids in zip(contexts, block_ids.split(tables), strict=True):
            for place in range(context):
                unused[ids[place // block_size], place % block_size] = False
        cache.transpose(1, 2)[unused] = torch.nan
    qkv = rand(sum(new), (heads + 2 * kv_heads) * dim, dtype=dtype, seed=3)
    lengths = torch.tensor(contexts, dtype=torch.int32)
    return qkv, *caches, bounds_of(new), lengths, block_ids.int(), bounds_of(tables)


STEPS = {
    "one": ([1], [1]),
    "decode": ([1, 1, 1, 1], [70, 1, 64, 130]),
    "mixed": ([1, 1, 5, 40], [33, 257, 5, 90]),
    "prompts": ([7, 1, 16], [7, 20, 48]),
}


@pytest.mark.parametrize("new, contexts", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize(
    "heads, kv_heads, dim, block_size", [(3, 3, 20, 16), (8, 2, 64, 64)], ids=str
)
@pytest.mark.parametrize("window", [0, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_attention_over_blocks_matches_the_reference(
    new, contexts, heads, kv_heads, dim, block_size, window, dtype
):
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "block_size": block_size}
    args = paged_inputs(new, contexts, **shape, dtype=dtype)
    options = {"num_heads": heads, "num_kv_heads": kv_heads, "scale": dim**-0.5, "window": window}
    out = torch.full((sum(new), heads * dim), torch.nan, dtype=dtype)

    actual = cpu.attention_paged(*args, **options, out=out)

    assert actual is out
    check(actual, reference.attention_paged(*args, **options), dtype)


@pytest.mark.parametrize("new, contexts", STEPS.values(), ids=STEPS)
def test_queries_alone_give_the_same_attention_as_with_keys_and_values(new, contexts):
    qkv, *others = paged_inputs(new, contexts, heads=4, kv_heads=2, dim=8, block_size=16)
    options = {"num_heads": 4, "num_kv_heads": 2, "scale": 0.3}

    actual = cpu.attention_paged(qkv[:, :32].contiguous(), *others, **options)

    assert torch.equal(actual, cpu.attention_paged(qkv, *others, **options))


@pytest.mark.parametrize("new", [[0, 2], [1, 0, 2], [1, 2, 0], [1, 0, 1]], ids=str)
def test_a_sequence_without_new_tokens_does_not_change_its_neighbours(new):
    contexts = [count + 20 for count in new]
    args = paged_inputs(new, contexts, heads=4, kv_heads=2, dim=8, block_size=16)
    options = {"num_heads": 4, "num_kv_heads": 2, "scale": 0.3}

    check(cpu.attention_paged(*args, **options), reference.attention_paged(*args, **options))


@pytest.mark.parametrize("new, contexts", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("window, reach", [(0, 0), (17, 9), (0, 300)])
@pytest.mark.parametrize("soft_cap", [0.0, 0.5])
def test_a_bias_is_added_as_by_the_reference(new, contexts, window, reach, soft_cap):
    args = paged_inputs(new, contexts, heads=6, kv_heads=2, dim=8, block_size=16)
    bias = 3 * rand(6, 2 * reach + 1, seed=5)
    options = {"num_heads": 6, "num_kv_heads": 2, "scale": 0.3, "window": window}
    options["soft_cap"] = soft_cap

    actual = cpu.attention_paged(*args, bias, **options)

    check(actual, reference.attention_paged(*args, bias, **options))


@pytest.mark.parametrize("new, contexts", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("soft_cap", [0.01, 3.0, 50.0])
def test_scores_have_the_limit_of_the_reference_in_float64(new, contexts, soft_cap):
    args = paged_inputs(new, contexts, heads=6, kv_heads=2, dim=20, block_size=24)
    options = {"num_heads": 6, "num_kv_heads": 2, "scale": 0.3, "soft_cap": soft_cap}

    actual = cpu.attention_paged(*args, **options)

    args64 = (each.double() if each.is_floating_point() else each for each in args)
    check(actual, reference.attention_paged(*args64, **options))


@pytest.mark.parametrize("dim", [8, 20, 64, 80, 128])
@pytest.mark.parametrize("block_size", [16, 24, 64])
@pytest.mark.parametrize("heads, kv_heads", [(3, 3), (6, 2), (7, 1)], ids=str)
@pytest.mark.parametrize("window, reach", [(0, None), (17, None), (0, 9), (40, 300)], ids=str)
def test_decoding_matches_the_reference_in_float64(dim, block_size, heads, kv_heads, window, reach):
    contexts = [1, block_size - 1, block_size, block_size + 1, 3 * block_size + 5]
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "block_size": block_size}
    args = paged_inputs([1] * len(contexts), contexts, **shape)
    bias = None if reach is None else 3 * rand(heads, 2 * reach + 1, seed=5)
    options = {"num_heads": heads, "num_kv_heads": kv_heads, "scale": 0.3, "window": window}
    # also scores whose weights are near 0 and 1
    args[0].mul_(torch.tensor([1, 1, 5, 1, 5])[:, None])

    actual = cpu.attention_paged(*args, bias, **options)

    args64 = (each.double() if each.is_floating_point() else each for each in args)
    bias64 = None if bias is None else bias.double()
    check(actual, reference.attention_paged(*args64, bias64, **options))


@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 4, 64), (6, 2, 20), (7, 1, 128)], ids=str)
@pytest.mark.parametrize("window", [0, 600])
def test_large_steps_are_shared_by_threads_and_equal_each_sequence_alone(
    heads, kv_heads, dim, window, monkeypatch
):
    monkeypatch.setattr("varlen_kernels.cpu.calls.run_calls._LEAST_SHARED_WORK", 1)
    monkeypatch.setattr(calls, "_LEAST_SHARED_CALL", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    contexts = [700, 3, 1200, 64, 900]
    args = paged_inputs([1] * 5, contexts, heads=heads, kv_heads=kv_heads, dim=dim, block_size=64)
    qkv, keys, values, _, lengths, block_ids, tables = args
    options = {"num_heads": heads, "num_kv_heads": kv_heads, "scale": 0.125, "window": window}

    together = cpu.attention_paged(*args, **options)

    for row in range(5):
        table = block_ids[tables[row] : tables[row + 1]]
        alone = cpu.attention_paged(
            qkv[row : row + 1],
            keys,
            values,
            bounds_of([1]),
            lengths[row : row + 1],
            table,
            bounds_of([len(table)]),
            **options,
        )
        assert torch.equal(alone[0], together[row])


def test_a_step_has_the_same_bits_wherever_its_memory_lies():
    """Compiled code chose between vectors and single numbers by addresses, and the two divided differently."""
    args = paged_inputs([1], [70], heads=4, kv_heads=4, dim=64, block_size=64)
    options = {"num_heads": 4, "num_kv_heads": 4, "scale": 0.125}
    expected = cpu.attention_paged(*args, **options)
    sizes, kept = np.random.default_rng(0).integers(1, 600, 1000), []

    for size in sizes:
        # other allocations between the allocations of steps
        kept = [*kept[-40:], np.empty(size, np.uint8)]
        assert torch.equal(cpu.attention_paged(*args, **options), expected)


@pytest.mark.parametrize("heads", [3, 0], ids=["", "keys-and-values-alone"])
@pytest.mark.parametrize("dim", [8, 20, 64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_tokens_are_appended_as_by_the_reference_and_nothing_else_changes(dtype, dim, heads):
    width = (heads + 2 * 2) * dim
    qkv, slots = rand(5, width, dtype=dtype), torch.tensor([70, 3, -1, 0, 95])
    caches = [torch.full((6, 2, 16, dim), torch.nan, dtype=dtype) for _ in range(4)]

    cpu.append_kv(qkv, slots, *caches[:2], num_heads=heads, num_kv_heads=2)
    reference.append_kv(qkv, slots, *caches[2:], num_heads=heads, num_kv_heads=2)

    for actual, expected in zip(caches[:2], caches[2:], strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_without_positions_a_result_is_ignored():
    qkv, slots = rand(5, 6 * 8), torch.arange(5)
    caches = [torch.zeros(6, 2, 16, 8) for _ in range(2)]
    out = torch.empty_like(qkv)

    assert cpu.append_kv(qkv, slots, *caches, num_heads=2, num_kv_heads=2, out=out) is qkv
    named = dict(zip(("slots", "key_cache", "value_cache"), (slots, *caches), strict=True))
    assert cpu.append_kv(qkv=qkv, **named, num_heads=2, num_kv_heads=2) is qkv


def rotated_inputs(tokens, heads, kv_heads, dim, dtype, *, is_normed):
    """Return the arguments of an append with rotary positions; caches hold NaN."""
    qkv = rand(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(5))[:tokens]
    slots[tokens // 2] = -1
    caches = [torch.full((4, kv_heads, 16, dim), torch.nan, dtype=dtype) for _ in range(2)]
    positions = torch.arange(tokens, dtype=torch.int32) * 3
    weights = [rand(dim, dtype=dtype, seed=seed) if is_normed else None for seed in (1, 2)]
    return qkv, slots, *caches, positions, rand(3 * tokens, dim, seed=4), *weights


APPENDED_HEADS = pytest.mark.parametrize(
    "heads, kv_heads, dim", [(1, 1, 2), (3, 3, 20), (8, 2, 64), (7, 1, 80), (4, 2, 128)], ids=str
)


@DTYPES
@APPENDED_HEADS
def test_an_append_with_rotary_positions_has_the_bits_of_both_ops(heads, kv_heads, dim, dtype):
    qkv, slots, *caches, positions, cos_sin, _, _ = rotated_inputs(
        9, heads, kv_heads, dim, dtype, is_normed=False
    )
    copies, settings = (
        [cache.clone() for cache in caches],
        {"num_heads": heads, "num_kv_heads": kv_heads},
    )
    rotated = cpu.rotary(qkv, positions, cos_sin, **settings)
    cpu.append_kv(rotated, slots, *copies, **settings)
    out = torch.full_like(qkv, torch.nan)

    assert cpu.append_kv(qkv, slots, *caches, positions, cos_sin, **settings, out=out) is out

    assert torch.equal(out[:, : heads * dim], rotated[:, : heads * dim])
    for actual, expected in zip(caches, copies, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@DTYPES
@APPENDED_HEADS
def test_an_append_with_norms_matches_the_reference_in_float64(heads, kv_heads, dim, dtype):
    args = rotated_inputs(9, heads, kv_heads, dim, dtype, is_normed=True)
    settings = {"num_heads": heads, "num_kv_heads": kv_heads, "eps": 1e-3}
    args64 = [each.double() if each.is_floating_point() else each.clone() for each in args]
    expected = reference.append_kv(*args64, **settings)[:, : heads * dim]
    qkv = args[0]

    # in place, as a program runs it
    assert cpu.append_kv(*args, **settings, out=qkv) is qkv

    check(qkv[:, : heads * dim], expected, dtype)
    for actual, right in zip(args[2:4], args64[2:4], strict=True):
        assert torch.equal(actual.isnan(), right.isnan())
        check(actual.nan_to_num(), right.nan_to_num(), dtype)


def test_an_append_shared_by_threads_has_the_same_bits(monkeypatch):
    args, same = (rotated_inputs(40, 4, 2, 64, torch.float32, is_normed=True) for _ in range(2))
    settings = {"num_heads": 4, "num_kv_heads": 2, "eps": 1e-3}
    expected = cpu.append_kv(*args, **settings)[:, :256]
    monkeypatch.setattr("varlen_kernels.cpu.calls.run_calls._LEAST_SHARED_WORK", 1)
    monkeypatch.setattr(calls, "_LEAST_SHARED_CALL", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)

    assert torch.equal(cpu.append_kv(*same, **settings)[:, :256], expected)
    for actual, right in zip(same[2:4], args[2:4], strict=True):
        torch.testing.assert_close(actual, right, rtol=0, atol=0, equal_nan=True)


@DTYPES
def test_blocks_are_copied_in_all_layers_and_nothing_else_changes(dtype):
    memory = rand(4, 6, 2, 4, 6, dtype=dtype)
    expected = memory.clone()
    expected[:, [5, 3, 1]] = memory[:, [0, 0, 2]]

    cpu.copy_blocks(memory, torch.tensor([(0, 5), (0, 3), (4, 4), (2, 1)], dtype=torch.int32))

    assert torch.equal(memory, expected)


def test_caches_that_are_not_contiguous_are_written_too():
    qkv, slots = rand(5, 3 * 2 * 8), torch.tensor([40, 3, -1, 0, 95])
    caches = [torch.zeros(6, 16, 2, 8).transpose(1, 2) for _ in range(4)]

    for ops, pair in ((cpu, caches[:2]), (reference, caches[2:])):
        ops.append_kv(qkv, slots, *pair, num_heads=2, num_kv_heads=2)

    for actual, expected in zip(caches[:2], caches[2:], strict=True):
        assert expected.any()
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    "memory, copies, message",
    [
        (torch.zeros(6, 2, 3, 5), torch.zeros(1, 2), r"memory is \[6, 2, 3, 5\]"),
        (torch.zeros(6, 2, 3, 5, 1).transpose(0, 1), torch.zeros(1, 2), "it must be contiguous"),
        (torch.zeros(6, 2, 3, 5, 1).bfloat16(), torch.zeros(1, 2), "multiples of 4 bytes"),
        (torch.zeros(6, 2, 3, 5, 1), torch.zeros(2).int(), r"copies is \[2\] torch.int32"),
        (
            torch.zeros(6, 2, 3, 5, 1),
            torch.zeros(1, 2).long(),
            r"must be \[copies, 2\] torch.int32",
        ),
    ],
    ids=["memory", "strides", "bytes", "copies", "dtype"],
)
def test_what_is_no_memory_of_blocks_or_no_copy_is_refused(memory, copies, message):
    for ops in (cpu, reference):
        with pytest.raises(ValueError, match=message):
            ops.copy_blocks(memory, copies)
