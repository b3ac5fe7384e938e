"""Programmatic dependent launch: which kernels take part, and that they wait before they touch memory."""

import re

import pytest
import torch

from varlen_bench.dry_run import dry_run
from varlen_bench.ops.any_batch import ANY_BATCH
from varlen_bench.ops.call import kernels

# The ops of an encoder's forward pass and of a step of generation.
OPS = [
    "activate",
    "activate_gate",
    "add_layer_norm",
    "append_kv",
    "attention_paged",
    "attention_tiles",
    "attention_varlen",
    "embed",
    "embed_layer_norm",
    "first_tokens",
    "layer_norm",
    "norm_heads",
    "paged_tiles",
    "pool",
    "residual_layer_norm",
    "residual_rms_norm",
    "rms_norm",
    "rotary",
]
ACCESS = re.compile(r"\b(?:ld|st|cp\.async)\S*\.global|\bret;")


def compiled_ptx(op, arch):
    call = ANY_BATCH[op]([100, 70], torch.bfloat16)
    with dry_run(arch) as compiled:
        call.run(kernels("fused"), call.make_empty())
    return [compilation.ptx for compilation in compiled]


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_waits_before_it_touches_memory_or_returns(op):
    for ptx in compiled_ptx(op, 90):
        access = ACCESS.search(ptx)
        assert access is not None
        assert 0 <= ptx.find("griddepcontrol.wait") < access.start()
        assert ptx.find("griddepcontrol.wait") < ptx.find("griddepcontrol.launch_dependents")


@pytest.mark.parametrize("op", OPS)
def test_an_older_gpu_has_none_of_it(op):
    for ptx in compiled_ptx(op, 80):
        assert "griddepcontrol" not in ptx
