"""Packed attention with keys and queries of distances, against the reference in fp64."""

import pytest
import torch

from varlen_kernels import reference
from varlen_kernels.reference.attention import Distances
from varlen_kernels.triton.attention_tiles import (
    attention_tiles,
    candidate_launches,
    mean_length_bucket,
)
from varlen_kernels.triton.attention_varlen import attention_varlen
from varlen_kernels.tuning import forced_launch

from .compare import DTYPES, assert_close, cu_seqlens_of, rand
from .guards import write_guarded

HEADS, ROWS = 2, 30
TABLES = pytest.mark.parametrize(
    "names",
    [("keys", "queries"), ("keys",), ("queries",)],
    ids=["both", "keys", "queries"],
)
BOTH = ("keys", "queries")


def tables_of(head_dim, dtype, device, reach, names=BOTH):
    """Return rows that several distances share, in any order, and the tables of these names."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, ROWS, (2 * reach + 1,), generator=generator, dtype=torch.int32)
    tables = {
        name: rand(ROWS, HEADS * head_dim, dtype=dtype, device=device, seed=seed)
        for seed, name in enumerate(names, 1)
    }
    return Distances(rows.to(device), tables.get("keys"), tables.get("queries"))


def reference64(qkv, bounds, tables, **settings):
    """Return attention in fp64; tokens past the last sequence are NaN."""
    out = qkv.new_full((len(qkv), qkv.shape[1] // 3), torch.nan, dtype=torch.float64)
    keys, queries = (None if table is None else table.double() for table in tables[1:])
    tables = Distances(tables.rows, keys, queries)
    return reference.attention_varlen(qkv.double(), bounds, out=out, distances=tables, **settings)


def check_against_reference(lengths, head_dim, dtype, device, reach=50, names=BOTH, **settings):
    settings = {"num_heads": HEADS, "scale": (3 * head_dim) ** -0.5} | settings
    tokens, bounds = sum(lengths), cu_seqlens_of(lengths, device)
    qkv = rand(tokens, 3 * HEADS * head_dim, dtype=dtype, device=device)
    tables = tables_of(head_dim, dtype, device, reach, names)

    actual = write_guarded(
        lambda out: attention_varlen(qkv, bounds, out=out, distances=tables, **settings),
        (tokens, HEADS * head_dim),
        dtype,
        device,
    )

    assert_close(actual, reference64(qkv, bounds, tables, **settings), dtype, 3.0)


@DTYPES
@TABLES
def test_matches_the_reference(names, dtype, device):
    check_against_reference([34, 1, 0], 16, dtype, device, names=names)


@pytest.mark.parametrize("length", [15, 33])
def test_a_sequence_may_end_anywhere_in_a_tile(length, device):
    check_against_reference([length], 16, torch.float16, device)


@pytest.mark.full
@pytest.mark.parametrize(
    "head_dim, dtype", [(1, torch.float16), (24, torch.float32), (65, torch.bfloat16)]
)
def test_accepts_any_head_dim_up_to_the_limit(head_dim, dtype, device):
    check_against_reference([34, 5], head_dim, dtype, device)


@pytest.mark.parametrize("reach", [0, 3])
def test_distances_past_the_ends_have_the_last_rows(reach, device):
    check_against_reference([40, 3], 16, torch.float16, device, reach)


def test_keys_in_many_blocks(device):
    check_against_reference([100], 16, torch.float16, device)


@pytest.mark.parametrize(
    "settings",
    [{"causal": True}, {"window": 20}, {"biased": True}],
    ids=["causal", "window", "bias"],
)
def test_goes_with_hidden_keys_and_a_bias(settings, device):
    bias = rand(HEADS, 41, device=device, seed=9) if settings.get("biased") else None
    settings = {name: value for name, value in settings.items() if name != "biased"}

    check_against_reference([40, 3], 16, torch.float16, device, bias=bias, **settings)


@pytest.mark.full
@pytest.mark.parametrize("mean", [1, 64])
def test_every_candidate_launch_matches_the_reference(mean, device):
    lengths = [33, 40]
    qkv, bounds = (
        rand(73, 3 * HEADS * 64, dtype=torch.float16, device=device),
        cu_seqlens_of(lengths, device),
    )
    tables = tables_of(64, torch.float16, device, 50)
    settings = {"num_heads": HEADS, "scale": 0.1}
    expected = reference64(qkv, bounds, tables, **settings)
    key = (64, torch.float16, False, False, True)

    launches = candidate_launches(*key, mean)
    # in the interpreter a launch takes a second
    for launch in launches if device.type == "cuda" else launches[:1]:
        with forced_launch("attention_varlen", (*key, mean_length_bucket(73, 2)), launch):
            actual = attention_varlen(qkv, bounds, distances=tables, **settings)
        assert_close(actual, expected, torch.float16)


def test_padding_of_a_captured_batch_is_neither_read_nor_written(device):
    bounds = torch.tensor([0, 20, 23, 23, 23], dtype=torch.int32, device=device)
    qkv = rand(40, 3 * HEADS * 16, dtype=torch.float16, device=device)
    qkv[23:] = torch.nan
    tables, settings = tables_of(16, torch.float16, device, 9), {"num_heads": HEADS, "scale": 0.2}

    actual = write_guarded(
        lambda out: attention_varlen(qkv, bounds, out=out, distances=tables, **settings),
        (40, HEADS * 16),
        torch.float16,
        device,
    )

    assert_close(actual[:23], reference64(qkv, bounds, tables, **settings)[:23], torch.float16, 2.0)
    assert actual[23:].isnan().all()


def test_has_the_same_bits_with_and_without_tiles(device):
    lengths = [33, 0, 20]
    qkv, bounds = (
        rand(58, 3 * HEADS * 16, dtype=torch.float16, device=device),
        cu_seqlens_of(lengths, device),
    )
    tables = tables_of(16, torch.float16, device, 9)
    tiles = attention_tiles(qkv, bounds, None, tables, num_heads=HEADS)

    searched = attention_varlen(qkv, bounds, num_heads=HEADS, scale=0.2, distances=tables)
    actual = attention_varlen(
        qkv, bounds, None, tiles, num_heads=HEADS, scale=0.2, distances=tables
    )

    assert torch.equal(actual[:53], searched[:53])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"keys": None}, "distances has no table; allowed: keys, queries or both"),
        ({"rows": torch.zeros(8).int()}, r"distances.rows is \[8\] .* be \[an odd number\]"),
        ({"rows": torch.zeros(9)}, r"distances.rows is \[9\] torch.float32"),
        ({"keys": torch.zeros(5, 31)}, r"distances.keys is \[5, 31\] .* be \[rows, 32\]"),
        ({"keys": torch.zeros(5, 32).half()}, r"is \[5, 32\] torch.float16; it must be"),
        ({"keys": torch.zeros(32, 5).t()}, "distances.keys has strides .1, 5."),
        (
            {"qkv": torch.zeros(4, 6 * 65), "keys": torch.zeros(5, 130)},
            "head_dim is 65; allowed with distances in torch.float32: 1 to 64",
        ),
        (
            {"qkv": torch.zeros(4, 64), "num_kv_heads": 1},
            "num_kv_heads is 1; allowed with distances: 2",
        ),
    ],
    ids=str,
)
def test_rejects_invalid_tables(change, message, device):
    arguments = {
        "qkv": torch.zeros(4, 96),
        "cu_seqlens": torch.tensor([0, 4], dtype=torch.int32),
        "rows": torch.zeros(9, dtype=torch.int32),
        "keys": torch.zeros(5, 32),
    }
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in (arguments | change).items()
    }

    distances = Distances(arguments.pop("rows"), arguments.pop("keys"), None)

    with pytest.raises(ValueError, match=message):
        attention_varlen(**arguments, distances=distances, num_heads=HEADS, scale=0.25)
