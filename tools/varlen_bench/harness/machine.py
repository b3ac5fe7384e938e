"""The machine of a benchmark: its CPU, its speed at this moment, its GPU driver."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np

# Instruction sets that decide the speed of bf16 and int8.
_INSTRUCTION_SETS = ("avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
_SPEED_SECONDS = 0.2
# A product of matrices with this side takes milliseconds: long enough to notice other work on a core.
_SIDE = 512


def cpu_count() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def cpu_name() -> str:
    """Return the name of the CPU, its instruction sets, and a lower level."""
    # not in the environments of other engines
    from varlen_kernels import CPU_LEVEL_VARIABLE

    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (li.partition(":") for li in lines)}
    flags = set(fields.get("flags", "").split())
    present = [name for name in _INSTRUCTION_SETS if name in flags]
    if level := os.environ.get(CPU_LEVEL_VARIABLE):
        present.append(f"{CPU_LEVEL_VARIABLE}={level}")
    return " ".join([fields.get("model name", platform.machine()), *present])


def has_native_bf16() -> bool:
    """Return whether this CPU multiplies bf16 in hardware."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


def gflops() -> float:
    """Return the present speed of fp32 matrix products on all cores, in GFLOP/s.

    A shared machine changes its speed; rows that carry this figure can be compared. Call it after a pass: threads of
    these products spin for a while, on cores that a pass needs.
    """
    matrix = np.full((_SIDE, _SIDE), 0.5, dtype=np.float32)
    product = np.empty_like(matrix)
    np.matmul(matrix, matrix, out=product)
    began = time.perf_counter()
    count = 0
    while (passed := time.perf_counter() - began) < _SPEED_SECONDS:
        np.matmul(matrix, matrix, out=product)
        count += 1
    return count * 2 * _SIDE**3 / passed / 1e9


def gpu_driver() -> str:
    """Return the version of the NVIDIA driver, or "unknown"."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown"
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else "unknown"
