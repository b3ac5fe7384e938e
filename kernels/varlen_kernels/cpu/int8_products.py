"""The fastest int8 linear layer on this CPU, and its exact range of codes.

Two products are torch's (`int8_torch`), one is compiled (`int8_panels`).
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from varlen_kernels import cpu
from varlen_kernels.cpu.bodies.int8_layout import pack_halves, pack_panels, panel_levels
from varlen_kernels.cpu.int8_torch import (
    LOWEST_SIGNED,
    pack_codes,
    signed_sums,
    unsigned_sums,
)
from varlen_kernels.reference.linear_int8 import (
    FULL_LEVELS,
    OUTLIERS,
    REDUCED_LEVELS,
    Int8Weight,
    WeightCodes,
    quantize_weight,
)

Int8Kernel: TypeAlias = Literal["linear_int8_panels", "linear_int8", "linear_int8_packed"]
Int4Kernel: TypeAlias = Literal["linear_int4_panels"]
# Row codes and packed codes to sums.
_Product: TypeAlias = Callable[[Tensor, Tensor], Tensor]

# Input and output features of layers that are checked and timed; rows of the latter, and how often.
_WIDTH = 512
_TIMED_ROWS = 64
_TIMED_RUNS = 7
_HOPELESS = 3
# Weights packed by oneDNN cost time for each new number of rows, so they must be this much faster.
_LEAST_GAIN: Mapping[Int8Kernel, float] = {"linear_int8_packed": 1.15}


@dataclass(frozen=True, slots=True)
class Int8Product:
    """A linear layer in int8 on this CPU.

    Attributes:
        kernel: name of the op.
        levels: largest code of a token that never saturates.
    """

    kernel: Int8Kernel | Int4Kernel
    levels: int

    def quantize(
        self,
        weight: Tensor,
        bias: Tensor | None,
        outliers: Tensor,
        chosen: WeightCodes | None = None,
    ) -> Int8Weight:
        """Return `quantize_weight`, with its codes in the layout that the op reads."""
        layer = quantize_weight(weight, bias, outliers, self.levels, chosen)
        if self.kernel == "linear_int4_panels":
            return layer._replace(codes=pack_halves(layer.codes))
        if self.kernel == "linear_int8_panels":
            return layer._replace(codes=pack_panels(layer.codes))
        if self.kernel == "linear_int8_packed":
            return layer._replace(codes=pack_codes(layer.codes))
        return layer


class NoInt8ProductError(RuntimeError):
    """No product of int8 codes is exact on this CPU."""


@lru_cache(1)
def choose_product() -> Int8Product:
    """Return the fastest product on one core, timed once per process, in a few milliseconds.

    The ops are compiled first, which takes seconds if their code is not stored.

    Raises:
        NoInt8ProductError: no product is exact.
    """
    threads = torch.get_num_threads()
    # as workers run it
    torch.set_num_threads(1)
    try:
        return _fastest_product()
    finally:
        torch.set_num_threads(threads)


def int4_product() -> Int8Product:
    """Return the linear layer with weights of 4 bits."""
    return Int8Product("linear_int4_panels", panel_levels())


def _fastest_product() -> Int8Product:
    fastest: Int8Product | None = None
    least = math.inf
    for kernel in get_args(Int8Kernel):
        try:
            product = Int8Product(kernel, _levels(kernel))
            gain = _LEAST_GAIN.get(kernel, 1.0)
            seconds = gain * _seconds(product, least / gain) if product.levels else least
        except (AttributeError, RuntimeError):
            # torch was built without this product
            continue
        if seconds < least:
            fastest, least = product, seconds
    if fastest is None:
        raise NoInt8ProductError(
            "torch multiplies int8 codes inexactly, or not at all, on this CPU"
        )
    return fastest


def _levels(kernel: Int8Kernel) -> int:
    if kernel == "linear_int8_panels":
        return panel_levels()
    if kernel == "linear_int8_packed":
        return exact_levels(unsigned_sums, pack_codes, 0)
    return exact_levels(signed_sums, lambda codes: codes, LOWEST_SIGNED)


def exact_levels(product: _Product, pack: Callable[[Tensor], Tensor], lowest: int) -> int:
    """Return the largest code whose sums are exact, or 0.

    Args:
        product: function that multiplies row codes by packed codes of a weight.
        pack: packs codes, `[hidden, features]` int8.
        lowest: the lowest row code.
    """
    codes = torch.tensor([[127], [-127]], dtype=torch.int8).repeat(_WIDTH // 2, _WIDTH).t()
    packed = pack(codes)
    for levels in (FULL_LEVELS, REDUCED_LEVELS):
        # sums are extreme where every code is at an end of its range
        rows = torch.tensor([[lowest + levels], [lowest]]).repeat(_TIMED_ROWS // 2, _WIDTH)
        row_codes = rows.to(torch.int8 if lowest else torch.uint8)
        exact = rows.double() @ codes.double()
        # one row may take another path than many
        if all(
            torch.equal(product(row_codes[:count], packed).double(), exact[:count])
            for count in (1, _TIMED_ROWS)
        ):
            return levels
    return 0


def _seconds(product: Int8Product, least: float) -> float:
    """Return the shortest time of a few linear layers, after one that compiles.

    A product that takes far longer than the shortest time of the others, `least`, is timed once.
    """
    op = getattr(cpu, product.kernel)
    layer = product.quantize(torch.ones(_WIDTH, _WIDTH), None, torch.arange(OUTLIERS))
    x = torch.ones(_TIMED_ROWS, _WIDTH)
    times = []
    op(x, layer)
    for _ in range(_TIMED_RUNS):
        began = time.perf_counter()
        op(x, layer)
        times.append(time.perf_counter() - began)
        if times[-1] > _HOPELESS * least:
            break
    return min(times)
