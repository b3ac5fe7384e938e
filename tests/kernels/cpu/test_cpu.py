"""The ops that CPUs run in another way than the reference give its results."""

import pkgutil
from inspect import signature

import numpy as np
import pytest
import torch

from tests.kernels.float64 import DTYPES, bounds_of, check, rand
from tests.kernels.ops import OPS
from varlen_kernels import cpu, reference
from varlen_kernels.cpu import paged as paged_cpu
from varlen_kernels.cpu import widened
from varlen_kernels.cpu.packed import can_pack, pack_weight
from varlen_kernels.reference.linear_int8 import (
    linear_int8,
    linear_int8_activate,
    linear_int8_add_layer_norm,
)

# The reference of each op: some have another name there, or are not among its ops.
REFERENCES = {
    **OPS,
    "linear_packed": reference.linear,
    "linear_widened": reference.linear,
    "linear_int8": linear_int8,
    "linear_int8_packed": linear_int8,
    "linear_int8_panels": linear_int8,
    "linear_int8_panels_activate": linear_int8_activate,
    "linear_int8_panels_add_layer_norm": linear_int8_add_layer_norm,
}


@pytest.mark.parametrize("name", REFERENCES)
def test_an_op_has_the_signature_of_its_reference(name):
    assert signature(getattr(cpu, name)) == signature(REFERENCES[name])


def test_no_file_has_the_name_of_an_op():
    """The import of `cpu/linear_int8.py` replaced the op of that name by the module."""
    files = {module.name for module in pkgutil.iter_modules(cpu.__path__)}

    assert not files & set(REFERENCES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows, hidden, features", [(0, 8, 5), (1, 48, 96), (33, 100, 7)], ids=str)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
def test_a_packed_weight_multiplies_as_its_original(rows, hidden, features, has_bias, dtype):
    if not can_pack(dtype):
        pytest.skip("oneDNN does not multiply bf16 on this CPU")
    x, weight = rand(rows, hidden, dtype=dtype), rand(hidden, features, dtype=dtype, seed=1)
    bias = rand(features, dtype=dtype, seed=2) if has_bias else None
    out = torch.full((rows, features), torch.nan, dtype=dtype)

    actual = cpu.linear_packed(x, pack_weight(weight), bias, out=out)

    assert actual is out
    check(actual, reference.linear(x, weight, bias), dtype)


@pytest.mark.parametrize("tile", [1, 300, 1 << 20])
@pytest.mark.parametrize("rows, hidden, features", [(0, 8, 5), (1, 48, 96), (33, 100, 7)], ids=str)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
def test_a_widened_product_is_the_exact_one_rounded_to_bf16(
    rows, hidden, features, has_bias, tile, monkeypatch
):
    monkeypatch.setattr(widened, "_TILE_ELEMENTS", tile)
    dtype = torch.bfloat16
    x, weight = rand(rows, hidden, dtype=dtype), rand(hidden, features, dtype=dtype, seed=1)
    bias = rand(features, dtype=dtype, seed=2) if has_bias else None
    out = torch.full((rows, features), torch.nan, dtype=dtype)

    actual = cpu.linear_widened(x, weight, bias, out=out)

    assert actual is out
    assert torch.equal(actual, cpu.linear_widened(x, weight, bias))
    operands = [each if each is None else each.double() for each in (x, weight, bias)]
    exact = reference.linear(*operands)
    # sums in fp32, then one rounding to the 8 bits of bf16
    sizes = reference.linear(*(each if each is None else each.abs() for each in operands))
    bound = 2**-8 * exact.abs() + (hidden + 1) * 2**-24 * sizes
    assert ((actual.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("can_pack", [True, False])
def test_products_of_bf16_are_widened_only_where_onednn_does_not_multiply_it(can_pack, monkeypatch):
    called = []
    monkeypatch.setattr(cpu, "can_pack", lambda _: can_pack)
    monkeypatch.setattr(cpu, "linear_widened", lambda *_, **__: called.append("widened"))

    for dtype in (torch.float32, torch.bfloat16):
        cpu.linear(rand(2, 3, dtype=dtype), rand(3, 4, dtype=dtype))

    assert called == ([] if can_pack else ["widened"])


def paged_inputs(new, contexts, *, heads, kv_heads, dim, block_size, dtype=torch.float32):
    """Return the arguments of attention over random caches; slots past a context hold NaN."""
    tables = [-(-context // block_size) for context in contexts]
    blocks = sum(tables) + 3
    block_ids = torch.randperm(blocks, generator=torch.Generator().manual_seed(0))[: sum(tables)]
    caches = [rand(blocks, kv_heads, block_size, dim, seed=seed) for seed in (1, 2)]
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_packed_product_of_no_rows_has_the_dtype_of_its_input(dtype):
    if not can_pack(dtype):
        pytest.skip("oneDNN does not multiply bf16 on this CPU")
    packed = pack_weight(rand(8, 5, dtype=dtype))

    actual = cpu.linear_packed(torch.empty(0, 8, dtype=dtype), packed)

    assert (actual.shape, actual.dtype) == ((0, 5), dtype)


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
def test_a_bias_is_added_as_by_the_reference(new, contexts, window, reach):
    args = paged_inputs(new, contexts, heads=6, kv_heads=2, dim=8, block_size=16)
    bias = 3 * rand(6, 2 * reach + 1, seed=5)
    options = {"num_heads": 6, "num_kv_heads": 2, "scale": 0.3, "window": window}

    actual = cpu.attention_paged(*args, bias, **options)

    check(actual, reference.attention_paged(*args, bias, **options))


def test_large_steps_are_shared_by_threads_and_equal_each_sequence_alone(monkeypatch):
    monkeypatch.setattr(paged_cpu, "_LEAST_SHARED_WORK", 700 * 4 * 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    contexts = [700, 3, 1200, 64, 900]
    args = paged_inputs([1] * 5, contexts, heads=4, kv_heads=4, dim=64, block_size=64)
    qkv, keys, values, _, lengths, block_ids, tables = args
    options = {"num_heads": 4, "num_kv_heads": 4, "scale": 0.125}

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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_tokens_are_appended_as_by_the_reference_and_nothing_else_changes(dtype, heads):
    width = (heads + 2 * 2) * 20
    qkv, slots = rand(5, width, dtype=dtype), torch.tensor([70, 3, -1, 0, 95])
    caches = [torch.full((6, 2, 16, 20), torch.nan) for _ in range(4)]

    cpu.append_kv(qkv, slots, *caches[:2], num_heads=heads, num_kv_heads=2)
    reference.append_kv(qkv, slots, *caches[2:], num_heads=heads, num_kv_heads=2)

    for actual, expected in zip(caches[:2], caches[2:], strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@DTYPES
def test_blocks_are_copied_in_order_and_nothing_else_changes(dtype):
    cache = rand(6, 2, 3, 4, dtype=dtype)
    expected = cache.clone()
    # block 5 is copied again after it was written
    pairs = [(0, 5), (2, 1), (5, 3)]
    for source, destination in pairs:
        expected[destination] = expected[source]

    cpu.copy_blocks(cache, *torch.tensor(pairs).T)

    torch.testing.assert_close(cache, expected, rtol=0, atol=0)
