"""The programs of decode attention that a multiprocessor holds, by machine code."""

import pytest
import torch

from varlen_bench.dry_run import dry_run
from varlen_bench.inspect_kernels import ARCHES, compile_call
from varlen_bench.machine_code import read_machine_code
from varlen_bench.ops.compiled import CompiledCall
from varlen_kernels.reference.paged import FP8
from varlen_kernels.triton.attention_paged import (
    attention_paged,
    candidate_launches,
    resident_programs,
)

# Limits of a multiprocessor; shared memory by compute capability.
# Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
REGISTERS, WARPS, SHARED_BYTES = 65_536, 64, {80: 164 * 1024, 90: 228 * 1024}
# Registers are allocated to a warp, and shared memory to a program, which needs some more.
REGISTER_UNIT, MORE_SHARED_BYTES = 256, 1024


def fits(code, arch):
    """Return the programs of a kernel that a multiprocessor holds."""
    of_warp = -(-32 * code.registers // REGISTER_UNIT) * REGISTER_UNIT
    return min(
        REGISTERS // (of_warp * code.num_warps),
        WARPS // code.num_warps,
        SHARED_BYTES[arch] // (code.shared_bytes + MORE_SHARED_BYTES),
    )


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads, key_heads", [(12, 12), (32, 8)], ids=str)
def test_as_many_programs_of_a_default_launch_fit_or_one_more(
    heads, key_heads, head_dim, dtype, arch
):
    sizes = {"heads": heads, "kv_heads": key_heads, "head_dim": head_dim}
    decode_step = CompiledCall(
        "attention_paged", "", {"lengths": [525] * 4, "new": [1] * 4, **sizes}
    )
    launch = candidate_launches(head_dim, heads // key_heads, dtype)[0]
    [code] = [
        code
        for code in compile_call(decode_step, dtype, arch)
        if code.kernel == "_read_split_kernel"
    ]

    resident = resident_programs(head_dim, dtype, launch)
    assert fits(code, arch) - 1 <= resident <= fits(code, arch)


@pytest.mark.parametrize("new", [1, 40])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_fp8_is_read_without_a_stack_by_as_many_programs(dtype, head_dim, new):
    heads = {"num_heads": 8, "num_kv_heads": 2}
    shape, lengths = (140, 2, 16, head_dim), torch.full((4,), 549, dtype=torch.int32)
    bounds = torch.arange(5, dtype=torch.int32)
    caches = (torch.zeros(shape).to(FP8) for _ in range(2))
    qkv = torch.zeros(4 * new, 12 * head_dim, dtype=dtype)

    with dry_run(90) as compiled:
        table = torch.arange(140, dtype=torch.int32), bounds * 35
        attention_paged(qkv, *caches, bounds * new, lengths, *table, **heads, scale=0.1)

    codes = {each.kernel: read_machine_code(each) for each in compiled}
    assert len(codes) == (2 if new == 1 else 3)
    assert all(code.stack_bytes == 0 for code in codes.values())
    launch = candidate_launches(head_dim, 4, FP8)[0]
    most = fits(codes["_read_split_kernel"], 90)
    assert most - 1 <= resident_programs(head_dim, FP8, launch) <= most
