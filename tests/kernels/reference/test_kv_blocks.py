"""The reference ops on KV blocks and shared key heads, against float64 in numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.float64 import DTYPES, bounds_of, check, f64, rand
from varlen_kernels import reference
from varlen_kernels.reference.attention import Distances

# (new tokens, context) of each sequence
STEPS = pytest.mark.parametrize(
    "step",
    [
        [(1, 1)],
        [(1, 33), (1, 1), (1, 100)],
        [(63, 63)],
        [(5, 5), (1, 17), (20, 66), (1, 64)],
        [(0, 0), (3, 19), (0, 30), (1, 1), (0, 0)],
    ],
    ids=["first", "decode", "prompt", "mixed", "padded"],
)
HEADS = pytest.mark.parametrize("heads, key_heads", [(1, 1), (3, 3), (6, 2), (7, 1)], ids=str)
WINDOWS = pytest.mark.parametrize("window", [0, 1, 16, 40, 1000])


def last_queries64(queries, keys, values, scale, window, bias=None, soft_cap=0.0):
    """Return the context of the last tokens of a sequence, [new, heads · head_dim].

    Args:
        queries: [new, heads, head_dim].
        keys, values: [length, key heads, head_dim].
        bias: [heads, 2 * reach + 1], or None.
    """
    group = queries.shape[1] // keys.shape[1]
    keys, values = (np.repeat(x, group, axis=1) for x in (keys, values))
    scores = np.einsum("qhd,khd->hqk", queries, keys) * scale
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    position = np.arange(len(keys))
    distance = position[len(keys) - len(queries) :, None] - position
    if bias is not None:
        reach = bias.shape[1] // 2
        scores += bias[:, np.clip(-distance, -reach, reach) + reach]
    hidden = distance < 0
    if window:
        hidden |= distance >= window
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-np.inf))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, values).reshape(len(queries), -1)


def paged_call(step, heads, key_heads, head_dim, dtype, *, block_size=16, shared=0):
    """Return the arguments of `attention_paged`, and the keys and values of each sequence.

    Args:
        shared: number of first blocks that all sequences share.
    """
    counts = [-(-length // block_size) for _, length in step]
    order = np.random.default_rng(0).permutation(sum(counts) + 3)
    tables = np.split(order[: sum(counts)], np.cumsum(counts)[:-1])
    for table in tables[1:]:
        table[:shared] = tables[0][: min(shared, len(table))]
    qkv = rand(sum(new for new, _ in step), (heads + 2 * key_heads) * head_dim, dtype=dtype)
    caches = [
        rand(len(order), key_heads, block_size, head_dim, dtype=dtype, seed=seed) for seed in (1, 2)
    ]
    contexts = [
        [
            f64(cache)[table].swapaxes(1, 2).reshape(-1, key_heads, head_dim)[:length]
            for cache in caches
        ]
        for table, (_, length) in zip(tables, step, strict=True)
    ]
    # no sequence reads these places
    read = torch.zeros(len(order), block_size, dtype=torch.bool)
    for table, (_, length) in zip(tables, step, strict=True):
        for i, block in enumerate(table):
            read[block, : min(block_size, length - i * block_size)] = True
    for cache in caches:
        cache.transpose(1, 2)[~read] = torch.nan
    arguments = (
        qkv,
        *caches,
        bounds_of([new for new, _ in step]),
        torch.tensor([length for _, length in step], dtype=torch.int32),
        torch.tensor(np.concatenate(tables), dtype=torch.int32),
        bounds_of(counts),
    )
    return arguments, contexts


def paged64(step, qkv, contexts, heads, head_dim, scale, window=0, bias=None, soft_cap=0.0):
    queries = f64(qkv)[:, : heads * head_dim].reshape(len(qkv), heads, head_dim)
    per_sequence = np.split(queries, np.cumsum([new for new, _ in step])[:-1])
    return np.concatenate(
        [
            last_queries64(q, keys, values, scale, window, bias, soft_cap)
            for q, (keys, values) in zip(per_sequence, contexts, strict=True)
            if len(q)
        ]
    )


@DTYPES
@HEADS
@STEPS
def test_attention_paged_matches_float64(step, heads, key_heads, dtype):
    arguments, contexts = paged_call(step, heads, key_heads, 8, dtype)
    out = torch.full((len(arguments[0]), heads * 8), torch.nan, dtype=dtype)

    reference.attention_paged(
        *arguments, num_heads=heads, num_kv_heads=key_heads, scale=0.3, out=out
    )

    check(out, paged64(step, arguments[0], contexts, heads, 8, 0.3), dtype)


@WINDOWS
@STEPS
def test_a_window_hides_earlier_tokens_of_the_blocks(step, window):
    arguments, contexts = paged_call(step, 4, 2, 8, torch.float32)

    actual = reference.attention_paged(
        *arguments, num_heads=4, num_kv_heads=2, scale=0.3, window=window
    )

    check(actual, paged64(step, arguments[0], contexts, 4, 8, 0.3, window))


@DTYPES
@STEPS
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_a_limit_of_scores_comes_before_a_bias(step, has_bias, dtype):
    arguments, contexts = paged_call(step, 6, 2, 8, dtype)
    bias = 3 * rand(6, 9, seed=3) if has_bias else None

    actual = reference.attention_paged(
        *arguments, bias, num_heads=6, num_kv_heads=2, scale=3.0, window=16, soft_cap=2.5
    )

    bias64 = f64(bias) if has_bias else None
    check(actual, paged64(step, arguments[0], contexts, 6, 8, 3.0, 16, bias64, 2.5), dtype)


@DTYPES
@HEADS
def test_queries_alone_attend_to_all_of_a_source_that_they_share(heads, key_heads, dtype):
    # three target tokens of one source, two of another
    arguments, contexts = paged_call([(3, 40), (2, 17)], heads, key_heads, 8, dtype)
    _, *caches, _, _, block_ids, cu_blocks = arguments
    sources = [0, 0, 0, 1, 1]
    tables = [block_ids[cu_blocks[source] : cu_blocks[source + 1]] for source in sources]
    queries = rand(5, heads * 8, dtype=dtype, seed=7)

    actual = reference.attention_paged(
        queries,
        *caches,
        bounds_of([1] * 5),
        torch.tensor([40, 40, 40, 17, 17], dtype=torch.int32),
        torch.cat(tables),
        bounds_of([len(table) for table in tables]),
        num_heads=heads,
        num_kv_heads=key_heads,
        scale=0.3,
    )

    step = [(1, len(contexts[source][0])) for source in sources]
    expected = paged64(step, queries, [contexts[source] for source in sources], heads, 8, 0.3)
    check(actual, expected, dtype)


@DTYPES
@pytest.mark.parametrize("reach", [0, 9, 200])
@pytest.mark.parametrize("window", [0, 16])
@STEPS
def test_attention_paged_adds_a_bias_by_distance(step, window, reach, dtype):
    arguments, contexts = paged_call(step, 6, 2, 8, dtype)
    bias = 3 * rand(6, 2 * reach + 1, seed=5)

    actual = reference.attention_paged(
        *arguments, bias, num_heads=6, num_kv_heads=2, scale=0.3, window=window
    )

    check(actual, paged64(step, arguments[0], contexts, 6, 8, 0.3, window, f64(bias)), dtype)


@pytest.mark.parametrize("block_size", [16, 48, 128])
def test_sequences_may_share_their_first_blocks(block_size):
    step = [(1, 130), (20, 150), (1, 131)]
    arguments, contexts = paged_call(step, 2, 1, 8, torch.float32, block_size=block_size, shared=1)

    actual = reference.attention_paged(*arguments, num_heads=2, num_kv_heads=1, scale=0.3)

    check(actual, paged64(step, arguments[0], contexts, 2, 8, 0.3))


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40)), min_size=1, max_size=6),
    st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    st.integers(0, 50),
)
def test_attention_paged_matches_float64_for_any_step(sizes, heads, window):
    step = [(new, new + earlier) for new, earlier in sizes]
    arguments, contexts = paged_call([*step, (1, 1)], *heads, 4, torch.float32)

    actual = reference.attention_paged(
        *arguments, num_heads=heads[0], num_kv_heads=heads[1], scale=0.5, window=window
    )

    check(actual, paged64([*step, (1, 1)], arguments[0], contexts, heads[0], 4, 0.5, window))


def test_tokens_past_the_last_sequence_get_no_paged_attention():
    step = [(1, 9), (2, 20)]
    arguments, contexts = paged_call(step, 2, 2, 4, torch.float32)
    qkv = torch.cat([arguments[0], torch.full((2, 24), torch.nan)])
    out = torch.full((5, 8), torch.nan)

    reference.attention_paged(qkv, *arguments[1:], num_heads=2, num_kv_heads=2, scale=0.5, out=out)

    check(out[:3], paged64(step, arguments[0], contexts, 2, 4, 0.5))
    assert out[3:].isnan().all()


@DTYPES
@HEADS
@pytest.mark.parametrize("block_size", [16, 48])
def test_append_kv_writes_each_token_into_its_slot(block_size, heads, key_heads, dtype):
    qkv = rand(40, (heads + 2 * key_heads) * 5, dtype=dtype)
    shape = (4, key_heads, block_size, 5)
    caches = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)]
    slots = np.random.default_rng(0).permutation(4 * block_size)[:40]
    slots[[0, 7, 39]] = -1
    expected = np.full((2, *shape), np.nan)

    returned = reference.append_kv(
        qkv, torch.tensor(slots), *caches, num_heads=heads, num_kv_heads=key_heads
    )

    by_head = f64(qkv).reshape(40, -1, 5)
    for token, slot in enumerate(slots):
        if slot >= 0:
            block, place = divmod(slot, block_size)
            expected[0, block, :, place] = by_head[token, heads : heads + key_heads]
            expected[1, block, :, place] = by_head[token, heads + key_heads :]
    assert returned is qkv
    np.testing.assert_array_equal(np.stack([f64(cache) for cache in caches]), expected)


@DTYPES
@pytest.mark.parametrize("is_normed", [False, True], ids=["rotated", "normed"])
@HEADS
def test_append_kv_norms_and_rotates_queries_and_keys_first(heads, key_heads, is_normed, dtype):
    qkv, dim = rand(9, (heads + 2 * key_heads) * 6, dtype=dtype), 6
    caches = [torch.full((2, key_heads, 16, dim), torch.nan, dtype=dtype) for _ in range(2)]
    slots = np.array([31, 0, 5, -1, 17, 2, 1, 30, 16])
    positions = np.array([0, 1, 2, 49, 7, 7, 0, 3, 20])
    angles = np.outer(np.arange(50), [1.0, 0.3, 0.01])
    cos_sin = torch.from_numpy(np.hstack([np.cos(angles), np.sin(angles)])).float()
    weights = [rand(dim, dtype=dtype, seed=seed) if is_normed else None for seed in (1, 2)]
    out = torch.full_like(qkv, torch.nan)

    returned = reference.append_kv(
        qkv,
        torch.tensor(slots),
        *caches,
        torch.tensor(positions, dtype=torch.int32),
        cos_sin,
        *weights,
        num_heads=heads,
        num_kv_heads=key_heads,
        eps=1e-3,
        out=out,
    )

    by_head = f64(qkv).reshape(9, -1, dim)
    parts = np.split(by_head, [heads, heads + key_heads], axis=1)
    for part, weight in zip(parts, weights, strict=False):
        if weight is not None:
            part[:] = part * f64(weight) / np.sqrt((part**2).mean(-1, keepdims=True) + 1e-3)
        # a pair is a complex number, multiplied by exp(i angle)
        pairs = (part[..., :3] + 1j * part[..., 3:]) * np.exp(1j * angles[positions])[:, None]
        part[..., :3], part[..., 3:] = pairs.real, pairs.imag
    assert returned is out
    check(out[:, : heads * dim], parts[0].reshape(9, -1), dtype)
    for cache, expected in zip(caches, parts[1:], strict=True):
        # [places, key heads, dim]
        places = cache.transpose(1, 2).flatten(0, 1)
        check(places[slots[slots >= 0]], expected[slots >= 0], dtype)
        assert places[np.setdiff1d(np.arange(32), slots)].isnan().all()


def test_append_kv_accepts_keys_and_values_alone():
    qkv, slots = rand(9, 7 * 5), torch.randperm(32, generator=torch.Generator().manual_seed(0))[:9]
    caches = [torch.zeros(2, 2, 16, 5) for _ in range(4)]

    reference.append_kv(qkv, slots, *caches[:2], num_heads=3, num_kv_heads=2)
    reference.append_kv(qkv[:, 15:], slots, *caches[2:], num_heads=0, num_kv_heads=2)

    assert all(map(torch.equal, caches[:2], caches[2:]))


@pytest.mark.parametrize("tokens", [0, 3])
def test_append_kv_may_write_no_token(tokens):
    caches = [torch.ones(2, 1, 16, 4), torch.ones(2, 1, 16, 4)]
    slots = torch.full((tokens,), -1)

    reference.append_kv(rand(tokens, 12), slots, *caches, num_heads=1, num_kv_heads=1)

    assert all(torch.equal(cache, torch.ones(2, 1, 16, 4)) for cache in caches)


def test_append_kv_rounds_to_the_dtype_of_the_caches():
    qkv = rand(3, 12)
    caches = [torch.zeros(1, 1, 16, 4, dtype=torch.bfloat16) for _ in range(2)]

    reference.append_kv(qkv, torch.arange(3), *caches, num_heads=1, num_kv_heads=1)

    assert torch.equal(caches[0][0, 0, :3], qkv[:, 4:8].bfloat16())
    assert torch.equal(caches[1][0, 0, :3], qkv[:, 8:].bfloat16())


def varlen64(qkv, lengths, heads, key_heads, scale, *, causal, window, soft_cap=0.0):
    head_dim = qkv.shape[1] // (heads + 2 * key_heads)
    by_head = f64(qkv).reshape(len(qkv), -1, head_dim)
    q, k, v = np.split(by_head, [heads, heads + key_heads], axis=1)
    outs = []
    for begin, end in zip(np.cumsum([0, *lengths]), np.cumsum(lengths), strict=False):
        rows = slice(begin, end)
        if causal:
            outs.append(last_queries64(q[rows], k[rows], v[rows], scale, window, soft_cap=soft_cap))
        else:
            for i in range(begin, end):
                near = slice(max(begin, i - window + 1), min(end, i + window)) if window else rows
                outs.append(
                    last_queries64(q[i : i + 1], k[near], v[near], scale, 0, soft_cap=soft_cap)
                )
    return np.concatenate(outs)


@DTYPES
@HEADS
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("lengths", [[1], [5, 1, 5, 5, 2], [63, 1, 100]], ids=str)
def test_heads_of_attention_varlen_share_key_heads(lengths, causal, heads, key_heads, dtype):
    qkv = rand(sum(lengths), (heads + 2 * key_heads) * 8, dtype=dtype)

    actual = reference.attention_varlen(
        qkv, bounds_of(lengths), num_heads=heads, num_kv_heads=key_heads, scale=0.3, causal=causal
    )

    expected = varlen64(qkv, lengths, heads, key_heads, 0.3, causal=causal, window=0)
    check(actual, expected, dtype)


@WINDOWS
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("lengths", [[1], [16, 16, 17], [63, 1, 100]], ids=str)
def test_a_window_hides_tokens_that_are_far(lengths, causal, window):
    qkv = rand(sum(lengths), (4 + 2 * 2) * 8)

    actual = reference.attention_varlen(
        qkv,
        bounds_of(lengths),
        num_heads=4,
        num_kv_heads=2,
        scale=0.3,
        causal=causal,
        window=window,
    )

    check(actual, varlen64(qkv, lengths, 4, 2, 0.3, causal=causal, window=window))


@DTYPES
@HEADS
@pytest.mark.parametrize("window", [0, 16])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_scores_have_a_limit(causal, window, heads, key_heads, dtype):
    # more queries than are multiplied at once
    lengths = [5, 300, 1]
    qkv = rand(sum(lengths), (heads + 2 * key_heads) * 8, dtype=dtype)
    options = {"causal": causal, "window": window, "soft_cap": 2.5}

    actual = reference.attention_varlen(
        qkv, bounds_of(lengths), num_heads=heads, num_kv_heads=key_heads, scale=3.0, **options
    )

    check(actual, varlen64(qkv, lengths, heads, key_heads, 3.0, **options), dtype)


def test_a_limit_of_scores_does_not_go_with_distances():
    distances = Distances(torch.zeros(1, dtype=torch.int32), rand(1, 16), None)

    with pytest.raises(ValueError, match="soft_cap is 2.5; allowed with distances: 0"):
        reference.attention_varlen(
            rand(4, 48), bounds_of([4]), None, None, distances, num_heads=2, scale=1, soft_cap=2.5
        )


def test_a_window_and_a_bias_both_apply():
    qkv = rand(40, 3 * 2 * 8)
    bias = torch.zeros(2, 79)
    # a bias of -inf on keys outside a window of 7 is that window
    bias[:, : 39 - 6] = -torch.inf
    options = {"num_heads": 2, "scale": 0.3, "causal": True}

    both = reference.attention_varlen(qkv, bounds_of([40]), window=20, bias=bias, **options)

    check(both, varlen64(qkv, [40], 2, 2, 0.3, causal=True, window=7))


def test_paged_and_packed_attention_agree():
    lengths, block_size = [40, 5, 17], 16
    qkv = rand(sum(lengths), (6 + 2 * 2) * 8)
    counts = [-(-length // block_size) for length in lengths]
    caches = [torch.full((sum(counts), 2, block_size, 8), torch.nan) for _ in range(2)]
    starts = np.cumsum([0, *counts])
    slots = np.concatenate(
        [start * block_size + np.arange(n) for start, n in zip(starts, lengths, strict=False)]
    )
    heads = {"num_heads": 6, "num_kv_heads": 2}
    reference.append_kv(qkv, torch.tensor(slots), *caches, **heads)

    paged = reference.attention_paged(
        qkv,
        *caches,
        bounds_of(lengths),
        torch.tensor(lengths, dtype=torch.int32),
        torch.arange(sum(counts), dtype=torch.int32),
        bounds_of(counts),
        **heads,
        scale=0.3,
        window=9,
    )

    packed = reference.attention_varlen(
        qkv, bounds_of(lengths), **heads, scale=0.3, causal=True, window=9
    )
    check(paged, packed)
