"""A CUDA device emulated over CPU memory: refuses what a GPU refuses, counts work.

Tensors on "cuda" hold CPU memory, Triton's interpreter runs the kernels, and graphs record and replay. An op on
tensors of two devices fails, and so does a wait or a copy of pageable memory inside a capture. Work runs at once, so
missing synchronization is not found. Each process has memory of its own, so one device stands for all that it sees:
ranks are processes, and their collectives run over gloo. A device that is lost fails every call, as CUDA does after a
fault.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import GridExecutor

from varlen_kernels import tuning
from varlen_kernels.triton import few_rows

DEVICE = torch.device("cuda", 0)
MEMORY_BYTES = 1 << 30
_NAME = "an emulated GPU"
# What every call says after a fault.
_LOST = "CUDA error: unspecified launch failure"
# Ops that wait for the device because the host needs a number of the result.
_WAITING = {"_local_scalar_dense", "nonzero", "equal", "masked_select"}
# Ops that copy indices of the host to the device.
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
# Ops that copy between the devices, or on one of them.
_COPYING = {"_to_copy", "copy_"}
# Ops that launch nothing, beside views.
_ALLOCATING = {"empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view"}


class CudaTensor(Tensor):
    """A tensor on the device; `held` is its memory on the host.

    Only Python sees the device: a build of torch without CUDA refuses to index what it takes for a CUDA tensor.
    """

    held: Tensor
    gpu: FakeCuda
    device = DEVICE
    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor, gpu: FakeCuda) -> CudaTensor:
        tensor: CudaTensor = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
        )
        tensor.held, tensor.gpu = held, gpu
        return tensor

    def data_ptr(self) -> int:
        """Return the address of its memory, which a wrapper has none of."""
        return self.held.data_ptr()

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the tensor on another device or in another dtype."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        dtype, device = dtype or self.dtype, device or DEVICE
        if device.type == "cuda" and dtype == self.dtype:
            return self
        options = {"dtype": dtype, "device": device, "non_blocking": non_blocking}
        return self.gpu.run(torch.ops.aten._to_copy.default, (self,), options)

    def cpu(self) -> Tensor:
        """Return a copy on the host."""
        return self.to("cpu")

    def tolist(self) -> list[Any]:
        """Return the numbers, after a copy to the host."""
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        """Refuse, as for a tensor on a GPU."""
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    __array__ = numpy

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        (gpu, *_) = [each.gpu for each in tree_leaves((args, kwargs)) if isinstance(each, cls)]
        return gpu.run(op, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Gives the device the ops of this thread that make tensors there, or pinned ones."""

    def __init__(self, gpu: FakeCuda) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_ours = any(isinstance(each, CudaTensor) for each in tree_leaves((args, kwargs)))
        if is_ours or _is_cuda(kwargs.get("device")) or kwargs.get("pin_memory"):
            return self._gpu.run(op, args, kwargs)
        return op(*args, **kwargs)


