"""The device and dtype that a setting selects, on machines with and without GPUs."""

import pytest
import torch

from varlen.errors import ConfigError
from varlen.execution import device as module
from varlen.execution.device import choose_device, choose_dtype
from varlen_kernels import cpu
from varlen_kernels.ops import kernels_for

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that makes torch report `count` GPUs of one compute capability."""

    def see(count, capability=(9, 0)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    return see


@pytest.mark.parametrize(
    "name, count, index, expected",
    [
        ("auto", 0, 0, "cpu"),
        ("auto", 1, 0, "cuda:0"),
        ("auto", 2, 1, "cuda:1"),
        ("cuda", 1, 0, "cuda:0"),
        ("cpu", 0, 0, "cpu"),
        ("cpu", 2, 1, "cpu"),
    ],
)
def test_auto_takes_a_gpu_where_there_is_one(gpus, name, count, index, expected):
    gpus(count)

    assert choose_device(name, index) == torch.device(expected)


@pytest.mark.parametrize(
    "name, count, index, message",
    [
        ("cuda", 0, 0, 'device is "cuda", GPU 0; torch sees no CUDA GPU here: set device to "cpu"'),
        ("cuda", 1, 1, 'device is "cuda", GPU 1; torch sees 1 CUDA GPUs'),
        ("auto", 2, 2, 'device is "auto", GPU 2; torch sees 2 CUDA GPUs'),
    ],
)
def test_refuses_a_gpu_that_is_not_there(gpus, name, count, index, message):
    gpus(count)

    with pytest.raises(ConfigError, match=message):
        choose_device(name, index)


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_says_how_to_get_triton_where_a_gpu_lacks_it(gpus, monkeypatch, name):
    gpus(1)
    monkeypatch.setattr(module, "find_spec", lambda package: None)

    with pytest.raises(
        ConfigError, match=r'triton is not installed: pip install triton, or set device to "cpu"'
    ):
        choose_device(name)


@pytest.mark.parametrize(
    "capabilities, dtype",
    [
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": False, "avx2": True}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_auto_is_bf16_where_the_cpu_multiplies_it_natively(monkeypatch, capabilities, dtype):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)

    assert choose_dtype("auto", CPU) is dtype


@pytest.mark.parametrize(
    "capability, dtype",
    [((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)],
    ids=str,
)
def test_auto_is_bf16_where_the_gpu_multiplies_it_natively(gpus, capability, dtype):
    gpus(1, capability)

    assert choose_dtype("auto", GPU) is dtype


def test_fp16_is_for_gpus(gpus):
    gpus(1)
    assert choose_dtype("fp16", GPU) is torch.float16

    with pytest.raises(ConfigError, match='dtype is "fp16", which needs a GPU; allowed on a CPU'):
        choose_dtype("fp16", CPU)


@pytest.mark.parametrize(
    ("dtype", "device", "allowed"),
    [
        ("fp8", CPU, "a GPU; allowed on a CPU: auto, fp32, bf16, int8, int4"),
        ("int4", GPU, "a CPU; allowed on a GPU: auto, fp32, fp16, bf16, int8, fp8"),
    ],
    ids=["fp8", "int4"],
)
def test_codes_that_a_device_does_not_run_are_refused(gpus, dtype, device, allowed):
    gpus(1)

    with pytest.raises(ConfigError, match=f'dtype is "{dtype}", which needs {allowed}'):
        choose_dtype(dtype, device)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_activations_beside_codes_of_a_gpu_have_the_dtype_of_auto(gpus, dtype):
    gpus(1, (7, 5))
    assert choose_dtype(dtype, GPU) is torch.float16

    gpus(1, (8, 0))
    assert choose_dtype(dtype, GPU) is torch.bfloat16


def test_a_cpu_runs_the_ops_of_cpus():
    assert kernels_for(CPU) is cpu


def test_a_gpu_runs_the_fused_kernels():
    assert kernels_for(GPU).__name__ == "varlen_kernels.fused"
