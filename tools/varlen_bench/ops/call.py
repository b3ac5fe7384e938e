"""One call of an op: inputs, exact result, and sizes that bound its time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from itertools import accumulate
from types import ModuleType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

# Tensor arguments of one call by parameter name; `out` receives the result.
Inputs: TypeAlias = Mapping[str, Any]
Read: TypeAlias = Callable[[Any, Inputs], Tensor]

# Largest ||result - exact|| / ||exact|| of a right result.
THRESHOLDS = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def kernels(form: Literal["reference", "fused"]) -> ModuleType:
    """Return the ops in one form."""
    return import_module(f"varlen_kernels.{form}")


def as_tensor(result: Any, _: Inputs) -> Tensor:
    """Return the result, which must be a tensor."""
    assert isinstance(result, Tensor)
    return result


class Tensors:
    """Makes the tensors of a call.

    Without a seed they are not filled, which is enough for a call that is compiled and not run.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int | None = None
    ) -> None:
        self._dtype = dtype
        self.device = torch.device(device)
        self._is_empty = seed is None
        self._generator = torch.Generator(device=self.device).manual_seed(seed or 0)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return normally distributed values."""
        tensor = torch.empty(shape, dtype=dtype or self._dtype, device=self.device)
        return tensor if self._is_empty else tensor.normal_(generator=self._generator)

    def ids(self, rows: int, *shape: int) -> Tensor:
        """Return random int32 below `rows`."""
        tensor = torch.zeros(shape, dtype=torch.int32, device=self.device)
        return tensor if self._is_empty else tensor.random_(rows, generator=self._generator)

    def unwritten(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor for a result, filled by `poison`."""
        tensor = torch.empty(shape, dtype=dtype or self._dtype, device=self.device)
        return tensor if self._is_empty else poison(tensor)

    def ints(self, values: list[int]) -> Tensor:
        """Return these values as int32."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)


# Returns a tensor, or several in a tuple.
Make: TypeAlias = Callable[[Tensors], Any]
# How to make an input: the shape of random values in the dtype of the call, int32 values, or a function.
Made: TypeAlias = tuple[int, ...] | list[int] | Make | None


def bounds(lengths: list[int]) -> list[int]:
    """Return `cu_seqlens` of these lengths."""
    return list(accumulate(lengths, initial=0))


@dataclass(frozen=True, slots=True)
class OpCall:
    """An op at one shape and dtype.

    Attributes:
        op: name in `varlen_kernels.reference`.
        inputs: recipe for each tensor argument.
        out: makes the result, given the other inputs; None where the op takes none.
        formula: computes the exact result from the inputs; None for the reference, in float64 if it rounds.
        read: converts a result to the form of the exact one.
        lengths: sequence lengths, if the op uses them.
        fill: computes inputs from others by other ops, see `prepare`.
        written: arguments that hold the result of an op that returns None.
        moved: fewest bytes that any implementation reads and writes; None for the sizes of all tensors.
        flops: multiplications and additions; 0 if they cannot bound the time.
        tokens: tokens of the batch; 0 if tokens per second mean nothing.
        threshold: largest error of a right result; None for the threshold of the dtype.
    """

    op: str
    shape: str
    dtype: torch.dtype
    inputs: Mapping[str, Made]
    out: Callable[[Tensors, Inputs], Any] = lambda *_: None
    options: Mapping[str, Any] = field(default_factory=dict)
    formula: Callable[[Inputs], Tensor] | None = None
    read: Read = as_tensor
    lengths: tuple[int, ...] = ()
    fill: Callable[[Any, Inputs], object] | None = None
    written: tuple[str, ...] = ()
    moved: int | None = None
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
        """Largest error of a right result."""
        return THRESHOLDS[self.dtype] if self.threshold is None else self.threshold

    @property
    def bytes_moved(self) -> int:
        """Fewest bytes that any implementation reads and writes."""
        return _size(tuple(self.make_empty().values())) if self.moved is None else self.moved

    def make(self, device: torch.device | str, seed: int) -> Inputs:
        """Return random inputs; tensors for results are poisoned."""
        return self._make(Tensors(self.dtype, device, seed))

    def make_empty(self) -> Inputs:
        """Return unfilled inputs on the CPU, for a call that is compiled and not run."""
        return self._make(Tensors(self.dtype))

    def _make(self, make: Tensors) -> Inputs:
        inputs = {name: _made(make, how) for name, how in self.inputs.items()}
        out = self.out(make, inputs)
        return inputs if out is None else {**inputs, "out": out}

    def prepare(self, kernels: object, inputs: Inputs) -> None:
        """Fill the inputs that a model computes once for many calls.

        They may depend on the launch, so they are filled again after it changes.
        """
        if self.fill is not None:
            self.fill(kernels, inputs)

    def run(self, kernels: object, inputs: Inputs) -> Any:
        """Return the result of the op in `kernels`."""
        result = getattr(kernels, self.op)(**inputs, **self.options)
        return tuple(inputs[name] for name in self.written) if self.written else result

    def exact(self, inputs: Inputs) -> Tensor:
        """Return the exact result; the inputs stay as they are."""
        if self.formula is not None:
            return self.formula(inputs)
        copies = {name: _copied(value, widen=self.max_error > 0) for name, value in inputs.items()}
        return self.read(self.run(kernels("reference"), copies), copies)

    def error_of(self, kernels: object, device: torch.device | str, seed: int) -> float:
        """Return the relative error of the op in `kernels` on random inputs."""
        inputs = self.make(device, seed)
        self.prepare(kernels, inputs)
        # before the run, which may overwrite inputs
        exact = self.exact(inputs)
        return self.error(self.run(kernels, inputs), inputs, exact)

    def error(self, result: object, inputs: Inputs, exact: Tensor) -> float:
        """Return the relative error of a result."""
        return relative_error(self.read(result, inputs), exact)


def relative_error(result: Tensor, exact: Tensor) -> float:
    """Return ||result - exact|| / ||exact||; infinite if shapes differ or a value is not finite."""
    if result.shape != exact.shape:
        return float("inf")
    # some ops return integers
    exact = exact.double()
    error = torch.linalg.vector_norm(result.double() - exact) / torch.linalg.vector_norm(exact)
    return float(error.nan_to_num(nan=torch.inf))


def poison(result: Any) -> Any:
    """Fill a result's tensors with NaN, or -7 in integer dtypes, and return it."""
    for tensor in result if isinstance(result, tuple) else (result,):
        if isinstance(tensor, Tensor):
            tensor.fill_(torch.nan if tensor.dtype.is_floating_point else -7)
    return result


def _made(make: Tensors, how: Made) -> Any:
    """Return an input."""
    if isinstance(how, tuple):
        return make.random(*how)
    return make.ints(how) if isinstance(how, list) else how and how(make)


def _copied(value: Any, *, widen: bool) -> Any:
    """Return a copy of tensors; real numbers in float64 if `widen`."""
    if isinstance(value, tuple):
        copies = [_copied(each, widen=widen) for each in value]
        return type(value)(*copies) if hasattr(value, "_fields") else tuple(copies)
    if not isinstance(value, Tensor):
        return value
    return value.to(
        torch.float64 if widen and value.is_floating_point() else value.dtype, copy=True
    )


def _size(value: Any) -> int:
    """Return the bytes of all tensors."""
    if isinstance(value, tuple):
        return sum(map(_size, value))
    return value.nbytes if isinstance(value, Tensor) else 0
