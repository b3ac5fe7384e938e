"""Compiles every op of this CPU ahead, on all cores: `python -m varlen_kernels.cpu.compile_all`.

Otherwise the first start of each kind of model compiles what it needs, on one core. The code is stored where numba
finds it: in this package's folder if it may write there, else in the user's cache folder; NUMBA_CACHE_DIR names another
one. It holds for this CPU and these sources.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context

import torch
from torch import Tensor

from varlen_kernels import cpu
from varlen_kernels.cpu.compiled_ops import compiling, has_numba
from varlen_kernels.cpu.threads import usable_cores
from varlen_kernels.reference.attention import Distances

# Widest row of an activation that torch would run.
_FEATURES = 2048


def compile_all() -> None:
    """Compile all ops, and print how long it takes.

    Raises:
        RuntimeError: numba compiles nothing here, and the log says why; or a process was ended.
    """
    began = time.perf_counter()
    if not has_numba():
        raise RuntimeError("numba compiles no ops here")
    # forked processes hold the lock with this one; no two of them compile the same function
    count = min(usable_cores(), len(UNITS))
    with compiling(), ProcessPoolExecutor(count, get_context("fork")) as processes:
        for done in as_completed([processes.submit(_compile, name) for name in UNITS]):
            name, seconds = done.result()
            print(f"compiled {name} in {seconds:.0f} s", flush=True)
    print(f"compiled all ops of this CPU in {time.perf_counter() - began:.0f} s")


def _compile(name: str) -> tuple[str, float]:
    began = time.perf_counter()
    torch.set_num_threads(1)
    UNITS[name]()
    return name, time.perf_counter() - began


def _entries(*names: str) -> None:
    from varlen_kernels.cpu.entries import address_of

    for name in names:
        address_of(name)


def _attention(dtype: torch.dtype) -> None:
    cpu.attention_varlen(torch.zeros(4, 3 * 16, dtype=dtype), _ints(0, 1, 4), num_heads=1, scale=1)


def _attention_with_distances(dtype: torch.dtype) -> None:
    distances = Distances(_ints(0, 1, 2), *torch.zeros(2, 3, 16, dtype=dtype))
    qkv = torch.zeros(4, 3 * 16, dtype=dtype)
    cpu.attention_varlen(qkv, _ints(0, 1, 4), None, None, distances, num_heads=1, scale=1)


def _paged(dtype: torch.dtype) -> None:
    qkv = torch.zeros(1, 3 * 16, dtype=dtype)
    keys, values = torch.zeros(2, 2, 1, 16, 16)
    cpu.append_kv(qkv, torch.tensor([0]), keys, values, num_heads=1, num_kv_heads=1)
    cpu.attention_paged(
        qkv,
        keys,
        values,
        _ints(0, 1),
        _ints(1),
        _ints(0),
        _ints(0, 1),
        num_heads=1,
        num_kv_heads=1,
        scale=1,
    )
    cpu.copy_blocks(keys, torch.tensor([0]), torch.tensor([1]))


def _panels(dtype: torch.dtype) -> None:
    weight = cpu.panel_ops.pack_panels(torch.zeros(16, 16, dtype=dtype))
    cpu.linear_panels(torch.zeros(1, 16, dtype=dtype), weight, torch.zeros(16, dtype=dtype))


def _int8() -> None:
    from varlen_kernels.cpu.int8_products import (
        NoInt8ProductError,
        choose_product,
        int4_product,
    )
    from varlen_kernels.reference.linear_int8 import OUTLIERS, nearest_codes

    _entries("multiply_int8", "multiply_int4")
    weight, outliers = torch.zeros(16, 16), torch.arange(OUTLIERS)
    try:
        # runs each of them
        choose_product()
        chosen = nearest_codes(weight, outliers, bits=4)
        layer = int4_product().quantize(weight, None, outliers, chosen)
        cpu.linear_int4_panels(torch.zeros(1, 16), layer)
    except NoInt8ProductError as error:
        print(error, file=sys.stderr)


def _rows() -> None:
    _entries("norm", "activate", "gather", "rotate")
    row = torch.zeros(1, 16)
    cpu.layer_norm(row, row[0], row[0], eps=1e-5)
    _in_both_dtypes(
        lambda dtype: cpu.activate(torch.zeros(1, _FEATURES, dtype=dtype), kind="gelu_tanh")
    )


def _choices() -> None:
    logits, one = torch.zeros(1, 16), torch.ones(1)
    cpu.sample_tokens(logits, one, _ints(0), one, 0 * one, one.double())
    cpu.beam_step(logits, torch.zeros(1, 1))


def _in_both_dtypes(run: Callable[[torch.dtype], object], *entries: str) -> None:
    _entries(*entries)
    for dtype in (torch.float32, torch.bfloat16):
        run(dtype)


def _ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


# What to compile, the longest first. A function is compiled by one of them only.
UNITS: Mapping[str, Callable[[], None]] = {
    "attention with distances": partial(_in_both_dtypes, _attention_with_distances),
    "attention over blocks": partial(_in_both_dtypes, _paged, "append", "attend_blocks"),
    "attention": partial(_in_both_dtypes, _attention, "attend"),
    "choices of tokens": _choices,
    "int8 products": _int8,
    "products": partial(_in_both_dtypes, _panels, "multiply"),
    "norms and activations": _rows,
}

if __name__ == "__main__":
    try:
        compile_all()
    except RuntimeError as error:
        sys.exit(f"error: {error}")
