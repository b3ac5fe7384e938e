"""All parts of a call end before it does."""

import threading

import pytest

from varlen_kernels.cpu.threads import run_parts


def test_an_error_of_the_caller_is_raised_after_other_threads_are_done():
    failed, done = threading.Event(), []

    def work(first, last):
        if first == 0:
            failed.set()
            raise ValueError("the first part")
        failed.wait()
        # the caller has failed; it must still wait
        threading.Event().wait(0.05)
        done.append((first, last))

    with pytest.raises(ValueError, match="the first part"):
        run_parts(work, [0, 1, 2])

    assert done == [(1, 2)]


def test_an_error_of_another_thread_is_raised():
    def work(first, last):
        if first:
            raise ValueError("the second part")

    with pytest.raises(ValueError, match="the second part"):
        run_parts(work, [0, 1, 2])
