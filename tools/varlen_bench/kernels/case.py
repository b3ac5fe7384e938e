"""What is compared: an op at a shape, how its inputs are made, and who computes it.

The benchmark, the tuner and the checks on a GPU all read the same cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TypeAlias

import torch
from torch import Tensor

# The tensors of one call by name, those that receive results too.
Inputs: TypeAlias = Mapping[str, Tensor]
Call: TypeAlias = Callable[[Inputs], object]
Compile: TypeAlias = Callable[[Callable[..., object]], Callable[..., object]]

# Most ||result - exact|| / ||exact|| of a result that counts as right.
THRESHOLDS = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


class Unavailable(Exception):  # noqa: N818  # nothing went wrong
    """A system cannot run here; the text says why."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Someone else's way to compute what a case's op computes.

    Attributes:
        name: such as "torch".
        build: returns the call, given what compiles a function; may raise Unavailable.
        read: brings what the call returns, and its inputs, into the form of the case's `exact`.
        compile_seconds: what must be left of a run's time before `build` and the first call may start.
        no_graph: why a CUDA graph cannot hold the call; empty if it can.
    """

    name: str
    build: Callable[[Compile], Call]
    read: Callable[[object, Inputs], Tensor] | None = None
    compile_seconds: float = 0.0
    no_graph: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """One op at one shape and dtype.

    Attributes:
        op: its name in `varlen_kernels.reference`.
        shape: as rows of a table spell it.
        dtype: of its tensors.
        make: returns new random inputs on a device, by seed. Tensors to be written hold NaN.
        call: computes it with a module's kernels.
        exact: returns the result in float64.
        bytes_moved: the least that must be read and written.
        peers: who else computes it.
        read: brings what `call` returns into the form of `exact`.
        flops: multiplications and additions, where they may bound the time.
        threshold: the greatest error of a right result.
        tokens: of the batch, where a rate of tokens means something.
        warm: whether it is timed with the cache as the last call left it.
    """

    op: str
    shape: str
    dtype: torch.dtype
    make: Callable[[torch.device, int], Inputs]
    call: Callable[[ModuleType, Inputs], object]
    exact: Callable[[Inputs], Tensor]
    bytes_moved: int
    peers: tuple[Peer, ...] = ()
    read: Callable[[object, Inputs], Tensor] | None = None
    flops: int = 0
    threshold: float | None = None
    tokens: int = 0
    warm: bool = False

    @property
    def name(self) -> str:
        """Op, shape and dtype."""
        return f"{self.op} {self.shape} {str(self.dtype).removeprefix('torch.')}"

    def without_compilation(self) -> Case:
        """Return the same without the peers that compile."""
        return replace(self, peers=tuple(peer for peer in self.peers if not peer.compile_seconds))

    def error(self, result: Tensor, exact: Tensor) -> float:
        """Return ||result - exact|| / ||exact||; infinite for a wrong shape or a value that is not finite."""
        return relative_error(result, exact)

    def most_error(self) -> float:
        """Return the greatest error of a right result."""
        return THRESHOLDS[self.dtype] if self.threshold is None else self.threshold


def relative_error(result: Tensor, exact: Tensor) -> float:
    """Return ||result - exact|| / ||exact|| in float64; infinite if shapes differ or a value is not finite."""
    if result.shape != exact.shape:
        return float("inf")
    error = torch.linalg.vector_norm(result.double() - exact) / torch.linalg.vector_norm(exact)
    value = float(error)
    return value if value == value else float("inf")  # noqa: PLR0124  # NaN alone differs from itself


def as_tensor(result: object, inputs: Inputs) -> Tensor:  # noqa: ARG001  # a `read`
    """Return a result that is a tensor in the right form already."""
    assert isinstance(result, Tensor)
    return result


def random_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    """Return normally distributed values."""
    return torch.randn(shape, dtype=dtype, device=device, generator=generator)


def unwritten(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return room for a result, full of NaN, or of -7 where the dtype knows none."""
    return torch.full(
        shape, float("nan") if dtype.is_floating_point else -7, dtype=dtype, device=device
    )


def generator_for(device: torch.device, seed: int) -> torch.Generator:
    """Return a random generator of that device."""
    return torch.Generator(device=device).manual_seed(seed)
