"""Device and dtype of a model, and what else decides the time of a batch.

The hash of a checkpoint covers its config.json, and header and size of each safetensors file, which list the tensors
with shape and dtype. A model that is trained further keeps its measured costs, and hashing does not read the weights.
"""

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from threading import Lock, Thread

import torch

import varlen.execution
import varlen.memory
import varlen.models
import varlen.program
import varlen_kernels
from varlen.config import CODED, Device, DType, EngineConfig
from varlen.costs.store import code_hash, cpu_name
from varlen.errors import ConfigError
from varlen.memory.planner import memory_errors
from varlen.models.checkpoint.extraction import config_name
from varlen.models.checkpoint.files import has_file, read_bytes
from varlen.models.checkpoint.weights import locate_weights, shards
from varlen.models.checkpoint_folder import Checkpoint
from varlen.program.rank import ALONE, Rank
from varlen.tasks import TASKS, Task
from varlen_kernels.cpu.calls.run_calls import has_compiled_ops
from varlen_kernels.cpu.native.target_cpu import target_cpu
from varlen_kernels.machine_memory import memory_limit

# Microseconds of all cores that a container may use, and the period in microseconds; "max 100000" without a limit.
_CGROUP_CORES = Path("/sys/fs/cgroup/cpu.max")

_setting_cores = Lock()

_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
# Dtypes of each device.
_ALLOWED: Mapping[Device, tuple[DType, ...]] = {
    "cpu": ("auto", "fp32", "bf16", "int8", "int4"),
    "cuda": ("auto", "fp32", "fp16", "bf16", "int8", "fp8"),
}


def choose_device(name: Device, index: int = 0) -> torch.device:
    """Return the torch device for a setting; `auto` prefers a CUDA GPU.

    Raises:
        ConfigError: the GPU is absent, or the package triton, which its kernels need, is not installed.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not gpus):
        return torch.device("cpu")
    if index >= gpus:
        seen = f"torch sees {gpus} CUDA GPUs" if gpus else "torch sees no CUDA GPU here"
        raise ConfigError(f'device is "{name}", GPU {index}; {seen}: set device to "cpu"')
    if find_spec("triton") is None:
        raise ConfigError(
            f'device is "{name}" and there is a GPU, but the package triton is not installed: '
            'pip install triton, or set device to "cpu"'
        )
    return torch.device("cuda", index)


def check_dtype(name: DType, device: Device) -> None:
    """Raise ConfigError if the setting `device` excludes a dtype; `auto` excludes none.

    A CPU has no fast arithmetic for fp16 and fp8, and a GPU no linear layers in int4 here.
    """
    allowed = _ALLOWED.get(device, (name,))
    if name not in allowed:
        here, needed = ("CPU", "GPU") if device == "cpu" else ("GPU", "CPU")
        raise ConfigError(
            f'dtype is "{name}", which needs a {needed}; allowed on a {here}: {", ".join(allowed)}'
        )


def check_task_dtype(name: DType, task: Task) -> None:
    """Raise ConfigError if a task does not run a dtype.

    Vectors lose too much with weights of 4 bits.
    """
    if name == "int4" and not TASKS[task].is_iterative:
        raise ConfigError(
            f'dtype is "int4", which the tasks generate and translate have, and the task is "{task}";'
            " allowed: auto, fp32, bf16, int8"
        )


def check_task_device(device: torch.device, task: Task) -> None:
    """Raise ConfigError if a task does not run on a device.

    No kernel for GPUs has the LSTM over the words of a text.
    """
    if device.type == "cuda" and task == "extract":
        raise ConfigError(
            'the task "extract" runs on CPUs only in this version; set device to cpu, or the instance to KIND_CPU'
        )


def choose_dtype(name: DType, device: torch.device) -> torch.dtype:
    """Return the torch dtype for a setting.

    `auto` is bf16 where the device multiplies it natively, else fp16 on a GPU and fp32 on a CPU. For int8, int4 and fp8
    it is the dtype of all but linear layers, as for `auto`; on a CPU compiled code has to multiply bf16.

    Raises:
        ConfigError: see `check_dtype`.
    """
    on_cpu = device.type == "cpu"
    check_dtype(name, "cpu" if on_cpu else "cuda")
    if name in _DTYPES:
        return _DTYPES[name]
    if not on_cpu:
        native = torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if native else torch.float16
    if name in CODED:
        return torch.bfloat16 if target_cpu().has("avx512bf16") else torch.float32
    capabilities = torch.cpu.get_capabilities()
    fast = capabilities.get("amx_bf16") or capabilities.get("avx512_bf16")
    return torch.bfloat16 if fast else torch.float32


@contextmanager
def device_memory(refusal: str) -> Iterator[None]:
    """Refuse the settings, by ConfigError with this message, if the device runs out of memory."""
    try:
        with memory_errors():
            yield
    except MemoryError:
        raise ConfigError(refusal) from None


def memory_of(device: torch.device, processes: int = 1) -> int:
    """Return the memory of the machine or container, or of all processes' GPUs, in bytes."""
    if device.type == "cuda":
        return processes * torch.cuda.get_device_properties(device).total_memory
    return memory_limit()


