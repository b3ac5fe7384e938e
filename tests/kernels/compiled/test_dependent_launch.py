"""Programmatic dependent launch: which kernels take part, and that they wait before they touch memory."""

import re

import pytest
import torch

from varlen_bench.dry_run import dry_run
from varlen_bench.machine_code import cuobjdump
from varlen_bench.ops.call import kernels
from varlen_bench.ops.table import op_call

# The ops of an encoder's forward pass, of a step of generation, and of a step of searches.
OPS = [
    "activate",
    "activate_gate",
    "add_layer_norm",
    "advance_searches",
    "append_kv",
    "attention_paged",
    "attention_tiles",
    "attention_varlen",
    "beam_step",
    "copy_blocks",
    "embed",
    "embed_layer_norm",
    "first_tokens",
    "follow_beams",
    "layer_norm",
    "linear_groups",
    "norm_heads",
    "paged_tiles",
    "pool",
    "residual_layer_norm",
    "residual_rms_norm",
    "rms_norm",
    "rotary",
    "sample_tokens",
]
# An access to global memory, or the end of a program, in PTX and in machine code.
ACCESS = re.compile(r"\b(?:ld|st|cp\.async)\S*\.global|\bret;")
MACHINE_ACCESS = re.compile(r"\b(?:LDG|STG|LDGSTS|LD|ST|ATOMG?|RED|UBLKCP|EXIT)\b")


def compile_op(op, arch):
    call = op_call(op, torch.bfloat16, lengths=[100, 70])
    with dry_run(arch) as compiled:
        call.run(kernels("fused"), call.make_empty())
    return compiled


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_waits_before_it_touches_memory_or_returns(op):
    for compilation in compile_op(op, 90):
        ptx = compilation.ptx
        access = ACCESS.search(ptx)
        assert access is not None
        assert 0 <= ptx.find("griddepcontrol.wait") < access.start()
        assert ptx.find("griddepcontrol.wait") < ptx.find("griddepcontrol.launch_dependents")


@pytest.mark.parametrize("op", OPS)
def test_the_assembler_moves_no_access_before_the_wait(op):
    for compilation in compile_op(op, 90):
        code = cuobjdump(compilation, "--dump-sass")
        access = MACHINE_ACCESS.search(code)
        assert access is not None
        assert 0 <= code.find("ACQBULK") < access.start(), compilation.kernel


@pytest.mark.parametrize("op", OPS)
def test_an_older_gpu_has_none_of_it(op):
    for compilation in compile_op(op, 80):
        assert "griddepcontrol" not in compilation.ptx


# Ops whose weights are requested before the wait.
FEW_ROWS = ["linear_residual", "norm_append_kv", "norm_linear", "norm_next_tokens"]


@pytest.mark.parametrize("rows", [1, 4, 16, 64])
@pytest.mark.parametrize("op", FEW_ROWS)
def test_weights_and_nothing_else_are_requested_before_the_wait(op, rows):
    call = op_call(op, torch.bfloat16, lengths=[1] * rows, hidden=2048)
    with dry_run(90) as compiled:
        call.run(kernels("fused"), call.make_empty())

    (compilation,) = compiled
    before, after = cuobjdump(compilation, "--dump-sass").split("ACQBULK")
    # into registers, 128 bits at a time, or lines into the L2 cache
    request = "LDG.E.128" if rows == 1 else "CCTL.E.PF2"
    found = [request for _ in re.findall(rf"\b{re.escape(request)}", before)]
    assert found == re.findall(r"\b(?:LDG|STG|LDGSTS|ATOMG?|RED|CCTL|EXIT)\b[.\w]*", before)
    assert found
    # rows are read after it
    assert re.search(r"\b(?:LDG|LDGSTS)\b", after)
    # the instruction that lets the next kernel start
    assert "PREEXIT" in after
