"""Launchers compile without a GPU, and their machine code can be read."""

import re
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from varlen_bench.dry_run import SHARED_MEMORY_LIMITS, Compilation, dry_run
from varlen_bench.machine_code import cuobjdump, read_machine_code

pytestmark = pytest.mark.full


@triton.jit(do_not_specialize=["rows"])
def _double_kernel(x_ptr, rows, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = row * STRIDE + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 2.0 * tl.load(x_ptr + at, mask=row < rows, other=0.0))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    product = tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at))
    tl.store(out_ptr + at, product)


def double(x: torch.Tensor) -> None:
    rows, width = x.shape
    launch = {"STRIDE": x.stride(0), "BLOCK": width, "num_warps": 1}
    _double_kernel[(rows,)](x, rows, **launch, enable_fp_fusion=True)


def dot(size: int, **launch: int) -> None:
    a = torch.zeros(size, size, dtype=torch.float16)
    out = torch.zeros(size, size)
    _dot_kernel[(1,)](a, a, out, SIZE=size, enable_fp_fusion=True, **launch)


@pytest.mark.parametrize("arch", [80, 90])
def test_a_launch_compiles_and_does_not_run(arch: int) -> None:
    x = torch.ones(3, 256)

    with dry_run(arch) as compiled:
        double(x)

    assert [(c.kernel, c.arch, c.num_warps) for c in compiled] == [("_double_kernel", arch, 1)]
    assert (x == 1).all()


def test_only_another_dtype_or_constant_compiles_again() -> None:
    with dry_run(90) as compiled:
        for rows in (1, 2, 3, 16, 33):
            double(torch.ones(rows, 256))
        assert len(compiled) == 1
        double(torch.ones(2, 256, dtype=torch.float16))
        double(torch.ones(2, 512))
        assert len(compiled) == 3


def test_each_dry_run_compiles_again_and_uses_the_cache_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    for arch, cached in ((80, False), (90, False), (90, True)):
        with dry_run(arch) as compiled:
            double(torch.ones(2, 256))
        assert [(c.arch, c.cached) for c in compiled] == [(arch, cached)]

    assert len(list(tmp_path.rglob("*.cubin"))) == 2


def test_a_failed_launch_restores_the_driver() -> None:
    before = triton.runtime.driver._active, triton.knobs.compilation.listener

    with pytest.raises(KeyError), dry_run(90):
        _dot_kernel[(1,)](*torch.zeros(3, 4), SIZE=2, NO_SUCH_NAME=1, enable_fp_fusion=True)

    assert (triton.runtime.driver._active, triton.knobs.compilation.listener) == before


def test_too_much_shared_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHARED_MEMORY_LIMITS, 90, 1024)

    with pytest.raises(OutOfResources, match="shared memory"), dry_run(90):
        dot(64, num_warps=4)


def test_rejects_an_unknown_gpu_and_a_process_that_interprets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="arch is 75; allowed: 80, 86, 89, 90"), dry_run(75):
        pass
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"), dry_run(90):
        pass


def test_loads_and_stores_are_counted_by_width() -> None:
    with dry_run(90) as compiled:
        # 4 and 2 fp32 values per thread, and rows that are not aligned to 16 bytes
        for x in (torch.ones(2, 512), torch.ones(2, 64), torch.ones(2, 257)[:, :256]):
            double(x)
    codes = list(map(read_machine_code, compiled))

    assert [(code.wide_loads, code.wide_stores) for code in codes] == [(4, 4), (0, 0), (0, 0)]
    assert [(code.narrow_loads, code.narrow_stores) for code in codes[:2]] == [(0, 0), (1, 1)]


def test_spilled_registers_need_stack() -> None:
    with dry_run(80) as compiled:
        double(torch.ones(2, 256))
        # just the accumulators need 32 registers
        dot(64, num_warps=4, maxnreg=32)
    small, spilled = map(read_machine_code, compiled)

    assert 8 <= small.registers <= 64
    assert small.stack_bytes == 0
    assert spilled.stack_bytes > 0


@pytest.mark.parametrize("arch", [80, 90])
def test_counts_match_the_disassembly(arch: int) -> None:
    with dry_run(arch) as compiled:
        double(torch.ones(2, 512))
        double(torch.ones(2, 257)[:, :256])
        dot(64, num_warps=4)
    for compilation in compiled:
        code = read_machine_code(compilation)
        listing = cuobjdump(compilation, "--dump-sass")

        addresses = re.findall(r"^ +/\*[0-9a-f]{4,}\*/", listing, re.MULTILINE)
        assert len(addresses) == code.instructions
        wide = len(re.findall(r"\bLDG\.\S*128\b|\bLDGSTS\.\S*128\b", listing))
        assert wide == code.wide_loads
        assert len(re.findall(r"\bLDG\.|\bLDGSTS\.", listing)) == wide + code.narrow_loads
        assert len(re.findall(r"\bSTG\.\S*128\b", listing)) == code.wide_stores
        assert len(re.findall(r"\bHMMA\.", listing)) == code.mma
        assert len(re.findall(r"\bHGMMA\.", listing)) == code.wgmma
        assert not re.search(r"\bLDL\b|\bSTL\b", listing)
    # the last kernel uses the tensor cores of its GPU
    assert (code.mma > 0, code.wgmma > 0) == (arch == 80, arch == 90)
    assert code.shared_bytes > 0
    assert code.barriers > 0


def test_invalid_machine_code_is_an_error() -> None:
    compilation = Compilation("_kernel", 90, 4, 0, "", b"no cubin", cached=False)

    with pytest.raises(RuntimeError, match="cuobjdump"):
        read_machine_code(compilation)