def usable_cores() -> int:
    """Return the number of cores: those that torch uses, or the container's limit."""
    cores = torch.get_num_threads()
    try:
        quota, period = map(int, _CGROUP_CORES.read_text().split())
    except (OSError, ValueError):
        # no container, or one without a limit
        return cores
    return max(1, min(cores, math.ceil(quota / period)))


def cores_of_rank(config: EngineConfig) -> int:
    """Return the number of cores that one rank or stage of a model uses."""
    return max(1, (config.threads or usable_cores()) // config.num_processes)


def check_ranks(config: EngineConfig, device: torch.device, *, isolated: bool) -> None:
    """Raise ConfigError if a model cannot be divided among processes there."""
    on_gpu = device.type == "cuda"
    if config.pipeline_parallel > 1 and on_gpu:
        raise ConfigError(
            f"pipeline_parallel is {config.pipeline_parallel}, which needs a CPU: set device to"
            ' "cpu", or pipeline_parallel to 1'
        )
    for name in ("tensor_parallel", "pipeline_parallel"):
        count = getattr(config, name)
        if count > 1 and not isolated:
            raise ConfigError(
                f"{name} is {count}, which needs a server; in process, a model is one process"
            )
    ranks, first = config.tensor_parallel, device.index or 0
    if ranks > 1 and on_gpu and first + ranks > (seen := torch.cuda.device_count()):
        raise ConfigError(
            f"tensor_parallel is {ranks}: each rank has a GPU, from GPU {first} on, and torch sees"
            f" {seen}; lower tensor_parallel, or let the server see more (CUDA_VISIBLE_DEVICES)"
        )


def use_one_core() -> None:
    """Have torch use one core in this thread; in others the number stays."""
    with _setting_cores:
        # torch applies its default when a thread first asks, even over the thread's own setting: so ask, then set
        cores = torch.get_num_threads()
        torch.set_num_threads(1)
        # the last setting is also the default of later threads, so another thread restores it
        restore = Thread(target=torch.set_num_threads, args=(cores,))
        restore.start()
        restore.join()


def name_of(device: torch.device) -> str:
    """Return the name of a device for the log."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({device})"
    return f"{torch.get_num_threads()} threads"


# Our own packages that run a batch.
_PACKAGES = (varlen.models, varlen.program, varlen.execution, varlen.memory, varlen_kernels)
# A safetensors file begins with the length of its header, a little-endian number of this many bytes.
_LENGTH_BYTES = 8


def cost_fields(
    checkpoint: Checkpoint, device: torch.device, rank: Rank = ALONE
) -> Mapping[str, str]:
    """Return what decides the run time of a batch beside settings, by name.

    Raises:
        CheckpointError, OSError: see `checkpoint_hash`.
    """
    return {
        "checkpoint": checkpoint_hash(checkpoint.weights_folder),
        "device": device_name(device),
        **({} if rank == ALONE else {"ranks": str(rank.size)}),
        **library_versions(device),
    }


def checkpoint_hash(folder: Path) -> str:
    """Return a hash of a checkpoint's architecture, in hexadecimal digits.

    Raises:
        CheckpointError: there are no safetensors files.
        OSError: one cannot be read.
    """
    digest = hashlib.sha256()
    # static embeddings may have none
    if has_file(folder, name := config_name(folder)):
        digest.update(read_bytes(folder, name))
    for shard in shards(folder):
        path = locate_weights(folder, shard.name)
        with path.open("rb") as file:
            length = file.read(_LENGTH_BYTES)
            digest.update(length)
            digest.update(file.read(int.from_bytes(length, "little")))
        digest.update(path.stat().st_size.to_bytes(_LENGTH_BYTES, "little"))
    return digest.hexdigest()


def device_name(device: torch.device) -> str:
    """Return model and size of a device, such as "Intel Xeon 2.50GHz, AVX512, 2 cores"."""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        return f"{gpu.name}, {gpu.multi_processor_count} multiprocessors"
    cores = len(os.sched_getaffinity(0))
    return f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {cores} cores"


def library_versions(device: torch.device) -> Mapping[str, str]:
    """Return the versions of the libraries that run a batch, by name.

    Our own version is a hash of the code: a backend that was copied into a server's folder has no package version, and
    one in development changes without a new version.
    """
    versions = {"varlen": _own_code_hash(), "torch": str(torch.__version__)}
    if device.type == "cuda":
        versions["triton"] = _version("triton")
    elif has_compiled_ops():
        versions["level"] = target_cpu().level
    return versions


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        # some builds of torch bring it under another name
        return "unknown"


@cache
def _own_code_hash() -> str:
    """Return the hash of our own code.

    It is read once, since this process runs what it has imported.
    """
    return code_hash([Path(folder) for package in _PACKAGES for folder in package.__path__])
