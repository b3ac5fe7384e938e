"""The programs of decode attention that a multiprocessor holds, by machine code."""

import pytest
import torch

from varlen_bench.inspect_kernels import ARCHES, compile_call
from varlen_bench.ops.compiled import CompiledCall
from varlen_kernels.triton.attention_decode import candidate_launches, resident_programs

# Limits of a multiprocessor; shared memory by compute capability.
# Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
REGISTERS, WARPS, SHARED_BYTES = 65_536, 64, {80: 164 * 1024, 90: 228 * 1024}
# Registers are allocated to a warp, and shared memory to a program, which needs some more.
REGISTER_UNIT, MORE_SHARED_BYTES = 256, 1024


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

    of_warp = -(-32 * code.registers // REGISTER_UNIT) * REGISTER_UNIT
    fits = min(
        REGISTERS // (of_warp * code.num_warps),
        WARPS // code.num_warps,
        SHARED_BYTES[arch] // (code.shared_bytes + MORE_SHARED_BYTES),
    )
    assert fits - 1 <= resident_programs(head_dim, dtype, launch) <= fits
