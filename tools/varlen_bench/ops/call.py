"""One call of an op: its inputs, the call itself, the exact result, and what bounds its time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

# Arguments of one call by parameter name; `out` receives the result.
Inputs: TypeAlias = Mapping[str, Any]
Read: TypeAlias = Callable[[object, Inputs], Tensor]

# Greatest ||result - exact|| / ||exact|| of a right result.
THRESHOLDS = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@cache
def kernels(form: Literal["reference", "fused"]) -> SimpleNamespace:
    """Return all ops in one form: those of varlen_kernels and those of the padded baseline."""
    packages = ("varlen_kernels", "varlen_bench.padded")
    modules = [vars(import_module(f"{package}.{form}")) for package in packages]
    return SimpleNamespace(**modules[0] | modules[1])


def as_tensor(result: object, inputs: Inputs) -> Tensor:  # noqa: ARG001  # a `Read`
    """Return a result that is a tensor already."""
    assert isinstance(result, Tensor)
    return result


class Tensors:
    """Makes the tensors of a call: with a seed random ones, without one unfilled ones for the compiler."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int | None = None
    ) -> None:
        self._dtype = dtype
        self.device = torch.device(device)
        self._is_empty = seed is None
        self._numbers = torch.Generator(device=self.device).manual_seed(seed or 0)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return normally distributed values."""
        made = torch.empty(shape, dtype=dtype or self._dtype, device=self.device)
        return made if self._is_empty else made.normal_(generator=self._numbers)

    def ids(self, rows: int, count: int) -> Tensor:
        """Return `count` int32 below `rows`."""
        made = torch.zeros(count, dtype=torch.int32, device=self.device)
        return made if self._is_empty else made.random_(rows, generator=self._numbers)

    def unwritten(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor for a result, full of NaN; of -7 if its dtype has no NaN."""
        made = torch.empty(shape, dtype=dtype or self._dtype, device=self.device)
        return made if self._is_empty else poison(made)

    def ints(self, values: list[int]) -> Tensor:
        """Return these values as int32."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def cu_seqlens(self, lengths: list[int], room: int = 0) -> Tensor:
        """Return the start of each sequence and the end of the last; sequences past `lengths` are empty."""
        padding = [0] * max(room - len(lengths), 0)
        return self.ints(list(accumulate([*lengths, *padding], initial=0)))


@dataclass(frozen=True, slots=True)
class OpCall:
    """An op at one shape and dtype.

    Attributes:
        op: its name in `varlen_kernels.reference` or `varlen_bench.padded.reference`.
        shape: as tables show it.
        inputs: makes the arguments that are tensors.
        formula: computes the result in plain torch from the arguments that are no results, by name.
        bytes_moved: the least bytes to read and write.
        options: the arguments that are no tensors.
        read: brings a result into the form of the exact one.
        lengths: of the sequences, if the op knows them.
        flops: multiplications and additions, if they may bound the time.
        tokens: of the batch, if tokens per second have a meaning.
        threshold: greatest error of a right result; by default that of the dtype.
    """

    op: str
    shape: str
    dtype: torch.dtype
    inputs: Callable[[Tensors], Inputs]
    formula: Callable[..., Tensor]
    bytes_moved: int
    options: Mapping[str, Any] = field(default_factory=dict)
    read: Read = as_tensor
    lengths: tuple[int, ...] = ()
    flops: int = 0
    tokens: int = 0
    threshold: float | None = None

    @property
    def name(self) -> str:
        return f"{self.op} {self.shape} {self.dtype_name}"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def max_error(self) -> float:
        """The greatest error of a right result."""
        return THRESHOLDS[self.dtype] if self.threshold is None else self.threshold

    def make(self, device: torch.device | str, seed: int) -> Inputs:
        """Return random inputs; tensors for results hold NaN."""
        return self.inputs(Tensors(self.dtype, device, seed))

    def make_empty(self) -> Inputs:
        """Return inputs on the CPU that hold nothing, for a call that is compiled and not run."""
        return self.inputs(Tensors(self.dtype))

    def run(self, kernels: object, inputs: Inputs) -> object:
        """Return the result of the op in the form that `kernels` has."""
        return getattr(kernels, self.op)(**inputs, **self.options)

    def exact(self, inputs: Inputs) -> Tensor:
        """Return the result of the formula in float64."""
        return self.formula(
            **{
                name: value.double() if _is_float(value) else value
                for name, value in inputs.items()
                if not name.endswith("out")
            }
        )

    def error(self, result: object, inputs: Inputs, exact: Tensor) -> float:
        """Return the relative error of a result."""
        return relative_error(self.read(result, inputs), exact)


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def relative_error(result: Tensor, exact: Tensor) -> float:
    """Return ||result - exact|| / ||exact||; infinite if shapes differ or a value is not finite."""
    if result.shape != exact.shape:
        return float("inf")
    error = torch.linalg.vector_norm(result.double() - exact) / torch.linalg.vector_norm(exact)
    return float(error.nan_to_num(nan=torch.inf))


def poison(result: Any) -> Any:
    """Overwrite every tensor of a result with what no right result holds, and return it."""
    for tensor in result if isinstance(result, tuple) else (result,):
        if isinstance(tensor, Tensor):
            tensor.fill_(torch.nan if tensor.dtype.is_floating_point else -7)
    return result
