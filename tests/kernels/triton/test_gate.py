"""activation(gate) * up on a GPU or in the interpreter, against the reference in fp64."""

import pytest
import torch

from varlen_kernels import reference
from varlen_kernels.triton import gate
from varlen_kernels.triton.gate import activate_gate
from varlen_kernels.tuning import forced_launch

from .compare import DTYPES, SIZES, assert_close, rand, spread
from .guards import write_guarded


@DTYPES
@SIZES
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_matches_the_reference(tokens, width, dtype, device, kind):
    x = 3 * rand(tokens, 2 * width, dtype=dtype, device=device)

    actual = write_guarded(
        lambda out: activate_gate(x, kind=kind, out=out), (tokens, width), dtype, device
    )

    assert_close(actual, reference.activate_gate(x.double(), kind=kind), dtype)


@pytest.mark.parametrize("width", [5, 768])
def test_accepts_strided_rows(width, device):
    x = rand(6, 2 * width, dtype=torch.float16, device=device)

    actual = write_guarded(
        lambda out: activate_gate(spread(x), kind="silu", out=out),
        (6, width),
        torch.float16,
        device,
        gap=16,
    )

    assert_close(actual, reference.activate_gate(x.double(), kind="silu"), torch.float16)


@pytest.mark.full
@pytest.mark.parametrize("width", [501, 1536])
def test_every_candidate_launch_matches_the_reference(width, device):
    x = rand(5, 2 * width, dtype=torch.bfloat16, device=device)
    expected = reference.activate_gate(x.double(), kind="silu")

    for launch in gate.candidate_launches(width, torch.bfloat16):
        with forced_launch("activate_gate", (width, torch.bfloat16), launch):
            assert_close(activate_gate(x, kind="silu"), expected, torch.bfloat16)


def test_a_large_negative_gate_gives_zero(device):
    x = torch.tensor([[-1e4, 1e4, 3.0, 3.0]], device=device)

    assert torch.equal(activate_gate(x, kind="silu"), torch.tensor([[0.0, 3e4]], device=device))


def test_no_tokens(device):
    assert activate_gate(torch.zeros(0, 64, device=device), kind="silu").shape == (0, 32)


def test_rejects_an_odd_width(device):
    with pytest.raises(ValueError, match="x has 7 features; it must be an even number"):
        activate_gate(torch.zeros(2, 7, device=device), kind="silu")


def test_rejects_an_out_of_another_shape(device):
    x = torch.zeros(2, 8, device=device)

    with pytest.raises(ValueError, match=r"out is \[2, 8\] torch.float32; it must be \[2, 4\]"):
        activate_gate(x, kind="silu", out=torch.zeros(2, 8, device=device))
