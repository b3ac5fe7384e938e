"""Append to KV blocks on a GPU or in the interpreter, against the reference."""

import pytest
import torch

from varlen_kernels import reference
from varlen_kernels.reference.paged import FP8
from varlen_kernels.triton.append_kv import append_kv, candidate_launches
from varlen_kernels.tuning import forced_launch

from .compare import DTYPES, assert_close, rand, spread
from .guards import Guarded


def slots_of(tokens, places, device, missing=()):
    """Return random slots, no slot twice, and -1 for the missing tokens."""
    slots = torch.randperm(places, generator=torch.Generator().manual_seed(5))[:tokens]
    slots[list(missing)] = -1
    return slots.to(device)


def check_against_reference(
    tokens, heads, key_heads, head_dim, dtype, device, *, block_size=16, missing=(), change=None
):
    """Compare the caches with the caches of the reference, bit by bit, unwritten places included."""
    blocks = -(-tokens // block_size) + 1
    shape = (blocks, key_heads, block_size, head_dim)
    caches = [Guarded(shape, dtype, device) for _ in range(2)]
    expected = [cache.tensor.clone() for cache in caches]
    qkv = rand(tokens, (heads + 2 * key_heads) * head_dim, dtype=dtype, device=device)
    slots = slots_of(tokens, blocks * block_size, device, missing)
    settings = {"num_heads": heads, "num_kv_heads": key_heads}

    appended = change(qkv) if change else qkv
    append_kv(appended, slots, *(cache.tensor for cache in caches), **settings)

    reference.append_kv(qkv, slots, *expected, **settings)
    for cache, right in zip(caches, expected, strict=True):
        cache.check()
        assert torch.equal(cache.tensor.nan_to_num(), right.nan_to_num())
        assert torch.equal(cache.tensor.isnan(), right.isnan())


@DTYPES
@pytest.mark.parametrize("tokens", [1, 7, 63])
def test_matches_the_reference(tokens, dtype, device):
    check_against_reference(tokens, 4, 2, 64, dtype, device)


@DTYPES
@pytest.mark.parametrize("rotates", [False, True], ids=["", "rotated"])
def test_fp8_caches_hold_the_nearest_number_up_to_448(rotates, dtype, device):
    factors = torch.logspace(-4, 4, 9)[:, None]
    qkv = (rand(9, 4 * 16) * factors).to(device, dtype)
    caches = torch.full((2, 2, 3, 2, 16, 16), 7.0).to(FP8).to(device)
    positions = ()
    if rotates:
        angles = rand(20, 8)
        cos_sin = torch.cat([angles.cos(), angles.sin()], 1).to(device)
        positions = torch.arange(9, dtype=torch.int32, device=device), cos_sin
    settings = {"num_heads": 0, "num_kv_heads": 2}
    slots = slots_of(9, 48, device, missing=[4])

    append_kv(qkv, slots, *caches[0], *positions, **settings)
    reference.append_kv(qkv, slots, *caches[1], *positions, **settings)

    actual, expected = caches.float()
    assert actual.abs().max() == 448
    # rounding before the last one may differ, and then by a step of 3 bits
    tolerance = {"rtol": 0.13, "atol": 2**-9} if rotates else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(actual, expected, **tolerance)


def test_accepts_keys_and_values_alone(device):
    check_against_reference(9, 0, 2, 16, torch.float16, device, missing=[3])


@pytest.mark.parametrize("head_dim", [1, 5, 63, 80, 128, 256])
def test_accepts_any_head_dim(head_dim, device):
    check_against_reference(9, 3, 3, head_dim, torch.float16, device)


@pytest.mark.parametrize("key_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("block_size", [16, 48, 128])
def test_accepts_any_heads_and_multiples_of_16_as_block_size(key_heads, block_size, device):
    check_against_reference(20, 6, key_heads, 8, torch.float32, device, block_size=block_size)


@pytest.mark.parametrize("missing", [[0], [3, 4, 8], list(range(9))], ids=str)
def test_a_token_without_a_slot_writes_nothing(missing, device):
    check_against_reference(9, 2, 2, 16, torch.float32, device, missing=missing)


def test_accepts_strided_rows(device):
    check_against_reference(9, 2, 1, 16, torch.float16, device, change=spread)


def test_without_positions_the_rows_come_back_as_they_are(device):
    qkv, caches = rand(3, 6 * 16, device=device), torch.zeros(2, 1, 2, 16, 16, device=device)

    returned = append_kv(qkv, slots_of(3, 16, device), *caches, num_heads=2, num_kv_heads=2)

    assert returned is qkv


def test_values_are_cast_to_the_dtype_of_the_caches(device):
    qkv, slots = rand(9, 6 * 16, device=device), slots_of(9, 16, device)
    caches = [torch.zeros(1, 2, 16, 16, dtype=torch.float16, device=device) for _ in range(2)]
    expected = [cache.clone() for cache in caches]

    append_kv(qkv, slots, *caches, num_heads=2, num_kv_heads=2)

    reference.append_kv(qkv, slots, *expected, num_heads=2, num_kv_heads=2)
    assert all(map(torch.equal, caches, expected))


@pytest.mark.full
def test_every_candidate_launch_matches_the_reference(device):
    key = (64, torch.float16)
    for launch in candidate_launches(*key):
        with forced_launch("append_kv", key, launch):
            check_against_reference(40, 4, 2, 64, torch.float16, device)


def check_positions(
    tokens, heads, key_heads, head_dim, dtype, device, *, is_normed, missing=(), in_place=False
):
    """Compare queries and caches with the reference in fp32; unwritten places stay NaN."""
    blocks, settings = -(-tokens // 16) + 1, {"num_heads": heads, "num_kv_heads": key_heads}
    shape = (blocks, key_heads, 16, head_dim)
    caches = [Guarded(shape, dtype, device) for _ in range(2)]
    expected = [torch.full(shape, torch.nan, device=device) for _ in range(2)]
    qkv = rand(tokens, (heads + 2 * key_heads) * head_dim, dtype=dtype, device=device)
    slots = slots_of(tokens, blocks * 16, device, missing)
    positions = torch.arange(tokens, dtype=torch.int32, device=device) * 2
    cos_sin = rand(2 * tokens, head_dim, device=device, seed=1)
    weights = [rand(head_dim, dtype=dtype, device=device, seed=seed) for seed in (2, 3)]
    weights = weights if is_normed else [None, None]
    wide = [None if weight is None else weight.float() for weight in weights]
    right = reference.append_kv(
        qkv.float(), slots, *expected, positions, cos_sin, *wide, **settings, eps=1e-3
    )
    out = qkv if in_place else torch.full_like(qkv, torch.nan)

    written = [cache.tensor for cache in caches]
    returned = append_kv(
        qkv, slots, *written, positions, cos_sin, *weights, **settings, eps=1e-3, out=out
    )

    assert returned is out
    width = heads * head_dim
    assert_close(out[:, :width], right[:, :width], dtype)
    for cache, whole in zip(caches, expected, strict=True):
        cache.check()
        assert torch.equal(cache.tensor.isnan(), whole.isnan())
        assert_close(cache.tensor.nan_to_num(), whole.nan_to_num(), dtype)


NORMED = pytest.mark.parametrize("is_normed", [False, True], ids=["rotated", "normed"])


@DTYPES
@NORMED
@pytest.mark.parametrize("tokens", [1, 7, 63])
def test_rotated_queries_and_keys_match_the_reference(tokens, is_normed, dtype, device):
    check_positions(tokens, 4, 2, 64, dtype, device, is_normed=is_normed)


@NORMED
@pytest.mark.parametrize("in_place", [False, True], ids=["", "in-place"])
@pytest.mark.parametrize(
    "heads, key_heads, head_dim", [(1, 1, 2), (3, 3, 10), (2, 1, 80), (6, 2, 256)], ids=str
)
def test_heads_of_any_even_size_are_rotated(
    heads, key_heads, head_dim, in_place, is_normed, device
):
    sizes = 9, heads, key_heads, head_dim
    check_positions(*sizes, torch.float32, device, is_normed=is_normed, in_place=in_place)


@pytest.mark.parametrize("missing", [[0], [3, 4, 8], list(range(9))], ids=str)
def test_a_token_without_a_slot_gets_a_query_but_writes_nothing(missing, device):
    check_positions(9, 2, 2, 16, torch.float32, device, is_normed=True, missing=missing)


@pytest.mark.full
def test_every_candidate_launch_rotates(device):
    key = (64, torch.float16)
    for launch in candidate_launches(*key):
        with forced_launch("append_kv", key, launch):
            check_positions(40, 4, 2, 64, torch.float16, device, is_normed=True)


def test_no_tokens(device):
    check_against_reference(0, 2, 2, 16, torch.float32, device)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"slots": torch.zeros(3).int()}, "slots is torch.int32; it must be torch.int64"),
        ({"slots": torch.zeros(4).long()}, r"slots has shape \[4\]"),
        ({"qkv": torch.zeros(3, 95)}, "qkv has rows of 95; allowed: multiples of 2 . 2 · 2 heads"),
        ({"key_cache": torch.zeros(5, 2, 16, 8)}, r"key_cache is \[5, 2, 16, 8\]; it must be"),
        (
            {"key_cache": torch.zeros(5, 2, 8, 16), "value_cache": torch.zeros(5, 2, 8, 16)},
            "block_size is 8; allowed: multiples of 16",
        ),
        ({"position_ids": torch.zeros(3).int()}, "position_ids and cos_sin are given together"),
        ({"query_weight": torch.zeros(16)}, "query_weight and key_weight are given together"),
        (
            {"query_weight": torch.zeros(16), "key_weight": torch.zeros(16)},
            "and weights only with them",
        ),
        (
            {"position_ids": torch.zeros(3).int(), "cos_sin": torch.zeros(9, 8)},
            r"cos_sin is \[9, 8\] torch.float32; it must be \[positions, 16\]",
        ),
    ],
    ids=[
        "slots",
        "slots",
        "qkv",
        "key_cache",
        "block_size",
        "positions",
        "weight",
        "weights",
        "cos_sin",
    ],
)
def test_rejects_invalid_arguments(change, message, device):
    arguments = {
        "qkv": torch.zeros(3, 96),
        "slots": torch.zeros(3).long(),
        "key_cache": torch.zeros(5, 2, 16, 16),
        "value_cache": torch.zeros(5, 2, 16, 16),
    }
    arguments = {name: value.to(device) for name, value in (arguments | change).items()}

    with pytest.raises(ValueError, match=message):
        append_kv(**arguments, num_heads=2, num_kv_heads=2)
