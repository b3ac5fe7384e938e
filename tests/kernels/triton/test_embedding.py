"""Embeddings on a GPU or interpreted: types of ids, positions, and what is refused."""

import pytest
import torch

from varlen_kernels.triton.norms import embed, embed_layer_norm
from varlen_kernels.triton.rows import tile_launches
from varlen_kernels.tuning import forced_launch

from .compare import DTYPES, assert_close, rand, spread
from .guards import write_guarded
from .test_row_ops import OPS
from .test_row_ops import ids_and_tables as inputs

EPS = 1e-5


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
def test_accepts_both_integer_types(id_dtype, device):
    args = inputs(7, 384, torch.float16, device, id_dtype)

    assert_close(
        embed_layer_norm(*args, eps=EPS), OPS["embed_layer_norm"].expected(args), torch.float16
    )


@pytest.mark.parametrize(
    "index, change, message",
    [
        (1, lambda t: t[:2], r"position_ids has shape \[2\] .* must be \[3\]"),
        (2, lambda t: t.float(), "type_ids is torch.float32; allowed: torch.int32, torch.int64"),
        (4, lambda t: t[:, :7], r"position_table is \[1, 7\]"),
        (5, lambda t: t.half(), "type_table is .* torch.float16"),
        (7, lambda t: t[:7], r"bias has shape \[7\]"),
    ],
    ids=["ids of another length", "ids that are not integers", "width", "dtype", "bias"],
)
def test_rejects_invalid_arguments(index, change, message, device):
    args = inputs(3, 8, torch.float32, device)
    args[index] = change(args[index])

    with pytest.raises(ValueError, match=message):
        embed_layer_norm(*args, eps=EPS)


@DTYPES
@pytest.mark.parametrize("has_positions", [False, True], ids=["tokens", "positions"])
@pytest.mark.parametrize("width, scale", [(5, 1.0), (501, 22.5), (768, 1.0)])
def test_embed_matches_the_reference(width, scale, has_positions, dtype, device):
    token_ids, position_ids, _, tokens, positions, *_ = inputs(7, width, dtype, device, torch.int64)
    args = [token_ids, spread(tokens)]
    args += [position_ids.int(), spread(positions, 24)] if has_positions else []

    actual = write_guarded(
        lambda out: embed(*args, scale=scale, out=out), (7, width), dtype, device, gap=16
    )

    expected = tokens.float()[token_ids] * scale
    if has_positions:
        expected += positions.float()[position_ids]
    if scale == 1:
        assert torch.equal(actual, expected.to(dtype))
    else:
        assert_close(actual, expected, dtype)


@pytest.mark.full
def test_every_candidate_launch_of_embed_gives_the_same_bits(device):
    token_ids, position_ids, _, tokens, positions, *_ = inputs(9, 300, torch.bfloat16, device)
    fresh = embed(token_ids, tokens, position_ids, positions)

    for launch in tile_launches(300, torch.bfloat16):
        with forced_launch("embed", (300, torch.bfloat16), launch):
            assert torch.equal(embed(token_ids, tokens, position_ids, positions), fresh)


def test_embed_rejects_a_table_of_another_width(device):
    ids = torch.zeros(3, dtype=torch.int32, device=device)

    with pytest.raises(ValueError, match=r"position_table is \[1, 9\]"):
        embed(ids, rand(4, 8, device=device), ids, rand(4, 9, device=device))
