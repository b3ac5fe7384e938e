"""One process at a time compiles ops into a folder."""

import fcntl
import threading

import pytest

from varlen_kernels.cpu import compiled_ops, int8_torch
from varlen_kernels.cpu.calls import cache_folder
from varlen_kernels.cpu.compile_lock import compile_lock


@pytest.fixture
def is_free(tmp_path):
    """Return whether another process could take the lock of the folder."""

    def check():
        with (tmp_path / "varlen.lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    return check


def test_the_lock_is_held_until_the_outermost_block_ends(tmp_path, is_free):
    with compile_lock(tmp_path):
        with compile_lock(tmp_path):
            assert not is_free()
        assert not is_free()
    assert is_free()


def test_the_lock_is_released_after_an_error(tmp_path, is_free):
    with pytest.raises(ValueError, match="no"), compile_lock(tmp_path):
        raise ValueError("no")

    assert is_free()


def test_another_thread_waits(tmp_path):
    order = []

    def second():
        with compile_lock(tmp_path):
            order.append("second")

    thread = threading.Thread(target=second)
    with compile_lock(tmp_path):
        thread.start()
        thread.join(0.05)
        order.append("first")
    thread.join()

    assert order == ["first", "second"]


def test_compiling_locks_the_folder_of_compiled_code():
    with compiled_ops.compiling():
        with (cache_folder() / "varlen.lock").open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_sums_of_equal_size_are_dequantized_by_functions_of_their_own():
    for function in (int8_torch._dequantize_rows, int8_torch._dequantize_integers):
        assert len(function.signatures) <= 1
