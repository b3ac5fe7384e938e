"""The last program sees what all others have written: barriers and fences of machine code."""

import re

import pytest
import torch

from varlen_bench.dry_run import dry_run
from varlen_bench.inspect_kernels import ARCHES
from varlen_bench.machine_code import cuobjdump
from varlen_bench.ops.compiled import CompiledCall

DTYPE = {"sample_tokens": torch.float32}
DECODE = {"lengths": [525] * 4, "new": [1] * 4}
CALLS = [
    CompiledCall("attention_paged", "", DECODE | {"heads": 12, "kv_heads": 12, "head_dim": 64}),
    CompiledCall("attention_paged", "", DECODE | {"heads": 32, "kv_heads": 8, "head_dim": 128}),
    CompiledCall("sample_tokens", "", {"lengths": [16] * 4, "vocabulary": 50257}),
    CompiledCall("norm_next_tokens", "", {"lengths": [1] * 4, "vocabulary": 50257}),
    CompiledCall("norm_next_tokens", "", {"lengths": [1] * 16, "vocabulary": 50257}),
]
# The stores of all threads come before a barrier, one thread adds after a fence and then drops its L1 cache, and the
# others read after one more barrier. PTX ISA, "Memory Consistency Model": barriers and fences are cumulative.
ORDER = re.compile(
    r"\bSTG.*?\bBAR\.SYNC.*?\bMEMBAR\.\w+\.GPU.*?\bATOMG\.E\.ADD\S*\.STRONG\.GPU.*?\bCCTL\.IVALL"
    r".*?\bBAR\.SYNC.*?\bLDG\.E\S*\.STRONG\.GPU",
    re.DOTALL,
)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.op}-{call.sizes.get('head_dim')}")
def test_results_are_stored_before_the_arrival_and_read_after_it(call, arch):
    with dry_run(arch) as compiled:
        call.run(DTYPE.get(call.op, torch.bfloat16))

    # sampling has two such kernels
    kernels = [each for each in compiled if "acq_rel" in each.ptx]
    assert len(kernels) == (2 if call.op == "sample_tokens" else 1)
    for kernel in kernels:
        assert kernel.ptx.count("acq_rel") == 1
        assert ORDER.search(cuobjdump(kernel, "--dump-sass")), kernel.kernel
