"""Each unit of a table of functions runs once, on any number of threads."""

import threading
from functools import cache

import numba
import numpy as np
import pytest
import torch
from numba.core import types

from tests.kernels.float64 import bounds_of, rand
from varlen_kernels import cpu, reference
from varlen_kernels.cpu.calls import calls, entries
from varlen_kernels.cpu.calls.calls import run_op
from varlen_kernels.cpu.calls.run_calls import has_compiled_ops, run_calls
from varlen_kernels.cpu.native import threads
from varlen_kernels.cpu.native.native import int64_vector
from varlen_kernels.cpu.native.threads import ARGUMENTS, FUNCTION, PARTS, UNITS, using_cores
from varlen_kernels.functions import FUNCTIONS

pytestmark = pytest.mark.skipif(not has_compiled_ops(), reason="functions are compiled")
UNIT_COUNT = 64


def add_one(arguments, first, last):
    """Add one and a number of the row before; fail at a negative one."""
    address, row = int64_vector(arguments, 2)[0], int64_vector(arguments, 2)[1]
    numbers = int64_vector(address, 64 * (row + 1))
    for i in range(first, last):
        if numbers[64 * row + i] < 0:
            return 1
        numbers[64 * row + i] += 1
        if row > 0:
            numbers[64 * row + i] += numbers[64 * (row - 1) + (i + 17) % 64]
    return 0


@cache
def compiled_add_one():
    # here, since collecting tests compiles nothing
    return numba.cfunc(types.int64(types.int64, types.int64, types.int64), _nrt=False)(add_one)


def table_of(numbers, parts):
    table = np.zeros((len(numbers), ARGUMENTS + 2), np.int64)
    table[:, FUNCTION], table[:, UNITS], table[:, PARTS] = (
        compiled_add_one().address,
        UNIT_COUNT,
        parts,
    )
    table[:, ARGUMENTS] = numbers.ctypes.data
    table[:, ARGUMENTS + 1] = np.arange(len(numbers))
    return table


@pytest.mark.parametrize("cores", [1, 2, 3])
@pytest.mark.parametrize("parts", [1, 5, UNIT_COUNT])
def test_each_unit_runs_once_and_after_all_units_of_the_function_before(cores, parts):
    for _ in range(20):
        numbers = np.zeros((30, UNIT_COUNT), np.int64)

        run_calls(table_of(numbers, parts), cores)

        assert (numbers == np.arange(1, 31)[:, None]).all()


def test_functions_may_have_numbers_of_parts_of_their_own():
    numbers = np.zeros((9, UNIT_COUNT), np.int64)
    table = table_of(numbers, 1)
    table[::2, PARTS] = 7

    run_calls(table, 3)

    assert (numbers == np.arange(1, 10)[:, None]).all()


def test_no_units_are_no_work():
    numbers = np.zeros((3, UNIT_COUNT), np.int64)
    table = table_of(numbers, 1)
    table[:, UNITS] = 0

    run_calls(table, 2)

    assert not numbers.any()


def test_a_thread_that_comes_too_late_finds_nothing_to_do(monkeypatch):
    late = []
    monkeypatch.setattr(threads, "_help", late.append)
    numbers = np.zeros((5, UNIT_COUNT), np.int64)

    run_calls(table_of(numbers, 4), 3)

    before = numbers.copy()
    assert len(late) == 2
    for each in late:
        each.take_parts()
    assert (numbers == before).all()
    assert (numbers[-1] == 5).all()


def test_a_thread_whose_core_is_taken_is_not_waited_for():
    """Helpers that are busy with something else do not delay a table."""
    release, begun = threading.Event(), threading.Semaphore(0)

    def block():
        begun.release()
        release.wait()

    # both helpers of three cores
    threads.run_along(lambda: None, 3)
    caller = threading.current_thread()
    threads.run_along(lambda: None if threading.current_thread() is caller else block(), 3)
    numbers = np.zeros((5, UNIT_COUNT), np.int64)
    try:
        run_calls(table_of(numbers, 4), 3)
        assert (numbers[-1] == 5).all()
    finally:
        release.set()


