"""Norm of heads and rotary positions on a GPU or interpreted, against the reference."""

import pytest
import torch

from varlen_kernels import reference
from varlen_kernels.triton import norms
from varlen_kernels.triton.norms import norm_heads, rotary
from varlen_kernels.triton.rows import row_launches
from varlen_kernels.tuning import forced_launch

from .compare import DTYPES, assert_close, rand
from .guards import write_guarded

EPS = 1e-6
# tokens, query heads, key heads, features of a head
HEADS = pytest.mark.parametrize(
    "tokens, num_heads, num_kv_heads, head_dim",
    [(1, 1, 1, 2), (9, 3, 3, 10), (5, 4, 2, 64), (33, 2, 1, 80), (3, 6, 2, 128), (2, 1, 1, 256)],
    ids=str,
)


def random_qkv(tokens, num_heads, num_kv_heads, head_dim, dtype, device):
    return rand(tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, device=device)


def random_positions(tokens, device):
    return torch.randint(50, (tokens,), generator=torch.Generator().manual_seed(0)).int().to(device)


@DTYPES
@HEADS
def test_norm_heads_matches_the_reference(tokens, num_heads, num_kv_heads, head_dim, dtype, device):
    qkv = random_qkv(tokens, num_heads, num_kv_heads, head_dim, dtype, device)
    weights = [rand(head_dim, dtype=dtype, device=device, seed=seed) for seed in (1, 2)]
    counts = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}

    actual = write_guarded(
        lambda out: norm_heads(qkv, *weights, **counts, eps=EPS, out=out),
        tuple(qkv.shape),
        dtype,
        device,
        gap=32,
    )

    expected = reference.norm_heads(
        qkv.float(), *(weight.float() for weight in weights), **counts, eps=EPS
    )
    assert_close(actual, expected, dtype)


@DTYPES
@pytest.mark.parametrize("part", [1, 2], ids=["whole", "half"])
@HEADS
def test_rotary_matches_the_reference(
    tokens, num_heads, num_kv_heads, head_dim, part, dtype, device
):
    qkv = random_qkv(tokens, num_heads, num_kv_heads, head_dim, dtype, device)
    positions, cos_sin = random_positions(tokens, device), rand(50, head_dim, device=device, seed=1)
    cos_sin = cos_sin[:, : max(head_dim // part // 2, 1) * 2]
    counts = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}

    actual = write_guarded(
        lambda out: rotary(qkv, positions, cos_sin, **counts, out=out),
        tuple(qkv.shape),
        dtype,
        device,
        gap=32,
    )

    assert_close(actual, reference.rotary(qkv.float(), positions, cos_sin, **counts), dtype)


@DTYPES
def test_in_place_writes_the_same_bits_and_keeps_the_values(dtype, device):
    qkv = random_qkv(7, 4, 2, 32, dtype, device)
    weight, cos_sin = rand(32, dtype=dtype, device=device), rand(50, 32, device=device)
    calls = {
        norm_heads: ((weight, weight), {"eps": EPS}),
        rotary: ((random_positions(7, device), cos_sin), {}),
    }

    for op, (args, options) in calls.items():
        fresh = op(qkv, *args, num_heads=4, num_kv_heads=2, **options)
        changed = qkv.clone()
        returned = op(changed, *args, num_heads=4, num_kv_heads=2, **options, out=changed)

        assert returned is changed
        assert torch.equal(changed, fresh)
        assert torch.equal(changed[:, 6 * 32 :], qkv[:, 6 * 32 :])


@pytest.mark.full
@pytest.mark.parametrize("head_dim", [10, 128])
def test_every_candidate_launch_matches_the_reference(head_dim, device):
    dtype, counts = torch.bfloat16, {"num_heads": 3, "num_kv_heads": 1}
    qkv = random_qkv(5, 3, 1, head_dim, dtype, device)
    weight, cos_sin = rand(head_dim, dtype=dtype, device=device), rand(50, head_dim, device=device)
    positions = random_positions(5, device)
    normed = reference.norm_heads(qkv.float(), weight.float(), weight.float(), **counts, eps=EPS)
    rotated = reference.rotary(qkv.float(), positions, cos_sin, **counts)

    for launch in row_launches(head_dim, dtype):
        with forced_launch("norm_heads", (head_dim, dtype), launch):
            assert_close(norm_heads(qkv, weight, weight, **counts, eps=EPS), normed, dtype)
    key = (head_dim // 2, head_dim, dtype)
    for launch in norms.candidate_rotary_launches(*key):
        with forced_launch("rotary", key, launch):
            assert_close(rotary(qkv, positions, cos_sin, **counts), rotated, dtype)


def test_no_tokens(device):
    qkv, weight = random_qkv(0, 2, 1, 8, torch.float32, device), rand(8, device=device)
    counts = {"num_heads": 2, "num_kv_heads": 1}

    assert norm_heads(qkv, weight, weight, **counts, eps=EPS).shape == (0, 32)
    assert rotary(qkv, random_positions(0, device), rand(4, 8), **counts).shape == (0, 32)


def test_rejects_what_a_kernel_cannot_read(device):
    qkv, positions = rand(3, 32, device=device), random_positions(3, device)
    counts = {"num_heads": 2, "num_kv_heads": 1}

    with pytest.raises(ValueError, match=r"qkv has 32 features for 3 \+ 2 x 1 heads"):
        rotary(qkv, positions, rand(4, 8), num_heads=3, num_kv_heads=1)
    with pytest.raises(ValueError, match=r"cos_sin is \[4, 10\] torch.float32; it must be"):
        rotary(qkv, positions, rand(4, 10), **counts)
    with pytest.raises(ValueError, match="key_weight has shape"):
        norm_heads(qkv, rand(8), rand(9), **counts, eps=EPS)
