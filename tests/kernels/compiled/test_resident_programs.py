"""The programs of decode attention that a multiprocessor holds are what the machine code allows."""

import pytest
import torch

from varlen_bench.kernel_limits import compile_call
from varlen_bench.ops.compiled import CompiledCall
from varlen_bench.ops.kv_blocks import attention_paged
from varlen_kernels.triton.attention_decode import candidate_launches, resident_programs

# Of a multiprocessor of sm_90.
# Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
REGISTERS, WARPS, SHARED_BYTES = 65_536, 64, 228 * 1024
# Registers are allocated to a warp, and shared memory to a program, which needs some more.
REGISTER_UNIT, MORE_SHARED_BYTES = 256, 1024


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads, key_heads", [(12, 12), (32, 8)], ids=str)
def test_the_default_launch_of_decode_attention_fits_so_often(heads, key_heads, head_dim, dtype):
    def decode_step(dtype):
        return attention_paged([1] * 4, [25] * 4, heads, key_heads, head_dim, dtype)

    launch = candidate_launches(head_dim, heads // key_heads, dtype)[0]
    [code] = [
        code
        for code in compile_call(CompiledCall("", decode_step), dtype, 90)
        if code.kernel == "_read_split_kernel"
    ]

    of_warp = -(-32 * code.registers // REGISTER_UNIT) * REGISTER_UNIT
    fits = min(
        REGISTERS // (of_warp * code.num_warps),
        WARPS // code.num_warps,
        SHARED_BYTES // (code.shared_bytes + MORE_SHARED_BYTES),
    )
    assert resident_programs(head_dim, dtype, launch) == fits
