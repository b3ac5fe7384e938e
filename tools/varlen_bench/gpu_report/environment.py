"""What a machine is and what it has installed: `python -m varlen_bench.gpu_report.environment`."""

import platform
import shutil
import subprocess

from varlen_bench.harness.machine import cpu_count, cpu_name, gpu_driver
from varlen_bench.harness.rows import installed_version

_PACKAGES = (
    "torch triton numpy transformers tokenizers safetensors typer rich pytest pytest-timeout pytest-xdist"
    " pytest-asyncio hypothesis numba liger-kernel tritonclient"
).split()
_PROGRAMS = ("gcc", "cc", "nvcc", "ncu", "compute-sanitizer", "git")
_QUERY = "name,compute_cap,memory.total,clocks.sm,clocks.mem,power.limit"


def lines() -> list[str]:
    """Return one line a fact."""
    present = [name for name in _PROGRAMS if shutil.which(name)]
    return [
        f"gpu: {_gpu()}",
        f"driver: {gpu_driver()}",
        f"cpu: {cpu_name()} x{cpu_count()}",
        f"python: {platform.python_version()}",
        f"packages: {' '.join(f'{name}={installed_version(name)}' for name in _PACKAGES)}",
        f"programs: {' '.join(present)}",
    ]


def _gpu() -> str:
    if shutil.which("nvidia-smi") is None:
        return "nvidia-smi is not installed"
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=15)
    return " | ".join((done.stdout or done.stderr).strip().splitlines())


if __name__ == "__main__":
    print("\n".join(lines()))
