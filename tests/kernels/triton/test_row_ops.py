"""Ops on rows on a GPU or interpreted, against the reference in fp64."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from varlen_kernels import reference
from varlen_kernels.triton import activation, norms
from varlen_kernels.triton.rows import row_launches, tile_launches
from varlen_kernels.tuning import forced_launch

from .compare import DTYPES, SIZES, assert_close, rand, spread
from .guards import write_guarded

EPS = {"eps": 1e-5}


def rows_and_vectors(rows: int, vectors: int, *, factor: int = 1, scale: float = 1.0):
    """Return what makes the arguments of an op: rows, then vectors of their width."""

    def make(tokens, width, dtype, device):
        shapes = [(tokens, factor * width)] * rows + [(width,)] * vectors
        args = [
            rand(*shape, dtype=dtype, device=device, seed=seed) for seed, shape in enumerate(shapes)
        ]
        return [scale * args[0], *args[1:]]

    return make


def ids_and_tables(tokens, width, dtype, device, id_dtype=torch.int32):
    """Return ids, tables, weight and bias; the ids include the first and last rows."""
    rows = (23, 70, 2)
    tables = [rand(n, width, dtype=dtype, device=device, seed=i) for i, n in enumerate(rows)]
    ids = []
    for seed, n in enumerate(rows):
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randint(n, (tokens,), generator=generator)
        chosen[:1], chosen[1:2] = 0, n - 1
        ids.append(chosen.to(device, id_dtype))
    vectors = [rand(width, dtype=dtype, device=device, seed=i) for i in (3, 4)]
    return [*ids, *tables, *vectors]


@dataclass(frozen=True)
class RowOp:
    """An op with one result of rows.

    Attributes:
        inputs: makes its arguments, given tokens, width, dtype and device.
        launches: its candidate launches, given width and dtype.
        strided: the arguments that may have gaps between rows.
        replaced: the argument whose memory may be the result's.
    """

    run: Callable[..., torch.Tensor]
    inputs: Callable[..., list[torch.Tensor]]
    launches: Callable[..., Any]
    strided: tuple[int, ...] = (0,)
    replaced: int | None = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, args, out=None):
        return self.run(*args, **self.options, out=out)

    def expected(self, args):
        """Return the result of the reference in fp64."""
        exact = [each.double() if each.is_floating_point() else each for each in args]
        return getattr(reference, self.run.__name__)(*exact, **self.options)

    def apart(self, args):
        """Return the arguments, with gaps between the rows."""
        gaps = dict(zip(self.strided, (8, 24, 16), strict=False))
        return [spread(each, gaps[i]) if i in gaps else each for i, each in enumerate(args)]


NORMS = {
    "add_layer_norm": RowOp(
        norms.add_layer_norm, rows_and_vectors(2, 2), row_launches, (0, 1), options=EPS
    ),
    "layer_norm": RowOp(norms.layer_norm, rows_and_vectors(1, 2), row_launches, options=EPS),
    "layer_norm without bias": RowOp(
        norms.layer_norm,
        rows_and_vectors(1, 1),
        row_launches,
        options={"bias": None, **EPS},
    ),
    "rms_norm": RowOp(norms.rms_norm, rows_and_vectors(1, 1), row_launches, options=EPS),
}
OPS = NORMS | {
    "embed_layer_norm": RowOp(
        norms.embed_layer_norm,
        ids_and_tables,
        row_launches,
        (3, 4, 5),
        replaced=None,
        options=EPS,
    ),
    **{
        f"activate {kind}": RowOp(
            activation.activate,
            rows_and_vectors(1, 1, scale=3.0),
            tile_launches,
            options={"kind": kind},
        )
        for kind in ("gelu", "gelu_tanh", "relu", "silu")
    },
    **{
        f"activate_gate {kind}": RowOp(
            activation.activate_gate,
            rows_and_vectors(1, 0, factor=2, scale=3.0),
            tile_launches,
            replaced=None,
            options={"kind": kind},
        )
        for kind in ("silu", "gelu_tanh")
    },
}
EACH = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
IN_PLACE = {name: op for name, op in OPS.items() if op.replaced is not None}


@DTYPES
@SIZES
@EACH
def test_matches_the_reference(op, tokens, width, dtype, device):
    args = op.inputs(tokens, width, dtype, device)

    actual = write_guarded(lambda out: op(args, out), (tokens, width), dtype, device)

    assert_close(actual, op.expected(args), dtype)


@DTYPES
@pytest.mark.parametrize("width", [5, 501, 768])
@EACH
def test_accepts_strided_rows(op, width, dtype, device):
    args = op.inputs(6, width, dtype, device)

    actual = write_guarded(lambda out: op(op.apart(args), out), (6, width), dtype, device, gap=16)

    assert_close(actual, op.expected(args), dtype)


@DTYPES
@pytest.mark.parametrize("width", [63, 300, 2048])
@pytest.mark.parametrize("op", IN_PLACE.values(), ids=IN_PLACE)
def test_in_place_writes_the_same_bits(op, width, dtype, device):
    args = op.inputs(6, width, dtype, device)
    fresh, replaced = op(args), args[op.replaced]

    returned = op(args, replaced)

    assert returned.data_ptr() == replaced.data_ptr()
    assert torch.equal(replaced, fresh)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("width", [101, 384, 768, 3072])
@EACH
def test_every_candidate_launch_matches_the_reference(op, width, dtype, device):
    args = op.inputs(9, width, dtype, device)
    expected, name = op.expected(args), op.run.__name__

    for launch in op.launches(width, dtype):
        with forced_launch(name, (width, dtype), launch):
            actual = op(args)
        assert_close(actual, expected, dtype)


@pytest.mark.parametrize("op", NORMS.values(), ids=NORMS)
def test_nan_in_a_token_changes_no_other_token(op, device):
    args = op.inputs(8, 384, torch.float16, device)
    fresh = op(args)
    args[0][3, 100] = torch.nan

    actual = op(args)

    others = torch.arange(8) != 3
    assert actual[3].isnan().all()
    assert torch.equal(actual[others], fresh[others])


@EACH
def test_no_tokens(op, device):
    assert op(op.inputs(0, 64, torch.float16, device)).shape == (0, 64)
