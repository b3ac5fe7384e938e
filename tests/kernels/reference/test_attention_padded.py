"""Attention of padded sequences: what packed attention of the same sequences is."""

import pytest
import torch

from tests.kernels.float64 import (
    DTYPES,
    assert_out_is_overwritten,
    bounds_of,
    check,
    f64,
    rand,
    tables_of,
)
from varlen_kernels import reference
from varlen_kernels.reference.attention import Distances

HEADS, DIM = 4, 6
LENGTHS = ([5], [3, 3, 3], [7, 1, 4, 0, 7])


def padded(packed, lengths):
    """Return tokens with random padding, their rows, and the bounds of all parts."""
    longest = max(lengths)
    x = rand(len(lengths) * longest + 3, packed.shape[1], dtype=packed.dtype, seed=9)
    rows = [longest * i + place for i, n in enumerate(lengths) for place in range(n)]
    x[rows] = packed
    parts = [part for n in lengths for part in (n, longest - n)]
    return x, rows, bounds_of(parts)


FORMS = {
    "plain": {},
    "causal": {"causal": True},
    "shared key heads": {"num_kv_heads": 2},
    "window": {"window": 3},
    "causal window": {"window": 3, "causal": True},
    "limit": {"soft_cap": 0.7, "num_kv_heads": 1},
    "bias": {"bias": rand(HEADS, 7)},
    "distances": {"distances": True},
    "unread keys": {"key_lengths": True},
    "window without keys": {"key_lengths": True, "window": 2},
}


@DTYPES
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_padded_attention_is_packed_attention_in_float64(form, lengths, dtype):
    options = dict(FORMS[form])
    heads = options.get("num_kv_heads", HEADS)
    packed = rand(sum(lengths), (HEADS + 2 * heads) * DIM, dtype=dtype)
    x, rows, parts = padded(packed, lengths)
    exact, given = {**options}, {**options}
    if form == "distances":
        given["distances"] = tables_of(HEADS, DIM, dtype, 4)
        of_tables = [table.double() for table in given["distances"][1:]]
        exact["distances"] = Distances(given["distances"].rows, *of_tables)
    if form in ("unread keys", "window without keys"):
        read = [-(-n // 2) for n in lengths]
        exact["key_lengths"] = torch.tensor(read, dtype=torch.int32)
        of_pairs = [count for n in read for count in (n, 99)]
        given["key_lengths"] = torch.tensor(of_pairs, dtype=torch.int32)

    context, *_ = reference.attention_padded(x, parts, num_heads=HEADS, scale=0.4, **given)

    expected = reference.attention_varlen(
        packed.double(), bounds_of(lengths), num_heads=HEADS, scale=0.4, **exact
    )
    check(context[rows], f64(expected), dtype)
    whole = len(lengths) * max(lengths)
    assert not context[:whole].isnan().any()


@DTYPES
def test_a_poisoned_out_is_fully_overwritten_with_the_same_bits(dtype):
    lengths = [4, 2, 4]
    x, _, parts = padded(rand(10, 3 * HEADS * DIM, dtype=dtype), lengths)
    x = x[:12]

    def call(out):
        results = (out, rand(48, HEADS, dtype=dtype), torch.empty_like(x))
        found = reference.attention_padded(
            x, parts, num_heads=HEADS, scale=0.4, out=None if out is None else results
        )
        return found[0]

    assert_out_is_overwritten(call)


def test_a_limit_beside_distances_is_refused():
    x, _, parts = padded(rand(5, 3 * HEADS * DIM), [5])

    with pytest.raises(ValueError, match="soft_cap is 2.0; allowed with distances: 0"):
        reference.attention_padded(
            x,
            parts,
            None,
            tables_of(HEADS, DIM, x.dtype, 4),
            num_heads=HEADS,
            scale=1.0,
            soft_cap=2.0,
        )