class FakeCuda:
    """The device: its captures, its pinned memory, and its counts.

    Attributes:
        counts: numbers of launches, replays, waits and copies outside of captures, by name.
        nodes: number of launches in each graph.
        is_lost: whether the device is lost; once is for ever.
    """

    def __init__(self, is_lost: Callable[[], bool] = lambda: False) -> None:
        self.is_lost = is_lost
        self.counts: Counter[str] = Counter()
        self.nodes: list[int] = []
        self.pinned: dict[int, Tensor] = {}
        # the steps of the capture in progress, by thread
        self.captures: dict[int, list[Callable[[], object]]] = {}

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """Yield the counts of what runs in the context, complete at its end."""
        before, found = self.counts.copy(), Counter[str]()
        yield found
        found.update(self.counts - before)

    def check(self) -> None:
        """Raise what CUDA raises once the device is lost."""
        if self.is_lost():
            self.is_lost = lambda: True
            raise torch.AcceleratorError(_LOST)

    def run(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an op, and return tensors on the device that it names."""
        self.check()
        if op._can_decompose():
            # in inference mode, ops that consist of others arrive whole
            with _Mode(self):
                return op.decompose(*args, **kwargs)
        name = op.overloadpacket.__name__
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        ours = [each for each in tensors if isinstance(each, CudaTensor)]
        target = kwargs.get("device")
        on_device = bool(ours) if target is None else _is_cuda(target)
        self._check_devices(name, args, kwargs, tensors, on_device=on_device)
        if ours and name in _WAITING:
            self.wait(name)
        held, held_kwargs = tree_map(_held, (tuple(args), _on_host(kwargs)))
        # a result that is an argument stays the same tensor
        known = {id(_held(each)): each for each in tensors}

        def placed(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) in known:
                return known[id(value)]
            if kwargs.get("pin_memory"):
                self.pinned[value.untyped_storage().data_ptr()] = value
            return CudaTensor(value, self) if on_device else value

        compute = _addmm_activation if name == "_addmm_activation" else op
        if op.namespace == "c10d":
            compute = _collective(op)
        # a view of a normal tensor cannot wrap an inference tensor
        with torch.inference_mode(False), torch.no_grad():
            found = compute(*held, **held_kwargs)
            result = tree_map(placed, found)
        if on_device and not _is_view(op) and name not in _ALLOCATING:
            is_copy = name in _COPYING and len(ours) < len(tensors)
            self.started(lambda: _repeat(compute, held, held_kwargs, found), is_launch=not is_copy)
        return result

    def started(self, again: Callable[[], object], *, is_launch: bool = True) -> None:
        """Record work in the capture of this thread, or count the launch of a kernel."""
        if (steps := self.capturing()) is not None:
            steps.append(again)
        elif is_launch:
            self.counts["launches"] += 1

    def capturing(self) -> list[Callable[[], object]] | None:
        """Return the steps of the capture of this thread; None outside of captures."""
        return self.captures.get(threading.get_ident())

    def wait(self, what: str) -> None:
        """Count a wait of the host for the device.

        Raises:
            RuntimeError: a capture is in progress.
        """
        self.check()
        if self.capturing() is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
        self.counts["waits"] += 1

    def _check_devices(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor],
        *,
        on_device: bool,
    ) -> None:
        """Count a copy between the devices; refuse other ops on tensors of both."""
        if name == "_to_copy" and isinstance(args[0], CudaTensor) != on_device:
            # new memory of the host is pageable
            host = args[0] if on_device else None
            self._count_copy(host, to_device=on_device, blocks=not kwargs.get("non_blocking"))
            return
        if name == "copy_":
            into, source, *rest = args
            if isinstance(into, CudaTensor) != isinstance(source, CudaTensor):
                to_device = isinstance(into, CudaTensor)
                blocks = not (rest and rest[0]) and not kwargs.get("non_blocking")
                self._count_copy(source if to_device else into, to_device=to_device, blocks=blocks)
            return
        # a number of the host is an argument of the kernel
        foreign = [each for each in tensors if not isinstance(each, CudaTensor) and each.ndim]
        if not on_device or not foreign:
            return
        if name not in _INDEXING:
            raise RuntimeError(
                f"Expected all tensors to be on the same device: {name} got a CPU tensor of {tuple(foreign[0].shape)}"
            )
        for each in foreign:
            self._count_copy(each, to_device=True, blocks=True)

    def _count_copy(self, host: Tensor | None, *, to_device: bool, blocks: bool) -> None:
        is_pinned = host is not None and host.untyped_storage().data_ptr() in self.pinned
        memory, end = ("pinned" if is_pinned else "pageable"), ("device" if to_device else "host")
        what = f"{memory} copies to the {end}"
        if blocks or not is_pinned:
            self.wait(what)
        self.counts[what] += 1


class _Part:
    """A part of torch.cuda; `_install` makes a class of it for its device."""

    gpu: FakeCuda

    def __init__(self, *_: object, **__: object) -> None:
        pass


class _Stream(_Part):
    cuda_stream = 0

    def wait_stream(self, other: _Stream) -> None:
        pass

    def synchronize(self) -> None:
        self.gpu.wait("Stream.synchronize")


class _Event(_Part):
    at = 0.0

    def record(self, stream: _Stream | None = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        self.gpu.wait("Event.synchronize")

    def elapsed_time(self, later: _Event) -> float:
        return 1e3 * (later.at - self.at)


class _Graph(_Part):
    """Steps that were recorded and run again, on the memory of the recording."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode == "thread_local"
        assert self.gpu.capturing() is None
        self.gpu.captures[threading.get_ident()] = self._steps

    def capture_end(self) -> None:
        assert self.gpu.captures.pop(threading.get_ident()) is self._steps
        self.gpu.nodes.append(len(self._steps))

    def replay(self) -> None:
        assert self.gpu.capturing() is None
        self.gpu.check()
        self.gpu.counts["replays"] += 1
        with _disable_current_modes():
            for step in self._steps:
                step()


def _install(patch: pytest.MonkeyPatch, count: int, is_lost: Callable[[], bool]) -> FakeCuda:
    """Return a device that torch and Triton's interpreter use until `patch` is undone."""
    gpu = FakeCuda(is_lost)
    parts = {"Stream": _Stream, "Event": _Event, "CUDAGraph": _Graph}
    made = {name: type(name, (part,), {"gpu": gpu}) for name, part in parts.items()}
    default = made["Stream"]()
    properties = SimpleNamespace(
        name=_NAME,
        total_memory=MEMORY_BYTES,
        L2_cache_size=1 << 20,
        multi_processor_count=4,
        shared_memory_per_multiprocessor=228 << 10,
    )
    fakes: dict[str, Callable[..., object]] = {
        **made,
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: count,
        "set_device": lambda _: None,
        "current_device": lambda: 0,
        "get_device_name": lambda _=None: _NAME,
        "get_device_capability": lambda _=None: (9, 0),
        "get_device_properties": lambda _=None: properties,
        "mem_get_info": lambda _=None: (MEMORY_BYTES, MEMORY_BYTES),
        "graph_pool_handle": lambda: (0, 1),
        "current_stream": lambda _=None: default,
        "is_current_stream_capturing": lambda: gpu.capturing() is not None,
        "stream": lambda _: nullcontext(),
        "synchronize": lambda _=None: gpu.wait("torch.cuda.synchronize"),
        "empty_cache": lambda: None,
    }
    for name, fake in fakes.items():
        patch.setattr(torch.cuda, name, fake)
    patch.setattr(torch, "tensor", _tensor_on(torch.tensor))
    patch.setattr(distributed, "init_process_group", _over_gloo(distributed.init_process_group))
    patch.setattr(GridExecutor, "__call__", _interpreted_on(gpu, GridExecutor.__call__))
    patch.setattr(threading.Thread, "run", _run_in_mode(gpu, threading.Thread.run))
    # its programs run one after another: the logits of small models are 17 programs instead of 66
    patch.setattr(few_rows, "_PROGRAMS", 512)
    return gpu


@contextmanager
def emulated_gpu(
    count: int = 1, *, is_lost: Callable[[], bool] = lambda: False
) -> Iterator[FakeCuda]:
    """Yield a device that this thread, and the threads that start meanwhile, use as "cuda".

    Args:
        count: number of GPUs that torch sees; they share memory.
        is_lost: whether they are lost.
    """
    with pytest.MonkeyPatch.context() as patch:
        gpu = _install(patch, count, is_lost)
        # its launches are chosen for another GPU
        tuning.clear()
        with _Mode(gpu):
            yield gpu
    tuning.clear()


def _run_in_mode(
    gpu: FakeCuda, run: Callable[[threading.Thread], None]
) -> Callable[[threading.Thread], None]:
    """Return `Thread.run` inside the mode, which every thread enters by itself."""

    def run_in_mode(thread: threading.Thread) -> None:
        with _Mode(gpu):
            run(thread)

    return run_in_mode


def _tensor_on(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `torch.tensor`, which copies to a device without a dispatched op."""

    def tensor(data: object, *, device: object = None, **options: Any) -> Tensor:
        made = make(data, **options)
        return made.to(device) if device is not None else made

    return tensor


def _over_gloo(connect: Callable[..., None]) -> Callable[..., None]:
    """Return `init_process_group`, whose groups of GPUs exchange memory of the host."""

    def init_process_group(backend: str, *, device_id: object, **options: Any) -> None:
        assert backend == "nccl"
        assert _is_cuda(device_id)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        connect("gloo", **options)

    return init_process_group


def _collective(op: Any) -> Callable[..., Any]:
    """Return an op of torch.distributed that has ended when it returns, as on a stream."""

    def run(*args: Any, **kwargs: Any) -> Any:
        result = op(*args, **kwargs)
        (*_, work) = result if isinstance(result, tuple) else (result,)
        work.wait()
        return result

    return run


def _interpreted_on(gpu: FakeCuda, call: Callable[..., object]) -> Callable[..., object]:
    """Return the launch of an interpreted kernel, which takes tensors of the device."""

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor) and not isinstance(each, CudaTensor):
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")  # noqa: TRY004  # Triton's
        gpu.check()
        held, held_kwargs = tree_map(_held, (args, kwargs))

        def again() -> None:
            with _disable_current_modes():
                call(executor, *held, **held_kwargs)

        again()
        gpu.started(again)

    return launch


def _addmm_activation(
    bias: Tensor, x: Tensor, weight: Tensor, *, use_gelu: bool, out: Tensor
) -> Tensor:
    """Compute the op as a GPU does: with the tanh form of GELU."""
    product = torch.addmm(bias, x, weight)
    gelu = torch.nn.functional.gelu
    return out.copy_(gelu(product, approximate="tanh") if use_gelu else product.relu())


def _repeat(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Any) -> None:
    """Run an op again, into the memory of its first results."""
    for old, new in zip(tree_leaves(found), tree_leaves(op(*args, **kwargs)), strict=True):
        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)


def _held(value: Any) -> Any:
    return value.held if isinstance(value, CudaTensor) else value


def _on_host(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an op on the host."""
    kept = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if kept.get("device") is not None:
        kept["device"] = torch.device("cpu")
    return kept


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _is_view(op: Any) -> bool:
    """Return whether the results are views of arguments, which no kernel computes."""
    aliases = [each.alias_info for each in op._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)