def test_other_threads_leave_when_a_byte_says_so(monkeypatch):
    late = []
    monkeypatch.setattr(threads, "_help", late.append)
    numbers, stay = np.zeros((5, UNIT_COUNT), np.int64), np.zeros(1, np.uint8)

    run_calls(table_of(numbers, 4), 2, stay)

    late[0].take_parts()
    assert (numbers[-1] == 5).all()


@pytest.mark.parametrize("cores", [1, 3])
def test_a_function_without_memory_fails_the_call(cores):
    numbers = np.zeros((5, UNIT_COUNT), np.int64)
    numbers[2, 40] = -1

    with pytest.raises(MemoryError, match="too little memory"):
        run_calls(table_of(numbers, 4), cores)


def test_an_op_takes_tensors_that_are_not_contiguous():
    x, out = rand(6, 80)[::2], torch.full((3, 160), torch.nan)[:, :80]

    run_op("activate", (x, None), [out], kind="relu")

    assert torch.equal(out, x.clamp_min(0))


def test_a_tensor_of_another_dtype_is_an_error():
    x = rand(2, 8, dtype=torch.bfloat16)

    with pytest.raises(
        TypeError, match=r"activate has no code for x in torch\.bfloat16, out in torch\.float32"
    ):
        run_op("activate", (x, None), [torch.empty(2, 8)], kind="relu")


def test_numbers_of_16_bits_that_code_reads_as_fp32_are_converted_exactly():
    qkv, bias = rand(4, 24), rand(2, 7, seed=1, dtype=torch.bfloat16)
    options = {"num_heads": 2, "scale": 0.5}

    actual = cpu.attention_varlen(qkv, bounds_of([4]), bias, **options)

    assert torch.equal(actual, cpu.attention_varlen(qkv, bounds_of([4]), bias.float(), **options))


def test_an_op_of_a_dtype_without_code_is_its_specification():
    qkv, options = rand(4, 24).double(), {"num_heads": 2, "scale": 0.5}

    actual = cpu.attention_varlen(qkv, bounds_of([4]), **options)

    assert torch.equal(actual, reference.attention_varlen(qkv, bounds_of([4]), **options))


@pytest.fixture
def shares_everything(monkeypatch):
    """Have cores share any work, however small."""
    monkeypatch.setattr("varlen_kernels.cpu.calls.run_calls._LEAST_SHARED_WORK", 1)
    monkeypatch.setattr(calls, "_LEAST_SHARED_CALL", 1)


def test_a_function_of_one_part_wakes_no_thread(shares_everything, monkeypatch):
    monkeypatch.setattr("varlen_kernels.cpu.calls.run_calls.run_along", pytest.fail)
    x = rand(1, 64)

    with using_cores(3):
        out = torch.empty_like(x)
        run_op("activate", (x, None), [out], kind="relu")

    assert torch.equal(out, x.clamp_min(0))


def test_what_other_cores_gain_is_counted(shares_everything, monkeypatch):
    monkeypatch.setattr(calls, "run_calls", lambda *args, **kwargs: 0.25)
    x = rand(64, 64)

    with using_cores(3) as cores:
        run_op("activate", (x, None), [x], kind="relu")

    assert cores.gained == 0.25


def test_every_function_declares_what_its_body_takes():
    for function in FUNCTIONS.values():
        code = entries.BODIES[function.body].py_func.__code__
        assert {*code.co_varnames[2 : code.co_argcount]} <= {*function.kinds}, function.name


def test_an_op_without_an_argument_or_with_another_one_is_an_error():
    x = rand(2, 8)

    with pytest.raises(TypeError, match="activate lacks kind"):
        run_op("activate", (x,), [x])
    with pytest.raises(TypeError, match="activate has eps; allowed: kind"):
        run_op("activate", (x,), [x], kind="relu", eps=1.0)
    with pytest.raises(TypeError, match="activate has 3 operands; allowed: x, bias"):
        run_op("activate", (x, None, x), [x], kind="relu")
